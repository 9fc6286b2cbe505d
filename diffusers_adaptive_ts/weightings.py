"""How much each timestep counts: loss weightings as functions of the SNR, right for every prediction type."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import ranks
from .objective import DiffusionObjective, lookup
from .optimizer_state import adam_with_state, optimizer_tensors
from .registry import Registry, accepted_options

_WEIGHTINGS = Registry("weighting")


def list_weightings() -> list[str]:
    """Names that `make_weighting` takes.

    Example:
        >>> "min_snr" in list_weightings()
        True
    """
    return _WEIGHTINGS.names()


def weighting_entry(name: str) -> Callable[..., torch.Tensor | Weighting]:
    """The function or class registered under `name`.

    Example:
        >>> weighting_entry("min_snr").__name__
        'min_snr'
    """
    return _WEIGHTINGS[name]


def register_weighting(name: str):
    """Register a weighting: a function `(objective, **options) -> (T,)` or a subclass of `Weighting`.

    Example:
        >>> @register_weighting("half")
        ... def half(objective):
        ...     return torch.full_like(objective.betas, 0.5)
        >>> _ = _WEIGHTINGS._entries.pop("half")
    """
    return _WEIGHTINGS.register(name)


class Weighting:
    """A weight for each timestep, multiplied with the loss of the sample that drew it.

    Args:
        name: the registered name.
        table: `(T,)` weights of the prediction's squared error.
        options: what it was made with, for the sampler's config.
    """

    def __init__(self, name: str, table: torch.Tensor, options: dict[str, Any] | None = None) -> None:
        self.name = name
        self.options = dict(options or {})
        self._table = table.double()
        if not torch.isfinite(self._table).all() or (self._table < 0).any():
            raise ValueError(f"The weighting {name!r} gave a negative, infinite or NaN weight for this schedule.")

    def table(self) -> torch.Tensor:
        """`(T,)` weights as they stand now, float64."""
        return self._table

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor:
        """`(B,)` weights of the samples that drew `timesteps`."""
        return lookup(self.table(), timesteps)

    def loss(
        self, squared_error: torch.Tensor, timesteps: torch.Tensor, importance: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scalar training loss of `(B,)` errors."""
        weights = self.weights(timesteps)
        return ((weights if importance is None else weights * importance) * squared_error).mean()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What it has learned, by name; loading copies into these tensors."""
        return {}


def make_weighting(name: str, scheduler: Any, **options: Any) -> Weighting:
    """Build a registered weighting for a diffusers scheduler (or a `DiffusionObjective`).

    An unknown option, or a value of the wrong type, is an error.

    Example:
        >>> from diffusers import DDPMScheduler
        >>> weighting = make_weighting("min_snr", DDPMScheduler(), gamma=5.0)
        >>> weighting.weights(torch.tensor([0, 999]))
        tensor([5.0013e-04, 1.0000e+00])
    """
    entry = _WEIGHTINGS[name]
    _WEIGHTINGS.check_options(name, options, [o for o in accepted_options(entry) if o != "objective"])
    if not isinstance(scheduler, DiffusionObjective):
        scheduler = DiffusionObjective.from_scheduler(scheduler)
    with _WEIGHTINGS.building(name, options):
        made = entry(scheduler, **options)
    return made if isinstance(made, Weighting) else Weighting(name, made, options)


def in_prediction_space(eps_weight: torch.Tensor, objective: DiffusionObjective) -> torch.Tensor:
    """Weights of the eps error as weights of the prediction's error: times SNR for x0, times SNR/(SNR+1) for v."""
    return eps_weight * objective.eps_space_factor


def _positive(name: str, **values: float) -> None:
    for option, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}: {option} must be above 0, got {value}.")


@register_weighting("uniform")
def uniform(objective: DiffusionObjective) -> torch.Tensor:
    """1 on the network's own target, whatever it predicts: the loss of diffusers' scripts."""
    return torch.ones_like(objective.betas)


@register_weighting("epsilon")
def epsilon(objective: DiffusionObjective) -> torch.Tensor:
    """1 on the eps error, so that x0- and v-prediction optimise DDPM's L_simple (Ho et al. 2020, Eq. 14)."""
    return in_prediction_space(torch.ones_like(objective.betas), objective)


@register_weighting("min_snr")
def min_snr(objective: DiffusionObjective, gamma: float = 5.0) -> torch.Tensor:
    """`min(SNR, gamma)` in x0 (Hang et al. 2023, Eq. 8; arXiv 2303.09556). At SNR 0 the eps weight is 1."""
    _positive("min_snr", gamma=gamma)
    return in_prediction_space((gamma / objective.positive_snr).clamp(max=1.0), objective)


@register_weighting("soft_min_snr")
def soft_min_snr(objective: DiffusionObjective, gamma: float = 5.0) -> torch.Tensor:
    """`SNR gamma / (SNR + gamma)` in x0: min_snr without the corner (Crowson et al. 2024, arXiv 2401.11605)."""
    _positive("soft_min_snr", gamma=gamma)
    return in_prediction_space(gamma / (objective.snr + gamma), objective)


@register_weighting("p2")
def p2(objective: DiffusionObjective, gamma: float = 1.0, k: float = 1.0) -> torch.Tensor:
    """`1 / (k + SNR)^gamma` in eps (Choi et al. 2022, Eq. 8; arXiv 2204.00227)."""
    _positive("p2", k=k)
    if gamma < 0:
        raise ValueError(f"p2: gamma must be at least 0, got {gamma}.")
    if gamma == 0:
        warnings.warn("p2 with gamma=0 is plain DDPM: every timestep has weight 1. P2 uses gamma=1.", stacklevel=3)
    return in_prediction_space((k + objective.snr) ** -gamma, objective)


@register_weighting("debiased")
def debiased(objective: DiffusionObjective) -> torch.Tensor:
    """`1 / sqrt(SNR)` in eps (Yu et al. 2023, arXiv 2310.08442)."""
    return in_prediction_space(objective.positive_snr**-0.5, objective)


@register_weighting("speed_v1")
def speed_v1(objective: DiffusionObjective) -> torch.Tensor:
    """`1 / (1 + SNR)` in eps: what the first version of SpeeD trains with (arXiv 2405.17403)."""
    return in_prediction_space(1 - objective.alphas_cumprod, objective)


@register_weighting("speed_v2")
def speed_v2(objective: DiffusionObjective, lam: float = 0.6, tau: int | None = None) -> torch.Tensor:
    """SpeeD's change-aware weight: the rate of `1 - abar`, scaled to `[1 - lam, lam]`, before `tau`; 1 after it.

    `tau` is 700 of 1,000 timesteps unless given (arXiv 2405.17403, Sec. 2.4).
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"speed_v2: lam must lie in 0..1, got {lam}.")
    total = objective.num_train_timesteps
    tau = round(0.7 * total) if tau is None else tau
    if not 0 < tau <= total:
        raise ValueError(f"speed_v2: tau must lie in 1..{total}, got {tau}.")
    rate = torch.from_numpy(np.gradient((1 - objective.alphas_cumprod).numpy()))
    scaled = (rate - rate.min()) / (rate.max() - rate.min())
    weight = torch.where(torch.arange(total) < tau, (1 - lam) + (2 * lam - 1) * scaled, torch.ones_like(rate))
    return in_prediction_space(weight, objective)


@register_weighting("vlb")
def vlb(objective: DiffusionObjective, cap: float | None = None) -> torch.Tensor:
    """`c_t` of the variational bound (Eq. 7 of arXiv 2411.09998), at most `cap`.

    On the cosine schedule the last ten timesteps hold 98 % of the sum: there the bound is about little else.
    """
    coefficients = objective.vlb_coefficients
    if cap is None:
        return coefficients
    _positive("vlb", cap=cap)
    return coefficients.clamp(max=cap)


@register_weighting("learned_uncertainty")
class LearnedUncertainty(Weighting):
    """`err / e^u(t) + u(t)` with `u` learned (Karras et al. 2024, arXiv 2312.02696, Eq. 14-15).

    `u` is linear in fixed Fourier features of the log-SNR and starts at 0, the plain loss. It follows the detached
    errors with an optimizer of its own, inside `loss`, so the user's optimizer and loop stay as they are.
    """

    NUM_FEATURES = 64

    def __init__(self, objective: DiffusionObjective, learning_rate: float = 1e-2) -> None:
        _positive("learned_uncertainty", learning_rate=learning_rate)
        super().__init__("learned_uncertainty", uniform(objective), {"learning_rate": learning_rate})
        generator = torch.Generator().manual_seed(0)
        frequency = torch.randn(self.NUM_FEATURES, generator=generator)
        phase = torch.rand(self.NUM_FEATURES, generator=generator)
        noise_level = -objective.log_snr.float() / 8  # EDM's c_noise = ln(sigma) / 4
        angle = 2 * torch.pi * (noise_level[:, None] * frequency + phase)
        bias = torch.ones(objective.num_train_timesteps, 1)
        self._features = torch.cat([bias, angle.cos() * (2 / self.NUM_FEATURES) ** 0.5], dim=1)
        self._coefficients = torch.zeros(self.NUM_FEATURES + 1, requires_grad=True)
        self._optimizer = adam_with_state([self._coefficients], learning_rate)

    def log_variance(self) -> torch.Tensor:
        """`(T,)` u(t), the learned log of the error at each timestep."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self._features @ self._coefficients

    def table(self) -> torch.Tensor:
        return (-self.log_variance()).exp().double()

    def loss(
        self, squared_error: torch.Tensor, timesteps: torch.Tensor, importance: torch.Tensor | None = None
    ) -> torch.Tensor:
        log_variance = lookup(self.log_variance(), timesteps)
        terms = squared_error * (-log_variance).exp() + log_variance
        if torch.is_grad_enabled():
            self._follow(squared_error.detach(), timesteps)
        return (terms if importance is None else importance * terms).mean()

    def _follow(self, squared_error: torch.Tensor, timesteps: torch.Tensor) -> None:
        errors, drawn = ranks.gather(squared_error).float().cpu(), ranks.gather(timesteps).cpu()
        finite = errors.isfinite()
        if not finite.any():
            return
        with torch.autocast("cpu", enabled=False):
            log_variance = self._features[drawn[finite]] @ self._coefficients
            self._optimizer.zero_grad()
            (errors[finite] * (-log_variance).exp() + log_variance).mean().backward()
        self._optimizer.step()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"coefficients": self._coefficients, **optimizer_tensors(self._optimizer)}
