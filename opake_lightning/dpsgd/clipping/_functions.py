"""Which of torch's functions do what, as far as a tape has to know."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import FrameType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import resolve_name

__all__ = [
    "INDEXING",
    "IN_FLOAT32",
    "RANDOM",
    "VIEWS",
    "body_of",
    "definition_of",
    "in_float32",
    "is_basic",
    "line_of",
    "mapped",
    "name_of",
    "place_of",
    "tensors_in",
    "writes",
]


@cache
def body_of(func: Any) -> Any:
    """The function itself, if it is one of torch.nn.functional's that is written in Python.

    Such a function first asks whether a mode is active, and hands itself over to it. Here the
    question is answered no, so that its own operations are what the mode gets to see.
    """
    modules = (functional.__dict__, torch.functional.__dict__)
    if not isinstance(func, FunctionType) or all(func.__globals__ is not m for m in modules):
        return None
    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    names = {**func.__globals__, **dict.fromkeys(asks, _no)}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*_: object) -> bool:
    return False


@cache
def writes(func: Any) -> bool:
    """Whether a function writes to its first argument."""
    name = getattr(func, "__name__", "")
    if name == "__set__":  # Tensor.data, as in buffer.data = x
        return getattr(func, "__self__", None) is cast("Any", Tensor.data)
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name in _INPLACE)
    return name.endswith("_") and not name.endswith("requires_grad_")


def name_of(func: Any) -> str:
    """The function as a user would write it."""
    return resolve_name(func) or getattr(func, "__name__", repr(func))


_INPLACE = {
    f"__i{name}__" for name in
    ("add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "and", "or", "xor",
     "lshift", "rshift", "matmul")
}  # fmt: skip
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
# What draws random numbers; a part of a batch gets those that the whole batch would have drawn.
_DRAWING = {
    torch: """
        rand randn randint randperm normal bernoulli multinomial poisson binomial rand_like
        randn_like randint_like dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout
        feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_
    """,
    Tensor: """
        normal_ uniform_ bernoulli_ random_ exponential_ log_normal_ cauchy_ geometric_ bernoulli
        multinomial
    """,
    functional: """
        dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_
        gumbel_softmax fractional_max_pool2d fractional_max_pool3d
    """,
}
RANDOM = {
    getattr(owner, name)
    for owner, names in _DRAWING.items()
    for name in names.split()
    if hasattr(owner, name)
}


# What autocast runs in float32; within vmap it does not.
_WIDE_LOSSES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
    "cross_entropy", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss",
    "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss", "grid_sample", "pdist",
)  # fmt: skip
IN_FLOAT32 = {
    *[getattr(functional, name) for name in _WIDE_LOSSES if hasattr(functional, name)],
    torch.cdist, torch.trace, Tensor.trace, torch.prod, Tensor.prod, torch.linalg.svdvals,
    torch.linalg.norm, torch.linalg.svd, torch.linalg.cholesky, torch.linalg.inv,
}  # fmt: skip


def is_basic(index: Any) -> bool:
    """Whether an index takes every element at most once: integers, slices, None and ``...``."""
    if isinstance(index, tuple):
        return all(is_basic(i) for i in cast("tuple[Any, ...]", index))
    if isinstance(index, slice):
        return all(end is None or type(end) is int for end in (index.start, index.stop, index.step))
    return index is None or index is ... or type(index) is int


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in it, tuples, lists and dicts, changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(item, change) for item in cast("Iterable[Any]", value)])
    if isinstance(value, dict):
        return {k: mapped(item, change) for k, item in cast("dict[Any, Any]", value).items()}
    return value


def in_float32(value: Tensor) -> Tensor:
    """What autocast makes of an argument of a function that runs in float32."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def place_of(func: Any) -> str:
    """A function, and the line of the user's code that called it."""
    line = next(_lines(traceback.walk_stack(cast("Any", sys)._getframe(1))), None)
    return name_of(func) if line is None else f"{name_of(func)} ({line})"


def line_of(error: BaseException) -> str:
    """The last line of the user's code that an exception came through; "" if there is none."""
    *_, last = "", *_lines(traceback.walk_tb(error.__traceback__))
    return last


def definition_of(func: Any) -> str:
    """A function's name, and where it is defined, under whatever wraps it."""
    inner = inspect.unwrap(func)
    while isinstance(inner, partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__name__)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _lines(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    """Those of the user's code."""
    for frame, line in frames:
        root = frame.f_globals.get("__name__", "").partition(".")[0]
        if root not in ("torch", "opake_lightning", "optree", "contextlib"):
            yield f"{frame.f_code.co_filename}:{line}"


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a tuple or list."""
    if not isinstance(value, (tuple, list)):
        return []
    return [item for item in cast("Iterable[Any]", value) if isinstance(item, Tensor)]
