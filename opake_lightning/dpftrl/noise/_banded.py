r"""Optimal diagonals of a banded strategy matrix.

With at most ``min_sep`` bands the columns at which one example takes part do not meet, so the
sensitivity is :math:`\sqrt{k}\,\lVert c\rVert` whatever the schema, and what is left is to minimise

.. math:: \log \lVert c\rVert^2 + \log \sum_i w_i b_i^2, \qquad b = a \cdot c^{-1},

over :math:`c_0, \ldots, c_{p-1}`. It does not depend on the scale of c, which is set to
:math:`\lVert c\rVert = 1` in the end. Its gradient is a filter run backwards: for
:math:`h` the gradient by :math:`b`, divided by c backwards in time,
:math:`\partial/\partial c_j = -\sum_i h_i b_{i-j}`.

Source: Choquette-Choo et al. 2023 (arXiv:2306.08153) for banded matrices; McKenna 2024
(arXiv:2405.15913) for Toeplitz ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from opake_lightning.dpftrl.noise._objective import ErrorKind, Objective, objective
from opake_lightning.dpftrl.noise._workload import Workload

__all__ = ["optimal_bands"]

_Array = NDArray[np.float64]
# The first step of a search has length 1: far less than the point, or it leaves the diagonals
# whose inverse does not explode.
_SCALE = 30.0
# The logarithm of an error that no diagonals worth having reach.
_HOPELESS = 1e3


def optimal_bands(workload: Workload, n_steps: int, bands: int, error: ErrorKind) -> _Array:
    """Return the diagonals with the least error times norm, of norm 1, shape [bands].

    Args:
        workload: What the gradients are used for.
        n_steps: Length of the run.
        bands: Number of diagonals, at most ``n_steps``.
        error: Which error over steps counts.
    """
    if bands == 1:
        return np.ones(1)
    point = _root_of_kernel(workload, n_steps, bands)
    smooth = error == "max" and not workload.toeplitz
    for power in (16.0, 256.0) if smooth else (None,):
        target = objective(workload, n_steps, error, power)
        found: Any = minimize(
            partial(_value_and_gradient, target),
            point * (_SCALE / point[0]),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 400, "ftol": 1e-12, "gtol": 1e-8, "maxcor": 20},
        )
        point = cast("_Array", found.x)
    return point / np.linalg.norm(point)


def _value_and_gradient(target: Objective, c: _Array) -> tuple[float, _Array]:
    norm = float(c @ c)
    with np.errstate(over="ignore", invalid="ignore"):
        errors = cast("_Array", lfilter([1.0], c, target.rows))
    if not (np.max(np.abs(errors)) < 1e100):
        return _HOPELESS, np.zeros_like(c)
    value, by_errors = target.log_error(errors)
    divided = cast("_Array", lfilter([1.0], c, by_errors[:, ::-1]))[:, ::-1]
    gradient = 2 * c / norm - _products_at_lags(divided, errors, len(c))
    return value + float(np.log(norm)), gradient


def _products_at_lags(late: _Array, early: _Array, lags: int) -> _Array:
    """Return the inner product of each row with the other's shifted by 0, 1, ..., summed up."""
    n = late.shape[-1]
    if lags <= 32:
        return np.array([np.sum(late[:, j:] * early[:, : n - j]) for j in range(lags)])
    size = 2 ** int(np.ceil(np.log2(2 * n)))
    spectrum = np.fft.rfft(late, size) * np.conj(np.fft.rfft(early, size))
    return np.fft.irfft(np.sum(spectrum, axis=0), size)[:lags]


def _root_of_kernel(workload: Workload, n_steps: int, bands: int) -> _Array:
    """Return the first diagonals of the square root of the workload, without its schedule.

    The whole root is optimal for the largest error, if each example takes part once.
    """
    impulse = np.zeros(n_steps)
    impulse[0] = 1.0
    kernel = Workload(workload.prefix, workload.momentum).apply(impulse)[:bands]
    root = np.zeros(bands)
    root[0] = 1.0
    for i in range(1, bands):
        root[i] = (kernel[i] - root[1:i] @ root[i - 1 : 0 : -1]) / 2
    return root
