"""What the tests of the learned samplers share."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from diffusers import DDPMScheduler

from tests.fragile import TOTAL, make_fragile


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test():
    """accelerate's state is global; a plain loop must not look like an accelerated one."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def short_scheduler():
    return DDPMScheduler(num_train_timesteps=TOTAL, beta_end=0.5)


@pytest.fixture
def model():
    return make_fragile()


@pytest.fixture
def x0():
    return torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(7))
