"""The training loop: one for every script, family and sampler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import tqdm

from .checkpoints import remove_oldest, write_checkpoint
from .outputs import Outputs
from .randomness import derived_seed, generator
from .run import Run
from .run_state import save_run


def train(run: Run, outputs: Outputs, loss_window: torch.Tensor | None = None) -> None:
    """Train from `run.step` to `run.max_train_steps`.

    Everything random in a step is a function of seed, rank and step, or part of the checkpoint, so a run that was
    stopped and resumed is the run that was not.

    Args:
        loss_window: sum and count of the losses since the last log row, from a checkpoint.
    """
    args, accelerator = run.args, run.accelerator
    window = torch.zeros(2, dtype=torch.float64) if loss_window is None else loss_window
    window = window.to(accelerator.device, torch.float32 if accelerator.device.type == "mps" else torch.float64)
    clock = _Clock(run)
    bar = tqdm(
        total=run.max_train_steps, initial=run.step, desc="training", disable=not accelerator.is_local_main_process
    )
    if run.step == 0:
        outputs.validate(clock.minutes())
        outputs.density(clock.minutes())
    batches = run.stream.batches(start=run.step * args.gradient_accumulation_steps)
    run.model.train()
    if run.step >= run.max_train_steps:
        outputs.pipeline()
    while run.step < run.max_train_steps:
        window += _optimizer_step(run, batches)
        run.step += 1
        bar.update(1)
        clock.tick()
        last = run.step == run.max_train_steps
        if run.step % args.logging_steps == 0 or last:
            loss, values = _mean_loss(run, window), clock.rates()
            window.zero_()
            bar.set_postfix(loss=f"{loss:.4f}", overhead=f"{100 * values['sampler_overhead']:.1f}%")
            learning_rate = run.lr_scheduler.get_last_lr()[0]
            decay = {"ema_decay": run.ema.cur_decay_value} if run.ema is not None else {}
            outputs.scalars(clock.minutes(), loss=loss, lr=learning_rate, **values, **decay)
        with clock.paused():
            if args.validation_steps and (run.step % args.validation_steps == 0 or last):
                outputs.validate(clock.minutes())
            if run.step % _density_every(run) == 0 or last:
                outputs.density(clock.minutes())
            if _epoch_ends(run, args.save_model_epochs) or last:
                outputs.pipeline()  # before the pictures, which can fail for lack of memory
            if _epoch_ends(run, args.save_images_epochs) or last:
                outputs.samples(clock.minutes())
            if run.step % args.checkpointing_steps == 0:
                checkpoint(run, clock.minutes(), window)
    bar.close()
    outputs.report()


def _optimizer_step(run: Run, batches: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
    """One optimizer step over all its micro-batches; returns sum and count of their losses."""
    args, accelerator = run.args, run.accelerator
    losses = torch.zeros(2, dtype=torch.float32, device=accelerator.device)
    for part in range(args.gradient_accumulation_steps):
        counters = (run.seed, "step", run.step, part, accelerator.process_index)
        torch.manual_seed(derived_seed(*counters))
        drawing = generator(*counters, "data")
        batch = next(batches)
        x0 = run.family.clean_samples(batch, drawing, accelerator.device)
        conditioning = run.family.conditioning(batch, drawing, accelerator.device)
        noise, added = run.noise.draw(x0)
        timesteps = run.sampler.sample(x0)
        with accelerator.accumulate(run.model):
            noise, added = run.noise.rectified(
                run.model, run.sampler.objective, x0, noise, added, timesteps, conditioning
            )
            pred = run.model(run.scheduler.add_noise(x0, added, timesteps), timesteps, **conditioning).sample
            loss = run.sampler.loss(pred, x0, noise, timesteps)
            with run.sampler.observe(run.model, x0, ema=run.ema, **conditioning):
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(run.model.parameters(), args.max_grad_norm)
                run.optimizer.step()
                run.optimizer.zero_grad()
        losses += torch.stack([loss.detach().float(), torch.ones_like(losses[0])])
    if not accelerator.optimizer_step_was_skipped:
        run.lr_scheduler.step()
    if run.ema is not None:
        run.ema.to(accelerator.device)
        run.ema.step(run.bare_model.parameters())
        run.ema.to(run.ema_device)
    return losses


def checkpoint(run: Run, minutes: float, window: torch.Tensor) -> None:
    """Write `checkpoint-<step>` and remove the oldest beyond the limit."""
    write_checkpoint(run.folder, run.step, run.accelerator, lambda folder: save_run(run, folder, minutes, window))
    if run.accelerator.is_main_process:
        remove_oldest(run.folder, run.args.checkpoints_total_limit)


def _mean_loss(run: Run, window: torch.Tensor) -> float:
    total, count = run.accelerator.reduce(window, reduction="sum").tolist()
    return total / count


def _epoch_ends(run: Run, every: int | None) -> bool:
    """Whether this step ends an epoch that is asked for: the first, then every so many, as upstream; None: never."""
    if every is None:
        return False
    if run.steps_in_epoch is None:  # a stream has no epochs that could be counted
        return run.step % run.args.checkpointing_steps == 0
    if run.step % run.steps_in_epoch:
        return False
    return (run.step // run.steps_in_epoch - 1) % every == 0


def _density_every(run: Run) -> int:
    return max(run.args.logging_steps, run.max_train_steps // 100)


class _Clock:
    """Minutes of the run (resumed ones included) and rates of the training steps alone."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._start = time.perf_counter()
        self._mark, self._steps, self._idle = self._start, 0, 0.0
        self._sampler_seconds = run.sampler.seconds

    def minutes(self) -> float:
        return self._run.minutes_before + (time.perf_counter() - self._start) / 60

    def tick(self) -> None:
        self._steps += 1

    def rates(self) -> dict[str, float]:
        """Steps per second and the sampler's share of their time since the last call."""
        seconds = time.perf_counter() - self._mark - self._idle
        spent = self._run.sampler.seconds - self._sampler_seconds
        rates = {"steps_per_second": self._steps / seconds, "sampler_overhead": spent / seconds}
        self._mark, self._steps, self._idle = time.perf_counter(), 0, 0.0
        self._sampler_seconds = self._run.sampler.seconds
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not training and does not count in the rates."""
        start = time.perf_counter()
        yield
        self._idle += time.perf_counter() - start
