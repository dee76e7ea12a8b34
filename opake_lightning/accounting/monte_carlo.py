r"""Amplification that only sampling can measure: balls in bins, and b-min-separated batches.

**The pair.** A matrix mechanism releases :math:`Cx + z` with :math:`z \sim N(0, \sigma^2 I)`, rows
of :math:`x` clipped to 1. An example that takes part in the steps :math:`S`, drawn with
probability :math:`p(S)` and independently of every other example, moves the release by at most
:math:`m_S = \sum_{t \in S} C_{\cdot t}` if all entries of :math:`C` are :math:`\ge 0` and all its
gradients are the same unit vector; then the run as a whole is dominated, under add/remove
adjacency and for gradients chosen adaptively, by

.. math:: P = \sum_S p(S)\, N(m_S, \sigma^2 I), \qquad Q = N(0, \sigma^2 I)

in both orders (Choquette-Choo et al., arXiv:2410.06266, for lower triangular :math:`C \ge 0` and
balls in bins; Dong & Ganesh, arXiv:2602.09338, for b-min-separated sampling). With a negative
entry, gradients that point in different directions can be worse, and nothing here holds: it is
refused. With :math:`L = \log dP/dQ`,

.. math:: \delta(\varepsilon) = \max\bigl( E_P (1 - e^{\varepsilon - L})_+ ,\;
          E_Q (1 - e^{\varepsilon + L})_+ \bigr).

**The bound.** Both means are of variables :math:`Y \in [0, 1]`, estimated from :math:`N`
independent samples. Were the mean :math:`m`, then :math:`\prod_i (1 + \theta (m - Y_i))` would
have expectation 1 and be non-negative for every fixed :math:`\theta \in [0, 1]`, and so would
:math:`K(m)`, the average of it over a fixed list of :math:`\theta`. By Markov's inequality
:math:`K(m) \ge 1/\alpha` has probability :math:`\le \alpha`. This is Chernoff's argument without
the step that replaces :math:`Y` by a coin with the same mean (Waudby-Smith & Ramdas,
arXiv:2010.09686, with bets that do not learn), and so less loose than the bound by the
Kullback-Leibler divergence. We report the least :math:`m` for which both directions say
:math:`K(m) \ge 1/\alpha`, at :math:`\alpha = (1 - \text{confidence})/2` each.

**Why ε may be searched for on the same samples.** :math:`Y` falls as :math:`\varepsilon` grows, so
:math:`K` rises, for every single outcome of the samples. If the search stopped below the true
:math:`\varepsilon^*` (where :math:`\delta(\varepsilon^*) = \delta`), then :math:`K(\delta) \ge
1/\alpha` would hold at :math:`\varepsilon^*` too, where one direction has mean :math:`\delta`. So
all ways to be too low lie within the one event that was allowed for; no union over ε is needed.

**What needs no sampling.** By convexity the pair is never worse than its worst :math:`S`, a
Gaussian with multiplier :math:`\sigma / \max_S |m_S|`; the smaller of the two bounds is taken.

The samples follow from ``seed`` alone, not from the noise multiplier, so ε is a smooth function
of the noise, and the same question has the same answer everywhere.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from opake_lightning import _check
from opake_lightning.accounting import _columns
from opake_lightning.accounting.process import NO_NOISE, GaussianEvent, Process
from opake_lightning.errors import PrivacyError

__all__ = ["BMinSep", "BallsInBins", "MonteCarlo"]

_Floats = NDArray[np.float64]

_STAKES = 2.0 ** -np.arange(10)
# The whole stake finds the smallest δ, the others the tight ones where there are many samples.
_WEIGHTS = np.where(_STAKES == 1, 0.5, 0.5 / (len(_STAKES) - 1))
_ENOUGH = 50  # samples per 1/δ: the bound on δ is then about half as high again as the estimate
_AT_LEAST, _AT_MOST = 200_000, 10**9  # samples, and samples times numbers drawn for each
_CHUNK = 2**20
_ROUGHLY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MonteCarlo(ABC):
    """The cost of a whole run of correlated noise on random batches, measured by sampling.

    Guarantees:
        With probability ``confidence`` over the samples, :meth:`epsilon_at` is not below the true
        ε (and likewise δ), under add/remove adjacency. It is never above the cost without
        amplification. The same numbers give the same result, to the last bits of the processor.

        This is said of a noise multiplier that was fixed beforehand. One that ``calibrate()``
        found was chosen by the same samples, on a curve that hardly moves within the tolerance;
        whoever wants the statement to the letter asks the result once more, with another ``seed``.

    Args:
        noise_multiplier: Noise standard deviation over clipping norm, without unit; 0 is no noise.
        coefficients: First column of the Toeplitz matrix C, non-negative, the first one > 0.
        normalized: Whether every column is divided by its norm.
        n_steps: Length of the run, the size of C.
        confidence: In (0, 1).
        n_samples: How many samples to draw; by default some 50/δ and at least 200,000, but fewer
            if those would take minutes. More make the bound tighter, by up to some per cent.
        seed: Which samples to draw.

    Raises:
        PrivacyError: If a coefficient is negative.
        ValueError: If a number is outside its range.
    """

    noise_multiplier: float
    coefficients: tuple[float, ...]
    normalized: bool = False
    n_steps: int
    confidence: float = 0.999
    n_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        sigma = _check.non_negative("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        if not isinstance(self.normalized, bool):
            raise TypeError(f"normalized must be True or False, got {self.normalized!r}")
        n = _check.positive_int("n_steps", self.n_steps)
        _check.fraction("confidence", self.confidence, zero=False, one=False)
        if self.n_samples is not None:
            _check.positive_int("n_samples", self.n_samples)
        _check.at_least("seed", self.seed, 0)
        if isinstance(self.coefficients, str):
            raise TypeError(f"coefficients must be numbers, got {self.coefficients!r}")
        given = tuple(float(value) for value in self.coefficients)
        if not given or not all(map(math.isfinite, given)) or given[0] == 0:
            raise ValueError(
                f"coefficients must be finite and start with one that is not 0, got {given[:8]}"
            )
        if min(given) < 0:
            raise PrivacyError(
                f"coefficients hold {min(given)!r}, but amplification is proven for matrices "
                "without negative entries only; account for the run unamplified"
            )
        object.__setattr__(self, "coefficients", given[:n])

    def epsilon_at(self, delta: float) -> float:
        """Return an upper confidence bound on ε at ``delta``; seconds, the first time.

        Raises:
            ValueError: If ``delta`` is not in (0, 1).
            PrivacyError: If ``delta`` is too small for the number of samples.
        """
        return _epsilon(self, _check.fraction("delta", delta, zero=False, one=False), 1)

    def rough_epsilon(self, delta: float) -> float:
        """Return about ``epsilon_at(delta)``, from a sixteenth of the samples; not a bound."""
        return _epsilon(self, _check.fraction("delta", delta, zero=False, one=False), _ROUGHLY)

    def delta_at(self, epsilon: float) -> float:
        """Return an upper confidence bound on δ at ``epsilon``, at most 1; seconds.

        Raises:
            ValueError: If ``epsilon`` is negative or not finite.
        """
        epsilon = _check.non_negative("epsilon", epsilon)
        if self.noise_multiplier < NO_NOISE:
            return 1.0
        n = self._samples(1_000_000)
        gains = [_gains(losses, epsilon) for losses in self.losses(n)]
        low, high = 0.0, 1.0
        while high - low > 1e-6 * high:
            middle = math.sqrt(low * high) if low else high / 4
            if middle < 1e-300 or all(_refuted(middle, y, n, self.alpha) for y in gains):
                high = middle
            else:
                low = middle
        return min(high, self.unamplified.delta_at(epsilon))

    def losses(self, n: int) -> tuple[_Floats, _Floats]:
        """Return those of n samples of L under P that are > 0, and the same of -L under Q."""
        size = max(_CHUNK // self.numbers_per_sample(), 64)

        def chunk(start: int) -> tuple[_Floats, _Floats]:
            rng = np.random.Generator(np.random.SFC64([self.seed, start // size]))
            remove, add = self.draw(rng, min(size, n - start))
            # Not a number, from noise too small for floating point: as bad as any loss can be.
            remove, add = (np.where(np.isnan(x), math.inf, x) for x in (remove, add))
            return remove[remove > 0], add[add > 0]

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            removes, adds = zip(*pool.map(chunk, range(0, n, size)), strict=True)
        return np.concatenate(removes), np.concatenate(adds)

    @property
    def unamplified(self) -> Process:
        """What the run costs at worst, if it were known which steps an example takes part in."""
        return Process(((GaussianEvent(self.noise_multiplier / self.sensitivity()), 1),))

    @property
    def alpha(self) -> float:
        """The probability with which the bound on one direction may be too low."""
        return (1 - self.confidence) / 2

    def samples_for(self, delta: float) -> int:
        """Return how many samples a bound of about ``delta`` takes, or refuse if too few."""
        least = math.ceil(-math.log(self.alpha * _WEIGHTS[0]) / math.log1p(delta))
        n = self._samples(max(_ENOUGH / delta, _AT_LEAST))
        if n < least:
            raise PrivacyError(
                f"delta={delta!r} is too small for n_samples={n}: {self.confidence} confidence "
                f"takes at least n_samples={least}, and several times as many to be tight. Pass "
                "them, or a larger delta, or account by cyclic Poisson sampling or unamplified"
            )
        return n

    def _samples(self, wanted: float) -> int:
        affordable = max(_AT_MOST // self.numbers_per_sample(), 1)
        return min(int(wanted), affordable) if self.n_samples is None else self.n_samples

    @abstractmethod
    def sensitivity(self) -> float:
        """Return the largest norm that one example's columns add up to."""

    @abstractmethod
    def numbers_per_sample(self) -> int:
        """Return how many random numbers a sample takes."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, n: int) -> tuple[_Floats, _Floats]:
        """Return n samples of L under P, and n of -L under Q."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BallsInBins(MonteCarlo):
    r"""Every example in one of ``n_bins`` batches, drawn once; step t takes batch t mod n_bins.

    :math:`P` has ``n_bins`` equally likely means :math:`m_i`, the sum of the columns i,
    i + n_bins, ...; as :math:`L` depends on the inner products :math:`\langle z, m_i\rangle`
    alone, n_bins numbers are drawn for each sample, however long the run.

    Args:
        n_bins: Number of batches that the data are thrown into.

    Source: Choquette-Choo et al., "Near-exact privacy amplification for matrix mechanisms",
    arXiv:2410.06266.

    >>> one_bin = BallsInBins(noise_multiplier=4.0, coefficients=(1.0,), n_steps=16, n_bins=1)
    >>> round(one_bin.delta_at(1.0), 4)  # one Gaussian at 1: Phi(-0.5) - e Phi(-1.5)
    0.1269
    """

    n_bins: int

    def __post_init__(self) -> None:
        MonteCarlo.__post_init__(self)
        _check.positive_int("n_bins", self.n_bins)

    @override
    def sensitivity(self) -> float:
        gram, _ = _columns.bin_sums(self.coefficients, self.normalized, self.n_steps, self.n_bins)
        return math.sqrt(gram.diagonal().max())

    @override
    def numbers_per_sample(self) -> int:
        return self.n_bins

    @override
    def draw(self, rng: np.random.Generator, n: int) -> tuple[_Floats, _Floats]:
        gram, root = _columns.bin_sums(
            self.coefficients, self.normalized, self.n_steps, self.n_bins
        )
        gram = gram / self.noise_multiplier**2
        used = len(root)
        # Rows of logs[i]: log dN(m_i)/dQ. Bins that no step comes to have m_i = 0, so log 1.
        logs = np.zeros((self.n_bins, n))
        logs[:used] = (root / self.noise_multiplier) @ rng.standard_normal((used, n))
        logs[:used] -= gram.diagonal()[:, None] / 2
        add = _log_mean_exp(logs)
        bins = rng.integers(self.n_bins, size=n)
        padded = np.zeros((used, self.n_bins))
        padded[:, :used] = gram
        logs[:used] += padded[:, bins]
        return _log_mean_exp(logs), -add


@dataclass(frozen=True, slots=True, kw_only=True)
class BMinSep(MonteCarlo):
    r"""Every example drawn at random, but not in the ``min_sep - 1`` steps after it took part.

    An example that may take part does so with probability :math:`p = p_0 / (1 - p_0 (b-1))`; it
    starts in the stationary state, so that at every step its chance is :math:`p_0`. If :math:`C`
    has at most :math:`b` = ``min_sep`` diagonals, columns that one example uses do not overlap,
    and :math:`dP/dQ` factors into the :math:`w_t = \exp((\langle x, C_t\rangle - |C_t|^2/2) /
    \sigma^2)` of the steps it uses. Let :math:`R_t` be its mean over what happens from step t on,
    to an example that may take part in step t:

    .. math:: R_t = p\, w_t R_{t+b} + (1 - p) R_{t+1}, \qquad
              e^L = (1 - (b-1) p_0) R_0 + p_0 \sum_{j=1}^{b-1} R_j,

    with :math:`R_t = 1` past the end. So L takes one pass, although there are exponentially
    many S.

    Args:
        min_sep: b, the least distance between two steps of one example; at least the number of
            diagonals of C.
        sample_rate: p_0, the expected batch size over the number of examples, in (0, 1/b].

    Raises:
        PrivacyError: If C has more than ``min_sep`` diagonals.

    Source: Dong & Ganesh, arXiv:2602.09338.
    """

    min_sep: int
    sample_rate: float

    def __post_init__(self) -> None:
        MonteCarlo.__post_init__(self)
        b = _check.positive_int("min_sep", self.min_sep)
        rate = _check.fraction("sample_rate", self.sample_rate, zero=False, one=True)
        if not rate * b <= 1 + 1e-9:
            raise ValueError(
                f"sample_rate={rate!r} is more than 1 / min_sep = {1 / b:.6g}, but an example "
                f"takes part in at most one of {b} steps; take smaller batches or a smaller min_sep"
            )
        if len(self.coefficients) > b:
            raise PrivacyError(
                f"the matrix has {len(self.coefficients)} diagonals, but min_sep={b}, and the "
                "accounting holds only for as many as min_sep or fewer; take a strategy with fewer "
                "bands or a larger min_sep"
            )
        object.__setattr__(self, "sample_rate", rate)

    @override
    def sensitivity(self) -> float:
        # Column norms do not grow, so that to start at once is worst.
        norms = _columns.column_norms(self.coefficients, self.n_steps)
        squares = np.ones(self.n_steps) if self.normalized else norms**2
        return math.sqrt(math.fsum(squares[:: self.min_sep]))

    @override
    def numbers_per_sample(self) -> int:
        return self.n_steps

    @override
    def draw(self, rng: np.random.Generator, n: int) -> tuple[_Floats, _Floats]:
        sigma, p0, b = self.noise_multiplier, self.sample_rate, self.min_sep
        blocks = _columns.banded_blocks(self.coefficients, self.normalized, self.n_steps)
        p = min(p0 / (1 - p0 * (b - 1)), 1.0)
        noise = rng.standard_normal((self.n_steps, n))
        used = self._patterns(rng, n, p)
        # Left half of logs: log w_t on samples of P; right half: on samples of Q, same noise.
        logs = np.empty((self.n_steps, 2 * n))
        for block in blocks:
            inner = logs[block.steps, n:]
            np.matmul(block.columns.T / sigma, noise[block.reach], out=inner)
            inner -= np.square(block.columns).sum(axis=0)[:, None] / (2 * sigma**2)
            np.matmul(block.gram / sigma**2, used[block.around], out=logs[block.steps, :n])
            logs[block.steps, :n] += inner
        total = _suffixes(logs, p, p0, b)
        return total[:n], -total[n:]

    def _patterns(self, rng: np.random.Generator, n: int, p: float) -> _Floats:
        """Return, by step and sample, 1 where the example takes part."""
        b, p0 = self.min_sep, self.sample_rate
        used = np.zeros((self.n_steps, n))
        start = rng.random(n)
        waiting = np.minimum(1 + (start / p0).astype(np.int64), b - 1)
        step = np.where(start < (b - 1) * p0, waiting, 0) + rng.geometric(p, n) - 1
        sample = np.arange(n)
        while len(step):
            inside = step < self.n_steps
            step, sample = step[inside], sample[inside]
            used[step, sample] = 1
            step = step + b - 1 + rng.geometric(p, len(step))
        return used


# ------------------------------------------------------------------------------------------
# The bound, from samples of L and -L.


@lru_cache(maxsize=1024)
def _epsilon(cost: MonteCarlo, delta: float, thinning: int) -> float:
    if cost.noise_multiplier < NO_NOISE:
        return math.inf
    n, alpha = cost.samples_for(delta), cost.alpha
    high = cost.unamplified.epsilon_at(delta)
    losses = cost.losses(-(-n // thinning))

    def refuted(epsilon: float) -> bool:
        gains = (_gains(loss, epsilon) for loss in losses)
        return all(_refuted(delta, y, n, alpha, thinning) for y in gains)

    if not refuted(high):
        return high
    low = 0.0
    if refuted(low):
        return 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if refuted(middle):
            high = middle
        else:
            low = middle
            losses = (losses[0][losses[0] > low], losses[1][losses[1] > low])
    return high


def _gains(losses: _Floats, epsilon: float) -> _Floats:
    """Return those Y that are not 0."""
    return -np.expm1(epsilon - losses[losses > epsilon])


def _refuted(delta: float, gains: _Floats, n: int, alpha: float, times: int = 1) -> bool:
    """Say whether n samples, ``gains`` and zeros, are too low for a mean of ``delta`` or more.

    Each of ``gains`` counts ``times`` times.
    """
    with np.errstate(divide="ignore"):  # delta = 1 = Y at the whole stake: a product of 0
        sums = np.array([np.log1p(stake * (delta - gains)).sum() for stake in _STAKES])
    logs = times * sums + max(n - times * len(gains), 0) * np.log1p(_STAKES * delta)
    top = logs.max()
    return bool(top + np.log(np.exp(logs - top) @ _WEIGHTS) >= -math.log(alpha))


# ------------------------------------------------------------------------------------------
# Densities, as logarithms. Samples lie along the last axis.


def _log_mean_exp(logs: _Floats) -> _Floats:
    top = logs.max(axis=0)
    scaled = logs - top
    np.exp(scaled, out=scaled)
    return top + np.log(scaled.mean(axis=0))


def _suffixes(logs: _Floats, p: float, p0: float, b: int) -> _Floats:
    """Return L from log w_t, which the log R_t replace."""
    n_steps, n = logs.shape
    rest = math.log1p(-p) if p < 1 else -math.inf
    past = np.zeros(n)
    for t in reversed(range(n_steps)):
        here = logs[t]
        here += math.log(p)
        here += logs[t + b] if t + b < n_steps else past
        out = (logs[t + 1] if t + 1 < n_steps else past) + rest
        # log(e^here + e^out), which is here where the difference is too large for exp.
        ahead = np.minimum(here - out, 700.0)
        np.exp(ahead, out=ahead)
        ahead += 1
        np.log(ahead, out=ahead)
        ahead += out
        np.maximum(here, ahead, out=here)
    idle = 1 - (b - 1) * p0
    first = [logs[0] + math.log(idle)]
    first += [(logs[j] if j < n_steps else past) + math.log(p0) for j in range(1, b)]
    stacked = np.stack(first)
    return _log_mean_exp(stacked) + math.log(len(stacked))
