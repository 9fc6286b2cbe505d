"""Random numbers of a sampler: stratified, repeatable, its own."""

import pytest
import torch

from diffusers_adaptive_ts import make_sampler
from diffusers_adaptive_ts.samplers.draws import Draws, draw_from_table


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_stratified_uniforms_are_one_in_each_cell(count):
    draws = Draws(0)
    for _ in range(10):
        cells = (draws.uniforms(count, stratified=True) * count).long()
        assert sorted(cells.tolist()) == list(range(count))


def test_stratified_uniforms_are_shuffled():
    draws = Draws(0)
    first = [int(draws.uniforms(100, stratified=True).argmin()) for _ in range(50)]
    assert len(set(first)) > 20


def test_uniforms_fill_the_unit_interval_in_float64():
    uniforms = Draws(0).uniforms(100_000)
    assert uniforms.dtype == torch.float64
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    # Kolmogorov-Smirnov at alpha 1e-4: 2.23 / sqrt(n)
    distance = (uniforms.sort().values - (torch.arange(100_000) + 0.5) / 100_000).abs().max()
    assert distance < 2.23 / 100_000**0.5


def test_equal_seeds_give_equal_numbers_and_other_seeds_others():
    assert torch.equal(Draws(4).uniforms(5), Draws(4).uniforms(5))
    assert not torch.equal(Draws(4).uniforms(5), Draws(5).uniforms(5))


def test_without_a_seed_torchs_own_decides():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = Draws().uniforms(5)
        torch.manual_seed(1)
        again, other = Draws().uniforms(5), Draws().uniforms(5)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_sampler_without_a_seed_takes_one_number_from_torch_when_built_and_none_later(scheduler):
    sampler = make_sampler("uniform", scheduler)
    before = torch.get_rng_state()
    sampler.sample(torch.zeros(4, 1, 1, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_loading_a_state_goes_on_with_its_numbers():
    draws = Draws(0)
    draws.uniforms(10, stratified=True)
    state = draws.state_tensors()
    expected = draws.uniforms(10, stratified=True)
    other = Draws(99)
    other.load(state["generator"], state["shared_generator"])
    assert torch.equal(other.uniforms(10, stratified=True), expected)


def test_a_broken_generator_state_is_refused_and_nothing_changes():
    draws = Draws(0)
    state = draws.state_tensors()
    with pytest.raises(ValueError, match="state of a generator is not one of torch's"):
        draws.load(state["generator"], torch.zeros_like(state["shared_generator"]))
    assert torch.equal(draws.state_tensors()["shared_generator"], state["shared_generator"])


def test_the_inverse_cdf_draws_each_index_for_its_share_of_the_interval():
    table = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn = draw_from_table(table, (torch.arange(1000) + 0.5) / 1000)
    assert torch.bincount(drawn).tolist() == [100, 200, 300, 400]


def test_the_inverse_cdf_normalises():
    uniforms = torch.rand(100, generator=torch.Generator().manual_seed(0))
    table = torch.tensor([1.0, 5.0, 2.0])
    assert torch.equal(draw_from_table(table, uniforms), draw_from_table(table / 8, uniforms))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_indices_of_probability_0_are_never_drawn_even_where_rounding_gives_1(uniform):
    table = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0, 0.0])
    assert int(draw_from_table(table, torch.tensor([uniform], dtype=torch.float64))) in (1, 3)
