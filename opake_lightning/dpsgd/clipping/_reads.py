"""Python values that a loss asks of the batch: one answer for all, or the batch is split."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from opake_lightning import _functorch
from opake_lightning._functorch import outside
from opake_lightning.dpsgd.clipping._entries import CHECKS, Split
from opake_lightning.dpsgd.clipping._functions import place_of
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []


def _read(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` says of each example, if it says the same of all."""
    inner = _seen(tape, args[0])
    if inner is None:
        # An array would share the memory, and writes to it would not be seen.
        shared = func is Tensor.numpy and isinstance(tape, Tape) and tape.fence.owns(args[0])
        return func(args[0].clone(), *args[1:], **kwargs) if shared else NotImplemented
    place = place_of(func)
    tape.fence.reads(place)
    with outside(), torch.no_grad():
        values = inner.detach()
        if values[0].numel() == 1:
            answer = _ANSWERS.get(func, repr)
            # As it is written NaN is one value, and 0.0 another than -0.0.
            keys = [repr(answer(value)) for value in values.reshape(tape.size).tolist()]
        else:
            flat = values.reshape(tape.size, -1).cpu()
            if flat.is_floating_point():
                # NumPy has no bfloat16; bit for bit NaN would be many values.
                flat = flat.double()
                flat = torch.where(flat.isnan(), math.nan, flat)
            keys = [row.tobytes() for row in flat.numpy()]
        if any(key != keys[0] for key in keys):
            raise Split(keys, place)
        # A copy, as an array may share the memory of the rows.
        return func(values[0].clone(), *args[1:], **kwargs)


def _compared(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What vmap cannot run: whether all elements are equal, or close, or one is contained."""
    left, right = args[:2]
    if _seen(tape, left) is None and _seen(tape, right) is None:
        return NotImplemented
    if func is _contains:
        same = (left == right).any()
    elif func in (torch.allclose, Tensor.allclose):
        same = torch.isclose(*args, **kwargs).all()
    elif left.shape != right.shape:
        return False
    else:
        same = (left == right).all()
    return _read(tape, Tensor.__bool__, (same,), {})


def _seen(tape: Tape, value: Any) -> Tensor | None:
    """The tensor behind ``value``, examples first; None if it is the same for all of them."""
    seen = isinstance(value, Tensor) and tape.level
    return _functorch.physical_of(value, tape.level) if seen else None


_contains: Any = cast("Any", Tensor).__contains__
_ANSWERS: dict[Any, Callable[[Any], Any]] = {
    Tensor.__bool__: bool, Tensor.is_nonzero: bool, torch.is_nonzero: bool, Tensor.__int__: int,
    Tensor.__index__: int, Tensor.__float__: float, Tensor.__complex__: complex,
}  # fmt: skip
_READS = (
    *_ANSWERS, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__,
    Tensor.__repr__, Tensor.__format__,  # which would show all rows
)  # fmt: skip
_COMPARES = (torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, _contains)
CHECKS.update(dict.fromkeys(_READS, _read) | dict.fromkeys(_COMPARES, _compared))


def _indexed(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing by what vmap cannot: a slice that ends at a tensor, or a mask that is written to."""
    if not tape.level:
        return NotImplemented
    target, index, *value = args
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, slice) and tape.any_batched([part]) for part in parts):
        ends = [_with_numbers(tape, part) for part in cast("tuple[Any, ...]", parts)]
        with tape:
            return func(target, tuple(ends), *value)
    if not value or (isinstance(value[0], Tensor) and value[0].dim()):
        return NotImplemented
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not tape.any_batched([index]):
        return NotImplemented
    with tape:
        target.masked_fill_(
            index.reshape(*index.shape, *[1] * (target.dim() - index.dim())), value[0]
        )
    return None


def _with_numbers(tape: Tape, part: Any) -> Any:
    if not isinstance(part, slice):
        return part
    with tape:
        ends = (part.start, part.stop, part.step)
        return slice(*[int(end) if isinstance(end, Tensor) else end for end in ends])


CHECKS[Tensor.__getitem__] = CHECKS[Tensor.__setitem__] = _indexed
