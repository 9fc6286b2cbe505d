"""Text embeddings of a run's captions: encoded once and kept on disk where that pays, otherwise in every step."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from safetensors.torch import load_file

from .disk_cache import DiskCache, take_rows
from .text import CHUNK, Embedder, TextSpace

if TYPE_CHECKING:
    from .data import ImageData

_NAME = "embeddings"
logger = get_logger(__name__)


class CachedEmbedder(Embedder):
    """Embeddings from files; a caption that is not among them is encoded as it comes.

    Args:
        text: tokenizer and encoder.
        captions: those of the files, in their order.
        files: `rows_per_file` embeddings each.
        in_memory: read all at once; otherwise pages are read from disk as they are asked for.
    """

    def __init__(
        self, text: TextSpace, captions: Sequence[str], files: Sequence[Path], rows_per_file: int, in_memory: bool
    ) -> None:
        super().__init__(text)
        self._places = {caption: place for place, caption in enumerate(captions)}
        self._parts, self._rows_per_file = [load_file(file)[_NAME] for file in files], rows_per_file
        held = [tuple(part.shape) for part in self._parts]
        wanted = (text.max_length, text.hidden_size)
        if sum(shape[0] for shape in held) != len(captions) or any(shape[1:] != wanted for shape in held):
            raise ValueError(f"it holds embeddings of {held} for {len(captions)} captions of {wanted}")
        if in_memory:
            self._parts, self._rows_per_file = [torch.cat(self._parts)], len(captions)

    def __call__(self, captions: Sequence[str], device: torch.device | str) -> torch.Tensor:
        places = [self._places.get(caption) for caption in captions]
        if None in places:
            return super().__call__(captions, device)
        return take_rows(self._parts, self._rows_per_file, torch.tensor(places, dtype=torch.int64)).to(device)


def prepare_captions(
    data: ImageData, text: TextSpace, args: argparse.Namespace, accelerator: Any
) -> tuple[Embedder, list[str]]:
    """What embeds the captions of this run, and what the log should say about it.

    `--cache_text_embeddings` decides whether they are cached; when it is not given, they are if they fit in memory.
    """
    wanted, streamed = args.cache_text_embeddings, data.train is None
    if streamed and wanted:
        raise ValueError(
            "--cache_text_embeddings needs all captions before the first step, and --streaming reads them as they "
            "come. Leave one of the two out."
        )
    counts = _count([data.train, data.validation])
    cut = _warn_truncated(text, counts)
    live = Embedder(text, watch=streamed and not cut)
    if wanted is False or args.dry_run:
        return live, []
    if streamed:
        return live, ["text embeddings are not cached: captions of a stream are encoded as they come"]
    # Dropped captions are empty, whether or not a row is.
    captions = sorted({"", *counts})
    size, budget = len(captions) * _row_bytes(text), args.keep_in_memory_bytes
    if wanted is None and size > budget:
        return live, [
            f"text embeddings are not cached: {len(captions):,} captions take {size / 1e6:,.1f} MB, more than the "
            f"{budget / 1e6:,.1f} MB of --keep_in_memory_bytes; --cache_text_embeddings reads them from disk"
        ]
    embedder, note = cache_embeddings(captions, text, args.output_dir, size <= budget, accelerator)
    return embedder, [f"{note} ({len(captions):,} different captions)"]


def cache_embeddings(
    captions: Sequence[str], text: TextSpace, output_dir: str | Path, in_memory: bool, accelerator: Any
) -> tuple[CachedEmbedder, str]:
    """Embeddings of different captions, encoded now or found from before; and which of the two, for the log."""
    facts = {
        "captions": hashlib.sha256(json.dumps(list(captions)).encode()).hexdigest(),
        "text_encoder": text.fingerprint(),
    }

    def read(files: dict[str, list[Path]], rows_per_file: int) -> CachedEmbedder:
        return CachedEmbedder(text, captions, files["captions"], rows_per_file, in_memory)

    def encode(_: str, rows: range, bar: Any) -> dict[str, torch.Tensor]:
        parts = []
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            parts.append(text.encode([captions[row] for row in chunk], accelerator.device).cpu())
            bar.update(len(chunk))
        return {_NAME: torch.cat(parts)}

    folder = Path(output_dir) / "text_embeddings"
    instead = "--no-cache_text_embeddings to encode captions in every step"
    cache = DiskCache(folder, facts, "text embeddings", "captions", instead)
    counts = {"captions": len(captions)}
    embedder, note = cache.read_or_write(counts, read, encode, _row_bytes(text), CHUNK, accelerator)
    # The encoder has nothing left to do: its memory on the device is the model's.
    text.encoder.to("cpu")
    return embedder, note


def _row_bytes(text: TextSpace) -> int:
    return 4 * text.max_length * text.hidden_size


def _count(splits: Sequence[Any]) -> Counter[str]:
    """How often each caption occurs in splits of which some may be None; a row may have several."""
    rows = [split.captions for split in splits if split is not None and split.captions is not None]
    return Counter(caption for captions in rows for row in captions for caption in row)


def _warn_truncated(text: TextSpace, counts: Counter[str]) -> int:
    """Count the captions whose ends the encoder does not see, and warn about all of them at once."""
    unique = list(counts)
    cut = [caption for caption, is_cut in zip(unique, text.truncated(unique), strict=True) if is_cut]
    total = sum(counts[caption] for caption in cut)
    if cut:
        logger.warning(
            "%d of %d captions are longer than the %d tokens that the text encoder takes; their ends are not seen. "
            "For example: %r",
            total,
            counts.total(),
            text.max_length,
            cut[0],
        )
    return total
