"""What a stage is, and what passes from one to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias, final

from torch import Tensor

from opake_lightning._tree import Layout
from opake_lightning.optimizers._fused import Recipe
from opake_lightning.scheduling import Schedule

__all__ = ["Flats", "Flow", "Stage", "tree_fields"]

Flats: TypeAlias = list[Tensor]


@final
@dataclass(slots=True)
class Flow:
    """What passes from stage to stage in one update.

    A stage gives its attributes other tensors; it does not write into those that are there.

    Attributes:
        gradient: The released gradient, with coupled weight decay: what second moments square.
        direction: What has become of it so far; after the last stage, the update.
        variance: Of the noise on each coordinate of ``gradient``.
        square: The square of ``gradient``, if an estimate of it was released on its own.
        step: Number of updates before this one.
        lr: Learning rate of this step.
        params: The parameters, if a stage asked for them.
        layout: Where each leaf lies in the flat tensors.
        scale: The direction is to be multiplied by this, which is done before the next stage.
        divisor: The direction is to be divided by this, likewise.
    """

    gradient: Flats
    direction: Flats
    variance: float
    square: Flats | None
    step: int
    lr: float
    params: Flats | None
    layout: Layout
    scale: float = 1.0
    divisor: Tensor | None = None


class Stage(ABC):
    """One stage of a chain; its settings are its attributes, its state is passed in and out.

    In a state given to or returned by a stage, flat tensors stand in place of pytrees, and the
    stage may write into them.

    Attributes:
        stateful: Whether it keeps a state.
        whole: Whether it has to see the whole model. All others are given stretches of the flat
            tensors, one after the other, and must do the same on each. One that sees the whole may
            write into the direction, which is its own then.
    """

    __slots__ = ()
    stateful: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def init(self, layout: Layout, params: Any) -> Any:
        """The first state of a stateful stage, which shares no memory with ``params``."""
        return None

    def layouts(self, layout: Layout) -> Mapping[str, Layout]:
        """Layouts of the pytrees in its state that are not shaped like the parameters."""
        return {}

    def like_params(self, state: Any) -> Any:
        """A pytree shaped and typed like the parameters' flat tensors, from a closed state."""
        return getattr(state, tree_fields(state)[0])

    @property
    def needs_params(self) -> str:
        """The setting because of which parameters are needed, as the user typed it, or nothing."""
        return ""

    @property
    def reads_gradient(self) -> bool:
        """Whether it makes use of ``gradient`` or ``square`` of the flow, or changes them."""
        return False

    @property
    def on_square(self) -> Literal["ignores", "uses", "corrects"]:
        """What it does with squares that are released on their own.

        ``"corrects"`` is for a stage that would use them but takes noise off the square of the
        gradient instead.
        """
        return "ignores"

    @property
    def schedule(self) -> Schedule | None:
        """The learning rate as a function of the step, in the stage that applies it."""
        return None

    @abstractmethod
    def update(self, flow: Flow, state: Any) -> Any:
        """Do its part to ``flow``; returns the new state."""

    def fuse(self, recipe: Recipe, state: Any) -> Any:
        """Enter its part in ``recipe``, if a kernel could do it; returns the new state."""
        recipe.possible = False
        return state


def tree_fields(state: Any) -> list[str]:
    """Names of the fields of a stage's state that hold pytrees."""
    return [f.name for f in fields(state) if not isinstance(getattr(state, f.name), (int, float))]
