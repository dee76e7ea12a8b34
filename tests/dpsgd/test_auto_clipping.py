"""AUTO-S: every gradient is scaled to just below the bound, and none exceeds it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opake_lightning.dpsgd.clipping import auto_clipped_grad
from tests.helpers import norm_of


def linear(w: Tensor, x: Tensor) -> Tensor:
    """A loss whose gradient for an example is the example."""
    return x @ w


@pytest.mark.parametrize(
    ("norm", "scaled"),
    [
        (0.0, 0.0),
        (0.001, 0.09090909090909091),
        (0.01, 0.5),
        (0.1, 0.9090909090909092),
        (0.5, 0.5 * 1.96078431372549),
        (1.0, 0.9900990099009901),
        (5.0, 5 * 0.1996007984031936),
        (10.0, 0.999000999000999),
    ],
)
def test_auto_clipping_has_the_published_norms(norm: float, scaled: float) -> None:
    grad_fn, state = auto_clipped_grad(linear)  # of 1, as auto() has
    row = torch.tensor([[0.6 * norm, 0.8 * norm]], dtype=torch.float64)
    grads, _ = grad_fn(torch.zeros(2, dtype=torch.float64), row, state=state)
    assert norm_of([grads.pytree]) == pytest.approx(scaled, rel=1e-12)
    assert norm_of([grads.pytree]) < grads.sensitivity == 1.0


def test_auto_clipping_divides_by_the_expected_batch_and_drops_what_is_not_finite() -> None:
    grad_fn, state = auto_clipped_grad(
        linear, clipping_norm=2.0, stability=1.0, expected_batch_size=4.0
    )
    rows = torch.tensor([[3.0, 0.0], [torch.nan, 0.0], [0.0, -torch.inf]])
    grads, state = grad_fn(torch.zeros(2), rows, state=state)
    assert grads.pytree.tolist() == [0.375, 0.0]  # 3 * 2 / (3 + 1) / 4
    assert (grads.sensitivity, state.nonfinite_examples) == (0.5, 2)


@pytest.mark.parametrize("stability", [0.0, -1.0, math.nan, math.inf, 1e-35])
def test_auto_clipping_refuses_a_stability_it_cannot_divide_by(stability: float) -> None:
    with pytest.raises(ValueError, match="stability"):
        auto_clipped_grad(linear, clipping_norm=1.0, stability=stability)
