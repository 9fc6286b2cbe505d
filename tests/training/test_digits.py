from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits


def test_digits_are_the_default(load):
    data = load(class_labels="label")
    digits = load_digits()
    assert (data.name, data.channels, data.resolution, len(data.train)) == ("digits", 1, 8, 1797)
    assert data.id2label == {digit: str(digit) for digit in range(10)}
    batch = data.train.batch(range(1797))
    # 17 shades over [-1, 1], as near as 8 bits come.
    assert np.abs(batch["images"][:, 0].numpy() - (digits.images / 8 - 1)).max() < 1 / 250
    assert np.array_equal(batch["labels"].numpy(), digits.target)
    assert data.notes[0] == "1,797 images decoded once, 0.1 MB in memory."


def test_digits_in_rgb_and_larger(load):
    data = load(resolution=16, model_channels=3)
    assert (data.channels, data.resolution, data.id2label) == (3, 16, None)
    assert data.train.item(0)["images"].shape == (3, 16, 16)
    assert "labels" not in data.train.item(0)
    assert any("1,797 grey images are converted to RGB" in note for note in data.notes)


def test_columns_of_the_digits_are_checked(load):
    with pytest.raises(ValueError, match=r"--class_labels lable: the digits have the columns image, label.*'label'"):
        load(class_labels="lable")
    with pytest.raises(ValueError, match="--image_column img"):
        load(image_column="img")
    with pytest.raises(ValueError, match="--streaming needs a data set"):
        load(streaming=True)
