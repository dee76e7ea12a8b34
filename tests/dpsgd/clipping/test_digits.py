"""Norms and sums with digits enough, in whatever form gradients come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import _gradients, _pass, clipped_grad
from opake_lightning.dpsgd.clipping._rules import _conv

SIGNS = torch.tensor([[1.0], [-1.0]])


def sum_of(loss: Callable[[Tensor, Tensor], Tensor], w: Tensor, x: Tensor, bound: float) -> Tensor:
    """All rows in one microbatch, whose sum in float32 would lose a part of the last one."""
    grad_fn, state = clipped_grad(
        lambda p, b: loss(p["w"], b), clipping_norm=bound, microbatch_size=len(x)
    )
    return grad_fn({"w": w}, x, state=state)[0].pytree["w"].double()


@pytest.mark.parametrize("width", [4, 64])
def test_where_places_cancel_an_example_is_clipped_to_the_bound(width):
    """From gradients for narrow layers, from products of pairs for wide ones."""
    torch.manual_seed(0)
    w, u, one = torch.randn(width, width), torch.randn(width), torch.randn(6, 1, width)
    x = torch.cat([one, one + 1e-4 * torch.randn(6, 1, width)], 1)
    for row in x.split(1):
        total = sum_of(lambda w, x: (F.linear(x, w) * SIGNS * u).sum((1, 2)), w, row, 1e-6)
        assert abs(float(total.norm()) / 1e-6 - 1) < 1e-6


def test_where_uses_cancel_an_example_is_clipped_to_the_bound():
    """What is left of a product in float32 is rounding, which a sum in float64 does not have."""
    torch.manual_seed(0)
    w, u, x = torch.randn(8, 8), torch.randn(8), torch.randn(6, 8)
    near = x + 1e-4 * torch.randn(6, 8)

    def loss(w: Tensor, batch: Tensor) -> Tensor:
        x, near = batch.unbind(1)
        return F.linear(x, w) @ u - (w * (u[:, None] * near[:, None])).sum((1, 2))

    for row in torch.stack([x, near], 1).split(1):
        assert abs(float(sum_of(loss, w, row, 1e-6).norm()) / 1e-6 - 1) < 1e-6


@pytest.mark.parametrize(("inputs", "outputs"), [(1e-21, 1e18), (1e18, 1e-21), (1e-25, 1e25)])
def test_factors_that_float32_cannot_square_have_their_norm(inputs, outputs):
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    for row in (x / x.norm(dim=1, keepdim=True)).split(1):
        bound = 0.5 * inputs * outputs
        total = sum_of(
            lambda w, x: (F.linear(inputs * x, w) * outputs).sum(1),
            torch.zeros(4, 5),
            row,
            bound,
        )
        assert abs(float(total.norm()) / bound - 1) < 1e-6


KINDS: dict[str, tuple[Any, tuple[int, ...], Callable[[], Tensor]]] = {
    "elementwise": (lambda w, x: (x * w).sum(1), (20,), lambda: torch.randn(20)),
    "view": (lambda w, x: (x @ w.t()).sum(1), (3, 20), lambda: torch.randn(20)),
    "table": (
        lambda w, x: F.embedding(x, w).sin().sum((1, 2)),
        (5, 4),
        lambda: torch.tensor([1, 3]),
    ),
    "convolution": (
        lambda w, x: F.conv1d(x, w).sin().sum((1, 2)),
        (3, 2, 3),
        lambda: torch.randn(2, 20),
    ),
    "computed": (lambda w, x: (x @ w.sin().t()).sum(1), (3, 20), lambda: torch.randn(20)),
}


@pytest.mark.parametrize("formed", ["at once", "a few at a time", "never"])
@pytest.mark.parametrize("name", KINDS)
def test_the_last_of_many_equal_rows_moves_any_sum_by_the_bound(monkeypatch, name, formed):
    if formed == "a few at a time":
        monkeypatch.setattr(_gradients, "_CHUNK", 1 << 10)
        monkeypatch.setattr(_conv, "_CHUNK", 1 << 10)
    if formed == "never":
        monkeypatch.setattr(_pass, "_FORMED", 0)
    loss, shape, make = KINDS[name]
    torch.manual_seed(0)
    w, row = 0.3 * torch.randn(shape), make()
    x = row.expand(5000, *row.shape)
    alone = float(sum_of(loss, w, x[:1], 1e9).norm())
    for bound in (0.3 * alone, 0.7 * alone):
        moved = sum_of(loss, w, x, bound) - sum_of(loss, w, x[:-1], bound)
        assert abs(float(moved.norm()) / bound - 1) < 1e-6


@pytest.mark.parametrize("name", KINDS)
def test_an_example_of_half_precision_is_clipped_to_the_bound(name):
    """A norm in eight bits would be off by parts in a thousand."""
    loss, shape, make = KINDS[name]
    torch.manual_seed(0)
    w, row = torch.randn(shape).bfloat16(), make()[None]
    row = row.bfloat16() if row.is_floating_point() else row
    alone = float(sum_of(loss, w, row, 1e9).norm())
    for bound in (0.3 * alone, 0.7 * alone):
        assert abs(float(sum_of(loss, w, row, bound).norm()) / bound - 1) < 1e-6
