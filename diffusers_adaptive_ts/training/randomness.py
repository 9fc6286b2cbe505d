"""Randomness as a function of counters: what a step draws depends on seed and step, never on what ran before."""

from __future__ import annotations

import hashlib

import torch


def derived_seed(*parts: int | str) -> int:
    """A stable 63-bit number for any tuple of whole numbers and words.

    Example:
        >>> derived_seed(0, "order", 3) == derived_seed(0, "order", 3) != derived_seed(0, "order", 4)
        True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator that starts at `derived_seed(*parts)`."""
    return torch.Generator().manual_seed(derived_seed(*parts))
