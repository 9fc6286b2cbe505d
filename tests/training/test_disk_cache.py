"""A cache on disk is whole or not there, and belongs to its facts alone."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from diffusers_adaptive_ts.training import disk_cache
from diffusers_adaptive_ts.training.disk_cache import DiskCache, take_rows

from .thread_ranks import Rank, on_ranks

COUNTS = {"train": 5, "validation": 2}


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def make_cache(folder: Path, **facts: Any) -> DiskCache:
    return DiskCache(folder / "numbers", {"data": "some", **facts}, "numbers", "rows", "--no-numbers to count")


def encode(name: str, rows: range, bar: Any) -> dict[str, torch.Tensor]:
    bar.update(len(rows))
    return {"row": torch.tensor(list(rows)) + 100 * (name == "validation")}


def read(files: dict[str, list[Path]], rows_per_file: int) -> dict[str, list[int]]:
    return {name: torch.cat([load_file(file)["row"] for file in part]).tolist() for name, part in files.items()}


def test_rows_come_back_in_order_and_files_hold_whole_chunks(tmp_path, accelerator, monkeypatch):
    monkeypatch.setattr(disk_cache, "_BYTES_PER_FILE", 1)
    cache = make_cache(tmp_path)
    content, note = cache.read_or_write(COUNTS, read, encode, 8, 2, accelerator)
    assert content == {"train": [0, 1, 2, 3, 4], "validation": [100, 101]}
    assert note == f"numbers encoded once into {cache.folder}"
    sizes = {file.stem: len(load_file(file)["row"]) for file in cache.folder.glob("*.safetensors")}
    assert sizes == {"train-000000": 2, "train-000001": 2, "train-000002": 1, "validation-000000": 2}
    assert json.loads((cache.folder / "index.json").read_text()) == {"rows_per_file": 2, "data": "some"}

    def never(*_: Any) -> Any:
        raise AssertionError("encoded again")

    again, note = make_cache(tmp_path).read_or_write(COUNTS, read, never, 8, 2, accelerator)
    assert (again, note) == (content, f"numbers reused from {cache.folder}")


def test_files_are_as_large_as_they_may_be(tmp_path, accelerator, monkeypatch):
    monkeypatch.setattr(disk_cache, "_BYTES_PER_FILE", 8 * 5)
    cache = make_cache(tmp_path)
    cache.read_or_write({"train": 9}, read, encode, 8, 2, accelerator)
    assert json.loads((cache.folder / "index.json").read_text())["rows_per_file"] == 4
    assert len(list(cache.folder.glob("*.safetensors"))) == 3


def test_other_facts_are_another_folder(tmp_path):
    folders = {
        make_cache(tmp_path, **facts).folder for facts in ({}, {"flips": True}, {"flips": False}, {"data": "a"})
    }
    assert len(folders) == 4
    assert make_cache(tmp_path, a=1, b=2).folder == make_cache(tmp_path, b=2, a=1).folder


def test_what_was_interrupted_is_not_used(tmp_path, accelerator):
    def interrupted(name: str, rows: range, bar: Any) -> dict[str, torch.Tensor]:
        if name == "validation":
            raise KeyboardInterrupt
        return encode(name, rows, bar)

    cache = make_cache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.read_or_write(COUNTS, read, interrupted, 8, 2, accelerator)
    assert not cache.folder.exists()
    _, note = cache.read_or_write(COUNTS, read, encode, 8, 2, accelerator)
    assert "encoded once" in note
    assert list(cache.parent.iterdir()) == [cache.folder]


def test_a_disk_that_loses_what_was_written_is_said(tmp_path, accelerator):
    def unreadable(files: dict[str, list[Path]], rows_per_file: int) -> None:
        raise OSError("bad sector")

    with pytest.raises(RuntimeError, match=r"just written .* cannot be read\. Is the disk full or failing"):
        make_cache(tmp_path).read_or_write(COUNTS, unreadable, encode, 8, 2, accelerator)


def test_all_ranks_encode_when_one_misses_the_files(tmp_path, accelerator):
    """As on a disk that shows new files late; a rank that went on alone would leave the others waiting."""
    make_cache(tmp_path).read_or_write(COUNTS, read, encode, 8, 2, accelerator)
    missed = threading.Event()

    def work(rank: Rank) -> tuple[dict[str, list[int]], str]:
        def late(files: dict[str, list[Path]], rows_per_file: int) -> dict[str, list[int]]:
            if rank.process_index == 1 and not missed.is_set():
                missed.set()
                raise FileNotFoundError
            return read(files, rows_per_file)

        return make_cache(tmp_path).read_or_write(COUNTS, late, encode, 8, 2, rank)

    results = on_ranks(work)
    assert ["encoded once" in note for _, note in results] == [True, True]
    assert results[0][0] == results[1][0] == {"train": [0, 1, 2, 3, 4], "validation": [100, 101]}


def test_rows_are_taken_from_one_part_or_several():
    whole = torch.arange(21).reshape(7, 3)
    for index in ([6, 0, 3, 3, 2], []):
        expected = whole[torch.tensor(index, dtype=torch.int64)]
        for size in (7, 3, 1):
            assert torch.equal(take_rows(whole.split(size), size, torch.tensor(index, dtype=torch.int64)), expected)
