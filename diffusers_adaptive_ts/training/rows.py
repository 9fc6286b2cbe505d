"""Images that can be asked for by number: decoded once into memory when they fit, otherwise for each batch."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm

from .images import ColourImage, Preparation, identity, mode_and_size, open_image, resized_size

_CHUNK = 64
_PROBES = 64
_SLOW_SECONDS = 2e-3


class ImageSource(Protocol):
    """Where undecoded images come from."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Any]:
        """What `images.open_image` takes, for each index."""

    def where(self, index: int, value: Any) -> str:
        """How an error message names this image: its row, and its file where there is one."""

    def subset(self, rows: Sequence[int]) -> ImageSource:
        """Some of the images, in this order."""


class ListSource:
    """Undecoded images in a list."""

    def __init__(self, values: list[Any], name: str) -> None:
        self._values, self._name = values, name

    def __len__(self) -> int:
        return len(self._values)

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [self._values[index] for index in indices]

    def where(self, index: int, value: Any) -> str:
        return f"image {index} of {self._name}"

    def subset(self, rows: Sequence[int]) -> ListSource:
        return ListSource([self._values[row] for row in rows], self._name)


class Pixels:
    """Stored images of one type end to end in one tensor, whatever their sizes."""

    def __init__(self, first: torch.Tensor, count: int, capacity: int) -> None:
        self.channels, self._used = first.shape[0], 0
        # Pages of the capacity that are never written cost no memory.
        self._flat = torch.empty(capacity, dtype=first.dtype)
        self._starts, self._sizes = torch.zeros(count, dtype=torch.int64), torch.zeros(count, 2, dtype=torch.int64)
        self._uniform: torch.Tensor | None = None
        self._count = 0

    def append(self, image: torch.Tensor) -> None:
        end = self._used + image.numel()
        if end > len(self._flat):
            self._flat.resize_(end + len(self._flat) // 4)
        self._flat[self._used : end] = image.reshape(-1)
        self._starts[self._count], self._sizes[self._count] = self._used, torch.tensor(image.shape[1:])
        self._used, self._count = end, self._count + 1
        if self._count == len(self._starts) and (self._sizes == self._sizes[0]).all():
            self._uniform = self._flat[: self._used].view(self._count, self.channels, *self._sizes[0].tolist())

    def take(self, indices: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        if self._uniform is not None:
            return self._uniform.index_select(0, indices)
        return [self._one(index) for index in indices.tolist()]

    def _one(self, index: int) -> torch.Tensor:
        start, (height, width) = int(self._starts[index]), self._sizes[index].tolist()
        return self._flat[start : start + self.channels * height * width].view(self.channels, height, width)

    @property
    def nbytes(self) -> int:
        return self._used * self._flat.element_size()

    def all_square(self) -> bool:
        return bool((self._sizes[:, 0] == self._sizes[:, 1]).all())

    def digest(self) -> str:
        digest = hashlib.blake2b(repr((self.channels, self._sizes.tolist())).encode(), digest_size=16)
        digest.update(self._flat[: self._used].numpy().data)
        return digest.hexdigest()


class Rows:
    """Samples that can be asked for by number; a subclass knows what they are.

    Attributes:
        labels: `(N,)` int64 classes, where they are used.
        captions: those of each row, of which training picks one, where they are used.
    """

    labels: torch.Tensor | None
    captions: list[tuple[str, ...]] | None = None

    def samples(self, index: torch.Tensor, augment: torch.Generator | None) -> dict[str, torch.Tensor]:
        """What the rows hold, by name, and `flipped` (B,): which were mirrored."""
        raise NotImplementedError

    def batch(self, indices: Sequence[int] | torch.Tensor, augment: torch.Generator | None = None) -> dict[str, Any]:
        """The `samples`, `index` (B,), `flipped` (B,), `labels` (B,) and `captions`, a list of B tuples, where used.

        Args:
            augment: draws crops and flips; None takes the middle and does not mirror.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        batch = {**self.samples(index, augment), "index": index}
        if self.labels is not None:
            batch["labels"] = self.labels[index]
        if self.captions is not None:
            batch["captions"] = [self.captions[row] for row in index.tolist()]
        return batch

    def item(self, index: int, augment: torch.Generator | None = None) -> dict[str, Any]:
        """One row: its sample, `labels` a scalar and `captions` a tuple where used, `index` a number, `flipped`."""
        row = {key: value[0] for key, value in self.batch([index], augment).items()}
        return row | {"index": int(index), "flipped": bool(row["flipped"])}


class ImageRows(Rows):
    """The images of one split, with labels and captions where they are used.

    A picture that cannot be read is an error that names it. All are read here: whole where they are kept in memory,
    otherwise the heads of their files, which say mode and size. A head cannot tell whether all of the pixels follow
    it, so a file that is cut off later is only found when a batch decodes it.

    Args:
        source: where they are read from.
        preparation: what is done to them.
        labels: `(N,)` int64 classes.
        budget: bytes that the decoded images may take; 0 decodes them for each batch.
        captions: those of each image.
    """

    def __init__(
        self,
        source: ImageSource,
        preparation: Preparation,
        labels: torch.Tensor | None = None,
        budget: int = 0,
        captions: list[tuple[str, ...]] | None = None,
    ) -> None:
        if len(source) == 0:
            raise ValueError("There are no images.")
        self.source, self.preparation, self.labels, self.captions = source, preparation, labels, captions
        self.modes: Counter[str] = Counter()
        self._heads_digest = ""
        self.pixels = self._decode_all(budget)
        self._all_square = self._check_heads() if self.pixels is None else self.pixels.all_square()

    def __len__(self) -> int:
        return len(self.source)

    def samples(self, index: torch.Tensor, augment: torch.Generator | None) -> dict[str, torch.Tensor]:
        """`images` (B, C, R, R) float32 in [-1, 1]."""
        images, flipped = self.preparation.finish(self._stored(index), augment)
        return {"images": images, "flipped": flipped}

    @property
    def in_memory(self) -> bool:
        return self.pixels is not None

    def crops_vary(self) -> bool:
        """Whether training sees different crops of an image: some are not square, and `center_crop` is off."""
        return not self.preparation.center_crop and not self._all_square

    @cached_property
    def images_fingerprint(self) -> str:
        """Changes with the images alone; the identity of a data set would change with every other column too."""
        return self._heads_digest if self.pixels is None else self.pixels.digest()

    def fingerprint(self) -> str:
        """Changes with the images, the labels or the captions."""
        digest = hashlib.blake2b(self.images_fingerprint.encode(), digest_size=16)
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        for captions in self.captions or ():
            digest.update(repr(captions).encode())
        return digest.hexdigest()

    def _stored(self, index: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        if self.pixels is not None:
            return self.pixels.take(index)
        numbers = index.tolist()
        return [self._decode(*pair)[0] for pair in zip(numbers, self.source.read(numbers), strict=True)]

    def _decode(self, index: int, value: Any) -> tuple[torch.Tensor, str]:
        with naming(lambda: self.source.where(index, value)):
            image = open_image(value)
            return self.preparation.stored(image), image.mode

    def _check_heads(self) -> bool:
        """Count the modes, digest what the files are, and say whether all images are square once resized."""
        resolution, all_square = self.preparation.resolution, True
        digest = hashlib.blake2b(digest_size=16)
        with _bar(len(self), "checking") as bar:
            for index, value, mode, size in heads(self.source, range(len(self))):
                with naming(lambda index=index, value=value: self.source.where(index, value)):
                    self.preparation.check_mode(mode)
                    all_square &= resized_size(*size, resolution) == (resolution, resolution)
                self.modes[mode] += 1
                which = identity(value)
                digest.update(repr((mode, size, len(which))).encode())
                digest.update(which)
                bar.update()
        self._heads_digest = digest.hexdigest()
        return all_square

    def _decode_all(self, budget: int) -> Pixels | None:
        count = len(self)
        if budget <= 0:
            return None
        chosen, began = spread(count), time.perf_counter()
        probes = list(map(self._decode, chosen, self.source.read(chosen)))
        # PIL works outside the interpreter's lock: threads pay for large pictures and cost time for small ones.
        slow = time.perf_counter() - began > _SLOW_SECONDS * len(probes)
        numbers = sum(pixels.numel() for pixels, _ in probes) * count // len(probes)
        first, size = probes[0][0], probes[0][0].element_size()
        if numbers * size > budget:
            return None
        pixels, modes = Pixels(first, count, numbers), Counter()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool, _bar(count, "decoding") as bar:
            decode = pool.map if slow else map
            for start in range(0, count, _CHUNK):
                chunk = range(start, min(start + _CHUNK, count))
                for image, mode in decode(self._decode, chunk, self.source.read(chunk)):
                    pixels.append(image)
                    modes[mode] += 1
                bar.update(len(chunk))
                if pixels.nbytes > budget:
                    return None
        self.modes = modes
        return pixels


def spread(count: int, most: int = _PROBES) -> list[int]:
    """At most `most` of `count` numbers, evenly spread; data sets are often sorted, so the first would mislead.

    Example:
        >>> spread(10, 4)
        [0, 3, 6, 9]
    """
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]


def heads(source: ImageSource, indices: Sequence[int]) -> Iterator[tuple[int, Any, str, tuple[int, int]]]:
    """Index, value, PIL mode and (width, height) of images, without decoding them."""
    for start in range(0, len(indices), _CHUNK):
        chunk = indices[start : start + _CHUNK]
        for index, value in zip(chunk, source.read(chunk), strict=True):
            with naming(lambda index=index, value=value: source.where(index, value)):
                mode, size = mode_and_size(value)
            yield index, value, mode, size


@contextmanager
def naming(where: Callable[[], str]) -> Iterator[None]:
    """Errors inside say which image they are about."""
    try:
        yield
    except ColourImage as error:
        raise ColourImage(f"{where()}: {error}") from None
    except Exception as error:
        raise ValueError(f"{where()} cannot be read: {error}. Replace or remove it, and start again.") from error


def _bar(total: int, what: str) -> tqdm:
    """A progress bar that shows itself only when the work takes a while, on the first process of a machine."""
    elsewhere = int(os.environ.get("LOCAL_RANK", 0)) > 0
    return tqdm(total=total, desc=what, unit=" images", delay=2, leave=False, disable=elsewhere or None)
