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
