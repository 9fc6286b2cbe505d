from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

from diffusers_adaptive_ts.training.sources import (
    DatasetSource,
    find_image_column,
    load_splits,
    read_labels,
    train_split,
    undecoded,
)

from .conftest import make_picture


def make_dataset(count: int = 4, **columns: list) -> Dataset:
    return Dataset.from_dict({"image": [make_picture(number) for number in range(count)], **columns}).cast_column(
        "image", Image()
    )


def find(
    tmp_path: Path,
    name: str | Path | None = None,
    folder: Path | None = None,
    streaming: bool = False,
    config: str | None = None,
) -> tuple:
    names = [None if path is None else str(path) for path in (name, folder)]
    return load_splits(names[0], config, names[1], str(tmp_path / "cache"), streaming)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for split, count in (("train-00", 4), ("train-01", 3), ("test-00", 2)):
        make_dataset(count).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_folders_files_and_globs(parquet, tmp_path, streaming):
    def sizes(name: Path) -> dict[str, int]:
        splits, found = find(tmp_path, name, streaming=streaming)
        assert found == ("train-01" if name.suffix else "files") or "*" in name.name
        return {key: len(list(split)) for key, split in splits.items()}

    assert sizes(parquet) == {"train": 7, "test": 2}
    assert sizes(parquet / "train-01.parquet") == {"train": 3}
    assert sizes(parquet / "train-*.parquet") == {"train": 7}


@pytest.mark.parametrize("streaming", [False, True])
def test_folders_of_save_to_disk(tmp_path, streaming):
    make_dataset().save_to_disk(tmp_path / "one")
    DatasetDict(train=make_dataset(), validation=make_dataset(2)).save_to_disk(tmp_path / "two")
    assert [*find(tmp_path, tmp_path / "one", streaming=streaming)[0]] == ["train"]
    splits, name = find(tmp_path, tmp_path / "two", streaming=streaming)
    assert ([*splits], name) == (["train", "validation"], "two")
    assert len(list(splits["validation"])) == 2


def test_configurations_where_there_are_none(parquet, tmp_path, picture_folder):
    make_dataset().save_to_disk(tmp_path / "saved")
    complaint = "--dataset_config_name small cannot be used with --{}.*Leave it out"
    file = next(parquet.glob("*.parquet"))
    for name in (file, parquet / "*.parquet", tmp_path / "saved"):
        with pytest.raises(ValueError, match=complaint.format("dataset_name")):
            find(tmp_path, name, config="small")
    with pytest.raises(ValueError, match=complaint.format("train_data_dir")):
        find(tmp_path, folder=picture_folder(["RGB"] * 2), config="small")
    with pytest.raises(ValueError, match=r"could not be loaded.*small"):
        find(tmp_path, parquet, config="small")


def test_a_configuration_of_a_folder(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for count, name in ((2, "small"), (4, "large")):
        make_dataset(count).to_parquet(folder / f"{name}.parquet")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.parquet\n" for name in ("small", "large"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    splits, name = find(tmp_path, folder, config="large")
    assert (len(splits["train"]), name) == (4, "set (large)")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_inside_a_data_set(parquet, tmp_path, streaming):
    cache = str(tmp_path / "cache")
    splits, name = load_splits(str(tmp_path), None, "files", cache, streaming, data_dir="files")
    assert (name, {key: len(list(split)) for key, split in splits.items()}) == (
        f"{tmp_path.name}/files",
        {"train": 7, "test": 2},
    )
    file = str(parquet / "train-00.parquet")
    with pytest.raises(ValueError, match=r"--train_data_dir files cannot be used with --dataset_name .*train-00"):
        load_splits(file, None, "files", cache, streaming, data_dir="files")
    make_dataset(2).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"--train_data_dir files cannot be used with --dataset_name .*saved"):
        load_splits(str(tmp_path / "saved"), None, "files", cache, streaming, data_dir="files")


def test_image_folders_name_their_classes(tmp_path, picture_folder):
    splits, name = find(tmp_path, folder=picture_folder(["RGB"] * 4, classes=("cat", "dog")))
    assert name == "pictures"
    assert splits["train"].features["label"].names == ["cat", "dog"]
    glob = find(tmp_path, tmp_path / "pictures" / "cat" / "*.png")[0]
    assert len(glob["train"]) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/at/all", "--dataset_name /nowhere/at/all: there is no such file or folder"),
        ("./nowhere", "no such file or folder"),
        ("{tmp_path}/empty", "this folder is empty"),
        ("{tmp_path}/*.parquet", "no file matches"),
        ("{tmp_path}/notes.txt", "must all be .parquet, all .arrow or all images, got .txt"),
        ("{tmp_path}/bad.parquet", "could not be loaded"),
    ],
)
def test_names_that_lead_nowhere(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("nothing")
    if "bad" in name:
        (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=message):
        find(tmp_path, name.format(tmp_path=tmp_path))


def test_a_name_that_the_hub_does_not_give(tmp_path, monkeypatch):
    def offline(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        ValueError, match="--dataset_name some/set could not be loaded: ConnectionError: Couldn't reach"
    ):
        find(tmp_path, "some/set")


def test_image_folders_that_are_missing_or_empty(tmp_path):
    with pytest.raises(ValueError, match=r"--train_data_dir .*nowhere: there is no such folder"):
        find(tmp_path, folder=tmp_path / "nowhere")
    (tmp_path / "empty" / "below").mkdir(parents=True)
    (tmp_path / "empty" / "below" / "notes.txt").write_text("no picture")
    with pytest.raises(ValueError, match="there are no images in this folder or below it"):
        find(tmp_path, folder=tmp_path / "empty")


def test_a_data_set_without_training_split():
    with pytest.raises(ValueError, match="no split 'train'; it has 'test', 'extra'"):
        train_split({"test": 0, "extra": 0})


def test_the_image_column_is_found():
    text = Value("string")
    assert find_image_column(Features(label=text, image=Image()), None) == "image"
    assert find_image_column(Features(img=Image(), other=Image()), None) == "img"
    assert find_image_column(Features(photo=Image(), text=text), None) == "photo"
    assert find_image_column(Features(image={"bytes": Value("binary"), "path": text}), None) == "image"
    assert find_image_column(Features(a=Image(), b=Image()), "b") == "b"
    with pytest.raises(ValueError, match=r"2 image columns \(a, b\)\. The columns are: a, b\. Name one"):
        find_image_column(Features(a=Image(), b=Image()), None)
    with pytest.raises(ValueError, match=r"no image column. The columns are: text. Name one"):
        find_image_column(Features(text=text), None)
    with pytest.raises(ValueError, match=r"--image_column imgae: no such column. Did you mean 'image'"):
        find_image_column(Features(image=Image()), "imgae")
    with pytest.raises(ValueError, match=r"--image_column n holds .*int64.*, not images"):
        find_image_column(Features(n=Value("int64"), image=Image()), "n")


def test_rows_are_read_undecoded_and_named():
    dataset = undecoded(make_dataset(6), "image")
    source = DatasetSource(dataset, "image", "train").subset([5, 1, 3])
    values = source.read([0, 2])
    assert [value["bytes"] for value in values] == [dataset[row]["image"]["bytes"] for row in (5, 3)]
    assert source.where(0, values[0]) == "Image in row 5 of split 'train'"
    assert source.where(1, {"path": "/a/b.png"}) == "Image in row 1 of split 'train' (/a/b.png)"
    assert source.subset([2]).where(0, None) == "Image in row 3 of split 'train'"
    assert source.rows == [5, 1, 3]
    assert source.subset([2, 0]).rows == [3, 5]


def test_labels_of_every_kind():
    words = make_dataset(kind=["dog", "ant", "dog", "cat"])
    labels, classes = read_labels(words, "kind", "train")
    assert (labels.tolist(), classes) == ([2, 0, 2, 1], {0: "ant", 1: "cat", 2: "dog"})
    assert read_labels(make_dataset(2, kind=["cat", "cat"]), "kind", "test", classes)[0].tolist() == [1, 1]
    numbers = read_labels(make_dataset(kind=[7, 3, 3, 0]), "kind", "train")
    assert (numbers[0].tolist(), numbers[1]) == ([7, 3, 3, 0], {0: "0", 3: "3", 7: "7"})
    named = make_dataset(kind=[1, 0, 1, 1]).cast_column("kind", ClassLabel(names=["x", "y", "z"]))
    assert read_labels(named, "kind", "train")[1] == {0: "x", 1: "y", 2: "z"}


def test_labels_that_cannot_be_used():
    with pytest.raises(
        ValueError, match=r"--class_labels kid: no such column. Did you mean 'kind'\? The columns are: image, kind"
    ):
        read_labels(make_dataset(kind=[0] * 4), "kid", "train")
    with pytest.raises(ValueError, match=r"holds .*float64.*whole numbers, class labels or strings"):
        read_labels(make_dataset(kind=[0.5] * 4), "kind", "train")
    with pytest.raises(ValueError, match=r"holds Image.*whole numbers"):
        read_labels(make_dataset(), "image", "train")
    with pytest.raises(ValueError, match="row 2 of split 'train' has no label"):
        read_labels(make_dataset(kind=["a", "b", None, "c"]), "kind", "train")
    with pytest.raises(ValueError, match="row 1 of split 'train' has the label -1"):
        read_labels(make_dataset(kind=[0, -1, 0, 0]), "kind", "train")
    with pytest.raises(ValueError, match="row 3 of split 'test' has the label 'new', which is no class"):
        read_labels(make_dataset(kind=["a", "a", "a", "new"]), "kind", "test", {0: "a"})
