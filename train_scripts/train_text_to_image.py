#!/usr/bin/env python
"""Fine-tune Stable Diffusion on captioned images, whole or with LoRA, or train it from scratch, with any sampler.

The options of diffusers' script of this name mean here what they mean there:

    accelerate launch train_scripts/train_text_to_image.py --pretrained_model_name_or_path MODEL \\
        --train_data_dir IMAGES --timestep_sampler adaptive --lora_rank 8 --validation_prompts "a red cat"
"""

from __future__ import annotations

import argparse
import math
import sys

import torch

from diffusers_adaptive_ts.training.arguments import (
    add_checkpoint_and_hub_options,
    add_image_options,
    add_optimizer_options,
    add_run_options,
    add_sampler_options,
    parse,
    positive_float,
    positive_int,
)
from diffusers_adaptive_ts.training.entry import run_training, said_in_one_line
from diffusers_adaptive_ts.training.images import INTERPOLATIONS
from diffusers_adaptive_ts.training.run import Run

_DENOISING_STEPS = 20
_TRACKERS = ["tensorboard", "wandb", "comet_ml", "trackio", "all", "none"]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    model = parser.add_argument_group("model")
    model.add_argument("--pretrained_model_name_or_path", help="A Stable Diffusion pipeline: folder or Hub id.")
    model.add_argument("--revision", help="Branch, tag or commit of the pipeline on the Hub.")
    model.add_argument("--variant", help="Variant of its weight files, such as fp16 or non_ema.")
    model.add_argument("--non_ema_revision", help="Revision of the weights to train, where they are kept apart.")
    model.add_argument(
        "--model_config_name_or_path",
        help="Configuration of a UNet2DConditionModel that is trained from scratch: file, folder or Hub id.",
    )
    model.add_argument("--autoencoder", help="AutoencoderKL to train from scratch with: folder or Hub id.")
    model.add_argument(
        "--text_encoder", help="Text encoder and tokenizer to train from scratch with: folder or Hub id."
    )
    model.add_argument(
        "--lora_rank", type=positive_int, help="Train a LoRA of this rank instead of the whole network."
    )
    model.add_argument("--lora_alpha", type=positive_float, help="Strength of the LoRA; unset: its rank.")
    model.add_argument(
        "--lora_targets", nargs="+", metavar="NAME", help="Layers it adapts; unset: to_k to_q to_v to_out.0."
    )
    model.add_argument(
        "--prediction_type",
        choices=["epsilon", "sample", "v_prediction"],
        help="What the network predicts; unset: what the pipeline says.",
    )
    model.add_argument("--ddpm_num_steps", type=positive_int, help="Timesteps, without a pipeline; unset: 1000.")
    model.add_argument("--ddpm_beta_schedule", help="Noise schedule, without a pipeline; unset: scaled_linear.")
    model.add_argument("--rescale_betas_zero_snr", action="store_true", help="Zero-terminal SNR schedule.")
    model.add_argument("--enable_xformers_memory_efficient_attention", action="store_true")

    data = parser.add_argument_group("data")
    data.add_argument("--dataset_name", help="Hub id or local path of a data set.")
    data.add_argument("--dataset_config_name", help="Configuration of the data set, where it has several.")
    data.add_argument(
        "--train_data_dir",
        help="Folder of images with captions in metadata.jsonl (datasets' imagefolder), or a folder of dataset_name.",
    )
    data.add_argument("--image_column", help="Column of the images; unset: image, img, or the only one.")
    data.add_argument("--caption_column", default="text", help="Column of the captions: texts, or lists of texts.")
    data.add_argument("--caption_dropout", type=float, default=0.0, help="Share of captions left empty, for guidance.")
    data.add_argument("--max_train_samples", type=positive_int, help="Train on so many images, chosen by the seed.")
    data.add_argument("--resolution", type=positive_int, default=512)
    data.add_argument("--image_interpolation_mode", default="lanczos", choices=sorted(INTERPOLATIONS))
    add_image_options(data)
    data.add_argument(
        "--cache_latents",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Encode every image once and keep mean and std on disk; unset: unless crops differ from epoch to epoch.",
    )
    data.add_argument(
        "--cache_text_embeddings",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Encode every caption once and keep it on disk; unset: when all fit in keep_in_memory_bytes.",
    )

    training = parser.add_argument_group("training")
    training.add_argument("--output_dir", default="sd-model-finetuned", help="Pipeline, checkpoints, log and report.")
    training.add_argument("--num_train_epochs", type=positive_int, default=100)
    add_optimizer_options(training, lr_scheduler="constant", adam_beta1=0.9, adam_weight_decay=1e-2)
    training.add_argument("--scale_lr", action="store_true", help="Multiply the learning rate by the effective batch.")
    training.add_argument(
        "--snr_gamma", type=positive_float, help="Min-SNR weighting: --loss_weighting min_snr with this gamma."
    )
    training.add_argument("--dream_training", action="store_true", help="DREAM; one more forward in every step.")
    training.add_argument("--dream_detail_preservation", type=float, default=1.0)
    training.add_argument("--noise_offset", type=float, default=0, help="Scale of the noise offset.")
    training.add_argument("--input_perturbation", type=float, default=0, help="Scale of it; 0.1 is recommended.")
    training.add_argument("--use_8bit_adam", action="store_true", help="8-bit Adam of bitsandbytes.")
    training.add_argument("--allow_tf32", action="store_true", help="Faster matrix products on Ampere GPUs.")
    training.add_argument("--offload_ema", action="store_true", help="Keep averaged weights on the CPU between steps.")
    training.add_argument("--foreach_ema", action="store_true", help="Average with fewer, larger operations.")
    training.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="Unset: as accelerate is set up.")
    add_run_options(parser)
    add_sampler_options(parser)

    out = parser.add_argument_group("output")
    out.add_argument("--validation_prompts", nargs="+", metavar="TEXT", help="Images are made from them and shown.")
    out.add_argument("--validation_epochs", type=positive_int, default=5, help="Epochs between two such images.")
    out.add_argument("--report_to", default="tensorboard", choices=_TRACKERS)
    out.add_argument("--tracker_project_name", default="text2image-fine-tune")
    add_checkpoint_and_hub_options(out)
    return parser


def settle(args: argparse.Namespace) -> None:
    """The names under which the shared loop knows this script's options; what contradicts itself is an error."""
    if args.snr_gamma is not None:
        if args.loss_weighting is not None:
            raise ValueError(
                f"--snr_gamma {args.snr_gamma} is --loss_weighting min_snr with that gamma, so --loss_weighting "
                f"{args.loss_weighting} contradicts it. Give one of them."
            )
        if args.weighting_options:
            raise ValueError("--weighting_options go with --loss_weighting; --snr_gamma is an option of its own.")
        args.loss_weighting, args.weighting_options = "min_snr", {"gamma": args.snr_gamma}
    for flag in ("offload_ema", "foreach_ema"):
        if getattr(args, flag) and not args.use_ema:
            raise ValueError(f"--{flag} is about averaged weights; give --use_ema with it, or leave it out.")
    args.model_family = "stable_diffusion"
    args.embedded, args.data_dir_inside = False, True
    args.logger = args.report_to
    args.num_epochs, args.save_images_epochs, args.save_model_epochs = (
        args.num_train_epochs,
        args.validation_epochs,
        None,
    )
    args.eval_batch_size, args.ddpm_num_inference_steps = len(args.validation_prompts or []), _DENOISING_STEPS
    if args.allow_tf32:
        torch.backends.cuda.matmul.allow_tf32 = True


def one_more_step(run: Run) -> None:
    """A run resumed at or past its end inside its last epoch takes one more step, as with diffusers' script."""
    if run.step < run.max_train_steps or run.steps_in_epoch is None:
        return
    if run.step // run.steps_in_epoch < math.ceil(run.max_train_steps / run.steps_in_epoch):
        run.max_train_steps = run.step + 1


def main(argv: list[str] | None = None) -> int:
    args = parse(make_parser(), argv)
    settle(args)
    return run_training(args, args.tracker_project_name, one_more_step)


if __name__ == "__main__":
    sys.exit(said_in_one_line(main))
