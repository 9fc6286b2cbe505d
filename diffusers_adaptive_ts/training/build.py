"""From options to a run: data, model, sampler, optimizer and log, in the order in which mistakes are cheapest."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from ..evaluation.validation import StableValidation
from ..hub import publish
from . import setup
from .checkpoints import find_checkpoint
from .families import Family
from .log import TrainingLog
from .run_state import load_run, saved_seed
from .stream import make_stream

logger = get_logger(__name__)


def build_run(
    args: argparse.Namespace, accelerator: Accelerator, family: Family, folder: Path
) -> tuple[setup.Run, torch.Tensor | None]:
    """Everything the loop needs, resumed where that was asked for; the loss window of the checkpoint comes with it."""
    found = find_checkpoint(folder, args.resume_from_checkpoint) if args.resume_from_checkpoint else None
    if args.resume_from_checkpoint and found is None:
        logger.warning("There is no checkpoint in %s yet: a new run is started.", folder)
    seed = saved_seed(found) if found is not None and args.seed is None else setup.choose_seed(args)
    # The same first weights on every rank and in every run with this seed.
    torch.manual_seed(seed)
    model = family.build_model()
    if args.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    if args.enable_xformers_memory_efficient_attention:
        model.enable_xformers_memory_efficient_attention()
    if not args.dry_run:
        setup.check_space(folder, model, args.use_ema)
    scheduler = family.build_scheduler()
    sampler = setup.make_run_sampler(args, scheduler, model.config.in_channels, seed)
    if not args.dry_run:
        family.data = family.prepare_data(family.data, accelerator)
    stream = make_stream(
        family.data, args.train_batch_size, seed, accelerator.process_index, accelerator.num_processes,
        args.dataloader_num_workers,
    )  # fmt: skip
    for note in [*family.data.notes, *family.notes]:
        logger.info(note)
    max_train_steps, steps_in_epoch = setup.count_steps(args, stream.steps_in_epoch)
    ema = setup.make_ema(args, model, family)
    optimizer = setup.make_optimizer(args, model)
    lr_scheduler = setup.make_lr_scheduler(args, optimizer, max_train_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    if ema is not None:
        ema.to(accelerator.device)
    run = setup.Run(
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
        validation=None if args.dry_run else _validation(args, family, sampler),
        log=TrainingLog(folder, enabled=accelerator.is_main_process and not args.dry_run),
        folder=folder,
        seed=seed,
        max_train_steps=max_train_steps,
        steps_in_epoch=steps_in_epoch,
    )
    window = None
    if found is not None:
        window = load_run(run, found)
        logger.info("Resumed from %s at step %d of %d.", found.name, run.step, max_train_steps)
    run.log.write("run", **setup.facts(run, setup.shown_command()), **({"resumed": True} if found else {}))
    return run, window


def _validation(args: argparse.Namespace, family: Family, sampler: Any) -> StableValidation | None:
    rows = family.data.validation
    if not args.validation_steps or rows is None:
        return None
    batch = rows.batch(list(range(len(rows))), None)
    return StableValidation(
        sampler.objective,
        family.clean_samples(batch, None, torch.device("cpu")),
        family.conditioning(batch, None, torch.device("cpu")),
        batch_size=args.train_batch_size,
    )


def describe(run: setup.Run) -> str:
    """What `--dry_run` prints: the resolved options, the size of the model and of the run, the sampler's cost."""
    facts = setup.facts(run, setup.shown_command())
    overhead = run.sampler.expected_overhead(run.args.train_batch_size)
    lines = [
        json.dumps(facts["arguments"], indent=1, sort_keys=True),
        f"model: {run.family.name}, {type(run.bare_model).__name__}, {facts['parameters']:,} parameters",
        f"data: {facts['data']}, {facts['images']} images for training",
        f"steps: {run.max_train_steps}, effective batch {facts['effective_batch']}, seed {run.seed}",
        f"sampler: {run.sampler.name}, weighting {run.sampler.weighting.name}",
        f"expected overhead of the sampler: {100 * overhead:.1f} % of a training step, counted in forward passes",
    ]
    return "\n".join(lines)


def finish(run: setup.Run) -> None:
    """Push where that was asked for, and say where everything is."""
    args, folder = run.args, run.folder
    if run.accelerator.is_main_process:
        lines = [
            f"The pipeline is in {folder}, the sampler in {folder / 'timestep_sampler'}.",
            f"Look at {folder / 'samples.png'} and {folder / 'report.html'}. Generate with:",
            "",
            run.family.how_to_generate(folder),
        ]
        if args.push_to_hub:
            lines.insert(1, _push(run))
        print("\n".join(lines))
    run.accelerator.end_training()
    run.log.close()


def _push(run: setup.Run) -> str:
    """A refused upload loses nothing: the pipeline is on disk, and the message says so."""
    args = run.args
    try:
        url = publish(run.folder, args.hub_model_id, token=args.hub_token, private=args.hub_private_repo)
        return f"Pushed to {url}."
    except Exception as error:  # the Hub's client raises errors of many kinds
        return (
            f"The upload failed ({type(error).__name__}: {error}). Everything is kept in {run.folder}; push it again."
        )


def start_logging() -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", level=logging.INFO
    )
    for noisy in ("httpx", "PIL", "matplotlib", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
