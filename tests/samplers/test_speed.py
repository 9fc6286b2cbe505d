"""SpeeD: where the convergence area begins, the density with its duals, and the weights that go with it."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from diffusers_adaptive_ts import make_sampler, make_weighting
from diffusers_adaptive_ts.samplers.draws import Draws
from tests.conftest import make_scheduler


@pytest.mark.parametrize(("schedule", "tau"), [("linear", 642), ("scaled_linear", 829), ("squaredcos_cap_v2", 959)])
def test_tau_is_that_of_the_paper(schedule, tau):
    assert make_sampler("speed", make_scheduler(1000, schedule)).tau == tau


def test_tau_of_the_second_version_is_seven_tenths():
    assert make_sampler("speed", make_scheduler(1000, "linear"), version="v2").tau == 700
    assert make_sampler("speed", make_scheduler(50), version="v2").tau == 35


def test_a_larger_threshold_begins_earlier():
    scheduler = make_scheduler(1000, "linear")
    assert make_sampler("speed", scheduler, threshold=3e-4).tau < 642 < make_sampler("speed", scheduler, tau=700).tau


def reference_density(total, tau, size, ratio=5.0):
    """`n // 2 + 1` draws and as many duals as are missing to n, counted timestep by timestep."""
    drawn = np.array([ratio if t < tau else 1.0 for t in range(total)])
    drawn /= drawn.sum()
    duals = np.zeros(total)
    for t in range(total):
        duals[tau - t if t < tau else t - tau] += drawn[t]
    first = size // 2 + 1
    return (first * drawn + (size - first) * duals) / size


@pytest.mark.parametrize("size", [1, 2, 3, 8, 63, 128])
def test_density_is_that_of_a_batch_with_its_duals(size):
    sampler = make_sampler("speed", make_scheduler(1000, "linear"), seed=0)
    sampler.sample(torch.zeros(size, 1, 1, 1))
    assert np.allclose(sampler.density().numpy(), reference_density(1000, 642, size), rtol=1e-12, atol=0)


def test_density_before_the_first_batch_is_that_of_a_large_one():
    density = make_sampler("speed", make_scheduler(1000, "linear")).density()
    assert np.allclose(density.numpy(), reference_density(1000, 642, 10**9), rtol=1e-6)


def test_without_duals_the_ratio_before_and_after_tau_is_k():
    density = make_sampler("speed", make_scheduler(1000, "linear"), duals=False, k=4.0).density()
    assert float(density[641] / density[642]) == pytest.approx(4.0)
    assert float(density[0] / density[999]) == pytest.approx(4.0)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_a_batch_is_the_draws_of_its_first_half_and_their_duals(size):
    """The draws again from the same seed: inverse CDF, dual, cut, compared as multisets."""
    sampler = make_sampler("speed", make_scheduler(1000, "linear"), seed=3)
    drawn_density = make_sampler("speed", make_scheduler(1000, "linear"), duals=False).density().numpy()
    first = np.searchsorted(np.cumsum(drawn_density), Draws(3).uniforms(size // 2 + 1).numpy(), side="right")
    duals = np.where(first < 642, 642 - first, first - 642)
    expected = np.concatenate([first, duals])[:size]
    assert sorted(sampler.sample(torch.zeros(size, 1, 1, 1)).tolist()) == sorted(expected.tolist())


def test_a_batch_is_shuffled_so_that_duals_meet_any_sample():
    sampler = make_sampler("speed", make_scheduler(1000, "linear"), seed=0)
    in_order = 0
    for _ in range(50):
        drawn = sampler.sample(torch.zeros(64, 1, 1, 1))
        in_order += int((torch.where(drawn[:31] < 642, 642 - drawn[:31], drawn[:31] - 642) == drawn[33:]).sum())
    assert in_order < 50 * 31 / 4


@pytest.mark.parametrize(("version", "weighting"), [("v1", "speed_v1"), ("v2", "speed_v2")])
def test_each_version_brings_its_own_weighting(version, weighting):
    scheduler = make_scheduler(1000, "linear")
    sampler = make_sampler("speed", scheduler, version=version)
    assert sampler.weighting.name == weighting
    assert torch.equal(sampler.weighting.table(), make_weighting(weighting, scheduler).table())


def test_the_second_versions_weighting_follows_tau():
    scheduler = make_scheduler(1000, "linear")
    sampler = make_sampler("speed", scheduler, version="v2", tau=500)
    assert torch.equal(sampler.weighting.table(), make_weighting("speed_v2", scheduler, tau=500).table())


def test_another_weighting_takes_its_place():
    sampler = make_sampler("speed", make_scheduler(1000, "linear"), weighting="min_snr")
    assert sampler.weighting.name == "min_snr"


@pytest.mark.parametrize(("total", "schedule"), [(1000, "laplace"), (50, "linear"), (10, "sigmoid")])
def test_a_schedule_that_never_converges_is_refused_with_what_to_do(total, schedule):
    """On ten steps of `sigmoid` the noise level starts slowly and then grows: no convergence either."""
    with pytest.raises(ValueError, match=r"no convergence area to cut. Give tau=\.\.\., a larger threshold"):
        make_sampler("speed", make_scheduler(total, schedule))


def test_a_schedule_that_starts_slowly_converges_where_it_slows_down_again():
    scheduler = DDPMScheduler(num_train_timesteps=1000, trained_betas=[1e-9] * 100 + [0.01] * 900)
    growth = np.gradient((1 - scheduler.alphas_cumprod.double()).sqrt().numpy())
    tau = make_sampler("speed", scheduler).tau
    assert growth[0] < 1e-4
    assert growth[tau - 2] >= 1e-4 > growth[tau - 1 :].max()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"version": "v3"}, "version must be one of v1, v2, got 'v3'"),
        ({"tau": 0}, r"tau must lie in 1\.\.49, got 0"),
        ({"tau": 50}, r"tau must lie in 1\.\.49, got 50"),
        ({"k": 0.0}, "k and threshold must be above 0, got k=0.0"),
        ({"threshold": -1.0}, "got k=5.0, threshold=-1.0"),
        ({"weighting_options": {"lam": 0.5}}, "The weighting 'speed_v1' has no option 'lam'"),
    ],
)
def test_options_out_of_range_are_refused(options, complaint, scheduler):
    with pytest.raises(ValueError, match=complaint):
        make_sampler("speed", scheduler, **options)
