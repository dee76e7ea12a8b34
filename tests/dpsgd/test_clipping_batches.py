"""What a batch, a loss and its auxiliary output may be, and what is said when they are not."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn

from opake_lightning.dpsgd.clipping import clipped_grad
from opake_lightning.errors import PrivacyError

X = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
W = torch.zeros(2)
WANT = torch.tensor([0.9, 1.2])


class Pair(NamedTuple):
    x: Any
    rest: Any


class Registered:
    """A container of the user's, known to optree."""

    def __init__(self, x: Tensor, tag: Any) -> None:
        self.x, self.tag = x, tag


optree.register_pytree_node(
    Registered,
    lambda r: ((r.x, r.tag), None),
    lambda _, children: Registered(*children),
    namespace="opake_lightning",
)


def run(loss_fn: Any, *batch: Any, params: Any = W, **options: Any) -> Any:
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, **options)
    return grad_fn(params, *batch, state=state)


def dot(w: Tensor, x: Tensor) -> Tensor:
    assert x.shape[1:] == (2,)  # the batch dimension is kept
    return x @ w


@pytest.mark.parametrize(
    ("batch", "get"),
    [
        (X, lambda b: b),
        ((X, X), lambda b: b[1]),
        ([X, None], lambda b: b[0]),
        ({"x": X, "id": ["a", "b"], "n": 3}, lambda b: b["x"]),
        (Pair(X, {"deep": [(X.long(), X)]}), lambda b: b.rest["deep"][0][1]),
        (deque([X]), lambda b: b[0]),
        (Registered(X, "tag"), lambda b: b.x),
        ((X, torch.zeros(2, 0)), lambda b: b[0]),
    ],
    ids=["tensor", "tuple", "list", "dict", "namedtuple", "deque", "registered", "zero-width"],
)
def test_any_container_that_optree_knows(batch, get):
    grads, _ = run(lambda w, b: dot(w, get(b)), batch)
    torch.testing.assert_close(grads.pytree, WANT)
    empty = optree.tree_map(
        lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf,
        batch,
        namespace="opake_lightning",
    )
    grads, _ = run(lambda w, b: dot(w, get(b)), empty)
    assert torch.equal(grads.pytree, W)


def test_several_batch_arguments_and_constants_in_any_position():
    def loss_fn(scale: float, x: Tensor, w: dict[str, Tensor], y: Tensor) -> Tensor:
        return scale * (x @ w["w"] - y)

    batch_at = {"argnums": 2, "batch_argnums": (1, 3)}
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, **batch_at)
    grads, _ = grad_fn(1.0, X, {"w": W}, torch.ones(2), state=state)
    torch.testing.assert_close(grads.pytree["w"], WANT)
    with pytest.raises(TypeError, match="at least 4 positional arguments"):
        grad_fn(1.0, X, {"w": W}, state=state)


@pytest.mark.parametrize("where", [(0, 0), (1, (0, 1)), (0, ())])
def test_parameters_and_batch_are_different_arguments(where):
    argnums, batch_argnums = where
    with pytest.raises(PrivacyError, match=rf"argnums={argnums} must differ from batch_argnums"):
        clipped_grad(dot, clipping_norm=1.0, argnums=argnums, batch_argnums=batch_argnums)
    with pytest.raises(ValueError, match="argnums and batch_argnums must be >= 0"):
        clipped_grad(dot, clipping_norm=1.0, argnums=-1, batch_argnums=1)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("clipping_norm", 0.0, ValueError),
        ("clipping_norm", float("inf"), ValueError),
        ("clipping_norm", float("nan"), ValueError),
        ("clipping_norm", "1", TypeError),
        ("expected_batch_size", 0, ValueError),
        ("microbatch_size", 0, ValueError),
        ("microbatch_size", 2.0, TypeError),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(argument, value, error):
    with pytest.raises(error, match=f"{argument} must be"):
        clipped_grad(dot, **{"clipping_norm": 1.0, argument: value})


# -- what is not a tensor -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n + 1,
        lambda n: 2 * n,
        lambda n: float(n),
        lambda n: n == 3,
        lambda n: n < 3,
        lambda n: f"{n}",
        lambda n: n[0],
        lambda n: n.item(),
        lambda n: list(n),
        lambda n: 1 if n else 2,
        lambda n: len(n),
        lambda n: n(),
        lambda n: {n: 1},
    ],
)
def test_what_is_not_a_tensor_complains_when_it_is_used(use):
    def loss_fn(w: Tensor, batch: Any) -> Tensor:
        assert "withheld: batch['meta']['n']" in repr(batch["meta"]["n"])
        use(batch["meta"]["n"])
        return dot(w, batch["x"])

    with pytest.raises(TypeError, match=r"batch\['meta'\]\['n'\] is not a tensor|unhashable"):
        run(loss_fn, {"x": X, "meta": {"n": 3}})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X, torch.tensor(1.0)), r"batch\[1\] is a tensor without dimensions"),
        ({"x": X, "ids": torch.zeros(1, 3)}, r"batch\['x'\] has 2 rows but batch\['ids'\] has 1"),
        (["a", "b"], r"the batch holds no tensors, only str at batch\[0\]"),
        (object(), r"the batch holds no tensors, only object at batch;"),
    ],
)
def test_a_batch_that_is_not_made_of_rows_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        run(lambda w, b: w.sum(), batch)


def test_two_batch_arguments_are_told_apart_in_messages():
    with pytest.raises(ValueError, match=r"batch\[1\]\['y'\] has 3 rows but batch\[0\] has 2"):
        run(lambda w, x, y: w.sum(), X, {"y": torch.zeros(3)}, batch_argnums=(1, 2))


# -- losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda w, x: x * w, ValueError, r"shape \(1,\) or \(\), got shape \(1, 2\)"),
        (lambda w, x: (x * w)[0], ValueError, r"got shape \(2,\); reduce over everything but"),
        (lambda w, x: ((x @ w), 1), ValueError, r"got <class 'tuple'>"),
        (lambda w, x: 1.0, ValueError, r"got <class 'float'>"),
    ],
)
def test_a_loss_that_is_not_one_number_per_example_is_refused(loss_fn, error, message):
    with pytest.raises(error, match=message):
        run(loss_fn, X)


def test_a_mean_over_the_batch_is_taken_example_by_example_and_that_is_said():
    with pytest.warns(UserWarning, match="mean makes one number of the whole batch"):
        grads, _ = run(lambda w, x: (x @ w).mean(), X)
    torch.testing.assert_close(grads.pytree, WANT)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda w, x: x @ w, r"must return \(loss, aux\), got <class 'torch.Tensor'>"),
        (
            lambda w, x: (x @ w, {"n": 1}),
            "aux must hold tensors only, one row per example, got int",
        ),
    ],
)
def test_bad_auxiliary_output_is_refused(loss_fn, message):
    with pytest.raises(TypeError, match=message):
        run(loss_fn, X, has_aux=True)


def test_auxiliary_output_has_one_row_per_example():
    def loss_fn(w: Tensor, x: Tensor) -> Any:
        return x @ w, {"kept": x, "dropped": x.sum(), "wide": x[0], "constant": torch.ones(1)}

    with pytest.warns(UserWarning, match="sum makes one number of the whole batch"):
        (grads, aux), _ = run(loss_fn, X, has_aux=True)
    torch.testing.assert_close(grads.pytree, WANT)
    assert torch.equal(aux["kept"], X)
    assert torch.equal(aux["dropped"], X.sum(1))
    assert torch.equal(aux["wide"], X)
    assert torch.equal(aux["constant"], torch.ones(2))


def test_auxiliary_output_of_another_length_is_taken_example_by_example():
    with pytest.warns(UserWarning, match=r"an auxiliary output has shape \(1,\)"):
        (_, aux), _ = run(lambda w, x: (x @ w, torch.ones(1)), X, has_aux=True)
    assert torch.equal(aux, torch.ones(2))


def test_a_loss_that_reads_values_is_explained():
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return x @ w if (x > 0).any(1, keepdim=True) else -(x @ w)

    with pytest.raises(RuntimeError) as caught:
        run(loss_fn, X, engine="vmap")
    assert "under torch.func.vmap" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="__bool__ makes Python or shapes depend on the batch"):
        run(loss_fn, X, engine="one_pass")
    with pytest.warns(UserWarning, match="one example at a time, which is much slower"):
        grads, state = run(loss_fn, X)
    torch.testing.assert_close(grads.pytree, WANT)
    assert state.engine == 2


def test_a_module_that_writes_its_buffers_is_refused():
    norm = nn.BatchNorm1d(2)
    params = dict(norm.named_parameters())
    with pytest.raises(RuntimeError) as caught:
        run(lambda p, x: torch.func.functional_call(norm, p, (x,)).sum(1), X, params=params)
    assert "buffers cannot be written in place" in "".join(caught.value.__notes__)
    assert int(norm.num_batches_tracked) == 0


# -- empty draws --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, (None, None), X[:0], {"x": X[:0], "id": []}])
@pytest.mark.parametrize("has_aux", [False, True])
def test_an_empty_draw_is_zeros_whatever_the_loss(batch, has_aux):
    def loss_fn(w: Any, x: Any) -> Any:
        raise AssertionError("there is no example to call this with")

    params = {"w": torch.ones(2), "h": torch.ones(3, dtype=torch.bfloat16)}
    result, state = run(loss_fn, batch, params=params, has_aux=has_aux, expected_batch_size=4)
    grads = result[0] if has_aux else result
    if has_aux:
        assert result[1] is None
    assert {k: (v.tolist(), v.dtype) for k, v in grads.pytree.items()} == {
        "w": ([0.0] * 2, torch.float32),
        "h": ([0.0] * 3, torch.float32),
    }
    assert (grads.sensitivity, state.nonfinite_examples) == (0.25, 0)


# -- purity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [1.0, float("nan"), 1e30])
def test_no_argument_is_written_to(special):
    params = {"a": torch.randn(2), "b": nn.Parameter(torch.randn(2))}
    batch = {"x": torch.tensor([[special, 1.0], [2.0, 3.0]])}
    tensors = [*params.values(), *batch.values()]
    before = [(t._version, t.detach().clone()) for t in tensors]
    grad_fn, state = clipped_grad(
        lambda p, b: b["x"] @ (p["a"] + p["b"]), clipping_norm=1.0, microbatch_size=1
    )
    grads, _ = grad_fn(params, batch, state=state)
    assert state.nonfinite_examples == 0
    assert not any(g.requires_grad for g in grads.pytree.values())
    assert params["b"].grad is None
    for tensor, (version, value) in zip(tensors, before, strict=True):
        assert tensor._version == version
        torch.testing.assert_close(tensor.detach(), value, rtol=0, atol=0, equal_nan=True)
