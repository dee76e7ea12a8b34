r"""The error that optimised strategies minimise, and its gradient.

Row t of :math:`B = A C^{-1}` is the row of the workload A divided by C. Read backwards from its
last entry it is a row vector times power series, :math:`b = a \cdot c^{-1}`, so all that is needed
here is a set of such rows a, and what their squares count. For a Toeplitz workload the longest
row holds all others, and one row is enough:

.. math:: \max_t \lVert B_t\rVert^2 = \sum_{i<n} b_i^2, \qquad
          \frac1n \sum_t \lVert B_t\rVert^2 = \sum_{i<n} \frac{n-i}{n}\, b_i^2 .

With a learning-rate schedule every row is another. Their squared norms change slowly with t, so
a sample of at most ``_MAX_ROWS`` rows stands for all; privacy does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from opake_lightning.dpftrl.noise._workload import Workload

__all__ = ["ErrorKind", "Objective", "objective"]

_Array = NDArray[np.float64]
ErrorKind: TypeAlias = Literal["mean", "max"]
_MAX_ROWS = 48
# Numbers in all sampled rows together, which bounds the time of one evaluation.
_MAX_NUMBERS = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """A function of the rows of B: the mean of weighted squares, or their largest sum, smoothed.

    Args:
        rows: Rows of the workload read backwards, padded with zeros, shape [rows, n_steps].
        weights: Of each square, shape [rows, n_steps].
        power: None for the sum over rows; otherwise the power mean that stands for the maximum.
    """

    rows: _Array
    weights: _Array
    power: float | None = None

    def log_error(self, errors: _Array) -> tuple[float, _Array]:
        """Return the logarithm of the squared error, and its gradient by each entry of B.

        Args:
            errors: Rows of B, read backwards, shape as ``rows``.
        """
        weighted = self.weights * errors
        squares = np.einsum("ri,ri->r", weighted, errors)
        if self.power is None:
            total = float(np.sum(squares))
            return float(np.log(total)), weighted * (2 / total)
        top = float(np.max(squares))
        relative = (squares / top) ** self.power
        share = relative / np.sum(relative)
        value = np.log(top) + np.log(np.mean(relative)) / self.power
        return float(value), weighted * (2 * share / np.maximum(squares, 1e-300))[:, None]


def objective(
    workload: Workload, n_steps: int, error: ErrorKind, power: float | None = None
) -> Objective:
    """Return the error of a workload as a function of the rows of B.

    Args:
        workload: What the gradients are used for.
        n_steps: Length of the run.
        error: Whether the mean or the largest error over steps counts.
        power: With a schedule and the largest error, the power mean that stands for it.
    """
    if workload.toeplitz:
        impulse = np.zeros(n_steps)
        impulse[0] = 1.0
        weights = np.ones(n_steps) if error == "max" else 1.0 - np.arange(n_steps) / n_steps
        return Objective(workload.apply(impulse)[None], weights[None])
    steps, shares = _sampled_steps(n_steps)
    rows = workload.rows_backwards(steps.tolist(), n_steps)
    if not rows.any():
        raise ValueError(
            f"lr_schedule gives 0 at all of the {n_steps} steps, so there is no error to minimise"
        )
    # The row of step t ends after t + 1 entries, though the division by c goes on.
    inside = (np.arange(n_steps) <= steps[:, None]).astype(np.float64)
    if error == "max":
        return Objective(rows, inside, power)
    return Objective(rows, inside * shares[:, None])


def _sampled_steps(n_steps: int) -> tuple[NDArray[np.intp], _Array]:
    """Return steps, denser at the beginning, and the share of all that each stands for."""
    count = max(16, min(_MAX_ROWS, _MAX_NUMBERS // n_steps))
    if n_steps <= count:
        return np.arange(n_steps), np.full(n_steps, 1.0 / n_steps)
    edges = np.unique(np.round(n_steps * np.linspace(0, 1, count + 1) ** 1.5).astype(np.intp))
    return (edges[:-1] + edges[1:] - 1) // 2, np.diff(edges) / n_steps
