"""Sampling in proportion to the variance of stochastic gradients: the paper's Table 4 baseline."""

from __future__ import annotations

from typing import Any

import torch

from .. import ranks
from ..probes.forward import ProbeBatch, noise_like, predict, undisturbed
from .base import TimestepSampler, register_sampler
from .bins import check_share, time_bins, with_floor


def two_microbatch_variance(first: list[torch.Tensor], second: list[torch.Tensor], size: int) -> float:
    """Trace of the covariance of one sample's gradient, unbiased, from two means over `size` samples each.

    `E |g1 - g2|^2 = 2 tr(Sigma) / size`.
    """
    return 0.5 * size * sum(float((a - b).double().pow(2).sum()) for a, b in zip(first, second, strict=True))


@register_sampler("gradient_variance")
class GradientVarianceSampler(TimestepSampler):
    """`p` of a time bin in proportion to the running trace of its gradient covariance.

    The paper shows that it does badly, because timesteps are not independent; it is here to be compared with. A
    measured step costs two forward and backward passes of `microbatch_size` samples and, for that moment, two
    gradients' worth of memory. Gradients of a sharded model (FSDP, ZeRO-3) cannot be taken this way.

    Args:
        num_bins: time bins; one is measured at a time, in turn, and the density is uniform until all have been.
        measure_every: optimizer steps between two measurements.
        microbatch_size: samples in each of the two gradients; at most half of the batch is used.
        decay: of the running mean of each bin.
        floor: share of uniform mixed in.
    """

    def __init__(
        self,
        scheduler: Any,
        num_bins: int = 20,
        measure_every: int = 10,
        microbatch_size: int = 8,
        decay: float = 0.9,
        floor: float = 0.05,
        **common: Any,
    ) -> None:
        check_share("gradient_variance", decay=decay, floor=floor)
        if min(num_bins, measure_every, microbatch_size) < 1:
            raise ValueError(
                "gradient_variance: num_bins, measure_every and microbatch_size must be at least 1; "
                f"got {num_bins}, {measure_every} and {microbatch_size}."
            )
        options = {
            "num_bins": num_bins,
            "measure_every": measure_every,
            "microbatch_size": microbatch_size,
            "decay": decay,
            "floor": floor,
        }
        super().__init__(scheduler, options=options, **common)
        self._bins = time_bins(self.num_train_timesteps, num_bins)
        self._variance = torch.zeros(int(self._bins.max()) + 1, dtype=torch.float64)
        self._measured = torch.zeros((), dtype=torch.int64)
        self._waiting = False

    def expected_overhead(self, batch_size: int) -> float:
        used = 2 * min(self.options["microbatch_size"], batch_size // 2)
        return used / batch_size / self.options["measure_every"]

    def density(self) -> torch.Tensor:
        if self._measured < len(self._variance) or self._variance.sum() == 0:
            return torch.full((self.num_train_timesteps,), 1 / self.num_train_timesteps, dtype=torch.float64)
        return with_floor(self._variance[self._bins], self.options["floor"])

    def _before_step(self, model: torch.nn.Module, x0: torch.Tensor, ema: Any, conditioning: dict[str, Any]) -> None:
        if self.steps % self.options["measure_every"] or self._waiting:
            return
        size = min(self.options["microbatch_size"], len(x0) // 2)
        if size == 0:
            raise ValueError("gradient_variance needs batches of at least 2 samples, one for each of two gradients.")
        self._waiting = True
        current = int(self._measured) % len(self._variance)
        inside = torch.nonzero(self._bins == current).flatten()
        timesteps = inside[torch.randint(len(inside), (2 * size,), generator=self.draws.own)]
        seed = int(torch.randint(2**31, (), generator=self.draws.own))
        batch = ProbeBatch(x0, conditioning).select(torch.arange(2 * size))
        first, second = self._gradients(model, batch, timesteps.to(x0.device), seed)
        variance = float(ranks.mean(torch.tensor(two_microbatch_variance(first, second, size), device=x0.device)))
        if variance != variance or variance == float("inf"):
            self._drop_event("a gradient is NaN or infinite")
            return
        decay = self.options["decay"] if self._measured >= len(self._variance) else 0.0
        self._variance[current] = decay * self._variance[current] + (1 - decay) * variance
        self._measured += 1

    def _gradients(
        self, model: torch.nn.Module, batch: ProbeBatch, timesteps: torch.Tensor, seed: int
    ) -> list[list[torch.Tensor]]:
        noise, halves = noise_like(batch.x0, seed), torch.arange(len(batch)).chunk(2)
        gradients = []
        with undisturbed(model, batch.x0.device) as network, torch.enable_grad():
            trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
            for rows in halves:
                part, eps, times = batch.select(rows), noise[rows], timesteps[rows]
                pred = predict(network, self.objective.add_noise(part.x0, eps, times), times, part.conditioning)
                loss = self.objective.squared_error(pred, part.x0, eps, times).mean()
                taken = torch.autograd.grad(loss, trained, allow_unused=True)
                gradients.append([gradient for gradient in taken if gradient is not None])
        return gradients

    def _after_step(self, model: torch.nn.Module, ema: Any) -> None:
        self._waiting = False

    def _abandon(self) -> None:
        self._waiting = False

    def _own_state(self) -> dict[str, torch.Tensor]:
        return {"variance": self._variance, "measured": self._measured}
