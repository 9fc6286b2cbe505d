"""Gradient variance: the estimator against exact covariances, and the density against what was measured."""

import numpy as np
import pytest
import torch
from torch import nn

from diffusers_adaptive_ts import GradientVarianceSampler
from diffusers_adaptive_ts.samplers.gradient_variance import two_microbatch_variance
from tests.fragile import TOTAL


class TestEstimator:
    @pytest.mark.parametrize("size", [1, 3, 8])
    def test_is_unbiased_on_a_linear_model(self, size):
        """40,000 pairs of micro-batches, drawn from 50 samples with replacement.

        The exact trace is met within four standard errors, each of them below 2 % of it.
        """
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(50, 4, generator=generator, dtype=torch.float64)
        targets = torch.randn(50, generator=generator, dtype=torch.float64)
        weight = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64)
        # Gradient of (w x - y)^2 for each sample.
        gradients = 2 * (features @ weight - targets)[:, None] * features
        exact = float(gradients.var(0, correction=0).sum())
        drawn = torch.randint(50, (40_000, 2, size), generator=generator)
        means = gradients[drawn].mean(2)
        # Weights and biases are lists of tensors; split the four numbers into two of them.
        estimates = [two_microbatch_variance([a[:1], a[1:]], [b[:1], b[1:]], size) for a, b in means]
        error = np.std(estimates) / len(estimates) ** 0.5
        assert error < 0.02 * exact
        assert np.mean(estimates) == pytest.approx(exact, abs=4 * error)

    def test_of_equal_gradients_is_zero(self):
        gradient = [torch.ones(3), torch.ones(2)]
        assert two_microbatch_variance(gradient, gradient, 5) == 0.0


class NoisyBins(nn.Module):
    """With x0 = 0 the gradient of one sample is `-2 s(t) eps / D`: covariance trace `4 s(t)^2 / D`, by bins of t."""

    def __init__(self, scale, dimensions):
        super().__init__()
        self.register_buffer("scale", scale)
        self.offset = nn.Parameter(torch.zeros(dimensions))

    def forward(self, x, timesteps):
        return self.scale[timesteps][:, None] * self.offset.expand(len(x), -1)


def observe(sampler, model, x0, steps=1, **conditioning):
    """Optimizer steps that move nothing, so that the variances stay what they are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(steps):
        with sampler.observe(model, x0, **conditioning):
            optimizer.step()


class TestDensity:
    def test_is_proportional_to_the_variances_with_a_floor(self, short_scheduler):
        """Four bins; 64 dimensions and a long memory: every variance within 10 % of the exact one."""
        scale = torch.tensor([1.0, 2.0, 0.5, 3.0]).repeat_interleave(TOTAL // 4)
        sampler = GradientVarianceSampler(
            short_scheduler, num_bins=4, measure_every=1, decay=0.98, floor=0.1, microbatch_size=4, seed=0
        )
        observe(sampler, NoisyBins(scale, 64), torch.zeros(8, 64), steps=800)
        measured = sampler.state_dict()["variance"]
        np.testing.assert_allclose(measured, 4 * scale[:: TOTAL // 4] ** 2 / 64, rtol=0.1)
        expected = 0.9 * scale**2 / (scale**2).sum() + 0.1 / TOTAL
        np.testing.assert_allclose(sampler.density(), expected, rtol=0.1)
        per_timestep = measured.repeat_interleave(TOTAL // 4)
        np.testing.assert_allclose(sampler.density(), 0.9 * per_timestep / per_timestep.sum() + 0.1 / TOTAL)
        drawn = torch.bincount(sampler.sample(torch.zeros(50_000, 1)), minlength=TOTAL) / 50_000
        np.testing.assert_allclose(drawn, sampler.density(), atol=0.01)

    def test_is_uniform_until_every_bin_was_measured(self, short_scheduler):
        sampler = GradientVarianceSampler(short_scheduler, num_bins=4, measure_every=1, seed=0)
        model = NoisyBins(torch.linspace(1, 2, TOTAL), 8)
        for _ in range(3):
            observe(sampler, model, torch.zeros(8, 8))
            np.testing.assert_allclose(sampler.density(), 1 / TOTAL)
        observe(sampler, model, torch.zeros(8, 8))
        assert sampler.density().std() > 0
        assert sampler.density().sum() == pytest.approx(1)

    def test_bins_are_measured_in_turn(self, short_scheduler):
        seen = []
        model = NoisyBins(torch.ones(TOTAL), 8)
        model.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        sampler = GradientVarianceSampler(short_scheduler, num_bins=4, measure_every=1, microbatch_size=3, seed=0)
        observe(sampler, model, torch.zeros(8, 8), steps=5)
        assert [len(times) for times in seen] == [3] * 10
        bins = [set((times // 3).tolist()) for times in seen]
        assert bins == [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}, {0}, {0}]

    def test_no_variance_anywhere_is_uniform(self, short_scheduler):
        sampler = GradientVarianceSampler(short_scheduler, num_bins=3, measure_every=1, seed=0)
        observe(sampler, NoisyBins(torch.zeros(TOTAL), 8), torch.zeros(8, 8), steps=4)
        np.testing.assert_allclose(sampler.density(), 1 / TOTAL)


class TestObserve:
    def test_leaves_no_trace(self, short_scheduler, model, x0):
        model.norm.eval()
        modes = [module.training for module in model.modules()]
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        gradients = [parameter.grad for parameter in model.parameters()]
        copies = [gradient.clone() for gradient in gradients]
        state = {key: value.clone() for key, value in model.state_dict().items()}
        random = torch.get_rng_state()
        sampler = GradientVarianceSampler(short_scheduler, measure_every=1, seed=0)
        with sampler.observe(model, x0, shift=torch.ones(5)):
            assert int(sampler.state_dict()["measured"]) == 1
        for parameter, gradient, copy in zip(model.parameters(), gradients, copies, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, copy)
        assert [key for key, value in model.state_dict().items() if not torch.equal(value, state[key])] == []
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random)

    def test_cadence_and_cost(self, short_scheduler, model, x0):
        """Two forwards on every third step, also when a step is made of two micro-batches."""
        calls = []
        model.register_forward_hook(lambda *_: calls.append(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sampler = GradientVarianceSampler(short_scheduler, measure_every=3, seed=0)
        added = []
        for _ in range(6):
            for micro in range(2):
                loss = model(x0, torch.arange(5)).pow(2).mean()
                before = len(calls)
                with sampler.observe(model, x0):
                    loss.backward()
                    if micro == 1:
                        optimizer.step()
                        optimizer.zero_grad()
                added.append(len(calls) - before)
        assert added == [2, 0, 0, 0, 0, 0] * 2
        assert sampler.steps == 6

    def test_a_gradient_that_is_not_finite_is_dropped(self, short_scheduler, model, x0):
        sampler = GradientVarianceSampler(short_scheduler, measure_every=1, num_bins=2, seed=0)
        x0[0, 0, 0, 0] = torch.nan
        with pytest.warns(UserWarning, match="a gradient is NaN or infinite; the measurement is dropped"):
            observe(sampler, model, x0)
        observe(sampler, model, x0)
        assert sampler.dropped == 2
        assert int(sampler.state_dict()["measured"]) == 0
        observe(sampler, model, torch.randn(5, 2, 4, 4), steps=2)
        assert int(sampler.state_dict()["measured"]) == 2
        assert sampler.density().isfinite().all()

    def test_frozen_and_unused_parameters(self, short_scheduler):
        model = NoisyBins(torch.ones(TOTAL), 8)
        model.unused = nn.Parameter(torch.ones(3))
        model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        sampler = GradientVarianceSampler(short_scheduler, measure_every=1, seed=0)
        observe(sampler, model, torch.zeros(8, 8))
        assert int(sampler.state_dict()["measured"]) == 1

    def test_an_error_inside_leaves_the_sampler_usable(self, short_scheduler, model, x0):
        sampler = GradientVarianceSampler(short_scheduler, measure_every=1, seed=0)
        with pytest.raises(KeyError), sampler.observe(model, x0):
            raise KeyError
        observe(sampler, model, x0)
        assert int(sampler.state_dict()["measured"]) == 2

    def test_one_sample_is_too_few(self, short_scheduler, model, x0):
        sampler = GradientVarianceSampler(short_scheduler, measure_every=1, seed=0)
        with pytest.raises(ValueError, match="batches of at least 2 samples"):
            with sampler.observe(model, x0[:1]):
                pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_bins": 0}, "num_bins, measure_every and microbatch_size must be at least 1"),
        ({"measure_every": 0}, "at least 1"),
        ({"microbatch_size": 0}, "at least 1"),
        ({"decay": 1.5}, r"decay must lie in 0\.\.1"),
        ({"floor": -0.1}, r"floor must lie in 0\.\.1"),
    ],
)
def test_wrong_options_are_refused(short_scheduler, options, message):
    with pytest.raises(ValueError, match=message):
        GradientVarianceSampler(short_scheduler, **options)
