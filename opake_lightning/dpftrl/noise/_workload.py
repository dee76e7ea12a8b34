r"""What the noise is optimised for: the linear map from gradients to what training uses of them.

The error of a strategy is the noise in :math:`A \tilde g`, where :math:`\tilde g_t` is the noisy
gradient of step :math:`t` and :math:`A` the workload, a lower triangular matrix:

* prefix sums, :math:`\sum_{u \le t} \eta_u \tilde g_u`: the parameters of SGD;
* velocity, :math:`v_t = \sum_{s \le t} \beta^{t-s} \tilde g_s`: what an optimizer with a moving
  average, such as Adam, reads of the gradients;
* iterates, :math:`\sum_{u \le t} \eta_u v_u`: the parameters of SGD with momentum.

All are one form, :math:`A = P \operatorname{diag}(\eta)\, V_\beta`, with :math:`P` the prefix sums,
or nothing, and :math:`V_\beta` the velocity. Without a schedule it is a Toeplitz matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from opake_lightning import _check
from opake_lightning.scheduling import schedule_to_dict

__all__ = ["Workload", "iterate_workload", "prefix_workload", "velocity_workload"]

_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """A linear map of gradients; see the functions of this module, which make one.

    Args:
        prefix: Whether velocities are summed up.
        momentum: Decay of the velocity, in [0, 1); 0 is no momentum.
        lr_schedule: Learning rate of each step, from 0, or None if it is constant, whose size does
            not matter.
    """

    prefix: bool
    momentum: float = 0.0
    lr_schedule: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        momentum = _check.fraction("momentum", self.momentum, zero=True, one=False)
        object.__setattr__(self, "momentum", momentum)
        if self.lr_schedule is not None and not callable(self.lr_schedule):
            raise TypeError(
                "lr_schedule must be a function from the step to the learning rate or None, got "
                f"{self.lr_schedule!r}; a constant learning rate needs none"
            )

    @property
    def toeplitz(self) -> bool:
        """Whether the matrix has constant diagonals, which it has without a schedule."""
        return self.lr_schedule is None

    def rates(self, n_steps: int) -> _Array:
        """Return the learning rate of every step, shape [n_steps]; ones without a schedule."""
        return _rates(self.lr_schedule, n_steps)

    def apply(self, gradients: _Array) -> _Array:
        """Return the workload times ``gradients``, whose last axis is the steps, from 0."""
        result = gradients
        if self.momentum:
            result = cast("_Array", lfilter([1.0], [1.0, -self.momentum], result, axis=-1))
        if self.lr_schedule is not None:
            result = result * self.rates(gradients.shape[-1])
        return np.cumsum(result, axis=-1) if self.prefix else result

    def row(self, step: int) -> _Array:
        """Return row ``step``, shape [step + 1]: how the result of the step weights gradients."""
        return self.rows_backwards([step], step + 1)[0, ::-1]

    def rows_backwards(self, steps: Sequence[int], n_steps: int) -> _Array:
        """Return rows read from their last entry, padded with zeros, shape [rows, n_steps]."""
        rates, rows = self.rates(n_steps), np.zeros((len(steps), n_steps))
        for row, step in zip(rows, steps, strict=True):
            if self.prefix:
                row[: step + 1] = rates[step::-1]
            else:
                row[0] = rates[step]
            if self.momentum:
                row[: step + 1] = lfilter([1.0], [1.0, -self.momentum], row[: step + 1])
        return rows

    def describe(self) -> str:
        """Return one line of text that is the same for the same workload in every process."""
        kind = (
            "iterate" if self.prefix and self.momentum else "prefix" if self.prefix else "velocity"
        )
        schedule = "" if self.lr_schedule is None else f", lr={_schedule_name(self.lr_schedule)}"
        return f"{kind}(momentum={self.momentum!r}{schedule})"


def prefix_workload(lr_schedule: Callable[[int], float] | None = None) -> Workload:
    """Prefix sums, each gradient weighted by the learning rate of its step: the iterates of SGD.

    Args:
        lr_schedule: Learning rate by step, from 0; None for a constant one.

    >>> prefix_workload().row(2)
    array([1., 1., 1.])
    """
    return Workload(prefix=True, lr_schedule=lr_schedule)


def velocity_workload(momentum: float) -> Workload:
    r"""The velocity :math:`\sum_s \beta^{t-s} g_s` itself: Adam's first moment, but for a factor.

    Args:
        momentum: :math:`\beta` in [0, 1).

    >>> velocity_workload(0.5).row(2)
    array([0.25, 0.5 , 1.  ])
    """
    return Workload(prefix=False, momentum=momentum)


def iterate_workload(
    momentum: float, lr_schedule: Callable[[int], float] | None = None
) -> Workload:
    """Sums of velocities, each weighted by the learning rate of its step: SGD with momentum.

    Args:
        momentum: Decay of the velocity in [0, 1).
        lr_schedule: Learning rate by step, from 0; None for a constant one. As in SGD it multiplies
            the velocity of the step, not the gradient that entered it.

    >>> iterate_workload(0.5).row(2)
    array([1.75, 1.5 , 1.  ])
    """
    return Workload(prefix=True, momentum=momentum, lr_schedule=lr_schedule)


@lru_cache(maxsize=8)
def _rates(lr_schedule: Callable[[int], float] | None, n_steps: int) -> _Array:
    if lr_schedule is None:
        rates = np.ones(n_steps)
    else:
        rates = np.array([float(lr_schedule(step)) for step in range(n_steps)])
        wrong = ~(np.isfinite(rates) & (rates >= 0))
        if wrong.any():
            step = int(np.argmax(wrong))
            raise ValueError(
                f"lr_schedule must give finite numbers >= 0, got {rates[step]} at step {step}"
            )
    rates.setflags(write=False)
    return rates


def _schedule_name(schedule: Callable[[int], float]) -> str:
    try:
        return repr(schedule_to_dict(schedule))
    except TypeError:
        # Other callables are known by name and by values: their repr holds a memory address.
        kind: Any = schedule if hasattr(schedule, "__qualname__") else type(schedule)
        values = ",".join(float(schedule(step)).hex() for step in range(1024))
        digest = hashlib.blake2b(values.encode(), digest_size=8).hexdigest()
        return f"{kind.__qualname__}#{digest}"
