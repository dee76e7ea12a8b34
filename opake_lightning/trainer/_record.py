"""What a run has released, on which key, and what may go on from it: one value.

A run makes its steps in **segments**: rows of steps on one key, with inputs (plan, optimizer,
learning rates, data, first weights) that stay the same. A fit opens a segment; so does a fork. Its
key is derived from the one before it and a digest of its inputs
(:mod:`opake_lightning.trainer._keys`), so other inputs never come to the same noise.

What was **released** is a map from segments to their steps. It only grows, and two maps are merged
by the larger number for each segment. So steps that are made again cost nothing, those of a fork or
of another fit count in addition, and the order in which records meet does not matter.

A record is **complete** or not: what nobody wrote down makes ε a lower bound, and not 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import lt
from typing import Any, cast

from opake_lightning import _check
from opake_lightning.accounting import Ledger
from opake_lightning.errors import CheckpointError
from opake_lightning.random import RngKey, fold_in
from opake_lightning.trainer._keys import derive, digest_of, entry_of

__all__ = [
    "VERSION",
    "Known",
    "Released",
    "RunRecord",
    "Segment",
    "new_lineage",
]

VERSION = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """The steps of one segment.

    Attributes:
        ledger: What they cost.
        rounding: What the last digits of a step depend on, each with the first step, counted from 0
            in the segment, that was made so.
    """

    ledger: Ledger = field(default_factory=Ledger)
    rounding: tuple[tuple[int, str], ...] = ()

    @property
    def n_steps(self) -> int:
        """How many there are."""
        return self.ledger.n_steps

    def then(self, event: Any, rounding: str) -> Segment:
        """With one more."""
        known = self.rounding
        if not known or known[-1][1] != rounding:
            known = (*known, (self.n_steps, rounding))
        return Segment(self.ledger.spend(event), known)

    def rounding_since(self, step: int) -> set[str]:
        """What the steps from ``step`` on were made with."""
        ends = [*(start for start, _ in self.rounding[1:]), self.n_steps]
        return {how for (_, how), end in zip(self.rounding, ends, strict=False) if end > step}


Released = Mapping[str, Segment]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known to be released.

    Attributes:
        released: The steps of each segment, by its name.
        complete: Whether that is all.
    """

    released: Released = field(default_factory=dict)
    complete: bool = True

    def joined(self, *others: Known) -> Known:
        """Everything that any of them knows; order and repetition do not matter."""
        most: dict[str, Segment] = {}
        for known in (self, *others):
            for name, segment in known.released.items():
                if name not in most or segment.n_steps > most[name].n_steps:
                    most[name] = segment
        # Who does not know how much there was before does not know it by hearing of the rest.
        return Known(most, all(known.complete for known in (self, *others)))

    def to_plain(self) -> dict[str, Any]:
        """Plain values."""
        released = {
            name: {
                "ledger": segment.ledger.to_dict(),
                "rounding": [list(pair) for pair in segment.rounding],
            }
            for name, segment in self.released.items()
        }
        return {"released": released, "complete": self.complete}

    @classmethod
    def from_plain(cls, saved: Any) -> Known:
        """What :meth:`to_plain` made.

        Raises:
            CheckpointError: If it is anything else.
        """
        if not isinstance(saved, dict) or saved.keys() != {"released", "complete"}:
            raise CheckpointError(f"{saved!r} is no record of released steps")
        complete = _expect("complete", cast("dict[str, Any]", saved)["complete"], bool)
        released = _expect("released", cast("dict[str, Any]", saved)["released"], dict)
        segments = {
            _expect("a name in released", name, str): _segment_from(segment)
            for name, segment in released.items()
        }
        return cls(segments, complete)


def _segment_from(saved: Any) -> Segment:
    if not isinstance(saved, dict) or saved.keys() != {"ledger", "rounding"}:
        raise CheckpointError(f"{saved!r} is no record of a segment's steps")
    rounding: list[tuple[int, str]] = []
    for pair in _expect("what steps were made with", saved["rounding"], list):
        if not isinstance(pair, list) or [*map(type, cast("list[Any]", pair))] != [int, str]:
            raise CheckpointError(f"what steps were made with must be in pairs, got {pair!r}")
        rounding.append(tuple(cast("Any", pair)))
    segment = Segment(Ledger.from_dict(cast("Any", saved["ledger"])), tuple(rounding))
    starts = [start for start, _ in rounding]
    ends = [*starts[1:], segment.n_steps]
    if starts[:1] != [0][: segment.n_steps] or not all(map(lt, starts, ends)):
        raise CheckpointError(f"steps {starts} do not divide the {segment.n_steps} of a segment")
    return segment


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All that must outlive a fit. ``key`` is secret; everything else is public.

    Attributes:
        lineage: Name of the record on disk, which all that goes on from one run share.
        key: The live key; None if there is none here: a new module, a pickle, a loaded file.
        path: Key derivation path, from the root.
        inputs: What the open segment follows from, as :meth:`Inputs.saved` tells; None between
            fits.
        begun: Number of the open segment's first step: how many had been released before.
        step: Number of the next one.
        released: All that is known to be released, by this run or others.
        complete: Whether that is all.
        plan: The plan's public numbers.
    """

    lineage: str
    key: RngKey | None = None
    path: tuple[str, ...] = ()
    inputs: Mapping[str, Any] | None = None
    begun: int = 0
    step: int = 0
    released: Released = field(default_factory=dict)
    complete: bool = True
    plan: Mapping[str, Any] = field(default_factory=dict)

    # -- what it tells ----------------------------------------------------------------------------

    @property
    def known(self) -> Known:
        """What is known to be released."""
        return Known(self.released, self.complete)

    @property
    def n_steps(self) -> int:
        """How many steps were released."""
        return sum(segment.n_steps for segment in self.released.values())

    @property
    def ledger(self) -> Ledger:
        """What all of them cost."""
        own = self.segment
        # The open segment's event is found again in the total; others may be renamed.
        total, known = Ledger(), {run for run, _ in self._of(own).ledger.horizons}
        for name, segment in self.released.items():
            for event, count in segment.ledger.process.segments:
                total = total.spend(event, count)
            for run, done in segment.ledger.horizons:
                # Two segments may begin at one step, also the open one, of which there may be no
                # step yet; each is paid whole.
                while name != own and (run in known or run.start == self.begun):
                    run = replace(run, start=run.start + 1)
                known.add(run)
                total = total.spend(run, done)
        return total

    def _of(self, segment: str) -> Segment:
        return self.released.get(segment, _NOTHING)

    @property
    def segment(self) -> str:
        """Name of the open segment; public."""
        return "" if self.key is None else self.key.digest()

    @property
    def live_key(self) -> RngKey:
        """The key, of a record that has one."""
        assert self.key is not None
        return self.key

    @property
    def n_open(self) -> int:
        """How many steps of the open segment are known to be released."""
        return self._of(self.segment).n_steps

    @property
    def to_repeat(self) -> int:
        """How many of the coming steps were released before, and cost nothing again."""
        return max(self.n_open - (self.step - self.begun), 0)

    # -- transitions ------------------------------------------------------------------------------

    def knowing(self, *others: Known) -> RunRecord:
        """With what others have recorded."""
        known = self.known.joined(*others)
        return replace(self, released=known.released, complete=known.complete)

    def opened(self, word: str, nonce: str, inputs: str) -> RunRecord:
        """With a key of its own for the coming steps: the only place where one is made.

        A guarantee depends on the digest of ``inputs`` in it: noise of one key and step is added to
        one gradient.
        """
        n = self.n_steps
        # Steps are told apart by their numbers, so the first one's is a part of the key as well.
        opened = self._folded(entry_of(word, nonce, digest_of(n, inputs)))
        return replace(opened, begun=n, step=n)

    def released_one(self, event: Any, rounding: str) -> RunRecord:
        """One step later; it counts unless it is known to have been released before."""
        later = replace(self, step=self.step + 1)
        if self.to_repeat:
            return later
        name = self.segment
        segment = self._of(name).then(event, rounding)
        return replace(later, released={**self.released, name: segment})

    def copied(self) -> RunRecord:
        """For a copy: a run of its own with the same past, on keys that nobody else comes to."""
        copy = self._folded(entry_of("copy", secrets.token_hex(16)))
        return replace(copy, lineage=new_lineage())

    def reset(self) -> RunRecord:
        """For a module whose past is given up on purpose; no key of it comes again."""
        reset = RunRecord(new_lineage(), self.key, self.path)
        return reset if self.key is None and not self.path else reset._folded(entry_of("reset"))

    def public(self) -> RunRecord:
        """What may be published with the weights: their past, for a run of its own."""
        return RunRecord(
            self.lineage, released=self.released, complete=self.complete, plan=self.plan
        )

    def rooted(self, root: RngKey, *, apart: bool) -> RunRecord:
        """With a key, derived from ``root``, if there is none; always if it is kept ``apart``.

        An earlier key may be in a checkpoint, and all that follows from it is known to its readers.
        """
        lineage = new_lineage() if self.key is None else self.lineage
        if apart:
            return replace(self, lineage=lineage, key=root, path=())
        key = derive(root, self.path) if self.key is None else self.key
        return replace(self, lineage=lineage, key=key)

    def _folded(self, entry: str) -> RunRecord:
        key = None if self.key is None else fold_in(self.key, entry)
        return replace(self, key=key, path=(*self.path, entry), inputs=None)

    # -- plain values -----------------------------------------------------------------------------

    def to_plain(self, *, secret: bool) -> dict[str, Any]:
        """Plain values, for checkpoints, pickles and other processes; the key if ``secret``."""
        plain = {name: getattr(self, name) for name in _TYPES}
        plain["key"] = self.key.hex() if secret and self.key is not None else None
        plain["inputs"] = None if self.inputs is None else dict(self.inputs)
        plain |= {"path": list(self.path), "plan": dict(self.plan)}
        return {"version": VERSION, **plain, **self.known.to_plain()}

    @classmethod
    def from_plain(cls, saved: Any) -> RunRecord:
        """What :meth:`to_plain` made.

        Raises:
            CheckpointError: If it is anything else, or another release's.
        """
        parts: dict[str, Any] = dict(_expect("the privacy record", saved, dict))
        if parts.pop("version", None) != VERSION:
            raise CheckpointError(
                f"the checkpoint's privacy record has version {saved.get('version')!r}, this "
                f"release reads version {VERSION}; version 1 is that of opake_lightning 0.1, which "
                "can go on from it (its sums round in another way, so a run ends with the release "
                "it began in)"
            )
        if parts.keys() != _TYPES.keys():
            missing = sorted(_TYPES.keys() - parts.keys())
            raise CheckpointError(
                f"the checkpoint's privacy record lacks {missing}"
                if missing
                else f"the privacy record has unknown fields {sorted(parts.keys() - _TYPES.keys())}"
            )
        for name, types in _TYPES.items():
            _expect(f"the privacy record's {name}", parts[name], *types)
        if not all(isinstance(entry, str) for entry in parts["path"]):
            raise CheckpointError(f"corrupt checkpoint: bad key derivation {parts['path']!r}")
        try:
            key = None if parts["key"] is None else RngKey.from_hex(parts["key"])
        except ValueError as error:
            raise CheckpointError("the checkpoint's key is damaged") from error
        parts |= {"key": key, "path": tuple(parts["path"])}
        known = Known.from_plain({name: parts[name] for name in ("released", "complete")})
        parts["released"] = known.released
        record = cls(**parts)
        record._require_consistent()
        return record

    def _require_consistent(self) -> None:
        if not 0 <= self.begun <= self.step:
            raise CheckpointError(
                f"corrupt checkpoint: a segment begun at step {self.begun} is at step {self.step}"
            )
        for name, value in self.plan.items():
            if (check := _NUMBERS.get(name)) and value is not None:
                try:
                    check(name, value)
                except (TypeError, ValueError) as error:
                    raise CheckpointError(f"corrupt checkpoint: {error}") from error


_NOTHING = Segment()
# Of the plan's numbers, those that are gone on with, and how each is checked; None is unset.
_NUMBERS: dict[str, Callable[[str, Any], Any]] = {
    "target_delta": partial(_check.fraction, zero=False, one=False),
    "target_epsilon": _check.positive,
    "noise_multiplier": _check.non_negative,
    "planned_steps": partial(_check.at_least, least=0),
}
# What a checkpoint has of each field.
_TYPES: dict[str, tuple[type, ...]] = {
    "lineage": (str,),
    "key": (str, type(None)),
    "path": (list,),
    "inputs": (dict, type(None)),
    "begun": (int,),
    "step": (int,),
    "released": (dict,),
    "complete": (bool,),
    "plan": (dict,),
}


def new_lineage() -> str:
    """A name that no other run has; it has nothing to do with the run's key."""
    return secrets.token_hex(8)


def _expect(what: str, value: Any, *types: type) -> Any:
    if type(value) not in types:
        named = " or ".join(each.__name__ for each in types)
        raise CheckpointError(f"corrupt checkpoint: {what} must be a {named}, got {value!r}")
    return value
