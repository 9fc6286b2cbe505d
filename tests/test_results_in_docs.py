"""Figures in README and docs are those of the result files, written by the command that the marks name."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def readme(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("readme")


@pytest.mark.parametrize("page", ["README.md", "docs/text_to_image.md"])
def test_the_results_are_up_to_date(readme, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert readme.renewed(page, text) == text, "run: python benchmarks/readme.py"


def test_a_changed_result_is_noticed(readme, monkeypatch):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    real = readme.read
    monkeypatch.setattr(
        readme,
        "read",
        lambda name: {"ratio": {"median": 9.0, "lowest": 8, "highest": 10}} if "memory" in name else real(name),
    )
    assert readme.renewed("README.md", text) != text
    assert "9.00 (8.00 to 10.00)" in readme.renewed("README.md", text)
