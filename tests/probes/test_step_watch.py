"""Was there an optimizer step? Every kind of optimizer, and every way a step can fail to happen."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import nn
from torch.optim import optimizer as torch_optimizer

from diffusers_adaptive_ts.probes import StepWatch, gradients_are_gone, gradients_are_synchronised


class WritesToData(torch.optim.Optimizer):
    """As older optimizers and native kernels do: no version counter sees it."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


def make(name, parameters):
    makers = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "foreach": lambda: torch.optim.Adam(parameters, lr=0.1, foreach=True),
        "fused sgd": lambda: torch.optim.SGD(parameters, lr=0.1, fused=True),
        "fused adam": lambda: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        "data": lambda: WritesToData(parameters),
    }
    return makers[name]()


OPTIMIZERS = ["sgd", "foreach", "fused sgd", "fused adam", "data"]


@pytest.fixture
def linear():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sees_a_step(linear, name):
    optimizer = make(name, linear.parameters())
    watch = StepWatch(linear)
    assert not watch.weights_moved()
    optimizer.step()
    assert watch.weights_moved()
    assert not StepWatch(linear).weights_moved()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_of_this_model(linear, name):
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    watch = StepWatch(linear)
    make(name, other.parameters()).step()
    assert not watch.weights_moved()


def test_backward_and_frozen_parameters_are_no_step(linear):
    linear.bias.requires_grad_(False)
    watch = StepWatch(linear)
    linear(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        linear.bias.add_(1)
    assert not watch.weights_moved()


@pytest.mark.parametrize("name", ["sgd", "fused adam"])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaler_that_sees_an_overflow_skips_the_step(linear, name, overflow):
    """A fused optimizer is called even then, and skips inside its kernel."""
    optimizer, scaler = make(name, linear.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in linear.parameters()]
    watch = StepWatch(linear)
    loss = linear(torch.ones(1, 2)).sum() * (torch.inf if overflow else 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    stood_still = all(torch.equal(a, b) for a, b in zip(before, linear.parameters(), strict=True))
    assert stood_still == overflow
    assert watch.weights_moved() == (not overflow)
    assert not watch.step_was_skipped()  # the gradients are still there: a step may follow
    optimizer.zero_grad()
    assert watch.step_was_skipped()


def test_an_engine_is_asked_for_its_count(linear):
    linear.global_steps = 3
    watch = StepWatch(linear)
    with torch.no_grad():
        linear.weight.add_(1)
    assert not watch.weights_moved()
    linear.global_steps = 4
    assert watch.weights_moved()


def test_the_hook_goes_with_the_watch(linear):
    def hooks():
        return len(torch_optimizer._global_optimizer_post_hooks)

    before = hooks()
    watch = StepWatch(linear)
    assert hooks() == before + 1
    make("sgd", linear.parameters()).step()
    del watch
    assert hooks() == before


def test_gradients_are_gone(linear):
    assert not gradients_are_gone(linear)
    linear.zero_grad(set_to_none=False)
    assert not gradients_are_gone(linear)
    linear.zero_grad()
    assert gradients_are_gone(linear)


def test_synchronisation_is_what_accelerate_says():
    assert gradients_are_synchronised()
    state = GradientState()
    state._set_sync_gradients(False)
    assert not gradients_are_synchronised()
    state._set_sync_gradients(True)
    assert gradients_are_synchronised()


def test_with_accelerate_a_step_that_did_not_come_was_skipped(linear):
    watch = StepWatch(linear)
    assert not watch.step_was_skipped()
    Accelerator(cpu=True)
    assert watch.step_was_skipped()
