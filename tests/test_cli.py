"""The command adaptive-ts."""

import inspect
import io
import re
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from diffusers_adaptive_ts import __version__, cli, list_samplers, list_weightings
from diffusers_adaptive_ts.samplers import sampler_class


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(capsys):
    """Run the command; gives its exit code, stdout and stderr."""

    def command(*argv):
        code = cli.main([str(word) for word in argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


@pytest.fixture
def refused(run):
    """Run a command that must fail with one line on stderr and exit code 2; gives the line."""

    def command(*argv):
        code, out, err = run(*argv)
        assert code == 2
        assert out == ""
        assert err.startswith("adaptive-ts: error: ")
        assert err.count("\n") == 1
        return err

    return command


def test_the_installed_command_is_this_one():
    (script,) = entry_points(group="console_scripts", name="adaptive-ts")
    assert script.load() is cli.main


def test_version_and_help_end_well(run):
    assert run("--version") == (0, f"adaptive-ts {__version__}\n", "")
    for argv in (["--help"], ["show", "--help"], ["list", "--help"]):
        code, out, err = run(*argv)
        assert (code, err) == (0, "")
        assert "usage: adaptive-ts" in out


def test_list_names_everything_with_its_first_line_and_its_defaults(run):
    code, out, _ = run("list")
    assert code == 0
    flat = " ".join(out.split())
    for name in list_samplers():
        first_line = inspect.getdoc(sampler_class(name)).splitlines()[0]
        assert f" {name} {' '.join(first_line.split())}" in flat
    for name in list_weightings():
        assert re.search(rf"^  {name} ", out, flags=re.MULTILINE)
    assert "version='v1', tau=None, k=5.0, duals=True, threshold=0.0001" in flat
    assert "history_per_timestep=10, uniform_probability=0.001, importance_weighting=True" in flat
    assert "gamma=1.0, k=1.0" in flat
    assert "Every sampler also takes: weighting=None, weighting_options=None, stratified=False," in flat
    assert max(len(line) for line in out.splitlines()) <= 100


@pytest.mark.parametrize("name", sorted(set(list_samplers()) - {"histogram"}))
def test_show_draws_every_sampler_in_the_terminal(run, name):
    code, out, err = run("show", "--sampler", name)
    assert (code, err) == (0, "")
    assert f"{name}, " in out
    assert len(re.findall(r"^ *\d+-\d+ ", out, flags=re.MULTILINE)) == 20


def test_show_takes_all_its_options(run):
    code, out, err = run(
        *("show", "--sampler", "speed", "--schedule", "scaled_linear", "--weighting", "min_snr"),
        *("--num_train_timesteps", 500, "--prediction_type", "v_prediction", "--rescale_betas_zero_snr"),
        *("--sampler_options", "k=3", "duals=false", "--weighting_options", "gamma=2.5"),
    )
    assert (code, err) == (0, "")
    assert (
        "scaled_linear schedule from 0.0001 to 0.02, zero terminal SNR, 500 timesteps, prediction_type v_prediction"
        in out
    )
    assert "speed, min_snr weights" in out


def test_a_list_and_several_samplers_are_taken(run):
    code, out, _ = run("show", "--sampler", "histogram", "--sampler_options", "histogram=1,0,3")
    assert code == 0
    assert out.count("  0.0") >= 12
    code, out, _ = run("show", "--sampler", "uniform", "logit_normal", "--sampler_options", "stratified=true")
    assert code == 0
    assert "uniform, uniform weights" in out
    assert "logit_normal, uniform weights" in out


def test_what_learns_is_marked_as_untrained(run):
    for name in ("adaptive", "entropy_rate", "learning_progress", "loss_second_moment", "gradient_variance"):
        assert "(before training)" in run("show", "--sampler", name)[1]
    assert "(before training)" in run("show", "--sampler", "uniform", "--weighting", "learned_uncertainty")[1]
    assert "(before training)" not in run("show", "--sampler", "speed")[1]


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")]
)
def test_out_writes_a_picture_and_replaces_an_older_one(run, tmp_path, suffix, magic):
    path = tmp_path / f"density{suffix}"
    path.write_text("old")
    code, out, err = run("show", "--sampler", "speed", "uniform", "--out", path)
    assert (code, out, err) == (0, f"wrote {path}\n", "")
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: command"),
        (["shwo"], "invalid choice: 'shwo'"),
        (["show"], "required: --sampler"),
        (["show", "--sampler", "spede"], "Unknown sampler 'spede'. Did you mean 'speed'?"),
        (["show", "--sampler", "uniform", "spede"], "Unknown sampler 'spede'. Did you mean 'speed'?"),
        (["show", "--sampler", "uniform", "uniform"], "'uniform' is given twice"),
        (["show", "--sampler", "uniform", "--weighting", "min_srn"], "Did you mean 'min_snr'?"),
        (["show", "--sampler", "uniform", "--schedule", "liner"], "Unknown schedule 'liner'. Did you mean 'linear'?"),
        (["show", "--sampler", "uniform", "--schedule", "cosine"], "Did you mean 'squaredcos_cap_v2'?"),
        (["show", "--sampler", "uniform", "--prediction_type", "eps"], "Unknown prediction_type 'eps'"),
        (["show", "--sampler", "uniform", "--num_train_timesteps", "1"], "at least 2, got 1"),
        (["show", "--sampler", "uniform", "--num_train_timesteps", "many"], "invalid int value: 'many'"),
        (["show", "--sampler", "uniform", "--sched", "linear"], "unrecognized arguments: --sched"),
        (["show", "--sampler", "speed", "--sampler_options", "K"], "'K' is not an option. Write key=value"),
        (["show", "--sampler", "speed", "--sampler_options", "kk=2"], "'speed' has no option 'kk'. Did you mean 'k'?"),
        (["show", "--sampler", "speed", "--sampler_options", "weighting=p2"], "write --weighting ... instead"),
        (["show", "--sampler", "speed", "--sampler_options", "k=0"], "above 0"),
        (["show", "--sampler", "speed", "--sampler_options", "k=fast"], "cannot be built with k=fast"),
        (
            ["show", "--sampler", "uniform", "--weighting", "min_snr", "--weighting_options", "gamma=high"],
            "The weighting 'min_snr' cannot be built with gamma=high",
        ),
        (["show", "--sampler", "speed", "--num_train_timesteps", "10"], "no convergence area"),
        (["show", "--sampler", "histogram"], "give histogram=[...]"),
        (["show", "--sampler", "uniform", "--weighting_options", "gamma=3"], "'uniform' has no option 'gamma'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(refused, argv, message):
    assert message in refused(*argv)


def test_an_option_that_not_all_samplers_take_names_those_that_do_not(refused):
    line = refused("show", "--sampler", "speed", "uniform", "logit_normal", "--sampler_options", "k=3")
    assert "'k' is not an option of uniform, logit_normal." in line
    line = refused("show", "--sampler", "speed", "uniform", "--sampler_options", "stratifed=true")
    assert "Did you mean 'stratified'?" in line


def test_out_must_be_a_picture_in_a_folder_that_exists(refused, tmp_path):
    assert "Accepted are .png" in refused("show", "--sampler", "uniform", "--out", tmp_path / "density.gif")
    assert "Accepted are .png" in refused("show", "--sampler", "uniform", "--out", tmp_path / "density")
    assert "there is no folder" in refused("show", "--sampler", "uniform", "--out", tmp_path / "no" / "density.png")
    (tmp_path / "folder.png").mkdir()
    assert "is a folder" in refused("show", "--sampler", "uniform", "--out", tmp_path / "folder.png")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "folder.png"]


def test_a_warning_is_one_line_too(run):
    code, _, err = run("show", "--sampler", "uniform", "--weighting", "p2", "--weighting_options", "gamma=0")
    assert code == 0
    assert err == (
        "adaptive-ts: warning: p2 with gamma=0 is plain DDPM: every timestep has weight 1. P2 uses gamma=1.\n"
    )


def test_a_terminal_without_block_characters_gets_plain_ones(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["show", "--sampler", "uniform"]) == 0
    assert b"####" in stream.buffer.getvalue()


def test_a_closed_pipe_is_no_error():
    # A reader that goes away before anything is written.
    program = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); "
        "from diffusers_adaptive_ts.cli import main; sys.exit(main(['list']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
