"""Kill, break and corrupt small private runs, resume them, and compare with what an observer saw.

    python benchmarks/faults.py            # the table of docs/faults.md; a quarter of an hour
    python benchmarks/faults.py --quick    # ten kills, printed only

Every run is resumed from its newest checkpoint until it comes to its end. The observer is a file to
which each process appends a digest of what it releases, before anything else is done with it. What
a run says it has spent, when it is resumed and at its end, is compared with the number of different
releases in that file. A step is recorded just before the observer sees it, on several ranks before
the sum over ranks, so a kill in between counts one step more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lives import N_STEPS, SAVE_EVERY, Life, Outcome, best_checkpoint, outcome, seen, warm_up

from opake_lightning import CheckpointError
from opake_lightning.trainer import _checkpoint_io
from opake_lightning.trainer._checkpoint_io import SealedCheckpointIO
from opake_lightning.trainer._run import Run

DOC = Path(__file__).parents[1] / "docs" / "faults.md"
BEGIN, END = "<!-- begin: benchmarks/faults.py -->", "<!-- end: benchmarks/faults.py -->"


@dataclass
class Row:
    """What came of one kind of fault."""

    fault: str
    tries: int = 0
    survived: int = 0
    lost: list[int] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    runs: int = 0
    equal: int = 0

    @property
    def under(self) -> int:
        """How often less was counted than had been released."""
        return sum(error < 0 for error in self.errors)

    def cells(self) -> list[str]:
        """One line of the table."""
        lost = (
            f"{sum(self.lost) / len(self.lost):.1f}, at most {max(self.lost)}" if self.lost else "–"
        )
        errors = f"{min(self.errors)} … {max(self.errors)}" if self.errors else "–"
        return [
            self.fault, str(self.tries), str(self.survived), lost, errors, str(self.under),
            f"{self.equal} of {self.runs}" if self.runs else "–",
        ]  # fmt: skip


HEAD = [
    "fault", "tried", "survived", "steps to repeat", "ledger − released", "under-counts",
    "runs that ended bit for bit as the unbroken one",
]  # fmt: skip

# One life of a run: start it, and say whether it came to its end by itself.
Live = Callable[[Life], bool]


def broken_runs(row: Row, wanted: int, whole: Outcome | None, live: Live, **life: Any) -> Row:
    """Break runs with ``live`` until ``wanted`` faults have struck; each run goes on to its end.

    Args:
        row: Is filled.
        wanted: Number of faults.
        whole: How the unbroken run ended; None if there is nothing to be equal to.
        live: One life.
        life: How the processes are started.
    """
    while row.tries < wanted:
        with _folder() as folder:
            done, struck = False, 0
            while not done:
                before, resumes = seen(folder), best_checkpoint(folder) is not None
                if row.tries < wanted:
                    one = Life(folder, **life)
                    one.start()
                    done = live(one)
                else:
                    one = Life(folder, **{**life, "spoil": None})
                    one.start()
                    one.wait()
                    done = True
                after = seen(folder)
                if after.told is not None and resumes:
                    row.errors.append(after.told - len(before.releases))
                if not done:
                    row.tries += 1
                    struck += 1
                    row.lost.append(after.steps - _saved_steps(folder))
            end = outcome(folder)
            row.survived += struck
            row.errors.append(end.ledger - len(after.releases))
            row.runs += 1
            if whole is not None:
                row.equal += end == whole and len(after.releases) == N_STEPS
    return row


def at_random(rng: random.Random, ranks: int, duration: float) -> Live:
    """SIGKILL at a random instant; on several ranks all at once, or one before the others."""

    def live(life: Life) -> bool:
        victims = rng.choice([None, *([rank] for rank in range(ranks))]) if ranks > 1 else None
        return life.end_after(rng.uniform(0.0, 1.1 * duration), victims)

    return live


def by_itself(life: Life) -> bool:
    """The fault is in the process; wait for its end."""
    life.wait()
    return any(path.stat().st_size for path in [life.folder / "end"] if path.exists())


# -- processes that break by themselves -----------------------------------------------------------


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _at_call(number: int) -> Callable[[], bool]:
    """Whether this is the call of that number, from 1."""
    calls = itertools.count(1)
    return lambda: next(calls) == number


def dies_in_a_save(rng: random.Random) -> Callable[[int], None]:
    """The process is killed when part of a checkpoint has been written."""

    def spoil(rank: int) -> None:
        rng.seed(rng.random() + os.getpid())
        write, now, share = _checkpoint_io._write, _at_call(rng.randint(1, 6)), rng.random()

        def broken(checkpoint: dict[str, Any], file: Any) -> None:
            write(checkpoint, file)
            if now():
                file.flush()
                file.truncate(int(share * file.tell()))
                _die()

        _checkpoint_io._write = broken

    return spoil


def dies_before_the_rename(rng: random.Random) -> Callable[[int], None]:
    """The process is killed when a checkpoint is written and does not have its name yet."""

    def spoil(rank: int) -> None:
        rng.seed(rng.random() + os.getpid())
        sync, now = os.fsync, _at_call(rng.randint(1, 6))

        def broken(descriptor: int) -> None:
            sync(descriptor)
            if now():
                _die()

        os.fsync = broken

    return spoil


def dies_before_the_update(rng: random.Random) -> Callable[[int], None]:
    """The process is killed between a release and the move of the parameters."""

    def spoil(rank: int) -> None:
        rng.seed(rng.random() + os.getpid())
        apply, now = Run.apply, _at_call(rng.randint(1, 20))

        def broken(self: Run, released: Any) -> None:
            if now():
                _die()
            apply(self, released)

        Run.apply = broken

    return spoil


def raises(error: type[BaseException], rng: random.Random) -> Callable[[int], None]:
    """The process meets ``error`` at a random step, in the loss."""

    def spoil(rank: int) -> None:
        import lives

        rng.seed(rng.random() + os.getpid())
        loss, now = lives.Net.per_example_loss, _at_call(rng.randint(1, 25))

        def broken(self: Any, batch: Any) -> Any:
            if now():
                raise error("a fault")
            return loss(self, batch)

        lives.Net.per_example_loss = broken

    return spoil


# -- disks ----------------------------------------------------------------------------------------


def bad_disk(row: Row, wanted: int, spoil: Callable[[Path], None], said: str) -> Row:
    """Save to a file system that goes bad; repair it; resume.

    Args:
        row: Is filled.
        wanted: Number of runs.
        spoil: Prepares the process so that the file system of the path goes bad.
        said: What the error must say.
    """
    with _small_disk() as disk:
        while disk is not None and row.tries < wanted:
            with _folder() as notes:
                folder = disk / str(row.tries)
                folder.mkdir()
                first = Life(folder, notes=notes, spoil=lambda rank, disk=disk: spoil(disk))
                first.start()
                first.wait()
                (error,) = notes.glob("error-0.txt")
                told = error.read_text()
                _mount("-o", "remount,rw", str(disk))
                (disk / "filler").unlink(missing_ok=True)
                row.tries += 1
                row.survived += "CheckpointError" in told and said in told
                known = seen(notes)
                row.lost.append(known.steps - _saved_steps(folder))
                second = Life(folder, notes=notes)
                second.start()
                second.wait()
                after = seen(notes)
                row.errors.append((after.told or 0) - len(known.releases))
                row.errors.append(outcome(notes).ledger - len(after.releases))
                row.runs += 1
                row.equal += outcome(notes) == WHOLE["1 rank"] and len(after.releases) == N_STEPS
                shutil.rmtree(folder)
    return row


def _fill_after_a_save(disk: Path) -> None:
    save, saved = SealedCheckpointIO.save_checkpoint, [0]

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        saved[0] += 1
        if saved[0] == 3:
            with (disk / "filler").open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(1024)):
                        pass
                except OSError:
                    pass
                file.truncate(max(file.tell() - 4096, 0))
        save(self, *args, **kwargs)

    SealedCheckpointIO.save_checkpoint = broken


def _lock_after_a_save(disk: Path) -> None:
    save, saved = SealedCheckpointIO.save_checkpoint, [0]

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        saved[0] += 1
        if saved[0] == 3:
            # Files that are open keep a file system from being locked.
            module = self.saving.__self__
            module._dp.journal.__init__(module._dp.journal.lineage)
            _mount("-o", "remount,ro", str(disk))
        save(self, *args, **kwargs)

    SealedCheckpointIO.save_checkpoint = broken


# -- damaged files --------------------------------------------------------------------------------


def damaged(row: Row, wanted: int, rng: random.Random, damage: Callable[[bytearray], None]) -> Row:
    """Damage a copy of a checkpoint and try to load it."""
    with _folder() as folder:
        life = Life(folder)
        life.start()
        life.wait()
        content = (folder / "last.ckpt").read_bytes()
        path = folder / "damaged.ckpt"
        for _ in range(wanted):
            spoiled = bytearray(content)
            damage(spoiled)
            path.write_bytes(spoiled)
            row.tries += 1
            try:
                SealedCheckpointIO().load_checkpoint(path)
            except CheckpointError:
                row.survived += 1
    return row


def _cut(rng: random.Random) -> Callable[[bytearray], None]:
    def damage(content: bytearray) -> None:
        del content[rng.randrange(len(content)) :]

    return damage


def _flip(rng: random.Random, bits: int) -> Callable[[bytearray], None]:
    def damage(content: bytearray) -> None:
        for place in rng.sample(range(8 * len(content)), bits):
            content[place // 8] ^= 1 << place % 8

    return damage


# -- the table ------------------------------------------------------------------------------------


# How runs are started, and the number of kills.
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "1 rank": ({}, 180),
    "2 ranks": ({"ranks": 2}, 90),
    "DP-FTRL": ({"correlated": True}, 90),
}
WHOLE: dict[str, Outcome] = {}
TIME: dict[str, float] = {}


def table(*, quick: bool, seed: int) -> Iterator[Row]:
    """Every kind of fault, one row after the other."""
    rng = random.Random(seed)
    many = (lambda n: max(1, n // 30)) if quick else (lambda n: n)
    for name, (life, wanted) in RUNS.items():
        _unbroken(name, life)
        live = at_random(rng, life.get("ranks", 1), TIME[name])
        row = Row(f"SIGKILL at any instant, {name}")
        yield broken_runs(row, many(wanted), WHOLE[name], live, **life)
    for name, spoil in (
        ("SIGKILL while a checkpoint is written", dies_in_a_save(rng)),
        ("SIGKILL before a checkpoint is renamed", dies_before_the_rename(rng)),
        ("SIGKILL between a release and its update", dies_before_the_update(rng)),
        ("an exception in the loss", raises(ArithmeticError, rng)),
        ("KeyboardInterrupt in the loss", raises(KeyboardInterrupt, rng)),
    ):
        yield broken_runs(Row(name), many(30), WHOLE["1 rank"], by_itself, spoil=spoil)
    for name in ("1 rank", "DP-FTRL"):
        row = Row(f"SIGKILL at any instant of forks with another clipping norm, {name}")
        yield forked_runs(row, many(40), at_random(rng, 1, TIME[name]), **RUNS[name][0])
    name, wanted = "disk full while a checkpoint is saved", many(20)
    yield bad_disk(Row(name), wanted, _fill_after_a_save, "No space left")
    name = "directory read-only while a checkpoint is saved"
    yield bad_disk(Row(name), wanted, _lock_after_a_save, "Read-only")
    yield damaged(Row("checkpoint cut off at a random place"), many(300), rng, _cut(rng))
    for bits in (1, 16):
        name = f"{bits} random bit{'s' * (bits > 1)} of a checkpoint flipped"
        yield damaged(Row(name), many(1500), rng, _flip(rng, bits))


def forked_runs(row: Row, wanted: int, live: Live, **life: Any) -> Row:
    """Kill a run, and let forks of it be killed as well, before one comes to its end."""
    while row.tries < wanted:
        with _folder() as folder:
            while best_checkpoint(folder) is None:  # or there is nothing to fork from
                for path in folder.glob("released-*"):
                    path.unlink()
                trunk = Life(folder, **life)
                trunk.start()
                trunk.end_after(0.7 * TIME["1 rank"])
            done, struck = False, 0
            while not done:
                before, resumes = seen(folder), best_checkpoint(folder) is not None
                fork = Life(folder, clipping_norm=0.5, **life)
                fork.start()
                if struck < 3 and row.tries < wanted:
                    done = live(fork)
                else:
                    fork.wait()
                    done = True
                after = seen(folder)
                if after.told is not None and resumes:
                    row.errors.append(after.told - len(before.releases))
                if not done:
                    row.tries += 1
                    struck += 1
                    row.lost.append(after.steps - _saved_steps(folder))
            row.survived += struck
            if best_checkpoint(folder) is not None:
                row.errors.append(outcome(folder).ledger - len(seen(folder).releases))
    return row


def _unbroken(name: str, life: dict[str, Any]) -> None:
    with _folder() as folder:
        begun = time.monotonic()
        one = Life(folder, **life)
        one.start()
        one.wait()
        TIME[name] = time.monotonic() - begun
        WHOLE[name] = outcome(folder)
        if len(seen(folder).releases) != N_STEPS:
            raise RuntimeError("the unbroken run did not make every release once")


def _saved_steps(folder: Path) -> int:
    path = best_checkpoint(folder)
    if path is None:
        return 0
    run = torch.load(path, weights_only=True)["optimizer_states"][0]["opake_lightning"]
    return run["record"]["step"]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def _small_disk() -> Iterator[Path | None]:
    """A file system of its own, if this user may mount one."""
    with _folder() as place:
        if not _mount("-t", "tmpfs", "-o", "size=600k", "none", str(place)):
            yield None
            return
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=False)


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


def _markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> None:
    """Run everything, print the table, and put it into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ten kills; change no file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warm_up()
    rows: list[Row] = []
    for row in table(quick=options.quick, seed=options.seed):
        rows.append(row)
        print(" | ".join(row.cells()), flush=True)
    text = _markdown([HEAD, *(row.cells() for row in rows if row.tries)])
    kills = sum(row.tries for row in rows if row.fault.startswith("SIGKILL"))
    under = sum(row.under for row in rows)
    text += (
        f"\n\nRuns of {N_STEPS} steps, with a checkpoint every {SAVE_EVERY}. {kills} kills, "
        f"{under} under-counts."
    )
    print(f"{kills} kills, {under} under-counts")
    if not options.quick:
        before, rest = DOC.read_text().split(BEGIN)
        DOC.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    if under or any(row.survived != row.tries for row in rows):
        raise SystemExit("a guarantee was broken")


if __name__ == "__main__":
    main()
