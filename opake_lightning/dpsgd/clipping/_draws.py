"""Random numbers of a part of a batch."""

from __future__ import annotations

import math
from typing import Any, cast

import optree
import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning import _functorch
from opake_lightning._functorch import outside
from opake_lightning.dpsgd.clipping._functions import writes

__all__ = ["drawn_as_before"]


def drawn_as_before(tape: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` draws for the rows of a part: what it drew for them in the whole batch.

    Otherwise a part whose rows agreed on a random value would draw another one, and a loss that
    branches on it would take the rarer way too seldom.
    """
    assert tape.draws is not None
    whole, rows = tape.draws.whole, tape.draws.rows

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        inner = _functorch.physical_of(value, tape.level)
        if inner is None:
            return value
        return _room(inner, whole).index_copy_(0, rows.to(inner.device), inner)

    if func is functional.dropout and len(args) == 1:  # as it comes, with all else by name
        given = {"p": 0.5, "training": True, "inplace": False, **kwargs}
        if not given["p"] or not given["training"]:
            return func(*args, **kwargs)  # which draws nothing
        if not given["inplace"]:
            return _dropped(tape, args[0], given["p"])
    with outside():
        leaves, treespec = optree.tree_flatten(cast("Any", (args, kwargs)), none_is_leaf=True)
        spreads = [spread(leaf) for leaf in leaves]
        places = [i for i, (a, b) in enumerate(zip(leaves, spreads, strict=True)) if a is not b]

        def one(_: Tensor, *examples: Tensor) -> Any:
            filled = list(spreads)
            for place, example in zip(places, examples, strict=True):
                filled[place] = example
            args, kwargs = cast("Any", optree.tree_unflatten(treespec, filled))
            return func(*args, **kwargs)

        number = torch.arange(whole)
        each = torch.func.vmap(one, randomness="different")(number, *[spreads[i] for i in places])
        out = tape.wrapped(each[rows.to(each.device)])
    return args[0].copy_(out) if writes(func) else out


def _room(inner: Tensor, whole: int) -> Tensor:
    """Zeros for all rows, laid out as ``inner`` is: numbers are drawn in the order of memory."""
    strides = torch.empty_like(inner, device="meta").stride()
    # A single row's stride says nothing.
    key = [s if d or len(inner) > 1 else math.inf for d, s in enumerate(strides)]
    order = sorted(range(inner.dim()), key=lambda d: -key[d])
    shape = (whole, *inner.shape[1:])
    back = [order.index(d) for d in range(inner.dim())]
    return inner.new_zeros([shape[d] for d in order]).permute(back)


def _dropped(tape: Any, input: Tensor, p: float) -> Tensor:
    """Dropout as a product with what it makes of ones, so that only these are as many as all."""
    with outside():
        inner = _functorch.physical_of(input, tape.level)
        like = input if inner is None else inner[0]
        ones = torch.ones((), dtype=like.dtype, device=like.device)
        kept = functional.dropout(ones.expand(tape.draws.whole, *like.shape), p)
        kept = tape.wrapped(kept[tape.draws.rows.to(kept.device)])
    return input * kept
