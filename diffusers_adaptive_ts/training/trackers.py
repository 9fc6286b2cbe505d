"""Pictures for the trackers: tensorboard, wandb and trackio each take them in their own way."""

from __future__ import annotations

from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.logging import get_logger
from PIL import Image

logger = get_logger(__name__)


def track_picture(accelerator: Accelerator, name: str, picture: Image.Image, step: int) -> None:
    """Show `picture` as `name` in every tracker of the run; only the main process may call this."""
    pixels = np.asarray(picture.convert("RGB"))
    for tracker in accelerator.trackers:
        try:
            _show(tracker, name, pixels, step)
        except Exception as error:  # a picture must never stop a run, and trackers fail in many ways
            logger.warning("%s was not shown in %s: %s: %s", name, tracker.name, type(error).__name__, error)


def _show(tracker: Any, name: str, pixels: np.ndarray, step: int) -> None:
    if tracker.name == "tensorboard":
        tracker.log_images({name: pixels[None]}, step=step, dataformats="NHWC")
    elif tracker.name == "trackio":  # accelerate's tracker has no log_images for it
        import trackio

        tracker.log({name: trackio.Image(pixels)}, step=step)
    elif tracker.name == "comet_ml":  # nor for this one
        tracker.tracker.log_image(pixels, name=name, step=step)
    elif hasattr(tracker, "log_images"):
        tracker.log_images({name: [pixels]}, step=step)
