"""All interleavings of a few processes, on the real record; and every rule, broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opake_lightning.trainer import _lifecycle
from opake_lightning.trainer._inputs import Inputs
from opake_lightning.trainer._record import Known, RunRecord, Segment
from tests.trainer import record_world
from tests.trainer.record_world import BrokenPromiseError, Scenario, Setup, search

RATES, DATA, PLAN = Setup(rates="others"), Setup(data="others"), Setup(plan="another")

SCENARIOS = {
    "two resume at once": Scenario(frozenset({"kill"}), (Setup(), RATES), depth=8),
    "forks and kills": Scenario(frozenset({"kill"}), (Setup(), PLAN), depth=8, steps=4),
    "other data": Scenario(frozenset({"kill"}), (Setup(), DATA), depth=8),
    "averages": Scenario(frozenset({"average", "kill"}), depth=8),
    "fits": Scenario(frozenset({"fit", "kill"}), (Setup(), DATA), depth=6, steps=4),
    "fits on unnamed keys": Scenario(
        frozenset({"fit", "kill"}), (Setup(), DATA), ((False, Setup()),), depth=6, steps=4
    ),
    "copies": Scenario(frozenset({"fit", "copy"}), (Setup(), RATES), depth=6, places=3, steps=4),
    "resets": Scenario(frozenset({"fit", "reset"}), (Setup(), DATA), depth=6, steps=4),
    "weights from a file": Scenario(frozenset({"fit", "load", "kill"}), depth=7, steps=4),
    "lost records": Scenario(frozenset({"lose", "kill"}), (Setup(), RATES), depth=8),
    "one key for two runs": Scenario(
        frozenset({"again"}), (Setup(), RATES), ((True, Setup()), (True, RATES)), depth=6
    ),
    "three at once": Scenario(frozenset(), places=3, depth=9, files=1),
    "two folders": Scenario(frozenset({"kill"}), (Setup(), RATES), depth=7, folders=2, places=3),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_that_may_happen_breaks_a_promise(name):
    assert search(SCENARIOS[name]) > 300


# -- every rule, broken on purpose ----------------------------------------------------------------


def last_one_counts(self: Known, *others: Known) -> Known:
    known = self
    for other in others:
        released = {**known.released, **other.released}
        known = Known(released, known.complete and other.complete)
    return known


def forgets_that_it_is_not_all(self: Known, *others: Known) -> Known:
    return Known(joined(self, *others).released)


def without_inputs(self: RunRecord, word: str, nonce: str, inputs: str) -> RunRecord:
    del inputs
    return opened(self, word, nonce, "")


def without_its_number(self: RunRecord, word: str, nonce: str, inputs: str) -> RunRecord:
    n = self.n_steps
    return replace(self._folded(f"{word}:{nonce}:{inputs}"), begun=n, step=n)


def on_the_same_key(self: RunRecord, word: str, nonce: str, inputs: str) -> RunRecord:
    key = self.key if word == "fork" else opened(self, word, nonce, inputs).key
    return replace(opened(self, word, nonce, inputs), key=key)


def counts_twice(self: RunRecord, event: Any, rounding: str) -> RunRecord:
    segment = self.released.get(self.segment, Segment()).then(event, rounding)
    released = {**self.released, self.segment: segment}
    return replace(self, step=self.step + 1, released=released)


def counts_the_first_only(self: RunRecord, event: Any, rounding: str) -> RunRecord:
    if self.released:
        return replace(self, step=self.step + 1)
    return released_one(self, event, rounding)


def all_that_is_seen(self: Inputs, saved: Any, live: Any) -> list[str]:
    del self, saved, live
    return []


def writes_over_others(world: Any, process: Any, folders: Any) -> Any:
    journals = {place: text for place, text in world.journals if place[0] not in folders}
    return written(world._replace(journals=tuple(journals.items())), process, folders)


def writes_nothing(world: Any, process: Any, folders: Any) -> Any:
    del process, folders
    return world


def compares_no_weights(saved: Any, inputs: Any, plan: Any, weights: Any) -> Any:
    del weights
    return compared(saved, inputs, plan, lambda: saved["weights"])


joined, written, compared = Known.joined, record_world.written, _lifecycle.compared
opened, released_one, to_plain = RunRecord.opened, RunRecord.released_one, RunRecord.to_plain

COUNTED, GRADIENT, MORE = "all is counted", "one gradient", "nothing else is counted"
UNKNOWN, SAME, PUBLIC = "unknown is told", "nothing changed, and goes on", "no key in public"
# What is broken, in which scenario it is found, and which promise it breaks. Where two rules guard
# one thing, as inputs in the key and the entry of a copy do, it is found if both are broken.
NO_INPUTS = (RunRecord, "opened", without_inputs)
BROKEN: dict[str, tuple[list[tuple[Any, str, Any]], str, str]] = {
    "the last record counts": ([(Known, "joined", last_one_counts)], "three at once", COUNTED),
    "a lost record is forgotten": (
        [(Known, "joined", forgets_that_it_is_not_all)],
        "lost records",
        UNKNOWN,
    ),
    "inputs are not in the key": ([NO_INPUTS], "one key for two runs", GRADIENT),
    "nor is the first step's number": (
        [(RunRecord, "opened", without_its_number)],
        "weights from a file",
        COUNTED,
    ),
    "a fork has the run's key": (
        [(RunRecord, "opened", on_the_same_key)],
        "forks and kills",
        GRADIENT,
    ),
    "a replay counts": ([(RunRecord, "released_one", counts_twice)], "two resume at once", MORE),
    "steps do not count": (
        [(RunRecord, "released_one", counts_the_first_only)],
        "two resume at once",
        COUNTED,
    ),
    "rates are not compared": (
        [(Inputs, "changed", all_that_is_seen)],
        "two resume at once",
        GRADIENT,
    ),
    "data are not compared": ([(Inputs, "changed", all_that_is_seen)], "other data", GRADIENT),
    "the plan is not compared": (
        [(Inputs, "changed_plan", lambda self, saved: [])],
        "forks and kills",
        GRADIENT,
    ),
    "weights are not compared": (
        [(_lifecycle, "compared", compares_no_weights)],
        "averages",
        GRADIENT,
    ),
    "a copy has the run's key": (
        [NO_INPUTS, (RunRecord, "copied", lambda self: replace(self, inputs=None))],
        "copies",
        GRADIENT,
    ),
    "a reset goes on with the key": (
        [NO_INPUTS, (RunRecord, "reset", lambda self: RunRecord("f"))],
        "resets",
        GRADIENT,
    ),
    "what is public holds the key": (
        [
            (RunRecord, "public", lambda self: self),
            (RunRecord, "to_plain", lambda self, *, secret: to_plain(self, secret=True)),
        ],
        "weights from a file",
        PUBLIC,
    ),
    "nothing is written down": (
        [(record_world, "written", writes_nothing)],
        "two resume at once",
        COUNTED,
    ),
    "one file for all processes": (
        [(record_world, "written", writes_over_others)],
        "forks and kills",
        COUNTED,
    ),
    "a resume begins anew": (
        [(RunRecord, "knowing", lambda self, *known: replace(self, step=self.begun))],
        "two resume at once",
        SAME,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name, monkeypatch):
    rules, scenario, promise = BROKEN[name]
    for owner, rule, broken in rules:
        monkeypatch.setattr(owner, rule, broken)
    with pytest.raises(BrokenPromiseError, match=promise):
        search(SCENARIOS[scenario])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_nor_does_a_longer_story(name):
    scenario = SCENARIOS[name]
    assert search(replace(scenario, depth=scenario.depth + 1)) > 1000
