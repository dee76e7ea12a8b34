"""DP-SGD as a process to account for: a Gaussian mechanism, and the same on a Poisson sample.

Adaptive clipping adds noisy counts to a step; :mod:`opake_lightning.dpsgd.clipping` has the
derivation of what they cost.
"""

from __future__ import annotations

import math

from opake_lightning import _check
from opake_lightning.accounting import GaussianEvent, Process
from opake_lightning.errors import PrivacyError

__all__ = ["adaclip", "adaclip_noise_multiplier", "gaussian", "poisson"]


def gaussian(noise_multiplier: float) -> Process:
    """One noisy sum over all examples.

    Args:
        noise_multiplier: Noise standard deviation over clipping norm, without unit; 0 is no noise,
            and ε infinite.

    Raises:
        ValueError: If ``noise_multiplier`` is negative or not finite.

    >>> round(gaussian(1.0).epsilon_at(1e-5), 4)
    4.3772
    """
    return Process(((GaussianEvent(noise_multiplier), 1),))


def poisson(mechanism: Process, sample_rate: float, n_steps: int | None = None) -> Process:
    """Run ``mechanism`` on a Poisson sample, drawn anew at every step.

    Guarantees:
        Amplification is claimed once and for one release: what has been sampled already, or is
        composed of several steps (which would share one draw), is refused.

    Args:
        mechanism: One step on all examples, as :func:`gaussian` returns it.
        sample_rate: Expected batch size over number of examples, in (0, 1].
        n_steps: Number of steps; one by default. ``poisson(m, q) * n`` is the same.

    Raises:
        PrivacyError: If ``mechanism`` is not one step with sample rate 1.
        ValueError: If ``sample_rate`` is not in (0, 1] or ``n_steps`` is negative.

    >>> poisson(gaussian(1.0), 0.5, n_steps=8) == poisson(gaussian(1.0), 0.5) * 8
    True
    >>> round(poisson(gaussian(1.0), 0.5).delta_at(0.0), 3)  # q (2 Phi(1/2) - 1)
    0.191
    """
    rate = _check.fraction("sample_rate", sample_rate, zero=False, one=True)
    if len(mechanism.segments) != 1 or mechanism.segments[0][1] != 1:
        raise PrivacyError(
            f"poisson() samples one step, but got a mechanism of {mechanism.n_steps}, and several "
            "releases on one draw are not amplified like one. Sample first, then repeat: "
            "poisson(gaussian(noise_multiplier), sample_rate, n_steps=...)"
        )
    ((event, _),) = mechanism.segments
    if event.sample_rate != 1:
        raise PrivacyError(
            f"poisson() got a mechanism that is sampled already, at rate {event.sample_rate!r}; "
            "pass gaussian(noise_multiplier), and as sample_rate the chance of being in the batch"
        )
    steps = 1 if n_steps is None else _check.at_least("n_steps", n_steps, 0)
    return Process(((GaussianEvent(event.noise_multiplier, rate), steps),))


def adaclip(mechanism: Process, *, count_noise_stddev: float, n_groups: int = 1) -> Process:
    r"""``mechanism`` together with the counts that move an adaptive clipping norm.

    .. math:: z = \bigl(z_\Delta^{-2} + K (2 \sigma_b)^{-2}\bigr)^{-1/2}

    Args:
        mechanism: One step on all examples with the noise multiplier z_Δ of the gradient, as
            :func:`gaussian` returns it. Sample afterwards: ``poisson(adaclip(...), rate)``.
        count_noise_stddev: σ_b, noise on each count, in examples; 0 is no noise, and ε infinite.
        n_groups: K, the number of adaptive clipping norms.

    Returns:
        One Gaussian mechanism with multiplier z: what the gradient and the counts cost together.

    Raises:
        PrivacyError: If ``mechanism`` is not one step with sample rate 1.
        ValueError: If a number is out of range.

    Source: Andrew et al. 2021, Theorem 1 (arXiv:1905.03871).

    >>> adaclip(gaussian(1 / 3), count_noise_stddev=1 / 8) == gaussian(1 / 5)  # 3² + 4² = 5²
    True
    """
    sigma = _check.non_negative("count_noise_stddev", count_noise_stddev)
    groups = _check.positive_int("n_groups", n_groups)
    if len(mechanism.segments) != 1 or mechanism.segments[0][1] != 1:
        raise PrivacyError(
            f"adaclip() adds counts to one step, but got a mechanism of {mechanism.n_steps}; pass "
            "gaussian(noise_multiplier), then sample and repeat"
        )
    ((event, _),) = mechanism.segments
    if event.sample_rate != 1:
        raise PrivacyError(
            f"adaclip() got a mechanism that is sampled already, at rate {event.sample_rate!r}; "
            "the counts share the gradient's draw, so sample afterwards: "
            "poisson(adaclip(gaussian(noise_multiplier), ...), sample_rate)"
        )
    z = event.noise_multiplier
    if z == 0 or sigma == 0:
        return gaussian(0.0)
    return gaussian(1 / math.hypot(1 / z, math.sqrt(groups) / (2 * sigma)))


def adaclip_noise_multiplier(
    noise_multiplier: float, *, count_noise_stddev: float, n_groups: int = 1
) -> float:
    r"""Noise multiplier of the gradient with which gradient and counts cost one release.

    .. math:: z_\Delta = \bigl(z^{-2} - K (2 \sigma_b)^{-2}\bigr)^{-1/2}

    Guarantee: ``adaclip(gaussian(z_Δ), ...)`` is ``gaussian(z)``, up to rounding.

    Args:
        noise_multiplier: z, of the whole step; 0 gives 0, and protects nothing.
        count_noise_stddev: σ_b, noise on each count, in examples.
        n_groups: K, the number of adaptive clipping norms.

    Raises:
        PrivacyError: Unless z < 2 σ_b / √K: with less noise the counts alone cost more than z.
        ValueError: If a number is out of range.

    >>> adaclip_noise_multiplier(1.0, count_noise_stddev=5.0)  # (1 - 1/100) ** -0.5
    1.005037815259212
    """
    z = _check.non_negative("noise_multiplier", noise_multiplier)
    sigma = _check.non_negative("count_noise_stddev", count_noise_stddev)
    root = math.sqrt(_check.positive_int("n_groups", n_groups))
    if z == 0:
        return 0.0
    limit = 2 * sigma / root
    if not z < limit:
        raise PrivacyError(
            f"noise_multiplier={z:.6g} leaves nothing for the gradient: {n_groups} count(s) with "
            f"noise of standard deviation count_noise_stddev={sigma:.6g} are released, which takes "
            f"a noise_multiplier below 2 * {sigma:.6g} / sqrt({n_groups}) = {limit:.6g}; give a "
            f"count_noise_stddev well above {z * root / 2:.6g} (by default it is 0.05 of the "
            "expected batch size, so a larger batch does too), or have fewer groups"
        )
    return z / math.sqrt((1 - z / limit) * (1 + z / limit))
