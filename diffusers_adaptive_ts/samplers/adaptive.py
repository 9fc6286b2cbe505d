"""Adaptive non-uniform timestep sampling (Kim et al., CVPR 2025, arXiv 2411.09998): learn where to train."""

from __future__ import annotations

from typing import Any

import torch

from .. import ranks
from ..objective import DiffusionObjective
from ..policies import POLICIES, make_policy
from ..policy_gradient import PolicyGradient
from ..probes import ESTIMATORS, ProbeBatch, gradients_are_gone, make_estimator
from ..registry import accepted_options
from .base import TimestepSampler, register_sampler
from .bins import check_share
from .static import edges

# Rows of policy parameters that density() averages over.
_RECENT = 256
_LEARNER_OPTIONS = (
    "learning_rate",
    "entropy_coef",
    "entropy",
    "advantage",
    "max_grad_norm",
    "max_divergence",
    "uniform_floor",
)


@register_sampler("adaptive")
class AdaptiveTimestepSampler(TimestepSampler):
    """A policy draws the timesteps; every `update_every` optimizer steps it is shown what one step changed.

    The model is trained with the plain loss (Algorithm 1, line 5). On a measured step an estimator looks before and
    after the real optimizer step and gives each sample a reward; the policy follows the likelihood-ratio gradient
    `-(A_i log pi(u_i | x0_i)).mean() - entropy_coef H` (Eq. 13) with Adam.

    Args:
        scheduler: the `DDPMScheduler` to wrap.
        in_channels: channels of x0; `None` takes them from the first batch.
        estimator: what is measured; `paper` is Algorithm 2.
        estimator_options: for `paper`: `queue_size`, `num_selected`, `noise`, `reward_reduction`,
            `probe_batch_size`, `selector`.
        policy: `beta` (the paper's network) or `histogram`.
        policy_options: for `beta`: `hidden_channels`, `depth`; for `histogram`: `num_bins`.
        update_every: f_S, optimizer steps between two measured ones.
        learning_rate: of the policy; `None` is its own (beta: 1e-3), or with `advantage="raw"` the paper's 1e-2
            (cosine: 1e-3).
        entropy_coef: strength of the pull towards uniform.
        entropy: `bonus`, or `authors` for the form in their code, whose expected gradient is that of -H^2/2.
        advantage: `normalized` compares a step with the steps before it and divides by their spread; `raw` is the
            paper's reward as it is.
        max_grad_norm: of the policy's gradient.
        max_divergence: how far one update may move the policy (mean KL divergence, nats); `None`, the paper's form,
            lets it go, and with normalised advantages it then oscillates or collapses.
        uniform_floor: share of draws that are uniform whatever the policy says.
        common: `weighting`, `stratified`, `seed`, ... of every sampler.

    Example:
        >>> from diffusers import DDPMScheduler
        >>> sampler = AdaptiveTimestepSampler(DDPMScheduler(), in_channels=3, seed=0)
        >>> sampler.sample(torch.zeros(4, 3, 32, 32)).shape
        torch.Size([4])
        >>> sampler.forwards_per_event(batch_size=100)
        26
    """

    def __init__(
        self,
        scheduler: Any,
        in_channels: int | None = None,
        estimator: str = "paper",
        estimator_options: dict[str, Any] | None = None,
        policy: str = "beta",
        policy_options: dict[str, Any] | None = None,
        update_every: int = 40,
        learning_rate: float | None = None,
        entropy_coef: float = 1e-2,
        entropy: str = "bonus",
        advantage: str = "normalized",
        max_grad_norm: float = 1.0,
        max_divergence: float | None = 5e-4,
        uniform_floor: float = 0.0,
        importance_weighting: bool = False,
        **common: Any,
    ) -> None:
        if importance_weighting:
            raise ValueError(
                "The adaptive sampler chooses the objective with its density; it takes no importance weights."
            )
        if update_every < 1 or max_grad_norm <= 0 or entropy_coef < 0:
            raise ValueError(
                "update_every must be at least 1, max_grad_norm above 0 and entropy_coef at least 0; "
                f"got {update_every}, {max_grad_norm} and {entropy_coef}."
            )
        if entropy not in ("bonus", "authors"):
            raise ValueError(f"entropy must be 'bonus' or 'authors', got {entropy!r}.")
        if advantage not in ("normalized", "raw"):
            raise ValueError(f"advantage must be 'normalized' or 'raw', got {advantage!r}.")
        check_share("adaptive", uniform_floor=uniform_floor)
        DiffusionObjective.from_scheduler(scheduler)  # a scheduler that cannot be used says so first
        if learning_rate is None:
            cosine = scheduler.config.get("beta_schedule") == "squaredcos_cap_v2"
            learning_rate = 1e-2 if advantage == "raw" and not cosine else POLICIES[policy].learning_rate
        if not learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {learning_rate}.")
        if max_divergence is not None and not max_divergence > 0:
            raise ValueError(f"max_divergence must be above 0 or None, got {max_divergence}.")
        ESTIMATORS.check_options(estimator, estimator_options or {}, _options_of(ESTIMATORS[estimator], "objective"))
        POLICIES.check_options(policy, policy_options or {}, _options_of(POLICIES[policy], "in_channels"))
        options = {
            "in_channels": in_channels,
            "estimator": estimator,
            "estimator_options": dict(estimator_options or {}),
            "policy": policy,
            "policy_options": dict(policy_options or {}),
            "update_every": update_every,
            "learning_rate": learning_rate,
            "entropy_coef": entropy_coef,
            "entropy": entropy,
            "advantage": advantage,
            "max_grad_norm": max_grad_norm,
            "max_divergence": max_divergence,
            "uniform_floor": uniform_floor,
        }
        super().__init__(scheduler, options=options, **common)
        self.estimator = make_estimator(estimator, self.objective, **(estimator_options or {}))
        self._drawn: torch.Tensor | None = None
        self._measured_u: torch.Tensor | None = None
        self._measured_x0: torch.Tensor | None = None
        self.policy: torch.nn.Module | None = None
        self._learner: PolicyGradient | None = None
        if in_channels is not None or not POLICIES[policy].looks_at_x0:
            self._build_policy(1 if in_channels is None else in_channels)

    def _build_policy(self, in_channels: int) -> None:
        if POLICIES[self.options["policy"]].looks_at_x0:
            self.options["in_channels"] = in_channels
        # One seed for all: ranks must start alike, even if built before torch.distributed is, and the last layer,
        # which is 0, hides the others. Only the CPU's generator is touched, and put back.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.policy = make_policy(self.options["policy"], in_channels, **self.options["policy_options"])
        self._learner = PolicyGradient(self.policy, **{name: self.options[name] for name in _LEARNER_OPTIONS})
        self._recent = self.policy.typical().detach().repeat(_RECENT, 1)
        self._rows_seen = torch.zeros((), dtype=torch.int64)

    @property
    def events(self) -> torch.Tensor:
        """How many measured steps the policy has learned from."""
        return torch.zeros((), dtype=torch.int64) if self._learner is None else self._learner.events

    def forwards_per_event(self, batch_size: int) -> int:
        """Model calls that one measured step adds on this rank."""
        return self.estimator.forwards_per_event(batch_size)

    def expected_overhead(self, batch_size: int) -> float:
        return self.forwards_per_event(batch_size) / (3 * self.options["update_every"])

    def summary(self) -> dict[str, float]:
        if self.options["policy"] != "beta" or self.policy is None:
            return super().summary()
        a, b = self._recent.double().mean(0).tolist()
        return {**super().summary(), "a": a, "b": b}

    def density(self) -> torch.Tensor:
        """`(T,)` probabilities, averaged over the last samples (on several ranks: the last measured batch)."""
        if self.policy is None:
            self._build_policy_error()
        masses = self.policy.cell_masses(self._recent, edges(self.num_train_timesteps))
        floor = self.options["uniform_floor"]
        return (1 - floor) * masses / masses.sum() + floor / self.num_train_timesteps

    def _build_policy_error(self) -> None:
        raise ValueError(
            "The policy is built with the first batch; give in_channels=... to ask for its density before."
        )

    def _draw(self, x0: torch.Tensor) -> torch.Tensor:
        if self.policy is None:
            self._build_policy(x0.shape[1])
        expected = self.options["in_channels"]
        if self.policy.looks_at_x0 and x0.shape[1] != expected:
            raise ValueError(
                f"The policy was built for {expected} channels, but x0 has shape {tuple(x0.shape)}. "
                f"Give in_channels={x0.shape[1]}."
            )
        self._learner.place(x0.device)
        with torch.no_grad(), torch.autocast(x0.device.type, enabled=False):
            parameters = self.policy(x0).cpu()
        if ranks.world_size() == 1:
            self._remember(parameters)
        u = self.policy.draw(parameters, self.draws.uniforms(len(x0), self.stratified))
        floor = self.options["uniform_floor"]
        if floor > 0:
            uniform = self.draws.uniforms(2 * len(x0))
            u = torch.where(uniform[: len(x0)] < floor, uniform[len(x0) :], u)
        self._drawn = u
        return (u * self.num_train_timesteps).long().clamp(max=self.num_train_timesteps - 1)

    def _remember(self, parameters: torch.Tensor) -> None:
        parameters = parameters[-_RECENT:]
        if self._rows_seen == 0:
            self._recent.copy_(parameters[torch.arange(_RECENT) % len(parameters)])
        self._recent = torch.cat([self._recent[len(parameters) :], parameters])
        self._rows_seen += len(parameters)

    def _remember_all_ranks(self, x0: torch.Tensor) -> None:
        """Take part of every rank's measured batch, so that all ranks describe one density; drawing needs no talk."""
        if ranks.world_size() == 1:
            return
        with torch.no_grad(), torch.autocast(x0.device.type, enabled=False):
            parameters = self.policy(x0)
        share = max(1, _RECENT // ranks.world_size())
        gathered = ranks.gather(parameters[torch.arange(share) % len(parameters)]).cpu()
        self._recent = gathered[torch.arange(_RECENT) % len(gathered)]
        self._rows_seen += len(gathered)

    def _before_step(self, model: torch.nn.Module, x0: torch.Tensor, ema: Any, conditioning: dict[str, Any]) -> None:
        if self.estimator.is_measuring:
            if not gradients_are_gone(model):
                return
            self._abandon()
        if (int(self.steps) + 1) % self.options["update_every"]:
            return
        if self._drawn is None or len(self._drawn) != len(x0):
            drawn = "no" if self._drawn is None else str(len(self._drawn))
            raise ValueError(
                f"observe got {len(x0)} samples, but {drawn} timesteps were drawn by the last sample(x0). "
                "Give observe the same batch."
            )
        if ranks.mean(torch.isfinite(x0).all().float()) < 1:
            self._drop_event("x0 has NaN or infinite values")
            return
        self._measured_u, self._measured_x0 = self._drawn, x0
        self.estimator.begin(model, ProbeBatch(x0, conditioning), self.draws.shared, self.draws.own, ema)

    def _after_step(self, model: torch.nn.Module, ema: Any) -> None:
        if not self.estimator.is_measuring:
            return
        credit = self.estimator.finish(model, self.draws.shared, self.draws.own, ema)
        if credit is None:
            self._drop_event("a probe loss is NaN or infinite")
        else:
            self._learn(self._measured_x0, self._measured_u, credit.per_sample)
            self._remember_all_ranks(self._measured_x0)
        self._measured_u = self._measured_x0 = None

    def _abandon(self) -> None:
        self.estimator.abandon()
        self._measured_u = self._measured_x0 = None

    def _learn(self, x0: torch.Tensor, u: torch.Tensor, rewards: torch.Tensor) -> None:
        if not self._learner.learn(x0, u, rewards):
            self._drop_event("the policy's gradient is NaN or infinite")

    def _own_state(self) -> dict[str, torch.Tensor]:
        state = {f"estimator.{key}": value for key, value in self.estimator.state_tensors().items()}
        if self._learner is None:
            return state
        return {**state, **self._learner.state_tensors(), "recent": self._recent, "rows_seen": self._rows_seen}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        unbuilt = self.policy is None
        try:
            super().load_state_dict(state)
        except ValueError:
            if unbuilt:
                self.policy = self._learner = self.options["in_channels"] = None
            raise

    def _prepare_to_load(self, state: dict[str, torch.Tensor]) -> None:
        first = state.get("policy.features.0.weight")
        if self.policy is None and first is not None and first.ndim == 4:
            self._build_policy(first.shape[1])


def _options_of(entry: Any, *given_by_us: str) -> list[str]:
    return [option for option in accepted_options(entry) if option not in given_by_us]
