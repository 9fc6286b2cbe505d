"""Samplers that do not learn: densities over timesteps, each a formula of one paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

from .base import TimestepSampler, register_sampler


class _TableSampler(TimestepSampler):
    """A density fixed when the sampler is built."""

    def __init__(self, scheduler: Any, options: dict[str, Any], **common: Any) -> None:
        super().__init__(scheduler, options=options, **common)
        table = torch.as_tensor(self._table(**options), dtype=torch.float64)
        self._density = table / table.sum()
        if self.importance_weighting:
            _reaches_all(self.name, self._density)

    def _table(self, **options: Any) -> np.ndarray | torch.Tensor:
        """`(T,)` unnormalised probabilities."""
        raise NotImplementedError

    def density(self) -> torch.Tensor:
        return self._density.clone()


def cells(cdf_at_edges: np.ndarray) -> np.ndarray:
    """Masses of neighbouring cells from the CDF at their edges, never below 0."""
    return np.clip(np.diff(cdf_at_edges), 0, None)


def edges(num_train_timesteps: int) -> np.ndarray:
    """`(T + 1,)` edges of the cells that `floor(u T)` maps to the timesteps."""
    return np.arange(num_train_timesteps + 1) / num_train_timesteps


def nearest_edges(values: np.ndarray) -> np.ndarray:
    """`(T + 1,)` edges of the cells nearest to each of `(T,)` increasing values."""
    return np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])


def _above_zero(sampler: str, **values: float) -> None:
    for option, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{sampler}: {option} must be above 0 and finite, got {value}.")


def _finite(sampler: str, **values: float) -> None:
    for option, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{sampler}: {option} must be finite, got {value}.")


def _reaches_all(sampler: str, density: torch.Tensor) -> None:
    if (density == 0).any():
        raise ValueError(
            f"{sampler}: {int((density == 0).sum())} timesteps are never drawn with these options, and no importance "
            "weight makes up for that. Widen the density, or leave importance_weighting off."
        )


@register_sampler("uniform")
class UniformSampler(_TableSampler):
    """Every timestep alike: DDPM (Ho et al. 2020, arXiv 2006.11239)."""

    def __init__(self, scheduler: Any, **common: Any) -> None:
        super().__init__(scheduler, {}, **common)

    def _table(self) -> torch.Tensor:
        return torch.ones(self.num_train_timesteps)


@register_sampler("stratified")
class StratifiedSampler(_TableSampler):
    """Uniform, with one draw in each equal part of the timesteps over the global batch (Kingma et al. 2021)."""

    def __init__(self, scheduler: Any, stratified: bool = True, **common: Any) -> None:
        if not stratified:
            raise ValueError("The stratified sampler with stratified=False is the sampler 'uniform'.")
        super().__init__(scheduler, {}, stratified=True, **common)

    def _table(self) -> torch.Tensor:
        return torch.ones(self.num_train_timesteps)


@register_sampler("logit_normal")
class LogitNormalSampler(_TableSampler):
    """`t = floor(sigmoid(N(mean, std)) T)` (Esser et al. 2024, arXiv 2403.03206); the papers' "Log-Normal"."""

    def __init__(self, scheduler: Any, mean: float = 0.0, std: float = 1.0, **common: Any) -> None:
        _finite("logit_normal", mean=mean)
        _above_zero("logit_normal", std=std)
        super().__init__(scheduler, {"mean": mean, "std": std}, **common)

    def _table(self, mean: float, std: float) -> np.ndarray:
        return logit_normal_table(self.num_train_timesteps, mean, std)


def logit_normal_table(num_train_timesteps: int, mean: float, std: float) -> np.ndarray:
    """`(T,)` mass of a logit-normal in each cell."""
    inner = edges(num_train_timesteps)[1:-1]
    at_edges = stats.norm.cdf(np.log(inner / (1 - inner)), mean, std)
    return cells(np.concatenate([[0.0], at_edges, [1.0]]))


@register_sampler("edm_lognormal")
class EDMLogNormalSampler(_TableSampler):
    """`ln sigma ~ N(mean, std)`, nearest timestep by `sigma_t = sqrt((1-abar)/abar)` (EDM, arXiv 2206.00364)."""

    def __init__(self, scheduler: Any, mean: float = -1.2, std: float = 1.2, **common: Any) -> None:
        _finite("edm_lognormal", mean=mean)
        _above_zero("edm_lognormal", std=std)
        super().__init__(scheduler, {"mean": mean, "std": std}, **common)

    def _table(self, mean: float, std: float) -> np.ndarray:
        sigma = np.exp(-self.objective.log_snr.numpy() / 2)
        at_edges = np.maximum(nearest_edges(sigma), 0.0)
        with np.errstate(divide="ignore"):
            return cells(stats.norm.cdf(np.log(at_edges), mean, std))


@register_sampler("laplace")
class LaplaceSampler(_TableSampler):
    """Laplace(mu, b) over the log-SNR, nearest timestep (Hang et al. 2024, arXiv 2407.03297)."""

    def __init__(self, scheduler: Any, mu: float = 0.0, b: float = 0.5, **common: Any) -> None:
        _finite("laplace", mu=mu)
        _above_zero("laplace", b=b)
        super().__init__(scheduler, {"mu": mu, "b": b}, **common)

    def _table(self, mu: float, b: float) -> np.ndarray:
        noise_level = -self.objective.log_snr.numpy()
        return cells(stats.laplace.cdf(nearest_edges(noise_level), -mu, b))


@register_sampler("beta")
class BetaSampler(_TableSampler):
    """`t = floor(Beta(a, b) T)`; a = 0.8, b = 1 is B-TTDM (Zheng et al., ECCV 2024)."""

    def __init__(self, scheduler: Any, a: float = 0.8, b: float = 1.0, **common: Any) -> None:
        _above_zero("beta", a=a, b=b)
        super().__init__(scheduler, {"a": a, "b": b}, **common)

    def _table(self, a: float, b: float) -> np.ndarray:
        return cells(stats.beta.cdf(edges(self.num_train_timesteps), a, b))


@register_sampler("mode")
class ModeSampler(_TableSampler):
    """`u' = 1 - u - s (cos^2(pi u / 2) - 1 + u)`, `t = floor(u' T)` (SD3's mode sampling, arXiv 2403.03206)."""

    def __init__(self, scheduler: Any, scale: float = 1.29, **common: Any) -> None:
        if not -1 <= scale <= 2 / (math.pi - 2):
            raise ValueError(f"mode: scale must lie in -1..{2 / (math.pi - 2):.4f}, got {scale}.")
        super().__init__(scheduler, {"scale": scale}, **common)

    def _table(self, scale: float) -> np.ndarray:
        u = np.linspace(0, 1, 400_001)
        mapped = 1 - u - scale * (np.cos(np.pi * u / 2) ** 2 - 1 + u)
        return cells(np.interp(edges(self.num_train_timesteps), mapped[::-1], u))


@register_sampler("timestep_bias")
class TimestepBiasSampler(_TableSampler):
    """A range of timesteps drawn `multiplier` times as often, as diffusers' SDXL script offers it.

    Args:
        strategy: `earlier` or `later` (the first or last `portion`), or `range` (from `begin` up to, not with, `end`).
    """

    def __init__(
        self,
        scheduler: Any,
        strategy: str = "later",
        multiplier: float = 2.0,
        portion: float = 0.25,
        begin: int | None = None,
        end: int | None = None,
        **common: Any,
    ) -> None:
        if strategy not in ("earlier", "later", "range"):
            raise ValueError(f"timestep_bias: strategy must be earlier, later or range, got {strategy!r}.")
        if strategy != "range" and (begin is not None or end is not None):
            raise ValueError(f"timestep_bias: begin and end go with strategy='range', not with {strategy!r}.")
        if not 0 < portion < 1:
            raise ValueError(f"timestep_bias: portion must lie between 0 and 1, got {portion}.")
        _above_zero("timestep_bias", multiplier=multiplier)
        options = {"strategy": strategy, "multiplier": multiplier, "portion": portion, "begin": begin, "end": end}
        super().__init__(scheduler, options, **common)

    def _table(
        self, strategy: str, multiplier: float, portion: float, begin: int | None, end: int | None
    ) -> torch.Tensor:
        total = self.num_train_timesteps
        share = int(portion * total)
        if strategy == "range":
            begin, end = 0 if begin is None else begin, total if end is None else end
            if not 0 <= begin < end <= total:
                raise ValueError(f"timestep_bias: 0 <= begin < end <= {total} is needed, got {begin} and {end}.")
        else:
            begin, end = (0, share) if strategy == "earlier" else (total - share, total)
        table = torch.ones(total)
        table[begin:end] *= multiplier
        return table


@register_sampler("histogram")
class HistogramSampler(_TableSampler):
    """A density of one's own: any number of non-negative values, equal bins over 0..T."""

    def __init__(self, scheduler: Any, histogram: Sequence[float] | None = None, **common: Any) -> None:
        try:
            values = np.asarray([] if histogram is None else histogram, dtype=np.float64)
        except (TypeError, ValueError):  # words, ragged lists
            values = np.empty(0)
        if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(
                "histogram: give histogram=[...], a list of finite values of at least 0, one per bin; "
                f"got {histogram!r}."
            )
        if values.sum() == 0:
            raise ValueError("histogram: at least one bin must be above 0.")
        super().__init__(scheduler, {"histogram": values.tolist()}, **common)

    def _table(self, histogram: list[float]) -> np.ndarray:
        if len(histogram) > self.num_train_timesteps:
            raise ValueError(
                f"histogram: {len(histogram)} bins are more than the {self.num_train_timesteps} timesteps."
            )
        at_bins = np.concatenate([[0.0], np.cumsum(histogram)])
        return cells(np.interp(edges(self.num_train_timesteps), np.linspace(0, 1, len(at_bins)), at_bins))


@register_sampler("curriculum")
class CurriculumSampler(TimestepSampler):
    """Logit-normal for the first `switch_step` optimizer steps, uniform from then on (Sun 2026, arXiv 2603.12517).

    Needs `observe`, which counts the steps.
    """

    def __init__(
        self, scheduler: Any, switch_step: int = 10_000, mean: float = 0.0, std: float = 1.0, **common: Any
    ) -> None:
        if switch_step < 0:
            raise ValueError(f"curriculum: switch_step must be at least 0, got {switch_step}.")
        _finite("curriculum", mean=mean)
        _above_zero("curriculum", std=std)
        super().__init__(scheduler, options={"switch_step": switch_step, "mean": mean, "std": std}, **common)
        self._switch_step = switch_step
        first = torch.from_numpy(logit_normal_table(self.num_train_timesteps, mean, std))
        self._first = first / first.sum()
        self._later = torch.full_like(first, 1 / len(first))
        if self.importance_weighting:
            _reaches_all("curriculum", self._first)

    def density(self) -> torch.Tensor:
        return (self._first if self.steps < self._switch_step else self._later).clone()
