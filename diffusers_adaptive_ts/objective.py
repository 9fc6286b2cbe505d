"""What a diffusion model is trained on: targets, SNR, the variational coefficients, and the loss of each sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")


@dataclass(frozen=True)
class DiffusionObjective:
    """The training objective that a diffusers scheduler implies; all tables are float64 on the CPU.

    Args:
        betas: `(T,)` noise added at each timestep.
        alphas_cumprod: `(T,)` share of signal variance left at each timestep, the papers' `abar_t`.
        prediction_type: what the network predicts: `epsilon`, `sample` (x0) or `v_prediction`.

    Example:
        >>> from diffusers import DDPMScheduler
        >>> objective = DiffusionObjective.from_scheduler(DDPMScheduler(num_train_timesteps=10))
        >>> objective.num_train_timesteps, objective.prediction_type
        (10, 'epsilon')
    """

    betas: torch.Tensor
    alphas_cumprod: torch.Tensor
    prediction_type: str

    @classmethod
    def from_scheduler(cls, scheduler: Any) -> DiffusionObjective:
        """Read the objective off a scheduler; anything with `betas`, `alphas_cumprod` and a config will do."""
        betas = getattr(scheduler, "betas", None)
        alphas_cumprod = getattr(scheduler, "alphas_cumprod", None)
        if betas is None or alphas_cumprod is None:
            raise ValueError(
                f"{type(scheduler).__name__} has no betas / alphas_cumprod, so it does not describe a DDPM noise "
                "process. Give a diffusers.DDPMScheduler (or another scheduler with a beta schedule, such as "
                "DDIMScheduler); flow-matching schedulers are not supported."
            )
        prediction_type = scheduler.config.get("prediction_type", "epsilon")
        if prediction_type not in PREDICTION_TYPES:
            raise ValueError(
                f"The scheduler's prediction_type is {prediction_type!r}; accepted are {', '.join(PREDICTION_TYPES)}."
            )
        return cls(betas.double().cpu(), alphas_cumprod.double().cpu(), prediction_type)

    @property
    def num_train_timesteps(self) -> int:
        return len(self.betas)

    @property
    def snr(self) -> torch.Tensor:
        """`(T,)` signal-to-noise ratio `abar / (1 - abar)`; 0 at the end of a zero-terminal schedule."""
        return self.alphas_cumprod / (1 - self.alphas_cumprod)

    @property
    def positive_snr(self) -> torch.Tensor:
        """`(T,)` SNR where a zero is replaced by the smallest value above it, for formulas that divide by it."""
        snr = self.snr
        return snr.clamp(min=snr[snr > 0].min())

    @property
    def log_snr(self) -> torch.Tensor:
        """`(T,)` finite log-SNR; a zero-terminal step continues the slope of the steps before it."""
        log_snr = self.snr.log()
        if log_snr[-1].isinf():
            log_snr[-1] = 2 * log_snr[-2] - log_snr[-3] if len(log_snr) > 2 else log_snr[-2] - 1
        return log_snr

    @property
    def eps_space_factor(self) -> torch.Tensor:
        """`(T,)` factor that turns the squared error of the prediction into the squared error in eps.

        At fixed `x_t`: `eps - eps' = sqrt(SNR) (x0' - x0)` and `eps - eps' = sqrt(abar) (v - v')`.
        """
        if self.prediction_type == "epsilon":
            return torch.ones_like(self.betas)
        return self.snr if self.prediction_type == "sample" else self.alphas_cumprod

    @property
    def vlb_coefficients(self) -> torch.Tensor:
        """`(T,)` weight of the *prediction's* squared error in the variational bound (Eq. 4 and 7 of the paper).

        In eps: `c_t = beta_t^2 / (2 sigma_t^2 alpha_t (1 - abar_t))` with `sigma_t^2 = beta_t` (fixed-large) and
        `sigma_0^2` the posterior variance one step later, because the true one is 0 there. It is computed in x0,
        where it stays finite for a zero-terminal schedule; in eps that last step takes the value before it.
        """
        beta, abar = self.betas, self.alphas_cumprod
        abar_before = torch.cat([torch.ones(1, dtype=abar.dtype), abar[:-1]])
        sigma2 = beta.clone()
        if len(beta) > 1:
            sigma2[0] = beta[1] * (1 - abar[0]) / (1 - abar[1])
        in_x0 = beta**2 * abar_before / (2 * sigma2 * (1 - abar) ** 2)
        if self.prediction_type == "sample":
            return in_x0
        if self.prediction_type == "v_prediction":
            return in_x0 * (1 - abar)
        in_eps = in_x0 / self.snr
        in_eps[self.snr == 0] = in_eps[self.snr > 0][-1]
        return in_eps

    def target(self, x0: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """What the network should return for `x_t`: the noise, the clean sample, or the velocity."""
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return x0
        abar = _per_sample(self.alphas_cumprod, timesteps, x0)
        return abar.sqrt() * noise - (1 - abar).sqrt() * x0

    def add_noise(self, x0: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """`x_t = sqrt(abar_t) x0 + sqrt(1 - abar_t) eps`, as the scheduler's own `add_noise`."""
        abar = _per_sample(self.alphas_cumprod, timesteps, x0)
        return abar.sqrt() * x0 + (1 - abar).sqrt() * noise

    def squared_error(
        self, pred: torch.Tensor, x0: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """`(B,)` mean squared error of each sample on the scheduler's own target, in float32."""
        if pred.shape != x0.shape or noise.shape != x0.shape:
            raise ValueError(
                f"pred {tuple(pred.shape)}, x0 {tuple(x0.shape)} and noise {tuple(noise.shape)} must have one shape. "
                "A model that also predicts a variance returns twice the channels: pass the first half as pred."
            )
        if x0.ndim == 0 or len(x0) == 0:
            raise ValueError(f"x0 must hold at least one sample; got shape {tuple(x0.shape)}.")
        check_timesteps(timesteps, self.num_train_timesteps, len(x0))
        error = pred.float() - self.target(x0.float(), noise.float(), timesteps)
        return error.pow(2).flatten(1).mean(1) if error.ndim > 1 else error.pow(2)

    def eps_squared_error(self, squared_error: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """`(B,)` the same errors expressed in eps, whatever the network predicts."""
        return squared_error * lookup(self.eps_space_factor, timesteps)

    def vlb_bits(self, squared_error: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """`(B,)` each sample's term `L_t` of the variational bound, per pixel, in bits."""
        return squared_error * lookup(self.vlb_coefficients, timesteps) / math.log(2)


def lookup(table: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """`(B,)` float32 values of a `(T,)` table at `timesteps`, on their device."""
    return table.to(timesteps.device, torch.float32)[timesteps]


def _per_sample(table: torch.Tensor, timesteps: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    values = table.to(like.device, torch.float32)[timesteps.to(like.device)].to(like.dtype)
    return values.reshape(-1, *[1] * (like.ndim - 1))


def check_timesteps(timesteps: torch.Tensor, num_train_timesteps: int, batch_size: int | None = None) -> None:
    """Shape and dtype are checked always; the range only on the CPU, where it costs no synchronisation."""
    is_tensor = isinstance(timesteps, torch.Tensor)
    count = len(timesteps) if is_tensor and timesteps.ndim == 1 else 0
    if count == 0 or batch_size not in (None, count) or timesteps.dtype not in (torch.int64, torch.int32):
        given = f"{timesteps.dtype} of shape {tuple(timesteps.shape)}" if is_tensor else type(timesteps).__name__
        raise ValueError(
            f"timesteps must be a tensor of integers of shape ({batch_size or 'B'},), one per sample; got {given}."
        )
    if timesteps.device.type == "cpu" and (timesteps.min() < 0 or timesteps.max() >= num_train_timesteps):
        raise ValueError(
            f"timesteps must lie in 0..{num_train_timesteps - 1}; got {int(timesteps.min())}..{int(timesteps.max())}."
        )
