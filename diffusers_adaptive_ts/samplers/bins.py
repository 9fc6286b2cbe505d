"""Timesteps grouped on the log-SNR axis, where equal widths mean the same on every schedule."""

from __future__ import annotations

import numpy as np
import torch

from ..objective import DiffusionObjective


def log_snr_bins(objective: DiffusionObjective, count: int) -> torch.Tensor:
    """`(T,)` bin of each timestep: at most `count` bins of equal width in log-SNR, none of them empty."""
    log_snr = objective.log_snr
    position = (log_snr[0] - log_snr) / (log_snr[0] - log_snr[-1]) * count
    return torch.unique(position.long().clamp(0, count - 1), return_inverse=True)[1]


def time_bins(num_train_timesteps: int, count: int) -> torch.Tensor:
    """`(T,)` bin of each timestep: `count` bins (at most T) of equal width in t."""
    count = min(count, num_train_timesteps)
    return torch.arange(num_train_timesteps) * count // num_train_timesteps


def spread_over_timesteps(values: torch.Tensor, bins: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
    """`(T,)` values interpolated between bin centres along a monotone `(T,)` axis, flat beyond the outer ones."""
    total = torch.zeros_like(values).index_add_(0, bins, axis.to(values.dtype))
    centres = (total / torch.bincount(bins, minlength=len(values))).numpy()
    order = np.argsort(centres)
    return torch.from_numpy(np.interp(axis.numpy(), centres[order], values.numpy()[order]))


def with_floor(table: torch.Tensor, floor: float) -> torch.Tensor:
    """`(T,)` probabilities in proportion to `table`, mixed with a share `floor` of uniform."""
    return (1 - floor) * table / table.sum() + floor / len(table)


def check_share(name: str, **values: float) -> None:
    for option, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: {option} must lie in 0..1, got {value}.")
