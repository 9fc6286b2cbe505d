"""Where images come from: the Hub, a folder, parquet or arrow files; their splits, columns and classes."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from ..registry import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}


class DatasetSource:
    """Undecoded images of a map-style `datasets.Dataset`.

    Args:
        dataset: its image column is not decoded by datasets.
        column: name of that column.
        rows: which rows, numbered as in the split; None is all of them.
    """

    def __init__(self, dataset: Dataset, column: str, split: str, rows: Sequence[int] | None = None) -> None:
        self._dataset, self._column, self._split = dataset.select_columns([column]), column, split
        self._rows = np.arange(len(dataset)) if rows is None else np.asarray(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Any]:
        return self._dataset[self._rows[np.asarray(indices)].tolist()][self._column]

    @property
    def rows(self) -> list[int]:
        """The images' row numbers in the split."""
        return self._rows.tolist()

    def where(self, index: int, value: Any) -> str:
        path = value.get("path") if isinstance(value, dict) else None
        return f"Image in row {self._rows[index]} of split {self._split!r}{f' ({path})' if path else ''}"

    def subset(self, rows: Sequence[int]) -> DatasetSource:
        chosen = DatasetSource.__new__(DatasetSource)
        chosen.__dict__ = self.__dict__ | {"_rows": self._rows[np.asarray(rows)]}
        return chosen


def load_splits(
    dataset_name: str | None,
    dataset_config_name: str | None,
    train_data_dir: str | None,
    cache_dir: str | None,
    streaming: bool,
    data_dir: str | None = None,
) -> tuple[dict[str, Dataset | IterableDataset], str]:
    """All splits by name, and what to call the data set.

    Args:
        data_dir: a folder inside the data set of `dataset_name`.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "Reading a data set needs the package `datasets`: pip install 'diffusers-adaptive-ts[train]'."
        ) from error
    asked = f"--train_data_dir {train_data_dir}" if dataset_name is None else f"--dataset_name {dataset_name}"
    if dataset_name is None:
        folder = _existing_folder(Path(train_data_dir).expanduser(), asked, wants_images=True)
        path, files, name = "imagefolder", {"data_dir": str(folder)}, folder.resolve().name
    else:
        path, files, name = _locate(dataset_name, asked)
    if dataset_config_name is not None and (path is None or files):
        raise ValueError(
            f"--dataset_config_name {dataset_config_name} cannot be used with {asked}: files, image folders and "
            "folders of save_to_disk have no configurations. Leave it out, or give the --dataset_name of a data "
            "set that has them."
        )
    if data_dir is not None:
        files = {**files, "data_dir": _folder_inside(data_dir, path, files, asked)}
        name = f"{name}/{Path(data_dir).name}"
    if path is None:
        return _from_disk(Path(dataset_name).expanduser(), streaming), name
    try:
        splits = datasets.load_dataset(path, dataset_config_name, cache_dir=cache_dir, streaming=streaming, **files)
    except Exception as error:
        raise ValueError(
            f"{asked} could not be loaded: {type(error).__name__}: {error} It must be a data set on the Hub, or a "
            "path to a folder or to .parquet or .arrow files."
        ) from error
    return dict(splits), name if dataset_config_name is None else f"{name} ({dataset_config_name})"


def _locate(dataset_name: str, asked: str) -> tuple[str | None, dict[str, Any], str]:
    """What `load_dataset` takes as path and as files, and a name; no path for a folder of `save_to_disk`."""
    given = Path(dataset_name).expanduser()
    if given.is_dir():
        if (given / "state.json").is_file() or (given / "dataset_dict.json").is_file():
            return None, {}, given.resolve().name
        return str(_existing_folder(given, asked, wants_images=False)), {}, given.resolve().name
    if given.is_file() or any(letter in dataset_name for letter in "*?["):
        builder, files = _builder(given, asked)
        return (
            builder,
            {"data_files": {"train": files}},
            given.stem if given.is_file() else given.resolve().parent.name,
        )
    if given.is_absolute() or dataset_name.startswith((".", "~")) or len(given.parts) > 2:
        raise ValueError(f"{asked}: there is no such file or folder.")
    return dataset_name, {}, dataset_name


def _from_disk(folder: Path, streaming: bool) -> dict[str, Dataset | IterableDataset]:
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    return {key: split.to_iterable_dataset() for key, split in splits.items()} if streaming else splits


def _folder_inside(data_dir: str, path: str | None, files: dict[str, Any], asked: str) -> str:
    """`data_dir` as `load_dataset` takes it, beside the path and files of `_locate`."""
    if path is None or files:
        raise ValueError(
            f"--train_data_dir {data_dir} cannot be used with {asked}: files and folders of save_to_disk have no "
            "folders inside. Leave one of the two out."
        )
    if Path(path).is_dir():
        _existing_folder(Path(path, data_dir), f"--train_data_dir {data_dir} inside {asked}", wants_images=False)
    return data_dir


def _existing_folder(folder: Path, asked: str, wants_images: bool) -> Path:
    if not folder.is_dir():
        raise ValueError(f"{asked}: there is no such folder.")
    files = (path for path in folder.rglob("*") if path.is_file())
    endings = Image.registered_extensions()
    archives = (".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2")
    if wants_images and not any(path.suffix.lower() in endings or path.suffix in archives for path in files):
        raise ValueError(f"{asked}: there are no images in this folder or below it.")
    if not wants_images and next(files, None) is None:
        raise ValueError(f"{asked}: this folder is empty.")
    return folder


def _builder(given: Path, asked: str) -> tuple[str, list[str]]:
    """The builder of datasets for a file or a glob pattern, and the files."""
    files = [str(given)] if given.is_file() else sorted(glob.glob(str(given), recursive=True))
    if not files:
        raise ValueError(f"{asked}: no file matches.")
    endings = {Path(file).suffix.lower() for file in files}
    if endings <= set(Image.registered_extensions()):
        return "imagefolder", files
    if len(endings) > 1 or not endings <= set(_BUILDERS):
        raise ValueError(
            f"{asked}: files must all be .parquet, all .arrow or all images, got {', '.join(sorted(endings))}."
        )
    return _BUILDERS[endings.pop()], files


def train_split(splits: dict[str, Any]) -> Any:
    if "train" not in splits:
        raise ValueError(f"The data set has no split 'train'; it has {', '.join(map(repr, splits))}.")
    return splits["train"]


def find_image_column(features: Features, asked: str | None) -> str:
    """The column asked for, else `image`, `img`, or the only one that holds images."""
    from datasets import Image as ImageFeature

    columns = f"The columns are: {', '.join(features)}."
    if asked is not None:
        if asked not in features:
            raise ValueError(f"--image_column {asked}: no such column.{did_you_mean(asked, features)} {columns}")
        if not _holds_images(features[asked]):
            raise ValueError(f"--image_column {asked} holds {features[asked]}, not images. {columns}")
        return asked
    for name in ("image", "img"):
        if name in features and _holds_images(features[name]):
            return name
    found = [name for name, feature in features.items() if isinstance(feature, ImageFeature)]
    if len(found) == 1:
        return found[0]
    problem = f"There are {len(found)} image columns ({', '.join(found)})" if found else "There is no image column"
    raise ValueError(f"{problem}. {columns} Name one with --image_column.")


def _holds_images(feature: Any) -> bool:
    """Image columns, and what datasets can read as one: encoded bytes, paths, or a struct of them."""
    from datasets import Image as ImageFeature
    from datasets import Value

    if isinstance(feature, Value):
        return feature.dtype in ("binary", "large_binary", "string", "large_string")
    return isinstance(feature, ImageFeature) or (isinstance(feature, dict) and bool({"bytes", "path"} & set(feature)))


def undecoded(dataset: Any, column: str) -> Any:
    """The data set with images left as bytes or paths, so that reading a row does not decode it."""
    from datasets import Image as ImageFeature

    return dataset.cast_column(column, ImageFeature(decode=False))


def check_label_column(features: Features, column: str) -> None:
    from datasets import ClassLabel

    if column not in features:
        raise ValueError(
            f"--class_labels {column}: no such column.{did_you_mean(column, features)} "
            f"The columns are: {', '.join(features)}."
        )
    feature = features[column]
    dtype = str(getattr(feature, "dtype", ""))
    if not isinstance(feature, ClassLabel) and not dtype.lstrip("u").startswith("int") and "string" not in dtype:
        raise ValueError(
            f"--class_labels {column} holds {feature}; it must hold whole numbers, class labels or strings."
        )


def read_labels(
    dataset: Dataset, column: str, split: str, classes: dict[int, str] | None = None
) -> tuple[torch.Tensor, dict[int, str]]:
    """`(N,)` int64 labels and the names of the classes; strings become classes in sorted order.

    Args:
        classes: those of the training split, which others must keep to.
    """
    from datasets import ClassLabel

    check_label_column(dataset.features, column)
    feature = dataset.features[column]
    values = dataset.select_columns([column]).with_format("arrow")[:][column].to_pylist()
    if None in values:
        raise ValueError(f"--class_labels {column}: row {values.index(None)} of split {split!r} has no label.")
    given = values
    if isinstance(values[0], str):
        classes = classes or dict(enumerate(sorted(set(values))))
        numbers = {name: number for number, name in classes.items()}
        values = [numbers.get(value, -1) for value in values]
    elif classes is None:
        classes = dict(enumerate(feature.names)) if isinstance(feature, ClassLabel) else {}
        classes = classes or {number: str(number) for number in sorted(set(values))}
    labels = torch.tensor(values, dtype=torch.int64)
    known = torch.tensor([number for number in classes if number >= 0], dtype=torch.int64)
    strange = (~torch.isin(labels, known)).nonzero().flatten()
    if len(strange):
        row = int(strange[0])
        raise ValueError(
            f"--class_labels {column}: row {row} of split {split!r} has the label {given[row]!r}, which is no class "
            "of the training images."
        )
    return labels, classes
