"""Densities that do not learn, against brute force: draw from the paper's definition, count, compare."""

import math

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling

from diffusers_adaptive_ts import make_sampler
from diffusers_adaptive_ts.samplers.static import cells, edges, nearest_edges
from tests.conftest import chi_square_p, make_scheduler, train

ALPHA = 1e-4  # of every chi-square test here, on 200,000 seeded draws
DRAWS = 200_000


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def floored(u, total):
    return (u.double() * total).long().clamp(0, total - 1)


def nearest(values, table):
    """Index of the entry of `table` nearest to each value, by looking at all of them."""
    return torch.cat([(part[:, None] - table).abs().argmin(1) for part in values.split(20_000)])


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.8, 0.5), (1.0, 2.0)])
@pytest.mark.parametrize("total", [10, 1000])
def test_logit_normal_is_diffusers_density(mean, std, total, generator):
    u = compute_density_for_timestep_sampling(
        "logit_normal", DRAWS, logit_mean=mean, logit_std=std, generator=generator
    )
    density = make_sampler("logit_normal", make_scheduler(total), mean=mean, std=std).density()
    assert chi_square_p(floored(u, total), density) > ALPHA


@pytest.mark.parametrize("scale", [-1.0, -0.5, 0.0, 0.81, 1.29, 1.75])
@pytest.mark.parametrize("total", [10, 1000])
def test_mode_is_diffusers_density(scale, total, generator):
    u = compute_density_for_timestep_sampling("mode", DRAWS, mode_scale=scale, generator=generator)
    density = make_sampler("mode", make_scheduler(total), scale=scale).density()
    assert chi_square_p(floored(u, total), density) > ALPHA


@pytest.mark.parametrize(("a", "b"), [(0.8, 1.0), (2.0, 5.0), (0.3, 0.3)])
def test_beta_is_torchs_beta(a, b):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        u = torch.distributions.Beta(torch.tensor(a).double(), torch.tensor(b).double()).sample((DRAWS,))
    density = make_sampler("beta", make_scheduler(1000), a=a, b=b).density()
    assert chi_square_p(floored(u, 1000), density) > ALPHA


# Ten coarse steps tell the nearest sigma from the nearest log sigma.
COARSE_AND_FINE = [(10, "squaredcos_cap_v2"), (200, "linear"), (200, "scaled_linear"), (200, "squaredcos_cap_v2")]


@pytest.mark.parametrize(("total", "schedule"), COARSE_AND_FINE)
@pytest.mark.parametrize(("mean", "std"), [(-1.2, 1.2), (0.5, 0.7)])
def test_edm_lognormal_is_the_nearest_noise_level(total, schedule, mean, std, generator):
    scheduler = make_scheduler(total, schedule)
    abar = scheduler.alphas_cumprod.double()
    sigma = (torch.randn(DRAWS, generator=generator, dtype=torch.float64) * std + mean).exp()
    density = make_sampler("edm_lognormal", scheduler, mean=mean, std=std).density()
    assert chi_square_p(nearest(sigma, ((1 - abar) / abar).sqrt()), density) > ALPHA


@pytest.mark.parametrize(("total", "schedule"), COARSE_AND_FINE)
@pytest.mark.parametrize(("mu", "b"), [(0.0, 0.5), (-2.0, 1.5)])
def test_laplace_is_the_nearest_log_snr(total, schedule, mu, b, generator):
    scheduler = make_scheduler(total, schedule)
    abar = scheduler.alphas_cumprod.double()
    u = torch.rand(DRAWS, generator=generator, dtype=torch.float64) - 0.5
    log_snr = mu - b * u.sign() * (1 - 2 * u.abs()).log()
    density = make_sampler("laplace", scheduler, mu=mu, b=b).density()
    assert chi_square_p(nearest(log_snr, (abar / (1 - abar)).log()), density) > ALPHA


@pytest.mark.parametrize("name", ["uniform", "stratified"])
def test_uniform_is_uniform(name, scheduler):
    assert make_sampler(name, scheduler).density().tolist() == pytest.approx([1 / 50] * 50, rel=1e-12)


def test_stratified_draws_one_timestep_of_every_part(scheduler):
    sampler = make_sampler("stratified", scheduler, seed=0)
    for _ in range(20):
        assert sorted(sampler.sample(torch.zeros(50, 1, 1, 1)).tolist()) == list(range(50))
        parts = sampler.sample(torch.zeros(10, 1, 1, 1)) // 5
        assert sorted(parts.tolist()) == list(range(10))


def test_stratified_cannot_be_switched_off(scheduler):
    with pytest.raises(ValueError, match="is the sampler 'uniform'"):
        make_sampler("stratified", scheduler, stratified=False)


@pytest.mark.parametrize("name", ["logit_normal", "beta", "laplace", "mode"])
def test_the_stratified_option_spreads_a_batch_evenly_over_any_density(name, scheduler):
    """Of n draws, a set of neighbouring timesteps of mass p gets n p, give or take less than one at each end."""
    sampler = make_sampler(name, scheduler, stratified=True, seed=0)
    cumulative = torch.cumsum(sampler.density(), 0)
    for _ in range(5):
        drawn = sampler.sample(torch.zeros(200, 1, 1, 1))
        counted = torch.cumsum(torch.bincount(drawn, minlength=50), 0)
        assert (counted - 200 * cumulative).abs().max() < 1


@pytest.mark.parametrize(
    ("options", "biased"),
    [
        ({"strategy": "later"}, range(38, 50)),  # int(0.25 * 50) = 12, as diffusers' script rounds
        ({"strategy": "earlier", "portion": 0.5}, range(25)),
        ({"strategy": "range", "begin": 10, "end": 20}, range(10, 20)),
        ({"strategy": "range", "begin": 40}, range(40, 50)),
    ],
)
def test_timestep_bias_multiplies_a_range(options, biased, scheduler):
    density = make_sampler("timestep_bias", scheduler, multiplier=3.0, **options).density()
    weights = [3.0 if t in biased else 1.0 for t in range(50)]
    assert density.tolist() == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-12)


@pytest.mark.parametrize(
    ("total", "histogram", "expected"),
    [
        (4, [1, 3], [0.125, 0.125, 0.375, 0.375]),
        (4, [2, 0, 0, 2], [0.5, 0, 0, 0.5]),
        (3, [1, 1], [1 / 3, 1 / 3, 1 / 3]),
        (3, [1, 0], [2 / 3, 1 / 3, 0]),
        (5, [7], [0.2] * 5),
    ],
)
def test_histogram_is_spread_over_the_timesteps(total, histogram, expected):
    scheduler = make_scheduler(total)
    assert make_sampler("histogram", scheduler, histogram=histogram).density().tolist() == pytest.approx(expected)


def test_histogram_bins_of_zero_are_never_drawn(scheduler):
    sampler = make_sampler("histogram", scheduler, histogram=[0, 1, 0, 1, 0], stratified=True, seed=0)
    drawn = sampler.sample(torch.zeros(20_000, 1, 1, 1)).unique()
    assert drawn.tolist() == [*range(10, 20), *range(30, 40)]


def test_curriculum_switches_after_the_given_number_of_optimizer_steps(scheduler):
    sampler = make_sampler("curriculum", scheduler, switch_step=3, mean=0.5, std=0.8, seed=0)
    first = make_sampler("logit_normal", scheduler, mean=0.5, std=0.8).density()
    uniform = make_sampler("uniform", scheduler).density()
    for density in (first, first, first, uniform, uniform):
        assert torch.allclose(sampler.density(), density, rtol=1e-12)
        train(sampler, steps=1)


def test_cells_and_edges_are_the_maps_from_u_and_from_values_to_timesteps():
    assert edges(4).tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert nearest_edges(torch.tensor([1.0, 2.0, 4.0]).numpy()).tolist() == [-math.inf, 1.5, 3.0, math.inf]
    assert cells(torch.tensor([0.0, 0.25, 0.2, 1.0]).numpy()).tolist() == pytest.approx([0.25, 0, 0.8])


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("logit_normal", {"std": 0.0}, "logit_normal: std must be above 0 and finite, got 0.0"),
        ("logit_normal", {"std": math.inf}, "logit_normal: std must be above 0 and finite, got inf"),
        ("logit_normal", {"mean": math.nan}, "logit_normal: mean must be finite, got nan"),
        ("edm_lognormal", {"std": -1.0}, "edm_lognormal: std must be above 0"),
        ("edm_lognormal", {"mean": math.inf}, "edm_lognormal: mean must be finite, got inf"),
        ("laplace", {"b": 0.0}, "laplace: b must be above 0"),
        ("laplace", {"mu": math.nan}, "laplace: mu must be finite, got nan"),
        ("beta", {"a": 0.0}, "beta: a must be above 0"),
        ("beta", {"b": math.nan}, "beta: b must be above 0 and finite, got nan"),
        ("mode", {"scale": 2.0}, r"mode: scale must lie in -1\.\.1\.7519, got 2.0"),
        ("mode", {"scale": math.nan}, "mode: scale must lie in"),
        ("timestep_bias", {"strategy": "middle"}, "strategy must be earlier, later or range, got 'middle'"),
        (
            "timestep_bias",
            {"strategy": "later", "begin": 3},
            "begin and end go with strategy='range', not with 'later'",
        ),
        ("timestep_bias", {"strategy": "range", "begin": 20, "end": 20}, "begin < end <= 50 is needed, got 20 and 20"),
        ("timestep_bias", {"strategy": "range", "end": 51}, "begin < end <= 50 is needed, got 0 and 51"),
        ("timestep_bias", {"portion": 1.0}, "portion must lie between 0 and 1, got 1.0"),
        ("timestep_bias", {"multiplier": 0.0}, "multiplier must be above 0"),
        ("histogram", {}, r"give histogram=\[...\], a list of finite values.*got None"),
        ("histogram", {"histogram": []}, r"give histogram=\[...\]"),
        ("histogram", {"histogram": "abc"}, "got 'abc'"),
        ("histogram", {"histogram": [[1, 2], [3]]}, r"got \[\[1, 2\], \[3\]\]"),
        ("histogram", {"histogram": [1, -1]}, r"at least 0.*got \[1, -1\]"),
        ("histogram", {"histogram": [1, math.nan]}, "finite values"),
        ("histogram", {"histogram": [0, 0]}, "at least one bin must be above 0"),
        ("histogram", {"histogram": [1.0] * 51}, "51 bins are more than the 50 timesteps"),
        ("curriculum", {"switch_step": -1}, "switch_step must be at least 0, got -1"),
        ("curriculum", {"std": 1e-3, "importance_weighting": True}, "curriculum: .* timesteps are never drawn"),
        ("uniform", {"seed": -1}, "seed must be a whole number of at least 0, or None; got -1"),
        ("uniform", {"seed": 1.5}, "seed must be a whole number of at least 0, or None; got 1.5"),
    ],
)
def test_options_out_of_range_are_refused_by_name_and_value(name, options, complaint, scheduler):
    with pytest.raises(ValueError, match=complaint):
        make_sampler(name, scheduler, **options)


@pytest.mark.parametrize("name", ["logit_normal", "edm_lognormal", "laplace"])
def test_a_centre_far_outside_puts_all_mass_on_an_end_and_stays_a_distribution(name, scheduler):
    option = "mu" if name == "laplace" else "mean"
    for centre in (-1e6, 1e6):
        density = make_sampler(name, scheduler, **{option: centre}).density()
        assert density.max() == 1
        assert int(density.argmax()) in (0, 49)
