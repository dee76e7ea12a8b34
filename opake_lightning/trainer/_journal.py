"""The record of released steps that lies beside a run's checkpoints, and outlives the process.

A checkpoint knows the steps up to the moment it was saved. Steps made after it have been released
as well: their weights were logged, evaluated, perhaps published. If the process then dies, only
this record knows of them.

**Where.** In every local directory that a run has saved a full checkpoint to, one file for each
process that has gone on with it, ``opake-<name>.<process>.steps``. The name is 64 random bits that
the checkpoints carry; neither it nor the content has anything to do with the run's key, so the
files are as public as the ledger. Nobody writes over what another process wrote: all are read. Only
rank 0 writes. A run that saves no checkpoint has none; neither has one whose checkpoints go to
remote storage, or through a ``CheckpointIO`` of the user's own.

**What.** The whole ledger, at every release: two slots that are written in turn, each one line of
text with a checksum. A release is recorded *before* its parameters move, with one ``pwrite`` into
space that was allocated when the file was made, so that a full disk does not stop it. On several
ranks it is recorded before the sum over ranks, as another rank may have the sum first; a run that
ends in between has recorded one step too many, never one too few. What has
been written survives the end of the process, SIGKILL included. There is no ``fsync``, so a loss of
power may take the last seconds of it; a checkpoint is synced, and is never lost with it.

**What a resume makes of it.** It looks in the checkpoint's directory, in those of the trainer's
checkpoint callbacks and in ``default_root_dir``, and takes the largest count.

* *Same plan, same key*, and the same inputs (:mod:`opake_lightning.trainer._inputs`), ranks,
  microbatches and precision. Batches, noise and dropout are functions of the key and the step, so
  the steps after the checkpoint are repeated: the same releases, which cost nothing the second
  time. The ledger, ε included, is the larger of what was recorded and what was repeated, from the
  first moment on; it grows when the run passes the last recorded step, and at the end equals that
  of the run that was never interrupted.
* *Another plan* with ``on_changed_plan="fork"``: the run gets a new key, and all that is recorded
  counts in addition to what is to come. The fork goes on with the same record, so that steps of a
  fork that died before its first checkpoint are counted by the next one, too.
* *Recorded steps that this run would not repeat*, as another plan, a fork, another fit of the same
  module, other ranks, or another learning rate made them: resuming is refused, unless the plan says
  ``on_changed_plan="fork"``. Each line has a digest of who made the steps, and at which rates.
* *A new fit from* ``load_from_checkpoint``, which has a new key: in addition as well, from the
  start of the fit. Until then the module tells what its own weights cost. Such a fit is a run of
  its own: two of them do not count each other.
* *No record*: the checkpoint's own count, as if no step had been made after it.

**A replay proves itself.** Beside the record, ``opake-<name>.bits`` has 16 bytes for each step:
half of them tell who made it, as the digest in the record does; the others are a sum of the bits of
what was released, which is public. A step that is made again must come to the same bits before the
parameters move. So what no comparison of inputs sees (the code of the loss, rows that are not
looked at, frozen weights, another kind of processor) ends the run, and no noise is given out for a
second gradient. The sum is written after the count: a process that is killed in between leaves a
step without one, which is repeated where all inputs are equal.

A slot that is damaged or cut off is passed over, and the other one, at most one step older, counts.
A file without a readable slot raises :class:`~opake_lightning.errors.CheckpointError`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import secrets
import threading
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opake_lightning.accounting import Ledger
from opake_lightning.distributed import rank, world_size
from opake_lightning.errors import CheckpointError

__all__ = ["Journal", "Spending", "later", "most_recorded", "recorded"]

_SECTOR = 512
_PROOF = 16  # bytes of a step


@dataclass(frozen=True, slots=True)
class Spending:
    """What a run has released, its forks included.

    Attributes:
        ledger: All of it.
        forks: How many steps the ledger had at each fork.
        trail: Digest of who made each of the steps, and with which learning rate: only the run
            that made them, as it was, comes to the same.
    """

    ledger: Ledger = field(default_factory=Ledger)
    forks: tuple[int, ...] = ()
    trail: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """What makes one record later than another."""
        return self.ledger.n_steps, len(self.forks)

    def then(self, event: Any, words: tuple[str, ...], *rates: float | None) -> Spending:
        """With one more step for each of ``rates``, by a run whose key has these ``words``.

        Steps that follow on one ledger may be those of a run and a fork of it, which has spent as
        much and released something else; and a step's gradient follows from all rates before it.
        """
        trail = self.trail
        for rate in rates:
            trail = blake2b(f"{trail} {words} {rate!r}".encode(), digest_size=8).hexdigest()
        return Spending(self.ledger.spend(event, len(rates)), self.forks, trail)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"ledger": self.ledger.to_dict(), "forks": list(self.forks), "trail": self.trail}

    @classmethod
    def from_dict(cls, saved: Any) -> Spending:
        """What :meth:`to_dict` wrote.

        Raises:
            CheckpointError: If it is anything else.
        """
        if not isinstance(saved, dict) or saved.keys() != {"ledger", "forks", "trail"}:
            raise CheckpointError(f"{saved!r} is no record of what was spent")
        forks, trail = saved["forks"], saved["trail"]
        if not isinstance(forks, (list, tuple)) or not all(type(n) is int for n in forks):
            raise CheckpointError(f"a record of forks must be a list of counts, got {forks!r}")
        if not isinstance(trail, str):
            raise CheckpointError(f"the digest of recorded steps must be a string, got {trail!r}")
        return cls(Ledger.from_dict(saved["ledger"]), tuple(forks), trail)


class Journal:
    """Records every release of one run in all directories that hold its checkpoints.

    Args:
        name: Name of the run whose record is to go on; a new one by default.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name or secrets.token_hex(8)
        # Of the files that are written here, and nowhere else: processes that go on from one
        # checkpoint at once would write over what the other one has released.
        self._writer = secrets.token_hex(4)
        self._files: dict[Path, _File] = {}
        # A checkpoint may be saved, and its directory become ours, in another thread.
        self._lock = threading.Lock()

    def keep_in(self, directory: Path, run: Any) -> None:
        """Record in ``directory`` from now on what ``run.spending`` comes to.

        Raises:
            OSError: If the file cannot be written.
        """
        directory = Path(os.path.realpath(directory))
        with self._lock:
            if directory not in self._files:
                path = directory / file_name(self.name, self._writer)
                self._files = {**self._files, directory: _File(path, run.spending)}

    def record(self, spending: Spending) -> None:
        """Write down what has been spent.

        Raises:
            CheckpointError: If the file cannot be written.
        """
        if not self._files:
            return
        with self._lock:
            for directory, file in self._files.items():
                try:
                    file.write(spending)
                except OSError as error:
                    if not directory.exists():  # and its checkpoints are gone with it
                        continue
                    raise CheckpointError(
                        f"the step cannot be recorded in {file.path} ({error}), so it is not "
                        "applied; see to the disk and resume from the last checkpoint"
                    ) from error

    @property
    def directories(self) -> list[Path]:
        """Where the record is kept."""
        return list(self._files)

    def note_bits(self, step: int, trail: str, bits: bytes) -> None:
        """Write down the bits of the release that ``trail`` ends with, number ``step`` from 0."""
        for directory in self._files:
            # One that cannot be written, on a full disk say, leaves a step that nobody can prove.
            with contextlib.suppress(OSError):
                place = os.open(directory / bits_name(self.name), os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    os.pwrite(place, bytes.fromhex(trail) + bits, _PROOF * step)
                finally:
                    os.close(place)

    def bits_of(self, step: int, trail: str, directories: Iterable[Path]) -> bytes | None:
        """What :meth:`note_bits` wrote in one of ``directories``, in this process or another."""
        for directory in directories:
            with contextlib.suppress(OSError):
                content = (directory / bits_name(self.name)).read_bytes()
                found = content[_PROOF * step : _PROOF * (step + 1)]
                if len(found) == _PROOF and found.startswith(bytes.fromhex(trail)):
                    return found[_PROOF // 2 :]
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the files for itself."""
        return {"name": self.name, "directories": self.directories}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`."""
        self.__init__(kept["name"])
        self.go_on_in(kept["directories"])

    def go_on_in(self, directories: Iterable[Path]) -> None:
        """Go on in directories where a record is, as far as they can be written."""
        for directory in directories:
            try:
                file = _File(directory / file_name(self.name, self._writer), Spending())
            except OSError:
                continue
            self._files[directory] = file


def file_name(name: str, writer: str) -> str:
    """Name of the file that ``writer`` keeps of the run ``name``; "*" is any writer."""
    return f"{_stem(name)}.{writer}.steps"


def bits_name(name: str) -> str:
    """Name of the file that holds the bits of the releases of the run ``name``."""
    return f"{_stem(name)}.bits"


def _stem(name: str) -> str:
    if not (name.isalnum() and name.isascii()):
        raise CheckpointError(f"corrupt checkpoint: bad journal id {name!r}")
    return f"opake-{name}"


def recorded(name: str, directories: Iterable[Path | str]) -> Spending | None:
    """The most that the run ``name`` has recorded in any of ``directories``.

    Raises:
        CheckpointError: If a record is there and holds no whole line.
    """
    found: Spending | None = None
    pattern = file_name(name, "*")
    for directory in {os.path.realpath(directory) for directory in directories}:
        names: list[str] = []
        try:
            # Not by Path.glob, for which a directory that may not be listed is an empty one.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                names = fnmatch.filter(os.listdir(directory), pattern)
            contents = {path: path.read_bytes() for path in map(Path(directory).joinpath, names)}
        except OSError as error:
            raise CheckpointError(
                f"the record of released steps in {directory} cannot be read: {error}"
            ) from error
        for path, content in contents.items():
            found = later(found, _latest(path, content))
    return found


def most_recorded(name: str, directories: Iterable[Path | str], known: Spending) -> Spending:
    """The larger of ``known`` and what is recorded where rank 0 looks; the same on all ranks."""
    found: list[Any] = [None]
    if rank() == 0:
        try:
            found = [later(recorded(name, directories), known).to_dict()]
        except CheckpointError as error:
            found = [str(error)]
    if world_size() > 1:
        dist.broadcast_object_list(found)
    if isinstance(found[0], str):
        raise CheckpointError(found[0])
    return Spending.from_dict(found[0])


def later(a: Spending | None, b: Spending) -> Spending:
    """Whichever counts more; ``b`` if they count the same."""
    return b if a is None or b.size >= a.size else a


class _File:
    """Two slots, each as long as a whole number of sectors, in one file."""

    def __init__(self, path: Path, spending: Spending) -> None:
        """Begin ``path``, which nobody else writes, with ``spending``."""
        self.path = path
        self._create(_line(spending))

    def write(self, spending: Spending) -> None:
        line = _line(spending)
        if len(line) > self._size:
            self._create(line)
            return
        os.pwrite(self._descriptor, line, self._turn * self._size)
        self._turn = 1 - self._turn

    def _create(self, line: bytes) -> None:
        # Twice the room it needs now: a ledger grows by a few numbers when a plan changes.
        size = -(-2 * len(line) // _SECTOR) * _SECTOR
        part = self.path.with_suffix(".part")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            # Blanks are written, not skipped, so that the blocks are there when they are due.
            os.pwrite(descriptor, _padded(line, size) + _padded(b"\n", size), 0)
            part.replace(self.path)
        except OSError:
            os.close(descriptor)
            part.unlink(missing_ok=True)
            raise
        self._descriptor, self._size, self._turn = descriptor, size, 1
        # Of the file before, if there was one, the finalizer still knows the descriptor.
        self._close, before = weakref.finalize(self, os.close, descriptor), vars(self).get("_close")
        if before is not None:
            before()


def _line(spending: Spending) -> bytes:
    text = json.dumps(spending.to_dict(), separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _padded(line: bytes, size: int) -> bytes:
    return line[:-1] + b" " * (size - len(line)) + b"\n"


def _latest(path: Path, content: bytes) -> Spending:
    found: Spending | None = None
    # Of a file that was cut off, the first slot is where it was.
    for start in (0, len(content) // 2):
        checksum, _, text = content[start:].split(b"\n", 1)[0].rstrip().partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            found = later(found, Spending.from_dict(json.loads(text)))
    if found is None:
        raise CheckpointError(
            f"the record of released steps {path} is damaged. It counts the steps that were made "
            "after the last checkpoint; if you know that there were none, delete the file, and the "
            "checkpoint's own count holds"
        )
    return found
