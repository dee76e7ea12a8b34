"""What clipping asks of an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["Aux", "ClippedSum", "FactorsOf"]

Aux: TypeAlias = Any
# From norms to factors, both float64 of shape [G, B]; 0 where a norm is not finite.
FactorsOf: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ClippedSum:
    """What an engine returns.

    Attributes:
        flats: The weighted sum of per-example gradients, packed.
        norms: L2 norm of each example's gradient before clipping, float64, one row per group of
            parameters and one column per example: [G, B]. An example whose gradient is NaN or
            infinite anywhere has norm infinity in every group.
        aux: What the loss returned beside the loss, one row per example; None for an empty batch.
        squares: The weighted sum of their squares, packed; None unless asked for.
    """

    flats: list[Tensor]
    norms: Tensor
    aux: Aux
    squares: list[Tensor] | None = None
