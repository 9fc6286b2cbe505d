"""Samplers that learn from the training losses alone: no extra forward pass, no extra memory to speak of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import ranks
from .base import TimestepSampler, register_sampler
from .bins import check_share, log_snr_bins, spread_over_timesteps, with_floor


@register_sampler("loss_second_moment")
class LossSecondMomentSampler(TimestepSampler):
    """`p_t ~ sqrt(E[L_t^2])` with importance weights (improved DDPM, arXiv 2102.09672, Eq. 18).

    Args:
        history_per_timestep: how many of the last losses of each timestep are kept; uniform until all have as many.
        uniform_probability: share of uniform mixed in.
    """

    def __init__(
        self,
        scheduler: Any,
        history_per_timestep: int = 10,
        uniform_probability: float = 0.001,
        importance_weighting: bool = True,
        **common: Any,
    ) -> None:
        if history_per_timestep < 1:
            raise ValueError(
                f"loss_second_moment: history_per_timestep must be at least 1, got {history_per_timestep}."
            )
        check_share("loss_second_moment", uniform_probability=uniform_probability)
        options = {"history_per_timestep": history_per_timestep, "uniform_probability": uniform_probability}
        super().__init__(scheduler, options=options, importance_weighting=importance_weighting, **common)
        self._floor = uniform_probability
        self._history = torch.zeros(self.num_train_timesteps, history_per_timestep, dtype=torch.float64)
        self._seen = torch.zeros(self.num_train_timesteps, dtype=torch.int64)
        self._current = torch.full((self.num_train_timesteps,), 1 / self.num_train_timesteps, dtype=torch.float64)

    def density(self) -> torch.Tensor:
        return self._current.clone()

    def _record(self, timesteps: torch.Tensor, squared_error: torch.Tensor) -> None:
        drawn, losses = ranks.gather(timesteps).cpu().numpy(), ranks.gather(squared_error).double().cpu().numpy()
        finite = np.isfinite(losses)
        if not finite.all():
            self._drop_event(f"{int((~finite).sum())} losses of a batch are NaN or infinite")
        history, seen, size = self._history.numpy(), self._seen.numpy(), self._history.shape[1]
        for timestep, loss in zip(drawn[finite], losses[finite], strict=True):
            history[timestep, seen[timestep] % size] = loss
            seen[timestep] += 1
        if (seen >= size).all():
            second_moment = self._history.pow(2).mean(1).sqrt()
            if second_moment.sum() > 0:
                self._current.copy_(with_floor(second_moment, self._floor))

    def _own_state(self) -> dict[str, torch.Tensor]:
        return {"history": self._history, "seen": self._seen, "density": self._current}


@register_sampler("entropy_rate")
class EntropyRateSampler(TimestepSampler):
    """`p_t` in proportion to how much a timestep tells about the clean sample (InfoNoise, arXiv 2602.18647).

    By I-MMSE, `dI / dSNR = mmse / 2`; with the eps error `mmse_x0 = mse_eps / SNR`, so one timestep reduces the
    conditional entropy by `mse_eps(t) |d log SNR / dt| / 2`. The errors are running means over bins of log-SNR.

    Args:
        power: exponent on the rate; below 1 flattens the density.
        floor: share of uniform mixed in.
        num_bins: bins of log-SNR whose errors are averaged.
        decay: of the running means, per update.
        update_every: batches between two updates; the only moments at which a device is waited for.
        min_count: uniform until every bin has seen this many samples.
    """

    def __init__(
        self,
        scheduler: Any,
        power: float = 1.0,
        floor: float = 0.1,
        num_bins: int = 50,
        decay: float = 0.9,
        update_every: int = 10,
        min_count: int = 10,
        **common: Any,
    ) -> None:
        check_share("entropy_rate", floor=floor, decay=decay)
        if not power > 0 or num_bins < 2 or update_every < 1 or min_count < 1:
            raise ValueError(
                "entropy_rate: power must be above 0, num_bins at least 2, update_every and min_count at least 1; "
                f"got power={power}, num_bins={num_bins}, update_every={update_every}, min_count={min_count}."
            )
        options = {
            "power": power,
            "floor": floor,
            "num_bins": num_bins,
            "decay": decay,
            "update_every": update_every,
            "min_count": min_count,
        }
        super().__init__(scheduler, options=options, **common)
        self._bins = log_snr_bins(self.objective, num_bins)
        count = int(self._bins.max()) + 1
        # Summed errors, how many they are, and how many were not finite, in each bin since the last update.
        self._pending = torch.zeros(3, count, dtype=torch.float64)
        self._batches = torch.zeros((), dtype=torch.int64)
        self._error = torch.zeros(count, dtype=torch.float64)
        self._seen = torch.zeros(count, dtype=torch.float64)
        self._current = torch.full((self.num_train_timesteps,), 1 / self.num_train_timesteps, dtype=torch.float64)

    def density(self) -> torch.Tensor:
        return self._current.clone()

    def _record(self, timesteps: torch.Tensor, squared_error: torch.Tensor) -> None:
        if self._pending.device != timesteps.device and timesteps.device.type != "mps":
            self._pending = self._pending.to(timesteps.device)
        errors = self.objective.eps_squared_error(squared_error, timesteps).to(self._pending)
        finite = errors.isfinite()
        bins = self._bins.to(timesteps.device)[timesteps].to(self._pending.device)
        self._pending[0].index_add_(0, bins, torch.where(finite, errors, 0.0))
        self._pending[1].index_add_(0, bins, finite.to(self._pending))
        self._pending[2].index_add_(0, bins, (~finite).to(self._pending))
        self._batches += 1
        if self._batches % self.options["update_every"] == 0:
            total, count, broken = (ranks.mean(self._pending).cpu() * ranks.world_size()).unbind()
            self._pending.zero_()
            if broken.sum() > 0:
                self._drop_event(f"{round(float(broken.sum()))} losses are NaN or infinite")
            self._update(total, count)

    def _update(self, total: torch.Tensor, count: torch.Tensor) -> None:
        fresh = count > 0
        mean = total[fresh] / count[fresh]
        decay = torch.where(self._seen[fresh] > 0, self.options["decay"], 0.0)
        self._error[fresh] = decay * self._error[fresh] + (1 - decay) * mean
        self._seen += count
        if (self._seen >= self.options["min_count"]).all() and self._error.sum() > 0:
            log_snr = self.objective.log_snr
            error = spread_over_timesteps(self._error, self._bins, log_snr)
            rate = error * torch.from_numpy(np.abs(np.gradient(log_snr.numpy())))
            # Scaled first: a large power of small rates would be 0 everywhere.
            self._current.copy_(with_floor((rate / rate.max()).pow(self.options["power"]), self.options["floor"]))

    def _own_state(self) -> dict[str, torch.Tensor]:
        return {
            "pending": self._pending,
            "batches": self._batches,
            "error": self._error,
            "seen": self._seen,
            "density": self._current,
        }
