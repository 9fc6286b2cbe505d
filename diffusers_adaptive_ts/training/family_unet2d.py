"""Diffusion on pixels with a UNet2DModel, saved as DDPMPipeline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

from .family import Family, read_model_config
from .model_configs import check_size, pixel_unet

if TYPE_CHECKING:
    from .data import ImageData


class UNet2DFamily(Family):
    """Grey or RGB images of any size that the UNet can halve often enough."""

    name = "unet2d"
    model_folder = "unet"
    model_class = UNet2DModel
    accepted_configs = ("UNet2DModel",)
    default_steps = 1000

    def __init__(self, args: argparse.Namespace, data: ImageData) -> None:
        super().__init__(args, data)
        self.refuse_labels()
        if args.autoencoder is not None or args.cache_latents:
            raise ValueError(
                "--autoencoder and --cache_latents are for latent models, and --model_family unet2d works on pixels. "
                "Leave them out, or use --model_family ldm or dit."
            )
        config = self.read_config() or pixel_unet(data.resolution, data.channels)
        self.config = self.fix_config(config, data.resolution, data.channels, data.name)
        check_unet(self.config, data.resolution, "--resolution")

    @classmethod
    def image_channels(cls, args: argparse.Namespace) -> int | None:
        config = read_model_config(args, cls.model_folder, cls.accepted_configs)
        return config.get("in_channels", 3) if config is not None else None

    def pipeline(self, model: UNet2DModel, scheduler: DDPMScheduler) -> DDPMPipeline:
        # Of its own, because generation changes a scheduler's timesteps while training goes on with the other.
        return DDPMPipeline(unet=model, scheduler=DDPMScheduler.from_config(scheduler.config))


def check_unet(config: dict[str, Any], size: int, what: str) -> None:
    """Refuse what would fail in the middle of the first step, or train what no pipeline can call."""
    levels = len(config.get("block_out_channels", (224, 448, 672, 896)))
    check_size(size, 2 ** (levels - 1), f"{what}: the UNet2DModel with {levels} levels")
    if config.get("num_class_embeds") is not None or config.get("class_embed_type") is not None:
        raise ValueError(
            "The model's configuration asks for class labels (num_class_embeds or class_embed_type), which its "
            "pipeline cannot pass on. Remove them, or use --model_family dit."
        )
