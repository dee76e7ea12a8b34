"""Random numbers of a part of a batch."""

from __future__ import annotations

from typing import Any, cast

import optree
import torch
from torch import Tensor

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
        room = inner.new_zeros(whole, *inner.shape[1:])
        return room.index_copy(0, rows.to(inner.device), inner)

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
