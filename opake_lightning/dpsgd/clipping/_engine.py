"""What clipping asks of the engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import optree
import torch
from torch import Tensor

from opake_lightning._tree import Layout
from opake_lightning.dpsgd.clipping._batch import Examples
from opake_lightning.dpsgd.clipping._groups import names_of

__all__ = ["LARGE_NORM", "ClippedSum", "Request", "refuse_engine"]

# Squares of larger norms, or factors as small as their inverse, may leave the range of the dtype.
LARGE_NORM = 1e15


@dataclass(frozen=True, slots=True)
class Request:
    """The sum over examples of ``factor(norm) * gradient``.

    Attributes:
        loss_of: Loss of (params, batch arguments), or (loss, aux).
        params: Leaves of the parameters, in the layout's order, each requiring a gradient.
        layout: Layout of the parameters.
        examples: The batch.
        owners: Modules, containers and objects that the loss may write to, and must not.
        needs_gradient: Whether a loss that depends on no parameter is refused.
        least_bound: The least norm that a gradient may be scaled to.
        groups: Number of each leaf's group, from 0 to G-1: norms are taken, and factors applied,
            group by group.
        factors_of: From norms to factors, both float64 of shape [G, B]; 0 where a norm is not
            finite.
        square_scale: How much larger factors are for gradients that are squared before they are
            summed; None leaves the squares out.
        has_aux: Whether the loss returns (loss, aux).
    """

    loss_of: Callable[[Any, tuple[Any, ...]], Any]
    params: list[Tensor]
    layout: Layout
    examples: Examples
    owners: Sequence[Any]
    needs_gradient: bool
    least_bound: float
    groups: tuple[int, ...]
    factors_of: Callable[[Tensor], Tensor]
    square_scale: float | None
    has_aux: bool

    @property
    def n_groups(self) -> int:
        """G, the number of groups."""
        return max(self.groups, default=0) + 1

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.params[0].device if self.params else torch.device("cpu")

    def loss(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Any]:
        """What the loss of ``tensors`` is, and its aux, () if there is none."""
        params = optree.tree_unflatten(self.layout.treespec, self.params)
        out = self.loss_of(params, self.examples.rebuild(tensors))
        if not self.has_aux:
            return out, ()
        if not (isinstance(out, tuple) and len(cast("Any", out)) == 2):
            raise TypeError(f"with has_aux=True the loss must return (loss, aux), got {type(out)}")
        return cast("tuple[Any, Any]", out)

    def with_names(self, text: str) -> str:
        """``text`` with the names of parameters in place of their numbers in braces."""
        for number, name in enumerate(names_of(self.layout.treespec)):
            text = text.replace(f"{{{number}}}", name)
        return text


@dataclass(frozen=True, slots=True)
class ClippedSum:
    """What the engine returns.

    Attributes:
        sums: The weighted sum of per-example gradients, a float64 tensor for each leaf; views of
            flat ones.
        norms: L2 norm of each example's gradient before clipping, float64, one row per group of
            parameters and one column per example: [G, B]. An example whose gradient is NaN or
            infinite anywhere has norm infinity in every group.
        aux: What the loss returned beside the loss, one row per example; None for an empty batch.
        squares: The weighted sum of their squares, likewise; None unless asked for.
    """

    sums: list[Tensor]
    norms: Tensor
    aux: Any
    squares: list[Tensor] | None = None


def refuse_engine(engine: object) -> None:
    """Refuse a choice that there is no longer."""
    if engine is not None:
        raise TypeError(
            f"engine={engine!r} is gone: one engine is exact for every loss, so nothing needs to "
            "be chosen; leave it out. A loss of code that you do not trust is as safe as any other"
        )
