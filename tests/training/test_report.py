"""The report without a browser: what is in the page, what is not, and the chart functions where node is there."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from PIL import Image

from diffusers_adaptive_ts.training.report import MOST_DENSITIES, MOST_PICTURES, MOST_TRAIN_POINTS, write_report

RUN = {
    "kind": "run",
    "step": 0,
    "command": "accelerate launch train.py --seed 0",
    "versions": {"torch": "2.9.0"},
    "arguments": {"ddpm_num_steps": 1000, "learning_rate": 1e-4, "hub_token": None},
    "sampler": "adaptive",
    "sampler_options": {"update_every": 20},
    "weighting": "uniform",
    "parameters": 1_000_000,
    "data": "digits",
    "images": 1797,
    "max_train_steps": 100,
    "effective_batch": 64,
    "machine": "2 cores",
    "started": "2026-11-18T12:00:00Z",
}
HOSTILE = "</script><script>alert('x')</script><!-- \"quoted\" & {{data}} \n \u2028 \\ <img src=x onerror=alert(1)>"


def train_row(step: int, **more: float) -> dict:
    row = {"kind": "train", "step": step, "minutes": step / 60, "loss": 1 / (step + 1), "lr": 1e-4}
    return {**row, "steps_per_second": 1.0, "sampler_overhead": 0.012, **more}


def validation_row(step: int) -> dict:
    ranges = [{"from": 0, "to": 499, "simple": 0.5, "vlb_bits": 3.0}, {"from": 500, "to": 999, "simple": 0.1}]
    row = {"kind": "validation", "step": step, "minutes": step / 60, "simple": 0.3, "vlb_bits": 3.5}
    return {**row, "simple_relative": 0.9, "vlb_relative": 0.8, "ranges": ranges}


def density_row(step: int, bins: int = 4) -> dict:
    row = {"kind": "density", "step": step, "minutes": step / 60, "density": [1 / bins] * bins, "entropy": -0.25}
    return {**row, "policy": {"alpha": 1.5, "beta": 2.5}}


def write_log(folder: Path, rows: list[dict], tail: str = "") -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "training_log.jsonl").write_text(text + tail, encoding="utf-8")
    return folder


def write_picture(folder: Path, step: int, image: Image.Image | None = None) -> dict:
    name = f"samples/step-{step:08d}.png"
    (folder / "samples").mkdir(exist_ok=True)
    (image or Image.new("L", (20, 20), step % 256)).save(folder / name, compress_level=1)
    return {"kind": "samples", "step": step, "minutes": step / 60, "file": name}


class Page(HTMLParser):
    """The page's elements, as a browser would find them, and the data inside."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.tags, self.scripts, self.title = path.read_text(encoding="utf-8"), [], [], ""
        self._inside = ""
        self.feed(self.text)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        if self._inside == "title":
            self.title += data


def draw(folder: Path, rows: list[dict], tail: str = "") -> Page:
    return Page(write_report(write_log(folder, rows, tail)))


def test_the_data_in_the_page_is_the_log(tmp_path):
    rows = [RUN, *map(train_row, range(1, 101)), *map(validation_row, (0, 50)), *map(density_row, (0, 20, 40))]
    rows += [
        {"kind": "evaluation", "step": 100, "minutes": 1.7, "frechet_distance": 12.5},
        write_picture(tmp_path, 100),
    ]
    data = draw(tmp_path, rows).data
    assert data["train"]["step"] == list(range(1, 101))
    assert data["train"]["loss"] == pytest.approx([1 / (step + 1) for step in range(1, 101)], rel=1e-5)
    assert data["train"]["minutes"] == pytest.approx([step / 60 for step in range(1, 101)], rel=1e-5)
    assert data["train"]["sampler_overhead"] == [0.012] * 100
    assert "ema_decay" not in data["train"]
    assert data["validation"][1]["ranges"] == validation_row(50)["ranges"]
    assert [row["density"] for row in data["density"]] == [[0.25] * 4] * 3
    assert [row["policy"] for row in data["policy"]] == [{"alpha": 1.5, "beta": 2.5}] * 3
    assert data["evaluation"][0]["frechet_distance"] == 12.5
    shown = {key: value for key, value in data["runs"][0].items() if key != "minutes"}
    assert shown == {key: value for key, value in RUN.items() if key != "kind"}
    source = data["samples"][0]["source"]
    assert base64.b64decode(source.split(",")[1]) == (tmp_path / "samples/step-00000100.png").read_bytes()


def test_the_page_needs_nothing_from_anywhere(tmp_path):
    page = draw(tmp_path, [RUN, train_row(1), density_row(0), write_picture(tmp_path, 1)])
    assert not re.findall(r"https?://|//cdn|@import|url\((?!#)", page.text)
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base")]
    assert not [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "srcset")]
    policies = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert len(policies) == 1
    assert "default-src 'none'" in policies[0]


def test_hostile_strings_stay_strings(tmp_path):
    names = ("command", "data", "sampler", "weighting", "machine")
    run = {**RUN, **dict.fromkeys(names, HOSTILE), "arguments": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    density = {**density_row(0), "policy": {HOSTILE: 1.0}}
    page = draw(tmp_path, [run, train_row(1), density, {"kind": "evaluation", "step": 1, HOSTILE: 1.0}])
    plain = draw(tmp_path, [RUN, train_row(1), density_row(0)])
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert page.scripts[1:] == plain.scripts[1:]
    assert page.data["runs"][0]["command"] == HOSTILE
    assert page.data["runs"][0]["arguments"] == {HOSTILE: HOSTILE}
    assert page.data["policy"][0]["policy"] == {HOSTILE: 1.0}
    assert page.title == f"{HOSTILE} · {HOSTILE}"


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    page = draw(tmp_path, [RUN, train_row(1), train_row(2)], tail='{"kind": "train", "step": 3, "lo')
    assert page.data["train"]["step"] == [1, 2]


def test_no_log_and_an_empty_log_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no training_log\.jsonl in .*give the output_dir of a run"):
        write_report(tmp_path)
    for tail in ("", '{"kind": "ru'):
        write_log(tmp_path, [], tail)
        with pytest.raises(ValueError, match="holds no whole line yet"):
            write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_run_that_has_only_begun_and_a_log_without_a_run_are_drawn(tmp_path):
    page = draw(tmp_path, [RUN])
    assert page.data["train"]["step"] == []
    assert page.title == "digits · adaptive"
    assert draw(tmp_path, [train_row(1), {"kind": "something new", "step": 1}]).title == "Training report"


def test_a_resumed_run_is_one_run(tmp_path):
    lost = [train_row(step, loss=9.0) for step in (51, 52)]
    again = [train_row(step, minutes=(step - 50) / 60) for step in range(51, 101)]
    resumed = {**RUN, "step": 50, "resumed": True, "command": "again"}
    data = draw(tmp_path, [RUN, *map(train_row, range(1, 51)), *lost, resumed, *again]).data
    assert data["train"]["step"] == list(range(1, 101))
    assert max(data["train"]["loss"]) < 1
    assert data["train"]["minutes"] == pytest.approx([step / 60 for step in range(1, 101)], rel=1e-4)
    assert [(run["step"], run["command"]) for run in data["runs"]] == [(0, RUN["command"]), (50, "again")]
    assert data["runs"][1]["minutes"] == pytest.approx(50 / 60)


def test_a_clock_that_went_on_after_a_resume_is_kept(tmp_path):
    rows = [*map(train_row, range(1, 51)), {**RUN, "step": 50, "resumed": True}, *map(train_row, range(51, 101))]
    data = draw(tmp_path, [RUN, *rows]).data
    assert data["train"]["minutes"] == pytest.approx([step / 60 for step in range(1, 101)], rel=1e-4)


def test_a_new_run_in_the_same_log_replaces_the_old_one(tmp_path):
    data = draw(tmp_path, [RUN, train_row(1), train_row(2), {**RUN, "data": "faces"}, train_row(1, loss=5.0)]).data
    assert [run["data"] for run in data["runs"]] == ["faces"]
    assert data["train"]["loss"] == [5.0]


def test_a_loss_that_is_not_finite_is_told_and_left_out(tmp_path):
    losses = [1.0, math.nan, math.inf, 0.5, math.nan]
    rows = [train_row(step, loss=loss) for step, loss in enumerate(losses, 1)]
    data = draw(tmp_path, [RUN, *rows, {**density_row(5), "entropy": math.nan}]).data
    assert data["train"]["loss"] == [1.0, None, None, 0.5, None]
    assert data["not_finite"] == {"count": 3, "first": 2, "last": 5}
    assert data["policy"][0]["entropy"] is None


def test_numbers_that_javascript_cannot_hold_become_strings(tmp_path):
    run = {**RUN, "arguments": {"seed": 2**62 + 1, "small": 7, "rate": 0.1234567891234}}
    shown = draw(tmp_path, [run, train_row(1)]).data["runs"][0]["arguments"]
    assert shown == {"seed": str(2**62 + 1), "small": 7, "rate": 0.1234567891234}


def test_ten_thousand_lines_make_a_small_page_quickly(tmp_path):
    noise = Image.effect_noise((1024, 1024), 80).convert("RGB")
    rows = [RUN, *map(train_row, range(1, 9_401)), *(density_row(step, 100) for step in range(0, 5_000, 10))]
    rows += [validation_row(step) for step in range(80)] + [write_picture(tmp_path, step, noise) for step in range(20)]
    write_log(tmp_path, rows)
    assert len(rows) > 10_000
    write_report(tmp_path)
    started = time.process_time()
    path = write_report(tmp_path)
    assert time.process_time() - started < 1.0  # 0.1 s on a quiet machine
    assert path.stat().st_size < 5_000_000
    data = Page(path).data
    train = data["train"]
    assert len(train["step"]) <= MOST_TRAIN_POINTS
    assert len(data["density"]) == MOST_DENSITIES
    assert len(data["samples"]) == MOST_PICTURES
    assert [data["samples"][0]["step"], data["samples"][-1]["step"]] == [0, 19]
    assert [data["density"][0]["step"], data["density"][-1]["step"]] == [0, 4_990]
    size = train["rows_per_point"]
    first = [1 / (step + 1) for step in range(1, size + 1)]
    assert train["step"][0] == size
    assert train["step"][-1] == 9_400
    assert train["loss"][0] == pytest.approx(sum(first) / size, rel=1e-5)
    assert [train["lowest"][0], train["highest"][0]] == pytest.approx([min(first), max(first)], rel=1e-5)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "I;16"])
def test_large_pictures_of_any_mode_are_made_smaller(tmp_path, mode):
    image = Image.effect_noise((900, 600), 90)
    image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
    data = draw(tmp_path, [RUN, write_picture(tmp_path, 1, image)]).data
    source = data["samples"][0]["source"]
    assert source.startswith("data:image/")
    assert len(source) < 250_000
    with Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))) as shown:
        assert shown.width / shown.height == pytest.approx(1.5, rel=0.01)


def test_pictures_that_are_gone_broken_or_elsewhere_are_passed_over(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "secret.png")
    kept = write_picture(run, 3)
    (run / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    files = ["samples/gone.png", "../secret.png", str(tmp_path / "secret.png"), "broken.png", ""]
    rows = [{"kind": "samples", "step": 10 + index, "minutes": 1.0, "file": file} for index, file in enumerate(files)]
    assert [sample["step"] for sample in draw(run, [RUN, kept, *rows]).data["samples"]] == [3]


def test_the_old_page_stays_when_drawing_fails(tmp_path, monkeypatch):
    path = write_report(write_log(tmp_path, [RUN, train_row(1)]))
    before = path.read_text(encoding="utf-8")

    def fail(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path)
    assert path.read_text(encoding="utf-8") == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "training_log.jsonl"]


def run_node(script: str) -> object:
    """What `script` returns, with the functions of charts.js at hand."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    charts = resources.files("diffusers_adaptive_ts.training").joinpath("report_page/charts.js").read_text("utf-8")
    program = f"{charts}\nconsole.log(JSON.stringify((() => {{ {script} }})()));"
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_numbers_read_well():
    values = "[0, 1, 0.5, 0.03124, 12345, 1e-4, 0.000123, 3e9, null, NaN].map((value) => formatNumber(value))"
    assert run_node(f"return {values}") == ["0", "1", "0.5", "0.0312", "12,345", "1e-4", "1.23e-4", "3e9", "–", "–"]
    assert run_node("return [0.5, 4.21, 59.8, 125, 2000].map(formatMinutes)") == [
        "30 s", "4.2 min", "1 h 0 min", "2 h 5 min", "1 d 9 h",
    ]  # fmt: skip


def test_ticks_are_round_and_inside():
    linear, steps, small, log = run_node(
        "return [linearTicks(0, 1, 5), linearTicks(0, 3, 8, true), linearTicks(0, 1e-4, 2), logTicks(0.01, 1, 6)]"
        ".map((ticks) => ticks.map(({ label }) => label))"
    )
    assert linear == ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert steps == ["0", "1", "2", "3"]
    assert small == ["0", "5e-5", "1e-4"]
    assert log == ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"]


def test_smoothing_keeps_a_constant_and_gaps_and_does_not_lag():
    assert run_node("return smooth([2, null, 2, 2], 3)") == pytest.approx([2, None, 2, 2])
    ramp = run_node("return smooth(Array.from({ length: 101 }, (_, index) => index), 9)")
    assert ramp[50] == pytest.approx(50)
    assert run_node("return smooth([3, 1, 4], 0)") == pytest.approx([3, 1, 4])


def test_a_curve_breaks_where_a_value_is_missing_and_hides():
    script = """
      const series = [{ id: "a<b", name: "a<b", colour: "red", x: [0, 1, 2, 3], y: [1, 2, null, 4] }];
      const spec = { id: "c", title: "<t>", width: 400, height: 200, series, xDomain: [0, 3], xUnit: "x", yUnit: "y" };
      const shown = lineChart(spec).svg, empty = lineChart({ ...spec, hidden: new Set(["a<b"]) }).svg;
      return [shown, empty, lineChart({ ...spec, log: true }).svg];
    """
    shown, empty, logarithmic = run_node(script)
    path = re.search(r'data-series="a&#60;b"[^>]* d="([^"]*)"', shown)[1]
    assert path.count("M") == 2
    assert "data-series" not in empty
    assert "<t>" not in shown
    assert "NaN" not in shown + empty + logarithmic


def test_a_heat_map_has_a_cell_for_every_value():
    script = """
      const columns = [[1, 1, 1], [0, 1, 4], [0.25, 2, 16]], edges = edgesAround([0, 10, 20], 30);
      const spec = { id: "h", title: "t", width: 300, height: 200, columns, edges, limit: 4,
        xDomain: [0, 30], yDomain: [0, 1000], xUnit: "steps", yUnit: "t" };
      const { svg, x, y } = heatMap(spec);
      const levels = [0, 0.25, 1, 4, 16].map((ratio) => heatLevel(ratio, 4));
      return { svg, edges, levels, limit: heatLimit(columns), at: [x.invert(x.at(12)), y.invert(y.at(700))] };
    """
    drawn = run_node(script)
    assert drawn["edges"] == [0, 5, 15, 30]
    assert drawn["levels"] == [0, 0, 20, 40, 40]
    assert drawn["limit"] == 16
    assert drawn["at"] == pytest.approx([12, 700])
    cells = re.search(r'<g class="cells">(.*?)</g>', drawn["svg"])[1]
    assert cells.count("M") == 7  # the first column is one run of equal cells
    assert "NaN" not in drawn["svg"]


def test_one_density_fills_the_whole_map():
    assert run_node("return edgesAround([0], 500)") == [0, 500]
    assert run_node("return edgesAround([5, 15], 40)") == [5, 10, 40]
