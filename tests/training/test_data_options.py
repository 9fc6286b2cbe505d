from __future__ import annotations

from argparse import Namespace

import pytest

from diffusers_adaptive_ts.training.data_options import DataOptions


def test_other_arguments_are_left_alone():
    options = DataOptions.from_args(Namespace(dataset_name="some/set", learning_rate=1.0))
    assert (options.dataset_name, options.resolution, options.keep_in_memory_bytes) == ("some/set", 64, 2 * 2**30)
    assert DataOptions().resolution == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resolution": 0}, "--resolution must be at least 1, got 0"),
        ({"dataset_config_name": "small"}, "--dataset_config_name small needs a data set.*give --dataset_name"),
        ({"validation_images": -1}, "--validation_images must be at least 0"),
        ({"image_mode": "rgb"}, "--image_mode must be auto, RGB or L, got 'rgb'"),
        ({"embedded": False}, "There is no data set.*give --dataset_name or --train_data_dir"),
        ({"caption_column": "text"}, "--caption_column text: the embedded digits have no captions.*--train_data_dir"),
        ({"max_train_samples": 0}, "--max_train_samples must be at least 1, got 0"),
        (
            {"image_interpolation_mode": "bicubik"},
            "must be one of bilinear, bicubic, .*nearest_exact, got 'bicubik'.*Did you mean 'bicubic'",
        ),
        (
            {"image_interpolation_mode": "box", "preserve_input_precision": True},
            "--image_interpolation_mode box is for images of 8 bits",
        ),
        ({"model_channels": 4}, "takes 4 channels, images have 1"),
        ({"image_mode": "L", "model_channels": 3}, "gives 1 channel.*model takes 3"),
        ({"image_mode": "RGB", "model_channels": 1}, "gives 3 channel.*model takes 1"),
    ],
)
def test_mistakes_are_said(given, message):
    with pytest.raises(ValueError, match=message):
        DataOptions(**given)


@pytest.mark.parametrize(
    ("given", "modes", "channels", "grey_only"),
    [
        ({}, ["L", "1", "I;16", "LA"], 1, True),
        ({}, ["L", "RGB"], 3, False),
        ({}, ["P"], 3, False),
        ({"model_channels": 3}, ["L"], 3, False),
        ({"model_channels": 1}, ["RGB"], 1, True),
        ({"image_mode": "L"}, ["RGB"], 1, False),
        ({"image_mode": "RGB"}, ["L"], 3, False),
        ({"preserve_input_precision": True}, ["I;16"], 3, False),
        ({"preserve_input_precision": True, "model_channels": 1}, ["I;16"], 1, True),
    ],
)
def test_channels_follow_the_model_or_the_images(given, modes, channels, grey_only):
    preparation = DataOptions(**given).preparation(modes)
    assert (preparation.channels, preparation.grey_only) == (channels, grey_only)


def test_a_folder_inside_a_data_set_is_asked_for_by_the_script():
    both = {"dataset_name": "some/set", "train_data_dir": "part"}
    assert DataOptions(**both).data_dir is None
    assert DataOptions(**both, data_dir_inside=True).data_dir == "part"
    assert DataOptions(train_data_dir="part", data_dir_inside=True, embedded=False).data_dir is None


def test_interpolation_reaches_the_preparation():
    assert DataOptions().preparation(["RGB"]).interpolation == "bilinear"
    assert DataOptions(image_interpolation_mode="lanczos").preparation(["RGB"]).interpolation == "lanczos"
