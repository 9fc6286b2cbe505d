"""Steps per second and peak memory of the training scripts, each as a ratio in one run with the two sides in turn.

    python benchmarks/training_speed.py latents memory
    python benchmarks/training_speed.py diffusers --upstream_script train_unconditional.py --python OTHER_PYTHON
    python benchmarks/training_speed.py text_to_image --upstream_script train_text_to_image.py --python OTHER_PYTHON

`diffusers` and the parts named `text_to_image` run that library's own script beside ours. It needs torchvision, so
both run with the interpreter of a separate environment (`--python`) in which the script's needs and this package are
installed; the script itself is fetched by the user and not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from alternating import in_turn, options, ours_speed, ratio, run, spreads, upstream_speed, versions_of
from digit_images import write_images
from record import facts, save
from text_to_image_speed import text_to_image, text_to_image_larger_latents

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "train_scripts" / "train_unconditional.py"
UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 32,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": [32, 64, 64],
    "down_block_types": ["DownBlock2D", "DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D", "UpBlock2D"],
    "norm_num_groups": 8,
}


def common(config: Path, data: Path, output: Path, batch: int) -> list[str]:
    """A command line that both scripts take."""
    words = {
        "model_config_name_or_path": config,
        "train_data_dir": data,
        "output_dir": output,
        "resolution": 32,
        "train_batch_size": batch,
        "ddpm_num_inference_steps": 1,
        "eval_batch_size": 1,
        "checkpointing_steps": 10**9,
        "save_images_epochs": 10**6,
        "save_model_epochs": 10**6,
    }
    return ["--random_flip", *options(words)]


def against_diffusers(args: argparse.Namespace, work: Path) -> dict:
    """Pixel space, uniform sampling, same model, data, batch."""
    if not args.upstream_script or not args.python:
        sys.exit("give --upstream_script and --python for the comparison with diffusers' own script")
    config, data = work / "unet.json", work / "images"
    config.write_text(json.dumps(UNET))
    write_images(data, count=960, size=48)
    epochs = max(1, round(args.steps * args.batch / 960))

    def measure(side: str, repeat: int) -> float:
        theirs, output = side == "diffusers", work / f"{side}-{repeat}"
        words = [*common(config, data, output, args.batch), "--num_epochs", str(epochs)]
        own = [] if theirs else ["--validation_steps", "0"]
        run([args.python, str(args.upstream_script if theirs else SCRIPT), *words, *own], args.threads)
        return upstream_speed(output, "loss") if theirs else ours_speed(output)

    speeds = in_turn(args.repeats, measure, ["diffusers", "ours"])
    result = {"versions_of_both": versions_of(args.python), "steps_per_second": spreads(speeds)}
    return {**result, "ratio": ratio(speeds, "ours", over="diffusers"), "asked": 1.0}


def cached_latents(args: argparse.Namespace, work: Path) -> dict:
    """A latent model with latents cached, against encoding in every step."""
    from diffusers import AutoencoderKL

    data, autoencoder = work / "images", work / "autoencoder"
    write_images(data, count=960, size=64)
    AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=8,
        sample_size=64,
    ).save_pretrained(autoencoder)
    config = work / "unet.json"
    config.write_text(json.dumps({**UNET, "in_channels": 4, "out_channels": 4, "sample_size": 16}))
    flags = {"encode every step": "--no-cache_latents", "cached": "--cache_latents"}

    def measure(side: str, repeat: int) -> float:
        output = work / f"{side.replace(' ', '-')}-{repeat}"
        words = common(config, data, output, args.batch)
        words[words.index("--resolution") + 1] = "64"
        more = ["--model_family", "ldm", "--autoencoder", str(autoencoder), flags[side], "--max_train_steps"]
        more += [str(args.steps), "--validation_steps", "0", "--logging_steps", "1", "--logger", "none"]
        run([sys.executable, str(SCRIPT), *words, *more], args.threads)
        return ours_speed(output)

    speeds = in_turn(args.repeats, measure, flags)
    gain = ratio(speeds, "cached", over="encode every step")
    return {"steps_per_second": spreads(speeds), "ratio": gain, "asked": 1.5}


def memory(args: argparse.Namespace, work: Path) -> dict:
    """Peak memory with the adaptive sampler over uniform sampling."""
    config, data = work / "unet.json", work / "images"
    config.write_text(json.dumps(UNET))
    write_images(data, count=960, size=32)

    def measure(sampler: str, repeat: int) -> float:
        words = common(config, data, work / f"{sampler}-memory-{repeat}", args.batch)
        more = ["--timestep_sampler", sampler, "--max_train_steps", "50", "--validation_steps", "0"]
        return run([sys.executable, str(SCRIPT), *words, *more, "--logger", "none"], args.threads)

    peaks = in_turn(args.repeats, measure, ["uniform", "adaptive"])
    cost = ratio(peaks, "adaptive", over="uniform")
    return {"peak_MiB": spreads(peaks), "ratio": cost, "asked": "at most 1.02"}


PARTS = {
    "diffusers": against_diffusers,
    "latents": cached_latents,
    "memory": memory,
    "text_to_image": text_to_image,
    "text_to_image_larger_latents": text_to_image_larger_latents,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["latents", "memory"], help=", ".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--upstream_script", type=Path)
    parser.add_argument("--python")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of every run; unset: torch decides")
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; there are {', '.join(PARTS)}")
        with tempfile.TemporaryDirectory() as work:
            result = {**facts(seed=0), **PARTS[part](args, Path(work))}
        path = save(f"training_speed-{part}", result)
        for name, value in result.get("ratios", {part: result.get("ratio")}).items():
            print(f"{name}: {value['median']:.3f} ({value['lowest']:.3f} to {value['highest']:.3f}) -> {path.name}")


if __name__ == "__main__":
    main()
