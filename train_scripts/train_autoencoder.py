#!/usr/bin/env python
"""Train an AutoencoderKL or VQModel on your own images, for latent diffusion with train_unconditional.py.

    accelerate launch train_scripts/train_autoencoder.py --train_data_dir photos --output_dir photos_vae
    accelerate launch train_scripts/train_unconditional.py --model_family ldm --autoencoder photos_vae ...

The loss is L1 + L2 on pixels, and for `kl` the divergence of the posterior, for `vq` the distance to the codebook.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import tqdm
from diffusers import AutoencoderKL, VQModel
from diffusers.models.modeling_utils import ModelMixin
from diffusers.optimization import get_scheduler
from diffusers.utils import make_image_grid
from PIL import Image

from diffusers_adaptive_ts.training.arguments import LR_SCHEDULERS
from diffusers_adaptive_ts.training.autoencoders import LatentSpace, measure_scaling_factor
from diffusers_adaptive_ts.training.data import ImageData, load_image_data
from diffusers_adaptive_ts.training.model_configs import check_class, check_size, find_config
from diffusers_adaptive_ts.training.randomness import derived_seed
from diffusers_adaptive_ts.training.reconstruction import ReconstructionLoss, psnr, reconstruct, start_codebook
from diffusers_adaptive_ts.training.stream import make_stream

CLASSES = {"kl": AutoencoderKL, "vq": VQModel}
_CONFIG_FLAG = "--model_config_name_or_path"


def _penalty_weights(args: argparse.Namespace, autoencoder: ModelMixin) -> tuple[float, float]:
    """The weight that this kind of autoencoder uses; the other one's flag is an error."""
    unused = "commitment_weight" if isinstance(autoencoder, AutoencoderKL) else "kl_weight"
    if getattr(args, unused) is not None:
        raise ValueError(f"--{unused} is not used by {type(autoencoder).__name__}; leave it out.")
    return (1e-6 if args.kl_weight is None else args.kl_weight), (
        1.0 if args.commitment_weight is None else args.commitment_weight
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    data = parser.add_argument_group("data")
    data.add_argument("--dataset_name", help="Hub id or path of a data set; unset with no train_data_dir: digits.")
    data.add_argument("--dataset_config_name", help="Configuration of the data set, where it has several.")
    data.add_argument("--train_data_dir", help="Folder of images (datasets' imagefolder).")
    data.add_argument("--image_column", help="Column of the images; unset: image, img, or the only one.")
    data.add_argument("--image_mode", default="auto", choices=["auto", "RGB", "L"], help="Colour or grey.")
    data.add_argument("--cache_dir", help="Where downloaded data sets are kept.")
    data.add_argument("--resolution", type=int, help="Images are resized to this size; unset: 64, or 8 for digits.")
    data.add_argument("--center_crop", action="store_true", help="Crop at the centre instead of at random.")
    data.add_argument("--random_flip", action="store_true", help="Mirror images at random.")
    data.add_argument("--validation_images", type=int, default=256, help="Images held out to measure the PSNR on.")
    data.add_argument("--train_batch_size", type=int, default=32, help="Images per process and step.")
    data.add_argument("--keep_in_memory_bytes", type=int, default=2 << 30, help="Larger sets are decoded per batch.")
    data.add_argument("--dataloader_num_workers", type=int, default=0, help="Processes that decode images.")

    model = parser.add_argument_group("model")
    model.add_argument("--autoencoder_class", default="kl", choices=sorted(CLASSES), help="AutoencoderKL or VQModel.")
    model.add_argument(_CONFIG_FLAG, help="Configuration: file, folder or Hub id; takes the place of the sizes below.")
    model.add_argument("--latent_channels", type=int, help="Channels of the latents; unset: 4.")
    model.add_argument(
        "--block_out_channels",
        type=int,
        nargs="+",
        help="Widths; each after the first halves the size. Unset: 64 128 ..., down to latents of about an eighth.",
    )
    model.add_argument("--layers_per_block", type=int, help="Unset: 1.")
    model.add_argument("--num_vq_embeddings", type=int, help="Entries of a VQModel's codebook; unset: 256.")

    training = parser.add_argument_group("training")
    training.add_argument("--output_dir", default="autoencoder", help="The autoencoder, its PSNR, reconstructions.")
    training.add_argument("--overwrite_output_dir", action="store_true", help="Replace an autoencoder that is there.")
    training.add_argument("--max_train_steps", type=int, default=5_000)
    training.add_argument("--learning_rate", type=float, default=5e-4)
    training.add_argument("--lr_scheduler", default="cosine", choices=LR_SCHEDULERS)
    training.add_argument("--lr_warmup_steps", type=int, default=100)
    training.add_argument("--max_grad_norm", type=float, default=1.0, help="Gradients are clipped to this norm.")
    training.add_argument("--kl_weight", type=float, help="Weight of the KL divergence (kl; unset: 1e-6).")
    training.add_argument("--commitment_weight", type=float, help="Weight of the codebook loss (vq; unset: 1).")
    training.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    training.add_argument("--seed", type=int, default=0, help="Makes the run repeatable.")
    return parser


def build_autoencoder(args: argparse.Namespace, data: ImageData) -> ModelMixin:
    """From the configuration or the sizes given, checked against the data."""
    chosen = CLASSES[args.autoencoder_class]
    sizes = ("latent_channels", "block_out_channels", "layers_per_block", "num_vq_embeddings")
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    source = args.model_config_name_or_path
    if source is not None:
        if given:
            raise ValueError(f"{_CONFIG_FLAG} and --{', --'.join(given)} exclude each other; give one or the other.")
        config, _ = find_config(source, ("", "vae", "vqvae"), _CONFIG_FLAG, args.cache_dir)
        check_class(
            config, (chosen.__name__,), f"--autoencoder_class {args.autoencoder_class}: {_CONFIG_FLAG}", source
        )
        config = {key: value for key, value in config.items() if not key.startswith("_")}
    else:
        if args.autoencoder_class == "kl" and "num_vq_embeddings" in given:
            raise ValueError("--num_vq_embeddings is for --autoencoder_class vq; an AutoencoderKL has no codebook.")
        config = default_config(data.resolution) | given
        config["norm_num_groups"] = math.gcd(32, *config["block_out_channels"])
        levels = len(config["block_out_channels"])
        config["down_block_types"] = ("DownEncoderBlock2D",) * levels
        config["up_block_types"] = ("UpDecoderBlock2D",) * levels
    for key in ("in_channels", "out_channels"):
        if config.setdefault(key, data.channels) != data.channels:
            raise ValueError(
                f"{_CONFIG_FLAG} {source}: {key} is {config[key]}, but the images have {data.channels}. "
                "Pass --image_mode RGB or L, or change the configuration."
            )
    config["sample_size"] = data.resolution
    downscale = 2 ** (len(config["block_out_channels"]) - 1)
    check_size(data.resolution, downscale, f"--resolution: an autoencoder with {downscale:g}-fold reduction")
    return chosen.from_config(config)


def default_config(resolution: int) -> dict[str, Any]:
    levels = 2 if resolution <= 16 else 3 if resolution <= 64 else 4
    return {"latent_channels": 4, "block_out_channels": (64, 128, 256, 256)[:levels], "layers_per_block": 1}


def grid(images: torch.Tensor, reconstructions: torch.Tensor, columns: int = 8) -> Image.Image:
    """Each row of images with the row of its reconstructions below it."""
    columns = min(columns, len(images))
    rows = min(4, len(images) // columns)
    pictures = []
    for row in range(rows):
        for part in (images, reconstructions):
            pixels = ((part[row * columns : (row + 1) * columns] + 1) * 127.5).round().to(torch.uint8)
            for one in pixels.permute(0, 2, 3, 1).numpy():
                pictures.append(Image.fromarray(one[..., 0] if one.shape[-1] == 1 else one))
    return make_image_grid(pictures, rows=2 * rows, cols=columns)


def train(args: argparse.Namespace, accelerator: Accelerator, data: ImageData) -> ModelMixin:
    torch.manual_seed(args.seed)
    autoencoder = build_autoencoder(args, data)
    stream = make_stream(
        data,
        args.train_batch_size,
        args.seed,
        accelerator.process_index,
        accelerator.num_processes,
        args.dataloader_num_workers,
    )
    if isinstance(autoencoder, VQModel):
        first = data.train.batch(list(range(min(len(data.train), 64))))["images"]
        start_codebook(autoencoder, first, torch.Generator().manual_seed(args.seed))
    objective = ReconstructionLoss(autoencoder, *_penalty_weights(args, autoencoder))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=args.learning_rate, weight_decay=0.0)
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer,
        num_warmup_steps=min(args.lr_warmup_steps, args.max_train_steps),
        num_training_steps=args.max_train_steps,
    )
    objective, optimizer = accelerator.prepare(objective, optimizer)
    batches = stream.batches()
    bar = tqdm(range(args.max_train_steps), desc="training")
    for step in bar:
        torch.manual_seed(derived_seed(args.seed, "step", step, accelerator.process_index))
        loss, pixels = objective(next(batches)["images"].to(accelerator.device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(objective.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", pixels=f"{pixels.item():.4f}")
    return accelerator.unwrap_model(objective).autoencoder


def save(space: LatentSpace, data: ImageData, args: argparse.Namespace) -> dict[str, Any]:
    """The autoencoder with its measured scaling factor, its PSNR and a picture, each in its place at once."""
    factor = measure_scaling_factor(space, data.train, space.autoencoder.device)
    space.autoencoder.register_to_config(scaling_factor=factor)
    images = data.validation.batch(list(range(len(data.validation))))["images"]
    reconstructions = reconstruct(space, images)
    facts = {
        "psnr": round(psnr(images, reconstructions), 3),
        "validation_images": len(images),
        "scaling_factor": factor,
        "latents": [space.channels, *[space.size(data.resolution)] * 2],
        "data": data.name,
        "max_train_steps": args.max_train_steps,
        "seed": args.seed,
        "command": shlex.join(sys.argv),
    }
    with tempfile.TemporaryDirectory(dir=args.output_dir, prefix=".partial.") as partial:
        space.autoencoder.save_pretrained(partial)
        grid(images, reconstructions).save(Path(partial) / "reconstructions.png")
        (Path(partial) / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for file in Path(partial).iterdir():
            os.replace(file, Path(args.output_dir) / file.name)
    return facts


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    folder = Path(args.output_dir)
    if (folder / "config.json").exists() and not args.overwrite_output_dir:
        raise ValueError(f"--output_dir {folder} holds a model; give another or --overwrite_output_dir.")
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    with accelerator.main_process_first():
        data = load_image_data(args)
    if data.validation is None:
        raise ValueError("No images are held out to measure the PSNR on; give --validation_images or more data.")
    for note in data.notes:
        accelerator.print(note)
    folder.mkdir(parents=True, exist_ok=True)
    autoencoder = train(args, accelerator, data)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        facts = save(LatentSpace(autoencoder), data, args)
        print(f"{type(autoencoder).__name__} saved to {folder}: latents {facts['latents']}, scaling_factor "
              f"{facts['scaling_factor']}, reconstructions in {folder / 'reconstructions.png'}")  # fmt: skip
        print(f"PSNR on {facts['validation_images']} held-out images: {facts['psnr']:.2f} dB")
        print(f"Use it: train_unconditional.py --model_family ldm --autoencoder {folder} ...")
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        # What a user can mend is said in one line; everything else keeps its traceback.
        sys.exit(f"error: {error}")
