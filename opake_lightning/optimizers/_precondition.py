"""Stages that divide by the root of a second moment, one element at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import torch

from opake_lightning import _check
from opake_lightning._tree import Layout
from opake_lightning.optimizers._fused import Moment, Recipe
from opake_lightning.optimizers._second_moment import (
    Correction,
    SecondMomentState,
    correction,
    possible,
    ratio_bound,
)
from opake_lightning.optimizers._stage import Flats, Flow, Stage
from opake_lightning.optimizers.types import AdadeltaState

__all__ = ["precondition", "precondition_by_sum", "rectified_precondition", "scale_by_past_steps"]

# Below this an eps vanishes in float32, and a coordinate without a gradient becomes 0/0.
_SMALLEST = torch.finfo(torch.float32).tiny


def precondition(
    decay: float,
    eps: float,
    *,
    debias: bool = True,
    correct: bool = False,
    floor: float = 1e-6,
    relative_floor: float = 0.0,
    mean_decay: float = 0.0,
    slow_weight: float = 0.0,
) -> Stage:
    r"""Divide the direction by :math:`\sqrt{\hat v} + eps`, v an average of squared gradients.

    Args:
        decay: Of the average, in [0, 1).
        eps: Added after the square root; > 0.
        debias: Divide v by :math:`1 - decay^t` first.
        correct: Subtract from v what noise is expected to have added to it, and floor the result.
        floor: γ, the least that is left of a corrected v; > 0.
        relative_floor: r, the least that is left as a share of what was subtracted; at least 0.
        mean_decay: Of the debiased average of gradients that the direction is; 0 if it is the
            gradient itself.
        slow_weight: Weight of a slow average added to that.
    """
    return _Precondition(
        _check.fraction("beta2", decay, zero=True, one=False), _eps(eps), debias,
        correction(correct=correct, floor=floor, relative_floor=relative_floor),
        _check.fraction("mean_decay", mean_decay, zero=True, one=False),
        _check.non_negative("slow_weight", slow_weight),
    )  # fmt: skip


def rectified_precondition(
    decay: float,
    eps: float,
    *,
    correct: bool = False,
    floor: float = 1e-6,
    relative_floor: float = 0.0,
    mean_decay: float = 0.0,
) -> Stage:
    """Divide as :func:`precondition` does and rectify as RAdam does, once ρ > 5.

    Args:
        decay: Of the average, in [0, 1).
        eps: Added to the root of v before debiasing, as in ``torch.optim.RAdam``; > 0.
        correct: Subtract what is noise. The noise is counted from the first step on.
        floor: γ, the least that is left of a corrected v; > 0.
        relative_floor: r, the least that is left as a share of what was subtracted; at least 0.
        mean_decay: Of the debiased average of gradients that the direction is.
    """
    return _Rectified(
        _Precondition(
            _check.fraction("beta2", decay, zero=True, one=False), _eps(eps), True,
            correction(correct=correct, floor=floor, relative_floor=relative_floor),
            _check.fraction("mean_decay", mean_decay, zero=True, one=False),
            eps_is_debiased=True,
        )
    )  # fmt: skip


def precondition_by_sum(
    eps: float,
    *,
    init_value: float = 0.0,
    correct: bool = False,
    floor: float = 1e-6,
    relative_floor: float = 0.0,
) -> Stage:
    r"""Divide the direction by :math:`\sqrt{s} + eps`, s the sum of all squared gradients.

    Args:
        eps: Added after the square root; > 0.
        init_value: What the sum starts from; at least 0.
        correct: Subtract the sum of the noise's variances, and floor the result.
        floor: γ, the least that is left of a corrected sum; > 0.
        relative_floor: r, the least that is left as a share of what was subtracted; at least 0.
    """
    return _PreconditionBySum(
        _eps(eps),
        _check.non_negative("initial_accumulator_value", init_value),
        correction(correct=correct, floor=floor, relative_floor=relative_floor),
    )


def scale_by_past_steps(
    decay: float,
    eps: float,
    *,
    correct: bool = False,
    floor: float = 1e-6,
    relative_floor: float = 1.0,
) -> Stage:
    r"""Adadelta's step, :math:`\sqrt{d + eps} / \sqrt{v + eps}` times the gradient.

    Args:
        decay: ρ, of the averages v of squared gradients and d of squared steps; in [0, 1).
        eps: Added before both square roots; > 0.
        correct: Subtract from both what noise is expected to have added to them. v is floored, d
            at zero: it is in the numerator, where ``eps`` alone is what Adadelta starts from.
        floor: γ, the least that is left of a corrected v; > 0.
        relative_floor: r, the least that is left as a share of what was subtracted; at least 0.
    """
    return _ScaleByPastSteps(
        _check.fraction("rho", decay, zero=True, one=False), _eps(eps),
        correction(correct=correct, floor=floor, relative_floor=relative_floor),
    )  # fmt: skip


def _eps(eps: float) -> float:
    eps = _check.positive("eps", eps)
    if not eps >= _SMALLEST:
        raise ValueError(f"eps must be >= {_SMALLEST:.3g}, which is float32's least, got {eps!r}")
    return eps


def _stepped(state: SecondMomentState, flow: Flow, *, keep: float, add: float) -> SecondMomentState:
    """``state`` after this step's gradient, or after its squares where they were released."""
    if flow.square is None:
        return state.step(flow.gradient, flow.variance, keep=keep, add=add)
    return state.step(flow.square, 0.0, keep=keep, add=add, squared=True, signed=True)


def _divided(directions: Flats, squares: Flats, eps: float) -> Flats:
    roots = [torch.sqrt(square).add_(eps) for square in squares]
    return [torch.div(d, root, out=root) for d, root in zip(directions, roots, strict=True)]


@final
@dataclass(frozen=True, slots=True)
class _Precondition(Stage):
    decay: float
    eps: float
    debias: bool
    correction: Correction
    mean_decay: float
    slow_weight: float = 0.0
    eps_is_debiased: bool = False
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> SecondMomentState:
        return SecondMomentState(layout.zeros(), 0.0)

    @property
    def on_square(self) -> Literal["uses", "corrects"]:
        return "corrects" if self.correction.on else "uses"

    @property
    def reads_gradient(self) -> bool:
        return True

    def update(self, flow: Flow, state: SecondMomentState) -> SecondMomentState:
        state = _stepped(state, flow, keep=self.decay, add=1 - self.decay)
        weight, eps = self._weight_and_eps(flow.step)
        squares = state.denoised(self.correction, weight)
        if state.signed:
            squares = possible(squares, flow.direction, self._ratio_bound(flow.step + 1))
        flow.direction = _divided(flow.direction, squares, eps)
        return state

    def fuse(self, recipe: Recipe, state: SecondMomentState) -> SecondMomentState:
        keep, add = self.decay, 1 - self.decay
        noise = state.noise_after(recipe.variance, keep=keep, add=add)
        weight, eps = self._weight_and_eps(recipe.step)
        recipe.enter("moment")
        recipe.possible &= not state.signed
        recipe.moment = Moment(
            state.square, keep, add, weight, recipe.step + 1 if self.debias else math.inf, eps,
            noise=noise if self.correction.on else 0.0,
            least=self.correction.least(noise / weight),
        )  # fmt: skip
        return replace(state, noise=noise)

    def _weight_and_eps(self, step: int) -> tuple[float, float]:
        weight = 1 - self.decay ** (step + 1) if self.debias else 1.0
        return weight, self.eps / math.sqrt(weight) if self.eps_is_debiased else self.eps

    def _ratio_bound(self, n: int) -> float:
        fast = ratio_bound(self.mean_decay, self.decay, n, debias=self.debias)
        # A slow average outlives v, so no bound holds for it; gradients that last give this one.
        return (math.sqrt(fast) + self.slow_weight) ** 2


@final
@dataclass(frozen=True, slots=True)
class _Rectified(Stage):
    divide: _Precondition
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> SecondMomentState:
        return self.divide.init(layout, params)

    @property
    def on_square(self) -> Literal["uses", "corrects"]:
        return self.divide.on_square

    @property
    def reads_gradient(self) -> bool:
        return True

    def update(self, flow: Flow, state: SecondMomentState) -> SecondMomentState:
        direction = flow.direction
        state = self.divide.update(flow, state)
        rectification = _rectification(self.divide.decay, flow.step + 1)
        if rectification is None:
            flow.direction = direction
        else:
            flow.direction = [d.mul_(rectification) for d in flow.direction]
        return state

    def fuse(self, recipe: Recipe, state: SecondMomentState) -> SecondMomentState:
        state = self.divide.fuse(recipe, state)
        rectification = _rectification(self.divide.decay, recipe.step + 1)
        if rectification is None or recipe.moment is None:
            recipe.possible = False
        else:
            recipe.moment = replace(recipe.moment, gain=rectification)
        return state


def _rectification(decay: float, n: int) -> float | None:
    """RAdam's r after ``n`` steps; None while the variance of 1/√v is not finite enough."""
    end = 2 / (1 - decay) - 1
    rho = end - 2 * n * decay**n / (1 - decay**n)
    if not rho > 5:
        return None
    return math.sqrt((rho - 4) * (rho - 2) * end / ((end - 4) * (end - 2) * rho))


@final
@dataclass(frozen=True, slots=True)
class _PreconditionBySum(Stage):
    eps: float
    init_value: float
    correction: Correction
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> SecondMomentState:
        return SecondMomentState([flat.fill_(self.init_value) for flat in layout.zeros()], 0.0)

    @property
    def reads_gradient(self) -> bool:
        return True

    def update(self, flow: Flow, state: SecondMomentState) -> SecondMomentState:
        state = state.step(flow.gradient, flow.variance, keep=1.0, add=1.0)
        flow.direction = _divided(flow.direction, state.denoised(self.correction), self.eps)
        return state

    def fuse(self, recipe: Recipe, state: SecondMomentState) -> SecondMomentState:
        noise = state.noise_after(recipe.variance, keep=1.0, add=1.0)
        recipe.enter("moment")
        recipe.moment = Moment(
            state.square, 1.0, 1.0, 1.0, 1.0, self.eps,
            noise=noise if self.correction.on else 0.0,
            least=self.correction.least(noise),
        )  # fmt: skip
        return replace(state, noise=noise)


@final
@dataclass(frozen=True, slots=True)
class _ScaleByPastSteps(Stage):
    decay: float
    eps: float
    correction: Correction
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> AdadeltaState:
        return AdadeltaState(layout.zeros(), 0.0, False, layout.zeros(), layout.zeros())

    @property
    def on_square(self) -> Literal["uses", "corrects"]:
        return "corrects" if self.correction.on else "uses"

    @property
    def reads_gradient(self) -> bool:
        return True

    def update(self, flow: Flow, state: AdadeltaState) -> AdadeltaState:
        keep, add = self.decay, 1 - self.decay
        seen = SecondMomentState(state.square, state.noise, state.signed)
        seen = _stepped(seen, flow, keep=keep, add=add)
        below = seen.denoised(self.correction)
        if seen.signed:
            bound = ratio_bound(0.0, self.decay, flow.step + 1, debias=False)
            below = possible(below, flow.direction, bound)
        # Corrected or not, the noise in d is zero as long as none came in.
        noisy = self.correction.on and seen.noise > 0
        past = SecondMomentState(state.step_square, state.step_noise if noisy else 0.0)
        above = past.denoised(replace(self.correction, floor=0.0))
        factors = [
            torch.add(a, self.eps).div_(torch.add(b, self.eps)).sqrt_()
            for a, b in zip(above, below, strict=True)
        ]
        flow.direction = [d * factor for d, factor in zip(flow.direction, factors, strict=True)]
        # A factor of 0 times an infinite variance would be NaN, so σ goes in before the square.
        stddev = math.sqrt(flow.variance)
        roots = [factor.mul_(stddev) for factor in factors] if noisy else 0.0
        past.step(flow.direction, roots, keep=keep, add=add)
        return replace(state, noise=seen.noise, signed=seen.signed)
