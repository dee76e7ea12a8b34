"""What a step's clipping and noise did, for the one who tunes."""

from __future__ import annotations

from typing import Any

from opake_lightning.dpsgd.clipping import not_private_diagnostics
from opake_lightning.types import SecondMomentClippedPytree, SecondMomentNoiseOutput

__all__ = ["Diagnostics"]


class Diagnostics:
    """Watches one step: called with the clipped gradient, before its memory gets the noise."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._sensitivity = 1.0

    def __call__(self, grads: Any) -> None:
        """Look at the clipped gradient."""
        gradient = grads.gradient if isinstance(grads, SecondMomentClippedPytree) else grads
        self._sensitivity = gradient.sensitivity
        self._seen = not_private_diagnostics(grads, noise_multiplier=1.0)

    def told(self, released: Any) -> dict[str, float]:
        """What there was to see, against the noise that was really added."""
        gradient = released.gradient if isinstance(released, SecondMomentNoiseOutput) else released
        seen = dict(self._seen)
        ratio = seen.pop("signal_to_noise", None)
        noise = gradient.noise_stddev / self._sensitivity
        if ratio is not None and noise > 0:
            seen["signal_to_noise"] = ratio / noise
        return seen
