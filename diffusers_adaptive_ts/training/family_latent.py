"""What models in the latents of an autoencoder have in common: the autoencoder, cached latents, their size."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .autoencoders import LatentSpace, image_channels
from .family import Family
from .latents import latents_of, prepare_latents

if TYPE_CHECKING:
    from .data import ImageData


class LatentFamily(Family):
    """A model in latents; a subclass calls `load_space`, then takes its configuration from `latent_config`.

    Attributes:
        autoencoders: classes that `--autoencoder` may be of.
        space: the latents of the autoencoder.
        latent_size: height and width of the latents.
    """

    autoencoders: tuple[str, ...]
    space: LatentSpace
    latent_size: int
    clip_sample = False

    @classmethod
    def image_channels(cls, args: argparse.Namespace) -> int | None:
        return image_channels(args.autoencoder, cls.autoencoders, args.cache_dir)

    def load_space(self) -> None:
        """The autoencoder of the options; images of other channels than its own are an error."""
        self.space = LatentSpace.load(self.args.autoencoder, self.autoencoders, self.args.cache_dir)
        self.space.check_channels(self.data.channels, self.data.name)
        self.latent_size = self.space.size(self.data.resolution)

    def latent_config(self, default: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
        """The network's configuration, fixed to the latents.

        Args:
            default: makes one from size and channels, when none is named on the command line.
        """
        size, channels = self.latent_size, self.space.channels
        return self.fix_config(
            self.read_config() or default(size, channels), size, channels, "the latent of the autoencoder"
        )

    def origin_of_size(self) -> str:
        """Where the size comes from, for an error about it."""
        return f"--resolution {self.data.resolution} gives latents of size {self.latent_size}"

    def prepare_data(self, data: ImageData, accelerator: Any) -> ImageData:
        self.data = prepare_latents(data, self.space, self.args, accelerator)
        return self.data

    def clean_samples(
        self, batch: dict[str, torch.Tensor], generator: torch.Generator | None, device: torch.device
    ) -> torch.Tensor:
        return latents_of(self.space, batch, generator, device)
