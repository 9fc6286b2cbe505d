from __future__ import annotations

import re
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, LargeList, Value
from datasets import Image as ImageFeature

from diffusers_adaptive_ts.training.captions import captions_of, check_caption_column, read_captions

Strings = Value("string")


@pytest.mark.parametrize(
    "feature",
    [Strings, Value("large_string"), [Strings], [Value("large_string")], LargeList(Strings)],
    ids=str,
)
def test_strings_and_lists_of_strings_are_captions(feature):
    several = not isinstance(feature, Value)
    values = [["a cat", "it sits"], ["dog"]] if several else [" a cat", "dog"]
    dataset = Dataset.from_dict({"text": values}, features=Features(text=feature))
    expected = [("a cat", "it sits"), ("dog",)] if several else [(" a cat",), ("dog",)]
    assert read_captions(dataset, "text", "train") == expected
    assert read_captions(dataset, "text", "train", [1, 0]) == expected[::-1]


@pytest.mark.parametrize(
    "feature",
    [Value("int64"), Value("binary"), Value("null"), ClassLabel(names=["a"]), ImageFeature(), [Value("int64")],
     [[Strings]], {"en": Strings}],
    ids=str,
)  # fmt: skip
def test_columns_that_hold_no_text(feature):
    features = Features(image=ImageFeature(), text=feature)
    with pytest.raises(ValueError, match=r"--caption_column text holds .*must hold strings, .*metadata\.jsonl"):
        check_caption_column(features, "text")
    with pytest.raises(ValueError, match=r"--caption_column text holds .*Columns of text: words, more\.$"):
        check_caption_column(Features(**features, words=Strings, more=[Strings]), "text")


def test_lists_as_older_versions_of_datasets_write_them():
    check_caption_column({"text": [Strings]}, "text")
    with pytest.raises(ValueError, match="--caption_column text holds"):
        check_caption_column({"text": [Value("int64")]}, "text")


def test_a_column_that_is_not_there():
    features = Features(image=ImageFeature(), title=Strings, n=Value("int64"))
    message = (
        "--caption_column titel: no such column. Did you mean 'title'? The columns are: image, title, n. "
        "Columns of text: title."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_caption_column(features, "titel")
    with pytest.raises(ValueError, match=r'The columns are: image\. None of them holds text.*\{"file_name": "1\.png"'):
        check_caption_column(Features(image=ImageFeature()), "text")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "no caption"),
        ("", "an empty caption ('')"),
        (" \t", "an empty caption (' \\t')"),
        ([], "an empty list of captions"),
        (["a", None], "a list with a missing caption"),
        (["a", "  "], "a list with an empty caption ('  ')"),
    ],
)
def test_rows_without_a_caption_are_named(value: Any, problem: str):
    several = isinstance(value, list)
    values = [["first"], ["second"], value] if several else ["first", "second", value]
    dataset = Dataset.from_dict({"text": values}, features=Features(text=[Strings] if several else Strings))
    message = f"--caption_column text: row 2 of split 'dev' has {problem}. To train without captions for a share"
    for rows in (None, [0, 2]):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}.*--caption_dropout"):
            read_captions(dataset, "text", "dev", rows)
    # Rows that are not asked for may be anything.
    assert len(read_captions(dataset, "text", "dev", [1, 0])) == 2


@pytest.mark.parametrize("value", [3, ["a", 3], b"a", {"a": "b"}])
def test_a_value_of_another_type_in_a_stream(value: Any):
    with pytest.raises(ValueError, match=r"--caption_column text: image 7 has .*must be a string, or a list"):
        captions_of(value, "text", "image 7")
