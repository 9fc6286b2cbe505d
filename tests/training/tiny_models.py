"""Networks and autoencoders of a few thousand parameters, and families around them, for tests."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, VQModel
from diffusers.models.modeling_utils import ModelMixin

from diffusers_adaptive_ts.training.data import ImageData, load_image_data
from diffusers_adaptive_ts.training.families import Family, make_family

CPU = torch.device("cpu")
T = 40
UNET = {
    "_class_name": "UNet2DModel",
    "layers_per_block": 1,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
}
DIT = {
    "_class_name": "DiTTransformer2DModel",
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "patch_size": 2,
}
# One of each kind of pipeline: family and autoencoder.
KINDS = {
    "unet2d": ("unet2d", None),
    "ldm-kl": ("ldm", "kl"),
    "ldm-tiny": ("ldm", "tiny"),
    "ldm-vq": ("ldm", "vq"),
    "dit": ("dit", "kl"),
}


def small_autoencoder(kind: str, channels: int = 1, **config: Any) -> ModelMixin:
    """Halves the size once; untrained, which changes nothing for what is tested here."""
    torch.manual_seed(0)
    widths, same = (8, 16), {"in_channels": channels, "out_channels": channels, "latent_channels": 4}
    if kind == "tiny":
        widths = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
        return AutoencoderTiny(**same, **widths, num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), **config)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    cls = AutoencoderKL if kind == "kl" else VQModel
    autoencoder = cls(**same, **blocks, block_out_channels=widths, norm_num_groups=4, sample_size=8, **config)
    if kind == "vq":
        # Entries as far apart as latents are; from the class's own start on all would decode alike.
        autoencoder.quantize.embedding.weight.data.normal_()
    return autoencoder


def write_models(root: Path) -> Path:
    """Autoencoders and configurations on disk."""
    for kind in ("kl", "tiny", "vq"):
        small_autoencoder(kind).save_pretrained(root / kind)
    (root / "unet.json").write_text(json.dumps(UNET))
    (root / "dit.json").write_text(json.dumps(DIT))
    return root


def make_args(folder: Path, **changes: Any) -> argparse.Namespace:
    values = {
        "model_family": "unet2d",
        "model_config_name_or_path": None,
        "autoencoder": None,
        "cache_latents": None,
        "cache_dir": None,
        "class_labels": None,
        "label_dropout": None,
        "random_flip": False,
        "dry_run": False,
        "output_dir": str(folder / "out"),
        "validation_images": 16,
        "prediction_type": "epsilon",
        "ddpm_num_steps": T,
        "ddpm_beta_schedule": "linear",
        "rescale_betas_zero_snr": False,
    }
    return argparse.Namespace(**values | changes)


def make(folder: Path, kind: str, data: ImageData | None = None, **changes: Any) -> Family:
    family, autoencoder = KINDS[kind]
    given = {
        "model_family": family,
        "autoencoder": autoencoder and str(folder / autoencoder),
        "model_config_name_or_path": str(folder / ("dit.json" if family == "dit" else "unet.json")),
        "class_labels": "label" if family == "dit" else None,
    }
    args = make_args(folder, **given | changes)
    return make_family(args, data or load_image_data(args))


def build(family: Family) -> ModelMixin:
    """The network with weights that make its predictions depend on everything."""
    torch.manual_seed(1)
    model = family.build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model
