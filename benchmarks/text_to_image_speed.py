"""Steps per second of our text-to-image script over diffusers' own, on a tiny Stable Diffusion made here.

Parts of `training_speed.py`, which says how to run them. What caching gains depends on what encoding costs beside
training the network, so there is one part with Stable Diffusion's own downscale of 8 and one with larger latents, and
a result states the arithmetic of each network beside that of Stable Diffusion 1.5.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alternating import in_turn, options, ours_speed, ratio, run, spreads, upstream_speed, versions_of
from digit_images import write_images

SCRIPT = Path(__file__).parents[1] / "train_scripts" / "train_text_to_image.py"
IMAGES, TOKENS = 960, 77
SCHEDULE = {"num_train_timesteps": 1000, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
NOTHING_CACHED, CACHED = "ours, nothing cached", "ours, latents and text embeddings cached"
SIDES = {
    "diffusers": [],
    NOTHING_CACHED: ["--no-cache_latents", "--no-cache_text_embeddings"],
    CACHED: ["--cache_latents", "--cache_text_embeddings"],
}


@dataclass(frozen=True)
class Sizes:
    """What tells one Stable Diffusion from another; layers per block and where attention stands are 1.5's in all."""

    resolution: int
    unet_widths: tuple[int, ...]
    unet_heads: int
    autoencoder_widths: tuple[int, ...]
    norm_groups: int
    text_width: int
    text_layers: int
    text_heads: int

    @property
    def latents(self) -> int:
        """Height and width."""
        return self.resolution // 2 ** (len(self.autoencoder_widths) - 1)


LATENTS_8 = Sizes(64, (32, 64), 4, (32, 64, 64, 64), 8, 128, 4, 4)
LATENTS_16 = Sizes(64, (32, 64), 4, (32, 64, 64), 8, 128, 4, 4)
STABLE_DIFFUSION_1_5 = Sizes(512, (320, 640, 1280, 1280), 8, (128, 256, 512, 512), 32, 768, 12, 12)


def networks(sizes: Sizes, **text: Any) -> dict[str, Any]:
    """UNet, autoencoder and text encoder with random weights, named as in a pipeline."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    deeper, levels = len(sizes.unet_widths) - 1, len(sizes.autoencoder_widths)
    unet = UNet2DConditionModel(
        sample_size=sizes.latents,
        block_out_channels=sizes.unet_widths,
        down_block_types=("CrossAttnDownBlock2D",) * deeper + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * deeper,
        layers_per_block=2,
        attention_head_dim=sizes.unet_heads,  # diffusers reads it as their number
        cross_attention_dim=sizes.text_width,
        norm_num_groups=sizes.norm_groups,
    )
    autoencoder = AutoencoderKL(
        sample_size=sizes.resolution,
        latent_channels=4,
        block_out_channels=sizes.autoencoder_widths,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=2,
        norm_num_groups=sizes.norm_groups,
    )
    config = CLIPTextConfig(
        hidden_size=sizes.text_width,
        intermediate_size=4 * sizes.text_width,
        num_hidden_layers=sizes.text_layers,
        num_attention_heads=sizes.text_heads,
        max_position_embeddings=TOKENS,
        projection_dim=sizes.text_width,
        **text,
    )
    return {"unet": unet, "vae": autoencoder, "text_encoder": CLIPTextModel(config)}


def write_pipeline(sizes: Sizes, folder: Path) -> None:
    """A StableDiffusionPipeline with a tokenizer whose words are single letters."""
    import torch
    from diffusers import PNDMScheduler, StableDiffusionPipeline
    from transformers import CLIPTokenizer

    torch.manual_seed(0)
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=TOKENS)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    StableDiffusionPipeline(
        **networks(sizes, vocab_size=len(tokenizer), **ids),
        tokenizer=tokenizer,
        scheduler=PNDMScheduler(**SCHEDULE, skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def arithmetic(sizes: Sizes) -> dict[str, float]:
    """Floating-point operations for one image in a step, in billions, and what leaving out the encoders could gain."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def billions(call: Any) -> float:
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops() / 1e9

    with torch.device("meta"):
        parts = networks(sizes)
        parts["vae"].requires_grad_(False)
        parts["text_encoder"].requires_grad_(False)
        images = torch.zeros(1, 3, sizes.resolution, sizes.resolution)
        latents, text = torch.zeros(1, 4, sizes.latents, sizes.latents), torch.zeros(1, TOKENS, sizes.text_width)
        autoencoder = billions(lambda: parts["vae"].encode(images))
        encoder = billions(lambda: parts["text_encoder"](torch.zeros(1, TOKENS, dtype=torch.int64)))
        unet = billions(lambda: parts["unet"](latents, torch.zeros(1), text).sample.sum().backward())
    return {
        "images to latents": autoencoder,
        "captions to embeddings": encoder,
        "unet, forward and backward": unet,
        "all over unet": (autoencoder + encoder + unet) / unet,
    }


def text_to_image(args: argparse.Namespace, work: Path, sizes: Sizes = LATENTS_8) -> dict[str, Any]:
    """Same pipeline, images, captions, batch and optimizer; encoding once, before the first step, is in no step."""
    if not args.upstream_script or not args.python:
        sys.exit("give --upstream_script and --python for the comparison with diffusers' own script")
    data, model = work / "images", work / "model"
    write_images(data, count=IMAGES, size=80, captions=True)
    write_pipeline(sizes, model)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}

    def measure(side: str, repeat: int) -> float:
        theirs, output = side == "diffusers", work / f"{list(SIDES).index(side)}-{repeat}"
        words = {
            "pretrained_model_name_or_path": model,
            "train_data_dir": data,
            "output_dir": output,
            "cache_dir": work / "cache",
            "resolution": sizes.resolution,
            "train_batch_size": args.batch,
            "max_train_steps": args.steps,
            "checkpointing_steps": 10**9,
            "seed": 0,
        }
        own = [] if theirs else ["--validation_steps", "0", "--validation_images", "0", *SIDES[side]]
        script = args.upstream_script if theirs else SCRIPT
        began = time.perf_counter()
        run([args.python, str(script), "--random_flip", *options(words), *own], args.threads)
        seconds[side].append(time.perf_counter() - began)
        return upstream_speed(output, "train_loss") if theirs else ours_speed(output)

    speeds = in_turn(args.repeats, measure, SIDES)
    asked = {NOTHING_CACHED: 1.0, CACHED: 2.0}
    return {
        "versions_of_both": versions_of(args.python, "transformers"),
        "sizes": {**asdict(sizes), "latents": sizes.latents, "tokens": TOKENS},
        "data": f"{IMAGES} PNG files, each with another caption; diffusers decodes in every step, ours once (default)",
        "billion_operations_per_image": {
            "here": arithmetic(sizes),
            "Stable Diffusion 1.5": arithmetic(STABLE_DIFFUSION_1_5),
        },
        "steps_per_second": spreads(speeds),
        "seconds_of_whole_run": spreads(seconds),
        "ratios": {side: {**ratio(speeds, side, over="diffusers"), "asked": asked[side]} for side in asked},
    }


def text_to_image_larger_latents(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The same with a downscale of 4, where the network costs four times as much and encoding about the same."""
    return text_to_image(args, work, LATENTS_16)
