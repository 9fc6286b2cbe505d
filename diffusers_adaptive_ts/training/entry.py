"""What both training scripts do once their options are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from . import build, setup
from .data import load_image_data
from .ending import describe, finish
from .families import image_channels, make_family
from .loop import train
from .output_folder import check_folder
from .outputs import Outputs
from .run import Run


def run_training(
    args: argparse.Namespace, tracker_name: str, before_training: Callable[[Run], None] | None = None
) -> int:
    """From options to a trained model; returns the exit code of the process.

    Args:
        tracker_name: what trackers call the project.
        before_training: a last change to the run.
    """
    build.start_logging()
    folder = check_folder(args)
    accelerator = setup.make_accelerator(args)
    args.mixed_precision = accelerator.mixed_precision  # also where accelerate's own configuration says it
    setup.scale_learning_rate(args, accelerator)
    args.model_channels = image_channels(args)
    if not args.validation_steps:
        args.validation_images = 0
    with accelerator.main_process_first():
        data = load_image_data(args)
    family = make_family(args, data)
    del data  # decoded images may be replaced by cached latents
    run, loss_window = build.build_run(args, accelerator, family, folder)
    if args.dry_run:
        accelerator.print(describe(run))
        return 0
    if before_training is not None:
        before_training(run)
    train(run, Outputs(run, tracker_name), loss_window)
    return finish(run)


def said_in_one_line(main: Callable[[], int]) -> int | str:
    """What a user can mend is said in one line; everything else keeps its traceback."""
    try:
        return main()
    except (ValueError, FileNotFoundError) as error:
        return f"error: {error}"
