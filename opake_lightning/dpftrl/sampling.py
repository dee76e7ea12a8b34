r"""Who takes part when, as pure functions of (key, step).

Correlated noise is accounted for over a whole run, by how often and how far apart one example takes
part. Each function here keeps one such promise exactly, at every step, whatever the order in which
steps are asked for; :mod:`opake_lightning.dpftrl.accounting` has what each costs.

==========================  ====================================  ================================
function                    one example                           accounted for by
==========================  ====================================  ================================
cyclic_poisson_indices      at random, in every b-th step         ``poisson``
balls_in_bins_indices       in the same step of every pass        ``balls_in_bins``, ``unamplified``
b_min_sep_indices           at random, at least b steps apart     ``b_min_sep``
fixed_order_indices         in the same step of every pass        ``unamplified``
==========================  ====================================  ================================

In the first three each example's steps are independent of all other examples', so that with one
example more or less the others are drawn by the same law: groups and bins have random sizes, on
purpose. In the last, a row that is taken out would move all later ones, so neighbouring datasets
there have a row blanked, not removed.

Groups, bins and waits are those of one horizon, of the steps from ``start`` on. Another horizon
needs its own, which another ``start`` gives: the first may have told in which group or bin an
example is, and with the same one again nothing would be amplified.

Groups and bins are drawn once for a horizon and remembered for the next step, as is how far
``b_min_sep_indices`` has come; that saves time and changes nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from opake_lightning import _check
from opake_lightning.errors import PrivacyError
from opake_lightning.random import RngKey, bernoulli_indices, fold_in, words

__all__ = [
    "b_min_sep_indices",
    "balls_in_bins_indices",
    "cyclic_poisson_indices",
    "fixed_order_indices",
]

Indices = NDArray[np.int64]
_KEPT = 2  # runs, and windows of each, that are remembered
_NEVER = 1 << 60


def cyclic_poisson_indices(
    key: RngKey, step: int, *, n_examples: int, n_groups: int, sample_rate: float, start: int = 0
) -> Indices:
    """Indices drawn at ``step`` by cyclic Poisson sampling, ascending; possibly none.

    Every example belongs to one of b groups for the whole run. Step t draws from group t mod b
    alone, each of its examples with the same rate.

    Guarantee: the draw depends on the arguments alone. Each example's group is uniform and its
    draws, in the steps of its group, are independent with rate ``sample_rate``; all independently
    of other examples. In all other steps it is not drawn, so two of its draws are a multiple of b
    steps apart.

    Args:
        key: Key of the run.
        step: Number of the step, from 0.
        n_examples: Size of the dataset, n.
        n_groups: Number of groups, b; 1 is Poisson sampling.
        sample_rate: Rate q in (0, 1] with which an example is drawn when its group's turn comes.
            For an expected batch of B, q = b B / n.
        start: Step at which the horizon begins.

    Returns:
        int64 array of distinct indices in [0, n).

    Raises:
        ValueError: If an argument is out of range.

    Source: Choquette-Choo et al. 2023 (arXiv:2306.08153), Algorithm 2. Departs from it: groups have
    random sizes, as adding or removing an example asks for.

    >>> from opake_lightning.random import key
    >>> draws = [
    ...     cyclic_poisson_indices(key(7), t, n_examples=5, n_groups=2, sample_rate=1.0)
    ...     for t in range(2)
    ... ]
    >>> sorted([*draws[0].tolist(), *draws[1].tolist()])  # at a rate of 1, one pass in two steps
    [0, 1, 2, 3, 4]
    """
    key, step = _within(key, step, start)
    _check.positive_int("n_groups", n_groups)
    rate = _check.fraction("sample_rate", sample_rate, zero=False, one=True)
    members = _parts(fold_in(key, "cyclic_poisson"), n_examples, n_groups)[step % n_groups]
    if not len(members):
        return members.copy()
    stream = fold_in(fold_in(key, "cyclic_poisson_draw"), step)
    return members[bernoulli_indices(stream, len(members), rate)]


def balls_in_bins_indices(
    key: RngKey, step: int, *, n_examples: int, n_bins: int, start: int = 0
) -> Indices:
    """Indices of the bin that ``step`` takes, ascending; possibly none.

    Every example lies in one of b bins for the whole run, and step t takes bin t mod b: one random
    partition, the same in every pass.

    Guarantee: the draw depends on the arguments alone. Each example's bin is uniform, independently
    of other examples; it is drawn in every b-th step, and in no other.

    Args:
        key: Key of the run. For accounting that counts on the partition being secret, it must be.
        step: Number of the step, from 0.
        n_examples: Size of the dataset, n.
        n_bins: Number of bins, b; the steps of one pass.
        start: Step at which the horizon begins.

    Returns:
        int64 array of distinct indices in [0, n).

    Raises:
        ValueError: If an argument is out of range.

    Source: Chua et al. 2024 (arXiv:2412.16802).

    >>> from opake_lightning.random import key
    >>> balls_in_bins_indices(key(7), 3, n_examples=4, n_bins=1)
    array([0, 1, 2, 3])
    """
    key, step = _within(key, step, start)
    _check.positive_int("n_bins", n_bins)
    return _parts(fold_in(key, "balls_in_bins"), n_examples, n_bins)[step % n_bins].copy()


def fixed_order_indices(step: int, *, n_examples: int, batch_size: int, start: int = 0) -> Indices:
    """Indices of the batch at ``step`` when batches go through the dataset in order.

    Guarantee: the draw depends on the arguments alone. Each example is drawn once in every
    ⌈n / B⌉ steps, always the same number of steps apart; the last batch of a pass is what is left.

    Neighbouring datasets have one row blanked (its gradient zero): a row taken out would move all
    later ones to other batches.

    Args:
        step: Number of the step, from 0.
        n_examples: Size of the dataset, n.
        batch_size: Examples in a batch, B.
        start: Step at which the horizon begins.

    Raises:
        ValueError: If an argument is out of range.

    >>> [fixed_order_indices(t, n_examples=5, batch_size=2).tolist() for t in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    """
    n = _check.positive_int("n_examples", n_examples)
    size = _check.positive_int("batch_size", batch_size)
    first = _local(step, start) % -(-n // size) * size
    return np.arange(first, min(first + size, n), dtype=np.int64)


def b_min_sep_indices(
    key: RngKey, step: int, *, n_examples: int, min_sep: int, sample_rate: float, start: int = 0
) -> Indices:
    r"""Indices drawn at ``step`` by b-min-sep sampling, ascending; possibly none.

    An example that was in none of the last b-1 batches is drawn with chance p, any other one not at
    all:

    .. math:: p = p_0 / (1 - (b-1) p_0)

    so that in the long run every step draws it with chance :math:`p_0`. It does so from step 0 on:
    an example starts as it would be found in the middle of a run, waiting for j more steps with
    chance :math:`p_0` for each j in 1, ..., b-1, and ready otherwise.

    Guarantee: the draw depends on the arguments alone. Each example is drawn with chance
    ``sample_rate`` at every step, never twice within b steps, and, if it was in none of the last
    b-1 batches, with chance p; independently of all other examples.

    The cost of a step is that of what it draws, and that of looking through all n examples once in
    max(b, 1/p₀) steps; so is that of every step before, if it is not the next in turn. Resuming a
    run after 100 passes over a million examples takes some seconds, once.

    Args:
        key: Key of the run.
        step: Number of the step, from 0.
        n_examples: Size of the dataset, n.
        min_sep: Least number of steps from one draw of an example to its next, b; 1 is Poisson
            sampling.
        sample_rate: Mean rate p₀ in (0, 1/b]. For an expected batch of B, p₀ = B / n.
        start: Step at which the horizon begins.

    Returns:
        int64 array of distinct indices in [0, n).

    Raises:
        ValueError: If an argument is out of range.
        PrivacyError: If ``sample_rate`` is above 1 / ``min_sep``.

    Source: Dong & Ganesh 2026 (arXiv:2602.09338).

    >>> from opake_lightning.random import key
    >>> draws = [
    ...     b_min_sep_indices(key(7), t, n_examples=6, min_sep=3, sample_rate=1 / 3)
    ...     for t in range(4)
    ... ]
    >>> sorted(sum((draw.tolist() for draw in draws[:3]), []))  # p is 1: in every third batch
    [0, 1, 2, 3, 4, 5]
    >>> draws[3].tolist() == draws[0].tolist()
    True
    """
    n = _check.positive_int("n_examples", n_examples)
    b = _check.positive_int("min_sep", min_sep)
    rate = _check.fraction("sample_rate", sample_rate, zero=False, one=True)
    key, step = _within(key, step, start)
    if not rate * b <= 1 + 1e-12:
        raise PrivacyError(
            f"with min_sep={b} an example is drawn in at most every {b}th step, so its rate cannot "
            f"be sample_rate={rate:.6g}; use a batch of at most n / min_sep = {n / b:.6g} examples"
        )
    return _renewals(key, n, b, rate).at(step)


def _within(key: RngKey, step: int, start: int) -> tuple[RngKey, int]:
    """The key of one horizon, and the number of the step in it."""
    return fold_in(fold_in(key, "horizon"), start), _local(step, start)


def _local(step: int, start: int) -> int:
    _check.at_least("start", start, 0)
    return _check.at_least("step", step, start) - start


@lru_cache(maxsize=_KEPT)
def _parts(stream: RngKey, n_examples: int, n_parts: int) -> tuple[Indices, ...]:
    """The examples of each part of a random partition, ascending."""
    n = _check.positive_int("n_examples", n_examples)
    if n_parts == 1:
        return (np.arange(n, dtype=np.int64),)
    # The remainder of 64 random bits is uniform but for some n_parts / 2**64.
    part = (words(stream).random_raw(n) % np.uint64(n_parts)).astype(np.int64)
    order = np.argsort(part, kind="stable")
    return tuple(np.split(order, np.cumsum(np.bincount(part, minlength=n_parts))[:-1]))


@dataclass(frozen=True, slots=True)
class _Window:
    """Draws of a stretch of steps.

    Attributes:
        steps: The draws in the window, sorted by step and example.
        indices: Whose they are.
        after: Per example, its first draw after the window.
    """

    steps: Indices
    indices: Indices
    after: Indices


class _Renewals:
    """The draws of one b-min-sep run, window by window.

    What is kept are windows, each a function of the arguments alone; one that is not kept is made
    again from the window before it, the first from nothing.
    """

    def __init__(self, key: RngKey, n: int, b: int, rate: float) -> None:
        self._key, self._n, self._b, self._rate = fold_in(key, "b_min_sep"), n, b, rate
        # At a rate of 1 / b, whose last bit is rounded, an example is drawn as soon as it may be.
        chance = rate / (1 - (b - 1) * rate) if rate * b < 1 - 1e-12 else 1.0
        self._scale = math.log1p(-chance) if chance < 1 else -math.inf
        self._length = max(b, math.ceil(1 / rate))
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._lock = Lock()

    def at(self, step: int) -> Indices:
        """Indices drawn at ``step``, ascending."""
        with self._lock:
            window = self._window(step // self._length)
        first, last = np.searchsorted(window.steps, [step, step + 1])
        return window.indices[first:last].copy()

    def _window(self, number: int) -> _Window:
        if number in self._windows:
            return self._windows[number]
        before = max((k for k in self._windows if k < number), default=-1)
        upcoming = self._windows[before].after if before >= 0 else self._first()
        for index in range(before + 1, number + 1):
            window = self._make(index, upcoming)
            upcoming = window.after
            self._windows[index] = window
            if len(self._windows) > _KEPT:
                self._windows.popitem(last=False)
        return self._windows[number]

    def _first(self) -> Indices:
        """When each example is drawn first."""
        uniform = _uniform(fold_in(self._key, "start"), self._n)
        # Uniform in (0, 1]: the j-th interval of length p0 is a wait of j, the rest is none.
        waits = np.ceil(uniform / self._rate)
        waits[waits > self._b - 1] = 0
        return waits.astype(np.int64) + self._failures(fold_in(self._key, "first"), self._n)

    def _make(self, number: int, upcoming: Indices) -> _Window:
        stream = fold_in(self._key, number)
        end = (number + 1) * self._length
        after = upcoming.copy()
        steps: list[Indices] = []
        indices: list[Indices] = []
        due = np.flatnonzero(after < end)
        while len(due):
            steps.append(after[due])
            indices.append(due)
            gaps = self._b + self._failures(fold_in(stream, len(steps)), len(due))
            after[due] += gaps
            due = due[after[due] < end]
        if not steps:
            nobody = np.empty(0, np.int64)
            return _Window(nobody, nobody, after)
        when, who = np.concatenate(steps), np.concatenate(indices)
        order = np.lexsort((who, when))
        return _Window(when[order], who[order], after)

    def _failures(self, stream: RngKey, size: int) -> Indices:
        """How often a trial with chance p fails before it succeeds; geometric, from 0."""
        if self._scale == -math.inf:
            return np.zeros(size, np.int64)
        gaps = np.log(_uniform(stream, size)) / self._scale
        return np.minimum(gaps, float(_NEVER)).astype(np.int64)


@lru_cache(maxsize=_KEPT)
def _renewals(key: RngKey, n: int, b: int, rate: float) -> _Renewals:
    return _Renewals(key, n, b, rate)


def _uniform(stream: RngKey, size: int) -> NDArray[np.float64]:
    """Uniform in (0, 1], multiples of 2**-53."""
    bits = (words(stream).random_raw(size) >> np.uint64(11)) + np.uint64(1)
    return bits.astype(np.float64) * 2.0**-53
