"""The adaptive sampler's policy update, draws and options."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from scipy import special, stats

from diffusers_adaptive_ts import AdaptiveTimestepSampler, make_sampler
from tests.fragile import TOTAL


def with_policy(scheduler, bias, **options):
    """A sampler whose policy gives `a, b = softplus(bias)` for every x0, and whose gradients are never clipped."""
    sampler = AdaptiveTimestepSampler(
        scheduler, in_channels=1, **{"seed": 0, "max_grad_norm": 1e9, "advantage": "raw", **options}
    )
    with torch.no_grad():
        sampler.policy.head.bias.copy_(torch.tensor(bias))
    sampler.policy.forward = lambda x0: sampler.policy.typical().expand(len(x0), -1)
    return sampler


def parameters_of(sampler):
    return np.logaddexp(0, sampler.policy.head.bias.detach().double().numpy()) + 1e-5


def bias_gradient(sampler, batch_size, rewards):
    """Of the loss of one update on the last layer's bias, from `batch_size` draws of one x0."""
    x0 = torch.zeros(batch_size, 1, 1, 1)
    sampler.sample(x0)
    u = sampler._drawn.clone()
    before = parameters_of(sampler)
    slope = special.expit(sampler.policy.head.bias.detach().double().numpy())
    sampler._learn(x0, u, torch.as_tensor(rewards(u) if callable(rewards) else rewards).double().expand(batch_size))
    return sampler.policy.head.bias.grad.double().numpy(), u.numpy(), before, slope


def score(u, a, b):
    """Gradient of `log Beta(u; a, b)` in a and b."""
    return np.stack(
        [
            np.log(u) - special.digamma(a) + special.digamma(a + b),
            np.log1p(-u) - special.digamma(b) + special.digamma(a + b),
        ]
    )


def entropy(a, b):
    return stats.beta(a, b).entropy()


def entropy_gradient(a, b, step=1e-5):
    return np.array(
        [
            (entropy(a + step, b) - entropy(a - step, b)) / (2 * step),
            (entropy(a, b + step) - entropy(a, b - step)) / (2 * step),
        ]
    )


class TestUpdate:
    @pytest.mark.parametrize("coef", [0.0, 0.01, 1.0])
    def test_raw_gradient_is_equation_13(self, short_scheduler, coef):
        """`-mean(r_i grad log Beta(u_i)) - coef grad H`, by the digamma functions of scipy."""
        sampler = with_policy(short_scheduler, [1.5, 0.2], entropy_coef=coef)
        gradient, u, (a, b), slope = bias_gradient(sampler, 64, lambda u: torch.sin(5 * u))
        expected = -(np.sin(5 * u) * score(u, a, b)).mean(1) - coef * entropy_gradient(a, b)
        np.testing.assert_allclose(gradient, expected * slope, rtol=2e-3, atol=1e-5)

    @pytest.mark.parametrize("bias", [[1.5, 0.2], [-0.8, -0.5], [3.0, 3.0]])
    def test_authors_entropy_is_that_of_half_the_square(self, short_scheduler, bias):
        """Monte Carlo with 400,000 draws: the expected gradient of the loss is `coef grad(H^2 / 2)`, within 3 %.

        The smallest entropy here is -0.5 nats; five standard errors of the mean lie below those 3 %.
        """
        sampler = with_policy(short_scheduler, bias, entropy="authors", entropy_coef=0.7)
        gradient, _, (a, b), slope = bias_gradient(sampler, 400_000, 0.0)
        expected = 0.7 * entropy(a, b) * entropy_gradient(a, b) * slope
        assert np.abs(gradient - expected).max() < 0.03 * np.abs(expected).max()

    def test_authors_form_differs_from_the_bonus(self, short_scheduler):
        gradients = []
        for form in ("bonus", "authors"):
            sampler = with_policy(short_scheduler, [1.5, 0.2], entropy=form, entropy_coef=0.7)
            gradients.append(bias_gradient(sampler, 64, 1.0)[0])
        assert not np.allclose(*gradients, rtol=0.1)

    @pytest.mark.parametrize("limit", [5e-4, 1e-5, 1e-2])
    @pytest.mark.parametrize(("policy", "learning_rate"), [("beta", 0.05), ("histogram", 1.0)])
    @pytest.mark.filterwarnings("ignore:The timestep policy has collapsed")  # without a limit it does
    def test_max_divergence_is_kept(self, short_scheduler, limit, policy, learning_rate):
        """KL divergence on the batch after each of 20 updates with a learning rate that would go much further."""
        moved = []
        for max_divergence in (limit, None):
            sampler = AdaptiveTimestepSampler(
                short_scheduler, 1, policy=policy, learning_rate=learning_rate, max_divergence=max_divergence, seed=0
            )
            moved.append([])
            for event in range(20):
                x0 = torch.randn(8, 1, 4, 4)
                sampler.sample(x0)
                with torch.no_grad():
                    before = sampler.policy(x0).clone()
                sampler._learn(x0, sampler._drawn, torch.full((8,), float((-1) ** event * event)))
                with torch.no_grad():
                    moved[-1].append(float(sampler.policy.divergence(before, sampler.policy(x0)).mean()))
            assert all(parameter.isfinite().all() for parameter in sampler.policy.parameters())
        assert max(moved[0]) <= limit * (1 + 1e-5)
        assert max(moved[0]) > 0.5 * limit  # it moves, too
        assert max(moved[1]) > limit

    def test_entropy_alone_leads_back_to_uniform(self, short_scheduler):
        sampler = with_policy(short_scheduler, [2.0, 0.5], entropy_coef=1.0, learning_rate=0.02, max_divergence=None)
        x0 = torch.zeros(8, 1, 1, 1)
        for _ in range(200):
            sampler.sample(x0)
            sampler._learn(x0, sampler._drawn, torch.zeros(8))
        sampler.sample(x0)
        density = sampler.density()
        assert density.min() > 0.9 / TOTAL
        assert density.max() < 1.1 / TOTAL


class TestUniformFloor:
    def test_density_and_draws(self, short_scheduler):
        sampler = with_policy(short_scheduler, [6.0, -4.0], uniform_floor=0.4)
        timesteps = sampler.sample(torch.zeros(60_000, 1, 1, 1))
        density = sampler.density().numpy()
        assert density.min() >= 0.4 / TOTAL
        assert density[-1] > 0.6
        counts = np.bincount(timesteps.numpy(), minlength=TOTAL)
        assert stats.chisquare(counts, density * len(timesteps)).pvalue > 1e-3

    def test_all_uniform_learns_nothing(self, short_scheduler):
        sampler = with_policy(short_scheduler, [1.5, 0.2], uniform_floor=1.0, entropy_coef=0.0)
        gradient, *_ = bias_gradient(sampler, 64, 1.0)
        np.testing.assert_array_equal(gradient, 0)
        np.testing.assert_allclose(sampler.density(), 1 / TOTAL)

    def test_the_score_is_that_of_the_mixture(self, short_scheduler):
        """The mean score of a distribution under itself is 0; that of the Beta alone under the mixture is not."""
        sampler = with_policy(short_scheduler, [1.8, -0.5], uniform_floor=0.5, entropy_coef=0.0)
        gradient, u, (a, b), slope = bias_gradient(sampler, 400_000, 1.0)
        of_the_beta_alone = score(u, a, b).mean(1) * slope
        assert np.abs(gradient).max() < 0.02 * np.abs(of_the_beta_alone).max()


class TestDensity:
    def test_before_the_first_batch(self, short_scheduler):
        with pytest.raises(ValueError, match=r"built with the first batch; give in_channels=\.\.\. to ask"):
            AdaptiveTimestepSampler(short_scheduler).density()
        for options in ({"in_channels": 3}, {"policy": "histogram"}):
            density = AdaptiveTimestepSampler(short_scheduler, **options).density()
            assert density.shape == (TOTAL,)
            assert density.dtype == torch.float64
            np.testing.assert_allclose(density, 1 / TOTAL, rtol=0.05)

    def test_is_the_average_over_the_last_samples(self, short_scheduler):
        """A policy that looks at x0: half of the samples are drawn early, half late."""
        sampler = AdaptiveTimestepSampler(short_scheduler, 1, seed=0)
        sampler.policy.forward = lambda x0: (
            torch.where(x0.flatten(1).mean(1, keepdim=True) > 0, 1.0, 0.0) * torch.tensor([[4.0, -4.0]])
            + torch.tensor([[1.0, 5.0]])
        )
        x0 = torch.ones(512, 1, 2, 2)
        x0[::2] = -1
        sampler.sample(x0)
        early, late = stats.beta(1, 5), stats.beta(5, 1)
        edges = np.arange(TOTAL + 1) / TOTAL
        expected = (np.diff(early.cdf(edges)) + np.diff(late.cdf(edges))) / 2
        np.testing.assert_allclose(sampler.density(), expected, atol=1e-6)
        sampler.sample(torch.ones(512, 1, 2, 2))
        np.testing.assert_allclose(sampler.density(), np.diff(late.cdf(edges)), atol=1e-6)

    def test_stratified_draws_cover_the_batch(self):
        scheduler = DDPMScheduler(num_train_timesteps=16)
        sampler = AdaptiveTimestepSampler(scheduler, policy="histogram", stratified=True, seed=0)
        for _ in range(3):
            assert sorted(sampler.sample(torch.zeros(16, 1, 1, 1)).tolist()) == list(range(16))


class TestCollapse:
    def test_is_said_once(self, short_scheduler):
        sampler = with_policy(short_scheduler, [5.0, -5.0])
        x0 = torch.zeros(4, 1, 1, 1)
        sampler.sample(x0)
        with pytest.warns(
            UserWarning, match=r"policy has collapsed \(entropy -\d.* Raise entropy_coef or uniform_floor"
        ):
            sampler._learn(x0, sampler._drawn, torch.zeros(4))
        sampler._learn(x0, sampler._drawn, torch.zeros(4))

    def test_not_of_a_policy_that_only_leans(self, short_scheduler):
        sampler = with_policy(short_scheduler, [3.0, 0.5])
        x0 = torch.zeros(4, 1, 1, 1)
        sampler.sample(x0)
        sampler._learn(x0, sampler._drawn, torch.zeros(4))  # a warning would be an error


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"estimator": "papr"}, "Unknown estimator 'papr'. Did you mean 'paper'"),
            ({"policy": "gamma_net"}, "Unknown policy 'gamma_net'.* Available: beta, histogram"),
            (
                {"estimator_options": {"que_size": 5}},
                "The estimator 'paper' has no option 'que_size'. Did you mean 'queue_size'.* It takes: queue_size,",
            ),
            ({"estimator_options": {"selector": "f_statistics"}}, "Did you mean 'f_statistic'"),
            ({"estimator_options": {"objective": 1}}, "has no option 'objective'"),
            (
                {"policy_options": {"hidden_chanels": 5}},
                "The policy 'beta' has no option 'hidden_chanels'. Did you mean 'hidden_channels'",
            ),
            ({"policy": "histogram", "policy_options": {"depth": 5}}, "'histogram' has no option 'depth'.*num_bins"),
            ({"policy_options": {"in_channels": 5}}, "has no option 'in_channels'"),
            ({"estimator_options": {"num_selected": 13}}, r"\(\|S\|\) must lie in 1..12"),
            ({"in_channels": 0}, "in_channels"),
            ({"update_every": 0}, "update_every must be at least 1"),
            ({"max_grad_norm": 0}, "max_grad_norm above 0"),
            ({"entropy_coef": -1.0}, "entropy_coef at least 0"),
            ({"entropy": "none"}, "entropy must be 'bonus' or 'authors', got 'none'"),
            ({"advantage": "normalised"}, "advantage must be 'normalized' or 'raw', got 'normalised'"),
            ({"learning_rate": 0.0}, "learning_rate must be above 0"),
            ({"max_divergence": 0.0}, "max_divergence must be above 0 or None"),
            ({"uniform_floor": 1.5}, r"uniform_floor must lie in 0\.\.1, got 1\.5"),
            ({"importance_weighting": True}, "takes no importance weights"),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_wrong_ones_are_refused(self, short_scheduler, options, message):
        with pytest.raises(ValueError, match=message):
            AdaptiveTimestepSampler(short_scheduler, **options)

    def test_a_mistyped_one_is_named(self, short_scheduler):
        with pytest.raises(ValueError, match=r"has no option 'update_evry'\. Did you mean 'update_every'"):
            make_sampler("adaptive", short_scheduler, update_evry=3)

    def test_another_number_of_channels(self, short_scheduler):
        sampler = AdaptiveTimestepSampler(short_scheduler, in_channels=3)
        with pytest.raises(
            ValueError, match=r"built for 3 channels, but x0 has shape \(2, 4, 8, 8\). Give in_channels=4"
        ):
            sampler.sample(torch.zeros(2, 4, 8, 8))
        lazy = AdaptiveTimestepSampler(short_scheduler)
        lazy.sample(torch.zeros(2, 4, 8, 8))
        assert lazy.options["in_channels"] == 4
        with pytest.raises(ValueError, match="built for 4 channels"):
            lazy.sample(torch.zeros(2, 3, 8, 8))
        histogram = AdaptiveTimestepSampler(short_scheduler, policy="histogram")
        for channels in (3, 4):
            assert histogram.sample(torch.zeros(2, channels, 8, 8)).shape == (2,)

    @pytest.mark.parametrize(
        ("schedule", "advantage", "policy", "rate"),
        [
            ("linear", "normalized", "beta", 1e-3),
            ("linear", "raw", "beta", 1e-2),
            ("scaled_linear", "raw", "beta", 1e-2),
            ("squaredcos_cap_v2", "raw", "beta", 1e-3),
            ("linear", "normalized", "histogram", 3e-2),
        ],
    )
    def test_learning_rate(self, schedule, advantage, policy, rate):
        scheduler = DDPMScheduler(num_train_timesteps=TOTAL, beta_schedule=schedule)
        sampler = AdaptiveTimestepSampler(scheduler, advantage=advantage, policy=policy)
        assert sampler.options["learning_rate"] == rate

    def test_the_papers_defaults(self, short_scheduler):
        sampler = AdaptiveTimestepSampler(short_scheduler)
        assert sampler.options["update_every"] == 40
        assert sampler.options["entropy_coef"] == 1e-2
        assert sampler.options["max_grad_norm"] == 1.0
        assert sampler.estimator.queue.state_tensors()["rows"].shape == (20, TOTAL)
        assert len(sampler.estimator.selected) == 3

    def test_estimator_options_arrive(self, short_scheduler):
        sampler = AdaptiveTimestepSampler(short_scheduler, estimator_options={"queue_size": 7, "num_selected": 5})
        assert sampler.estimator.queue.state_tensors()["rows"].shape == (7, TOTAL)
        assert len(sampler.estimator.selected) == 5

    def test_policy_options_arrive(self, short_scheduler):
        sampler = AdaptiveTimestepSampler(short_scheduler, 3, policy_options={"hidden_channels": 9, "depth": 3})
        linears = [module for module in sampler.policy.hidden if isinstance(module, torch.nn.Linear)]
        assert [linear.out_features for linear in linears] == [9, 9, 9]

    def test_seeds_decide_the_draws(self, short_scheduler):
        x0 = torch.zeros(32, 1, 4, 4)
        first, again, other = (AdaptiveTimestepSampler(short_scheduler, seed=seed).sample(x0) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


@pytest.mark.parametrize("policy", ["beta", "histogram"])
@pytest.mark.parametrize("in_channels", [None, 2])
def test_a_saved_sampler_goes_on_as_if_nothing_had_happened(tmp_path, short_scheduler, model, x0, policy, in_channels):
    """Also when the policy was built with the first batch. Three events, save, load, three more: the same state."""

    def train(sampler, model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            sampler.sample(x0)
            loss = model(x0, torch.arange(5) + step).pow(2).mean()
            optimizer.zero_grad()
            with sampler.observe(model, x0):
                loss.backward()
                optimizer.step()

    model.drop.p = 0.0
    sampler = AdaptiveTimestepSampler(short_scheduler, in_channels, policy=policy, update_every=1, seed=3)
    train(sampler, model, 3)
    sampler.save_pretrained(tmp_path)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    train(sampler, model, 3)
    loaded = AdaptiveTimestepSampler.from_pretrained(tmp_path)
    model.load_state_dict(weights)
    train(loaded, model, 3)
    first, second = sampler.state_dict(), loaded.state_dict()
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert loaded.events == 6
