r"""Recurrent layers, which vmap cannot run: unrolled, with a backward pass of their own.

Of a layer, :math:`g_t = W x_t + b` is one product over all steps. What a step adds to it,
:math:`W' h_{t-1}`, has the gradient that :math:`g_t` has (in a GRU times r, for the candidate), so
the gradient of g over all steps is all that the gradients of W, W' and both biases need.

Packed sequences run over all steps, and a sequence that has ended keeps its state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning import _functorch
from opake_lightning.dpsgd.clipping._entries import BODIES, CHECKS, CHECKS_ALONE, NoRule, rule_for
from opake_lightning.dpsgd.clipping._gradients import Gradients
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []

Kind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(slots=True)
class _Cell:
    """One layer in one direction: weights, and what its backward pass needs. Time comes first."""

    kind: Kind
    w: Tensor
    bias: Tensor | None = None  # of a GRU's recurrent part
    projection: Tensor | None = None
    mask: Tensor | None = None  # [T, N, 1], whether a sequence goes on
    states: list[Tensor] = field(default_factory=list[Tensor])  # h before each step
    cells: list[Tensor] = field(default_factory=list[Tensor])
    gates: list[Tensor] = field(default_factory=list[Tensor])
    inner: list[Tensor] = field(default_factory=list[Tensor])  # tanh(c), or a GRU's W'h + b

    def step(self, g: Tensor, h: Tensor, c: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor]:
        """State after a step with input part ``g`` and, if projected, the addend ``p``."""
        if self.kind == "gru":
            return self._gru(g, h), c
        a = torch.addmm(g, h, self.w.t())
        if self.kind != "lstm":
            out = a.tanh_() if self.kind == "rnn_tanh" else a.relu_()
            self.gates.append(out)
            return out, c
        i, f, candidate, o = a.chunk(4, 1)
        for gate in (i, f, o):
            gate.sigmoid_()
        candidate.tanh_()
        new = torch.addcmul(i * candidate, f, c)
        inner = new.tanh()
        self.gates.append(a)
        self.inner.append(inner)
        out = o * inner
        if self.projection is not None:
            assert p is not None
            out = torch.addmm(p, out, self.projection.t())
        return out, new

    def _gru(self, g: Tensor, h: Tensor) -> Tensor:
        size = h.shape[1]
        recurrent = h @ self.w.t() if self.bias is None else torch.addmm(self.bias, h, self.w.t())
        gates = (g[:, : 2 * size] + recurrent[:, : 2 * size]).sigmoid_()
        r, z = gates.chunk(2, 1)
        n = torch.addcmul(g[:, 2 * size :], r, recurrent[:, 2 * size :]).tanh_()
        self.gates.append(torch.cat([gates, n], 1))
        self.inner.append(recurrent[:, 2 * size :])
        return torch.addcmul(n, z, h - n)

    def back(self, t: int, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of g, of h and of c before step t, from those after it."""
        if self.kind == "gru":
            return self._gru_back(t, dh, dc)
        if self.kind != "lstm":
            out = self.gates[t]
            d = dh * (1 - out * out) if self.kind == "rnn_tanh" else dh * (out > 0)
            return d, d @ self.w, dc
        if self.projection is not None:
            dh = dh @ self.projection
        i, f, candidate, o = self.gates[t].chunk(4, 1)
        inner = self.inner[t]
        dc = torch.addcmul(dc, dh * o, 1 - inner * inner)
        d = torch.cat([dc * candidate, dc * self.cells[t], dc * i, dh * inner], 1)
        gates = self.gates[t]
        slope = gates - gates * gates
        size = candidate.shape[1]
        slope[:, 2 * size : 3 * size] = 1 - candidate * candidate
        d.mul_(slope)
        return d, d @ self.w, dc * f

    def _gru_back(self, t: int, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r, z, n = self.gates[t].chunk(3, 1)
        dn = (dh - dh * z) * (1 - n * n)
        dz = dh * (self.states[t] - n) * (z - z * z)
        dr = dn * self.inner[t] * (r - r * r)
        d = torch.cat([dr, dz, dn], 1)
        return d, torch.addmm(dh * z, torch.cat([dr, dz, dn * r], 1), self.w), dc


class _Unrolled(torch.autograd.Function):
    """All steps of a cell. Weights have no gradient here: the tape finds it."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, h: Tensor, c: Tensor, p: Tensor | None, cell: _Cell) -> Any:
        """Outputs [T, N, H], and the last states."""
        with torch.autocast(g.device.type, enabled=False):
            return _Unrolled._forward(ctx, g, h, c, p, cell)

    @staticmethod
    def _forward(ctx: Any, g: Tensor, h: Tensor, c: Tensor, p: Tensor | None, cell: _Cell) -> Any:
        outs: list[Tensor] = []
        steps = g.unbind()
        addends = [None] * len(steps) if p is None else p.unbind()
        for t, (row, addend) in enumerate(zip(steps, addends, strict=True)):
            cell.states.append(h)
            cell.cells.append(c)
            new, cells = cell.step(row, h, c, addend)
            if cell.mask is not None:
                new = torch.where(cell.mask[t], new, h)
                cells = torch.where(cell.mask[t], cells, c)
            h, c = new, cells
            outs.append(h)
        ctx.cell, ctx.projected = cell, p is not None
        return torch.stack(outs), h.clone(), c.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Through time, from the last step to the first."""
        (douts, dh, dc), cell = gradients, ctx.cell
        found: list[Tensor] = []
        projected: list[Tensor] = []
        for t in reversed(range(len(douts))):
            dh = dh + douts[t]
            on = None if cell.mask is None else cell.mask[t]
            here, cells = (dh, dc) if on is None else (dh * on, dc * on)
            d, before, before_c = cell.back(t, here, cells)
            dh, dc = (before, before_c) if on is None else (before + dh * ~on, before_c + dc * ~on)
            found.append(d)
            projected.append(here)
        dp = torch.stack(projected[::-1]) if ctx.projected else None
        return torch.stack(found[::-1]), dh, dc, dp, None


def _layer(
    tape: Tape,
    kind: Kind,
    x: Tensor,
    state: tuple[Tensor, Tensor],
    weights: list[Any],
    mask: Tensor | None,
    *,
    biases: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction: outputs and last states of ``x``, [T, N, features]."""
    w_in, w, *rest = weights
    b_in, b = rest[:2] if biases else (None, None)
    w_out = rest[-1] if len(rest) > 2 * biases else None
    # A GRU's recurrent bias is inside of what r multiplies.
    shift = None if b_in is None else tape.value(b_in)
    if shift is not None and kind != "gru":
        shift = shift + tape.value(b)
    cell = _Cell(
        kind,
        tape.value(w),
        tape.value(b) if kind == "gru" and b is not None else None,
        None if w_out is None else tape.value(w_out),
        mask,
    )
    steps = len(x)

    def by_example(value: Tensor) -> Tensor:
        """[T, N, k] to [size, places, k]."""
        return tape.rows(value.transpose(0, 1), 1)

    def recurrent(d: Tensor) -> Tensor:
        if kind != "gru":
            return d
        r, _, _ = torch.stack(cell.gates).chunk(3, 2)
        dr, dz, dn = d.chunk(3, 2)
        return torch.cat([dr, dz, dn * r], 2)

    def of_input(d: Tensor) -> Gradients:
        return tape.outer(by_example(d), by_example(x.detach()))

    def of_state(d: Tensor) -> Gradients:
        return tape.outer(by_example(recurrent(d)), by_example(torch.stack(cell.states[:steps])))

    def of_shift(d: Tensor) -> Gradients:
        return tape.summed(by_example(d), 1)

    def of_state_shift(d: Tensor) -> Gradients:
        return tape.summed(by_example(recurrent(d)), 1)

    def of_projection(d: Tensor) -> Gradients:
        gates = torch.stack(cell.gates)
        return tape.outer(by_example(d), by_example(gates.chunk(4, 2)[3] * torch.stack(cell.inner)))

    uses = [(w_in, of_input), (w, of_state), (b_in, of_shift), (b, of_state_shift)]
    g = tape.record(kind, functional.linear(x, tape.value(w_in), shift), uses, x)
    addend = None
    if w_out is not None:
        addend = x.new_zeros(*x.shape[:2], w_out.shape[0], dtype=cell.w.dtype)
        addend = tape.record("projection", addend, [(w_out, of_projection)])
    # Time steps are in the type of the weights, whatever autocast says of products.
    wide = [value.to(cell.w.dtype) for value in (g, *state)]
    return cast("Any", _Unrolled.apply(*wide, addend, cell))


def _stacked(
    tape: Tape,
    kind: Kind,
    x: Tensor,
    states: tuple[Tensor, Tensor],
    weights: list[Any],
    lengths: Tensor | None,
    options: tuple[Any, ...],
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
        if backwards is None:
            return value.flip(0)
        return value.gather(0, backwards.expand_as(value))

    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outs: list[Tensor] = []
        for direction in range(directions):
            n = layer * directions + direction
            state = states[0][n], states[1][n]
            own = weights[n * each : (n + 1) * each]
            out, h, c = _layer(
                tape, kind, turned(x) if direction else x, state, own, mask, biases=biases
            )
            outs.append(turned(out) if direction else out)
            last.append((h, c))
        x = torch.cat(outs, 2) if directions > 1 else outs[0]
        if mask is not None:
            x = x * mask
        if dropout and train and layer < layers - 1:
            x = functional.dropout(x, dropout)
    h, c = (torch.stack(parts) for parts in zip(*last, strict=True))
    return x, h, c


def _recurrent(tape: Tape, func: Any, *args: Any) -> Any:
    """The four functions behind ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``, packed or not."""
    kind: Kind = func.__name__
    input, second, *rest = args
    packed = isinstance(rest[0], (tuple, list)) and kind == "lstm" and isinstance(second, Tensor)
    packed = packed or (kind != "lstm" and isinstance(rest[0], Tensor))
    hx = rest.pop(0) if packed else second
    weights, *options = rest
    lengths = None
    if packed:
        _, lengths = tape.packed.get(id(second), (second, 0))
        if isinstance(lengths, int):
            raise NoRule
        x, lead = input.transpose(0, 1), input.shape[:1]
    else:
        x = input if options.pop() else input.transpose(1, 2)
        lead = x.shape[:2]
        x = x.flatten(0, 1).transpose(0, 1)
    if not tape.is_data(input) or any(tape.is_data(w) for w in weights):
        raise NoRule
    given = hx if isinstance(hx, (tuple, list)) else (hx, hx)
    states = [tape.own(state).transpose(0, 1).flatten(1, 2) for state in given]
    out, *last = _stacked(tape, kind, x, (states[0], states[1]), weights, lengths, tuple(options))
    out = out.transpose(0, 1).unflatten(0, lead)
    if not packed and not args[-1]:
        out = out.transpose(1, 2)
    h, c = (s.unflatten(1, (tape.size, -1)).transpose(0, 1) for s in last)
    return (out, h, c) if kind == "lstm" else (out, h)


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    rule_for(_function, row_wise=True)(_recurrent)


# -- single cells ----------------------------------------------------------------------------------


def _cell(func: Any, x: Tensor, hx: Any, w_in: Tensor, w: Tensor, b_in: Any, b: Any) -> Any:
    """A step of a cell in products that have rules."""
    kind = func.__name__.removesuffix("_cell")
    h = hx[0] if kind == "lstm" else hx
    g, r = functional.linear(x, w_in, b_in), functional.linear(h, w, b)
    if kind == "gru":
        (gr, gz, gn), (rr, rz, rn) = g.chunk(3, -1), r.chunk(3, -1)
        z, n = (gz + rz).sigmoid(), (gn + (gr + rr).sigmoid() * rn).tanh()
        return n + z * (h - n)
    if kind != "lstm":
        return (g + r).tanh() if kind == "rnn_tanh" else (g + r).relu()
    i, f, candidate, o = (g + r).chunk(4, -1)
    c = f.sigmoid() * hx[1] + i.sigmoid() * candidate.tanh()
    return o.sigmoid() * c.tanh(), c


for _function in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell):
    BODIES[_function] = partial(_cell, _function)


# -- packing: nothing is packed, but it is known how long each sequence is -------------------------


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


_packing: Any = torch
for _checks in (CHECKS, CHECKS_ALONE):
    _checks[_packing._pack_padded_sequence] = _pack
    _checks[_packing._pad_packed_sequence] = _unpack
