"""Unconditional diffusion in the latents of an autoencoder, saved as LDMPipeline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from diffusers import DDPMScheduler, LDMPipeline, UNet2DModel

from .family import deterministic
from .family_latent import LatentFamily
from .family_unet2d import check_unet
from .model_configs import latent_unet

if TYPE_CHECKING:
    from .data import ImageData


class LatentUNetFamily(LatentFamily):
    """A UNet2DModel on latents of an AutoencoderKL, AutoencoderTiny or VQModel."""

    name = "ldm"
    model_folder = "unet"
    model_class = UNet2DModel
    accepted_configs = ("UNet2DModel",)
    autoencoders = ("AutoencoderKL", "AutoencoderTiny", "VQModel")

    def __init__(self, args: argparse.Namespace, data: ImageData) -> None:
        super().__init__(args, data)
        self.refuse_labels()
        self.load_space()
        self.config = self.latent_config(latent_unet)
        check_unet(self.config, self.latent_size, self.origin_of_size())

    def pipeline(self, model: UNet2DModel, scheduler: DDPMScheduler) -> LDMPipeline:
        autoencoder = self.space.autoencoder.to(model.device)
        return LDMPipeline(vqvae=autoencoder, unet=model, scheduler=deterministic(scheduler))
