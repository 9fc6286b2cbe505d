"""The map of steps and timesteps: where it is warm and where it is cold."""

import pytest
from PIL import ImageColor

from diffusers_adaptive_ts.training.density_map import density_map
from diffusers_adaptive_ts.training.report import MOST_DENSITIES

MORE, LESS, UNIFORM = map(ImageColor.getrgb, ("#872f00", "#123c73", "#f3f2ee"))
LOW, HIGH, EVEN = [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], [0.25] * 4


def colours(rows: list[dict]) -> dict[str, tuple[int, ...]]:
    """The colours of the map's four corners: early and late in training, low and high t."""
    picture = density_map(rows, 1000)
    width, height = picture.size
    columns, lines = {"early": 0.2, "late": 0.75}, {"low": 0.75, "high": 0.2}
    return {
        f"{when} {t}": picture.getpixel((int(x * width), int(y * height)))
        for when, x in columns.items()
        for t, y in lines.items()
    }


def test_steps_go_to_the_right_and_timesteps_up():
    found = colours([{"step": 0, "density": LOW}, {"step": 100, "density": HIGH}])
    assert found == {"early low": MORE, "early high": LESS, "late low": LESS, "late high": MORE}


def test_columns_are_as_wide_as_their_steps():
    found = colours([{"step": 0, "density": LOW}, {"step": 1, "density": EVEN}, {"step": 100, "density": EVEN}])
    assert found["early low"] == found["late high"] == pytest.approx(UNIFORM, abs=2)


def test_one_row_and_more_rows_than_a_page_shows():
    assert set(colours([{"step": 5, "density": LOW}]).values()) == {MORE, LESS}
    rows = [{"step": step, "density": LOW if step < 500 else HIGH} for step in range(MOST_DENSITIES * 10)]
    assert colours(rows)["late high"] == MORE
