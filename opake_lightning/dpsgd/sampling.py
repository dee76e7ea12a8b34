"""Poisson sampling as a pure function of (key, step).

At every step each of n examples is drawn independently with the same rate. That is what the
accounting assumes, and what a shuffled pass is not: the number drawn varies, some examples are
drawn several times in an expected pass and some not at all, and a draw may be empty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from opake_lightning import _check
from opake_lightning.errors import PrivacyError
from opake_lightning.random import RngKey, bernoulli_indices, fold_in

__all__ = ["expected_rate", "poisson_indices", "rank_share"]


def expected_rate(batch_size: int, n_examples: int) -> float:
    """The rate at which ``batch_size`` of ``n_examples`` are expected to be drawn.

    Raises:
        ValueError: If there are no examples, or ``batch_size`` is not > 0.
        PrivacyError: If the batch is larger than the dataset.

    >>> expected_rate(256, 1024)
    0.25
    """
    _check.positive_int("n_examples", n_examples, why="the training dataset is empty")
    _check.positive_int("batch_size", batch_size)
    if batch_size > n_examples:
        raise PrivacyError(
            f"batch_size={batch_size} is larger than the dataset ({n_examples} examples); use "
            f"batch_size={n_examples} to draw every example at every step"
        )
    return batch_size / n_examples


def poisson_indices(
    key: RngKey, step: int, *, n_examples: int, sample_rate: float
) -> NDArray[np.int64]:
    """Indices drawn at ``step``, ascending; possibly none.

    The cost is proportional to the number drawn.

    Guarantee: the draw depends on the arguments alone, and includes each index with probability
    ``sample_rate`` independently of all others and of all other steps.

    Args:
        key: Key of the run.
        step: Number of the step, from 0.
        n_examples: Size of the dataset, n.
        sample_rate: Rate q in (0, 1].

    Returns:
        int64 array of distinct indices in [0, n).

    Raises:
        ValueError: If an argument is out of range.

    >>> from opake_lightning.random import key
    >>> poisson_indices(key(7), 0, n_examples=3, sample_rate=1.0)
    array([0, 1, 2])
    """
    n = _check.positive_int("n_examples", n_examples)
    q = _check.fraction("sample_rate", sample_rate, zero=False, one=True)
    _check.at_least("step", step, 0)
    return bernoulli_indices(fold_in(fold_in(key, "poisson_sampling"), step), n, q)


def rank_share(indices: NDArray[np.int64], *, rank: int, world_size: int) -> NDArray[np.int64]:
    """The part of one draw that belongs to one rank: every ``world_size``-th index.

    Guarantee: the shares of all ranks are disjoint, their union is the draw, and their sizes
    differ by at most one.

    >>> import numpy as np
    >>> rank_share(np.array([2, 3, 5, 7, 11]), rank=1, world_size=2)
    array([3, 7])
    """
    _check.positive_int("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    return indices[rank::world_size]
