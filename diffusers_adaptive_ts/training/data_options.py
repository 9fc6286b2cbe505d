"""Which images a run uses and how they are prepared, as the command line says it; checked before anything is read."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, fields

from . import digits
from .images import GREY_MODES, Preparation

_CHANNELS = {"RGB": 3, "L": 1}


@dataclass
class DataOptions:
    """The command-line options that say which images, and how they are prepared."""

    dataset_name: str | None = None
    dataset_config_name: str | None = None
    train_data_dir: str | None = None
    cache_dir: str | None = None
    resolution: int | None = None
    center_crop: bool = False
    random_flip: bool = False
    preserve_input_precision: bool = False
    class_labels: str | None = None
    image_column: str | None = None
    image_mode: str = "auto"
    validation_images: int = 0
    streaming: bool = False
    model_channels: int | None = None
    keep_in_memory_bytes: int = 2 << 30

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> DataOptions:
        return cls(**{entry.name: getattr(args, entry.name) for entry in fields(cls) if hasattr(args, entry.name)})

    def __post_init__(self) -> None:
        if self.is_digits and self.streaming:
            raise ValueError("--streaming needs a data set: give --dataset_name or --train_data_dir.")
        if self.is_digits and self.dataset_config_name is not None:
            raise ValueError(
                f"--dataset_config_name {self.dataset_config_name} needs a data set that has configurations: give "
                "--dataset_name, or leave it out."
            )
        if self.resolution is None:
            self.resolution = digits.RESOLUTION if self.is_digits else 64
        if self.resolution < 1:
            raise ValueError(f"--resolution must be at least 1, got {self.resolution}.")
        if self.validation_images < 0:
            raise ValueError(f"--validation_images must be at least 0, got {self.validation_images}.")
        if self.image_mode not in ("auto", "RGB", "L"):
            raise ValueError(f"--image_mode must be auto, RGB or L, got {self.image_mode!r}.")
        if self.model_channels not in (None, 1, 3):
            raise ValueError(
                f"The model takes {self.model_channels} channels, images have 1 (grey) or 3 (RGB). "
                "Change in_channels in its config, or train a latent model with --model_family ldm or dit."
            )
        asked = _CHANNELS.get(self.image_mode)
        if asked and self.model_channels and asked != self.model_channels:
            raise ValueError(
                f"--image_mode {self.image_mode} gives {asked} channel(s), but the model takes {self.model_channels}. "
                "Leave --image_mode out, or change in_channels in the model's config."
            )

    @property
    def is_digits(self) -> bool:
        return self.dataset_name is None and self.train_data_dir is None

    def preparation(self, modes: Iterable[str]) -> Preparation:
        """How images are prepared, given the modes of some of them: grey only if all are, unless told otherwise."""
        asked = _CHANNELS.get(self.image_mode)
        all_grey = not self.preserve_input_precision and all(mode in GREY_MODES for mode in modes)
        channels = asked or self.model_channels or (1 if all_grey else 3)
        return Preparation(
            self.resolution,
            channels,
            self.center_crop,
            self.random_flip,
            self.preserve_input_precision,
            grey_only=channels == 1 and asked is None,
        )
