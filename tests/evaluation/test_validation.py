"""The validation loss is a function of model and held-out samples alone, and right."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from diffusers_adaptive_ts import DiffusionObjective
from diffusers_adaptive_ts.evaluation.validation import StableValidation


class Zero(torch.nn.Module):
    """Predicts zero noise and remembers what it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def forward(self, x, t):
        self.asked.append(t.clone())
        return torch.zeros_like(x)


@pytest.fixture
def objective():
    return DiffusionObjective.from_scheduler(DDPMScheduler(num_train_timesteps=100))


def test_timesteps_cover_every_stratum_exactly_once(objective):
    validation = StableValidation(objective, torch.zeros(25, 1, 4, 4), draws=4)
    assert sorted(validation.timesteps().flatten().tolist()) == list(range(100))


def test_values_equal_an_independent_computation(objective):
    x0 = torch.randn(25, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    result = StableValidation(objective, x0, draws=4, num_ranges=4).measure(Zero())
    # A model that predicts 0 has the error eps^2, whose mean over 100 draws of 16 pixels is 1 +- 0.035.
    assert result["simple"] == pytest.approx(1.0, abs=0.15)
    abar, beta = objective.alphas_cumprod.numpy(), objective.betas.numpy()
    sigma2 = beta.copy()
    sigma2[0] = beta[1] * (1 - abar[0]) / (1 - abar[1])
    c = beta**2 / (2 * sigma2 * (1 - beta) * (1 - abar))
    assert result["vlb_bits"] == pytest.approx(c.sum() / np.log(2), rel=0.3)
    assert sum(part["vlb_bits"] for part in result["ranges"]) == pytest.approx(result["vlb_bits"])
    assert np.mean([part["simple"] for part in result["ranges"]]) == pytest.approx(result["simple"])
    assert [(part["from"], part["to"]) for part in result["ranges"]] == [(0, 24), (25, 49), (50, 74), (75, 99)]


def test_nothing_but_samples_and_model_matters(objective):
    x0 = torch.randn(10, 1, 4, 4)
    model = torch.nn.Conv2d(1, 1, 3, padding=1)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x, t):
            return self.net(x)

    torch.manual_seed(1)
    first = StableValidation(objective, x0, batch_size=3).measure(Net())
    torch.manual_seed(2)
    second = StableValidation(objective, x0, batch_size=10).measure(Net())
    assert first["simple"] == pytest.approx(second["simple"], rel=1e-5)
    assert first["vlb_bits"] == pytest.approx(second["vlb_bits"], rel=1e-5)


def test_the_model_is_left_as_it_was(objective):
    model = Zero().train()
    before = torch.get_rng_state()
    StableValidation(objective, torch.zeros(4, 1, 4, 4)).measure(model)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


def test_no_samples_is_an_error(objective):
    with pytest.raises(ValueError, match="no held-out samples"):
        StableValidation(objective, torch.zeros(0, 1, 4, 4))
