r"""The strategy matrix of a run, and what follows from it: sensitivity, noise and error.

Correlated noise is :math:`C^{-1} z` with :math:`z_t \sim N(0, \sigma_z^2 I)` independent. Adding it
to the gradients :math:`g` is the same as adding :math:`z` to :math:`C g`, so the run as a whole
costs what one Gaussian costs whose sensitivity is the largest :math:`\lVert C\,\Delta g\rVert`
that one example can cause.

:math:`C` is lower triangular, :math:`n \times n`, with constant diagonals
:math:`c_0, c_1, \ldots`; or such a matrix :math:`T` whose columns are divided by their norms
:math:`d_t`, so that :math:`C = T \operatorname{diag}(d)^{-1}` and
:math:`C^{-1} = \operatorname{diag}(d)\, T^{-1}`. The norms depend on :math:`n`: columns end with
the run, so later ones are shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from opake_lightning import _check
from opake_lightning.dpftrl.noise._sensitivity import Sensitivity, participation_sensitivity
from opake_lightning.dpftrl.noise._workload import Workload

__all__ = ["Rmse", "StrategyMatrix"]

_Array = NDArray[np.float64]
# Numbers held at a time where all n columns have to be looked at.
_CHUNK = 2**21


class Rmse(NamedTuple):
    """Root of the mean square error per coordinate, for noise of standard deviation 1.

    Without the sensitivity: multiply by it, by the noise multiplier and by the clipping norm.

    Args:
        max: Of the step where it is largest.
        mean: Root of the mean over steps of its square.
    """

    max: float
    mean: float


@dataclass(frozen=True, slots=True, eq=False)
class StrategyMatrix:
    """A lower triangular matrix C with constant diagonals, or one with its columns normalised.

    Args:
        n_steps: Number of rows and of columns.
        coefficients: First column of T, as far as it is not zero, shape [at most n_steps].
        normalized: Whether each column of T is divided by its norm.
        inverse: First column of the inverse of T, as far as it is not zero, where it is known.

    >>> matrix = StrategyMatrix(3, np.array([1.0, 0.5]))
    >>> matrix.dense()
    array([[1. , 0. , 0. ],
           [0.5, 1. , 0. ],
           [0. , 0.5, 1. ]])
    >>> matrix.inverse_coefficients()
    array([ 1.  , -0.5 ,  0.25])
    """

    n_steps: int
    coefficients: _Array
    normalized: bool = False
    inverse: _Array | None = None

    def __post_init__(self) -> None:
        _check.positive_int("n_steps", self.n_steps)
        for name in ("coefficients", "inverse"):
            given = getattr(self, name)
            if given is None:
                continue
            values = np.array(given, dtype=np.float64)
            if values.ndim != 1 or not 0 < len(values) <= self.n_steps:
                raise ValueError(
                    f"{name} must be a vector of 1 to n_steps={self.n_steps} numbers, got shape "
                    f"{values.shape}"
                )
            if not (np.isfinite(values).all() and values[0] != 0):
                raise ValueError(f"{name} must be finite, and the first not 0, got {values[:8]}")
            # One matrix serves all who ask for it.
            values.setflags(write=False)
            object.__setattr__(self, name, values)

    def column_norms(self) -> _Array:
        """Return the norm of every column of C, shape [n_steps]."""
        return np.ones(self.n_steps) if self.normalized else self._toeplitz_norms()

    def max_column_norm(self) -> float:
        """Return the largest norm of a column of C: the sensitivity of one participation."""
        return float(self.column_norms()[0])

    def scales(self) -> _Array:
        """Return the factor by which step t's noise is multiplied, shape [n_steps]: d, or ones."""
        return self._toeplitz_norms() if self.normalized else np.ones(self.n_steps)

    def inverse_coefficients(self) -> _Array:
        """Return the first column of the inverse of T, shape [n_steps]."""
        result = np.zeros(self.n_steps)
        if self.inverse is not None:
            result[: len(self.inverse)] = self.inverse
            return result
        result[0] = 1.0
        return cast("_Array", lfilter([1.0], self.coefficients, result))

    def row_norms(self) -> _Array:
        r"""Return the norm of every row of the inverse of C, shape [n_steps].

        That of row t is the standard deviation of the noise of step t over :math:`\sigma_z`.
        """
        return self.scales() * np.sqrt(np.cumsum(self.inverse_coefficients() ** 2))

    def dense(self) -> _Array:
        """Return C itself, shape [n_steps, n_steps]."""
        column = np.zeros(self.n_steps)
        column[: len(self.coefficients)] = self.coefficients
        lag = np.subtract.outer(np.arange(self.n_steps), np.arange(self.n_steps))
        return np.where(lag >= 0, column[np.abs(lag)], 0.0) / self.scales()

    def sensitivity(self, min_sep: int, max_participations: int | None = None) -> float:
        """Return how far one example can move C times the gradients, at most.

        Guarantees:
            Never too low, but for rounding. Exact for the strategies of this package; of those
            with normalised columns, if the matrix has at most ``min_sep`` bands or none, and for
            at most 12,000 steps, else an upper bound that is a few per cent too high at most.
            :meth:`sensitivity_bound` tells whether it is exact.

        Args:
            min_sep: An example takes part at steps at least so far apart; 1 is every step.
            max_participations: How often it takes part at most; by default as often as the
                n_steps allow.

        Returns:
            The L2 norm, for gradients clipped to norm 1.

        Raises:
            ValueError: If an argument is not at least 1.
        """
        return self.sensitivity_bound(min_sep, max_participations).value

    def sensitivity_bound(self, min_sep: int, max_participations: int | None = None) -> Sensitivity:
        """Return :meth:`sensitivity`, and whether it is exact."""
        return participation_sensitivity(
            self.coefficients,
            self.n_steps,
            normalized=self.normalized,
            min_sep=min_sep,
            max_participations=max_participations,
        )

    def rmse(self, workload: Workload) -> Rmse:
        r"""Return the error of ``workload``: norms of the rows of :math:`A C^{-1}`.

        >>> from opake_lightning.dpftrl.noise import prefix_workload
        >>> StrategyMatrix(4, np.array([1.0])).rmse(prefix_workload())  # sqrt(4), sqrt(10 / 4)
        Rmse(max=2.0, mean=1.58...)
        """
        inverse = self.inverse_coefficients()
        if workload.toeplitz and not self.normalized:
            squares = np.cumsum(workload.apply(inverse) ** 2)
        else:
            squares = self._row_squares(workload, inverse)
        return Rmse(math.sqrt(float(squares.max())), math.sqrt(float(squares.mean())))

    def _row_squares(self, workload: Workload, inverse: _Array) -> _Array:
        n, scales, squares = self.n_steps, self.scales(), np.zeros(self.n_steps)
        padded = np.concatenate([np.zeros(n), inverse])
        windows = np.lib.stride_tricks.sliding_window_view(padded, n)
        chunk = max(1, _CHUNK // n)
        for first in range(0, n, chunk):
            last = min(n, first + chunk)
            # Columns first to last of the inverse of C, as rows.
            columns = windows[n - np.arange(first, last)] * scales
            errors = workload.apply(columns)
            squares += np.einsum("st,st->t", errors, errors)
        return squares

    def _toeplitz_norms(self) -> _Array:
        squares = np.zeros(self.n_steps)
        squares[: len(self.coefficients)] = self.coefficients**2
        return np.sqrt(np.cumsum(squares))[::-1]
