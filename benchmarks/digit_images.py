"""Digits blown up to colour PNG files: real decoding work, no data set needed."""

from __future__ import annotations

import json
from pathlib import Path

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_images(folder: Path, count: int, size: int, captions: bool = False) -> None:
    """PNG files of `size` pixels, as datasets' imagefolder reads them.

    Args:
        captions: write metadata.jsonl too. No two captions are the same, as in most data sets: a script that encodes
            equal captions of a batch once gains nothing.
    """
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir()
    digits, lines = load_digits(), []
    for index, (digit, label) in enumerate(zip(digits.images[:count], digits.target, strict=False)):
        name = f"{index:05d}.png"
        grey = Image.fromarray((digit * 15.9).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
        grey.convert("RGB").save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": f"the digit {_WORDS[label]}, written by hand {index}"}))
    if captions:
        (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
