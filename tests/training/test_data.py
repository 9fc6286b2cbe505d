from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Image
from PIL import Image as Pictures

from .conftest import make_picture
from .tiny_stable_diffusion import COLOURS, write_captioned

REAL = Path(__file__).parents[3] / "shared" / "data"


def write_parquet(folder: Path, columns: dict[str, list], **more: dict[str, list]) -> Path:
    """A folder with a training split, and others where they are given."""
    splits = DatasetDict({name: Dataset.from_dict(part) for name, part in {"train": columns, **more}.items()})
    folder.mkdir()
    for name, split in splits.items():
        split.cast_column("image", Image()).to_parquet(folder / f"{name}-00.parquet")
    return folder


def pictures(count: int, first: int = 0, mode: str = "RGB") -> list:
    return [make_picture(first + number, mode) for number in range(count)]


def as_png(picture: Pictures.Image) -> bytes:
    picture.save(file := BytesIO(), "PNG")
    return file.getvalue()


def every(rows) -> torch.Tensor:
    return rows.batch(range(len(rows)))["images"]


def as_set(rows) -> set[bytes]:
    return {image.numpy().tobytes() for image in every(rows)}


def test_a_folder_of_pictures(load, picture_folder):
    folder = picture_folder(["RGB"] * 10)
    data = load(train_data_dir=str(folder), resolution=12, class_labels="label")
    assert (data.name, data.channels, data.resolution, data.id2label) == ("pictures", 3, 12, {0: "a", 1: "b"})
    assert data.validation is None
    assert data.streamed is None
    files = sorted(folder.rglob("*.png"))
    expected = [torch.from_numpy(np.array(Pictures.open(file)) / 127.5 - 1).permute(2, 0, 1) for file in files]
    assert torch.allclose(every(data.train), torch.stack(expected).float(), atol=1e-6)
    assert data.train.labels.tolist() == [0] * 5 + [1] * 5
    assert data.notes == ["10 images decoded once, 0.0 MB in memory."]


def test_the_same_images_from_every_form(load, picture_folder, tmp_path):
    folder = picture_folder(["RGB"] * 8, classes=("only",))
    files = sorted(folder.rglob("*.png"))
    write_parquet(tmp_path / "parquet", {"image": [str(file) for file in files]})
    Dataset.from_dict({"photo": [file.read_bytes() for file in files]}).to_parquet(tmp_path / "bytes.parquet")
    options = {"resolution": 9}
    first = every(load(train_data_dir=str(folder), **options).train)
    assert torch.equal(every(load(dataset_name=str(tmp_path / "parquet"), **options).train), first)
    assert torch.equal(every(load(dataset_name=str(tmp_path / "parquet" / "*.parquet"), **options).train), first)
    plain = load(dataset_name=str(tmp_path / "bytes.parquet"), image_column="photo", **options)
    assert torch.equal(every(plain.train), first)


def test_held_out_images_are_fixed_and_never_trained_on(load, tmp_path):
    name = str(write_parquet(tmp_path / "set", {"image": pictures(60), "n": list(range(60))}))
    whole = load(dataset_name=name, resolution=8)
    assert whole.validation is None
    found = [
        load(dataset_name=name, resolution=8, class_labels="n", validation_images=4, seed=seed) for seed in (0, 1)
    ]
    assert torch.equal(found[0].validation.labels, found[1].validation.labels)
    for data in found:
        assert (len(data.train), len(data.validation)) == (56, 4)
        assert not as_set(data.train) & as_set(data.validation)
        assert as_set(data.train) | as_set(data.validation) == as_set(whole.train)
        numbers = torch.cat([data.train.labels, data.validation.labels])
        assert torch.equal(numbers.sort().values, torch.arange(60))
        assert torch.equal(every(data.validation), every(whole.train)[data.validation.labels])
    assert len(load(dataset_name=name, resolution=8, validation_images=1000).validation) == 6


def test_validation_knows_no_chance(load, picture_folder):
    folder = picture_folder(["RGB"] * 20, sizes=((12, 20),))
    data = load(train_data_dir=str(folder), resolution=8, random_flip=True, validation_images=2)
    assert data.train.crops_vary()
    plain = data.validation.batch([0, 1])["images"]
    assert all(
        torch.equal(data.validation.batch([0, 1], torch.Generator().manual_seed(s))["images"], plain) for s in range(5)
    )


def test_own_validation_split(load, tmp_path):
    parts = {"test": {"image": pictures(9, 100), "n": [1, 0, 0] * 3}}
    name = str(write_parquet(tmp_path / "set", {"image": pictures(30), "n": [0, 1, 2] * 10}, **parts))
    data = load(dataset_name=name, resolution=12, class_labels="n", validation_images=5)
    assert (len(data.train), len(data.validation)) == (30, 5)
    assert as_set(data.validation) < {
        torch.from_numpy(np.array(image) / np.float32(127.5) - 1)
        .permute(2, 0, 1)
        .float()
        .contiguous()
        .numpy()
        .tobytes()
        for image in parts["test"]["image"]
    }
    assert "5 images of split 'test' for validation." in data.notes
    assert len(load(dataset_name=name, resolution=12, validation_images=50).validation) == 9


def test_own_validation_split_without_labels_is_left_aside(load, tmp_path):
    parts = {"test": {"image": pictures(9, 100), "n": [-1] * 9}}
    name = str(write_parquet(tmp_path / "set", {"image": pictures(30), "n": [0, 1, 2] * 10}, **parts))
    data = load(dataset_name=name, resolution=12, class_labels="n", validation_images=5)
    assert (len(data.train), len(data.validation)) == (27, 3)
    assert any("Split 'test' is not used for validation" in note for note in data.notes)


def test_grey_unless_one_is_not(load, picture_folder):
    # More than are looked at first, and a colour image that only decoding meets.
    grey = picture_folder(["L", "1", "LA", "I;16"] * 40, name="grey")
    data = load(train_data_dir=str(grey), resolution=8)
    assert data.channels == 1
    assert any("40 images of 16 or 32 bits are reduced to 8" in note for note in data.notes)
    modes = ["L"] * 160
    modes[78] = "RGB"  # row 39 of 160: files are sorted by class
    mixed = picture_folder(modes, name="mixed")
    for budget in (2**30, 0):
        data = load(train_data_dir=str(mixed), resolution=8, keep_in_memory_bytes=budget)
        assert data.channels == 3
        assert every(data.train).shape == (160, 3, 8, 8)
        assert data.train.in_memory == (budget > 0)
        assert "159 grey images are converted to RGB." in data.notes


@pytest.mark.parametrize("budget", [2**30, 0])
def test_colour_images_for_a_grey_model(load, picture_folder, budget):
    folder = str(picture_folder(["L"] * 7 + ["RGB"] + ["L"] * 8))
    options = {"train_data_dir": folder, "resolution": 8, "keep_in_memory_bytes": budget}
    with pytest.raises(ValueError, match=r"row 11 of split 'train' \(.*007.png\): a colour image.*--image_mode L"):
        load(model_channels=1, **options)
    assert load(model_channels=1, image_mode="L", **options).channels == 1
    assert load(model_channels=3, **options).channels == 3


def test_input_precision_of_16_bit_images(load, picture_folder):
    folder = picture_folder(["I;16", "RGB", "F"] * 3, sizes=((8, 8),), classes=("only",))
    data = load(train_data_dir=str(folder), resolution=8, preserve_input_precision=True)
    assert data.channels == 3
    values = np.asarray(Pictures.open(folder / "only" / "000.png")).astype(np.float32) / 65535
    assert torch.equal(data.train.item(0)["images"], torch.from_numpy(values * 2 - 1).expand(3, 8, 8))
    assert not any("reduced" in note for note in data.notes)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize("budget", [2**30, 1000, 0])
def test_a_corrupt_image_is_named_before_training(load, picture_folder, budget):
    folder = picture_folder(["RGB"] * 80, classes=("only",))
    cut(folder / "only" / "033.png", 20)
    with pytest.raises(ValueError, match=r"row 33 of split 'train' \(.*033.png\) cannot be read"):
        load(train_data_dir=str(folder), resolution=8, keep_in_memory_bytes=budget)


def test_a_missing_image_is_named_before_training(load, picture_folder, tmp_path):
    files = [str(file) for file in sorted(picture_folder(["RGB"] * 80, classes=("only",)).rglob("*.png"))]
    Dataset.from_dict({"image": files}).to_parquet(tmp_path / "paths.parquet")
    Path(files[33]).unlink()
    with pytest.raises(ValueError, match=r"row 33 of split 'train' \(.*033.png\) cannot be read"):
        load(dataset_name=str(tmp_path / "paths.parquet"), resolution=8, keep_in_memory_bytes=0)


def test_an_image_whose_end_is_missing_is_named_when_it_is_reached(load, picture_folder):
    folder = picture_folder(["RGB"] * 80, classes=("only",))
    cut(folder / "only" / "033.png", 200)
    options = {"train_data_dir": str(folder), "resolution": 8}
    complaint = r"row 33 of split 'train' \(.*033.png\) cannot be read: .*Replace or remove it"
    with pytest.raises(ValueError, match=complaint):
        load(**options)
    data = load(**options, keep_in_memory_bytes=0)
    data.train.batch([32, 34])
    with pytest.raises(ValueError, match=complaint):
        data.train.batch([32, 33])


def test_a_stream_checks_its_validation_images_too(load, tmp_path):
    values = [b"nothing" if number == 70 else as_png(make_picture(number)) for number in range(80)]
    folder = tmp_path / "set"
    folder.mkdir()
    Dataset.from_dict({"image": values}).to_parquet(folder / "train-00.parquet")
    options = {"dataset_name": str(folder), "resolution": 8, "streaming": True, "keep_in_memory_bytes": 0}
    with pytest.raises(ValueError, match="image 70 of split 'train' cannot be read"):
        load(**options, validation_images=75)
    assert len(load(**options, validation_images=5).validation) == 5


def test_too_large_for_memory_is_decoded_for_each_batch(load, picture_folder):
    folder = str(picture_folder(["RGB"] * 30, sizes=((12, 20), (12, 12))))
    options = {"train_data_dir": folder, "resolution": 8, "random_flip": True, "validation_images": 3}
    kept, lazy = load(**options), load(keep_in_memory_bytes=2000, **options)
    assert kept.train.in_memory
    assert not lazy.train.in_memory
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    first, second = kept.train.batch([3, 9, 4], draws[0]), lazy.train.batch([3, 9, 4], draws[1])
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert "decoded anew for each batch" in lazy.notes[0]


def test_fingerprint_changes_with_the_data_alone(load, picture_folder):
    folder = picture_folder(["RGB"] * 12)
    base = {"train_data_dir": str(folder), "resolution": 8}
    same = load(**base).fingerprint
    assert load(**base, random_flip=True, seed=3).fingerprint == same
    others = [
        {"resolution": 9},
        {"image_mode": "L"},
        {"validation_images": 1},
        {"class_labels": "label"},
        {"preserve_input_precision": True},
        {"image_interpolation_mode": "nearest"},
        {"max_train_samples": 11},
        {"keep_in_memory_bytes": 0},
    ]
    prints = {load(**base | other).fingerprint for other in others}
    assert len(prints | {same}) == len(others) + 1
    make_picture(99).save(folder / "a" / "000.png")
    assert load(**base).fingerprint not in prints | {same}
    assert load(**base, keep_in_memory_bytes=0).fingerprint not in prints | {same}


def test_the_data_set_comes_before_the_folder(load, picture_folder, tmp_path):
    name = str(write_parquet(tmp_path / "set", {"image": pictures(5)}))
    data = load(dataset_name=name, train_data_dir=str(picture_folder(["L"])), resolution=8)
    assert len(data.train) == 5
    assert "is not used: --dataset_name comes first" in data.notes[-1]


def test_a_folder_inside_the_data_set(load, picture_folder, tmp_path):
    folder = picture_folder(["RGB"] * 9, classes=("a", "b", "b"))
    options = {"resolution": 8, "data_dir_inside": True}
    data = load(dataset_name=str(folder), train_data_dir="b", **options)
    assert (len(data.train), data.name, len(data.notes)) == (6, "pictures/b", 1)
    assert len(load(dataset_name="imagefolder", train_data_dir=str(folder / "a"), **options).train) == 3
    assert len(load(train_data_dir=str(folder), **options).train) == 9
    with pytest.raises(ValueError, match=r"--train_data_dir c inside --dataset_name .*: there is no such folder"):
        load(dataset_name=str(folder), train_data_dir="c", **options)


def captions_by_image(rows) -> dict[bytes, tuple[str, ...]]:
    batch = rows.batch(range(len(rows)))
    return {
        image.numpy().tobytes(): captions for image, captions in zip(batch["images"], batch["captions"], strict=True)
    }


@pytest.mark.parametrize("budget", [0, 2**20])
def test_captions_stay_with_their_images(load, tmp_path, budget):
    texts = [[f"picture {number}", f"no. {number}"] for number in range(50)]
    name = str(write_parquet(tmp_path / "set", {"image": pictures(50), "text": texts}))
    options = {"dataset_name": name, "resolution": 8, "keep_in_memory_bytes": budget}
    whole = load(**options, caption_column="text")
    expected = captions_by_image(whole.train)
    assert list(expected.values()) == [tuple(text) for text in texts]
    assert load(**options).train.captions is None
    data = load(**options, caption_column="text", validation_images=4, max_train_samples=40)
    assert (len(data.train), len(data.validation)) == (36, 4)
    found = captions_by_image(data.train) | captions_by_image(data.validation)
    assert len(found) == 40
    assert found.items() < expected.items()
    other = load(**options, caption_column="text", validation_images=4, max_train_samples=40, seed=1)
    assert other.train.captions != data.train.captions


def test_captions_of_an_image_folder(load, tmp_path):
    folder = write_captioned(tmp_path / "set", 8)
    data = load(train_data_dir=str(folder), resolution=8, caption_column="text")
    assert data.train.captions == [(f"{colour} square",) for colour in COLOURS] + [
        (f"{colour} bar",) for colour in COLOURS
    ]


def test_captions_of_its_own_validation_split(load, tmp_path):
    train = {"image": pictures(30), "text": [f"picture {number}" for number in range(30)]}
    test = {"image": pictures(9, 100), "text": [f"picture {number}" for number in range(100, 109)]}
    options = {"resolution": 12, "caption_column": "text", "validation_images": 5}
    good = load(dataset_name=str(write_parquet(tmp_path / "good", train, test=test)), **options)
    whole = load(dataset_name=str(write_parquet(tmp_path / "whole", test)), **options | {"validation_images": 0})
    assert captions_by_image(good.validation).items() < captions_by_image(whole.train).items()
    for name, column, problem in (
        ("none", {}, r"--caption_column text: row \d of split 'test' has no caption"),
        ("empty", {"text": [""] * 9}, r"--caption_column text: row \d of split 'test' has an empty caption"),
    ):
        parts = {"test": {"image": test["image"], **column}}
        data = load(dataset_name=str(write_parquet(tmp_path / name, train, **parts)), **options)
        assert (len(data.train), len(data.validation), len(data.validation.captions)) == (27, 3, 3)
        assert any(re.search(f"Split 'test' is not used for validation. {problem}", note) for note in data.notes)
    parts = {"train": Dataset.from_dict(train), "test": Dataset.from_dict({"image": test["image"]})}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    data = load(dataset_name=str(tmp_path / "saved"), **options)
    assert len(data.validation) == 3
    assert "Split 'test' is not used for validation. --caption_column text: no such column." in " ".join(data.notes)


def test_captions_are_checked_before_training(load, tmp_path):
    texts = [f"picture {number}" for number in range(20)]
    columns = {"image": pictures(20), "text": [*texts[:13], " ", *texts[14:]], "n": list(range(20))}
    options = {"dataset_name": str(write_parquet(tmp_path / "set", columns)), "resolution": 8}
    with pytest.raises(ValueError, match=r"--caption_column text: row 13 of split 'train' has an empty caption"):
        load(**options, caption_column="text")
    with pytest.raises(ValueError, match=r"--caption_column n holds .*Columns of text: text"):
        load(**options, caption_column="n")
    with pytest.raises(ValueError, match=r"--caption_column test: no such column. Did you mean 'text'"):
        load(**options, caption_column="test")


def test_all_images_where_there_are_no_more(load, tmp_path):
    name = str(write_parquet(tmp_path / "set", {"image": pictures(20)}))
    data = load(dataset_name=name, resolution=8, max_train_samples=21)
    assert len(data.train) == 20
    assert "--max_train_samples 21: all 20 images are used, there are no more." in data.notes
    assert len(load(max_train_samples=100, validation_images=10).train) == 90


@pytest.mark.parametrize("budget", [0, 2**20])
def test_an_edited_caption_changes_the_data_but_not_the_images(load, tmp_path, budget):
    folder = write_captioned(tmp_path / "set", 12)
    options = {"train_data_dir": str(folder), "resolution": 8, "keep_in_memory_bytes": budget, "validation_images": 1}
    before, plain = load(**options, caption_column="text"), load(**options)
    metadata = folder / "metadata.jsonl"
    metadata.write_text(metadata.read_text().replace("red bar", "crimson bar", 1))
    after = load(**options, caption_column="text")
    assert ("crimson bar",) in after.train.captions + after.validation.captions
    assert len({before.fingerprint, after.fingerprint, plain.fingerprint}) == 3
    assert before.images_fingerprint == after.images_fingerprint == plain.images_fingerprint
    others = [{"image_interpolation_mode": "nearest"}, {"image_mode": "L"}, {"validation_images": 0}]
    prints = {load(**options | other, caption_column="text").images_fingerprint for other in others}
    make_picture(99, size=(16, 16)).save(folder / "000.png")
    prints.add(load(**options, caption_column="text").images_fingerprint)
    assert len(prints | {before.images_fingerprint}) == 5


def test_no_rows_at_all(load, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    features = Dataset.from_dict({"image": pictures(1)}).cast_column("image", Image()).features
    Dataset.from_dict({"image": []}, features=features).to_parquet(folder / "train-00.parquet")
    with pytest.raises(ValueError, match=r"no images|could not be loaded"):
        load(dataset_name=str(folder))


@pytest.mark.skipif(not REAL.is_dir(), reason=f"needs the data sets in {REAL}")
@pytest.mark.parametrize(
    ("name", "column", "channels", "size"),
    [("cifar10", "img", 3, 32), ("fashion_mnist", "image", 1, 28)],
)
def test_real_data_sets(load, name, column, channels, size):
    data = load(
        dataset_name=str(REAL / name / "test-*.parquet"), resolution=size, class_labels="label", validation_images=64
    )
    assert (data.name, data.channels, len(data.train), len(data.id2label)) == (name, channels, 10_000 - 64, 10)
    source = data.train.source
    for index in (0, 4321, 9000):
        image = np.asarray(Pictures.open(BytesIO(source.read([index])[0]["bytes"])), dtype=np.float32)
        expected = torch.from_numpy(image / np.float32(127.5) - 1).reshape(size, size, channels).permute(2, 0, 1)
        assert torch.equal(data.train.item(index)["images"], expected)
