"""SpeeD (Wang et al. 2024, arXiv 2405.17403): sample the convergence area less, in pairs, with its own weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..objective import DiffusionObjective
from .base import TimestepSampler, register_sampler
from .draws import draw_from_table

_VERSIONS = ("v1", "v2")


def convergence_start(objective: DiffusionObjective, threshold: float = 1e-4) -> int:
    """`tau`: one past the first timestep whose noise level `sqrt(1 - abar)` hardly grows any more.

    A slow start is not convergence: the search begins where the noise level grows fastest.
    """
    total = objective.num_train_timesteps
    growth = np.gradient((1 - objective.alphas_cumprod).sqrt().numpy())
    slow = growth < threshold * 1000 / total
    slow[: growth.argmax()] = False
    below = np.flatnonzero(slow)
    if len(below) == 0 or below[0] + 1 >= total:
        raise ValueError(
            f"speed: sqrt(1 - abar) grows by at least {threshold * 1000 / total:g} per timestep over the whole "
            "schedule, so there is no convergence area to cut. Give tau=..., a larger threshold=..., or version='v2'."
        )
    return int(below[0]) + 1


@register_sampler("speed")
class SpeeDSampler(TimestepSampler):
    """Timesteps before `tau` are drawn `k` times as often as those after it; half of a batch are duals of the rest.

    Args:
        version: `v1` finds `tau` from the schedule and weights by `speed_v1`; `v2` puts it at 0.7 T with `speed_v2`.
        tau: where the convergence area begins; `None` is the version's own.
        k: how many times as often the timesteps before `tau` are drawn.
        duals: draw `n // 2 + 1` timesteps and fill up with `tau - t` (before tau) or `t - tau` (after it).
        threshold: of v1's rule, per timestep of 1,000.
    """

    def __init__(
        self,
        scheduler: Any,
        version: str = "v1",
        tau: int | None = None,
        k: float = 5.0,
        duals: bool = True,
        threshold: float = 1e-4,
        weighting: Any = None,
        weighting_options: dict[str, Any] | None = None,
        **common: Any,
    ) -> None:
        if version not in _VERSIONS:
            raise ValueError(f"speed: version must be one of {', '.join(_VERSIONS)}, got {version!r}.")
        if not k > 0 or not threshold > 0:
            raise ValueError(f"speed: k and threshold must be above 0, got k={k}, threshold={threshold}.")
        objective = DiffusionObjective.from_scheduler(scheduler)
        total = objective.num_train_timesteps
        options = {"version": version, "tau": tau, "k": k, "duals": duals, "threshold": threshold}
        if tau is None:
            tau = convergence_start(objective, threshold) if version == "v1" else round(0.7 * total)
        if not 0 < tau < total:
            raise ValueError(f"speed: tau must lie in 1..{total - 1}, got {tau}.")
        if weighting is None:
            weighting = f"speed_{version}"
            if version == "v2":
                weighting_options = {"tau": tau, **(weighting_options or {})}
        super().__init__(
            scheduler, options=options, weighting=weighting, weighting_options=weighting_options, **common
        )
        self.tau = tau
        self._duals = duals
        table = torch.where(torch.arange(total) < tau, k, 1.0).double()
        self._drawn = table / table.sum()
        self._dual_of = torch.cat([tau - torch.arange(tau), torch.arange(total - tau)])
        self._last_batch = torch.zeros((), dtype=torch.int64)
        if duals and self.importance_weighting:
            raise ValueError("speed: importance_weighting needs duals=False, whose draws follow one known density.")

    def density(self) -> torch.Tensor:
        """`(T,)` share of each timestep in a batch as large as the last one, duals included."""
        if not self._duals:
            return self._drawn.clone()
        of_duals = torch.zeros_like(self._drawn).index_add_(0, self._dual_of, self._drawn)
        size = int(self._last_batch)
        share = (size // 2 + 1) / size if size else 0.5
        return share * self._drawn + (1 - share) * of_duals

    def _draw(self, x0: torch.Tensor) -> torch.Tensor:
        if not self._duals:
            return draw_from_table(self._drawn, self.draws.uniforms(len(x0), self.stratified))
        size = len(x0)
        self._last_batch.fill_(size)
        drawn = draw_from_table(self._drawn, self.draws.uniforms(size // 2 + 1, self.stratified))
        both = torch.cat([drawn, self._dual_of[drawn]])[:size]
        return both[torch.randperm(size, generator=self.draws.own)]

    def _own_state(self) -> dict[str, torch.Tensor]:
        return {"last_batch": self._last_batch}
