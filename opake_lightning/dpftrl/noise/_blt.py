r"""Buffered linear Toeplitz matrices: diagonals that are sums of a few exponentials.

With :math:`d` buffers, in powers of the shift :math:`z`,

.. math:: c(z) = 1 + \sum_i \frac{\omega_i z}{1 - \theta_i z}
               = \prod_i \frac{1 - \hat\theta_i z}{1 - \theta_i z} ,

so the inverse has the same form with :math:`\theta` and :math:`\hat\theta` exchanged, both are
known in closed form, and :math:`\omega_i > 0` if and only if they interlace:
:math:`1 \ge \theta_1 > \hat\theta_1 > \theta_2 > \hat\theta_2 > \ldots` The diagonals then fall
and are not negative, and the set {0, b, 2b, ...} is the worst.

The roots are optimised through :math:`1 - \theta`: each root lies the exponential of a parameter
below the one before, and :math:`1 - \theta_1 \ge 0` is a parameter of its own, because with
several participations the optimum can have :math:`\theta_1 = 1`. One is minimising

.. math:: \log S^2 + \log \sum_i w_i b_i^2

for the schema's sensitivity S. Since :math:`\partial \log c / \partial\theta_i = z/(1-\theta_i z)`,
gradients are inner products with sections of first order. Everything is O(d n).

Source: Dvijotham et al. 2024 (arXiv:2404.16706); McMahan et al. 2024 (arXiv:2408.08868) for
several participations. Departs from them: roots instead of :math:`\omega` are optimised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from opake_lightning.dpftrl.noise._objective import ErrorKind, Objective, objective
from opake_lightning.dpftrl.noise._workload import Workload

__all__ = ["blt_columns", "blt_weights", "optimal_buffers"]

_Array = NDArray[np.float64]
# Roots closer than this are one root to rounding, and weights lose all digits.
_LEAST_GAP = 1e-7
# The logarithm of an error that no buffers worth having reach.
_HOPELESS = 1e3
# Longer runs begin where the search from many starts ended for a run of this length.
_SEARCHED_N = 4096


def blt_weights(kept: _Array, removed: _Array) -> _Array:
    """Return omega for interlacing roots theta (``kept``) and theta-hat (``removed``)."""
    weights = np.empty_like(kept)
    for i, root in enumerate(kept):
        others = np.delete(np.arange(len(kept)), i)
        ratios = (root - removed[others]) / (root - kept[others])
        weights[i] = (root - removed[i]) * np.prod(ratios)
    return weights


def blt_columns(kept: _Array, removed: _Array, n_steps: int) -> tuple[_Array, _Array]:
    """Return the first columns of C and of its inverse, shape [n_steps] each."""
    impulse = np.zeros(n_steps)
    impulse[0] = 1.0
    return _sections(impulse, removed, kept), _sections(impulse, kept, removed)


def optimal_buffers(
    workload: Workload,
    n_steps: int,
    n_buffers: int,
    error: ErrorKind,
    min_sep: int,
    count: int,
) -> tuple[_Array, _Array]:
    """Return theta and theta-hat with the least error times sensitivity, shape [n_buffers] each.

    Args:
        workload: What the gradients are used for.
        n_steps: Length of the run.
        n_buffers: Number of buffers.
        error: Which error over steps counts.
        min_sep: Least number of steps between participations.
        count: Number of participations.
    """
    if n_steps > _SEARCHED_N or not workload.toeplitz:
        return _from_shorter(workload, n_steps, n_buffers, error, min_sep, count)
    loss = partial(_value_and_gradient, objective(workload, n_steps, error), min_sep, count)
    point = best = _best(loss, _spread(n_steps, 1, min_sep))
    for buffers in range(2, n_buffers + 2):
        starts = _with_one_more(loss, point, n_steps) + _spread(n_steps, buffers, min_sep)
        more = _best(loss, starts)
        # A buffer that turns out to cancel shows where the others should have been.
        best = _best(loss, [point, *_with_one_less(loss, more, n_steps)])
        if loss(best)[0] < loss(point)[0] - 1e-6:
            more = _best(loss, [more, *_with_one_more(loss, best, n_steps)])
        point = more
    _, point = _descend(loss, best)
    kept, removed, _ = _roots(point, n_steps)
    return kept, removed


def _from_shorter(
    workload: Workload, n_steps: int, n_buffers: int, error: ErrorKind, min_sep: int, count: int
) -> tuple[_Array, _Array]:
    """Return the optimum next to that of a shorter run without a schedule, time scales stretched.

    Time scales spread from one step to the run. They are stretched so that one step stays what it
    is and the end of the run becomes the end of the run.
    """
    n = min(n_steps, _SEARCHED_N)
    short = max(1, round(min_sep * n / n_steps))
    plain = Workload(workload.prefix, workload.momentum)
    found = optimal_buffers(plain, n, n_buffers, error, short, min(count, -(-n // short)))
    roots = 1.0 - np.stack(found, axis=1).ravel()
    roots = np.maximum(roots, 0.0) ** (math.log(n_steps + 1) / math.log(n + 1))
    # Those that all but cancel may have come too close.
    roots = np.maximum.accumulate(roots + 2 * _LEAST_GAP * np.arange(len(roots)))
    point = _point(roots, n_steps)
    for power in (16.0, 256.0) if error == "max" and not workload.toeplitz else (None,):
        target = objective(workload, n_steps, error, power)
        loss = partial(_value_and_gradient, target, min_sep, count)
        _, point = _descend(loss, point, short=not workload.toeplitz)
    kept, removed, _ = _roots(point, n_steps)
    return kept, removed


_Loss: TypeAlias = Callable[[_Array], tuple[float, _Array]]


def _best(loss: _Loss, starts: list[_Array]) -> _Array:
    """Return the best end of short descents."""
    ends = [_descend(loss, start, short=True) for start in starts]
    return min(ends, key=lambda end: end[0])[1]


def _descend(loss: _Loss, point: _Array, *, short: bool = False) -> tuple[float, _Array]:
    found: Any = minimize(
        loss,
        point,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, math.inf)] + [(math.log(_LEAST_GAP), 0.0)] * (len(point) - 1),
        options={
            "maxiter": 100 if short else 500,
            "ftol": 1e-9 if short else 1e-12,
            "gtol": 1e-9,
            "maxcor": 20,
        },
    )
    return float(found.fun), cast("_Array", found.x)


def _spread(n_steps: int, n_buffers: int, min_sep: int) -> list[_Array]:
    """Return roots evenly spread over time scales up to the run, or to the next participation."""
    starts: list[_Array] = []
    for horizon in {n_steps, min_sep}:
        for first, last in ((1.0, 0.6), (0.2, 0.9)):
            roots = np.geomspace(min(first / horizon, 0.1), last, 2 * n_buffers)
            starts.append(_point(roots, n_steps))
    return starts


def _with_one_more(loss: _Loss, point: _Array, n_steps: int) -> list[_Array]:
    """Return where to go on with one buffer more than ``point`` has.

    Two roots next to each other cancel, wherever they are, and roots still interlace. So the new
    buffer begins small at the places where that helps most, and the error never rises with the
    number of buffers. Begun anywhere, buffers tend to end up cancelled in a bad place.
    """
    roots = np.cumsum(np.concatenate([[point[0] / n_steps], np.exp(point[1:])]))
    best: list[_Array] = []
    for ratio in (1.02, 1.15, 2.0):
        trials: list[tuple[float, _Array]] = []
        for place in np.geomspace(0.02 / n_steps, 0.95, 40):
            after = int(np.searchsorted(roots, place))
            low = max(place / ratio, roots[after - 1] + 2 * _LEAST_GAP if after else 0.0)
            high = min(place * ratio, 1.0)
            if after < len(roots):
                high = min(high, roots[after] - 2 * _LEAST_GAP)
            if high - low > 2 * _LEAST_GAP:
                trial = _point(np.insert(roots, after, [low, high]), n_steps)
                trials.append((loss(trial)[0], trial))
        values = np.array([math.inf] + [trial[0] for trial in trials] + [math.inf])
        lowest = np.flatnonzero((values[1:-1] <= values[:-2]) & (values[1:-1] <= values[2:]))
        best += [trials[i][1] for i in sorted(lowest, key=lambda i: values[i + 1])[:2]]
    # Where no place helps, one that cancels to rounding does no harm.
    edges = np.concatenate([[0.0], roots, [1.0]])
    widest = int(np.argmax(np.diff(edges)))
    pair = edges[widest] + _LEAST_GAP * np.array([2, 4])
    return [*best, _point(np.insert(roots, widest, pair), n_steps)]


def _with_one_less(loss: _Loss, point: _Array, n_steps: int) -> list[_Array]:
    """Return where to go on with one buffer less: two neighbours among the roots taken out."""
    kept, removed, _ = _roots(point, n_steps)
    roots = 1.0 - np.stack([kept, removed], axis=1).ravel()
    trials = [_point(np.delete(roots, [i, i + 1]), n_steps) for i in range(len(roots) - 1)]
    return sorted(trials, key=lambda trial: loss(trial)[0])[:2]


def _point(roots: _Array, n_steps: int) -> _Array:
    """Return the parameters for 1 - theta_1, 1 - theta-hat_1, 1 - theta_2, ..., which rise."""
    return np.concatenate([[roots[0] * n_steps], np.log(np.diff(roots))])


def _roots(point: _Array, n_steps: int) -> tuple[_Array, _Array, _Array]:
    """Return theta, theta-hat and the gaps between them, from the parameters."""
    gaps = np.concatenate([[point[0] / n_steps], np.exp(point[1:])])
    roots = 1.0 - np.cumsum(gaps)
    return roots[::2], roots[1::2], gaps


def _value_and_gradient(
    target: Objective, min_sep: int, count: int, point: _Array
) -> tuple[float, _Array]:
    n = target.rows.shape[-1]
    kept, removed, gaps = _roots(point, n)
    if not (kept[-1] >= 0 and removed[-1] > -0.99):
        return _HOPELESS, np.zeros_like(point)
    errors = _sections(target.rows, kept, removed)
    value, by_errors = target.log_error(errors)
    impulse = np.zeros(n)
    impulse[0] = 1.0
    column = _sections(impulse, removed, kept)
    log_square, by_column = _log_sensitivity(column, min_sep, count)
    by_root = np.empty(2 * len(kept))
    for i, root in enumerate(np.stack([kept, removed], axis=1).ravel()):
        sign = 1.0 if i % 2 == 0 else -1.0
        by_root[i] = sign * _derivative(column[None], by_column[None], root)
        by_root[i] -= sign * _derivative(errors, by_errors, root)
    # Every root lies below 1 by all gaps up to its own.
    by_gap = -np.cumsum(by_root[::-1])[::-1]
    by_gap[0] /= n
    by_gap[1:] *= gaps[1:]
    return value + log_square, by_gap


def _sections(rows: _Array, zeros: _Array, poles: _Array) -> _Array:
    """Return rows times the product of (1 - zero z) / (1 - pole z), one section at a time."""
    for zero, pole in zip(zeros, poles, strict=True):
        rows = cast("_Array", lfilter([1.0, -zero], [1.0, -pole], rows))
    return rows


def _derivative(rows: _Array, by_rows: _Array, root: float) -> float:
    """Return the inner product of a gradient by rows with rows times z / (1 - root z)."""
    moved = cast("_Array", lfilter([1.0], [1.0, -root], rows))
    return float(np.vdot(by_rows[:, 1:], moved[:, :-1]))


def _log_sensitivity(column: _Array, min_sep: int, count: int) -> tuple[float, _Array]:
    """Return the logarithm of the squared norm of columns 0, b, ... summed, and its gradient."""
    total = column.copy()
    for i in range(1, count):
        total[i * min_sep :] += column[: len(column) - i * min_sep]
    square = float(total @ total)
    gradient = total.copy()
    for i in range(1, count):
        gradient[: len(column) - i * min_sep] += total[i * min_sep :]
    return math.log(square), gradient * (2 / square)
