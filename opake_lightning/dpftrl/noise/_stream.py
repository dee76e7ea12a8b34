r"""Noise :math:`x_t = (T^{-1} z)_t` one step at a time, in memory that does not grow.

Each recurrence has one class, whose :meth:`Stream.at` gives, for one step, the work on one stretch
of the model: from the step's draw and the rows of what is remembered to the noise on the gradient.
Rows are in units of the noise with standard deviation 1.

- :class:`~opake_lightning.dpftrl.noise._recurrence.Outputs`: row ``t mod (p - 1)`` is overwritten
  by :math:`x_t`; it held :math:`x_{t-p+1}`, which is not needed any more.
- :class:`~opake_lightning.dpftrl.noise._recurrence.Inputs`: likewise with :math:`z_t`. Or no rows
  at all, and earlier draws are drawn again from their keys.
- :class:`~opake_lightning.dpftrl.noise._recurrence.Buffers`: a row for each buffer.

The matrix whose noise this is must be the one that is accounted for. In float32 the last digit of a
coefficient is 6e-8, and where a recurrence adds up over n steps that comes to n times as much: λ of
0.99999 would be one with half a per cent less to go to 1. So where a sum has no end in sight, a
coefficient is taken in two terms, the first of few binary digits and the second small; θ is taken
as what it is below 1; and the scale, which would be rounded along with every coefficient, comes
last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from opake_lightning.dpftrl.noise._recurrence import Buffers, Inputs, Outputs, Recurrence

__all__ = ["Add", "Memory", "Stream", "Work", "stream_of"]

_DIGITS = 256
_NEXT_TO_1 = 0.9
Memory: TypeAlias = Literal["auto", "store", "regenerate"]
# Adds a number times the noise of one stretch, which it overwrites, from where that begins.
Add: TypeAlias = Callable[[Tensor, float, int], None]
# Takes the draws of one stretch, newest first, and where it begins and how long it is.
Work: TypeAlias = Callable[[list[Tensor], int, int], None]


class Stream(ABC):
    """One recurrence.

    Args:
        rows: How many vectors it remembers.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def draws(self, t: int) -> int:
        """How many draws step ``t`` needs: its own, and so many less one before it."""
        del t
        return 1

    @abstractmethod
    def at(self, t: int, scale: float, ring: Tensor, add: Add) -> Work:
        """The work of step ``t``.

        Args:
            t: Step within the horizon, from 0.
            scale: What the noise is multiplied by.
            ring: What is remembered, [rows, elements].
            add: What adds the noise to the gradient.
        """


def stream_of(recurrence: Recurrence, memory: Memory) -> Stream:
    """The stream of ``recurrence``.

    Args:
        recurrence: How the noise of a step follows from draws.
        memory: Whether earlier draws are stored, or regenerated from the key where they are all
            that is needed. "auto" regenerates if it is one only.

    Raises:
        ValueError: If ``memory`` is not known, or the recurrence cannot be had from draws alone.
    """
    if memory not in ("auto", "store", "regenerate"):
        raise ValueError(f'memory must be "auto", "store" or "regenerate", got {memory!r}')
    if isinstance(recurrence, Inputs):
        again = len(recurrence.coefficients) <= 2 if memory == "auto" else memory == "regenerate"
        return (_Again if again else _Inputs)(recurrence.coefficients)
    stream = (
        _Outputs(recurrence.coefficients)
        if isinstance(recurrence, Outputs)
        else _Buffers(recurrence)
    )
    if memory == "regenerate" and stream.rows:
        raise ValueError(
            'memory="regenerate" is for strategies whose inverse is banded (bisr, lambda_cgd); the '
            "noise of a step here depends on the draws of all steps before it, so that drawing "
            'them again would take longer with every step; use memory="store"'
        )
    return stream


@final
class _Outputs(Stream):
    def __init__(self, coefficients: tuple[float, ...]) -> None:
        super().__init__(len(coefficients) - 1)
        self._shrink = 1 / coefficients[0]
        self._weights = [-c / coefficients[0] for c in coefficients[1:]]

    @override
    def at(self, t: int, scale: float, ring: Tensor, add: Add) -> Work:
        shrink, past, weights = self._shrink, *_past(ring, self._weights, t)
        newest = ring[t % self.rows] if self.rows else None

        def work(drawn: list[Tensor], begin: int, size: int) -> None:
            (x,) = drawn
            if past is not None:
                x.addmv_(past.narrow(0, begin, size), weights, beta=shrink)
            elif shrink != 1:
                x.mul_(shrink)
            if newest is not None:
                newest.narrow(0, begin, size).copy_(x)
            add(x, scale, begin)

        return work


@final
class _Inputs(Stream):
    def __init__(self, coefficients: tuple[float, ...]) -> None:
        super().__init__(len(coefficients) - 1)
        self._newest, *self._earlier = coefficients

    @override
    def at(self, t: int, scale: float, ring: Tensor, add: Add) -> Work:
        coarse, fine = _halves(self._earlier)
        past, weights = _past(ring, coarse, t)
        _, rest = _past(ring, fine, t)
        newest = ring[t % self.rows] if self.rows else None

        def work(drawn: list[Tensor], begin: int, size: int) -> None:
            (z,) = drawn
            x = z
            if past is not None:
                inputs = past.narrow(0, begin, size)
                x = torch.addmv(z, inputs, weights, beta=self._newest).addmv_(inputs, rest)
            elif self._newest != 1:
                x = z * self._newest
            if newest is not None:
                newest.narrow(0, begin, size).copy_(z)
            add(x, scale, begin)

        return work


@final
class _Again(Stream):
    def __init__(self, coefficients: tuple[float, ...]) -> None:
        super().__init__(0)
        self._coefficients = coefficients

    @override
    def draws(self, t: int) -> int:
        return min(t + 1, len(self._coefficients))

    @override
    def at(self, t: int, scale: float, ring: Tensor, add: Add) -> Work:
        newest, *earlier = self._coefficients[: self.draws(t)]
        halves = list(zip(*_halves(earlier), strict=True))

        def work(drawn: list[Tensor], begin: int, size: int) -> None:
            x, *past = drawn
            if newest != 1:
                x.mul_(newest)
            for z, (coarse, fine) in zip(past, halves, strict=True):
                x.add_(z, alpha=coarse)
                if fine:
                    x.add_(z, alpha=fine)
            add(x, scale, begin)

        return work


@final
class _Buffers(Stream):
    def __init__(self, recurrence: Buffers) -> None:
        super().__init__(len(recurrence.theta))
        self._theta = recurrence.theta
        self._omega = recurrence.omega

    @override
    def at(self, t: int, scale: float, ring: Tensor, add: Add) -> Work:
        weights = _vector([-weight for weight in self._omega], ring)
        sums, rows = ring.t(), ring.unbind()

        def work(drawn: list[Tensor], begin: int, size: int) -> None:
            (x,) = drawn
            x.addmv_(sums.narrow(0, begin, size), weights)
            for whole, theta in zip(rows, self._theta, strict=True):
                row = whole.narrow(0, begin, size)
                if theta > _NEXT_TO_1:
                    row.add_(torch.add(x, row, alpha=theta - 1))
                else:
                    torch.add(x, row, alpha=theta, out=row)
            add(x, scale, begin)

        return work


def _halves(coefficients: list[float]) -> tuple[list[float], list[float]]:
    """Each coefficient as a number of few digits, and what that leaves out."""
    coarse = [round(c * _DIGITS) / _DIGITS for c in coefficients]
    return coarse, [c - few for c, few in zip(coefficients, coarse, strict=True)]


def _past(ring: Tensor, by_lag: list[float], t: int) -> tuple[Tensor | None, Tensor]:
    """Rows written so far, [elements, rows], and their weights; ``by_lag`` is of lags 1, 2, ..."""
    rows = len(by_lag)
    used = min(t, rows)
    weights = _vector([by_lag[(t - 1 - row) % rows] for row in range(used)], ring)
    return (ring[:used].t() if used else None), weights


def _vector(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)
