"""A run whose cost is only known as a whole: paid with its first step, owed nothing by its last."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Never

from opake_lightning import _check
from opake_lightning.accounting.monte_carlo import BallsInBins, BMinSep, MonteCarlo
from opake_lightning.accounting.process import GaussianEvent, Process
from opake_lightning.errors import PrivacyError

__all__ = ["WholeRun"]

_ROUNDING = 1e-9
_SAMPLED: dict[str, type[MonteCarlo]] = {"balls_in_bins": BallsInBins, "b_min_sep": BMinSep}


@dataclass(frozen=True, slots=True)
class WholeRun:
    """What a declared number of steps costs together, however few of them are made.

    Noise that is correlated over steps has no cost per step: what one step has released cannot be
    told apart from what the others will. So the whole is spent with the first step, and the run
    can be neither repeated nor sampled afterwards; a :class:`Ledger` composes it with others.

    Guarantees:
        :meth:`epsilon_at` and :meth:`delta_at` are the cost's own. ``*``, ``+`` and every function
        that amplifies a process refuse a whole run.

    Args:
        cost: The cost of all steps.
        n_steps: How many steps were declared.
        start: How many steps had been made when it began, by which two equal runs, one after the
            other, are told apart: ``dataclasses.replace(run, start=...)``. Their noise, and what
            decides who takes part when, must be independent: give noise and sampler the same start.

    >>> run = WholeRun(Process(((GaussianEvent(1.0), 1),)), n_steps=100)
    >>> round(run.epsilon_at(1e-5), 4)
    4.3772
    """

    cost: Process | MonteCarlo
    n_steps: int
    start: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.cost, (Process, MonteCarlo)):
            raise TypeError(f"cost must be a Process or a MonteCarlo cost, got {self.cost!r}")
        _check.positive_int("n_steps", self.n_steps)
        _check.at_least("start", self.start, 0)
        if isinstance(self.cost, MonteCarlo) and self.cost.n_steps != self.n_steps:
            raise ValueError(
                f"the cost is that of {self.cost.n_steps} steps, not of n_steps={self.n_steps}"
            )

    def epsilon_at(self, delta: float) -> float:
        """Return an upper bound on ε at ``delta`` of all steps, from the first on."""
        return self.cost.epsilon_at(delta)

    def delta_at(self, epsilon: float) -> float:
        """Return an upper bound on δ at ``epsilon`` of all steps, from the first on."""
        return self.cost.delta_at(epsilon)

    @property
    def segments(self) -> Never:
        """A process has segments of steps; whoever wants those of a whole run is refused."""
        self._refuse()

    def __mul__(self, other: object) -> Never:
        """Refuse to repeat a whole run."""
        self._refuse()

    __rmul__ = __add__ = __radd__ = __mul__

    def _refuse(self) -> Never:
        raise PrivacyError(
            f"a WholeRun of {self.n_steps} steps with correlated noise is one release: it can be "
            "neither repeated, nor joined to a process, nor sampled (amplified) a second time. "
            "Declare all steps as n_steps of one run, and compose different runs with "
            "Ledger().spend(run)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and text, for a checkpoint."""
        return {"cost": _saved(self.cost), "n_steps": self.n_steps, "start": self.start}

    def is_but_for_rounding(self, other: WholeRun) -> bool:
        """Whether both are one run, whose numbers two kinds of processor have computed."""
        return _close(self.to_dict(), other.to_dict())

    @classmethod
    def from_dict(cls, saved: Any) -> WholeRun:
        """Return the run that :meth:`to_dict` saved.

        Raises:
            ValueError, TypeError: If anything in ``saved`` is not as :meth:`to_dict` writes it.
        """
        _expect(saved, {"cost", "n_steps", "start"})
        return cls(_restored(saved["cost"]), saved["n_steps"], saved["start"])


def saved_segments(process: Process) -> list[list[float | int]]:
    """Return ``[noise_multiplier, sample_rate, count]`` of each segment."""
    return [[event.noise_multiplier, event.sample_rate, n] for event, n in process.segments]


def restored_segments(rows: Any) -> Process:
    """Return the process that :func:`saved_segments` saved, or raise ValueError or TypeError."""
    if not isinstance(rows, (list, tuple)):
        raise TypeError(f"segments must be a list, got {rows!r}")
    return Process(tuple(_segment(row) for row in rows))


def _segment(row: Any) -> tuple[GaussianEvent, int]:
    try:
        noise_multiplier, sample_rate, count = row
        return GaussianEvent(noise_multiplier, sample_rate), _check.positive_int("count", count)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{row!r} is not [noise_multiplier, sample_rate, count]: {error}"
        ) from error


def _saved(cost: Process | MonteCarlo) -> dict[str, Any]:
    if isinstance(cost, Process):
        return {"kind": "process", "segments": saved_segments(cost)}
    (kind,) = (name for name, known in _SAMPLED.items() if type(cost) is known)
    values = {field.name: getattr(cost, field.name) for field in fields(cost)}
    return {"kind": kind, **values, "coefficients": list(cost.coefficients)}


def _restored(saved: Any) -> Process | MonteCarlo:
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if kind == "process":
        _expect(saved, {"kind", "segments"})
        return restored_segments(saved["segments"])
    if kind not in _SAMPLED:
        raise ValueError(f"a cost is 'process' or one of {[*_SAMPLED]}, got {saved!r}")
    known = _SAMPLED[kind]
    _expect(saved, {"kind", *(field.name for field in fields(known))})
    return known(**{name: value for name, value in saved.items() if name != "kind"})


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING)
    return one == other


def _expect(saved: Any, keys: set[str]) -> None:
    if not isinstance(saved, dict) or set(saved) != keys:
        raise ValueError(f"expected a dict with the keys {sorted(keys)}, got {saved!r}")
