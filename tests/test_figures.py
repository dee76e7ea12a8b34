"""The optimizers' guide shows what ``benchmarks/figures.py`` makes, no older and no other."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "optimizers.md"
NUMBER = re.compile(r"[-−+]?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.fixture(scope="module")
def figures():
    folder = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location("figures_of_the_guide", folder / "figures.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))  # where the script finds its neighbour
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def block_on_page(name):
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"<!-- figures\.py {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    return found[1].strip()


def assert_same_numbers(actual, expected):
    """Equal words, and numbers that agree to what another machine's rounding may change."""
    assert NUMBER.sub("", actual) == NUMBER.sub("", expected)
    pairs = zip(NUMBER.findall(actual), NUMBER.findall(expected), strict=True)
    for one, other in pairs:
        one, other = (float(x.replace("−", "-")) for x in (one, other))
        assert one == pytest.approx(other, rel=0.05, abs=1e-9)


def test_figures_of_the_page_exist_and_come_from_the_script(figures):
    text = PAGE.read_text(encoding="utf-8")
    shown = set(re.findall(r"images/(optimizers-[\w-]+\.png)", text))
    made = {f"optimizers-{name}.png" for name in figures.MAKERS}
    assert shown <= made
    assert shown == {path.name for path in figures.IMAGES.glob("optimizers-*.png")}


def test_every_table_of_the_script_is_on_the_page_and_filled(figures):
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- figures\.py ([\w-]+) -->", text)) == set(figures.MAKERS)
    assert all(block_on_page(name).startswith("|") for name in figures.MAKERS)


def test_the_table_of_digits_is_that_of_the_published_runs(figures, tmp_path):
    assert figures.make("digits", tmp_path) == block_on_page("digits")
    assert (tmp_path / "optimizers-digits.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["floor", "second-moment", "scatter", "walk", "adagrad"])
def test_made_again_the_tables_are_those_of_the_page(figures, name, tmp_path):
    assert_same_numbers(figures.make(name, tmp_path), block_on_page(name))


@pytest.mark.slow
def test_a_private_run_on_digits_learns_and_repeats(figures):
    runs = sys.modules["digits_runs"]
    job = ("softmax", "`adamw`", 0.03, 11)
    accuracy = runs.train(job)
    assert accuracy == runs.train(job)
    assert accuracy > 90
