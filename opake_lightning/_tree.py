"""Packed pytrees: a tree of tensors as a few contiguous ones.

Public functions take and return pytrees; below them the leaves are views into one flat tensor per
(dtype, device), in leaf order. :func:`pack` finds that flat tensor behind a tree whose leaves
already are such views, and builds it by copying otherwise; so a whole model is one kernel, one
random draw, one reduction, and nothing depends on how a tree came about.

Flat tensors are float32, or float64 for float64 leaves: norms, noise and optimizer state are never
kept in a narrower type, whatever type the parameters have.

A sum over examples is wider still. It is float64 until it has its noise, in the same groups and
order as what it is rounded to then (:func:`layouts_of_sum`): each flat tensor that is released has
one flat tensor of float64 behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, cast, final

import optree
import torch
from torch import Tensor

from opake_lightning import _pool

__all__ = [
    "BATCH_NAMESPACE",
    "Layout",
    "Scattered",
    "bases",
    "flatten",
    "in_float64",
    "layout_of",
    "layouts_of_sum",
    "leaves_with_paths",
    "pack",
    "packed",
    "readable",
    "room_for",
    "seat",
    "unpack",
    "wide",
]

# Where a container of batches that is not a tuple, list or dict is registered with optree.
BATCH_NAMESPACE = "opake_lightning"


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over ``dtype`` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class _Group:
    dtype: torch.dtype
    device: torch.device
    members: tuple[int, ...]  # indices into the list of leaves
    offsets: tuple[int, ...]  # start of each member in the flat tensor
    total: int
    filled: tuple[int, ...]  # members that have elements, and so an address
    starts: tuple[int, ...]  # start of each of these in the flat tensor, in bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each leaf of one tree structure lies in the flat tensors."""

    treespec: optree.PyTreeSpec
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    groups: tuple[_Group, ...]
    wide: bool  # whether every leaf has the type of its flat tensor

    def leaves(self, tree: Any) -> list[Tensor]:
        """Flatten ``tree``, which must have this layout's structure and shapes."""
        leaves = self.fitting(tree)
        if leaves is not None:
            return leaves
        leaves, treespec = _flatten(tree)
        if treespec != self.treespec:
            raise ValueError(
                f"pytree structures differ: expected {self.treespec}, got {treespec}; pass a tree "
                "with the structure that init() was given"
            )
        if tuple([leaf.shape for leaf in leaves]) != self.shapes:
            path, shape, leaf = next(
                (path, shape, leaf)
                for (path, leaf), shape in zip(leaves_with_paths(tree), self.shapes, strict=True)
                if leaf.shape != shape
            )
            raise ValueError(f"{path}: expected shape {tuple(shape)}, got {tuple(leaf.shape)}")
        return leaves

    def fitting(self, tree: Any) -> list[Tensor] | None:
        """The leaves of ``tree``, or None if it has another structure or other shapes."""
        try:
            # Many times faster than to find out the structure of the tree and compare.
            leaves = cast("list[Tensor]", self.treespec.flatten_up_to(tree))
        except (TypeError, ValueError):
            return None
        if not _are_tensors(leaves) or tuple([leaf.shape for leaf in leaves]) != self.shapes:
            return None
        return leaves

    def empty(self) -> list[Tensor]:
        """Flat tensors of any content."""
        return [_pool.empty(g.total, g.dtype, g.device) for g in self.groups]

    def zeros(self) -> list[Tensor]:
        """Flat tensors of zeros."""
        return [flat.zero_() for flat in self.empty()]

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The leaves, as views into ``flats``, in leaf order."""
        out: list[Tensor | None] = [None] * len(self.shapes)
        for group, flat in zip(self.groups, flats, strict=True):
            start = flat.storage_offset()
            for i, offset in zip(group.members, group.offsets, strict=True):
                out[i] = flat.as_strided(self.shapes[i], self.strides[i], start + offset)
        return cast("list[Tensor]", out)


def layout_of(tree: Any) -> Layout:
    """Layout of ``tree``.

    Raises:
        TypeError: If a leaf is not a real floating-point tensor.
    """
    return flatten(tree)[1]


def layouts_of_sum(
    tree: Any, dtypes: tuple[torch.dtype, ...] | None = None
) -> tuple[Layout, Layout]:
    """How a sum is kept until it has its noise, and how it is released.

    Args:
        tree: The sum.
        dtypes: What each leaf is released in, in leaf order; the sum is then kept in float64.
            None releases it as it is.

    Raises:
        TypeError: If a leaf is not a real floating-point tensor, or is to be released as another.
        ValueError: If there are more or fewer ``dtypes`` than leaves.
    """
    leaves, layout = flatten(tree)
    if dtypes is None:
        return layout, layout
    if len(dtypes) != len(leaves):
        raise ValueError(f"{len(leaves)} leaves need as many dtypes, got {dtypes}")
    if not all(dtype.is_floating_point for dtype in set(dtypes)):
        raise TypeError(f"a gradient is released in real floating-point types, not {dtypes}")
    kinds = tuple([(dtype, leaf.device) for dtype, leaf in zip(dtypes, leaves, strict=True)])
    released = _layout(layout.treespec, layout.shapes, kinds)
    return in_float64(released), released


@lru_cache(maxsize=64)
def in_float64(layout: Layout) -> Layout:
    """The layout of sums that are rounded to ``layout``: the same groups, all in float64."""
    groups = [
        replace(
            group,
            dtype=torch.float64,
            starts=tuple(
                [start // group.dtype.itemsize * torch.float64.itemsize for start in group.starts]
            ),
        )
        for group in layout.groups
    ]
    return replace(layout, groups=tuple(groups), wide=True)


def flatten(tree: Any) -> tuple[list[Tensor], Layout]:
    """Leaves and layout of ``tree``; raises as :func:`layout_of` does."""
    leaves, treespec = _flatten(tree)
    kinds = tuple([(leaf.dtype, leaf.device) for leaf in leaves])
    if not all(dtype.is_floating_point for dtype, _ in set(kinds)):
        path, leaf = next(
            (path, leaf) for path, leaf in leaves_with_paths(tree) if not leaf.is_floating_point()
        )
        raise TypeError(
            f"{path} has dtype {leaf.dtype}; only real floating-point tensors can be trained. "
            "Keep integer tensors in buffers, and complex ones as torch.view_as_real"
        )
    return leaves, _layout(treespec, tuple([leaf.shape for leaf in leaves]), kinds)


@lru_cache(maxsize=64)
def _layout(
    treespec: optree.PyTreeSpec,
    shapes: tuple[torch.Size, ...],
    kinds: tuple[tuple[torch.dtype, torch.device], ...],
) -> Layout:
    members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, (dtype, device) in enumerate(kinds):
        members.setdefault((wide(dtype), device), []).append(index)
    groups: list[_Group] = []
    for (dtype, device), indices in members.items():
        ends = list(accumulate(shapes[i].numel() for i in indices))
        offsets = (0, *ends[:-1])
        filled = [(i, o) for i, o in zip(indices, offsets, strict=True) if shapes[i].numel()]
        groups.append(
            _Group(
                dtype, device, tuple(indices), offsets, ends[-1],
                tuple([i for i, _ in filled]),
                tuple([offset * dtype.itemsize for _, offset in filled]),
            )
        )  # fmt: skip
    strides = tuple(map(_contiguous, shapes))
    is_wide = all(wide(dtype) == dtype for dtype, _ in kinds)
    return Layout(treespec, shapes, strides, tuple(groups), is_wide)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    below = accumulate((max(n, 1) for n in reversed(shape[1:])), mul, initial=1)
    return tuple(below)[::-1] if shape else ()


def pack(tree: Any, layout: Layout) -> list[Tensor]:
    """The flat tensors behind ``tree``; copied only where its leaves are not views of such."""
    leaves = layout.leaves(tree)
    out: list[Tensor] = []
    for group in layout.groups:
        flat = _shared_base(leaves, group)
        out.append(_gathered(leaves, group) if flat is None else flat)
    return out


def readable(tree: Any, layout: Layout) -> list[Tensor | Scattered]:
    """As :func:`pack`, but where leaves would have to be copied, they are only when read."""
    leaves = layout.leaves(tree)
    found = [(_shared_base(leaves, group), group) for group in layout.groups]
    return [Scattered(leaves, group) if flat is None else flat for flat, group in found]


@final
class Scattered:
    """The leaves of one group, wherever they lie, to be read a stretch at a time.

    Args:
        leaves: Those of the whole tree.
        group: Of some of them, one at least with elements in it.
    """

    def __init__(self, leaves: list[Tensor], group: _Group) -> None:
        self._leaves = [leaves[i] for i in group.filled]
        self._group = group
        self.dtype, self.device = group.dtype, group.device

    def numel(self) -> int:
        """The number of elements of all of them."""
        return self._group.total

    def split(self, size: int) -> Iterator[Tensor]:
        """As ``split`` of the flat tensor; what it gives is to be used before the next."""
        scratch = torch.empty(min(size, self.numel()), dtype=self.dtype, device=self.device)
        pieces: list[Tensor] = []
        room = size
        for leaf in self._leaves:
            rest = leaf.reshape(-1).to(scratch).detach()
            n = rest.numel()
            while n >= room:
                yield _joined([*pieces, rest[:room]], scratch)
                rest, n, pieces, room = rest[room:], n - room, [], size
            if n:
                pieces.append(rest)
                room -= n
        if pieces:
            yield _joined(pieces, scratch[: size - room])


def packed(tree: Any, layout: Layout) -> list[Tensor] | None:
    """The flat tensors behind ``tree``, or None if it is not made of views of such."""
    leaves = layout.fitting(tree)
    return None if leaves is None else bases(leaves, layout)


def bases(leaves: list[Tensor], layout: Layout) -> list[Tensor] | None:
    """As :func:`packed`, of the leaves of a tree with this layout."""
    out: list[Tensor] = []
    for group in layout.groups:
        flat = _shared_base(leaves, group)
        if flat is None:
            return None
        out.append(flat)
    return out


def seat(tree: Any) -> None:
    """Move the leaves of ``tree``, in place, so that they are views of flat tensors.

    Every leaf stays the tensor it is, with the values it has; only its memory is another. So a
    module's parameters can be seated, and an update of all of them is then one operation.

    Leaves that share memory with anything else (tied by a view, watched by another tensor), are
    not contiguous, or are of a narrower type than flat tensors, stay where they are, and so do all
    others of their device and type: there is no flat tensor of some of them.
    """
    leaves, layout = flatten(tree)
    for group in layout.groups:
        members = [leaves[i] for i in group.members]
        if _shared_base(leaves, group) is None and _can_move(members, group):
            flat = _gathered(leaves, group)
            for leaf, offset in zip(members, group.offsets, strict=True):
                leaf.data = flat.narrow(0, offset, leaf.numel()).view(leaf.shape)


def room_for(flats: Sequence[Tensor], layout: Layout, *, inplace: bool) -> list[Tensor]:
    """Flat tensors of ``layout`` to round ``flats`` to: new ones, of any content.

    With ``inplace``, those of ``flats`` themselves that have the type already.
    """
    return [
        flat
        if inplace and flat.dtype == group.dtype
        else _pool.empty(group.total, group.dtype, group.device)
        for flat, group in zip(flats, layout.groups, strict=True)
    ]


def unpack(
    flats: Sequence[Tensor], layout: Layout, dtypes: tuple[torch.dtype, ...] | None = None
) -> Any:
    """The tree whose leaves are views into ``flats``; copies where ``dtypes`` are narrower."""
    leaves = layout.views(flats)
    if dtypes is not None and any(wide(dtype) != dtype for dtype in set(dtypes)):
        leaves = [leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return optree.tree_unflatten(layout.treespec, leaves)


def leaves_with_paths(tree: Any) -> list[tuple[str, Tensor]]:
    """Leaves with a readable name each, in leaf order."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    names = ["/".join(str(entry) for entry in path) or "the tensor" for path in paths]
    return list(zip(names, cast("list[Tensor]", leaves), strict=True))


def _flatten(tree: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    leaves, treespec = optree.tree_flatten(tree)
    if not _are_tensors(leaves):
        leaf = next(leaf for leaf in leaves if not isinstance(leaf, Tensor))
        raise TypeError(
            f"expected a pytree of tensors, got a leaf of type {type(leaf).__name__}: {leaf!r}"
        )
    return cast("list[Tensor]", leaves), treespec


def _are_tensors(leaves: list[Any]) -> bool:
    # Asked of every tree in every step, so not one by one.
    return all(issubclass(kind, Tensor) for kind in set(map(type, leaves)))


def _shared_base(leaves: list[Tensor], group: _Group) -> Tensor | None:
    """The flat tensor whose consecutive views the group's leaves are, if there is one."""
    if not group.filled:
        return torch.zeros(group.total, dtype=group.dtype, device=group.device)
    filled = [leaves[i] for i in group.filled]
    start = filled[0].data_ptr()
    if (
        [leaf.data_ptr() for leaf in filled] != [start + begin for begin in group.starts]
        or {leaf.dtype for leaf in filled} != {group.dtype}
        or filled[0].device != group.device
        or not all(map(Tensor.is_contiguous, filled))
    ):
        return None
    # Addresses in a row lie in one tensor only if its storage reaches that far.
    first = filled[0].detach()
    begin = first.storage_offset()
    if (begin + group.total) * first.element_size() > first.untyped_storage().nbytes():
        return None
    return first.as_strided((group.total,), (1,), begin)


def _gathered(leaves: list[Tensor], group: _Group) -> Tensor:
    """The group's leaves one after the other in a new flat tensor."""
    flat = _pool.empty(group.total, group.dtype, group.device)
    # Always a copy: whoever gets it may write to it.
    return torch.cat([leaves[i].detach().reshape(-1).to(flat) for i in group.members], out=flat)


def _joined(pieces: list[Tensor], flat: Tensor) -> Tensor:
    """The pieces one after the other: in ``flat``, unless there is but one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, out=flat)


def _can_move(leaves: list[Tensor], group: _Group) -> bool:
    """Whether nothing else can tell when the leaves get other memory."""
    alone = _owners(torch.empty(1))
    movable = all(
        type(leaf) in (Tensor, torch.nn.Parameter)
        and leaf.dtype == group.dtype
        and leaf.is_contiguous()
        and not (leaf.device.type == "cpu" and leaf.is_shared())  # with another process
        and _owners(leaf) == alone
        for leaf in leaves
    )
    return movable and alone > 0 and len({id(leaf) for leaf in leaves}) == len(leaves)


def _owners(leaf: Tensor) -> int:
    """How many have hold of the memory of ``leaf``, as counted for any tensor; 0: cannot tell."""
    count = getattr(cast("Any", torch)._C, "_storage_Use_Count", None)
    return count(cast("Any", leaf.untyped_storage())._cdata) if count else 0
