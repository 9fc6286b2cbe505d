"""Samplers that learn from losses, against slow references that keep every number in plain lists."""

import math
import warnings
from collections import deque

import numpy as np
import pytest
import torch

from diffusers_adaptive_ts import make_sampler
from tests.conftest import PREDICTION_TYPES, make_scheduler

TOTAL = 20


def batches(count, size=16, seed=0, total=TOTAL):
    """Timesteps and wanted squared errors that differ between timesteps and scatter within them."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        timesteps = random.integers(total, size=size)
        yield timesteps, (0.1 + timesteps / total) ** 2 * random.uniform(0.5, 1.5, size=size)


def show(sampler, timesteps, errors):
    """Call `loss` with a prediction whose squared errors are these; returns the errors as it saw them (float32)."""
    x0, noise = torch.randn(2, len(timesteps), 3, generator=torch.Generator().manual_seed(0))
    timesteps = torch.as_tensor(timesteps)
    wrong = torch.as_tensor(errors, dtype=torch.float32).sqrt()[:, None]
    pred = sampler.objective.target(x0, noise, timesteps) + wrong
    sampler.loss(pred, x0, noise, timesteps)
    return sampler.objective.squared_error(pred, x0, noise, timesteps).double().numpy()


class SlowSecondMoment:
    """The last losses of each timestep in a deque (improved DDPM, Eq. 18)."""

    def __init__(self, total, history, floor):
        self.losses, self.history, self.floor = [deque(maxlen=history) for _ in range(total)], history, floor

    def show(self, timesteps, errors):
        for timestep, error in zip(timesteps, errors, strict=True):
            if math.isfinite(error):
                self.losses[timestep].append(error)

    def density(self):
        total = len(self.losses)
        if any(len(losses) < self.history for losses in self.losses):
            return [1 / total] * total
        roots = [math.sqrt(sum(loss**2 for loss in losses) / len(losses)) for losses in self.losses]
        return [(1 - self.floor) * root / sum(roots) + self.floor / total for root in roots]


@pytest.mark.parametrize(("history", "floor"), [(10, 0.001), (3, 0.1)])
def test_second_moment_is_that_of_the_slow_reference_at_every_step(history, floor):
    sampler = make_sampler(
        "loss_second_moment", make_scheduler(TOTAL), history_per_timestep=history, uniform_probability=floor
    )
    slow, moved = SlowSecondMoment(TOTAL, history, floor), 0
    for timesteps, errors in batches(60):
        slow.show(timesteps, show(sampler, timesteps, errors))
        assert sampler.density().tolist() == pytest.approx(slow.density(), rel=1e-9)
        moved += float(sampler.density().max()) > 1.5 / TOTAL
    assert 0 < moved < 60, "the comparison must cover both the warm-up and the learned density"


def test_second_moment_is_uniform_until_every_timestep_is_full():
    sampler = make_sampler("loss_second_moment", make_scheduler(4), history_per_timestep=2)
    show(sampler, [0, 0, 1, 1, 2, 2, 3], [9.0, 1, 1, 1, 1, 1, 1])
    assert sampler.density().tolist() == [0.25] * 4
    show(sampler, [3], [1.0])
    assert float(sampler.density()[0]) > 0.5


def test_second_moment_is_fed_with_unweighted_losses():
    plain, weighted = (
        make_sampler("loss_second_moment", make_scheduler(TOTAL), history_per_timestep=1, weighting=weighting)
        for weighting in ("uniform", "vlb")
    )
    for timesteps, errors in batches(20):
        show(plain, timesteps, errors)
        show(weighted, timesteps, errors)
    assert float(plain.density().max()) > 1.5 / TOTAL
    assert torch.equal(plain.density(), weighted.density())


def test_second_moment_of_a_perfect_model_stays_uniform():
    sampler = make_sampler("loss_second_moment", make_scheduler(4), history_per_timestep=1)
    show(sampler, [0, 1, 2, 3], [0.0] * 4)
    assert sampler.density().tolist() == [0.25] * 4


class SlowEntropyRate:
    """Errors in eps, averaged in bins of log-SNR, times the slope of log-SNR, timestep by timestep."""

    def __init__(self, objective, power, floor, num_bins, decay, update_every, min_count):
        self.abar = objective.alphas_cumprod.numpy()
        self.log_snr = np.log(self.abar / (1 - self.abar))
        self.kind, self.power, self.floor, self.decay = objective.prediction_type, power, floor, decay
        self.update_every, self.min_count = update_every, min_count
        span = self.log_snr[0] - self.log_snr[-1]
        places = [min(int((self.log_snr[0] - value) / span * num_bins), num_bins - 1) for value in self.log_snr]
        self.bin_of = [sorted(set(places)).index(place) for place in places]
        count = len(set(places))
        self.pending = [[] for _ in range(count)]
        self.mean, self.seen, self.shown = [None] * count, [0] * count, 0
        self.current = [1 / len(self.abar)] * len(self.abar)

    def in_eps(self, error, t):
        factors = {"epsilon": 1.0, "sample": self.abar[t] / (1 - self.abar[t]), "v_prediction": self.abar[t]}
        return error * factors[self.kind]

    def show(self, timesteps, errors):
        for t, error in zip(timesteps, errors, strict=True):
            if math.isfinite(error):
                self.pending[self.bin_of[t]].append(self.in_eps(error, t))
        self.shown += 1
        if self.shown % self.update_every == 0:
            self.update()

    def update(self):
        for index, errors in enumerate(self.pending):
            if errors:
                fresh, old = sum(errors) / len(errors), self.mean[index]
                self.mean[index] = fresh if old is None else self.decay * old + (1 - self.decay) * fresh
                self.seen[index] += len(errors)
        self.pending = [[] for _ in self.pending]
        if min(self.seen) >= self.min_count:
            self.current = self.density_of_means()

    def density_of_means(self):
        total = len(self.abar)
        centres = [np.mean([self.log_snr[t] for t in range(total) if self.bin_of[t] == b]) for b in set(self.bin_of)]
        rates = []
        for t in range(total):
            error = np.interp(-self.log_snr[t], [-centre for centre in centres], self.mean)
            low, high = max(t - 1, 0), min(t + 1, total - 1)
            slope = (self.log_snr[low] - self.log_snr[high]) / (high - low)
            rates.append((error * slope) ** self.power)
        return [(1 - self.floor) * rate / sum(rates) + self.floor / total for rate in rates]


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"power": 1.0, "floor": 0.1, "num_bins": 6, "decay": 0.9, "update_every": 3, "min_count": 10},
        {"power": 0.5, "floor": 0.0, "num_bins": 50, "decay": 0.5, "update_every": 1, "min_count": 1},
    ],
    ids=["wide bins", "narrow bins"],
)
def test_entropy_rate_is_that_of_the_slow_reference_at_every_step(options, prediction_type):
    sampler = make_sampler("entropy_rate", make_scheduler(TOTAL, prediction_type=prediction_type), **options)
    slow, moved = SlowEntropyRate(sampler.objective, **options), 0
    for timesteps, errors in batches(40):
        slow.show(timesteps, show(sampler, timesteps, errors))
        assert sampler.density().tolist() == pytest.approx(slow.current, rel=1e-5)  # its eps errors are float32
        moved += float(sampler.density().max()) > 1.1 / TOTAL
    assert 0 < moved < 40, "the comparison must cover both the warm-up and the learned density"


def test_entropy_rate_of_a_constant_eps_error_is_the_slope_of_log_snr():
    """Then every unit of log-SNR tells the same, so the density is the schedule's own log-SNR measure."""
    scheduler = make_scheduler(100, "linear")
    sampler = make_sampler("entropy_rate", scheduler, floor=0.0, update_every=1, min_count=1)
    show(sampler, np.arange(100), np.full(100, 0.7))
    slope = np.abs(np.gradient(sampler.objective.log_snr.numpy()))
    assert np.allclose(sampler.density().numpy(), slope / slope.sum(), rtol=1e-5)


def test_entropy_rate_with_a_large_power_stays_a_distribution():
    sampler = make_sampler("entropy_rate", make_scheduler(TOTAL), power=500.0, update_every=1, min_count=1)
    show(sampler, np.arange(TOTAL), np.full(TOTAL, 1e-3))
    assert float(sampler.density().sum()) == pytest.approx(1)
    assert sampler.density().isfinite().all()


def show_broken(sampler, broken, at):
    """Eight batches, with one broken loss more in those numbered `at`."""
    for index, (timesteps, errors) in enumerate(batches(8, size=TOTAL)):
        if index in at:
            timesteps, errors = np.append(timesteps, 0), np.append(errors, broken)
        show(sampler, timesteps, errors)


@pytest.mark.parametrize("name", ["loss_second_moment", "entropy_rate"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_losses_are_dropped_counted_and_said_once(name, broken):
    options = {"loss_second_moment": {"history_per_timestep": 1}, "entropy_rate": {"update_every": 1, "min_count": 1}}
    dirty, clean = (make_sampler(name, make_scheduler(TOTAL), **options[name]) for _ in range(2))
    show_broken(clean, broken, at=())
    with pytest.warns(UserWarning, match="1 losses .*NaN or infinite.*Said once; `sampler.dropped` counts") as said:
        show_broken(dirty, broken, at=(2, 5))
    assert len(said) == 1
    assert said[0].filename == __file__
    assert (int(dirty.dropped), int(clean.dropped)) == (2, 0)
    assert torch.allclose(dirty.density(), clean.density(), rtol=1e-5)


def test_one_broken_loss_among_thousands_is_noticed():
    sampler, timesteps = (
        make_sampler("entropy_rate", make_scheduler(TOTAL), update_every=2),
        np.zeros(5_000, dtype=int),
    )
    show(sampler, timesteps, np.append(np.ones(4_999), math.nan))
    with pytest.warns(UserWarning, match="1 losses are NaN or infinite"):
        show(sampler, timesteps, np.ones(5_000))
    assert int(sampler.dropped) == 1


def test_batches_of_different_sizes_are_not_taken_for_broken_ones():
    sampler = make_sampler("entropy_rate", make_scheduler(TOTAL), update_every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (4, 16, 16, 4):
            show(sampler, np.zeros(size, dtype=int), np.ones(size))
    assert int(sampler.dropped) == 0


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("loss_second_moment", {"history_per_timestep": 0}, "history_per_timestep must be at least 1, got 0"),
        ("loss_second_moment", {"uniform_probability": 1.5}, r"uniform_probability must lie in 0\.\.1, got 1.5"),
        ("entropy_rate", {"power": 0.0}, "power must be above 0.*got power=0.0"),
        ("entropy_rate", {"num_bins": 1}, "num_bins at least 2.*num_bins=1"),
        ("entropy_rate", {"update_every": 0}, "update_every and min_count at least 1.*update_every=0"),
        ("entropy_rate", {"min_count": 0}, "min_count=0"),
        ("entropy_rate", {"decay": -0.1}, r"decay must lie in 0\.\.1, got -0.1"),
        ("entropy_rate", {"floor": math.nan}, r"floor must lie in 0\.\.1, got nan"),
    ],
)
def test_options_out_of_range_are_refused_by_name_and_value(name, options, complaint, scheduler):
    with pytest.raises(ValueError, match=complaint):
        make_sampler(name, scheduler, **options)
