"""What one record makes of another: of a run that goes on, in other directories and processes."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.errors import CheckpointError
from opake_lightning.trainer._journal import (
    Journal,
    Spending,
    file_name,
    later,
    most_recorded,
    recorded,
)

EVENT = GaussianEvent(1.0, 0.25)


class Fake:
    """A run that has spent so much."""

    def __init__(self, spending: Spending) -> None:
        self.spending = spending


def spent(n: int) -> Spending:
    return Spending(Ledger().spend(EVENT, n), (), "a" * 16)


def kept(path: Path, n: int, name: str = "") -> Journal:
    path.mkdir(exist_ok=True)
    journal = Journal(name)
    journal.keep_in(path, Fake(spent(n)))
    return journal


def test_the_later_of_two_has_more_steps_then_more_forks_and_is_else_the_second():
    few, other, forked = Spending(), Spending(trail="a"), Spending(forks=(0,))
    assert later(few, forked) is later(forked, few) is forked
    assert later(few, other) is other
    assert later(other, few) is few


@pytest.mark.parametrize("n", [2, 5])
def test_who_goes_on_with_a_file_keeps_the_most(n, tmp_path):
    name = kept(tmp_path, 3).name
    kept(tmp_path, n, name)
    assert recorded(name, [tmp_path]) == spent(max(n, 3))


def test_another_process_keeps_what_is_there(tmp_path):
    journal = kept(tmp_path, 3)
    other = pickle.loads(pickle.dumps(journal))
    assert (other.name, other.directories) == (journal.name, journal.directories)
    assert recorded(journal.name, [tmp_path]) == spent(3)
    other.record(spent(4))
    assert recorded(journal.name, [tmp_path]) == spent(4)


def test_two_processes_that_go_on_at_once_do_not_write_over_each_other(tmp_path):
    """The second begins later, and has come to less when it ends."""
    one = kept(tmp_path, 3)
    other = kept(tmp_path, 3, one.name)
    for n in (8, 9, 10):
        one.record(spent(n))
    for n in (4, 5):
        other.record(spent(n))
    assert recorded(one.name, [tmp_path]) == spent(10)


def test_the_most_of_all_directories_counts(tmp_path):
    counts = {tmp_path / str(n): n for n in (3, 7, 2, 5, 1, 6)}
    name = Journal().name
    for path, n in counts.items():
        kept(path, n, name)
    for some in combinations(counts, 2):
        assert recorded(name, some) == spent(max(counts[path] for path in some))


@pytest.mark.parametrize("known", [2, 4])
def test_what_is_known_counts_if_it_is_more(known, tmp_path):
    name = kept(tmp_path, 3).name
    assert most_recorded(name, [tmp_path], spent(known)) == spent(max(3, known))


def test_a_trail_tells_who_made_each_step_and_at_which_rate():
    steps = [(("a",), 0.1), (("a",), 0.2), (("b",), 0.1), ((), None)]
    one = Spending()
    trails = {one.trail}
    for words, rate in steps:
        trails |= {one.then(EVENT, *other).trail for other in steps}
        one = one.then(EVENT, words, rate)
        assert one.then(EVENT, words).trail == one.trail  # no step
    assert len(trails) == 1 + len(steps) ** 2  # whatever came before is in it
    assert Spending().then(EVENT, ("a",), 0.1, 0.2) == Spending().then(EVENT, ("a",), 0.1).then(
        EVENT, ("a",), 0.2
    )


def test_a_step_leaves_the_forks_and_a_record_reads_back():
    one = replace(Spending(), forks=(0, 0)).then(EVENT, ("a",), 0.1, 0.1)
    assert (one.ledger.n_steps, one.forks) == (2, (0, 0))
    assert Spending.from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {"ledger": Ledger().to_dict(), "forks": []},
        {**Spending().to_dict(), "rate": 0.1},
    ],
)
def test_what_is_no_record_is_refused(saved):
    with pytest.raises(CheckpointError, match="no record of what was spent"):
        Spending.from_dict(saved)


def test_a_step_is_not_written_over_the_one_before(tmp_path):
    journal = kept(tmp_path, 3)
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    journal.record(spent(4))
    assert file.read_bytes()[:512] == before[:512]


def test_a_record_that_cannot_be_read_is_not_passed_over(tmp_path):
    name = Journal().name
    (tmp_path / file_name(name, "0")).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        recorded(name, [tmp_path])


def test_a_directory_that_may_not_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    def denied(path: str) -> list[str]:
        raise PermissionError(path)

    journal = kept(tmp_path, 3)
    monkeypatch.setattr("os.listdir", denied)
    with pytest.raises(CheckpointError, match="cannot be read"):
        recorded(journal.name, [tmp_path])
    monkeypatch.undo()
    assert recorded(journal.name, [tmp_path, tmp_path / "none"]) == spent(3)


def test_a_directory_that_is_gone_needs_no_larger_file(tmp_path):
    journal = kept(tmp_path / "a", 3)
    shutil.rmtree(tmp_path / "a")
    journal.record(replace(spent(4), forks=tuple(range(1000))))


def test_every_run_has_a_name_of_its_own():
    assert len({Journal().name for _ in range(100)}) == 100
