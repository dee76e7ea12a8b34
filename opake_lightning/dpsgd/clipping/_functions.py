"""Which of torch's functions do what, as far as a recorder has to know."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "INDEXING",
    "ORDERING",
    "SPREADING",
    "VIEWS",
    "body_of",
    "is_basic",
    "steers",
    "unwatched",
    "writes",
]

_bodies: dict[Any, Callable[..., Any] | None] = {}


def body_of(func: Any) -> Callable[..., Any] | None:
    """The function itself, if it is one of torch.nn.functional's that is written in Python.

    Such a function first asks whether a mode is active, and hands itself over to it. Here the
    question is answered no, so that its own operations are what the mode gets to see.
    """
    if func not in _bodies:
        modules = (functional.__dict__, torch.functional.__dict__)
        python = isinstance(func, FunctionType) and any(func.__globals__ is m for m in modules)
        _bodies[func] = unwatched(func) if python else None
    return _bodies[func]


def unwatched(func: Any) -> Callable[..., Any]:
    """A copy of a function of torch that does not ask whether a mode is active."""
    names = {name: _no for name in func.__globals__ if name.startswith("has_torch_function")}
    copy = FunctionType(
        func.__code__,
        {**func.__globals__, **names},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def writes(func: Any) -> bool:
    """Whether a function writes to its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__ipow__")
    return name.endswith("_")


def _no(*_: object) -> bool:
    return False


def _expanded(value: Tensor, *sizes: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = (
        tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    )
    own = (None,) * (len(shape) - value.dim()) + tuple(value.shape)
    both = zip(own, shape, strict=True)
    return tuple([n if size == -1 and n is not None else size for n, size in both])


def _repeated(value: Tensor, *repeats: Any) -> tuple[int, ...]:
    times = tuple(repeats[0]) if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
    own = (1,) * (len(times) - value.dim()) + tuple(value.shape)
    # What is repeated along a dimension that it has cannot be had by broadcasting.
    if any(n != 1 and k != 1 for n, k in zip(own, times, strict=True)):
        return ()
    return tuple([n * k for n, k in zip(own, times, strict=True)])


def _like(value: Tensor, other: Tensor) -> tuple[int, ...]:
    del value
    return tuple(other.shape)


SPREADING: dict[Any, Callable[..., tuple[int, ...]]] = {
    Tensor.expand: _expanded,
    torch.broadcast_to: _expanded,
    Tensor.expand_as: _like,
    Tensor.repeat: _repeated,
}
INDEXING = {Tensor.__getitem__}
VIEWS = {
    Tensor.t, torch.t, cast("Any", Tensor.T).__get__, cast("Any", Tensor.mT).__get__,
    Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.movedim,
    torch.movedim, Tensor.swapaxes, torch.swapaxes, Tensor.view, Tensor.reshape, torch.reshape,
    Tensor.view_as, Tensor.reshape_as, Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze,
    torch.squeeze, Tensor.flatten, torch.flatten, Tensor.unflatten, Tensor.narrow, torch.narrow,
    Tensor.select, torch.select, Tensor.chunk, torch.chunk, Tensor.split, torch.split,
    Tensor.unbind, torch.unbind, Tensor.contiguous, Tensor.clone, torch.clone,
}  # fmt: skip
STEERING = {
    Tensor.__bool__, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.nonzero, torch.nonzero,
    Tensor.masked_select, torch.masked_select, Tensor.unique, torch.unique, Tensor.__contains__,
    Tensor.unique_consecutive, torch.unique_consecutive, torch.allclose, Tensor.allclose,
    torch.equal, Tensor.equal, torch.bincount, Tensor.bincount, Tensor.is_nonzero,
    Tensor.repeat_interleave, torch.repeat_interleave, torch.is_nonzero, torch.argwhere,
    Tensor.argwhere, Tensor.__format__, Tensor.__repr__, Tensor.__dlpack__,
}  # fmt: skip
# Dimensions change places, so that the same functions may do something else.
ORDERING = {
    Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.movedim,
    torch.movedim, Tensor.swapaxes, torch.swapaxes, Tensor.flatten, torch.flatten,
}  # fmt: skip


def steers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether values of a tensor decide what Python does next, or which shape comes out."""
    if func in STEERING:
        return True
    if func in INDEXING:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(
            (isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8))
            or (isinstance(i, slice) and not is_basic(i))
            for i in index
        )
    if func in (torch.where, functional.one_hot):
        return len(args) + len(kwargs) == 1
    return False


def is_basic(index: Any) -> bool:
    """Whether an index takes every element at most once: integers, slices, None and ``...``."""
    if isinstance(index, tuple):
        return all(is_basic(i) for i in cast("tuple[Any, ...]", index))
    if isinstance(index, slice):
        return all(end is None or type(end) is int for end in (index.start, index.stop, index.step))
    return index is None or index is ... or type(index) is int
