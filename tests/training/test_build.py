from __future__ import annotations

from argparse import Namespace

import pytest

from diffusers_adaptive_ts.training.build import _unused_hub_options


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, ""),
        ({"hub_token": "hf_secret"}, "--hub_token"),
        ({"hub_model_id": "me/model", "hub_private_repo": True}, "--hub_model_id, --hub_private_repo"),
        ({"hub_token": "hf_secret", "hub_model_id": "me/model", "push_to_hub": True}, ""),
    ],
)
def test_upload_options_without_an_upload_are_named_and_not_shown(given, named):
    none = {"push_to_hub": False, "hub_token": None, "hub_model_id": None, "hub_private_repo": False}
    assert _unused_hub_options(Namespace(**none | given)) == named
