"""What the noise is not for is refused before any is drawn."""

from __future__ import annotations

from typing import Any

from opake_lightning._clipped import refuse_noised, require_bounded
from opake_lightning.errors import PrivacyError
from opake_lightning.types import SecondMomentClippedPytree

__all__ = ["require_clipped"]


def require_clipped(grads: Any, *, pairs: bool) -> None:
    """Refuse all but a clipped gradient, or clipped pair, of finite sensitivity."""
    refuse_noised(grads, "mf_gaussian_noise")
    paired = isinstance(grads, SecondMomentClippedPytree)
    if paired and not pairs:
        raise PrivacyError(
            "got a pair of gradient and squares, but no strategy for the squares; give "
            "mf_gaussian_noise a second_moment_strategy, or clip without second_moment"
        )
    if pairs and not paired:
        raise PrivacyError(
            "mf_gaussian_noise was given a second_moment_strategy, so the noise function needs a "
            f"SecondMomentClippedPytree, got {type(grads).__name__}; clip with second_moment, or "
            "leave out second_moment_strategy"
        )
    require_bounded(grads, "mf_gaussian_noise")
