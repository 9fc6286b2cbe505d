"""Batches as a function of their number: shuffled anew every epoch, split over ranks, exact from any start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from .randomness import generator

if TYPE_CHECKING:
    from .data import ImageData
    from .streamed import StreamedBatches


class BatchStream:
    """Endless micro-batches of one rank.

    Stream position p is element p % N of the shuffled images of epoch p // N. Micro-batch k of rank r takes the
    positions from (k * world_size + r) * batch_size on, so ranks never share an image, every image comes once in an
    epoch, and all batches have the same size: the last of an epoch runs on into the next.

    Args:
        rows: anything with a length and `batch(indices, augment)`, such as `ImageRows`.
        batch_size: images in a micro-batch of one rank.
        seed: orders, crops and flips follow from it.
        num_workers: processes that make batches ahead of time; the batches are the same with any number.

    Example:
        >>> stream = BatchStream(rows, batch_size=128, seed=0)  # doctest: +SKIP
        >>> for batch in stream.batches(start=step):  # doctest: +SKIP
        ...     batch["images"]
    """

    def __init__(
        self, rows: Any, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, num_workers: int = 0
    ) -> None:
        check_shape(batch_size, rank, world_size, num_workers)
        if len(rows) < batch_size * world_size:
            processes = f" x {world_size} processes" if world_size > 1 else ""
            raise ValueError(
                f"{len(rows)} training images are fewer than one step takes ({batch_size}{processes}). "
                f"Lower --train_batch_size to at most {max(1, len(rows) // world_size)}, or give more images."
            )
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers
        self._orders: dict[int, torch.Tensor] = {}

    @property
    def steps_in_epoch(self) -> int:
        """Micro-batches of one rank that together with the other ranks' cover all images."""
        return -(-len(self.rows) // (self.batch_size * self.world_size))

    def batches(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Micro-batches `start`, `start + 1`, ... without end."""
        if self.num_workers == 0:
            yield from map(self.__getitem__, count(start))
            return
        # A generator of its own: the loader would otherwise take a number from torch's global one.
        yield from DataLoader(
            self,
            batch_size=None,
            sampler=count(start),
            num_workers=self.num_workers,
            generator=generator(self.seed, "workers"),
            collate_fn=_as_made,
        )

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Micro-batch `number` of this rank."""
        augment = generator(self.seed, "augment", number, self.rank)
        return self.rows.batch(self.indices(number), augment)

    def indices(self, number: int) -> torch.Tensor:
        """`(batch_size,)` rows of micro-batch `number`."""
        first = (number * self.world_size + self.rank) * self.batch_size
        positions = torch.arange(first, first + self.batch_size)
        epochs = positions // len(self.rows)
        parts = [self._order(epoch)[positions[epochs == epoch] % len(self.rows)] for epoch in epochs.unique().tolist()]
        return torch.cat(parts)

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            # A batch reaches over two epochs at most.
            self._orders = {key: order for key, order in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = torch.randperm(len(self.rows), generator=generator(self.seed, "order", epoch))
        return self._orders[epoch]


def _as_made(batch: dict[str, Any]) -> dict[str, Any]:
    """In place of the loader's own conversion, which turns the tuples of captions into lists."""
    return batch


def check_shape(batch_size: int, rank: int, world_size: int, num_workers: int) -> None:
    if batch_size < 1:
        raise ValueError(f"--train_batch_size must be at least 1, got {batch_size}.")
    if num_workers < 0:
        raise ValueError(f"--dataloader_num_workers must be at least 0, got {num_workers}.")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0 .. {world_size - 1} (world_size {world_size}), got {rank}.")


def make_stream(
    data: ImageData, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, num_workers: int = 0
) -> BatchStream | StreamedBatches:
    """The stream that suits the data: by row number, or in the order of a `--streaming` data set."""
    if data.streamed is not None:
        from .streamed import StreamedBatches

        return StreamedBatches(data.streamed, batch_size, seed, rank, world_size, num_workers)
    return BatchStream(data.train, batch_size, seed, rank, world_size, num_workers)
