"""Write the results in README.md and docs/ from `results/`, between two marks, so that none goes stale.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from record import RESULTS

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results: python benchmarks/readme.py -->", "<!-- end of results -->"
REAL_RUNS = {
    "cifar10_pixels": "CIFAR-10, pixels, `unet2d`",
    "fashion_pixels": "Fashion-MNIST, pixels, `unet2d`",
    "fashion_latents": "Fashion-MNIST, latents, `ldm`",
    "fashion_dit": "Fashion-MNIST, classes, `dit`",
}


def read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def told(ratio: dict[str, Any], digits: int = 2) -> str:
    return f"{ratio['median']:.{digits}f} ({ratio['lowest']:.{digits}f} to {ratio['highest']:.{digits}f})"


def speed_rows() -> list[str]:
    """One line for each ratio of `training_speed.py`."""
    rows = []
    for name, what in (
        ("diffusers", "steps per second over diffusers' script, pixels, uniform sampling"),
        ("latents", "steps per second with cached latents over encoding in every step, `ldm`"),
        ("memory", "peak memory of `adaptive` over `uniform`"),
    ):
        result = read(f"training_speed-{name}")
        if result is not None:
            rows.append(f"| {what} | {told(result['ratio'])} | `training_speed-{name}.json` |")
    overhead = read("overhead") or {"cells": {}}
    rows += [
        f"| step time of `{sampler}` over `uniform`, {cell}, T = 1000; "
        f"{told_of['forward_equivalents_per_40_steps']:.1f} forwards per 40 steps | {told(told_of['ratio'], 3)} "
        "| `overhead.json` |"
        for cell, samplers in overhead["cells"].items()
        for sampler, told_of in samplers.items()
        if sampler != "uniform"
    ]
    return rows + [
        f"| text to image over diffusers' script, latents {result['sizes']['latents']}x{result['sizes']['latents']}, "
        f"{side.removeprefix('ours, ')} | {told(ratio)} | `{name}.json` |"
        for name in ("training_speed-text_to_image", "training_speed-text_to_image_larger_latents")
        if (result := read(name)) is not None
        for side, ratio in result["ratios"].items()
    ]


def run_rows() -> list[str]:
    """One line for each run on real data."""
    rows = []
    for name, what in REAL_RUNS.items():
        result = read(f"real_runs/{name}")
        if result is None:
            continue
        run, last = result["run"], result["validation"][-1]
        more = ""
        if "recognition" in result:
            seen = result["recognition"]
            more = (
                f"; a classifier sees the asked class in {100 * seen['recognised_as_the_asked_class']:.1f} % of "
                f"{seen['generated']} images (chance {100 * seen['chance']:.0f} %)"
            )
        rows.append(
            f"| {what} | {run['parameters'] / 1e6:.1f} M | {run['max_train_steps']:,} | {last['simple']:.4f}{more} "
            f"| [picture](benchmarks/results/real_runs/{name}.png) |"
        )
    return rows


def results() -> str:
    return "\n".join(
        [
            "| ratio in one alternating run | median (lowest to highest) | file in `benchmarks/results/` |",
            "|---|---|---|",
            *speed_rows(),
            "",
            "| run on real data, `adaptive`, one seed | parameters | steps | validation loss (simple) | samples |",
            "|---|---|---|---|---|",
            *run_rows(),
        ]
    )


def emoji() -> str:
    """What the emoji run shows, or that it has not been run."""
    result = read("emoji_text_to_image")
    if result is None:
        return "Not run yet."
    right, empty, shuffled = result["right_caption"], result["empty_caption"], result["shuffled_simple"]
    return "\n".join(
        [
            f"{result['images']:,} emoji of 64x64 pixels, {result['parameters'] / 1e6:.1f} M parameters, autoencoder "
            f"of {result['autoencoder_psnr']:.1f} dB, {result['validation'][-1]['step']:,} steps. Stable validation "
            f"loss (simple, v-prediction) on {result['held_out_captions']} held-out captions, on averaged weights:",
            "",
            "| caption given | loss |",
            "|---|---|",
            f"| the image's own | {right['simple']:.4f} |",
            f"| none | {empty['simple']:.4f} |",
            f"| another image's, mean of {len(result['shuffled_captions'])} shuffles | {shuffled['mean']:.4f} "
            f"({shuffled['lowest']:.4f} to {shuffled['highest']:.4f}) |",
            "",
            "Sixteen prompts, generated with plain diffusers (DDIM, 50 steps, guidance 4), left to right: "
            + "; ".join(result["prompts"])
            + ".",
            "",
            "![sixteen generated emoji](../benchmarks/results/emoji_text_to_image.png)",
        ]
    )


PAGES = {"README.md": results, "docs/text_to_image.md": emoji}


def renewed(page: str, text: str) -> str:
    """The page with its results written anew."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        sys.exit(f"{page} has no place for results: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{PAGES[page]()}\n{END}{after}"


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(renewed(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
