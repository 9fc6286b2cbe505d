#!/usr/bin/env python
"""Train an unconditional or class-conditional diffusion model with any timestep sampler.

The options of diffusers' script of this name mean here what they mean there. With no data set named, the model trains
on scikit-learn's digits:

    accelerate launch train_scripts/train_unconditional.py --timestep_sampler adaptive --output_dir digits
"""

from __future__ import annotations

import argparse
import sys

from diffusers_adaptive_ts.training import build, setup
from diffusers_adaptive_ts.training.arguments import (
    add_run_options,
    add_sampler_options,
    parse,
    positive_float,
    positive_int,
    whole_number,
)
from diffusers_adaptive_ts.training.data import load_image_data
from diffusers_adaptive_ts.training.ending import describe, finish
from diffusers_adaptive_ts.training.families import FAMILIES, image_channels, make_family
from diffusers_adaptive_ts.training.loop import train
from diffusers_adaptive_ts.training.output_folder import check_folder
from diffusers_adaptive_ts.training.outputs import Outputs


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
    data.add_argument("--cache_dir", help="Where downloaded models and data sets are kept.")
    data.add_argument(
        "--resolution", type=positive_int, help="Images are resized to this size; unset: 64, or 8 for digits."
    )
    data.add_argument("--center_crop", action="store_true", help="Crop at the centre instead of at random.")
    data.add_argument("--random_flip", action="store_true", help="Mirror images at random.")
    data.add_argument(
        "--preserve_input_precision", action="store_true", help="Keep 16- and 32-bit images as they are."
    )
    data.add_argument(
        "--train_batch_size", type=positive_int, default=16, help="Samples per process and forward pass."
    )
    data.add_argument("--dataloader_num_workers", type=whole_number, default=0, help="Processes that decode images.")

    model = parser.add_argument_group("model")
    model.add_argument("--model_family", default="unet2d", choices=sorted(FAMILIES), help="What is trained.")
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
    training.add_argument("--overwrite_output_dir", action="store_true", help="Replace a run that is in output_dir.")
    training.add_argument("--num_epochs", type=positive_int, default=100)
    training.add_argument("--gradient_accumulation_steps", type=positive_int, default=1)
    training.add_argument("--learning_rate", type=positive_float, default=1e-4)
    training.add_argument("--lr_scheduler", default="cosine", help="A name that diffusers.optimization takes.")
    training.add_argument("--lr_warmup_steps", type=whole_number, default=500)
    training.add_argument("--adam_beta1", type=float, default=0.95)
    training.add_argument("--adam_beta2", type=float, default=0.999)
    training.add_argument("--adam_weight_decay", type=float, default=1e-6)
    training.add_argument("--adam_epsilon", type=float, default=1e-8)
    training.add_argument("--use_ema", action="store_true", help="Average the weights, and save the average.")
    training.add_argument("--ema_inv_gamma", type=float, default=1.0)
    training.add_argument("--ema_power", type=float, default=3 / 4)
    training.add_argument("--ema_max_decay", type=float, default=0.9999)
    training.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    training.add_argument("--local_rank", type=int, default=-1, help="Set by the launcher.")
    add_run_options(parser)
    add_sampler_options(parser)

    out = parser.add_argument_group("output")
    out.add_argument("--eval_batch_size", type=whole_number, default=16, help="Images in a sample grid.")
    out.add_argument("--save_images_epochs", type=positive_int, default=10)
    out.add_argument("--save_model_epochs", type=positive_int, default=10)
    out.add_argument("--checkpointing_steps", type=positive_int, default=500)
    out.add_argument("--checkpoints_total_limit", type=positive_int)
    out.add_argument("--resume_from_checkpoint", help="`latest`, or a checkpoint folder.")
    out.add_argument("--logger", default="tensorboard", choices=["tensorboard", "wandb", "trackio", "none"])
    out.add_argument("--logging_dir", default="logs", help="Of the tracker, inside output_dir.")
    out.add_argument("--push_to_hub", action="store_true", help="Upload the pipeline to the Hub.")
    out.add_argument("--hub_token", help="Token for the upload; stored nowhere.")
    out.add_argument("--hub_model_id", help="Name of the repository; unset: the name of output_dir.")
    out.add_argument("--hub_private_repo", action="store_true", help="Create the repository private.")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parse(make_parser(), argv)
    build.start_logging()
    folder = check_folder(args)
    accelerator = setup.make_accelerator(args)
    args.model_channels = image_channels(args)
    if not args.validation_steps:
        args.validation_images = 0
    with accelerator.main_process_first():
        data = load_image_data(args)
    family = make_family(args, data)
    run, loss_window = build.build_run(args, accelerator, family, folder)
    if args.dry_run:
        accelerator.print(describe(run))
        return 0
    train(run, Outputs(run, "train_unconditional"), loss_window)
    return finish(run)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, FileNotFoundError) as error:
        # What a user can mend is said in one line; everything else keeps its traceback.
        sys.exit(f"error: {error}")
