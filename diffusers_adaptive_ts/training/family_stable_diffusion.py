"""Text-to-image diffusion in latents with a UNet2DConditionModel, saved as StableDiffusionPipeline or as LoRA."""

from __future__ import annotations

import argparse
import copy
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.modeling_utils import ModelMixin

from .autoencoders import LatentSpace, weights_fingerprint
from .family import deterministic
from .family_latent import LatentFamily
from .lora import DEFAULT_TARGETS, add_lora, load_lora, save_lora
from .stable_diffusion_parts import autoencoder_config, load_network, load_parts
from .text import TextSpace
from .text_cache import prepare_captions

if TYPE_CHECKING:
    from .data import ImageData

# Stable Diffusion's own noise process, for networks that are trained from scratch.
_SCHEDULE = {"num_train_timesteps": 1000, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_SCHEDULER = "scheduler"


class StableDiffusionFamily(LatentFamily):
    """A UNet conditioned on captions: fine-tuned whole, with LoRA, or trained from scratch from a configuration."""

    name = "stable_diffusion"
    model_folder = "unet"
    model_class = UNet2DConditionModel
    accepted_configs = ("UNet2DConditionModel",)
    autoencoders = ("AutoencoderKL",)
    images_per_call = 4

    def __init__(self, args: argparse.Namespace, data: ImageData) -> None:
        super().__init__(args, data)
        self.from_scratch = args.model_config_name_or_path is not None
        self.parts = load_parts(args)
        self.space = LatentSpace(self.parts.autoencoder, fixed=not self.from_scratch)
        self.space.check_channels(data.channels, data.name)
        self.latent_size = self.space.size(data.resolution)
        self.text = TextSpace(self.parts.tokenizer, self.parts.text_encoder)
        if self.from_scratch:
            self.config = self.latent_config(lambda size, channels: {})
            self._check_network(self.config)
        self._embed = None
        self._base_fingerprint: str | None = None

    @classmethod
    def image_channels(cls, args: argparse.Namespace) -> int | None:
        _check_options(args)
        return autoencoder_config(args).get("in_channels", 3)

    def _check_network(self, config: dict[str, Any]) -> None:
        """Refuse what would only fail in the middle of the first step."""
        for key in ("in_channels", "out_channels"):
            if config.get(key, 4) != self.space.channels:
                raise ValueError(
                    f"The unet's {key} is {config.get(key, 4)}, but the autoencoder's latents have "
                    f"{self.space.channels} channels. Inpainting and other networks of more inputs are not trained "
                    "here."
                )
        width = config.get("cross_attention_dim", 1280)
        if width != self.text.hidden_size:
            raise ValueError(
                f"The unet's cross_attention_dim is {width}, but the text encoder gives {self.text.hidden_size} "
                f"numbers per token. Set cross_attention_dim to {self.text.hidden_size}, or use another "
                "--text_encoder."
            )

    def build_model(self) -> ModelMixin:
        """Fresh weights of the configuration, or the pipeline's, with LoRA where that is asked for."""
        if self.from_scratch:
            return super().build_model()
        model = load_network(self.args)
        self._check_network(dict(model.config))
        if self.args.lora_rank is not None:
            self._base_fingerprint = weights_fingerprint(model)
            half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.args.mixed_precision)
            model.to(dtype=half or torch.float32)  # frozen, so it needs no more precision than it computes in
            add_lora(model, self.args.lora_rank, self.args.lora_alpha, self.args.lora_targets)
        return model

    def average_start(self, model: ModelMixin) -> ModelMixin:
        """The average may be published apart from the weights to go on from: `--variant`, `--non_ema_revision`."""
        apart = self.args.variant is not None or self.args.non_ema_revision is not None
        return load_network(self.args, averaged=True) if apart and not self.from_scratch else model

    def build_scheduler(self) -> DDPMScheduler:
        args = self.args
        changes: dict[str, Any] = {"clip_sample": self.clip_sample}  # which PNDM's configuration says nothing about
        if self.parts.scheduler is None:
            asked = {"num_train_timesteps": args.ddpm_num_steps, "beta_schedule": args.ddpm_beta_schedule}
            changes |= {**_SCHEDULE, **{key: value for key, value in asked.items() if value is not None}}
            changes["steps_offset"] = 1
        if args.prediction_type is not None:
            changes["prediction_type"] = args.prediction_type
        if args.rescale_betas_zero_snr:
            # Generation must start at the timestep without signal, which "leading" skips.
            changes |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        try:
            # Changes as arguments: in the configuration, those of keys that a file leaves out would be dropped.
            scheduler = DDPMScheduler.from_config(self._own_schedule(), **changes)
        except NotImplementedError as error:
            raise ValueError(f"--ddpm_beta_schedule: {error}") from None
        if scheduler.config.rescale_betas_zero_snr and scheduler.config.prediction_type == "epsilon":
            raise ValueError(
                "A schedule with zero terminal SNR leaves no signal at the last timestep, where predicting the noise "
                "teaches nothing. Use --prediction_type v_prediction or sample with it."
            )
        return scheduler

    def _own_schedule(self) -> dict[str, Any]:
        scheduler = self.parts.scheduler
        if scheduler is None:
            return {}
        if not hasattr(scheduler, "alphas_cumprod"):
            raise ValueError(
                f"The pipeline's scheduler is a {type(scheduler).__name__}, which has no DDPM noise process to train."
            )
        return dict(scheduler.config)

    def prepare_data(self, data: ImageData, accelerator: Any) -> ImageData:
        if self.args.cache_latents is None and data.train is not None and data.train.crops_vary():
            self.args.cache_latents = False
            self.notes.append("latents are not cached: images that are not square are cropped anew each time")
        self._embed, notes = prepare_captions(data, self.text, self.args, accelerator)
        self.notes += notes
        data = super().prepare_data(data, accelerator)
        data.fingerprint = f"{data.fingerprint}-{self.text.fingerprint()}"
        return data

    def conditioning(
        self, batch: dict[str, Any], generator: torch.Generator | None, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The captions' embeddings: one of several at random, none with probability `--caption_dropout`."""
        captions = batch["captions"]
        if generator is None:
            chosen = [some[0] for some in captions]
        else:
            draws = torch.rand(len(captions), 2, generator=generator)
            picked = [some[int(place * len(some))] for some, place in zip(captions, draws[:, 0].tolist(), strict=True)]
            kept = (draws[:, 1] >= self.args.caption_dropout).tolist()
            chosen = [caption if keep else "" for caption, keep in zip(picked, kept, strict=True)]
        return {"encoder_hidden_states": self._embed(chosen, device)}

    def pipeline(self, model: ModelMixin, scheduler: DDPMScheduler, complete: bool = False) -> StableDiffusionPipeline:
        """For training's own pictures, or `complete` with the safety checker and all else that the source had."""
        parts = self.parts
        others = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        others |= parts.others if complete else {}
        return StableDiffusionPipeline(
            vae=parts.autoencoder.to(model.device),
            text_encoder=parts.text_encoder.to(model.device),
            tokenizer=parts.tokenizer,
            unet=model,
            scheduler=_generating(parts.scheduler, scheduler),
            **others,
        )

    def save_pipeline(self, model: ModelMixin, scheduler: DDPMScheduler, folder: str | Path) -> None:
        if self.args.lora_rank is not None:
            save_lora(model, folder)
            if self._has_own_process(scheduler):
                _generating(self.parts.scheduler, scheduler).save_pretrained(Path(folder) / _SCHEDULER)
            return
        pipeline = self.pipeline(model, scheduler, complete=True)
        with self.parts.in_stored_precision():
            pipeline.save_pretrained(folder, safe_serialization=True)

    def _has_own_process(self, scheduler: DDPMScheduler) -> bool:
        """Whether a LoRA was trained on another noise process than its pipeline's, which it then needs with it."""
        own = DDPMScheduler.from_config(self._own_schedule()).config
        return any(own[key] != scheduler.config[key] for key in ("prediction_type", "rescale_betas_zero_snr"))

    def save_model(self, model: ModelMixin, folder: Path) -> None:
        if self.args.lora_rank is not None:
            save_lora(model, folder)
        else:
            super().save_model(model, folder)

    def load_model(self, model: ModelMixin, folder: Path) -> None:
        if self.args.lora_rank is not None:
            load_lora(model, folder)
        else:
            super().load_model(model, folder)

    def identity(self) -> dict[str, Any]:
        """LoRA weights mean something on the network that they were trained on only."""
        args = self.args
        if args.lora_rank is None:
            return {"--lora_rank": None}
        return {
            "--lora_rank": args.lora_rank,
            "--lora_alpha": args.lora_alpha or args.lora_rank,
            "--lora_targets": sorted(set(args.lora_targets or DEFAULT_TARGETS)),
            "network under the LoRA": self._base_fingerprint,
        }

    def generation_arguments(self, indices: Sequence[int]) -> dict[str, Any]:
        prompts = self.args.validation_prompts
        return {"prompt": [prompts[index % len(prompts)] for index in indices]}

    def how_to_generate(self, folder: str | Path) -> str:
        prompt = (self.args.validation_prompts or ["a prompt of yours"])[0]
        imports, load = ["DiffusionPipeline"], [f"pipeline = DiffusionPipeline.from_pretrained({str(folder)!r})"]
        if self.args.lora_rank is not None:
            where = {key: getattr(self.args, key) for key in ("revision", "variant")}
            words = [repr(self.args.pretrained_model_name_or_path)]
            words += [f"{key}={value!r}" for key, value in where.items() if value is not None]
            load = [f"pipeline = DiffusionPipeline.from_pretrained({', '.join(words)})"]
            load += [f"pipeline.load_lora_weights({str(folder)!r})"]
            config = Path(folder) / _SCHEDULER / "scheduler_config.json"
            if config.is_file():
                kind = json.loads(config.read_text(encoding="utf-8"))["_class_name"]
                imports.append(kind)
                load += [f"pipeline.scheduler = {kind}.from_pretrained({str(folder)!r}, subfolder={_SCHEDULER!r})"]
        generate = [f"image = pipeline({prompt!r}).images[0]", 'image.save("image.png")']
        return "\n".join([f"from diffusers import {', '.join(imports)}", "", *load, *generate, ""])


def _check_options(args: argparse.Namespace) -> None:
    """What contradicts itself is known before any data is read."""
    from_scratch = args.model_config_name_or_path is not None
    if args.lora_rank is None and (args.lora_alpha is not None or args.lora_targets is not None):
        raise ValueError("--lora_alpha and --lora_targets go with --lora_rank; give it, or leave them out.")
    if args.lora_rank is not None and from_scratch:
        raise ValueError(
            "--lora_rank adapts a trained network, and --model_config_name_or_path makes a new one. Leave one out."
        )
    if args.lora_rank is not None and args.use_ema:
        raise ValueError("--use_ema averages whole networks and not LoRA weights. Leave --use_ema out.")
    if not from_scratch and args.pretrained_model_name_or_path is None:
        raise ValueError(
            "Give --pretrained_model_name_or_path with a Stable Diffusion pipeline to fine-tune, or "
            "--model_config_name_or_path with the configuration of a UNet2DConditionModel to train from scratch."
        )
    unused = ["non_ema_revision"] if from_scratch else []
    unused += [] if args.pretrained_model_name_or_path is not None else ["revision", "variant"]
    for flag in unused:
        if getattr(args, flag) is not None:
            raise ValueError(
                f"--{flag} is about the weights of a pipeline, and none of them are used here; leave it out."
            )
    if args.pretrained_model_name_or_path is not None:
        for flag in ("ddpm_num_steps", "ddpm_beta_schedule"):
            if getattr(args, flag) is not None:
                raise ValueError(
                    f"--{flag} is for networks without a pipeline: the one of --pretrained_model_name_or_path has "
                    "a noise process of its own. Leave it out."
                )
    if not from_scratch and (args.autoencoder or args.text_encoder):
        raise ValueError(
            "--autoencoder and --text_encoder are for networks that are trained from scratch "
            "(--model_config_name_or_path): a trained one knows only those of its own pipeline."
        )
    if not 0 <= args.caption_dropout < 1:
        raise ValueError(f"--caption_dropout must be at least 0 and below 1, got {args.caption_dropout}.")


def _generating(own: Any | None, scheduler: DDPMScheduler) -> Any:
    """The pipeline's own scheduler with what options changed of the noise process; DDIM where it cannot follow."""
    if own is None:
        return deterministic(scheduler)
    changes = {"prediction_type": scheduler.config.prediction_type}
    if scheduler.config.rescale_betas_zero_snr:
        changes |= {"rescale_betas_zero_snr": True, "timestep_spacing": scheduler.config.timestep_spacing}
    if not set(changes) <= set(inspect.signature(type(own).__init__).parameters):
        return deterministic(scheduler)
    changed = type(own).from_config(own.config, **changes)
    return changed if _steps(changed) else deterministic(scheduler)


def _steps(scheduler: Any) -> bool:
    """Whether it takes a step: PNDM and others know the word of a prediction type and refuse it then."""
    trial, sample = copy.deepcopy(scheduler), torch.zeros(1, 4, 2, 2)
    with torch.random.fork_rng(devices=[]):
        try:
            trial.set_timesteps(4)
            time = trial.timesteps[0]
            trial.step(torch.zeros_like(sample), time, trial.scale_model_input(sample, time))
        except (NotImplementedError, ValueError):
            return False
    return True
