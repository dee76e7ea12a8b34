r"""What a run spends, and the ε that amounts to.

A step of DP-SGD draws every example with probability :math:`q` on its own, sums clipped gradients
of sensitivity 1 (in units of the clipping norm) and adds :math:`N(0, \sigma^2)`. Under add/remove
adjacency its worst case is the pair :math:`(1-q)\,N(0,\sigma^2) + q\,N(-1,\sigma^2)` and
:math:`N(0,\sigma^2)`, taken in both orders. Steps compose by convolving the distributions of the
privacy loss (PLD), which ``dp_accounting`` does, on a grid of losses of width :math:`h` that
"connect the dots" (arXiv:2207.04380) keeps on the safe side. What is decided here is :math:`h`:

* The grid adds a variance of up to about :math:`0.16\,h^2` to each step, so that ε of :math:`T`
  steps comes out too high by a relative :math:`0.08\,T h^2/\mu^2`, where :math:`1/\mu` is the
  multiplier of the one Gaussian with that ε. Now :math:`\mu^2/T` hardly depends on :math:`T`. It
  is :math:`q^2 (\exp(\sigma^{-2})-1)` where the central limit holds, and about
  :math:`q/\sigma^2` where that is smaller. So :math:`h` is a fixed fraction of the root of the
  smaller one, whatever the number of steps: ε then grows with every step, and one discretised
  step serves all counts.
* :math:`h` is a power of two. Such grids are nested, and a coarser one never gives less than a
  finer one, so a cheap coarse answer is still a bound.
* :math:`h` is not so small that rounding counts: each of the :math:`n` masses of a step is a
  difference divided by :math:`h`, wrong by about :math:`4\cdot10^{-17}/h`. What :math:`T` steps
  add to the total mass of 1, :math:`4\cdot10^{-17}\,nT/h`, stays in the order of 1.

Why the result is never too low: the pair on the grid dominates the true one; what is cut off at the
tails counts as certain failure; δ is lowered, before it is looked up, by more than the Fourier
transforms round; and ε is rounded up. Where the grid has little to say (δ near 2e-13 times the root
of the number of steps, or below), would not fit into memory (σ of a few hundredths), or comes out
as no distribution (its total mass is far from 1, or no number), after coarser grids, the answer is
the least of two bounds that need none: that of the steps' Rényi divergences (Mironov, Talwar &
Zhang 2019, arXiv:1908.10530; converted by Canonne, Kamath & Steinke 2020, arXiv:2004.00010,
proposition 12), and the same steps without sampling, which are always worse.

Steps that take every example (:math:`q=1`) amount to one Gaussian with
:math:`\sigma^{-2} = \sum_i \sigma_i^{-2}` and need no grid (Balle & Wang 2018, Theorem 8).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np
from dp_accounting import dp_event, gaussian_mechanism
from dp_accounting.pld import privacy_loss_distribution, privacy_loss_mechanism
from dp_accounting.rdp import rdp_privacy_accountant

from opake_lightning import _check

__all__ = ["GaussianEvent", "Process"]


@dataclass(frozen=True, slots=True)
class GaussianEvent:
    """One step: Gaussian noise on a sum of sensitivity 1 over a Poisson sample.

    Args:
        noise_multiplier: Noise standard deviation over clipping norm, without unit; 0 is no noise.
        sample_rate: Probability in (0, 1] with which each example takes part; 1 is all of them.

    Raises:
        ValueError: If ``noise_multiplier`` is negative or not finite, or ``sample_rate`` is not
            in (0, 1].
    """

    noise_multiplier: float
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        sigma = _check.non_negative("noise_multiplier", self.noise_multiplier)
        rate = _check.fraction("sample_rate", self.sample_rate, zero=False, one=True)
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "sample_rate", rate)


@dataclass(frozen=True, slots=True)
class Process:
    """A sequence of steps, run-length encoded: ``p * n`` repeats it, ``p + q`` runs q after p.

    Guarantees:
        :meth:`epsilon_at` and :meth:`delta_at` are upper bounds under add/remove adjacency and do
        not depend on the order of the steps. For sample rates of 1e-3 and more, and ε of 1e-4 and
        more, and noise multipliers of 0.1 and more, ε is at most 3e-4 (relative) too high; for
        rarer sampling, or less noise, it stays a bound but loosens. More of the same step never
        gives less ε.

    Args:
        segments: Pairs of an event and how often it happens. Zero counts are dropped and equal
            neighbours joined.

    >>> one_step = Process(((GaussianEvent(noise_multiplier=2.0), 1),))
    >>> round((one_step * 4).delta_at(1.0), 4)  # as sigma=1: Phi(-0.5) - e Phi(-1.5)
    0.1269
    >>> round((one_step * 4).epsilon_at(1e-5), 4)
    4.3772
    """

    segments: tuple[tuple[GaussianEvent, int], ...] = ()

    def __post_init__(self) -> None:
        joined: list[tuple[GaussianEvent, int]] = []
        for event, count in self.segments:
            if not _check.at_least("count", count, 0):
                continue
            if joined and joined[-1][0] == event:
                joined[-1] = (event, joined[-1][1] + count)
            else:
                joined.append((event, count))
        object.__setattr__(self, "segments", tuple(joined))

    @property
    def n_steps(self) -> int:
        """How many steps there are in all."""
        return sum(count for _, count in self.segments)

    def __mul__(self, n: int) -> Process:
        """Run this process ``n`` times (``n >= 0``)."""
        _check.at_least("the number of repetitions", n, 0)
        if len(self.segments) == 1:
            ((event, count),) = self.segments
            return Process(((event, count * n),))
        return Process(self.segments * n)

    __rmul__ = __mul__

    def __add__(self, other: Process) -> Process:
        """Run ``other`` after this process, on the same data."""
        return Process(self.segments + other.segments)

    def epsilon_at(self, delta: float) -> float:
        """Return an upper bound on ε at ``delta``.

        Args:
            delta: In (0, 1).

        Returns:
            ε, rounded up; 0.0 for a process of no steps and ``inf`` if a step has no noise.

        Raises:
            ValueError: If ``delta`` is not in (0, 1).
        """
        delta = _check.fraction("delta", delta, zero=False, one=False)
        return _epsilon(_totals(self), delta, 1)

    def delta_at(self, epsilon: float) -> float:
        """Return an upper bound on δ at ``epsilon``, at most 1.

        Raises:
            ValueError: If ``epsilon`` is negative or not finite.
        """
        epsilon = _check.non_negative("epsilon", epsilon)
        totals = _totals(self)
        if (sigma := _unsampled_sigma(totals)) in (0.0, math.inf):
            return 0.0 if sigma else 1.0
        bound = _gaussian_delta(sigma, epsilon)
        if bound <= _fourier_noise(totals) or not _on_grid(totals):
            return bound
        sampled = _sampled(totals, 1, lambda grid: grid.get_delta_for_epsilon(epsilon))
        return min(bound, sampled * (1 + _RELATIVE_SLACK) + _fourier_noise(totals))


def coarse_epsilon(process: Process, delta: float) -> float:
    """Return a bound at or above ``process.epsilon_at(delta)``, ten times cheaper.

    Guarantees:
        At or above ``epsilon_at`` also of a process whose counts are up to 5 % smaller. Less than
        1 % above its own for a noise multiplier of 0.5 and more, less than 5 % otherwise.
    """
    return _epsilon(_totals(process), delta, _COARSE)


# ------------------------------------------------------------------------------------------
# From here on: numbers of steps by event, sorted, so that order of spending changes nothing.

_Totals = tuple[tuple[GaussianEvent, int], ...]

# Noise whose square floating point could not hold; it hides nothing at any ε there is.
NO_NOISE = 1e-100
# Grid width over mu per step: an error of 0.08 * 0.02**2 = 3e-5.
_FINENESS = 0.02
# Must be 2 or more: counts that differ by a few per cent may move the width by one power of two.
_COARSE = 16
_WIDEST = 2.0**-3
# The library puts losses on the grid one by one, and what each is wrong by adds up.
_MAX_POINTS = 2**17
# Rounding summed over the grid, whose size goes with the square root of the number of steps.
_FOURIER_NOISE = 2e-13
# Of less noise, or more, what the exact formula subtracts from one another has too few digits.
_LITTLE_NOISE, _MUCH_NOISE = 1e-5, 1e12
# A single step's loss up to which, and as many points with which, a grid still fits into memory.
# 2^23 points take 2 GB and some seconds, and are enough for 10^7 ordinary steps.
_LARGEST_LOSS = 2.0**14
_MAX_COMPOSED = 2.0**23
_RELATIVE_SLACK = 1e-9
# Up to how many times the rounding of the Fourier transforms a δ is asked of other bounds, too.
_LITTLE = 100.0
# Of a step's Rényi divergence, which is a logarithm of a sum.
_RENYI_SLACK = 1e-11
_RAREST = 1e-12
# Whole ones have a finite sum each; δ so small that these bounds matter asks for large ones.
_ORDERS = (*range(2, 33), *(2**n + k * 2 ** (n - 2) for n in range(5, 9) for k in range(1, 5)))
# The widths that rounding asks for: per step, and per step and unit of the largest loss, squared.
_ROUNDING, _ROUNDING_OF_MANY = 5e-14, 5e-17
# Between which the total mass of a composed grid is near enough to 1 for its δ to be a bound.
_LEAST_MASS, _MOST_MASS = 1 - 1e-6, 10.0
# How many times wider the grids are that are tried, in this order.
_WIDER = (1, 16, 256)
# Of very much noise the library takes the logarithm of 0, or overflows; `_sampled` sees it.
_quietly = np.errstate(divide="ignore", over="ignore", invalid="ignore")


def _totals(process: Process) -> _Totals:
    counts: Counter[GaussianEvent] = Counter()
    for event, count in process.segments:
        counts[event] += count
    return tuple(
        sorted(counts.items(), key=lambda item: (item[0].noise_multiplier, item[0].sample_rate))
    )


def _unsampled_sigma(totals: _Totals) -> float:
    """Return the multiplier of the one Gaussian that all steps without sampling amount to."""
    if any(event.noise_multiplier < NO_NOISE for event, _ in totals):
        return 0.0
    precision = math.fsum(
        count / event.noise_multiplier / event.noise_multiplier for event, count in totals
    )
    return precision**-0.5 if precision else math.inf


@lru_cache(maxsize=4096)
def _epsilon(totals: _Totals, delta: float, coarser: int) -> float:
    if (sigma := _unsampled_sigma(totals)) in (0.0, math.inf):
        return 0.0 if sigma else math.inf
    bound = _gaussian_epsilon(sigma, delta)
    noise = _fourier_noise(totals)
    certain = delta * (1 - _RELATIVE_SLACK) - noise
    if bound == 0 or all(event.sample_rate == 1 for event, _ in totals):
        return bound
    sampled = math.inf
    if certain > 0 and _on_grid(totals):
        sampled = _sampled(totals, coarser, lambda grid: grid.get_epsilon_for_delta(certain))
        bound = min(bound, sampled * (1 + _RELATIVE_SLACK))
    if sampled < math.inf and delta > _LITTLE * noise:
        return bound
    return min(bound, _renyi_epsilon(totals, delta))


def _on_grid(totals: _Totals) -> bool:
    """Whether sampling makes a difference that a grid of losses can show."""
    if all(event.sample_rate == 1 for event, _ in totals):
        return False
    if any(_largest_loss(event) > _LARGEST_LOSS for event, _ in totals):
        return False
    spread = math.sqrt(math.fsum(count * _spread(event) ** 2 for event, count in totals))
    return 20 * spread <= _MAX_COMPOSED * _grid_width(totals)


def _fourier_noise(totals: _Totals) -> float:
    return _FOURIER_NOISE * math.sqrt(sum(count for _, count in totals))


def _renyi_epsilon(totals: _Totals, delta: float) -> float:
    """Return what Rényi divergences say; ``inf`` where rounding may be more than they are."""
    accountant: Any = rdp_privacy_accountant.RdpAccountant(_ORDERS)
    for event, count in totals:
        noise: Any = dp_event.GaussianDpEvent(event.noise_multiplier)
        if event.sample_rate < 1:
            # To sample more often costs more; of less, the library cannot take the logarithm.
            rate = max(event.sample_rate, _RAREST)
            noise = dp_event.PoissonSampledDpEvent(rate, noise)
        accountant.compose(noise, count)
    try:
        epsilon = float(accountant.get_epsilon(delta))
    except ValueError:  # of a divergence that rounding has made negative
        return math.inf
    slack = _RENYI_SLACK * sum(count for _, count in totals)
    return epsilon * (1 + _RELATIVE_SLACK) + slack if epsilon > 10 * slack else math.inf


@_quietly
def _sampled(totals: _Totals, coarser: int, ask: Callable[[_Pld], float]) -> float:
    """Return what the finest grid says that is a distribution; ``inf`` if there is none."""
    for wider in _WIDER:
        grid = _composed(totals, coarser * wider)
        # δ at an ε of minus infinity is all of the mass. Processors differ in how a Fourier
        # transform rounds, and where that takes over, masses grow without limit, to either side.
        mass, answer = float(grid.get_delta_for_epsilon(-_LARGEST_LOSS)), float(ask(grid))
        if _LEAST_MASS <= mass <= _MOST_MASS and answer >= 0:
            return answer
    return math.inf


def _composed(totals: _Totals, coarser: int) -> _Pld:
    width = _grid_width(totals) * coarser
    whole: _Pld | None = None
    for event, count in totals:
        part = _one_step(event, width).self_compose(count)
        whole = part if whole is None else whole.compose(part)
    assert whole is not None
    return whole


def _grid_width(totals: _Totals) -> float:
    """Return the power of two at or below ``_FINENESS`` of the steps' root mean square mu."""
    steps = sum(count for _, count in totals)
    power = math.fsum(count * _mu_per_step(event) ** 2 for event, count in totals)
    ideal = _FINENESS * math.sqrt(power / steps)
    largest = max(_largest_loss(event) for event, _ in totals)
    exact = max(_ROUNDING * steps, math.sqrt(_ROUNDING_OF_MANY * steps * largest))
    needed = max(ideal, largest / _MAX_POINTS, exact)
    return 2.0 ** math.floor(math.log2(min(needed, _WIDEST)))


def _mu_per_step(event: GaussianEvent) -> float:
    return min(_central_limit(event), math.sqrt(event.sample_rate) / event.noise_multiplier)


def _central_limit(event: GaussianEvent) -> float:
    # The exponential is beside the point, and overflows, long before its exponent reaches 100.
    return event.sample_rate * math.sqrt(math.expm1(min(event.noise_multiplier**-2, 100.0)))


def _spread(event: GaussianEvent) -> float:
    """Return about the standard deviation of the loss of one step."""
    sigma, rate = event.noise_multiplier, event.sample_rate
    return min(_central_limit(event), math.sqrt(rate) * (0.5 / sigma + 1) / sigma)


def _largest_loss(event: GaussianEvent) -> float:
    """Return about the loss of an outcome ten standard deviations out, where the grid ends."""
    sigma, rate = event.noise_multiplier, event.sample_rate
    unsampled = (0.5 + 10 * sigma) / sigma**2
    return math.log1p(rate * math.expm1(unsampled)) if unsampled < 700 else unsampled


# ------------------------------------------------------------------------------------------
# The border to dp_accounting, which has no type stubs.


class _Pld(Protocol):
    def self_compose(self, num_times: int) -> _Pld: ...
    def compose(self, privacy_loss_distribution: _Pld) -> _Pld: ...
    def get_epsilon_for_delta(self, delta: float) -> float: ...
    def get_delta_for_epsilon(self, epsilon: float) -> float: ...


@_quietly
def _gaussian_epsilon(sigma: float, delta: float) -> float:
    if _most_delta(sigma) <= delta:
        return 0.0
    if not _LITTLE_NOISE <= sigma <= _MUCH_NOISE:
        # The loss is N(1 / (2 sigma^2), 1 / sigma^2), and this the Chernoff bound of its tail.
        return (0.5 / sigma + math.sqrt(-2 * math.log(delta))) / sigma * (1 + _RELATIVE_SLACK)
    tolerance = 1e-12
    epsilon = float(gaussian_mechanism.get_epsilon_gaussian(sigma, delta, tolerance))
    return epsilon * (1 + _RELATIVE_SLACK) + 2 * tolerance


def _gaussian_delta(sigma: float, epsilon: float) -> float:
    if (most := _most_delta(sigma)) <= 1e-15:
        return most
    loss: Any = privacy_loss_mechanism.GaussianPrivacyLoss(sigma)
    return min(1.0, float(loss.get_delta_for_epsilon(epsilon)) * (1 + _RELATIVE_SLACK) + 1e-15)


def _most_delta(sigma: float) -> float:
    """Return δ at ε = 0, which is 2 Φ(1 / (2 sigma)) - 1, rounded up."""
    return math.erf(math.sqrt(0.125) / sigma) * (1 + _RELATIVE_SLACK)


@lru_cache(maxsize=8)
def _one_step(event: GaussianEvent, width: float) -> _Pld:
    loss: Any = privacy_loss_distribution.from_gaussian_mechanism(
        event.noise_multiplier,
        sampling_prob=event.sample_rate,
        value_discretization_interval=width,
        use_connect_dots=True,
    )
    return cast("_Pld", loss)
