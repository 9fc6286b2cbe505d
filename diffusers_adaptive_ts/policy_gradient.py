"""How a policy learns from rewards: the likelihood-ratio gradient, with a baseline and a bound on each step."""

from __future__ import annotations

import warnings

import torch

from . import ranks
from .optimizer_state import adam_with_state, optimizer_tensors

_COLLAPSED_ENTROPY = -2.5
# The running mean and spread of the rewards forget at this rate per event.
_REWARD_MEMORY = 0.9
_LARGEST_ADVANTAGE = 3.0
_MOST_BACKTRACKS = 10


class PolicyGradient:
    """Moves a policy along `(A_i grad log pi(u_i | x0_i)).mean() + entropy_coef grad H` (Eq. 13), alike on all ranks.

    The options are those of `AdaptiveTimestepSampler`.
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        *,
        learning_rate: float,
        entropy_coef: float,
        entropy: str,
        advantage: str,
        max_grad_norm: float,
        max_divergence: float | None,
        uniform_floor: float,
    ) -> None:
        self.policy = policy
        self._optimizer = adam_with_state(policy.parameters(), learning_rate)
        self._entropy_coef, self._entropy_form, self._advantage_form = entropy_coef, entropy, advantage
        self._max_grad_norm, self._max_divergence, self._floor = max_grad_norm, max_divergence, uniform_floor
        self.events = torch.zeros((), dtype=torch.int64)
        self._reward_mean = torch.zeros((), dtype=torch.float64)
        self._reward_variance = torch.zeros((), dtype=torch.float64)
        self._warned_of_collapse = False

    def place(self, device: torch.device) -> None:
        """Move policy and moments to where the samples are."""
        parameters = list(self.policy.parameters())
        if parameters[0].device == device:
            return
        self.policy.to(device)
        for parameter in parameters:
            moments = self._optimizer.state[parameter]
            moments.update({key: moments[key].to(device) for key in ("exp_avg", "exp_avg_sq")})

    def learn(self, x0: torch.Tensor, u: torch.Tensor, rewards: torch.Tensor) -> bool:
        """One step from `(B,)` draws and their rewards; False, nothing changed, when the gradient is not finite."""
        advantages = self.advantages(rewards, x0.device)
        with torch.enable_grad(), torch.autocast(x0.device.type, enabled=False):
            parameters = self.policy(x0)
            log_prob = self.policy.log_prob(parameters, u.to(parameters))
            if self._floor > 0:  # u came from the mixture
                log_prob = ((1 - self._floor) * log_prob.exp() + self._floor).log()
            entropy = self.policy.entropy(parameters)
            if self._entropy_form == "authors":
                loss = -((advantages.to(log_prob) + self._entropy_coef * entropy) * log_prob).mean()
            else:
                loss = -(advantages.to(log_prob) * log_prob).mean() - self._entropy_coef * entropy.mean()
            self._optimizer.zero_grad()
            loss.backward()
        for parameter in self.policy.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(ranks.mean(parameter.grad))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._max_grad_norm)
        if not torch.isfinite(norm):
            return False
        self._step_within_trust(x0, parameters.detach())
        self.events += 1
        self._warn_of_collapse(float(entropy.detach().mean()))
        return True

    def advantages(self, rewards: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`(B,)` the rewards themselves, or how much better this step was than the steps before it.

        One update is shared by the whole batch, so nearly all of the signal lies *between* steps: the normalised form
        gives every sample the batch's mean reward, less the running mean and divided by the running spread of the
        steps before.
        """
        if self._advantage_form == "raw":
            return rewards
        reward = float(ranks.mean(rewards.mean().to(device)))
        known = int(self.events) >= 2
        mean, spread = float(self._reward_mean), float(self._reward_variance) ** 0.5
        advantage = (reward - mean) / spread if known and spread > 0 else 0.0
        keep = min(int(self.events) / (int(self.events) + 1), _REWARD_MEMORY)
        self._reward_variance.copy_(keep * (self._reward_variance + (1 - keep) * (reward - mean) ** 2))
        self._reward_mean.copy_(keep * self._reward_mean + (1 - keep) * reward)
        return torch.full_like(rewards, max(-_LARGEST_ADVANTAGE, min(_LARGEST_ADVANTAGE, advantage)))

    def _step_within_trust(self, x0: torch.Tensor, before: torch.Tensor) -> None:
        """Step, then go back along the step until the policy has moved by at most `max_divergence` on this batch."""
        limit = self._max_divergence
        weights = [parameter.detach().clone() for parameter in self.policy.parameters()]
        self._optimizer.step()
        if limit is None:
            return
        with torch.no_grad(), torch.autocast(x0.device.type, enabled=False):
            for _ in range(_MOST_BACKTRACKS):
                moved = float(ranks.mean(self.policy.divergence(before, self.policy(x0)).mean()))
                if moved <= limit:
                    return
                # The divergence is quadratic in a small step; the 0.9 ends the search when it is not.
                shrink = 0.9 * min(1.0, (limit / moved) ** 0.5)
                for parameter, old in zip(self.policy.parameters(), weights, strict=True):
                    parameter.lerp_(old, 1 - shrink)
            for parameter, old in zip(self.policy.parameters(), weights, strict=True):
                parameter.copy_(old)

    def _warn_of_collapse(self, entropy: float) -> None:
        if entropy < _COLLAPSED_ENTROPY and not self._warned_of_collapse:
            self._warned_of_collapse = True
            warnings.warn(
                f"The timestep policy has collapsed (entropy {entropy:.2f} nats, uniform 0): it draws few timesteps "
                "only. Raise entropy_coef or uniform_floor, or lower learning_rate.",
                stacklevel=6,
            )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Policy, moments and baseline by name; loading copies into them."""
        policy = {f"policy.{key}": value for key, value in self.policy.state_dict(keep_vars=True).items()}
        learned = {f"policy_{key}": value for key, value in optimizer_tensors(self._optimizer).items()}
        baseline = {"reward_mean": self._reward_mean, "reward_variance": self._reward_variance}
        return {"events": self.events, **baseline, **policy, **learned}
