#!/usr/bin/env python
"""Train an unconditional or class-conditional diffusion model with any timestep sampler.

The options of diffusers' script of this name mean here what they mean there. With no data set named, the model trains
on scikit-learn's digits:

    accelerate launch train_scripts/train_unconditional.py --timestep_sampler adaptive --output_dir digits
"""

from __future__ import annotations

import argparse
import sys

from diffusers_adaptive_ts.training.arguments import (
    add_checkpoint_and_hub_options,
    add_image_options,
    add_optimizer_options,
    add_run_options,
    add_sampler_options,
    parse,
    positive_int,
    whole_number,
)
from diffusers_adaptive_ts.training.entry import run_training, said_in_one_line
from diffusers_adaptive_ts.training.families import UNCONDITIONAL


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--dataset_name", help="Hub id or local path of a data set; unset with no train_data_dir: digits."
    )
    data.add_argument("--dataset_config_name", help="Configuration of the data set, where it has several.")
    data.add_argument("--train_data_dir", help="Folder of images (datasets' imagefolder); ignored with dataset_name.")
    data.add_argument("--image_column", help="Column of the images; unset: image, img, or the only one.")
    data.add_argument(
        "--class_labels", metavar="COLUMN", help="Column of the class labels, for class-conditional models."
    )
    data.add_argument("--label_dropout", type=float, help="Share of labels dropped, for guidance (dit; unset: 0.1).")
    data.add_argument("--image_mode", default="auto", choices=["auto", "RGB", "L"], help="Colour or grey.")
    data.add_argument(
        "--resolution", type=positive_int, help="Images are resized to this size; unset: 64, or 8 for digits."
    )
    data.add_argument(
        "--preserve_input_precision", action="store_true", help="Keep 16- and 32-bit images as they are."
    )
    add_image_options(data)

    model = parser.add_argument_group("model")
    model.add_argument("--model_family", default="unet2d", choices=sorted(UNCONDITIONAL), help="What is trained.")
    model.add_argument("--model_config_name_or_path", help="Configuration of the network: file, folder or Hub id.")
    model.add_argument("--autoencoder", help="AutoencoderKL, AutoencoderTiny or VQModel: path or Hub id (ldm, dit).")
    model.add_argument(
        "--cache_latents",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Encode every image once and keep mean and std on disk; on for latent families unless switched off.",
    )
    model.add_argument("--prediction_type", default="epsilon", choices=["epsilon", "sample", "v_prediction"])
    model.add_argument("--ddpm_num_steps", type=positive_int, default=1000, help="Timesteps of the noise process.")
    model.add_argument(
        "--ddpm_num_inference_steps", type=positive_int, default=1000, help="Steps of the sample grids."
    )
    model.add_argument("--ddpm_beta_schedule", default="linear", help="linear, scaled_linear, squaredcos_cap_v2, ...")
    model.add_argument("--rescale_betas_zero_snr", action="store_true", help="Zero-terminal SNR schedule.")
    model.add_argument("--enable_xformers_memory_efficient_attention", action="store_true")

    training = parser.add_argument_group("training")
    training.add_argument("--output_dir", default="ddpm-model-64", help="Pipeline, checkpoints, log and report.")
    training.add_argument("--num_epochs", type=positive_int, default=100)
    add_optimizer_options(training, lr_scheduler="cosine", adam_beta1=0.95, adam_weight_decay=1e-6)
    training.add_argument("--ema_inv_gamma", type=float, default=1.0)
    training.add_argument("--ema_power", type=float, default=3 / 4)
    training.add_argument("--ema_max_decay", type=float, default=0.9999)
    training.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    add_run_options(parser)
    add_sampler_options(parser)

    out = parser.add_argument_group("output")
    out.add_argument("--eval_batch_size", type=whole_number, default=16, help="Images in a sample grid.")
    out.add_argument("--save_images_epochs", type=positive_int, default=10)
    out.add_argument("--save_model_epochs", type=positive_int, default=10)
    out.add_argument("--logger", default="tensorboard", choices=["tensorboard", "wandb", "trackio", "none"])
    add_checkpoint_and_hub_options(out)
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_training(parse(make_parser(), argv), "train_unconditional")


if __name__ == "__main__":
    sys.exit(said_in_one_line(main))
