"""Policies: what they draw, what they say they draw, and what they measure, against numerical integrals."""

import numpy as np
import pytest
import torch
from scipy import stats

from diffusers_adaptive_ts.policies import EDGE, POLICIES, BetaPolicy, HistogramPolicy, as_images, make_policy

BETAS = [(1.0, 1.0), (0.5, 0.5), (2.0, 5.0), (0.7, 3.0), (30.0, 4.0)]
HISTOGRAMS = [[0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.05, 0.25], [0.98, 0.01, 0.01]]
CASES = [(BetaPolicy, case) for case in BETAS] + [(HistogramPolicy, case) for case in HISTOGRAMS]
every_case = pytest.mark.parametrize(
    ("policy", "row"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)


def rows(row, count=1):
    return torch.tensor([row], dtype=torch.float64).repeat(count, 1)


def density(policy, row, u):
    return policy.log_prob(rows(row, len(u)), u).exp()


def integral(policy, row, function):
    """Of `function(u)` over (0, 1): by midpoints for a histogram, over logit(u) for the poles of a Beta."""
    if policy is HistogramPolicy:
        u = (torch.arange(len(row) * 10, dtype=torch.float64) + 0.5) / (len(row) * 10)
        return float(function(u).mean())
    logit = torch.linspace(-34, 34, 20_001, dtype=torch.float64)
    u = logit.sigmoid()
    return float(torch.trapezoid(function(u) * u * (1 - u), logit))


@every_case
def test_density_integrates_to_one(policy, row):
    assert integral(policy, row, lambda u: density(policy, row, u)) == pytest.approx(1, abs=1e-6)


@every_case
def test_entropy_is_the_integral(policy, row):
    expected = -integral(policy, row, lambda u: torch.xlogy(density(policy, row, u), density(policy, row, u)))
    assert float(policy.entropy(rows(row))) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("policy", [BetaPolicy, HistogramPolicy])
def test_divergence_is_the_integral(policy):
    before, after = ((2.0, 5.0), (3.0, 4.0)) if policy is BetaPolicy else (HISTOGRAMS[0], HISTOGRAMS[1])

    def excess(u):
        p = density(policy, before, u)
        return p * (p / density(policy, after, u)).log()

    expected = integral(policy, before, excess)
    assert expected > 0.01
    assert float(policy.divergence(rows(before), rows(after))) == pytest.approx(expected, abs=1e-6)
    assert float(policy.divergence(rows(before), rows(before))) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("policy", [BetaPolicy, HistogramPolicy])
def test_uniform_has_entropy_zero_and_the_most(policy):
    uniform, other = (BETAS[0], BETAS[2]) if policy is BetaPolicy else (HISTOGRAMS[0], HISTOGRAMS[1])
    assert float(policy.entropy(rows(uniform))) == pytest.approx(0, abs=1e-12)
    assert float(policy.entropy(rows(other))) < 0


@every_case
@pytest.mark.parametrize("total", [10, 37])
def test_cell_masses_agree_with_draws(policy, row, total):
    """Chi-square over 100,000 draws, cells of fewer than 5 expected draws merged; p above 1e-3 for a fixed seed."""
    uniforms = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = policy.draw(rows(row, len(uniforms)), uniforms)
    counts = np.bincount((u * total).long().numpy(), minlength=total)
    masses = policy.cell_masses(rows(row), np.arange(total + 1) / total).numpy()
    assert masses.sum() == pytest.approx(1, abs=1e-9)
    expected = masses * len(uniforms)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
        expected *= observed.sum() / expected.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@every_case
def test_masses_are_averaged_over_rows(policy, row):
    other = torch.tensor([[1.5] * 2 if policy is BetaPolicy else [1 / len(row)] * len(row)], dtype=torch.float64)
    edges = np.linspace(0, 1, 8)
    both = policy.cell_masses(torch.cat([rows(row), other]), edges)
    torch.testing.assert_close(both, (policy.cell_masses(rows(row), edges) + policy.cell_masses(other, edges)) / 2)


@every_case
def test_stratified_uniforms_give_stratified_draws(policy, row):
    count = 64
    generator = torch.Generator().manual_seed(1)
    jitter = torch.rand(count, dtype=torch.float64, generator=generator)
    shuffled = torch.randperm(count, generator=generator)
    u = policy.draw(rows(row, count), (shuffled + jitter) / count).numpy()
    if policy is BetaPolicy:
        position = stats.beta.cdf(u, *row)
    else:
        position = np.interp(u, np.linspace(0, 1, len(row) + 1), np.concatenate([[0], np.cumsum(row)]))
    assert sorted((position * count).astype(int)) == list(range(count))


@every_case
def test_draws_stay_off_the_poles_at_the_ends(policy, row):
    u = policy.draw(rows(row, 3), torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert u.dtype == torch.float64
    assert EDGE <= u.min() <= u.max() <= 1 - EDGE
    assert policy.log_prob(rows(row, 3), u).isfinite().all()


def test_histogram_never_draws_an_empty_bin():
    row = [0.0, 0.5, 0.0, 0.5, 0.0]
    uniforms = torch.linspace(0, 1 - 2**-53, 1001, dtype=torch.float64)
    u = HistogramPolicy.draw(rows(row, len(uniforms)), uniforms)
    bins = set((u * 5).long().tolist())
    assert bins == {1, 3}
    assert float(HistogramPolicy.entropy(rows(row))) == pytest.approx(np.log(2 / 5))


SHAPES = [(1, 28, 28), (3, 32, 32), (4, 32, 32), (16, 1, 1), (7,), (3, 50), (4, 3, 16, 16), (2, 5, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(POLICIES.names()))
def test_takes_any_shape_and_starts_near_uniform(name, shape):
    policy = make_policy(name, shape[0])
    parameters = policy(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)))
    assert parameters.shape == (2, policy.num_parameters_per_sample)
    torch.testing.assert_close(parameters, policy.typical().expand(2, -1))
    masses = policy.cell_masses(parameters.detach(), np.linspace(0, 1, 6))
    assert 0.19 < masses.min() <= masses.max() < 0.21


def test_as_images_merges_what_it_cannot_use():
    assert as_images(torch.zeros(2, 5)).shape == (2, 5, 1, 1)
    assert as_images(torch.zeros(2, 5, 6)).shape == (2, 5, 6, 1)
    assert as_images(torch.zeros(2, 5, 6, 7)).shape == (2, 5, 6, 7)
    assert as_images(torch.zeros(2, 5, 6, 7, 8)).shape == (2, 5, 42, 8)


def test_beta_looks_at_x0_and_reads_broken_values_as_zero():
    policy = BetaPolicy(3)
    torch.nn.init.normal_(policy.head.weight, generator=torch.Generator().manual_seed(0))
    x0 = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    first, second = policy(x0)
    assert not torch.equal(first, second)
    broken, zeros = torch.full_like(x0, torch.nan), torch.zeros_like(x0)
    broken[1] = torch.inf
    assert torch.equal(policy(broken), policy(zeros))
    assert policy(x0.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("raw", [-1e4, 1e4])
def test_beta_is_bounded(raw):
    policy = BetaPolicy(1)
    torch.nn.init.constant_(policy.head.bias, raw)
    a = float(policy(torch.zeros(1, 1, 4, 4)).detach()[0, 0])
    assert a == pytest.approx(BetaPolicy.LOWEST if raw < 0 else BetaPolicy.HIGHEST)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'beta'"):
        make_policy("betta", 3)
    with pytest.raises(ValueError, match="in_channels, hidden_channels and depth must be at least 1"):
        make_policy("beta", 0)
    with pytest.raises(ValueError, match="num_bins must be at least 2"):
        make_policy("histogram", 3, num_bins=1)
