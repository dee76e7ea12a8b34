"""Fixed values in place of random ones, so that two runs of a loss can be compared.

Nothing is random in the loss of a batch and in those of its examples one by one while they are
compared: dropout is left out, and generators give the middle of their distribution. A permutation
is not the identity, since what it would mix across examples must show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["REPLACED"]


def _same(_: Any, value: Tensor, *__: Any, **___: Any) -> Tensor:
    return value


def _attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    else:
        kwargs = {**kwargs, "dropout_p": 0.0}
    return func(*args, **kwargs)


def _half(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    # The generator of ordinary numbers of the same shape.
    plain = torch.empty_like if func in (torch.rand_like, torch.randn_like) else torch.empty
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    return plain(*args, **kwargs).fill_(0.5)


def _fill(value: float) -> Callable[..., Tensor]:
    def fill(_: Any, tensor: Tensor, *__: Any, **___: Any) -> Tensor:
        return tensor.fill_(value)

    return fill


def _ones(_: Any, value: Tensor, *__: Any, **___: Any) -> Tensor:
    return torch.ones_like(value)


def _reversed(_: Any, n: int, **kwargs: Any) -> Tensor:
    kwargs = {name: value for name, value in kwargs.items() if name in ("device", "dtype")}
    return torch.arange(n - 1, -1, -1, **kwargs)


REPLACED: dict[Any, Callable[..., Any]] = {
    functional.dropout: _same,
    functional.dropout1d: _same,
    functional.dropout2d: _same,
    functional.dropout3d: _same,
    functional.alpha_dropout: _same,
    functional.feature_alpha_dropout: _same,
    torch.dropout: _same,
    torch.dropout_: _same,
    torch.feature_dropout: _same,
    torch.alpha_dropout: _same,
    functional.scaled_dot_product_attention: _attention,
    torch.rand: _half,
    torch.randn: _half,
    torch.rand_like: _half,
    torch.randn_like: _half,
    Tensor.uniform_: _fill(0.5),
    Tensor.normal_: _fill(0.5),
    Tensor.bernoulli_: _fill(1.0),
    Tensor.bernoulli: _ones,
    torch.bernoulli: _ones,
    torch.randperm: _reversed,
}
