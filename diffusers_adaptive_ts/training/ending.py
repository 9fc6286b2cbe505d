"""What a user reads when the script stops: the plan of a dry run, or where everything is and how to generate."""

from __future__ import annotations

import json

from ..hub import publish
from .run import Run, facts, shown_command


def describe(run: Run) -> str:
    """What `--dry_run` prints: the resolved options, the size of the model and of the run, the sampler's cost."""
    told = facts(run, shown_command())
    overhead = run.sampler.expected_overhead(run.args.train_batch_size) / run.args.gradient_accumulation_steps
    lines = [
        json.dumps(told["arguments"], indent=1, sort_keys=True),
        f"model: {run.family.name}, {type(run.bare_model).__name__}, {told['parameters']:,} parameters",
        f"data: {told['data']}, {told['images']} images for training",
        f"steps: {run.max_train_steps}, effective batch {told['effective_batch']}, seed {run.seed}",
        f"sampler: {run.sampler.name}, weighting {run.sampler.weighting.name}",
        f"expected overhead of the sampler: {100 * overhead:.1f} % of a training step, counted in forward passes",
    ]
    return "\n".join(lines)


def finish(run: Run) -> int:
    """Push where that was asked for, and say where everything is; the exit code tells whether the push went well."""
    folder, code = run.folder, 0
    if run.accelerator.is_main_process:
        what = "LoRA" if getattr(run.args, "lora_rank", None) else "pipeline"
        # Without prompts, or with an --eval_batch_size of 0, there are no pictures to look at.
        seen = [str(folder / name) for name in ("samples.png", "report.html") if (folder / name).is_file()]
        lines = [
            f"The {what} is in {folder}, the sampler in {folder / 'timestep_sampler'}.",
            f"Look at {' and '.join(seen)}. Generate with:",
            "",
            run.family.how_to_generate(folder),
        ]
        if run.args.push_to_hub:
            said, code = _push(run)
            lines.insert(1, said)
        print("\n".join(lines))
    run.accelerator.end_training()
    run.log.close()
    return code


def _push(run: Run) -> tuple[str, int]:
    """A failed upload loses nothing: the pipeline is on disk, and the message says so."""
    try:
        return f"Pushed to {publish(run.folder, run.args.hub_model_id, token=run.args.hub_token)}.", 0
    except Exception as error:  # the Hub's client raises errors of many kinds
        said = f"The upload failed ({type(error).__name__}: {error})."
        return f"{said} Everything is kept in {run.folder}; push it again.", 1
