"""The parts of a StableDiffusionPipeline that do not train: found by path or Hub id, checked, saved as they came."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel
from safetensors import safe_open
from transformers import AutoModel, AutoTokenizer, CLIPTextModel, T5EncoderModel

from .model_configs import check_class, find_config

PIPELINE_FLAG = "--pretrained_model_name_or_path"
_PIPELINE = "StableDiffusionPipeline"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class FrozenParts:
    """What the network is trained with and the pipeline is saved with.

    Args:
        autoencoder: float32; computes latents.
        tokenizer, text_encoder: float32; compute what the network is conditioned on.
        scheduler: the pipeline's own; None when there was no pipeline.
        others: safety checker, feature extractor and image encoder, as they came.
        stored: the precision that autoencoder and text encoder had on disk, and get back when they are saved.
    """

    autoencoder: AutoencoderKL
    tokenizer: Any
    text_encoder: torch.nn.Module
    scheduler: Any | None = None
    others: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in (self.autoencoder, self.text_encoder):
            module.float().eval().requires_grad_(False)

    @contextmanager
    def in_stored_precision(self) -> Iterator[None]:
        """For saving. Widened numbers that are narrowed again are the same numbers, so nothing is lost either way."""
        modules = {"vae": self.autoencoder, "text_encoder": self.text_encoder}
        narrow = {name: dtype for name, dtype in self.stored.items() if dtype != torch.float32}
        try:
            for name, dtype in narrow.items():
                modules[name].to(dtype)
            yield
        finally:
            for name in narrow:
                modules[name].float()


def load_parts(args: argparse.Namespace) -> FrozenParts:
    """The parts of the pipeline that the options name, some of them replaced by `--autoencoder`, `--text_encoder`."""
    given: dict[str, Any] = {}
    stored: dict[str, torch.dtype] = {}
    if args.autoencoder is not None:
        given["vae"], stored["vae"] = _own_autoencoder(args.autoencoder, args.cache_dir)
    if args.text_encoder is not None:
        given["tokenizer"], given["text_encoder"], stored["text_encoder"] = _own_text_encoder(
            args.text_encoder, args.cache_dir
        )
    if args.pretrained_model_name_or_path is None:
        missing = [flag for flag in ("autoencoder", "text_encoder") if getattr(args, flag) is None]
        if missing:
            raise ValueError(
                f"Give {PIPELINE_FLAG} with a Stable Diffusion pipeline to fine-tune, or, to train a network from "
                f"scratch, --model_config_name_or_path with --autoencoder and --text_encoder; missing: "
                f"{', '.join(f'--{flag}' for flag in missing)}."
            )
        return FrozenParts(given["vae"], given["tokenizer"], given["text_encoder"], stored=stored)
    folder = pipeline_folder(args)
    try:
        pipeline = StableDiffusionPipeline.from_pretrained(
            folder, unet=None, variant=args.variant, use_safetensors=True, **given
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{PIPELINE_FLAG} {args.pretrained_model_name_or_path} cannot be loaded: {error}") from None
    for name in ("vae", "text_encoder"):
        stored.setdefault(name, _stored_precision(folder / name, args.variant))
    names = ("safety_checker", "feature_extractor", "image_encoder")
    others = {name: pipeline.components.get(name) for name in names}
    others["requires_safety_checker"] = pipeline.config.requires_safety_checker
    return FrozenParts(
        pipeline.vae, pipeline.tokenizer, pipeline.text_encoder, pipeline.scheduler, others=others, stored=stored
    )


def load_network(args: argparse.Namespace, averaged: bool = False) -> UNet2DConditionModel:
    """The pipeline's UNet in float32: the weights to train, or, where they are kept apart, their average.

    As in diffusers' script, training starts from `--non_ema_revision` and its average from `--revision` and
    `--variant`. A repository that has the variant only is taken as it is.
    """
    source = args.pretrained_model_name_or_path
    revision = args.revision if averaged else args.non_ema_revision or args.revision
    variants = [args.variant] if averaged else [None, args.variant]
    for variant in dict.fromkeys(variants):
        try:
            return UNet2DConditionModel.from_pretrained(
                source,
                subfolder="unet",
                revision=revision,
                variant=variant,
                cache_dir=args.cache_dir,
                use_safetensors=True,
            ).float()
        except OSError as error:
            problem = str(error).splitlines()[0]
    raise ValueError(f"{PIPELINE_FLAG} {source}: the weights of its unet cannot be read. {problem}")


def pipeline_folder(args: argparse.Namespace) -> Path:
    """The pipeline on this machine, downloaded if need be; a pipeline of another kind is an error."""
    source = args.pretrained_model_name_or_path
    if not os.path.isdir(source):
        try:
            source = DiffusionPipeline.download(
                source, revision=args.revision, variant=args.variant, cache_dir=args.cache_dir, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{PIPELINE_FLAG} {source} is no folder here, and cannot be had from the Hub: "
                f"{str(error).splitlines()[0]}"
            ) from None
    folder = Path(source)
    try:
        kind = json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    except (OSError, ValueError, AttributeError):
        raise ValueError(
            f"{PIPELINE_FLAG} {args.pretrained_model_name_or_path} holds no pipeline: there is no readable "
            "model_index.json in it. Give the folder or repository of a Stable Diffusion pipeline."
        ) from None
    if kind != _PIPELINE:
        raise ValueError(
            f"{PIPELINE_FLAG} {args.pretrained_model_name_or_path} is a {kind}; this script trains a {_PIPELINE} "
            "(Stable Diffusion 1 and 2). Pipelines without text are for train_unconditional.py."
        )
    return folder


def autoencoder_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration of the autoencoder, before any weights are read."""
    if args.autoencoder is not None:
        return find_config(args.autoencoder, ("", "vae"), "--autoencoder", args.cache_dir)[0]
    if args.pretrained_model_name_or_path is None:
        load_parts(args)  # says what is missing
    return find_config(str(pipeline_folder(args)), ("vae",), PIPELINE_FLAG, args.cache_dir)[0]


def _own_autoencoder(source: str, cache_dir: str | None) -> tuple[AutoencoderKL, torch.dtype]:
    config, subfolder = find_config(source, ("", "vae"), "--autoencoder", cache_dir)
    check_class(config, ("AutoencoderKL",), "--autoencoder", source)
    try:
        autoencoder = AutoencoderKL.from_pretrained(
            source, subfolder=subfolder or None, cache_dir=cache_dir, use_safetensors=True
        )
    except OSError as error:
        raise ValueError(f"--autoencoder {source}: the weights cannot be read. {str(error).splitlines()[0]}") from None
    return autoencoder, _stored_precision(Path(source) / subfolder, None)


def _own_text_encoder(source: str, cache_dir: str | None) -> tuple[Any, torch.nn.Module, torch.dtype]:
    """Tokenizer and encoder in one folder or repository, as transformers saves them, or those of a pipeline."""
    config, encoder_in = find_config(source, ("text_encoder", ""), "--text_encoder", cache_dir)
    tokenizer_in = "tokenizer" if encoder_in else ""
    # Of models that are more than an encoder, the encoder; classes come from transformers alone, never from the file.
    kind = {"clip": CLIPTextModel, "t5": T5EncoderModel}.get(config.get("model_type"), AutoModel)
    try:
        encoder = kind.from_pretrained(
            source, subfolder=encoder_in, cache_dir=cache_dir, use_safetensors=True, dtype="auto"
        )
        tokenizer = AutoTokenizer.from_pretrained(source, subfolder=tokenizer_in, cache_dir=cache_dir)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"--text_encoder {source} cannot be loaded: {str(error).splitlines()[0]} Give a folder or repository that "
            "holds a text encoder of transformers and its tokenizer."
        ) from None
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # What transformers gives for some classes where there is no vocabulary: every caption would be the same.
        raise ValueError(
            f"--text_encoder {source} holds an encoder but no vocabulary of a tokenizer. Save the encoder's tokenizer "
            "in the same folder."
        )
    if not encoder.config.model_type.startswith("clip"):
        # StableDiffusionPipeline then tells the encoder which tokens are padding, as all but CLIP's were trained.
        encoder.config.use_attention_mask = True
    return tokenizer, encoder, encoder.dtype


def _stored_precision(folder: Path, variant: str | None) -> torch.dtype:
    """Of the first tensor in a folder of safetensors; float32 when it cannot be told."""
    pattern = f"*.{variant}*.safetensors" if variant else "*.safetensors"
    for path in sorted(folder.glob(pattern)) or sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                return _DTYPES.get(file.get_slice(name).get_dtype(), torch.float32)
    return torch.float32
