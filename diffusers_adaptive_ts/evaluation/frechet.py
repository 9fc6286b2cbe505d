"""How far apart two sets of images are: the Frechet distance of normal distributions fitted to their features."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FeatureMoments:
    """Count, mean and covariance of features, added up part by part in float64; samples themselves are not kept.

    Args:
        count: how many samples.
        mean: `(D,)`.
        scatter: `(D, D)` sum of the outer products of deviations from the mean.

    Example:
        >>> features = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        >>> whole, halves = FeatureMoments.of(features), [FeatureMoments.of(half) for half in features.split(500)]
        >>> bool(torch.allclose(whole.covariance, (halves[0] + halves[1]).covariance))
        True
    """

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor

    @classmethod
    def of(cls, features: torch.Tensor) -> FeatureMoments:
        """Moments of `(N, D)` features."""
        if features.ndim != 2 or len(features) == 0:
            raise ValueError(f"features must have the shape (N, D) with N at least 1; got {tuple(features.shape)}.")
        features = features.detach().cpu().double()
        if not features.isfinite().all():
            raise ValueError("features hold NaN or infinite values, so they have no moments.")
        mean = features.mean(0)
        return cls(len(features), mean, (features - mean).T @ (features - mean))

    def __add__(self, other: FeatureMoments) -> FeatureMoments:
        """Moments of both sets together (Chan et al. 1983)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return FeatureMoments(
            count,
            self.mean + apart * other.count / count,
            self.scatter + other.scatter + torch.outer(apart, apart) * self.count * other.count / count,
        )

    @property
    def covariance(self) -> torch.Tensor:
        """`(D, D)` the unbiased estimate, as FID implementations take it."""
        if self.count < 2:
            raise ValueError("One sample has no covariance; give at least two.")
        return self.scatter / (self.count - 1)


def frechet_distance(one: FeatureMoments, other: FeatureMoments) -> float:
    """`|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))` (Heusel et al. 2017, Eq. 6).

    The trace of the root is the sum of the roots of the eigenvalues of `C1^(1/2) C2 C1^(1/2)`, which is symmetric, so
    nothing complex appears even where there are fewer samples than features.

    Example:
        >>> features = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
        >>> moved = FeatureMoments.of(features + torch.tensor([3.0, 0.0, 0.0, 0.0]))
        >>> round(frechet_distance(FeatureMoments.of(features), moved), 6)
        9.0
    """
    if one.mean.shape != other.mean.shape:
        raise ValueError(f"The features have {len(one.mean)} and {len(other.mean)} numbers; they must be of one kind.")
    root = _root(one.covariance)
    cross = torch.linalg.eigvalsh(root @ other.covariance @ root).clamp(min=0).sqrt().sum()
    apart = (one.mean - other.mean).pow(2).sum()
    return float(apart + one.covariance.trace() + other.covariance.trace() - 2 * cross)


def _root(matrix: torch.Tensor) -> torch.Tensor:
    """The symmetric root of a covariance; rounding makes its smallest eigenvalues negative."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
