"""The images of a run: loaded, checked, split into training and validation before the first step."""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from . import digits, held_out, sources
from .captions import check_caption_column, read_captions
from .data_options import DataOptions
from .held_out import Part
from .images import DEEP_MODES, GREY_MODES, ColourImage, Preparation, mode_and_size
from .rows import ImageRows, ListSource, heads, naming, spread
from .streamed import StreamedImages, streamed_captions, streamed_labels

__all__ = ["DataOptions", "ImageData", "ImageRows", "load_image_data"]

# Examples of a stream whose modes decide whether it is grey.
_FIRST = 64


@dataclass
class ImageData:
    """What a run trains on and is validated on.

    Args:
        train: rows by number; None when they are streamed.
        validation: held-out rows, prepared without chance; None when none are held out.
        channels: 1 or 3.
        resolution: height and width.
        id2label: names of the classes, when labels are used.
        name: what log, report and model card call the data set.
        fingerprint: changes with the files, the splits, the resolution, the mode, the columns or the captions.
        notes: what the log should say.
        streamed: the training images of `--streaming`.
        images_fingerprint: changes with the prepared images alone, so that what is computed from them outlives an
            edited caption or label; `fingerprint` where none is given.
    """

    train: ImageRows | None
    validation: ImageRows | None
    channels: int
    resolution: int
    id2label: dict[int, str] | None
    name: str
    fingerprint: str
    notes: list[str] = field(default_factory=list)
    streamed: StreamedImages | None = None
    images_fingerprint: str = ""

    def __post_init__(self) -> None:
        self.images_fingerprint = self.images_fingerprint or self.fingerprint


def load_image_data(args: argparse.Namespace) -> ImageData:
    """Images, labels and captions that the options name; every mistake that can be seen at once is raised here."""
    options, notes = DataOptions.from_args(args), []
    if options.dataset_name is not None and options.train_data_dir is not None and options.data_dir is None:
        notes.append(f"--train_data_dir {options.train_data_dir} is not used: --dataset_name comes first.")
    if options.streaming:
        return _load_stream(options, notes)
    held = None
    if options.is_digits:
        source, labels, id2label = digits.load_digits_images(options.image_column, options.class_labels)
        train, name, column = Part(source, labels), digits.NAME, "image"
        train = held_out.sampled(train, options.max_train_samples, options.seed, notes)
    else:
        splits, name = _load_splits(options)
        dataset, id2label = sources.train_split(splits), None
        if len(dataset) == 0:
            raise ValueError(f"There are no images in the training split of {name}.")
        column = sources.find_image_column(dataset.features, options.image_column)
        train = Part(sources.DatasetSource(sources.undecoded(dataset, column), column, "train"), None)
        if options.class_labels is not None:
            labels, id2label = sources.read_labels(dataset, options.class_labels, "train")
            train = train._replace(labels=labels)
        train = held_out.sampled(train, options.max_train_samples, options.seed, notes)
        if options.caption_column is not None:
            train = train._replace(captions=read_captions(dataset, options.caption_column, "train", train.source.rows))
        if options.validation_images:
            held = held_out.from_own_split(
                splits,
                options.validation_images,
                column,
                options.class_labels,
                id2label,
                notes,
                options.caption_column,
            )
    if options.validation_images and held is None:
        train, held = held_out.from_training(train, options.validation_images, notes)
    preparation = options.preparation(mode for _, _, mode, _ in heads(train.source, spread(len(train.source))))
    try:
        rows, validation = _decode(options, preparation, train, held)
    except ColourImage:
        if options.model_channels == 1:
            raise
        preparation = replace(preparation, channels=3, grey_only=False)
        rows, validation = _decode(options, preparation, train, held)
    parts = [part for part in (rows, validation) if part is not None]
    content = [part.fingerprint() for part in parts]
    return _prepared(
        preparation,
        train=rows,
        validation=validation,
        id2label=id2label,
        name=name,
        fingerprint=_fingerprint(content, column, options.class_labels, id2label, preparation),
        images_fingerprint=_fingerprint([part.images_fingerprint for part in parts], preparation),
        notes=[_memory_note(rows, options), *_mode_notes(rows.modes, preparation), *notes],
    )


def _prepared(preparation: Preparation, **rest: Any) -> ImageData:
    return ImageData(channels=preparation.channels, resolution=preparation.resolution, **rest)


def _load_splits(options: DataOptions) -> tuple[dict[str, Any], str]:
    return sources.load_splits(
        options.dataset_name,
        options.dataset_config_name,
        options.train_data_dir,
        options.cache_dir,
        options.streaming,
        options.data_dir,
    )


def _decode(
    options: DataOptions, preparation: Preparation, train: Part, held: Part | None
) -> tuple[ImageRows, ImageRows | None]:
    """Training and validation rows; validation is decoded first, into the same share of memory."""
    budget, validation = options.keep_in_memory_bytes, None
    if held is not None:
        validation = ImageRows(held.source, _without_chance(preparation), held.labels, budget, held.captions)
        budget -= validation.pixels.nbytes if validation.in_memory else 0
    return ImageRows(train.source, preparation, train.labels, budget, train.captions), validation


def _without_chance(preparation: Preparation) -> Preparation:
    return replace(preparation, center_crop=True, random_flip=False)


def _load_stream(options: DataOptions, notes: list[str]) -> ImageData:
    splits, name = _load_splits(options)
    dataset = sources.train_split(splits)
    features = dataset.features or dataset._resolve_features().features
    column = sources.find_image_column(features, options.image_column)
    id2label = _streamed_classes(features, options.class_labels)
    if options.caption_column is not None:
        check_caption_column(features, options.caption_column)
    columns = [name for name in (column, options.class_labels, options.caption_column) if name is not None]

    def undecoded(split: str) -> Any:
        return sources.undecoded(splits[split].select_columns(columns), column)

    most = options.max_train_samples
    first = list(islice(undecoded("train"), _FIRST if most is None else min(_FIRST, most)))
    if not first:
        raise ValueError(f"There are no images in the training split of {name}.")
    modes: Counter[str] = Counter()
    for number, example in enumerate(first):
        with naming(lambda number=number: f"Image {number} of the stream"):
            modes[mode_and_size(example[column])[0]] += 1
    if options.caption_column is not None:
        streamed_captions(first, options.caption_column, "the stream")
    preparation = options.preparation(modes)
    split = held_out.own_split(splits)
    if split is None or not set(columns) <= set(splits[split].features or columns):
        split = "train"
    wanted = options.validation_images
    if split == "train" and most is not None:
        wanted = min(wanted, most // 10)
        if wanted < min(options.validation_images, 1):
            notes.append(f"No images held out for validation: a tenth of {most} is less than one.")
    examples = list(islice(undecoded(split), wanted))
    validation = None
    if examples:
        source = ListSource([example[column] for example in examples], f"split {split!r}")
        labels = None if id2label is None else streamed_labels(examples, options.class_labels, f"split {split!r}")
        captions = None
        if options.caption_column is not None:
            captions = streamed_captions(examples, options.caption_column, f"split {split!r}")
        validation = ImageRows(source, _without_chance(preparation), labels, options.keep_in_memory_bytes, captions)
        notes.append(f"The first {len(examples):,} images of split {split!r} for validation.")
    reserved = len(examples) if split == "train" else 0
    facts = (name, str(dataset.info.splits), str(features), columns, reserved, most, preparation, first)
    kind = "grey" if preparation.channels == 1 else "RGB"
    return _prepared(
        preparation,
        train=None,
        validation=validation,
        id2label=id2label,
        name=name,
        fingerprint=_fingerprint(*facts),
        notes=[f"Images are read as a stream, as {kind}.", *_mode_notes(modes, preparation, exact=False), *notes],
        streamed=StreamedImages(
            undecoded("train"), column, options.class_labels, preparation, reserved, options.caption_column, most
        ),
    )


def _streamed_classes(features: Any, column: str | None) -> dict[int, str] | None:
    if column is None:
        return None
    from datasets import ClassLabel

    sources.check_label_column(features, column)
    if not isinstance(features[column], ClassLabel):
        raise ValueError(
            f"--class_labels {column} holds {features[column]}: the classes of a stream are known only from a "
            "ClassLabel column. Leave --streaming out, or give the column that type."
        )
    return dict(enumerate(features[column].names))


def _fingerprint(*parts: Any) -> str:
    """Flips are left out: they change what a run draws from the data, not the data."""
    parts = tuple(replace(part, random_flip=False) if isinstance(part, Preparation) else part for part in parts)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _memory_note(rows: ImageRows, options: DataOptions) -> str:
    if rows.in_memory:
        return f"{len(rows):,} images decoded once, {rows.pixels.nbytes / 1e6:,.1f} MB in memory."
    return (
        f"{len(rows):,} images are decoded anew for each batch: together they take more than the "
        f"{options.keep_in_memory_bytes / 1e6:,.1f} MB of --keep_in_memory_bytes."
    )


def _mode_notes(modes: Counter[str], preparation: Preparation, exact: bool = True) -> list[str]:
    """What happens to images whose mode is not the model's; numbers only where the modes of all are counted."""
    notes = []
    grey = sum(number for mode, number in modes.items() if mode in GREY_MODES)
    other = sum(modes.values()) - grey
    deep = sum(number for mode, number in modes.items() if mode in DEEP_MODES)
    if preparation.channels == 3 and grey:
        notes.append(f"{f'{grey:,} grey' if exact else 'Grey'} images are converted to RGB.")
    if preparation.channels == 1 and other:
        notes.append(f"{f'{other:,} colour' if exact else 'Colour'} images are converted to grey.")
    if deep and not preparation.preserve_input_precision:
        notes.append(
            f"{f'{deep:,} images' if exact else 'Images'} of 16 or 32 bits are reduced to 8; "
            "--preserve_input_precision keeps them."
        )
    return notes
