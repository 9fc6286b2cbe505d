"""Options typed as `key=value` on a command line, with the types they would have in Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def parse_key_values(items: Iterable[str]) -> dict[str, Any]:
    """Options from `key=value` items; a key given twice is an error.

    Example:
        >>> parse_key_values(["k=3", "duals=false", "histogram=1,2,0.5", "version=v2"])
        {'k': 3, 'duals': False, 'histogram': [1, 2, 0.5], 'version': 'v2'}
    """
    options: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{item!r} is not an option. Write key=value, for example gamma=5 or weights=1,2,3.")
        if key in options:
            raise ValueError(f"The option {key!r} is given twice ({options[key]!r} and {value!r}). Give it once.")
        try:
            options[key] = parse_value(value)
        except ValueError as error:
            raise ValueError(f"{item!r}: {error}") from None
    return options


def parse_value(text: str) -> Any:
    """A number, true / false / null, a list `1,2,3`, anything JSON (`"..."`, `[...]`, `{...}`), or else a string.

    Example:
        >>> parse_value("1e-4"), parse_value("null"), parse_value("3,"), parse_value('{"num_bins": 10}')
        (0.0001, None, [3], {'num_bins': 10})
    """
    text = text.strip()
    if not text:
        raise ValueError('the value is empty. Write "" in quotes for an empty string, or null for none.')
    if text[0] in '"[{':
        return _parse_json(text)
    if "," in text:
        return [parse_value(part) for part in text.removesuffix(",").split(",")]
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _parse_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a value of JSON.")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"it begins like JSON but does not parse ({error}).") from None
