"""DP-SGD as a process to account for: a Gaussian mechanism, and the same on a Poisson sample."""

from __future__ import annotations

from opake_lightning import _check
from opake_lightning.accounting import GaussianEvent, Process
from opake_lightning.errors import PrivacyError

__all__ = ["gaussian", "poisson"]


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
