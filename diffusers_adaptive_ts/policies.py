"""Learned distributions over normalised time u in (0, 1): a Beta that looks at x0, and a histogram that does not."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import nn

from .registry import Registry

POLICIES = Registry("policy")
# u is kept away from 0 and 1, where the log-density of a Beta has poles.
EDGE = 1e-6


@POLICIES.register("beta")
class BetaPolicy(nn.Module):
    """`a, b = pi_phi(x0)`, `u ~ Beta(a, b)` (Eq. 11 of arXiv 2411.09998), for any channel count and resolution.

    Three blocks of convolution, ReLU and pooling, pooled to 4x4, then `depth` hidden layers; the last layer starts
    with weight 0 and bias 0.5, so every x0 starts near Beta(1, 1), the uniform distribution.

    Args:
        in_channels: channels of x0 (its dimension 1).
        hidden_channels: width of the hidden layers.
        depth: number of hidden layers.
    """

    LOWEST, HIGHEST = 1e-2, 1e2
    num_parameters_per_sample = 2
    looks_at_x0 = True
    learning_rate = 1e-3

    def __init__(self, in_channels: int, hidden_channels: int = 128, depth: int = 2) -> None:
        super().__init__()
        if min(in_channels, hidden_channels, depth) < 1:
            raise ValueError(
                "in_channels, hidden_channels and depth must be at least 1; "
                f"got {in_channels}, {hidden_channels} and {depth}."
            )
        blocks: list[nn.Module] = []
        for width_in, width_out in ((in_channels, 32), (32, 64), (64, 128)):
            blocks += [nn.Conv2d(width_in, width_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]
        self.features = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        widths = [128 * 16] + [hidden_channels] * depth
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.hidden = nn.Sequential(*hidden)
        self.head = nn.Linear(hidden_channels, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, 0.5)

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        """`(B, 2)` a and b for a batch `(B, C, ...)`; NaN and Inf in x0 are read as 0."""
        images = torch.nan_to_num(as_images(x0).float(), nan=0.0, posinf=0.0, neginf=0.0)
        return self._bounded(self.head(self.hidden(self.features(images))))

    def typical(self) -> torch.Tensor:
        """`(1, 2)` parameters before any x0 has been seen."""
        return self._bounded(self.head.bias[None])

    def _bounded(self, raw: torch.Tensor) -> torch.Tensor:
        return (nn.functional.softplus(raw) + 1e-5).clamp(self.LOWEST, self.HIGHEST)

    @staticmethod
    def draw(parameters: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """`(B,)` float64 u by the inverse CDF, so that stratified uniforms give stratified draws."""
        a, b = parameters.double().cpu().numpy().T
        return torch.from_numpy(special.betaincinv(a, b, uniforms.numpy())).clamp(EDGE, 1 - EDGE)

    @staticmethod
    def log_prob(parameters: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """`(B,)` log-density at u."""
        return torch.distributions.Beta(*parameters.unbind(1), validate_args=False).log_prob(u)

    @staticmethod
    def entropy(parameters: torch.Tensor) -> torch.Tensor:
        """`(B,)` differential entropy; 0 is uniform, below it is concentrated."""
        return torch.distributions.Beta(*parameters.unbind(1), validate_args=False).entropy()

    @staticmethod
    def divergence(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """`(B,)` KL divergence of the distributions after from those before."""
        return torch.distributions.kl_divergence(
            torch.distributions.Beta(*before.unbind(1), validate_args=False),
            torch.distributions.Beta(*after.unbind(1), validate_args=False),
        )

    @staticmethod
    def cell_masses(parameters: torch.Tensor, edges: np.ndarray) -> torch.Tensor:
        """`(len(edges) - 1,)` probability between neighbouring edges, averaged over the rows of `parameters`."""
        a, b = parameters.double().cpu().numpy().T
        at_edges = special.betainc(a[:, None], b[:, None], edges[None]).mean(0)
        return torch.from_numpy(np.clip(np.diff(at_edges), 0, None))


@POLICIES.register("histogram")
class HistogramPolicy(nn.Module):
    """Equal bins of u with learned logits, the same for every x0: no network, any shape of density.

    Args:
        in_channels: accepted and unused, so that policies are made alike.
        num_bins: how many bins.
    """

    looks_at_x0 = False
    learning_rate = 3e-2

    def __init__(self, in_channels: int = 1, num_bins: int = 20) -> None:
        super().__init__()
        if num_bins < 2:
            raise ValueError(f"num_bins must be at least 2, got {num_bins}.")
        self.logits = nn.Parameter(torch.zeros(num_bins))
        self.num_parameters_per_sample = num_bins

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        """`(B, num_bins)` probabilities."""
        return self.typical().expand(len(x0), -1)

    def typical(self) -> torch.Tensor:
        return self.logits.softmax(0)[None]

    @staticmethod
    def draw(parameters: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        cumulative = parameters.double().cpu().cumsum(1)
        cumulative = cumulative / cumulative[:, -1:]
        bins = torch.searchsorted(cumulative, uniforms[:, None], right=True).clamp(max=parameters.shape[1] - 1)
        upper = cumulative.gather(1, bins)
        lower = torch.where(bins > 0, cumulative.gather(1, (bins - 1).clamp(min=0)), 0.0)
        # Off the edges of the bin too, or rounding would put u into its neighbour.
        inside = ((uniforms[:, None] - lower) / (upper - lower).clamp(min=1e-300)).clamp(EDGE, 1 - EDGE)
        return ((bins + inside) / parameters.shape[1]).squeeze(1).clamp(EDGE, 1 - EDGE)

    @staticmethod
    def log_prob(parameters: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        count = parameters.shape[1]
        bins = (u * count).long().clamp(max=count - 1)
        return parameters.gather(1, bins[:, None]).squeeze(1).log() + math.log(count)

    @staticmethod
    def entropy(parameters: torch.Tensor) -> torch.Tensor:
        return -torch.xlogy(parameters, parameters * parameters.shape[1]).sum(1)

    @staticmethod
    def divergence(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return torch.xlogy(before, before / after).sum(1)

    @staticmethod
    def cell_masses(parameters: torch.Tensor, edges: np.ndarray) -> torch.Tensor:
        at_bins = np.concatenate([[0.0], parameters.double().mean(0).cpu().numpy().cumsum()])
        return torch.from_numpy(np.diff(np.interp(edges, np.linspace(0, 1, len(at_bins)), at_bins)))


def make_policy(name: str, in_channels: int, **options: Any) -> nn.Module:
    """Build a registered policy."""
    return POLICIES[name](in_channels, **options)


def as_images(x0: torch.Tensor) -> torch.Tensor:
    """`(B, C, H, W)` view of x0 of any rank: vectors and sequences get size 1, further dimensions are merged."""
    if x0.ndim <= 4:
        return x0.reshape(*x0.shape, *[1] * (4 - x0.ndim))
    return x0.flatten(2, -2)
