"""The least noise that keeps a planned run within its budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from opake_lightning import _check
from opake_lightning.accounting.horizon import WholeRun
from opake_lightning.accounting.ledger import Ledger, rough_epsilon
from opake_lightning.accounting.process import Process
from opake_lightning.errors import PrivacyError

__all__ = ["calibrate"]

_SMALLEST, _LARGEST = 0.01, 1e6
_MAX_EVALUATIONS = 100


def calibrate(
    make_process: Callable[[float], Process | WholeRun | Ledger],
    *,
    target_epsilon: float,
    target_delta: float,
    tolerance: float = 2e-4,
) -> float:
    """Find the noise multiplier at which a run spends just under its target.

    Guarantees:
        ``make_process(result).epsilon_at(target_delta)`` (of a ledger, ``epsilon``) is never above
        ``target_epsilon``, and above ``(1 - tolerance) * target_epsilon``.

    Args:
        make_process: From a noise multiplier to everything the run will do with it. Steps already
            taken may be part of it, at the noise they had. A whole run of correlated noise is one
            such thing, and ``ledger.spend(run)`` if something went before it.
        target_epsilon: Largest acceptable ε, > 0.
        target_delta: δ in (0, 1).
        tolerance: What part of the target may be left unused, in [1e-4, 0.01].

    Returns:
        The noise multiplier, without unit.

    Raises:
        ValueError: If an argument is outside its range.
        PrivacyError: If no multiplier up to 1e6 keeps within the target (the fixed part of the
            process alone spends more), or every one down to 0.01 does.

    >>> from opake_lightning.dpsgd import accounting as dpsgd_acc
    >>> sigma = calibrate(dpsgd_acc.gaussian, target_epsilon=1.0, target_delta=1e-5)
    >>> round(sigma, 2)  # Balle & Wang's exact answer is 3.7306
    3.73
    """
    target = _check.positive("target_epsilon", target_epsilon)
    delta = _check.fraction("target_delta", target_delta, zero=False, one=False)
    tolerance = _check.positive("tolerance", tolerance)
    if not 1e-4 <= tolerance <= 0.01:
        raise ValueError(f"tolerance must be in [1e-4, 0.01], got {tolerance!r}")

    def coarse(sigma: float) -> float:
        made = make_process(sigma)
        if isinstance(made, Ledger):
            return made.rough_epsilon(delta)
        return rough_epsilon(made.cost if isinstance(made, WholeRun) else made, delta)

    def fine(sigma: float) -> float:
        made = make_process(sigma)
        return made.epsilon(delta) if isinstance(made, Ledger) else made.epsilon_at(delta)

    start, slope = 1.0, -1.0
    # A cheap search first leaves two or three exact evaluations. Where it fails, so will the
    # exact one, which has the better message.
    with suppress(PrivacyError):
        start, slope = _search(coarse, target, 0.002, start, slope)
    return _search(fine, target, tolerance, start, slope)[0]


def _search(
    epsilon_at: Callable[[float], float],
    target: float,
    tolerance: float,
    sigma: float,
    slope: float,
) -> tuple[float, float]:
    """Return σ with ε in ``((1 - tolerance) * target, target]`` and the slope, log ε by log σ."""
    bracket = _Bracket(aim=target * (1 - tolerance / 2), slope=slope)
    for _ in range(_MAX_EVALUATIONS):
        epsilon = epsilon_at(sigma)
        bracket.narrow(sigma, epsilon)
        if target * (1 - tolerance) < epsilon <= target:
            return sigma, bracket.slope
        sigma = bracket.propose()
        if sigma > _LARGEST:
            raise PrivacyError(
                f"target_epsilon={target!r} is out of reach: at noise_multiplier="
                f"{bracket.low[0]:.3g} ε is still {epsilon:.6g}. What make_process adds whatever "
                "the multiplier costs too much; raise the target, or plan fewer steps"
            )
        if sigma < _SMALLEST:
            raise PrivacyError(
                f"target_epsilon={target!r} asks for no noise: at noise_multiplier="
                f"{bracket.high[0]:.3g} ε is only {epsilon:.6g}. Lower target_delta (well below "
                "one over the number of examples) or target_epsilon, or set noise_multiplier"
            )
    raise PrivacyError(
        f"found no noise_multiplier for target_epsilon={target!r}: between {bracket.low[0]!r} and "
        f"{bracket.high[0]!r} ε jumps from {bracket.low[1]!r} to {bracket.high[1]!r}. make_process "
        "must depend continuously on the multiplier"
    )


@dataclass(slots=True)
class _Bracket:
    """Two points (σ, ε) around the aim, ``low`` with too little noise, and where to look next."""

    aim: float
    slope: float
    low: tuple[float, float] = (0.0, math.inf)
    high: tuple[float, float] = (math.inf, 0.0)
    # How often in a row one side moved (low counts up): false position stalls if it always does.
    run: int = 0

    def narrow(self, sigma: float, epsilon: float) -> None:
        if epsilon > self.aim:
            self.low, self.run = (sigma, epsilon), max(self.run, 0) + 1
        else:
            self.high, self.run = (sigma, epsilon), min(self.run, 0) - 1
        (few, most), (many, least) = self.low, self.high
        if few and most < math.inf and least and many < math.inf:
            self.slope = math.log(least / most) / math.log(many / few)

    def propose(self) -> float:
        (few, most), (many, least) = self.low, self.high
        stalled = abs(self.run) > 2
        if few == 0 or many == math.inf:
            sigma, epsilon = self.low if few else self.high
            way = 0.5 if few == 0 else 2.0
            if 0 < epsilon < math.inf and not stalled:
                step = (self.aim / epsilon) ** (1 / self.slope)
                return sigma * min(max(step, 1 / 64), 64.0)
            # ε does not move, or not as the slope has it.
            return sigma * way ** (abs(self.run) + 1)
        if stalled or least == 0 or most == math.inf:
            return math.sqrt(few * many)
        return few * (self.aim / most) ** (1 / self.slope)
