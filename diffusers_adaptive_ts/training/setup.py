"""The parts of a run that options alone decide: accelerator, sampler, optimizer, schedule, average."""

from __future__ import annotations

import argparse
import importlib.util
import math
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

from .. import ranks
from ..samplers import TimestepSampler, make_sampler
from .families import Family
from .randomness import derived_seed


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
    flag = "report_to" if hasattr(args, "report_to") else "logger"
    if args.logger not in ("none", "all") and importlib.util.find_spec(args.logger) is None:
        raise ValueError(f"--{flag} {args.logger} is not installed: pip install {args.logger}, or give --{flag} none.")
    if getattr(args, "use_8bit_adam", False) and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("--use_8bit_adam needs bitsandbytes: pip install bitsandbytes, or leave it out.")
    if args.enable_xformers_memory_efficient_attention and importlib.util.find_spec("xformers") is None:
        raise ValueError("--enable_xformers_memory_efficient_attention needs xformers: pip install xformers.")


def scale_learning_rate(args: argparse.Namespace, accelerator: Accelerator) -> None:
    """`--scale_lr`: the learning rate of one sample, times the samples of an optimizer step."""
    if getattr(args, "scale_lr", False):
        args.learning_rate *= args.gradient_accumulation_steps * args.train_batch_size * accelerator.num_processes


def choose_seed(args: argparse.Namespace) -> int:
    """The seed asked for, or one number that all ranks agree on."""
    if args.seed is not None:
        return args.seed
    return int(ranks.from_first(torch.randint(2**31, ())))


def make_run_sampler(args: argparse.Namespace, scheduler: DDPMScheduler, channels: int, seed: int) -> TimestepSampler:
    """The sampler and weighting that the flags name."""
    for word, flag in (("seed", "seed"), ("weighting", "loss_weighting"), ("weighting_options", "weighting_options")):
        if word in args.sampler_options:
            raise ValueError(f"{word} is not given by --sampler_options here, but by --{flag}.")
    if args.weighting_options and args.loss_weighting is None:
        raise ValueError("--weighting_options go with --loss_weighting; name one.")
    options = {**args.sampler_options, "seed": derived_seed(seed, "sampler") % 2**31}
    if args.timestep_sampler == "adaptive":
        options.setdefault("in_channels", channels)
    if args.loss_weighting is not None:
        options.update(weighting=args.loss_weighting, weighting_options=args.weighting_options)
    sampler, predicts = make_sampler(args.timestep_sampler, scheduler, **options), scheduler.config.prediction_type
    if args.loss_weighting is None and sampler.weighting.name == "uniform" and predicts == "sample":
        # diffusers' script weights x0-prediction by the SNR, which is the eps error.
        return make_sampler(args.timestep_sampler, scheduler, weighting="epsilon", **options)
    return sampler


def count_steps(args: argparse.Namespace, batches_in_epoch: int | None) -> tuple[int, int | None]:
    """Optimizer steps of the run, and of an epoch (None for a stream)."""
    if batches_in_epoch is None:
        if args.max_train_steps is None:
            raise ValueError("--streaming needs --max_train_steps: the length of a stream is not known.")
        return args.max_train_steps, None
    in_epoch = math.ceil(batches_in_epoch / args.gradient_accumulation_steps)
    total = args.num_epochs * in_epoch if args.max_train_steps is None else args.max_train_steps
    return total, in_epoch


def make_optimizer(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW
    if getattr(args, "use_8bit_adam", False):
        from bitsandbytes.optim import AdamW8bit as kind
    return kind(
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
    """Warmed up as the options of the unconditional script say; as EMAModel does by itself where there are none."""
    if not args.use_ema:
        return None
    warm_up = {}
    if hasattr(args, "ema_max_decay"):
        warm_up = {"decay": args.ema_max_decay, "inv_gamma": args.ema_inv_gamma, "power": args.ema_power}
    return EMAModel(
        family.average_start(model).parameters(),
        use_ema_warmup=bool(warm_up),
        foreach=getattr(args, "foreach_ema", False),
        model_cls=family.model_class,
        model_config=model.config,
        **warm_up,
    )
