"""What a tape keeps, what it goes by, and how it says that a pass cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opake_lightning.dpsgd.clipping._gradients import Gradients

__all__ = [
    "BODIES",
    "CHECKS",
    "CHECKS_ALONE",
    "OF_COPIES",
    "ROW_WISE",
    "RULES",
    "Caution",
    "Computed",
    "Draws",
    "NoData",
    "NoRule",
    "Retry",
    "Rule",
    "Split",
    "Use",
    "WritesToBatch",
    "check_of",
    "rule_for",
]

Rule = Callable[..., Any]
# From torch function to rule, and to what looks at a call before anything else does.
RULES: dict[Any, Rule] = {}
CHECKS: dict[Any, Callable[..., Any]] = {}
# Of those, what also looks at the calls of a row that runs alone.
CHECKS_ALONE: dict[Any, Callable[..., Any]] = {}
# Functions in other words, which have rules.
BODIES: dict[Any, Callable[..., Any]] = {}
# What stands in for functions that torch.func.vmap gets wrong if a parameter is batched.
OF_COPIES: dict[Any, Callable[..., Any]] = {}
# Functions whose rule is better than vmap's own way even where no parameter is in it.
ROW_WISE: set[Any] = set()


def rule_for(*funcs: Any, row_wise: bool = False) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule of ``funcs``; ``row_wise``: also without parameters."""

    def decorate(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(funcs, rule))
        if row_wise:
            ROW_WISE.update(funcs)
        return rule

    return decorate


def check_of(*funcs: Any) -> Callable[[Rule], Rule]:
    """Let the decorated function look at calls of ``funcs`` first, also where rows run alone."""

    def decorate(check: Rule) -> Rule:
        CHECKS.update(dict.fromkeys(funcs, check))
        CHECKS_ALONE.update(dict.fromkeys(funcs, check))
        return check

    return decorate


class NoRule(Exception):  # noqa: N818  (nothing is wrong: the use gets an expanded view)
    """The rule does not cover this call."""


class NoData(NoRule):
    """The call is of parameters and constants alone."""


class Split(BaseException):
    """The loss asked for a Python value, and examples differ in it.

    No ``Exception``: a loss that catches those must not catch this one.

    Attributes:
        values: One for each row, equal where rows may stay together.
        place: Which function asked, and where.
    """

    def __init__(self, values: list[Any], place: str) -> None:
        super().__init__(place)
        self.values, self.place = values, place


class Caution:
    """How a pass runs; what a loss turns out to need is tried again with more of it."""

    NONE = 0
    #: Constants that the loss makes get memory of their own for each example, to be written to.
    WIDE = 1
    #: No rules either: the loss takes gradients of its own, or writes to what it computed.
    NO_RULES = 2


class WritesToBatch(BaseException):
    """The loss is about to write to its batch, which another pass may need as it is."""


class Retry(BaseException):
    """The pass has to run again with more caution."""

    def __init__(self, caution: int) -> None:
        super().__init__()
        self.caution = caution


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows of a part within the batch it was split from.

    A part repeats the random numbers that its rows drew among all: it may have been split by them,
    and no row may decide what others draw.

    Attributes:
        whole: Number of rows of the batch.
        rows: Which of them are in the part, an index tensor.
    """

    whole: int
    rows: Tensor

    def split(self, values: Sequence[Any]) -> list[Draws]:
        """The rows of each of ``values``, one for each row, in the order in which they come."""
        rows: dict[Any, list[int]] = {}
        for row, value in zip(self.rows.tolist(), values, strict=True):
            rows.setdefault(value, []).append(row)
        return [Draws(self.whole, torch.tensor(mine)) for mine in rows.values()]


class Computed(NamedTuple):
    """A parameter: a leaf, or a tensor computed of leaves and constants.

    Attributes:
        tensor: The tensor. Kept, so that no other gets its id.
        leaves: Numbers of the leaves that it depends on.
        isometric: Whether it holds elements of one leaf, each at most once.
    """

    tensor: Tensor
    leaves: frozenset[int]
    isometric: bool


class Use(NamedTuple):
    """One operation with parameters in it.

    Attributes:
        name: Of the operation.
        gradients: For each parameter in it, how to get the examples' gradients from the gradient
            of the output.
        inputs: Tensors that this needs, with the version each had.
    """

    name: str
    gradients: tuple[tuple[Computed, Callable[[Tensor], Gradients]], ...]
    inputs: tuple[tuple[Tensor, int], ...]
