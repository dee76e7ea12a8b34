"""Gradients of one example whose places cancel: what is summed has the norm that was found."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

from opake_lightning.dpsgd.clipping import clipped_grad
from tests.helpers import norm_of, trainable

LAYERS = {
    "linear": (lambda: nn.Linear(64, 64), (6, 64)),
    "wide linear": (lambda: nn.Linear(256, 256), (2, 256)),
    "convolution": (lambda: nn.Conv2d(16, 16, 3, padding=1), (16, 4, 4)),
    "convolution of few places": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 2, 2)),
    "convolution of many places": (lambda: nn.Conv1d(2, 3, 3), (2, 40)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(8, 8, 2), (8, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [1, 3])
def test_the_sum_of_one_example_is_within_the_bound(name, size):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        out = torch.func.functional_call(layer, params, (x,))
        # The upstream gradient is large, and nearly cancels over places.
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        places = upstream.flatten(2) if out.dim() > 2 else upstream.flatten(1)[:, None]
        places = places - places.mean(-1, keepdim=True)
        return 1e6 * (out * places.reshape(out.shape)).sum()

    # The same value at all places, so that only what is left of the cancelling is a gradient.
    x = torch.randn(size, *[shape[0]], *[1] * (len(shape) - 1)).expand(size, *shape).contiguous()
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1e-3)
    alone, _ = grad_fn(trainable(layer), x[:1], state=state)
    assert norm_of(optree.tree_leaves(alone.pytree)) <= 1e-3 * (1 + 1e-6)
    # In a batch, too: without the last one, the sum is less by its clipped gradient.
    both = [
        grad_fn(trainable(layer), part, state=state)[0].pytree
        for part in (x, x[:-1] if size > 1 else x[:0])
    ]
    moved = [a - b for a, b in zip(*map(optree.tree_leaves, both), strict=True)]
    assert norm_of(moved) <= 1e-3 * (1 + 1e-6)
