"""Attention and pooling, which have no parameters: outside of vmap they are one fast kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning.dpsgd.clipping._entries import NoRule, rule_for
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []


@rule_for(functional.scaled_dot_product_attention, row_wise=True)
def _attention(
    tape: Tape,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Each sequence by itself, so those of all examples are one batch."""
    if query.dim() < 3 or not all(tape.is_data(x) for x in (query, key, value)):
        raise NoRule
    shape = query.shape[:-2]
    query, key, value = (x.flatten(0, -4) if x.dim() > 4 else x for x in (query, key, value))
    if isinstance(attn_mask, Tensor):
        own = tape.is_data(attn_mask) or tape.is_parameter(attn_mask)
        if own or attn_mask.dim() > 2:
            attn_mask = _mask(tape.own(attn_mask), shape)
    output = func(query, key, value, attn_mask, *args, **options)
    return output.reshape(*shape, *output.shape[-2:])


def _mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """[B, ..., L, S] to what broadcasts to [batch, heads, L, S]; queries begin with ``shape``."""
    lead = mask.shape[1:-2]
    mask = mask.reshape(len(mask), *[1] * (len(shape) - 1 - len(lead)), *lead, *mask.shape[-2:])
    return mask.expand(*shape[:-1], *mask.shape[-3:]).flatten(0, -4) if len(shape) > 2 else mask


# Numbers that a processor compares at once.
_VECTOR = 8
_POOLING = {
    functional.max_pool1d: 1, functional.max_pool2d: 2, functional.max_pool3d: 3,
    torch.max_pool1d: 1, torch.max_pool2d: 2, torch.max_pool3d: 3, functional.avg_pool1d: 1,
    functional.avg_pool2d: 2, functional.avg_pool3d: 3, torch.adaptive_avg_pool1d: 1,
    functional.adaptive_avg_pool2d: 2, functional.adaptive_avg_pool3d: 3,
}  # fmt: skip


@rule_for(*_POOLING, row_wise=True)
def _pooling(tape: Tape, func: Any, input: Tensor, *args: Any, **options: Any) -> Tensor:
    """Each channel by itself, so the images of all examples are one batch."""
    if not tape.is_data(input) or input.dim() != _POOLING[func] + 3:
        raise NoRule
    if options.get("return_indices") or len(args) > 5:  # the sixth asks for indices, too
        raise NoRule
    images = input.flatten(0, 1)
    greatest = func in (functional.max_pool2d, torch.max_pool2d)
    if greatest and images.device.type == "cpu" and images.shape[1] >= _VECTOR:
        # Channel beside channel its kernel compares whole vectors, and takes a third of the time.
        # Not so what is before it: on two layouts at once it would take many times as long.
        if images.requires_grad:
            images.register_hook(Tensor.contiguous)
        images = images.contiguous(memory_format=torch.channels_last)
    return func(images, *args, **options).contiguous().unflatten(0, input.shape[:2])
