"""A batch taken apart into examples.

Every tensor of a batch must have the example as its first dimension. Anything else in it (strings,
numbers, arrays) cannot be cut into examples, and handing all of it to every example would let one
example's loss depend on the others; so it is replaced by an object that raises when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import optree
from torch import Tensor

from opake_lightning._tree import BATCH_NAMESPACE

__all__ = ["Examples", "examples_of"]


class _Withheld:
    """Stands where something that is not a tensor stood; complains only when it is used."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"{self._what} is not a tensor, so it cannot be cut into examples and is withheld from "
            "the loss (it could carry other examples' data); turn it into a tensor with one row "
            "per example in the dataset or collate_fn"
        )

    __getattr__ = __getitem__ = __call__ = __iter__ = __len__ = __bool__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _refuse
    __float__ = __int__ = __index__ = __str__ = __eq__ = __lt__ = __gt__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<withheld: {self._what}>"


@dataclass(frozen=True, slots=True)
class Examples:
    """The tensors of a batch, each with one row per example, and how to put a batch together.

    Attributes:
        size: Number of examples, 0 for an empty draw.
        tensors: The tensors, in the order of the flattened batch.
    """

    size: int
    tensors: tuple[Tensor, ...]
    _leaves: tuple[Any, ...]
    _slots: tuple[int, ...]
    _treespec: Any

    def of(self, tensors: tuple[Tensor, ...]) -> Examples:
        """The same for other examples, whose ``tensors`` are given."""
        return replace(self, size=len(tensors[0]), tensors=tensors)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The batch arguments with ``tensors`` in the places of the original ones."""
        leaves = list(self._leaves)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            leaves[slot] = tensor
        return cast("tuple[Any, ...]", optree.tree_unflatten(self._treespec, leaves))


def examples_of(batch: tuple[Any, ...]) -> Examples:
    """Take the batch arguments apart.

    Args:
        batch: The batch arguments, any pytrees. If all are ``None`` the draw was empty.

    Raises:
        ValueError: If there is no tensor, a tensor has no dimensions, or first sizes differ.
    """
    paths, leaves, treespec = optree.tree_flatten_with_path(
        cast("Any", batch), namespace=BATCH_NAMESPACE
    )
    if not leaves:
        return Examples(0, (), (), (), treespec)
    slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    names = [_name(path, single=len(batch) == 1) for path in paths]
    if not slots:
        raise ValueError(
            f"the batch holds no tensors, only {type(leaves[0]).__name__} at {names[0]}; return "
            "tensors from the collate_fn, in containers that optree knows (tuple, list, dict, "
            f"namedtuple, or a class registered with optree under namespace={BATCH_NAMESPACE!r})"
        )
    tensors = tuple(cast("Tensor", leaves[i]) for i in slots)
    for slot, tensor in zip(slots, tensors, strict=True):
        if tensor.dim() == 0:
            raise ValueError(
                f"{names[slot]} is a tensor without dimensions, so it belongs to no example; give "
                "it one row per example, or make it a constant of the module"
            )
        if len(tensor) != len(tensors[0]):
            raise ValueError(
                f"{names[slot]} has {len(tensor)} rows but {names[slots[0]]} has {len(tensors[0])};"
                " every tensor of a batch needs one row per example in its first dimension"
            )
    kept = tuple(
        leaf if isinstance(leaf, Tensor) else _Withheld(name)
        for leaf, name in zip(leaves, names, strict=True)
    )
    return Examples(len(tensors[0]), tensors, kept, slots, treespec)


def _name(path: tuple[Any, ...], *, single: bool) -> str:
    return "batch" + "".join(f"[{entry!r}]" for entry in (path[1:] if single else path))
