"""From a picture to a tensor: one mode, shorter side to the resolution, crop, flip, the range a model trains on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N")
# Modes of more than 8 bits, which `--preserve_input_precision` keeps; all of them have one channel.
DEEP_MODES = (*_SIXTEEN_BIT, "I", "F")
GREY_MODES = ("1", "L", "LA", "La", *DEEP_MODES)
# torchvision's names, as diffusers' scripts take them; for PIL both nearest ones are the same.
INTERPOLATIONS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "nearest": Image.Resampling.NEAREST,
    "nearest_exact": Image.Resampling.NEAREST,
}


class ColourImage(ValueError):
    """A colour picture where only grey ones are expected."""


def open_image(value: Any) -> Image.Image:
    """A decoded picture from what a data set holds: a picture, or a dict of `bytes` and `path`.

    datasets does the work: it turns pictures as their EXIF orientation says, and reads from archives and the Hub.
    """
    if isinstance(value, Image.Image):
        return value
    if value is None:
        raise ValueError("there is no image")
    if value["bytes"] is None and value["path"] and os.path.isfile(value["path"]):
        # Read here: PIL would leave the file of a broken picture open.
        value = {"bytes": Path(value["path"]).read_bytes(), "path": value["path"]}
    from datasets import Image as ImageFeature

    return ImageFeature().decode_example(value)


def mode_and_size(value: Any) -> tuple[str, tuple[int, int]]:
    """PIL mode and (width, height) from the head of a file, without decoding it unless it has to be fetched."""
    if value is None:
        raise ValueError("there is no image")
    if isinstance(value, Image.Image) or (value["bytes"] is None and not os.path.isfile(value["path"] or "")):
        image = open_image(value)
        return image.mode, image.size
    with Image.open(value["path"] if value["bytes"] is None else BytesIO(value["bytes"])) as image:
        return image.mode, image.size


def identity(value: Any) -> bytes:
    """What tells a picture from others without decoding it: its bytes, or a file's path, size and time of change."""
    if isinstance(value, Image.Image):
        return value.tobytes()
    if value["bytes"] is not None:
        return value["bytes"]
    path = value["path"]
    facts = os.stat(path) if os.path.isfile(path) else None
    return repr((path, facts and (facts.st_size, facts.st_mtime_ns))).encode()


def to_eight_bit(image: Image.Image, mode: str) -> Image.Image:
    """The picture as "L" or "RGB". Pictures of 16 bits keep their upper 8 (PIL's own `convert` would clip at 255)."""
    if image.mode == mode:
        return image
    if image.mode in _SIXTEEN_BIT or (image.mode == "I" and image.format == "PNG"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def resized_size(width: int, height: int, resolution: int) -> tuple[int, int]:
    """(width, height) with the shorter side at `resolution`, rounded down as torchvision's `Resize` does.

    Example:
        >>> resized_size(100, 50, 32)
        (64, 32)
    """
    longer = int(resolution * max(width, height) / min(width, height))
    return (resolution, longer) if width <= height else (longer, resolution)


def eight_bit_pixels(
    image: Image.Image, channels: int, resolution: int, interpolation: str = "bilinear"
) -> torch.Tensor:
    """`(channels, h, w)` uint8, resized with one of PIL's filters."""
    image = to_eight_bit(image, "RGB" if channels == 3 else "L")
    image = image.resize(resized_size(*image.size, resolution), INTERPOLATIONS[interpolation])
    pixels = np.array(image)
    return torch.from_numpy(pixels if channels == 1 else pixels.transpose(2, 0, 1)).reshape(
        channels, *pixels.shape[:2]
    )


def precise_pixels(image: Image.Image, channels: int, resolution: int) -> torch.Tensor:
    """`(channels, h, w)` float32: 0 to 1 over the range of the file's own type, resized as floats."""
    if image.mode in DEEP_MODES:
        pixels = torch.from_numpy(np.asarray(image).astype(np.float32) / _largest(image))
        pixels = pixels.expand(channels, -1, -1)
        if not pixels.isfinite().all():
            raise ValueError("it holds values that are not finite")
    else:
        plain = np.array(to_eight_bit(image, "RGB" if channels == 3 else "L"))
        pixels = torch.from_numpy(plain).reshape(*plain.shape[:2], channels).permute(2, 0, 1).float() / 255
    width, height = resized_size(*image.size, resolution)
    if (height, width) != pixels.shape[1:]:
        pixels = F.interpolate(pixels[None], (height, width), mode="bilinear", align_corners=False, antialias=True)[0]
    return pixels.contiguous()


def _largest(image: Image.Image) -> float:
    """The value of white. A PNG has at most 16 bits, also where older Pillows open it as 32-bit integers."""
    if image.mode in _SIXTEEN_BIT or (image.mode == "I" and image.format == "PNG"):
        return 2**16 - 1
    return 2**31 - 1 if image.mode == "I" else 1.0


def to_model_range(pixels: torch.Tensor) -> torch.Tensor:
    """uint8, or float32 in [0, 1], to float32 in [-1, 1]; the same bits as ToTensor and Normalize(0.5, 0.5).

    Factors of two change no bit, so two operations do the work of three: (x / 255 - 0.5) / 0.5 = x / 127.5 - 1.
    """
    twice = pixels.float().div_(127.5) if pixels.dtype == torch.uint8 else pixels * 2
    return twice.sub_(1)


@dataclass(frozen=True)
class Preparation:
    """What is done to every picture of a data set: `stored` once, `finish` for each batch.

    Args:
        resolution: height and width of the finished images.
        channels: 1 or 3.
        center_crop: keep the middle; otherwise training crops at random along the longer side.
        random_flip: mirror half of the training images.
        preserve_input_precision: floats of full precision instead of 8 bits.
        grey_only: a colour picture is a `ColourImage` error instead of being converted.
        interpolation: one of `INTERPOLATIONS`; images of preserved precision are always resized bilinearly.
    """

    resolution: int
    channels: int
    center_crop: bool = False
    random_flip: bool = False
    preserve_input_precision: bool = False
    grey_only: bool = False
    interpolation: str = "bilinear"

    def stored(self, image: Image.Image) -> torch.Tensor:
        """`(C, h, w)`, uint8 or float32: everything that does not change from epoch to epoch."""
        self.check_mode(image.mode)
        if self.preserve_input_precision:
            pixels = precise_pixels(image, self.channels, self.resolution)
        else:
            pixels = eight_bit_pixels(image, self.channels, self.resolution, self.interpolation)
        return self._crop(pixels, None).contiguous() if self.center_crop else pixels

    def check_mode(self, mode: str) -> None:
        if self.grey_only and mode not in GREY_MODES:
            raise ColourImage(
                f"a colour image (PIL mode {mode}) among grey ones, for a model with 1 channel. "
                "Give --image_mode L to make all images grey, or --image_mode RGB and a model with 3 channels."
            )

    def finish(
        self, pixels: torch.Tensor | Sequence[torch.Tensor], augment: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(B, C, R, R)` float32 in [-1, 1] and `(B,)` bool, which were mirrored, from what `stored` gave.

        Three numbers are drawn for each image, needed or not, so that nothing depends on how images are kept.
        """
        draws = None if augment is None else torch.rand(len(pixels), 3, dtype=torch.float64, generator=augment)
        square = (self.resolution, self.resolution)
        if not isinstance(pixels, torch.Tensor) or pixels.shape[-2:] != square:
            places = [None] * len(pixels) if draws is None else draws[:, :2].tolist()
            pixels = torch.stack([self._crop(one, place) for one, place in zip(pixels, places, strict=True)])
        flipped = torch.zeros(len(pixels), dtype=torch.bool)
        images = to_model_range(pixels)
        if self.random_flip and draws is not None:
            flipped = draws[:, 2] < 0.5
            rows = flipped.nonzero().flatten()
            images.index_copy_(0, rows, images.index_select(0, rows).flip(-1))
        return images, flipped

    def _crop(self, pixels: torch.Tensor, place: Sequence[float] | None) -> torch.Tensor:
        """A square of (C, h, w): the middle, or at `place`, two numbers in [0, 1)."""
        spare = [side - self.resolution for side in pixels.shape[-2:]]
        if place is None:
            top, left = (round(room / 2) for room in spare)
        else:
            top, left = (min(int(at * (room + 1)), room) for at, room in zip(place, spare, strict=True))
        return pixels[..., top : top + self.resolution, left : left + self.resolution]
