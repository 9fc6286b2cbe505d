"""A look at the model: right losses, and no trace of it."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diffusers_adaptive_ts.probes import ProbeBatch, noise_like, predict, squared_errors, undisturbed, unwrapped

CPU = torch.device("cpu")


class TestProbeBatch:
    def test_conditioning_goes_with_its_sample(self):
        Pair = namedtuple("Pair", "left right")
        x0 = torch.arange(4.0)[:, None]
        conditioning = {
            "class_labels": torch.arange(4),
            "added_cond_kwargs": {"text_embeds": torch.arange(8.0).reshape(4, 2), "scale": torch.tensor(3.0)},
            "residuals": [torch.arange(4), (torch.arange(4), "name")],
            "pair": Pair(torch.arange(4), 1),
            "table": torch.arange(7),
            "return_dict": False,
            "nothing": None,
        }
        part = ProbeBatch(x0, conditioning).select(torch.tensor([3, 1, 1]))
        assert part.x0.flatten().tolist() == [3, 1, 1]
        assert len(part) == 3
        assert part.conditioning["class_labels"].tolist() == [3, 1, 1]
        assert part.conditioning["added_cond_kwargs"]["text_embeds"].tolist() == [[6, 7], [2, 3], [2, 3]]
        assert part.conditioning["added_cond_kwargs"]["scale"] == 3
        assert part.conditioning["residuals"][0].tolist() == [3, 1, 1]
        assert part.conditioning["residuals"][1][0].tolist() == [3, 1, 1]
        assert part.conditioning["residuals"][1][1] == "name"
        assert part.conditioning["pair"].left.tolist() == [3, 1, 1]
        assert part.conditioning["pair"].right == 1
        assert part.conditioning["table"].tolist() == list(range(7))
        assert part.conditioning["return_dict"] is False
        assert part.conditioning["nothing"] is None
        assert conditioning["class_labels"].tolist() == [0, 1, 2, 3]

    def test_one_sample_can_be_repeated(self):
        one = ProbeBatch(torch.randn(4, 2), {"y": torch.arange(4)}).select(torch.tensor([2]))
        many = one.select(torch.zeros(6, dtype=torch.int64))
        assert many.x0.shape == (6, 2)
        assert many.conditioning["y"].tolist() == [2] * 6


class TestUnwrapped:
    def test_plain_and_compiled(self, model):
        assert unwrapped(model) is model
        assert unwrapped(torch.compile(model, backend="eager")) is model

    def test_distributed_data_parallel(self, model):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(model)
            assert unwrapped(wrapped) is model
            assert unwrapped(torch.compile(wrapped, backend="eager")) is model
            assert unwrapped(nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))) is model
        finally:
            dist.destroy_process_group()


class TestUndisturbed:
    def test_modes_are_put_back_one_by_one(self, model):
        model.norm.eval()
        before = {name: module.training for name, module in model.named_modules()}
        assert set(before.values()) == {True, False}
        with undisturbed(model, CPU) as network:
            assert network is model
            assert not any(module.training for module in model.modules())
        assert {name: module.training for name, module in model.named_modules()} == before

    def test_also_after_an_error(self, model):
        state = torch.get_rng_state()
        with pytest.raises(KeyError), undisturbed(model, CPU):
            {}[torch.rand(3)]
        assert all(module.training for module in model.modules())
        assert torch.equal(torch.get_rng_state(), state)

    def test_random_numbers_drawn_inside_do_not_count(self, model):
        state = torch.get_rng_state()
        with undisturbed(model, CPU):
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), state)

    def test_buffers_stay_and_dropout_is_off(self, model, x0):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        times = torch.arange(5)
        with undisturbed(model, CPU), torch.no_grad():
            assert torch.equal(model(x0, times), model(x0, times))
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())

    def test_a_model_that_changes_its_weights_in_eval_does_not(self):
        """Some adapters merge their weights when `eval()` is called and take them apart in `train()`."""

        class Merging(nn.Linear):
            def train(self, mode=True):
                self.weight.data.add_(1.0 if not mode else 0.0)
                return super().train(mode)

        model = Merging(2, 2)
        before = model.weight.detach().clone()
        with undisturbed(model, CPU):
            assert not model.training
        assert torch.equal(model.weight, before)

    def test_inside_autocast_the_new_weights_are_seen(self):
        """Autocast keeps the cast weights until its block ends; a look after the step must not find old ones."""
        model, x = nn.Linear(3, 3), torch.randn(2, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)  # fills the cache
            with undisturbed(model, CPU), torch.no_grad():
                before = model(x)
            model(x)  # as gradient checkpointing does in the backward pass
            with torch.no_grad():
                model.weight.add_(1.0)
            with undisturbed(model, CPU), torch.no_grad():
                after = model(x)
            assert (after - before).abs().max() > 0.1
            model(x).float().sum().backward()
        assert model.weight.grad is not None


class TestPredict:
    @pytest.mark.parametrize(
        "wrap", [lambda y: y, lambda y: (y, "more"), lambda y: SimpleNamespace(sample=y), lambda y: [y]]
    )
    def test_reads_every_kind_of_output(self, wrap):
        noisy = torch.randn(2, 3, 4, 4)
        assert torch.equal(predict(lambda x, t: wrap(x * 2), noisy, torch.zeros(2), {}), noisy * 2)

    def test_of_twice_the_channels_the_first_half_counts(self):
        noisy = torch.randn(2, 3, 4, 4)
        both = predict(lambda x, t: torch.cat([x, x + 1], 1), noisy, torch.zeros(2), {})
        assert torch.equal(both, noisy)

    def test_hands_on_timesteps_and_conditioning(self):
        seen = {}

        def model(x, t, **conditioning):
            seen.update(conditioning, t=t)
            return x

        predict(model, torch.randn(2, 3), torch.tensor([4, 5]), {"y": 1})
        assert seen["y"] == 1
        assert seen["t"].tolist() == [4, 5]


def test_noise_is_decided_by_its_seed_alone():
    x0 = torch.zeros(3, 2, 4, 4)
    state = torch.get_rng_state()
    first, again, other = noise_like(x0, 1), noise_like(x0, 1), noise_like(x0, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert noise_like(x0.bfloat16(), 1).dtype == torch.bfloat16
    assert noise_like(torch.zeros(100_000, 1), 3).std() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_squared_errors(any_scheduler, model, x0, chunk_size):
    """Against diffusers' own `add_noise` and target, one sample at a time; one forward per chunk."""
    from diffusers_adaptive_ts import DiffusionObjective

    objective = DiffusionObjective.from_scheduler(any_scheduler)
    noise = noise_like(x0, 0)
    shift = torch.linspace(-1, 1, len(x0))
    index = torch.tensor([0, 1, 1, 4, 3, 2, 0])
    timesteps = torch.tensor([0, 11, 5, 3, 3, 8, 6])
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with undisturbed(model, CPU) as network:
        errors = squared_errors(
            network, objective, ProbeBatch(x0, {"shift": shift}), noise, index, timesteps, chunk_size
        )
    assert len(calls) == -(-len(index) // chunk_size)
    assert errors.dtype == torch.float64
    model.eval()
    for i, t, error in zip(index, timesteps, errors, strict=True):
        x, eps, t = x0[i][None], noise[i][None], t[None]
        targets = {"epsilon": eps, "sample": x, "v_prediction": any_scheduler.get_velocity(x, eps, t)}
        with torch.no_grad():
            pred = model(any_scheduler.add_noise(x, eps, t), t, shift=shift[i][None])
        expected = nn.functional.mse_loss(pred, targets[any_scheduler.config.prediction_type])
        assert float(error) == pytest.approx(float(expected), rel=1e-4)
