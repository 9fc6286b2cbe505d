"""Train where the model is still learning: the fall of the loss at each noise level, seen on a fixed probe set."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy import stats

from ..averaged import averaged_weights
from ..probes import ProbeBatch, unwrapped
from ..probes.probe_set import ProbeSet
from ..weightings import make_weighting
from .base import TimestepSampler, register_sampler
from .bins import check_share, log_snr_bins, spread_over_timesteps, with_floor

# What progress is measured in: names for what users want, beside every registered weighting.
OBJECTIVES = {"quality": "p2", "likelihood": "vlb"}
# A look may cost this many forwards of the training batch per `update_every` steps; larger looks come less often.
_MOST_FORWARDS = 3.5
_PROBE = "probe."
# In place of a probe's loss before the first look; losses are never below 0.
_UNSEEN = -1.0


@register_sampler("learning_progress")
class LearningProgressSampler(TimestepSampler):
    """`p_t ~ progress_t^temperature`: timesteps are drawn by how fast their weighted loss falls.

    Every `update_every` steps the model (its average, where `observe` is given one) is evaluated once on probes whose
    samples, noise and timesteps never change, a few in each bin of log-SNR. A bin's progress is the fall of its
    weighted loss since the last look, averaged over looks and over neighbouring bins by how certain each is. What
    counts is the expected positive part `E[max(progress, 0)]` given its error bar, so that a bin whose progress is
    merely unseen is not starved.

    Args:
        scheduler: the `DDPMScheduler` to wrap.
        objective: what progress is measured in: `quality` (P2 weights, which favour what the eye sees), `likelihood`
            (the variational bound), or the name of any weighting. The training loss itself stays as it is.
        temperature: exponent on the progress; 0 is uniform, 1 follows it in proportion.
        floor: share of draws that are uniform in any case.
        num_bins: bins of equal width in log-SNR.
        probes_per_bin: samples in each bin.
        update_every: optimizer steps between two looks; more where the probes are many for the batch.
        window: share of the run so far whose looks count; progress slows down as a run goes on, so that a window of
            fixed length would be all noise late, or all memory early.
        smoothing: width, in bins, of the average over neighbours.
        common: `weighting`, `stratified`, `seed`, ... of every sampler.

    Example:
        >>> from diffusers import DDPMScheduler
        >>> sampler = LearningProgressSampler(DDPMScheduler(), seed=0)
        >>> sampler.sample(torch.zeros(4, 3, 32, 32)).shape
        torch.Size([4])
        >>> round(sampler.expected_overhead(batch_size=64), 3)  # 160 probes in 40 steps of 3 forwards
        0.021
    """

    def __init__(
        self,
        scheduler: Any,
        objective: str = "quality",
        temperature: float = 0.5,
        floor: float = 0.2,
        num_bins: int = 40,
        probes_per_bin: int = 4,
        update_every: int = 40,
        window: float = 0.3,
        smoothing: float = 1.5,
        **common: Any,
    ) -> None:
        check_share("learning_progress", floor=floor, window=window)
        if temperature < 0 or smoothing < 0 or min(num_bins, probes_per_bin) < 2 or update_every < 1:
            raise ValueError(
                "learning_progress: temperature and smoothing must be at least 0, num_bins and probes_per_bin at "
                f"least 2, update_every at least 1; got {temperature}, {smoothing}, {num_bins}, {probes_per_bin} and "
                f"{update_every}."
            )
        options = {
            "objective": objective,
            "temperature": temperature,
            "floor": floor,
            "num_bins": num_bins,
            "probes_per_bin": probes_per_bin,
            "update_every": update_every,
            "window": window,
            "smoothing": smoothing,
        }
        super().__init__(scheduler, options=options, **common)
        self._bins = log_snr_bins(self.objective, num_bins)
        count = int(self._bins.max()) + 1
        self._weights = make_weighting(OBJECTIVES.get(objective, objective), self.objective).table()
        self._probes = ProbeSet(self.objective, _probe_timesteps(self._bins, probes_per_bin))
        self._last = torch.full((len(self._probes.timesteps),), _UNSEEN, dtype=torch.float64)
        # Of each bin: running mean of its progress, of that mean's variance, and how much memory is behind them.
        self._progress = torch.zeros(count, dtype=torch.float64)
        self._variance = torch.zeros(count, dtype=torch.float64)
        self._looks = torch.zeros((), dtype=torch.int64)
        self._current = torch.full((self.num_train_timesteps,), 1 / self.num_train_timesteps, dtype=torch.float64)
        self._chunk = 0

    def density(self) -> torch.Tensor:
        return self._current.clone()

    def values(self) -> torch.Tensor:
        """`(T,)` expected positive progress of every timestep, before temperature and floor."""
        return spread_over_timesteps(self._expected(), self._bins, self.objective.log_snr)

    def steps_between_looks(self, batch_size: int) -> int:
        """`update_every`, times as often as one look costs more than its share allows."""
        forwards = self._probes.share / batch_size
        return self.options["update_every"] * max(1, math.ceil(forwards / _MOST_FORWARDS))

    def expected_overhead(self, batch_size: int) -> float:
        return self._probes.share / batch_size / (3 * self.steps_between_looks(batch_size))

    def _before_step(self, model: torch.nn.Module, x0: torch.Tensor, ema: Any, conditioning: dict[str, Any]) -> None:
        self._chunk = len(x0)
        self._probes.gather(ProbeBatch(x0, conditioning))

    def _after_step(self, model: torch.nn.Module, ema: Any) -> None:
        if not self._probes.is_full or int(self.steps) % self.steps_between_looks(self._chunk):
            return
        with averaged_weights(unwrapped(model), ema):
            losses = self._probes.losses(model, self._chunk)
        if not losses.isfinite().all():
            self._drop_event("a probe loss is NaN or infinite")
            return
        losses = losses * self._weights[self._probes.timesteps]
        if (self._last != _UNSEEN).all():
            self._learn(self._last - losses)
        self._last.copy_(losses)

    def _learn(self, falls: torch.Tensor) -> None:
        """Take in the `(P,)` weighted falls since the last look."""
        mean, variance = _per_bin(falls, self._bins[self._probes.timesteps], len(self._progress))
        keep = 1 - 1 / max(1.0, self.options["window"] * (int(self._looks) + 1))
        self._progress.copy_(keep * self._progress + (1 - keep) * mean)
        self._variance.copy_(keep**2 * self._variance + (1 - keep) ** 2 * variance)
        self._looks += 1
        values = self.values()
        if values.sum() > 0:
            scaled = (values / values.max()).pow(self.options["temperature"])
            self._current.copy_(with_floor(scaled, self.options["floor"]))

    def _expected(self) -> torch.Tensor:
        """`(K,)` E[max(progress, 0)] for a normal posterior: `m Phi(m/s) + s phi(m/s)`."""
        mean, spread = self._smoothed()
        mean, spread = mean.numpy(), np.maximum(spread.numpy(), 1e-30)
        ratio = mean / spread
        return torch.from_numpy(mean * stats.norm.cdf(ratio) + spread * stats.norm.pdf(ratio))

    def _smoothed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(K,)` mean and standard error of the progress averaged over neighbours, certain ones counting more."""
        width = self.options["smoothing"]
        if width == 0:
            return self._progress, self._variance.sqrt()
        place = torch.arange(len(self._progress), dtype=torch.float64)
        kernel = torch.exp(-0.5 * ((place[:, None] - place) / width).pow(2))
        # A bin that happens to show no spread at all is not certain.
        variance = self._variance.clamp(min=1e-3 * float(self._variance.mean()) + 1e-60)
        certainty = kernel / variance
        share = certainty / certainty.sum(1, keepdim=True)
        return share @ self._progress, (share.pow(2) @ variance).sqrt()

    def _own_state(self) -> dict[str, torch.Tensor]:
        probes = {f"{_PROBE}{name}": tensor for name, tensor in self._probes.samples.items()}
        return {
            "last": self._last,
            "progress": self._progress,
            "variance": self._variance,
            "looks": self._looks,
            "density": self._current,
            **probes,
        }

    def published_state(self) -> dict[str, torch.Tensor]:
        """Without the probes, which are training samples; a sampler that is loaded from it gathers new ones."""
        state = {name: value for name, value in self.state_dict().items() if not name.startswith(_PROBE)}
        return state | {"last": torch.full_like(self._last, _UNSEEN)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        before = self._probes.samples
        try:
            super().load_state_dict(state)
        except ValueError:
            self._probes.restore(before)
            raise

    def _prepare_to_load(self, state: dict[str, torch.Tensor]) -> None:
        given = {name.removeprefix(_PROBE): value for name, value in state.items() if name.startswith(_PROBE)}
        self._probes.restore({name: value.clone() for name, value in given.items()})


def _probe_timesteps(bins: torch.Tensor, per_bin: int) -> torch.Tensor:
    """`(P,)` timesteps spread evenly over those of each bin; in a bin of few they repeat."""
    parts = []
    for number in range(int(bins.max()) + 1):
        inside = (bins == number).nonzero().flatten()
        parts.append(inside[((torch.arange(per_bin) + 0.5) * len(inside) / per_bin).long()])
    return torch.cat(parts)


def _per_bin(values: torch.Tensor, bins: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(count,)` mean of each bin's values, and the variance of that mean."""
    number = torch.bincount(bins, minlength=count).double()
    mean = torch.zeros(count, dtype=values.dtype).index_add_(0, bins, values) / number
    squares = torch.zeros(count, dtype=values.dtype).index_add_(0, bins, (values - mean[bins]).pow(2))
    return mean, squares / (number - 1) / number
