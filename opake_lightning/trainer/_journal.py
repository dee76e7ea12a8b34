"""The record of released steps that lies beside a run's checkpoints, and outlives the process.

A checkpoint knows the steps up to the moment it was saved. Steps made after it have been released
as well: their weights were logged, evaluated, perhaps published. If the process then dies, only
this record knows of them.

**Where.** In every local directory that a run has saved a full checkpoint to, one file for each
process that has gone on with it, ``opake-<lineage>.<process>.steps``. The lineage is 64 random bits
that the checkpoints carry; neither it nor the content has anything to do with the run's key, so the
files are as public as the ledger. Nobody writes over what another process wrote: all are read, and
merged by the larger number of steps in each segment, so nothing has to be locked. Only rank 0
writes. A run that saves no checkpoint has none; neither has one whose checkpoints go to remote
storage, or through a ``CheckpointIO`` of the user's own.

**What.** All that is known to be released, and whether that is all, at every release
(:mod:`opake_lightning.trainer._record`): two slots that are written in turn, each one line of text
with a checksum. A release is recorded *before* its parameters move, with one ``pwrite`` into space
that was allocated when the file was made, so that a full disk does not stop it. On several ranks it
is recorded before the sum over ranks, as another rank may have the sum first; a run that ends in
between has recorded one step too many, never one too few. What has been written survives the end of
the process, SIGKILL included. There is no ``fsync``, so a loss of power may take the last seconds
of it; a checkpoint is synced, and is never lost with it.

**What a resume makes of it.** It looks in the checkpoint's directory, in those of the trainer's
checkpoint callbacks and in ``default_root_dir``, and merges what it finds with the checkpoint.

* *The same inputs* (:mod:`opake_lightning.trainer._inputs`): the run goes on in its segment.
  Batches, noise and dropout are functions of the key and the step, so the steps after the
  checkpoint are made again: the same releases, which cost nothing the second time. They must be
  made on as many ranks, with the same microbatches and precision; else resuming is refused, or
  forks. Where no step was lost, a run may go on on others.
* *Other inputs*, with ``on_changed_plan="fork"``: a new segment, with a new key; all that is
  recorded counts in addition to what is to come.
* *Steps of other segments*, as those of a fork or of another fit: they count, and are left alone.
* *A new fit from* ``load_from_checkpoint``, which has a new key: in addition as well, from the
  start of the fit. Until then the module tells what its own weights cost. Such a fit is a run of
  its own: two of them do not count each other.
* *No record*: the checkpoint's own count, as a lower bound: ``privacy_spent().complete`` is False.

**A replay proves itself.** Beside the record, ``opake-<lineage>.<segment>.bits`` has 8 bytes for
each step of a segment: a sum of the bits of what was released, which is public. A step that was
made before, or is being made by another process, must come to the same bits before the parameters
move. So what no comparison of inputs sees
(the code of the loss, rows that are not looked at, frozen weights, another kind of processor) ends
the run, and no noise is given out for a second gradient. The sum is written after the count: a
process that is killed in between leaves a step without one, which is made again where all inputs
are equal.

A slot that is damaged or cut off is passed over, and the other one, at most one step older, counts.
A file without a readable slot raises :class:`~opake_lightning.errors.CheckpointError`.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import os
import secrets
import threading
import weakref
import zlib
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opake_lightning.distributed import rank, world_size
from opake_lightning.errors import CheckpointError
from opake_lightning.trainer._record import Known

__all__ = ["Journal", "read", "read_on_rank_zero"]

_SECTOR = 512
_PROOF = 8  # bytes of a step


class Journal:
    """Records every release of one lineage in all directories that hold its checkpoints.

    Args:
        lineage: Name of the record.
    """

    def __init__(self, lineage: str) -> None:
        self.lineage = lineage
        # Of the files that are written here, and nowhere else: processes that go on from one
        # checkpoint at once would write over what the other one has released.
        self._writer = secrets.token_hex(4)
        self._files: dict[Path, _File] = {}
        self._latest = Known()
        self._complete = True
        # A checkpoint may be saved, and its directory become ours, in another thread.
        self._lock = threading.Lock()

    @property
    def directories(self) -> list[Path]:
        """Where the record is kept."""
        return list(self._files)

    def keep_in(self, directory: Path, known: Known) -> None:
        """Record in ``directory`` from now on, beginning with ``known``.

        Raises:
            OSError: If the file cannot be written.
        """
        directory = Path(os.path.realpath(directory))
        with self._lock:
            path = directory / file_name(self.lineage, self._writer)
            file = self._files.get(directory)
            # A step may have been made while the checkpoint was on its way to another thread.
            known = known.joined(self._latest)
            if file is None:
                file = _File(path, self._marked(known))
                self._files = {**self._files, directory: file}
            elif not file.is_there():
                self._begin_again(file, known)

    def go_on_in(self, directories: Iterable[Path], known: Known) -> None:
        """As :meth:`keep_in`, as far as files can be written there."""
        for directory in directories:
            with contextlib.suppress(OSError):
                self.keep_in(directory, known)

    def append(self, known: Known) -> None:
        """Write down what has been released.

        Raises:
            CheckpointError: If the file cannot be written.
        """
        with self._lock:
            self._latest = known
            for directory, file in self._files.items():
                try:
                    if file.is_there():
                        file.write(self._marked(known))
                    elif directory.exists():  # else its checkpoints are gone with it
                        self._begin_again(file, known)
                except OSError as error:
                    raise CheckpointError(
                        f"the step cannot be recorded in {file.path} ({error}), so it is not "
                        "applied; see to the disk and resume from the last checkpoint"
                    ) from error

    def _marked(self, known: Known) -> Known:
        return known if self._complete else replace(known, complete=False)

    def _begin_again(self, file: _File, known: Known) -> None:
        # A folder was emptied, or is another one now, and what others had recorded is gone as well.
        self._complete = False
        file.create(self._marked(known))

    def prove(self, segment: str, step: int, bits: bytes, places: Iterable[Path] = ()) -> bool:
        """Write down the bits of the release number ``step``, from 0, of ``segment``.

        Returns:
            Whether nobody has written others: here, or in ``places``, which are only read.
        """
        name = bits_name(self.lineage, segment)
        for directory in [*self._files, *places]:
            with contextlib.suppress(OSError), _opened(directory / name, os.O_RDONLY) as file:
                if _proof_in(file, step) not in (None, bits):
                    return False
        for directory in self._files:
            # One that cannot be written, on a full disk say, leaves a step that nobody can prove.
            with (
                contextlib.suppress(OSError),
                _opened(directory / name, os.O_RDWR | os.O_CREAT) as file,
            ):
                # Of two processes that make one step at once, the second sees what the first wrote.
                with contextlib.suppress(OSError):  # where a file system has no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                if _proof_in(file, step) not in (None, bits):
                    return False
                os.pwrite(file, bits, _PROOF * step)
        return True


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Generator[int]:
    file = os.open(path, flags, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _proof_in(file: int, step: int) -> bytes | None:
    found = os.pread(file, _PROOF, _PROOF * step)
    # A step that was passed over has zeros.
    return found if len(found) == _PROOF and any(found) else None


def file_name(lineage: str, writer: str) -> str:
    """Name of the file that ``writer`` keeps of ``lineage``; "*" is any writer."""
    return f"{_stem(lineage)}.{writer}.steps"


def bits_name(lineage: str, segment: str) -> str:
    """Name of the file that holds the bits of a segment's releases."""
    return f"{_stem(lineage)}.{segment[:16]}.bits"


def _stem(lineage: str) -> str:
    if not (lineage.isalnum() and lineage.isascii()):
        raise CheckpointError(f"corrupt checkpoint: bad journal id {lineage!r}")
    return f"opake-{lineage}"


def read(lineage: str, directories: Iterable[Path | str]) -> Known | None:
    """All that any process has recorded of ``lineage`` in ``directories``; None if nothing is.

    Raises:
        CheckpointError: If a record is there and holds no whole line.
    """
    found: list[Known] = []
    pattern = file_name(lineage, "*")
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
        found += [_content(path, content) for path, content in contents.items()]
    return found[0].joined(*found[1:]) if found else None


def read_on_rank_zero(lineage: str, directories: Iterable[Path | str]) -> Known | None:
    """As :func:`read`, where rank 0 looks; the same on all ranks."""
    found: list[Any] = [None, ""]
    if rank() == 0:
        try:
            known = read(lineage, directories)
            found = [None if known is None else known.to_plain(), ""]
        except CheckpointError as error:
            found = [None, str(error)]
    if world_size() > 1:
        dist.broadcast_object_list(found)
    if found[1]:
        raise CheckpointError(found[1])
    return None if found[0] is None else Known.from_plain(found[0])


class _File:
    """Two slots, each as long as a whole number of sectors, in one file."""

    def __init__(self, path: Path, known: Known) -> None:
        """Begin ``path``, which nobody else writes, with ``known``."""
        self.path = path
        self.create(known)

    def is_there(self) -> bool:
        """Whether what is written can be found under the file's name."""
        try:
            return os.path.samestat(os.stat(self.path), self._status)
        except OSError:
            return False

    def write(self, known: Known) -> None:
        """Write down ``known``."""
        line = _line(known)
        if len(line) > self._size:
            self.create(known)
            return
        os.pwrite(self._descriptor, line, self._turn * self._size)
        self._turn = 1 - self._turn

    def create(self, known: Known) -> None:
        """Put a new file, with ``known``, in the place of what is there, if anything is."""
        line = _line(known)
        # Twice the room it needs now: a record grows with each fork and each fit.
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
        self._status = os.fstat(descriptor)
        # Of the file before, if there was one, the finalizer still knows the descriptor.
        self._close, before = weakref.finalize(self, os.close, descriptor), vars(self).get("_close")
        if before is not None:
            before()


def _line(known: Known) -> bytes:
    text = json.dumps(known.to_plain(), separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _padded(line: bytes, size: int) -> bytes:
    return line[:-1] + b" " * (size - len(line)) + b"\n"


def _content(path: Path, content: bytes) -> Known:
    found: list[Known] = []
    # Of a file that was cut off, the first slot is where it was.
    for start in (0, len(content) // 2):
        checksum, _, text = content[start:].split(b"\n", 1)[0].rstrip().partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            found.append(Known.from_plain(json.loads(text)))
    if not found:
        raise CheckpointError(
            f"the record of released steps {path} is damaged. It counts the steps that were made "
            "after the last checkpoint; if you know that there were none, delete the file, and the "
            "checkpoint's own count holds"
        )
    return found[0].joined(*found[1:])
