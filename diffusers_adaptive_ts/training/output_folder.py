"""The folder of a run: whose it is, what may be removed from it, and whether there is room."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from .checkpoints import list_checkpoints
from .log import LOG_NAME
from .lora import FILE_NAME as LORA_NAME

# What a run writes beside its pipeline and checkpoints.
_RUN_FILES = (LOG_NAME, "report.html", "samples.png", "samples", "timestep_sampler", LORA_NAME)


def check_folder(args: argparse.Namespace) -> Path:
    """The output folder; another run in it is an error unless it is resumed or overwritten. Nothing is touched yet."""
    folder = Path(args.output_dir)
    if folder.is_file():
        raise ValueError(f"--output_dir {folder} is a file; give a directory.")
    if args.overwrite_output_dir and args.resume_from_checkpoint:
        raise ValueError("--overwrite_output_dir removes the run that --resume_from_checkpoint would go on with.")
    old = _old_run(folder)
    if old and not args.overwrite_output_dir and not args.resume_from_checkpoint:
        raise ValueError(
            f"--output_dir {folder} holds another run ({', '.join(sorted(p.name for p in old)[:4])}). Resume it with "
            "--resume_from_checkpoint latest, replace it with --overwrite_output_dir, or give another directory."
        )
    return folder


def clear_folder(folder: Path) -> None:
    """Remove what an older run left, and nothing else."""
    for path in _old_run(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _old_run(folder: Path) -> list[Path]:
    index = folder / "model_index.json"
    parts = pipeline_parts(folder) if index.is_file() else []
    if (folder / LORA_NAME).is_file():
        parts.append("scheduler")  # of a LoRA that was trained on a noise process of its own
    named = [folder / name for name in (*_RUN_FILES, *parts, index.name)]
    return [path for path in named if path.exists()] + list_checkpoints(folder)


def pipeline_parts(folder: Path) -> list[str]:
    """Folders of the pipeline that its `model_index.json` names."""
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [key for key, value in index.items() if isinstance(value, list) and (folder / key).is_dir()]


def check_space(folder: Path, model: torch.nn.Module, use_ema: bool) -> None:
    """Two checkpoints stand side by side for a moment: weights, their average and Adam's two moments, each twice."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bytes_of_weights = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    needed = 2 * (3 + use_ema) * bytes_of_weights + bytes_of_weights
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"--output_dir {folder}: {free / 2**20:,.0f} MiB are free, but two checkpoints and the pipeline of this "
            f"model take about {needed / 2**20:,.0f} MiB. Make room, or give another directory."
        )
