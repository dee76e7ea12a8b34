r"""Recurrent layers, which vmap cannot run: unrolled over the steps of a sequence.

Of a layer, :math:`g_t = W x_t + b` is one product over all steps. What the state before a step
adds, :math:`r_t = W' h_{t-1} + b'`, is made step by step from an addend that is recorded for all
steps at once. So the gradients of g and r over all steps are all that those of W, W' and both
biases need, and likewise for a projection of the state.

Packed sequences run over all steps, and a sequence that has ended keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning import _functorch
from opake_lightning.dpsgd.clipping._entries import BODIES, NoRule, check_of, rule_for
from opake_lightning.dpsgd.clipping._gradients import Gradients
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []

State = tuple[Tensor, Tensor]  # h and c; those without c have h twice
Uses = list[tuple[Any, Callable[[Tensor], Gradients]]]


def _step(kind: str, r: Tensor, g: Tensor, h: Tensor, c: Tensor) -> State:
    """State after a step, from that before it and its part ``r``, to which g was added.

    Not so in a GRU, which multiplies r by a gate first.
    """
    if kind == "gru":
        (gr, gz, gn), (rr, rz, rn) = g.chunk(3, -1), r.chunk(3, -1)
        z, n = (gz + rz).sigmoid(), torch.addcmul(gn, (gr + rr).sigmoid(), rn).tanh()
        return torch.addcmul(n, z, h - n), c
    if kind != "lstm":
        return r.tanh() if kind == "rnn_tanh" else r.relu(), c
    i, f, candidate, o = r.unsafe_chunk(4, -1)  # to be written to
    c = torch.addcmul(i.sigmoid_() * candidate.tanh_(), f.sigmoid_(), c)
    return o.sigmoid_() * c.tanh(), c


def _layer(
    tape: Tape, kind: str, x: Tensor, state: State, weights: list[Any], mask: Any, *, biases: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction: outputs and last states of ``x``, [T, N, features]."""
    w_in, w, *rest = weights
    b_in, b = rest[:2] if biases else (None, None)
    w_out = rest[-1] if len(rest) > 2 * biases else None
    before: list[Tensor] = []  # the state before each step
    inner: list[Tensor] = []  # the state after each step, before its projection

    def by_example(value: Tensor) -> Tensor:
        """[T, N, k] to [size, places, k]."""
        return tape.rows(value.transpose(0, 1), 1)

    def uses(weight: Any, bias: Any, factors: Callable[[], Tensor]) -> Uses:
        """Of a product of ``weight`` and the factors of all steps."""
        return [
            (weight, lambda d: tape.outer(by_example(d), by_example(factors().detach()))),
            (bias, lambda d: tape.summed(by_example(d), 1)),
        ]

    def addend(weight: Any, bias: Any, of: Uses) -> Tensor:
        """What the product of ``weight`` and a state is added to, for all steps."""
        values = w.new_zeros(*x.shape[:2], len(weight))
        return tape.record("addend", values if bias is None else values + tape.value(bias), of)

    of_input, of_state = uses(w_in, b_in, lambda: x), uses(w, b, lambda: torch.stack(before))
    r, shift = None, tape.value(b_in)
    if kind == "gru":
        r = addend(w, b, of_state)
    else:
        of_input += of_state
        shift = None if b is None else shift + tape.value(b)
    g = tape.record(kind, functional.linear(x, tape.value(w_in), shift), of_input, x)
    # Time steps are in the type of the weights, whatever autocast says of products.
    g, h, c = [value.to(w.dtype) for value in (g, *state)]
    r, by_state, p, by_inner = g if r is None else r, tape.value(w).t(), None, w
    if w_out is not None:
        p = addend(w_out, None, uses(w_out, None, lambda: torch.stack(inner))).unbind()
        by_inner = tape.value(w_out).t()
    outputs: list[Tensor] = []
    with torch.autocast(x.device.type, enabled=False):
        for t, (gt, rt) in enumerate(zip(g.unbind(), r.unbind(), strict=True)):
            before.append(h)
            new, new_c = _step(kind, torch.addmm(rt, h, by_state), gt, h, c)
            if p is not None:
                inner.append(new)
                new = torch.addmm(p[t], new, by_inner)
            if mask is not None:
                new, new_c = torch.where(mask[t], new, h), torch.where(mask[t], new_c, c)
            h, c = new, new_c
            outputs.append(h)
    return torch.stack(outputs), h, c


def _stacked(
    tape: Tape, kind: str, x: Tensor, states: State, weights: Any, lengths: Any, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """All layers of ``x``, [T, N, features], from states [layers · directions, N, ...]."""
    biases, layers, dropout, train, bidirectional = options
    directions = 1 + bool(bidirectional)
    each = len(weights) // (layers * directions)
    times = torch.arange(len(x), device=x.device)[:, None]
    mask = backwards = None
    if lengths is not None:
        mask = (times < lengths).unsqueeze(2)
        # The last step of each sequence first, what is behind it stays where it is.
        backwards = torch.where(times < lengths, lengths - 1 - times, times).unsqueeze(2)

    def turned(value: Tensor) -> Tensor:
        return value.flip(0) if backwards is None else value.gather(0, backwards.expand_as(value))

    last: list[State] = []
    for layer in range(layers):
        outs: list[Tensor] = []
        for n in range(layer * directions, (layer + 1) * directions):
            own, state = weights[n * each : (n + 1) * each], (states[0][n], states[1][n])
            along = turned(x) if outs else x  # the second direction
            out, h, c = _layer(tape, kind, along, state, own, mask, biases=biases)
            outs.append(turned(out) if outs else out)
            last.append((h, c))
        x = torch.cat(outs, 2)
        if mask is not None:
            x = x * mask
        if dropout and train and layer < layers - 1:
            x = functional.dropout(x, dropout)
    h, c = (torch.stack(parts) for parts in zip(*last, strict=True))
    return x, h, c


@rule_for(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, row_wise=True)
def _recurrent(tape: Tape, func: Any, input: Tensor, *args: Any) -> Any:
    """The four functions behind ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``, packed or not."""
    kind = func.__name__
    packed = isinstance(args[2], (tuple, list))  # the weights, behind the sizes of a packed one
    hx, weights, *options = args[packed:]
    if not tape.is_data(input) or any(tape.is_data(w) for w in weights):
        raise NoRule
    lengths, batch_first = None, packed or options.pop()
    if packed:
        _, lengths = tape.packed.get(id(args[0]), (args[0], 0))
        if isinstance(lengths, int):
            raise NoRule
        x, lead = input.transpose(0, 1), input.shape[:1]
    else:
        x = input if batch_first else input.transpose(1, 2)
        x, lead = x.flatten(0, 1).transpose(0, 1), x.shape[:2]
    given = hx if kind == "lstm" else (hx, hx)
    h, c = (tape.own(state).transpose(0, 1).flatten(1, 2) for state in given)
    out, *last = _stacked(tape, kind, x, (h, c), weights, lengths, *options)
    out = out.transpose(0, 1).unflatten(0, lead)
    out = out if batch_first else out.transpose(1, 2)
    h, c = (s.unflatten(1, (tape.size, -1)).transpose(0, 1) for s in last)
    return (out, h, c) if kind == "lstm" else (out, h)


# -- single cells ----------------------------------------------------------------------------------


def _cell(func: Any, x: Tensor, hx: Any, w_in: Tensor, w: Tensor, b_in: Any, b: Any) -> Any:
    """A step of a cell in products that have rules."""
    kind = func.__name__.removesuffix("_cell")
    h, c = hx if kind == "lstm" else (hx, hx)
    g, r = functional.linear(x, w_in, b_in), functional.linear(h, w, b)
    h, c = _step(kind, r if kind == "gru" else g + r, g, h, c)
    return (h, c) if kind == "lstm" else h


for _function in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell):
    BODIES[_function] = partial(_cell, _function)


# -- packing: nothing is packed, but it is known how long each sequence is -------------------------

_packing: Any = torch


@check_of(_packing._pack_padded_sequence)
def _pack(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole sequence of an example, of which ``lengths`` steps count."""
    input, lengths, batch_first = args
    if not tape.level or input.shape[0 if batch_first else 1] != 1:
        data, sizes = func(*args, **kwargs)
        tape.packed[id(sizes)] = sizes, input.shape[1 if batch_first else 0]
        return data, sizes
    inner = _functorch.physical_of(lengths, tape.level)
    rows = input[0] if batch_first else input[:, 0]
    ones = torch.ones(len(rows), dtype=torch.int64)
    with _functorch.outside():
        lengths = lengths.expand(tape.size, 1) if inner is None else inner
        tape.packed[id(ones)] = ones, lengths.reshape(tape.size).to(rows.device)
    return rows, ones


@check_of(_packing._pad_packed_sequence)
def _unpack(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sequence with padding behind its end, as long as the batch's, or as was asked for.

    Also of a row that runs alone, which must not tell of that.
    """
    rows, sizes, batch_first, padding, total = args
    _, lengths = tape.packed.get(id(sizes), (sizes, 0))
    if isinstance(lengths, int):
        return func(*args[:4], max(total, lengths), **kwargs)
    with _functorch.outside():
        wrapped = _functorch.add_batch_dim(lengths, 0, tape.level)
    kept = torch.arange(len(rows), device=rows.device) < wrapped
    shape = (-1, *[1] * (rows.dim() - 1))
    rows = torch.where(kept.reshape(shape), rows, padding)
    if total > len(rows):
        width = [0, 0] * (rows.dim() - 1) + [0, total - len(rows)]
        rows = functional.pad(rows, width, value=padding)
    return rows.unsqueeze(0 if batch_first else 1), wrapped.unsqueeze(0)
