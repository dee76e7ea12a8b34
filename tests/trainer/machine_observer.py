"""What ``test_machine.py`` believes: a history of releases that knows nothing of ledgers.

An observer stands between the library and its noise. It notes which stream of noise was added to
which gradient, and how large it was. The model says which of those releases a module, a checkpoint
or a record must count, and what they cost by the accountant of another library.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
)

from opake_lightning.dpftrl.noise import _mechanism, band_mf_strategy, lambda_cgd_strategy
from opake_lightning.dpsgd import noise as independent_noise
from opake_lightning.optimizers import adamw
from opake_lightning.random import RngKey, key
from tests.trainer.cases_dpftrl import mf_plan
from tests.trainer.helpers import Net, plan

DELTA = 1e-5
CORRELATED = {"banded": band_mf_strategy(2), "partition": lambda_cgd_strategy(0.7)}


@dataclass(frozen=True)
class Setup:
    """All that a fit is made from. ``apart``: the key is kept out of checkpoints."""

    kind: str
    key: RngKey | None = None
    apart: bool = False
    batch_size: int = 6
    n_examples: int = 24
    clipping_norm: float = 1.0
    noise_multiplier: float = 1.0
    max_steps: int = 6
    rate: float = 0.05

    @property
    def target(self) -> float | None:
        return 8.0 / self.noise_multiplier if self.kind == "target" else None

    def plan(self, on_changed_plan: Any = "refuse") -> Any:
        common = {
            "clipping_norm": self.clipping_norm,
            "key": self.key,
            "key_in_checkpoint": not self.apart,
            "on_changed_plan": on_changed_plan,
        }
        if self.kind == "target":
            return plan(**common, target_epsilon=self.target)
        common["noise_multiplier"] = self.noise_multiplier
        if self.kind == "dpsgd":
            return plan(**common)
        return mf_plan(**common, strategy=CORRELATED[self.kind])

    def optimizer(self) -> Any:
        return adamw(lr=self.rate)

    def net(self, on_changed_plan: Any = "refuse") -> Net:
        return Net(self.plan(on_changed_plan), self.optimizer)

    def changed(self, name: str | None) -> Setup:
        return self if name is None else replace(self, **{name: CHANGES[name]})

    def refused_for(self, name: str) -> str | None:
        """What a refusal calls this change; None if it may be made without a new key."""
        if name == "max_steps" and self.kind == "dpsgd":
            return None
        if self.kind == "target" and name == "noise_multiplier":
            return "target_epsilon"
        kind = "strategy" if self.kind in CORRELATED else "plan"
        names = {
            "max_steps": "planned_steps",
            "key": "the digest of the key",
            "kind": kind,
            "rate": "the learning rates",
        }
        return names.get(name, name)


CHANGES: dict[str, Any] = {
    "kind": "partition",
    "key": key(8),
    "batch_size": 8,
    "n_examples": 25,
    "clipping_norm": 0.5,
    "noise_multiplier": 1.25,
    "max_steps": 7,
    "rate": 0.01,
}


@dataclass(frozen=True)
class Horizon:
    """A fit's worth of correlated noise, paid for as a whole."""

    number: int
    setup: Setup
    n_steps: int


@dataclass(frozen=True)
class Release:
    """One noisy gradient, as the observer saw it."""

    stream: str
    cost: tuple[float, float] | Horizon  # (noise multiplier, sample rate) of independent noise
    part: int  # of which part of the history: a fit, a fork or a copy begins a new one


# Of each part of the history, in order.
Releases = Mapping[int, tuple[Release, ...]]


@dataclass
class Record:
    """All releases that the record of a run, in one folder, must know of."""

    known: Releases = field(default_factory=dict)


@dataclass(frozen=True)
class Past:
    """What a module, or a checkpoint, was made from, and where its checkpoints are."""

    setup: Setup
    folder: Path
    part: int
    horizon: Horizon | None
    # All releases that it counts; the first ``made`` of its own part are its own steps.
    known: Releases = field(default_factory=dict)
    made: int = 0
    record: Record = field(default_factory=Record, compare=False)
    # What was recorded beside the weights that were loaded: counted from the next fit on.
    since: Releases = field(default_factory=dict)
    # No second fit, fork or copy yet: it must be as the unbroken run of its key.
    unbroken: bool = True

    def counted(self) -> Releases:
        """All that a fit that begins now has to count."""
        return together(self.known, self.since)

    def own(self) -> tuple[Release, ...]:
        """What is known of its part."""
        return self.known.get(self.part, ())

    def begun(self, setup: Setup, part: int, horizon: Horizon | None, *, after: Releases) -> Past:
        """The past of a new part, which comes after ``after``."""
        spent: dict[str, Any] = {"known": after, "made": 0, "since": {}}
        return replace(self, setup=setup, part=part, horizon=horizon, unbroken=False, **spent)


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    path: Path
    past: Past
    global_step: int
    weights: str

    def recorded(self) -> Releases:
        """All that a resume, or a new fit, from here has to count."""
        return together(self.past.known, self.past.record.known)


def together(*histories: Releases) -> Releases:
    """The most that is known of each part."""
    parts = {part for history in histories for part in history}
    return {part: max((h.get(part, ()) for h in histories), key=len) for part in parts}


def all_of(releases: Releases) -> list[Release]:
    return [release for part in releases.values() for release in part]


class KilledError(Exception):
    """What ends a fit in a way that nothing is prepared for."""


class Observer:
    """Sees all noise that is added to gradients."""

    def __init__(self) -> None:
        self.gradients: dict[str, str] = {}
        self.faults: list[str] = []
        self.past: Any = None
        self.fail_after: int | None = None  # how many releases, during the next one

    def saw(self, keys: list[RngKey], gradient: torch.Tensor, cost: Any) -> None:
        streams = [digest(one.hex().encode()) for one in keys]
        said = digest(gradient.numpy().tobytes())
        if self.gradients.setdefault(streams[0], said) != said:
            self.faults.append(f"stream {streams[0]} was added to two gradients")
        past: Past = self.past
        own = {release.stream for release in past.own()[: past.made] if release.cost == cost}
        for earlier in streams[1:]:  # regenerated: correlated noise may use its own again
            if earlier not in own:
                self.faults.append(f"stream {earlier} is of another horizon")
        if self.fail_after == 0:
            raise KilledError("while noise was being added")
        if self.fail_after is not None:
            self.fail_after -= 1
        self.released(Release(streams[0], cost, past.part))

    def released(self, release: Release) -> None:
        past: Past = self.past
        own = past.own()
        if past.made == len(own):
            past = replace(past, known={**past.known, past.part: (*own, release)})
            past.record.known = together(past.record.known, past.known)
        elif own[past.made] != release:
            self.faults.append(f"step {past.made} was not repeated, and is not counted")
        self.past = replace(past, made=past.made + 1)

    @contextmanager
    def watching(self, past: Past) -> Iterator[None]:
        """See a fit of a module with this ``past``; ``self.past`` follows what it becomes."""
        self.past, setup = past, past.setup
        add, visit = independent_noise.add_normal_, _mechanism.visit_normals

        def add_normal_(one: RngKey, out: torch.Tensor, stddev: float, **kwargs: Any) -> Any:
            gradient = out.clone()
            add(one, out, stddev, **kwargs)
            multiplier = stddev * setup.batch_size / setup.clipping_norm
            rate = setup.batch_size / setup.n_examples
            self.saw([one], gradient, (round(multiplier, 9), rate))
            return out

        def visit_normals(keys: Any, like: torch.Tensor, work: Any, **kwargs: Any) -> None:
            gradient = like.clone()
            visit(keys, like, work, **kwargs)
            self.saw(list(keys), gradient, past.horizon)

        with (
            mock.patch.object(independent_noise, "add_normal_", add_normal_),
            mock.patch.object(_mechanism, "visit_normals", visit_normals),
        ):
            yield


def digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()[:16]


def weights_of(net: Net) -> str:
    return digest(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))


# -- what it costs, by another accountant --------------------------------------------------------


def epsilon_of(releases: Releases) -> float:
    """ε by the accountant of dp_accounting, and sensitivities by trying all participations."""
    costs: Counter[tuple[float, float]] = Counter()
    found = [release.cost for release in all_of(releases)]
    for one in {cost for cost in found if isinstance(cost, Horizon)}:
        costs.update(_cost_of(one))
    costs.update(cost for cost in found if isinstance(cost, tuple))
    return _composed(tuple(sorted(costs.items())))


@lru_cache(maxsize=1024)
def _composed(costs: tuple[tuple[tuple[float, float], int], ...]) -> float:
    if not costs:
        return 0.0
    parts = (_one(*event).self_compose(count) for event, count in costs)
    return float(reduce(PrivacyLossDistribution.compose, parts).get_epsilon_for_delta(DELTA))


@lru_cache(maxsize=64)
def _one(multiplier: float, rate: float) -> Any:
    return from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=1e-3
    )


@lru_cache(maxsize=64)
def _cost_of(horizon: Horizon) -> dict[tuple[float, float], int]:
    setup, n = horizon.setup, horizon.n_steps
    parts = -(-setup.n_examples // setup.batch_size)
    apart = 2 if setup.kind == "banded" else parts
    strategy = CORRELATED[setup.kind].for_participation(apart, -(-n // apart))
    c = strategy.matrix(n).dense()
    if setup.kind == "banded":  # each turn is a release of its own
        multiplier = setup.noise_multiplier / float(np.linalg.norm(c, axis=0).max())
        return {(multiplier, 2 * setup.batch_size / setup.n_examples): -(-n // 2)}
    sets = (range(first, n, parts) for first in range(parts) if first < n)
    farthest = max(float(np.linalg.norm(c[:, list(s)].sum(1))) for s in sets)
    return {(setup.noise_multiplier / farthest, 1.0): 1}
