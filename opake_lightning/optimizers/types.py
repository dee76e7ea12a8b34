"""The states of the optimizers: frozen dataclasses of pytrees and Python numbers.

The state of a whole optimizer is a dictionary: ``"step"``, the number of updates so far, and one of
these for each stage that remembers something, under the stage's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from opake_lightning.optimizers._second_moment import SecondMomentState

__all__ = [
    "AdadeltaState",
    "AverageState",
    "FactoredState",
    "MeanState",
    "ScheduleFreeState",
    "SecondMomentState",
    "TraceState",
]


@final
@dataclass(frozen=True, slots=True)
class MeanState:
    """An exponential average of gradients.

    Attributes:
        mean: Pytree like the parameters, before debiasing.
    """

    mean: Any


@final
@dataclass(frozen=True, slots=True)
class TraceState:
    """Momentum in the manner of SGD: a decaying sum.

    Attributes:
        trace: Pytree like the parameters.
    """

    trace: Any


@final
@dataclass(frozen=True, slots=True)
class AdadeltaState:
    """Averages of squared gradients and of squared steps, and the noise in them.

    Attributes:
        square: Pytree like the parameters: v, of gradients.
        noise: φ, what noise is expected to have put into every element of ``square``.
        signed: Whether squares that were released on their own have gone into ``square``.
        step_square: Pytree like the parameters: d, of steps before they are multiplied by the
            learning rate.
        step_noise: Pytree like the parameters: what noise is expected to have put into
            ``step_square``. Kept up while the correction is on.
    """

    square: Any
    noise: float
    signed: bool
    step_square: Any
    step_noise: Any


@final
@dataclass(frozen=True, slots=True)
class FactoredState:
    """Accumulated squares of which tensors of two dimensions or more keep averages only.

    Attributes:
        row: Pytree: averages over the last dimension, empty for a tensor that is not factored.
        col: Pytree: averages over the last but one, empty for a tensor that is not factored.
        square: Pytree: the squares of a tensor that is not factored, empty for one that is.
        noise: φ, what noise is expected to have put into every element of the three.
    """

    row: Any
    col: Any
    square: Any
    noise: float


@final
@dataclass(frozen=True, slots=True)
class AverageState:
    """The two sequences of a schedule-free optimizer.

    Attributes:
        x: Pytree like the parameters: the average, which is what to evaluate and publish.
        z: Pytree like the parameters: what the optimizer underneath moves.
        weight_sum: Sum of the weights in ``x``.
        max_lr: Largest learning rate so far.
    """

    x: Any
    z: Any
    weight_sum: float
    max_lr: float


@final
@dataclass(frozen=True, slots=True)
class ScheduleFreeState:
    """State of :func:`opake_lightning.optimizers.schedule_free`.

    Attributes:
        stages: As the state of any other optimizer: the count and the states of the stages, those
            of the optimizer underneath among them.
    """

    stages: dict[str, Any]

    @property
    def x(self) -> Any:
        """The averaged parameters, which are the ones to evaluate and publish; float32 or wider."""
        return self.stages["average"].x

    @property
    def z(self) -> Any:
        """The parameters that the optimizer underneath moves."""
        return self.stages["average"].z
