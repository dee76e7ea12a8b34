"""``nn.MultiheadAttention`` and what is built of it, option by option; its function itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import B, Case, Spec, of_function, of_module, reduced, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)

D, H, T, S = 8, 2, 5, 6  # width, heads, queries, keys


def causal(steps: int, width: int | None = None) -> Tensor:
    return torch.ones(steps, width or steps, dtype=torch.bool).triu(1)


def padding(steps: int) -> Tensor:
    """True at padding: rows of 2, 3, ... tokens."""
    return torch.arange(steps) >= torch.arange(2, 2 + B)[:, None]


def randomised(net: nn.Module) -> nn.Module:
    """With biases that are not zero, as they are at first."""
    for name, parameter in net.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return net


# -- nn.MultiheadAttention ------------------------------------------------------------------------


class _Attention(nn.Module):
    """Self-attention, or attention to a memory, with masks of each example among the inputs."""

    def __init__(self, *, call: Any, names: tuple[str, ...], first: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=first, **options)
        self.call, self.names, self.first = call, names, first

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        given = dict(zip(self.names, more, strict=True))
        keys, values = given.pop("keys", x), given.pop("values", None)
        values = keys if values is None else values
        turn = (lambda t: t) if self.first else (lambda t: t.transpose(0, 1))
        call = {**self.call, **given}
        out, weights = self.attention(turn(x), turn(keys), turn(values), **call)
        out = turn(out)
        return out if weights is None else out.mean((1, 2))[:, None] + weights.flatten(1)


def _mha(
    options: dict[str, Any] | None = None,
    call: dict[str, Any] | None = None,
    first: bool = True,
    train: bool = True,
    **inputs: Any,
) -> Spec:
    """The spec of attention; a shape among ``inputs`` is of one example, as is a function of B."""

    def make(dtype: torch.dtype) -> Case:
        net = _Attention(
            call={"need_weights": False, **_cast(call or {}, dtype)},
            names=tuple(inputs),
            first=first,
            **(options or {}),
        )
        batch = [torch.randn(B, T, D)]
        for value in inputs.values():
            batch.append(torch.randn(B, *value) if isinstance(value, tuple) else value())
        return of_module(randomised(net).train(train), *batch, dtype=dtype)

    return Spec(make)


def _cast(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in call.items()
    }


def _mask_of_each_head() -> Tensor:
    """One mask for each example and head, as nn.MultiheadAttention takes it from the batch."""
    return torch.randn(B, H, T, T)


CASES |= {
    "mha-time-first": _mha(first=False),
    "mha-time-first-padded": _mha(first=False, key_padding_mask=lambda: padding(T)),
    "mha-in-evaluation": _mha(train=False),
    "mha-in-evaluation-padded": _mha(train=False, key_padding_mask=lambda: padding(T)),
    "mha-with-weights": _mha(call={"need_weights": True}),
    "mha-with-weights-of-each-head": _mha(
        call={"need_weights": True, "average_attn_weights": False}
    ),
    "mha-with-weights-padded": _mha(
        call={"need_weights": True}, key_padding_mask=lambda: padding(T)
    ),
    "mha-memory": _mha(keys=(S, D)),
    "mha-memory-time-first": _mha(first=False, keys=(S, D)),
    "mha-keys-and-values": _mha(keys=(S, D), values=(S, D)),
    "mha-memory-padded": _mha(keys=(S, D), key_padding_mask=lambda: padding(S)),
    "mha-widths": _mha({"kdim": 3, "vdim": 7}, keys=(S, 3), values=(S, 7)),
    "mha-widths-without-bias": _mha(
        {"kdim": 3, "vdim": 7, "bias": False}, keys=(S, 3), values=(S, 7)
    ),
    "mha-bias-kv": _mha({"add_bias_kv": True}),
    "mha-bias-kv-padded": _mha({"add_bias_kv": True}, key_padding_mask=lambda: padding(T)),
    "mha-zero-attention": _mha({"add_zero_attn": True}),
    "mha-bias-kv-and-zero-attention-masked": _mha(
        {"add_bias_kv": True, "add_zero_attn": True}, {"attn_mask": causal(T)}
    ),
    "mha-masked": _mha(call={"attn_mask": causal(T)}),
    "mha-mask-of-numbers": _mha(call={"attn_mask": torch.linspace(-1, 1, T * T).view(T, T)}),
    "mha-masked-and-padded": _mha(
        call={"attn_mask": causal(T)}, key_padding_mask=lambda: padding(T)
    ),
    "mha-mask-of-heads": _mha(call={"attn_mask": torch.linspace(-1, 1, H * T * T).view(H, T, T)}),
    "mha-causal": _mha(call={"attn_mask": causal(T), "is_causal": True}),
    "mha-padding-of-numbers": _mha(
        key_padding_mask=lambda: torch.randn(B, T),
    ),
    "mha-without-bias": _mha({"bias": False}),
}


@case()
def mha_mask_of_each_example(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, H, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.attention(x, x, x, attn_mask=mask.flatten(0, 1), need_weights=False)[0]

    return of_module(Net(), torch.randn(B, T, D), _mask_of_each_head(), dtype=dtype)


@case(mixes=True)
def mha_of_one_sequence(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, H)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            (x,), (padding,) = x, padding  # not batched at all
            return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0][None]

    return of_module(Net(), torch.randn(B, T, D), padding(T), dtype=dtype)


@case()
def mha_frozen_projections(dtype):
    net = _Attention(call={"need_weights": False}, names=(), first=True)
    net.attention.in_proj_weight.requires_grad_(requires_grad=False)
    net.attention.out_proj.weight.requires_grad_(requires_grad=False)
    return of_module(randomised(net), torch.randn(B, T, D), dtype=dtype)


@case()
def mha_of_learned_queries(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(3, D))
            self.attention = nn.MultiheadAttention(D, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            queries = self.queries.expand(len(x), -1, -1)
            return self.attention(queries, x, x, need_weights=False)[0]

    return of_module(Net(), torch.randn(B, T, D), dtype=dtype)


# -- layers and stacks ----------------------------------------------------------------------------


class _Padded(nn.Module):
    """A stack on embedded tokens, id 0 being padding."""

    def __init__(self, stack: nn.Module, *, first: bool = True) -> None:
        super().__init__()
        self.embed, self.stack, self.first = nn.Embedding(7, D), stack, first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.stack(x if self.first else x.transpose(0, 1), src_key_padding_mask=ids == 0)
        x = x if self.first else x.transpose(0, 1)
        return x[:, 0]


def _encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(D, H, 12, **{"dropout": 0.0, "batch_first": True, **options})


def _encoder(nested: bool = False, **options: Any) -> nn.Module:
    layer = _encoder_layer(**options)
    return nn.TransformerEncoder(
        layer, 2, nn.LayerNorm(D), enable_nested_tensor=nested, mask_check=nested
    )


def _stack(make: Any, *, train: bool, first: bool = True, **known: Any) -> Spec:
    def of(dtype: torch.dtype) -> Case:
        net = _Padded(make(), first=first).train(train)
        ids = torch.randint(1, 7, (B, T)).masked_fill(padding(T), 0)
        return of_module(randomised(net), ids, dtype=dtype)

    return Spec(of, **known)


CASES |= {
    f"encoder-{name}-{'training' if train else 'evaluation'}": _stack(
        make, train=train, first=first
    )
    for train in (True, False)
    for name, make, first in (
        ("layer", _encoder_layer, True),
        ("layer-norm-first", lambda: _encoder_layer(norm_first=True, activation="gelu"), True),
        ("layer-time-first", lambda: _encoder_layer(batch_first=False), False),
        ("stack", _encoder, True),
        ("stack-nested", lambda: _encoder(nested=True), True),
        ("stack-norm-first", lambda: _encoder(norm_first=True, bias=False), True),
    )
}


@case()
def encoder_causal(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = _encoder()

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)
            return self.stack(x, mask=mask, is_causal=True)

    return of_module(randomised(Net()), torch.randn(B, T, D), dtype=dtype)


class _Decoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(D, H, 12, 0.0, batch_first=True, **options)
        self.stack = nn.TransformerDecoder(layer, 2, nn.LayerNorm(D))

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        return self.stack(x, memory, tgt_mask=causal(T), memory_key_padding_mask=padding)


CASES |= {
    f"decoder-stack-{name}": Spec(
        lambda dtype, options=options, train=train: of_module(
            randomised(_Decoder(**options)).train(train),
            torch.randn(B, T, D),
            torch.randn(B, S, D),
            padding(S),
            dtype=dtype,
        )
    )
    for name, options, train in (
        ("training", {}, True),
        ("evaluation", {}, False),
        ("norm-first", {"norm_first": True, "activation": F.gelu}, True),
        ("without-bias", {"bias": False}, True),
    )
}


@case()
def transformer(dtype):
    net = nn.Transformer(D, H, 1, 1, 12, dropout=0.0, batch_first=True)
    return of_module(
        randomised(net),
        torch.randn(B, S, D),
        torch.randn(B, T, D),
        dtype=dtype,
        tgt_mask=causal(T),
        tgt_is_causal=True,
    )


# -- scaled_dot_product_attention itself ----------------------------------------------------------


def _sdpa(of: Any, *inputs: Any, loss: Any = reduced, **params: tuple[int, ...]) -> Spec:
    """The spec of ``of(p, q, k, v, *inputs)`` on projections of x, in two heads."""

    def loss_of(p: Any, x: Tensor, *more: Tensor) -> Tensor:
        q, k, v = F.linear(x, p["qkv"]).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return of(p, q, k, v, *more)

    return of_function(loss_of, {"qkv": (3 * D, D), **params}, (T, D), *inputs, loss=loss)


sdpa = F.scaled_dot_product_attention
CASES |= {
    "sdpa": _sdpa(lambda p, q, k, v: sdpa(q, k, v)),
    "sdpa-scaled": _sdpa(lambda p, q, k, v: sdpa(q, k, v, scale=0.3)),
    "sdpa-causal": _sdpa(lambda p, q, k, v: sdpa(q, k, v, is_causal=True)),
    "sdpa-by-name": _sdpa(lambda p, q, k, v: sdpa(key=k, value=v, query=q, is_causal=True)),
    "sdpa-three-dimensions": _sdpa(lambda p, q, k, v: sdpa(q[:, 0], k[:, 0], v[:, 1])),
    "sdpa-three-dimensions-causal": _sdpa(
        lambda p, q, k, v: sdpa(q[:, 0], k[:, 0], v[:, 1], is_causal=True)
    ),
    "sdpa-heads-folded-into-the-batch": _sdpa(
        lambda p, q, k, v: sdpa(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, (-1, H))
    ),
    "sdpa-five-dimensions": _sdpa(
        lambda p, q, k, v: sdpa(*(t.unflatten(-1, (2, 2)).movedim(-1, 2) for t in (q, k, v)))
    ),
    "sdpa-mask": _sdpa(lambda p, q, k, v: sdpa(q, k, v, ~causal(T))),
    "sdpa-mask-of-numbers": _sdpa(
        lambda p, q, k, v: sdpa(q, k, v, torch.linspace(-1, 1, T * T).view(T, T).to(q))
    ),
    "sdpa-mask-of-heads": _sdpa(
        lambda p, q, k, v: sdpa(q, k, v, torch.linspace(-1, 1, H * T * T).view(1, H, T, T).to(q))
    ),
    "sdpa-mask-of-examples": _sdpa(
        lambda p, q, k, v, m: sdpa(q, k, v, ~m[:, None, None]), padding(T)
    ),
    "sdpa-mask-of-examples-in-three-dimensions": _sdpa(
        lambda p, q, k, v, m: sdpa(q[:, 0], k[:, 0], v[:, 0], ~m[:, None]), padding(T)
    ),
    "sdpa-numbers-of-examples": _sdpa(lambda p, q, k, v, m: sdpa(q, k, v, m[:, None]), (T, T)),
    "sdpa-learned-bias": _sdpa(lambda p, q, k, v: sdpa(q, k, v, p["bias"]), bias=(H, T, T)),
    "sdpa-learned-bias-alike-for-heads": _sdpa(
        lambda p, q, k, v: sdpa(q, k, v, p["bias"]), bias=(T, T)
    ),
    "sdpa-learned-bias-of-the-distance": _sdpa(
        lambda p, q, k, v: sdpa(
            q, k, v, p["table"][torch.arange(T)[:, None] - torch.arange(T) + T - 1].movedim(2, 0)
        ),
        table=(2 * T - 1, H),
    ),
    "sdpa-learned-bias-and-padding": _sdpa(
        lambda p, q, k, v, m: sdpa(
            q, k, v, p["bias"] + torch.where(m, -torch.inf, 0.0).to(q)[:, None, None]
        ),
        padding(T),
        bias=(H, T, T),
    ),
    "sdpa-learned-queries": _sdpa(
        lambda p, q, k, v: q.mean(2, keepdim=True) + sdpa(p["queries"].expand_as(q), k, v),
        queries=(1, H, T, D // H),
    ),
    "sdpa-learned-queries-without-a-batch": _sdpa(
        lambda p, q, k, v: q + sdpa(p["queries"], k[0], v[0])[None], queries=(H, T, D // H)
    ),
    "sdpa-learned-keys-and-values": _sdpa(
        lambda p, q, k, v: k + v + sdpa(q, *(p[n].expand(len(q), -1, -1, -1) for n in "kv")),
        k=(H, S, D // H),
        v=(H, S, D // H),
    ),
    "sdpa-learned-prefix": _sdpa(
        lambda p, q, k, v: sdpa(
            q,
            torch.cat([p["k"].expand(len(q), -1, -1, -1), k], 2),
            torch.cat([p["v"].expand(len(q), -1, -1, -1), v], 2),
        ),
        k=(H, 2, D // H),
        v=(H, 2, D // H),
    ),
    "sdpa-of-one-sequence": _sdpa(lambda p, q, k, v: sdpa(q[0], k[0], v[0])[None]),
    "sdpa-of-one-head-of-one-sequence": _sdpa(
        lambda p, q, k, v: sdpa(q[0, 0], k[0, 0], v[0, 1])[None]
    ),
    "sdpa-memory-alike-for-all": _sdpa(
        lambda p, q, k, v: (
            k.mean()
            + sdpa(
                q,
                torch.ones(1, H, S, D // H).to(q).cumsum(2),
                v[:, :, :1].expand(-1, -1, S, -1) * torch.arange(S)[:, None].to(q),
            )
        )
    ),
}
for _name in (
    "sdpa-of-one-sequence",
    "sdpa-of-one-head-of-one-sequence",
    "sdpa-learned-queries-without-a-batch",
    "sdpa-memory-alike-for-all",
    "mha-mask-of-heads",
):
    CASES[_name] = replace(CASES[_name], mixes=True)
# vmap cannot run the fused kernel with a bias that has a gradient.
for _name in ("sdpa-learned-bias-alike-for-heads", "sdpa-learned-bias-and-padding"):
    CASES[_name] = replace(CASES[_name], beyond_vmap=True)
