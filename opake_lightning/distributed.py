"""Sums over ranks, and checks that ranks agree.

Every function is the identity in a process that is not part of a group, so the same code runs on
one device and on many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opake_lightning._tree import layouts_of_sum, pack, unpack
from opake_lightning.errors import PrivacyError
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

__all__ = ["leave_group", "rank", "require_equal", "sum_flats_", "sum_gradients", "world_size"]

_LEAVING = 0.1  # seconds


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks; 1 outside a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    return 1


def rank(group: dist.ProcessGroup | None = None) -> int:
    """Number of this rank; 0 outside a process group."""
    return dist.get_rank(group) if world_size(group) > 1 else 0


def sum_gradients(
    grads: Any, *, group: dist.ProcessGroup | None = None, inplace: bool = False
) -> Any:
    """Sum of clipped gradients over all ranks; equal on every rank.

    One collective per dtype and device, over packed leaves, in the type that the sum of a rank is
    kept in: a :class:`~opake_lightning.types.ClippedPytree` with ``dtypes`` stays in float64. Each
    example lives on one rank, so the sensitivity of the sum is that of a part. Call it before noise
    is added: noise of a common key would be summed with the gradients. Of a
    :class:`~opake_lightning.types.SecondMomentClippedPytree` both parts are summed; the square of
    the aggregate is no part of it yet, so it will be that of the total.

    Args:
        grads: A :class:`~opake_lightning.types.ClippedPytree`, a pair, or a raw pytree of tensors
            for a run that is meant to be non-private.
        group: Process group; None is the default one.
        inplace: Reduce in the memory of ``grads``.

    Returns:
        The same kind of object as ``grads``.

    Raises:
        PrivacyError: If given a ``NoisedPytree`` or a ``SecondMomentNoiseOutput``.
    """
    if isinstance(grads, (NoisedPytree, SecondMomentNoiseOutput)):
        raise PrivacyError(
            f"sum_gradients got a {type(grads).__name__}: summing it would add every rank's copy "
            "of the same noise; sum what the clipping function returned, then add noise"
        )
    if isinstance(grads, SecondMomentClippedPytree):
        gradient = sum_gradients(grads.gradient, group=group, inplace=inplace)
        square = None
        if grads.square is not None:
            square = sum_gradients(grads.square, group=group, inplace=inplace)
        return replace(grads, gradient=gradient, square=square)
    if isinstance(grads, ClippedPytree):
        return replace(grads, pytree=_summed(grads.pytree, grads.dtypes, group, inplace=inplace))
    return _summed(grads, None, group, inplace=inplace)


def sum_flats_(flats: Sequence[Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Sum each of ``flats`` over all ranks, in place."""
    if world_size(group) > 1:
        for flat in flats:
            dist.all_reduce(flat, group=group)


def _summed(
    tree: Any,
    dtypes: tuple[torch.dtype, ...] | None,
    group: dist.ProcessGroup | None,
    *,
    inplace: bool,
) -> Any:
    if world_size(group) == 1:
        return tree
    layout, _ = layouts_of_sum(tree, dtypes)
    flats = pack(tree, layout)
    if not inplace:
        flats = [flat.clone() for flat in flats]
    sum_flats_(flats, group=group)
    return unpack(flats, layout)


def require_equal(values: Mapping[str, object], *, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank, naming what differs, unless ``values`` are equal on all ranks.

    Args:
        values: Named plain values, such as a plan's fields.
        group: Process group; None is the default one.

    Raises:
        PrivacyError: If any value differs between ranks.
    """
    if world_size(group) == 1:
        return
    gathered: list[Any] = [None] * world_size(group)
    dist.all_gather_object(gathered, dict(values), group=group)
    # Names of all ranks: a rank that lacks one must raise too, or it would wait for the others.
    for name in dict.fromkeys(name for other in gathered for name in other):
        seen = [other.get(name, "<missing>") for other in gathered]
        if any(value != seen[0] for value in seen):
            raise PrivacyError(
                f"ranks disagree on {name}: {seen}; every rank must have the same model, plan, "
                "dataset and checkpoint"
            )


def leave_group() -> None:
    """Leave the default process group, if there is one; for the end of a process.

    A thread of gloo may still hold the tensors of the last sum, and needs the interpreter to let go
    of them. If that is closing down by then, the process is aborted, and so reports a failure after
    all work is done.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        # Nothing tells when such a thread is through; it only has to get its turn.
        time.sleep(_LEAVING)
