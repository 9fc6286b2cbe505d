"""The latent space of an autoencoder: found by path or Hub id, checked against the data, scaled to unit variance."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, VQModel
from diffusers.models.modeling_utils import ModelMixin

from .model_configs import check_class, check_size, find_config

CLASSES = {"AutoencoderKL": AutoencoderKL, "AutoencoderTiny": AutoencoderTiny, "VQModel": VQModel}
FLAG = "--autoencoder"
_SUBFOLDERS = ("", "vae", "vqvae")
# Images of one call of the encoder, however large the batch: validation encodes all its images at once.
CHUNK = 32
# Larger ones than this come in fewer at once, or their activations would not fit beside the network that trains.
_PIXELS_OF_CHUNK = 128**2
# A stated scaling_factor is believed when it brings the latents' standard deviation into this range.
_BELIEVABLE = (0.5, 2.0)


class LatentSpace:
    """An autoencoder in evaluation mode and the numbers that diffusion in its latents needs.

    Args:
        autoencoder: an AutoencoderKL, AutoencoderTiny or VQModel with float32 weights.
        stated: whether its configuration names a scaling factor, rather than leaving it to a class default.
        fixed: keep the scaling factor in any case, because a network was trained with it.
    """

    def __init__(self, autoencoder: ModelMixin, stated: bool = True, fixed: bool = False) -> None:
        self.autoencoder = autoencoder.eval().requires_grad_(False)
        self._fixed = fixed
        self._stated = stated and autoencoder.config.scaling_factor != 1
        config = autoencoder.config
        if config.in_channels != config.out_channels:
            raise ValueError(
                f"The autoencoder reads {config.in_channels} channels and writes {config.out_channels}; "
                "one that writes what it reads is needed."
            )

    @classmethod
    def load(cls, source: str | None, accepted: tuple[str, ...], cache_dir: str | None = None) -> LatentSpace:
        """The autoencoder in a folder or Hub repository, also inside the `vae` or `vqvae` folder of a pipeline."""
        config, subfolder = _config(source, accepted, cache_dir)
        name = check_class(config, accepted, FLAG, source)
        try:
            autoencoder = CLASSES[name].from_pretrained(source, subfolder=subfolder or None, cache_dir=cache_dir)
        except OSError as error:
            raise ValueError(f"{FLAG} {source}: the weights cannot be read. {str(error).splitlines()[0]}") from None
        return cls(autoencoder.float(), stated="scaling_factor" in config)

    @property
    def channels(self) -> int:
        """Channels of the latents; of a VQModel those before quantization, which LDMPipeline quantizes itself."""
        config = self.autoencoder.config
        return config.get("vq_embed_dim") or config.latent_channels

    @property
    def downscale(self) -> int:
        """How many pixels wide a latent is; every autoencoder here halves the size between its blocks."""
        config = self.autoencoder.config
        return 2 ** (len(config.get("encoder_block_out_channels") or config.block_out_channels) - 1)

    @property
    def has_posterior(self) -> bool:
        """Whether latents are drawn from a distribution; otherwise their standard deviation is zero."""
        return isinstance(self.autoencoder, AutoencoderKL)

    @property
    def scaling_factor(self) -> float:
        return self.autoencoder.config.scaling_factor

    def size(self, resolution: int) -> int:
        """Height and width of the latents of square images."""
        check_size(resolution, self.downscale, f"This {type(self.autoencoder).__name__}")
        return resolution // self.downscale

    def check_channels(self, channels: int, data_name: str) -> None:
        wanted = self.autoencoder.config.in_channels
        if wanted != channels:
            mode = {1: "L", 3: "RGB"}.get(wanted)
            advice = f"pass --image_mode {mode}, or " if mode else ""
            raise ValueError(
                f"The autoencoder takes images of {wanted} channel(s), but {data_name} gives {channels}: "
                f"{advice}give another {FLAG}."
            )

    def fingerprint(self) -> str:
        """Changes when class or weights change; the scaling factor is no part of what is encoded."""
        return weights_fingerprint(self.autoencoder)

    @torch.no_grad()
    def encode(self, images: torch.Tensor, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation `(B, c, h, w)` of the unscaled latents."""
        self.autoencoder.to(device)
        height, width = images.shape[-2:]
        chunk = max(1, min(CHUNK, CHUNK * _PIXELS_OF_CHUNK // (height * width)))
        parts = [self.autoencoder.encode(part.to(device)) for part in images.split(chunk)]
        if self.has_posterior:
            posteriors = [part.latent_dist for part in parts]
            return torch.cat([one.mean for one in posteriors]), torch.cat([one.std for one in posteriors])
        mean = torch.cat([part.latents for part in parts])
        return mean, torch.zeros_like(mean)

    def draw(self, mean: torch.Tensor, std: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """Scaled latents: drawn freshly from the posterior, or its mean without a generator.

        `shift_factor` and `latents_mean` are left alone on purpose: LDMPipeline and DiTPipeline undo the scaling only.
        """
        if self.has_posterior and generator is not None:
            mean = mean + std * torch.randn(mean.shape, generator=generator).to(mean)
        return mean * self.scaling_factor

    def scale_to(self, rows: Any | None, device: torch.device | str, count: int = 256) -> str | None:
        """Keep the stated scaling factor if it fits, else measure one on `count` rows; says what was done.

        With the factor `1 / sqrt(Var z)` over all elements, as in section D.1 of the latent diffusion paper. It is
        rounded so that machines whose last bits differ agree on it.
        """
        if self._fixed or (rows is None and self._stated):
            return None
        if rows is None:
            raise ValueError(
                "The autoencoder states no scaling_factor, and a stream has no rows to measure it on. "
                "Hold some out with --validation_images, or leave --streaming out."
            )
        measured = measure_scaling_factor(self, rows, device, count)
        std = self.scaling_factor / measured
        if self._stated and _BELIEVABLE[0] <= std <= _BELIEVABLE[1]:
            return None
        old = (
            f"{self.scaling_factor:g} gave latents of standard deviation {std:.2g}" if self._stated else "none stated"
        )
        self.autoencoder.register_to_config(scaling_factor=measured)
        self._stated = True
        return f"scaling_factor of the autoencoder set to {measured:g}, measured on the data ({old})"


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Changes when class or weights of a model change."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def measure_scaling_factor(space: LatentSpace, rows: Any, device: torch.device | str, count: int = 256) -> float:
    """The factor that gives drawn latents unit variance, measured on at most `count` evenly spaced rows."""
    count = min(count, len(rows))
    indices = [index * len(rows) // count for index in range(count)]
    total = squares = elements = 0.0
    for start in range(0, count, CHUNK):
        mean, std = space.encode(rows.batch(indices[start : start + CHUNK], None)["images"], device)
        mean = mean.double()
        total += mean.sum().item()
        squares += mean.pow(2).sum().item() + std.double().pow(2).sum().item()
        elements += mean.numel()
    variance = squares / elements - (total / elements) ** 2
    if not 1e-12 < variance < 1e12:
        raise ValueError(
            f"The latents of the first images have variance {variance:.3g}, so they cannot be scaled to 1. "
            f"The {FLAG} is broken or was never trained on such images."
        )
    return float(f"{variance**-0.5:.5g}")


def image_channels(source: str | None, accepted: tuple[str, ...], cache_dir: str | None = None) -> int:
    """Channels of the images that an autoencoder takes, without loading its weights."""
    config, _ = _config(source, accepted, cache_dir)
    check_class(config, accepted, FLAG, source)
    return config.get("in_channels", 3)


def _config(source: str | None, accepted: tuple[str, ...], cache_dir: str | None) -> tuple[dict[str, Any], str]:
    if source is None:
        raise ValueError(
            f"A latent model needs {FLAG}: a folder or Hub id of {' or '.join(accepted)}. "
            "train_scripts/train_autoencoder.py makes one from your own images."
        )
    return find_config(source, _SUBFOLDERS, FLAG, cache_dir)
