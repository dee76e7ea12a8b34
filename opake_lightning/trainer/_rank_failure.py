"""Ranks go on together, and end together and say why.

A rank that fails is waited for, in the next sum, until its process is gone; if that lives on, until
the group's timeout of half an hour. And the others learn no more than that a connection broke. So a
rank that fails leaves a word in the group's store and then the group, which breaks its connections
at once; the others look for that word before they fail in turn. A rank that was killed leaves none,
and is known by that.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from traceback import walk_tb
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from opake_lightning.distributed import require_equal, world_size

__all__ = [
    "ending_together",
    "only_note_sigterm",
    "refuse_to_meet_again",
    "require_same_checkpoint",
]

_PATIENCE = 1.5  # seconds in which a rank that lives should have noticed, too
_LONGEST = 1000  # characters of a reason


# Why this process left its group; a fact about the process, whatever trainer comes next in it.
_left_because: list[str] = []


@contextmanager
def ending_together() -> Generator[None]:
    """If this rank fails in the block, the others do, with its reason; nobody waits for another.

    Raises:
        RuntimeError: If a sum failed because of another rank; says which, and its reason.
    """
    try:
        yield
    except _TunerExitException:  # how Lightning's tuner ends a fit that went well
        raise
    except BaseException as failure:
        if world_size() == 1:
            raise
        why = _leave(failure)
        _left_because.append(why or f"{type(failure).__name__}: {failure}"[:_LONGEST])
        if why is None:
            raise
        raise RuntimeError(why) from failure


def refuse_to_meet_again() -> None:
    """Refuse a second group after one that failed.

    Ranks leave it at different times, and the first to come back would meet in the store of those
    that are still leaving, and wait there.

    Raises:
        RuntimeError: With the reason of the failure.
    """
    if _left_because:
        raise RuntimeError(
            f"this process has left its process group ({_left_because[0]}), and a failed process "
            "group cannot be re-initialised; restart all processes, and resume from the last "
            "checkpoint with ckpt_path="
        )


def only_note_sigterm(trainer: pl.Trainer) -> None:
    """Let SIGTERM be noted, and answered at the end of a step.

    Lightning's handler makes a broadcast, wherever the signal finds the rank. Unless that is
    between the same two sums on all ranks, they wait for each other from then on.
    """
    connector: Any = trainer._signal_connector

    def note(signum: int, frame: object) -> None:
        del frame
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(cast("Any", signum))
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note


def require_same_checkpoint(saved: dict[str, Any] | None) -> None:
    """Raise on every rank if ranks are to go on from different checkpoints.

    Each reads a file of its own, and on another machine the path may lead to an older one: its
    noise would be that of a step which has been released.

    Raises:
        PrivacyError: If keys, counters or ledgers differ.
    """
    if world_size() == 1:
        return
    record: dict[str, Any] = dict(saved or {})
    plain = [f"{name}={value!r}" for name, value in _plain_values(record)]
    require_equal(
        {
            "the checkpoint's ledger": repr(_released_in(record)),
            "the checkpoint's key and counters (compared by digest)": hashlib.sha256(
                "\n".join(sorted(plain)).encode()
            ).hexdigest(),
        }
    )


def _released_in(record: dict[str, Any]) -> object:
    saved = record.get("record")
    return cast("dict[str, Any]", saved).get("released") if isinstance(saved, dict) else None


def _plain_values(record: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Everything in it but tensors, which are long and follow from the rest."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _plain_values(cast("dict[str, Any]", value))
        elif not isinstance(value, Tensor):
            yield name, value


def _leave(failure: BaseException) -> str | None:
    """Leave the group; if ``failure`` only follows from another's, say what that was."""
    follows = _came_from_a_sum(failure)
    words = _Words(dist.get_rank(), dist.get_world_size())
    words.say("" if follows else f"{type(failure).__name__}: {failure}"[:_LONGEST])
    if dist.get_backend() == "gloo":
        # Connections are closed when nothing holds the group, as the frames that failed do.
        for frame, _ in walk_tb(failure.__traceback__):
            if _is_distributed(frame):
                frame.clear()
        dist.destroy_process_group()
    else:
        c10d._abort_process_group()
    verdict = words.verdict() if follows else None
    words.wait_for_readers()
    return verdict


class _Words:
    """What each rank said when it left: its reason, or nothing if it merely lost another."""

    def __init__(self, me: int, world_size: int) -> None:
        self.me, self.others = me, [rank for rank in range(world_size) if rank != me]
        self.store = c10d.PrefixStore("opake_lightning/left", c10d._get_default_store())
        self.said: dict[int, str] = {}
        self.gone: list[int] = []
        self.reachable = True

    def say(self, word: str) -> None:
        """Leave this rank's word."""
        with self._reaching():
            self.store.set_timeout(timedelta(seconds=_PATIENCE))
        self._write(f"{self.me}", word)

    def verdict(self) -> str:
        """Why this rank ends, though it did not fail by itself."""
        found = ""
        until = time.monotonic() + _PATIENCE
        while self.reachable and not found and time.monotonic() < until:
            self._listen()
            if any(self.said.values()) or len(self.said) == len(self.others):
                break
            found = self._read("verdict") or ""
            time.sleep(0.01)
        found = found or self._judge()
        self._write("verdict", found)  # for those who notice later
        self._write(f"{self.me} has read", "")
        return f"{found}; rank {self.me} ends with it"

    def wait_for_readers(self) -> None:
        """Keep the store there, where this rank serves it, for those who read in it."""
        until = time.monotonic() + _PATIENCE
        while self.me == 0 and self.reachable and time.monotonic() < until:
            self._listen()
            # Whoever gave a reason of its own does not read.
            reading = [r for r in self.others if not self.said.get(r) and r not in self.gone]
            if all(self._read(f"{rank} has read") is not None for rank in reading):
                break
            time.sleep(0.01)

    def _judge(self) -> str:
        reasons = {rank: word for rank, word in sorted(self.said.items()) if word}
        if reasons:
            return "; ".join(f"rank {rank} failed: {word}" for rank, word in reasons.items())
        self.gone = [rank for rank in self.others if rank not in self.said]
        if not self.reachable and 0 in self.gone:
            self.gone = [0]  # which served the store
        if not self.gone:
            return "the ranks lost each other, though all of them are there"
        named = " and ".join(f"rank {rank}" for rank in self.gone)
        return f"{named} exited without an error (stopped, killed, cut off) or does not answer"

    def _listen(self) -> None:
        for rank in self.others:
            if rank not in self.said and (word := self._read(f"{rank}")) is not None:
                self.said[rank] = word

    def _read(self, name: str) -> str | None:
        with self._reaching():
            if self.reachable and self.store.check([name]):
                return self.store.get(name).decode()
        return None

    def _write(self, name: str, word: str) -> None:
        with self._reaching():
            if self.reachable:
                self.store.set(name, word)

    @contextmanager
    def _reaching(self) -> Generator[None]:
        try:
            yield
        except RuntimeError:  # of all kinds that torch.distributed has
            self.reachable = False


def _came_from_a_sum(failure: BaseException) -> bool:
    """Whether ``failure`` was raised by torch.distributed itself, as it is where a peer is lost."""
    frames = [frame for frame, _ in walk_tb(failure.__traceback__)]
    return isinstance(failure, RuntimeError) and bool(frames) and _is_distributed(frames[-1])


def _is_distributed(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")
