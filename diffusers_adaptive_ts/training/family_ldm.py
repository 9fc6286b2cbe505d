"""Unconditional diffusion in the latents of an autoencoder, saved as LDMPipeline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDPMScheduler, LDMPipeline, UNet2DModel

from .autoencoders import LatentSpace, image_channels
from .family import Family, deterministic
from .family_unet2d import check_unet
from .latents import latents_of, prepare_latents
from .model_configs import latent_unet

if TYPE_CHECKING:
    from .data import ImageData

_AUTOENCODERS = ("AutoencoderKL", "AutoencoderTiny", "VQModel")


class LatentUNetFamily(Family):
    """A UNet2DModel on latents of an AutoencoderKL, AutoencoderTiny or VQModel."""

    name = "ldm"
    model_folder = "unet"
    model_class = UNet2DModel
    accepted_configs = ("UNet2DModel",)
    clip_sample = False

    def __init__(self, args: argparse.Namespace, data: ImageData) -> None:
        super().__init__(args, data)
        self.refuse_labels()
        self.space = LatentSpace.load(args.autoencoder, _AUTOENCODERS, args.cache_dir)
        self.space.check_channels(data.channels, data.name)
        size = self.space.size(data.resolution)
        config = self.read_config() or latent_unet(size, self.space.channels)
        self.config = self.fix_config(config, size, self.space.channels, "the latent of the autoencoder")
        check_unet(self.config, size, f"--resolution {data.resolution} gives latents of size {size}")

    @classmethod
    def image_channels(cls, args: argparse.Namespace) -> int | None:
        return image_channels(args.autoencoder, _AUTOENCODERS, args.cache_dir)

    def prepare_data(self, data: ImageData, accelerator: Any) -> ImageData:
        self.data = prepare_latents(data, self.space, self.args, accelerator)
        return self.data

    def clean_samples(
        self, batch: dict[str, torch.Tensor], generator: torch.Generator | None, device: torch.device
    ) -> torch.Tensor:
        return latents_of(self.space, batch, generator, device)

    def pipeline(self, model: UNet2DModel, scheduler: DDPMScheduler) -> LDMPipeline:
        autoencoder = self.space.autoencoder.to(model.device)
        return LDMPipeline(vqvae=autoencoder, unet=model, scheduler=deterministic(scheduler))
