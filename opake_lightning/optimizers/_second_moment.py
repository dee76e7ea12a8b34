r"""The second moment of released gradients, and the part of it that is noise.

A released gradient is :math:`\tilde g = g + \xi` with :math:`\xi \sim N(0, \sigma^2)`, so
:math:`E[\tilde g^2] = g^2 + \sigma^2`. Every accumulator of squares is linear,

.. math:: v \leftarrow a\,v + b\,\tilde g^2 ,

and so the expected share of the noise in it obeys the same recursion:

.. math:: \varphi \leftarrow a\,\varphi + b\,\sigma^2 , \qquad E[v] - \varphi =
          \text{what } v \text{ would be without noise.}

This holds for an average (:math:`a=\beta_2, b=1-\beta_2`), for a running sum (:math:`a=b=1`), for
averages over rows and columns, for squares of something linear in :math:`\tilde g` (whose noise has
a variance of its own on every coordinate), and for a :math:`\sigma` that changes from step to step.
Debiasing divides both by the same weight.

The difference is an estimate and can be negative; it is floored,
:math:`\hat v \leftarrow \max(\hat v - \hat\varphi, \gamma, r\hat\varphi)`. While no noise has come
in (:math:`\varphi = 0`) there is nothing to subtract and nothing is floored: the optimizer is then
exactly the one without correction.

**Squares released on their own.** A :class:`~opake_lightning.types.SecondMomentNoiseOutput` brings
an estimate of :math:`g^2` with noise of its own, which takes the place of :math:`\tilde g^2`.
Nothing has to be subtracted then, but the average can be zero or negative. What it divides is an
average of gradients too, :math:`n = \sum_k w_k \tilde g_k`, and if :math:`\hat v` is
:math:`\sum_k u_k s_k` with weights :math:`u_k`, squares :math:`s_k = \tilde g_k^2` of real numbers
would make

.. math:: n^2 \le K \hat v, \qquad K = \sum_k w_k^2 / u_k

by Cauchy and Schwarz. Where :math:`\hat v` is below :math:`n^2 / K` it has no square root that
means anything, and :math:`n^2` stands in for it: the coordinate moves by the learning rate. So no
coordinate moves by more than :math:`\sqrt K` learning rates (7.3 for Adam's defaults), whatever
the squares are, and with exact squares nothing is changed.

Source: Tang, Lécuyer et al. (arXiv:2312.14334); Chooi et al. (arXiv:2511.07843), Algorithm 2;
Kalinin et al. (arXiv:2502.06597) for squares released on their own.
Departs from it: r and the stand-in are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from opake_lightning import _check

__all__ = ["Correction", "SecondMomentState", "correction", "possible", "ratio_bound"]

# Rounding must not make exact squares look impossible.
_SLACK = 0.99


@final
@dataclass(frozen=True, slots=True)
class Correction:
    """Whether and how noise is taken off a second moment."""

    on: bool
    floor: float
    relative: float

    def least(self, noise: float) -> float:
        """What a corrected second moment with ``noise`` in it is floored at."""
        return max(self.floor, self.relative * noise)


def correction(*, correct: bool, floor: float, relative_floor: float) -> Correction:
    """The checked settings of a correction.

    Args:
        correct: Whether noise is taken off.
        floor: γ, the least that is left; > 0.
        relative_floor: r, the least that is left as a share of what was taken off; at least 0.
    """
    return Correction(
        correct,
        _check.positive("noise_floor", floor),
        _check.non_negative("noise_floor_relative", relative_floor),
    )


@final
@dataclass(frozen=True, slots=True)
class SecondMomentState:
    """Accumulated squares and the noise in them.

    Attributes:
        square: Pytree like the parameters: v, before debiasing.
        noise: φ, what noise is expected to have put into every element of ``square``. Kept up
            whether or not the correction is on, so that it can be switched on later.
        signed: Whether squares that were released on their own, which can be negative, have gone
            into ``square``.
    """

    square: Any
    noise: Any
    signed: bool = False

    def step(
        self,
        news: Sequence[Tensor],
        variance: Any,
        *,
        keep: float,
        add: float,
        squared: bool = False,
        signed: bool = False,
    ) -> SecondMomentState:
        """``keep`` · old + ``add`` · new, for the squares (in place) and for the noise alike.

        Args:
            news: What is squared and added; with ``squared``, the squares themselves.
            variance: A number; or, where the noise is in flat tensors (changed in place), such of
                its root.
            keep: What is kept of the old.
            add: What is added of the new.
            squared: See ``news``.
            signed: Whether they are squares that were released on their own.
        """
        _accumulate(self.square, news, keep, add, squared=squared)
        noise = self.noise
        if isinstance(noise, float):
            noise = self.noise_after(variance, keep=keep, add=add)
        else:
            _accumulate(noise, variance, keep, add, squared=False)
        return SecondMomentState(self.square, noise, self.signed or signed)

    def noise_after(self, variance: float, *, keep: float, add: float) -> float:
        """φ after a step, where it is a number."""
        return keep * self.noise + add * variance

    def denoised(self, correction: Correction, weight: float = 1.0) -> list[Tensor]:
        """The squares, divided by ``weight`` and with noise taken off if that is on.

        They are in new tensors, unless nothing is to be done to them.
        """
        if not correction.on or (isinstance(self.noise, float) and not self.noise):
            return [total if weight == 1 else total / weight for total in self.square]
        if isinstance(self.noise, float):
            # Squares that overflowed stay infinite (no update) where inf - inf would be NaN.
            least = correction.least(self.noise / weight)
            noises = [min(self.noise, torch.finfo(total.dtype).max) for total in self.square]
        else:
            least, noises = correction.floor, self.noise
        out = [total.sub(noise) for total, noise in zip(self.square, noises, strict=True)]
        for left in out:
            if weight != 1:
                left.div_(weight)
            left.clamp_(min=min(least, torch.finfo(left.dtype).max))
        return out


def ratio_bound(mean_decay: float, decay: float, n: int, *, debias: bool) -> float:
    r"""K after ``n`` steps: how much larger than v the square of an average can be.

    Args:
        mean_decay: Of the debiased average that is squared.
        decay: Of the average of squares.
        n: Number of steps, at least 1.
        debias: Whether the average of squares is debiased.
    """
    if decay == 0:
        return 1.0 if mean_decay == 0 or n == 1 else _LARGEST
    q = mean_decay**2 / decay
    terms = float(n)
    if q != 1:
        terms = math.expm1(min(n * math.log(q), 700)) / (q - 1) if q else 1.0
    bound = (1 - mean_decay) ** 2 / (1 - decay) * terms / (1 - mean_decay**n) ** 2
    return min(bound * (1 - decay**n) if debias else bound, _LARGEST)


# Settings with which real squares put hardly any bound still get one: a hundred learning rates.
_LARGEST = 1e4


def possible(squares: list[Tensor], over: Sequence[Tensor], bound: float) -> list[Tensor]:
    """``squares``, with the square of ``over`` where theirs is not > that / ``bound``."""
    out: list[Tensor] = []
    for square, n in zip(squares, over, strict=True):
        stand_in = n * n
        out.append(torch.where(square > stand_in * (_SLACK / bound), square, stand_in))
    return out


def _accumulate(totals: Any, news: Any, keep: float, add: float, *, squared: bool) -> None:
    for total, new in zip(totals, news, strict=True):
        if keep != 1:
            total.mul_(keep)
        if squared:
            total.add_(new, alpha=add)
        else:
            total.addcmul_(new, new, value=add)
