"""Which few timesteps stand for all of them: the feature selection of the paper's Algorithm 2, line 5."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from sklearn.feature_selection import f_regression

from ..registry import Registry

# From `(n, T)` loss changes and a count to that many timesteps; register one of your own by name.
Selector = Callable[[torch.Tensor, int], torch.Tensor]
SELECTORS = Registry("selector")


@SELECTORS.register("f_statistic")
def f_statistic_selector(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`(count,)` timesteps, ascending, whose changes best explain the row means by the F-statistic of a regression.

    Constant timesteps score 0; ties go to the larger variance, then to the smaller timestep.

    Args:
        rows: `(n, T)` loss changes, n at least 3.

    Example:
        >>> mean = torch.tensor([1.0, 2.0, 3.0, 5.0])
        >>> rows = torch.stack([mean * 2, mean * 0, torch.tensor([1.0, -1, 1, -1])], dim=1)
        >>> f_statistic_selector(rows, 1)
        tensor([0])
    """
    features = rows.numpy()
    target = features.mean(1)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # constant columns divide by zero; they are scored 0 below
        score, _ = f_regression(features, target)
    variance = features.var(0)
    score = np.where(np.isnan(score) | (np.ptp(features, axis=0) == 0), 0.0, score)
    best = np.lexsort((np.arange(len(score)), -variance, -score))[:count]
    return torch.from_numpy(np.sort(best))


def stratified_timesteps(num_train_timesteps: int, count: int) -> torch.Tensor:
    """`(count,)` middles of equal parts of the timesteps: T/6, T/2, 5T/6 for three."""
    return ((torch.arange(count) + 0.5) * num_train_timesteps / count).long()
