r"""The second moment of released gradients, and the part of it that is noise.

A released gradient is :math:`\tilde g = g + \xi` with :math:`\xi \sim N(0, \sigma^2)`, so
:math:`E[\tilde g^2] = g^2 + \sigma^2`. Every accumulator of squares is linear,

.. math:: v \leftarrow a\,v + b\,\tilde g^2 ,

and so the expected share of the noise in it obeys the same recursion:

.. math:: \varphi \leftarrow a\,\varphi + b\,\sigma^2 , \qquad E[v] - \varphi =
          \text{what } v \text{ would be without noise.}

This holds for an average (:math:`a=\beta_2, b=1-\beta_2`), for a running sum (:math:`a=b=1`), and
for a :math:`\sigma` that changes from step to step. Debiasing divides both by the same weight.

The difference is an estimate and can be negative; it is floored,
:math:`\hat v \leftarrow \max(\hat v - \hat\varphi, \gamma)`. While no noise has come in
(:math:`\varphi = 0`) there is nothing to subtract and nothing is floored: the optimizer is then
exactly the one without correction.

Source: Tang, Lécuyer et al. (arXiv:2312.14334); Chooi et al. (arXiv:2511.07843), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["SecondMomentState"]


@final
@dataclass(frozen=True, slots=True)
class SecondMomentState:
    """Accumulated squares and the noise in them.

    Attributes:
        square: Pytree like the parameters: v, before debiasing.
        noise: φ, what noise is expected to have put into every element of ``square``. Kept up
            whether or not the correction is on, so that it can be switched on later.
    """

    square: Any
    noise: float

    def step(
        self, squares: Sequence[Tensor], variance: float, *, keep: float, add: float
    ) -> SecondMomentState:
        """``keep`` · old + ``add`` · new, for the squares (in place) and for the noise alike."""
        for total, new in zip(self.square, squares, strict=True):
            total.mul_(keep).add_(new, alpha=add)
        return SecondMomentState(self.square, keep * self.noise + add * variance)

    def denoised(self, *, correct: bool, floor: float, weight: float = 1.0) -> list[Tensor]:
        """The squares in new tensors: divided by ``weight``, noise taken off if ``correct``."""
        if not correct or self.noise == 0:
            return [total / weight for total in self.square]
        # Squares that overflowed stay infinite (no update) where inf - inf would be NaN.
        return [
            total.sub(min(self.noise, torch.finfo(total.dtype).max)).div_(weight).clamp_(min=floor)
            for total in self.square
        ]
