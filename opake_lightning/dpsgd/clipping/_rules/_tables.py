"""Tables that are looked up by integers of an example."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning.dpsgd.clipping._entries import OF_COPIES, NoRule, rule_for
from opake_lightning.dpsgd.clipping._gradients import Gradients, Rows
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []


@rule_for(functional.embedding)
def _embedding(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Row lookup: row ``input[t]`` gets dyₜ."""
    del max_norm, norm_type, sparse  # the first is refused before
    if not tape.is_data(input) or tape.is_data(weight) or scale_grad_by_freq:
        raise NoRule
    output = func(input, tape.value(weight), padding_idx)
    return _looked_up(tape, "embedding", output, input, weight, padding_idx)


@rule_for(torch.embedding)
def _torch_embedding(
    tape: Tape, func: Any, weight: Tensor, indices: Tensor, padding_idx: int = -1, *rest: Any
) -> Tensor:
    if not tape.is_data(indices) or tape.is_data(weight) or any(rest):
        raise NoRule
    output = func(tape.value(weight), indices, padding_idx)
    padding = padding_idx if padding_idx >= 0 else None
    return _looked_up(tape, "embedding", output, indices, weight, padding)


def _of_copies(
    input: Tensor, weight: Tensor, padding_idx: Any = None, *rest: Any, **more: Any
) -> Any:
    """Row lookup in a table of each example's own.

    Under vmap torch lays such tables behind each other, but takes ``padding_idx`` for a row of the
    first; here that row is one without a gradient instead.
    """
    out = functional.embedding(input, weight, None, *rest, **more)
    if padding_idx is None:
        return out
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, out.detach(), out)


def _torch_of_copies(weight: Tensor, indices: Tensor, padding_idx: int = -1, *rest: Any) -> Any:
    by_freq, sparse = (*rest, False, False)[:2]
    return _of_copies(
        indices, weight, padding_idx if padding_idx >= 0 else None, None, 2.0, by_freq, sparse
    )


def _strided_of_copies(table: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In memory of its own: the rows of an expanded view lie on each other."""
    return table.clone().as_strided(*args, **kwargs)


OF_COPIES[Tensor.as_strided] = OF_COPIES[torch.as_strided] = _strided_of_copies
OF_COPIES[functional.embedding] = _of_copies
OF_COPIES[torch.embedding] = _torch_of_copies


@rule_for(Tensor.__getitem__)
def _getitem(tape: Tape, func: Any, table: Any, index: Any) -> Tensor:
    """A table indexed by integers."""
    if isinstance(index, (tuple, list)) and len(cast("tuple[Any, ...]", index)) == 1:
        index = cast("Any", index)[0]
    index = cast("Any", index)
    integers = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if not tape.is_parameter(table) or not integers or not tape.is_data(index) or table.dim() != 2:
        raise NoRule
    output = func(tape.value(table), index)
    return _looked_up(tape, "indexing", output, index % len(table), table, None)


def _looked_up(
    tape: Tape, name: str, output: Tensor, ids: Tensor, table: Tensor, padding_idx: int | None
) -> Tensor:
    def gradients(dy: Tensor) -> Gradients:
        rows = tape.rows(ids.long(), 0)
        values = tape.rows(dy, 1)
        if padding_idx is not None:
            padding = rows == padding_idx % table.shape[0]
            values = values.masked_fill(padding.unsqueeze(-1), 0)
        return Rows(rows, values, table.shape[0])

    return tape.record(name, output, [(table, gradients)], ids)


@rule_for(functional.embedding_bag)
def _embedding_bag(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Tensor,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum or mean of rows."""
    del max_norm
    unusual = scale_grad_by_freq or include_last_offset or offsets is not None or mode == "max"
    own = per_sample_weights is not None and not tape.is_data(per_sample_weights)
    if unusual or own or not tape.is_data(input) or tape.is_data(weight) or input.dim() != 3:
        raise NoRule
    bags = input.flatten(0, 1)
    shares = None if per_sample_weights is None else per_sample_weights.flatten(0, 1)
    output = func(
        bags, tape.value(weight), None, None, norm_type, False, mode, sparse, shares, False,
        padding_idx,
    ).unflatten(0, input.shape[:2])  # fmt: skip

    def gradients(dy: Tensor) -> Gradients:
        kept = torch.ones_like(input, dtype=dy.dtype)
        if padding_idx is not None:
            kept = (input != padding_idx % weight.shape[0]).to(dy.dtype)
        share = kept if per_sample_weights is None else kept * per_sample_weights.detach()
        if mode == "mean":
            share = share / kept.sum(-1, keepdim=True).clamp(min=1)
        values = dy.unsqueeze(2) * share.unsqueeze(-1)
        return Rows(tape.rows(input.long(), 0), tape.rows(values, 1), weight.shape[0])

    inputs = [input] if per_sample_weights is None else [input, per_sample_weights]
    return tape.record("embedding_bag", output, [(weight, gradients)], *inputs)
