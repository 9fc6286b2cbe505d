"""The report's map of training step and timestep as a picture, for trackers that cannot show the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from PIL import Image

from .report import MOST_DENSITIES, evenly

# The report's colours (page.css) at the report's places (charts.js): less than uniform, uniform, more.
_COLOURS = [(0.0, "#123c73"), (0.225, "#78b0dd"), (0.5, "#f3f2ee"), (0.775, "#f2a344"), (1.0, "#872f00")]
_LIMITS = (1.25, 1.5, 2.0, 4.0, 8.0, 16.0)


def density_map(rows: Sequence[dict[str, Any]], num_train_timesteps: int) -> Image.Image:
    """Draws compared with uniform sampling, over optimizer steps and timesteps.

    Args:
        rows: the log's density rows in order of steps, at least one.
        num_train_timesteps: of the scheduler.
    """
    rows = evenly(rows, MOST_DENSITIES)
    ratios = np.array([row["density"] for row in rows]).T * len(rows[0]["density"])
    limit = colour_limit(ratios)
    figure = Figure(figsize=(9, 4), layout="constrained", dpi=100)
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    cells = axes.pcolormesh(
        column_edges([row["step"] for row in rows]),
        np.linspace(0, num_train_timesteps, len(ratios) + 1),
        ratios.clip(1 / limit, limit),
        cmap=LinearSegmentedColormap.from_list("density", _COLOURS),
        norm=LogNorm(1 / limit, limit),
    )
    axes.set(title="Which timesteps are drawn", xlabel="optimizer steps", ylabel="timestep t")
    places = [1 / limit, limit**-0.5, 1, limit**0.5, limit]
    names = [f"≤ {1 / limit:.2g}×", f"{limit**-0.5:.2g}×", "uniform", f"{limit**0.5:.2g}×", f"≥ {limit:g}×"]
    bar = figure.colorbar(cells, ax=axes, pad=0.02)
    bar.set_ticks(places, labels=names)
    bar.minorticks_off()
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def colour_limit(ratios: np.ndarray) -> float:
    """The end of the colour scale that shows all but the highest hundredth of the ratios.

    Example:
        >>> colour_limit(np.array([0.5, 1.0, 1.7]))
        2.0
    """
    high = np.quantile(ratios, 0.99, method="nearest")
    return next((limit for limit in _LIMITS if high <= limit), _LIMITS[-1])


def column_edges(steps: Sequence[int]) -> list[float]:
    """Edges half-way between the steps; a lone step gets a width of one.

    Example:
        >>> column_edges([0, 10, 20])
        [0, 5.0, 15.0, 20]
    """
    between = [(before + after) / 2 for before, after in pairwise(steps)]
    return [steps[0], *between, steps[-1] if between else steps[0] + 1]
