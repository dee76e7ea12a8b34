"""Recurrent layers, packed and not, and their cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.dpsgd.clipping.case import ALONE, B, Case, Spec, of_module, reduced, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)

I, H, T = 3, 4, 6  # noqa: E741 - features in, features out, steps
LENGTHS = torch.tensor([3, 6, 1, 4])
KINDS: dict[str, Callable[..., nn.Module]] = {
    "rnn": nn.RNN,
    "relu-rnn": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
}
# No rule of vmap's own.
KNOWN = {"beyond_vmap": True}


class _Net(nn.Module):
    """A layer between linear ones; what comes out are all outputs, or the last state."""

    def __init__(self, layer: nn.Module, *, last: bool = False, first: bool = True) -> None:
        super().__init__()
        self.enter, self.layer = nn.Linear(I, I), layer
        width = (1 + layer.bidirectional) * (getattr(layer, "proj_size", 0) or H)
        self.leave = nn.Linear(width, 2)
        self.last, self.first = last, first

    def run(self, x: Tensor) -> Any:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        out, state = self.run(x if self.first else x.transpose(0, 1))
        if self.last:
            states = state if isinstance(state, tuple) else (state,)
            return torch.cat([s.transpose(0, 1).flatten(1).sin() for s in states], 1)
        out = self.leave(out)
        return out if self.first else out.transpose(0, 1)


def _of(make: Callable[[], nn.Module], **known: Any) -> Spec:
    return Spec(
        lambda dtype: of_module(make(), torch.randn(B, T, I), dtype=dtype), **{**KNOWN, **known}
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without-bias": {"bias": False},
    "of-two-layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "of-two-layers-bidirectional": {"num_layers": 2, "bidirectional": True},
}
CASES |= {
    f"recurrent-{kind}-{name}": _of(
        lambda layer=layer, options=options: _Net(layer(I, H, batch_first=True, **options))
    )
    for kind, layer in KINDS.items()
    for name, options in OPTIONS.items()
}
CASES |= {
    f"recurrent-{kind}-time-first": _of(lambda layer=layer: _Net(layer(I, H), first=False))
    for kind, layer in KINDS.items()
}
CASES |= {
    f"recurrent-{kind}-last-state": _of(
        lambda layer=layer: _Net(layer(I, H, 2, bidirectional=True, batch_first=True), last=True),
        unused=True,
    )
    for kind, layer in KINDS.items()
}
CASES |= {
    f"recurrent-lstm-projected-{name}": _of(
        lambda options=options: _Net(nn.LSTM(I, H, batch_first=True, proj_size=2, **options))
    )
    for name, options in OPTIONS.items()
}


@case(**KNOWN)
def recurrent_dropout_in_evaluation(dtype):
    net = _Net(nn.LSTM(I, H, 2, dropout=0.5, batch_first=True)).eval()
    return of_module(net, torch.randn(B, T, I), dtype=dtype)


# -- initial states -------------------------------------------------------------------------------


class _Started(_Net):
    """With an initial state that is zero, learned, or made of the example."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__(layer)
        count = layer.num_layers * (1 + layer.bidirectional)
        width = getattr(layer, "proj_size", 0) or H
        if how == "learned":
            self.h = nn.Parameter(torch.randn(count, 1, width))
            self.c = nn.Parameter(torch.randn(count, 1, H))
        self.how, self.shapes = how, ((count, width), (count, H))

    def run(self, x: Tensor) -> Any:
        if self.how == "zero":
            h, c = (x.new_zeros(n, len(x), k) for n, k in self.shapes)
        elif self.how == "learned":
            h, c = (s.expand(-1, len(x), -1).contiguous() for s in (self.h, self.c))
        else:
            h, c = (
                (x.mean((1, 2)) * torch.arange(1.0, n * k + 1).view(n, k, 1).to(x)).mT.contiguous()
                for n, k in self.shapes
            )
        return self.layer(x, (h, c) if isinstance(self.layer, nn.LSTM) else h)


CASES |= {
    f"recurrent-{kind}-from-a-{how}-state": _of(
        lambda layer=layer, how=how: _Started(layer(I, H, 2, batch_first=True), how),
        unused=how == "learned" and kind != "lstm",
    )
    for kind, layer in KINDS.items()
    for how in ("zero", "learned", "given")
}
CASES["recurrent-lstm-projected-from-a-learned-state"] = _of(
    lambda: _Started(nn.LSTM(I, H, 2, batch_first=True, proj_size=2), "learned")
)

# -- what is trained, and what is shared ----------------------------------------------------------


def _frozen(net: nn.Module, *parts: str) -> nn.Module:
    for name, parameter in net.named_parameters():
        if any(part in name for part in parts):
            parameter.requires_grad_(requires_grad=False)
    return net


CASES |= {
    f"recurrent-{kind}-frozen-{name}": _of(
        lambda layer=layer, parts=parts: _frozen(_Net(layer(I, H, 2, batch_first=True)), *parts)
    )
    for kind, layer in KINDS.items()
    for name, parts in {
        "input-weights": ("weight_ih", "bias_ih"),
        "recurrent-weights": ("weight_hh", "bias_hh"),
        "first-layer": ("layer.weight_ih_l0", "layer.weight_hh_l0", "layer.bias"),
    }.items()
}


@case(**KNOWN)
def recurrent_used_twice(dtype):
    class Net(_Net):
        def run(self, x: Tensor) -> Any:
            out, state = self.layer(x)
            return self.layer(out[..., :I], state)

    return of_module(Net(nn.GRU(I, H, batch_first=True)), torch.randn(B, T, I), dtype=dtype)


@case(mixes=True, **KNOWN)
def recurrent_of_one_sequence(dtype):
    class Net(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.layer(self.enter(x[0]))[0])[None]

    return of_module(Net(nn.LSTM(I, H)), torch.randn(B, T, I), dtype=dtype)


@case(**KNOWN)
def recurrent_by_its_own_parameters(dtype):
    net = _Net(nn.LSTM(I, H, 2, batch_first=True, bidirectional=True))
    return of_module(net, torch.randn(B, T, I), dtype=dtype, own=True)


@case(**KNOWN)
def recurrent_encoder_and_decoder(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.GRU(I, H, batch_first=True)
            self.decoder = nn.GRU(2, H, batch_first=True)
            self.out = nn.Linear(H, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.out(self.decoder(y, self.encoder(x)[1])[0])

    return of_module(Net(), torch.randn(B, T, I), torch.randn(B, 4, 2), dtype=dtype)


# -- packed ---------------------------------------------------------------------------------------


class _Packed(_Net):
    """Packed before the layer, unpacked after it."""

    def __init__(self, layer: nn.Module, *, ordered: bool, total: int | None, last: bool) -> None:
        super().__init__(layer, last=last, first=layer.batch_first)
        self.ordered, self.total = ordered, total

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.enter(x)
        packed = pack_padded_sequence(
            x if self.first else x.transpose(0, 1), lengths.cpu(), self.first, self.ordered
        )
        out, state = self.layer(packed)
        if self.last:
            states = state if isinstance(state, tuple) else (state,)
            return torch.cat([s.transpose(0, 1).flatten(1).sin() for s in states], 1)
        out, kept = pad_packed_sequence(out, self.first, padding_value=0.5, total_length=self.total)
        out = self.leave(out if self.first else out.transpose(0, 1))
        if self.total is None:
            # As long as the longest of the batch: what is behind the end must not count.
            out = out * (torch.arange(out.shape[1]) < kept[:, None])[..., None]
        return out.sum(1) / kept.to(out)[:, None]


PACKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "of-two-layers-bidirectional": ({"num_layers": 2, "bidirectional": True}, {}),
    "without-bias": ({"bias": False}, {}),
    "time-first": ({"batch_first": False}, {}),
    "ordered": ({}, {"ordered": True}),
    "to-a-length": ({"bidirectional": True}, {"total": T + 2}),
    "last-state": ({"num_layers": 2, "bidirectional": True}, {"last": True}),
}


def _packed(layer: Any, options: dict[str, Any], how: dict[str, Any]) -> Spec:
    options = {"batch_first": True, **options}
    how = {"ordered": False, "total": None, "last": False, **how}

    def make(dtype: torch.dtype) -> Case:
        net = _Packed(layer(I, H, **options), **how)
        return of_module(net, torch.randn(B, T, I), LENGTHS, dtype=dtype)

    # The batch's sequences are not in order, those of a row alone are.
    return Spec(make, mixes=how["ordered"], unused=how["last"], **KNOWN)


CASES |= {
    f"packed-{kind}-{name}": _packed(layer, options, how)
    for kind, layer in KINDS.items()
    for name, (options, how) in PACKED.items()
}
CASES["packed-lstm-projected"] = _packed(nn.LSTM, {"proj_size": 2}, {})


@case(**KNOWN)
def packed_mean_over_all_steps(dtype):
    class Net(_Net):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.layer(packed)[0], True, total_length=x.shape[1])
            return self.leave(out).mean(1)

    net = Net(nn.GRU(I, H, batch_first=True))
    del net.enter
    return of_module(net, torch.randn(B, T, I), LENGTHS, dtype=dtype)


@case(**KNOWN)
def packed_then_pooled(dtype):
    class Net(_Packed):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.leave(self.layer(packed)[1][-1])

    net = Net(nn.GRU(I, H, batch_first=True), ordered=False, total=None, last=True)
    del net.enter
    return of_module(net, torch.randn(B, T, I), LENGTHS, dtype=dtype)


@case(mixes=True, **KNOWN)
def packed_data_by_itself(dtype):
    class Net(_Packed):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            # Of a row alone there are no steps behind its end.
            return self.leave(self.layer(packed)[0].data.square().flatten(0, -2).sum(0))[None]

    net = Net(nn.LSTM(I, H, batch_first=True), ordered=False, total=None, last=False)
    del net.enter
    return of_module(net, torch.randn(B, T, I), LENGTHS, dtype=dtype)


@case(mixes=True, **ALONE)
def recurrent_with_a_bias_of_the_example(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(I, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            given = {"bias_ih_l0": self.layer.bias_ih_l0 * x.mean().sigmoid()}
            return torch.func.functional_call(self.layer, given, (x,))[0]

    return of_module(Net(), torch.randn(B, T, I), dtype=dtype)


# -- cells ----------------------------------------------------------------------------------------


class _Loop(nn.Module):
    def __init__(self, cell: nn.Module, *, given: bool) -> None:
        super().__init__()
        self.cell, self.out, self.given = cell, nn.Linear(H, 2), given

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        if self.given:
            h = x.new_zeros(len(x), H)
            state = (h, h) if isinstance(self.cell, nn.LSTMCell) else h
        outs = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outs.append(state[0] if isinstance(state, tuple) else state)
        return self.out(torch.stack(outs, 1))


CASES |= {
    f"cell-{kind}-{'from-zeros' if given else 'plain'}{'' if bias else '-without-bias'}": Spec(
        lambda dtype, make=make, given=given, bias=bias: of_module(
            _Loop(make(I, H, bias=bias), given=given), torch.randn(B, T, I), dtype=dtype
        ),
        beyond_vmap=kind == "lstm",
    )
    for kind, make in {
        "rnn": nn.RNNCell,
        "relu-rnn": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
        "lstm": nn.LSTMCell,
        "gru": nn.GRUCell,
    }.items()
    for given in (True, False)
    for bias in (True, False)
}


@case(mixes=True)
def cell_of_a_vector(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(I, H)

        def forward(self, x: Tensor) -> Tensor:
            state = self.cell(x[0, 0])
            return self.cell(x[0, 1], state)[None]

    return of_module(Net(), torch.randn(B, T, I), dtype=dtype)


@case(**KNOWN)
def cell_from_a_learned_state(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.h = nn.LSTMCell(I, H), nn.Parameter(torch.randn(H))
            self.c = nn.Parameter(torch.randn(1, H))

        def forward(self, x: Tensor) -> Tensor:
            state = self.h.expand(len(x), -1), self.c.repeat(len(x), 1)
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return state[0]

    return of_module(Net(), torch.randn(B, T, I), dtype=dtype, loss=reduced)
