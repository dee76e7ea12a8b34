"""Examples whose gradients float32 can hardly hold, or not at all, beside usual ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import ClipState, clipped_grad, per_group
from tests.helpers import distance, looped

W = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
X = torch.tensor([[3.0, 4.0], [0.3, 0.4], [-1.0, 2.0]])


def plain(w: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, w).sin().sum(1)


def of_places(w: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, w).sum((1, 2))


def derived(w: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, 1.0 * w).sum(1)


def without_a_rule(w: Tensor, x: Tensor) -> Tensor:
    return (x[:, None] * w).sum((1, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 1e38, 1e-38])
@pytest.mark.parametrize("loss_fn", [derived, without_a_rule])
@pytest.mark.parametrize("microbatch", [None, 1, 2])
def test_an_odd_example_leaves_the_others_alone(loss_fn, value, microbatch):
    odd = torch.cat([X[:1], torch.tensor([[value, 1.0]]), X[1:]])
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, microbatch_size=microbatch)
    grads, state = grad_fn(W, odd, state=state)
    finite = abs(value) < float("inf")
    want = looped(loss_fn, W, odd if finite else X, 1.0)
    assert distance(grads.pytree, want) < 1e-6
    assert state.nonfinite_examples == (not finite)
    assert bool(grads.report.norms.isfinite().all()) is finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_such_an_example(value):
    """NaN of one row, behind its own weights, does not reach the others' through any product."""

    def loss_fn(w: Tensor, batch: Any) -> Tensor:
        x, scale = batch
        return plain(w, x) * scale

    scale = torch.tensor([1.0, value, 1.0])
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    grads, state = grad_fn(W, (X, scale), state=state)
    kept = torch.tensor([0, 2])
    assert distance(grads.pytree, looped(plain, W, X[kept], 1.0)) < 1e-6
    assert state.nonfinite_examples == 1


def test_all_examples_lost_is_a_sum_of_zeros():
    grad_fn, state = clipped_grad(plain, clipping_norm=1.0)
    grads, state = grad_fn(W, X * float("nan"), state=state)
    assert grads.pytree.abs().max() == 0
    assert state.nonfinite_examples == 3


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("bound", [1e-30, 1e-10, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("loss_fn", [derived, of_places, without_a_rule])
def test_norms_of_any_size(loss_fn, scale, bound):
    """Squares of most of these are zero or infinite in float32."""
    x = scale * (X if loss_fn is not of_places else X[:, None].expand(-1, 4, -1))
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=bound)
    grads, state = grad_fn(W, x, state=state)
    assert distance(grads.pytree, looped(loss_fn, W, x, bound)) < 1e-5
    assert state.nonfinite_examples == 0


@pytest.mark.parametrize("loss_fn", [derived, of_places, without_a_rule])
def test_one_example_more_moves_a_tiny_bound_by_no_more_than_it(loss_fn):
    x = X if loss_fn is not of_places else X[:, None].expand(-1, 4, -1)
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1e-26)
    with_all, _ = grad_fn(W, 1e-25 * x, state=state)
    without, _ = grad_fn(W, 1e-25 * x[:-1], state=state)
    moved = float((with_all.pytree - without.pytree).norm())
    assert moved == pytest.approx(1e-26, rel=1e-5, abs=0)


def test_a_tiny_bound_of_one_group_is_kept():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return F.linear(x, p["w"]).sin().sum((1, 2)) + x.sum(1) @ p["b"]

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=per_group({"b": 1.0, "w": 1e-26}))
    params, x = {"w": W, "b": torch.zeros(2)}, torch.ones(3, 4, 2)
    grads, _ = grad_fn(params, 1e-25 * x, state=state)
    assert float(grads.pytree["w"].norm()) == pytest.approx(3e-26, rel=1e-5, abs=0)


def test_factors_far_apart():
    """|x| beyond float32's squares, |dy| below: their product is an ordinary norm."""
    x = 5e18 * torch.randn(3, 2)

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return (F.linear(x, w) * 5e-24).sum(1)

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1e-5)
    assert distance(grad_fn(W, x, state=state)[0].pytree, looped(loss_fn, W, x, 1e-5)) < 1e-5


@pytest.mark.parametrize("batch", [None, torch.zeros(0, 2)])
@pytest.mark.parametrize("has_aux", [False, True])
def test_an_empty_batch_is_a_sum_of_zeros(batch, has_aux):
    calls = []

    def loss_fn(w: Tensor, x: Tensor) -> Any:
        calls.append(1)
        return (plain(w, x), x) if has_aux else plain(w, x)

    grad_fn, _ = clipped_grad(loss_fn, clipping_norm=1.0, has_aux=has_aux)
    got, state = grad_fn(W, batch, state=ClipState(step=3, microbatch_size=8))
    grads, aux = got if has_aux else (got, None)
    assert grads.pytree.dtype == torch.float64
    assert not grads.pytree.any()
    assert grads.report.norms.shape == (1, 0)
    assert aux is None
    assert state == ClipState(step=4, microbatch_size=8)
    assert not calls
