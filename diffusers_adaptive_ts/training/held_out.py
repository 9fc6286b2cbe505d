"""Which images are trained on and which are kept for validation: the latter the same in every run on the data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import sources
from .captions import read_captions
from .randomness import generator
from .rows import ImageSource

SPLITS = ("validation", "valid", "val", "test")


class Part(NamedTuple):
    """Undecoded images, `(N,)` labels and the captions of each where they are used."""

    source: ImageSource
    labels: torch.Tensor | None
    captions: list[tuple[str, ...]] | None = None

    def subset(self, rows: torch.Tensor) -> Part:
        numbers = rows.tolist()
        return Part(
            self.source.subset(numbers),
            None if self.labels is None else self.labels[rows],
            None if self.captions is None else [self.captions[row] for row in numbers],
        )


def sampled(train: Part, count: int | None, seed: int | None, notes: list[str]) -> Part:
    """`count` of the training images, in order, chosen by the seed; all of them for None."""
    total = len(train.source)
    if count is None or count == total:
        return train
    if count > total:
        notes.append(f"--max_train_samples {count:,}: all {total:,} images are used, there are no more.")
        return train
    notes.append(f"{count:,} of {total:,} training images are used, chosen by the seed.")
    return train.subset(_some_rows(total, count, generator(seed or 0, "training samples")))


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
    caption_column: str | None = None,
) -> Part | None:
    """At most `count` rows of the data set's own validation or test split, if it has one that can be used."""
    name = own_split(splits)
    if name is None or len(splits[name]) == 0:
        return None
    count = min(count, len(splits[name]))
    rows, captions = chosen_rows(len(splits[name]), count), None
    try:
        sources.find_image_column(splits[name].features, image_column)
        labels = None if classes is None else sources.read_labels(splits[name], class_labels, name, classes)[0]
        if caption_column is not None:
            captions = read_captions(splits[name], caption_column, name, rows.tolist())
    except ValueError as error:
        notes.append(f"Split {name!r} is not used for validation. {error}")
        return None
    source = sources.DatasetSource(sources.undecoded(splits[name], image_column), image_column, name)
    notes.append(f"{count:,} images of split {name!r} for validation.")
    return Part(source, labels).subset(rows)._replace(captions=captions)


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
    return _some_rows(total, count, generator("validation rows"))


def _some_rows(total: int, count: int, random: torch.Generator) -> torch.Tensor:
    return torch.randperm(total, generator=random)[:count].sort().values
