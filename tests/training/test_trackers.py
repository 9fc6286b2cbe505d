"""Pictures reach each tracker as they are: tensorboard for real, wandb and trackio up to their own image class."""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import PartialState
from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diffusers_adaptive_ts.training.trackers import track_picture

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 9, 3), dtype=np.uint8)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_tensorboard_gives_the_picture_back(tmp_path, mode):
    picture = Image.fromarray(PIXELS).convert(mode)
    tracker = TensorBoardTracker("run", logging_dir=tmp_path)
    tracker.start()
    track_picture(SimpleNamespace(trackers=[tracker]), "samples", picture, step=7)
    tracker.finish()
    [event] = EventAccumulator(str(tmp_path / "run")).Reload().Images("samples")
    assert event.step == 7
    np.testing.assert_array_equal(Image.open(io.BytesIO(event.encoded_image_string)), picture.convert("RGB"))


@pytest.mark.parametrize("cls", [WandBTracker, TrackioTracker])
def test_wandb_and_trackio_get_images_of_their_own(monkeypatch, cls):
    """Neither is installed here, so their modules are stand-ins and accelerate's part is real."""
    logged = []
    monkeypatch.setitem(sys.modules, cls.name, SimpleNamespace(Image=lambda pixels: ("image", pixels)))
    tracker = cls("run")
    tracker.run = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    track_picture(SimpleNamespace(trackers=[tracker]), "samples", Image.fromarray(PIXELS), step=7)
    [(values, step)] = logged
    [(kind, pixels)] = values["samples"] if cls is WandBTracker else [values["samples"]]
    assert (kind, step) == ("image", 7)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, PIXELS)


def test_a_tracker_without_pictures_or_in_trouble_does_not_stop_the_run(caplog):
    class Broken:
        name = "wandb"

        def log_images(self, values, step):
            raise ConnectionError("gone")

    logged = []
    comet = SimpleNamespace(log_image=lambda pixels, name, step: logged.append((pixels.shape, name, step)))
    trackers = [SimpleNamespace(name="mlflow"), Broken(), SimpleNamespace(name="comet_ml", tracker=comet)]
    PartialState()
    with caplog.at_level("WARNING"):
        track_picture(SimpleNamespace(trackers=trackers), "samples", Image.fromarray(PIXELS), step=7)
    assert "samples was not shown in wandb: ConnectionError: gone" in caplog.text
    assert logged == [((6, 9, 3), "samples", 7)]
