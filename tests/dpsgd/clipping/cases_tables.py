"""Tables that are looked up: embeddings, bags, indexing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import ALONE, B, Case, Spec, normal, of_module, reduced, registry
from tests.helpers import trainable

CASES: dict[str, Spec] = {}
case = registry(CASES)

N, D = 7, 4


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, N, shape)


def _of_table(of: Any, *shape: int, table: tuple[int, ...] = (N, D), **known: Any) -> Spec:
    """The spec of ``of(table, ids)``."""

    def make(dtype: torch.dtype) -> Case:
        params = normal(dtype, table=table)
        return Case(params, lambda p, ids: reduced(of(p["table"], ids)), _ids(B, *(shape or (5,))))

    return Spec(make, **known)


# -- embeddings -----------------------------------------------------------------------------------

# Every row has the padding at its beginning, its end, several times, and not at all.
PADDED = torch.tensor([[2, 1, 0, 3, 5], [1, 6, 4, 0, 2], [2, 2, 5, 2, 2], [0, 1, 3, 4, 5]])

CASES |= {
    f"embedding-{name}": Spec(
        lambda dtype, options=options: of_module(
            nn.Embedding(N, D, **options), PADDED, dtype=dtype
        ),
        **known,
    )
    for name, options, known in (
        ("with-padding-in-every-place", {"padding_idx": 2}, {}),
        ("with-negative-padding", {"padding_idx": -5}, {}),
        ("sparse-with-padding", {"padding_idx": 2, "sparse": True}, {"beyond_vmap": True}),
        ("by-frequency-with-padding", {"padding_idx": 2, "scale_grad_by_freq": True}, {}),
    )
}

CASES |= {
    "embedding-by-name": _of_table(lambda t, ids: F.embedding(weight=t, input=ids)),
    "embedding-of-int32": _of_table(lambda t, ids: F.embedding(ids.int(), t)),
    "embedding-of-a-vector-of-ids": _of_table(
        lambda t, ids: F.embedding(ids[0], t)[None], mixes=True
    ),
    "embedding-of-a-part-of-the-table": _of_table(lambda t, ids: F.embedding(ids % 3, t[2:5])),
    "embedding-of-a-scaled-table": _of_table(lambda t, ids: F.embedding(ids, t * 3.0)),
    "embedding-of-a-concatenated-table": _of_table(
        lambda t, ids: F.embedding(ids, torch.cat([t, t.flip(0)]))
    ),
    "embedding-below-the-functional-layer": _of_table(lambda t, ids: torch.embedding(t, ids, 2)),
    "embedding-of-constants": _of_table(
        lambda t, ids: F.embedding(torch.tensor([1, 3, 1]), t) * ids[:, :3, None]
    ),
    "embedding-in-one-letters": _of_table(lambda t, ids: F.one_hot(ids, N).to(t.dtype) @ t),
    "embedding-in-sums-of-hashes": _of_table(
        lambda t, ids: F.embedding(ids, t) + F.embedding((3 * ids + 1) % N, t)
    ),
    "indexed": _of_table(lambda t, ids: t[ids]),
    "indexed-by-negative-numbers": _of_table(lambda t, ids: t[ids - N]),
    "indexed-by-a-tuple": _of_table(lambda t, ids: t[(ids,)]),
    "indexed-with-an-ellipsis": _of_table(lambda t, ids: t[ids, ...]),
    "indexed-in-the-second-dimension": _of_table(
        lambda t, ids: t[:, ids].movedim(1, 0), table=(D, N)
    ),
    "indexed-in-both-dimensions": _of_table(lambda t, ids: t[ids, ids % D]),
    "indexed-by-an-example-and-a-slice": _of_table(lambda t, ids: t[ids, 1:3]),
    "indexed-by-a-number": _of_table(lambda t, ids: t[3] * ids[:, :D]),
    "indexed-by-int32": _of_table(lambda t, ids: t[ids.int()]),
    "indexed-table-of-matrices": _of_table(lambda t, ids: t[ids], table=(N, 2, 3)),
    "indexed-vector": _of_table(lambda t, ids: t[ids], table=(N,)),
    "index-select": _of_table(lambda t, ids: t.index_select(0, ids[0])[None], mixes=True),
    "gather": _of_table(lambda t, ids: t.gather(0, ids[:, :D] % N)),
    "take": _of_table(lambda t, ids: t.take(ids)),
    "take-along-dim": _of_table(
        lambda t, ids: torch.take_along_dim(t[None], ids[..., None].expand(-1, -1, D), 1)
    ),
    "unbound-rows-of-a-table": _of_table(
        lambda t, ids: torch.stack(t.unbind(0)[:5]) * ids[..., None]
    ),
}


@case()
def embedding_from_pretrained(dtype):
    net = nn.Embedding.from_pretrained(torch.randn(N, D), freeze=False, padding_idx=1)
    return of_module(net, PADDED, dtype=dtype)


@case()
def embedding_padding_and_tied_head(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(N, D, padding_idx=2)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.embed(ids).tanh(), self.embed.weight)

    return of_module(Net(), PADDED, dtype=dtype)


@case(refused="max_norm")
def embedding_that_renormalises(dtype):
    return of_module(nn.Embedding(N, D, max_norm=1.0), _ids(B, 5), dtype=dtype)


@case(refused="max_norm")
def bag_that_renormalises(dtype):
    return of_module(nn.EmbeddingBag(N, D, max_norm=1.0), _ids(B, 5), dtype=dtype)


# -- bags -----------------------------------------------------------------------------------------

CASES |= {
    f"bag-{name}": Spec(
        lambda dtype, options=options: of_module(
            nn.EmbeddingBag(N, D, **options), PADDED, dtype=dtype
        ),
        **known,
    )
    for name, options, known in (
        ("mean", {"mode": "mean"}, {}),
        ("max-with-padding", {"mode": "max", "padding_idx": 1}, {}),
        ("sum-with-padding", {"mode": "sum", "padding_idx": 1}, {}),
        ("sum-with-negative-padding", {"mode": "sum", "padding_idx": -6}, {}),
        ("mean-by-frequency", {"mode": "mean", "scale_grad_by_freq": True}, {}),
        ("sum-by-frequency", {"mode": "sum", "scale_grad_by_freq": True}, {}),
        ("sum-sparse", {"mode": "sum", "sparse": True}, {"beyond_vmap": True}),
        (
            "mean-sparse-with-padding",
            {"mode": "mean", "sparse": True, "padding_idx": 1},
            {"beyond_vmap": True},
        ),
    )
}


def _bags_by_offsets(**options: Any) -> Spec:
    """Three bags in each row, one of them empty."""
    ends = options.get("include_last_offset", False)

    def make(dtype: torch.dtype) -> Case:
        starts = torch.tensor([0, 2, 2, 5] if ends else [0, 2, 2])
        net = nn.EmbeddingBag(N, D, **options)
        return of_module(
            _Row(net, starts), PADDED, dtype=dtype, loss=lambda out: reduced(out[None])
        )

    return Spec(make, mixes=True)


class _Row(nn.Module):
    """A bag of the ids of one row, flat."""

    def __init__(self, bag: nn.Module, starts: Tensor) -> None:
        super().__init__()
        self.bag, self.starts = bag, starts

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids[0], self.starts)


CASES |= {
    "bags-by-offsets-sum": _bags_by_offsets(mode="sum"),
    "bags-by-offsets-mean": _bags_by_offsets(mode="mean", padding_idx=2),
    "bags-by-offsets-max": _bags_by_offsets(mode="max"),
    "bags-by-offsets-with-the-last": _bags_by_offsets(mode="sum", include_last_offset=True),
}


def _weighted(of: Any, **params: tuple[int, ...]) -> Spec:
    """A bag of weighted ids, the weights by ``of`` of the parameters and a row of numbers."""

    def make(dtype: torch.dtype) -> Case:
        params_ = normal(dtype, table=(N, D), **params)

        def loss_fn(p: Any, batch: Any) -> Tensor:
            ids, x = batch
            out = F.embedding_bag(ids, p["table"], mode="sum", per_sample_weights=of(p, x))
            return reduced(out)

        return Case(params_, loss_fn, (_ids(B, 5), torch.rand(B, 5, dtype=dtype)))

    return Spec(make)


CASES |= {
    "bag-of-weights-by-a-layer": _weighted(lambda p, x: F.linear(x, p["w"]).sigmoid(), w=(5, 5)),
    "bag-of-learned-weights": _weighted(lambda p, x: p["w"].expand_as(x).contiguous(), w=(5,)),
    "bag-of-constant-weights": _weighted(lambda p, x: torch.linspace(1, 2, 5).to(x).expand_as(x)),
}


@case(mixes=True)
def bag_below_the_functional_layer(dtype):
    params = normal(dtype, table=(N, D))

    def loss_fn(p: Any, ids: Tensor) -> Tensor:
        starts = torch.zeros(1, dtype=torch.int64)
        return reduced(torch.embedding_bag(p["table"], ids[0], starts)[0])

    return Case(params, loss_fn, _ids(B, 5))


@case(**ALONE, mixes=True)
def adaptive_softmax(dtype):
    # It picks the rows of each cluster by a mask, so shapes depend on values.
    net = nn.AdaptiveLogSoftmaxWithLoss(5, 9, [3, 6], div_value=2.0).to(dtype)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return torch.func.functional_call(net, params, batch).loss

    batch = torch.randn(B, 5, dtype=dtype), torch.tensor([1, 4, 8, 2])
    return Case(trainable(net), loss_fn, batch)
