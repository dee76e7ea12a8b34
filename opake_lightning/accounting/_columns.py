"""The columns of a strategy matrix that an example adds up to, and their inner products.

The matrix is lower triangular with constant diagonals, its columns normalized or not. Nothing here
depends on the noise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "banded_blocks", "bin_sums", "column_norms"]

_Floats = NDArray[np.float64]


def column_norms(coefficients: tuple[float, ...], n: int) -> _Floats:
    """Return the norms of the columns before they are normalized; they do not grow."""
    padded = np.zeros(n)
    padded[: len(coefficients)] = coefficients
    return np.sqrt(np.cumsum(padded**2)[::-1])


@lru_cache(maxsize=4)
def bin_sums(
    coefficients: tuple[float, ...], normalized: bool, n_steps: int, n_bins: int
) -> tuple[_Floats, _Floats]:
    """Return the inner products of the sums over bins i < n_steps, and a root of that matrix.

    The sum of bin i is of the columns i, i + n_bins, ...
    """
    used = min(n_bins, n_steps)
    weights = 1 / column_norms(coefficients, n_steps) if normalized else np.ones(n_steps)
    size = 2 * n_steps
    kernel = np.fft.rfft(np.array(coefficients), size)
    means = np.empty((used, n_steps))
    for i in range(used):
        comb = np.zeros(n_steps)
        comb[i::n_bins] = weights[i::n_bins]
        means[i] = np.fft.irfft(np.fft.rfft(comb, size) * kernel, size)[:n_steps]
    gram = means @ means.T
    values, vectors = np.linalg.eigh(gram)
    return gram, vectors * np.sqrt(np.maximum(values, 0.0))


class Block(NamedTuple):
    """Neighbouring columns of a banded C: only a few rows and other columns touch them."""

    steps: slice
    reach: slice  # the rows where these columns are not 0
    around: slice  # the columns that overlap with these
    columns: _Floats  # [reach, steps]
    gram: _Floats  # inner products, [steps, around]


@lru_cache(maxsize=4)
def banded_blocks(coefficients: tuple[float, ...], normalized: bool, n_steps: int) -> list[Block]:
    """Return a banded matrix cut into blocks of some columns each."""
    bands = len(coefficients)
    weights = 1 / column_norms(coefficients, n_steps) if normalized else np.ones(n_steps)
    width = max(bands, 32)
    blocks: list[Block] = []
    for begin in range(0, n_steps, width):
        end = min(begin + width, n_steps)
        low, high = max(begin - bands + 1, 0), min(end + bands - 1, n_steps)
        bottom = min(high + bands - 1, n_steps)
        near = np.zeros((bottom - low, high - low))  # rows and columns from low on
        for lag, value in enumerate(coefficients):
            column = np.arange(min(high - low, bottom - low - lag))
            near[column + lag, column] = value
        near *= weights[low:high]
        mine = near[:, begin - low : end - low]
        blocks.append(
            Block(
                slice(begin, end),
                slice(begin, high),
                slice(low, high),
                mine[begin - low : high - low],
                mine.T @ near,
            )
        )
    return blocks
