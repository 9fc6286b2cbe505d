"""The adaptive sampler with what people train: diffusers' UNets, accelerate, autocast, compiled models, any data."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel, UNet2DModel
from torch import nn

from diffusers_adaptive_ts import AdaptiveTimestepSampler
from tests.fragile import TOTAL

SHAPES = [(1, 28, 28), (3, 32, 32), (4, 32, 32), (16, 1, 1), (7,), (3, 9), (2, 3, 6, 6)]


def train(model, sampler, x0, steps=2, backward=torch.Tensor.backward, optimizer=None, **conditioning):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        noise, timesteps = torch.randn_like(x0), sampler.sample(x0)
        output = model(sampler.scheduler.add_noise(x0, noise, timesteps), timesteps, **conditioning)
        if not isinstance(output, torch.Tensor):
            output = output.sample if hasattr(output, "sample") else output[0]
        loss = sampler.loss(output[:, : x0.shape[1]], x0, noise, timesteps)
        with sampler.observe(model, x0, **conditioning):
            backward(loss)
            optimizer.step()
        optimizer.zero_grad()
    return sampler


def changes(sampler):
    """The queue's rows: what the sampler saw the steps do."""
    return sampler.estimator.queue.rows()


def assert_learned(sampler, events=2):
    assert (int(sampler.events), int(sampler.dropped)) == (events, 0)
    assert changes(sampler).shape == (events, sampler.num_train_timesteps)
    assert (changes(sampler).abs().amax(1) > 0).all()
    assert sampler.density().sum() == pytest.approx(1)


@pytest.fixture
def sampler(short_scheduler):
    return AdaptiveTimestepSampler(short_scheduler, update_every=1, seed=0)


class PerChannel(nn.Module):
    """A trainable scale of each channel, for data of any rank; `wrap` is what it returns."""

    def __init__(self, channels, wrap=lambda y: y):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.wrap = wrap

    def forward(self, x, timesteps):
        return self.wrap(x * self.scale.reshape(1, -1, *[1] * (x.ndim - 2)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("policy", ["beta", "histogram"])
def test_any_shape(short_scheduler, shape, policy):
    sampler = AdaptiveTimestepSampler(short_scheduler, policy=policy, update_every=1, seed=0)
    assert_learned(train(PerChannel(shape[0]), sampler, torch.randn(4, *shape)))


@pytest.mark.parametrize(
    "wrap",
    [lambda y: y, lambda y: (y,), lambda y: SimpleNamespace(sample=y), lambda y: torch.cat([y, y * 0], 1)],
    ids=["tensor", "tuple", "output", "with variance"],
)
def test_any_output(sampler, wrap):
    assert_learned(train(PerChannel(3, wrap), sampler, torch.randn(4, 3, 8, 8)))


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_any_prediction_type(prediction_type, zero_snr):
    scheduler = DDPMScheduler(TOTAL, beta_end=0.5, prediction_type=prediction_type, rescale_betas_zero_snr=zero_snr)
    sampler = AdaptiveTimestepSampler(scheduler, update_every=1, seed=0)
    train(PerChannel(3), sampler, torch.randn(4, 3, 8, 8))
    assert_learned(sampler)
    assert changes(sampler).isfinite().all()


def tiny_unet(**options):
    return UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        **options,
    )


def test_unet_with_class_labels(sampler):
    model = tiny_unet(num_class_embeds=5)
    assert_learned(train(model, sampler, torch.randn(4, 3, 8, 8), class_labels=torch.tensor([0, 4, 2, 2])))


def test_unet_with_text(sampler):
    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 8),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=6,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    text = torch.randn(4, 7, 6)
    x0 = torch.randn(4, 4, 8, 8)
    assert_learned(train(model, sampler, x0, encoder_hidden_states=text, return_dict=False))


def test_conditioning_is_indexed_with_the_samples(sampler):
    """Each sample is a constant of 1000 times its label, so that every noisy input shows whose it is."""

    class Recording(PerChannel):
        def forward(self, x, timesteps, class_labels, added_cond_kwargs, scale):
            if not self.training:
                seen.append((x, timesteps, class_labels, added_cond_kwargs["text"], scale))
            return super().forward(x, timesteps)

    seen = []
    labels = torch.tensor([3, 1, 4, 2, 5])
    x0 = 1000.0 * labels[:, None, None, None].expand(-1, 2, 4, 4)
    added = {"text": labels[:, None, None].expand(-1, 7, 6).float()}
    train(Recording(2), sampler, x0, 3, class_labels=labels, added_cond_kwargs=added, scale=torch.tensor(0.5))
    assert len(seen) == 3 * sampler.forwards_per_event(5)
    for x, timesteps, own, text, scale in seen:
        signal = sampler.scheduler.alphas_cumprod[timesteps].sqrt()
        whose = (x.flatten(1).mean(1) / signal / 1000).round().long()
        assert torch.equal(whose, own)
        assert torch.equal(text[:, 0, 0].long(), own)
        assert text.shape[1:] == (7, 6)
        assert scale == 0.5
    swept = {int(own[0]) for _, _, own, _, _ in seen[:3]}
    assert len(swept) == 1  # the sweep is of one sample
    batch = torch.cat([own for _, _, own, _, _ in seen[3:6]])
    assert torch.equal(batch, labels.repeat(3))


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate(sampler, mixed_precision):
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model = tiny_unet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert_learned(train(model, sampler, torch.randn(4, 3, 8, 8), 2, accelerator.backward, optimizer))


@pytest.mark.parametrize("around", ["forward", "everything"])
def test_bf16_autocast(sampler, around):
    """Also when a loop's autocast spans the step: the look after it must see the new weights, not cached casts."""
    model, x0 = tiny_unet(), torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step(with_step):
        noise, timesteps = torch.randn_like(x0), sampler.sample(x0)
        loss = sampler.loss(
            model(sampler.scheduler.add_noise(x0, noise, timesteps), timesteps).sample, x0, noise, timesteps
        )
        return with_step(loss)

    def observed(loss):
        with sampler.observe(model, x0):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = step(lambda loss: loss)
            if around == "everything":
                observed(loss)
        if around == "forward":
            observed(loss)
    assert_learned(sampler)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(moved)


def test_model_in_bfloat16(sampler):
    model = PerChannel(3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # smaller steps are lost in the weights' rounding
    assert_learned(train(model, sampler, torch.randn(4, 3, 8, 8).bfloat16(), optimizer=optimizer))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_model(sampler, backend, in_place):
    class WithTime(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x, timesteps):
            return self.inner(x) * (timesteps[:, None, None, None] + 1.0)

    torch.compiler.reset()
    model = WithTime()
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    assert_learned(train(model, sampler, torch.randn(4, 3, 8, 8)))
    torch.compiler.reset()


def test_frozen_and_unused_parameters(sampler):
    """LoRA-like: most weights frozen, one never used."""
    model = PerChannel(3)
    model.frozen = nn.Linear(4, 4).requires_grad_(False)
    model.unused = nn.Parameter(torch.zeros(2))
    assert_learned(train(model, sampler, torch.randn(4, 3, 8, 8)))
