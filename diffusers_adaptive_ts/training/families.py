"""The kinds of model that `--model_family` names."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..registry import did_you_mean
from .family import Family
from .family_dit import DiTFamily
from .family_ldm import LatentUNetFamily
from .family_stable_diffusion import StableDiffusionFamily
from .family_unet2d import UNet2DFamily

if TYPE_CHECKING:
    from .data import ImageData

__all__ = ["FAMILIES", "UNCONDITIONAL", "Family", "image_channels", "make_family"]

# The families without text, which one script trains; the other trains the last.
UNCONDITIONAL: dict[str, type[Family]] = {
    family.name: family for family in (UNet2DFamily, LatentUNetFamily, DiTFamily)
}
FAMILIES: dict[str, type[Family]] = {**UNCONDITIONAL, StableDiffusionFamily.name: StableDiffusionFamily}


def make_family(args: argparse.Namespace, data: ImageData) -> Family:
    """The family asked for, with its options checked against the data."""
    return _named(args.model_family)(args, data)


def image_channels(args: argparse.Namespace) -> int | None:
    """Channels of the images that the given model or autoencoder takes: `args.model_channels`, before data is loaded.

    None when any number will do.
    """
    return _named(args.model_family).image_channels(args)


def _named(name: str) -> type[Family]:
    if name not in FAMILIES:
        raise ValueError(
            f"Unknown --model_family {name!r}.{did_you_mean(name, FAMILIES)} Available: {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]
