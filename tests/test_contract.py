"""What every registered sampler and every registered weighting promises, whatever it computes."""

import json
import subprocess
import sys
from itertools import product

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusers_adaptive_ts import TimestepSampler, list_samplers, list_weightings, make_sampler, make_weighting
from tests.conftest import (
    IMAGE_SHAPES,
    PREDICTION_TYPES,
    QUICK,
    SCHEDULES,
    assert_same_state,
    chi_square_p,
    draws_of,
    make,
    make_quick,
    make_scheduler,
    train,
)

ALPHA = 1e-4  # of every chi-square test here; all draws are seeded, so a test that passes keeps passing
DRAWS = 100_000
LEARNED = sorted(QUICK)
VARIANTS = [
    *[(name, {}) for name in list_samplers()],
    ("logit_normal", {"stratified": True}),
    ("speed", {"version": "v2"}),
    ("speed", {"duals": False}),
    ("adaptive", {"policy": "histogram", "uniform_floor": 0.3}),
]
every_sampler = pytest.mark.parametrize("name", list_samplers())
every_weighting = pytest.mark.parametrize("weighting", list_weightings())


@every_sampler
@pytest.mark.parametrize("shape", IMAGE_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_draws_are_int64_timesteps_on_the_device_of_x0(name, shape, scheduler):
    sampler = make(name, scheduler, channels=shape[0], seed=0)
    for size in (1, 2, 5):
        x0 = torch.randn(size, *shape)
        timesteps = sampler.sample(x0)
        assert (timesteps.shape, timesteps.dtype, timesteps.device) == ((size,), torch.int64, x0.device)
        assert timesteps.min() >= 0
        assert timesteps.max() < 50


@every_sampler
@pytest.mark.parametrize("shape", IMAGE_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_a_step_of_training_gives_finite_losses_and_gradients_for_any_shape(name, shape):
    sampler = make_quick(name, make_scheduler(10), channels=shape[0], seed=0)
    losses, model = train(sampler, steps=2, shape=shape, batch_size=4)
    assert torch.tensor(losses).isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert int(sampler.steps) == 2


@pytest.mark.parametrize("total", [10, 50, 1000])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_density_is_a_distribution_that_agrees_with_100000_draws(name, options, total):
    sampler = make(name, make_scheduler(total), seed=1, **options)
    draws = draws_of(sampler, DRAWS)
    density = sampler.density()
    assert (density.shape, density.dtype) == ((total,), torch.float64)
    assert (density >= 0).all()
    assert float(density.sum()) == pytest.approx(1, abs=1e-12)
    assert chi_square_p(draws, density, in_pairs=name == "speed" and options.get("duals", True)) > ALPHA


@pytest.mark.parametrize("name", LEARNED)
def test_learned_density_agrees_with_100000_draws(name):
    sampler = make_quick(name, make_scheduler(10), seed=2)
    before = sampler.density()
    train(sampler, steps=40, batch_size=32)
    draws = draws_of(sampler, DRAWS)
    density = sampler.density()
    assert (density - before).abs().max() > 1e-3, "it has learned nothing, so this test would prove nothing"
    assert float(density.sum()) == pytest.approx(1, abs=1e-12)
    assert chi_square_p(draws, density) > ALPHA


def test_chi_square_notices_a_density_that_is_wrong_by_a_tenth(scheduler):
    draws, density = draws_of(make("uniform", scheduler, seed=0), DRAWS), torch.full((50,), 1 / 50).double()
    tilted = density * (1 + 0.1 * torch.linspace(-1, 1, 50))
    assert chi_square_p(draws, density) > ALPHA
    assert chi_square_p(draws, tilted / tilted.sum()) < ALPHA
    assert chi_square_p(draws, tilted / tilted.sum(), in_pairs=True) < ALPHA


@every_sampler
def test_a_density_once_given_out_is_the_users_own(name, scheduler):
    sampler = make(name, scheduler, seed=0)
    given = sampler.density()
    given.zero_()
    assert float(sampler.density().sum()) == pytest.approx(1, abs=1e-12)


@every_sampler
def test_equal_seeds_draw_alike_and_torchs_generator_is_left_alone(name, scheduler):
    first, second, other = (make_quick(name, scheduler, seed=seed) for seed in (3, 3, 4))
    before = torch.get_rng_state()
    losses, _ = train(first, steps=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert train(second, steps=3)[0] == losses
    assert train(other, steps=3)[0] != losses
    assert_same_state(first, second)


@every_sampler
def test_a_loaded_state_dict_draws_and_learns_on_as_if_nothing_had_happened(name):
    first, second = (
        make_quick(name, make_scheduler(10), weighting="learned_uncertainty", seed=seed) for seed in (5, 6)
    )
    train(first, steps=8, batch_size=16)
    second.load_state_dict(first.state_dict())
    assert_same_state(first, second)
    assert train(first, steps=5, seed=1)[0] == train(second, steps=5, seed=1)[0]
    assert_same_state(first, second)
    assert torch.equal(first.density(), second.density())


@every_sampler
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name, scheduler):
    sampler, longer = make(name, scheduler, seed=0), make(name, make_scheduler(60), seed=0)
    before = sampler.state_dict()
    for broken in (
        {**before, "steps": torch.tensor([7])},
        {**before, "steps": torch.tensor(7.0)},
        {**before, "steps": 7},
        {**before, "generator": torch.zeros_like(before["generator"]), "steps": torch.tensor(7)},
        {**before, "surplus": torch.zeros(1)},
        {key: value for key, value in before.items() if key != "dropped"},
        {},
    ):
        with pytest.raises(ValueError, match="state"):
            sampler.load_state_dict(broken)
        assert all(torch.equal(value, before[key]) for key, value in sampler.state_dict().items())
    if any(value.shape != before[key].shape for key, value in longer.state_dict().items()):
        with pytest.raises(ValueError, match="another T"):
            sampler.load_state_dict(longer.state_dict())


NEXT_DRAWS = """
import json, sys, torch
from diffusers_adaptive_ts import TimestepSampler
x0 = torch.zeros(6, 1, 4, 4)
drawn = {}
for name in sys.argv[2:]:
    sampler = TimestepSampler.from_pretrained(f"{sys.argv[1]}/{name}")
    drawn[name] = [sampler.sample(x0).tolist() for _ in range(3)] + [sampler.density().tolist()]
print(json.dumps(drawn))
"""


def test_a_saved_sampler_goes_on_alike_in_a_new_process(tmp_path, scheduler):
    expected = {}
    for name in list_samplers():
        sampler = make_quick(name, scheduler, weighting="learned_uncertainty", seed=7)
        train(sampler, steps=3)
        sampler.save_pretrained(tmp_path / name)
        drawn = [sampler.sample(torch.zeros(6, 1, 4, 4)).tolist() for _ in range(3)]
        expected[name] = [*drawn, sampler.density().tolist()]
    run = subprocess.run(
        [sys.executable, "-c", NEXT_DRAWS, str(tmp_path), *expected],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == expected


@every_sampler
def test_a_loss_without_gradients_teaches_nothing(name, scheduler):
    sampler = make_quick(name, scheduler, weighting="learned_uncertainty", seed=0)
    x0 = torch.randn(8, 1, 4, 4)
    timesteps = sampler.sample(x0)
    before = sampler.state_dict()
    with torch.no_grad():
        assert sampler.loss(x0, x0, torch.randn_like(x0), timesteps).isfinite()
    assert all(torch.equal(value, before[key]) for key, value in sampler.state_dict().items())


def learned_sampler_with_importance(name):
    options = {"speed": {"duals": False}, "loss_second_moment": {"uniform_probability": 0.2}}.get(name, {})
    sampler = make_quick(name, make_scheduler(10), seed=8, importance_weighting=True, **options)
    if name in LEARNED:
        train(sampler, steps=40, batch_size=32)
        assert (sampler.density() - 0.1).abs().max() > 1e-3
    return sampler


@pytest.mark.parametrize("name", [name for name in list_samplers() if name != "adaptive"])
def test_importance_weights_give_the_uniform_expectation_exactly(name):
    sampler = learned_sampler_with_importance(name)
    timesteps = torch.arange(10)
    importance = sampler.weights(timesteps).double() / sampler.weighting.weights(timesteps)
    assert torch.allclose(sampler.density() * importance, torch.full((10,), 0.1).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["logit_normal", "beta", "speed", "curriculum", *LEARNED[1:]])
def test_importance_weighted_loss_over_draws_estimates_the_uniform_loss(name):
    """Within five standard errors, which the density itself gives."""
    sampler = learned_sampler_with_importance(name)
    error = torch.linspace(0.1, 2.0, 10) ** 2 * sampler.weighting.table().float()
    timesteps = draws_of(sampler, 20_000)
    zero, noise = torch.zeros(20_000, 1), torch.linspace(0.1, 2.0, 10)[timesteps, None]
    with torch.no_grad():
        estimate = float(sampler.loss(zero, zero, noise, timesteps))
    second_moment = float((error.double() ** 2 / (100 * sampler.density())).sum())
    tolerance = 5 * ((second_moment - float(error.mean()) ** 2) / 20_000) ** 0.5
    assert tolerance < 0.1 * float(error.mean())
    assert estimate == pytest.approx(float(error.mean()), abs=tolerance)


def test_samplers_whose_draws_have_no_single_density_refuse_importance_weights(scheduler):
    with pytest.raises(ValueError, match="no importance weights"):
        make("adaptive", scheduler, importance_weighting=True)
    with pytest.raises(ValueError, match="duals=False"):
        make("speed", scheduler, importance_weighting=True)
    with pytest.raises(ValueError, match="16 timesteps are never drawn"):
        make("histogram", scheduler, histogram=[1, 0, 1], importance_weighting=True)


@every_sampler
@every_weighting
def test_every_weighting_composes_with_every_sampler(name, weighting):
    sampler = make_quick(name, make_scheduler(10), weighting=weighting, seed=0)
    losses, model = train(sampler, steps=2)
    weights = sampler.weights(torch.arange(10))
    assert (sampler.weighting.name, weights.shape, weights.dtype) == (weighting, (10,), torch.float32)
    assert torch.tensor(losses).isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    if not sampler.importance_weighting and weighting != "learned_uncertainty":
        assert torch.equal(weights.double(), make_weighting(weighting, make_scheduler(10)).table().float().double())


@every_sampler
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_are_finite_on_every_schedule_and_prediction_type(name, schedule):
    for zero_snr, prediction_type in product((False, True), PREDICTION_TYPES):
        scheduler = make_scheduler(10, schedule, rescale_betas_zero_snr=zero_snr, prediction_type=prediction_type)
        sampler = make_quick(name, scheduler, seed=0)
        losses, model = train(sampler, steps=2)
        assert torch.tensor(losses).isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        assert float(sampler.density().sum()) == pytest.approx(1, abs=1e-12)


@every_weighting
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero_snr", [False, True], ids=["", "zero_snr"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("total", [10, 1000])
def test_weights_are_finite_and_not_negative(weighting, schedule, zero_snr, prediction_type, total):
    scheduler = make_scheduler(total, schedule, rescale_betas_zero_snr=zero_snr, prediction_type=prediction_type)
    weights = make_weighting(weighting, scheduler).weights(torch.arange(total))
    assert weights.shape == (total,)
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert weights.sum() > 0


@every_sampler
def test_x0_that_is_no_batch_is_refused(name, scheduler):
    sampler = make(name, scheduler, seed=0)
    with pytest.raises(ValueError, match=r"at least one sample; got shape \(0, 1, 4, 4\)"):
        sampler.sample(torch.zeros(0, 1, 4, 4))
    with pytest.raises(ValueError, match=r"batch dimension and at least one sample; got shape \(5,\)"):
        sampler.sample(torch.zeros(5))
    with pytest.raises(ValueError, match="got list"):
        sampler.sample([1.0, 2.0])


@every_sampler
def test_x0_with_nan_and_inf_still_gets_timesteps(name, scheduler):
    x0 = torch.full((4, 1, 4, 4), float("nan"))
    x0[1:] = float("inf")
    timesteps = make(name, scheduler, seed=0).sample(x0)
    assert timesteps.min() >= 0
    assert timesteps.max() < 50


@every_sampler
def test_shapes_that_do_not_belong_together_are_refused(name, scheduler):
    sampler, x0 = make(name, scheduler, seed=0), torch.zeros(2, 1, 4, 4)
    with pytest.raises(ValueError, match=r"pred \(2, 2, 4, 4\), x0 \(2, 1, 4, 4\).*first half"):
        sampler.loss(torch.zeros(2, 2, 4, 4), x0, x0, torch.tensor([1, 2]))
    for timesteps, complaint in (
        (torch.tensor([1, 2, 3]), r"shape \(2,\).*got torch.int64 of shape \(3,\)"),
        (torch.tensor([1.0, 2.0]), "got torch.float32"),
        ([1, 2], "got list"),
        (torch.tensor([0, 50]), r"0\.\.49; got 0\.\.50"),
        (torch.tensor([-1, 3]), r"0\.\.49; got -1\.\.3"),
    ):
        with pytest.raises(ValueError, match=complaint):
            sampler.loss(x0, x0, x0, timesteps)
    with pytest.raises(ValueError, match=r"at least one sample; got shape \(0, 1, 4, 4\)"):
        sampler.loss(x0[:0], x0[:0], x0[:0], torch.zeros(0, dtype=torch.int64))
    for timesteps in (torch.tensor(3), torch.zeros(0, dtype=torch.int64), [3]):
        with pytest.raises(ValueError, match=r"integers of shape \(B,\)"):
            sampler.weights(timesteps)


@every_sampler
def test_a_scheduler_without_betas_is_refused_by_name(name):
    options = {"histogram": [1.0]} if name == "histogram" else {}
    with pytest.raises(ValueError, match=r"FlowMatchEulerDiscreteScheduler has no betas.*DDPMScheduler"):
        make_sampler(name, FlowMatchEulerDiscreteScheduler(), **options)


def test_more_selected_timesteps_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"num_selected \(\|S\|\) must lie in 1\.\.10, .*; got 11"):
        make("adaptive", make_scheduler(10), estimator_options={"num_selected": 11})


@every_weighting
def test_a_weighting_refuses_a_scheduler_without_betas(weighting):
    with pytest.raises(ValueError, match="FlowMatchEulerDiscreteScheduler has no betas"):
        make_weighting(weighting, FlowMatchEulerDiscreteScheduler())


@every_sampler
def test_an_unknown_option_is_refused_with_what_is_accepted(name, scheduler):
    with pytest.raises(ValueError, match=f"The sampler '{name}' has no option 'wieghting'. Did you mean 'weighting'"):
        make(name, scheduler, wieghting="uniform")


@every_weighting
def test_a_weighting_refuses_an_unknown_option(weighting, scheduler):
    with pytest.raises(ValueError, match=f"The weighting '{weighting}' has no option 'bogus'. It takes"):
        make_weighting(weighting, scheduler, bogus=1)


@every_sampler
def test_every_sampler_is_loaded_by_the_base_class_and_by_its_own(name, tmp_path, scheduler):
    sampler = make(name, scheduler, seed=0)
    sampler.save_pretrained(tmp_path)
    for cls in (TimestepSampler, type(sampler)):
        loaded = cls.from_pretrained(tmp_path)
        assert type(loaded) is type(sampler)
        assert loaded.options == sampler.options
        assert_same_state(sampler, loaded)
