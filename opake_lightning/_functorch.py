"""What the tape needs of torch's private names, in one place.

Where a version of torch lacks them, no tensor can be seen from inside ``torch.func.vmap``: then
every use of a parameter is one without a rule, and what asks for a value of the batch runs one
example at a time. That is slower and as exact.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

__all__ = [
    "add_batch_dim",
    "batch_dim_of",
    "checkpoints_called_directly",
    "custom_function_call",
    "eagerly",
    "has_private_names",
    "is_batched",
    "is_tracked",
    "level_now",
    "outside",
    "physical_of",
    "unwrapped",
]

_C: Any = None  # pyright: ignore[reportConstantRedefinition]
_checkpoint: Any = torch.utils.checkpoint
try:
    import torch._C._functorch as _functorch

    _C = cast("Any", _functorch)  # pyright: ignore[reportConstantRedefinition]
    add_batch_dim: Callable[[Tensor, int, int], Tensor] = _C._add_batch_dim
    unwrapped: Callable[[Tensor], Tensor] = _C.get_unwrapped
    level_now: Callable[[], int] = _C.maybe_current_level
    _is_batched: Callable[[Tensor], bool] = _C.is_batchedtensor
    _bdim: Callable[[Tensor], int] = _C.maybe_get_bdim
    _level: Callable[[Tensor], int] = _C.maybe_get_level
    _is_tracked: Callable[[Tensor], bool] = _C.is_gradtrackingtensor
    _pop: Callable[[], Any] = _C.pop_dynamic_layer_stack
    _push: Callable[[Any], Any] = _C.push_dynamic_layer_stack
except (ImportError, AttributeError):
    _C = None  # pyright: ignore[reportConstantRedefinition]
    add_batch_dim = unwrapped = level_now = cast("Any", None)


try:
    from torch._functorch.autograd_function import custom_function_call
except (ImportError, AttributeError):
    custom_function_call = cast("Any", None)


def has_private_names() -> bool:
    """Whether tensors can be seen from inside of vmap."""
    return _C is not None


def is_batched(value: Tensor) -> bool:
    """Whether ``value`` has a row for each example of a vmap, also of one that is over."""
    return _C is not None and _is_batched(value)


def is_tracked(value: Tensor) -> bool:
    """Whether ``value`` is one of ``torch.func.grad`` and its kin."""
    return _C is not None and _is_tracked(value)


def physical_of(value: Tensor, level: int) -> Tensor | None:
    """The tensor behind ``value``, examples first; None if it is the same for all of them.

    Args:
        value: A tensor, maybe inside of ``torch.func.grad`` within the vmap.
        level: Nesting level of the vmap over examples.
    """
    while not _is_batched(value):
        if not _is_tracked(value):
            return None
        value = unwrapped(value)
    if _level(value) != level:
        return None
    dim = _bdim(value)
    inner = unwrapped(value)
    return inner.movedim(dim, 0) if dim else inner


def batch_dim_of(value: Tensor) -> int:
    """Where the examples are in the tensor behind ``value``."""
    return _bdim(value)


class outside:  # noqa: N801 - used like a function
    """Leave all function transforms for a while; a class, as a generator takes longer."""

    __slots__ = ("_saved",)

    def __enter__(self) -> None:
        """Take the stack of transforms away, those of the loss's own too."""
        self._saved = [_pop()]
        while level_now():
            self._saved.append(_pop())

    def __exit__(self, *_: object) -> None:
        """Put it back."""
        while self._saved:
            _push(self._saved.pop())


@contextlib.contextmanager
def eagerly() -> Generator[None]:
    """Run compiled parts of a loss as they are: they would be traced through the tape."""
    # Where nothing has been compiled, the compiler has not been loaded, and that takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class _Direct:
    """In place of the function behind re-entrant checkpointing."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        del preserve
        return function(*args)


def _no_hooks(*_: Any, **__: Any) -> Generator[None]:
    yield


@contextlib.contextmanager
def checkpoints_called_directly() -> Generator[None]:
    """Let ``torch.utils.checkpoint`` call its function and keep what it keeps.

    Its recomputation cannot run inside of vmap, and its re-entrant form hides parameters behind a
    frozen input, whose gradients would be lost. Microbatches bound memory already.
    """
    names = {
        "CheckpointFunction": _Direct,
        "_checkpoint_without_reentrant_generator": _no_hooks,
        "_checkpoint_without_reentrant_generator_impl": _no_hooks,  # from torch 2.14 on
    }
    kept = {name: getattr(_checkpoint, name) for name in names if hasattr(_checkpoint, name)}
    for name in kept:
        setattr(_checkpoint, name, names[name])
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(_checkpoint, name, value)
