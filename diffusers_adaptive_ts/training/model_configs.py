"""Configurations of networks: read from a file, a folder or the Hub, or the default for a size."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

CONFIG_NAME = "config.json"


def find_config(
    source: str, subfolders: Sequence[str], flag: str, cache_dir: str | None = None
) -> tuple[dict[str, Any], str]:
    """The `config.json` that `source` means, and the sub-folder it was found in (`""` is the root).

    Args:
        source: a JSON file, a folder, or the id of a Hub repository.
        subfolders: where to look, in this order; a pipeline keeps its networks in sub-folders.
        flag: the option that `source` was given with, for error messages.
    """
    if os.path.isfile(source):
        return _read(Path(source), flag), ""
    for subfolder in subfolders:
        path = _local_or_downloaded(source, subfolder, flag, cache_dir)
        if path is not None:
            return _read(path, flag), subfolder
    places = ", ".join(f"{name}/{CONFIG_NAME}" if name else CONFIG_NAME for name in subfolders)
    raise ValueError(f"{flag} {source} holds none of {places}. Give the folder that the model was saved in.")


def _local_or_downloaded(source: str, subfolder: str, flag: str, cache_dir: str | None) -> Path | None:
    if os.path.isdir(source):
        path = Path(source) / subfolder / CONFIG_NAME
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source, CONFIG_NAME, subfolder=subfolder or None, cache_dir=cache_dir))
    except EntryNotFoundError:
        return None
    except HFValidationError:
        raise ValueError(f"{flag} {source} is neither a file, a folder nor the id of a Hub repository.") from None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ValueError(
            f"{flag} {source} is no file or folder here, and the Hub did not answer for a repository of that name: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _read(path: Path, flag: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: {path} is not a readable JSON file ({error}).") from None
    if not isinstance(config, dict):
        raise ValueError(f"{flag}: {path} must hold a JSON object with the configuration of a network.")
    return config


def check_class(config: dict[str, Any], accepted: Sequence[str], flag: str, source: str) -> str:
    """The class that a configuration is of; a configuration without one is taken to be of the first accepted."""
    name = config.get("_class_name", accepted[0])
    if name not in accepted:
        raise ValueError(f"{flag} {source} is of class {name}; accepted here: {', '.join(accepted)}.")
    return name


def check_size(size: int, multiple: int, what: str) -> None:
    """Refuse a size that a network cannot halve often enough, and name the nearest ones that it can."""
    if size % multiple or size < multiple:
        below, above = size // multiple * multiple, (size // multiple + 1) * multiple
        nearest = " and ".join(str(value) for value in (below, above) if value > 0)
        raise ValueError(
            f"{what} takes sizes that are multiples of {multiple}; {size} is not. The nearest: {nearest}."
        )


def pixel_unet(size: int, channels: int) -> dict[str, Any]:
    """The default UNet2DModel for images of `size` pixels.

    From 64 pixels on it is the one of diffusers' own script. Between 16 and 63 it is the one of the DDPM paper for
    CIFAR-10, with as many levels as the size can be halved. Below 16 it is a small one that trains on a CPU.
    """
    if size >= 64:
        return _unet(size, channels, (128, 128, 256, 256, 512, 512), attention_level=4)
    if size >= 16:
        return _unet(size, channels, (128, 256, 256, 256), attention_level=1)
    return _unet(size, channels, (32, 64), attention_level=1)


def latent_unet(size: int, channels: int) -> dict[str, Any]:
    """The default UNet2DModel for latents: as for pixels, but wider where they are few, because each says more."""
    return pixel_unet(size, channels) if size >= 16 else _unet(size, channels, (96, 192), attention_level=1)


def _unet(size: int, channels: int, widths: Sequence[int], attention_level: int) -> dict[str, Any]:
    levels = len(widths)
    # Images below 64 pixels get fewer levels where their size cannot be halved that often; larger ones must fit.
    while size < 64 and levels > 2 and (size % 2 ** (levels - 1) or size < 2 ** (levels - 1)):
        levels -= 1
    down = ["AttnDownBlock2D" if level == attention_level else "DownBlock2D" for level in range(levels)]
    return {
        "sample_size": size,
        "in_channels": channels,
        "out_channels": channels,
        "layers_per_block": 2,
        "block_out_channels": tuple(widths[:levels]),
        "down_block_types": tuple(down),
        "up_block_types": tuple(name.replace("Down", "Up") for name in reversed(down)),
    }


def small_dit(size: int, channels: int) -> dict[str, Any]:
    """The default DiTTransformer2DModel: DiT-S/2 of the paper for latents from 32 on, half of it below."""
    large = size >= 32
    return {
        "sample_size": size,
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": 12 if large else 6,
        "num_attention_heads": 6 if large else 4,
        "attention_head_dim": 64 if large else 48,
        "patch_size": 2 if size >= 16 and size % 2 == 0 else 1,
    }
