"""Schedules: plain functions from the step (0 at the first) to a number.

They are frozen dataclasses, so two equal ones compare equal, a log shows which one ran, and
:func:`schedule_to_dict` writes one down in plain values. Any other callable from an integer to a
float will do wherever a schedule is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast, final

from opake_lightning import _check

__all__ = [
    "ScalarOrSchedule",
    "Schedule",
    "as_schedule",
    "constant_schedule",
    "cosine_restarts_schedule",
    "cosine_schedule",
    "exponential_schedule",
    "inverse_sqrt_schedule",
    "linear_schedule",
    "polynomial_schedule",
    "schedule_from_dict",
    "schedule_to_dict",
    "warmup_stable_decay_schedule",
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


def polynomial_schedule(
    init_value: float,
    end_value: float,
    power: float,
    transition_steps: int,
    transition_begin: int = 0,
) -> Schedule:
    r"""From ``init_value`` to ``end_value``, the distance left falling as :math:`(1-done)^{power}`.

    Args:
        init_value: Value up to and including step ``transition_begin``.
        end_value: Value from step ``transition_begin + transition_steps`` on.
        power: > 0; 1 is :func:`linear_schedule`, more falls faster at first.
        transition_steps: Number of steps between the two, at least 1.
        transition_begin: Step at which the value begins to move.

    >>> polynomial_schedule(1.0, 0.0, power=2, transition_steps=10)(5)
    0.25
    """
    init, end, steps, begin = _transition(init_value, end_value, transition_steps, transition_begin)
    return _Polynomial(init, end, _check.positive("power", power), steps, begin)


def exponential_schedule(
    init_value: float,
    decay_rate: float,
    transition_steps: int,
    transition_begin: int = 0,
    *,
    staircase: bool = False,
    end_value: float = 0.0,
) -> Schedule:
    """``init_value`` times ``decay_rate`` for every ``transition_steps`` that have passed.

    Args:
        init_value: Value up to and including step ``transition_begin``.
        decay_rate: Factor per ``transition_steps``, in (0, 1].
        transition_steps: Number of steps in which the factor is applied once, at least 1.
        transition_begin: Step at which the value begins to move.
        staircase: Apply the whole factor at the end of each ``transition_steps``, instead of a
            little at every step.
        end_value: The value never falls below this.

    >>> exponential_schedule(1.0, 0.25, transition_steps=10)(5)
    0.5
    """
    return _Exponential(
        _check.non_negative("init_value", init_value),
        _check.fraction("decay_rate", decay_rate, zero=False, one=True),
        _check.positive_int("transition_steps", transition_steps),
        _check.at_least("transition_begin", transition_begin, 0),
        staircase,
        _check.non_negative("end_value", end_value),
    )


def inverse_sqrt_schedule(init_value: float, timescale: int) -> Schedule:
    r"""``init_value`` at first, then falling as :math:`\sqrt{timescale / step}`.

    Args:
        init_value: Value up to and including step ``timescale``.
        timescale: Step at which the value begins to fall, at least 1. With a warm-up of as many
            steps, ``init_value`` is the peak.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 5.3.

    >>> with_warmup(inverse_sqrt_schedule(0.1, timescale=100), transition_steps=100)(400)
    0.05
    """
    return _InverseSqrt(
        _check.non_negative("init_value", init_value), _check.positive_int("timescale", timescale)
    )


def warmup_stable_decay_schedule(
    peak_value: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    init_value: float = 0.0,
    end_value: float = 0.0,
) -> Schedule:
    """A linear rise, a plateau, and a linear fall.

    Args:
        peak_value: Value of the plateau.
        warmup_steps: Steps from ``init_value`` at step 0 to the plateau; 0 for none.
        stable_steps: Steps on the plateau, at least 0.
        decay_steps: Steps from the plateau to ``end_value``, at least 1.
        init_value: Value at step 0. With 0 the first update does not move the parameters.
        end_value: Value from step ``warmup_steps + stable_steps + decay_steps`` on.

    Source: Hu et al. 2024 (arXiv:2404.06395).

    >>> schedule = warmup_stable_decay_schedule(1.0, 4, 10, 4)
    >>> [schedule(step) for step in (0, 1, 4, 14, 15, 18)]
    [0.0, 0.25, 1.0, 1.0, 0.75, 0.0]
    """
    return _WarmupStableDecay(
        _check.non_negative("peak_value", peak_value),
        _check.at_least("warmup_steps", warmup_steps, 0),
        _check.at_least("stable_steps", stable_steps, 0),
        _check.positive_int("decay_steps", decay_steps),
        _check.non_negative("init_value", init_value),
        _check.non_negative("end_value", end_value),
    )


def cosine_restarts_schedule(
    init_value: float,
    end_value: float,
    transition_steps: int,
    transition_begin: int = 0,
    *,
    period_factor: int = 1,
    init_factor: float = 1.0,
) -> Schedule:
    """Half a period of a cosine from ``init_value`` to ``end_value``, again and again.

    Args:
        init_value: Value at the beginning of the first period, and before it.
        end_value: Value that each period falls to: not quite, as the next begins in its place.
        transition_steps: Number of steps of the first period, at least 1.
        transition_begin: Step at which the first period begins.
        period_factor: Each period is this many times as long as the one before, at least 1.
        init_factor: Each period begins this many times as far from ``end_value`` as the one before,
            in (0, 1].

    Source: Loshchilov & Hutter 2017 (arXiv:1608.03983).

    >>> schedule = cosine_restarts_schedule(1.0, 0.0, transition_steps=2, period_factor=2)
    >>> [round(schedule(step), 3) for step in range(7)]
    [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 1.0]
    """
    return _CosineRestarts(
        *_transition(init_value, end_value, transition_steps, transition_begin),
        _check.positive_int("period_factor", period_factor),
        _check.fraction("init_factor", init_factor, zero=False, one=True),
    )


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
    if isinstance(value, Iterator):  # as module.parameters() is
        raise TypeError(
            f"{name} must be a number or a schedule, got a {type(value).__name__}: a functional "
            "optimizer is made without parameters, as adamw(lr=1e-3), and is handed them later"
        )
    return _Constant(_check.non_negative(name, value))


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """Write a schedule down in plain values: the name of its function, and the arguments.

    Args:
        schedule: A schedule of this module.

    Raises:
        TypeError: If it, or a schedule inside it, is another callable.

    >>> schedule_to_dict(with_warmup(0.1, transition_steps=5))  # doctest: +NORMALIZE_WHITESPACE
    {'name': 'with_warmup', 'schedule': {'name': 'constant_schedule', 'value': 0.1},
     'transition_steps': 5, 'init_value': 0.0}
    """
    for name, (kind, _) in _KINDS.items():
        if type(schedule) is kind:
            settings = {f.name: getattr(schedule, f.name) for f in fields(kind)}
            return {"name": name} | {
                key: schedule_to_dict(cast("Schedule", value)) if callable(value) else value
                for key, value in settings.items()
            }
    raise TypeError(
        f"{schedule!r} is not a schedule of opake_lightning.scheduling, so it has no name to be "
        "written down by; build it from the functions there"
    )


def schedule_from_dict(written: Mapping[str, Any]) -> Schedule:
    """The schedule that :func:`schedule_to_dict` wrote down.

    Args:
        written: ``"name"``, one of the functions of this module, and its arguments.

    Raises:
        ValueError: If the name is unknown, or the arguments are not those of the function.

    >>> schedule_from_dict({"name": "constant_schedule", "value": 0.1})(0)
    0.1
    """
    name = written.get("name")
    if name not in _KINDS:
        raise ValueError(f"there is no schedule {name!r}; there are {sorted(_KINDS)}")
    kind, make = _KINDS[name]
    settings: dict[str, Any] = {
        key: schedule_from_dict(value) if isinstance(value, Mapping) else value
        for key, value in written.items()
        if key != "name"
    }
    expected = {f.name for f in fields(kind)}
    if settings.keys() != expected:
        raise ValueError(f"{name} takes {sorted(expected)}, got {sorted(settings)}")
    return make(**settings)


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
class _Polynomial:
    init_value: float
    end_value: float
    power: float
    transition_steps: int
    transition_begin: int

    def __call__(self, step: int) -> float:
        done = min(max(step - self.transition_begin, 0), self.transition_steps)
        left = ((self.transition_steps - done) / self.transition_steps) ** self.power
        return left * self.init_value + (1 - left) * self.end_value


@final
@dataclass(frozen=True, slots=True)
class _Exponential:
    init_value: float
    decay_rate: float
    transition_steps: int
    transition_begin: int
    staircase: bool
    end_value: float

    def __call__(self, step: int) -> float:
        passed = max(step - self.transition_begin, 0) / self.transition_steps
        times = math.floor(passed) if self.staircase else passed
        return max(self.init_value * self.decay_rate**times, self.end_value)


@final
@dataclass(frozen=True, slots=True)
class _InverseSqrt:
    init_value: float
    timescale: int

    def __call__(self, step: int) -> float:
        return self.init_value * math.sqrt(self.timescale / max(step, self.timescale))


@final
@dataclass(frozen=True, slots=True)
class _WarmupStableDecay:
    peak_value: float
    warmup_steps: int
    stable_steps: int
    decay_steps: int
    init_value: float
    end_value: float

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            done, n, ends = max(step, 0), self.warmup_steps, (self.init_value, self.peak_value)
        else:
            done = min(max(step - self.warmup_steps - self.stable_steps, 0), self.decay_steps)
            n, ends = self.decay_steps, (self.peak_value, self.end_value)
        return ((n - done) * ends[0] + done * ends[1]) / n


@final
@dataclass(frozen=True, slots=True)
class _CosineRestarts:
    init_value: float
    end_value: float
    transition_steps: int
    transition_begin: int
    period_factor: int
    init_factor: float

    def __call__(self, step: int) -> float:
        period, done, factor = self.transition_steps, max(step - self.transition_begin, 0), 1.0
        if self.period_factor == 1:
            factor, done = self.init_factor ** (done // period), done % period
        while done >= period:
            done, factor = done - period, factor * self.init_factor
            period *= self.period_factor
        left = factor * (1 + math.cos(math.pi * done / period)) / 2
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


_KINDS: dict[Any, tuple[Any, Callable[..., Schedule]]] = {
    "constant_schedule": (_Constant, constant_schedule),
    "cosine_restarts_schedule": (_CosineRestarts, cosine_restarts_schedule),
    "cosine_schedule": (_Cosine, cosine_schedule),
    "exponential_schedule": (_Exponential, exponential_schedule),
    "inverse_sqrt_schedule": (_InverseSqrt, inverse_sqrt_schedule),
    "linear_schedule": (_Linear, linear_schedule),
    "polynomial_schedule": (_Polynomial, polynomial_schedule),
    "warmup_stable_decay_schedule": (_WarmupStableDecay, warmup_stable_decay_schedule),
    "with_warmup": (_Warmup, with_warmup),
}
