"""A result file says what was run, on what, when, and every single measurement behind its figures."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def facts(seed: int | None) -> dict[str, Any]:
    """Versions, machine, date and command of this run."""
    names = ("torch", "diffusers", "accelerate", "datasets", "diffusers-adaptive-ts")
    return {
        "command": " ".join(["python", *_relative(sys.argv)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in names},
        "seed": seed,
    }


def _relative(words: list[str]) -> list[str]:
    """Paths outside the repository stay out of the repository."""
    root = str(Path(__file__).parents[1])
    return [
        word.replace(root + "/", "")
        if word.startswith(root)
        else (f"<{Path(word).name}>" if word[:1] == "/" else word)
        for word in words
    ]


def spread(values: list[float]) -> dict[str, Any]:
    """Median with the range of the repeats behind it."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "all": values}


def save(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    return path
