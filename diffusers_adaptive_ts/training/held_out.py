"""Which images are kept for validation: the same ones in every run on the same data, whatever its seed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import sources
from .randomness import generator
from .rows import ImageSource

SPLITS = ("validation", "valid", "val", "test")


class Part(NamedTuple):
    """Undecoded images, and `(N,)` labels where they are used."""

    source: ImageSource
    labels: torch.Tensor | None

    def subset(self, rows: torch.Tensor) -> Part:
        return Part(self.source.subset(rows.tolist()), None if self.labels is None else self.labels[rows])


def own_split(splits: dict[str, Any]) -> str | None:
    """The name of the data set's own validation or test split."""
    return next((name for name in SPLITS if name in splits), None)


def from_own_split(
    splits: dict[str, Any],
    count: int,
    image_column: str,
    class_labels: str | None,
    classes: dict[int, str] | None,
    notes: list[str],
) -> Part | None:
    """At most `count` rows of the data set's own validation or test split, if it has one that can be used."""
    name = own_split(splits)
    if name is None or len(splits[name]) == 0:
        return None
    try:
        sources.find_image_column(splits[name].features, image_column)
        labels = None if classes is None else sources.read_labels(splits[name], class_labels, name, classes)[0]
    except ValueError as error:
        notes.append(f"Split {name!r} is not used for validation. {error}")
        return None
    source = sources.DatasetSource(sources.undecoded(splits[name], image_column), image_column, name)
    count = min(count, len(source))
    notes.append(f"{count:,} images of split {name!r} for validation.")
    return Part(source, labels).subset(chosen_rows(len(source), count))


def from_training(train: Part, count: int, notes: list[str]) -> tuple[Part, Part | None]:
    """What is left for training, and at most `count` and a tenth of the images for validation."""
    total = len(train.source)
    count = min(count, total // 10)
    if count == 0:
        notes.append(f"No images held out for validation: a tenth of {total} is less than one.")
        return train, None
    notes.append(f"{count:,} training images held out for validation, the same in every run.")
    held = chosen_rows(total, count)
    kept = torch.ones(total, dtype=torch.bool).index_fill_(0, held, False).nonzero().flatten()
    return train.subset(kept), train.subset(held)


def chosen_rows(total: int, count: int) -> torch.Tensor:
    """`(count,)` of `total` rows in order, by a seed that is not the run's: validation losses must compare."""
    return torch.randperm(total, generator=generator("validation rows"))[:count].sort().values
