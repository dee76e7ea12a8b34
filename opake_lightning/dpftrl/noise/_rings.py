"""Several vectors as large as the model, as one matrix per type and device.

What a stream remembers are rows of such a matrix, so that a weighted sum of all of them is one
matrix-vector product, and overwriting the oldest is one copy. Outside, in states and checkpoints,
it is a pytree with the template's structure, whose leaves have one more dimension in front:
``[rows, *shape]``, each a view of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from opake_lightning import _pool
from opake_lightning._tree import Layout
from opake_lightning.distributed import world_size
from opake_lightning.errors import CheckpointError
from opake_lightning.random import elements_of

__all__ = ["put_together", "rings_behind", "tree_of", "zero_rings"]

_ALIGNED = 16


def zero_rings(layout: Layout, rows: int) -> list[Tensor]:
    """Matrices of zeros, [rows, elements], one for each group of ``layout``."""
    return [ring.zero_() for ring in _empty(layout, rows)]


def tree_of(rings: Sequence[Tensor], layout: Layout) -> Any:
    """The tree of ``[rows, *shape]`` leaves that are views of ``rings``."""
    views: dict[int, Tensor] = {}
    for group, ring in zip(layout.groups, rings, strict=True):
        rows, pitch, begin = len(ring), ring.stride(0), ring.storage_offset()
        for i, offset in zip(group.members, group.offsets, strict=True):
            views[i] = ring.as_strided(
                (rows, *layout.shapes[i]), (pitch, *layout.strides[i]), begin + offset
            )
    return optree.tree_unflatten(layout.treespec, [views[i] for i in range(len(views))])


def rings_behind(tree: Any, layout: Layout, rows: int, *, copy: bool) -> tuple[list[Tensor], Any]:
    """The matrices that the leaves of ``tree`` are views of, and the tree of these views.

    Args:
        tree: What :func:`tree_of` made, or has been restored from a checkpoint.
        layout: Of one row.
        rows: Their number.
        copy: Give new matrices with the same values; they are also new where leaves are no views.

    Raises:
        CheckpointError: If the leaves do not have the layout's structure, shapes, types or devices.
    """
    leaves = _fitting(tree, layout, rows)
    found = _shared(leaves, layout, rows)
    if found is not None and not copy:
        return found, tree
    rings = _empty(layout, rows)
    new = tree_of(rings, layout)
    if found is not None:
        for ring, old in zip(rings, found, strict=True):
            ring.copy_(old)
    else:
        for leaf, old in zip(optree.tree_leaves(new), leaves, strict=True):
            leaf.copy_(old)
    return rings, new


def put_together(ring: Tensor) -> None:
    """Let every rank have, in the columns of each rank's share of them, what that one has."""
    if not ring.numel():
        return
    for other in range(world_size()):
        begin, end = elements_of(ring[0], (other, world_size()))
        if begin < end:
            part = ring[:, begin:end].contiguous()
            dist.broadcast(part, other)
            ring[:, begin:end] = part


def _empty(layout: Layout, rows: int) -> list[Tensor]:
    rings: list[Tensor] = []
    for group in layout.groups:
        pitch = _pitch(group.total)
        flat = _pool.empty(rows * pitch, group.dtype, group.device)
        rings.append(flat.view(rows, pitch)[:, : group.total])
    return rings


def _pitch(total: int) -> int:
    """Elements from one row to the next.

    Rows start aligned, and an odd number of units apart: many rows a power of two apart would
    compete for the same few lines of the cache.
    """
    return (-(-total // _ALIGNED) | 1) * _ALIGNED


def _fitting(tree: Any, layout: Layout, rows: int) -> list[Tensor]:
    leaves, treespec = optree.tree_flatten(tree)
    wanted = [(rows, *shape) for shape in layout.shapes]
    if treespec != layout.treespec or [tuple(leaf.shape) for leaf in leaves] != wanted:
        raise CheckpointError(
            "the buffers of the noise state have another structure or other shapes than the "
            "template has; restore with the strategy, memory and model that the state was saved "
            "with"
        )
    for group in layout.groups:
        kinds = {(leaves[i].dtype, leaves[i].device) for i in group.members}
        if kinds != {(group.dtype, group.device)}:
            raise CheckpointError(
                f"the buffers of the noise state must be {group.dtype} on {group.device} where the "
                f"template's leaves are, got {sorted(map(str, kinds))}; restore into a state that "
                "mf_gaussian_noise made for this template"
            )
    return leaves


def _shared(leaves: list[Tensor], layout: Layout, rows: int) -> list[Tensor] | None:
    """The matrices whose columns the leaves are, if there are such."""
    rings: list[Tensor] = []
    for group in layout.groups:
        pitch = _pitch(group.total)
        filled = [leaves[i] for i in group.filled]
        if not filled:
            rings.append(torch.zeros(rows, 0, dtype=group.dtype, device=group.device))
            continue
        first = filled[0]
        start, begin = first.data_ptr(), first.storage_offset()
        strides = [(pitch, *layout.strides[i]) for i in group.filled]
        if (
            [leaf.data_ptr() for leaf in filled] != [start + place for place in group.starts]
            or [leaf.stride() for leaf in filled] != strides
            # Addresses in a row lie in one tensor only if its storage reaches that far.
            or (begin + rows * pitch) * first.element_size() > first.untyped_storage().nbytes()
        ):
            return None
        rings.append(first.as_strided((rows, group.total), (pitch, 1), begin))
    return rings
