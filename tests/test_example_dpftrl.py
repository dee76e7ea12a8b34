"""``examples/train_dpftrl.py``, with every mechanism, optimizer and sampling that it offers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import get_args

import pytest

from opake_lightning.plan import Sampling

FOLDER = Path(__file__).resolve().parent.parent / "examples"
MECHANISMS = ["identity", "band_mf", "blt", "bsr", "bisr", "lambda_cgd"]
TAKES_SQUARES = ["adam", "adamw", "radam", "ademamix", "rmsprop", "adadelta"]
ONLY_GRADIENTS = ["sgd", "adagrad", "adafactor", "lion"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_dpftrl", FOLDER / "train_dpftrl.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))  # where the script finds its neighbour
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.fixture
def train(example, capsys, tmp_path, monkeypatch):
    """Run the command: its table by column, and all that it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*options, preset="smoke"):
        example.main(["--preset", preset, "--key", "7", *options])
        out = capsys.readouterr().out
        head = re.findall(r"┃ (.*?)(?= ┃)", next(x for x in out.splitlines() if "accuracy" in x))
        row = re.findall(r"│ (.*?)(?= │)", next(x for x in out.splitlines() if x[0:1] == "│"))
        cells = dict(zip((x.strip() for x in head), (x.strip() for x in row), strict=True))
        assert not list(tmp_path.iterdir())  # leaves nothing behind
        return cells, out

    return run


@pytest.fixture
def refused(example, capsys):
    """What the command says when it cannot do what it is asked for."""

    def run(*options):
        with pytest.raises(SystemExit) as stopped:
            example.main(["--preset", "smoke", *options])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run


def test_what_is_offered_is_what_is_tested(example):
    assert set(MECHANISMS) == set(example.MECHANISMS)
    assert {*TAKES_SQUARES, *ONLY_GRADIENTS} == set(example.OPTIMIZERS)


@pytest.mark.parametrize("squares", [False, True], ids=["gradient", "pair"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_trains_within_its_budget(train, mechanism, squares):
    options = ["--second-moment"] if squares else []
    cells, out = train("--optimizer", "adamw", "--mechanism", mechanism, *options)
    assert f"{mechanism}(" in out
    assert 2.97 < float(cells["ε"]) <= 3.0
    assert float(cells["δ"]) == 1e-4
    assert cells["steps"] == "12"
    assert float(cells["σ"]) > 1
    assert float(cells["sensitivity"]) > 1
    assert float(cells["test accuracy"]) > 0.4  # guessing has 0.1


@pytest.mark.parametrize("optimizer", TAKES_SQUARES)
def test_optimizers_that_take_squares(train, optimizer):
    cells, _ = train("--optimizer", optimizer, "--second-moment", "--epochs", "1")
    assert cells["steps"] == "6"


@pytest.mark.parametrize("optimizer", ONLY_GRADIENTS)
def test_optimizers_that_do_not_say_which_ones_do(train, refused, optimizer):
    cells, _ = train("--optimizer", optimizer, "--epochs", "1")
    assert cells["steps"] == "6"
    assert "take adam, adamw" in refused("--optimizer", optimizer, "--second-moment")


@pytest.mark.parametrize("sampling", get_args(Sampling))
def test_every_sampling(train, sampling):
    cells, out = train("--sampling", sampling, "--epsilon", "2")
    assert 1.98 < float(cells["ε"]) <= 2.0
    assert f"{sampling} batches" in out


def test_the_key_repeats_a_run_and_options_reach_the_strategy(train):
    options = ["--mechanism", "bisr", "--bandwidth", "3", "--momentum", "0.5", "--normalized"]
    options += ["--optimizer", "adamw", "--second-moment", "--second-momentum", "0.9"]
    one, out = train(*options)
    two, _ = train(*options)
    assert one | {"seconds": ""} == two | {"seconds": ""}
    assert "bisr(bandwidth=3, momentum=0.5, decay=1.0, normalized=True)" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mechanism", "blt", "--sampling", "cyclic_poisson"], "is not banded"),
        (["--mechanism", "identity", "--bands", "3"], "identity makes no use of --bands"),
        (["--mechanism", "lambda_cgd", "--momentum", "0.9"], "makes no use of --momentum"),
        (["--mechanism", "blt", "--normalized"], "makes no use of --normalized"),
        (["--second-momentum", "0.9"], "add --second-moment"),
        (["--bands", "8"], "use at most 5 bands"),
        (["--bands", "0"], "bands must be"),
        (["--batch-size", "5000"], "larger than the dataset"),
        (["--epsilon", "-1"], "target_epsilon must be"),
        (
            ["--sampling", "b_min_sep", "--second-moment", "--second-momentum", "0.9"],
            "second_moment_strategy=strategy",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_does_not_go_together_is_refused_readably(refused, options, words):
    text = refused("--optimizer", "adamw", *options)
    assert words in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_real_setting_learns(train, mechanism):
    cells, _ = train("--mechanism", mechanism, preset="digits")
    assert cells["steps"] == "240"
    assert float(cells["test accuracy"]) > 0.85
