"""Options typed as key=value."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusers_adaptive_ts.key_values import parse_key_values, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("+3", 3),
        ("0.5", 0.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e-4", 1e-4),
        ("-1.2E+3", -1200.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("None", None),
        ("v2", "v2"),
        ("1,2,3", [1, 2, 3]),
        ("1,", [1]),
        ("0.1, true ,x", [0.1, True, "x"]),
        ('"3"', "3"),
        ('""', ""),
        ('"a,b"', "a,b"),
        ("[1, 2]", [1, 2]),
        ('{"num_bins": 10, "x": null}', {"num_bins": 10, "x": None}),
        ("1.2.3", "1.2.3"),
        ("-", "-"),
        ("nan", "nan"),  # a typo must not become a number that passes every comparison
    ],
)
def test_values_have_the_type_they_look_like(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_items_become_options_in_order():
    options = parse_key_values(["b=1", "a=x=y"])
    assert options == {"b": 1, "a": "x=y"}
    assert list(options) == ["b", "a"]
    assert parse_key_values([]) == {}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["gamma"], "'gamma' is not an option. Write key=value"),
        (["=3"], "'=3' is not an option"),
        (["2x=3"], "'2x=3' is not an option"),
        (["k=1", "k=2"], "'k' is given twice"),
        (["k="], "the value is empty"),
        (["k=1,,2"], "the value is empty"),
        (["k=[1,2"], "begins like JSON"),
        (["k={'a': 1}"], "begins like JSON"),
        (["k=[NaN]"], "NaN is not a value of JSON"),
    ],
)
def test_bad_items_say_what_to_write(items, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_key_values(items)


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(_scalars, min_size=2))
def test_a_list_of_json_scalars_is_read_as_json_reads_it(values):
    assert parse_value(",".join(json.dumps(value) for value in values)) == values


@given(st.text())
def test_any_text_in_quotes_comes_back(text):
    assert parse_value(json.dumps(text)) == text
