"""The verbs every timestep sampler has: sample, loss, weights, observe, density, and a state that is complete."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from .. import persistence
from ..objective import DiffusionObjective, check_timesteps, lookup
from ..probes.step_watch import StepWatch, gradients_are_synchronised
from ..registry import Registry, accepted_options
from ..weightings import Weighting, make_weighting
from .draws import Draws, draw_from_table

_SAMPLERS = Registry("sampler")


class TimestepSampler:
    """Decides which timestep each training sample gets and how much its loss counts.

    A subclass gives `density()`; one that learns also overrides `_record` (losses it is shown anyway) or
    `_before_step` / `_after_step` (what an optimizer step changed), and names its state in `_own_state`.

    Args:
        scheduler: a `diffusers.DDPMScheduler`; it is wrapped, never changed, and stays what the pipeline saves.
        options: the subclass's own options, as they go into the saved config.
        weighting: name of a registered weighting, or a `Weighting`; `None` is the sampler's own (mostly `uniform`).
        weighting_options: options of a weighting given by name, for example `{"gamma": 5.0}`.
        stratified: spread the draws of a batch evenly over the distribution (over all ranks): less variance, free.
        importance_weighting: weight each loss by `1 / (T p_t)`, which keeps the uniform objective under any density.
        seed: of the sampler's own generator; `None` takes one from torch's.

    A training loop with any sampler:
        >>> import torch
        >>> from diffusers import DDPMScheduler
        >>> from diffusers_adaptive_ts import make_sampler
        >>> scheduler, model = DDPMScheduler(), torch.nn.Conv2d(1, 1, 3, padding=1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> sampler = make_sampler("logit_normal", scheduler, weighting="min_snr", seed=0)
        >>> x0 = torch.randn(4, 1, 8, 8)
        >>> noise, timesteps = torch.randn_like(x0), sampler.sample(x0)
        >>> pred = model(scheduler.add_noise(x0, noise, timesteps))
        >>> loss = sampler.loss(pred, x0, noise, timesteps)
        >>> with sampler.observe(model, x0):
        ...     loss.backward()
        ...     optimizer.step()
        >>> int(sampler.steps)
        1
    """

    name: ClassVar[str] = ""
    default_weighting: ClassVar[str] = "uniform"

    def __init__(
        self,
        scheduler: Any,
        *,
        options: dict[str, Any] | None = None,
        weighting: str | Weighting | None = None,
        weighting_options: dict[str, Any] | None = None,
        stratified: bool = False,
        importance_weighting: bool = False,
        seed: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.objective = DiffusionObjective.from_scheduler(scheduler)
        if isinstance(weighting, Weighting):
            if weighting_options:
                raise ValueError("weighting_options go with a weighting given by name; this one is built already.")
            self.weighting = weighting
        else:
            self.weighting = make_weighting(
                weighting or self.default_weighting, self.objective, **(weighting_options or {})
            )
        shape = tuple(self.weighting.table().shape)
        if shape != (self.num_train_timesteps,):
            raise ValueError(
                f"The weighting {self.weighting.name!r} has weights of shape {shape}, but the scheduler has "
                f"{self.num_train_timesteps} timesteps. Build it for this scheduler."
            )
        self.stratified = stratified
        self.importance_weighting = importance_weighting
        self.draws = Draws(seed)
        self.steps = torch.zeros((), dtype=torch.int64)
        self.dropped = torch.zeros((), dtype=torch.int64)
        self.seconds = 0.0
        self.options = {
            **(options or {}),
            "weighting": self.weighting.name,
            "weighting_options": self.weighting.options,
            "stratified": stratified,
            "importance_weighting": importance_weighting,
            "seed": seed,
        }

    @property
    def num_train_timesteps(self) -> int:
        return self.objective.num_train_timesteps

    def density(self) -> torch.Tensor:
        """`(T,)` float64 probabilities of the timesteps, as the next batch will be drawn."""
        raise NotImplementedError

    def sample(self, x0: torch.Tensor) -> torch.Tensor:
        """`(B,)` int64 timesteps for a batch of clean samples, on their device."""
        if not isinstance(x0, torch.Tensor) or x0.ndim < 2 or len(x0) == 0:
            given = f"shape {tuple(x0.shape)}" if isinstance(x0, torch.Tensor) else type(x0).__name__
            raise ValueError(f"x0 must be a tensor with a batch dimension and at least one sample; got {given}.")
        with self._timed():
            return self._draw(x0).to(x0.device, non_blocking=True)

    def _draw(self, x0: torch.Tensor) -> torch.Tensor:
        return draw_from_table(self.density(), self.draws.uniforms(len(x0), self.stratified))

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor:
        """`(B,)` what the squared error of each sample is multiplied with."""
        check_timesteps(timesteps, self.num_train_timesteps)
        weights = self.weighting.weights(timesteps)
        importance = self._importance(timesteps)
        return weights if importance is None else weights * importance

    def _importance(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        if not self.importance_weighting:
            return None
        return lookup(1 / (self.num_train_timesteps * self.density()), timesteps)

    def loss(self, pred: torch.Tensor, x0: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Scalar training loss; under `torch.no_grad()` (validation) nothing is learned from it."""
        squared_error = self.objective.squared_error(pred, x0, noise, timesteps)
        loss = self.weighting.loss(squared_error, timesteps, self._importance(timesteps))
        if torch.is_grad_enabled():
            with self._timed():
                self._record(timesteps, squared_error.detach())
        return loss

    @contextmanager
    def observe(
        self, model: torch.nn.Module, x0: torch.Tensor, ema: Any = None, **conditioning: Any
    ) -> Iterator[None]:
        """Bracket `backward` and the optimizer step, so that the sampler sees what the step did.

        Free on steps that are not measured. Micro-batches whose gradients only accumulate are not steps: with
        accelerate they are passed over; in a plain loop a measurement waits until the weights have moved.

        Args:
            model: the network as it is trained (DDP, compiled and prepared ones too).
            x0: the batch given to `sample`.
            ema: a `diffusers.training_utils.EMAModel`, for estimators that look at averaged weights.
            conditioning: what the model is called with besides `(x_t, t)`; tensors with a batch dimension, also
                inside dicts, are indexed with the samples.
        """
        if not gradients_are_synchronised():
            yield
            return
        with self._timed():
            watch = StepWatch(model)
            self._before_step(model, x0, ema, conditioning)
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        with self._timed():
            if watch.weights_moved():
                self.steps += 1
                self._after_step(model, ema)
            elif watch.step_was_skipped():
                self._abandon()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add to `seconds`, what the sampler has cost so far (wall-clock; a device's queue is not waited for)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def expected_overhead(self, batch_size: int) -> float:
        """Extra work as a share of a training step, counted in forward passes (a step is three: forward, backward)."""
        return 0.0

    def summary(self) -> dict[str, float]:
        """Numbers worth a curve in a report; a learned sampler adds what it has learned."""
        density = self.density()
        entropy = -torch.xlogy(density, density * len(density)).sum()
        return {"entropy": float(entropy)}

    def _record(self, timesteps: torch.Tensor, squared_error: torch.Tensor) -> None:
        """Take notice of the losses of a training batch."""

    def _before_step(self, model: torch.nn.Module, x0: torch.Tensor, ema: Any, conditioning: dict[str, Any]) -> None:
        """Measure before the optimizer step."""

    def _after_step(self, model: torch.nn.Module, ema: Any) -> None:
        """Measure after it, and learn."""

    def _abandon(self) -> None:
        """Forget a measurement whose step did not happen."""

    def _drop_event(self, reason: str) -> None:
        """Count what could not be used; say so the first time."""
        if self.dropped == 0:
            warnings.warn(
                f"{type(self).__name__}: {reason}; the measurement is dropped and training goes on. "
                "Said once; `sampler.dropped` counts them.",
                stacklevel=4,
            )
        self.dropped += 1

    def _own_state(self) -> dict[str, torch.Tensor]:
        """The subclass's state tensors by name; loading copies into them."""
        return {}

    def _prepare_to_load(self, state: dict[str, torch.Tensor]) -> None:
        """Build what is built lazily, so that `_own_state` has the shapes of `state`."""

    def _state_in_place(self) -> dict[str, torch.Tensor]:
        weighting = {f"weighting.{key}": value for key, value in self.weighting.state_tensors().items()}
        return {"steps": self.steps, "dropped": self.dropped, **weighting, **self._own_state()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything the next draw and the next update depend on, as a flat dict of CPU tensors (copies)."""
        state = {key: value.detach().cpu().clone() for key, value in self._state_in_place().items()}
        return {**state, **self.draws.state_tensors()}

    def published_state(self) -> dict[str, torch.Tensor]:
        """What `save_pretrained` writes: the state, without what should not leave the machine."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `state_dict` gave; on any mismatch nothing is changed."""
        self._prepare_to_load(state)
        mine = self._state_in_place()
        persistence.check_state(state, {**mine, **self.draws.state_tensors()}, type(self).__name__)
        self.draws.load(state["generator"], state["shared_generator"])
        with torch.no_grad():
            for key, value in mine.items():
                value.copy_(state[key])

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Write `config.json` and `sampler.safetensors`; both replace older ones whole or not at all."""
        persistence.save(self, save_directory)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, scheduler: Any = None, **download: Any
    ) -> TimestepSampler:
        """Load a sampler from a folder or a Hub repository (`subfolder=`, `revision=`, `token=`, `cache_dir=`, ...).

        Called on `TimestepSampler` it gives whatever sampler was saved. With no `scheduler` the saved one's is
        rebuilt; a given one must have the same timesteps, betas and prediction type.
        """
        return persistence.load(cls, pretrained_model_name_or_path, scheduler, **download)

    def push_to_hub(self, repo_id: str, **upload: Any) -> str:
        """Upload to a Hub repository (`subfolder=`, `private=`, `token=`, `commit_message=`, ...); returns its URL."""
        return persistence.push(self, repo_id, **upload)


def register_sampler(name: str):
    """Class decorator: make a `TimestepSampler` subclass available by name, in Python, scripts and the CLI.

    Example:
        >>> @register_sampler("first_half")
        ... class FirstHalf(TimestepSampler):
        ...     def density(self):
        ...         return (
        ...             (torch.arange(self.num_train_timesteps) < self.num_train_timesteps / 2)
        ...             .double()
        ...             .div(self.num_train_timesteps / 2)
        ...         )
        >>> _ = _SAMPLERS._entries.pop("first_half")
    """

    def add(cls: type[TimestepSampler]) -> type[TimestepSampler]:
        if not (isinstance(cls, type) and issubclass(cls, TimestepSampler)):
            raise TypeError(f"register_sampler takes a subclass of TimestepSampler, got {cls!r}.")
        _SAMPLERS.register(name)(cls)
        cls.name = name
        return cls

    return add


def sampler_class(name: str) -> type[TimestepSampler]:
    """The class registered under `name`."""
    return _SAMPLERS[name]


def list_samplers() -> list[str]:
    """Names that `make_sampler` takes.

    Example:
        >>> "adaptive" in list_samplers()
        True
    """
    return _SAMPLERS.names()


def sampler_options(name: str) -> list[str]:
    """Options that `make_sampler(name, ...)` takes.

    Example:
        >>> sampler_options("logit_normal")[:2]
        ['mean', 'std']
    """
    hidden = ("scheduler", "options", "common", "kwargs", "args")
    own = accepted_options(_SAMPLERS[name])
    common = accepted_options(TimestepSampler)
    return [option for option in dict.fromkeys([*own, *common]) if option not in hidden]


def make_sampler(name: str, scheduler: Any, **options: Any) -> TimestepSampler:
    """Build a registered sampler around a diffusers scheduler; an unknown option is an error.

    Example:
        >>> from diffusers import DDPMScheduler
        >>> sampler = make_sampler("speed", DDPMScheduler(), version="v1")
        >>> sampler.tau
        642
    """
    cls = _SAMPLERS[name]
    _SAMPLERS.check_options(name, options, sampler_options(name))
    with _SAMPLERS.building(name, options):
        return cls(scheduler, **options)
