"""A Stable Diffusion pipeline of a few thousand parameters and captioned pictures on disk, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "white": (240, 240, 240)}
SHAPES = ("square", "bar")
MAX_LENGTH = 12


def tiny_tokenizer() -> CLIPTokenizer:
    """Letters and two words of merges are a vocabulary: any text can be written with it."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    merges = [("r", "e"), ("re", "d</w>"), ("b", "l"), ("bl", "u"), ("blu", "e</w>")]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_LENGTH)


def tiny_unet_config(**changes: Any) -> dict[str, Any]:
    return {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 1,
        "block_out_channels": [8, 16],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    } | changes


def tiny_pipeline(**scheduler: Any) -> StableDiffusionPipeline:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    text = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH, projection_dim=16,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    autoencoder = AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    )  # fmt: skip
    schedule = {
        "num_train_timesteps": 50, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
        "skip_prk_steps": True, "steps_offset": 1, **scheduler,
    }  # fmt: skip
    return StableDiffusionPipeline(
        vae=autoencoder,
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(**tiny_unet_config()),
        scheduler=PNDMScheduler(**schedule),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def write_pipeline(folder: Path, dtype: torch.dtype | None = None, **scheduler: Any) -> Path:
    pipeline = tiny_pipeline(**scheduler)
    if dtype is not None:
        pipeline.to(dtype=dtype)
    pipeline.save_pretrained(folder)
    return folder


def write_captioned(folder: Path, count: int = 24, size: tuple[int, int] = (16, 16)) -> Path:
    """Coloured shapes that their captions describe, as datasets' imagefolder reads them."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        colour, shape = list(COLOURS)[number % 4], SHAPES[number // 4 % 2]
        pixels = np.full((size[1], size[0], 3), 128 - number, dtype=np.uint8)
        pixels[2:9, 2 : (9 if shape == "square" else 14)] = COLOURS[colour]
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
        lines.append(json.dumps({"file_name": f"{number:03d}.png", "text": f"{colour} {shape}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder
