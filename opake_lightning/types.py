"""What flows between the parts: gradients that are private, and gradients that are released.

The scale of the noise travels with the gradients. A clipping function returns a
:class:`ClippedPytree`, which knows how far one example can move it; a noise mechanism turns that
into a :class:`NoisedPytree`, which knows how much noise it carries. The two are siblings, so that
code which takes the released kind can never be handed the private kind by inheritance. The pairs
are what the two become when the squares of the gradient are to be released along with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = [
    "ClippedPytree",
    "NoisedPytree",
    "SecondMomentClippedPytree",
    "SecondMomentNoiseOutput",
]


def _is_not_a_tensor(value: object, attribute: str, advice: str) -> NoReturn:
    raise AttributeError(
        f"{type(value).__name__!r} object has no attribute {attribute!r}: it wraps the pytree of "
        f"tensors; {advice}"
    )


@dataclass(frozen=True, slots=True, eq=False)
class ClippedPytree:
    """A sum of clipped per-example gradients. Private: it carries no noise yet.

    Attributes:
        pytree: The sum, one tensor per parameter, float32 or wider; divided by the expected batch
            size if the clipping function was told one.
        sensitivity: Largest L2 distance that adding or removing one example can move ``pytree``
            by, in its own units: the clipping norm, divided by whatever ``pytree`` was divided by.
    """

    pytree: Any
    sensitivity: float

    def __getattr__(self, name: str) -> NoReturn:
        _is_not_a_tensor(self, name, "add noise first, or use .pytree for a non-private run")


@dataclass(frozen=True, slots=True, eq=False)
class NoisedPytree:
    """A released gradient: a clipped sum with noise on every coordinate.

    Attributes:
        pytree: The noisy sum, one tensor per parameter.
        noise_stddev: Standard deviation of the noise on each coordinate, in the units of
            ``pytree``; what a noise-aware optimizer corrects its second moment by.
    """

    pytree: Any
    noise_stddev: float

    def __getattr__(self, name: str) -> NoReturn:
        _is_not_a_tensor(
            self,
            name,
            "put this library's optimizer first in a torchopt.chain, or pass .pytree (which drops "
            "the noise level, so nothing after it can correct for noise)",
        )


@dataclass(frozen=True, slots=True, eq=False)
class SecondMomentClippedPytree:
    """A clipped gradient and what its squares are to be made from. Private: no noise yet.

    Exactly one of ``square`` and ``projection_radius`` is given; it tells what is squared. The
    square of the whole gradient can only be taken where the gradient is whole, after the sum over
    ranks; so the noise mechanism takes it, and until then there is only the radius.

    Attributes:
        gradient: The sum of clipped per-example gradients.
        square: The sum of their elementwise squares, in the same structure, divided like
            ``gradient``; None if the aggregate is to be squared.
        projection_radius: L2 norm, in the units of ``gradient``, to which the aggregate is
            projected before it is squared; None if ``square`` is given.

    Raises:
        ValueError: If both or none of ``square`` and ``projection_radius`` are given.
    """

    gradient: ClippedPytree
    square: ClippedPytree | None = None
    projection_radius: float | None = None

    def __post_init__(self) -> None:
        """Check that the form of the squares is known."""
        if (self.square is None) == (self.projection_radius is None):
            raise ValueError(
                "give either square (squares of single examples) or projection_radius (square of "
                "the aggregate)"
            )

    def __getattr__(self, name: str) -> NoReturn:
        _is_not_a_tensor(
            self, name, "add noise first, or use .gradient.pytree for a non-private run"
        )


@dataclass(frozen=True, slots=True, eq=False)
class SecondMomentNoiseOutput:
    """A released gradient and a released estimate of its squares, each with its own noise.

    Attributes:
        gradient: The noisy gradient.
        square: The noisy squares, in the same structure and in squared units of the gradient.
            Where the noise exceeds the square, an element is negative.
    """

    gradient: NoisedPytree
    square: NoisedPytree

    def __getattr__(self, name: str) -> NoReturn:
        _is_not_a_tensor(
            self,
            name,
            "put an optimizer of this library that takes second moments first in a "
            "torchopt.chain, or pass .gradient to one that does not",
        )
