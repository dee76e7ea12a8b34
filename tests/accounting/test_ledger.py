"""Every step counted once, cheaply, and kept through a checkpoint."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opake_lightning.accounting import GaussianEvent, Ledger, process
from opake_lightning.errors import CheckpointError

STEP = GaussianEvent(1.1, 0.01)


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
    ],
    ids=str,
)
def test_a_damaged_ledger_is_refused(saved):
    with pytest.raises(CheckpointError, match="ledger"):
        Ledger.from_dict(saved)
