"""Everything a run is made of, built and checked before the first step."""

from __future__ import annotations

import argparse
import importlib.util
import math
import platform
import shutil
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

from .. import ranks
from ..evaluation.validation import StableValidation
from ..samplers import TimestepSampler, make_sampler, sampler_class
from .checkpoints import list_checkpoints
from .families import Family
from .log import LOG_NAME, TrainingLog
from .randomness import derived_seed

# What a run writes into its folder; `--overwrite_output_dir` removes these and nothing else.
RUN_FILES = (LOG_NAME, "report.html", "samples.png", "samples", "timestep_sampler", "model_index.json", "README.md")


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
    step: int = 0
    minutes_before: float = 0.0

    @property
    def bare_model(self) -> torch.nn.Module:
        return self.accelerator.unwrap_model(self.model)


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    folder = Path(args.output_dir)
    check_installed(args)
    tracker = None if args.logger == "none" else args.logger
    return Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=tracker,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / args.logging_dir)),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))],
    )


def check_installed(args: argparse.Namespace) -> None:
    """An option whose package is missing would be dropped in silence further down."""
    if args.logger != "none" and importlib.util.find_spec(args.logger) is None:
        raise ValueError(f"--logger {args.logger} is not installed: pip install {args.logger}, or give --logger none.")
    if args.enable_xformers_memory_efficient_attention and importlib.util.find_spec("xformers") is None:
        raise ValueError("--enable_xformers_memory_efficient_attention needs xformers: pip install xformers.")


def check_space(folder: Path, model: torch.nn.Module, use_ema: bool) -> None:
    """Two checkpoints stand side by side for a moment: weights, their average and Adam's two moments, each twice."""
    bytes_of_weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    needed = 2 * (3 + use_ema) * bytes_of_weights + bytes_of_weights
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"--output_dir {folder}: {free / 2**20:,.0f} MiB are free, but two checkpoints and the pipeline of this "
            f"model take about {needed / 2**20:,.0f} MiB. Make room, or give another directory."
        )


def prepare_folder(args: argparse.Namespace, accelerator: Accelerator) -> Path:
    """The output folder; another run in it is an error unless it is resumed or overwritten."""
    folder = Path(args.output_dir)
    if folder.is_file():
        raise ValueError(f"--output_dir {folder} is a file; give a directory.")
    if accelerator.is_main_process and not args.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        old = [folder / name for name in RUN_FILES if (folder / name).exists()] + list_checkpoints(folder)
        if old and args.overwrite_output_dir and not args.resume_from_checkpoint:
            for path in old:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif old and not args.resume_from_checkpoint:
            raise ValueError(
                f"--output_dir {folder} holds another run ({', '.join(sorted(p.name for p in old)[:4])}). "
                "Resume it with --resume_from_checkpoint latest, replace it with --overwrite_output_dir, "
                "or give another directory."
            )
    accelerator.wait_for_everyone()
    return folder


def choose_seed(args: argparse.Namespace) -> int:
    """The seed asked for, or one number that all ranks agree on."""
    if args.seed is not None:
        return args.seed
    return int(ranks.from_first(torch.randint(2**31, ())))


def make_run_sampler(args: argparse.Namespace, scheduler: DDPMScheduler, channels: int, seed: int) -> TimestepSampler:
    """The sampler and weighting that the flags name."""
    options = dict(args.sampler_options)
    if args.timestep_sampler == "adaptive":
        options.setdefault("in_channels", channels)
    weighting = args.loss_weighting
    if weighting is None and args.weighting_options:
        raise ValueError("--weighting_options go with --loss_weighting; name one.")
    # diffusers' script weights x0-prediction by the SNR, which is the eps error.
    plain = sampler_class(args.timestep_sampler).default_weighting == "uniform"
    if weighting is None and plain and scheduler.config.prediction_type == "sample":
        weighting = "epsilon"
    if weighting is not None:
        options.update(weighting=weighting, weighting_options=args.weighting_options)
    return make_sampler(args.timestep_sampler, scheduler, seed=derived_seed(seed, "sampler") % 2**31, **options)


def count_steps(args: argparse.Namespace, batches_in_epoch: int | None) -> tuple[int, int | None]:
    """Optimizer steps of the run, and of an epoch (None for a stream)."""
    if batches_in_epoch is None:
        if args.max_train_steps is None:
            raise ValueError("--streaming needs --max_train_steps: the length of a stream is not known.")
        return args.max_train_steps, None
    in_epoch = math.ceil(batches_in_epoch / args.gradient_accumulation_steps)
    return args.max_train_steps or args.num_epochs * in_epoch, in_epoch


def make_optimizer(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        eps=args.adam_epsilon,
    )


def make_lr_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, max_train_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Counted in optimizer steps, so it is right for any number of processes; it is not `prepare`d."""
    return get_scheduler(
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=min(args.lr_warmup_steps, max_train_steps),
        num_training_steps=max_train_steps,
    )


def make_ema(args: argparse.Namespace, model: torch.nn.Module, family: Family) -> EMAModel | None:
    if not args.use_ema:
        return None
    return EMAModel(
        model.parameters(),
        decay=args.ema_max_decay,
        use_ema_warmup=True,
        inv_gamma=args.ema_inv_gamma,
        power=args.ema_power,
        model_cls=family.model_class,
        model_config=model.config,
    )


def facts(run: Run, command: str) -> dict[str, Any]:
    """The first row of the log: what this run is, without secrets."""
    import accelerate
    import diffusers

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
    import shlex

    words = list(sys.argv if argv is None else argv)
    for index, word in enumerate(words):
        if word.startswith("--hub_token="):
            words[index] = "--hub_token=***"
        elif word == "--hub_token" and index + 1 < len(words):
            words[index + 1] = "***"
    return shlex.join(words)
