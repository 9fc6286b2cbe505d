"""Algorithm 2 against a slow computation of its own: copies of the model, a loop over timesteps, c_t by hand."""

import copy
import math

import pytest
import torch

from diffusers_adaptive_ts import DiffusionObjective
from diffusers_adaptive_ts.probes import (
    SELECTORS,
    LookAhead,
    ProbeBatch,
    make_estimator,
    noise_like,
    stratified_timesteps,
)


def bound_in_bits(model, scheduler, x0, noise, timestep, **conditioning):
    """`c_t mean((eps - eps_theta)^2) / ln 2` of one sample, all in float64 except the network itself."""
    beta, abar = scheduler.betas.double(), scheduler.alphas_cumprod.double()
    sigma2 = beta[timestep] if timestep > 0 else beta[1] * (1 - abar[0]) / (1 - abar[1])
    c = beta[timestep] ** 2 / (2 * sigma2 * (1 - beta[timestep]) * (1 - abar[timestep]))
    t = torch.tensor([timestep])
    x_t = scheduler.add_noise(x0[None], noise[None], t)
    with torch.no_grad():
        output = model.eval()(x_t, t, **conditioning)[0].double()
    signal, spread = abar[timestep].sqrt(), (1 - abar[timestep]).sqrt()
    eps = {
        "epsilon": lambda: output,
        "sample": lambda: (x_t[0] - signal * output) / spread,
        "v_prediction": lambda: signal * output + spread * x_t[0],
    }[scheduler.config.prediction_type]()
    return float(c * (noise.double() - eps).pow(2).mean()) / math.log(2)


class Loop:
    """A model, an optimizer and two generators; `event` measures one step and says what should have come out."""

    def __init__(self, model, scheduler, x0, **options):
        self.model, self.scheduler, self.x0 = model, scheduler, x0
        self.total = scheduler.config.num_train_timesteps
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.estimator = LookAhead(DiffusionObjective.from_scheduler(scheduler), **options)
        self.shared, self.own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        self.shift = torch.linspace(-1, 1, len(x0))
        self.train = torch.Generator().manual_seed(3)

    def step(self):
        times = torch.randint(self.total, (len(self.x0),), generator=self.train)
        noise = torch.randn(self.x0.shape, generator=self.train)
        noisy = self.scheduler.add_noise(self.x0, noise, times)
        self.optimizer.zero_grad()
        (self.model(noisy, times, shift=self.shift) - noise).pow(2).mean().backward()
        self.optimizer.step()

    def event(self):
        batch = ProbeBatch(self.x0, {"shift": self.shift})
        self.estimator.begin(self.model, batch, self.shared, self.own)
        self.step()
        return self.estimator.finish(self.model, self.shared, self.own)

    def event_by_hand(self):
        """Queue row and rewards, from copies of the model before and after and from the generators' next numbers."""
        shared, own = self.shared.clone_state(), self.own.clone_state()
        swept = int(torch.randint(len(self.x0), (1,), generator=shared))
        row_noise = noise_like(self.x0[:1], int(torch.randint(2**31, (), generator=shared)))[0]
        noise = noise_like(self.x0, int(torch.randint(2**31, (), generator=own)))
        selected = self.estimator.selected.tolist()
        before = copy.deepcopy(self.model)
        credit = self.event()
        after = copy.deepcopy(self.model)

        def change(i, eps, t):
            shift = self.shift[i][None]
            losses = [bound_in_bits(net, self.scheduler, self.x0[i], eps, t, shift=shift) for net in (before, after)]
            return losses[0] - losses[1]

        row = [change(swept, row_noise, t) for t in range(self.total)]
        rewards = [sum(change(i, noise[i], t) for t in selected) for i in range(len(self.x0))]
        return credit, torch.tensor(row, dtype=torch.float64), torch.tensor(rewards, dtype=torch.float64)


@pytest.mark.parametrize("probe_batch_size", [None, 3])
def test_rows_and_rewards_equal_a_slow_computation(model, any_scheduler, x0, probe_batch_size):
    """Five events, so that S has been chosen from the queue by then; the tolerance is float32's."""
    loop = Loop(model, any_scheduler, x0, probe_batch_size=probe_batch_size)
    for event in range(5):
        credit, row, rewards = loop.event_by_hand()
        assert row.abs().max() > 1e-3
        torch.testing.assert_close(loop.estimator.queue.rows()[-1], row, rtol=1e-3, atol=2e-5 * float(row.abs().max()))
        torch.testing.assert_close(credit.per_sample, rewards, rtol=1e-3, atol=2e-5 * float(row.abs().max()))
        assert len(loop.estimator.queue) == event + 1


def test_the_mean_over_s_is_the_sum_divided(model, scheduler, x0):
    model.drop.p = 0.0  # the step itself must be the same
    sums, means = (
        Loop(copy.deepcopy(model), scheduler, x0, num_selected=4, reward_reduction=reduction).event().per_sample
        for reduction in ("sum", "mean")
    )
    torch.testing.assert_close(means, sums / 4)


def inputs_of(model):
    """What the model is called with in eval mode: the probes' `(x_t, t)` pairs, in order."""
    seen = []

    def note(module, args):
        if not module.training:
            seen.append((args[0].clone(), args[1].clone()))

    model.register_forward_pre_hook(note)
    return seen


@pytest.mark.parametrize("noise", ["common", "fresh"])
def test_noise_before_and_after(model, scheduler, x0, noise):
    """With common noise both looks see the very same inputs; fresh noise is new in every sample."""
    seen = inputs_of(model)
    loop = Loop(model, scheduler, x0, noise=noise)
    loop.event()
    before, after = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(seen) == loop.estimator.forwards_per_event(len(x0))
    for (x, t), (x_after, t_after) in zip(before, after, strict=True):
        assert torch.equal(t, t_after)
        same = (x == x_after).flatten(1).all(1)
        assert same.all() if noise == "common" else not same.any()


def test_noise_belongs_to_the_sample_not_to_the_timestep(model, scheduler, x0):
    """All timesteps of one sample share its noise, so a row shows differences between timesteps alone."""
    seen = inputs_of(model)
    Loop(model, scheduler, x0).event()
    sweep = seen[:3]
    abar = scheduler.alphas_cumprod
    x = torch.cat([pair[0] for pair in sweep]).double()
    t = torch.cat([pair[1] for pair in sweep])
    assert t.tolist() == list(range(12))
    # Two timesteps give x0 and eps of the swept sample; the others must follow from them.
    a, b = abar.double().sqrt(), (1 - abar.double()).sqrt()
    system = torch.stack([a, b], 1)[[2, 11]]
    clean, eps = torch.linalg.solve(system, x[[2, 11]].flatten(1)).unbind()
    expected = a[:, None] * clean + b[:, None] * eps
    torch.testing.assert_close(x.flatten(1), expected, atol=1e-5, rtol=0)
    assert (x0.flatten(1).double() - clean).abs().amax(1).min() < 1e-5


def test_fresh_noise_gives_other_and_larger_changes(model, scheduler, x0):
    model.drop.p = 0.0
    common, fresh = (
        Loop(copy.deepcopy(model), scheduler, x0, noise=noise).event().per_sample for noise in ("common", "fresh")
    )
    assert not torch.allclose(common, fresh, rtol=0.1)
    assert fresh.std() > common.std()


def test_s_is_stratified_until_three_rows_and_then_one_event_late(model, scheduler, x0, monkeypatch):
    offered = []

    def last_ones(rows, count):
        offered.append(len(rows))
        return torch.arange(count) + len(rows)

    seen = inputs_of(model)
    monkeypatch.setitem(SELECTORS._entries, "last_ones", last_ones)
    loop = Loop(model, scheduler, x0, selector="last_ones")
    used = []
    for _ in range(5):
        seen.clear()
        loop.event()
        used.append(sorted({int(t) for _, times in seen[3:6] for t in times}))
    assert used == [[2, 6, 10], [2, 6, 10], [2, 6, 10], [3, 4, 5], [4, 5, 6]]
    assert offered == [3, 4, 5]
    assert loop.estimator.selected.tolist() == [5, 6, 7]


def test_starts_at_the_middles(objective):
    assert torch.equal(LookAhead(objective).selected, stratified_timesteps(12, 3))
    assert LookAhead(objective).selected.tolist() == [2, 6, 10]


@pytest.mark.parametrize("batch_size", [1, 4, 5, 12, 64])
@pytest.mark.parametrize("chunk", [None, 1, 5, 1000])
@pytest.mark.parametrize("selected", [1, 3, 12])
def test_forwards_are_as_many_as_said(model, scheduler, batch_size, chunk, selected):
    x0 = torch.randn(batch_size, 2, 4, 4)
    loop = Loop(model, scheduler, x0, probe_batch_size=chunk, num_selected=selected)
    seen = inputs_of(model)
    loop.event()
    size = chunk or batch_size
    assert len(seen) == loop.estimator.forwards_per_event(batch_size)
    assert len(seen) == 2 * (math.ceil(12 / size) + math.ceil(selected * batch_size / size))
    assert max(len(x) for x, _ in seen) <= size


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_leaves_no_row(model, scheduler, x0, value):
    loop = Loop(model, scheduler, x0)
    for _ in range(3):
        loop.event()
    rows, selected = loop.estimator.queue.rows().clone(), loop.estimator.selected.clone()
    loop.estimator.begin(model, ProbeBatch(x0), loop.shared, loop.own)
    weight = model.last.weight.detach().clone()
    with torch.no_grad():
        model.last.weight.fill_(value)
    assert loop.estimator.finish(model, loop.shared, loop.own) is None
    assert torch.equal(loop.estimator.queue.rows(), rows)
    assert torch.equal(loop.estimator.selected, selected)
    assert not loop.estimator.is_measuring
    with torch.no_grad():
        model.last.weight.copy_(weight)
    assert loop.event() is not None


def test_abandon_forgets_the_event(model, scheduler, x0):
    loop = Loop(model, scheduler, x0)
    loop.estimator.begin(model, ProbeBatch(x0), loop.shared, loop.own)
    assert loop.estimator.is_measuring
    loop.estimator.abandon()
    assert not loop.estimator.is_measuring
    assert len(loop.estimator.queue) == 0


def test_state_is_the_queue_and_the_selection(model, scheduler, x0):
    loop = Loop(model, scheduler, x0)
    for _ in range(4):
        loop.event()
    other = LookAhead(DiffusionObjective.from_scheduler(scheduler))
    assert set(other.state_tensors()) == {"queue.rows", "queue.pushed", "selected"}
    for key, tensor in other.state_tensors().items():
        tensor.copy_(loop.estimator.state_tensors()[key])
    assert torch.equal(other.selected, loop.estimator.selected)
    assert torch.equal(other.queue.rows(), loop.estimator.queue.rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_selected": 13}, r"num_selected \(\|S\|\) must lie in 1..12, the number of timesteps; got 13"),
        ({"num_selected": 0}, "must lie in 1..12"),
        ({"queue_size": 2}, "at least 3 for an F-statistic, got 2"),
        ({"noise": "new"}, "noise must be 'common' or 'fresh', got 'new'"),
        ({"reward_reduction": "max"}, "must be 'sum' or 'mean', got 'max'"),
        ({"probe_batch_size": 0}, "probe_batch_size must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(objective, options, message):
    with pytest.raises(ValueError, match=message):
        LookAhead(objective, **options)


def test_made_by_name(objective):
    assert isinstance(make_estimator("paper", objective, queue_size=5), LookAhead)
    with pytest.raises(ValueError, match="Did you mean 'paper'"):
        make_estimator("papr", objective)
