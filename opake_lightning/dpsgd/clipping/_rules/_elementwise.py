"""Arithmetic element by element, which has no parameters: outside of vmap a call takes less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning.dpsgd.clipping._entries import NoRule, rule_for
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []

# What may be said of a call by name, beside tensors: numbers and words.
_SETTINGS = {"inplace", "approximate", "rounding_mode"}


@rule_for(
    Tensor.add, torch.add, Tensor.sub, torch.sub, Tensor.__rsub__, Tensor.mul, torch.mul,
    Tensor.div, torch.div, Tensor.__rdiv__, Tensor.neg, torch.neg, torch.relu, Tensor.relu,
    functional.relu, functional.gelu, functional.silu, torch.tanh, Tensor.tanh, torch.sigmoid,
    Tensor.sigmoid, row_wise=True,
)  # fmt: skip
def _elementwise(tape: Tape, func: Any, *operands: Any, **options: Any) -> Tensor:
    """Of rows with numbers, or with rows of the same shape: no other element comes in."""
    if not options.keys() <= _SETTINGS or options.get("inplace"):
        raise NoRule
    if not operands or not isinstance(first := operands[0], Tensor):
        raise NoRule
    shape = first.shape
    for value in operands:
        if isinstance(value, Tensor):
            # Of other shapes the rows of one could be taken for the columns of another.
            if not tape.is_data(value) or value.shape != shape:
                raise NoRule
        elif not isinstance(value, (int, float)):
            raise NoRule
    return func(*operands, **options)
