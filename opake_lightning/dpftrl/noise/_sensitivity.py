r"""How much one example can change what the Gaussian noise of a whole run protects.

An example takes part at steps :math:`s_1 < s_2 < \ldots`, at least :math:`b` apart and at most
:math:`k` times (at most :math:`k' = \min(k, \lceil n/b \rceil)`, then). With gradients of norm at
most 1 it moves :math:`C g` by at most

.. math:: S = \max_{\{s_i\}} \Bigl(\sum_{i,j} |G_{s_i s_j}|\Bigr)^{1/2},
          \qquad G = C^{\mathsf T} C ,

and by exactly that much if the entries of :math:`G` that count are not negative, or if signs of
gradients make them so. The sets are too many to try. What holds for any of them: its :math:`i`-th
element (from 0) is at least :math:`ib`, and two that are :math:`m` places apart are at least
:math:`mb` steps apart. So with :math:`H(s, g)` the largest :math:`|G_{s', s'+g'}|` of all
:math:`s' \ge s, g' \ge g`, and as the norms of columns never grow with s,

.. math:: S^2 \le \sum_{i < k'} G_{ib,ib} + 2 \sum_{i < j < k'} H(ib, (j-i)b) ,

the *corner bound*. The set :math:`\{0, b, 2b, \ldots\}` attains it whenever each maximum lies in
its corner, which is the case

* for diagonals :math:`c_0 \ge c_1 \ge \ldots \ge 0` (arXiv:2405.13763, Theorem 2): all strategies
  of this package whose columns are not normalised;
* for columns that do not meet: at most :math:`b` diagonals, where only the diagonal of :math:`G`
  counts and :math:`S^2` is the sum of :math:`k'` squared norms (arXiv:2306.08153);
* for normalised columns wherever the comparison of both sums, which is made, says so: that of
  all strategies of this package, but for banded ones with more than :math:`b` diagonals.

Where it is not attained and the matrix is small, all sets are tried, or the dynamic programme of
arXiv:2306.08153 is run twice, which is an upper bound too, and the smaller bound is given. For
normalised columns and more than 12,000 steps the corner bound itself is bounded, by blocks.

Departs from arXiv:2306.08153: its programme maximises over sets row by row, so rows may disagree
about the set; the corner bound is often exact where it is not, and needs no :math:`n^2` memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from opake_lightning import _check

__all__ = ["Sensitivity", "participation_sensitivity"]

_Array = NDArray[np.float64]
# Relative to the largest possible value: sums of squares that differ by less are equal.
_ROUNDING = 1e-12
# The corner bound looks at all pairs of columns up to this n; beyond it at blocks of columns.
_MAX_PAIRS_N = 12_000
_BLOCKS = 400
_MAX_SETS = 20_000
_MAX_PROGRAMME = 2 * 10**8


class Sensitivity(NamedTuple):
    """A sensitivity, never below the true one but for rounding.

    Args:
        value: The L2 norm.
        exact: Whether it is known to be the true one.
    """

    value: float
    exact: bool


def participation_sensitivity(
    coefficients: _Array,
    n_steps: int,
    *,
    normalized: bool,
    min_sep: int,
    max_participations: int | None = None,
) -> Sensitivity:
    """Return the sensitivity of a strategy matrix if each example takes part by a schema.

    Guarantees:
        ``value`` is at least the norm of C times any contribution of one example, for gradients
        of norm at most 1 in any number of dimensions, up to 1e-12 of it.

    Args:
        coefficients: First column of T, as far as it is not zero.
        n_steps: Number of steps.
        normalized: Whether C is T with columns of norm 1, or T itself.
        min_sep: Least number of steps from one participation to the next; 1 is every step.
        max_participations: Most participations of an example, by default as many as fit.

    Raises:
        ValueError: If ``min_sep`` or ``max_participations`` is not at least 1.

    >>> participation_sensitivity(np.array([1.0]), 9, normalized=False, min_sep=1)
    Sensitivity(value=3.0, exact=True)
    """
    _check.positive_int("min_sep", min_sep)
    count = -(-n_steps // min_sep)
    if max_participations is not None:
        count = min(count, _check.positive_int("max_participations", max_participations))
    c = coefficients[:n_steps]
    norm = 1.0 if normalized else float(np.sqrt(np.sum(c**2)))
    if count == 1:
        return Sensitivity(norm, exact=True)
    if normalized and np.count_nonzero(c) == 1:
        return Sensitivity(math.sqrt(count), exact=True)
    # The least sequence above c that falls: c itself, but for the rounding of a flat tail.
    falling = np.maximum.accumulate(np.abs(c[::-1]))[::-1]
    if not normalized and (falling - c <= 1e-14 * c[0]).all():
        return Sensitivity(_evenly_spaced(falling, n_steps, min_sep, count), exact=True)
    if len(c) <= min_sep:
        return Sensitivity(_disjoint(c, n_steps, normalized, min_sep, count), exact=True)
    return _corner(c, n_steps, normalized, min_sep, count)


def _evenly_spaced(c: _Array, n: int, min_sep: int, count: int) -> float:
    """Return the norm of the sum of columns 0, b, 2b, ... of T."""
    rows = -(-n // min_sep)
    table = np.zeros(rows * min_sep)
    table[: len(c)] = c
    sums = np.cumsum(table.reshape(rows, min_sep), axis=0)
    if count < rows:
        sums[count:] -= sums[:-count].copy()
    return float(np.sqrt(np.sum(sums.ravel()[:n] ** 2)))


def _disjoint(c: _Array, n: int, normalized: bool, min_sep: int, count: int) -> float:
    """Return the norm of the sum of columns 0, b, 2b, ..., of which no two have a common row."""
    if normalized:
        return math.sqrt(count)
    lengths = n - min_sep * np.arange(count)
    squares = np.cumsum(c**2)
    return float(np.sqrt(np.sum(squares[np.minimum(lengths, len(c)) - 1])))


def _corner(c: _Array, n: int, normalized: bool, min_sep: int, count: int) -> Sensitivity:
    if n > _MAX_PAIRS_N:
        bound = _corner_of_blocks(np.abs(c), n, normalized, min_sep, count)
        return Sensitivity(math.sqrt(bound), exact=False)
    bound, spaced, signed = _corner_of_pairs(c, n, normalized, min_sep, count)
    if bound <= spaced * (1 + _ROUNDING) and not signed:
        return Sensitivity(math.sqrt(bound), exact=True)
    if _number_of_sets(n, min_sep, count) <= _MAX_SETS:
        return _all_sets(_gram(c, n, normalized), min_sep, count)
    if n * n * count <= _MAX_PROGRAMME:
        bound = min(bound, _programme(np.abs(_gram(c, n, normalized)), min_sep, count))
    return Sensitivity(math.sqrt(bound), exact=False)


def _corner_of_pairs(
    c: _Array, n: int, normalized: bool, min_sep: int, count: int
) -> tuple[float, float, bool]:
    """Return the corner bound, its sum over {0, b, ..}, and if negative terms are in the latter.

    Columns are told apart by their length n - s: entry l - 1 of a vector belongs to the column of
    length l. So the maximum over later columns is one over shorter ones.
    """
    products = np.zeros(n)
    norms = np.ones(n)
    if normalized:
        products[: len(c)] = c**2
        norms = np.sqrt(np.cumsum(products))
    spaced_at = n - 1 - min_sep * np.arange(count)
    largest, bound, spaced, signed = np.zeros(n), 0.0, 0.0, False
    for gap in range(len(c) - 1, min_sep - 1, -1):
        products[: len(c) - gap] = c[: len(c) - gap] * c[gap:]
        products[len(c) - gap :] = 0.0
        gram = np.cumsum(products[: n - gap]) / (norms[gap:] * norms[: n - gap])
        later = np.maximum.accumulate(np.abs(gram))
        np.maximum(largest[gap:], later, out=largest[gap:])
        places, rest = divmod(gap, min_sep)
        if rest == 0 and places < count:
            pairs = spaced_at[: count - places]
            entries = gram[pairs - gap]
            bound += 2 * float(np.sum(largest[pairs]))
            spaced += 2 * float(np.sum(np.abs(entries)))
            signed = signed or bool((entries < 0).any())
    diagonal = float(count)
    if not normalized:
        products[:] = 0.0
        products[: len(c)] = c**2
        diagonal = float(np.sum(np.cumsum(products)[spaced_at]))
    return bound + diagonal, spaced + diagonal, signed


def _corner_of_blocks(c: _Array, n: int, normalized: bool, min_sep: int, count: int) -> float:
    """Return the corner bound for c >= 0, or above it, from blocks of columns of similar length.

    In a block, inner products are at most those of the longest columns, and norms at least those of
    the shortest. Lengths differ by a few per cent in a block, and norms by far less.
    """
    edges = np.unique(np.concatenate([np.geomspace(1, n, _BLOCKS).astype(int), [0]]))
    if count <= len(edges):
        edges = np.unique(np.concatenate([edges, n - min_sep * np.arange(count)]))
    padded = np.zeros(n)
    padded[: len(c)] = c
    squares = np.cumsum(padded**2)
    norms = np.sqrt(squares) if normalized else np.ones(n)
    lengths = n - min_sep * np.arange(count)
    largest, bound = np.zeros(n), 0.0
    for shortest, longest in zip(edges[:-1] + 1, edges[1:], strict=True):
        gaps = np.arange(min_sep, min(longest, len(c)))
        if len(gaps):
            size = 2 ** math.ceil(math.log2(2 * longest))
            spectrum = np.fft.rfft(padded[:longest], size)
            gram = np.fft.irfft(np.abs(spectrum) ** 2, size)[gaps] + _ROUNDING * squares[-1]
            gram /= norms[shortest - 1] * norms[np.maximum(shortest - gaps, 1) - 1]
            if normalized:
                gram = np.minimum(gram, 1.0)
            upward = np.maximum.accumulate(gram[::-1])[::-1]
            np.maximum(largest[gaps], upward, out=upward)
            largest[gaps] = upward
        for i in np.flatnonzero((lengths >= shortest) & (lengths <= longest)):
            later = min_sep * np.arange(1, count - int(i))
            bound += 2 * float(np.sum(largest[later]))
            bound += 1.0 if normalized else float(squares[lengths[i] - 1])
    return bound


def _gram(c: _Array, n: int, normalized: bool) -> _Array:
    column = np.zeros(n)
    column[: len(c)] = c
    lag = np.subtract.outer(np.arange(n), np.arange(n))
    matrix = np.where(lag >= 0, column[np.abs(lag)], 0.0)
    if normalized:
        matrix /= np.linalg.norm(matrix, axis=0)
    return matrix.T @ matrix


def _number_of_sets(n: int, min_sep: int, count: int) -> int:
    """Return how many sets of up to ``count`` steps there are.

    Smaller ones matter too: few steps may fit better to the columns than many that are crowded.
    """
    sizes = range(1, count + 1)
    return sum(math.comb(n - (size - 1) * (min_sep - 1), size) for size in sizes)


def _all_sets(gram: _Array, min_sep: int, count: int) -> Sensitivity:
    """Return the largest value of all sets; exact if signs of the gradients can attain it."""
    n, size = len(gram), np.abs(gram)
    best, best_set = 0.0, [0]

    def extend(steps: list[int], value: float, first: int) -> None:
        nonlocal best, best_set
        if value > best:
            best, best_set = value, steps
        if len(steps) == count:
            return
        for step in range(first, n):
            more = float(size[step, step] + 2 * np.sum(size[step, steps]))
            extend([*steps, step], value + more, step + min_sep)

    extend([], 0.0, 0)
    chosen = gram[np.ix_(best_set, best_set)]
    return Sensitivity(math.sqrt(best), exact=_signs_agree(chosen))


def _signs_agree(gram: _Array) -> bool:
    """Return whether some signs of rows and columns make every entry non-negative."""
    signs = np.zeros(len(gram))
    while (signs == 0).any():
        # A part of the steps that has nothing to do with those before begins with any sign.
        signs[np.flatnonzero(signs == 0)[0]] = 1.0
        while True:
            linked = (signs == 0) & (np.abs(signs) @ np.abs(gram) > 0)
            if not linked.any():
                break
            new = int(np.flatnonzero(linked)[0])
            known = np.flatnonzero((signs != 0) & (gram[new] != 0))[0]
            signs[new] = signs[known] * np.sign(gram[new, known])
    return bool((signs[:, None] * gram * signs >= 0).all())


def _programme(size: _Array, min_sep: int, count: int) -> float:
    """Return an upper bound by maximising over sets twice: in each row, then over rows."""
    rows = _heaviest(size, min_sep, count)
    return float(_heaviest(rows[None], min_sep, count)[0])


def _heaviest(weights: _Array, min_sep: int, count: int) -> _Array:
    """Return for each row of weights >= 0 the largest sum over a set of steps of the schema."""
    best = np.zeros_like(weights)
    for _ in range(count):
        total = weights.copy()
        total[:, :-min_sep] += best[:, min_sep:]
        best = np.maximum.accumulate(total[:, ::-1], axis=1)[:, ::-1]
    return best[:, 0]
