"""A validation loss that does not jump: held-out samples, fixed noise, stratified timesteps, the same in every run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from .. import ranks
from ..objective import DiffusionObjective
from ..probes import ProbeBatch, noise_like, squared_errors, undisturbed

# Fixed, so that numbers compare between runs whatever their seed.
_NOISE_SEED = 20_411


@dataclass
class StableValidation:
    """Losses of a model at timesteps that cover the whole schedule evenly.

    Every held-out sample is evaluated at `draws` timesteps with noise that only its row and the draw decide. The
    numbers depend on the samples and the model, not on sampler, seed, batch size or the number of ranks.

    Args:
        objective: of the scheduler trained with.
        x0: `(N, ...)` held-out clean samples (latents: the posterior's mean).
        conditioning: of those samples, without dropout.
        draws: timesteps per sample.
        num_ranges: equal parts of the timesteps that are reported one by one.
        batch_size: samples per forward.
    """

    objective: DiffusionObjective
    x0: torch.Tensor
    conditioning: dict[str, Any] = field(default_factory=dict)
    draws: int = 4
    num_ranges: int = 5
    batch_size: int = 64

    def __post_init__(self) -> None:
        if len(self.x0) == 0:
            raise ValueError("There are no held-out samples to validate on.")

    def timesteps(self) -> torch.Tensor:
        """`(draws, N)` the middle of each of `draws * N` equal strata, dealt out to the samples."""
        total = self.draws * len(self.x0)
        strata = torch.randperm(total, generator=torch.Generator().manual_seed(_NOISE_SEED))
        middles = ((strata + 0.5) * self.objective.num_train_timesteps / total).long()
        return middles.reshape(self.draws, len(self.x0))

    def measure(self, model: torch.nn.Module, device: torch.device | None = None) -> dict[str, Any]:
        """`simple`: mean squared error on the network's target; `vlb_bits`: the bound's sum over t, bits per pixel.

        The bound is given without its prior and decoder terms, which training does not change. `ranges` splits both:
        the means of `simple` are per range, the terms of `vlb_bits` add up to the whole.
        """
        timesteps = self.timesteps()
        errors = torch.stack([self._errors(model, draw, row, device) for draw, row in enumerate(timesteps)])
        simple, times = errors.flatten(), timesteps.flatten()
        total = self.objective.num_train_timesteps
        bits = self.objective.vlb_bits(simple, times).double() * total / len(times)
        edges = [index * total // self.num_ranges for index in range(self.num_ranges + 1)]
        ranges = []
        for low, high in pairwise(edges):
            inside = (times >= low) & (times < high)
            if inside.any():
                mean = simple[inside].mean().item()
                ranges.append({"from": low, "to": high - 1, "simple": mean, "vlb_bits": bits[inside].sum().item()})
        return {"simple": simple.mean().item(), "vlb_bits": bits.sum().item(), "ranges": ranges}

    def _errors(
        self, model: torch.nn.Module, draw: int, timesteps: torch.Tensor, device: torch.device | None
    ) -> torch.Tensor:
        """`(N,)` errors of one draw; every rank evaluates its share, padded so that all make as many forwards."""
        count = len(self.x0)
        share = math.ceil(count / ranks.world_size())
        mine = (torch.arange(share) + ranks.rank() * share).clamp(max=count - 1)
        device = device or self.x0.device
        batch = ProbeBatch(self.x0, self.conditioning).select(mine)
        batch = ProbeBatch(batch.x0.to(device), ranks.map_tensors(lambda t: t.to(device), batch.conditioning))
        noise = noise_like(self.x0, _NOISE_SEED + 1 + draw)[mine].to(device)
        with undisturbed(model, device) as network:
            errors = squared_errors(
                network, self.objective, batch, noise, torch.arange(share), timesteps[mine], self.batch_size
            )
        return ranks.gather(errors)[:count]
