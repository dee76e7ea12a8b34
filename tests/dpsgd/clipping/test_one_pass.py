"""What is particular to the engine that keeps no example's gradient: its routes and choices."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import (
    ClipState,
    _gradients,
    check_rule,
    clipped_grad,
    per_example_rule,
    per_group,
)
from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients, Outer, Pulled, Rows, total
from opake_lightning.dpsgd.clipping._one_pass import _conv
from opake_lightning.errors import PrivacyError
from opake_lightning.serialization import from_state_dict, state_dict
from tests.helpers import trainable

W = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
X = torch.tensor([[3.0, 4.0], [0.3, 0.4], [-1.0, 2.0]])


def plain(w: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, w).sin().sum(1)


def sum_by(engine: str, loss_fn: Any = plain, w: Any = W, x: Any = X, **options: Any) -> Any:
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, engine=engine, **options)
    grads, state = grad_fn(w, x, state=state)
    return grads.pytree, state


# -- forms of gradients ----------------------------------------------------------------------------


def _forms() -> dict[str, Gradients]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    ids = torch.randint(0, 5, (3, 6), generator=draw)
    leaf = normal(4, 6).requires_grad_()
    halves = leaf.t().chunk(2)
    return {
        "dense": Dense(normal(3, 2, 5)),
        "outer of one": Outer(normal(3, 1, 4), normal(3, 1, 6)),
        "outer": Outer(normal(3, 7, 4), normal(3, 7, 6)),
        "outer of few": Outer(normal(3, 2, 40), normal(3, 2, 60)),  # by products of pairs
        "outer of many": Outer(normal(3, 40, 4), normal(3, 40, 6)),  # formed
        "rows": Rows(ids, normal(3, 6, 4), 5),
        "two outers": total([Outer(normal(3, 2, 4), normal(3, 2, 6)) for _ in range(2)]),
        "tied": total([Rows(ids, normal(3, 6, 4), 5), Outer(normal(3, 2, 5), normal(3, 2, 4))]),
        "slices": total(
            [Pulled(Dense(normal(3, 3, 4)), half, leaf, isometric=True) for half in halves]
        ),
        "overlapping": total(
            [
                Pulled(Dense(normal(3, 3, 6)), leaf[start : start + 3], leaf, isometric=True)
                for start in (0, 1)
            ]
        ),
        "computed": Pulled(Dense(normal(3, 4, 6)), leaf.exp(), leaf, isometric=False),
    }


@pytest.mark.parametrize("name", _forms())
def test_every_form_agrees_with_the_gradients_themselves(name):
    form = _forms()[name]
    rows = form.dense(slice(None))
    factors = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    columns = factors.view(-1, *[1] * len(form.shape))
    sums, squares = (torch.zeros(form.shape, dtype=torch.float64) for _ in range(2))
    form.add_weighted(factors, sums)
    form.add_squares(factors, squares)
    forms = [form] if (formed := form.formed()) is None else [form, formed]
    for each in forms:
        torch.testing.assert_close(each.squared_norms(), rows.flatten(1).square().sum(1))
        torch.testing.assert_close(each.dense(slice(1, 2)), rows[1:2])
    torch.testing.assert_close(sums, (columns * rows).sum(0))
    torch.testing.assert_close(squares, (columns * rows).square().sum(0))
    assert (len(forms) == 2) is (name == "outer of many")


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation"),
    [
        ((6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
        ((7, 6), (3, 2), (2, 1), (0, 2), (1, 2)),
        ((6, 6), (1, 1), (2, 2), (0, 0), (1, 1)),
        ((9,), (4,), (1,), (3,), (2,)),
    ],
)
def test_products_of_places_give_a_convolution_s_norms(size, kernel, stride, padding, dilation):
    """The route that forms no gradient, whatever the heuristic would take."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, *size, generator=draw)
    weight = torch.randn(16, 8, *kernel, generator=draw)
    conv = F.conv2d if len(size) == 2 else F.conv1d
    y = conv(x, weight, None, stride, padding, dilation)
    dy = torch.randn(y.shape, generator=draw)
    how = ([*stride], [*padding], [*dilation], 1)
    form = _conv._Convolution(x, dy, weight.shape, 3, how)
    want = form.dense(slice(None)).double().flatten(1).square().sum(1)
    torch.testing.assert_close(form._gram(), want, rtol=1e-6, atol=0)


def test_what_cancels_keeps_its_digits():
    """‖Σ aₜbₜᵀ‖ of terms that nearly cancel; a float32 product of pairs is off by percents."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, 64, generator=draw), torch.randn(2, 1, 96, generator=draw)
    near = a * (1 + 1e-4 * torch.randn(a.shape, generator=draw))
    form = Outer(torch.cat([a, -near], 1), b.repeat(1, 2, 1))
    assert form._prefers_gram()
    want = (a.double() - near.double()).mT @ b.double()
    torch.testing.assert_close(
        form.squared_norms(), want.flatten(1).square().sum(1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("value", [1e-3, 7e-3, 0.3, 1.7])
def test_squares_are_summed_widely(value):
    """A plain float32 sum of 10⁷ equal squares is off by percents."""
    values = torch.full((1, 10**7 + 3), value)
    want = (10**7 + 3) * float(values[0, 0].double()) ** 2
    assert float(_gradients.squared_norms(values)) == pytest.approx(want, rel=6e-7)


# -- which engine ----------------------------------------------------------------------------------


def test_the_default_is_one_pass_and_says_nothing():
    got, state = sum_by("auto")
    torch.testing.assert_close(got, sum_by("vmap")[0])
    assert state.engine == 0
    assert state.microbatch_size > 0


def test_the_notice_names_operation_and_parameter_once():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return F.prelu(x, p["w"][0]).sum(1)

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    params = {"w": W}
    with pytest.warns(UserWarning, match="prelu of parameter w has no rule") as told:
        grads, state = grad_fn(params, X, state=state)
    assert len(told) == 1
    torch.testing.assert_close(grads.pytree["w"], sum_by("vmap", loss_fn, params)[0]["w"])
    # The run stays with the engine, and a resumed one with it: a second notice would fail here.
    assert state.engine == 1
    resumed = from_state_dict(ClipState(), state_dict(state))
    assert resumed == state
    fresh, _ = clipped_grad(loss_fn, clipping_norm=1.0)
    fresh(params, X, state=resumed)
    with pytest.raises(ValueError, match="prelu of parameter w has no rule; use engine='auto'"):
        sum_by("one_pass", loss_fn, params)


def test_another_way_through_the_model_is_tried_out_again():
    """Longer batches are centred, which mixes examples, by operations that hold no parameter."""

    def loss_fn(w: Tensor, batch: Any) -> Tensor:
        x, more = batch
        hidden = F.linear(x, w)
        return (hidden - hidden.mean(0) if more.shape[1] > 1 else hidden).square().sum(1)

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    _, state = grad_fn(W, (X, torch.zeros(3, 1)), state=state)
    assert state.engine == 0
    longer = (X, torch.zeros(3, 2))
    with pytest.warns(UserWarning, match="not that of its examples one by one"):
        got, state = grad_fn(W, longer, state=state)
    assert state.engine == 1
    torch.testing.assert_close(got.pytree, sum_by("vmap", loss_fn, x=longer)[0])


def test_a_batch_without_gradients_proves_nothing():
    """A loss that mixes examples, with a gradient of zero at first: found out at the second."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        hidden = F.linear(x, w)
        return (hidden * hidden.mean(0)).sum(1)

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    zero, state = grad_fn(W, torch.zeros(3, 2), state=state)
    assert zero.pytree.abs().max() == 0
    assert state.engine == 0
    with pytest.warns(UserWarning, match="not that of its examples one by one"):
        got, _ = grad_fn(W, X, state=state)
    torch.testing.assert_close(got.pytree, sum_by("vmap", loss_fn)[0])


def test_a_batch_of_one_proves_nothing():
    """Whatever comes first in a tensor, of one example everything is right."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return F.linear(x.transpose(0, 1), w).sin().sum((0, 2))  # time first

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    one = torch.randn(1, 6, 2)
    got, state = grad_fn(W, one, state=state)
    torch.testing.assert_close(got.pytree, sum_by("vmap", loss_fn, x=one)[0])
    many = torch.randn(3, 6, 2)
    with pytest.warns(UserWarning, match="not that of its examples one by one"):
        got, _ = grad_fn(W, many, state=state)
    torch.testing.assert_close(got.pytree, sum_by("vmap", loss_fn, x=many)[0])


def test_a_network_of_many_relus_is_not_taken_for_one_that_mixes():
    """In float32 some of them are open in a batch and shut for its examples alone, or other way."""
    torch.manual_seed(0)
    blocks = [
        (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(6)
    ]
    net = nn.Sequential(nn.Conv2d(3, 8, 1), *itertools.chain(*blocks), nn.Flatten())

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, p, (x,)).mean(1)

    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(8, 3, 16, 16)
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, engine="one_pass")
        grad_fn(trainable(net), x, state=state)


def test_random_numbers_go_on_as_if_nothing_had_been_tried_out():
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return F.dropout(F.linear(x, w), 0.5).sum(1)

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    drawn = []
    for _ in range(2):  # the second time, nothing is tried out
        torch.manual_seed(3)
        grads, state = grad_fn(W, X, state=state)
        drawn.append((grads.pytree, torch.rand(1)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_an_odd_example_leaves_the_others_alone(value):
    odd = torch.cat([X, torch.tensor([[value, 1.0]])])

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, w).sum(1)

    def clipped_by(engine: Any) -> Any:
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, engine=engine)
        return grad_fn(W, odd, state=state)

    (got, state), (want, _) = clipped_by("one_pass"), clipped_by("vmap")
    torch.testing.assert_close(got.pytree, want.pytree)
    torch.testing.assert_close(got.report.norms, want.report.norms)
    assert state.nonfinite_examples == (value != 1e30)


def test_a_tiny_bound_is_kept():
    """Squares of such gradients are zero in float32, and so would be the norm."""
    grad_fn, state = clipped_grad(plain, clipping_norm=1e-26)
    grads, _ = grad_fn(W, 1e-25 * X, state=state)
    assert 2e-26 < float(grads.pytree.double().norm()) <= 3e-26 * (1 + 1e-6)


def test_a_tiny_bound_is_kept_for_sums_over_places():
    grad_fn, state = clipped_grad(lambda w, x: plain(w, x).sum(1), clipping_norm=1e-26)
    x = torch.ones(3, 4, 2)
    _, state = grad_fn(W, x, state=state)  # so that the engine has been tried out
    grads, _ = grad_fn(W, 1e-25 * x, state=state)
    assert float(grads.pytree.double().norm()) == pytest.approx(3e-26, rel=1e-5, abs=0)


def test_a_tiny_bound_of_one_group_is_kept():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return plain(p["w"], x).sum(1) + x.sum(1) @ p["b"]

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=per_group({"b": 1.0, "w": 1e-26}))
    params, x = {"w": W, "b": torch.zeros(2)}, torch.ones(3, 4, 2)
    _, state = grad_fn(params, x, state=state)  # so that the engine has been tried out
    grads, _ = grad_fn(params, 1e-25 * x, state=state)
    assert float(grads.pytree["w"].double().norm()) == pytest.approx(3e-26, rel=1e-5, abs=0)


# -- what a loss must not do -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "one_pass", "vmap"])
def test_a_buffer_that_takes_in_the_batch_is_refused_before_it_does(engine):
    seen = torch.zeros(2)

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        seen.add_(x.detach().mean(0))
        return F.linear(x, w).sum(1)

    with pytest.raises((RuntimeError, ValueError)):
        sum_by(engine, loss_fn)
    assert seen.tolist() == [0.0, 0.0]


def test_one_example_at_a_time_writes_to_no_buffer_either():
    """Where vmap gives up for another reason first."""
    seen, cell = torch.zeros(2), nn.GRU(2, 2, batch_first=True)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        out = torch.func.functional_call(cell, p, (x,))[0]
        seen.add_(x.detach().sum((0, 1)))
        return out.sum((1, 2))

    with pytest.raises(PrivacyError, match="writes to a tensor from outside the loss"):
        sum_by("auto", loss_fn, trainable(cell), torch.randn(3, 4, 2))
    assert seen.tolist() == [0.0, 0.0]


def test_a_gradient_within_the_loss_is_left_to_the_general_engine():
    """A penalty on the gradient with respect to the input: weights count twice."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return F.linear(x, w).sin().sum()

        return torch.func.grad(inner)(x).square().sum(1)

    with pytest.warns(UserWarning, match="clipping"):
        got, state = sum_by("auto", loss_fn)
    torch.testing.assert_close(got, sum_by("vmap", loss_fn)[0])
    assert state.engine > 0


# -- rules of one's own ----------------------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return dy * w, (dy * x).sum(0)


def test_a_rule_of_one_s_own():
    @per_example_rule(lambda dy, x, w: (None, dy * x))
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return _Scaled.apply(x, w)  # type: ignore[no-any-return]

    check_rule(scaled, X, torch.ones(2, requires_grad=True))

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return scaled(x, w).sin().sum(1)

    def spelled_out(w: Tensor, x: Tensor) -> Tensor:
        return (x * w).sin().sum(1)

    w = torch.tensor([0.5, -1.0])
    got, state = sum_by("one_pass", loss_fn, w)
    torch.testing.assert_close(got, sum_by("vmap", spelled_out, w)[0])
    assert state.engine == 0


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda dy, x, w: (None, 2 * dy * x), AssertionError, "argument 1, example 0"),
        (lambda dy, x, w: (None, (dy * x).sum(0)), ValueError, r"one gradient for each example"),
        (lambda dy, x, w: (None, None), ValueError, "returned None for argument 1"),
    ],
)
def test_a_wrong_rule_is_found(rule, error, message):
    @per_example_rule(rule)
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    with pytest.raises(error, match=message):
        check_rule(scaled, X, torch.ones(2, requires_grad=True))


def test_what_cannot_be_checked_is_said():
    with pytest.raises(ValueError, match="needs a parameter, and a batch of at least two"):
        check_rule(F.linear, X, W)
    with pytest.raises(ValueError, match="bilinear of parameter"):
        check_rule(F.bilinear, X, X, torch.ones(1, 2, 2, requires_grad=True))
    check_rule(F.linear, X, W.clone().requires_grad_())


# -- memory ----------------------------------------------------------------------------------------


def test_nothing_of_a_step_waits_for_the_garbage_collector():
    """A cycle would keep the activations of many steps, and gradients that were formed."""
    kept: list[weakref.ref[Tensor]] = []

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        hidden = F.linear(x, w)
        kept.append(weakref.ref(hidden))
        F.linear(hidden, w)  # recorded, and never asked for
        return hidden.sin().sum((1, 2))

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, engine="one_pass")
    x = torch.randn(4, 64, 2)
    _, state = grad_fn(W, x, state=state)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            grad_fn(W, x, state=state)
        assert [ref() for ref in kept] == [None] * len(kept)
        assert len(kept) > 3
    finally:
        gc.enable()


def test_the_choice_of_a_microbatch_is_kept():
    """Sums over other microbatches round differently, so a resumed run takes the same."""
    grad_fn, state = clipped_grad(plain, clipping_norm=1.0)
    _, state = grad_fn(W, X[:1], state=state)
    assert state.microbatch_size == 0  # of one example nothing is known
    _, state = grad_fn(W, X, state=state)
    size = state.microbatch_size
    assert size > 0
    assert size & (size - 1) == 0
    _, state = grad_fn(W, X[:2], state=state)
    assert state.microbatch_size == size


def test_where_memory_is_short_a_batch_is_compared_as_it_is(monkeypatch):
    where = "opake_lightning.dpsgd.clipping._one_pass._verify.free_bytes"
    monkeypatch.setattr(where, lambda device: 1.0)
    seen: set[torch.dtype] = set()

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        seen.add(w.dtype)
        hidden = F.linear(x, w)
        return (hidden - hidden.mean(0)).square().sum(1)

    with pytest.warns(UserWarning, match="not that of its examples one by one"):
        got, _ = sum_by("auto", loss_fn)
    torch.testing.assert_close(got, sum_by("vmap", loss_fn)[0])
    assert seen == {torch.float32}
