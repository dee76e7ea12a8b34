"""What the first batch does not show: other sizes, zeros, values, and ways through the model."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import clipped_grad
from tests.helpers import distance, looped, norm_of

W = torch.tensor([[1.0, -2.0], [0.5, 3.0]])


def steps_equal_a_loop(loss_fn: Any, *steps: tuple[Any, Any], **options: Any) -> list[int]:
    """Clip several batches in a row by ``auto``, each against a loop; returns the engines."""
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=0.1, **options)
    engines = []
    for params, batch in steps:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "clipping ")
            grads, state = grad_fn(params, batch, state=state)
        want = looped(loss_fn, params, batch, 0.1)
        pairs = zip(optree.tree_leaves(grads.pytree), want, strict=True)
        assert norm_of([a.double() - b for a, b in pairs]) < 1e-6
        engines.append(state.engine)
    return engines


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({}, [(16, 16)]), ({}, [(4, 6), (4, 4)]), ({"microbatch_size": 8}, [(14, 6)])],
    ids=["first batch", "second batch", "last microbatch"],
)
@pytest.mark.parametrize("make", ["ones", "eye", "expand"])
def test_a_size_that_happens_to_be_the_batch_s(make, options, sizes):
    """A constant, or a parameter, whose first size is by chance the number of examples."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        if make == "ones":
            gate = torch.ones(x.shape[1], x.shape[2]) * p["g"]
            return torch.tanh(x * gate).sum((1, 2))
        if make == "eye":
            return torch.tanh(x.transpose(1, 2) @ (torch.eye(x.shape[1]) @ p["w"])).sum((1, 2))
        gate = p["g"].expand(x.shape[1], 5).unsqueeze(0).expand(len(x), -1, -1)
        return torch.tanh(x * gate).sum((1, 2))

    def params(length: int) -> dict[str, Tensor]:
        return {"w": normal(length, 3)} if make == "eye" else {"g": normal(5)}

    steps_equal_a_loop(loss_fn, *((params(t), normal(n, t, 5)) for n, t in sizes), **options)


def _time_first(p: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(F.linear(x.transpose(0, 1), p["w"])).mean(0)
    return (hidden @ p["head"] - 1) ** 2


def _through_a_function(p: Any, x: Tensor) -> Tensor:
    return F.linear(x, _Doubled.apply(p["w"]) * p["s"]).sin().sum((1, 2))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return 2 * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * dy


@pytest.mark.parametrize("name", ["head", "s"])
def test_a_parameter_that_is_zero_at_first_hides_nothing(name):
    """Behind a head or a gate of zeros, all gradients are zero, those that are wrong, too."""
    loss_fn = _time_first if name == "head" else _through_a_function
    width = {"head": (6,), "s": ()}[name]
    params = {"w": normal(6, 5), name: torch.zeros(width)}
    later = {"w": params["w"], name: torch.ones(width)}
    x = normal(4, 8, 5)
    assert steps_equal_a_loop(loss_fn, (params, x), (later, x))[-1] > 0


def test_examples_without_gradients_decide_nothing():
    """Those that are compared, the first, middle and last, have no gradient; others are mixed."""
    x = normal(8, 8, 5)
    params = {"w": normal(6, 5), "head": normal(6)}
    x[[0, 4, 7]] = x[:, [0, 4, 7]] = 0  # of each sequence, too: it is taken for an example
    engines = steps_equal_a_loop(_time_first, (params, x), (params, normal(8, 8, 5)))
    assert engines[0] == 0  # by one pass, which took them one by one
    assert engines[1] > 0


@pytest.mark.parametrize("first", ["one example", "one that is usual"])
def test_an_example_alone_tells_nothing_of_many(first):
    """Of one example, every row is its own; the next batch does the same with more of them."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return F.linear(x.transpose(0, 1), w).sum((0, 2))

    w, x = normal(6, 5), normal(4, 8, 5)
    begin = x.clone()
    begin[1:, 2:] *= 1e24  # those that are odd, and what is taken for them
    begin = x[:1] if first == "one example" else begin
    assert steps_equal_a_loop(loss_fn, (w, begin), (w, x))[-1] > 0


LONG, SHORT = torch.full((4,), 6), torch.tensor([2, 5, 3, 1])


@pytest.mark.parametrize(
    "cut",
    [
        lambda x, n: x[:, : n.max()],
        lambda x, n: x.narrow(1, 0, n.max()),
        lambda x, n: x[:, torch.arange(n.max())],
        lambda x, n: x[:, : F.one_hot(n).shape[1]],
        lambda x, n: x[:, : int(f"{n.amax(0, keepdim=True).squeeze()}")],
    ],
    ids=["slice", "narrow", "arange", "one-hot", "format"],
)
def test_the_longest_of_a_batch_cuts_no_other_example(cut):
    def loss_fn(w: Tensor, batch: Any) -> Tensor:
        x, n = batch
        return F.linear(cut(x, n), w).sin().mean((1, 2))

    w, x = normal(3, 5), normal(4, 7, 5)
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=0.1, engine="one_pass")
    with pytest.raises(ValueError, match=r"one number of the whole batch|depend on the batch"):
        grad_fn(w, (x, LONG), state=state)


def test_places_of_a_mask_are_no_rows():
    def loss_fn(w: Tensor, batch: Any) -> Tensor:
        x, n = batch
        i, j = torch.where(torch.arange(x.shape[1]) < n[:, None])
        return torch.zeros(len(x)).index_add(0, i, F.linear(x[i, j], w).sin().sum(1))

    w, x = normal(3, 5), normal(4, 6, 5)
    steps_equal_a_loop(loss_fn, (w, (x, torch.full((4,), 3))), (w, (x, torch.tensor([1, 3, 4, 4]))))


def test_rows_of_a_table_that_are_read_twice():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        places = np.minimum(np.arange(x.shape[1]), 3)
        return torch.tanh(x + p["t"][places]).sum((1, 2))

    params = {"t": normal(4, 5)}
    assert steps_equal_a_loop(loss_fn, (params, normal(4, 4, 5)), (params, normal(4, 9, 5)))[0] == 0


def test_copies_of_overlapping_parts():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        first = 2 * (x.shape[1] - 4)
        copied = torch.tanh(x[:, :2] + p["t"][first : first + 2].clone()).sum((1, 2))
        return copied + torch.tanh(x[:, 2:4] * p["t"][2:4]).sum((1, 2))

    params = {"t": normal(6, 5)}
    steps_equal_a_loop(loss_fn, (params, normal(4, 4, 5)), (params, normal(4, 5, 5)))


def test_factors_far_apart():
    """|x| beyond float32's squares, |dy| below: their product is an ordinary norm."""
    x = 5e18 * normal(3, 2)

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return (F.linear(x, w) * 5e-24).sum(1)

    want = looped(loss_fn, W, x, 1e-5)
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1e-5)
    assert distance(grad_fn(W, x, state=state)[0].pytree, want) < 1e-5


def test_dimensions_that_change_places_later():
    where = [0]

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        rows = F.linear(x.movedim(0, where[0]).flatten(0, 1), w).sin()
        sizes = (len(x), -1) if where[0] == 0 else (-1, len(x))
        return rows.unflatten(0, sizes).movedim(where[0], 0).flatten(1).sum(1)

    w, x = normal(3, 5), normal(4, 8, 5)
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=0.1)
    grad_fn(w, x, state=state)
    where[0] = 1
    with pytest.warns(UserWarning, match="not that of its examples one by one"):
        got, _ = grad_fn(w, x, state=state)
    assert distance(got.pytree, looped(loss_fn, w, x, 0.1)) < 1e-5


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda p, x: torch.matmul(input=x, other=p["w"]).sin().sum(1),
        lambda p, x: x.mm(mat2=p["w"]).sin().sum(1),
        lambda p, x: torch.addmm(p["b"], mat1=x, mat2=p["w"]).sin().sum(1),
        lambda p, x: torch.add(input=x, other=p["b"]).sin().sum(1),
        lambda p, x: torch.where(condition=x > 0, input=x, other=p["b"]).sin().sum(1),
        lambda p, x: (x + p["b"].expand(size=(len(x), 5))).sin().sum(1),
        lambda p, x: (x + torch.broadcast_to(p["b"], size=(len(x), 5))).sin().sum(1),
    ],
)
def test_arguments_by_name(loss_fn):
    params = {"w": normal(5, 5), "b": normal(5)}
    steps_equal_a_loop(loss_fn, (params, normal(4, 5)))


@pytest.mark.parametrize("engine", ["auto", "one_by_one"])
def test_what_is_no_parameter_here_gets_no_gradient(engine):
    body = nn.Linear(5, 3)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        hidden = body(x)
        if engine == "one_by_one" and bool((hidden > 1e9).any(1, keepdim=True)[0]):
            hidden = hidden * 2
        return F.linear(hidden, p["w"]).sin().sum(1)

    steps_equal_a_loop(loss_fn, ({"w": normal(2, 3)}, normal(4, 5)))
    assert body.weight.grad is None
