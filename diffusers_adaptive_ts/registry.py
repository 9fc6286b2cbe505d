"""Names of samplers, weightings, estimators, policies: registering is one line, a wrong name says what to do."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Registry:
    """A table from names to classes or functions.

    Example:
        >>> colours = Registry("colour")
        >>> @colours.register("red")
        ... def red(shade=1):
        ...     return "red" * shade
        >>> colours.names()
        ['red']
        >>> colours["rad"]
        Traceback (most recent call last):
        ...
        ValueError: Unknown colour 'rad'. Did you mean 'red'? Available: red.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Decorator that registers a class or function under `name`."""

        def add(entry: Any) -> Any:
            if name in self._entries:
                raise ValueError(
                    f"A {self.kind} named {name!r} is registered already ({self._entries[name].__qualname__}). "
                    "Choose another name."
                )
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        return sorted(self._entries)

    def items(self) -> list[tuple[str, Any]]:
        return sorted(self._entries.items())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            raise ValueError(
                f"Unknown {self.kind} {name!r}.{did_you_mean(name, self._entries)} "
                f"Available: {', '.join(self.names())}."
            )
        return self._entries[name]

    def check_options(self, name: str, given: Iterable[str], accepted: list[str]) -> None:
        """An option that the entry does not take is an error, never silently ignored."""
        for option in given:
            if option not in accepted:
                takes = f"It takes: {', '.join(accepted)}." if accepted else "It takes no options."
                raise ValueError(
                    f"The {self.kind} {name!r} has no option {option!r}.{did_you_mean(option, accepted)} {takes}"
                )

    @contextmanager
    def building(self, name: str, options: Mapping[str, Any]) -> Iterator[None]:
        """A value of the wrong type is an error that says what was given, and to what; Python's own does not."""
        try:
            yield
        except TypeError as error:
            given = ", ".join(f"{option}={value}" for option, value in options.items()) or "no options"
            raise ValueError(f"The {self.kind} {name!r} cannot be built with {given}: {error}.") from error


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint for a mistyped name, with a leading space, or nothing."""
    close = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def accepted_options(entry: Any) -> list[str]:
    """The keyword names that a registered class or function takes."""
    return [name for name in inspect.signature(entry).parameters if name != "self"]
