"""The objective against computations of its own: Gaussians in NumPy, and diffusers' scheduler."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from diffusers.training_utils import compute_snr

from diffusers_adaptive_ts import DiffusionObjective
from tests.conftest import PREDICTION_TYPES, SCHEDULES, make_scheduler


def objective_of(*args, **config):
    return DiffusionObjective.from_scheduler(make_scheduler(*args, **config))


def objective_in_float64(*args, **config):
    """Free of the scheduler's float32, which costs `1 - abar` up to three digits at the first timesteps."""
    scheduler = make_scheduler(*args, **config)
    betas = scheduler.betas.double()
    return DiffusionObjective(betas, torch.cumprod(1 - betas, 0), scheduler.config.prediction_type)


def x0_from_output(output, x_t, abar, prediction_type):
    """What x0 a network means by its output, from `x_t = sqrt(abar) x0 + sqrt(1 - abar) eps`."""
    if prediction_type == "sample":
        return output
    if prediction_type == "v_prediction":
        return math.sqrt(abar) * x_t - math.sqrt(1 - abar) * output
    return (x_t - math.sqrt(1 - abar) * output) / math.sqrt(abar)


def target_of(x0, eps, abar, prediction_type):
    targets = {
        "epsilon": eps,
        "sample": x0,
        "v_prediction": math.sqrt(abar) * eps - math.sqrt(1 - abar) * x0,
    }
    return targets[prediction_type]


def posterior(x0, x_t, beta, abar, abar_before):
    """Mean and variance of `q(x_{t-1} | x_t, x0)` (Ho et al. 2020, Eq. 6-7)."""
    mean = math.sqrt(abar_before) * beta / (1 - abar) * x0
    mean += math.sqrt(1 - beta) * (1 - abar_before) / (1 - abar) * x_t
    return mean, beta * (1 - abar_before) / (1 - abar)


def gaussian_kl(mean_q, variance_q, mean_p, variance_p):
    return 0.5 * (math.log(variance_p / variance_q) + (variance_q + (mean_q - mean_p) ** 2) / variance_p - 1)


def gaussian_nll(x, mean, variance):
    return 0.5 * (math.log(2 * math.pi * variance) + (x - mean) ** 2 / variance)


def bound_term(betas, t, x0, eps, output, prediction_type):
    """`L_t` of one scalar sample: a KL divergence with the model's variance fixed large, at t = 0 a likelihood."""
    abars = np.cumprod(1 - betas)
    abar, abar_before = abars[t], abars[t - 1] if t > 0 else 1.0
    x_t = math.sqrt(abar) * x0 + math.sqrt(1 - abar) * eps
    predicted = x0_from_output(output, x_t, abar, prediction_type)
    mean_p, _ = posterior(predicted, x_t, betas[t], abar, abar_before)
    if t == 0:
        _, variance_one_later = posterior(x0, x_t, betas[1], abars[1], abars[0])
        return gaussian_nll(x0, mean_p, variance_one_later)
    mean_q, variance_q = posterior(x0, x_t, betas[t], abar, abar_before)
    return gaussian_kl(mean_q, variance_q, mean_p, betas[t])


def assert_coefficients_are_those_of_the_bound(objective, timesteps):
    """Two predictions differ in the bound by `c_t` times the difference of their squared errors (rtol 1e-6)."""
    betas, kind = objective.betas.numpy(), objective.prediction_type
    random = np.random.default_rng(0)
    for t in timesteps:
        x0, eps, first, second = random.normal(size=4)
        target = target_of(x0, eps, np.cumprod(1 - betas)[t], kind)
        in_bound = bound_term(betas, t, x0, eps, first, kind) - bound_term(betas, t, x0, eps, second, kind)
        in_error = (first - target) ** 2 - (second - target) ** 2
        assert float(objective.vlb_coefficients[t]) == pytest.approx(in_bound / in_error, rel=1e-6)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_vlb_coefficients_are_those_of_the_gaussian_kl(schedule, prediction_type):
    objective = objective_in_float64(1000, schedule, prediction_type=prediction_type)
    assert_coefficients_are_those_of_the_bound(objective, [0, 1, 2, 10, 100, 500, 900, 998, 999])


@pytest.mark.parametrize("prediction_type", ["sample", "v_prediction"])
def test_vlb_coefficients_hold_where_the_snr_is_zero(prediction_type):
    objective = objective_in_float64(50, "linear", rescale_betas_zero_snr=True, prediction_type=prediction_type)
    assert objective.alphas_cumprod[-1] == 0
    assert_coefficients_are_those_of_the_bound(objective, range(50))


def test_vlb_coefficient_of_eps_at_zero_snr_takes_the_value_before():
    coefficients = objective_of(50, "linear", rescale_betas_zero_snr=True).vlb_coefficients
    assert coefficients[-1] == coefficients[-2]


def test_vlb_coefficients_of_eps_are_the_papers_formula():
    objective = objective_of(1000, "linear")
    betas = np.linspace(1e-4, 0.02, 1000)
    abar = np.cumprod(1 - betas)
    sigma2 = np.append(betas[1] * (1 - abar[0]) / (1 - abar[1]), betas[1:])
    papers = betas**2 / (2 * sigma2 * (1 - betas) * (1 - abar))
    assert np.allclose(objective.vlb_coefficients.numpy(), papers, rtol=1e-3)  # diffusers' betas are float32
    assert int(objective.vlb_coefficients.argmax()) == 0


def test_the_last_ten_steps_hold_the_bound_of_the_cosine_schedule():
    coefficients = objective_of(1000).vlb_coefficients
    assert float(coefficients[-1]) == pytest.approx(500, rel=2e-3)
    assert float(coefficients[-10:].sum() / coefficients.sum()) == pytest.approx(0.98, abs=0.01)


def test_bits_are_the_coefficients_over_ln_2():
    objective, timesteps = objective_of(50), torch.tensor([0, 20, 49])
    bits = objective.vlb_bits(torch.tensor([1.0, 2.0, 3.0]), timesteps)
    expected = objective.vlb_coefficients[timesteps] * torch.tensor([1.0, 2.0, 3.0]) / math.log(2)
    assert torch.allclose(bits.double(), expected, rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_snr_is_that_of_diffusers(schedule):
    scheduler = make_scheduler(1000, schedule)
    theirs = compute_snr(scheduler, torch.arange(1000)).double()
    assert torch.allclose(DiffusionObjective.from_scheduler(scheduler).snr, theirs, rtol=2e-3)  # theirs is float32


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero_snr", [False, True])
def test_log_snr_falls_all_the_way_and_is_finite(schedule, zero_snr):
    log_snr = objective_of(1000, schedule, rescale_betas_zero_snr=zero_snr).log_snr
    assert log_snr.isfinite().all()
    assert (log_snr.diff() < 0).all()


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_noising_and_targets_are_those_of_the_scheduler(prediction_type):
    scheduler = make_scheduler(1000, "linear", prediction_type=prediction_type)
    objective = DiffusionObjective.from_scheduler(scheduler)
    x0, noise = torch.randn(2, 8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([0, 1, 10, 100, 500, 900, 998, 999])
    assert torch.allclose(
        objective.add_noise(x0, noise, timesteps), scheduler.add_noise(x0, noise, timesteps), atol=1e-6
    )
    theirs = {"epsilon": noise, "sample": x0, "v_prediction": scheduler.get_velocity(x0, noise, timesteps)}
    assert torch.allclose(objective.target(x0, noise, timesteps), theirs[prediction_type], atol=1e-6)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_errors_in_eps_do_not_depend_on_what_is_predicted(prediction_type):
    """One wrong x0, told as each prediction type, has the same eps error (rtol 1e-3, in float32)."""
    objective = objective_of(1000, "linear", prediction_type=prediction_type)
    generator = torch.Generator().manual_seed(0)
    x0, noise, wrong = torch.randn(3, 5, 16, generator=generator)
    timesteps = torch.tensor([50, 200, 500, 700, 900])
    x_t, abar = objective.add_noise(x0, noise, timesteps), objective.alphas_cumprod[timesteps].float()[:, None]
    eps_told = (x_t - abar.sqrt() * wrong) / (1 - abar).sqrt()
    told = {
        "epsilon": eps_told,
        "sample": wrong,
        "v_prediction": abar.sqrt() * eps_told - (1 - abar).sqrt() * wrong,
    }
    error = objective.squared_error(told[prediction_type], x0, noise, timesteps)
    expected = (eps_told - noise).pow(2).mean(1)
    assert torch.allclose(objective.eps_squared_error(error, timesteps), expected, rtol=1e-3)


@pytest.mark.parametrize("shape", [(4,), (4, 7), (4, 5, 6), (4, 3, 8, 8), (4, 2, 3, 4, 5)])
def test_squared_error_is_one_mean_per_sample(shape):
    pred, noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    error = objective_of().squared_error(pred, torch.zeros(shape), noise, torch.arange(4))
    expected = [torch.nn.functional.mse_loss(pred[i], noise[i]).item() for i in range(4)]
    assert error.tolist() == pytest.approx(expected, rel=1e-5)


def test_half_precision_predictions_are_compared_in_float32():
    pred = torch.full((2, 8), 300.0, dtype=torch.float16)  # 300^2 is beyond float16
    error = objective_of().squared_error(pred, torch.zeros(2, 8), torch.zeros(2, 8), torch.tensor([0, 1]))
    assert error.dtype == torch.float32
    assert error.tolist() == [90_000.0, 90_000.0]


def test_another_scheduler_with_betas_describes_the_same_objective():
    ddim = DiffusionObjective.from_scheduler(DDIMScheduler(num_train_timesteps=50, beta_schedule="scaled_linear"))
    ddpm = objective_of(50, "scaled_linear")
    assert torch.equal(ddim.betas, ddpm.betas)
    assert torch.equal(ddim.vlb_coefficients, ddpm.vlb_coefficients)


def test_an_unknown_prediction_type_is_refused_with_those_accepted():
    scheduler = DDPMScheduler(num_train_timesteps=10, prediction_type="flow")
    with pytest.raises(ValueError, match="'flow'; accepted are epsilon, sample, v_prediction"):
        DiffusionObjective.from_scheduler(scheduler)


@pytest.mark.parametrize("thing", [None, object(), "linear"])
def test_what_is_no_scheduler_is_refused_by_its_type(thing):
    with pytest.raises(ValueError, match=f"{type(thing).__name__} has no betas"):
        DiffusionObjective.from_scheduler(thing)
