"""A batch taken apart into examples.

Every tensor of a batch must have the example as its first dimension. Anything else in it (strings,
numbers, arrays) cannot be cut into examples, and handing all of it to every example would let one
example's loss depend on the others; so it is replaced by an object that raises when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, cast

import optree
from torch import Tensor

from opake_lightning._batches import Parts, take_apart
from opake_lightning._tree import BATCH_NAMESPACE

__all__ = ["Examples", "examples_of"]


class _Withheld:
    """Stands where something that is not a tensor stood; complains only when it is used.

    Guarantees: what a loss can learn from it is the place, and that there was something. The rest
    of its methods, all of which refuse, are made from :data:`_USES`.
    """

    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        object.__setattr__(self, "_place", place)

    def __repr__(self) -> str:
        return f"<withheld: {self._place}>"

    def __deepcopy__(self, memo: object = None) -> _Withheld:
        return self

    __copy__ = __deepcopy__

    @property
    def __class__(self) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        # What isinstance asks for: False would send a string down the branch for what is none.
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del func, types
        given = optree.tree_leaves(cast("Any", (args, kwargs)))
        next(leaf for leaf in given if type(leaf) is _Withheld)._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"{self._place} is not a tensor, so it cannot be cut into examples and is withheld "
            "from the loss (it could carry other examples' data); turn it into a tensor with one "
            "row per example in the dataset or collate_fn"
        )


_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
# Every special method that an expression, a statement or a built-in function calls; what is left
# out falls back on one of these, or is for the interpreter itself (init, del, ...). Python gives
# messages of its own where it asks for nothing but the type: ",".join, "%d" %, memoryview.
_USES = (
    *("getattr", "setattr", "delattr", "call", "hash", "bool", "str", "format", "bytes", "fspath"),
    *("eq", "ne", "lt", "le", "gt", "ge", "int", "float", "complex", "index"),
    *("len", "getitem", "setitem", "delitem", "contains", "iter", "next", "reversed"),
    *("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"),
    *(prefix + name for name in _ARITHMETIC for prefix in ("", "r")),
    *("enter", "exit", "aenter", "aexit", "await", "aiter", "anext"),
    *("instancecheck", "subclasscheck", "reduce", "reduce_ex", "dir", "sizeof", "buffer"),
    *("array", "array_ufunc", "array_function"),  # NumPy
)
for _name in _USES:
    setattr(_Withheld, f"__{_name}__", _Withheld._refuse)  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class Examples:
    """The tensors of a batch, each with one row per example, and how to put a batch together.

    Attributes:
        size: Number of examples, 0 for an empty draw.
        tensors: The tensors, in the order of the batch.
    """

    size: int
    tensors: tuple[Tensor, ...]
    _parts: Parts

    def rebuild(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """New batch arguments with ``tensors`` in the places of the original ones.

        Guarantees: They are of the same classes as the given ones (or a dict for a Mapping that
        cannot be copied), share nothing with them that can be written to, and hold nothing of them
        but what has no example in it: keys, None, functions, and what a class registered with
        optree calls its metadata.
        """
        rest = iter(tensors)
        return self._parts.assemble(
            [leaf if type(leaf) is _Withheld else next(rest) for leaf in self._parts.leaves]
        )


def examples_of(batch: tuple[Any, ...]) -> Examples:
    """Take the batch arguments apart.

    Args:
        batch: The batch arguments, any containers. If all are ``None`` the draw was empty.

    Raises:
        ValueError: If there is no tensor, a tensor has no dimensions, or first sizes differ.
    """
    parts = take_apart(batch, stand_in=_Withheld)
    if not parts.leaves:
        return Examples(0, (), parts)
    # By type: an isinstance is a use of what is withheld.
    leaves = zip(parts.leaves, parts.places, strict=True)
    found = [(leaf, place) for leaf, place in leaves if type(leaf) is not _Withheld]
    if not found:
        kind = type(take_apart(batch).leaves[0]).__name__
        raise ValueError(
            f"the batch holds no tensors, only {kind} at {parts.places[0]}; return tensors from "
            "the collate_fn, in containers (tuple, list, dict or another Mapping, namedtuple, "
            "dataclass, or a class registered with optree under "
            f"namespace={BATCH_NAMESPACE!r})"
        )
    first, first_place = found[0]
    for tensor, place in found:
        if tensor.dim() == 0:
            raise ValueError(
                f"{place} is a tensor without dimensions, so it belongs to no example; give "
                "it one row per example, or make it a constant of the module"
            )
        if len(tensor) != len(first):
            raise ValueError(
                f"{place} has {len(tensor)} rows but {first_place} has {len(first)}; every tensor "
                "of a batch needs one row per example in its first dimension"
            )
    return Examples(len(first), tuple([tensor for tensor, _ in found]), parts)
