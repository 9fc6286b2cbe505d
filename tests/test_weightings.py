"""Every weighting against its formula, written out for each prediction type."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr

from diffusers_adaptive_ts import Weighting, list_weightings, make_sampler, make_weighting, register_weighting
from diffusers_adaptive_ts.weightings import _WEIGHTINGS, LearnedUncertainty, min_snr, weighting_entry
from tests.conftest import PREDICTION_TYPES, SCHEDULES, make_scheduler

GAMMA = 5.0

# METHODS.md, section 2, one formula of the SNR for each prediction type.
FORMULAS = {
    ("epsilon", "epsilon"): lambda snr: np.ones_like(snr),
    ("epsilon", "sample"): lambda snr: snr,
    ("epsilon", "v_prediction"): lambda snr: snr / (snr + 1),
    ("min_snr", "epsilon"): lambda snr: np.minimum(snr, GAMMA) / snr,
    ("min_snr", "sample"): lambda snr: np.minimum(snr, GAMMA),
    ("min_snr", "v_prediction"): lambda snr: np.minimum(snr, GAMMA) / (snr + 1),
    ("soft_min_snr", "epsilon"): lambda snr: GAMMA / (snr + GAMMA),
    ("soft_min_snr", "sample"): lambda snr: snr * GAMMA / (snr + GAMMA),
    ("soft_min_snr", "v_prediction"): lambda snr: snr * GAMMA / ((snr + GAMMA) * (snr + 1)),
    ("p2", "epsilon"): lambda snr: 1 / (1 + snr),
    ("p2", "sample"): lambda snr: snr / (1 + snr),
    ("p2", "v_prediction"): lambda snr: snr / (1 + snr) ** 2,
    ("debiased", "epsilon"): lambda snr: snr**-0.5,
    ("debiased", "sample"): lambda snr: snr**0.5,
    ("debiased", "v_prediction"): lambda snr: snr**0.5 / (snr + 1),
    ("speed_v1", "epsilon"): lambda snr: 1 / (1 + snr),
    ("speed_v1", "sample"): lambda snr: snr / (1 + snr),
    ("speed_v1", "v_prediction"): lambda snr: snr / (1 + snr) ** 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "prediction_type"), FORMULAS, ids="-".join)
def test_weights_are_the_papers_formula_of_diffusers_snr(name, prediction_type, schedule):
    """Relative tolerance 2e-3: diffusers' SNR is computed in float32, and 1 - abar loses digits there."""
    scheduler = make_scheduler(1000, schedule, prediction_type=prediction_type)
    snr = compute_snr(scheduler, torch.arange(1000)).double().numpy()
    table = make_weighting(name, scheduler).table().numpy()
    assert np.allclose(table, FORMULAS[name, prediction_type](snr), rtol=2e-3, atol=0)


def test_min_snr_is_the_weight_of_diffusers_training_script():
    """`train_text_to_image.py` divides `min(SNR, gamma)` by SNR for eps and by SNR + 1 for v."""
    for prediction_type, extra in (("epsilon", 0), ("v_prediction", 1)):
        scheduler = make_scheduler(1000, "scaled_linear", prediction_type=prediction_type)
        timesteps = torch.arange(1000)
        snr = compute_snr(scheduler, timesteps)
        theirs = torch.stack([snr, 3.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0] / (snr + extra)
        ours = make_weighting("min_snr", scheduler, gamma=3.0).weights(timesteps)
        assert torch.allclose(ours, theirs, rtol=2e-3)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_uniform_is_one_on_the_networks_own_target(prediction_type):
    assert (make_weighting("uniform", make_scheduler(50, prediction_type=prediction_type)).table() == 1).all()


def test_p2_with_gamma_1_is_one_minus_abar_for_eps():
    scheduler = make_scheduler(1000, "linear")
    expected = 1 - scheduler.alphas_cumprod.double()
    assert torch.allclose(make_weighting("p2", scheduler).table(), expected, rtol=1e-12)


def test_p2_follows_gamma_and_k():
    scheduler = make_scheduler(1000, "linear")
    snr = scheduler.alphas_cumprod.double() / (1 - scheduler.alphas_cumprod.double())
    expected = 1 / (2.0 + snr) ** 0.5
    assert torch.allclose(make_weighting("p2", scheduler, gamma=0.5, k=2.0).table(), expected, rtol=1e-12)


def test_p2_with_gamma_0_is_plain_and_says_so(scheduler):
    with pytest.warns(UserWarning, match="gamma=0 is plain DDPM"):
        weighting = make_weighting("p2", scheduler, gamma=0.0)
    assert (weighting.table() == 1).all()


@pytest.mark.parametrize(("tau", "start"), [(None, 700), (642, 642)])
def test_speed_v2_is_the_scaled_change_of_the_noise_before_tau_and_one_after_it(tau, start):
    scheduler = make_scheduler(1000, "linear")
    noise = 1 - scheduler.alphas_cumprod.double().numpy()
    change = [(noise[min(t + 1, 999)] - noise[max(t - 1, 0)]) / (min(t + 1, 999) - max(t - 1, 0)) for t in range(1000)]
    low, high = min(change), max(change)
    expected = [0.4 + 0.2 * (rate - low) / (high - low) for rate in change[:start]] + [1.0] * (1000 - start)
    table = make_weighting("speed_v2", scheduler, tau=tau).table()
    assert table.tolist() == pytest.approx(expected, rel=1e-9)
    assert float(table[:start].min()) >= 0.4
    assert float(table[:start].max()) == pytest.approx(0.6)


def test_vlb_is_the_coefficient_of_the_bound_and_can_be_capped():
    scheduler = make_scheduler(1000)
    objective = make_sampler("uniform", scheduler).objective
    free, capped = make_weighting("vlb", scheduler).table(), make_weighting("vlb", scheduler, cap=1.0).table()
    assert torch.equal(free, objective.vlb_coefficients)
    assert torch.equal(capped, objective.vlb_coefficients.clamp(max=1.0))
    assert free.max() > 400


@pytest.mark.parametrize("name", ["min_snr", "soft_min_snr"])
def test_at_zero_snr_the_eps_weight_is_one(name):
    table = make_weighting(name, make_scheduler(50, "linear", rescale_betas_zero_snr=True)).table()
    assert float(table[-1]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("min_snr", {"gamma": 0}, "min_snr: gamma must be above 0, got 0"),
        ("min_snr", {"gamma": -5.0}, "min_snr: gamma must be above 0, got -5.0"),
        ("min_snr", {"gamma": math.nan}, "min_snr: gamma must be above 0, got nan"),
        ("soft_min_snr", {"gamma": 0.0}, "soft_min_snr: gamma must be above 0, got 0.0"),
        ("soft_min_snr", {"gamma": math.inf}, "soft_min_snr' gave a negative, infinite or NaN weight"),
        ("p2", {"gamma": -1.0}, "p2: gamma must be at least 0, got -1.0"),
        ("p2", {"k": 0.0}, "p2: k must be above 0, got 0.0"),
        ("speed_v2", {"lam": 1.5}, r"speed_v2: lam must lie in 0\.\.1, got 1.5"),
        ("speed_v2", {"tau": 51}, r"speed_v2: tau must lie in 1\.\.50, got 51"),
        ("vlb", {"cap": 0.0}, "vlb: cap must be above 0, got 0.0"),
        ("learned_uncertainty", {"learning_rate": 0.0}, "learned_uncertainty: learning_rate must be above 0"),
    ],
)
def test_options_out_of_range_are_refused_by_name_and_value(name, options, complaint, scheduler):
    with pytest.raises(ValueError, match=complaint):
        make_weighting(name, scheduler, **options)


@pytest.mark.parametrize("value", ["high", [5.0]])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("min_snr", "gamma"),
        ("soft_min_snr", "gamma"),
        ("p2", "gamma"),
        ("p2", "k"),
        ("speed_v2", "lam"),
        ("speed_v2", "tau"),
        ("vlb", "cap"),
        ("learned_uncertainty", "learning_rate"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name_and_value(name, option, value, scheduler):
    complaint = re.escape(f"The weighting '{name}' cannot be built with {option}={value}: ")
    with pytest.raises(ValueError, match=complaint):
        make_weighting(name, scheduler, **{option: value})
    with pytest.raises(ValueError, match=complaint):
        make_sampler("uniform", scheduler, weighting=name, weighting_options={option: value})


def test_what_is_registered_can_be_looked_up():
    assert weighting_entry("min_snr") is min_snr
    assert weighting_entry("learned_uncertainty") is LearnedUncertainty
    with pytest.raises(ValueError, match=r"Unknown weighting 'min-snr'. Did you mean 'min_snr'\?"):
        weighting_entry("min-snr")


def test_a_loss_is_the_mean_of_weights_times_errors(scheduler):
    weighting, timesteps = make_weighting("min_snr", scheduler), torch.tensor([0, 10, 49])
    errors, importance = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.0, 2.0])
    weights = weighting.table()[timesteps]
    assert float(weighting.loss(errors, timesteps)) == pytest.approx(float((weights * errors).mean()), rel=1e-6)
    weighted = float((weights * errors * importance).mean())
    assert float(weighting.loss(errors, timesteps, importance)) == pytest.approx(weighted, rel=1e-6)


def follow_synthetic_errors(weighting, log_mean, steps, batch_size=512):
    """Show it errors of mean `exp(log_mean[t])` that scatter as a chi-square with 4 degrees of freedom."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        timesteps = torch.randint(len(log_mean), (batch_size,), generator=generator)
        scatter = torch.randn(4, batch_size, generator=generator).pow(2).mean(0)
        weighting.loss(log_mean[timesteps].exp() * scatter, timesteps)


def test_learned_uncertainty_converges_to_the_log_of_the_mean_error():
    """Within 0.15 everywhere and 0.05 on average, over errors that span a factor of 150."""
    scheduler = make_scheduler(100)
    weighting = make_weighting("learned_uncertainty", scheduler)
    log_mean = torch.linspace(-5, 0, 100) + torch.sin(torch.linspace(0, 6, 100)) / 2
    start = (weighting.log_variance() - log_mean).abs()
    follow_synthetic_errors(weighting, log_mean, steps=2500)
    distance = (weighting.log_variance() - log_mean).abs()
    assert start.max() > 4
    assert distance.max() < 0.15
    assert distance.mean() < 0.05
    assert torch.allclose(weighting.table(), (-weighting.log_variance()).exp().double())


def test_learned_uncertainty_starts_as_the_plain_loss_and_adds_u(scheduler):
    weighting, timesteps = make_weighting("learned_uncertainty", scheduler), torch.tensor([0, 20, 49])
    errors = torch.tensor([1.0, 2.0, 6.0])
    assert float(weighting.loss(errors, timesteps)) == pytest.approx(3.0)
    u = weighting.log_variance()[timesteps]
    with torch.no_grad():
        later = float(weighting.loss(errors, timesteps))
    assert later == pytest.approx(float((errors / u.exp() + u).mean()), rel=1e-6)
    assert not torch.equal(u, torch.zeros(3))


def test_learned_uncertainty_gives_the_model_the_gradient_of_the_weighted_error(scheduler):
    weighting, timesteps = make_weighting("learned_uncertainty", scheduler), torch.tensor([5, 40])
    follow_synthetic_errors(weighting, torch.linspace(-3, 0, 50), steps=50)
    errors = torch.tensor([1.0, 2.0], requires_grad=True)
    weights = weighting.weights(timesteps)
    weighting.loss(errors, timesteps).backward()
    assert torch.allclose(errors.grad, weights / 2)


def test_learned_uncertainty_passes_over_errors_that_are_not_finite(scheduler):
    clean, dirty = (make_weighting("learned_uncertainty", scheduler) for _ in range(2))
    timesteps = torch.tensor([3, 7, 9])
    clean.loss(torch.tensor([1.0, 4.0]), timesteps[:2])
    dirty.loss(torch.tensor([1.0, 4.0, math.nan]), timesteps)
    dirty.loss(torch.full((3,), math.inf), timesteps)
    assert torch.equal(clean.log_variance(), dirty.log_variance())


def test_unknown_names_are_refused_with_a_suggestion(scheduler):
    with pytest.raises(ValueError, match=r"Unknown weighting 'min-snr'. Did you mean 'min_snr'\? Available: debiased"):
        make_weighting("min-snr", scheduler)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="A weighting named 'p2' is registered already"):
        register_weighting("p2")(lambda objective: objective.betas)


@pytest.fixture
def registered_half():
    @register_weighting("half")
    def half(objective, share: float = 0.5):
        return torch.full_like(objective.betas, share)

    yield "half"
    del _WEIGHTINGS._entries["half"]


def test_a_registered_function_is_a_weighting_of_its_own(registered_half, tmp_path, scheduler):
    assert registered_half in list_weightings()
    sampler = make_sampler("uniform", scheduler, weighting="half", weighting_options={"share": 0.25})
    assert (sampler.weights(torch.arange(50)) == 0.25).all()
    sampler.save_pretrained(tmp_path)
    assert (type(sampler).from_pretrained(tmp_path).weights(torch.arange(50)) == 0.25).all()


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_weighting_of_ones_own_must_be_finite_and_not_negative(value):
    with pytest.raises(ValueError, match="'mine' gave a negative, infinite or NaN weight"):
        Weighting("mine", torch.tensor([1.0, value]))


def test_a_weighting_built_for_another_number_of_timesteps_is_refused(scheduler):
    with pytest.raises(ValueError, match=r"'min_snr' has weights of shape \(10,\), but the scheduler has 50"):
        make_sampler("uniform", scheduler, weighting=make_weighting("min_snr", make_scheduler(10)))


def test_options_beside_a_built_weighting_are_refused(scheduler):
    with pytest.raises(ValueError, match="built already"):
        make_sampler("uniform", scheduler, weighting=make_weighting("p2", scheduler), weighting_options={"gamma": 1.0})


def test_no_weighting_warns_when_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in list_weightings():
            make_weighting(name, make_scheduler(1000, "linear"))
