"""Low-rank adapters of a frozen UNet: added for training, and kept in the file that diffusers' pipelines load."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.training_utils import cast_training_params
from safetensors import SafetensorError, safe_open

from ..probes import unwrapped
from ..registry import did_you_mean

FILE_NAME = "pytorch_lora_weights.safetensors"
# The projections of all attention layers, as in diffusers' LoRA scripts.
DEFAULT_TARGETS = ("to_k", "to_q", "to_v", "to_out.0")
_ADAPTER = "default"
_LAYERS = (torch.nn.Linear, torch.nn.Conv2d)


def add_lora(
    model: UNet2DConditionModel, rank: int, alpha: float | None = None, targets: Sequence[str] | None = None
) -> None:
    """Freeze the model and give its target layers `W + alpha / rank B A` (arXiv 2106.09685), of which B starts at 0.

    Args:
        rank: of B A; what is trained grows with it.
        alpha: strength of the adapter; None is `rank`, a factor of 1.
        targets: ends of the names of linear or convolution layers; None is `DEFAULT_TARGETS`.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("--lora_rank needs peft: pip install peft.") from error
    alpha = rank if alpha is None else alpha
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"--lora_rank must be a whole number of at least 1; got {rank}.")
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"--lora_alpha must be above 0; got {alpha}. Leave it out for alpha = rank.")
    targets = _checked_targets(model, DEFAULT_TARGETS if targets is None else targets)
    model.requires_grad_(False)  # today's peft does it too, but does not promise it
    model.add_adapter(
        LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets), _ADAPTER
    )
    # peft takes the layer's precision; in half an optimizer's small steps would be rounded away.
    cast_training_params(model, torch.float32)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's weights by their names in the file; they are the parameters' own memory, not copies."""
    from peft import get_peft_model_state_dict

    bare = unwrapped(model)
    if _ADAPTER not in getattr(bare, "peft_config", {}):
        raise ValueError(f"This {type(bare).__name__} has no LoRA adapter; call add_lora first.")
    weights = get_peft_model_state_dict(bare, adapter_name=_ADAPTER)
    # diffusers' own conversion renames attention layers only, and its loader cannot read a mixture.
    return {
        f"unet.{name.replace('.lora_A.', '.lora.down.').replace('.lora_B.', '.lora.up.')}": weight
        for name, weight in weights.items()
    }


def save_lora(model: torch.nn.Module, folder: str | Path) -> None:
    """Write the file that `StableDiffusionPipeline.load_lora_weights(folder)` takes, alpha included."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    weights = {name.removeprefix("unet."): weight.contiguous() for name, weight in weights_of(model).items()}
    StableDiffusionLoraLoaderMixin.save_lora_weights(
        folder, unet_lora_layers=weights, unet_lora_adapter_metadata=_facts(model), safe_serialization=True
    )


def load_lora(model: torch.nn.Module, folder: str | Path) -> None:
    """Put saved weights into the adapter that `add_lora` made, in place: an optimizer keeps its parameters."""
    file = Path(folder) / FILE_NAME
    weights = weights_of(model)
    try:
        with safe_open(file, framework="pt") as reader:
            saved = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
            metadata = reader.metadata() or {}
    except FileNotFoundError as error:
        raise ValueError(f"There is no {FILE_NAME} in {folder}. Was it written by a run with --lora_rank?") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Use another checkpoint.") from error
    facts = _facts(model)
    # Without metadata, as in files of diffusers' own script, alpha is the rank.
    written = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    alpha = written.get("unet.lora_alpha", facts["r"])
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if {name: tuple(weight.shape) for name, weight in saved.items()} != shapes or alpha != facts["lora_alpha"]:
        wanted = _told(weights, facts["lora_alpha"])
        raise ValueError(
            f"{file} holds another adapter ({_told(saved, alpha)}) than this run's ({wanted}). Give the --lora_rank, "
            "--lora_alpha, --lora_targets and the base model it was trained with."
        )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])


def _facts(model: torch.nn.Module) -> dict[str, Any]:
    """What a loader needs beside the weights.

    Not all of peft's config: another version of peft refuses a field that it does not know.
    """
    config = unwrapped(model).peft_config[_ADAPTER]
    return {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": sorted(config.target_modules)}


def _told(weights: dict[str, torch.Tensor], alpha: float) -> str:
    ranks = sorted({len(weight) for name, weight in weights.items() if name.endswith(".lora.down.weight")})
    targets = sorted({_short(name.split(".lora.")[0]) for name in weights})
    return f"rank {', '.join(map(str, ranks))}, alpha {alpha:g}, {len(weights)} weights in {', '.join(targets)}"


def _checked_targets(model: torch.nn.Module, targets: Sequence[str]) -> list[str]:
    """The targets once each; every one must name layers that can be adapted, and nothing else."""
    targets = list(dict.fromkeys([targets] if isinstance(targets, str) else targets))
    modules = dict(model.named_modules())
    layers = sorted({_short(name) for name, module in modules.items() if isinstance(module, _LAYERS)})
    if not targets:
        raise ValueError(f"--lora_targets names no layer. Layers that can be adapted: {', '.join(layers)}.")
    for target in targets:
        named = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if not named or not all(isinstance(module, _LAYERS) for module in named):
            problem = "are not linear or convolution layers" if named else "match nothing in the model"
            raise ValueError(
                f"--lora_targets {target}: these {problem}.{did_you_mean(target, layers)} Layers that can be adapted: "
                f"{', '.join(layers)}; or the end of a longer name, such as attn2.to_q."
            )
    return targets


def _short(name: str) -> str:
    """The last part of a module's name, with the one before it where the last is only a number."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
