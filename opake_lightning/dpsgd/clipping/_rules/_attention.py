"""Attention without parameters: outside of vmap it is one fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning.dpsgd.clipping._tape import NoRule, Tape, rule_for

__all__: list[str] = []


@rule_for(functional.scaled_dot_product_attention, row_wise=True)
def _attention(
    tape: Tape,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
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
    output = func(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return output.reshape(*shape, *output.shape[-2:])


def _mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """[B, ..., L, S] to what broadcasts to [batch, heads, L, S]; queries begin with ``shape``."""
    lead = mask.shape[1:-2]
    mask = mask.reshape(len(mask), *[1] * (len(shape) - 1 - len(lead)), *lead, *mask.shape[-2:])
    return mask.expand(*shape[:-1], *mask.shape[-3:]).flatten(0, -4) if len(shape) > 2 else mask
