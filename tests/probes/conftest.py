"""Schedules and batches for the probes' tests."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from diffusers import DDPMScheduler

from diffusers_adaptive_ts import DiffusionObjective
from tests.fragile import TOTAL, make_fragile


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test():
    """accelerate's state is global; a plain loop must not look like an accelerated one."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def model():
    return make_fragile()


@pytest.fixture(params=["epsilon", "sample", "v_prediction"])
def any_scheduler(request):
    return DDPMScheduler(num_train_timesteps=TOTAL, beta_end=0.5, prediction_type=request.param)


@pytest.fixture
def scheduler():
    return DDPMScheduler(num_train_timesteps=TOTAL, beta_end=0.5)


@pytest.fixture
def objective(scheduler):
    return DiffusionObjective.from_scheduler(scheduler)


@pytest.fixture
def x0():
    return torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(7))
