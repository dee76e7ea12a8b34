"""What a module keeps from one fit to the next, and what of it a copy or another process gets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

from torch import Tensor

from opake_lightning.errors import CheckpointError
from opake_lightning.plan import NonPrivate
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.trainer._inputs import weights_digest
from opake_lightning.trainer._journal import Journal, read
from opake_lightning.trainer._record import Known, RunRecord
from opake_lightning.trainer.report import PrivacySpent

__all__ = ["Past", "carried_over", "flat"]


@dataclass(frozen=True, slots=True)
class Flat:
    """A state from another process, as a flat dictionary, until a template of it is there."""

    values: dict[str, Any]


class Past:
    """What a fit goes on from.

    Attributes:
        record: What was released, and on which key.
        journal: The record of releases beside the checkpoints.
        since: What was released after the checkpoint that the module was loaded from; it counts
            from the start of the next fit.
        unreadable: Why that cannot be told, if a record is there and damaged; no fit begins then.
        given: Digests of the weights that the record tells the cost of: what the module has given
            out, or was loaded with.
        clip: Clipping state that the last fit came to.
        optimizer: Its optimizer state.
        optimizer_name: What that optimizer is called.
        parked: The weights to train on, while the module shows the ones to publish.
        process: The one that the run goes on in. In all others this is a copy.
    """

    def __init__(
        self, record: RunRecord, journal: Journal | None = None, since: Known | None = None
    ) -> None:
        self.record = record
        self.journal = journal or Journal(record.lineage)
        self.since = since or Known()
        self.unreadable = ""
        self.given: set[str] = set()
        self.clip: Any = None
        self.optimizer: Any = None
        self.optimizer_name = ""
        self.parked: dict[str, Tensor] | None = None
        self.process = os.getpid()

    # -- reporting ------------------------------------------------------------------------------

    @property
    def delta(self) -> float:
        """δ that ε is reported at."""
        return float(self.record.plan.get("target_delta", NonPrivate.target_delta))

    def spent(self, delta: float | None = None) -> PrivacySpent:
        """What has been spent so far, at the plan's δ or another one."""
        record, ledger = self.record, self.record.ledger
        delta = self.delta if delta is None else delta
        return PrivacySpent(
            ledger.epsilon(delta), delta, ledger.n_steps, dict(record.plan), record.complete
        )

    # -- what becomes of it -----------------------------------------------------------------------

    def past(self) -> Past:
        """What the next fit goes on from: this."""
        return self

    def copied(self) -> Past:
        """A copy that goes on with its own key: two modules must not use the same noise."""
        past = self.past()
        copy = Past(past.record.copied(), since=past.since)
        copy.clip, copy.optimizer_name = past.clip, past.optimizer_name
        copy.optimizer = carried_over(past.optimizer, past.optimizer)
        copy.parked = None if past.parked is None else dict(past.parked)
        copy.unreadable, copy.given = past.unreadable, set(past.given)
        return copy

    def left_behind(self) -> Past:
        """After a fit in other processes that failed, so that nothing was brought back.

        They may have used its keys, and have counted in the record on disk alone.
        """
        copy, found = self.copied(), None
        if self.record.lineage:
            found = read(self.record.lineage, self.journal.directories)
        copy.since = copy.since.joined(found or Known(complete=False))
        return copy

    def reset(self) -> Past:
        """That of a module that has spent nothing and shares no noise with this one."""
        return Past(self.record.reset())

    @classmethod
    def unknown(cls) -> Past:
        """That of weights whose cost nobody has told."""
        return cls(RunRecord("", complete=False))

    @classmethod
    def loaded(cls, saved: Any) -> Past:
        """That of weights from a file: a new fit takes a new key."""
        if saved is None:
            return cls.unknown()
        return cls(RunRecord.from_plain(saved).public())

    def apart(self) -> Past:
        """The same, which may change without this one."""
        apart = Past.__new__(Past)
        vars(apart).update(vars(self.past()), given=set(self.given))
        return apart

    def joined_by(self, loaded: Past) -> None:
        """The module gets the weights of another run, and with them their past."""
        self.record = self.record.knowing(loaded.record.known)
        self.since = self.since.joined(loaded.since)
        self.unreadable = self.unreadable or loaded.unreadable

    def look_in(self, directories: Iterable[Path]) -> None:
        """See what was released after the checkpoint that this is the past of."""
        try:
            if self.record.lineage:
                self.since = read(self.record.lineage, directories) or Known()
        except CheckpointError as error:  # of which nothing is wanted, unless there is a fit
            self.unreadable = str(error)

    # -- weights that come from elsewhere ---------------------------------------------------------

    def gives(self, weights: Mapping[str, Any]) -> None:
        """Remember a ``state_dict`` whose cost the record tells."""
        self.given.add(_digest_of(weights))

    def gets(self, weights: Mapping[str, Any]) -> None:
        """The module has loaded a ``state_dict``, which tells nothing of its cost."""
        if _digest_of(weights) not in self.given:
            self.record = replace(self.record, complete=False)

    # -- plain values -----------------------------------------------------------------------------

    def to_plain(self, *, secret: bool) -> dict[str, Any]:
        """What the next fit in another process needs; with the key, and the rest, if ``secret``.

        What correlated noise remembers stays behind: a fit begins a new horizon.
        """
        past = self.past()
        record, since = past.record.to_plain(secret=secret), past.since.to_plain()
        plain = {"record": record, "since": since, "unreadable": past.unreadable}
        if not secret:
            return plain
        return {
            **plain,
            "directories": list(map(str, past.journal.directories)),
            "clip": flat(past.clip),
            "optimizer": flat(past.optimizer),
            "optimizer_name": past.optimizer_name,
            "parked": past.parked and {n: p.detach().clone() for n, p in past.parked.items()},
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Past:
        """What :meth:`to_plain` made."""
        record = RunRecord.from_plain(values["record"])
        past = cls(record, Journal(record.lineage), Known.from_plain(values["since"]))
        past.unreadable = values["unreadable"]
        if "clip" in values:
            past.journal.go_on_in(map(Path, values["directories"]), record.known)
            past.clip, past.optimizer = (
                Flat(values[name]) if values[name] else None for name in ("clip", "optimizer")
            )
            past.optimizer_name, past.parked = values["optimizer_name"], values["parked"]
        return past

    def __deepcopy__(self, memo: dict[int, Any]) -> Past:
        """A copy with a key of its own."""
        memo[id(self)] = copy = self.copied()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For a process that is being spawned, all of it; else the public past alone.

        A pickle that goes anywhere else, as of ``torch.save(module)``, holds no key: whoever reads
        it could take away the noise.
        """
        if get_spawning_popen() is None:
            return _unpickled, (self.to_plain(secret=False),)
        return _spawned, (self.to_plain(secret=True),)


def _digest_of(weights: Mapping[str, Any]) -> str:
    return weights_digest({n: w for n, w in weights.items() if isinstance(w, Tensor)})


def _unpickled(values: dict[str, Any]) -> Past:
    """A pickle may be read twice, and a plan may name its key."""
    past = Past.from_plain(values)
    past.record = past.record.copied()
    return past


def _spawned(values: dict[str, Any]) -> Past:
    past = Past.from_plain(values)
    past.process = 0  # there may be several, until the launcher says which one goes on
    return past


def flat(state: Any) -> dict[str, Any]:
    """The plain values of a state; none of None."""
    return state.values if isinstance(state, Flat) else state_dict(state) if state else {}


def carried_over(template: Any, before: Any) -> Any:
    """State ``before``, copied, if it fits ``template``; else ``template``."""
    if template is None or before is None:
        return template
    try:
        return from_state_dict(template, flat(before), strict=True)
    except CheckpointError:
        return template
