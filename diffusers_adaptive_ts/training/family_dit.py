"""Class-conditional diffusion in latents with a DiTTransformer2DModel, saved as DiTPipeline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDPMScheduler, DiTPipeline, DiTTransformer2DModel
from torch import nn

from .family import deterministic
from .family_latent import LatentFamily
from .model_configs import check_size, small_dit

if TYPE_CHECKING:
    from .data import ImageData

# DiTPipeline asks for this class when it wants no class; so there can be no more classes than this.
NULL_CLASS = 1000
_LABEL_DROPOUT = 0.1


class DiTFamily(LatentFamily):
    """A diffusion transformer (Peebles and Xie, 2023) with classifier-free guidance."""

    name = "dit"
    model_folder = "transformer"
    model_class = DiTTransformer2DModel
    # Published DiTs still carry the name of the class that this one was split off from.
    accepted_configs = ("DiTTransformer2DModel", "Transformer2DModel")
    autoencoders = ("AutoencoderKL",)

    def __init__(self, args: argparse.Namespace, data: ImageData) -> None:
        super().__init__(args, data)
        self.labels = _check_labels(args, data)
        self.load_space()
        self.config = self.latent_config(small_dit)
        patch = self.config.get("patch_size", 2)
        check_size(self.latent_size, patch, f"{self.origin_of_size()}; patch_size {patch}")
        if self.config.setdefault("num_embeds_ada_norm", NULL_CLASS) != NULL_CLASS:
            raise ValueError(
                f"The model's num_embeds_ada_norm is {self.config['num_embeds_ada_norm']}; DiTPipeline can only guide "
                f"models with {NULL_CLASS}, which leaves room for any number of classes up to that."
            )
        # Without dropped labels the null class stays untrained, and guidance away from it would only do harm.
        self.guidance_scale = 4.0 if args.label_dropout > 0 else 1.0

    def build_model(self) -> DiTTransformer2DModel:
        model = super().build_model()
        initialize(model)
        for block in model.transformer_blocks:
            # Each block would drop labels on its own, so that one sample is with and without its class at once.
            block.norm1.emb.class_embedder.dropout_prob = 0.0
        return model

    def conditioning(
        self, batch: dict[str, torch.Tensor], generator: torch.Generator | None, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The labels, each replaced by the null class with probability `--label_dropout`."""
        labels = batch["labels"]
        if generator is not None:
            dropped = torch.rand(len(labels), generator=generator) < self.args.label_dropout
            labels = labels.masked_fill(dropped, NULL_CLASS)
        return {"class_labels": labels.to(device)}

    def pipeline(self, model: DiTTransformer2DModel, scheduler: DDPMScheduler) -> DiTPipeline:
        autoencoder = self.space.autoencoder.to(model.device)
        pipeline = DiTPipeline(
            transformer=model, vae=autoencoder, scheduler=deterministic(scheduler), id2label=self.labels
        )
        # The pipeline only saves what stands in its config, and JSON keys are strings.
        pipeline.register_to_config(id2label={str(key): label for key, label in self.labels.items()})
        return pipeline

    def generation_arguments(self, indices: Sequence[int]) -> dict[str, Any]:
        """The classes in turn."""
        classes = sorted(self.labels)
        return {
            "class_labels": [classes[index % len(classes)] for index in indices],
            "guidance_scale": self.guidance_scale,
        }

    def how_to_generate(self, folder: str | Path) -> str:
        call = f"class_labels=[{min(self.labels)}], guidance_scale={self.guidance_scale}, {self.shown_steps()}"
        return (
            "from diffusers import DiffusionPipeline\n\n"
            f"pipeline = DiffusionPipeline.from_pretrained({str(folder)!r})\n"
            "print(pipeline.labels)  # names of the classes and their numbers\n"
            f"image = pipeline({call}).images[0]\n"
            'image.save("image.png")\n'
        )


def _check_labels(args: argparse.Namespace, data: ImageData) -> dict[int, str]:
    if not data.id2label:
        raise ValueError(
            "--model_family dit trains on classes: give --class_labels with the name of the column that holds them. "
            "For data without classes use --model_family ldm."
        )
    if args.label_dropout is None:
        args.label_dropout = _LABEL_DROPOUT
    if not 0 <= args.label_dropout < 1:
        raise ValueError(f"--label_dropout must be at least 0 and below 1, got {args.label_dropout}.")
    labels = {int(key): str(label) for key, label in data.id2label.items()}
    if len(labels) > NULL_CLASS or not all(0 <= key < NULL_CLASS for key in labels):
        raise ValueError(
            f"{data.name} has {len(labels)} classes numbered {min(labels)} to {max(labels)}; DiTPipeline takes at "
            f"most {NULL_CLASS}, numbered from 0. Merge classes, or use --model_family ldm without them."
        )
    return labels


def initialize(model: DiTTransformer2DModel) -> None:
    """The first weights of the DiT paper (section 3.2, adaLN-Zero), which diffusers leaves to the trainer.

    Every block starts as the identity and the prediction at zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    projection = model.pos_embed.proj
    nn.init.xavier_uniform_(projection.weight.view(projection.out_channels, -1))
    nn.init.zeros_(projection.bias)
    for block in model.transformer_blocks:
        embedding = block.norm1.emb
        nn.init.normal_(embedding.class_embedder.embedding_table.weight, std=0.02)
        nn.init.normal_(embedding.timestep_embedder.linear_1.weight, std=0.02)
        nn.init.normal_(embedding.timestep_embedder.linear_2.weight, std=0.02)
        nn.init.zeros_(block.norm1.linear.weight)
    for layer in (model.proj_out_1, model.proj_out_2):
        nn.init.zeros_(layer.weight)
