"""Work with the averaged weights for a while, without a second copy of either set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers.training_utils import EMAModel


@contextmanager
def averaged_weights(model: torch.nn.Module, ema: EMAModel | None) -> Iterator[None]:
    """Inside the block the model has the EMA's weights; with `ema=None` its own.

    The storages change places, so this costs no memory; EMA weights kept on another device are moved for the time.
    Where the average is kept in another precision, it would come back rounded: then the model's own weights wait
    beside a rounded copy of it.
    """
    pairs = [] if ema is None else _pairs(model, ema)
    waiting: list[torch.Tensor | None] = []
    try:
        for parameter, average in pairs:
            own, other = parameter.data, average.data
            waiting.append(None if own.dtype == other.dtype else own)
            parameter.data = other.to(own.device, own.dtype)
            if own.dtype == other.dtype:
                average.data = own.to(other.device)
        yield
    finally:
        # Only as many as were exchanged: moving one may have failed.
        for (parameter, average), own in zip(pairs, waiting, strict=False):
            inside, outside = parameter.data, average.data
            parameter.data = outside.to(inside.device) if own is None else own
            if own is None:
                average.data = inside.to(outside.device)


def _pairs(model: torch.nn.Module, ema: EMAModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter with its average, which may be kept of those that are trained alone."""
    averages = getattr(ema, "shadow_params", None)
    if averages is None:
        raise ValueError(f"ema must be a diffusers.training_utils.EMAModel, got {type(ema).__name__}.")
    parameters = list(model.parameters())
    if len(averages) != len(parameters):
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if [average.shape for average in averages] != [parameter.shape for parameter in parameters]:
        raise ValueError(
            f"The EMA holds {len(averages)} tensors that are not the averages of the model's parameters, neither of "
            "all nor of the trained ones. Give the EMAModel that was built from this model."
        )
    return list(zip(parameters, averages, strict=True))
