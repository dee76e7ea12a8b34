"""Every step counted once, cheaply, and kept through a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opake_lightning.accounting import (
    BallsInBins,
    GaussianEvent,
    Ledger,
    Process,
    WholeRun,
    calibrate,
    process,
)
from opake_lightning.errors import CheckpointError, PrivacyError

STEP = GaussianEvent(1.1, 0.01)
# Noise at 2 and no sampling, for ten steps as one; and a run that only samples can price.
RUN = WholeRun(Process(((GaussianEvent(2.0), 1),)), n_steps=10)
SAMPLED = WholeRun(
    BallsInBins(noise_multiplier=2.0, coefficients=(1, 0.5), n_steps=20, n_bins=5), n_steps=20
)
both_kinds = pytest.mark.parametrize("run", [RUN, SAMPLED], ids=["process", "sampled"])


@pytest.fixture
def evaluations(monkeypatch):
    """The counts at which an ε is really computed, with how much coarser a grid."""
    made = []
    composed = process._composed

    def counted(totals, coarser):
        made.append((sum(n for _, n in totals), coarser))
        return composed(totals, coarser)

    process._epsilon.cache_clear()
    monkeypatch.setattr(process, "_composed", counted)
    yield made
    process._epsilon.cache_clear()


def test_the_ledger_is_what_was_spent():
    empty = Ledger()
    ledger = empty.spend(STEP).spend(STEP, 2).spend(GaussianEvent(2.0, 0.5)).spend(STEP)
    assert empty.n_steps == 0
    assert empty.epsilon(1e-5) == 0.0
    assert ledger.n_steps == 5
    assert ledger.to_dict() == {"segments": [[1.1, 0.01, 3], [2.0, 0.5, 1], [1.1, 0.01, 1]]}


def test_epsilon_of_a_history_of_different_steps():
    ledger = Ledger().spend(GaussianEvent(1.0, 0.5), 4).spend(GaussianEvent(1.0, 0.125), 4)
    assert ledger.epsilon(1e-5) == pytest.approx(6.9001, rel=3e-4)


def test_a_step_without_noise_is_never_forgotten():
    ledger = Ledger().spend(STEP).spend(GaussianEvent(0.0)).spend(STEP, 10)
    assert ledger.epsilon(1e-5) == math.inf
    assert ledger.epsilon_bound(1e-5) == math.inf


def test_the_budget_stop_of_a_known_run(evaluations):
    assert Ledger().steps_within(STEP, 2.0, 1e-5) == 1725
    assert len(evaluations) <= 20
    ledger = Ledger().spend(STEP, 1725)
    assert ledger.epsilon(1e-5) <= 2.0 < ledger.spend(STEP).epsilon(1e-5)


@pytest.mark.parametrize("spent", [0, 700, 1724, 1725, 1726, 5000])
def test_steps_already_spent_come_off_the_budget(spent):
    assert Ledger().spend(STEP, spent).steps_within(STEP, 2.0, 1e-5) == max(1725 - spent, 0)


def test_steps_within_at_its_ends():
    assert Ledger().steps_within(STEP, 2.0, 1e-5, max_steps=100) == 100
    assert Ledger().steps_within(STEP, 2.0, 1e-5, max_steps=0) == 0
    assert Ledger().steps_within(GaussianEvent(0.0), 2.0, 1e-5) == 0
    # Ten draws at 0.1 % take an example with a chance below delta, which is epsilon 0.
    assert 10 <= Ledger().steps_within(GaussianEvent(0.5, 1e-3), 0.0, 0.01) < 100
    with pytest.raises(ValueError, match="epsilon"):
        Ledger().steps_within(STEP, math.nan, 1e-5)


@settings(max_examples=12)
@given(
    sigma=st.floats(0.5, 10),
    rate=st.floats(1e-3, 1),
    n=st.integers(1, 3000),
    before=st.integers(0, 300),
)
def test_the_cheap_bound_is_a_bound_and_not_far_off(sigma, rate, n, before):
    ledger = Ledger().spend(STEP, before).spend(GaussianEvent(sigma, rate), n)
    exact, bound = ledger.epsilon(1e-5), ledger.epsilon_bound(1e-5)
    assert exact <= bound <= exact * 1.06 + 1e-4


# A bound that is computed anew at every step: 2000 of them.
def test_the_bound_is_cheap_when_asked_for_at_every_step(evaluations):
    ledger, last = Ledger(), 0.0
    for _ in range(2000):
        ledger = ledger.spend(STEP)
        bound = ledger.epsilon_bound(1e-5)
        assert bound >= last
        last = bound
    assert len(evaluations) <= 64 + 32 * math.log2(2000 / 64) + 1
    assert all(coarser > 1 for _, coarser in evaluations)
    assert last >= ledger.epsilon(1e-5)


def test_the_same_question_is_answered_once(evaluations):
    ledger = Ledger().spend(STEP, 100)
    assert ledger.epsilon(1e-5) == Ledger().spend(STEP, 60).spend(STEP, 40).epsilon(1e-5)
    assert evaluations == [(100, 1)]


def test_a_ledger_survives_json():
    ledger = Ledger().spend(STEP, 3).spend(GaussianEvent(0.1 + 0.2, 1 / 3), 7)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert again == ledger
    assert hash(again) == hash(ledger)
    assert Ledger.from_dict(Ledger().to_dict()) == Ledger()


def begun(run: WholeRun, **changes: Any) -> dict[str, Any]:
    """A ledger with ``run``, whose cost is saved with ``changes``; what is None is left out."""
    saved = run.to_dict()
    cost = {name: value for name, value in (saved["cost"] | changes).items() if value is not None}
    return {"segments": [], "horizons": [saved | {"done": 1, "cost": cost}]}


@pytest.mark.parametrize(
    "saved",
    [
        {},
        [],
        None,
        {"segments": [], "extra": 1},
        {"segments": None},
        {"segments": "abc"},
        {"segments": [[1.0, 0.5]]},
        {"segments": [[1.0, 0.5, 0]]},
        {"segments": [[1.0, 0.5, -3]]},
        {"segments": [[1.0, 0.5, 2.0]]},
        {"segments": [[1.0, 0.5, True]]},
        {"segments": [[1.0, 0.0, 2]]},
        {"segments": [[-1.0, 0.5, 2]]},
        {"segments": [[math.nan, 0.5, 2]]},
        {"segments": [["1.0", 0.5, 2]]},
        {"segments": [7]},
        {"segments": [], "horizons": None},
        {"segments": [], "horizons": [7]},
        {"segments": [], "horizons": [RUN.to_dict()]},
        {"segments": [], "horizons": [RUN.to_dict() | {"done": 0}]},
        {"segments": [], "horizons": [RUN.to_dict() | {"done": 11}]},
        {"segments": [], "horizons": [RUN.to_dict() | {"done": 1.0}]},
        {"segments": [], "horizons": [RUN.to_dict() | {"done": 1, "extra": 1}]},
        {"segments": [], "horizons": [RUN.to_dict() | {"done": 1}] * 2},
        {"segments": [], "horizons": [RUN.to_dict() | {"done": 1, "cost": None}]},
        {"segments": [], "horizons": [RUN.to_dict() | {"done": 1, "cost": {"kind": "free"}}]},
        begun(RUN, segments=[[-1.0, 1, 1]]),
        begun(RUN, extra=1),
        begun(SAMPLED, noise_multiplier="2"),
        begun(SAMPLED, coefficients=[1, -1]),
        begun(SAMPLED, extra=1),
        begun(SAMPLED, normalized=None),
    ],
    ids=str,
)
def test_a_damaged_ledger_is_refused(saved):
    with pytest.raises(CheckpointError, match="ledger"):
        Ledger.from_dict(saved)


# ------------------------------------------------------------------------------------------
# Whole runs.


@both_kinds
def test_a_run_half_done_costs_the_whole(run):
    begun = Ledger().spend(run)
    assert begun.n_steps == 1
    assert begun.spend(run, 4).n_steps == 5
    assert begun.spend(run, 4) == Ledger().spend(run, 5)
    for ledger in (begun, begun.spend(run, 4), Ledger().spend(run, run.n_steps)):
        assert ledger.epsilon(1e-3) == ledger.epsilon_bound(1e-3) == run.epsilon_at(1e-3)
    assert Ledger().spend(run, 0) == Ledger()


@both_kinds
def test_more_steps_than_declared_are_refused_before_anything_changes(run):
    ledger = Ledger().spend(STEP).spend(run, run.n_steps - 1)
    before = ledger.to_dict()
    with pytest.raises(PrivacyError, match=rf"declared {run.n_steps} steps.*{run.n_steps + 1}"):
        ledger.spend(run, 2)
    assert ledger.to_dict() == before
    full = ledger.spend(run)
    with pytest.raises(PrivacyError, match="declared"):
        full.spend(run)


@both_kinds
def test_a_second_run_with_the_same_numbers_is_paid_again(run):
    first = Ledger().spend(run, run.n_steps)
    second = first.spend(replace(run, start=first.n_steps))
    assert second.n_steps == run.n_steps + 1
    assert second.epsilon(1e-3) > 1.2 * first.epsilon(1e-3)


# Two Gaussians at 2, and two steps at 2: four in all, which are one at 1.
def test_runs_compose_with_steps_as_gaussians_do():
    again = replace(RUN, start=10)
    ledger = Ledger().spend(RUN, 10).spend(again, 3).spend(GaussianEvent(2.0), 2)
    assert ledger.n_steps == 15
    assert ledger.epsilon(1e-5) == pytest.approx(4.3771780957, rel=1e-8)
    assert ledger.epsilon(1e-5) <= ledger.epsilon_bound(1e-5) <= 1.06 * ledger.epsilon(1e-5)


def test_sampled_costs_share_delta_and_add_up():
    ledger = Ledger().spend(SAMPLED).spend(RUN).spend(GaussianEvent(2.0), 3)
    known = SAMPLED.epsilon_at(5e-4) + (Process(((GaussianEvent(2.0), 4),))).epsilon_at(5e-4)
    assert ledger.epsilon(1e-3) == pytest.approx(known, rel=1e-12)
    assert ledger.epsilon_bound(1e-3) >= ledger.epsilon(1e-3)
    twice = Ledger().spend(SAMPLED).spend(replace(SAMPLED, start=20))
    assert twice.epsilon(1e-3) == pytest.approx(2 * SAMPLED.epsilon_at(5e-4), rel=1e-12)


@both_kinds
def test_a_ledger_with_runs_survives_json(run):
    ledger = Ledger().spend(STEP, 3).spend(run, 4).spend(replace(run, start=7), 2)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert again == ledger
    assert again.n_steps == 9
    assert again.epsilon(1e-3) == ledger.epsilon(1e-3)
    # What was begun goes on, and ends where it was declared to end.
    assert again.spend(run, run.n_steps - 4).n_steps == 5 + run.n_steps
    with pytest.raises(PrivacyError, match="declared"):
        again.spend(run, run.n_steps - 3)


@both_kinds
def test_a_budget_allows_all_of_a_run_or_nothing(run):
    enough = run.epsilon_at(1e-3)
    assert Ledger().steps_within(run, enough, 1e-3) == run.n_steps
    assert Ledger().steps_within(run, enough * 0.999, 1e-3) == 0
    begun = Ledger().spend(run, 3)
    assert begun.steps_within(run, enough, 1e-3) == run.n_steps - 3
    assert begun.steps_within(run, enough, 1e-3, max_steps=2) == 2
    assert begun.steps_within(run, enough * 0.999, 1e-3) == 0
    assert begun.steps_within(replace(run, start=3), enough, 1e-3) == 0
    assert Ledger().spend(run, run.n_steps).steps_within(run, enough, 1e-3) == 0


# After a Gaussian run at 2, steps at 2: four releases cost 4.3772.
def test_steps_after_a_run_come_on_top():
    assert Ledger().spend(RUN, 2).steps_within(GaussianEvent(2.0), 4.38, 1e-5) == 3
    after = Ledger().spend(SAMPLED)
    budget = after.spend(GaussianEvent(9.0), 4).epsilon(1e-3)
    assert after.steps_within(GaussianEvent(9.0), budget, 1e-3) == 4


@both_kinds
def test_noise_is_calibrated_on_top_of_a_run(run):
    past = Ledger().spend(run, 3)

    def planned(sigma):
        more = WholeRun(Process(((GaussianEvent(sigma), 1),)), n_steps=5, start=3)
        return past.spend(more, 5)

    sigma = calibrate(planned, target_epsilon=8.0, target_delta=1e-3)
    assert 0.999 * 8.0 < planned(sigma).epsilon(1e-3) <= 8.0
    with pytest.raises(PrivacyError, match="out of reach"):
        calibrate(planned, target_epsilon=0.5, target_delta=1e-3)
