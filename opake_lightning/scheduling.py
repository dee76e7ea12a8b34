"""Schedules: plain functions from the step (0 at the first) to a number.

They are frozen dataclasses, so two equal ones compare equal and a log shows which one ran. Any
other callable from an integer to a float will do wherever a schedule is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

from opake_lightning import _check

__all__ = [
    "ScalarOrSchedule",
    "Schedule",
    "as_schedule",
    "constant_schedule",
    "cosine_schedule",
    "linear_schedule",
    "with_warmup",
]

Schedule: TypeAlias = Callable[[int], float]
ScalarOrSchedule: TypeAlias = float | Schedule


def constant_schedule(value: float) -> Schedule:
    """The same ``value`` at every step.

    >>> constant_schedule(0.1)(1000)
    0.1
    """
    return _Constant(_check.non_negative("value", value))


def linear_schedule(
    init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """From ``init_value`` to ``end_value`` in a straight line.

    Args:
        init_value: Value up to and including step ``transition_begin``.
        end_value: Value from step ``transition_begin + transition_steps`` on.
        transition_steps: Number of steps between the two, at least 1.
        transition_begin: Step at which the value begins to move.

    >>> linear_schedule(1.0, 0.0, transition_steps=10, transition_begin=5)(8)
    0.7
    """
    return _Linear(*_transition(init_value, end_value, transition_steps, transition_begin))


def cosine_schedule(
    init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """From ``init_value`` to ``end_value`` along half a period of a cosine.

    Args:
        init_value: Value up to and including step ``transition_begin``.
        end_value: Value from step ``transition_begin + transition_steps`` on.
        transition_steps: Number of steps between the two, at least 1.
        transition_begin: Step at which the value begins to move.

    Source: Loshchilov & Hutter 2017 (arXiv:1608.03983), without restarts.

    >>> cosine_schedule(1.0, 0.0, transition_steps=10)(5)
    0.5
    """
    return _Cosine(*_transition(init_value, end_value, transition_steps, transition_begin))


def with_warmup(
    schedule: ScalarOrSchedule, transition_steps: int, init_value: float = 0.0
) -> Schedule:
    """A linear rise first, then ``schedule`` itself.

    The rise goes from ``init_value`` at step 0 to ``schedule(transition_steps)`` at step
    ``transition_steps``, and from there on the result is ``schedule`` at the same step: it is not
    shifted, so give a decay that shall begin after the warm-up ``transition_begin``.

    Args:
        schedule: What to warm up to: a schedule, or a constant value.
        transition_steps: Steps of the rise, at least 1.
        init_value: Value at step 0. With 0 the first update does not move the parameters.

    >>> warm = with_warmup(linear_schedule(1.0, 0.0, 10, transition_begin=4), transition_steps=4)
    >>> [warm(step) for step in (0, 1, 4, 9, 14)]
    [0.0, 0.25, 1.0, 0.5, 0.0]
    """
    return _Warmup(
        as_schedule("schedule", schedule),
        _check.positive_int("transition_steps", transition_steps),
        _check.non_negative("init_value", init_value),
    )


def as_schedule(name: str, value: Any) -> Schedule:
    """``value`` if it is callable, else the constant schedule of it; ``name`` is for the error."""
    if callable(value):
        return cast("Schedule", value)
    return _Constant(_check.non_negative(name, value))


def _transition(init: float, end: float, steps: int, begin: int) -> tuple[float, float, int, int]:
    return (
        _check.non_negative("init_value", init),
        _check.non_negative("end_value", end),
        _check.positive_int("transition_steps", steps),
        _check.at_least("transition_begin", begin, 0),
    )


@final
@dataclass(frozen=True, slots=True)
class _Constant:
    value: float

    def __call__(self, step: int) -> float:
        return self.value


@final
@dataclass(frozen=True, slots=True)
class _Linear:
    init_value: float
    end_value: float
    transition_steps: int
    transition_begin: int

    def __call__(self, step: int) -> float:
        done = min(max(step - self.transition_begin, 0), self.transition_steps)
        # Weighted by whole steps, so that both ends are met exactly.
        left = self.transition_steps - done
        return (left * self.init_value + done * self.end_value) / self.transition_steps


@final
@dataclass(frozen=True, slots=True)
class _Cosine:
    init_value: float
    end_value: float
    transition_steps: int
    transition_begin: int

    def __call__(self, step: int) -> float:
        done = min(max(step - self.transition_begin, 0), self.transition_steps)
        left = (1 + math.cos(math.pi * done / self.transition_steps)) / 2
        return left * self.init_value + (1 - left) * self.end_value


@final
@dataclass(frozen=True, slots=True)
class _Warmup:
    schedule: Schedule
    transition_steps: int
    init_value: float

    def __call__(self, step: int) -> float:
        if step >= self.transition_steps:
            return self.schedule(step)
        risen = max(step, 0) / self.transition_steps
        return (1 - risen) * self.init_value + risen * self.schedule(self.transition_steps)
