"""Per-example clipping: sums of gradients that one example can move by a known amount only."""

from __future__ import annotations

from opake_lightning.dpsgd.clipping._adaptive import (
    Adaptive,
    AdaptiveClipState,
    adaptive,
    adaptive_clipped_grad,
)
from opake_lightning.dpsgd.clipping._auto import Auto, auto, auto_clipped_grad
from opake_lightning.dpsgd.clipping._diagnostics import not_private_diagnostics
from opake_lightning.dpsgd.clipping._fixed import GradFn, clipped_grad
from opake_lightning.dpsgd.clipping._groups import per_group, per_layer
from opake_lightning.dpsgd.clipping._own_rules import check_rule, per_example_rule
from opake_lightning.dpsgd.clipping._rule import ClipState

__all__ = [
    "Adaptive",
    "AdaptiveClipState",
    "Auto",
    "ClipState",
    "GradFn",
    "adaptive",
    "adaptive_clipped_grad",
    "auto",
    "auto_clipped_grad",
    "check_rule",
    "clipped_grad",
    "not_private_diagnostics",
    "per_example_rule",
    "per_group",
    "per_layer",
]
