r"""Strategies: which matrix correlates the noise of a run, and how it is streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, cast, final

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from typing_extensions import override

from opake_lightning.dpftrl.noise._banded import optimal_bands
from opake_lightning.dpftrl.noise._blt import blt_columns, blt_weights, optimal_buffers
from opake_lightning.dpftrl.noise._matrix import StrategyMatrix
from opake_lightning.dpftrl.noise._objective import ErrorKind
from opake_lightning.dpftrl.noise._recurrence import Buffers, Inputs, Outputs, Recurrence
from opake_lightning.dpftrl.noise._workload import Workload

__all__ = ["BandMf", "Bisr", "Blt", "Bsr", "Identity", "LambdaCgd", "Strategy"]

_Array = NDArray[np.float64]


class Strategy(ABC):
    """A recipe for the strategy matrix of a run; equal and hashable by what it was made from.

    Guarantees:
        The matrix depends on the strategy and the number of steps alone, never on data.
    """

    __slots__ = ()

    name: ClassVar[str]

    @property
    @abstractmethod
    def bands(self) -> int | None:
        """Number of non-zero diagonals of C, or None if C is not banded."""

    @abstractmethod
    def matrix(self, n_steps: int) -> StrategyMatrix:
        """Return C for a run of ``n_steps``."""

    @abstractmethod
    def recurrence(self, n_steps: int) -> Recurrence:
        """Return how noise is streamed: the inverse of T, one entry at a time."""

    @property
    @abstractmethod
    def past_draws(self) -> int | None:
        """Of how many earlier steps the draws make up a step's noise; None if of all."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line of text that, with the number of steps, determines C."""

    def for_participation(self, min_sep: int, max_participations: int | None) -> Strategy:
        """Return the strategy optimised for this schema, where it was left open.

        Args:
            min_sep: Least number of steps between participations of an example.
            max_participations: Most participations, by default as many as the steps allow.

        Returns:
            A strategy that knows the schema; itself if it depends on none or was given one.
        """
        return self


@final
@dataclass(frozen=True, slots=True)
class Identity(Strategy):
    name: ClassVar[str] = "identity"

    @property
    @override
    def bands(self) -> int | None:
        return 1

    @override
    def matrix(self, n_steps: int) -> StrategyMatrix:
        return _identity_matrix(n_steps)

    @override
    def recurrence(self, n_steps: int) -> Recurrence:
        return Inputs((1.0,))

    @property
    @override
    def past_draws(self) -> int | None:
        return 0

    @override
    def describe(self) -> str:
        return "identity()"


@lru_cache(maxsize=8)
def _identity_matrix(n_steps: int) -> StrategyMatrix:
    return StrategyMatrix(n_steps, np.ones(1), inverse=np.ones(1))


@final
@dataclass(frozen=True, slots=True)
class Bsr(Strategy):
    n_bands: int
    momentum: float
    decay: float
    normalized: bool
    name: ClassVar[str] = "bsr"

    @property
    @override
    def bands(self) -> int | None:
        return self.n_bands

    @override
    def matrix(self, n_steps: int) -> StrategyMatrix:
        return _bsr_matrix(self, n_steps)

    @override
    def recurrence(self, n_steps: int) -> Recurrence:
        return Outputs(tuple(self.matrix(n_steps).coefficients.tolist()))

    @property
    @override
    def past_draws(self) -> int | None:
        return None if self.n_bands > 1 else 0

    @override
    def describe(self) -> str:
        return _describe_root(self, "bands", self.n_bands)


@lru_cache(maxsize=32)
def _bsr_matrix(strategy: Bsr, n_steps: int) -> StrategyMatrix:
    terms = min(strategy.n_bands, n_steps)
    root = _root(terms, strategy.momentum, strategy.decay, inverse=False)
    return StrategyMatrix(n_steps, root, strategy.normalized)


@final
@dataclass(frozen=True, slots=True)
class Bisr(Strategy):
    bandwidth: int
    momentum: float
    decay: float
    normalized: bool
    name: ClassVar[str] = "bisr"

    @property
    @override
    def bands(self) -> int | None:
        return None

    @override
    def matrix(self, n_steps: int) -> StrategyMatrix:
        return _bisr_matrix(self, n_steps)

    @override
    def recurrence(self, n_steps: int) -> Recurrence:
        inverse = self.matrix(n_steps).inverse_coefficients()
        return Inputs(tuple(inverse[: self.bandwidth].tolist()))

    @property
    @override
    def past_draws(self) -> int | None:
        return self.bandwidth - 1

    @override
    def describe(self) -> str:
        return _describe_root(self, "bandwidth", self.bandwidth)


@lru_cache(maxsize=32)
def _bisr_matrix(strategy: Bisr, n_steps: int) -> StrategyMatrix:
    terms = min(strategy.bandwidth, n_steps)
    inverse = _root(terms, strategy.momentum, strategy.decay, inverse=True)
    return StrategyMatrix(n_steps, _divide(inverse, n_steps), strategy.normalized, inverse)


@final
@dataclass(frozen=True, slots=True)
class LambdaCgd(Strategy):
    lam: float
    normalized: bool
    name: ClassVar[str] = "lambda_cgd"

    @property
    @override
    def bands(self) -> int | None:
        return None if self.lam else 1

    @override
    def matrix(self, n_steps: int) -> StrategyMatrix:
        return _lambda_cgd_matrix(self, n_steps)

    @override
    def recurrence(self, n_steps: int) -> Recurrence:
        return Inputs((1.0, -self.lam) if self.lam else (1.0,))

    @property
    @override
    def past_draws(self) -> int | None:
        return 1 if self.lam else 0

    @override
    def describe(self) -> str:
        return f"lambda_cgd(lam={self.lam!r}, normalized={self.normalized})"


@lru_cache(maxsize=32)
def _lambda_cgd_matrix(strategy: LambdaCgd, n_steps: int) -> StrategyMatrix:
    if not strategy.lam:
        return StrategyMatrix(n_steps, np.ones(1), inverse=np.ones(1))
    with np.errstate(under="ignore"):
        powers = np.power(strategy.lam, np.arange(n_steps), dtype=np.float64)
    inverse = np.array([1.0, -strategy.lam])[:n_steps]
    return StrategyMatrix(n_steps, powers, strategy.normalized, inverse)


@final
@dataclass(frozen=True, slots=True)
class BandMf(Strategy):
    n_bands: int
    error: ErrorKind
    workload: Workload
    name: ClassVar[str] = "band_mf"

    @property
    @override
    def bands(self) -> int | None:
        return self.n_bands

    @override
    def matrix(self, n_steps: int) -> StrategyMatrix:
        return _band_mf_matrix(self, n_steps)

    @override
    def recurrence(self, n_steps: int) -> Recurrence:
        return Outputs(tuple(self.matrix(n_steps).coefficients.tolist()))

    @property
    @override
    def past_draws(self) -> int | None:
        return None if self.n_bands > 1 else 0

    @override
    def describe(self) -> str:
        return f"band_mf(bands={self.n_bands}, error={self.error}, {self.workload.describe()})"


@lru_cache(maxsize=32)
def _band_mf_matrix(strategy: BandMf, n_steps: int) -> StrategyMatrix:
    bands = min(strategy.n_bands, n_steps)
    return StrategyMatrix(n_steps, optimal_bands(strategy.workload, n_steps, bands, strategy.error))


@final
@dataclass(frozen=True, slots=True)
class Blt(Strategy):
    n_buffers: int
    error: ErrorKind
    workload: Workload
    min_sep: int | None
    max_participations: int | None
    name: ClassVar[str] = "blt"

    @property
    @override
    def bands(self) -> int | None:
        return None

    @override
    def matrix(self, n_steps: int) -> StrategyMatrix:
        return _blt_matrix(self, n_steps)[0]

    @override
    def recurrence(self, n_steps: int) -> Recurrence:
        return _blt_matrix(self, n_steps)[1]

    @override
    def for_participation(self, min_sep: int, max_participations: int | None) -> Strategy:
        if self.min_sep is not None:
            return self
        return replace(self, min_sep=min_sep, max_participations=max_participations)

    @property
    @override
    def past_draws(self) -> int | None:
        return None

    @override
    def describe(self) -> str:
        schema = f"min_sep={self.min_sep}, max_participations={self.max_participations}"
        kind = f"error={self.error}, {self.workload.describe()}"
        return f"blt(n_buffers={self.n_buffers}, {kind}, {schema})"


@lru_cache(maxsize=32)
def _blt_matrix(strategy: Blt, n_steps: int) -> tuple[StrategyMatrix, Buffers]:
    min_sep, count = strategy.min_sep, strategy.max_participations
    if min_sep is None:
        min_sep, count = n_steps, 1
    fits = -(-n_steps // min_sep)
    count = fits if count is None else min(count, fits)
    kept, removed = optimal_buffers(
        strategy.workload, n_steps, strategy.n_buffers, strategy.error, min_sep, count
    )
    coefficients, inverse = blt_columns(kept, removed, n_steps)
    buffers = Buffers(tuple(kept.tolist()), tuple(blt_weights(kept, removed).tolist()))
    return StrategyMatrix(n_steps, coefficients, inverse=inverse), buffers


def _root(terms: int, momentum: float, decay: float, *, inverse: bool) -> _Array:
    """Return the first terms of the power series of ((1 - decay z)(1 - momentum z))^(-+1/2)."""
    k = np.arange(1, terms)
    ratios = (k - 1.5) / k if inverse else (k - 0.5) / k
    series = np.cumprod(np.concatenate([[1.0], ratios]))
    with np.errstate(under="ignore"):
        slow, fast = (series * rate ** np.arange(terms) for rate in (decay, momentum))
    return slow if momentum == 0 else np.convolve(slow, fast)[:terms]


def _divide(series: _Array, n_steps: int) -> _Array:
    """Return the first ``n_steps`` terms of 1 over a power series."""
    impulse = np.zeros(n_steps)
    impulse[0] = 1.0
    return cast("_Array", lfilter([1.0], series, impulse))


def _describe_root(strategy: Bsr | Bisr, width: str, value: int) -> str:
    decays = f"momentum={strategy.momentum!r}, decay={strategy.decay!r}"
    return f"{strategy.name}({width}={value}, {decays}, normalized={strategy.normalized})"
