"""push_to_hub and from_pretrained with the real Hub client, against a Hub on the loopback device."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.loopback_hub import TOKEN, LoopbackHub

# One process does it all: HF_ENDPOINT is read when huggingface_hub is imported, and importing takes seconds.
SCRIPT = """
import json, sys, torch
from diffusers import DDPMScheduler
from diffusers_adaptive_ts import TimestepSampler, make_sampler

token, empty_cache = sys.argv[1:]
told, x0 = {}, torch.zeros(5, 1, 4, 4)

def failure(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None

scheduler = DDPMScheduler(num_train_timesteps=50, beta_schedule="squaredcos_cap_v2")
sampler = make_sampler("adaptive", scheduler, in_channels=1, weighting="min_snr", seed=0)
sampler.sample(x0)
told["url"] = sampler.push_to_hub("tester/model", subfolder="timestep_sampler", private=True, token=token)
loaded = TimestepSampler.from_pretrained("tester/model", subfolder="timestep_sampler", token=token)
told["options"] = [loaded.options, sampler.options]
told["draws"] = [loaded.sample(x0).tolist(), sampler.sample(x0).tolist()]

other = make_sampler("mode", scheduler, seed=0)
told["second url"] = other.push_to_hub("tester/model", token=token, commit_message="at the root")
told["root"] = TimestepSampler.from_pretrained("tester/model", token=token).name
first_commit = told["url"].rsplit("/", 1)[1]
told["no root then"] = failure(
    lambda: TimestepSampler.from_pretrained("tester/model", revision=first_commit, token=token)
)
told["no subfolder"] = failure(
    lambda: TimestepSampler.from_pretrained("tester/model", subfolder="nowhere", token=token)
)
told["no repository"] = failure(lambda: TimestepSampler.from_pretrained("tester/nothing", token=token))
told["no token"] = failure(lambda: TimestepSampler.from_pretrained("tester/model", cache_dir=empty_cache, token=False))
told["push without token"] = failure(lambda: other.push_to_hub("tester/mine", token="hf_wrong"))
told["unknown option"] = failure(lambda: other.push_to_hub("tester/model", privat=True))
told["other T"] = failure(
    lambda: TimestepSampler.from_pretrained("tester/model", DDPMScheduler(num_train_timesteps=60), token=token)
)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """What the process told, and what the Hub holds afterwards."""
    home = tmp_path_factory.mktemp("home")
    with LoopbackHub() as hub:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, TOKEN, str(home / "empty")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert run.returncode == 0, f"{run.stderr}\n{hub.requests}"
        return SimpleNamespace(told=json.loads(run.stdout), hub=hub)


def test_a_pushed_sampler_comes_back_with_its_options_and_its_next_draws(session):
    options, draws = session.told["options"], session.told["draws"]
    assert options[0] == options[1]
    assert draws[0] == draws[1]


def test_two_files_go_into_the_subfolder_of_a_private_repository(session):
    repo = session.hub.repos["tester/model"]
    assert repo.private
    assert sorted(repo.commits[1].files) == ["timestep_sampler/config.json", "timestep_sampler/sampler.safetensors"]
    assert repo.commits[1].message == "Upload timestep sampler (adaptive)"
    assert session.told["url"] == f"{session.hub.url}/tester/model/commit/{repo.commits[1].sha}"


def test_a_second_push_to_the_same_repository_adds_a_commit(session):
    commits = session.hub.repos["tester/model"].commits
    assert [commit.message for commit in commits[2:]] == ["at the root"]
    assert set(commits[2].files) == {
        "config.json",
        "sampler.safetensors",
        "timestep_sampler/config.json",
        "timestep_sampler/sampler.safetensors",
    }
    assert session.told["root"] == "mode"


def test_a_repository_without_a_sampler_says_where_it_was_looked_for(session):
    assert session.told["no subfolder"] == [
        "FileNotFoundError",
        "The Hub repository tester/model has no config.json in nowhere.",
    ]
    assert session.told["no root then"][1] == "The Hub repository tester/model has no config.json in its root."


def test_a_repository_that_does_not_exist_or_is_not_ours_is_the_clients_own_error(session):
    for case in ("no repository", "no token"):
        kind, message = session.told[case]
        assert kind == "RepositoryNotFoundError"
        assert "Repository Not Found" in message


def test_a_push_that_is_not_allowed_fails_and_makes_no_repository(session):
    kind, message = session.told["push without token"]
    assert kind.endswith(("HfHubHTTPError", "RepositoryNotFoundError"))
    assert "401" in message
    assert set(session.hub.repos) == {"tester/model"}


def test_an_unknown_option_of_push_is_refused_before_anything_is_sent(session):
    kind, message = session.told["unknown option"]
    assert kind == "TypeError"
    assert "privat" in message


def test_a_scheduler_with_another_t_is_refused_for_a_downloaded_sampler_too(session):
    kind, message = session.told["other T"]
    assert kind == "ValueError"
    assert "num_train_timesteps is 60, the sampler was saved with 50" in message


def test_the_client_asked_for_nothing_that_this_hub_does_not_speak(session):
    spoken = ("/api/repos/create", "/api/models/tester/", "/api/validate-yaml", "/tester/")
    assert all(request.split(" ", 1)[1].startswith(spoken) for request in session.hub.requests)
