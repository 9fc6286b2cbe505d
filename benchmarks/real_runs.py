"""Real data, short budgets: pixel-space, latent and class-conditional runs whose pictures show that training works.

    python benchmarks/real_runs.py --data ../shared/data                 # all that are not done yet, in turn
    python benchmarks/real_runs.py --data ../shared/data fashion_pixels  # one of them

Each run is resumed where it was stopped; a finished one is not run again. The command, the curve of validation losses
and the sample grid of a run are kept in `results/real_runs/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from record import RESULTS, facts

ROOT = Path(__file__).parents[1]
SCRIPT = "train_scripts/train_unconditional.py"
COMMON = (
    "--timestep_sampler adaptive --use_ema --ema_max_decay 0.999 --seed 0 --logger none --train_batch_size 64 "
    "--lr_warmup_steps 200 --validation_steps 250 --checkpointing_steps 250 --checkpoints_total_limit 1 "
    "--ddpm_num_inference_steps 100 --eval_batch_size 64 --save_images_epochs 1000000 --save_model_epochs 1000000"
)
LATENT = "--autoencoder {runs}/fashion_autoencoder --dataset_name {data}/fashion_mnist --resolution 32"
# name: (what must be done before, command line)
RUNS = {
    "fashion_pixels": (
        None,
        f"{SCRIPT} --dataset_name {{data}}/fashion_mnist --resolution 28 --model_config_name_or_path "
        f"benchmarks/configs/fashion_unet.json --learning_rate 5e-4 --max_train_steps 2500 {COMMON}",
    ),
    "cifar10_pixels": (
        None,
        f"{SCRIPT} --dataset_name {{data}}/cifar10 --resolution 32 --random_flip --model_config_name_or_path "
        f"benchmarks/configs/cifar10_unet.json --learning_rate 4e-4 --max_train_steps 2000 {COMMON}",
    ),
    "fashion_autoencoder": (
        None,
        "train_scripts/train_autoencoder.py --dataset_name {data}/fashion_mnist --resolution 32 "
        "--max_train_steps 4000 --block_out_channels 16 32 64 --learning_rate 1e-3 --kl_weight 1e-4",
    ),
    "fashion_latents": (
        "fashion_autoencoder",
        f"{SCRIPT} --model_family ldm {LATENT} --model_config_name_or_path "
        f"benchmarks/configs/fashion_latent_unet.json --learning_rate 1e-3 --max_train_steps 3000 {COMMON}",
    ),
    "fashion_dit": (
        "fashion_autoencoder",
        f"{SCRIPT} --model_family dit --class_labels label {LATENT} --model_config_name_or_path "
        f"benchmarks/configs/fashion_dit.json --learning_rate 1e-3 --max_train_steps 3000 {COMMON}",
    ),
}


def recognised(pipeline_folder: Path, data: Path, count: int = 500) -> dict:
    """Ask the class-conditional pipeline for every class; a classifier fitted on real images says what it sees."""
    import torch
    from datasets import load_dataset
    from diffusers import DiffusionPipeline
    from sklearn.svm import SVC

    real = load_dataset("parquet", data_files={"train": f"{data}/fashion_mnist/train-*.parquet"}, split="train")
    real = real.shuffle(seed=0).select(range(12_000))
    pixels = np.stack([np.asarray(image.resize((28, 28)), dtype=np.float32).ravel() / 255 for image in real["image"]])
    labels = np.asarray(real["label"])
    classifier = SVC(C=10).fit(pixels[:10_000], labels[:10_000])
    pipeline = DiffusionPipeline.from_pretrained(pipeline_folder)
    pipeline.set_progress_bar_config(disable=True)
    asked = np.arange(count) % 10
    seen = []
    for start in range(0, count, 100):
        images = pipeline(
            class_labels=asked[start : start + 100].tolist(),
            guidance_scale=2.0,
            num_inference_steps=50,
            generator=torch.Generator().manual_seed(start),
        ).images
        generated = [
            np.asarray(image.convert("L").resize((28, 28)), dtype=np.float32).ravel() / 255 for image in images
        ]
        seen.append(classifier.predict(np.stack(generated)))
    right = np.concatenate(seen) == asked
    return {
        "classifier_accuracy_on_held_out_real": float(classifier.score(pixels[10_000:], labels[10_000:])),
        "generated": count,
        "recognised_as_the_asked_class": float(right.mean()),
        "per_class": [float(right[asked == label].mean()) for label in range(10)],
        "chance": 0.1,
    }


def finish(name: str, folder: Path, command: str, data: Path) -> None:
    """Keep what shows how the run went."""
    kept = RESULTS / "real_runs"
    kept.mkdir(parents=True, exist_ok=True)
    result = {**facts(seed=0), "training_command": command}
    for picture in ("samples.png", "reconstructions.png"):
        if (folder / picture).is_file():
            shutil.copy(folder / picture, kept / f"{name}.png")
    if (folder / "training.json").is_file():
        result["autoencoder"] = {
            key: value for key, value in json.loads((folder / "training.json").read_text()).items() if key != "command"
        }
    if (folder / "training_log.jsonl").is_file():
        rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
        runs = [row for row in rows if row["kind"] == "run"]
        result["run"] = {
            key: runs[0][key] for key in ("sampler", "weighting", "parameters", "images", "max_train_steps")
        }
        result["validation"] = [row for row in rows if row["kind"] == "validation"]
        result["minutes"] = rows[-1]["minutes"]
        result["last_train_row"] = [row for row in rows if row["kind"] == "train"][-1]
    if name == "fashion_dit":
        result["recognition"] = recognised(folder, data)
        print(result["recognition"])
    partial = kept / f".{name}.partial"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(kept / f"{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RUNS), metavar="name", help=", ".join(RUNS))
    parser.add_argument("--data", type=Path, required=True, help="folder with fashion_mnist/ and cifar10/")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs are written")
    args = parser.parse_args()
    for name in args.names:
        if name not in RUNS:
            parser.error(f"unknown run {name!r}; there are {', '.join(RUNS)}")
        if (RESULTS / "real_runs" / f"{name}.json").exists():
            print(f"{name}: done already")
            continue
        before, template = RUNS[name]
        if before and not (args.runs / before).is_dir():
            sys.exit(f"{name} needs {before}; run that first")
        folder = args.runs / name
        words = [*template.format(data=args.data, runs=args.runs).split(), "--output_dir", str(folder)]
        if list(folder.glob("checkpoint-*")):
            words += ["--resume_from_checkpoint", "latest"]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        if not (folder / "training.json").is_file():  # an autoencoder's run ends with it
            subprocess.run([sys.executable, *words], check=True, cwd=ROOT, env=environment)
        finish(name, folder, " ".join(["python", *template.format(data="DATA", runs="runs").split()]), args.data)


if __name__ == "__main__":
    main()
