"""A whole run is paid once, kept exactly, and never multiplied, joined or sampled again."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from opake_lightning.accounting import (
    BallsInBins,
    BMinSep,
    GaussianEvent,
    Ledger,
    Process,
    WholeRun,
)
from opake_lightning.dpsgd import accounting as dpsgd_acc
from opake_lightning.errors import PrivacyError

RUNS = {
    "process": WholeRun(Process(((GaussianEvent(2.0, 0.5), 7),)), n_steps=28),
    "bins": WholeRun(
        BallsInBins(noise_multiplier=1.1, coefficients=(1, 0.1 + 0.2), n_steps=30, n_bins=10),
        n_steps=30,
        start=12,
    ),
    "b_min_sep": WholeRun(
        BMinSep(
            noise_multiplier=1.3,
            coefficients=(1, 1 / 3),
            normalized=True,
            n_steps=30,
            min_sep=3,
            sample_rate=0.1,
            confidence=0.99,
            n_samples=50_000,
            seed=4,
        ),
        n_steps=30,
    ),
}
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@every_run
def test_a_run_costs_what_its_cost_says(run):
    assert run.epsilon_at(1e-3) == run.cost.epsilon_at(1e-3)
    assert run.delta_at(1.0) == run.cost.delta_at(1.0)


@every_run
@pytest.mark.parametrize(
    "use",
    [
        lambda run: run * 2,
        lambda run: 2 * run,
        lambda run: run + run,
        lambda run: run + Process(),
        lambda run: Process() + run,
        lambda run: dpsgd_acc.poisson(run, 0.5),
        lambda run: dpsgd_acc.adaclip(run, count_noise_stddev=1.0),
    ],
    ids=["times", "by", "and", "plus", "after", "poisson", "adaclip"],
)
def test_a_run_is_neither_repeated_nor_joined_nor_sampled(run, use):
    with pytest.raises(PrivacyError, match=r"one release.*Ledger\(\)\.spend"):
        use(run)


@every_run
def test_a_run_survives_json(run):
    again = WholeRun.from_dict(json.loads(json.dumps(run.to_dict())))
    assert again == run
    assert hash(again) == hash(run)


def test_the_start_tells_equal_runs_apart():
    run = RUNS["process"]
    assert replace(run, start=28) != run
    assert replace(run, start=28).epsilon_at(1e-5) == run.epsilon_at(1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cost", 1.0),
        ("n_steps", 0),
        ("n_steps", 2.0),
        ("start", -1),
        ("start", math.nan),
    ],
)
def test_arguments_are_checked(field, value):
    with pytest.raises((ValueError, TypeError), match=field):
        WholeRun(**{"cost": Process(), "n_steps": 3} | {field: value})


def test_a_simulated_cost_is_that_of_the_whole_run():
    ten = BallsInBins(noise_multiplier=1.0, coefficients=(1.0,), n_steps=10, n_bins=5)
    with pytest.raises(ValueError, match="the cost is that of 10 steps, not of n_steps=1000"):
        WholeRun(ten, 1000)


def test_what_another_processor_rounds_otherwise_is_the_same_horizon():
    def run(scale, start=0):
        cost = BallsInBins(
            noise_multiplier=2.0, coefficients=(1.0, 0.5 * scale), n_steps=10, n_bins=5
        )
        return WholeRun(cost, 10, start)

    half = Ledger().spend(run(1.0), 5)
    assert half.spend(run(1 + 1e-13), 5) == half.spend(run(1.0), 5)
    assert half.steps_within(run(1 + 1e-13), 1e3, 1e-3) == 5
    with pytest.raises(PrivacyError):
        half.spend(run(1 + 1e-13), 6)
    # Another matrix, or another start, is paid for in addition.
    assert len(half.spend(run(1 + 1e-6), 5).horizons) == 2
    assert len(half.spend(run(1.0, start=10), 5).horizons) == 2
