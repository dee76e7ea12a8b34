"""A rule: how large the gradients of an example may be, and how they are brought to that size."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from opake_lightning import _check
from opake_lightning.scheduling import Schedule, schedule_to_dict
from opake_lightning.types import PerGroup

__all__ = [
    "ClipState",
    "ClippingNorm",
    "Fixed",
    "Rule",
    "bounds_of",
    "check_steps",
    "describe",
    "rule_of",
    "scaled_down",
]

ClippingNorm: TypeAlias = float | PerGroup | Schedule

_FAR = 1 << 13  # how far an open-ended run's schedule is looked at


@dataclass(frozen=True, slots=True)
class ClipState:
    """State of a clipping function.

    Attributes:
        nonfinite_examples: How many examples so far had a gradient that was NaN or infinite and
            therefore contributed zero. Not private: it is exact.
        step: How many batches have been clipped so far, empty ones included; what a schedule of the
            clipping norm is asked about next.
        caution: How passes begin, as the loss has turned out to need it: 0, 1 with memory of their
            own for what it writes to, 2 also without rules. Sums round differently.
        microbatch_size: How many examples are differentiated at once, as chosen by what they
            take; 0 before that is known.
    """

    nonfinite_examples: int = 0
    step: int = 0
    caution: int = 0
    microbatch_size: int = 0


class Rule(ABC):
    """From the norms of an example's gradient, group by group, to the factors it is scaled by.

    The bounds depend on the state alone, which depends on nothing that is not released.
    """

    __slots__ = ()

    clipping_norm: Any

    def factors(self, norms: Tensor, bounds: Tensor | float) -> Tensor:
        """Factors ([G, B]) that keep ``factor * norm`` within ``bounds`` ([G, 1], or one number).

        Unless a rule says otherwise, min(1, bound / norm). Asked about norms that are not finite
        too; what it says then is not used.
        """
        return scaled_down(norms, bounds)

    @abstractmethod
    def describe(self, steps: int | None = None) -> str | float:
        """The rule in one plain value that differs if the rule does."""

    def bounds(self, state: ClipState) -> tuple[float, ...]:
        """The bound C_k of each group in the coming step.

        Raises:
            ValueError: If a schedule gives anything but a finite number > 0.
        """
        return bounds_of(self.clipping_norm, state.step)

    @property
    def groups(self) -> PerGroup | None:
        """Which parameters are clipped together; None for all of them."""
        return self.clipping_norm if isinstance(self.clipping_norm, PerGroup) else None

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return 1 if self.groups is None else len(self.groups.bounds)

    def after(self, state: ClipState, norms: Tensor, divisor: float) -> ClipState:
        """State after a batch with these ``norms`` ([G, B])."""
        del divisor
        lost = int((~norms.isfinite()).any(0).sum())
        return replace(
            state, step=state.step + 1, nonfinite_examples=state.nonfinite_examples + lost
        )


@dataclass(frozen=True, slots=True)
class Fixed(Rule):
    """Gradients beyond the bound are scaled down to it, others are left as they are."""

    clipping_norm: ClippingNorm

    def __post_init__(self) -> None:
        """Check the norm, that of a schedule at step 0."""
        bounds_of(self.clipping_norm, 0)

    def describe(self, steps: int | None = None) -> str | float:
        """The number itself, or what made the groups or the schedule."""
        return describe(self.clipping_norm, steps)


def rule_of(clipping_norm: Any) -> Rule:
    """The rule of a plan's ``clipping_norm``: itself, or clipping to that norm."""
    return clipping_norm if isinstance(clipping_norm, Rule) else Fixed(clipping_norm)


def scaled_down(norms: Tensor, bounds: Tensor | float) -> Tensor:
    """min(1, bound / norm), elementwise, and 1 for a norm of zero."""
    return torch.where(norms > bounds, bounds / norms, 1.0)


def bounds_of(clipping_norm: ClippingNorm, step: int) -> tuple[float, ...]:
    """The bound of each group at ``step``, checked."""
    if isinstance(clipping_norm, PerGroup):
        return clipping_norm.bounds
    name, bound = "clipping_norm", clipping_norm
    if callable(clipping_norm):
        name, bound = f"clipping_norm at step {step}", clipping_norm(step)
    why = "noise is proportional to it; use NonPrivate for none"
    return (_check.positive(name, bound, why=why),)


def check_steps(clipping_norm: ClippingNorm, steps: int) -> None:
    """Refuse a schedule without a valid norm at any step of a run of ``steps`` steps."""
    if callable(clipping_norm):
        for step in range(steps):
            bounds_of(clipping_norm, step)


def describe(clipping_norm: ClippingNorm, steps: int | None = None) -> str | float:
    """A clipping norm in one plain value, so that a resumed run can tell whether it is the same.

    Args:
        clipping_norm: A number, groups or a schedule. Of a schedule that is not one of
            :mod:`opake_lightning.scheduling` some values are written down.
        steps: Planned number of steps, if known: what the schedule has values for.
    """
    if isinstance(clipping_norm, PerGroup):
        groups = ", ".join(f"{'+'.join(group)}: {bound!r}" for group, bound in clipping_norm.groups)
        default = "" if clipping_norm.default is None else f", default={clipping_norm.default!r}"
        return f"per_group({groups}{default})"
    if not callable(clipping_norm):
        return float(clipping_norm)
    try:
        return f"schedule {json.dumps(schedule_to_dict(clipping_norm), sort_keys=True)}"
    except TypeError:
        values = [_value(clipping_norm, step) for step in _some_steps(steps or _FAR)]
        return f"schedule with the values {', '.join(values)}"


def _some_steps(steps: int) -> list[int]:
    last = max(steps - 1, 0)
    return sorted({0, last, *(1 << n for n in range(last.bit_length()) if 1 << n < last)})


def _value(schedule: Schedule, step: int) -> str:
    try:
        return f"{step}: {float(schedule(step))!r}"
    except (ArithmeticError, LookupError, ValueError):
        return f"{step}: none"  # it may end where the run does
