"""What a batch, a loss and its auxiliary output may be, and what is said when they are not."""

from __future__ import annotations

import copy
import json
import math
import operator
import os
import pickle
import re
import sys
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opake_lightning.dpsgd.clipping import clipped_grad
from opake_lightning.dpsgd.clipping._batch import examples_of
from opake_lightning.errors import PrivacyError
from tests.cases_batches import (
    AttributeDict,
    Encoding,
    Frozen,
    Pair,
    ReadOnly,
    Registered,
    Renamed,
    Slotted,
    Text,
    all_containers,
    reachable,
)

X = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
W = torch.zeros(2)
WANT = torch.tensor([0.9, 1.2])
IMMUTABLE = (str, int, type(None))


def run(loss_fn: Any, *batch: Any, params: Any = W, **options: Any) -> Any:
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, **options)
    return grad_fn(params, *batch, state=state)


def _endless(items: Any) -> Any:
    items.append(items)
    return items


def dot(w: Tensor, x: Tensor) -> Tensor:
    assert x.shape[1:] == (2,)  # the batch dimension is kept
    return x @ w


# -- containers ---------------------------------------------------------------------------------


@all_containers
def test_any_container_reaches_the_loss(case):
    def loss_fn(w: Tensor, batch: Any) -> Tensor:
        assert type(batch) is kind
        return dot(w, case.get(batch))

    batch = case.make(X)
    kind = case.becomes or type(batch)
    grads, _ = run(loss_fn, batch)
    torch.testing.assert_close(grads.pytree, WANT, check_dtype=False)


@all_containers
def test_a_rebuilt_batch_has_other_tensors_and_nothing_else_of_the_given_one(case):
    """What the docstring of Examples.rebuild guarantees."""
    batch = case.make(X)
    examples = examples_of((batch,))
    assert examples.size == 2
    rows = tuple(tensor[1:] for tensor in examples.tensors)
    (rebuilt,) = examples.rebuild(rows)
    assert type(rebuilt) is (case.becomes or type(batch))
    assert torch.equal(case.get(rebuilt), X[1:])
    assert torch.equal(case.get(batch), X)
    before, after = reachable(batch), reachable(rebuilt)
    assert Text in map(type, before.values())
    assert Text not in map(type, after.values())
    shared = [type(before[at]) for at in before.keys() & after.keys()]
    assert all(issubclass(kind, IMMUTABLE) for kind in shared)


def test_rebuilt_batches_share_nothing_with_each_other():
    examples = examples_of(({"x": [X], "d": UserDict(y=X)},))
    (first,), (second,) = (examples.rebuild(examples.tensors) for _ in range(2))
    first["x"].append(X)
    first["d"]["z"] = first["new"] = X
    assert (len(second), len(second["x"]), list(second["d"])) == (2, 1, ["y"])
    (third,) = examples.rebuild(examples.tensors)
    assert (len(third), len(third["x"]), list(third["d"])) == (2, 1, ["y"])


def test_what_containers_have_beside_their_leaves_is_kept():
    given = (
        defaultdict(list, b=X, a=X),
        deque([X], maxlen=3),
        OrderedDict(b=X, a=X),
        {"b": X, "a": X, 3: None},
        [None, (), {}, X],
        UserDict(),
    )
    rebuilt = examples_of((*given,)).rebuild((X,) * 8)
    assert (rebuilt[0].default_factory, list(rebuilt[0])) == (list, ["b", "a"])
    assert rebuilt[1].maxlen == 3
    assert (list(rebuilt[2]), list(rebuilt[3])) == (["b", "a"], ["b", "a", 3])
    assert (rebuilt[3][3], rebuilt[4]) == (None, [None, (), {}, X])
    assert type(rebuilt[5]) is UserDict


def test_items_that_are_attributes_too_are_one_tensor():
    assert len(examples_of((AttributeDict(x=X, y=AttributeDict(z=X)),)).tensors) == 2


def test_a_rebuilt_encoding_is_used_as_before():
    transformers = pytest.importorskip("transformers")
    given = transformers.BatchEncoding({"input_ids": X, "attention_mask": X.long()})
    given._encodings = [Text()]
    examples = examples_of((given,))
    (batch,) = examples.rebuild(examples.tensors)
    assert batch.input_ids is batch["input_ids"] is X
    assert (lambda **kwargs: kwargs)(**batch).keys() == {"input_ids", "attention_mask"}
    assert list(batch.to("cpu").keys()) == ["input_ids", "attention_mask"]
    with pytest.raises(TypeError, match=r"batch\._encodings\[0\] is not a tensor"):
        batch.tokens()


def test_an_order_that_differs_from_that_of_insertion_is_kept():
    given = OrderedDict(a=X, b=X)
    given.move_to_end("a")
    (rebuilt,) = examples_of((given,)).rebuild((X, X))
    assert (type(rebuilt), list(rebuilt)) == (OrderedDict, ["b", "a"])


def test_several_batch_arguments_and_constants_in_any_position():
    def loss_fn(scale: float, x: Tensor, w: dict[str, Tensor], y: Tensor) -> Tensor:
        return scale * (x @ w["w"] - y)

    batch_at = {"argnums": 2, "batch_argnums": (1, 3)}
    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, **batch_at)
    grads, _ = grad_fn(1.0, X, {"w": W}, torch.ones(2), state=state)
    torch.testing.assert_close(grads.pytree["w"], WANT.double())
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


def _withheld(value: Any = "secret") -> Any:
    examples = examples_of(({"x": X, "meta": {"n": value}},))
    return examples.rebuild(examples.tensors)[0]["meta"]["n"]


def _deleted_item(n: Any) -> None:
    del n[0]


def _set_item(n: Any) -> None:
    n[0] = 1


def _deleted_attribute(n: Any) -> None:
    del n.x


def _set_attribute(n: Any) -> None:
    n.x = 1


def _entered(n: Any) -> None:
    with n:
        pass


def _matched(n: Any) -> None:
    match n:
        case str():
            pass


def _added_to(n: Any) -> None:
    n += 1


async def _awaited(n: Any) -> None:
    await n


async def _entered_later(n: Any) -> None:
    async with n:
        pass


async def _iterated_later(n: Any) -> None:
    async for _ in n:
        pass


BINARY = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "matmul", "truediv", "mod")},
    **{name: getattr(operator, name) for name in ("floordiv", "pow", "lshift", "rshift", "xor")},
    **{
        name: getattr(operator, name)
        for name in ("and_", "or_", "eq", "ne", "lt", "le", "gt", "ge")
    },
    "divmod": divmod,
}

USES = {
    **{f"n {name} 1": lambda n, f=f: f(n, 1) for name, f in BINARY.items()},
    **{f"1 {name} n": lambda n, f=f: f(1, n) for name, f in BINARY.items()},
    **{f"X {name} n": lambda n, f=f: f(X, n) for name, f in BINARY.items() if name != "divmod"},
    **{f"n {name} X": lambda n, f=f: f(n, X) for name, f in BINARY.items() if name != "divmod"},
    **{
        f.__name__: f
        for f in (
            *(int, float, complex, bool, str, bytes, range, hash, len, dir, vars, open),
            *(iter, next, list, tuple, set, dict, reversed, sorted, enumerate, min, max, sum),
            *(operator.neg, operator.pos, operator.invert, operator.not_, operator.index),
            *(abs, round, math.floor, math.ceil, math.trunc, math.sqrt, os.fspath),
            *(pickle.dumps, json.dumps, sys.getsizeof, Counter),
            *(_deleted_item, _set_item, _deleted_attribute, _set_attribute, _entered, _matched),
            *(_added_to, torch.as_tensor, torch.tensor, torch.is_tensor, torch.zeros, torch.sum),
            *(np.asarray, np.isnan),
        )
    },
    "key": lambda n: {n: 1},
    "look-up": lambda n: {"secret": 1}[n],
    "in dict": lambda n: n in {"secret": 1},
    "in list": lambda n: n in ["secret"],
    "in n": lambda n: "secret" in n,
    "n == text": lambda n: n == "secret",
    "text + n": lambda n: "text" + n,
    "f-string": lambda n: f"{n}",
    "f-string with format": lambda n: f"{n:>3}",
    "%s": lambda n: "%s" % n,  # noqa: UP031
    "print": lambda n: print(n),  # noqa: T201
    "item": lambda n: n[0],
    "slice": lambda n: n[:1],
    "index": lambda n: "text"[n],
    "star": lambda n: [*n],
    "two stars": lambda n: {**n},
    "attribute": lambda n: n.lower(),
    "class": lambda n: n.__class__,
    "getattr": lambda n: getattr(n, "lower", None),
    "hasattr": lambda n: hasattr(n, "lower"),
    "call": lambda n: n(),
    "await": lambda n: _awaited(n).send(None),
    "async with": lambda n: _entered_later(n).send(None),
    "async for": lambda n: _iterated_later(n).send(None),
    "anext": lambda n: anext(n),
    "isinstance": lambda n: isinstance(n, str),
    "isinstance of an abc": lambda n: isinstance(n, Mapping),
    "isinstance of n": lambda n: isinstance(1, n),
    "issubclass": lambda n: issubclass(int, n),
    "pickle in a batch": lambda n: pickle.dumps({"n": n}),
    "tensor of a list": lambda n: torch.tensor([1.0, n]),
    "as_tensor of a list": lambda n: torch.as_tensor([n]),
    "array of a list": lambda n: np.array([n]),
    "array of arrays": lambda n: np.concatenate([n, np.ones(2)]),
    "array + n": lambda n: np.ones(2) + n,
    "index of a tensor": lambda n: X[n],
    "index of a dimension": lambda n: X[:, n],
    "dimension": lambda n: X.sum(dim=n),
    "shape": lambda n: X.reshape(2, n),
    "to": lambda n: X.to(n),
    "where": lambda n: torch.where(X > 0, X, n),
    "stack": lambda n: torch.stack([X, n]),
    "layer": lambda n: nn.Linear(2, 2)(n),
    "embedding": lambda n: nn.Embedding(2, 2)(n),
    "cross_entropy": lambda n: nn.functional.cross_entropy(X, n),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_what_is_not_a_tensor_complains_when_it_is_used(use):
    with pytest.raises(TypeError, match=r"batch\['meta'\]\['n'\] is not a tensor") as caught:
        use(_withheld())
    assert "secret" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:clipping one example at a time")
def test_the_complaint_comes_out_of_clipping():
    def loss_fn(w: Tensor, batch: Any) -> Tensor:
        return dot(w, batch["x"]) * {"secret": 1.0}[batch["name"]]

    with pytest.raises(TypeError, match=r"batch\['name'\] is not a tensor"):
        run(loss_fn, {"x": X, "name": "secret"})


@pytest.mark.parametrize(
    "value", ["secret", b"secret", 3, 2.5, True, np.ones(2), object(), {1}, X.shape, range(2), len]
)
def test_whatever_is_not_a_tensor_is_withheld(value):
    assert repr(_withheld(value)) == "<withheld: batch['meta']['n']>"


def test_what_is_withheld_is_copied_with_its_batch():
    examples = examples_of(((X, UserDict(n="secret", list=[3])),))
    (batch,) = examples.rebuild(examples.tensors)
    for copied in (copy.copy(batch), copy.deepcopy(batch)):
        assert repr(copied[1]["n"]) == "<withheld: batch[1]['n']>"
        assert copy.copy(copied[1]["n"]) is batch[1]["n"]
        assert repr(copied[1]["list"]) == "[<withheld: batch[1]['list'][0]>]"


@pytest.mark.parametrize(
    ("container", "place"),
    [
        (lambda n: (X, n), "[1]"),
        (lambda n: UserDict(x=X, n=n), "['n']"),
        (lambda n: Encoding({"x": X}, n), "._encodings"),
        (lambda n: Frozen(X, n), ".rest"),
        (lambda n: Slotted(X, n), ".rest"),
        (lambda n: Pair(X, n), ".rest"),
        (lambda n: Registered(X, n), "[1]"),
        (lambda n: deque([X, n]), "[1]"),
        (lambda n: ReadOnly({"x": X, "n": n}), "['n']"),
        (lambda n: Renamed({"x": X, "n": n}), "['N']"),
    ],
)
def test_messages_name_the_place_in_any_container(container, place):
    scalar = torch.tensor(1.0)
    with pytest.raises(ValueError, match="^" + re.escape(f"batch{place} is a tensor without")):
        examples_of((container(scalar),))
    with pytest.raises(ValueError, match="^" + re.escape(f"batch[1]{place}['k'] is a tensor")):
        examples_of((X, container({"k": scalar})))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X, torch.tensor(1.0)), r"batch\[1\] is a tensor without dimensions"),
        ({"x": X, "ids": torch.zeros(1, 3)}, r"batch\['ids'\] has 1 rows but batch\['x'\] has 2"),
        (["a", "b"], r"the batch holds no tensors, only str at batch\[0\]"),
        (object(), r"the batch holds no tensors, only object at batch;"),
        (UserDict(a="b"), r"the batch holds no tensors, only str at batch\['a'\]; return tensors"),
        (_endless([]), r"the batch contains itself, or is nested too deep; return plain"),
        (_endless(UserList()), r"the batch holds no tensors, only UserList at batch;"),
        (Encoding({"x": X}, _endless([])), r"the batch contains itself"),
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
    ("loss_fn", "what"),
    [
        (lambda w, x: x * w, r"shape \(1, 2\); take a mean or sum over everything but the batch"),
        (lambda w, x: ((x @ w), 1), "<class 'tuple'>"),
        (lambda w, x: 1.0, "<class 'float'>"),
    ],
)
def test_a_loss_that_is_not_one_number_per_example_is_refused(loss_fn, what):
    with pytest.raises(PrivacyError, match=f"one number per example: .* got {what}"):
        run(loss_fn, X)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (
            lambda w, x: x @ w,
            TypeError,
            r"must return \(loss, aux\), got <class 'torch.Tensor'>",
        ),
        (
            lambda w, x: (x @ w, {"n": 1}),
            PrivacyError,
            "aux must hold tensors only, one row per example, got int",
        ),
    ],
)
def test_bad_auxiliary_output_is_refused(loss_fn, error, message):
    with pytest.raises(error, match=message):
        run(loss_fn, X, has_aux=True)


@pytest.mark.parametrize("constant", [torch.ones(1), torch.ones(())])
def test_auxiliary_output_that_is_the_same_for_all_has_one_row_per_example(constant):
    (_, aux), _ = run(lambda w, x: (x @ w, {"n": constant}), X, has_aux=True)
    assert torch.equal(aux["n"], torch.ones(2))


def test_a_module_that_writes_its_buffers_is_refused_and_they_are_as_before():
    norm = nn.BatchNorm1d(2)
    params = dict(norm.named_parameters())
    with pytest.raises(PrivacyError, match="in training mode keeps statistics of the examples"):
        run(lambda p, x: torch.func.functional_call(norm, p, (x,)).sum(1), X, params=params)
    assert int(norm.num_batches_tracked) == 0
    assert norm.running_mean.tolist() == [0.0, 0.0]


# -- empty draws --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [None, (None, None), X[:0], {"x": X[:0], "id": []}, UserDict(x=X[:0], id=["a"]), UserDict()],
)
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
        "w": ([0.0] * 2, torch.float64),
        "h": ([0.0] * 3, torch.float64),
    }
    assert grads.dtypes == (torch.float32, torch.float32)
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
