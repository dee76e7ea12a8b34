"""What noise may be added to: a clipped gradient, or pair, whose sensitivity sets its size."""

from __future__ import annotations

import math
from typing import Any

from opake_lightning import _check
from opake_lightning.errors import PrivacyError
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

__all__ = ["refuse_noised", "require_bounded"]


def refuse_noised(grads: Any, who: str) -> None:
    """Refuse what has been released already; ``who`` was given it."""
    if isinstance(grads, (NoisedPytree, SecondMomentNoiseOutput)):
        raise PrivacyError(f"{who} got a {type(grads).__name__}, which already has its noise")


def require_bounded(grads: Any, who: str) -> None:
    """Refuse all but a gradient or pair, of which noise of finite size can cover every part.

    Raises:
        PrivacyError: If something was not clipped, or a bound is not finite.
        ValueError: If a sensitivity is of a size that float32 cannot hold.
    """
    if not isinstance(grads, SecondMomentClippedPytree):
        _require_sensitivity(grads, who)
        return
    for part in (grads.gradient, grads.square):
        if part is not None:
            _require_sensitivity(part, who)
    radius = grads.projection_radius
    if radius is not None and not (radius > 0 and math.isfinite(radius)):
        raise PrivacyError(f"projection_radius must be finite and > 0, got {radius!r}")


def _require_sensitivity(grads: Any, who: str) -> None:
    if not isinstance(grads, ClippedPytree):
        raise PrivacyError(
            f"{who} needs a ClippedPytree, whose sensitivity sets the noise, got "
            f"{type(grads).__name__}; pass what clipped_grad's function returned"
        )
    if not (grads.sensitivity > 0 and math.isfinite(grads.sensitivity)):
        raise PrivacyError(
            f"no finite noise can cover a sensitivity of {grads.sensitivity!r}; clip first"
        )
    _check.size_of_noise("the sensitivity of the gradient", grads.sensitivity)
