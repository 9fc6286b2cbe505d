"""Batches of a data set that is read as a stream (`--streaming`): shuffled in a buffer, exact from any start."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch

from .captions import captions_of
from .images import Preparation, open_image
from .randomness import derived_seed, generator
from .rows import naming
from .stream import check_shape

if TYPE_CHECKING:
    from datasets import IterableDataset

_BUFFER = 1_000


@dataclass(frozen=True)
class StreamedImages:
    """The training images of a stream.

    Args:
        dataset: its image column is not decoded by datasets.
        image_column: name of that column.
        label_column: a column of classes, where they are used.
        preparation: what is done to every image.
        held_out: so many examples at the head of the stream belong to validation and are left out.
        caption_column: a column of captions, where they are used.
        most: only so many examples at the head of the stream are used, those held out among them.
    """

    dataset: IterableDataset
    image_column: str
    label_column: str | None
    preparation: Preparation
    held_out: int = 0
    caption_column: str | None = None
    most: int | None = None

    @property
    def cut(self) -> bool:
        """Whether the head or the end of the stream is left out."""
        return self.held_out > 0 or self.most is not None


class StreamedBatches:
    """Endless micro-batches of one rank, as `BatchStream` gives them; the length of an epoch is not known.

    To start in the middle, the examples before are read and dropped without decoding them: at most about two epochs,
    except where ranks take whole shards of unequal length.
    """

    steps_in_epoch = None

    def __init__(
        self,
        images: StreamedImages,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
    ) -> None:
        check_shape(batch_size, rank, world_size, num_workers)
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers

    def batches(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Micro-batches `start`, `start + 1`, ... without end.

        Workers are threads that decode: processes would each read other shards, in another order.
        """
        examples = self._examples(start * self.batch_size)
        groups = ((number, list(islice(examples, self.batch_size))) for number in count(start))
        if self.num_workers == 0:
            for number, group in groups:
                yield self._batch(number, group)
            return
        pool = ThreadPoolExecutor(self.num_workers)
        try:
            ahead: deque[Future] = deque()
            for number, group in groups:
                ahead.append(pool.submit(self._batch, number, group))
                if len(ahead) > self.num_workers:
                    yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _batch(self, number: int, examples: list[dict[str, Any]]) -> dict[str, Any]:
        first = (number * self.world_size + self.rank) * self.batch_size
        preparation = self.images.preparation
        pixels = []
        for place, example in enumerate(examples):
            value = example[self.images.image_column]
            with naming(lambda place=place, value=value: _where(first + place, value)):
                pixels.append(preparation.stored(open_image(value)))
        augment = generator(self.seed, "augment", number, self.rank)
        images, flipped = preparation.finish(pixels, augment)
        batch = {"images": images, "index": torch.arange(first, first + len(examples)), "flipped": flipped}
        if self.images.label_column is not None:
            batch["labels"] = streamed_labels(examples, self.images.label_column, f"the stream from {first} on")
        if self.images.caption_column is not None:
            batch["captions"] = streamed_captions(examples, self.images.caption_column, "the stream", first)
        return batch

    def _examples(self, skip: int) -> Iterator[dict[str, Any]]:
        """Undecoded examples of this rank, epoch after epoch, from number `skip` on."""
        epoch = 0
        while True:
            taken = 0
            for example in self._epoch(epoch):
                taken += 1
                if taken > skip:
                    yield example
            if taken == 0:
                raise ValueError(f"The stream holds no training image for rank {self.rank} of {self.world_size}.")
            skip, epoch = max(0, skip - taken), epoch + 1
            if self._epochs_are_equal():
                epoch, skip = epoch + skip // taken, skip % taken

    def _epoch(self, epoch: int) -> Iterator[dict[str, Any]]:
        from datasets.distributed import split_dataset_by_node

        dataset, cut = self.images.dataset, self.images.cut
        if self.images.most is not None:
            dataset = dataset.take(self.images.most)
        if self.images.held_out:
            dataset = dataset.skip(self.images.held_out)
        # Newer datasets mix ten shards with threads and then wait 5 seconds at the end of every epoch.
        known = inspect.signature(dataset.shuffle).parameters
        options = {"max_buffer_input_shards": 1} if "max_buffer_input_shards" in known else {}
        dataset = dataset.shuffle(seed=derived_seed(self.seed, "order"), buffer_size=_BUFFER, **options)
        if self.world_size > 1 and not cut:
            dataset = split_dataset_by_node(dataset, self.rank, self.world_size)
        dataset.set_epoch(epoch)
        if self.world_size > 1 and cut:
            # split_dataset_by_node would skip and take a part of each shard instead of the head of the stream.
            return islice(dataset, self.rank, None, self.world_size)
        return iter(dataset)

    def _epochs_are_equal(self) -> bool:
        """Whether this rank has as many examples in every epoch: not when it is given other shards in each."""
        by_shard = not self.images.cut and self.images.dataset.num_shards % self.world_size == 0
        return self.world_size == 1 or not by_shard


def streamed_labels(examples: list[dict[str, Any]], column: str, where: str) -> torch.Tensor:
    """`(N,)` int64 classes of examples as a ClassLabel column gives them; datasets writes -1 where there is none."""
    labels = [example[column] for example in examples]
    for place, label in enumerate(labels):
        if label is None or label < 0:
            raise ValueError(f"--class_labels {column}: image {place} of {where} has no label.")
    return torch.tensor(labels, dtype=torch.int64)


def streamed_captions(
    examples: list[dict[str, Any]], column: str, where: str, first: int = 0
) -> list[tuple[str, ...]]:
    """The captions of each example; `first` is the number of the first of them."""
    return [
        captions_of(example[column], column, f"image {number} of {where}")
        for number, example in enumerate(examples, first)
    ]


def _where(position: int, value: Any) -> str:
    path = value.get("path") if isinstance(value, dict) else None
    return f"Image {position} of the stream{f' ({path})' if path else ''}"
