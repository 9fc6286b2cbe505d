"""The noise of a training step: plain, with an offset, perturbed at the input, or rectified by the model (DREAM)."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch

from ..objective import DiffusionObjective, lookup
from ..probes import predict, unwrapped


@dataclass(frozen=True)
class NoiseOptions:
    """How the noise of a training step is made; by default it is `torch.randn_like(x0)`.

    Args:
        offset: scale of a second draw that is one number per sample and channel, so that the model learns to change
            an image's mean (crosslabs.org, "Diffusion with offset noise"); 0.05 to 0.1 is usual.
        perturbation: scale of noise that is added to the input but not to be predicted, against the gap between
            training and sampling (Ning et al. 2023, arXiv 2301.11706, Alg. 2); they recommend 0.1.
        dream: detail preservation p of DREAM (arXiv 2312.00210), None for no DREAM. It costs one forward without
            gradients in every step; the paper uses 1.

    Example:
        >>> x0 = torch.zeros(2, 3, 4, 4)
        >>> noise, added = NoiseOptions().draw(x0)
        >>> noise is added
        True
        >>> noise, added = NoiseOptions(perturbation=0.1).draw(x0)
        >>> noise.equal(added)
        False
    """

    offset: float = 0.0
    perturbation: float = 0.0
    dream: float | None = None

    def __post_init__(self) -> None:
        for flag, value in (("noise_offset", self.offset), ("input_perturbation", self.perturbation)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"--{flag} is a scale of noise, 0 (off) or above; got {value}.")
        if self.dream is not None and not (math.isfinite(self.dream) and self.dream > 0):
            raise ValueError(
                f"--dream_detail_preservation must be above 0; got {self.dream}. The paper uses 1; a larger value "
                "rectifies less at small timesteps. Leave --dream_training out to train without DREAM."
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> NoiseOptions:
        """What the flags ask for; a script that does not have them trains on plain noise."""
        power = getattr(args, "dream_detail_preservation", 1.0)
        wanted = getattr(args, "dream_training", False)
        if not wanted and power != 1.0:
            raise ValueError(
                f"--dream_detail_preservation {power} changes nothing without --dream_training; give both or neither."
            )
        return cls(
            offset=getattr(args, "noise_offset", 0.0),
            perturbation=getattr(args, "input_perturbation", 0.0),
            dream=power if wanted else None,
        )

    def draw(self, x0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise to be predicted and noise that is added, both as `x0` `(B, C, ...)`; the same tensor if they agree.

        It draws from torch's own generator, in the order of diffusers' script.
        """
        noise = torch.randn_like(x0)
        if self.offset:
            shape = (*x0.shape[:2], *[1] * (x0.ndim - 2))
            noise = noise + self.offset * torch.randn(shape, dtype=x0.dtype, device=x0.device)
        if not self.perturbation:
            return noise, noise
        return noise, noise + self.perturbation * torch.randn_like(x0)

    def rectified(
        self,
        model: torch.nn.Module,
        objective: DiffusionObjective,
        x0: torch.Tensor,
        noise: torch.Tensor,
        added: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both noises after DREAM (Alg. 2), or as they came in without it.

        `delta = sqrt(1 - abar_t)^p (eps - eps_hat)` with the model's own estimate `eps_hat`, whatever it predicts:
        training then sees inputs that carry the model's error, as sampling does, and a target that undoes it.
        """
        if self.dream is None:
            return noise, added
        noisy = objective.add_noise(x0, added, timesteps)
        # Without DDP, whose buckets wait for a backward; the mixed precision is the bare module's own forward.
        with torch.no_grad():
            pred = predict(unwrapped(model), noisy, timesteps, conditioning)
        # Inside a caller's autocast, older torch takes the weights it cast without gradients for the trained ones.
        torch.clear_autocast_cache()
        abar = lookup(objective.alphas_cumprod, timesteps).view(-1, *[1] * (x0.ndim - 1))
        eps_hat = _noise_of(pred.float(), noisy.float(), abar, objective.prediction_type)
        delta = ((1 - abar).sqrt() ** self.dream * (noise.float() - eps_hat)).to(noise.dtype)
        rectified = noise + delta
        return rectified, (rectified if added is noise else added + delta)


def _noise_of(pred: torch.Tensor, noisy: torch.Tensor, abar: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """The noise in `noisy` that a prediction implies, with `abar` of the shape `(B, 1, ...)`."""
    if prediction_type == "epsilon":
        return pred
    if prediction_type == "sample":
        return (noisy - abar.sqrt() * pred) / (1 - abar).sqrt()
    return abar.sqrt() * pred + (1 - abar).sqrt() * noisy
