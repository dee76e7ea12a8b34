"""The states of the optimizers: frozen dataclasses of pytrees and Python numbers.

The state of a whole optimizer is a dictionary: ``"step"``, the number of updates so far, and one of
these for each stage that remembers something, under the stage's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from opake_lightning.optimizers._second_moment import SecondMomentState

__all__ = ["MeanState", "SecondMomentState", "TraceState"]


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
