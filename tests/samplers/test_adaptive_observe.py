"""`observe` of the adaptive sampler: no trace, exactly the forwards it states, and the cadence of real steps."""

import contextlib

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from diffusers_adaptive_ts import AdaptiveTimestepSampler
from tests.fragile import TOTAL, make_fragile

NEVER = 10**9


class Training:
    """The README's loop on fixed timesteps and noise, so that two runs differ by what the sampler does alone."""

    def __init__(self, scheduler, x0, update_every=1, optimizer="sgd", **options):
        self.scheduler, self.x0, self.model = scheduler, x0, make_fragile()
        self.optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
            "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        }[optimizer](self.model.parameters())
        self.sampler = AdaptiveTimestepSampler(scheduler, 2, update_every=update_every, seed=0, **options)
        self.data = torch.Generator().manual_seed(11)
        self.forwards = 0
        self.model.register_forward_hook(self._count)

    def _count(self, *_):
        self.forwards += 1

    def loss(self):
        assert self.sampler.sample(self.x0).shape == (len(self.x0),)
        timesteps = torch.randint(TOTAL, (len(self.x0),), generator=self.data)
        noise = torch.randn(self.x0.shape, generator=self.data)
        pred = self.model(self.scheduler.add_noise(self.x0, noise, timesteps), timesteps)
        return self.sampler.loss(pred, self.x0, noise, timesteps)

    def step(self):
        """One optimizer step; returns the forwards that the sampler added."""
        loss = self.loss()
        self.optimizer.zero_grad()
        before = self.forwards
        with self.sampler.observe(self.model, self.x0):
            loss.backward()
            self.optimizer.step()
        return self.forwards - before

    def everything(self):
        """All that training depends on and a measurement must not touch."""
        parts = {
            "model": self.model.state_dict(),
            "gradient": {name: parameter.grad for name, parameter in self.model.named_parameters()},
            "mode": {name: torch.tensor(module.training) for name, module in self.model.named_modules()},
            "random": {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.random.get_state()[1].copy())},
            **{f"optimizer {index}": state for index, state in self.optimizer.state_dict()["state"].items()},
        }
        return {f"{part}: {key}": tensor.clone() for part, tensors in parts.items() for key, tensor in tensors.items()}


def differences(first, second):
    assert first.keys() == second.keys()
    return [key for key in first if not torch.equal(first[key], second[key])]


class TestLeavesNoTrace:
    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "fused"])
    @pytest.mark.parametrize("frozen_norm", [False, True])
    def test_training_is_the_same_bit_for_bit(self, short_scheduler, x0, optimizer, frozen_norm):
        """Weights, gradients, buffers, optimizer, modes, random numbers (dropout) after each of six steps."""
        records = []
        for update_every in (1, NEVER):
            torch.manual_seed(5)
            training = Training(short_scheduler, x0, update_every, optimizer)
            if frozen_norm:
                training.model.norm.eval()
            records.append([])
            for _ in range(6):
                training.step()
                records[-1].append(training.everything())
            assert training.sampler.events == (6 if update_every == 1 else 0)
        assert [differences(a, b) for a, b in zip(*records, strict=True)] == [[]] * 6
        assert differences(records[0][0], records[0][5]) != []  # training did change something

    def test_x0_is_left_alone(self, short_scheduler, x0):
        copy = x0.clone()
        training = Training(short_scheduler, x0)
        training.step()
        assert torch.equal(x0, copy)
        assert not x0.requires_grad

    def test_building_a_policy_draws_no_global_random_number(self, short_scheduler, x0):
        state = torch.get_rng_state()
        sampler = AdaptiveTimestepSampler(short_scheduler, seed=0)
        sampler.sample(x0)
        assert torch.equal(torch.get_rng_state(), state)


class TestForwards:
    def test_unmeasured_steps_add_none(self, short_scheduler, x0):
        training = Training(short_scheduler, x0, update_every=3)
        stated = training.sampler.forwards_per_event(len(x0))
        assert [training.step() for _ in range(9)] == [0, 0, stated] * 3
        assert training.sampler.events == 3

    @pytest.mark.parametrize("batch_size", [1, 4, 5, 13])
    @pytest.mark.parametrize("probe_batch_size", [None, 1, 3, 64])
    def test_measured_steps_add_what_is_stated(self, short_scheduler, batch_size, probe_batch_size):
        x0 = torch.randn(batch_size, 2, 4, 4)
        training = Training(short_scheduler, x0, estimator_options={"probe_batch_size": probe_batch_size})
        training.model.norm.eval()  # batch norm refuses single values
        chunk = probe_batch_size or batch_size
        stated = training.sampler.forwards_per_event(batch_size)
        assert stated == 2 * (-(-TOTAL // chunk) + -(-3 * batch_size // chunk))
        assert training.step() == stated

    def test_the_default_is_every_fortieth_step(self, short_scheduler, x0):
        training = Training(
            short_scheduler, x0, update_every=AdaptiveTimestepSampler(short_scheduler).options["update_every"]
        )
        measured = [step for step in range(1, 121) if training.step()]
        assert measured == [40, 80, 120]


class TestCadence:
    @pytest.mark.parametrize("clear_first", [True, False])
    def test_plain_accumulation(self, short_scheduler, x0, clear_first):
        """Three micro-batches to a step; a measurement waits until the weights have moved."""
        training = Training(short_scheduler, x0, update_every=2)
        stated = training.sampler.forwards_per_event(len(x0))
        added = []
        for _ in range(4):
            if clear_first:
                training.optimizer.zero_grad()
            for micro in range(3):
                loss = training.loss()
                before = training.forwards
                with training.sampler.observe(training.model, x0):
                    loss.backward()
                    if micro == 2:
                        training.optimizer.step()
                        if not clear_first:
                            training.optimizer.zero_grad()
                added.append(training.forwards - before)
        assert training.sampler.steps == 4
        assert training.sampler.events == 2
        half = stated // 2
        assert added == [0, 0, 0, half, 0, half] * 2

    def test_accumulation_rewards_the_micro_batch_that_was_measured(self, short_scheduler, x0):
        training = Training(short_scheduler, x0)
        learned = []
        training.sampler._learn = lambda x0, u, rewards: learned.append((x0, u))
        loss = training.loss()
        measured = training.sampler._drawn
        with training.sampler.observe(training.model, x0):
            loss.backward()
        other = x0[:3] + 1
        training.sampler.sample(other)
        with training.sampler.observe(training.model, other):
            training.optimizer.step()
        assert len(learned) == 1
        assert learned[0][0] is x0
        assert torch.equal(learned[0][1], measured)

    def test_accelerate_accumulation(self, short_scheduler, x0):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        training = Training(short_scheduler, x0, update_every=2)
        model, optimizer = accelerator.prepare(training.model, training.optimizer)
        stated = training.sampler.forwards_per_event(len(x0))
        added = []
        for _ in range(12):
            with accelerator.accumulate(model):
                loss = training.loss()
                before = training.forwards
                with training.sampler.observe(model, x0):
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                added.append(training.forwards - before)
        assert training.sampler.steps == 4
        assert training.sampler.events == 2
        assert added == [0, 0, 0, 0, 0, stated] * 2

    @pytest.mark.parametrize("optimizer", ["sgd", "fused"])
    @pytest.mark.parametrize("clear", ["inside", "before", "not to None"])
    def test_a_skipped_step_drops_the_event(self, short_scheduler, x0, optimizer, clear):
        """A scaler that sees an overflow does not step. Gradients go inside `observe`, or before the next step."""
        training = Training(short_scheduler, x0, optimizer=optimizer)
        sampler, scaler = training.sampler, torch.amp.GradScaler("cpu", init_scale=4.0)
        counts = []
        for overflow in (False, True, True, False, False):
            loss = training.loss() * (torch.inf if overflow else 1.0)
            if clear != "inside":
                training.optimizer.zero_grad(set_to_none=clear == "before")
            with sampler.observe(training.model, x0):
                scaler.scale(loss).backward()
                scaler.step(training.optimizer)
                scaler.update()
                if clear == "inside":
                    training.optimizer.zero_grad()
            counts.append((int(sampler.steps), int(sampler.events)))
            assert all(parameter.isfinite().all() for parameter in training.model.parameters())
        assert counts == [(1, 1), (1, 1), (1, 1), (2, 2), (3, 3)]
        assert sampler.dropped == 0

    def test_accelerate_skipped_step(self, short_scheduler, x0):
        Accelerator(cpu=True)
        training = Training(short_scheduler, x0)
        training.loss().backward()
        with training.sampler.observe(training.model, x0):
            pass
        assert not training.sampler.estimator.is_measuring
        assert (int(training.sampler.steps), int(training.sampler.events)) == (0, 0)
        training.step()
        assert (int(training.sampler.steps), int(training.sampler.events)) == (1, 1)

    def test_an_error_inside_leaves_the_sampler_usable(self, short_scheduler, x0):
        training = Training(short_scheduler, x0)
        training.step()
        training.loss()
        with contextlib.suppress(KeyboardInterrupt), training.sampler.observe(training.model, x0):
            raise KeyboardInterrupt
        assert not training.sampler.estimator.is_measuring
        assert training.sampler.steps == 1
        assert training.step() == training.sampler.forwards_per_event(len(x0))
        assert training.sampler.events == 2

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_an_error_in_the_probe_leaves_the_sampler_usable(self, short_scheduler, x0, when):
        training = Training(short_scheduler, x0)
        half = training.sampler.forwards_per_event(len(x0)) // 2
        loss, failing_call = training.loss(), training.forwards + 1 + (half if when == "after" else 0)

        def fail(*_):
            if training.forwards == failing_call:
                raise MemoryError

        hook = training.model.register_forward_hook(fail)
        loss.backward()
        with pytest.raises(MemoryError), training.sampler.observe(training.model, x0):
            training.optimizer.step()
        hook.remove()
        assert all(module.training for module in training.model.modules())
        assert not training.sampler.estimator.is_measuring
        training.step()
        assert training.sampler.events == 1

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "fused"])
    def test_every_optimizer_counts(self, short_scheduler, x0, optimizer):
        training = Training(short_scheduler, x0, update_every=2, optimizer=optimizer)
        for _ in range(4):
            training.step()
        assert (int(training.sampler.steps), int(training.sampler.events)) == (4, 2)


class TestBadData:
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_x0_that_is_not_finite(self, short_scheduler, x0, value):
        training = Training(short_scheduler, x0)
        training.step()
        state = {key: tensor for key, tensor in training.sampler.state_dict().items() if "policy" in key}
        broken = x0.clone()
        broken[2, 0, 0, 0] = value
        training.sampler.sample(broken)
        training.x0, good = broken, x0
        # The step itself is of a good batch: a trainer that masks bad losses.
        with pytest.warns(UserWarning, match="x0 has NaN or infinite values; the measurement is dropped"):
            self._observe(training, broken)
        self._observe(training, broken)  # said once: a second warning would be an error here
        assert training.sampler.dropped == 2
        assert training.sampler.steps == 3
        assert training.sampler.events == 1
        after = training.sampler.state_dict()
        assert [key for key in state if not torch.equal(state[key], after[key])] == []
        training.x0 = good
        training.step()
        assert (int(training.sampler.events), int(training.sampler.steps)) == (2, 4)

    @staticmethod
    def _observe(training, x0):
        training.optimizer.zero_grad()
        with training.sampler.observe(training.model, x0):
            for parameter in training.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            training.optimizer.step()

    def test_a_probe_loss_that_is_not_finite(self, short_scheduler, x0):
        training = Training(short_scheduler, x0)
        training.step()
        good = {name: value.clone() for name, value in training.model.state_dict().items()}
        before = training.sampler.state_dict()
        with pytest.warns(UserWarning, match="a probe loss is NaN or infinite"):
            self._ruin(training)
        training.model.load_state_dict(good)
        self._ruin(training)
        assert training.sampler.dropped == 2
        assert training.sampler.events == 1
        after = training.sampler.state_dict()
        unchanged = [key for key in before if key.startswith(("policy", "estimator", "reward"))]
        assert [key for key in unchanged if not torch.equal(before[key], after[key])] == []
        training.model.load_state_dict(good)
        training.step()
        assert training.sampler.events == 2
        assert training.sampler.density().isfinite().all()

    @staticmethod
    def _ruin(training):
        training.loss()
        with training.sampler.observe(training.model, training.x0), torch.no_grad():
            training.model.last.weight.fill_(torch.nan)

    def test_rewards_too_large_for_the_policy(self, short_scheduler, x0):
        """A diverging model changes its loss by more than float32 holds; a raw reward would ruin the policy."""
        training = Training(short_scheduler, x0, advantage="raw", max_divergence=None)
        training.sampler.sample(x0)
        before = training.sampler.state_dict()
        with pytest.warns(UserWarning, match="policy's gradient is NaN or infinite"):
            training.sampler._learn(x0, training.sampler._drawn, torch.full((5,), 1e300, dtype=torch.float64))
        assert training.sampler.dropped == 1
        after = training.sampler.state_dict()
        assert [key for key in before if key != "dropped" and not torch.equal(before[key], after[key])] == []


class TestMisuse:
    def test_observe_without_sample(self, short_scheduler, x0):
        training = Training(short_scheduler, x0)
        with pytest.raises(ValueError, match="no timesteps were drawn by the last sample"):
            with training.sampler.observe(training.model, x0):
                pass

    def test_observe_with_another_batch(self, short_scheduler, x0):
        training = Training(short_scheduler, x0)
        training.sampler.sample(x0)
        with pytest.raises(ValueError, match=r"observe got 3 samples, but 5 timesteps .* Give observe the same batch"):
            with training.sampler.observe(training.model, x0[:3]):
                pass
        training.step()
        assert training.sampler.events == 1
