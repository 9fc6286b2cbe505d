"""The selection of S against scikit-learn's own, and what it does where the F-statistic says nothing."""

import numpy as np
import pytest
import torch
from sklearn.feature_selection import SelectKBest, f_regression

from diffusers_adaptive_ts.probes import f_statistic_selector, stratified_timesteps


def changes(rows, total, seed):
    """Loss changes that share a common part, as one optimizer step gives them."""
    generator = np.random.default_rng(seed)
    shared = generator.normal(size=(rows, 1))
    return torch.from_numpy(shared * generator.uniform(0, 2, total) + generator.normal(size=(rows, total)))


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize(("rows", "total"), [(3, 10), (7, 50), (20, 1000)])
@pytest.mark.parametrize("seed", range(3))
def test_equals_select_k_best(rows, total, count, seed):
    features = changes(rows, total, seed)
    best = SelectKBest(f_regression, k=count).fit(features.numpy(), features.numpy().mean(1))
    chosen = f_statistic_selector(features, count)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == best.get_support(indices=True).tolist()


def test_constant_timesteps_come_last():
    features = changes(6, 8, 0)
    features[:, 2] = 0.1  # whose computed variance is not exactly 0
    features[:, 5] = 0.0
    assert f_statistic_selector(features, 6).tolist() == [0, 1, 3, 4, 6, 7]


def test_ties_go_to_the_larger_variance_then_to_the_smaller_timestep():
    signal = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
    # Powers of two: every column is exactly proportional to the mean, so every F is the same.
    features = torch.stack([signal, signal * 4, signal * 2, signal * 4, signal], dim=1)
    assert f_statistic_selector(features, 1).tolist() == [1]
    assert f_statistic_selector(features, 2).tolist() == [1, 3]
    assert f_statistic_selector(features, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize("features", [torch.zeros(4, 6), torch.ones(3, 6), torch.full((3, 6), 0.1)], ids=str)
def test_nothing_to_choose_from_is_decided_all_the_same(features):
    assert f_statistic_selector(features.double(), 3).tolist() == [0, 1, 2]


def test_a_mean_that_does_not_move_is_decided_by_variance():
    wave = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    features = torch.stack([wave, wave * 2, -wave * 2, -wave, wave * 0], dim=1)
    assert f_statistic_selector(features, 2).tolist() == [1, 2]


def test_is_deterministic_and_leaves_its_input():
    features = changes(20, 100, 3)
    before = features.clone()
    assert torch.equal(f_statistic_selector(features, 3), f_statistic_selector(features.clone(), 3))
    assert torch.equal(features, before)


def test_all_timesteps_can_be_chosen():
    assert f_statistic_selector(changes(5, 4, 0), 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("total", [10, 50, 1000])
def test_stratified_is_the_middle_of_equal_parts(total):
    assert stratified_timesteps(total, 3).tolist() == [total // 6, total // 2, 5 * total // 6]
    assert stratified_timesteps(total, total).tolist() == list(range(total))
    assert stratified_timesteps(total, 1).tolist() == [total // 2]
