r"""DP-FTRL as something to account for: a run of correlated noise, and the ways to sample for it.

Noise :math:`C^{-1} z`, :math:`z \sim N(0, \sigma^2 I)`, on the clipped sums :math:`G` of a run is
post-processing of :math:`C G + z`, so the run is one Gaussian mechanism, also when each gradient
depends on what was released before (Denisov et al. 2022, arXiv:2202.08312). What it costs is
decided by the steps in which one example takes part, so noise, sampling and accounting must agree:

=====================  ===============================================================  ===========
function               how batches are drawn                                            strategies
=====================  ===============================================================  ===========
:func:`unamplified`    in any way that keeps the participations of an example           all
                       ``min_sep`` steps apart
:func:`poisson`        every example in one of ``n_groups`` random groups; step t       banded
                       draws each of group t mod n_groups with chance ``sample_rate``
:func:`b_min_sep`      at random, but no example twice within ``min_sep`` steps         banded, ≥ 0
:func:`balls_in_bins`  every example in one of ``n_bins`` random batches, in turn       ≥ 0
=====================  ===============================================================  ===========

Each returns a :class:`~opake_lightning.accounting.WholeRun`: paid in full with its first step, and
not to be repeated or sampled again. What is accounted for is the strategy as given; a strategy that
is open to being fitted to a schema must be the same object here and in the noise; and noise
made for pairs without ``min_sep`` is right for :func:`poisson` and for that schema only.

Amplification needs groups, bins or waits that nothing released before tells about. A second horizon
needs its own: another ``start`` for noise, sampler and whole run alike, or another key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opake_lightning import _check
from opake_lightning.accounting import BallsInBins, BMinSep, GaussianEvent, Process, WholeRun
from opake_lightning.errors import PrivacyError

if TYPE_CHECKING:
    from opake_lightning.dpftrl.noise import Strategy

__all__ = ["MFGaussian", "b_min_sep", "balls_in_bins", "mf_gaussian", "poisson", "unamplified"]


@dataclass(frozen=True, slots=True)
class MFGaussian:
    """Gaussian noise correlated by a strategy; it costs nothing yet, as nobody has taken part."""

    noise_multiplier: float
    strategy: Strategy

    def __post_init__(self) -> None:
        sigma = _check.non_negative("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        if not callable(getattr(self.strategy, "matrix", None)):
            raise TypeError(
                "strategy must be what a function of opake_lightning.dpftrl.noise returned, such "
                f"as band_mf_strategy(8), got {self.strategy!r}"
            )


def mf_gaussian(noise_multiplier: float, strategy: Strategy) -> MFGaussian:
    """Noise that is correlated over a run, before it is known who takes part when.

    Args:
        noise_multiplier: Standard deviation of the independent noise z over the clipping norm, as
            in :func:`~opake_lightning.dpftrl.noise.mf_gaussian_noise`, without unit; 0 is no
            noise, and ε infinite.
        strategy: How noise is correlated.

    Raises:
        ValueError: If ``noise_multiplier`` is negative or not finite.
    """
    return MFGaussian(noise_multiplier, strategy)


def unamplified(
    mechanism: MFGaussian, *, n_steps: int, min_sep: int, max_participations: int | None = None
) -> WholeRun:
    r"""A run in which it may be known when an example takes part.

    .. math:: \text{one Gaussian with multiplier } \sigma / S

    S is how far one example can move :math:`CG`: the norm of the sum of the columns in which it
    takes part, at worst.

    Guarantees:
        S counts every participation: steps 0, b, 2b, ... of a run, unless ``max_participations``
        is less than all of them.

    Args:
        mechanism: What :func:`mf_gaussian` returned.
        n_steps: Length of the run.
        min_sep: b, an example takes part at steps at least so far apart; 1 is every step. For the
            same batches in the same order in every pass, the number of batches in a pass.
        max_participations: How often an example takes part at most; by default ⌈n_steps / b⌉.

    Raises:
        PrivacyError: If ``mechanism`` has been accounted for already.
        ValueError: If a number is out of range.

    Source: Choquette-Choo et al. 2023, arXiv:2211.06530 and arXiv:2306.08153.

    >>> from opake_lightning.dpftrl.noise import identity_strategy
    >>> run = unamplified(mf_gaussian(9.0, identity_strategy()), n_steps=9, min_sep=1)
    >>> round(run.epsilon_at(1e-5), 4)  # nine participations, S = 3: one Gaussian at 3
    1.2711
    """
    matrix = _unspent("unamplified", mechanism).strategy.matrix(n_steps)
    sigma = mechanism.noise_multiplier / matrix.sensitivity(min_sep, max_participations)
    return WholeRun(Process(((GaussianEvent(sigma), 1),)), n_steps)


def poisson(
    mechanism: MFGaussian, sample_rate: float, n_steps: int, *, n_groups: int | None = None
) -> WholeRun:
    r"""A run on cyclic Poisson batches.

    Every example is in one of the groups, chosen at random once and for all, and step t draws from
    group t mod n_groups. So the steps in which an example may be drawn are ``n_groups`` apart, its
    columns do not overlap if there are no more bands than groups, and what it can learn from the
    run is ⌈n_steps / n_groups⌉ Poisson-sampled releases, as in DP-SGD:

    .. math:: \lceil n / b \rceil \text{ times the Gaussian with multiplier }
              \sigma / \max_t \lVert C_{\cdot t} \rVert \text{ at rate } q

    Args:
        mechanism: What :func:`mf_gaussian` returned, with a banded strategy.
        sample_rate: q, the chance in (0, 1] with which a step draws each example **of its group**,
            not of all examples: for an expected batch size B of N examples,
            ``n_groups * B / N``. ``B / N`` would understate ε.
        n_steps: Length of the run.
        n_groups: b, number of groups; by default as many as the strategy has bands, which for
            independent noise is one, and all this is DP-SGD.

    Raises:
        PrivacyError: If the strategy is not banded, or has more bands than there are groups; or if
            ``mechanism`` has been sampled already.
        ValueError: If a number is out of range.

    Source: Choquette-Choo et al. 2023, Theorem 4 (arXiv:2306.08153).

    >>> from opake_lightning.dpftrl.noise import identity_strategy
    >>> run = poisson(mf_gaussian(1.0, identity_strategy()), sample_rate=0.5, n_steps=1)
    >>> round(run.delta_at(0.0), 3)  # q (2 Phi(1/2) - 1)
    0.191
    """
    strategy = _unspent("poisson", mechanism).strategy
    rate = _check.fraction("sample_rate", sample_rate, zero=False, one=True)
    n = _check.positive_int("n_steps", n_steps)
    bands = _bands("poisson", strategy)
    groups = bands if n_groups is None else _check.positive_int("n_groups", n_groups)
    if groups < min(bands, n):
        raise PrivacyError(
            f"n_groups={groups} is less than the {bands} bands of {strategy.describe()}: noise "
            "would tie steps together in which one example is drawn. Take as many groups as bands, "
            "or a strategy with fewer bands"
        )
    sigma = mechanism.noise_multiplier / strategy.matrix(n).max_column_norm()
    return WholeRun(Process(((GaussianEvent(sigma, rate), -(-n // groups)),)), n)


def b_min_sep(
    mechanism: MFGaussian,
    *,
    sample_rate: float,
    min_sep: int,
    n_steps: int,
    confidence: float = 0.999,
    n_samples: int | None = None,
) -> WholeRun:
    """A run on batches drawn at random, except who took part in the last ``min_sep - 1`` steps.

    ε is measured by sampling, in seconds to a minute, and is an upper bound with the stated
    confidence; it is well below that of :func:`poisson` at the same batch size where δ is not too
    small for the samples. See :class:`~opake_lightning.accounting.BMinSep`.

    Args:
        mechanism: What :func:`mf_gaussian` returned, with a banded strategy without negative
            coefficients.
        sample_rate: Mean rate, the expected batch size over the number of **all** examples, at most
            1 / min_sep. Unlike in :func:`poisson`.
        min_sep: Least number of steps between participations, at least the number of bands.
        n_steps: Length of the run.
        confidence: Of the bound, in (0, 1).
        n_samples: More make it tighter; by default what takes seconds.

    Raises:
        PrivacyError: If the strategy has negative coefficients, is not banded, or has more bands
            than ``min_sep``; or if ``mechanism`` has been sampled already.
        ValueError: If a number is out of range.

    Source: Dong & Ganesh, arXiv:2602.09338.
    """
    strategy = _unspent("b_min_sep", mechanism).strategy
    _bands("b_min_sep", strategy)
    matrix = strategy.matrix(_check.positive_int("n_steps", n_steps))
    cost = BMinSep(
        noise_multiplier=mechanism.noise_multiplier,
        coefficients=tuple(matrix.coefficients.tolist()),
        normalized=matrix.normalized,
        n_steps=n_steps,
        confidence=confidence,
        n_samples=n_samples,
        min_sep=min_sep,
        sample_rate=sample_rate,
    )
    return WholeRun(cost, n_steps)


def balls_in_bins(
    mechanism: MFGaussian,
    *,
    n_bins: int,
    n_steps: int,
    confidence: float = 0.999,
    n_samples: int | None = None,
) -> WholeRun:
    """A run on the batches of one random partition, in the same order in every pass.

    The batches are those of an ordinary loader that shuffles once, but for their sizes: every
    example falls into a batch on its own, uniformly at random. ε is measured by sampling, in
    seconds, and is an upper bound with the stated confidence. See
    :class:`~opake_lightning.accounting.BallsInBins`.

    Args:
        mechanism: What :func:`mf_gaussian` returned, with a strategy without negative coefficients.
        n_bins: Number of batches in a pass.
        n_steps: Length of the run.
        confidence: Of the bound, in (0, 1).
        n_samples: More make it tighter; by default what takes seconds.

    Raises:
        PrivacyError: If the strategy has negative coefficients; or if ``mechanism`` has been
            sampled already.
        ValueError: If a number is out of range.

    Source: Choquette-Choo et al., arXiv:2410.06266.
    """
    strategy = _unspent("balls_in_bins", mechanism).strategy
    matrix = strategy.matrix(_check.positive_int("n_steps", n_steps))
    cost = BallsInBins(
        noise_multiplier=mechanism.noise_multiplier,
        coefficients=tuple(matrix.coefficients.tolist()),
        normalized=matrix.normalized,
        n_steps=n_steps,
        confidence=confidence,
        n_samples=n_samples,
        n_bins=n_bins,
    )
    return WholeRun(cost, n_steps)


def _unspent(name: str, mechanism: object) -> MFGaussian:
    if isinstance(mechanism, MFGaussian):
        return mechanism
    if isinstance(mechanism, (Process, WholeRun)):
        raise PrivacyError(
            f"{name}() got a {type(mechanism).__name__}, which is accounted for already, with its "
            "sampling: amplification counts once. Pass mf_gaussian(noise_multiplier, strategy)"
        )
    raise TypeError(f"{name}() takes what mf_gaussian() returned, got {mechanism!r}")


def _bands(name: str, strategy: Strategy) -> int:
    if strategy.bands is None:
        raise PrivacyError(
            f"{name}() draws an example again and again at random, which is accounted for only "
            f"with a banded strategy, and {strategy.describe()} is not one. Use balls_in_bins() or "
            "unamplified(), or band_mf_strategy, bsr_strategy or identity_strategy"
        )
    return strategy.bands
