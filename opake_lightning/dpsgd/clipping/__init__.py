"""Per-example clipping: sums of gradients that one example can move by a known amount only."""

from __future__ import annotations

from opake_lightning.dpsgd.clipping._auto import auto_clipped_grad
from opake_lightning.dpsgd.clipping._fixed import ClipState, GradFn, clipped_grad

__all__ = ["ClipState", "GradFn", "auto_clipped_grad", "clipped_grad"]
