"""Are the generated digits digits? A classifier fitted on real ones judges a pipeline trained on digits.

    python examples/recognise_digits.py demo

Only plain diffusers and scikit-learn are used: the pipeline needs nothing of this package.
"""

import argparse

import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pipeline", help="folder of a pipeline trained on digits")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--steps", type=int, default=50, help="DDIM steps")
    args = parser.parse_args()

    digits = load_digits()
    real, held_out, labels, held_out_labels = train_test_split(
        digits.data, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    classifier = CalibratedClassifierCV(SVC(gamma=0.001, C=10), ensemble=False).fit(real, labels)
    accuracy = classifier.score(held_out, held_out_labels)

    pipeline = DiffusionPipeline.from_pretrained(args.pipeline)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(desc="generating")
    generator = torch.Generator().manual_seed(0)
    images = pipeline(
        batch_size=args.images, num_inference_steps=args.steps, generator=generator, output_type="np"
    ).images
    pixels = np.asarray(images).reshape(args.images, -1) * 16

    confidence = classifier.predict_proba(pixels)
    sure = confidence.max(1) > 0.8
    counts = np.bincount(confidence.argmax(1)[sure], minlength=10)
    print(f"the classifier is right on {100 * accuracy:.1f} % of {len(held_out)} real digits it has not seen")
    print(f"it is more than 80 % sure of {100 * sure.mean():.1f} % of {args.images} generated ones")
    print("of each digit, 0 to 9:", " ".join(map(str, counts)))


if __name__ == "__main__":
    main()
