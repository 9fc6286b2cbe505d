"""What the tests share: schedulers, samplers with the options they need, a model that trains in milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from scipy import stats

from diffusers_adaptive_ts import TimestepSampler, make_sampler

SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace")
PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")
IMAGE_SHAPES = ((1, 28, 28), (3, 32, 32), (4, 32, 32), (16, 1, 1), (7,))

# Options that make a learned sampler learn within a few steps of a few samples.
QUICK = {
    "adaptive": {"update_every": 1, "estimator_options": {"queue_size": 3}},
    "entropy_rate": {"update_every": 3, "min_count": 1, "num_bins": 5},
    "gradient_variance": {"measure_every": 1, "num_bins": 4, "microbatch_size": 4},
    "learning_progress": {"update_every": 1, "num_bins": 4, "probes_per_bin": 2},
    "loss_second_moment": {"history_per_timestep": 2},
}


@cache
def make_scheduler(
    num_train_timesteps: int = 50, beta_schedule: str = "squaredcos_cap_v2", **config: Any
) -> DDPMScheduler:
    """A scheduler to read only: equal arguments give the same object."""
    return DDPMScheduler(num_train_timesteps=num_train_timesteps, beta_schedule=beta_schedule, **config)


def make(name: str, scheduler: Any, channels: int = 1, **options: Any) -> TimestepSampler:
    """`make_sampler` with the options that a sampler cannot do without, unless they are given."""
    required: dict[str, Any] = {}
    if name == "histogram":
        required = {"histogram": [1.0, 3.0, 2.0]}
    elif name == "adaptive":
        required = {"in_channels": channels}
    elif name == "speed" and (len(scheduler.betas) < 50 or scheduler.config.beta_schedule != "squaredcos_cap_v2"):
        required = {"tau": round(0.7 * len(scheduler.betas))}  # v1 finds none on such a schedule
    return make_sampler(name, scheduler, **{**required, **options})


def make_quick(name: str, scheduler: Any, **options: Any) -> TimestepSampler:
    """`make` with options that let a learned sampler learn within a few steps."""
    return make(name, scheduler, **{**QUICK.get(name, {}), **options})


class TinyModel(torch.nn.Module):
    """`a(t) x + b(t)` with smooth learned a and b: any shape, eight parameters."""

    def __init__(self, num_train_timesteps: int) -> None:
        super().__init__()
        self.total = num_train_timesteps
        self.coefficients = torch.nn.Parameter(torch.full((4, 2), 0.1))

    def forward(self, noisy: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        u = timesteps.float() / self.total
        a, b = (torch.stack([torch.ones_like(u), u, u**2, torch.cos(3 * u)], dim=1) @ self.coefficients).unbind(1)
        columns = (-1, *[1] * (noisy.ndim - 1))
        return a.reshape(columns) * noisy + b.reshape(columns)


def train(
    sampler: TimestepSampler, steps: int, shape: tuple[int, ...] = (1, 4, 4), batch_size: int = 8, seed: int = 0
) -> tuple[list[float], TinyModel]:
    """The README's loop; returns the losses, and the model with the gradients of the last step."""
    model = TinyModel(sampler.num_train_timesteps)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        x0 = torch.randn(batch_size, *shape, generator=generator)
        noise = torch.randn(x0.shape, generator=generator)
        timesteps = sampler.sample(x0)
        pred = model(sampler.objective.add_noise(x0, noise, timesteps), timesteps)
        loss = sampler.loss(pred, x0, noise, timesteps)
        optimizer.zero_grad()
        with sampler.observe(model, x0):
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def draws_of(sampler: TimestepSampler, count: int, batch_size: int = 5_000) -> torch.Tensor:
    """`(count,)` timesteps, drawn in batches of one constant x0."""
    x0 = torch.zeros(batch_size, 1, 1, 1)
    return torch.cat([sampler.sample(x0) for _ in range(count // batch_size)])


def chi_square_p(draws: torch.Tensor, density: torch.Tensor, in_pairs: bool = False) -> float:
    """p-value of the draws under `density`; cells expected less than 10 times are merged into one.

    Draws that come in pairs count half: the covariance of a pair's sum is at most twice that of two free draws.
    """
    counts = np.bincount(draws.numpy(), minlength=len(density)).astype(float)
    expected = density.numpy() * len(draws)
    if counts[expected == 0].any():
        return 0.0
    small = expected < 10
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 10:
        counts = np.append(counts[:-2], counts[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    statistic = ((counts - expected) ** 2 / expected).sum() / (2 if in_pairs else 1)
    return float(stats.chi2.sf(statistic, len(counts) - 1))


def assert_same_state(first: TimestepSampler, second: TimestepSampler) -> None:
    """Bit for bit, the generators included."""
    left, right = first.state_dict(), second.state_dict()
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


@pytest.fixture
def scheduler() -> DDPMScheduler:
    return make_scheduler()
