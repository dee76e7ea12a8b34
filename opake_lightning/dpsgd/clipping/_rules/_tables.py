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
    tape: Tape, func: Any, input: Tensor, weight: Tensor, padding_idx: Any = None, **options: Any
) -> Tensor:
    """Row lookup: row ``input[t]`` gets dyₜ."""
    if not tape.is_data(input) or tape.is_data(weight) or options.get("scale_grad_by_freq"):
        raise NoRule
    output = func(input, tape.value(weight), padding_idx)
    return _looked_up(tape, output, input, weight, padding_idx)


@rule_for(torch.embedding)
def _torch_embedding(
    tape: Tape, func: Any, weight: Tensor, indices: Tensor, padding_idx: int = -1, *rest: Any
) -> Tensor:
    if any(rest):
        raise NoRule
    padding = padding_idx if padding_idx >= 0 else None
    return _embedding(tape, functional.embedding, indices, weight, padding)


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
    padding = padding_idx if padding_idx >= 0 else None
    return _of_copies(indices, weight, padding, None, 2.0, *rest)


def _strided_of_copies(table: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In memory of its own: the rows of an expanded view lie on each other."""
    return table.clone().as_strided(*args, **kwargs)


OF_COPIES[Tensor.as_strided] = OF_COPIES[torch.as_strided] = _strided_of_copies
OF_COPIES[functional.embedding] = _of_copies
OF_COPIES[torch.embedding] = _torch_of_copies


@rule_for(Tensor.__getitem__)
def _getitem(tape: Tape, func: Any, table: Any, index: Any) -> Tensor:
    """A table indexed by integers."""
    single = isinstance(index, (tuple, list)) and len(cast("tuple[Any, ...]", index)) == 1
    index = cast("Any", index)[0] if single else index
    integers = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if not tape.is_parameter(table) or not integers or not tape.is_data(index) or table.dim() != 2:
        raise NoRule
    output = func(tape.value(table), index)
    return _looked_up(tape, output, index % len(table), table)


def _looked_up(
    tape: Tape, output: Tensor, ids: Tensor, table: Tensor, padding_idx: int | None = None
) -> Tensor:
    def gradients(dy: Tensor) -> Gradients:
        rows, values = tape.rows(ids.long(), 0), tape.rows(dy, 1)
        if padding_idx is not None:
            padding = rows == padding_idx % len(table)
            values = values.masked_fill(padding.unsqueeze(-1), 0)
        return Rows(rows, values, len(table))

    return tape.record("lookup", output, [(table, gradients)], ids)


@rule_for(functional.embedding_bag)
def _embedding_bag(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Tensor,
    offsets: Any = None,
    *,
    mode: str = "mean",
    per_sample_weights: Any = None,
    padding_idx: int | None = None,
    **options: Any,
) -> Tensor:
    """Sum or mean of rows."""
    unusual = options.get("scale_grad_by_freq") or options.get("include_last_offset")
    unusual = unusual or offsets is not None or mode == "max" or input.dim() != 3
    shares = per_sample_weights
    own = shares is not None and not tape.is_data(shares)
    if unusual or own or not tape.is_data(input) or tape.is_data(weight):
        raise NoRule
    output = func(
        input.flatten(0, 1), tape.value(weight), mode=mode, padding_idx=padding_idx,
        per_sample_weights=None if shares is None else shares.flatten(0, 1), **options,
    ).unflatten(0, input.shape[:2])  # fmt: skip

    def gradients(dy: Tensor) -> Gradients:
        kept = torch.ones_like(input, dtype=dy.dtype)
        if padding_idx is not None:
            kept = (input != padding_idx % len(weight)).to(dy.dtype)
        share = kept if shares is None else kept * shares.detach()
        if mode == "mean":
            share = share / kept.sum(-1, keepdim=True).clamp(min=1)
        values = dy.unsqueeze(2) * share.unsqueeze(-1)
        return Rows(tape.rows(input.long(), 0), tape.rows(values, 1), len(weight))

    inputs = [input] if shares is None else [input, shares]
    return tape.record("embedding_bag", output, [(weight, gradients)], *inputs)
