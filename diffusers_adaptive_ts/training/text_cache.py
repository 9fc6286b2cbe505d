"""Text embeddings of a run's captions: encoded once and kept on disk where that pays, otherwise in every step."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger

from .text import Embedder, TextSpace

if TYPE_CHECKING:
    from .data import ImageData

logger = get_logger(__name__)


def prepare_captions(
    data: ImageData, text: TextSpace, args: argparse.Namespace, accelerator: Any
) -> tuple[Embedder, list[str]]:
    """What embeds the captions of this run, and what the log should say about it."""
    counts = count_captions([data.train, data.validation])
    warn_truncated(text, counts)
    return Embedder(text, watch=data.train is None), []


def count_captions(splits: Sequence[Any]) -> Counter[str]:
    """How often each caption occurs, over all captions of all rows of these splits, None left out."""
    rows = [split.captions for split in splits if split is not None and split.captions is not None]
    return Counter(caption for captions in rows for row in captions for caption in row)


def warn_truncated(text: TextSpace, counts: Counter[str]) -> None:
    """One warning that counts the captions whose ends the encoder does not see."""
    unique = list(counts)
    cut = [caption for caption, is_cut in zip(unique, text.truncated(unique), strict=True) if is_cut]
    if cut:
        logger.warning(
            "%d of %d captions are longer than the %d tokens that the text encoder takes; their ends are not seen. "
            "For example: %r",
            sum(counts[caption] for caption in cut),
            counts.total(),
            text.max_length,
            max(cut, key=len),
        )
