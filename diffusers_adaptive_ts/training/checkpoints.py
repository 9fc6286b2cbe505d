"""Checkpoints that are whole or not there: written aside, listed with sizes and hashes, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..persistence import read_tensors

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def write_checkpoint(folder: Path, step: int, accelerator: Any, write: Any) -> Path:
    """Call `write(partial_folder)` on every rank, then give the folder its name; returns it.

    A crash at any moment leaves either no `checkpoint-<step>` or a complete one.
    """
    target = folder / f"checkpoint-{step}"
    partial = folder / f".checkpoint-{step}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    write(partial)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _write_manifest(partial)
        if target.exists():
            shutil.rmtree(target)
        os.rename(partial, target)
        _sync(folder)
    accelerator.wait_for_everyone()
    return target


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _hash(path)}
        _sync(path)
    (folder / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
    _sync(folder / MANIFEST)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; `None` when it is as it was written."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {facts['bytes']}"
        if _hash(path) != facts["sha256"]:
            return f"{name} has other contents than were written"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by step, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def find_checkpoint(folder: Path, asked: str) -> Path | None:
    """The checkpoint to resume from: `latest` is the newest that is whole; `None` when there is none yet."""
    if asked == "latest":
        there = list_checkpoints(folder)
        for path in reversed(there):
            problem = damage(path)
            if problem is None:
                return path
            warnings.warn(f"{path.name} is passed over: {problem}.", stacklevel=2)
        if there:
            raise ValueError(
                f"None of the checkpoints in {folder} is whole; the newest: {damage(there[-1])}. "
                "Put the file back, or start anew with --overwrite_output_dir."
            )
        return None
    path = Path(asked) if Path(asked).is_dir() else folder / Path(asked).name
    if not path.is_dir():
        there = ", ".join(p.name for p in list_checkpoints(folder)) or "none"
        raise FileNotFoundError(f"There is no checkpoint {asked}. In {folder} there are: {there}.")
    problem = damage(path)
    if problem is not None:
        raise ValueError(f"{path} is damaged: {problem}. Use another one, or --resume_from_checkpoint latest.")
    return path


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints of steps that are about to be done again; nothing is removed."""
    for path in list_checkpoints(folder):
        if int(_NAME.fullmatch(path.name)[1]) > step:
            aside = path.with_name(f"superseded-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


def remove_oldest(folder: Path, keep: int | None) -> None:
    """Keep the newest `keep` checkpoints, and no leftovers of crashed writes."""
    for leftover in folder.glob(".checkpoint-*.partial"):
        shutil.rmtree(leftover)
    if keep is not None:
        for path in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(path)


def save_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """The optimizer's state as safetensors, with its JSON side (groups, plain numbers) in the same file."""
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{key}"] = value.detach().cpu().contiguous()
            else:
                plain[f"{index}.{key}"] = value
    # One key: safetensors writes several in no fixed order, and equal states should be equal files.
    aside = json.dumps({"groups": state["param_groups"], "plain": plain}, sort_keys=True)
    save_file(tensors, path, metadata={"json": aside})


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Put back what `save_optimizer` wrote."""
    tensors = read_tensors(path)
    with safe_open(path, framework="pt") as file:
        aside = json.loads(file.metadata()["json"])
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *aside["plain"].items()]:
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": aside["groups"]})
