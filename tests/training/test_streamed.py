from __future__ import annotations

from itertools import islice

import pytest
import torch
from datasets import ClassLabel, Dataset, Image

from diffusers_adaptive_ts.training import images as images_module
from diffusers_adaptive_ts.training import streamed
from diffusers_adaptive_ts.training.stream import make_stream

from .conftest import make_picture


@pytest.fixture
def files(tmp_path):
    """`files([5, 6])` writes two shards of 5 and 6 pictures whose labels are their numbers."""

    def write(shards: list[int], test: int = 0, broken: int | None = None, no_caption: int | None = None) -> str:
        folder, first = tmp_path / "set", 0
        folder.mkdir()
        names = ClassLabel(names=[f"class {number}" for number in range(200)])
        parts = [(f"train-{place:02d}", count) for place, count in enumerate(shards)]
        for name, count in [*parts, *([("test-00", test)] if test else [])]:
            numbers = list(range(first, first + count))
            values = [make_picture(number, size=(9, 11)) for number in numbers]
            columns = {"image": values, "label": numbers, "n": [0.5] * count, "word": ["a"] * count}
            columns["texts"] = [[] if number == no_caption else [f"no. {number}", "or so"] for number in numbers]
            part = Dataset.from_dict(columns).cast_column("image", Image()).cast_column("label", names)
            if broken in numbers:
                rows = part.cast_column("image", Image(decode=False)).to_list()
                rows[broken - first]["image"]["bytes"] = b"\x89PNG no more"
                part = Dataset.from_list(rows, features=part.features)
            part.to_parquet(folder / f"{name}.parquet")
            first += count
        return str(folder)

    return write


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(streamed, "_BUFFER", 7)


@pytest.fixture
def load_stream(load):
    return lambda name, **options: load(
        **{"dataset_name": name, "resolution": 8, "class_labels": "label", "streaming": True, "random_flip": True}
        | options
    )


def take(stream, count: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    batches = stream.batches(start)
    taken = list(islice(batches, count))
    batches.close()
    return taken


def assert_same(first: list[dict], second: list[dict]) -> None:
    assert len(first) == len(second) > 0
    for left, right in zip(first, second, strict=True):
        assert left.keys() == right.keys()
        assert left.get("captions") == right.get("captions")
        assert all(torch.equal(left[key], right[key]) for key in left if key != "captions")


def labels_of(batches: list[dict]) -> list[int]:
    return torch.cat([batch["labels"] for batch in batches]).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("shards", "held"), [([20, 16], 0), ([20, 16], 5), ([30], 0)])
def test_a_batch_is_a_function_of_its_number(files, load_stream, world_size, shards, held):
    data = load_stream(files(shards), validation_images=held)
    for rank in range(world_size):
        straight = take(make_stream(data, 4, 1, rank, world_size), 26)
        for start in (1, 4, 9, 19, 25):
            assert_same(take(make_stream(data, 4, 1, rank, world_size), 26 - start, start), straight[start:])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("shards", "held"), [([18, 18], 0), ([20, 21], 5)])
def test_every_image_once_per_epoch_over_all_ranks(files, load_stream, world_size, shards, held):
    data = load_stream(files(shards), validation_images=held)
    left = sum(shards) - held
    epochs = [[], []]
    for rank in range(world_size):
        labels = labels_of(take(make_stream(data, 1, 3, rank, world_size), 2 * left // world_size))
        half = len(labels) // 2
        for epoch, seen in zip(epochs, (labels[:half], labels[half:]), strict=True):
            epoch.extend(seen)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(held, sum(shards)))
    assert epochs[0] != epochs[1]


def test_workers_change_nothing(files, load_stream):
    data = load_stream(files([20, 16]))
    assert_same(take(make_stream(data, 4, 1, num_workers=2), 12, start=3), take(make_stream(data, 4, 1), 12, start=3))


def test_images_are_those_of_the_loaded_data_set(files, load_stream):
    name = files([20, 16])
    streamed_data, whole = load_stream(name), load_stream(name, streaming=False)
    assert streamed_data.train is None
    assert (streamed_data.channels, streamed_data.id2label) == (whole.channels, whole.id2label)
    plain = whole.train.batch(range(36))
    crops = {image.numpy().tobytes() for image in plain["images"]}
    for batch in take(make_stream(load_stream(name, center_crop=True, random_flip=False), 4, 0), 9):
        assert all(image.numpy().tobytes() in crops for image in batch["images"])
    assert make_stream(streamed_data, 4, 0).steps_in_epoch is None


def test_resuming_decodes_nothing_that_was_seen(files, load_stream, monkeypatch):
    data, decoded = load_stream(files([20, 16])), []
    plain = images_module.open_image
    monkeypatch.setattr(streamed, "open_image", lambda value: decoded.append(1) or plain(value))
    take(make_stream(data, 4, 1), 2, start=30)
    assert len(decoded) == 8


def test_whole_epochs_are_skipped_unread(files, load_stream, monkeypatch):
    data, epochs = load_stream(files([20, 16])), []
    plain = streamed.StreamedBatches._epoch
    monkeypatch.setattr(
        streamed.StreamedBatches, "_epoch", lambda self, epoch: epochs.append(epoch) or plain(self, epoch)
    )
    take(make_stream(data, 4, 1), 1, start=9 * 50 + 2)
    assert epochs == [0, 50]


def test_validation_from_the_head_of_the_stream(files, load_stream):
    data = load_stream(files([20, 16]), validation_images=5)
    assert data.validation.labels.tolist() == [0, 1, 2, 3, 4]
    seen = set(labels_of(take(make_stream(data, 4, 1), 30)))
    assert seen == set(range(5, 36))
    assert "The first 5 images of split 'train' for validation." in data.notes


def test_validation_from_its_own_split(files, load_stream):
    data = load_stream(files([20], test=6), validation_images=4)
    assert data.validation.labels.tolist() == [20, 21, 22, 23]
    assert set(labels_of(take(make_stream(data, 4, 1), 10))) == set(range(20))


def test_a_folder_of_pictures_as_a_stream(load, picture_folder):
    folder = str(picture_folder(["L"] * 12))
    data = load(train_data_dir=folder, streaming=True, resolution=8, class_labels="label", validation_images=2)
    assert (data.channels, data.id2label, len(data.validation)) == (1, {0: "a", 1: "b"}, 2)
    assert take(make_stream(data, 5, 0), 3)[2]["images"].shape == (5, 1, 8, 8)


def test_fingerprints_differ(files, load_stream):
    name = files([20, 16])
    options = [{}, {"resolution": 9}, {"validation_images": 3}, {"class_labels": None}, {"image_mode": "L"}]
    assert len({load_stream(name, **given).fingerprint for given in options}) == len(options)
    assert load_stream(name, random_flip=False).fingerprint == load_stream(name).fingerprint


def test_mistakes_are_said(files, load_stream, load, picture_folder):
    name = files([20], broken=7)
    with pytest.raises(ValueError, match=r"--class_labels word holds .*ClassLabel column. Leave --streaming out"):
        load_stream(name, class_labels="word")
    with pytest.raises(ValueError, match="--class_labels n holds"):
        load_stream(name, class_labels="n")
    with pytest.raises(ValueError, match="--class_labels nothing: no such column"):
        load_stream(name, class_labels="nothing")
    with pytest.raises(ValueError, match="Image 7 of the stream cannot be read"):
        load_stream(name)
    mixed = str(picture_folder(["L"] * 64 + ["RGB"] * 6, classes=("only",)))
    data = load(train_data_dir=mixed, streaming=True, resolution=8)
    with pytest.raises(ValueError, match=r"Image \d+ of the stream \(.*png\): a colour image.*--image_mode L"):
        take(make_stream(data, 10, 0), 7)


def test_a_broken_image_later_in_the_stream(files, load_stream):
    data = load_stream(files([70, 10], broken=72))
    with pytest.raises(ValueError, match=r"Image \d+ of the stream.* cannot be read"):
        take(make_stream(data, 10, 0), 8)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("held", [0, 4])
def test_captions_come_with_their_images(files, load_stream, workers, held):
    name = files([12, 10])
    data = load_stream(name, caption_column="texts", validation_images=held)
    batches = take(make_stream(data, 4, 0, num_workers=workers), 8)
    for batch in batches:
        assert batch["captions"] == [(f"no. {number}", "or so") for number in batch["labels"].tolist()]
    assert_same(take(make_stream(data, 4, 0, num_workers=workers), 3, start=5), batches[5:])
    if held:
        assert data.validation.captions == [(f"no. {number}", "or so") for number in range(4)]
    assert load_stream(name, validation_images=held).fingerprint != data.fingerprint


def test_captions_of_a_stream_are_checked(files, load_stream):
    name = files([80], no_caption=70)
    with pytest.raises(ValueError, match=r"--caption_column n holds .*Columns of text: word, texts"):
        load_stream(name, caption_column="n")
    with pytest.raises(ValueError, match=r"--caption_column text: no such column\. Did you mean 'texts'"):
        load_stream(name, caption_column="text")
    order = labels_of(take(make_stream(load_stream(name), 10, 0), 8))
    data = load_stream(name, caption_column="texts")
    with pytest.raises(ValueError, match=f"texts: image {order.index(70)} of the stream has an empty list"):
        take(make_stream(data, 10, 0), 8)


@pytest.mark.parametrize("number", [0, 63])
def test_the_first_captions_of_a_stream_are_checked_at_once(files, load_stream, number):
    name = files([80], no_caption=number)
    with pytest.raises(ValueError, match=f"--caption_column texts: image {number} of the stream has an empty list"):
        load_stream(name, caption_column="texts")


def test_validation_captions_of_a_stream_are_checked_at_once(files, load_stream):
    name = files([20], test=5, no_caption=23)
    with pytest.raises(ValueError, match="--caption_column texts: image 3 of split 'test' has an empty list"):
        load_stream(name, caption_column="texts", validation_images=5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("shards", [[15, 15, 15, 15], [60], [31, 9, 20]])
@pytest.mark.parametrize("held", [0, 2])
def test_the_head_of_a_stream_alone(files, load_stream, world_size, shards, held):
    data = load_stream(files(shards), max_train_samples=24, validation_images=held)
    ranks = [make_stream(data, 2, 0, rank, world_size) for rank in range(world_size)]
    epoch = (24 - held) // world_size
    seen = [labels_of(take(rank, 3 * epoch // 2 + 1))[: 3 * epoch] for rank in ranks]
    for number in range(3):
        together = [label for labels in seen for label in labels[number * epoch : (number + 1) * epoch]]
        assert sorted(together) == list(range(held, 24))
    assert seen[0][:epoch] != seen[0][epoch : 2 * epoch]
    later = take(ranks[-1], 2, start=epoch)
    assert_same(take(ranks[-1], epoch + 2)[epoch:], later)


def test_the_head_of_a_stream_keeps_images_to_train_on(files, load_stream):
    name = files([30, 30])
    data = load_stream(name, max_train_samples=20, validation_images=100)
    assert len(data.validation) == 2
    few = load_stream(name, max_train_samples=9, validation_images=100)
    assert few.validation is None
    assert "No images held out for validation: a tenth of 9 is less than one." in few.notes
    assert sorted(labels_of(take(make_stream(few, 9, 0), 1))) == list(range(9))


def test_more_of_a_stream_is_other_data(files, load_stream):
    name = files([90])
    # More than the examples that are looked at before training.
    given = [{}, {"max_train_samples": 80}, {"max_train_samples": 70}]
    assert len({load_stream(name, **more).fingerprint for more in given}) == 3
