"""The report of a run: its training log and sample grids as one self-contained page, redrawn while it trains."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from ..persistence import replacing
from .log import LOG_NAME, read_log

REPORT_NAME = "report.html"
# What a page of 1,400 pixels can show; a longer log is averaged (training) or thinned out (all else) to this.
MOST_TRAIN_POINTS = 1000
MOST_VALIDATIONS = 300
MOST_POLICY_POINTS = 500
MOST_DENSITIES = 150
MOST_PICTURES = 12
# Twelve of them as base64 stay under 3 MB, which leaves the page under 5 MB whatever the images are.
_PICTURE_BYTES = 180_000
_SMALLER = ((768, 85), (640, 80), (512, 75), (384, 65), (256, 50))
_TRAIN_COLUMNS = ("loss", "lr", "steps_per_second", "sampler_overhead", "ema_decay")
_LARGEST_EXACT = 2**53  # whole numbers above it lose digits in JavaScript

Row = dict[str, Any]


def write_report(output_dir: Path) -> Path:
    """Draw `report.html` in `output_dir` from the log there; the old page stays until the new one is whole."""
    output_dir = Path(output_dir)
    log = output_dir / LOG_NAME
    if not log.is_file():
        raise FileNotFoundError(
            f"There is no {LOG_NAME} in {output_dir}. The report is drawn from it; give the output_dir of a run."
        )
    data = report_data(read_log(log), output_dir)
    if data is None:
        raise ValueError(f"{log} holds no whole line yet, so there is nothing to report. Train at least one step.")
    run = data["runs"][-1] if data["runs"] else {}
    names = [str(run[key]) for key in ("data", "sampler") if run.get(key)]
    target = output_dir / REPORT_NAME
    with replacing(target) as path:
        path.write_text(fill_page("page", " · ".join(names) or "Training report", data), encoding="utf-8")
    return target


def report_data(rows: Sequence[Row], output_dir: Path) -> dict[str, Any] | None:
    """What the page is drawn from, or None if there is no row at all."""
    kinds = _by_kind(rows)
    if not kinds:
        return None
    densities = kinds.get("density", [])
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": _plain([_without(row, "kind") for row in kinds.get("run", [])], digits=None),
        "train": _plain(_averaged(kinds.get("train", []), MOST_TRAIN_POINTS)),
        "not_finite": _not_finite(kinds.get("train", [])),
        "validation": _plain([_without(row, "kind") for row in evenly(kinds.get("validation", []), MOST_VALIDATIONS)]),
        "policy": _plain([_without(row, "kind", "density") for row in evenly(densities, MOST_POLICY_POINTS)]),
        "density": _plain([_without(row, "kind", "policy") for row in evenly(densities, MOST_DENSITIES)]),
        "evaluation": _plain([_without(row, "kind") for row in evenly(kinds.get("evaluation", []), MOST_VALIDATIONS)]),
        "samples": _pictures(kinds.get("samples", []), output_dir),
    }


def fill_page(name: str, title: str, data: Any) -> str:
    """`report_page/<name>.html` with style, data and scripts put in, so that it needs no other file.

    A later page (the comparison of several runs) brings its own `.html` and `.js` and shares `page.css`, `charts.js`
    (drawing) and `cards.js` (legends, pointer, light and dark).
    """
    parts = {
        "title": html.escape(title),
        "style": _asset("page.css"),
        "data": embedded(data),
        "charts": _asset("charts.js"),
        "cards": _asset("cards.js"),
        "script": _asset(f"{name}.js"),
    }
    # One pass: a title or an argument that looks like a placeholder is left alone.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset(f"{name}.html"))


def embedded(data: Any) -> str:
    r"""JSON that may stand inside a script element.

    Example:
        >>> embedded({"name": "</script>"})
        '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spaced, the first and the last among them.

    Example:
        >>> evenly(range(10), 4)
        [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


@lru_cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("report_page", name).read_text(encoding="utf-8")


def _by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of the last run by kind and in order of steps; what a resume did again counts once."""
    kinds: dict[str, dict[int, Row]] = {}
    latest = before_resume = 0.0
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or not isinstance(row.get("step"), int):
            continue
        kind, step = row["kind"], row["step"]
        if kind == "run":
            if not row.get("resumed"):
                kinds, latest, before_resume = {}, 0.0, 0.0
            # A log that was not cut back still has what the killed run did after its last checkpoint.
            kinds = {name: {at: old for at, old in found.items() if at <= step} for name, found in kinds.items()}
            latest = max((old.get("minutes") or 0.0 for found in kinds.values() for old in found.values()), default=0)
            kinds.setdefault("run", {})[step] = {"minutes": latest, **row}
            continue
        minutes = row.get("minutes")
        if isinstance(minutes, int | float):
            # A clock that starts again after a resume goes on from where it was.
            before_resume = latest if minutes + before_resume < latest else before_resume
            latest = minutes + before_resume
            row = {**row, "minutes": latest}
        found = kinds.setdefault(kind, {})
        found[step] = {**found.get(step, {}), **row}
    return {kind: [found[step] for step in sorted(found)] for kind, found in kinds.items() if found}


def _averaged(rows: Sequence[Row], most: int) -> dict[str, list[Any]]:
    """Columns of at most `most` points: each the mean of its rows and, for the loss, their lowest and highest."""
    size = max(1, math.ceil(len(rows) / most))
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    columns: dict[str, list[Any]] = {key: [group[-1].get(key) for group in groups] for key in ("step", "minutes")}
    for key in _TRAIN_COLUMNS:
        values = [[row[key] for row in group if _is_finite(row.get(key))] for group in groups]
        if any(values):
            columns[key] = [sum(found) / len(found) if found else None for found in values]
            if key == "loss":
                columns["lowest"] = [min(found, default=None) for found in values]
                columns["highest"] = [max(found, default=None) for found in values]
    columns["rows_per_point"] = size
    return columns


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _not_finite(rows: Sequence[Row]) -> dict[str, int] | None:
    """How many training rows have a loss that is NaN or infinite, and since which step."""
    steps = [row["step"] for row in rows if "loss" in row and not _is_finite(row["loss"])]
    return {"count": len(steps), "first": steps[0], "last": steps[-1]} if steps else None


def _without(row: Row, *keys: str) -> Row:
    return {key: value for key, value in row.items() if key not in keys}


def _plain(value: Any, digits: int | None = 6) -> Any:
    """The value as JavaScript can read it: NaN and infinity as null, floats at `digits` significant digits."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {str(key): _plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, digits) for item in value]
    if isinstance(value, int) and abs(value) > _LARGEST_EXACT:
        return str(value)
    return value


def _pictures(rows: Sequence[Row], output_dir: Path) -> list[Row]:
    """At most twelve sample grids as data URLs; a file that is gone or lies outside of the run is passed over."""
    root, found = output_dir.resolve(), []
    for row in rows:
        path = (root / str(row.get("file", ""))).resolve()
        if path.is_file() and path.is_relative_to(root):
            found.append((row, path))
    pictures = []
    for row, path in evenly(found, MOST_PICTURES):
        stat = path.stat()
        picture = _inlined(path, stat.st_mtime_ns, stat.st_size)
        if picture is not None:
            pictures.append({"step": row["step"], "minutes": _plain(row.get("minutes")), **picture})
    return pictures


@lru_cache(maxsize=4 * MOST_PICTURES)  # a report is drawn many times over the same pictures
def _inlined(path: Path, changed: int, size: int) -> Row | None:
    """The picture as it is when it is small, else as the largest JPEG within `_PICTURE_BYTES`; None if unreadable."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            if size <= _PICTURE_BYTES and image.format in ("PNG", "JPEG", "WEBP", "GIF"):
                content, mime = path.read_bytes(), Image.MIME[image.format]
            else:
                content, mime = _smaller(image), "image/jpeg"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return {
        "source": f"data:{mime};base64,{base64.b64encode(content).decode()}",
        "width": width,
        "height": height,
        "file": path.name,
    }


def _smaller(image: Image.Image) -> bytes:
    image = image.convert("L" if image.mode in ("1", "L", "I;16") else "RGB")
    for side, quality in _SMALLER:
        image.thumbnail((side, side))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        if buffer.tell() <= _PICTURE_BYTES:
            break
    return buffer.getvalue()
