"""From options to a run: data, model, sampler, optimizer and log, in the order in which mistakes are cheapest."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from .. import ranks
from ..evaluation.validation import StableValidation
from ..hub import ensure_repository
from ..samplers import TimestepSampler
from . import setup
from .checkpoints import find_checkpoint, set_aside_newer
from .families import Family
from .heap import keep_freed_memory
from .log import TrainingLog
from .noise import NoiseOptions
from .output_folder import check_space, clear_folder
from .run import Run, facts, shown_command
from .run_state import load_run, saved_seed
from .stream import make_stream

logger = get_logger(__name__)


def build_run(
    args: argparse.Namespace, accelerator: Accelerator, family: Family, folder: Path
) -> tuple[Run, torch.Tensor | None]:
    """Everything the loop needs, resumed where that was asked for; the loss window of the checkpoint comes with it.

    An older run in the folder is removed last, when everything that can be wrong has been looked at.
    """
    keep_freed_memory(accelerator.device)
    noise = NoiseOptions.from_args(args)
    found = find_checkpoint(folder, args.resume_from_checkpoint) if args.resume_from_checkpoint else None
    seed = saved_seed(found) if found is not None and args.seed is None else setup.choose_seed(args)
    # The same first weights on every rank and in every run with this seed.
    torch.manual_seed(seed)
    model = family.build_model()
    if args.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    if args.enable_xformers_memory_efficient_attention:
        model.enable_xformers_memory_efficient_attention()
    scheduler = family.build_scheduler()
    sampler = setup.make_run_sampler(args, scheduler, model.config.in_channels, seed)
    if not args.dry_run:
        check_space(folder, model, args.use_ema)
        if args.push_to_hub and accelerator.is_main_process:
            args.hub_model_id = ensure_repository(
                args.hub_model_id or folder.resolve().name, token=args.hub_token, private=args.hub_private_repo
            )
        family.data = family.prepare_data(family.data, accelerator)
    stream = make_stream(
        family.data,
        args.train_batch_size,
        seed,
        accelerator.process_index,
        accelerator.num_processes,
        args.dataloader_num_workers,
    )
    for note in [*family.data.notes, *family.notes]:
        logger.info(note)
    if unused := _unused_hub_options(args):
        logger.warning("%s not used: nothing is uploaded without --push_to_hub.", unused)
    max_train_steps, steps_in_epoch = setup.count_steps(args, stream.steps_in_epoch)
    ema = setup.make_ema(args, model, family)
    optimizer = setup.make_optimizer(args, model)
    lr_scheduler = setup.make_lr_scheduler(args, optimizer, max_train_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run = Run(
        args=args,
        accelerator=accelerator,
        family=family,
        model=model,
        ema=ema,
        scheduler=scheduler,
        sampler=sampler,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        stream=stream,
        validation=None if args.dry_run else _validation(args, family, sampler, accelerator.device),
        log=_open_log(args, accelerator, folder, fresh=found is None),
        folder=folder,
        seed=seed,
        max_train_steps=max_train_steps,
        steps_in_epoch=steps_in_epoch,
        noise=noise,
    )
    if ema is not None:
        ema.to(run.ema_device)
    window = None
    if found is not None:
        window = load_run(run, found)
        if accelerator.is_main_process:
            set_aside_newer(folder, run.step)
        logger.info("Resumed from %s at step %d of %d.", found.name, run.step, max_train_steps)
    elif args.resume_from_checkpoint:
        logger.warning("There is no checkpoint in %s yet: a new run is started.", folder)
    run.log.write("run", **facts(run, shown_command()), **({"resumed": True} if found else {}))
    return run, window


def _unused_hub_options(args: argparse.Namespace) -> str:
    """Upload options without an upload, by name: one of them is a secret. Upstream's script takes them silently."""
    given = [name for name in ("hub_token", "hub_model_id", "hub_private_repo") if getattr(args, name)]
    return "" if args.push_to_hub else ", ".join(f"--{name}" for name in given)


def _open_log(args: argparse.Namespace, accelerator: Accelerator, folder: Path, fresh: bool) -> TrainingLog:
    if args.dry_run or not accelerator.is_main_process:
        return TrainingLog(folder, enabled=False)
    folder.mkdir(parents=True, exist_ok=True)
    if fresh:
        clear_folder(folder)
    return TrainingLog(folder)


def _validation(
    args: argparse.Namespace, family: Family, sampler: TimestepSampler, device: torch.device
) -> StableValidation | None:
    """Encoded where that is fast, kept where there is room."""
    rows = family.data.validation
    if not args.validation_steps or rows is None:
        return None
    batch = rows.batch(list(range(len(rows))), None)
    return StableValidation(
        sampler.objective,
        family.clean_samples(batch, None, device).cpu(),
        ranks.map_tensors(lambda tensor: tensor.cpu(), family.conditioning(batch, None, device)),
        batch_size=args.train_batch_size,
    )


def start_logging() -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", level=logging.INFO
    )
    for noisy in ("httpx", "httpx2", "PIL", "matplotlib", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
