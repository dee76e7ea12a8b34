"""What is changed for some rows only is refused, wherever it is, and put back."""

from __future__ import annotations

import functools
import io
import itertools
import queue
import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opake_lightning import _places
from opake_lightning.dpsgd.clipping import clipped_grad
from opake_lightning.errors import PrivacyError


class _Base:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = 0


class _Derived(_Base):
    __slots__ = ()


class Loss(nn.Module):
    """Changes one place, if a row's mean is positive, or with ``always`` in every call."""

    def __init__(self, change: Any, *, always: bool = False) -> None:
        super().__init__()
        self.lin, self.frozen = nn.Linear(3, 2), nn.Linear(2, 1).requires_grad_(False)
        self.register_buffer("tagged", torch.zeros(2))
        self.register_buffer("plain", torch.zeros(2))
        self.tagged.kept = 0
        self.names, self.seen, self.long = {"a"}, [1, 2], [0] * 1000
        self.of_row = dict.fromkeys(range(1000), 0)
        self.table = {"a": self.lin}
        self.big, self.small = np.zeros(100_000), np.zeros(3)
        self.slotted = _Derived()
        self.numpy_draws, self.python_draws = np.random.default_rng(0), random.Random(0)
        self.torch_draws = torch.Generator().manual_seed(0)
        self.counter, self.cached = itertools.count(), functools.lru_cache(abs)
        self.file, self.waiting = io.StringIO(), queue.SimpleQueue()
        cell = 0

        def count() -> None:
            nonlocal cell
            cell += 1

        self.count, self.cell = count, lambda: cell
        self.change, self.always, self.holder = change, always, None

    def forward(self, _: Any, x: Tensor) -> Tensor:
        z = self.lin(x)
        if self.always or z.mean() > 0:
            self.change(self)
        return z.square().sum(1)


class LossOfOutputs(Loss):
    """Changes one place in every call, by what its layer returns."""

    def forward(self, _: Any, x: Tensor) -> Tensor:
        z = self.lin(x)
        self.change(self, z)
        return z.square().sum(1)


def _renamed(loss: Loss) -> None:
    loss.table["b"] = loss.table.pop("a")


def _frozen(loss: Loss) -> None:
    loss.frozen.weight.requires_grad_(True)


CHANGES = {
    "tensor_that_had_attributes": (lambda s: setattr(s.tagged, "kept", 1), lambda s: s.tagged.kept),
    "tensor_that_had_none": (lambda s: setattr(s.plain, "kept", 1), lambda s: dict(vars(s.plain))),
    "set": (lambda s: s.names.add("b"), lambda s: set(s.names)),
    "list_made_shorter": (lambda s: s.seen.pop(), lambda s: list(s.seen)),
    "list": (lambda s: s.seen.append(3), lambda s: list(s.seen)),
    "longer_copy_of_a_list": (lambda s: setattr(s, "seen", [*s.seen, 3]), lambda s: s.seen),
    "long_list": (lambda s: s.long.__setitem__(500, 1), lambda s: sum(s.long)),
    "long_dict": (lambda s: s.of_row.update({500: 1}), lambda s: sum(s.of_row.values())),
    "another_key": (_renamed, lambda s: list(s.table)),
    "long_array": (lambda s: s.big.__setitem__(500, 1.0), lambda s: s.big.sum()),
    "array": (lambda s: s.small.__setitem__(0, 1.0), lambda s: s.small.tolist()),
    "slot_of_a_base_class": (lambda s: setattr(s.slotted, "value", 1), lambda s: s.slotted.value),
    "generator_of_numpy": (
        lambda s: s.numpy_draws.random(),
        lambda s: s.numpy_draws.bit_generator.state,
    ),
    "generator_of_Python": (lambda s: s.python_draws.random(), lambda s: s.python_draws.getstate()),
    "generator_of_torch": (
        lambda s: torch.rand(1, generator=s.torch_draws),
        lambda s: s.torch_draws.get_state().tolist(),
    ),
    "closure": (lambda s: s.count(), lambda s: s.cell()),
    "requires_grad": (_frozen, lambda s: s.frozen.weight.requires_grad),
    "hook": (
        lambda s: s.frozen.register_forward_hook(lambda *_: None),
        lambda s: len(s.frozen._forward_hooks),
    ),
    "buffer": (lambda s: s.plain.fill_(1.0), lambda s: s.plain.tolist()),
    "attribute": (lambda s: setattr(s, "holder", 1), lambda s: s.holder),
}


def _x(n: int = 12) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(n, 3)


def _run(loss: Loss, x: Tensor, state: Any = None, grad_fn: Any = None) -> Any:
    params = {n: p for n, p in loss.named_parameters() if p.requires_grad}
    if grad_fn is None:
        grad_fn, state = clipped_grad(loss, clipping_norm=1.0, microbatch_size=4)
    _, state = grad_fn(params, x, state=state)
    return grad_fn, state


@pytest.mark.filterwarnings("ignore:clipping one example at a time")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_for_some_rows_is_refused_and_put_back(name):
    change, what = CHANGES[name]
    torch.manual_seed(1)
    loss = Loss(change)
    before = what(loss)
    with pytest.raises(PrivacyError, match="outlives"):
        _run(loss, _x())
    assert what(loss) == before


LONGER = {
    "list": (lambda s: s.long.append(0), lambda s: len(s.long)),
    "dict": (lambda s: s.of_row.update({-1: 0}), lambda s: len(s.of_row)),
    "end of a list": (lambda s: s.long.__setitem__(-1, 1), None),
    "middle of a dict": (lambda s: s.of_row.pop(500), None),
}


@pytest.mark.parametrize("name", LONGER)
def test_of_a_very_long_place_the_length_and_the_ends_are_compared(monkeypatch, name):
    monkeypatch.setattr(_places, "_LONG", 100)
    change, what = LONGER[name]
    loss = Loss(change)
    with pytest.raises(PrivacyError, match="outlives"):
        _run(loss, _x())
    assert what is None or what(loss) == 1000


KEPT = {
    "list": lambda z: [z],
    "tuple": lambda z: (0, z),
    "dict": lambda z: {"z": z},
    "object": lambda z: types.SimpleNamespace(z=z),
    "nested": lambda z: [{"z": types.SimpleNamespace(z=(z,))}],
}


@pytest.mark.parametrize("name", KEPT)
def test_a_tensor_of_the_batch_is_found_in_what_is_assigned(name):
    loss = LossOfOutputs(lambda s, z: setattr(s, "holder", KEPT[name](z.detach())))
    with pytest.raises(PrivacyError, match=r"keeps a tensor of the batch in \w+.holder"):
        _run(loss, _x())
    assert loss.holder is None


@pytest.mark.filterwarnings("ignore:clipping one example at a time")
@pytest.mark.parametrize("write", [torch.Tensor.fill_, torch.Tensor.add_])
def test_where_rows_run_alone_a_write_to_a_buffer_is_refused_and_put_back(write):
    loss = LossOfOutputs(lambda s, z: write(s.plain, z[z > -9].detach().sum()))
    with pytest.raises(PrivacyError, match=r"writes to Loss.*plain"):
        _run(loss, _x())
    assert loss.plain.tolist() == [0, 0]


AFTER_COUNTING = {
    "nothing": lambda z: None,
    "a write": lambda z: torch.zeros(2).copy_(z[0]),
    "a branch": lambda z: 1 if z.mean() > 0 else 2,
}


@pytest.mark.parametrize("name", AFTER_COUNTING)
def test_a_step_counts_once_however_often_its_passes_begin(name):
    def change(loss: Loss, z: Tensor) -> None:
        loss.holder = (loss.holder or 0) + 1
        AFTER_COUNTING[name](z)

    loss = LossOfOutputs(change)
    grad_fn, state = _run(loss, _x())
    assert loss.holder == 1
    _run(loss, _x(), state, grad_fn)
    assert loss.holder == 2


def test_a_buffer_that_follows_a_weight_does_so_once_a_step():
    def change(loss: Loss, z: Tensor) -> None:
        with torch.no_grad():
            loss.plain.add_(loss.lin.bias)

    loss = LossOfOutputs(change)
    _run(loss, _x())
    torch.testing.assert_close(loss.plain, loss.lin.bias.detach())


def test_an_array_of_a_buffer_is_a_copy():
    loss = Loss(lambda s: s.plain.numpy().__setitem__(0, 1.0))
    _run(loss, _x())
    assert loss.plain.tolist() == [0, 0]


def test_what_goes_on_with_every_pass_is_refused():
    with pytest.raises(PrivacyError, match="how often"):
        _run(Loss(lambda s: next(s.counter), always=True), _x())


FOR_SOME_ROWS = {
    "cached function": lambda s: s.cached(1),
    "file": lambda s: s.file.write("positive"),
    "queue": lambda s: s.waiting.put(1),
    "counter": lambda s: next(s.counter),
}


@pytest.mark.parametrize("name", FOR_SOME_ROWS)
def test_what_goes_on_for_some_rows_is_refused(name):
    with pytest.raises(PrivacyError, match="in place"):
        _run(Loss(FOR_SOME_ROWS[name]), _x())


def test_what_changes_between_two_steps_stays():
    loss = Loss(lambda s: None)
    grad_fn, state = _run(loss, _x())
    next(loss.counter)
    loss.small[0], loss.holder = 5, 7
    _run(loss, _x(), state, grad_fn)
    assert (loss.small[0], loss.holder, next(loss.counter)) == (5, 7, 1)


def test_what_a_step_has_put_up_is_watched_in_the_next():
    loss = Loss(lambda s: setattr(s, "holder", _Derived()), always=True)
    grad_fn, state = _run(loss, _x())
    assert loss.holder is not None
    loss.change, loss.always = lambda s: setattr(s.holder, "value", 1), False
    with pytest.raises(PrivacyError, match="outlives"):
        _run(loss, _x(), state, grad_fn)


@pytest.mark.parametrize("name", ["new", "old", None])
def test_bare_tensors_take_the_place_of_others_between_steps_and_are_watched(name, monkeypatch):
    """Logged metrics are others after each step; to find all places anew takes as long as one."""
    loss = Loss(lambda s: s.holder and setattr(s.metrics[s.holder], "kept", 1), always=True)
    loss.metrics = {"new": torch.zeros(()), "old": torch.zeros(())}
    loss.metrics["new"] = loss.metrics["old"]
    grad_fn, state = _run(loss, _x())
    for number in range(3):
        loss.metrics["new"] = torch.tensor(float(number))
        with monkeypatch.context() as patched:
            patched.setattr(_places.Places, "__init__", lambda *_: pytest.fail("looked for anew"))
            _, state = _run(loss, _x(), state, grad_fn)
    loss.holder = name
    if name:
        with pytest.raises(PrivacyError):
            _run(loss, _x(), state, grad_fn)
        assert not any(value.__dict__ for value in loss.metrics.values())


@pytest.mark.parametrize("draws", ["numpy_draws", "python_draws"])
def test_a_generator_goes_on_by_a_step_whatever_is_drawn(draws):
    """Its state tells nothing of how many rows there were, and no step repeats another."""

    def draw(loss: Loss) -> None:
        loss.holder = getattr(loss, draws).random()

    told = []
    for n in (12, 5):
        loss = Loss(draw, always=True)
        grad_fn, state = _run(loss, _x(n))
        first = loss.holder
        _run(loss, _x(n), state, grad_fn)
        assert loss.holder != first
        told.append((first, loss.holder, getattr(loss, draws).random()))
    assert told[0] == told[1]


def test_pythons_generator_goes_on_by_a_step():
    states = []
    for n in (12, 5):
        random.seed(0)
        _run(Loss(lambda s: random.random(), always=True), _x(n))
        states.append(random.random())
    random.seed(0)
    assert states[0] == states[1] != random.random()
