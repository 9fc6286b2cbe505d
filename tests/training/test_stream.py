from __future__ import annotations

from itertools import islice

import pytest
import torch

from diffusers_adaptive_ts.training.data import ImageData
from diffusers_adaptive_ts.training.images import Preparation
from diffusers_adaptive_ts.training.rows import ImageRows, ListSource
from diffusers_adaptive_ts.training.stream import BatchStream, make_stream

from .conftest import make_picture


def make_rows(count: int = 23, in_memory: bool = True) -> ImageRows:
    pictures = [make_picture(number, size=((9, 9), (9, 12), (14, 9))[number % 3]) for number in range(count)]
    preparation = Preparation(8, 3, random_flip=True)
    labels = torch.arange(count) % 5
    captions = [(f"picture {number}", str(number)) for number in range(count)]
    return ImageRows(ListSource(pictures, "pictures"), preparation, labels, 2**20 if in_memory else 0, captions)


def take(stream: BatchStream, count: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    return list(islice(stream.batches(start), count))


def assert_same(first: list[dict], second: list[dict]) -> None:
    assert len(first) == len(second) > 0
    for left, right in zip(first, second, strict=True):
        assert left.keys() == right.keys()
        assert left["captions"] == right["captions"]
        assert all(torch.equal(left[key], right[key]) for key in left if key != "captions")


def test_a_batch_is_a_function_of_its_number():
    straight = take(BatchStream(make_rows(), 4, seed=1), 20)
    for start in (0, 1, 5, 6, 13):
        assert_same(take(BatchStream(make_rows(), 4, seed=1), 20 - start, start), straight[start:])
    state = torch.get_rng_state()
    assert_same([BatchStream(make_rows(), 4, seed=1)[7]], straight[7:8])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("in_memory", [True, False])
def test_workers_change_nothing(in_memory):
    rows = make_rows(in_memory=in_memory)
    state = torch.get_rng_state()
    ahead = BatchStream(rows, 4, seed=1, num_workers=2).batches(start=3)
    batches = list(islice(ahead, 9))
    ahead.close()
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(batches, take(BatchStream(rows, 4, seed=1), 9, start=3))


def test_decoded_when_asked_for_is_the_same_as_in_memory():
    kept, lazy = make_rows(), make_rows(in_memory=False)
    assert kept.in_memory
    assert not lazy.in_memory
    assert_same(take(BatchStream(lazy, 5, seed=2), 12), take(BatchStream(kept, 5, seed=2), 12))


def test_every_image_once_per_epoch_and_epochs_differ():
    batches = take(BatchStream(make_rows(23), 4, seed=0), 23)
    assert {len(batch["images"]) for batch in batches} == {4}
    order = torch.cat([batch["index"] for batch in batches]).view(4, 23)
    assert torch.equal(order.sort(dim=1).values, torch.arange(23).expand(4, 23))
    assert len({tuple(epoch) for epoch in order.tolist()}) == 4
    assert not torch.equal(
        order[0], torch.cat([b["index"] for b in take(BatchStream(make_rows(), 4, seed=1), 6)])[:23]
    )
    assert all(torch.equal(batch["labels"], batch["index"] % 5) for batch in batches)
    assert all(
        batch["captions"] == [(f"picture {row}", str(row)) for row in batch["index"].tolist()] for batch in batches
    )


def test_flips_and_crops_change_from_epoch_to_epoch():
    batches = take(BatchStream(make_rows(24), 24, seed=0), 6)
    flips = torch.stack([batch["flipped"][batch["index"].argsort()] for batch in batches])
    images = torch.stack([batch["images"][batch["index"].argsort()] for batch in batches])
    assert 0 < flips.float().mean() < 1
    assert (flips != flips[0]).any()
    assert all((images[1:, row] != images[0, row]).any() for row in (1, 2, 4, 5))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_no_image_and_together_have_all(world_size):
    rows = make_rows(24)
    streams = [BatchStream(rows, 4, 5, rank, world_size) for rank in range(world_size)]
    steps = streams[0].steps_in_epoch
    assert steps == 24 // (4 * world_size)
    for epoch in range(2):
        seen = [batch["index"] for stream in streams for batch in take(stream, steps, epoch * steps)]
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(24))
    flips = [torch.cat([batch["flipped"] for batch in take(stream, 6)]) for stream in streams]
    assert not torch.equal(flips[0], flips[1])


def test_ranks_cover_epochs_that_batches_do_not_divide():
    streams = [BatchStream(make_rows(23), 4, 5, rank, 2) for rank in range(2)]
    assert streams[0].steps_in_epoch == 3
    numbers = [stream.indices(step) for step in range(23) for stream in streams]
    order = torch.cat(numbers).view(8, 23)
    assert torch.equal(order.sort(dim=1).values, torch.arange(23).expand(8, 23))


def test_mistakes_are_said():
    with pytest.raises(
        ValueError, match=r"7 training images are fewer than one step takes \(4 x 2 processes\).*at most 3"
    ):
        BatchStream(make_rows(7), 4, 0, rank=0, world_size=2)
    with pytest.raises(ValueError, match="train_batch_size must be at least 1"):
        BatchStream(make_rows(3), 0, 0)
    with pytest.raises(ValueError, match="rank must be in 0"):
        BatchStream(make_rows(), 2, 0, rank=2, world_size=2)
    with pytest.raises(ValueError, match="num_workers must be at least 0"):
        BatchStream(make_rows(), 2, 0, num_workers=-1)


def test_make_stream_takes_rows_of_any_kind():
    data = ImageData(make_rows(), None, 3, 8, None, "pictures", "")
    assert_same(take(make_stream(data, 4, 1), 3), take(BatchStream(make_rows(), 4, 1), 3))
