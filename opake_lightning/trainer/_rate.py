"""The learning rate that an update applies, read off the optimizer before the update is made."""

from __future__ import annotations

from typing import Any

from opake_lightning import _check
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.optimizers.types import ScheduleFreeState
from opake_lightning.step import StepState

__all__ = ["rate_of"]


def rate_of(optimizer: GradientTransformation, state: StepState, ahead: int = 0) -> float | None:
    """Rate of the update that follows ``state``, or of a later one; None if there is none to see.

    Raises:
        TypeError: If a schedule returns something else than a number.
        ValueError: If it is negative or not finite.
    """
    rate: Any = getattr(optimizer, "lr", None)
    if rate is None:
        return None
    # The optimizer's own count: a second fit with another optimizer starts its schedule anew.
    own = state.optimizer
    own = own.stages if isinstance(own, ScheduleFreeState) else own
    counted = isinstance(own, dict) and "step" in own
    step: int = ahead + (own["step"] if counted else state.step)
    value = rate(step) if callable(rate) else rate
    return _check.non_negative(f"the learning rate at step {step}", value)
