"""Pictures for the trackers: tensorboard, wandb and trackio each take them in their own way."""

from __future__ import annotations

import numpy as np
from accelerate import Accelerator
from PIL import Image


def track_picture(accelerator: Accelerator, name: str, picture: Image.Image, step: int) -> None:
    """Show `picture` as `name` in every tracker of the run; only the main process may call this."""
    pixels = np.asarray(picture.convert("RGB"))
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({name: pixels[None]}, step=step, dataformats="NHWC")
        elif tracker.name == "trackio":  # accelerate's tracker has no log_images for it
            import trackio

            tracker.log({name: trackio.Image(pixels)}, step=step)
        else:
            tracker.log_images({name: [pixels]}, step=step)
