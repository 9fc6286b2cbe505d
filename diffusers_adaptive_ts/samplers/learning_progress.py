"""Train where the model is still learning: the fall of the loss at each noise level, seen on a fixed probe set."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy import stats

from .. import ranks
from ..averaged import averaged_weights
from ..probes import ProbeBatch, unwrapped
from ..probes.probe_set import ProbeSet
from ..weightings import list_weightings, make_weighting
from .base import TimestepSampler, register_sampler
from .bins import check_share, log_snr_bins, spread_over_timesteps, with_floor

# What progress is measured in: names for what users want, beside every registered weighting.
OBJECTIVES = {"quality": "p2", "likelihood": "vlb"}
# A look may cost this many forwards of the training batch per `update_every` steps; larger looks come less often.
_MOST_FORWARDS = 3.5
_PROBE = "probe."
_GATHERED_BY = f"{_PROBE}gathered_by"
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
        numbers_fit = temperature >= 0 and smoothing >= 0  # NaN does not
        if not numbers_fit or min(num_bins, probes_per_bin) < 2 or update_every < 1:
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
        self._weights = self._weights_of(objective)
        self._probes = ProbeSet(self.objective, _probe_timesteps(self._bins, probes_per_bin))
        self._last = torch.full((len(self._probes.timesteps),), _UNSEEN, dtype=torch.float64)
        # Of each bin: running mean of its progress, of that mean's variance, and how much memory is behind them.
        self._progress = torch.zeros(count, dtype=torch.float64)
        self._variance = torch.zeros(count, dtype=torch.float64)
        self._looks = torch.zeros((), dtype=torch.int64)
        self._current = torch.full((self.num_train_timesteps,), 1 / self.num_train_timesteps, dtype=torch.float64)
        # The largest batch so far: the last one of an epoch may be small.
        self._batch_size = torch.zeros((), dtype=torch.int64)

    def _weights_of(self, objective: str) -> torch.Tensor:
        name = OBJECTIVES.get(objective, objective)
        if name not in list_weightings():
            accepted = ", ".join([*OBJECTIVES, *list_weightings()])
            raise ValueError(f"learning_progress: objective must be one of {accepted}; got {objective!r}.")
        weighting = make_weighting(name, self.objective)
        if weighting.state_tensors():
            raise ValueError(
                f"learning_progress: the weighting {name!r} changes as it learns, so that no progress could be "
                "measured in it. Give an objective with fixed weights."
            )
        return weighting.table()

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
        self._batch_size.clamp_(min=len(x0))
        self._probes.gather(ProbeBatch(x0, conditioning))

    def _after_step(self, model: torch.nn.Module, ema: Any) -> None:
        if int(self.steps) % self.options["update_every"]:
            return
        all_full, all_seen = self._agree()
        if not all_full or int(self.steps) % self.steps_between_looks(int(self._batch_size)):
            return
        with averaged_weights(unwrapped(model), ema):
            losses = self._probes.losses(model, int(self._batch_size))
        if not losses.isfinite().all():
            self._drop_event("a probe loss is NaN or infinite")
            return
        losses = losses * self._weights[self._probes.timesteps]
        if all_seen:
            self._learn(self._last - losses)
        self._last.copy_(losses)

    def _agree(self) -> tuple[bool, bool]:
        """Whether all ranks have their probes, and a look to compare with: batches may differ, looks may not."""
        seen = bool((self._last != _UNSEEN).all())
        mine = torch.tensor([[self._probes.is_full, seen, -int(self._batch_size)]], dtype=torch.int64)
        all_full, all_seen, size = ranks.gather(mine).amin(0).tolist()
        self._batch_size.fill_(-size)
        return bool(all_full), bool(all_seen)

    def _learn(self, falls: torch.Tensor) -> None:
        """Take in the `(P,)` weighted falls since the last look."""
        mean, variance = _per_bin(falls, self._bins[self._probes.timesteps], len(self._progress))
        # Probes of one noise level move together with the weights, so how their mean moves between looks counts too.
        variance = torch.maximum(variance, (mean - self._progress).pow(2))
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
        if probes:
            probes[_GATHERED_BY] = _this_rank()
        return {
            "last": self._last,
            "progress": self._progress,
            "variance": self._variance,
            "looks": self._looks,
            "density": self._current,
            "batch_size": self._batch_size,
            **probes,
        }

    def published_state(self) -> dict[str, torch.Tensor]:
        """Without the probes, which are training samples; a sampler that is loaded from it gathers new ones."""
        return _without_probes(self.state_dict())

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        gathered_by = state.get(_GATHERED_BY)
        if isinstance(gathered_by, torch.Tensor) and not torch.equal(gathered_by, _this_rank()):
            state = _without_probes(state)  # another rank's share; the rest is the same on all
        before = self._probes.samples
        try:
            super().load_state_dict(state)
        except ValueError:
            self._probes.restore(before)
            raise

    def _prepare_to_load(self, state: dict[str, torch.Tensor]) -> None:
        given = {name: value for name, value in state.items() if name.startswith(_PROBE) and name != _GATHERED_BY}
        if not all(isinstance(value, torch.Tensor) for value in given.values()):
            raise ValueError("This is not a state of a LearningProgressSampler: a probe in it is not a tensor.")
        self._probes.restore({name.removeprefix(_PROBE): value.clone() for name, value in given.items()})


def _this_rank() -> torch.Tensor:
    return torch.tensor([ranks.rank(), ranks.world_size()])


def _without_probes(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    blank = {"last": _UNSEEN, "batch_size": 0}
    return {
        name: torch.full_like(value, blank[name]) if name in blank else value
        for name, value in state.items()
        if not name.startswith(_PROBE)
    }


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
