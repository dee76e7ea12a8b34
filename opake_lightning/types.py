"""What flows between the parts: gradients that are private, and gradients that are released.

The scale of the noise travels with the gradients. A clipping function returns a
:class:`ClippedPytree`, which knows how far one example can move it; a noise mechanism turns that
into a :class:`NoisedPytree`, which knows how much noise it carries. The two are siblings, so that
code which takes the released kind can never be handed the private kind by inheritance. The pairs
are what the two become when the squares of the gradient are to be released along with it.
:class:`PerGroup` is what a clipping function takes in place of one norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from opake_lightning import _check

__all__ = [
    "ClipReport",
    "ClippedPytree",
    "NoisedPytree",
    "PerGroup",
    "SecondMomentClippedPytree",
    "SecondMomentNoiseOutput",
]


def _is_not_a_tensor(value: object, attribute: str, advice: str) -> NoReturn:
    raise AttributeError(
        f"{type(value).__name__!r} object has no attribute {attribute!r}: it wraps the pytree of "
        f"tensors; {advice}"
    )


@dataclass(frozen=True, slots=True)
class PerGroup:
    """Groups of parameters, each clipped to a norm of its own.

    :func:`~opake_lightning.dpsgd.clipping.per_group` and
    :func:`~opake_lightning.dpsgd.clipping.per_layer` make it, and say how patterns match.

    Guarantee: with the parts of a gradient within these bounds, its norm over all parameters is at
    most ``sensitivity``.

    Attributes:
        groups: Per group: its patterns, and the bound C_k, in units of the gradient.
        default: Bound of one more group, of all parameters that no pattern matches; None allows no
            such parameters.

    Raises:
        ValueError: If a bound is not finite and > 0, a group has no pattern, or a pattern has an
            empty part or is given twice.
    """

    groups: tuple[tuple[tuple[str, ...], float], ...]
    default: float | None = None

    def __post_init__(self) -> None:
        """Check patterns and bounds."""
        patterns = [pattern for group, _ in self.groups for pattern in group]
        for group, bound in self.groups:
            if not group:
                raise ValueError(f"the group with bound {bound!r} has no pattern, so no parameters")
            _check.positive(f"the bound of {', '.join(map(repr, group))}", bound)
        for index, pattern in enumerate(patterns):
            if not isinstance(pattern, str):
                raise TypeError(
                    f"a pattern is a parameter's path or its beginning, got {pattern!r}"
                )
            if not all(pattern.split(".")):
                raise ValueError(
                    f"the pattern {pattern!r} has an empty part; write 'layers.1' for all "
                    "parameters below layers.1"
                )
            if pattern in patterns[:index]:
                raise ValueError(f"the pattern {pattern!r} is given twice")
        if self.default is not None:
            _check.positive("default", self.default)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The bounds C_k in the order of the groups, that of the default last."""
        default = () if self.default is None else (self.default,)
        return (*(bound for _, bound in self.groups), *default)

    @property
    def sensitivity(self) -> float:
        """√ΣC_k², the L2 bound on a gradient over all groups."""
        return math.hypot(*self.bounds)


@dataclass(frozen=True, slots=True, eq=False)
class ClipReport:
    """What clipping saw. Not private: for diagnostics only.

    Attributes:
        norms: Norms before clipping of the examples of this rank, float64, [groups, examples];
            infinite where a gradient was NaN or infinite and contributed zero.
        bounds: The bound that each group was clipped to.
    """

    norms: Tensor
    bounds: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ClippedPytree:
    """A sum of clipped per-example gradients. Private: it carries no noise yet.

    Attributes:
        pytree: The sum, one tensor per parameter, float32 or wider; divided by the expected batch
            size if the clipping function was told one. In float64, whatever type the parameters
            have, so that no row of a large batch moves it by more than ``sensitivity``: in float32,
            20,000 equal rows lose 4e-4 of one.
        sensitivity: Largest L2 distance that adding or removing one example can move ``pytree``
            by, in its own units: the clipping norm, divided by whatever ``pytree`` was divided by.
        report: What clipping saw, if it told; it never reaches what is released.
        dtypes: The type that each leaf is rounded to once it has its noise, in leaf order. None
            keeps that of ``pytree``, or float32 if that is narrower.
    """

    pytree: Any
    sensitivity: float
    report: ClipReport | None = None
    dtypes: tuple[torch.dtype, ...] | None = None

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
