"""What a recorder keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from opake_lightning.dpsgd.clipping._gradients import Gradients

__all__ = ["Computed", "Unsupported", "Use"]


class Unsupported(Exception):  # noqa: N818  (nothing is wrong, another engine is right)
    """The loss does something that this engine has no exact way for."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A parameter: a leaf, or a tensor computed of leaves and constants.

    Attributes:
        tensor: The tensor. Kept, so that no other gets its id.
        leaves: Numbers of the leaves that it depends on.
        isometric: Whether it holds elements of one leaf, each at most once.
    """

    tensor: Tensor
    leaves: frozenset[int]
    isometric: bool


@dataclass(frozen=True, slots=True)
class Use:
    """One operation with parameters in it.

    Attributes:
        name: Of the operation.
        gradients: For each parameter in it, how to get the examples' gradients from the gradient
            of the output.
        inputs: Tensors that this needs, with the version each had.
        axis: Where the examples are.
    """

    name: str
    gradients: tuple[tuple[Computed, Callable[[Tensor], Gradients]], ...]
    inputs: tuple[tuple[Tensor, int], ...]
    axis: int
