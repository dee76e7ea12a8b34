"""The clipped sum against hand-worked numbers and a loop over examples with plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from opake_lightning.dpsgd.clipping import clipped_grad
from tests.helpers import distance, example_gradients, looped, norm_of, trainable

SIZES = (5, 1, 4)


class Case(NamedTuple):
    """A loss of (params, batch), parameters, and a batch of n examples."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Callable[[int], Any]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def _module(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    module = module.to(dtype)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (x,)).flatten(1).square().mean(1)

    return Case(loss_fn, trainable(module), lambda n: torch.randn(n, *shape, dtype=dtype))


def _mlp(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(torch.func.functional_call(net, params, (x,)), y, reduction="none")

    return Case(
        loss_fn,
        trainable(net),
        lambda n: (torch.randn(n, 6, dtype=dtype), torch.randint(0, 3, (n,))),
    )


def _conv(dtype: torch.dtype) -> Case:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (3, 2), dilation=2, padding=2, groups=2, padding_mode="circular"),
        nn.ConvTranspose2d(4, 2, 3, stride=2),
        nn.MaxPool2d(2),
    )
    return _module(net, (2, 9, 9), dtype)


class _Transformer(nn.Module):
    """Embeddings, broadcast position ids, both kinds of attention; a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 8, padding_idx=0)
        self.position = nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 7)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])[None]  # [1, T], whatever the batch
        x = self.norm(self.token(ids) + self.position(positions))
        x = x + self.attention(x, x, x, key_padding_mask=ids == 0, need_weights=False)[0]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + mixed.transpose(1, 2).flatten(2))


def _transformer(dtype: torch.dtype) -> Case:
    net = _Transformer().to(dtype)

    def batch(n: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 7, (n, 5))
        ids[torch.arange(5) >= torch.randint(2, 6, (n, 1))] = 0
        return {"ids": ids, "labels": torch.where(ids == 0, -100, ids)}

    def loss_fn(params: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(net, params, (batch["ids"],))
        labels = batch["labels"]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return losses.sum(1) / (labels != -100).sum(1)

    return Case(loss_fn, trainable(net), batch)


def _tied(dtype: torch.dtype) -> Case:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.out = nn.Linear(4, 6, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.embed(ids))

    case = _module(Tied(), (3,), dtype)
    assert len(case.params) == 1
    return case._replace(batch=lambda n: torch.randint(0, 6, (n, 3)))


def _frozen(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.requires_grad_(requires_grad=False)
    case = _module(net, (6,), dtype)
    assert set(case.params) == {"0.bias", "2.weight", "2.bias"}
    return case


def _untouched(dtype: torch.dtype) -> Case:
    params = {"used": torch.randn(3, dtype=dtype), "unused": torch.randn(4, dtype=dtype)}
    return Case(
        lambda p, x: (x @ p["used"]).square(), params, lambda n: torch.randn(n, 3, dtype=dtype)
    )


def _several_passes(dtype: torch.dtype) -> Case:
    net = nn.Linear(4, 4).to(dtype)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        (first, second), third = batch.x, batch.y
        out = [torch.func.functional_call(net, params, (x,)) for x in (first, second, third)]
        return F.triplet_margin_loss(*out, margin=9.0, reduction="none")

    def batch(n: int) -> Pair:
        x = torch.randn(3, n, 4, dtype=dtype)
        return Pair((x[0], x[1]), x[2])  # type: ignore[arg-type]  # nested on purpose

    return Case(loss_fn, trainable(net), batch)


class _Raw(nn.Module):
    """A parameter that belongs to no known layer, and one behind a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.normed = parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.normed(x)


def _bag(dtype: torch.dtype) -> Case:
    case = _module(nn.EmbeddingBag(6, 4, mode="mean"), (3,), dtype)
    return case._replace(batch=lambda n: torch.randint(0, 6, (n, 3)))


CASES = {
    "mlp": _mlp,
    "conv": _conv,
    "transformer": _transformer,
    "tied": _tied,
    "frozen": _frozen,
    "untouched": _untouched,
    "several-passes": _several_passes,
    "raw-and-parametrized": lambda dtype: _module(_Raw(), (4,), dtype),
    "conv1d": lambda dtype: _module(nn.Conv1d(4, 8, 3, stride=2, groups=4), (4, 9), dtype),
    "embedding-bag": _bag,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.filterwarnings("ignore:There is a performance drop.*embedding_bag:UserWarning")
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_sum_is_that_of_a_loop_over_examples(make, dtype):
    case = make(dtype)
    batches = [case.batch(n) for n in SIZES]
    # A bound between the norms, so that some examples are clipped and some are not.
    gradients = [g for b in batches for g in example_gradients(case.loss_fn, case.params, b)]
    bound = sorted(norm_of(g) for g in gradients)[len(gradients) // 2]
    grad_fn, state = clipped_grad(case.loss_fn, clipping_norm=bound, microbatch_size=2)
    for batch in batches:
        grads, state = grad_fn(case.params, batch, state=state)
        want = looped(case.loss_fn, case.params, batch, bound)
        assert distance(grads.pytree, want) <= (1e-6 if dtype == torch.float32 else 1e-12)
        assert grads.sensitivity == bound
    assert state.nonfinite_examples == 0


def test_a_parameter_that_the_loss_never_touches_has_a_zero_gradient():
    case = _untouched(torch.float32)
    grad_fn, state = clipped_grad(case.loss_fn, clipping_norm=1.0)
    grads, _ = grad_fn(case.params, case.batch(3), state=state)
    assert torch.equal(grads.pytree["unused"], torch.zeros(4))


# -- hand-worked numbers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "expected", "want"),
    [
        (1.0, None, (-0.9, -1.2)),  # (-3, -4) / 5 + (-0.3, -0.4): within the norm is not scaled
        (0.25, None, (-0.3, -0.4)),  # both clipped to a quarter
        (1.0, 10, (-0.09, -0.12)),  # divided by the expected size, not by the two at hand
        (100.0, None, (-3.3, -4.4)),
    ],
)
def test_two_examples_by_hand(bound, expected, want):
    grad_fn, state = clipped_grad(
        lambda w, batch: 0.5 * (batch[0] @ w - batch[1]) ** 2,
        clipping_norm=bound,
        expected_batch_size=expected,
    )
    batch = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.ones(2)
    grads, _ = grad_fn(torch.zeros(2), batch, state=state)
    torch.testing.assert_close(grads.pytree, torch.tensor(want), rtol=1e-6, atol=0)
    assert grads.sensitivity == bound / (expected or 1)


def test_a_tied_weight_has_one_norm_over_its_summed_gradient():
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.a * self.b * x

    net = Product()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, params, (x,))

    for bound, want in ((1.0, 1.0), (100.0, 6.0)):
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=bound)
        grads, _ = grad_fn(trainable(net), torch.tensor([3.0]), state=state)
        assert [float(g) for g in grads.pytree.values()] == [want]


def test_ignored_tokens_are_not_averaged_over():
    # One row of token losses (2, 4, ignored, ignored): the loss is 3, not 1.5.
    def loss_fn(w: Tensor, batch: Any) -> Any:
        tokens, kept = batch
        loss = (w * tokens * kept).sum(1) / kept.sum(1)
        return loss, loss

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=10.0, has_aux=True)
    batch = torch.tensor([[2.0, 4.0, 7.0, 7.0]]), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    (grads, aux), _ = grad_fn(torch.tensor(1.0), batch, state=state)
    assert (float(grads.pytree), aux.tolist()) == (3.0, [3.0])


def test_identical_views_averaged_inside_the_loss_change_nothing():
    def averaged(w: Tensor, views: Tensor) -> Tensor:
        return (0.5 * (views @ w - 1) ** 2).mean(1)

    one = torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]])
    grad_fn, state = clipped_grad(averaged, clipping_norm=1.0)
    sums = [grad_fn(torch.zeros(2), v, state=state)[0].pytree for v in (one, one.repeat(1, 2, 1))]
    torch.testing.assert_close(*sums)


# -- random numbers that the loss draws ---------------------------------------------------------


def _dropped(w: Tensor, x: Tensor) -> Any:
    mask = F.dropout(torch.ones_like(x), 0.5)
    return (mask * w * x).sum(1), mask


@pytest.mark.parametrize("microbatch", [None, 2])
def test_every_example_draws_its_own_dropout_mask(microbatch):
    grad_fn, state = clipped_grad(
        _dropped, clipping_norm=1.0, has_aux=True, microbatch_size=microbatch
    )
    x = torch.randn(4, 64)

    def run() -> Any:
        torch.manual_seed(3)
        return grad_fn(torch.ones(64), x, state=state)[0]

    grads, masks = run()
    assert len({tuple(m) for m in masks.tolist()}) == 4
    rows = (masks * x).double()
    want = (rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)
    assert distance(grads.pytree, [want]) < 1e-6
    again, masks_again = run()
    assert torch.equal(again.pytree, grads.pytree)
    assert torch.equal(masks_again, masks)
