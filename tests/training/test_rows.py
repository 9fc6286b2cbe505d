from __future__ import annotations

import os
import pickle

import pytest
import torch

from diffusers_adaptive_ts.training import rows as rows_module
from diffusers_adaptive_ts.training.images import ColourImage, Preparation
from diffusers_adaptive_ts.training.rows import ImageRows, ListSource, heads, spread

from .conftest import make_picture

SIZES = ((12, 12), (20, 12), (12, 31))


def make_rows(modes="RGB", count=9, sizes=SIZES, budget=2**20, **preparation) -> ImageRows:
    modes = [modes] * count if isinstance(modes, str) else modes
    pictures = [make_picture(number, mode, sizes[number % len(sizes)]) for number, mode in enumerate(modes)]
    return ImageRows(
        ListSource(pictures, "pictures"), Preparation(**{"resolution": 8, "channels": 3} | preparation), budget=budget
    )


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("center_crop", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], SIZES[1:2]])
def test_in_memory_and_lazy_agree_bit_for_bit(precise, center_crop, sizes):
    options = {"sizes": sizes, "center_crop": center_crop, "random_flip": True, "preserve_input_precision": precise}
    kept, lazy = make_rows(**options), make_rows(**options, budget=0)
    assert kept.in_memory
    assert not lazy.in_memory
    for seed in (None, 0, 1):
        draws = [None if seed is None else torch.Generator().manual_seed(seed) for _ in range(2)]
        first, second = (rows.batch([4, 0, 2, 2], augment) for rows, augment in zip((kept, lazy), draws, strict=True))
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert kept.crops_vary() == lazy.crops_vary() == (not center_crop and sizes != SIZES[:1])


def test_item_is_a_batch_of_one():
    rows = make_rows(random_flip=True)
    rows.labels = torch.arange(9)
    for seed in range(4):
        item = rows.item(3, torch.Generator().manual_seed(seed))
        batch = rows.batch([3], torch.Generator().manual_seed(seed))
        assert torch.equal(item["images"], batch["images"][0])
        assert (item["index"], item["flipped"]) == (3, bool(batch["flipped"][0]))
        assert item["labels"].dtype == torch.int64
        assert item["labels"].ndim == 0


def test_batches_do_not_share_memory_with_the_images():
    rows = make_rows(sizes=SIZES[:1], random_flip=True)
    before = rows.batch([1])["images"].clone()
    rows.batch([1], torch.Generator())["images"].zero_()
    assert torch.equal(rows.batch([1])["images"], before)


def test_memory_decides():
    needed = 9 * 3 * 8 * 8
    assert make_rows(sizes=SIZES[:1], budget=needed).pixels.nbytes == needed
    assert not make_rows(sizes=SIZES[:1], budget=needed - 1).in_memory
    assert make_rows(sizes=SIZES[:1], budget=4 * needed, preserve_input_precision=True).pixels.nbytes == 4 * needed


def test_images_that_turn_out_larger_than_the_first_ones_still_come_right(monkeypatch):
    monkeypatch.setattr(rows_module, "spread", lambda count: [0])
    options = {"sizes": ((12, 12), (12, 60)), "count": 8}
    kept, lazy = make_rows(**options), make_rows(**options, budget=0)
    assert torch.equal(kept.batch(range(8))["images"], lazy.batch(range(8))["images"])
    assert not make_rows(**options, budget=3 * 8 * 8 * 8 + 100).in_memory


def test_large_pictures_are_decoded_in_threads_all_the_same(monkeypatch):
    slow = make_rows(count=150)
    monkeypatch.setattr(rows_module, "_SLOW_SECONDS", 0.0)
    assert make_rows(count=150).fingerprint() == slow.fingerprint()


def test_fingerprint_follows_the_content():
    prints = {make_rows(**options).fingerprint() for options in ({}, {"count": 8}, {"resolution": 9}, {"channels": 1})}
    assert len(prints) == 4
    assert make_rows().fingerprint() == make_rows().fingerprint()
    other = make_rows()
    other.labels = torch.zeros(9, dtype=torch.int64)
    assert other.fingerprint() != make_rows().fingerprint()
    assert other.images_fingerprint == make_rows().images_fingerprint


@pytest.mark.parametrize("budget", [0, 2**20])
def test_captions_come_with_their_images(budget):
    rows = make_rows(budget=budget)
    plain = rows.fingerprint()
    rows.captions = [(f"image {number}", "or so") for number in range(9)]
    assert rows.batch([4, 0])["captions"] == [("image 4", "or so"), ("image 0", "or so")]
    assert rows.batch(torch.tensor([8]))["captions"] == [("image 8", "or so")]
    assert rows.item(3)["captions"] == ("image 3", "or so")
    prints = {plain, rows.fingerprint()}
    rows.captions = [*rows.captions[:-1], ("edited",)]
    prints.add(rows.fingerprint())
    # The same letters, cut in another place.
    rows.captions = [("".join(captions),) for captions in rows.captions]
    prints.add(rows.fingerprint())
    assert len(prints) == 4
    assert rows.images_fingerprint == make_rows(budget=budget).images_fingerprint


def test_files_that_are_not_decoded_are_known_by_bytes_or_by_path_size_and_time(tmp_path):
    def digest(*values):
        return ImageRows(ListSource(list(values), "files"), Preparation(8, 3)).images_fingerprint

    files = [tmp_path / f"{number}.bmp" for number in range(2)]
    for number, file in enumerate(files):
        make_picture(number).save(file)
    encoded = [{"bytes": file.read_bytes(), "path": None} for file in files]
    paths = [{"bytes": None, "path": str(file)} for file in files]
    prints = {digest(*encoded), digest(*encoded[::-1]), digest(encoded[0]), digest(*paths), digest(*paths[::-1])}
    pictures = [make_picture(number) for number in range(2)]
    assert len(prints | {digest(*pictures), digest(*pictures[::-1])}) == 7
    assert digest(*paths) in prints
    make_picture(7).save(files[1])
    os.utime(files[1], ns=(0, 0))
    # The size is the same, so the time of change has to tell.
    assert digest(*paths) not in prints


def test_a_colour_image_among_grey_ones_is_named():
    modes = ["L"] * 5 + ["RGB"] + ["L"] * 3
    with pytest.raises(ColourImage, match="image 5 of pictures: a colour image"):
        make_rows(modes, channels=1, grey_only=True)
    with pytest.raises(ColourImage, match="image 5 of pictures: a colour image"):
        make_rows(modes, channels=1, grey_only=True, budget=0)


@pytest.mark.parametrize("budget", [0, 2**20])
def test_a_broken_image_is_named(budget):
    pictures = [
        {"bytes": b"\x89PNG nothing", "path": None} if number == 2 else make_picture(number) for number in range(4)
    ]
    with pytest.raises(ValueError, match=r"image 2 of pictures cannot be read.*Replace or remove it"):
        ImageRows(ListSource(pictures, "pictures"), Preparation(8, 3), budget=budget)
    with pytest.raises(ValueError, match="image 2 of pictures cannot be read"):
        list(heads(ListSource(pictures, "pictures"), range(4)))


def test_spread_reaches_both_ends():
    assert spread(3) == [0, 1, 2]
    assert (spread(1000)[0], spread(1000)[-1], len(set(spread(1000)))) == (0, 999, 64)


@pytest.mark.parametrize("budget", [2**20, 500, 0])
def test_modes_are_counted(budget):
    rows = make_rows(["L", "RGB", "L"] * 30, budget=budget)
    assert rows.in_memory == (budget == 2**20)
    assert rows.modes == {"L": 60, "RGB": 30}


def test_heads_are_read_once(monkeypatch):
    rows = make_rows(budget=0)
    monkeypatch.setattr(ListSource, "read", None)
    assert rows.crops_vary()


def test_modes_are_exact_when_the_images_turn_out_too_large(monkeypatch):
    monkeypatch.setattr(rows_module, "spread", lambda count: [0])
    monkeypatch.setattr(rows_module, "_CHUNK", 4)
    rows = make_rows(count=8, sizes=((12, 12), (12, 60)), budget=3 * 8 * 8 * 8 + 100)
    assert not rows.in_memory
    assert rows.modes == {"RGB": 8}


def test_no_images():
    with pytest.raises(ValueError, match="no images"):
        ImageRows(ListSource([], "nothing"), Preparation(8, 3))


def test_rows_can_be_sent_to_other_processes():
    rows = make_rows(random_flip=True)
    again = pickle.loads(pickle.dumps(rows))
    assert torch.equal(again.batch([1, 2])["images"], rows.batch([1, 2])["images"])
