"""Packed pytrees: a tree of tensors as a few contiguous ones.

Public functions take and return pytrees; below them the leaves are views into one flat tensor per
(dtype, device), in leaf order. :func:`pack` finds that flat tensor behind a tree whose leaves
already are such views, and builds it by copying otherwise; so a whole model is one kernel, one
random draw, one reduction, and nothing depends on how a tree came about.

Flat tensors are float32, or float64 for float64 leaves: sums, norms, noise and optimizer state are
never kept in a narrower type, whatever type the parameters have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import optree
import torch
from torch import Tensor

__all__ = ["BATCH_NAMESPACE", "Layout", "layout_of", "leaves_with_paths", "pack", "unpack", "wide"]


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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each leaf of one tree structure lies in the flat tensors."""

    treespec: optree.PyTreeSpec
    shapes: tuple[torch.Size, ...]
    groups: tuple[_Group, ...]

    def leaves(self, tree: Any) -> list[Tensor]:
        """Flatten ``tree``, which must have this layout's structure and shapes."""
        leaves, treespec = _flatten(tree)
        if treespec != self.treespec:
            raise ValueError(
                f"pytree structures differ: expected {self.treespec}, got {treespec}; pass a tree "
                "with the structure that init() was given"
            )
        if tuple(leaf.shape for leaf in leaves) != self.shapes:
            path, shape, leaf = next(
                (path, shape, leaf)
                for (path, leaf), shape in zip(leaves_with_paths(tree), self.shapes, strict=True)
                if leaf.shape != shape
            )
            raise ValueError(f"{path}: expected shape {tuple(shape)}, got {tuple(leaf.shape)}")
        return leaves

    def zeros(self) -> list[Tensor]:
        """Flat tensors of zeros."""
        return [torch.zeros(g.total, dtype=g.dtype, device=g.device) for g in self.groups]

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The leaves, as views into ``flats``, in leaf order."""
        out: list[Tensor | None] = [None] * len(self.shapes)
        for group, flat in zip(self.groups, flats, strict=True):
            for index, offset in zip(group.members, group.offsets, strict=True):
                shape = self.shapes[index]
                out[index] = flat.narrow(0, offset, shape.numel()).view(shape)
        return cast("list[Tensor]", out)


def layout_of(tree: Any) -> Layout:
    """Layout of ``tree``.

    Raises:
        TypeError: If a leaf is not a real floating-point tensor.
    """
    leaves, treespec = _flatten(tree)
    for leaf in leaves:
        if not leaf.is_floating_point():
            path = next(path for path, other in leaves_with_paths(tree) if other is leaf)
            raise TypeError(
                f"{path} has dtype {leaf.dtype}; only real floating-point tensors can be trained. "
                "Keep integer tensors in buffers, and complex ones as torch.view_as_real"
            )
    members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, leaf in enumerate(leaves):
        members.setdefault((wide(leaf.dtype), leaf.device), []).append(index)
    groups: list[_Group] = []
    for (dtype, device), indices in members.items():
        ends = list(accumulate(leaves[i].numel() for i in indices))
        groups.append(_Group(dtype, device, tuple(indices), (0, *ends[:-1]), ends[-1]))
    return Layout(treespec, tuple(leaf.shape for leaf in leaves), tuple(groups))


def pack(tree: Any, layout: Layout) -> list[Tensor]:
    """The flat tensors behind ``tree``; copied only where its leaves are not views of such."""
    leaves = layout.leaves(tree)
    return [_pack_group([leaves[i] for i in group.members], group) for group in layout.groups]


def unpack(flats: Sequence[Tensor], layout: Layout) -> Any:
    """The tree whose leaves are views into ``flats``."""
    return optree.tree_unflatten(layout.treespec, layout.views(flats))


def leaves_with_paths(tree: Any) -> list[tuple[str, Tensor]]:
    """Leaves with a readable name each, in leaf order."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    names = ["/".join(str(entry) for entry in path) or "the tensor" for path in paths]
    return list(zip(names, cast("list[Tensor]", leaves), strict=True))


def _flatten(tree: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    leaves, treespec = optree.tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"expected a pytree of tensors, got a leaf of type {type(leaf).__name__}: {leaf!r}"
            )
    return cast("list[Tensor]", leaves), treespec


def _pack_group(leaves: list[Tensor], group: _Group) -> Tensor:
    if not group.total:
        return torch.zeros(0, dtype=group.dtype, device=group.device)
    flat = _shared_base(leaves, group)
    if flat is not None:
        return flat
    return torch.cat([_flat(leaf, group) for leaf in leaves])


def _shared_base(leaves: list[Tensor], group: _Group) -> Tensor | None:
    """The flat tensor whose consecutive views the leaves are, if there is one."""
    first = leaves[0].detach()
    start, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for leaf, offset in zip(leaves, group.offsets, strict=True):
        if (
            leaf.dtype != group.dtype
            or not leaf.is_contiguous()
            or leaf.storage_offset() != start + offset
            or leaf.untyped_storage().data_ptr() != storage
        ):
            return None
    return first.as_strided((group.total,), (1,), start)


def _flat(leaf: Tensor, group: _Group) -> Tensor:
    return leaf.detach().reshape(-1).to(device=group.device, dtype=group.dtype)
