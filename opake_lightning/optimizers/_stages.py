"""The stages that optimizers are chains of.

Each function checks its settings and returns a stage, or None where they make it do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch

from opake_lightning import _check
from opake_lightning._tree import Layout
from opake_lightning.optimizers._chain import Flow, Stage
from opake_lightning.optimizers._second_moment import SecondMomentState
from opake_lightning.optimizers.types import MeanState, TraceState
from opake_lightning.scheduling import ScalarOrSchedule, Schedule, as_schedule

__all__ = [
    "add_decayed_weights",
    "clip_update_rms",
    "ema",
    "precondition",
    "scale_by_learning_rate",
    "trace",
]

# Below this an eps vanishes in float32, and a coordinate without a gradient becomes 0/0.
_SMALLEST = torch.finfo(torch.float32).tiny


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


def precondition(
    decay: float,
    eps: float,
    *,
    debias: bool = True,
    correct: bool = False,
    floor: float = 1e-6,
) -> Stage:
    r"""Divide the direction by :math:`\sqrt{\hat v} + eps`, v an average of squared gradients.

    Args:
        decay: Of the average, in [0, 1).
        eps: Added after the square root; > 0.
        debias: Divide v by :math:`1 - decay^t` first.
        correct: Subtract from v what noise is expected to have added to it, and floor the result.
        floor: γ, the least that is left of a corrected v; > 0.
    """
    eps = _check.positive("eps", eps)
    if not eps >= _SMALLEST:
        raise ValueError(f"eps must be >= {_SMALLEST:.3g}, which is float32's least, got {eps!r}")
    decay = _check.fraction("beta2", decay, zero=True, one=False)
    return _Precondition(decay, eps, debias, correct, _check.positive("noise_floor", floor))


def clip_update_rms(limit: float | None) -> Stage | None:
    """Divide the direction by max(1, RMS / ``limit``), RMS being over the whole model.

    Args:
        limit: Largest root mean square that passes unchanged, > 0; None is no stage.
    """
    return None if limit is None else _ClipUpdateRms(_check.positive("update_rms_clip", limit))


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

    def update(self, flow: Flow, state: Any) -> tuple[Flow, Any]:
        assert flow.params is not None  # the chain has seen to it
        direction = [
            torch.add(d, p, alpha=self.weight_decay)
            for d, p in zip(flow.direction, flow.params, strict=True)
        ]
        gradient = direction if self.coupled else flow.gradient
        return replace(flow, gradient=gradient, direction=direction), None


@final
@dataclass(frozen=True, slots=True)
class _Ema(Stage):
    decay: float
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout) -> MeanState:
        return MeanState(layout.zeros())

    def update(self, flow: Flow, state: MeanState) -> tuple[Flow, MeanState]:
        weight = 1 - self.decay ** (flow.step + 1)
        for mean, d in zip(state.mean, flow.direction, strict=True):
            mean.lerp_(d, 1 - self.decay)
        return replace(flow, direction=[mean / weight for mean in state.mean]), state


@final
@dataclass(frozen=True, slots=True)
class _Trace(Stage):
    momentum: float
    dampening: float
    nesterov: bool
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout) -> TraceState:
        return TraceState(layout.zeros())

    def update(self, flow: Flow, state: TraceState) -> tuple[Flow, TraceState]:
        share = 1.0 if flow.step == 0 else 1 - self.dampening
        for buffer, d in zip(state.trace, flow.direction, strict=True):
            buffer.mul_(self.momentum).add_(d, alpha=share)
        direction = state.trace
        if self.nesterov:
            direction = [
                torch.add(d, buffer, alpha=self.momentum)
                for d, buffer in zip(flow.direction, state.trace, strict=True)
            ]
        return replace(flow, direction=direction), state


@final
@dataclass(frozen=True, slots=True)
class _Precondition(Stage):
    decay: float
    eps: float
    debias: bool
    correct: bool
    floor: float
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout) -> SecondMomentState:
        return SecondMomentState(layout.zeros(), 0.0)

    def update(self, flow: Flow, state: SecondMomentState) -> tuple[Flow, SecondMomentState]:
        state = state.step(
            [g * g for g in flow.gradient], flow.variance, keep=self.decay, add=1 - self.decay
        )
        weight = 1 - self.decay ** (flow.step + 1) if self.debias else 1.0
        squares = state.denoised(correct=self.correct, floor=self.floor, weight=weight)
        direction = [
            torch.div(d, square.sqrt_().add_(self.eps), out=square)
            for d, square in zip(flow.direction, squares, strict=True)
        ]
        return replace(flow, direction=direction), state


@final
@dataclass(frozen=True, slots=True)
class _ClipUpdateRms(Stage):
    limit: float

    def update(self, flow: Flow, state: Any) -> tuple[Flow, Any]:
        n = sum(d.numel() for d in flow.direction)
        if not n:
            return flow, None
        norms = [torch.linalg.vector_norm(d) for d in flow.direction]
        norm = torch.linalg.vector_norm(torch.stack([x.to(norms[0]) for x in norms]))
        # Stays a tensor: a Python number would make the device wait.
        factor = (norm / (n**0.5 * self.limit)).clamp_(min=1)
        return replace(flow, direction=[d / factor.to(d) for d in flow.direction]), None


@final
@dataclass(frozen=True, slots=True)
class _ScaleByLearningRate(Stage):
    rate: Schedule

    @property
    def schedule(self) -> Schedule:
        return self.rate

    def update(self, flow: Flow, state: Any) -> tuple[Flow, Any]:
        return replace(flow, direction=[d * -flow.lr for d in flow.direction]), None
