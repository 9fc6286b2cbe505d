from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_adaptive_ts.training.images import (
    INTERPOLATIONS,
    ColourImage,
    Preparation,
    mode_and_size,
    open_image,
    resized_size,
    to_eight_bit,
    to_model_range,
)


def picture(seed: int, size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def sixteen_bit(size: tuple[int, int] = (9, 9), seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 2**16, size[::-1], dtype=np.uint16))


def as_file(image: Image.Image, form: str = "PNG", **options) -> dict:
    with io.BytesIO() as file:
        image.save(file, form, **options)
        return {"bytes": file.getvalue(), "path": None}


# What torchvision's Resize, CenterCrop, ToTensor and Normalize do, written out by hand for each size.
@pytest.mark.parametrize(
    ("size", "resized", "box"),
    [
        ((100, 60), (40, 24), (8, 0, 32, 24)),
        ((37, 50), (24, 32), (0, 4, 24, 28)),
        ((24, 24), (24, 24), (0, 0, 24, 24)),
        ((10, 13), (24, 31), (0, 4, 24, 28)),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_resize_and_center_crop_are_those_of_pil(size, resized, box, mode):
    image = picture(1, size, mode)
    preparation = Preparation(24, channels=len(image.getbands()))
    images, flipped = preparation.finish([preparation.stored(image)], None)
    expected = np.asarray(image.resize(resized, Image.Resampling.BILINEAR).crop(box), dtype=np.float32)
    expected = torch.from_numpy(expected).reshape(24, 24, -1).permute(2, 0, 1)
    assert resized_size(*size, 24) == resized
    assert torch.equal(images[0], (expected / 255 - 0.5) / 0.5)
    assert images.dtype == torch.float32
    assert not flipped.any()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("bilinear", Image.Resampling.BILINEAR),
        ("bicubic", Image.Resampling.BICUBIC),
        ("lanczos", Image.Resampling.LANCZOS),
        ("box", Image.Resampling.BOX),
        ("hamming", Image.Resampling.HAMMING),
        ("nearest", Image.Resampling.NEAREST),
        ("nearest_exact", Image.Resampling.NEAREST),
    ],
)
def test_interpolations_are_those_of_pil(name, method):
    image = picture(3, (40, 30))
    expected = torch.from_numpy(np.array(image.resize((16, 12), method))).permute(2, 0, 1)
    assert torch.equal(Preparation(12, 3, interpolation=name).stored(image), expected)
    assert name in INTERPOLATIONS
    assert len(INTERPOLATIONS) == 7


def test_center_crop_before_or_after_keeping_is_the_same():
    image = picture(2, (41, 30))
    kept_whole, cut_first = Preparation(16, 3), Preparation(16, 3, center_crop=True)
    assert cut_first.stored(image).shape == (3, 16, 16)
    whole, _ = kept_whole.finish([kept_whole.stored(image)], None)
    cut, _ = cut_first.finish([cut_first.stored(image)], torch.Generator())
    assert torch.equal(whole, cut)


def test_the_range_has_the_bits_of_totensor_and_normalize():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_model_range(every), (every.float() / 255 - 0.5) / 0.5)
    floats = torch.rand(1000)
    assert torch.equal(to_model_range(floats.clone()), (floats - 0.5) / 0.5)


def test_random_crops_reach_every_place_and_flips_mirror():
    # Columns 0 .. 11 say where a crop began and which way it runs.
    image = Image.fromarray(np.tile(np.arange(12, dtype=np.uint8), (8, 1)))
    preparation = Preparation(8, 1, random_flip=True)
    stored = preparation.stored(image)
    assert stored.shape == (1, 8, 12)
    images, flipped = preparation.finish([stored] * 400, torch.Generator().manual_seed(0))
    columns = ((images[:, 0, 0] + 1) * 127.5).round().long()
    columns = torch.where(flipped[:, None], columns.flip(-1), columns)
    assert torch.equal(columns, columns[:, :1] + torch.arange(8))
    assert columns[:, 0].unique().tolist() == [0, 1, 2, 3, 4]
    assert 0.4 < flipped.float().mean() < 0.6


@pytest.mark.parametrize(
    ("mode", "grey"), [("1", 1), ("L", 1), ("LA", 1), ("P", 0), ("RGBA", 0), ("CMYK", 0), ("RGB", 0)]
)
def test_modes_become_grey_or_rgb(mode, grey):
    image = picture(3, (10, 10), mode)
    for channels, target in ((1, "L"), (3, "RGB")):
        stored = Preparation(10, channels).stored(image)
        expected = np.asarray(image.convert(target)).reshape(10, 10, channels).transpose(2, 0, 1)
        assert np.array_equal(stored.numpy(), expected)
    strict = Preparation(10, 1, grey_only=True)
    if grey:
        assert strict.stored(image).shape == (1, 10, 10)
    else:
        with pytest.raises(ColourImage, match="--image_mode L"):
            strict.stored(image)


def test_palette_with_transparency_gives_no_warning():
    image = picture(4, (10, 10), "P")
    read = open_image(as_file(image, transparency=bytes(range(256))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_eight_bit(read, "RGB").mode == "RGB"


def test_sixteen_bits_are_reduced_not_clipped():
    image = sixteen_bit()
    stored = Preparation(9, 1).stored(open_image(as_file(image)))
    assert np.array_equal(stored[0].numpy(), np.asarray(image) // 256)
    as_32_bit = Image.fromarray(np.asarray(image).astype(np.int32))
    as_32_bit.format = "PNG"  # how older Pillows open it
    assert torch.equal(Preparation(9, 1).stored(as_32_bit), stored)


@pytest.mark.parametrize("channels", [1, 3])
def test_input_precision_is_preserved(channels):
    image = sixteen_bit()
    preparation = Preparation(9, channels, preserve_input_precision=True)
    images, _ = preparation.finish([preparation.stored(open_image(as_file(image)))], None)
    values = torch.from_numpy(np.asarray(image).astype(np.float32)) / 65535
    assert torch.equal(images[0], (2 * values - 1).expand(channels, 9, 9))
    eight = picture(5, (9, 9))
    from_eight = preparation.stored(eight)
    assert torch.equal(from_eight, Preparation(9, channels).stored(eight) / 255)


def test_precise_images_are_resized_as_pil_resizes_floats():
    image = sixteen_bit((40, 30))
    floats = Image.fromarray(np.asarray(image).astype(np.float32) / 65535)
    for read in (image, floats):
        stored = Preparation(12, 1, preserve_input_precision=True).stored(read)
        expected = np.asarray(floats.resize((16, 12), Image.Resampling.BILINEAR))
        assert np.abs(stored[0].numpy() - expected).max() < 1e-5
    thirty_two = Image.fromarray(np.full((4, 4), 2**30, dtype=np.int32))
    assert Preparation(4, 1, preserve_input_precision=True).stored(thirty_two).unique().tolist() == [0.5]
    with pytest.raises(ValueError, match="not finite"):
        Preparation(4, 1, preserve_input_precision=True).stored(Image.fromarray(np.full((4, 4), np.nan, np.float32)))


def test_orientation_of_a_photograph_is_honoured():
    image = picture(6, (20, 10))
    exif = Image.Exif()
    exif[0x0112] = 6
    value = as_file(image, exif=exif)
    assert open_image(value).size == (10, 20)
    assert mode_and_size(value) == ("RGB", (20, 10))


def test_a_missing_image_is_an_error():
    for reader in (open_image, mode_and_size):
        with pytest.raises(ValueError, match="no image"):
            reader(None)
