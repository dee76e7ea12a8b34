"""The record of a run as a value, and as files in directories."""

from __future__ import annotations

import json
import shutil
from itertools import combinations, permutations
from pathlib import Path

import pytest

from opake_lightning.accounting import GaussianEvent, Ledger, Process, WholeRun
from opake_lightning.errors import CheckpointError
from opake_lightning.random import fold_in, key
from opake_lightning.trainer._journal import Journal, file_name, read, read_on_rank_zero
from opake_lightning.trainer._keys import derive
from opake_lightning.trainer._record import (
    Known,
    Released,
    RunRecord,
    Segment,
    new_lineage,
)

EVENT = GaussianEvent(1.0, 0.25)
HORIZON = WholeRun(Process(((EVENT, 4),)), n_steps=6)


def segment(n: int, *, event: object = EVENT, made_with: str = "1 rank") -> Segment:
    one = Segment()
    for _ in range(n):
        one = one.then(event, made_with)
    return one


def started(path: tuple[str, ...] = ()) -> RunRecord:
    return RunRecord(new_lineage(), key(7), path).opened("fit", "", "inputs")


def after(record: RunRecord, n: int, made_with: str = "1 rank") -> RunRecord:
    for _ in range(n):
        record = record.released_one(EVENT, made_with)
    return record


# -- what was released ----------------------------------------------------------------------------


def test_what_is_joined_is_the_larger_of_each_in_any_order():
    found = [{"a": segment(3), "b": segment(1)}, {"a": segment(2)}, {"b": segment(4)}, {}]
    for complete in (True, False):
        parts = [*map(Known, found[:3]), Known(found[3], complete)]
        for one, *others in permutations(parts):
            assert one.joined(*others) == Known({"a": segment(3), "b": segment(4)}, complete)
            assert one.joined(*others, *others, one) == one.joined(*others)
        one, *others = parts
        assert one.joined(others[0]).joined(others[1].joined(others[2])) == one.joined(*others)


def test_steps_that_are_made_again_cost_nothing_and_later_ones_do():
    record = after(started(), 3)
    again = after(started(), 1).knowing(record.known)
    assert [again.to_repeat, again.n_steps] == [2, 3]
    again = after(again, 2)
    assert (again.to_repeat, again.step, again.released) == (0, 3, record.released)
    assert after(again, 1).n_steps == 4


def test_a_segment_that_begins_later_has_another_key():
    """Steps are told apart by number: those of one that began earlier have other numbers."""
    alone = RunRecord("f", key(7))
    told = alone.knowing(Known({"other": segment(2)}))
    assert alone.opened("fit", "", "inputs").key != told.opened("fit", "", "inputs").key


def test_another_segment_counts_in_addition_and_has_another_key():
    record = after(started(), 3)
    fork = after(record.opened("fork", "nonce", "others"), 2)
    assert (fork.begun, fork.step, fork.n_steps) == (3, 5, 5)
    assert fork.ledger == Ledger().spend(EVENT, 5)
    assert len({record.key, fork.key, key(7)}) == 3
    assert fork.key == derive(key(7), fork.path)


@pytest.mark.parametrize(
    "other", [("fit", "", "others"), ("fit", "1", "inputs"), ("fork", "", "inputs")]
)
def test_whatever_differs_has_another_key(other):
    record = RunRecord("f", key(7))
    assert record.opened(*other).key != record.opened("fit", "", "inputs").key
    assert record.opened("fit", "", "inputs").key == record.opened("fit", "", "inputs").key


def test_equal_horizons_are_each_paid_whole():
    pair: Released = {name: segment(2, event=HORIZON) for name in ("a", "b")}
    record = RunRecord("f", key(7), released=pair)
    assert [(run.start, done) for run, done in record.ledger.horizons] == [(1, 2), (2, 2)]
    alone = RunRecord("f", released={"a": pair["a"]})
    assert record.ledger.epsilon(1e-5) > alone.ledger.epsilon(1e-5)


def test_the_open_horizon_is_found_again_in_the_total():
    """Whoever asks what a budget allows asks for more steps of it."""
    record = started()
    record = record.released_one(HORIZON, "1 rank")
    mixed = record.knowing(Known({"0": segment(5, event=HORIZON)}))
    for each in (mixed, RunRecord.from_plain(mixed.to_plain(secret=True))):
        assert dict(each.ledger.horizons)[HORIZON] == 1


def test_what_steps_were_made_with_is_known_of_each():
    one = segment(3)
    for how in ("2 ranks", "2 ranks", "1 rank"):
        one = one.then(EVENT, how)
    assert one.rounding == ((0, "1 rank"), (3, "2 ranks"), (5, "1 rank"))
    assert one.rounding_since(0) == one.rounding_since(2) == {"1 rank", "2 ranks"}
    assert one.rounding_since(5) == {"1 rank"}
    assert one.rounding_since(6) == Segment().rounding_since(0) == set()


# -- what becomes of a record ---------------------------------------------------------------------


def test_no_key_of_a_copy_follows_from_what_is_public():
    record = after(started(), 2)
    copies = [record.copied() for _ in range(2)]
    assert len({record.key, *(copy.key for copy in copies)}) == 3
    assert {copy.released == record.released for copy in copies} == {True}
    assert len({record.lineage, *(copy.lineage for copy in copies)}) == 3
    # A named key does not lead to the same place either.
    assert all(copy.key == derive(key(7), copy.path) for copy in copies)


def test_reset_forgets_the_past_and_not_that_its_keys_were_used():
    record = after(started(), 2)
    reset = record.reset()
    assert (reset.n_steps, reset.complete, reset.inputs) == (0, True, None)
    assert len({record.key, reset.key, reset.reset().key, key(7)}) == 4
    assert RunRecord("f").reset().path == ()  # of nothing


def test_a_key_that_is_kept_apart_begins_at_its_root():
    record = after(started(), 2)
    assert record.rooted(key(8), apart=True).key == key(8)
    assert record.rooted(key(8), apart=False).key == record.key
    loaded = record.public()
    assert loaded.key is None
    begun = loaded.rooted(key(7), apart=False).opened("fit", "", "inputs")
    assert begun.key not in (key(7), record.key)
    # It is a run of its own, with a file of its own.
    assert loaded.lineage == record.lineage != loaded.rooted(key(7), apart=False).lineage


def test_what_is_public_holds_no_key_and_none_follows_from_it():
    record = after(started(), 2)
    text = json.dumps(record.public().to_plain(secret=False))
    assert record.key is not None
    assert record.key.hex() not in text
    assert key(7).hex() not in text
    assert fold_in(key(7), record.path[0]).hex() not in text


@pytest.mark.parametrize("secret", [True, False])
def test_plain_values_are_plain_and_come_back(secret):
    record = after(started(), 3).opened("fork", "1", "2")
    plain = json.loads(json.dumps(record.to_plain(secret=secret)))
    back = RunRecord.from_plain(plain)
    assert (back if secret else RunRecord.from_plain({**plain, "key": record.key.hex()})) == record
    assert (plain["key"] is None) == (not secret)


PLAIN = after(started(), 1).to_plain(secret=True)


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "version"])
@pytest.mark.parametrize("value", [object(), 1.5, b"x"])
def test_a_damaged_field_is_refused_by_name(name, value):
    with pytest.raises(CheckpointError, match=name):
        RunRecord.from_plain({**PLAIN, name: value})
    with pytest.raises(CheckpointError, match=rf"lacks \['{name}'\]"):
        RunRecord.from_plain({n: v for n, v in PLAIN.items() if n != name})


@pytest.mark.parametrize("saved", [None, [], {"a": None}, {1: {}}, {"a": {"ledger": {}}}])
def test_what_is_no_record_is_refused(saved):
    for plain in (saved, {"released": saved, "complete": True}, {"released": {}, "complete": 1}):
        with pytest.raises(CheckpointError):
            Known.from_plain(plain)


@pytest.mark.parametrize("rounding", [None, [1], [[0]], [["0", "1 rank"]], [[0, 1]], [[0, "a", 1]]])
def test_what_tells_nothing_of_how_steps_were_made_is_refused(rounding):
    plain = Known({"a": segment(1)}).to_plain()
    plain["released"]["a"]["rounding"] = rounding
    with pytest.raises(CheckpointError, match="what steps were made with"):
        Known.from_plain(plain)


def test_an_unknown_field_is_refused():
    with pytest.raises(CheckpointError, match="unknown fields"):
        RunRecord.from_plain({**PLAIN, "new": 1})


# -- files ----------------------------------------------------------------------------------------


def kept(path: Path, n: int, lineage: str = "") -> Journal:
    path.mkdir(exist_ok=True)
    journal = Journal(lineage or new_lineage())
    journal.keep_in(path, Known({"a": segment(n)}))
    return journal


def test_what_two_processes_wrote_is_merged(tmp_path):
    """Neither writes over the other, whichever ends last, and whatever each knew."""
    one = kept(tmp_path, 3)
    other = kept(tmp_path, 3, one.lineage)
    for n in (8, 9, 10):
        one.append(Known({"a": segment(n)}))
    for n in (1, 2):
        other.append(Known({"a": segment(3), "fork": segment(n)}))
    assert read(one.lineage, [tmp_path]) == Known({"a": segment(10), "fork": segment(2)})


def test_all_directories_are_read(tmp_path):
    counts = {tmp_path / str(n): n for n in (3, 7, 2, 5, 1, 6)}
    lineage = new_lineage()
    for path, n in counts.items():
        kept(path, n, lineage)
    for some in combinations(counts, 2):
        assert read(lineage, some) == Known({"a": segment(max(counts[path] for path in some))})
        assert read_on_rank_zero(lineage, some) == read(lineage, some)


def test_nothing_is_not_an_empty_record(tmp_path):
    assert read(new_lineage(), [tmp_path, tmp_path / "none"]) is None
    assert read_on_rank_zero(new_lineage(), [tmp_path]) is None
    journal = Journal(new_lineage())
    journal.keep_in(tmp_path, Known({}))
    assert read(journal.lineage, [tmp_path]) == Known({})


def test_a_directory_that_joins_later_has_the_latest(tmp_path):
    """A checkpoint may be on its way to the disk in another thread while a step is made."""
    journal = kept(tmp_path / "a", 3)
    journal.append(Known({"a": segment(4)}))
    (tmp_path / "b").mkdir()
    journal.keep_in(tmp_path / "b", Known({"a": segment(3)}))
    assert read(journal.lineage, [tmp_path / "b"]) == Known({"a": segment(4)})


def test_a_step_is_not_written_over_the_one_before(tmp_path):
    journal = kept(tmp_path, 3)
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    journal.append(Known({"a": segment(4)}))
    assert file.read_bytes()[:512] == before[:512]


def test_a_record_that_cannot_be_read_is_not_passed_over(tmp_path):
    lineage = new_lineage()
    (tmp_path / file_name(lineage, "0")).mkdir()
    for reads in (read, read_on_rank_zero):
        with pytest.raises(CheckpointError, match="cannot be read"):
            reads(lineage, [tmp_path])


def test_a_directory_that_may_not_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    def denied(path: str) -> list[str]:
        raise PermissionError(path)

    journal = kept(tmp_path, 3)
    monkeypatch.setattr("os.listdir", denied)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(journal.lineage, [tmp_path])
    monkeypatch.undo()
    assert read(journal.lineage, [tmp_path, tmp_path / "none"]) == Known({"a": segment(3)})


def test_a_directory_that_is_gone_needs_no_larger_file(tmp_path):
    journal = kept(tmp_path / "a", 3)
    shutil.rmtree(tmp_path / "a")
    journal.append(Known({f"{n}": segment(1) for n in range(100)}))


@pytest.mark.parametrize(
    "change",
    [
        {"begun": 3},
        {"begun": -1},
        {"step": -1},
        {"plan": {"target_delta": "1e-5"}},
        {"plan": {"target_delta": 2.0}},
        {"plan": {"planned_steps": [1]}},
        {"plan": {"noise_multiplier": -1.0}},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_is_refused(change):
    plain = after(started(), 2).to_plain(secret=True)
    assert RunRecord.from_plain(plain)
    with pytest.raises(CheckpointError, match="corrupt checkpoint"):
        RunRecord.from_plain({**plain, **change})


@pytest.mark.parametrize(
    "rounding", [[], [[1, "1 rank"]], [[0, "1"], [0, "2"]], [[0, "1"], [2, "2"]]]
)
def test_how_steps_were_made_is_told_of_each(rounding):
    plain = after(started(), 2).to_plain(secret=True)
    (name,) = plain["released"]
    plain["released"][name] = {**plain["released"][name], "rounding": rounding}
    with pytest.raises(CheckpointError, match="do not divide the 2 of a segment"):
        RunRecord.from_plain(plain)
