"""What the noise is not for is refused before any is drawn."""

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

__all__ = ["require_clipped"]


def require_clipped(grads: Any, *, pairs: bool) -> None:
    """Refuse all but a clipped gradient, or clipped pair, of finite sensitivity."""
    if isinstance(grads, (NoisedPytree, SecondMomentNoiseOutput)):
        raise PrivacyError(f"the gradient is a {type(grads).__name__}, which already has its noise")
    if isinstance(grads, SecondMomentClippedPytree):
        if not pairs:
            raise PrivacyError(
                "got a pair of gradient and squares, but no strategy for the squares; give "
                "mf_gaussian_noise a second_moment_strategy, or clip without second_moment"
            )
        for part in (grads.gradient, grads.square):
            if part is not None:
                _require_sensitivity(part)
        radius = grads.projection_radius
        if radius is not None and not (radius > 0 and math.isfinite(radius)):
            raise PrivacyError(f"projection_radius must be finite and > 0, got {radius!r}")
        return
    if pairs:
        raise PrivacyError(
            "mf_gaussian_noise was given a second_moment_strategy, so the noise function needs a "
            f"SecondMomentClippedPytree, got {type(grads).__name__}; clip with second_moment, or "
            "leave out second_moment_strategy"
        )
    _require_sensitivity(grads)


def _require_sensitivity(grads: Any) -> None:
    if not isinstance(grads, ClippedPytree):
        raise PrivacyError(
            "the noise needs a ClippedPytree, whose sensitivity sets its size, got "
            f"{type(grads).__name__}; pass what clipped_grad's function returned"
        )
    if not (grads.sensitivity > 0 and math.isfinite(grads.sensitivity)):
        raise PrivacyError(
            f"no finite noise can cover a sensitivity of {grads.sensitivity!r}; clip first"
        )
    _check.size_of_noise("the sensitivity of the gradient", grads.sensitivity)
