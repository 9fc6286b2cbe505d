"""What a run leaves behind: validation losses, density rows, sample grids, the pipeline, the sampler, the report."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from diffusers.utils import make_image_grid
from PIL import Image, ImageOps

from ..averaged import averaged_weights
from ..samplers.bins import time_bins
from .log import read_log
from .report import write_report
from .run import Run
from .trackers import track_picture

logger = get_logger(__name__)

# The report is drawn at most this often while training runs.
_SECONDS_BETWEEN_REPORTS = 30.0
_SMALLEST_TILE = 64
# Each validation loss and the name of its share of step 0's.
_RELATIVE = {"simple": "simple_relative", "vlb_bits": "vlb_relative"}


class Outputs:
    """Writes to log, trackers and disk; only the main process does, apart from the validation all ranks share."""

    def __init__(self, run: Run, tracker_name: str) -> None:
        self.run = run
        self._report_time = 0.0
        self._first: dict[str, Any] | None = None
        if run.args.logger != "none":
            run.accelerator.init_trackers(tracker_name)

    def scalars(self, minutes: float, **values: float) -> None:
        self.run.log.write("train", step=self.run.step, minutes=minutes, **values)
        self.run.accelerator.log(values, step=self.run.step)

    def validate(self, minutes: float) -> None:
        """The stable validation loss, on averaged weights where there are any."""
        run = self.run
        if run.validation is None:
            return
        with averaged_weights(run.bare_model, run.ema):
            result = run.validation.measure(run.model, run.accelerator.device)
        result = with_relative(result, self._first_validation() or result)
        run.log.write("validation", step=run.step, minutes=minutes, **result)
        run.accelerator.log(_scalars(result), step=run.step)
        self.report(at_once=False)

    def _first_validation(self) -> dict[str, Any] | None:
        """Step 0's losses, also after a resume: they stand in the log."""
        if self._first is None and self.run.accelerator.is_main_process:
            rows = self._logged("validation")
            self._first = rows[0] if rows else None
        return self._first

    def _logged(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_log(self.run.log.path) if row["kind"] == kind]

    def density(self, minutes: float) -> None:
        sampler = self.run.sampler
        density = sampler.density()
        bins = time_bins(len(density), 100)
        shares = torch.zeros(int(bins.max()) + 1, dtype=torch.float64).index_add_(0, bins, density)
        summary = sampler.summary()
        entropy = summary.pop("entropy")
        self.run.log.write(
            "density", step=self.run.step, minutes=minutes, density=shares.tolist(), entropy=entropy, policy=summary
        )
        values = {f"sampler/{key}": value for key, value in {"entropy": entropy, **summary}.items()}
        self.run.accelerator.log(values, step=self.run.step)

    def samples(self, minutes: float) -> None:
        """A grid from the same noise every time, to disk and the trackers; the density map to these alone."""
        run, args = self.run, self.run.args
        run.accelerator.wait_for_everyone()
        if run.accelerator.is_main_process and run.accelerator.trackers:
            self._track_density()
        if run.accelerator.is_main_process and args.eval_batch_size > 0:
            with averaged_weights(run.bare_model, run.ema):
                images = run.family.generate(
                    run.bare_model,
                    run.scheduler,
                    args.eval_batch_size,
                    seed=0,
                    num_inference_steps=args.ddpm_num_inference_steps,
                    batch_size=args.eval_batch_size,
                )
            grid = sample_grid(images)
            name = f"samples/step-{run.step:08d}.png"
            (run.folder / "samples").mkdir(exist_ok=True)
            grid.save(run.folder / name)
            grid.save(run.folder / "samples.png")
            run.log.write("samples", step=run.step, minutes=minutes, file=name)
            track_picture(run.accelerator, "samples", grid, run.step)
            self.report(at_once=False)
        run.accelerator.wait_for_everyone()

    def _track_density(self) -> None:
        from .density_map import density_map  # matplotlib is slow to import, and only trackers need the picture

        rows = self._logged("density")
        if rows:
            picture = density_map(rows, self.run.scheduler.config.num_train_timesteps)
            track_picture(self.run.accelerator, "sampler/density", picture, self.run.step)

    def pipeline(self) -> None:
        """The plain diffusers pipeline and, beside it, the sampler; each part replaces the old one whole."""
        run = self.run
        if run.accelerator.is_main_process:
            with tempfile.TemporaryDirectory(dir=run.folder, prefix=".pipeline.") as partial:
                with averaged_weights(run.bare_model, run.ema):
                    run.family.save_pipeline(run.bare_model, run.scheduler, Path(partial))
                run.sampler.save_pretrained(Path(partial) / "timestep_sampler")
                for part in sorted(Path(partial).iterdir()):
                    _replace(part, run.folder / part.name)
        run.accelerator.wait_for_everyone()

    def report(self, at_once: bool = True) -> None:
        run = self.run
        if run.accelerator.is_main_process and (
            at_once or time.monotonic() - self._report_time > _SECONDS_BETWEEN_REPORTS
        ):
            try:
                write_report(run.folder)
            except (OSError, ValueError) as error:
                # A picture of the run must never stop the run.
                logger.warning("The report could not be written: %s", error)
            self._report_time = time.monotonic()


def sample_grid(images: list[Image.Image]) -> Image.Image:
    """Images side by side with a gap, small ones enlarged pixel by pixel so that a person can see them."""
    factor = max(1, _SMALLEST_TILE // max(images[0].size))
    tiles = [ImageOps.expand(ImageOps.scale(image, factor, Image.Resampling.NEAREST), 2, "grey") for image in images]
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    empty = [Image.new(tiles[0].mode, tiles[0].size, "grey")] * (rows * columns - len(tiles))
    return make_image_grid([*tiles, *empty], rows=rows, cols=columns)


def with_relative(result: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """A validation's losses, whole and per range, each beside its share of the first validation's.

    Example:
        >>> first = {"simple": 2.0, "vlb_bits": 4.0, "ranges": []}
        >>> with_relative({"simple": 1.0, "vlb_bits": 3.0, "ranges": []}, first)
        {'simple': 1.0, 'vlb_bits': 3.0, 'ranges': [], 'simple_relative': 0.5, 'vlb_relative': 0.75}
    """
    starts = {(part["from"], part["to"]): part for part in first["ranges"]}
    ranges = [{**part, **_shares(part, starts.get((part["from"], part["to"]), {}))} for part in result["ranges"]]
    return {**result, "ranges": ranges, **_shares(result, first)}


def _shares(now: dict[str, Any], start: dict[str, Any]) -> dict[str, float]:
    """Shares of the losses; one that starts at 0, or in another run's ranges, has none."""
    return {name: now[key] / start[key] for key, name in _RELATIVE.items() if start.get(key)}


def _scalars(result: dict[str, Any]) -> dict[str, float]:
    """The whole and every range as trackers name them."""
    parts = {"": result, **{f" t={part['from']}..{part['to']}": part for part in result["ranges"]}}
    keys = (*_RELATIVE, *_RELATIVE.values())
    return {f"validation/{key}{where}": part[key] for where, part in parts.items() for key in keys if key in part}


def _replace(source: Path, target: Path) -> None:
    if target.is_dir():
        aside = target.with_name(f".{target.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
        os.rename(source, target)
        shutil.rmtree(aside)
    else:
        os.replace(source, target)
