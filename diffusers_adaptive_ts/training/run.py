"""One training run: its parts as the loop uses them, and what it says of itself."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel

from ..evaluation.validation import StableValidation
from ..samplers import TimestepSampler
from .families import Family
from .log import TrainingLog
from .noise import NoiseOptions


@dataclass
class Run:
    """The parts of one training run, as the loop uses them."""

    args: argparse.Namespace
    accelerator: Accelerator
    family: Family
    model: torch.nn.Module
    ema: EMAModel | None
    scheduler: DDPMScheduler
    sampler: TimestepSampler
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    stream: Any
    validation: StableValidation | None
    log: TrainingLog
    folder: Path
    seed: int
    max_train_steps: int
    steps_in_epoch: int | None
    noise: NoiseOptions
    step: int = 0
    minutes_before: float = 0.0

    @property
    def bare_model(self) -> torch.nn.Module:
        return self.accelerator.unwrap_model(self.model)

    @property
    def ema_device(self) -> torch.device:
        """Where the averaged weights are kept between steps."""
        return torch.device("cpu") if getattr(self.args, "offload_ema", False) else self.accelerator.device


def facts(run: Run, command: str) -> dict[str, Any]:
    """The first row of the log: what this run is, without secrets."""
    from .. import __version__

    arguments = {key: value for key, value in vars(run.args).items() if key != "hub_token"}
    return {
        "step": run.step,
        "command": command,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "accelerate": accelerate.__version__,
            "diffusers_adaptive_ts": __version__,
        },
        "arguments": {key: value if _is_plain(value) else str(value) for key, value in arguments.items()},
        "sampler": run.sampler.name,
        "sampler_options": run.sampler.options,
        "weighting": run.sampler.weighting.name,
        "seed": run.seed,
        "parameters": sum(parameter.numel() for parameter in run.bare_model.parameters()),
        "trained_parameters": sum(p.numel() for p in run.bare_model.parameters() if p.requires_grad),
        "data": run.family.data.name,
        "images": len(run.family.data.train) if run.family.data.train is not None else None,
        "max_train_steps": run.max_train_steps,
        "effective_batch": run.args.train_batch_size
        * run.args.gradient_accumulation_steps
        * run.accelerator.num_processes,
        "machine": f"{platform.machine()}, {run.accelerator.device.type}, {run.accelerator.num_processes} process(es)",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, type(None), list, dict))


def shown_command(argv: list[str] | None = None) -> str:
    """The command line as given, with the token blotted out."""
    words = list(sys.argv if argv is None else argv)
    for index, word in enumerate(words):
        if word.startswith("--hub_token="):
            words[index] = "--hub_token=***"
        elif word == "--hub_token" and index + 1 < len(words):
            words[index + 1] = "***"
    return shlex.join(words)
