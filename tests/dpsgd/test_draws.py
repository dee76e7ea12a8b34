"""A loss that branches on what it draws goes on with the numbers that it branched on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import clipped_grad

DRAWS = {
    "rand": lambda x: torch.rand(()),
    "rand_like": lambda x: torch.rand_like(x[0, 0]),
    "in_place": lambda x: torch.empty_like(x[0, 0]).uniform_(),
    "of_a_constant": lambda x: torch.zeros(()).uniform_() + 0 * x[0, 0],
    "dropout": lambda x: F.dropout(1 + x * 0)[0].mean() / 2,
    "bernoulli_of_the_example": lambda x: torch.bernoulli(x[0].sigmoid() * 0 + 0.5).mean(),
    "computed": lambda x: torch.stack([torch.rand(()), torch.rand(())]).mean(),
    "by_name": lambda x: torch.add(input=torch.rand(()), other=torch.rand(())) / 2,
}


READS = {
    "bool": bool,
    "equal": lambda t: torch.equal(t, torch.tensor(True)),
    "in": lambda t: True in t[None],
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("name", DRAWS)
def test_a_branch_is_on_the_number_that_the_loss_goes_on_with(name, how):
    def run(*, branch: bool) -> Any:
        def loss_fn(params: Any, x: Any) -> Any:
            u = DRAWS[name](x)
            yes = READS[how](u > 0.5) if branch else u > 0.5
            sign = (1.0 if yes else -1.0) if branch else torch.where(u > 0.5, 1.0, -1.0)
            return (params["w"] * x).sum(1) * sign, (u, torch.as_tensor(yes))

        torch.manual_seed(3)
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, has_aux=True, microbatch_size=20)
        (grads, aux), _ = grad_fn({"w": torch.ones(3)}, x, state=state)
        return grads.pytree["w"], *aux

    x = torch.linspace(-1, 1, 120).view(40, 3)
    total, u, yes = run(branch=True)
    want, v, which = run(branch=False)
    assert 5 < int(yes.sum()) < 35
    assert torch.equal(yes, u > 0.5)
    assert torch.equal(u, v)
    assert torch.equal(yes, which)
    torch.testing.assert_close(total, want)


ASKS = {
    "nothing": lambda x: 1,
    "a sign": lambda x: 1 if x.sum() > 0 else 2,
    "a shape": lambda x: len(x[x > 0]),
}


@pytest.mark.filterwarnings("ignore:clipping one example at a time")
@pytest.mark.parametrize("name", ASKS)
def test_no_row_and_no_step_draws_what_another_draws(name):
    def loss_fn(w: Any, x: Any) -> Any:
        return (x @ w).sum() * ASKS[name](x), torch.rand(())

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, has_aux=True, microbatch_size=4)
    x, drawn = torch.linspace(-1, 2, 36).view(12, 3), []
    for _ in range(3):
        (_, u), state = grad_fn(torch.ones(3), x, state=state)
        drawn += u.tolist()
    assert len(set(drawn)) == 36


def _turned(draw: Any) -> Any:
    """What ``draw`` makes of an example that lies otherwise in memory."""
    return lambda x: draw(x.transpose(1, 2)).transpose(1, 2)


LAID_OUT = {
    "dropout": F.dropout,
    "rand_like": lambda x: x * torch.rand_like(x),
    "in_place": lambda x: (1 * x).bernoulli_(0.5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.empty_like(x).normal_() * x,
}
LAID_OUT |= {f"{name} of a transposed one": _turned(draw) for name, draw in LAID_OUT.items()}


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_row_that_splits_the_batch_changes_nothing_of_what_others_draw(name):
    def drawn(mark: float) -> Any:
        x = torch.linspace(-1, 1, 60).view(5, 3, 4)
        marks = torch.tensor([0.0, 0.0, 0.0, 0.0, mark])

        def loss_fn(w: Any, batch: Any) -> Any:
            x, mark = batch
            out = LAID_OUT[name](x)
            return (out * w).sum() * (2 if mark > 0 else 1), out.detach()

        torch.manual_seed(3)
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, has_aux=True, microbatch_size=5)
        (_, out), _ = grad_fn(torch.ones(3, 4), (x, marks), state=state)
        return out

    assert torch.equal(drawn(0.0), drawn(1.0))
