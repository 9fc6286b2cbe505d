"""Work with the averaged weights for a while, without copying either set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers.training_utils import EMAModel


@contextmanager
def averaged_weights(model: torch.nn.Module, ema: EMAModel | None) -> Iterator[None]:
    """Inside the block the model has the EMA's weights; with `ema=None` its own.

    The storages change places, so this costs no memory; EMA weights kept on another device are moved for the time.
    """
    if ema is None:
        yield
        return
    _exchange(model, ema)
    try:
        yield
    finally:
        _exchange(model, ema)


def _exchange(model: torch.nn.Module, ema: EMAModel) -> None:
    for parameter, average in zip(model.parameters(), ema.shadow_params, strict=True):
        own, other = parameter.data, average.data
        parameter.data = other.to(own.device, own.dtype)
        average.data = own.to(other.device, other.dtype)
