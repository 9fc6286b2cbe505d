"""Where a sampler trains: its density and effective weight over timesteps and log-SNR, as a figure or as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..samplers.base import TimestepSampler
from ..samplers.bins import time_bins

# Okabe and Ito's palette, which colour-blind readers tell apart too.
_DENSITY, _EFFECTIVE, _UNIFORM = "#0072B2", "#D55E00", "#777777"
# A panel whose peak is this many times the typical one is cut off, with its peak written down.
_TALLEST = 3.0
# Widths of a sampler's column in the text chart.
_SMALLEST_COLUMN, _LARGEST_COLUMN = 26, 72
_BLOCKS = " ▏▎▍▌▋▊▉█"
_ASCII_BLOCKS = " #"


@dataclass(frozen=True)
class Profile:
    """What a sampler does to the timesteps, as `(T,)` float64 arrays.

    Args:
        density: probability of each timestep.
        effective: density times weight, normalised to sum 1: the share of the loss each timestep is given.
        log_snr: of each timestep, decreasing.
        log_snr_width: `|d log-SNR / dt|`; a table divided by it is per unit log-SNR.
    """

    density: np.ndarray
    effective: np.ndarray
    log_snr: np.ndarray
    log_snr_width: np.ndarray

    def per_log_snr(self, table: np.ndarray) -> np.ndarray:
        """`(T,)` density per unit log-SNR of a `(T,)` table of probabilities."""
        return table / self.log_snr_width


def profile(sampler: TimestepSampler) -> Profile:
    """The density and effective weight of a sampler as it stands now.

    Example:
        >>> from diffusers import DDPMScheduler
        >>> from diffusers_adaptive_ts import make_sampler
        >>> speed = profile(make_sampler("speed", DDPMScheduler()))
        >>> round(float(speed.density[:642].sum()), 2)
        0.95
    """
    total = sampler.num_train_timesteps
    if total < 2:
        raise ValueError(f"A density needs at least 2 timesteps to be looked at; the scheduler has {total}.")
    density = sampler.density().double().cpu().numpy()
    if not np.isfinite(density).all():
        raise ValueError(f"The density of {type(sampler).__name__} has NaN or infinite values with these options.")
    weights = sampler.weights(torch.arange(total)).double().cpu().numpy()
    # An importance weight is infinite where nothing is drawn, and counts nothing there.
    effective = np.multiply(density, weights, out=np.zeros(total), where=density > 0)
    log_snr = sampler.objective.log_snr.numpy()
    return Profile(
        density=density,
        effective=effective / (effective.sum() or 1.0),
        log_snr=log_snr,
        log_snr_width=np.abs(np.gradient(log_snr)),
    )


Samplers = Sequence[TimestepSampler] | Mapping[str, TimestepSampler]


def _labelled(samplers: Samplers) -> list[tuple[str, TimestepSampler]]:
    """Samplers with their labels: the given ones, or name and weighting, and the options that tell namesakes apart."""
    if not samplers:
        raise ValueError("Give at least one sampler to look at.")
    if isinstance(samplers, Mapping):
        return list(samplers.items())
    plain = [f"{sampler.name or type(sampler).__name__}, {sampler.weighting.name} weights" for sampler in samplers]
    return [
        (
            label + _differences(sampler, [twin for twin, name in zip(samplers, plain, strict=True) if name == label]),
            sampler,
        )
        for label, sampler in zip(plain, samplers, strict=True)
    ]


def _differences(sampler: TimestepSampler, twins: list[TimestepSampler]) -> str:
    differing = [
        f"{key}={value}"
        for key, value in sampler.options.items()
        if any(twin.options.get(key) != value for twin in twins)
    ]
    return f" ({', '.join(differing)})" if differing else ""


def _process(sampler: TimestepSampler) -> str:
    """The noise process in words."""
    config = sampler.scheduler.config
    schedule = f"{config.get('beta_schedule')} schedule"
    if config.get("trained_betas") is not None:
        schedule = "betas of its own"
    elif config.get("beta_schedule") in ("linear", "scaled_linear", "sigmoid"):
        schedule += f" from {config.beta_start:g} to {config.beta_end:g}"
    if sampler.objective.snr[-1] == 0:
        schedule += ", zero terminal SNR"
    return f"{schedule}, {sampler.num_train_timesteps} timesteps, prediction_type {sampler.objective.prediction_type}"


def density_figure(samplers: Samplers) -> Figure:
    """A picture of the samplers: for each, over timesteps and over log-SNR, what is drawn and what counts.

    Panels of one kind share their axes, so that samplers can be compared by eye.

    Args:
        samplers: built samplers, in a list, or in a dict by the label each shall have.

    Example:
        >>> from diffusers import DDPMScheduler
        >>> from diffusers_adaptive_ts import make_sampler
        >>> scheduler = DDPMScheduler()
        >>> figure = density_figure([make_sampler(name, scheduler) for name in ("uniform", "speed")])
        >>> figure.savefig("density.png")  # doctest: +SKIP
    """
    labelled = _labelled(samplers)
    profiles = [profile(sampler) for _, sampler in labelled]
    processes = [_process(sampler) for _, sampler in labelled]
    one_process = len(set(processes)) == 1
    blocks = 1 if len(labelled) <= 4 else 2 if len(labelled) <= 8 else 3
    rows = math.ceil(len(labelled) / blocks)
    panel_height = 3.2 if rows == 1 else 2.0 if one_process else 2.5
    figure = Figure(figsize=(max(9.0, 6.0 * blocks), panel_height * rows + 1.2), layout="constrained", dpi=120)
    panels = figure.subplots(rows, 2 * blocks, squeeze=False).reshape(rows * blocks, 2)
    tops = [_shared_top([kind(each) for each in profiles]) for kind in (_over_timesteps, _over_log_snr)]
    lowest, highest = min(each.log_snr[-1] for each in profiles), max(each.log_snr[0] for each in profiles)
    for index, ((label, _), each) in enumerate(zip(labelled, profiles, strict=True)):
        by_timestep, by_log_snr = panels[index]
        _draw(by_timestep, _over_timesteps(each), tops[0])
        _draw(by_log_snr, _over_log_snr(each), tops[1])
        by_log_snr.set_xlim(highest, lowest)  # clean samples on the left, as over timesteps
        title = label if one_process else f"{label}\n{processes[index]}"
        by_timestep.set_title(title, loc="left", fontsize=10, fontweight="bold")
        if index % blocks == 0:
            by_timestep.set_ylabel("relative to uniform")
            by_log_snr.set_ylabel("per unit log-SNR")
        if index + blocks >= len(labelled):  # nothing below
            by_timestep.set_xlabel("timestep")
            by_log_snr.set_xlabel("log-SNR (clean to noisy)")
    for unused in panels[len(labelled) :].flat:
        unused.set_axis_off()
    if one_process:
        figure.suptitle(processes[0], fontsize=11)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    return figure


@dataclass(frozen=True)
class _Curves:
    x: np.ndarray
    density: np.ndarray
    effective: np.ndarray
    uniform: np.ndarray


def _over_timesteps(each: Profile) -> _Curves:
    total = len(each.density)
    return _Curves(np.arange(total), each.density * total, each.effective * total, np.ones(total))


def _over_log_snr(each: Profile) -> _Curves:
    uniform = each.per_log_snr(np.full_like(each.density, 1 / len(each.density)))
    return _Curves(each.log_snr, each.per_log_snr(each.density), each.per_log_snr(each.effective), uniform)


def _shared_top(curves: list[_Curves]) -> float:
    """Upper end of the panels' common axis: one spike must not press all the others flat."""
    highest = max(max(each.density.max(), each.effective.max(), each.uniform.max()) for each in curves)
    typical = float(np.median([max(each.density.max(), each.uniform.max()) for each in curves]))
    return 1.08 * min(float(highest), _TALLEST * typical)


def _draw(axes: Axes, curves: _Curves, top: float) -> None:
    axes.fill_between(
        curves.x, curves.density, step="mid", facecolor=f"{_DENSITY}55", edgecolor=_DENSITY, label="density"
    )
    axes.step(
        curves.x, curves.effective, where="mid", color=_EFFECTIVE, linewidth=1.6, label="density × weight, normalised"
    )
    axes.step(
        curves.x,
        curves.uniform,
        where="mid",
        color=_UNIFORM,
        linewidth=1,
        linestyle="--",
        label="uniform over timesteps",
    )
    axes.set_ylim(0, top)
    axes.margins(x=0.01)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    cut = [(values, colour) for values, colour in ((curves.density, _DENSITY), (curves.effective, _EFFECTIVE))]
    cut = [(values, colour) for values, colour in cut if values.max() > top]
    if cut:
        _note_peaks(axes, curves.x, cut, top)


def _note_peaks(axes: Axes, x: np.ndarray, cut: list[tuple[np.ndarray, str]], top: float) -> None:
    """Write down the peaks that the shared axis cuts off, beside them and towards the wider side."""
    above = np.flatnonzero(np.max([values for values, _ in cut], axis=0) > 0.8 * top)
    early = above[0] + above[-1] < len(x)  # in both kinds of panel, early is on the left
    foot = above[-1] if early else above[0]
    beyond = min(foot + 1, len(x) - 1) if early else max(foot - 1, 0)
    for line, (values, colour) in enumerate(cut):
        axes.annotate(
            f"peak {values.max():.3g}",
            xy=((x[foot] + x[beyond]) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(5 if early else -5, -2 - 10 * line),
            textcoords="offset points",
            ha="left" if early else "right",
            va="top",
            color=colour,
            fontsize=8,
        )


def density_chart(samplers: Samplers, width: int = 100, num_bins: int = 20, ascii_only: bool = False) -> str:
    """The same as text: bars of density and effective weight over bins of timesteps, samplers side by side.

    Args:
        samplers: built samplers, in a list, or in a dict by the label each shall have.
        width: columns of the terminal; samplers that do not fit follow below.
        num_bins: bins of equal width in t.
        ascii_only: draw with `#`, for a terminal that knows no block characters.

    Example:
        >>> from diffusers import DDPMScheduler
        >>> from diffusers_adaptive_ts import make_sampler
        >>> sampler = make_sampler("timestep_bias", DDPMScheduler(), portion=0.5, weighting="min_snr")
        >>> print(density_chart([sampler], width=64, num_bins=4, ascii_only=True))
        linear schedule from 0.0001 to 0.02, 1000 timesteps, prediction_type epsilon
        <BLANKLINE>
                                timestep_bias, min_snr weights
        timesteps   log-SNR     density %           effective %
          0-249     9.2..0.1    ######        16.7  ####          11.5
        250-499     0.1..-2.5   ######        16.7  ######        17.7
        500-749    -2.5..-5.7   ############  33.3  ############# 35.4
        750-999    -5.7..-10.1  ############  33.3  ############# 35.4
    """
    groups: dict[tuple[str, bytes], list[tuple[str, Profile]]] = {}
    for label, sampler in _labelled(samplers):
        each = profile(sampler)
        groups.setdefault((_process(sampler), each.log_snr.tobytes()), []).append((label, each))
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    charts = [
        f"{process}\n\n{_chart_of_one_process(group, width, num_bins, blocks)}"
        for (process, _), group in groups.items()
    ]
    return "\n\n".join(charts)


def _chart_of_one_process(profiles: list[tuple[str, Profile]], width: int, num_bins: int, blocks: str) -> str:
    first = profiles[0][1]
    bins = time_bins(len(first.density), num_bins).numpy()
    axis = _bin_labels(bins, first.log_snr)
    room = width - max(len(line) for line in axis)
    side_by_side = min(len(profiles), max(1, room // (_SMALLEST_COLUMN + 2)))
    bar = max(1, (min(room // side_by_side - 2, _LARGEST_COLUMN) - 14) // 2)
    columns = [_column(label, each, bins, bar, blocks) for label, each in profiles]
    return "\n\n".join(
        _beside([axis, *columns[start : start + side_by_side]]) for start in range(0, len(columns), side_by_side)
    )


def _column(label: str, each: Profile, bins: np.ndarray, bar: int, blocks: str) -> list[str]:
    """A sampler's lines: label, heading, and per bin two bars on one scale, its own, each with its percentage."""
    density, effective = np.bincount(bins, each.density), np.bincount(bins, each.effective)
    longest = max(density.max(), effective.max())

    def cell(share: float) -> str:
        return f"{_bar(share / longest, bar, blocks)}{100 * share:6.1f}"

    rows = [f"{cell(drawn)}  {cell(counts)}" for drawn, counts in zip(density, effective, strict=True)]
    return [*textwrap.wrap(label, 2 * bar + 14), f"{'density %':<{bar + 6}}  effective %", *rows]


def _beside(columns: list[list[str]]) -> str:
    """Columns of lines side by side, aligned at their last lines."""
    height = max(len(column) for column in columns)
    padded = []
    for column in columns:
        width = max(len(line) for line in column)
        padded.append([f"{line:<{width}}" for line in [""] * (height - len(column)) + column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def _bin_labels(bins: np.ndarray, log_snr: np.ndarray) -> list[str]:
    """One line per bin, under a heading: its first and last timestep and their log-SNR."""
    first = np.flatnonzero(np.diff(bins, prepend=-1))
    last = np.append(first[1:], len(bins)) - 1
    digits = len(str(len(bins) - 1))
    timesteps = [f"{a:>{digits}}-{b}" for a, b in zip(first, last, strict=True)]
    ranges = [f"{log_snr[a]:6.1f}..{log_snr[b]:<5.1f}" for a, b in zip(first, last, strict=True)]
    width = max(len("timesteps"), 2 * digits + 1)
    lines = [f"{t:<{width}}{r}" for t, r in zip(timesteps, ranges, strict=True)]
    return [f"{'timesteps':<{width}}   log-SNR", *lines]


def _bar(share: float, width: int, blocks: str) -> str:
    """A bar over `share` of `width` characters, padded to it; its last character may be a part of a block."""
    steps = len(blocks) - 1
    full, part = divmod(round(share * width * steps), steps)
    return f"{blocks[-1] * full + (blocks[part] if part else ''):<{width}}"
