"""The kernel that torch does not have, compiled: Adam's arithmetic with noise taken off.

Nothing depends on it. It needs a C++ compiler when it is first used, which takes some seconds to a
minute, and without one the slower way of the module ``_fused`` is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Numbers", "run"]


class Numbers(NamedTuple):
    """Of one update; a tensor of them goes into the kernel, so that none is compiled into it."""

    l2: float
    mean_add: float
    keep: float
    add: float
    noise: float
    debias: float
    least: float
    eps: float
    rate: float
    shrink: float


def run(param: Tensor, gradient: Tensor, mean: Tensor | None, square: Tensor, n: Numbers) -> bool:
    """Update ``mean``, ``square`` and ``param`` in place; False if there is no compiler."""
    kernel = _kernel(param.dtype, with_mean=mean is not None)
    if kernel is None:
        return False
    most = torch.finfo(param.dtype).max
    numbers = torch.tensor([min(x, most) for x in n], dtype=param.dtype)
    kernel(param, gradient, mean, square, numbers)
    return True


@lru_cache
def _kernel(dtype: torch.dtype, *, with_mean: bool) -> Callable[..., None] | None:
    """The kernel, once it has been seen to work."""
    param, gradient, mean, square = [torch.zeros(64, dtype=dtype) for _ in range(4)]
    numbers = torch.ones(len(Numbers._fields), dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about itself
        try:
            kernel = torch.compile(_arithmetic, dynamic=True)
            kernel(param, gradient, mean if with_mean else None, square, numbers)
        except RuntimeError as error:
            failure = str(error)
        else:
            return kernel
    warnings.warn(
        f"optimizer.compiled() goes on without a compiled kernel, as none could be made: {failure}",
        stacklevel=2,
    )
    return None


def _arithmetic(
    param: Tensor, gradient: Tensor, mean: Tensor | None, square: Tensor, numbers: Tensor
) -> None:
    l2, mean_add, keep, add, noise, debias, least, eps, rate, shrink = numbers.unbind()
    g = gradient + l2 * param
    v = keep * square + add * g * g
    direction = g if mean is None else mean + mean_add * (g - mean)
    left = torch.maximum((v - noise) * debias, least)
    param.copy_(shrink * param - rate * direction / (left.sqrt() + eps))
    square.copy_(v)
    if mean is not None:
        mean.copy_(direction)
