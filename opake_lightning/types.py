"""What flows between the parts: gradients that are private, and gradients that are released.

The scale of the noise travels with the gradients. A clipping function returns a
:class:`ClippedPytree`, which knows how far one example can move it; a noise mechanism turns that
into a :class:`NoisedPytree`, which knows how much noise it carries. The two are siblings, so that
code which takes the released kind can never be handed the private kind by inheritance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["ClippedPytree", "NoisedPytree"]


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
