"""How a policy learns: what a reward is compared with, and what a step may do."""

import math

import numpy as np
import pytest
import torch

from diffusers_adaptive_ts.policies import HistogramPolicy
from diffusers_adaptive_ts.policy_gradient import PolicyGradient


def make_learner(**options):
    given = {
        "learning_rate": 1e-2,
        "entropy_coef": 1e-2,
        "entropy": "bonus",
        "advantage": "normalized",
        "max_grad_norm": 1.0,
        "max_divergence": None,
        "uniform_floor": 0.0,
        **options,
    }
    return PolicyGradient(HistogramPolicy(num_bins=4), **given)


class TestAdvantages:
    def advantages(self, rewards, advantage="normalized"):
        learner = make_learner(advantage=advantage)
        given = []
        for reward in rewards:
            given.append(learner.advantages(torch.as_tensor(reward, dtype=torch.float64), torch.device("cpu")))
            learner.events += 1
        return torch.stack(given)

    def test_raw_is_the_reward_itself(self):
        rewards = torch.randn(5, 4).double()
        assert torch.equal(self.advantages(rewards, advantage="raw"), rewards)

    def test_normalised_compares_with_the_steps_before(self):
        """A running mean and spread by hand: plain averages for ten events, then a memory of 0.9."""
        rewards = torch.randn(30, 4).double() + 3
        given = self.advantages(rewards)
        assert (given == given[:, :1]).all()  # the batch shares one update, and one advantage
        mean = variance = 0.0
        for event, reward in enumerate(rewards.mean(1).tolist()):
            expected = 0.0 if event < 2 else float(np.clip((reward - mean) / math.sqrt(variance), -3, 3))
            assert float(given[event, 0]) == pytest.approx(expected, abs=1e-9)
            keep = min(event / (event + 1), 0.9)
            variance = keep * (variance + (1 - keep) * (reward - mean) ** 2)
            mean = keep * mean + (1 - keep) * reward
            if event < 9:
                seen = rewards.mean(1)[: event + 1]
                assert mean == pytest.approx(float(seen.mean()))
                assert variance == pytest.approx(float(seen.var(correction=0)), abs=1e-12)

    @pytest.mark.parametrize(("scale", "shift"), [(1e-9, 0.0), (1e9, 0.0), (1.0, 1e3)])
    def test_normalised_does_not_depend_on_scale_and_level(self, scale, shift):
        rewards = torch.randn(20, 4).double()
        plain = self.advantages(rewards)
        torch.testing.assert_close(self.advantages(rewards * scale + shift), plain, atol=1e-6, rtol=0)

    def test_normalised_is_bounded_and_survives_no_spread(self):
        rewards = [[1.0], [1.0], [1.0], [1.0], [1.0 + 1e-12], [1e30], [-1e30]]
        given = self.advantages(rewards)
        assert given.isfinite().all()
        assert given[:4].eq(0).all()
        assert given.abs().max() <= 3


def test_a_gradient_that_is_not_finite_changes_nothing():
    learner = make_learner(advantage="raw")
    before = learner.policy.logits.detach().clone()
    u = torch.tensor([0.1, 0.9], dtype=torch.float64)
    assert not learner.learn(torch.zeros(2, 1), u, torch.tensor([float("nan"), 1.0]))
    assert torch.equal(learner.policy.logits, before)
    assert int(learner.events) == 0


def test_rewarded_draws_become_likelier():
    learner = make_learner(advantage="raw", entropy_coef=0.0)
    u = torch.tensor([0.1, 0.9], dtype=torch.float64)
    for _ in range(20):
        assert learner.learn(torch.zeros(2, 1), u, torch.tensor([1.0, -1.0]))
    probabilities = learner.policy.typical()[0]
    assert probabilities[0] > 0.25 > probabilities[3]
