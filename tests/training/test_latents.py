"""The latent cache: the same latents as encoding would give, made once, and never one that does not belong."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, AutoencoderTiny
from PIL import Image

from diffusers_adaptive_ts.training import disk_cache, latents
from diffusers_adaptive_ts.training.autoencoders import CHUNK, LatentSpace
from diffusers_adaptive_ts.training.data import ImageData
from diffusers_adaptive_ts.training.images import Preparation
from diffusers_adaptive_ts.training.latents import LatentRows, latents_of, prepare_latents
from diffusers_adaptive_ts.training.randomness import generator
from diffusers_adaptive_ts.training.rows import ImageRows, ListSource
from diffusers_adaptive_ts.training.stream import BatchStream

from .thread_ranks import on_ranks
from .tiny_stable_diffusion import write_captioned

CPU = torch.device("cpu")
COUNT = 2 * CHUNK + 7


def make_space(kind: str = "kl", seed: int = 0, **config: Any) -> LatentSpace:
    torch.manual_seed(seed)
    if kind == "tiny":
        widths = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
        return LatentSpace(
            AutoencoderTiny(1, 1, **widths, latent_channels=4, num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))
        )
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    config = {"in_channels": 1, "out_channels": 1, "block_out_channels": (8, 16), "norm_num_groups": 4} | config
    return LatentSpace(AutoencoderKL(**blocks, **config))


def make_data(count: int = COUNT, seed: int = 0, shape: tuple[int, int] = (8, 8), **changes: Any) -> ImageData:
    """Random pictures with labels; 5 of them held out."""
    random = np.random.default_rng(seed)
    pictures = [Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count + 5)]
    preparation = Preparation(8, 1, random_flip=True, **changes)
    plain = dataclasses.replace(preparation, center_crop=True, random_flip=False)
    train = ImageRows(ListSource(pictures[:count], "pictures"), preparation, torch.arange(count) % 10, 1 << 20)
    held = ImageRows(ListSource(pictures[count:], "pictures"), plain, torch.arange(5), 1 << 20)
    fingerprint = train.fingerprint() + held.fingerprint()
    return ImageData(train, held, 1, 8, None, "pictures", fingerprint, ["decoded"])


def make_args(folder: Path, **changes: Any) -> argparse.Namespace:
    values = {"output_dir": str(folder), "cache_latents": None, "random_flip": True, "dry_run": False}
    return argparse.Namespace(**values | changes)


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Sizes of all batches that are encoded from here on, without those that measure the scale."""
    sizes: list[int] = []
    encode = latents._encode

    def counting(rows: Any, indices: range, *rest: Any) -> dict[str, torch.Tensor]:
        sizes.append(len(indices))
        return encode(rows, indices, *rest)

    monkeypatch.setattr(latents, "_encode", counting)
    return sizes


@pytest.mark.parametrize("kind", ["kl", "tiny"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_cached_latents_are_those_of_direct_encoding_bit_for_bit(kind, in_memory, tmp_path, accelerator, monkeypatch):
    monkeypatch.setattr(disk_cache, "_BYTES_PER_FILE", 1)  # a file for every chunk
    space, data = make_space(kind), make_data()
    args = make_args(tmp_path, keep_in_memory_bytes=1 << 30 if in_memory else 0)
    cached = prepare_latents(data, space, args, accelerator)
    assert len(cached.train) == COUNT
    assert len(cached.validation) == 5
    assert len(list(tmp_path.glob("latents/*/train-*.safetensors"))) == 3
    for rows, kept in [(data.train, cached.train), (data.validation, cached.validation)]:
        for start in range(0, len(rows), CHUNK):
            indices = list(range(start, min(start + CHUNK, len(rows))))
            direct, batch = rows.batch(indices), kept.batch(indices)
            mean, std = space.encode(direct["images"], CPU)
            assert torch.equal(batch["mean"], mean)
            assert torch.equal(batch["std"], std)
            assert torch.equal(batch["labels"], direct["labels"])
            assert torch.equal(batch["index"], direct["index"])
            assert batch["mean"].dtype == batch["std"].dtype == torch.float32
    assert (std.abs().max() > 0) == (kind == "kl")


def test_mirrored_images_have_the_latents_of_the_mirrored_image(tmp_path, accelerator):
    space, data = make_space(), make_data()
    cached = prepare_latents(data, space, make_args(tmp_path), accelerator)
    indices = list(range(CHUNK))
    # The same generator mirrors the same images with and without the cache.
    direct, batch = (rows.batch(indices, generator("flips")) for rows in (data.train, cached.train))
    assert torch.equal(direct["flipped"], batch["flipped"])
    assert 0 < batch["flipped"].sum() < CHUNK
    mean, std = space.encode(direct["images"], CPU)
    assert torch.allclose(batch["mean"], mean, atol=1e-6)
    assert torch.allclose(batch["std"], std, atol=1e-6)
    assert not torch.equal(batch["mean"], cached.train.batch(indices)["mean"])
    assert not cached.validation.batch([0, 1, 2, 3, 4], generator("flips"))["flipped"].any()
    row = cached.train.item(3, generator(0))
    assert row["mean"].shape == (4, 4, 4)
    assert (row["index"], type(row["flipped"])) == (3, bool)


def test_without_random_flip_nothing_is_mirrored(tmp_path, accelerator):
    data = make_data()
    cached = prepare_latents(data, make_space(), make_args(tmp_path, random_flip=False), accelerator)
    assert not cached.train.batch(list(range(COUNT)), generator(0))["flipped"].any()
    assert "flipped_mean" not in cached.train._parts[0]


def test_every_draw_is_fresh_and_follows_the_generator(tmp_path, accelerator):
    space, data = make_space(), make_data()
    cached = prepare_latents(data, space, make_args(tmp_path), accelerator)
    batch = cached.train.batch(list(range(CHUNK)))
    draws = [latents_of(space, batch, generator("latents", epoch), CPU) for epoch in (0, 1, 0)]
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(latents_of(space, batch, None, CPU), batch["mean"] * space.scaling_factor)
    direct = latents_of(space, data.train.batch(list(range(CHUNK))), generator("latents", 0), CPU)
    assert torch.equal(draws[0], direct)
    # (z - mean) / std is standard normal: within five standard errors over 32 * 64 numbers.
    z = (draws[0] / space.scaling_factor - batch["mean"]) / batch["std"]
    assert abs(z.mean().item()) < 5 / z.numel() ** 0.5
    assert abs(z.std().item() - 1) < 5 / (2 * z.numel()) ** 0.5


def test_the_cache_is_reused_when_nothing_changed(tmp_path, accelerator, encoded):
    first = prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    assert encoded == [COUNT, 5]
    assert "encoded once" in first.notes[-1]
    second = prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    assert encoded == [COUNT, 5]
    assert "reused" in second.notes[-1]
    assert second.notes[0] == "decoded"
    assert first.fingerprint == second.fingerprint
    everything = list(range(COUNT))
    assert torch.equal(first.train.batch(everything)["mean"], second.train.batch(everything)["mean"])


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_an_edited_caption_does_not_encode_the_images_again(budget, tmp_path, accelerator, encoded, load):
    folder = write_captioned(tmp_path / "set", 20)
    options = {"train_data_dir": str(folder), "resolution": 8, "image_mode": "L", "keep_in_memory_bytes": budget}
    options |= {"caption_column": "text", "validation_images": 2}
    first = prepare_latents(load(**options), make_space(), make_args(tmp_path), accelerator)
    metadata = folder / "metadata.jsonl"
    metadata.write_text(metadata.read_text().replace("red", "crimson"))
    plain = load(**options)
    second = prepare_latents(plain, make_space(), make_args(tmp_path), accelerator)
    assert encoded == [18, 2]
    assert first.fingerprint != second.fingerprint
    assert second.train.captions == plain.train.captions != first.train.captions
    assert ("crimson square",) in second.train.captions
    assert second.validation.captions == plain.validation.captions
    assert second.train.batch([3, 1])["captions"] == [plain.train.captions[3], plain.train.captions[1]]


CHANGES = {
    "data": (make_data(seed=1), make_space(), {}),
    "autoencoder": (make_data(), make_space(seed=1), {}),
    "flips": (make_data(), make_space(), {"random_flip": False}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_cache_is_made_again_when_something_changed(change, tmp_path, accelerator, encoded):
    before = prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    data, space, options = CHANGES[change]
    after = prepare_latents(data, space, make_args(tmp_path, **options), accelerator)
    assert encoded == [COUNT, 5] * 2
    assert (after.fingerprint == before.fingerprint) == (change == "flips")
    mean, _ = space.encode(data.train.batch(range(CHUNK))["images"], CPU)
    assert torch.equal(after.train.batch(range(CHUNK))["mean"], mean)


def test_an_interrupted_cache_is_not_used(tmp_path, accelerator, monkeypatch, encoded):
    monkeypatch.setattr(disk_cache, "_BYTES_PER_FILE", 1)
    save, saved = disk_cache.save_file, []

    def failing(tensors: Any, path: Path) -> None:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(path)
        save(tensors, path)

    monkeypatch.setattr(disk_cache, "save_file", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    assert [path.name.endswith(".partial") for path in (tmp_path / "latents").iterdir()] == [True]
    monkeypatch.setattr(disk_cache, "save_file", save)
    encoded.clear()
    done = prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    assert sum(encoded) == COUNT + 5
    assert [path.name.endswith(".partial") for path in (tmp_path / "latents").iterdir()] == [False]
    assert len(done.train) == COUNT


@pytest.mark.parametrize("damage", ["cut off", "missing", "no index", "index"])
def test_a_damaged_cache_is_made_again(damage, tmp_path, accelerator, encoded):
    prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    (folder,) = (tmp_path / "latents").iterdir()
    (file,) = folder.glob("train-*.safetensors")
    if damage == "cut off":
        os.truncate(file, file.stat().st_size - 100)
    elif damage == "missing":
        file.unlink()
    elif damage == "no index":
        (folder / "index.json").unlink()
    else:
        (folder / "index.json").write_text("{")
    again = prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    assert encoded == [COUNT, 5] * 2
    assert "encoded once" in again.notes[-1]


def test_random_crops_of_images_that_are_not_square_are_refused(tmp_path, accelerator):
    with pytest.raises(ValueError, match="Pass --center_crop, or --no-cache_latents"):
        prepare_latents(make_data(shape=(8, 16)), make_space(), make_args(tmp_path), accelerator)
    data = make_data(shape=(8, 16), center_crop=True)
    cached = prepare_latents(data, make_space(), make_args(tmp_path), accelerator)
    assert isinstance(cached.train, LatentRows)
    uncached = make_data(shape=(8, 16))
    args = make_args(tmp_path, cache_latents=False)
    assert prepare_latents(uncached, make_space(), args, accelerator).train is uncached.train


def test_nothing_is_encoded_for_a_dry_run_or_when_switched_off(tmp_path, accelerator, encoded):
    for changes in ({"dry_run": True}, {"cache_latents": False}):
        data, space = make_data(), make_space()
        prepared = prepare_latents(data, space, make_args(tmp_path, **changes), accelerator)
        assert prepared.train is data.train
        batch = prepared.train.batch(range(4))
        assert latents_of(space, batch, generator(0), CPU).shape == (4, 4, 4, 4)
    assert encoded == []
    assert not (tmp_path / "latents").exists()
    cached = prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    assert cached.fingerprint == prepared.fingerprint


def test_a_stream_is_encoded_as_it_comes(tmp_path, accelerator):
    data = dataclasses.replace(make_data(), train=None)
    prepared = prepare_latents(data, make_space(), make_args(tmp_path), accelerator)
    assert prepared.train is None
    assert "a stream is encoded as it comes" in prepared.notes[-1]
    without = dataclasses.replace(data, validation=None)
    prepare_latents(without, make_space(scaling_factor=0.5), make_args(tmp_path), accelerator)
    with pytest.raises(ValueError, match="--validation_images"):
        prepare_latents(without, make_space(scaling_factor=1.0), make_args(tmp_path), accelerator)


def test_too_little_disk_is_said_before_encoding(tmp_path, accelerator, monkeypatch, encoded):
    monkeypatch.setattr(disk_cache.shutil, "disk_usage", lambda _: argparse.Namespace(free=1000))
    with pytest.raises(ValueError, match="--no-cache_latents"):
        prepare_latents(make_data(), make_space(), make_args(tmp_path), accelerator)
    assert encoded == []


def test_latents_without_variance_are_refused(tmp_path, accelerator):
    space = make_space()
    space.autoencoder.quant_conv.weight.zero_()
    space.autoencoder.quant_conv.bias.fill_(-100.0)
    with pytest.raises(ValueError, match="cannot be scaled to 1"):
        prepare_latents(make_data(), space, make_args(tmp_path), accelerator)


def test_batches_of_cached_latents_stream_like_images(tmp_path, accelerator):
    data = make_data()
    cached = prepare_latents(data, make_space(), make_args(tmp_path), accelerator)
    plain, ours = (BatchStream(rows, 16, seed=3) for rows in (data.train, cached.train))
    for number in (0, 1, 9):
        images, codes = plain[number], ours[number]
        for key in ("index", "labels", "flipped"):
            assert torch.equal(images[key], codes[key])


def test_ranks_share_the_encoding(tmp_path, accelerator, monkeypatch, encoded):
    monkeypatch.setattr(disk_cache, "_BYTES_PER_FILE", 1)
    alone = prepare_latents(make_data(), make_space(), make_args(tmp_path / "alone"), accelerator)
    encoded.clear()
    spaces, args = [make_space(), make_space()], make_args(tmp_path / "both")
    results = on_ranks(lambda rank: prepare_latents(make_data(), spaces[rank.process_index], args, rank))
    assert sorted(encoded) == [5, 7, CHUNK, CHUNK]
    everything = list(range(COUNT))
    for prepared in results:
        assert torch.equal(prepared.train.batch(everything)["mean"], alone.train.batch(everything)["mean"])
    shutil.rmtree(tmp_path / "both")
