"""What an autoencoder for latent diffusion is trained on, and how well it gives images back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, VQModel
from diffusers.models.modeling_utils import ModelMixin

from .autoencoders import CHUNK, LatentSpace


class ReconstructionLoss(torch.nn.Module):
    """The loss of an autoencoder, as one module so that `accelerator.prepare` can wrap it."""

    def __init__(self, autoencoder: ModelMixin, kl_weight: float, commitment_weight: float) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        self.kl_weight, self.commitment_weight = kl_weight, commitment_weight

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Total loss, and its part on pixels."""
        if isinstance(self.autoencoder, AutoencoderKL):
            posterior = self.autoencoder.encode(images).latent_dist
            output = self.autoencoder.decode(posterior.sample()).sample
            # Per pixel value, so that the weight means what it means beside a loss summed over the image.
            penalty = self.kl_weight * posterior.kl().mean() / images[0].numel()
        else:
            decoded = self.autoencoder(images)
            output, penalty = decoded.sample, self.commitment_weight * decoded.commit_loss.mean()
        pixels = F.l1_loss(output.float(), images) + F.mse_loss(output.float(), images)
        return pixels + penalty, pixels


@torch.no_grad()
def start_codebook(autoencoder: VQModel, images: torch.Tensor, generator: torch.Generator) -> None:
    """Codebook entries taken from the first latents: from diffusers' tiny start only a few would ever be chosen."""
    latents = autoencoder.encode(images).latents.permute(0, 2, 3, 1).flatten(0, 2)
    weight = autoencoder.quantize.embedding.weight
    chosen = torch.randint(len(latents), (len(weight),), generator=generator)
    weight.copy_(latents[chosen] + 0.01 * latents.std() * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def reconstruct(space: LatentSpace, images: torch.Tensor) -> torch.Tensor:
    """The images, encoded to their mean latents and decoded, in [-1, 1]."""
    device = space.autoencoder.device
    parts = (space.autoencoder.decode(space.encode(part, device)[0]).sample.cpu() for part in images.split(CHUNK))
    return torch.cat(list(parts)).clamp(-1, 1)


def psnr(images: torch.Tensor, reconstructions: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB, the mean over images in [-1, 1]."""
    errors = ((images - reconstructions) / 2).pow(2).flatten(1).mean(1)
    return float((-10 * errors.clamp(min=1e-10).log10()).mean())
