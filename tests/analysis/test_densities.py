"""Figures and text charts of samplers."""

import re

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diffusers_adaptive_ts import TimestepSampler, list_samplers, make_sampler
from diffusers_adaptive_ts.analysis import density_chart, density_figure, profile

SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace")
NEEDED = {"histogram": {"histogram": [1, 4, 2, 0, 3]}, "adaptive": {"in_channels": 1}}


def build(name="speed", schedule="linear", total=1000, zero_snr=False, prediction_type="epsilon", **options):
    scheduler = DDPMScheduler(
        total, beta_schedule=schedule, rescale_betas_zero_snr=zero_snr, prediction_type=prediction_type
    )
    return make_sampler(name, scheduler, **NEEDED.get(name, {}), **options)


class Fixed(TimestepSampler):
    """A density given from outside."""

    def __init__(self, scheduler, table, **common):
        super().__init__(scheduler, **common)
        self._table = torch.as_tensor(table, dtype=torch.float64)

    def density(self):
        return self._table


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_both_tables_are_probabilities_on_every_process(schedule, zero_snr, prediction_type):
    for weighting in ("uniform", "min_snr", "vlb"):
        each = profile(build("logit_normal", schedule, 1000, zero_snr, prediction_type, weighting=weighting))
        for table in (each.density, each.effective, each.per_log_snr(each.density)):
            assert np.isfinite(table).all()
            assert (table >= 0).all()
        assert each.density.sum() == pytest.approx(1)
        assert each.effective.sum() == pytest.approx(1)


def test_effective_weight_is_density_times_weight():
    sampler = build("logit_normal", weighting="min_snr")
    snr = sampler.objective.snr.numpy()
    expected = sampler.density().numpy() * np.minimum(snr, 5) / snr
    np.testing.assert_allclose(profile(sampler).effective, expected / expected.sum(), rtol=1e-5)


def test_importance_weights_bring_the_effective_weight_back_to_uniform():
    each = profile(build("logit_normal", total=100, std=2.0, importance_weighting=True))
    np.testing.assert_allclose(each.effective, np.full(100, 0.01), rtol=1e-5)


def test_a_timestep_that_is_never_drawn_counts_nothing():
    table = torch.ones(10).index_fill(0, torch.tensor([3]), 0)
    each = profile(Fixed(DDPMScheduler(10), table / table.sum(), importance_weighting=True))
    assert each.effective[3] == 0
    np.testing.assert_allclose(np.delete(each.effective, 3), 1 / 9, rtol=1e-5)


def test_over_log_snr_the_area_is_one_and_laplace_is_laplace():
    each = profile(build("laplace", "squaredcos_cap_v2", mu=0.5, b=0.8))
    over_log_snr = each.per_log_snr(each.density)
    area = -np.sum((over_log_snr[1:] + over_log_snr[:-1]) / 2 * np.diff(each.log_snr))
    assert area == pytest.approx(1, abs=1e-3)
    inside = np.abs(each.log_snr) < 4
    expected = np.exp(-np.abs(each.log_snr - 0.5) / 0.8) / (2 * 0.8)
    np.testing.assert_allclose(over_log_snr[inside], expected[inside], rtol=0.02)


def test_unusable_samplers_say_so():
    with pytest.raises(ValueError, match="at least 2 timesteps"):
        profile(build("uniform", total=1))
    with pytest.raises(ValueError, match="NaN or infinite"):
        profile(Fixed(DDPMScheduler(4), [0.5, float("nan"), 0.5, 0]))
    for draw in (density_figure, density_chart):
        with pytest.raises(ValueError, match="at least one sampler"):
            draw([])


def curve_of(panel, label):
    (line,) = [line for line in panel.get_lines() if line.get_label().startswith(label)]
    return line.get_xdata(), line.get_ydata()


def titled(figure):
    return {panel.get_title(loc="left"): panel for panel in figure.axes if panel.get_title(loc="left")}


def test_the_figure_shows_what_the_profile_says():
    sampler = build("speed", weighting="min_snr")
    figure = density_figure([sampler])
    assert isinstance(figure, Figure)
    by_timestep, by_log_snr = figure.axes
    each = profile(sampler)
    x, y = curve_of(by_timestep, "density × weight")
    np.testing.assert_allclose(x, np.arange(1000))
    np.testing.assert_allclose(y, each.effective * 1000)
    x, y = curve_of(by_log_snr, "density × weight")
    np.testing.assert_allclose(x, each.log_snr)
    np.testing.assert_allclose(y, each.effective / each.log_snr_width)
    assert by_log_snr.xaxis_inverted()
    assert list(titled(figure)) == ["speed, min_snr weights"]
    assert figure.get_suptitle() == "linear schedule from 0.0001 to 0.02, 1000 timesteps, prediction_type epsilon"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["density", "density × weight, normalised", "uniform over timesteps"]


def test_fifteen_samplers_have_a_pair_of_panels_each_and_share_their_axes(tmp_path):
    samplers = [build(name, "squaredcos_cap_v2") for name in list_samplers()]
    figure = density_figure(samplers)
    shown = [panel for panel in figure.axes if panel.axison]
    assert len(shown) == 2 * len(samplers)
    assert len({panel.get_ylim() for panel in shown[::2]}) == 1
    assert len({panel.get_ylim() for panel in shown[1::2]}) == 1
    figure.savefig(tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 50_000


def test_a_peak_beyond_the_axis_is_written_down():
    sampler = build("uniform", weighting="vlb")
    by_timestep = density_figure([sampler]).axes[0]
    peak = profile(sampler).effective.max() * 1000
    assert by_timestep.get_ylim()[1] < peak
    assert [text.get_text() for text in by_timestep.texts] == [f"peak {peak:.3g}"]


def test_the_legend_lies_outside_the_panels():
    for count in (1, 3, 7):
        figure = density_figure([build("logit_normal", mean=shift) for shift in range(count)])
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        legend = figure.legends[0].get_window_extent(renderer)
        assert not any(legend.overlaps(panel.get_tightbbox(renderer)) for panel in figure.axes if panel.axison)


def test_namesakes_are_told_apart_by_their_options_and_dicts_by_their_keys():
    figure = density_figure([build("speed", k=5.0), build("speed", k=3.0), build("uniform")])
    assert list(titled(figure)) == [
        "speed, speed_v1 weights (k=5.0)",
        "speed, speed_v1 weights (k=3.0)",
        "uniform, uniform weights",
    ]
    assert list(titled(density_figure({"mine": build("speed")}))) == ["mine"]


def test_samplers_of_different_processes_name_theirs():
    samplers = [build("uniform", total=100), build("uniform", "squaredcos_cap_v2", 50, zero_snr=True)]
    figure = density_figure(samplers)
    assert figure.get_suptitle() == ""
    second = list(titled(figure))[1]
    assert second.endswith("\nsquaredcos_cap_v2 schedule, zero terminal SNR, 50 timesteps, prediction_type epsilon")
    chart = density_chart(samplers)
    assert chart.count("timesteps   log-SNR") == 2
    assert "linear schedule from 0.0001 to 0.02, 100 timesteps" in chart


def rows_of(chart):
    """First and last timestep, log-SNR at both, density and effective percentages of each line."""
    number = r"(-?\d+\.\d)"
    pattern = rf"^ *(\d+)-(\d+) +{number}\.\.{number} +\S* +(\d+\.\d) +\S* +(\d+\.\d)$"
    return [tuple(map(float, match)) for match in re.findall(pattern, chart, flags=re.MULTILINE)]


def test_the_chart_covers_all_timesteps_with_their_shares():
    sampler = build("logit_normal", weighting="min_snr")
    rows = rows_of(density_chart([sampler], num_bins=20, ascii_only=True))
    assert len(rows) == 20
    assert [row[0] for row in rows] == list(range(0, 1000, 50))
    assert [row[1] for row in rows] == list(range(49, 1000, 50))
    each = profile(sampler)
    for first, last, high, low, density, effective in rows:
        part = slice(int(first), int(last) + 1)
        assert density == pytest.approx(100 * each.density[part].sum(), abs=0.051)
        assert effective == pytest.approx(100 * each.effective[part].sum(), abs=0.051)
        assert (high, low) == pytest.approx((each.log_snr[part][0], each.log_snr[part][-1]), abs=0.051)


def test_the_longest_bar_fills_its_column_and_others_are_in_proportion():
    sampler = Fixed(DDPMScheduler(4), [0.5, 0.25, 0.25, 0.0])
    bars = re.findall(r"(#*) +\d+\.\d(?=  )", density_chart([sampler], width=60, num_bins=4, ascii_only=True))
    longest = len(bars[0])
    assert longest > 5
    assert [len(bar) for bar in bars] == [longest, round(longest / 2), round(longest / 2), 0]


@pytest.mark.parametrize("width", [60, 80, 100, 160, 400])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_chart_stays_within_its_width(width, count):
    samplers = {f"a label of some length, number {index}": build("laplace") for index in range(count)}
    for line in density_chart(samplers, width=width).splitlines()[2:]:
        assert len(line) <= width


def test_samplers_stand_side_by_side_where_there_is_room():
    samplers = [build("uniform"), build("speed")]
    assert density_chart(samplers, width=120).count("log-SNR") == 1
    assert density_chart(samplers, width=60).count("log-SNR") == 2


def test_a_mass_on_one_bin_and_few_timesteps_are_drawn():
    chart = density_chart([Fixed(DDPMScheduler(3), [0.0, 0.0, 1.0])], num_bins=20, ascii_only=True)
    assert [row[4:] for row in rows_of(chart)] == [(0.0, 0.0), (0.0, 0.0), (100.0, 100.0)]
    assert not re.search(r"[^\x00-\x7f]", chart)
