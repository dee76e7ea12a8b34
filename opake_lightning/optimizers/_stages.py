"""The stages that optimizers are chains of.

Each function checks its settings and returns a stage, or None where they make it do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from opake_lightning import _check
from opake_lightning._tree import Layout
from opake_lightning.optimizers._fused import Momentum, Recipe
from opake_lightning.optimizers._stage import Flats, Flow, Stage
from opake_lightning.optimizers.types import MeanState, TraceState
from opake_lightning.scheduling import ScalarOrSchedule, Schedule, as_schedule

__all__ = [
    "add_decayed_weights",
    "add_slow_ema",
    "clip_update_rms",
    "ema",
    "interpolated_sign",
    "scale_by_learning_rate",
    "scale_by_parameter_rms",
    "trace",
]


def add_decayed_weights(weight_decay: float, *, coupled: bool) -> Stage | None:
    """Add ``weight_decay`` · parameters.

    Args:
        weight_decay: At least 0; 0 is no stage.
        coupled: Add to the gradient, so that later stages see it as part of it (L2 regularization);
            otherwise only to the direction. It is no noise: the noise level stays as it is.
    """
    weight_decay = _check.non_negative("weight_decay", weight_decay)
    return _AddDecayedWeights(weight_decay, coupled) if weight_decay else None


def ema(decay: float) -> Stage:
    r"""Debiased exponential average, :math:`\hat m = m / (1 - decay^t)`.

    Args:
        decay: In [0, 1).
    """
    return _Ema(_check.fraction("beta1", decay, zero=True, one=False))


def add_slow_ema(alpha: Schedule, decay: Schedule) -> Stage:
    r"""Add :math:`\alpha_t m_t` of a slow average of gradients, which is not debiased.

    Args:
        alpha: Its weight, as a function of the step (0 at the first).
        decay: Its decay, likewise, in [0, 1).
    """
    return _AddSlowEma(alpha, decay)


def interpolated_sign(look: float, decay: float) -> Stage:
    r"""Lion's direction, :math:`\mathrm{sign}(look\, m + (1 - look)\, g)`.

    Args:
        look: In [0, 1): weight of the average in the direction.
        decay: In [0, 1): decay of the average m, which takes g in afterwards.
    """
    return _InterpolatedSign(
        _check.fraction("beta1", look, zero=True, one=False),
        _check.fraction("beta2", decay, zero=True, one=False),
    )


def trace(momentum: float, *, dampening: float = 0.0, nesterov: bool = False) -> Stage | None:
    r"""SGD's momentum, :math:`b \leftarrow momentum\, b + (1 - dampening)\, g`.

    The first b is g itself, undampened, as in ``torch.optim.SGD``.

    Args:
        momentum: At least 0; 0 is no stage.
        dampening: Share of each later gradient that is left out.
        nesterov: Pass on :math:`g + momentum\, b` in place of b. Takes a momentum > 0 and no
            dampening.
    """
    momentum = _check.non_negative("momentum", momentum)
    dampening = _check.fraction("dampening", dampening, zero=True, one=True)
    if nesterov and (momentum == 0 or dampening != 0):
        raise ValueError(
            f"nesterov=True needs momentum > 0 and dampening = 0, got momentum={momentum!r} and "
            f"dampening={dampening!r}"
        )
    return _Trace(momentum, dampening, nesterov) if momentum else None


def clip_update_rms(limit: float | None, *, per_tensor: bool = False) -> Stage | None:
    """Divide the direction by max(1, RMS / ``limit``).

    Args:
        limit: Largest root mean square that passes unchanged, > 0; None is no stage.
        per_tensor: Take one root mean square for each tensor, not one for the whole model.
    """
    if limit is None:
        return None
    return _ClipUpdateRms(_check.positive("update_rms_clip", limit), per_tensor)


def scale_by_parameter_rms(least: float, why: str = "scale_parameter=True") -> Stage:
    """Multiply the direction of each tensor by max(``least``, RMS of the parameters in it).

    Args:
        least: So that a tensor that starts at zero can move; > 0.
        why: The setting that makes this stage part of the chain, for an error.
    """
    return _ScaleByParameterRms(_check.positive("eps[1]", least), why)


def scale_by_learning_rate(lr: ScalarOrSchedule) -> Stage:
    """Multiply by -``lr``: the update is what is added to the parameters.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
    """
    return _ScaleByLearningRate(as_schedule("lr", lr))


@final
@dataclass(frozen=True, slots=True)
class _AddDecayedWeights(Stage):
    weight_decay: float
    coupled: bool

    @property
    def needs_params(self) -> str:
        return f"weight_decay={self.weight_decay!r}"

    @property
    def reads_gradient(self) -> bool:
        return self.coupled

    def update(self, flow: Flow, state: Any) -> None:
        assert flow.params is not None  # the chain has seen to it
        direction = [
            torch.add(d, p, alpha=self.weight_decay)
            for d, p in zip(flow.direction, flow.params, strict=True)
        ]
        if self.coupled:
            if flow.square is not None:
                # (g + λp)² = g² + λp (2g + λp), of which only g² was released on its own.
                gradient = zip(flow.gradient, direction, strict=True)
                flow.square = [
                    torch.addcmul(s, p, torch.add(g, d), value=self.weight_decay)
                    for s, p, (g, d) in zip(flow.square, flow.params, gradient, strict=True)
                ]
            flow.gradient = direction
        flow.direction = direction

    def fuse(self, recipe: Recipe, state: Any) -> None:
        if self.coupled:
            recipe.enter("l2")
            recipe.l2 = self.weight_decay
        else:
            recipe.enter("decay")
            recipe.decay = self.weight_decay


@final
@dataclass(frozen=True, slots=True)
class _Ema(Stage):
    decay: float
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> MeanState:
        return MeanState(layout.zeros())

    def update(self, flow: Flow, state: MeanState) -> MeanState:
        weight = 1 - self.decay ** (flow.step + 1)
        for mean, d in zip(state.mean, flow.direction, strict=True):
            mean.lerp_(d, 1 - self.decay)
        flow.direction = [mean / weight for mean in state.mean]
        return state

    def fuse(self, recipe: Recipe, state: MeanState) -> MeanState:
        recipe.enter("mean")
        recipe.mean, recipe.mean_decay = state.mean, self.decay
        return state


@final
@dataclass(frozen=True, slots=True)
class _AddSlowEma(Stage):
    alpha: Schedule
    decay: Schedule
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> MeanState:
        return MeanState(layout.zeros())

    @property
    def reads_gradient(self) -> bool:
        return True

    def update(self, flow: Flow, state: MeanState) -> MeanState:
        alpha, decay = self.alpha(flow.step), self.decay(flow.step)
        for mean, g in zip(state.mean, flow.gradient, strict=True):
            mean.lerp_(g, 1 - decay)
        flow.direction = [
            torch.add(d, mean, alpha=alpha)
            for d, mean in zip(flow.direction, state.mean, strict=True)
        ]
        return state


@final
@dataclass(frozen=True, slots=True)
class _InterpolatedSign(Stage):
    look: float
    decay: float
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> MeanState:
        return MeanState(layout.zeros())

    def update(self, flow: Flow, state: MeanState) -> MeanState:
        direction: Flats = []
        for mean, d in zip(state.mean, flow.direction, strict=True):
            direction.append(torch.lerp(d, mean, self.look).sign_())
            mean.lerp_(d, 1 - self.decay)
        flow.direction = direction
        return state


@final
@dataclass(frozen=True, slots=True)
class _Trace(Stage):
    momentum: float
    dampening: float
    nesterov: bool
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> TraceState:
        return TraceState(layout.zeros())

    def update(self, flow: Flow, state: TraceState) -> TraceState:
        share = 1.0 if flow.step == 0 else 1 - self.dampening
        for buffer, d in zip(state.trace, flow.direction, strict=True):
            buffer.mul_(self.momentum).add_(d, alpha=share)
        direction = state.trace
        if self.nesterov:
            direction = [
                torch.add(d, buffer, alpha=self.momentum)
                for d, buffer in zip(flow.direction, state.trace, strict=True)
            ]
        flow.direction = direction
        return state

    def fuse(self, recipe: Recipe, state: TraceState) -> TraceState:
        recipe.enter("momentum")
        recipe.momentum = Momentum(state.trace, self.momentum, self.dampening, self.nesterov)
        return state


@final
@dataclass(frozen=True, slots=True)
class _ClipUpdateRms(Stage):
    limit: float
    per_tensor: bool
    whole: ClassVar[bool] = True

    def update(self, flow: Flow, state: Any) -> None:
        if self.per_tensor:
            for leaf in flow.layout.views(flow.direction):
                leaf.div_((_rms(leaf) / self.limit).clamp_(min=1))
            return
        n = sum(d.numel() for d in flow.direction)
        if not n:
            return
        norms = [torch.linalg.vector_norm(d) for d in flow.direction]
        norm = torch.linalg.vector_norm(torch.stack([x.to(norms[0]) for x in norms]))
        # Stays a tensor: a Python number would make the device wait.
        flow.divisor = (norm / (n**0.5 * self.limit)).clamp_(min=1)


@final
@dataclass(frozen=True, slots=True)
class _ScaleByParameterRms(Stage):
    least: float
    why: str
    whole: ClassVar[bool] = True

    @property
    def needs_params(self) -> str:
        return self.why

    def update(self, flow: Flow, state: Any) -> None:
        assert flow.params is not None  # the chain has seen to it
        params = flow.layout.views(flow.params)
        for leaf, param in zip(flow.layout.views(flow.direction), params, strict=True):
            leaf.mul_(_rms(param).clamp_(min=self.least))


def _rms(leaf: Tensor) -> Tensor:
    return torch.linalg.vector_norm(leaf) / max(leaf.numel(), 1) ** 0.5


@final
@dataclass(frozen=True, slots=True)
class _ScaleByLearningRate(Stage):
    rate: Schedule

    @property
    def schedule(self) -> Schedule:
        return self.rate

    def update(self, flow: Flow, state: Any) -> None:
        flow.scale = -flow.lr

    def fuse(self, recipe: Recipe, state: Any) -> None:
        recipe.enter("lr")
