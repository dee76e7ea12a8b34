"""Models made to fool an engine that records operations; each has to be noticed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import ALONE, B, Case, Spec, normal, of_module, reduced, registry
from tests.helpers import trainable

CASES: dict[str, Spec] = {}
case = registry(CASES)

# -- weights that are not used as they are --------------------------------------------------------


@case()
def masked_weight(dtype):
    mask = (torch.rand(4, 6) < 0.5).to(dtype)
    params = normal(dtype, w=(4, 6), b=(4,))
    return Case(
        params,
        lambda p, x: reduced(F.linear(x, p["w"] * mask, p["b"])),
        torch.randn(B, 6, dtype=dtype),
    )


@case()
def product_and_sum(dtype):
    params = normal(dtype, w=(4, 6))
    return Case(
        params,
        lambda p, x: reduced((p["w"][None] * x[:, None]).sum(-1)),
        torch.randn(B, 6, dtype=dtype),
    )


@case()
def weight_reused_after_a_reshape(dtype):
    params = normal(dtype, w=(4, 6))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(F.linear(x, p["w"]).tanh(), p["w"].reshape(6, 4)))

    return Case(params, loss_fn, torch.randn(B, 6, dtype=dtype))


@case()
def weight_reused_as_a_view_of_rows(dtype):
    params = normal(dtype, w=(6, 6))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(F.linear(x, p["w"]).tanh(), p["w"][:3]))

    return Case(params, loss_fn, torch.randn(B, 6, dtype=dtype))


@case()
def tied_transpose(dtype):
    # An autoencoder whose decoder is the encoder's transpose.
    params = normal(dtype, w=(4, 6), b=(6,))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(F.linear(x, p["w"]).tanh(), p["w"].t(), p["b"]))

    return Case(params, loss_fn, torch.randn(B, 6, dtype=dtype))


@case()
def embedding_table_also_used_whole(dtype):
    params = normal(dtype, table=(7, 4))

    def loss_fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["table"])
        return reduced((x @ p["table"].t()).softmax(-1) @ p["table"])

    return Case(params, loss_fn, torch.randint(0, 7, (B, 3)))


@case()
def weight_from_a_network(dtype):
    # A hypernetwork: another parameter's output is the weight.
    params = normal(dtype, code=(3,), make=(20, 3))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(x, F.linear(p["code"], p["make"]).view(4, 5)))

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def weight_of_every_example(dtype):
    # Fast weights: the second layer's weight comes from the example itself.
    params = normal(dtype, make=(15, 5), out=(2, 3))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        fast = F.linear(x, p["make"]).view(len(x), 3, 5)
        hidden = torch.stack([F.linear(row, w) for row, w in zip(x, fast, strict=True)])
        return reduced(F.linear(hidden, p["out"]))

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def weight_as_an_input(dtype):
    # A parameter in the place where a layer takes its input.
    params = normal(dtype, tokens=(B, 5), w=(3, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(x, p["w"]) @ F.linear(p["tokens"], p["w"]).T)

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


class _Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(3, 4), layer
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embed(x))[0])


@case(beyond_vmap=True)
def gru(dtype):
    net = _Recurrent(nn.GRU(4, 5, batch_first=True))
    return of_module(net, torch.randn(B, 6, 3), dtype=dtype)


# In float32 torch has a kernel for the whole layer, which vmap runs row by row.
@case(beyond_vmap=True)
def lstm_of_two_layers(dtype):
    net = _Recurrent(nn.LSTM(4, 5, num_layers=2, batch_first=True))
    return of_module(net, torch.randn(B, 6, 3), dtype=dtype)


@case(beyond_vmap=True)
def rnn(dtype):
    net = _Recurrent(nn.RNN(4, 5, batch_first=True, nonlinearity="relu"))
    return of_module(net, torch.randn(B, 6, 3), dtype=dtype)


@case(beyond_vmap=True)
def gru_alone(dtype):
    # Nothing that the recorder knows: no parameter is seen at all.
    net = nn.GRU(3, 4, batch_first=True, bidirectional=True)
    return of_module(net, torch.randn(B, 5, 3), dtype=dtype, loss=lambda out: reduced(out[0]))


@case(beyond_vmap=True)
def gru_with_its_state_given(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Linear(3, 4), nn.GRU(4, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.embed(x), x.new_zeros(1, len(x), 5))[0]

    return of_module(Net(), torch.randn(B, 6, 3), dtype=dtype)


@case()
def gru_cell(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), 4)
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return self.out(state)

    return of_module(Net(), torch.randn(B, 3, 3), dtype=dtype)


@case()
def lstm_unrolled(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 16), nn.Linear(4, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = c = x.new_zeros(len(x), 4)
            for t in range(x.shape[1]):
                i, f, g, o = (self.inner(x[:, t]) + self.outer(h)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return h

    return of_module(Net(), torch.randn(B, 3, 3), dtype=dtype)


# -- rows that depend on one another --------------------------------------------------------------


@case(mixes=True)
def normalised_over_the_batch(dtype):
    params = normal(dtype, w=(4, 6))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        out = F.linear(x, p["w"])
        return reduced(out - 0.5 * out.mean(0, keepdim=True))

    return Case(params, loss_fn, torch.randn(B, 6, dtype=dtype))


@case(mixes=True)
def contrast_within_the_batch(dtype):
    params = normal(dtype, w=(4, 6))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        out = F.linear(x, p["w"])
        logits = out @ out.T
        return F.cross_entropy(logits, torch.arange(len(x)), reduction="none") + reduced(out)

    return Case(params, loss_fn, torch.randn(B, 6, dtype=dtype))


@case(mixes=True)
def neighbour_in_the_batch(dtype):
    # A row's loss is its neighbour's; of the sum of losses, each row has its own part all the same.
    params = normal(dtype, w=(4, 6))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(x, p["w"]).roll(1, 0))

    return Case(params, loss_fn, torch.randn(B, 6, dtype=dtype))


@case(mixes=True)
def mean_over_the_batch(dtype):
    # Not one loss per row, but the sum is the same; a mean as a number is refused elsewhere.
    params = normal(dtype, w=(4, 6))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(x, p["w"])).mean().expand(len(x))

    return Case(params, loss_fn, torch.randn(B, 6, dtype=dtype))


@case(refused="writes what an example says", mixes=True)
def buffer_written_in_forward(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, 3)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.out(x) - self.out(self.mean)

    return of_module(Net(), torch.randn(B, 5), dtype=dtype)


@case()
def counter_in_forward(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, 3)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.out(x)

    return of_module(Net(), torch.randn(B, 5), dtype=dtype)


@case(mixes=True, passes=2, beyond_vmap=True)
def branch_on_values(dtype):
    params = normal(dtype, w=(4, 6))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        out = F.linear(x, p["w"])
        return reduced(out if bool(x.max() > 1.5) else 2 * out)

    x = torch.rand(B, 6, dtype=dtype)
    x[1, 3] = 2.0
    return Case(params, loss_fn, x)


@case(**ALONE)
def tokens_picked_by_a_mask(dtype):
    params = normal(dtype, w=(4, 6))

    def loss_fn(p: Any, batch: Any) -> Tensor:
        x, kept = batch
        rows = torch.arange(len(x))[:, None].expand_as(kept)[kept]
        losses = reduced(F.linear(x[kept], p["w"]))
        return x.new_zeros(len(x)).index_add(0, rows, losses)

    kept = torch.rand(B, 5) < 0.6
    return Case(params, loss_fn, (torch.randn(B, 5, 6, dtype=dtype), kept))


@case(**ALONE)
def as_many_picked_tokens_as_rows(dtype):
    # The size of what is recorded says B, but they are not one token of each row.
    picked = CASES["tokens-picked-by-a-mask"].make(dtype)
    kept = torch.zeros(B, 5, dtype=torch.bool)
    kept[0, 1] = kept[0, 3] = kept[2, 0] = kept[3, 4] = True
    return Case(picked.params, picked.loss_fn, (picked.batch[0], kept))


@case()
def rows_sorted_by_length(dtype):
    # As packed sequences are made: the second layer sees the rows in another order than the first.
    params = normal(dtype, first=(4, 5), second=(3, 4))

    def loss_fn(p: Any, batch: Any) -> Tensor:
        x, lengths = batch
        order = lengths.argsort(descending=True)
        hidden = F.linear(x, p["first"]).tanh()[order]
        return reduced(F.linear(hidden, p["second"])[order.argsort()])

    x = torch.randn(B, 5, dtype=dtype) * torch.tensor([[0.1], [1.0], [3.0], [0.5]], dtype=dtype)
    return Case(params, loss_fn, (x, torch.tensor([2, 5, 3, 4])))


@case()
def rows_flattened_with_pairs(dtype):
    # Two views of every row, all first views before all second ones.
    net = nn.Linear(5, 3).to(dtype)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        out = torch.func.functional_call(net, params, (torch.cat(batch),))
        first, second = out.chunk(2)
        return (first - second).sin().square().sum(1)

    return Case(
        trainable(net), loss_fn, (torch.randn(B, 5, dtype=dtype), torch.randn(B, 5, dtype=dtype))
    )


@case()
def rows_flattened_into_tokens(dtype):
    # [B * T, d], row after row: sortable out, unlike the case before.
    net = nn.Linear(5, 3).to(dtype)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        out = torch.func.functional_call(net, params, (x.reshape(-1, 5),))
        return reduced(out.view(len(x), -1))

    return Case(trainable(net), loss_fn, torch.randn(B, 3, 5, dtype=dtype))
