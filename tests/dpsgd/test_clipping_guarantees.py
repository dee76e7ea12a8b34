"""How far one example can move the sum, whatever its gradient, its neighbours and the dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import clipped_grad

SLACK = 1 + 1e-6
NAN, INF = float("nan"), float("inf")

moderate = st.floats(-100, 100)
anything = st.one_of(
    moderate,
    st.floats(width=32),  # with NaN and infinity
    st.sampled_from([1e30, -1e30, 3e38, 1e-30, 1e-45, 0.0]),
)
examples = st.lists(st.tuples(anything, anything, anything), min_size=1, max_size=5)


def linear(params: Any, x: Tensor) -> Tensor:
    """A loss whose per-example gradient is the example, spread over two leaves."""
    return x[:, :2] @ params["a"] + x[:, 2] * params["b"]


def zeros(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"a": torch.zeros(2, dtype=dtype), "b": torch.zeros((), dtype=dtype)}


def clipped(x: Tensor, bound: float, **options: Any) -> tuple[Tensor, int]:
    grad_fn, state = clipped_grad(linear, clipping_norm=bound, **options)
    grads, state = grad_fn(zeros(x.dtype), x, state=state)
    return torch.cat([grads.pytree["a"], grads.pytree["b"][None]]), state.nonfinite_examples


@given(rows=examples, bound=st.floats(1e-3, 1e3), expected=st.sampled_from([None, 1000]))
def test_one_example_more_moves_the_sum_by_at_most_the_bound(rows, bound, expected):
    for dtype in (torch.float64, torch.float32):
        x = torch.tensor(rows, dtype=dtype)
        whole, _ = clipped(x, bound, expected_batch_size=expected)
        rest, _ = clipped(x[:-1], bound, expected_batch_size=expected)
        alone, _ = clipped(x[-1:], bound, expected_batch_size=expected)
        limit = bound / (expected or 1)
        assert float(alone.double().norm()) <= limit * SLACK
        # Five numbers of at most `limit` added in float32 round by some 1e-7 of their sum.
        rounding = 0 if dtype == torch.float64 else len(rows) * 3e-7 * limit
        assert float((whole.double() - rest.double()).norm()) <= limit * SLACK + rounding
        torch.testing.assert_close(whole, rest + alone, rtol=1e-6, atol=1e-6 * limit)


@given(rows=examples)
def test_finite_gradients_within_the_bound_are_not_scaled(rows):
    x = torch.tensor(rows, dtype=torch.float64)
    small = x[x.norm(dim=1) <= 7]
    got, lost = clipped(small, 7.0)
    torch.testing.assert_close(got, small.sum(0), rtol=1e-12, atol=1e-12)
    assert lost == 0


@pytest.mark.parametrize("expected", [None, 1000])
@pytest.mark.parametrize(
    ("dtype", "x"),
    [
        (torch.float32, (3e30, 0.0, 4e30)),
        (torch.float32, (3e38, 3e38, 3e38)),
        (torch.bfloat16, (3e38, 0.0, 1e38)),
        (torch.float64, (3e200, 0.0, 4e200)),
        (torch.float64, (3e-200, 3e300, 4e300)),
    ],
)
def test_a_huge_finite_gradient_is_clipped_to_the_bound_not_dropped(dtype, x, expected):
    row = torch.tensor([x], dtype=dtype)
    got, lost = clipped(row, 0.5, expected_batch_size=expected)
    direction = F.normalize(row.double() / row.abs().max().double())
    want = 0.5 / (expected or 1) * direction[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-20)
    assert lost == 0


def test_gradients_whose_squares_float32_cannot_hold_are_clipped():
    """Some norms are found from sums of squares, such as a convolution's."""
    grad_fn, state = clipped_grad(lambda w, x: F.conv2d(x, w).sum((1, 2, 3)), clipping_norm=1e-25)
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for size in (1.0, 1e-24):
        grads, state = grad_fn(torch.zeros(8, 3, 3, 3), size * images, state=state)
        assert 1e-26 < float(grads.pytree.double().norm()) < 3e-25 * SLACK


@pytest.mark.parametrize("microbatch", [1, 2, None])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_an_example_that_is_not_finite_contributes_zero_and_is_counted(bad, microbatch):
    good = torch.tensor([[3.0, 4.0, 0.0], [0.1, 0.2, 0.3], [1e32, 0.0, 0.0]])
    x = torch.cat([good[:1], torch.tensor([[1.0, bad, 1.0]]), good[1:]])
    got, lost = clipped(x, 1.0, microbatch_size=microbatch)
    want, none_lost = clipped(good, 1.0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert (lost, none_lost) == (1, 0)
    assert clipped(torch.full((3, 3), bad), 1.0) == (pytest.approx([0, 0, 0]), 3)


def test_a_gradient_that_leaves_float32_is_not_finite_and_one_that_stays_is_clipped():
    # Three tokens of (3e38, 0): float32 holds each of them, and no sum of two.
    tokens = torch.tensor([[[3e38, 0.0]] * 3, [[3e38, 0.0], [-3e38, 0.0], [0.0, 1e38]]])
    grad_fn, state = clipped_grad(lambda w, x: F.linear(x, w).sum((1, 2)), clipping_norm=0.5)
    alone, wide = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.float64)
    grads, after = grad_fn(alone, tokens, state=state)
    torch.testing.assert_close(grads.pytree, torch.tensor([[0.0, 0.5]], dtype=torch.float64))
    assert after.nonfinite_examples == 1
    grads, after = grad_fn(wide, tokens.double(), state=state)
    torch.testing.assert_close(grads.pytree, torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    assert after.nonfinite_examples == 0


def test_leaves_that_share_one_gradient_are_each_clipped_and_divided_once():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return ((p["a"] + p["b"]) * x).sum(1) + p["empty"].sum()

    params = {name: torch.zeros(n) for name, n in (("a", 2), ("b", 2), ("empty", 0))}
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    x = torch.tensor([[3e30, 4e30], [NAN, 0.0], [0.3, 0.4]])
    grads, state = grad_fn(params, x, state=state)
    want = torch.tensor([0.6, 0.8]) / math.sqrt(2) + torch.tensor([0.3, 0.4])
    for name in ("a", "b"):
        torch.testing.assert_close(grads.pytree[name], want.double())
    assert state.nonfinite_examples == 1


def test_the_count_of_lost_examples_goes_on_from_the_state():
    grad_fn, state = clipped_grad(linear, clipping_norm=1.0)
    for _ in range(2):
        _, state = grad_fn(zeros(torch.float32), torch.tensor([[NAN] * 3, [1.0] * 3]), state=state)
    assert state.nonfinite_examples == 2


@pytest.mark.parametrize("microbatch", [1, 2, 4, 8, 100])
def test_the_sum_does_not_depend_on_the_microbatch(microbatch):
    # A group of examples clipped together would have C as the bound of the group, not of each.
    x = 10 * torch.randn(8, 3)
    got, _ = clipped(x, 1.0, microbatch_size=microbatch)
    want, _ = clipped(x, 1.0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    (_, aux), _ = _with_aux(x, microbatch)
    assert torch.equal(aux["twice"], 2 * x)


def _with_aux(x: Tensor, microbatch: int) -> Any:
    def loss_fn(params: Any, x: Tensor) -> Any:
        return linear(params, x), {"twice": 2 * x}

    grad_fn, state = clipped_grad(
        loss_fn, clipping_norm=1.0, has_aux=True, microbatch_size=microbatch
    )
    return grad_fn(zeros(x.dtype), x, state=state)


# -- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [True, False])
def test_the_clipped_norm_of_ten_million_parameters(constant):
    # A float32 reduction over this many equal numbers reads up to 4e-4 low.
    n = 10**7
    x = torch.full((1, n), 0.1) if constant else torch.randn(1, n)
    grad_fn, state = clipped_grad(lambda w, x: (w * x).sum(1), clipping_norm=1.0)
    grads, _ = grad_fn(torch.zeros(n), x, state=state)
    norm = float(grads.pytree.double().norm())
    assert 1 - 1e-6 <= norm <= SLACK


@pytest.mark.parametrize("order", ["half-first", "wide-first"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_norm_over_leaves_of_mixed_width(half, order):
    # 256 numbers of 1/64 have norm 0.25; in halves a sum of squares would stop growing.
    names = ("h", "w") if order == "half-first" else ("w", "h")
    dtypes = {"h": half, "w": torch.float32}
    params = {name: torch.zeros(128, dtype=dtypes[name]) for name in names}

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return sum((leaf * x.to(leaf.dtype)).sum(1).float() for leaf in p.values())

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=0.125)
    grads, _ = grad_fn(params, torch.full((1, 128), 1 / 64), state=state)
    for leaf in grads.pytree.values():
        # Half, as the norm was 0.25.
        want = torch.full((128,), 1 / 128, dtype=torch.float64)
        torch.testing.assert_close(leaf, want, rtol=1e-6, atol=0)
    assert grads.dtypes == (torch.float32, torch.float32)  # released no narrower than that


# On the CPU autocast computes these in float32.
IN_FLOAT32 = {
    "cross_entropy": lambda out, y: F.cross_entropy(out, y),
    "cross_entropy-of-shares": lambda out, y: F.cross_entropy(out, out.detach().softmax(1)),
    "nll_loss": lambda out, y: F.nll_loss(out, y, reduction="none"),
    "mse_loss": lambda out, y: F.mse_loss(out, torch.ones_like(out)),
    "l1_loss": lambda out, y: F.l1_loss(out, torch.ones_like(out)),
    "binary_cross_entropy_with_logits": lambda out, y: F.binary_cross_entropy_with_logits(
        out, torch.ones_like(out)
    ),
    "poisson_nll_loss": lambda out, y: F.poisson_nll_loss(out, torch.ones_like(out)),
    "layer_norm": lambda out, y: F.layer_norm(out, (3,)).square().sum(),
}


@pytest.mark.parametrize("of", IN_FLOAT32.values(), ids=IN_FLOAT32.keys())
def test_under_autocast_a_loss_has_the_type_that_it_has_outside_of_vmap(of):
    def loss_fn(w: Tensor, batch: Any) -> Tensor:
        x, y = batch
        out = F.linear(x, w)
        loss = of(out, y)
        seen.append((out.dtype, loss.dtype))
        return loss

    seen: list[Any] = []
    batch = torch.randn(4, 5), torch.randint(3, (4,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_fn(torch.randn(3, 5), [t[:1] for t in batch])
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=0.5)
        grad_fn(torch.randn(3, 5), batch, state=state)
        assert torch.is_autocast_enabled("cpu")
    assert seen[0][0] == torch.bfloat16
    assert len(set(seen)) == 1


def test_integers_and_complex_numbers_cannot_be_trained():
    grad_fn, state = clipped_grad(lambda p, x: x.sum(1), clipping_norm=1.0)
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(TypeError, match=r"layer/w has dtype .*only real floating-point"):
            grad_fn({"layer": {"w": torch.zeros(2, dtype=dtype)}}, torch.ones(1, 2), state=state)
