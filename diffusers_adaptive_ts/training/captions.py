"""The captions of images: found, checked, and read as tuples, since an image may have several to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..registry import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset, Features

_STRINGS = ("string", "large_string", "string_view")
_WITHOUT = "To train without captions for a share of the images, give every image one and pass --caption_dropout."


def check_caption_column(features: Features, column: str) -> None:
    """Whether there is such a column, and whether it holds strings or lists of strings."""
    if column not in features:
        raise ValueError(
            f"--caption_column {column}: no such column.{did_you_mean(column, features)} "
            f"The columns are: {', '.join(features)}.{_advice(features)}"
        )
    if not _is_text(features[column]):
        raise ValueError(
            f"--caption_column {column} holds {features[column]}; it must hold strings, or lists of strings of which "
            f"training picks one.{_advice(features)}"
        )


def read_captions(
    dataset: Dataset, column: str, split: str, rows: Sequence[int] | None = None
) -> list[tuple[str, ...]]:
    """The captions of these rows, numbered as in the split; None is all of them."""
    check_caption_column(dataset.features, column)
    chosen = slice(None) if rows is None else list(rows)
    values = dataset.select_columns([column]).with_format("arrow")[chosen][column].to_pylist()
    numbers = range(len(values)) if rows is None else rows
    return [
        captions_of(value, column, f"row {number} of split {split!r}")
        for number, value in zip(numbers, values, strict=True)
    ]


def captions_of(value: Any, column: str, where: str) -> tuple[str, ...]:
    """What a row of the caption column holds, as a tuple.

    Example:
        >>> captions_of("a red square", "text", "row 0"), captions_of(["a square", "red"], "text", "row 1")
        (('a red square',), ('a square', 'red'))
    """
    several = isinstance(value, list | tuple)
    captions = tuple(value) if several else (value,)
    if not captions:
        raise ValueError(f"--caption_column {column}: {where} has an empty list of captions. {_WITHOUT}")
    for caption in captions:
        if caption is None:
            problem = "a list with a missing caption" if several else "no caption"
        elif not isinstance(caption, str):
            raise ValueError(
                f"--caption_column {column}: {where} has {value!r}; it must be a string, or a list of strings of "
                "which training picks one."
            )
        elif not caption.strip():
            problem = f"{'a list with ' if several else ''}an empty caption ({caption!r})"
        else:
            continue
        raise ValueError(f"--caption_column {column}: {where} has {problem}. {_WITHOUT}")
    return captions


def _is_text(feature: Any) -> bool:
    """Strings or lists of them; a list is written in several ways, older ones as a Python list of one feature."""
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    return getattr(inner, "dtype", None) in _STRINGS


def _advice(features: Features) -> str:
    """What to do: name one of the columns that hold text, or write some."""
    found = [name for name, feature in features.items() if _is_text(feature)]
    if found:
        return f" Columns of text: {', '.join(found)}."
    return (
        " None of them holds text. Beside the images of a folder, captions stand in a file metadata.jsonl with a line "
        '{"file_name": "1.png", "text": "..."} for each image.'
    )
