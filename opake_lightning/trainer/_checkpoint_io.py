"""Checkpoint files that are whole or not there, and that notice if they are changed.

Lightning's own writer puts a file together in the system's temporary directory and then moves it.
Where that is another file system, the move is a copy: a process that is killed meanwhile, or a disk
that fills up, leaves half a file in the place of the checkpoint before it. If the directory cannot
be written to and an older file of the name is there, nothing is saved and nothing is said. And
``torch.load`` does not compare the checksums that are in the file, so a flipped bit in a tensor is
loaded as it is.

:class:`SealedCheckpointIO` writes beside the target, syncs, and renames; and it ends the file with
a digest of the rest, as a comment that a zip archive may have, so that ``torch.load`` and
Lightning read the file like any other. A :class:`~opake_lightning.DPModule` sees to it that its
trainer uses it, with any strategy, unless the user has given the trainer a ``CheckpointIO``.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from opake_lightning.errors import CheckpointError

__all__ = [
    "SealedCheckpointIO",
    "check_seal",
    "directories_beside",
    "directories_of",
    "use_sealed",
]

# How a zip archive ends: a signature, some counts, and the length of the comment.
_END = struct.Struct("<4s16sH")
_SIGNATURE = b"PK\x05\x06"
_START = b"PK\x03\x04"
_MARK = b"opake_lightning sha256:"
_SEAL_SIZE = len(_MARK) + hashlib.sha256().digest_size * 2
_CHUNK = 1 << 20


class SealedCheckpointIO(TorchCheckpointIO):
    """Saves whole files with a digest, and loads no file whose digest is wrong.

    Guarantees:
        Whatever happens while a checkpoint is saved, to the process or to the disk, a file that had
        its name before is there as before, or the new one is complete.
        A file that was cut off or changed after it was saved raises ``CheckpointError``; this finds
        accidents, and does not stop someone who writes the digest anew.
        Loading is ``torch.load(weights_only=True)`` unless the user asks otherwise.

    Files elsewhere (``s3://...``) are written and read as Lightning does.
    """

    def __init__(self) -> None:
        super().__init__()
        # Told the directory of a checkpoint, and what it holds, before it is written.
        self.saving: Callable[[Path, dict[str, Any]], None] | None = None

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save ``checkpoint``.

        Raises:
            CheckpointError: If the disk is full, or the directory cannot be written to.
        """
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        part = target.with_name(f".{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.saving is not None:
                self.saving(target.parent, checkpoint)
            # It holds the key, so it is for its owner, as Lightning's are.
            with open(part, "wb", opener=_private) as file:
                _write(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
            _sync(target.parent)
        except Exception as error:
            _forget(part)
            cause = _os_error(error)
            if cause is None:
                raise
            earlier = "; the earlier one of that name is as it was" if target.exists() else ""
            raise CheckpointError(
                f"the checkpoint {target} could not be saved: {cause.strerror or cause}{earlier}. "
                "Nothing else has changed: the steps made so far are counted, and a run resumes "
                "from any checkpoint that was saved before"
            ) from error

    @override
    def load_checkpoint(
        self,
        path: Any,
        map_location: Any | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint at ``path``.

        Raises:
            CheckpointError: If the file was cut off or changed after it was saved.
        """
        sealed = check_seal(path)
        weights_only = True if weights_only is None else weights_only
        try:
            return super().load_checkpoint(path, map_location, weights_only)
        except FileNotFoundError:
            raise
        except Exception as error:
            if sealed:  # so the file is as it was saved, and the error tells what is wrong
                raise
            raise CheckpointError(
                f"the checkpoint {path} cannot be read; if it was not cut off or damaged, torch "
                f"tells why: {error}"
            ) from error


def use_sealed(strategy: Any, saving: Callable[[Path, dict[str, Any]], None]) -> None:
    """Let ``strategy`` save with :class:`SealedCheckpointIO`, unless it was given something else.

    Args:
        strategy: Lightning's strategy.
        saving: As :attr:`SealedCheckpointIO.saving`.
    """
    chosen: Any = strategy.checkpoint_io
    outer: Any = None
    while isinstance(chosen, _WrappingCheckpointIO):  # such as AsyncCheckpointIO
        outer, chosen = chosen, chosen._checkpoint_io
    if type(chosen) is TorchCheckpointIO:
        chosen = SealedCheckpointIO()
        if outer is None:
            strategy.checkpoint_io = chosen
        else:
            outer._checkpoint_io = chosen
    if isinstance(chosen, SealedCheckpointIO):
        chosen.saving = saving


def check_seal(path: Any) -> bool:
    """Whether the file at ``path`` has a seal, which is then right.

    Raises:
        CheckpointError: If it has one that is wrong, or the end of the file is damaged.
    """
    local = local_path(path)
    if local is None or not local.is_file():
        return False
    size = local.stat().st_size
    with local.open("rb") as file:
        if _is_plain(file, size):
            return False
        seal, digest = _seal_of(file, size)
    if seal != _MARK + digest.encode():
        raise CheckpointError(
            f"the checkpoint {local} is damaged: it was cut off, or changed, after it was saved. "
            "Resume from another one; what was spent meanwhile is recorded beside it"
        )
    return True


def local_path(path: Any) -> Path | None:
    """``path`` if it is one of this machine's file system, else None."""
    if not isinstance(path, (str, os.PathLike)) or "://" in str(path) or "::" in str(path):
        return None
    return Path(path)


def directories_of(trainer: Any) -> list[Path]:
    """Where a run that ``trainer`` resumes may have left its record, the checkpoint's own first."""
    own = directories_beside(trainer.ckpt_path)
    callbacks = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    places = [local_path(place) for place in (*callbacks, trainer.default_root_dir) if place]
    return list(dict.fromkeys([*own, *(place for place in places if place is not None)]))


def directories_beside(path: Any) -> list[Path]:
    """Where the checkpoint at ``path`` lies, on this machine, also if that is a link to it."""
    local = local_path(path)
    return [] if local is None else [local.parent, Path(os.path.realpath(local)).parent]


class _Digested:
    """Writes to a file, and keeps the digest and the end of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.end = file, hashlib.sha256(), b""

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.digest.update(data)
        self.end = (self.end + bytes(memoryview(data)[-_END.size :]))[-_END.size :]
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _write(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    out = _Digested(file)
    torch.save(checkpoint, cast("Any", out))
    signature, counts, comment = _END.unpack(out.end)
    if (signature, comment) != (_SIGNATURE, 0):  # another format than torch writes today
        return
    file.seek(-_END.size, os.SEEK_END)
    file.write(_END.pack(signature, counts, _SEAL_SIZE))
    file.write(_MARK + out.digest.hexdigest().encode())


def _is_plain(file: BinaryIO, size: int) -> bool:
    """Whether the file begins and ends as one that ``torch.save`` wrote and nobody sealed."""
    start = file.read(len(_START))
    if start != _START or size < _END.size:
        return start.startswith(b"\x80")  # a pickle, which torch wrote before there were archives
    file.seek(size - _END.size)
    signature, _, comment = _END.unpack(file.read(_END.size))
    return (signature, comment) == (_SIGNATURE, 0)


def _seal_of(file: BinaryIO, size: int) -> tuple[bytes, str]:
    """The seal that the file ends with, and the digest of what ``torch.save`` wrote before it."""
    digest, end = hashlib.sha256(), size - _SEAL_SIZE - _END.size
    file.seek(0)
    while file.tell() < end and (chunk := file.read(min(_CHUNK, end - file.tell()))):
        digest.update(chunk)
    last = file.read(_END.size)
    if len(last) == _END.size:
        signature, counts, comment = _END.unpack(last)
        # Its own length is not part of what is sealed, so it must be looked at itself.
        digest.update(_END.pack(signature, counts, comment - _SEAL_SIZE & 0xFFFF))
    return file.read(), digest.hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _os_error(error: BaseException | None) -> OSError | None:
    """The system's error behind ``error``: torch wraps those that it meets while it writes."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _forget(part: Path) -> None:
    with suppress(OSError):  # of the directory that could not be written to
        part.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    """Make a rename in ``directory`` outlast a loss of power, where the system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)
