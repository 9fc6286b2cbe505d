"""The embedded data set: scikit-learn's handwritten digits, 1,797 grey images of 8 x 8, no network needed."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from ..registry import did_you_mean
from .rows import ListSource

NAME = "digits"
RESOLUTION = 8
_COLUMNS = ("image", "label")


def load_digits_images(
    image_column: str | None = None, class_labels: str | None = None
) -> tuple[ListSource, torch.Tensor | None, dict[int, str] | None]:
    """Undecoded images, and `(1797,)` labels with their names when `class_labels` asks for them.

    Example:
        >>> source, labels, id2label = load_digits_images(class_labels="label")
        >>> len(source), labels[:4].tolist(), id2label[3]
        (1797, [0, 1, 2, 3], '3')
    """
    for option, column, accepted in (
        ("--image_column", image_column, _COLUMNS[:1]),
        ("--class_labels", class_labels, _COLUMNS[1:]),
    ):
        if column is not None and column not in accepted:
            raise ValueError(
                f"{option} {column}: the digits have the columns {', '.join(_COLUMNS)}, and this must be "
                f"{accepted[0]!r}.{did_you_mean(column, accepted)}"
            )
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Their 17 shades, 0 to 16, over the whole range of 8 bits.
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    source = ListSource([Image.fromarray(image) for image in grey], NAME)
    if class_labels is None:
        return source, None, None
    return source, torch.from_numpy(digits.target.astype(np.int64)), {digit: str(digit) for digit in range(10)}
