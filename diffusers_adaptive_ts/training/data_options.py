"""Which images a run uses and how they are prepared, as the command line says it; checked before anything is read."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..registry import did_you_mean
from . import digits
from .images import GREY_MODES, INTERPOLATIONS, Preparation

_CHANNELS = {"RGB": 3, "L": 1}


@dataclass
class DataOptions:
    """The command-line options that say which images, and how they are prepared.

    Two belong to a script rather than to its command line:

    Args:
        data_dir_inside: `train_data_dir` beside `dataset_name` is a folder inside that data set, not left unused.
        embedded: whether the digits stand in where no data set is named; otherwise that is an error.
    """

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
    caption_column: str | None = None
    max_train_samples: int | None = None
    seed: int | None = None
    image_interpolation_mode: str = "bilinear"
    data_dir_inside: bool = False
    embedded: bool = True

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> DataOptions:
        return cls(**{entry.name: getattr(args, entry.name) for entry in fields(cls) if hasattr(args, entry.name)})

    def __post_init__(self) -> None:
        if self.is_digits and not self.embedded:
            raise ValueError("There is no data set to train on: give --dataset_name or --train_data_dir.")
        if self.is_digits and self.caption_column is not None:
            raise ValueError(
                f"--caption_column {self.caption_column}: the embedded digits have no captions. Give --dataset_name "
                "or --train_data_dir."
            )
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
        if self.max_train_samples is not None and self.max_train_samples < 1:
            raise ValueError(
                f"--max_train_samples must be at least 1, got {self.max_train_samples}. Leave it out for all images."
            )
        if self.image_interpolation_mode not in INTERPOLATIONS:
            raise ValueError(
                f"--image_interpolation_mode must be one of {', '.join(INTERPOLATIONS)}, got "
                f"{self.image_interpolation_mode!r}.{did_you_mean(self.image_interpolation_mode, INTERPOLATIONS)}"
            )
        if self.preserve_input_precision and self.image_interpolation_mode != "bilinear":
            raise ValueError(
                f"--image_interpolation_mode {self.image_interpolation_mode} is for images of 8 bits, "
                "--preserve_input_precision resizes bilinearly. Leave one of the two out."
            )
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

    @property
    def data_dir(self) -> str | None:
        """The folder to read inside the data set of `dataset_name`."""
        return self.train_data_dir if self.data_dir_inside and self.dataset_name is not None else None

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
            interpolation=self.image_interpolation_mode,
        )
