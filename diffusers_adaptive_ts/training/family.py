"""What differs between kinds of diffusion model: data, network and pipeline. The training loop knows only this."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin
from PIL import Image

from .model_configs import check_class, find_config
from .randomness import generator as counted_generator

if TYPE_CHECKING:
    from .data import ImageData

_MODEL_FLAG = "--model_config_name_or_path"


class Family:
    """One kind of model, with its options and data checked; a subclass per kind.

    Attributes:
        name: the word of `--model_family`.
        model_folder: the network's sub-folder in checkpoints and in the pipeline.
        model_class: the network's class.
        accepted_configs: classes that a given configuration may be of.
        config: the network's configuration; set by the subclass.
        clip_sample: whether clean samples lie in [-1, 1], so that sampling may clip to it; latents do not.
        default_steps: denoising steps that the pipeline takes unless told otherwise.
        images_per_call: how many images a pipeline makes at once at most; None leaves it to the caller.
        data: the data that training sees; `prepare_data` replaces it.
        notes: what the log should say about decisions made here.
    """

    name: str
    model_folder: str
    model_class: type[ModelMixin]
    accepted_configs: tuple[str, ...]
    config: dict[str, Any]
    clip_sample = True
    default_steps = 50
    images_per_call: int | None = None

    def __init__(self, args: argparse.Namespace, data: ImageData) -> None:
        self.args = args
        self.data = data
        self.notes: list[str] = []

    @classmethod
    def image_channels(cls, args: argparse.Namespace) -> int | None:
        """Channels of the images that the given model or autoencoder wants, or None when any will do."""
        raise NotImplementedError

    def build_model(self) -> ModelMixin:
        """The network with fresh weights from torch's global generator."""
        return self.model_class.from_config(self.config)

    def average_start(self, model: ModelMixin) -> ModelMixin:
        """The network whose weights an average starts from."""
        return model

    def save_model(self, model: ModelMixin, folder: Path) -> None:
        """Write the trained weights into a checkpoint."""
        model.save_pretrained(folder / self.model_folder)

    def load_model(self, model: ModelMixin, folder: Path) -> None:
        """Put a checkpoint's weights into the network."""
        model.load_state_dict(self.model_class.from_pretrained(folder, subfolder=self.model_folder).state_dict())

    def identity(self) -> dict[str, Any]:
        """What else must not change between a checkpoint and the run that resumes it."""
        return {}

    def build_scheduler(self) -> DDPMScheduler:
        """The noise process of the options; what the model predicts stands in its config and so in the pipeline's."""
        args = self.args
        if args.rescale_betas_zero_snr and args.prediction_type == "epsilon":
            raise ValueError(
                "--rescale_betas_zero_snr leaves no signal at the last timestep, where predicting the noise teaches "
                "nothing and generation divides by zero. Use --prediction_type v_prediction or sample with it."
            )
        try:
            return DDPMScheduler(
                num_train_timesteps=args.ddpm_num_steps,
                beta_schedule=args.ddpm_beta_schedule,
                prediction_type=args.prediction_type,
                clip_sample=self.clip_sample,
                rescale_betas_zero_snr=args.rescale_betas_zero_snr,
                # Generation must start at the timestep without signal, which "leading" skips.
                timestep_spacing="trailing" if args.rescale_betas_zero_snr else "leading",
            )
        except NotImplementedError:
            raise ValueError(
                f"Unknown --ddpm_beta_schedule {args.ddpm_beta_schedule!r}. Accepted: linear, scaled_linear, "
                "squaredcos_cap_v2, sigmoid, laplace."
            ) from None

    def prepare_data(self, data: ImageData, accelerator: Any) -> ImageData:
        """The data as the loop should read it; also becomes `self.data`."""
        self.data = data
        return data

    def clean_samples(
        self, batch: dict[str, torch.Tensor], generator: torch.Generator | None, device: torch.device
    ) -> torch.Tensor:
        """`(B, C, H, W)` what the diffusion starts from: pixels or latents. Without a generator nothing is drawn."""
        return batch["images"].to(device)

    def conditioning(
        self, batch: dict[str, torch.Tensor], generator: torch.Generator | None, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Keyword arguments of the network besides sample and timestep. Without a generator nothing is dropped."""
        return {}

    def pipeline(self, model: ModelMixin, scheduler: DDPMScheduler) -> DiffusionPipeline:
        """A plain diffusers pipeline around the network, with a scheduler of its own."""
        raise NotImplementedError

    def save_pipeline(self, model: ModelMixin, scheduler: DDPMScheduler, folder: str | Path) -> None:
        """Write what `DiffusionPipeline.from_pretrained(folder)` loads without this package."""
        self.pipeline(model, scheduler).save_pretrained(folder, safe_serialization=True)

    def generate(
        self, model: ModelMixin, scheduler: DDPMScheduler, count: int, *how: int, **call: Any
    ) -> list[Image.Image]:
        """`count` images through the plain pipeline, by all that `generate_arrays` takes."""
        arrays = (self.generate_arrays(model, scheduler, count, *how, **call) * 255).round().astype(np.uint8)
        return [Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array) for array in arrays]

    def generate_arrays(
        self,
        model: ModelMixin,
        scheduler: DDPMScheduler,
        count: int,
        seed: int,
        num_inference_steps: int,
        batch_size: int,
        **call: Any,
    ) -> np.ndarray:
        """`(count, H, W, C)` images in [0, 1]; image i depends on seed and i only, not on the batch it is made in.

        Args:
            num_inference_steps: steps of denoising, at most the T that the model was trained with.
            call: further arguments of the pipeline's call, the same for all images.
        """
        pipeline = self.pipeline(model, scheduler)
        pipeline.set_progress_bar_config(disable=True)
        steps = min(num_inference_steps, scheduler.config.num_train_timesteps)
        was_training = model.training
        model.eval()
        try:
            parts = []
            batch_size = min(batch_size, self.images_per_call or batch_size)
            for start in range(0, count, batch_size):
                indices = range(start, min(start + batch_size, count))
                parts.append(
                    pipeline(
                        generator=[counted_generator(seed, "image", index) for index in indices],
                        num_inference_steps=steps,
                        output_type="np",
                        **{**self.generation_arguments(indices), **call},
                    ).images
                )
            return np.concatenate(parts)
        finally:
            model.train(was_training)

    def generation_arguments(self, indices: Sequence[int]) -> dict[str, Any]:
        """What the pipeline's call needs in order to make the images with these numbers."""
        return {"batch_size": len(indices)}

    def how_to_generate(self, folder: str | Path) -> str:
        """Plain diffusers code that generates from the saved pipeline."""
        return (
            "from diffusers import DiffusionPipeline\n\n"
            f"pipeline = DiffusionPipeline.from_pretrained({str(folder)!r})\n"
            f"image = pipeline({self.shown_steps()}).images[0]\n"
            'image.save("image.png")\n'
        )

    def shown_steps(self) -> str:
        """The pipeline's own number of steps written out, or T where that is less and it would refuse its own."""
        return f"num_inference_steps={min(self.default_steps, self.args.ddpm_num_steps)}"

    def read_config(self) -> dict[str, Any] | None:
        """The network's configuration named on the command line, of an accepted class; None when none is named."""
        return read_model_config(self.args, self.model_folder, self.accepted_configs)

    def fix_config(self, config: dict[str, Any], size: int, channels: int, source: str) -> dict[str, Any]:
        """The configuration for samples of this size; channels that do not fit are an error.

        Args:
            source: where the channels come from, for the message.
        """
        config = {key: value for key, value in config.items() if not key.startswith("_")}
        for key in ("in_channels", "out_channels"):
            given = config.setdefault(key, channels)
            if given is not None and given != channels:
                raise ValueError(
                    f"{_MODEL_FLAG} {self.args.model_config_name_or_path}: {key} is {given}, but {source} has "
                    f"{channels} channel(s), and the network must return what it takes. Set {key} to {channels}."
                )
            config[key] = channels
        if config.get("sample_size") != size:
            if config.get("sample_size") is not None:
                self.notes.append(f"sample_size of the model set from {config['sample_size']} to {size}")
            config["sample_size"] = size
        return config

    def refuse_labels(self) -> None:
        """Their pipelines cannot pass labels on, so a model trained with them could not be used."""
        if self.args.label_dropout is not None:
            raise ValueError(
                f"--label_dropout {self.args.label_dropout} is for class labels, which --model_family {self.name} "
                "does not take. Use --model_family dit, or leave --label_dropout out."
            )
        if self.args.class_labels is not None:
            raise ValueError(
                f"--class_labels {self.args.class_labels} cannot be used with --model_family {self.name}: its "
                "pipeline has no way to ask for a class. Use --model_family dit, or leave --class_labels out."
            )


def read_model_config(args: argparse.Namespace, folder: str, accepted: tuple[str, ...]) -> dict[str, Any] | None:
    """The configuration that `--model_config_name_or_path` names, or None."""
    source = args.model_config_name_or_path
    if source is None:
        return None
    config, _ = find_config(source, ("", folder), _MODEL_FLAG, args.cache_dir)
    check_class(config, accepted, _MODEL_FLAG, source)
    return config


def deterministic(scheduler: DDPMScheduler) -> DDIMScheduler:
    """The DDIM scheduler of the same noise process and prediction type.

    LDMPipeline and DiTPipeline are written for it: they do not hand their generator to `scheduler.step`, so with
    DDPM's noise no seed would give the same image twice.
    """
    known = scheduler.config.beta_schedule in ("linear", "scaled_linear", "squaredcos_cap_v2")
    return DDIMScheduler.from_config(
        scheduler.config, **({} if known else {"trained_betas": scheduler.betas.tolist()})
    )
