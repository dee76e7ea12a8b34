"""Gradients of many leaves, looked at together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from opake_lightning.dpsgd.clipping._gradients import (
    Dense,
    Gradients,
    Outer,
    Places,
    as_float64,
    by_example,
)

__all__ = ["Alike"]

# One launch for all parameters.
_foreach_add_: Callable[..., None] = cast("Any", torch)._foreach_add_


@final
class Alike:
    """Gradients of several leaves that are of one :meth:`Gradients.kind`, looked at together.

    A network of hundreds of small layers spends its time on calls, not on numbers.
    """

    def __init__(self, members: Sequence[Gradients]) -> None:
        self.members = members
        self._all = self._stacked()

    def _stacked(self) -> Dense | Outer:
        """All members as one, leaf after leaf."""
        first, n = self.members[0], len(self.members)
        if isinstance(first, Outer):
            return Outer.of_all(cast("Sequence[Outer]", self.members))
        values = torch.stack([cast("Dense | Places", m).values for m in self.members])
        if isinstance(first, Dense):
            return Dense(values.flatten(0, 1))
        return Dense(by_example(values, n * first.size, first.shape).sum(1))

    def squared_norms(self) -> Tensor:
        """Squared L2 norms, float64, shape [members, size]."""
        return self._all.squared_norms().view(len(self.members), -1)

    def add_weighted(self, factors: Tensor, outs: Sequence[Tensor]) -> None:
        """Add each member's sum, weighted by its row of ``factors``, to its tensor of ``outs``."""
        n, one = len(self.members), self._all
        if isinstance(one, Dense):
            sums = torch.bmm(factors[:, None], as_float64(one.values).view(n, factors.shape[1], -1))
        else:
            a = as_float64(one.a) * factors.reshape(-1, 1, 1)
            a, b = (x.reshape(n, -1, x.shape[-1]) for x in (a, as_float64(one.b)))
            sums = torch.bmm(a.mT, b)
        _foreach_add_(list(outs), sums.view(n, *self.members[0].shape).unbind())
