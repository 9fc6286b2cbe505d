"""A look at the model that leaves no trace: losses at chosen timesteps; weights, modes and randomness stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..objective import DiffusionObjective
from ..ranks import map_tensors


@dataclass
class ProbeBatch:
    """Clean samples and what the model is conditioned on.

    Args:
        x0: `(B, ...)`.
        conditioning: keyword arguments of the model; a tensor whose first dimension is B belongs to the samples.
    """

    x0: torch.Tensor
    conditioning: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.x0)

    def select(self, index: torch.Tensor) -> ProbeBatch:
        """The samples at `index` `(n,)`, with their conditioning, also inside dicts."""
        size, index = len(self), index.to(self.x0.device)

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[index.to(tensor.device)] if tensor.ndim > 0 and len(tensor) == size else tensor

        return ProbeBatch(self.x0[index], map_tensors(pick, self.conditioning))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The network without DDP (whose hooks a probe must not fire) and torch.compile (a probe has other shapes)."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


@contextmanager
def undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[torch.nn.Module]:
    """The model in eval mode, with every module's own mode and torch's generators put back afterwards."""
    model = unwrapped(model)
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    # Inside the user's autocast, weights cast before the step would be taken for the ones after it.
    torch.clear_autocast_cache()
    with torch.random.fork_rng(devices=devices):
        for module, _ in modes:
            module.training = False  # not eval(): some adapters merge their weights when it is called
        try:
            yield model
        finally:
            for module, mode in modes:
                module.training = mode
            torch.clear_autocast_cache()


def predict(model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, conditioning: dict[str, Any]):
    """Call a diffusers model, or any `model(x_t, t, **conditioning)`; of twice the channels the first half counts."""
    output = model(noisy, timesteps, **conditioning)
    if not isinstance(output, torch.Tensor):
        output = output.sample if hasattr(output, "sample") else output[0]
    return output[:, : noisy.shape[1]] if output.shape[1] == 2 * noisy.shape[1] else output


def noise_like(x0: torch.Tensor, seed: int) -> torch.Tensor:
    """Standard normal noise that `seed` alone decides, so that it can be made again instead of kept."""
    return torch.randn(x0.shape, generator=torch.Generator().manual_seed(seed)).to(x0)


@torch.no_grad()
def squared_errors(
    model: torch.nn.Module,
    objective: DiffusionObjective,
    batch: ProbeBatch,
    noise: torch.Tensor,
    index: torch.Tensor,
    timesteps: torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:
    """`(n,)` errors of samples `index` at `timesteps`, on the CPU in float64; `ceil(n / chunk_size)` forwards.

    The model must be `undisturbed`. Noise belongs to the sample, so all timesteps of one sample share it.
    """
    errors = []
    for rows, times in zip(index.split(chunk_size), timesteps.split(chunk_size), strict=True):
        part = batch.select(rows)
        eps, times = noise[rows.to(noise.device)], times.to(part.x0.device)
        pred = predict(model, objective.add_noise(part.x0, eps, times), times, part.conditioning)
        errors.append(objective.squared_error(pred, part.x0, eps, times))
    return torch.cat(errors).double().cpu()
