"""Rules of a user's own, and finding that one is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import check_rule, per_example_rule
from tests.dpsgd.clipping.case import Case, clipped, counted, truth_of

X = torch.tensor([[3.0, 4.0], [0.3, 0.4], [-1.0, 2.0]])
W = torch.tensor([0.5, -1.0])


class _Scaled(torch.autograd.Function):
    """In the old style, which hides its use of the parameter from function transforms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return dy * w, (dy * x).sum(0)


@per_example_rule(lambda dy, x, w: (None, dy * x))
def scaled(x: Tensor, w: Tensor) -> Tensor:
    """x * w by a function of one's own."""
    return _Scaled.apply(x, w)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda p, x: scaled(x, p["w"]).sin().sum(1),
        lambda p, x: scaled(scaled(x, p["w"]).tanh(), 2 * p["w"]).sin().sum(1),
        lambda p, x: F.linear(scaled(x + p["w"], p["w"]), p["w"][None])[:, 0].sin(),
    ],
    ids=["once", "twice", "among others"],
)
def test_a_rule_of_one_s_own_takes_one_pass(loss_fn):
    case = Case({"w": W}, loss_fn, X)
    truth = truth_of(case)
    for bound in (1e-3, 1.0, 1e3):
        with counted() as count:  # a warning that rows run alone would be an error
            got, _ = clipped(case, bound, microbatch_size=len(X))
        assert (count.passes, count.alone) == (1, 0)
        assert truth.error_of(got.pytree, bound) < 1e-6


def test_without_its_rule_the_same_runs_one_example_at_a_time():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return _Scaled.apply(x, p["w"]).sin().sum(1)  # type: ignore[no-any-return]

    case = Case({"w": W}, loss_fn, X)
    with pytest.warns(UserWarning, match="give it a per_example_rule"):
        got, _ = clipped(case, 1.0)
    assert truth_of(case).error_of(got.pytree, 1.0) < 1e-6


def test_outside_of_clipping_a_decorated_function_is_itself():
    w = W.clone().requires_grad_()
    scaled(X, w).sin().sum().backward()
    (want,) = torch.autograd.grad((X * w).sin().sum(), w)
    torch.testing.assert_close(w.grad, want)


def test_a_right_rule_is_not_complained_of():
    check_rule(scaled, X, torch.ones(2, requires_grad=True))
    check_rule(F.linear, X, torch.randn(3, 2, requires_grad=True))


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda dy, x, w: (None, 2 * dy * x), AssertionError, "argument 1, example 0"),
        (lambda dy, x, w: (None, (dy * x).sum(0)), ValueError, r"one gradient for each example"),
        (lambda dy, x, w: (None, None), ValueError, "returned None for argument 1"),
    ],
    ids=["twice as much", "summed", "none"],
)
def test_a_wrong_rule_is_found(rule, error, message):
    @per_example_rule(rule)
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    with pytest.raises(error, match=message):
        check_rule(wrong, X, torch.ones(2, requires_grad=True))


def test_what_cannot_be_checked_is_said():
    with pytest.raises(ValueError, match="needs a parameter, and a batch of at least two"):
        check_rule(F.linear, X, torch.ones(3, 2))
    with pytest.raises(ValueError, match="needs a parameter, and a batch of at least two"):
        check_rule(F.linear, X[:1], torch.ones(3, 2, requires_grad=True))
    with pytest.raises(ValueError, match="run one at a time"):
        check_rule(_Scaled.apply, X, torch.ones(2, requires_grad=True))
