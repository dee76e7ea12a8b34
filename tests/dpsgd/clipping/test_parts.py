"""How a batch is taken apart and put together: microbatches, parts by value, rows alone."""

from __future__ import annotations

import gc
import re
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from opake_lightning.dpsgd.clipping import ClipState, clipped_grad
from opake_lightning.errors import PrivacyError
from opake_lightning.serialization import from_state_dict, state_dict
from tests.dpsgd.clipping.case import Case, clipped, counted
from tests.helpers import distance, looped, trainable

W = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
X = torch.randn(10, 2, generator=torch.Generator().manual_seed(1))


def plain(w: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, w).sin().sum(1)


# -- the size of a microbatch ---------------------------------------------------------------------


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
    assert from_state_dict(ClipState(), state_dict(state)) == state


def test_a_restored_choice_is_used():
    grad_fn, _ = clipped_grad(plain, clipping_norm=1.0)
    with counted() as count:
        _, state = grad_fn(W, X, state=ClipState(microbatch_size=4))
    assert count.passes == 3  # of 4, 4 and 2
    assert state.microbatch_size == 4


def test_a_given_size_is_no_choice():
    grad_fn, state = clipped_grad(plain, clipping_norm=1.0, microbatch_size=5)
    with counted() as count:
        _, state = grad_fn(W, X, state=state)
    assert count.passes == 2
    assert state.microbatch_size == 0


def test_where_an_example_takes_much_a_microbatch_is_small(monkeypatch):
    where = "opake_lightning.dpsgd.clipping._clip._free_bytes"
    monkeypatch.setattr(where, lambda device: 1.0)
    grad_fn, state = clipped_grad(plain, clipping_norm=1.0)
    grads, state = grad_fn(W, X, state=state)
    assert state.microbatch_size == 1
    assert distance(grads.pytree, looped(plain, W, X, 1.0)) < 1e-6


# -- caution --------------------------------------------------------------------------------------


def test_the_caution_that_a_loss_takes_is_kept():
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 3)
        out[:, 0] = F.linear(x, w)[:, 0]
        return out.sin().sum(1)

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, microbatch_size=len(X))
    tries = []
    for _ in range(2):
        with counted() as count:
            _, state = grad_fn(W, X, state=state)
        tries.append(count.tries)
    assert tries == [2, 1]
    assert state.caution == 1
    assert from_state_dict(ClipState(), state_dict(state)) == state
    with counted() as count:
        clipped_grad(loss_fn, clipping_norm=1.0)[0](W, X[:2], state=state)
    assert count.tries == 1


# -- what is said ---------------------------------------------------------------------------------


def _alone(w: Tensor, x: Tensor) -> Tensor:
    return F.linear(x[x[:, 0] > -9], w).sin().sum(1)


def test_that_rows_run_alone_is_said_once_and_where():
    grad_fn, state = clipped_grad(_alone, clipping_norm=1.0)
    with pytest.warns(UserWarning, match="one example at a time") as told:
        grads, state = grad_fn(W, X, state=state)
    grad_fn(W, X, state=state)  # again would be an error
    assert len(told) == 1
    message = str(told[0].message)
    assert "__getitem__" in message
    line = _alone.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in message
    assert "shapes that do not depend on values" in message
    assert distance(grads.pytree, looped(_alone, W, X, 1.0)) < 1e-6


class _Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy


def _of_old(w: Tensor, x: Tensor) -> Tensor:
    return _Old.apply(plain(w, x))


def test_the_line_is_said_where_no_function_of_torch_was_seen():
    grad_fn, state = clipped_grad(_of_old, clipping_norm=1.0)
    line = _of_old.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=f"cannot run .*test_parts.py:{line}: .*setup_context"):
        grad_fn(W, X, state=state)


def test_the_line_is_said_where_torch_func_hides_a_parameter():
    def one_step_of_maml(w: Tensor, x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda w: plain(w, x).sum())(w)
        return plain(w - inner, x)

    grad_fn, state = clipped_grad(one_step_of_maml, clipping_norm=1.0)
    with pytest.warns(UserWarning, match=r"linear \(.*test_parts.py:\d+\) in torch.func.grad"):
        grad_fn(W, X, state=state)


class _Loss:
    def __call__(self, w: Tensor, x: Tensor) -> Tensor:
        return plain(w, x).expand(2)


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (lambda w, x: plain(w, x).expand(2), "lambda"),
        (partial(lambda y, w, x: plain(w, x).expand(y), 2), "lambda"),
        (_Loss(), "_Loss"),
    ],
    ids=["function", "partial", "object"],
)
def test_a_refusal_says_which_loss_it_is_of(loss_fn, name):
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    with pytest.raises(PrivacyError) as caught:
        grad_fn(W, X, state=state)
    (note,) = caught.value.__notes__
    assert re.match(rf"In the loss .*{name}.* \(.*test_parts.py:\d+\)\.", note)


def test_a_value_that_splits_too_often_is_said_and_where():
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return plain(w, x) * x[0, 0].item()

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, microbatch_size=10)
    with pytest.warns(UserWarning, match="one example at a time") as told, counted() as count:
        grads, _ = grad_fn(W, X, state=state)
    assert count.alone == 10
    message = str(told[0].message)
    assert f"Tensor.item ({__file__}:{loss_fn.__code__.co_firstlineno + 1})" in message
    assert "torch.where" in message
    assert distance(grads.pytree, looped(loss_fn, W, X, 1.0)) < 1e-6


def test_a_cache_of_constants_is_kept_beside_a_tensor_that_is_filled():
    """What the loss fills has memory of each example's own, as any constant that it makes then."""
    cache: list[Tensor] = []

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        room = torch.zeros(3)
        room[:2] = x[0]
        if not cache:
            cache.append(torch.arange(3.0))
        return (room * cache[0] * w[:, 0]).sum()

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1e6)
    grads, state = grad_fn(W, X, state=state)
    assert state.caution == 1
    assert torch.equal(cache[0], torch.arange(3.0))
    assert float(grads.pytree[1, 0]) == pytest.approx(float(X[:, 1].sum()), rel=1e-6)


@pytest.mark.parametrize("caution", [0, 2])
@pytest.mark.parametrize("picks", [False, True])
@pytest.mark.filterwarnings("ignore:clipping one example at a time")
def test_a_sequence_is_padded_to_the_tensor_of_its_batch(caution, picks):
    """A row that runs alone, or is alone in its batch, is padded like any other."""
    torch.manual_seed(0)
    net = nn.GRU(3, 4, batch_first=True).double()
    x, lengths = torch.randn(3, 5, 3).double(), torch.tensor([2, 5, 1])

    def loss_of(total: int | None) -> Any:
        def loss_fn(p: Any, batch: Any) -> Tensor:
            x, n = batch
            packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
            out, _ = torch.func.functional_call(net, p, (packed,))
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=total)
            return out.mean((1, 2)) + (x[x > 1].sum() if picks else 0.0)

        return loss_fn

    case = Case(trainable(net), loss_of(5), (x, lengths))
    short = Case(trainable(net), loss_of(None), (x, lengths))
    truth = looped(case.loss_fn, case.params, case.batch, 0.1)
    got, _ = clipped(short, 0.1, caution=caution)
    assert distance(got.pytree, truth) < 1e-10


@pytest.mark.parametrize("engine", ["auto", "one_pass", "vmap", 0])
def test_there_is_no_engine_to_choose(engine):
    with pytest.raises(TypeError, match=f"engine={engine!r} is gone"):
        clipped_grad(plain, clipping_norm=1.0, engine=engine)


def test_parameters_that_no_example_moves_are_named_once():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return plain(p["w"], x) + p["target"].detach().sum()

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    params = {"w": W, "target": W.clone()}
    with pytest.warns(UserWarning, match="no example's loss has a gradient for target") as told:
        _, state = grad_fn(params, X, state=state)
    grad_fn(params, X, state=state)
    assert len(told) == 1


def test_a_contrastive_loss_of_one_row_has_no_gradient():
    """InfoNCE compares with the other rows; of one row, it is zero, and so is its gradient."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        out = F.linear(x, w)
        return F.cross_entropy(out @ out.T, torch.arange(len(x)))

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    grads, _ = grad_fn(W, X, state=state)
    assert not grads.pytree.any()
    assert not grads.report.norms.any()


def test_a_gradient_that_torch_leaves_undefined_is_zero():
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(p["w"], 0) * F.linear(x, p["v"]).sin().sum(1)

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    params = {"w": W, "v": W}
    grads, _ = grad_fn(params, X, state=state)
    assert distance(grads.pytree, looped(loss_fn, params, X, 1.0)) < 1e-6


@pytest.mark.parametrize(
    ("loss_fn", "shape"),
    [
        (lambda w, x: F.linear(x, w)[0, :2], r"\(2,\)"),
        (lambda w, x: F.linear(x, w), r"\(1, 3\)"),
        (lambda w, x: F.linear(x, w)[:, 0, None], r"\(1, 1\)"),
        (lambda w, x: F.linear(x[:0], w).sum(1), r"\(0,\)"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused_with_its_shape(loss_fn, shape):
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    with pytest.raises(PrivacyError, match=f"got shape {shape}"):
        grad_fn(W, X, state=state)


def test_an_error_of_the_loss_s_own_comes_out_as_it_is():
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        raise KeyError("of the loss")

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    with pytest.raises(KeyError, match="of the loss"):
        grad_fn(W, X, state=state)


# -- auxiliary outputs ----------------------------------------------------------------------------


def _with_numbers(kind: str) -> Any:
    """A loss whose auxiliary outputs say which row it was, by way of ``kind``."""

    def loss_fn(w: Tensor, batch: Any) -> Any:
        x, number = batch
        loss = plain(w, x)
        if kind == "split" and number % 3 == 1:
            loss = 2 * loss
        if kind == "split twice" and (number % 3 == 1 or number % 2 == 0):
            loss = 2 * loss
        if kind == "alone":
            loss = loss * len(torch.unique((x * 4).long()))
        if kind == "some alone" and number > 0:
            loss = loss * number.item()
        return loss, {"number": number, "out": (F.linear(x, w), loss.detach())}

    return loss_fn


@pytest.mark.parametrize("microbatch", [None, 1, 4, 10])
@pytest.mark.parametrize("kind", ["plain", "split", "split twice", "alone", "some alone"])
@pytest.mark.filterwarnings("ignore:clipping one example at a time")
def test_auxiliary_outputs_are_in_the_order_of_the_batch(kind, microbatch):
    numbers = torch.arange(10) - (5 if kind == "some alone" else 0)
    case = Case({"w": W}, lambda p, b: _with_numbers(kind)(p["w"], b), (X, numbers))
    (grads, aux), _ = clipped(case, 1.0, has_aux=True, microbatch_size=microbatch)
    assert aux["number"].tolist() == numbers.tolist()
    torch.testing.assert_close(aux["out"][0], F.linear(X, W))
    want = torch.stack(
        [
            _with_numbers(kind)(W, (X[i : i + 1], numbers[i : i + 1]))[0].reshape(())
            for i in range(10)
        ]
    )
    torch.testing.assert_close(aux["out"][1], want)
    # Norms, too.
    alone = [
        clipped(
            Case(
                case.params, lambda p, b: case.loss_fn(p, b)[0], (X[i : i + 1], numbers[i : i + 1])
            ),
            1.0,
        )[0].report.norms
        for i in range(10)
    ]
    torch.testing.assert_close(grads.report.norms, torch.cat(alone, 1))


def test_auxiliary_outputs_have_no_graph():
    grad_fn, state = clipped_grad(
        lambda w, x: (plain(w, x), F.linear(x, w)), clipping_norm=1.0, has_aux=True
    )
    (_, aux), _ = grad_fn(W, X, state=state)
    assert not aux.requires_grad


@pytest.mark.parametrize("aux", [lambda x: x.sum(0), lambda x: x[0], lambda x: x.mean()])
def test_an_auxiliary_output_without_rows_gets_them(aux):
    grad_fn, state = clipped_grad(
        lambda w, x: (plain(w, x), aux(x)), clipping_norm=1.0, has_aux=True
    )
    (_, got), _ = grad_fn(W, X, state=state)
    torch.testing.assert_close(got, torch.stack([aux(X[i : i + 1]) for i in range(10)]))


# -- what stays behind ----------------------------------------------------------------------------


def test_nothing_is_written_to_grad():
    body = torch.nn.Linear(2, 3)  # no parameter here

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return (body(x) + F.linear(x, p["w"])).sin().sum(1)

    w = W.clone().requires_grad_()
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    x = X.clone()
    grad_fn({"w": w}, x, state=state)
    assert w.grad is None
    assert body.weight.grad is None
    assert torch.equal(x, X)
    assert (x._version, w._version) == (0, 0)


def test_a_trace_of_a_loss_that_fails_is_no_trace_of_the_next():
    """An error half-way through leaves no mode and no transform behind."""
    grad_fn, state = clipped_grad(lambda w, x: F.linear(x, w.T).sum(1), clipping_norm=1.0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        grad_fn(W, X, state=state)
    grad_fn, state = clipped_grad(plain, clipping_norm=1.0)
    assert distance(grad_fn(W, X, state=state)[0].pytree, looped(plain, W, X, 1.0)) < 1e-6


def test_nothing_of_a_step_waits_for_the_garbage_collector():
    """A cycle would keep the activations of many steps, and gradients that were formed."""
    kept: list[weakref.ref[Tensor]] = []
    keep = kept.append

    class Loss:
        owners = ()

        def __call__(self, w: Tensor, x: Tensor) -> Tensor:
            hidden = F.linear(x, w)
            keep(weakref.ref(hidden))
            F.linear(hidden, w.T)  # recorded, and never asked for
            return hidden.sin().sum((1, 2))

    grad_fn, state = clipped_grad(Loss(), clipping_norm=1.0)
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
