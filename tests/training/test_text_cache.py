"""Cached text embeddings: those that encoding would give, made once, and never one that does not belong."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from diffusers_adaptive_ts.training import disk_cache
from diffusers_adaptive_ts.training.data import ImageData
from diffusers_adaptive_ts.training.images import Preparation
from diffusers_adaptive_ts.training.rows import ImageRows, ListSource
from diffusers_adaptive_ts.training.text import CHUNK, Embedder, TextSpace
from diffusers_adaptive_ts.training.text_cache import CachedEmbedder, prepare_captions

from .thread_ranks import on_ranks
from .tiny_stable_diffusion import MAX_LENGTH, tiny_pipeline

CPU = torch.device("cpu")
ROW_BYTES = 4 * MAX_LENGTH * 16
# Every caption three times, and a second one for each row that all share.
TRAIN = [(f"no {number}", "shared") for number in range(2 * CHUNK + 5)] * 3
HELD = [("no 1",), ("held",)]
UNIQUE = 2 * CHUNK + 5 + 3  # with "shared", "held" and the empty one


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def make_text(seed: int | None = None) -> TextSpace:
    pipeline = tiny_pipeline()
    if seed is not None:
        torch.manual_seed(seed)
        torch.nn.init.normal_(pipeline.text_encoder.get_input_embeddings().weight)
    return TextSpace(pipeline.tokenizer, pipeline.text_encoder)


def make_rows(captions: list[tuple[str, ...]]) -> ImageRows:
    source = ListSource([Image.new("L", (4, 4), number % 256) for number in range(len(captions))], "pictures")
    return ImageRows(source, Preparation(4, 1), None, 1 << 20, captions)


def make_data(train: Any = TRAIN, held: Any = HELD) -> ImageData:
    train, held = (None if captions is None else make_rows(captions) for captions in (train, held))
    return ImageData(train, held, 1, 4, None, "pictures", "fingerprint")


def make_args(folder: Path, **changes: Any) -> argparse.Namespace:
    values = {"cache_text_embeddings": None, "dry_run": False, "keep_in_memory_bytes": 1 << 30}
    return argparse.Namespace(output_dir=str(folder), **values | changes)


@pytest.fixture
def encoded(monkeypatch) -> list[str]:
    """All captions that are encoded from here on."""
    captions: list[str] = []
    encode = TextSpace.encode

    def counting(self: TextSpace, some: Any, device: Any) -> torch.Tensor:
        captions.extend(some)
        return encode(self, some, device)

    monkeypatch.setattr(TextSpace, "encode", counting)
    return captions


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("files", [1, 3])
def test_cached_embeddings_are_those_of_encoding(in_memory, files, tmp_path, accelerator, monkeypatch, encoded):
    if files > 1:
        monkeypatch.setattr(disk_cache, "_BYTES_PER_FILE", 1)  # a file for every chunk
    text = make_text()
    args = make_args(tmp_path, cache_text_embeddings=True, keep_in_memory_bytes=1 << 30 if in_memory else 0)
    embedder, notes = prepare_captions(make_data(), text, args, accelerator)
    assert isinstance(embedder, CachedEmbedder)
    assert len(list(tmp_path.glob("text_embeddings/*/captions-*.safetensors"))) == files
    assert len(embedder._parts) == (1 if in_memory else files)
    # Each caption once, however many rows have it.
    assert len(encoded) == len(set(encoded)) == UNIQUE
    (note,) = notes
    assert "text embeddings encoded once into" in note
    assert f"{UNIQUE} different captions" in note
    encoded.clear()
    every = ["", "shared", *(row[0] for row in [*TRAIN, *HELD])]
    embeddings = embedder(every, CPU)
    assert encoded == []
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings, text.encode(every, CPU), atol=1e-6, rtol=1e-5)
    assert embedder([], CPU).shape == (0, MAX_LENGTH, 16)
    # What a step is given is its own: it may be changed without harm.
    embeddings.zero_()
    assert embedder(["shared"], CPU).abs().sum() > 0


def test_the_empty_caption_is_cached_although_no_row_has_it(tmp_path, accelerator, encoded):
    text = make_text()
    embedder, _ = prepare_captions(make_data(), text, make_args(tmp_path), accelerator)
    encoded.clear()
    empty = embedder.empty(CPU)
    assert encoded == []
    torch.testing.assert_close(empty, text.encode([""], CPU), atol=1e-6, rtol=1e-5)


def test_a_caption_that_is_not_cached_is_encoded(tmp_path, accelerator, encoded):
    text = make_text()
    embedder, _ = prepare_captions(make_data(), text, make_args(tmp_path), accelerator)
    encoded.clear()
    batch = ["shared", "another"]
    embeddings = embedder(batch, CPU)
    assert "another" in encoded
    torch.testing.assert_close(embeddings, text.encode(batch, CPU), atol=1e-6, rtol=1e-5)


def test_the_cache_is_reused_when_nothing_changed(tmp_path, accelerator, encoded):
    first, _ = prepare_captions(make_data(), make_text(), make_args(tmp_path), accelerator)
    encoded.clear()
    # The order of rows, and which of them are held out, are no part of it.
    again = make_data(TRAIN[::-1] + HELD, None)
    second, (note,) = prepare_captions(again, make_text(), make_args(tmp_path), accelerator)
    assert encoded == []
    assert "text embeddings reused from" in note
    assert torch.equal(first(["no 3", "held"], CPU), second(["no 3", "held"], CPU))


CHANGES = {
    "more captions": (make_data([*TRAIN, ("new",)]), make_text()),
    "a caption": (make_data(held=[("new",)]), make_text()),
    "encoder": (make_data(), make_text(seed=1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_cache_is_made_again_when_something_changed(change, tmp_path, accelerator, encoded):
    prepare_captions(make_data(), make_text(), make_args(tmp_path), accelerator)
    encoded.clear()
    data, text = CHANGES[change]
    embedder, (note,) = prepare_captions(data, text, make_args(tmp_path), accelerator)
    assert "encoded once" in note
    assert len(encoded) == UNIQUE + (change == "more captions")
    some = ["no 7", "shared", data.validation.captions[-1][0]]
    torch.testing.assert_close(embedder(some, CPU), text.encode(some, CPU), atol=1e-6, rtol=1e-5)


DAMAGES = {
    "cut off": lambda folder, file: os.truncate(file, file.stat().st_size - 100),
    "missing": lambda folder, file: file.unlink(),
    "no index": lambda folder, file: (folder / "index.json").unlink(),
    "index": lambda folder, file: (folder / "index.json").write_text("{"),
    "another index": lambda folder, file: (folder / "index.json").write_text("[]"),
    "shape": lambda folder, file: disk_cache.save_file({"embeddings": torch.zeros(UNIQUE, 3, 16)}, file),
    "count": lambda folder, file: disk_cache.save_file({"embeddings": torch.zeros(UNIQUE - 1, MAX_LENGTH, 16)}, file),
    "name": lambda folder, file: disk_cache.save_file({"other": torch.zeros(UNIQUE, MAX_LENGTH, 16)}, file),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_said_and_made_again(damage, tmp_path, accelerator, encoded, caplog):
    prepare_captions(make_data(), make_text(), make_args(tmp_path), accelerator)
    encoded.clear()
    (folder,) = (tmp_path / "text_embeddings").iterdir()
    (file,) = folder.glob("captions-*.safetensors")
    DAMAGES[damage](folder, file)
    with caplog.at_level(logging.WARNING):
        embedder, (note,) = prepare_captions(make_data(), make_text(), make_args(tmp_path), accelerator)
    assert len(encoded) == UNIQUE
    assert "encoded once" in note
    assert embedder(["shared"], CPU).abs().sum() > 0
    # Without an index it was never finished, which is nothing to worry about.
    assert ["damaged" in record.getMessage() for record in caplog.records] == [True] * (damage != "no index")
    assert [path.name for path in (tmp_path / "text_embeddings").iterdir()] == [folder.name]


def test_what_does_not_fit_in_memory_is_cached_only_on_request(tmp_path, accelerator, encoded):
    size = UNIQUE * ROW_BYTES
    args = make_args(tmp_path, keep_in_memory_bytes=size - 1)
    embedder, (note,) = prepare_captions(make_data(), make_text(), args, accelerator)
    assert type(embedder) is Embedder
    assert "text embeddings are not cached: 72 captions take 0.1 MB" in note
    assert "--cache_text_embeddings" in note
    assert encoded == []
    assert not (tmp_path / "text_embeddings").exists()
    args = make_args(tmp_path, keep_in_memory_bytes=size)
    assert isinstance(prepare_captions(make_data(), make_text(), args, accelerator)[0], CachedEmbedder)


@pytest.mark.parametrize("changes", [{"dry_run": True}, {"cache_text_embeddings": False}])
def test_nothing_is_encoded_for_a_dry_run_or_when_switched_off(changes, tmp_path, accelerator, encoded):
    embedder, notes = prepare_captions(make_data(), make_text(), make_args(tmp_path, **changes), accelerator)
    assert type(embedder) is Embedder
    assert notes == []
    assert encoded == []
    assert list(tmp_path.iterdir()) == []


def test_a_stream_is_encoded_as_it_comes(tmp_path, accelerator, caplog):
    streamed = make_data(train=None)
    embedder, (note,) = prepare_captions(streamed, make_text(), make_args(tmp_path), accelerator)
    assert type(embedder) is Embedder
    assert "a stream are encoded as they come" in note
    assert list(tmp_path.iterdir()) == []
    with caplog.at_level(logging.WARNING):
        embedder(["a caption that is too long"], CPU)
    assert "longer than the 12 tokens" in caplog.text
    args = make_args(tmp_path, cache_text_embeddings=True)
    with pytest.raises(ValueError, match=r"--streaming reads them as they come\. Leave one of the two out"):
        prepare_captions(streamed, make_text(), args, accelerator)
    without = make_data(train=None, held=None)
    assert prepare_captions(without, make_text(), make_args(tmp_path), accelerator)[1] == [note]


@pytest.mark.parametrize("streamed", [False, True])
def test_captions_that_are_cut_off_are_counted_and_warned_about_once(streamed, tmp_path, accelerator, caplog):
    captions = [("a caption that is too long", "short")] * 3 + [("another caption of many letters",), ("short",)]
    data = make_data(None, captions) if streamed else make_data(captions, HELD)
    with caplog.at_level(logging.WARNING):
        embedder, _ = prepare_captions(data, make_text(), make_args(tmp_path), accelerator)
        embedder(["a caption that is too long"], CPU)
    (record,) = caplog.records
    assert f"4 of {8 if streamed else 10} captions are longer than the 12 tokens" in record.getMessage()
    assert "'a caption that is too long'" in record.getMessage()


def test_too_little_disk_is_said_before_encoding(tmp_path, accelerator, monkeypatch, encoded):
    monkeypatch.setattr(disk_cache.shutil, "disk_usage", lambda _: argparse.Namespace(free=UNIQUE * ROW_BYTES))
    with pytest.raises(ValueError, match=r"The text embeddings take .* or --no-cache_text_embeddings"):
        prepare_captions(make_data(), make_text(), make_args(tmp_path), accelerator)
    assert encoded == []


def test_ranks_share_the_encoding(tmp_path, accelerator, monkeypatch, encoded):
    monkeypatch.setattr(disk_cache, "_BYTES_PER_FILE", 1)
    texts = [make_text(), make_text()]
    data, args = make_data(), make_args(tmp_path)
    embedders = on_ranks(lambda rank: prepare_captions(data, texts[rank.process_index], args, rank)[0])
    assert len(encoded) == len(set(encoded)) == UNIQUE
    every = [row[0] for row in TRAIN]
    expected = make_text().encode(every, CPU)
    for embedder in embedders:
        torch.testing.assert_close(embedder(every, CPU), expected, atol=1e-6, rtol=1e-5)
