"""Training scripts run in turn, so that what else the machine does meets both sides; their speeds, and the ratio."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from accelerate.utils import tqdm
from record import spread


def in_turn(repeats: int, measure: Callable[[str, int], float], sides: Iterable[str]) -> dict[str, list[float]]:
    """`measure(side, repeat)` of all sides in every repeat."""
    values: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in tqdm(range(repeats), desc="alternating runs"):
        for side, measured in values.items():
            measured.append(measure(side, repeat))
    return values


def ratio(values: dict[str, list[float]], side: str, over: str) -> dict:
    """Spread of the quotients of runs that stood beside each other."""
    return spread([one / other for one, other in zip(values[side], values[over], strict=True)])


def spreads(values: dict[str, list[float]]) -> dict[str, dict]:
    return {side: spread(measured) for side, measured in values.items()}


def options(words: dict[str, object]) -> list[str]:
    return [str(part) for key, value in words.items() for part in (f"--{key}", value)]


def run(command: list[str], threads: int | None = None) -> float:
    """Run to the end; returns the peak resident memory of the process in MiB."""
    process = psutil.Popen(command, env=_environment(threads), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, said = 0.0, []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
    reader.start()
    while process.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss / 2**20)
        except psutil.Error:
            break
        time.sleep(0.01)
    reader.join()
    if process.wait() != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{said[0].decode()[-2000:]}")
    return peak


def _environment(threads: int | None) -> dict[str, str]:
    """Threads are limited in the same way for every side, or left to torch."""
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {**os.environ, "ACCELERATE_USE_CPU": "true", **offline, **limit}


def ours_speed(folder: Path) -> float:
    """Steps per second from the log, the first quarter left out as warm-up."""
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    first, last = rows[len(rows) // 4], rows[-1]
    return (last["step"] - first["step"]) / (60 * (last["minutes"] - first["minutes"]))


def upstream_speed(folder: Path, tag: str) -> float:
    """The same from the wall-clock stamps of the tensorboard events that diffusers' scripts write in every step.

    Args:
        tag: the loss's name there.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = next(p.parent for p in folder.rglob("events.out.tfevents*"))
    events = EventAccumulator(str(path))
    events.Reload()
    rows = events.Scalars(tag)
    first, last = rows[len(rows) // 4], rows[-1]
    return (last.step - first.step) / (last.wall_time - first.wall_time)


def versions_of(python: str, *more: str) -> dict[str, str]:
    """What is installed in the environment that the two scripts ran in."""
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in %r}))"
    names = ["torch", "torchvision", "diffusers", "accelerate", "datasets", *more]
    return json.loads(subprocess.run([python, "-c", code % names], capture_output=True, text=True, check=True).stdout)
