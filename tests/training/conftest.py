"""Small picture folders, and the loader with its cache inside the test's own folder."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffusers_adaptive_ts.training.data import ImageData, load_image_data


def make_picture(seed: int, mode: str = "RGB", size: tuple[int, int] = (12, 12)) -> Image.Image:
    """Random pixels; size is (width, height)."""
    random = np.random.default_rng(seed)
    if mode in ("I;16", "F"):
        pixels = random.integers(0, 2**16, size[::-1], dtype=np.uint16)
        return Image.fromarray(pixels if mode == "I;16" else (pixels / np.float32(2**16)).astype(np.float32))
    return Image.fromarray(random.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).convert(mode)


@pytest.fixture
def picture_folder(tmp_path: Path) -> Callable[..., Path]:
    """`picture_folder(modes, sizes=..., classes=...)` writes one picture for each mode, in turn into the classes."""

    def write(modes: list[str], sizes: Any = ((12, 12),), classes: Any = ("a", "b"), name: str = "pictures") -> Path:
        for number, mode in enumerate(modes):
            folder = tmp_path / name / classes[number % len(classes)]
            folder.mkdir(parents=True, exist_ok=True)
            ending = "tiff" if mode == "F" else "png"
            make_picture(number, mode, sizes[number % len(sizes)]).save(folder / f"{number:03d}.{ending}")
        return tmp_path / name

    return write


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ImageData]:
    return lambda **options: load_image_data(Namespace(cache_dir=str(tmp_path / "cache"), **options))
