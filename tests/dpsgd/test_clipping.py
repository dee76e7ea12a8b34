"""The clipped sum against hand-worked numbers and a loop over examples with plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def _several_passes(dtype: torch.dtype) -> Case:
    net = nn.Linear(4, 4).to(dtype)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        (first, second), third = batch.x, batch.y
        anchor, near, far = (
            torch.func.functional_call(net, params, (x,)) for x in (first, second, third)
        )
        return (9.0 + (anchor - near).norm(dim=1) - (anchor - far).norm(dim=1)).relu()

    def batch(n: int) -> Pair:
        x = torch.randn(3, n, 4, dtype=dtype)
        return Pair((x[0], x[1]), x[2])  # type: ignore[arg-type]  # nested on purpose

    return Case(loss_fn, trainable(net), batch)


CASES = {"mlp": _mlp, "transformer": _transformer, "several-passes": _several_passes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_sums_of_several_batches_are_those_of_a_loop_over_examples(make, dtype):
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


def test_a_parameter_that_the_loss_never_touches_has_a_zero_gradient_and_is_named_when_seen():
    params = {"used": torch.randn(3), "unused": torch.randn(4), "empty": torch.randn(0)}
    grad_fn, state = clipped_grad(
        lambda p, x: (x @ p["used"]).square() + p["empty"].sum(), clipping_norm=1.0
    )
    _, state = grad_fn(params, None, state=state)  # says nothing: there is nothing to see
    x = torch.randn(3, 3)
    with pytest.warns(UserWarning, match="no example's loss has a gradient for unused:"):
        grads, state = grad_fn(params, x, state=state)
    assert grads.pytree["unused"].tolist() == [0.0] * 4


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
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(grads.pytree, want, rtol=1e-6, atol=0)
    assert grads.dtypes == (torch.float32,)  # what it is rounded to, once it has its noise
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
