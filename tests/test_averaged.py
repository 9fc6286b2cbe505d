"""Averaged weights change places with the model's own and come back, bit for bit, without a copy."""

import pytest
import torch
from diffusers.training_utils import EMAModel

from diffusers_adaptive_ts.averaged import averaged_weights


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    ema = EMAModel(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model, ema


def test_inside_the_block_the_model_is_the_average_and_afterwards_itself():
    model, ema = make()
    own = [p.detach().clone() for p in model.parameters()]
    average = [p.clone() for p in ema.shadow_params]
    places = {p.data_ptr() for p in [*model.parameters(), *ema.shadow_params]}
    with averaged_weights(model, ema):
        assert all(torch.equal(p, a) for p, a in zip(model.parameters(), average, strict=True))
        assert {p.data_ptr() for p in [*model.parameters(), *ema.shadow_params]} == places
    assert all(torch.equal(p, o) for p, o in zip(model.parameters(), own, strict=True))
    assert all(torch.equal(s, a) for s, a in zip(ema.shadow_params, average, strict=True))


def test_an_error_inside_puts_the_weights_back():
    model, ema = make()
    own = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError), averaged_weights(model, ema):
        raise RuntimeError
    assert all(torch.equal(p, o) for p, o in zip(model.parameters(), own, strict=True))


def test_without_an_average_nothing_happens():
    model, _ = make()
    with averaged_weights(model, None):
        pass


def test_an_average_in_higher_precision_comes_back_unrounded():
    model, ema = make()
    model.bfloat16()
    average = [p.clone() for p in ema.shadow_params]
    own = [p.detach().clone() for p in model.parameters()]
    assert not torch.equal(average[0], average[0].bfloat16().float())
    with averaged_weights(model, ema):
        assert all(torch.equal(p, a.bfloat16()) for p, a in zip(model.parameters(), average, strict=True))
    assert all(torch.equal(s, a) for s, a in zip(ema.shadow_params, average, strict=True))
    assert all(torch.equal(p, o) for p, o in zip(model.parameters(), own, strict=True))


def test_an_average_of_the_trained_parameters_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    ema = EMAModel([p for p in model.parameters() if p.requires_grad])
    average = ema.shadow_params[0].clone()
    with torch.no_grad():
        model[1].weight.add_(1)
    with averaged_weights(model, ema):
        assert torch.equal(model[1].weight, average)
        assert torch.equal(model[0].weight, frozen)


def test_an_average_of_something_else_is_refused_and_nothing_is_exchanged():
    model, _ = make()
    other = EMAModel([torch.nn.Parameter(torch.zeros(3, 3)), torch.nn.Parameter(torch.zeros(4))])
    own = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="2 tensors that are not the averages"), averaged_weights(model, other):
        pass
    with pytest.raises(ValueError, match="EMAModel, got Linear"):
        averaged_weights(model, model).__enter__()
    assert all(torch.equal(p, o) for p, o in zip(model.parameters(), own, strict=True))
