"""Latents encoded once and kept on disk, mean and standard deviation apart, so that every epoch draws fresh ones."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from .autoencoders import CHUNK, LatentSpace
from .disk_cache import DiskCache
from .rows import Rows

if TYPE_CHECKING:
    from .data import ImageData


class LatentRows(Rows):
    """Cached latents.

    Args:
        files: their parts in order, `rows_per_file` rows each.
        labels: `(N,)` classes, where they are used.
        random_flip: whether training takes the latents of the mirrored image half of the time.
        in_memory: read all at once; otherwise pages are read from disk as they are asked for.
        captions: those of each row, where they are used.
    """

    def __init__(
        self,
        files: Sequence[Path],
        rows_per_file: int,
        count: int,
        labels: torch.Tensor | None = None,
        random_flip: bool = False,
        in_memory: bool = True,
        captions: list[tuple[str, ...]] | None = None,
    ) -> None:
        self.labels, self.captions, self.random_flip = labels, captions, random_flip
        self._rows_per_file, self._count = rows_per_file, count
        self._parts = [load_file(file) for file in files]
        held = sum(len(part["mean"]) for part in self._parts)
        if held != count:
            raise ValueError(f"{files[0].parent} holds {held} latents of {count}.")
        if in_memory:
            whole = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
            self._parts, self._rows_per_file = [whole], max(count, 1)

    def __len__(self) -> int:
        return self._count

    def samples(self, index: torch.Tensor, augment: torch.Generator | None) -> dict[str, torch.Tensor]:
        """Unscaled `mean` and `std` (B, c, h, w)."""
        flipped = torch.zeros(len(index), dtype=torch.bool)
        if self.random_flip and augment is not None:
            # The same draws as for images, so that a run with cached latents mirrors what one without does.
            flipped = torch.rand(len(index), 3, dtype=torch.float64, generator=augment)[:, 2] < 0.5
        mean = self._take("mean", index, flipped)
        has_std = "std" in self._parts[0]
        std = self._take("std", index, flipped) if has_std else torch.zeros_like(mean)
        return {"mean": mean, "std": std, "flipped": flipped}

    def _take(self, name: str, index: torch.Tensor, flipped: torch.Tensor) -> torch.Tensor:
        rows = self._select(name, index)
        if flipped.any():
            rows[flipped] = self._select(f"flipped_{name}", index[flipped])
        return rows

    def _select(self, name: str, index: torch.Tensor) -> torch.Tensor:
        if len(self._parts) == 1:
            return self._parts[0][name].index_select(0, index)
        places = (divmod(number, self._rows_per_file) for number in index.tolist())
        return torch.stack([self._parts[part][name][row] for part, row in places])


def latents_of(
    space: LatentSpace, batch: dict[str, torch.Tensor], generator: torch.Generator | None, device: torch.device
) -> torch.Tensor:
    """Scaled latents of a batch of cached latents or of images; without a generator the posterior's mean."""
    if "mean" in batch:
        mean, std = batch["mean"].to(device), batch["std"].to(device)
    else:
        mean, std = space.encode(batch["images"], device)
    return space.draw(mean, std, generator)


def prepare_latents(data: ImageData, space: LatentSpace, args: argparse.Namespace, accelerator: Any) -> ImageData:
    """The data with its latents cached where that is wanted; the autoencoder's scaling is settled first."""
    notes = [space.scale_to(data.validation if data.train is None else data.train, accelerator.device)]
    identity = space.fingerprint()
    wanted = args.cache_latents is None or args.cache_latents
    if wanted and not args.dry_run:
        if data.train is None and args.cache_latents:
            raise ValueError("--cache_latents cannot be had with --streaming: a stream is encoded as it comes.")
        if data.train is None:
            notes.append("latents are not cached: a stream is encoded as it comes")
        else:
            data, note = cache_latents(data, space, identity, args, accelerator)
            notes.append(note)
            space.autoencoder.to("cpu")  # until there are images to decode
    # A run is only resumed with the same data, and for a latent model these are the scaled latents.
    fingerprint = f"{data.fingerprint}-{identity}-{space.scaling_factor:g}"
    return dataclasses.replace(data, fingerprint=fingerprint, notes=[*data.notes, *filter(None, notes)])


def cache_latents(
    data: ImageData, space: LatentSpace, autoencoder: str, args: argparse.Namespace, accelerator: Any
) -> tuple[ImageData, str]:
    """The data with rows of cached latents, encoded now or found from before; and which of the two, for the log."""
    if data.train.crops_vary():
        raise ValueError(
            "Random crops cannot be cached as latents, and some images are not square. "
            "Pass --center_crop, or --no-cache_latents to encode every batch."
        )
    facts = {
        # Not `data.fingerprint`: an edited caption leaves the images as they are.
        "data": data.images_fingerprint,
        "autoencoder": autoencoder,
        "resolution": data.resolution,
        "flips": bool(args.random_flip),
    }
    splits = {"train": data.train, "validation": data.validation}
    splits = {name: rows for name, rows in splits.items() if rows is not None}
    numbers = space.channels * space.size(data.resolution) ** 2
    row_bytes = 4 * numbers * (2 if space.has_posterior else 1) * (2 if facts["flips"] else 1)

    def read(files: dict[str, list[Path]], rows_per_file: int) -> dict[str, LatentRows]:
        size = sum(file.stat().st_size for part in files.values() for file in part)
        return {
            name: LatentRows(
                files[name],
                rows_per_file,
                len(rows),
                rows.labels,
                random_flip=args.random_flip and name == "train",
                in_memory=size <= getattr(args, "keep_in_memory_bytes", 2 << 30),
                captions=rows.captions,
            )
            for name, rows in splits.items()
        }

    def encode(name: str, indices: range, bar: Any) -> dict[str, torch.Tensor]:
        return _encode(splits[name], indices, space, facts["flips"] and name == "train", accelerator.device, bar)

    cache = DiskCache(
        Path(args.output_dir) / "latents", facts, "latents", "images", "--no-cache_latents to encode every batch"
    )
    counts = {name: len(rows) for name, rows in splits.items()}
    cached, note = cache.read_or_write(counts, read, encode, row_bytes, CHUNK, accelerator)
    return dataclasses.replace(data, **cached), note


def _encode(
    rows: Any, indices: range, space: LatentSpace, flips: bool, device: torch.device, bar: Any
) -> dict[str, torch.Tensor]:
    collected: dict[str, list[torch.Tensor]] = {}
    for start in range(0, len(indices), CHUNK):
        images = rows.batch(indices[start : start + CHUNK], None)["images"]
        for prefix, seen in [("", images)] + ([("flipped_", images.flip(-1))] if flips else []):
            mean, std = space.encode(seen, device)
            collected.setdefault(f"{prefix}mean", []).append(mean.cpu())
            if space.has_posterior:
                collected.setdefault(f"{prefix}std", []).append(std.cpu())
        bar.update(len(images))
    return {name: torch.cat(parts).contiguous() for name, parts in collected.items()}
