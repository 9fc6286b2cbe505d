"""Timesteps grouped into bins, and values brought back from bins to timesteps."""

import math

import pytest
import torch

from diffusers_adaptive_ts import DiffusionObjective
from diffusers_adaptive_ts.samplers.bins import (
    check_share,
    log_snr_bins,
    spread_over_timesteps,
    time_bins,
    with_floor,
)
from tests.conftest import SCHEDULES, make_scheduler


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero_snr", [False, True])
def test_log_snr_bins_have_equal_width_in_log_snr_and_none_is_empty(schedule, zero_snr):
    objective = DiffusionObjective.from_scheduler(make_scheduler(1000, schedule, rescale_betas_zero_snr=zero_snr))
    bins, log_snr = log_snr_bins(objective, 20), objective.log_snr
    width = (log_snr[0] - log_snr[-1]) / 20
    assert bins[0] == 0
    assert ((bins.diff() == 0) | (bins.diff() == 1)).all()
    assert int(bins.max()) + 1 == len(bins.unique()) <= 20
    for index in bins.unique():
        inside = log_snr[bins == index]
        assert inside.max() - inside.min() <= width * (1 + 1e-9)


def test_more_bins_than_timesteps_leave_none_empty():
    objective = DiffusionObjective.from_scheduler(make_scheduler(10))
    bins = log_snr_bins(objective, 500)
    assert bins.unique().tolist() == list(range(int(bins.max()) + 1))


@pytest.mark.parametrize(("total", "count", "sizes"), [(10, 5, [2] * 5), (10, 3, [4, 3, 3]), (4, 20, [1] * 4)])
def test_time_bins_are_equally_wide(total, count, sizes):
    assert torch.bincount(time_bins(total, count)).tolist() == sizes


def test_spreading_is_linear_between_bin_centres_and_flat_outside():
    axis = torch.arange(6).double()
    spread = spread_over_timesteps(torch.tensor([1.0, 3.0]).double(), torch.tensor([0, 0, 0, 1, 1, 1]), axis)
    assert spread.tolist() == pytest.approx([1, 1, 1 + 2 / 3, 1 + 4 / 3, 3, 3])


def test_spreading_does_not_mind_an_axis_that_falls():
    bins, values = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1.0, 3.0]).double()
    axis = torch.arange(6).double()
    assert torch.allclose(spread_over_timesteps(values, bins, -axis), spread_over_timesteps(values, bins, axis))


@pytest.mark.parametrize(
    ("floor", "expected"), [(0.0, [0, 0.25, 0.75]), (0.3, [0.1, 0.275, 0.625]), (1.0, [1 / 3] * 3)]
)
def test_a_floor_is_a_share_of_uniform(floor, expected):
    assert with_floor(torch.tensor([0.0, 1.0, 3.0]), floor).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_a_share_lies_between_0_and_1(value):
    with pytest.raises(ValueError, match=rf"mine: floor must lie in 0\.\.1, got {value}"):
        check_share("mine", floor=value)
