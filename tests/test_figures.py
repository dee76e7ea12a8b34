"""The pages show what ``benchmarks/figures.py`` makes, no older and no other."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["optimizers", "correlated_noise"]
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


def text_of(page):
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def block_on_page(figures, name):
    text = text_of(figures.PAGE_OF[name])
    found = re.search(rf"<!-- figures\.py {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    return found[1].strip()


def assert_same_numbers(actual, expected):
    """Equal words, and numbers that agree to what another machine's rounding may change."""
    assert NUMBER.sub("", actual) == NUMBER.sub("", expected)
    pairs = zip(NUMBER.findall(actual), NUMBER.findall(expected), strict=True)
    for one, other in pairs:
        one, other = (float(x.replace("−", "-")) for x in (one, other))
        assert one == pytest.approx(other, rel=0.05, abs=1e-9)


def test_every_page_that_figures_are_made_for_is_looked_at(figures):
    assert list(figures.MAKERS) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_figures_of_the_page_exist_and_come_from_the_script(figures, page):
    shown = set(re.findall(rf"images/({page}-[\w-]+\.png)", text_of(page)))
    made = {f"{page}-{name}.png" for name in figures.MAKERS[page]}
    assert shown <= made
    assert shown == {path.name for path in figures.IMAGES.glob(f"{page}-*.png")}


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_the_script_is_on_the_page_and_filled(figures, page):
    names = re.findall(r"<!-- figures\.py ([\w-]+) -->", text_of(page))
    assert set(names) == set(figures.MAKERS[page])
    assert all(block_on_page(figures, name).startswith("|") for name in names)


@pytest.mark.parametrize("name", ["digits", "accuracy"])
def test_the_tables_of_trained_runs_are_those_of_the_published_runs(figures, name, tmp_path):
    assert figures.make(name, tmp_path) == block_on_page(figures, name)


def test_a_figure_is_drawn(figures, tmp_path):
    figures.make("digits", tmp_path)
    [image] = tmp_path.iterdir()
    assert image.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["floor", "second-moment", "scatter", "walk", "adagrad", "error"])
def test_made_again_the_tables_are_those_of_the_page(figures, name, tmp_path):
    assert_same_numbers(figures.make(name, tmp_path), block_on_page(figures, name))


@pytest.mark.slow
def test_a_private_run_on_digits_learns_and_repeats(figures):
    runs = sys.modules["digits_runs"]
    job = ("softmax", "`adamw`", 0.03, 11)
    accuracy = runs.train(job)
    assert accuracy == runs.train(job)
    assert accuracy > 90


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epsilon"), [("identity", 1), ("band_mf, 12 bands", 1), ("blt, 3 buffers ", 3)]
)
def test_a_run_with_correlated_noise_reaches_what_is_published(figures, name, epsilon):
    runs, published = sys.modules["correlated"], figures.measured("accuracy")[name][f"{epsilon}"]
    job = (name, float(epsilon), published["sigma"], published["best"], runs.REPORTED[0])
    assert runs.train(job) == pytest.approx(published["final"][0], abs=1)
