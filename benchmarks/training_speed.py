"""Steps per second and peak memory of the training script, each as a ratio in one run with the two sides in turn.

    python benchmarks/training_speed.py latents memory
    python benchmarks/training_speed.py diffusers --upstream_script train_unconditional.py --python OTHER_PYTHON

`diffusers` runs that library's own script beside ours. It needs torchvision, so both run with the interpreter of a
separate environment (`--python`) in which the script's needs and this package are installed; the script itself is
fetched by the user and not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from accelerate.utils import tqdm
from record import facts, save, spread

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


def write_images(folder: Path, count: int, size: int) -> None:
    """Digits blown up to colour PNG files: real decoding work, no data set needed."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir()
    for index, digit in enumerate(load_digits().images[:count]):
        grey = Image.fromarray((digit * 15.9).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
        grey.convert("RGB").save(folder / f"{index:05d}.png")


def environment() -> dict[str, str]:
    return {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(command: list[str]) -> float:
    """Run to the end; returns the peak resident memory of the process in MiB."""
    process = psutil.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, said = 0.0, []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
    reader.start()
    while process.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss / 2**20)
        except psutil.Error:
            break
        time.sleep(0.01)
    reader.join()
    if process.wait() != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{said[0].decode()[-2000:]}")
    return peak


def ours_speed(folder: Path) -> float:
    """Steps per second from the log, the first quarter left out as warm-up."""
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    first, last = rows[len(rows) // 4], rows[-1]
    return (last["step"] - first["step"]) / (60 * (last["minutes"] - first["minutes"]))


def upstream_speed(folder: Path) -> float:
    """The same from the wall-clock stamps of its tensorboard events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = next(p.parent for p in folder.rglob("events.out.tfevents*"))
    events = EventAccumulator(str(path))
    events.Reload()
    rows = events.Scalars("loss")
    first, last = rows[len(rows) // 4], rows[-1]
    return (last.step - first.step) / (last.wall_time - first.wall_time)


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
    return ["--random_flip", *(str(part) for key, value in words.items() for part in (f"--{key}", value))]


def against_diffusers(args: argparse.Namespace, work: Path) -> dict:
    """Pixel space, uniform sampling, same model, data, batch."""
    if not args.upstream_script or not args.python:
        sys.exit("give --upstream_script and --python for the comparison with diffusers' own script")
    config, data = work / "unet.json", work / "images"
    config.write_text(json.dumps(UNET))
    write_images(data, count=960, size=48)
    epochs = max(1, round(args.steps * args.batch / 960))
    speeds: dict[str, list[float]] = {"diffusers": [], "ours": []}
    for repeat in tqdm(range(args.repeats), desc="alternating runs"):
        for side, path in (("diffusers", args.upstream_script), ("ours", SCRIPT)):
            output = work / f"{side}-{repeat}"
            words = [*common(config, data, output, args.batch), "--num_epochs", str(epochs)]
            own = ["--validation_steps", "0"] if side == "ours" else []
            run([args.python, str(path), *words, *own])
            speeds[side].append(ours_speed(output) if side == "ours" else upstream_speed(output))
    ratios = [ours / theirs for ours, theirs in zip(speeds["ours"], speeds["diffusers"], strict=True)]
    versions = {"versions_of_both": versions_of(args.python)}
    speeds_of = {"steps_per_second": {k: spread(v) for k, v in speeds.items()}}
    return {**versions, **speeds_of, "ratio": spread(ratios), "asked": 1.0}


def versions_of(python: str) -> dict[str, str]:
    """What is installed in the environment that the two scripts ran in."""
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in %r}))"
    names = ["torch", "torchvision", "diffusers", "accelerate", "datasets"]
    return json.loads(subprocess.run([python, "-c", code % names], capture_output=True, text=True, check=True).stdout)


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
    speeds: dict[str, list[float]] = {"encode every step": [], "cached": []}
    for repeat in tqdm(range(args.repeats), desc="alternating runs"):
        for side, flag in (("encode every step", "--no-cache_latents"), ("cached", "--cache_latents")):
            output = work / f"{side.replace(' ', '-')}-{repeat}"
            words = common(config, data, output, args.batch)
            words[words.index("--resolution") + 1] = "64"
            more = ["--model_family", "ldm", "--autoencoder", str(autoencoder), flag, "--max_train_steps"]
            more += [str(args.steps), "--validation_steps", "0", "--logging_steps", "1", "--logger", "none"]
            run([sys.executable, str(SCRIPT), *words, *more])
            speeds[side].append(ours_speed(output))
    pairs = zip(speeds["cached"], speeds["encode every step"], strict=True)
    ratios = [cached / encoded for cached, encoded in pairs]
    return {"steps_per_second": {k: spread(v) for k, v in speeds.items()}, "ratio": spread(ratios), "asked": 1.5}


def memory(args: argparse.Namespace, work: Path) -> dict:
    """Peak memory with the adaptive sampler over uniform sampling."""
    config, data = work / "unet.json", work / "images"
    config.write_text(json.dumps(UNET))
    write_images(data, count=960, size=32)
    peaks: dict[str, list[float]] = {"uniform": [], "adaptive": []}
    for repeat in tqdm(range(args.repeats), desc="alternating runs"):
        for sampler in peaks:
            output = work / f"{sampler}-memory-{repeat}"
            words = common(config, data, output, args.batch)
            more = ["--timestep_sampler", sampler, "--max_train_steps", "50", "--validation_steps", "0"]
            peaks[sampler].append(run([sys.executable, str(SCRIPT), *words, *more, "--logger", "none"]))
    ratios = [a / u for a, u in zip(peaks["adaptive"], peaks["uniform"], strict=True)]
    return {"peak_MiB": {k: spread(v) for k, v in peaks.items()}, "ratio": spread(ratios), "asked": "at most 1.02"}


PARTS = {"diffusers": against_diffusers, "latents": cached_latents, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["latents", "memory"], help=", ".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--upstream_script", type=Path)
    parser.add_argument("--python")
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; there are {', '.join(PARTS)}")
        with tempfile.TemporaryDirectory() as work:
            result = {**facts(seed=0), **PARTS[part](args, Path(work))}
        path = save(f"training_speed-{part}", result)
        ratio = result["ratio"]
        print(f"{part}: {ratio['median']:.3f} ({ratio['lowest']:.3f} to {ratio['highest']:.3f}) -> {path.name}")


if __name__ == "__main__":
    main()
