"""The paper's estimator: losses before and after one real optimizer step, on a few timesteps that stand for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .. import ranks
from ..objective import DiffusionObjective
from ..registry import Registry
from .forward import ProbeBatch, noise_like, squared_errors, undisturbed
from .queue import DeltaQueue
from .selection import SELECTORS, Selector, stratified_timesteps

ESTIMATORS = Registry("estimator")


@dataclass
class Credit:
    """What a measured step tells a policy.

    Args:
        per_sample: `(B,)` reward of each sample of this rank's batch, for a likelihood-ratio update.
    """

    per_sample: torch.Tensor


@dataclass
class _Event:
    """A measurement under way; noise is kept as seeds, so nothing the size of a batch is held."""

    batch: ProbeBatch
    swept: ProbeBatch
    seeds: tuple[int, int]
    timesteps: torch.Tensor
    before: tuple[torch.Tensor, torch.Tensor]


@ESTIMATORS.register("paper")
class LookAhead:
    """Algorithm 2 of arXiv 2411.09998, evaluated around the real step instead of with a copy of the weights.

    One x0 is swept over all T timesteps and its changes are queued; S, the `num_selected` timesteps that best explain
    their mean, is chosen anew after each event and used in the next. Every sample's reward is the change of its own
    bound on S, in bits per pixel. Noise and conditioning before and after are the same.

    Forwards per event: `2 (ceil(T / (ranks * chunk)) + ceil(|S| B / chunk))`, with chunk = B unless given.

    Args:
        queue_size: |Q|, rows from which S is chosen.
        num_selected: |S|.
        noise: `common` before and after the step, or `fresh` as a comparison (the paper's text is silent).
        reward_reduction: `sum` over S as the authors' code, or `mean` as the paper's Eq. 14.
        probe_batch_size: samples per forward; `None` is the batch's own size.
        selector: name in `SELECTORS` of the feature selection that chooses S.
    """

    def __init__(
        self,
        objective: DiffusionObjective,
        queue_size: int = 20,
        num_selected: int = 3,
        noise: str = "common",
        reward_reduction: str = "sum",
        probe_batch_size: int | None = None,
        selector: str = "f_statistic",
    ) -> None:
        total = objective.num_train_timesteps
        if not 1 <= num_selected <= total:
            raise ValueError(
                f"num_selected (|S|) must lie in 1..{total}, the number of timesteps; got {num_selected}."
            )
        if queue_size < 3:
            raise ValueError(f"queue_size (|Q|) must be at least 3 for an F-statistic, got {queue_size}.")
        if noise not in ("common", "fresh"):
            raise ValueError(f"noise must be 'common' or 'fresh', got {noise!r}.")
        if reward_reduction not in ("sum", "mean"):
            raise ValueError(f"reward_reduction must be 'sum' or 'mean', got {reward_reduction!r}.")
        if probe_batch_size is not None and probe_batch_size < 1:
            raise ValueError(f"probe_batch_size must be at least 1, got {probe_batch_size}.")
        self._objective = objective
        self._noise = noise
        self._reduction = reward_reduction
        self._chunk = probe_batch_size
        self._selector: Selector = SELECTORS[selector]
        self.queue = DeltaQueue(queue_size, total)
        self.selected = stratified_timesteps(total, num_selected)
        self._event: _Event | None = None

    @property
    def is_measuring(self) -> bool:
        return self._event is not None

    def abandon(self) -> None:
        self._event = None

    def forwards_per_event(self, batch_size: int) -> int:
        """Model calls of one measured step on this rank, before and after together."""
        chunk = self._chunk or batch_size
        sweep = math.ceil(math.ceil(self._objective.num_train_timesteps / ranks.world_size()) / chunk)
        return 2 * (sweep + math.ceil(len(self.selected) * batch_size / chunk))

    def begin(
        self, model: torch.nn.Module, batch: ProbeBatch, shared: torch.Generator, own: torch.Generator, ema: Any = None
    ) -> None:
        """Look before the step. `shared` must give the same numbers on all ranks.

        The raw weights are measured; `ema` is for estimators that look at averaged ones.
        """
        chosen = torch.randint(len(batch), (1,), generator=shared)
        swept = batch.select(chosen)
        swept = ProbeBatch(ranks.from_first(swept.x0), ranks.from_first(swept.conditioning))
        seeds = (_seed(shared), _seed(own))
        timesteps = self.selected.clone()
        before = self._look(model, batch, swept, seeds, timesteps)
        self._event = _Event(batch, swept, seeds, timesteps, before)

    def finish(
        self, model: torch.nn.Module, shared: torch.Generator, own: torch.Generator, ema: Any = None
    ) -> Credit | None:
        """Look after the step, choose the next S; `None` when a loss was not finite."""
        event, self._event = self._event, None
        seeds = event.seeds if self._noise == "common" else (_seed(shared), _seed(own))
        after = self._look(model, event.batch, event.swept, seeds, event.timesteps)
        row = event.before[0] - after[0]
        change = event.before[1] - after[1]
        finite = torch.stack([row.isfinite().all(), change.isfinite().all()]).double()
        if ranks.mean(finite).min() < 1:
            return None
        self.queue.push(row)
        if len(self.queue) >= 3:
            self.selected.copy_(self._selector(self.queue.rows(), len(self.selected)))
        return Credit(change.sum(0) if self._reduction == "sum" else change.mean(0))

    def _look(
        self,
        model: torch.nn.Module,
        batch: ProbeBatch,
        swept: ProbeBatch,
        seeds: tuple[int, int],
        timesteps: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(T,)` bound of the swept sample at every timestep, and `(|S|, B)` bounds of the batch on S, in bits."""
        total, size = self._objective.num_train_timesteps, len(batch)
        chunk = self._chunk or size
        # Every rank sweeps its share of the timesteps, padded so that all make the same number of forwards.
        share = math.ceil(total / ranks.world_size())
        mine = (torch.arange(share) + ranks.rank() * share).clamp(max=total - 1)
        index = torch.arange(size).repeat(len(timesteps))
        times = timesteps.repeat_interleave(size)
        with undisturbed(model, batch.x0.device) as network:
            sweep = squared_errors(
                network,
                self._objective,
                swept,
                noise_like(swept.x0, seeds[0]),
                torch.zeros(share, dtype=torch.int64),
                mine,
                chunk,
            )
            errors = squared_errors(
                network, self._objective, batch, noise_like(batch.x0, seeds[1]), index, times, chunk
            )
        sweep = ranks.gather(sweep.to(batch.x0.device, torch.float32)).double().cpu()[:total]
        return (
            self._objective.vlb_bits(sweep, torch.arange(total)).double(),
            self._objective.vlb_bits(errors, times).double().reshape(len(timesteps), size),
        )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        queue = {f"queue.{key}": value for key, value in self.queue.state_tensors().items()}
        return {**queue, "selected": self.selected}


def make_estimator(name: str, objective: DiffusionObjective, **options: Any) -> LookAhead:
    """Build a registered estimator."""
    return ESTIMATORS[name](objective, **options)


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (), generator=generator))
