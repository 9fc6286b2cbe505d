"""Validation losses beside their share of the first validation's."""

import math

from diffusers_adaptive_ts.training.outputs import with_relative


def losses(simple: float, vlb_bits: float, **more) -> dict:
    return {"simple": simple, "vlb_bits": vlb_bits, **more}


FIRST = losses(2.0, 8.0, ranges=[{"from": 0, "to": 4, **losses(3.0, 6.0)}, {"from": 5, "to": 9, **losses(1.0, 0.0)}])
NOW = losses(1.0, 2.0, ranges=[{"from": 0, "to": 4, **losses(1.5, 2.0)}, {"from": 5, "to": 9, **losses(0.5, 1.0)}])


def test_each_range_is_relative_to_the_same_range_of_the_first_validation():
    low, high = with_relative(NOW, FIRST)["ranges"]
    assert (low["simple_relative"], high["simple_relative"]) == (0.5, 0.5)
    assert math.isclose(low["vlb_relative"], 1 / 3)


def test_what_starts_at_zero_has_no_share():
    assert "vlb_relative" not in with_relative(NOW, FIRST)["ranges"][1]


def test_a_range_that_the_first_validation_lacks_has_no_share():
    [low, *_] = with_relative(NOW, {**FIRST, "ranges": FIRST["ranges"][1:]})["ranges"]
    assert low == NOW["ranges"][0]


def test_the_losses_themselves_stay():
    found = with_relative(NOW, FIRST)
    assert (found["simple"], found["vlb_bits"]) == (1.0, 2.0)
    assert (found["simple_relative"], found["vlb_relative"]) == (0.5, 0.25)
