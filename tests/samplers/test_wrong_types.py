"""A value of the wrong type is an error that names the sampler and what was given."""

import pytest
from diffusers import DDPMScheduler

from diffusers_adaptive_ts import make_sampler


@pytest.mark.parametrize(("name", "options"), [("adaptive", {"update_every": "fast"}), ("beta", {"a": "wide"})])
def test_a_word_where_a_number_belongs(name, options):
    with pytest.raises(ValueError, match=f"The sampler '{name}' cannot be built with"):
        make_sampler(name, DDPMScheduler(), **options)
