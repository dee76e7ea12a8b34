"""Updates in place: the same numbers, in no room of their own."""

from __future__ import annotations

import copy
import math
import weakref

import optree
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opake_lightning._tree import flatten, packed, seat, unpack
from opake_lightning.dpsgd.noise import NoiseState
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import (
    _blocks,
    _compiled,
    _fused,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamw,
    ademamix,
    chain,
    clip_update_rms,
    ema,
    lion,
    precondition,
    radam,
    rmsprop,
    scale_by_learning_rate,
    schedule_free,
    sgd,
    trace,
)
from opake_lightning.random import key
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.step import Step, StepState
from opake_lightning.types import ClippedPytree, NoisedPytree, SecondMomentNoiseOutput

N_STEPS = 12
CORRECT = {"noise_bias_correction": True, "noise_floor_relative": 0.1}
ALL = {
    "sgd": lambda: sgd(0.1, weight_decay=0.1),
    "sgd-momentum": lambda: sgd(0.1, 0.9, dampening=0.5, weight_decay=0.1),
    "sgd-nesterov": lambda: sgd(0.1, 0.9, nesterov=True),
    "adam": lambda: adam(0.1, weight_decay=0.1),
    "adamw": lambda: adamw(0.1, weight_decay=0.1),
    "adamw-corrected": lambda: adamw(0.1, weight_decay=0.1, **CORRECT),
    "adamw-clip": lambda: adamw(0.1, update_rms_clip=0.5, **CORRECT),
    "radam": lambda: radam(0.1, weight_decay=0.1),
    "radam-corrected": lambda: radam(0.1, weight_decay=0.1, decoupled_weight_decay=True, **CORRECT),
    "rmsprop": lambda: rmsprop(0.1, weight_decay=0.1),
    "rmsprop-corrected": lambda: rmsprop(0.1, **CORRECT),
    "rmsprop-momentum": lambda: rmsprop(0.1, momentum=0.5, **CORRECT),
    "adagrad": lambda: adagrad(0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "adagrad-corrected": lambda: adagrad(0.1, weight_decay=0.1, **CORRECT),
    "adadelta": lambda: adadelta(weight_decay=0.1),
    "adadelta-corrected": lambda: adadelta(noise_bias_correction=True),
    "lion": lambda: lion(0.1, weight_decay=0.1),
    "ademamix": lambda: ademamix(0.1, (0.9, 0.999, 0.99), weight_decay=0.1, **CORRECT),
    "adafactor": lambda: adafactor(weight_decay=0.1, **CORRECT),
    "adafactor-per-tensor": lambda: adafactor(0.1, clip_per_tensor=True),
    "schedule_free": lambda: schedule_free(adamw(0.1, (0.0, 0.999), weight_decay=0.1)),
    "bare": lambda: chain(),
    "whole-last": lambda: chain(momentum=trace(0.9), clip=clip_update_rms(0.1)),
    "late-reader": lambda: chain(
        mean=ema(0.9), clip=clip_update_rms(0.5), second=precondition(0.99, 1e-8),
        lr=scale_by_learning_rate(0.1),
    ),
}  # fmt: skip
all_of_them = pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())

# Steps in which one kernel does everything; others go through the stages, to the same bits.
FUSED = {
    "sgd", "sgd-momentum", "sgd-nesterov", "adam", "adamw", "adamw-corrected", "rmsprop",
    "rmsprop-corrected", "adagrad", "adagrad-corrected",
}  # fmt: skip
FUSED_LATER = {"radam", "radam-corrected"}  # not before it is rectified


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Some ten stretches, the last one shorter."""
    monkeypatch.setattr(_blocks, "_BLOCK", 16)
    monkeypatch.setattr(_fused, "_BLOCK", 16)


def tree(dtype=torch.float64):
    torch.manual_seed(5)
    shapes = {"W": (12, 9), "b": (9,), "none": (0,), "s": (), "T": (3, 5, 4)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def gradients(params, n=N_STEPS, start=0):
    """Fresh gradients, which may be written over; the first two have no noise."""
    generator = torch.Generator().manual_seed(9)
    for step in range(n):
        leaves = {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            for name, p in params.items()
        }
        if step >= start:
            yield NoisedPytree(leaves, 0.0 if step < 2 else 0.2 + 0.1 * (step % 3))


def pure_run(optimizer, params):
    state = optimizer.init(params)
    for gradient in gradients(params):
        moves, state = optimizer.update(gradient, state, params=params)
        params = optree.tree_map(torch.add, params, moves)
    return params, state


def inplace_run(optimizer, params, state=None, **which):
    state = optimizer.init(params) if state is None else state
    for gradient in gradients(params, **which):
        state = optimizer.step_(gradient, state, params)
    return params, state


def seated(params):
    seat(params)
    assert packed(params, flatten(params)[1]) is not None
    return params


def assert_same(first, second, rtol=0.0):
    torch.testing.assert_close(first, second, rtol=rtol, atol=rtol)


@all_of_them
def test_scattered_parameters_are_moved_to_the_bits_of_the_pure_path(make):
    expected, expected_state = pure_run(make(), tree())
    params, state = inplace_run(make(), tree())
    assert_same(params, expected)
    assert_same(state_dict(state), state_dict(expected_state))


@pytest.mark.parametrize("name", ALL)
def test_seated_parameters_are_moved_alike(name):
    expected, expected_state = pure_run(ALL[name](), tree())
    params, state = inplace_run(ALL[name](), seated(tree()))
    # A kernel rounds in other places; the gap is some 1e-16 of the values in float64.
    rtol = 1e-12 if name in FUSED | FUSED_LATER else 0.0
    assert_same(params, expected, rtol)
    assert_same(state_dict(state), state_dict(expected_state), rtol)


@pytest.mark.parametrize("name", ALL)
def test_in_float32_the_gap_to_the_pure_path_is_rounding(name):
    expected, _ = pure_run(ALL[name](), tree(torch.float32))
    params, _ = inplace_run(ALL[name](), seated(tree(torch.float32)))
    for param, other in zip(params.values(), expected.values(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ALL)
def test_kernels_are_used_exactly_where_they_do_what_the_stages_do(name, monkeypatch):
    calls = []
    run = _fused.Recipe.run
    monkeypatch.setattr(_fused.Recipe, "run", lambda *x: calls.append(1) or run(*x))
    inplace_run(ALL[name](), seated(tree()))
    expected = N_STEPS if name in FUSED else 0
    assert len(calls) == (N_STEPS - 5 if name in FUSED_LATER else expected)


def test_squares_of_which_nothing_is_kept_are_corrected_alike():
    def make():
        return adamw(0.1, (0.9, 0.0), **CORRECT)

    # The kernel would have to take off noise / 0.
    expected, _ = pure_run(make(), tree())
    params, _ = inplace_run(make(), seated(tree()))
    assert_same(params, expected, 1e-12)


def test_squares_released_on_their_own_are_for_the_stages(monkeypatch):
    monkeypatch.setattr(_fused.Recipe, "run", lambda *_: pytest.fail("no kernel knows these"))
    params, pure = seated(tree()), tree()
    optimizer = adamw(0.1)
    state, pure_state = optimizer.init(params), optimizer.init(pure)
    for gradient in gradients(params):
        square = NoisedPytree(optree.tree_map(lambda g: g * g - 0.5, gradient.pytree), 0.1)
        both = SecondMomentNoiseOutput(gradient, square)
        moves, pure_state = optimizer.update(both, pure_state, params=pure)
        pure = optree.tree_map(torch.add, pure, moves)
        state = optimizer.step_(both, state, params)
    assert_same(params, pure)
    # What they left in v can be negative, so the kernel stays out afterwards, too.
    optimizer.step_(next(gradients(params)), state, params)


@all_of_them
def test_the_length_of_a_stretch_does_not_matter(make, monkeypatch):
    expected, _ = pure_run(make(), tree())
    monkeypatch.setattr(_blocks, "_BLOCK", 10**6)
    got, _ = pure_run(make(), tree())
    assert_same(got, expected, 1e-13)


@all_of_them
def test_a_resumed_run_takes_the_same_kernels(make):
    params, state = inplace_run(make(), seated(tree()), n=7)
    saved = copy.deepcopy(params), state_dict(state)
    unbroken, last = inplace_run(make(), params, state, start=7)

    params = seated({name: p.clone() for name, p in saved[0].items()})
    state = from_state_dict(make().init(params), saved[1], strict=True)
    resumed, again = inplace_run(make(), params, state, start=7)
    assert_same(resumed, unbroken)
    assert_same(state_dict(again), state_dict(last))


@all_of_them
def test_parameters_of_several_types(make):
    def mixed():
        params = tree(torch.float64)
        params["b"], params["W"] = params["b"].bfloat16(), params["W"].float()
        return params

    optimizer, expected = make(), mixed()
    state = optimizer.init(expected)
    for gradient in gradients(expected):
        moves, state = optimizer.update(gradient, state, params=expected)
        expected = optree.tree_map(torch.add, expected, moves)
    params, _ = inplace_run(make(), mixed())
    assert_same(params, expected)


class _Held(TorchDispatchMode):
    """The most that new tensors hold at a time, in bytes."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def _free(self, nbytes):
        self.now -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            x.untyped_storage().data_ptr()
            for x in optree.tree_leaves((args, kwargs or {}))
            if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                nbytes = x.untyped_storage().nbytes()
                weakref.finalize(x, self._free, nbytes)
                self.now += nbytes
                self.most = max(self.most, self.now)
        return out


@all_of_them
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_update_in_place_holds_little_memory_of_its_own(make, fused, monkeypatch):
    if make is ALL["late-reader"]:
        pytest.skip("a stage that needs the gradient after the whole model was seen keeps both")
    if not fused:
        monkeypatch.setattr(_fused.Recipe, "runs_on", lambda *_: False)
    params = seated({str(i): torch.randn(10, 10) for i in range(40)})
    optimizer = make()
    state = optimizer.init(params)
    layout = flatten(params)[1]
    for _ in range(7):
        gradient = NoisedPytree(unpack([torch.randn(4000)], layout), 0.1)
        with _Held() as held:
            state = optimizer.step_(gradient, state, params)
        # Of 16 000 bytes for each of parameters, gradient and averages. Adafactor's are rows and
        # columns, 3 200 bytes for all: the new ones, both without noise, and roots of half of them.
        assert held.most <= (8000 if "adafactor" in repr(optimizer) else 800)


def test_moved_parameters_are_noticed_by_autograd():
    params = seated({"a": torch.ones(3, requires_grad=True), "b": torch.ones(3)})
    loss = (params["a"] ** 2 * params["b"]).sum()
    optimizer = sgd(0.1)
    gradient = {name: torch.ones(3) for name in params}
    optimizer.step_(gradient, optimizer.init(params), params)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_refusal_changes_nothing():
    params = seated(tree())
    before = copy.deepcopy(params)
    optimizer = adamw()
    state = optimizer.init(params)
    with pytest.raises(PrivacyError, match="ClippedPytree"):
        optimizer.step_(ClippedPytree(params, 1.0), state, params)
    with pytest.raises(ValueError, match="structures differ"):
        optimizer.step_({"b": params["b"]}, state, params)
    assert_same(params, before)
    assert_same(state_dict(state), state_dict(optimizer.init(params)))


def test_squares_that_overflow_stop_a_coordinate_and_are_never_nan():
    for optimizer in (adamw(0.1, weight_decay=0.0, **CORRECT), adagrad(0.1, **CORRECT)):
        params = seated({"a": torch.ones(3), "b": torch.ones(2)})
        state = optimizer.init(params)
        for stddev in (0.1, 1e30):
            gradient = {"a": torch.full((3,), 1e30), "b": torch.ones(2)}
            state = optimizer.step_(NoisedPytree(gradient, stddev), state, params)
        values = [*params.values(), *state["second_moment"].square.values()]
        assert not any(value.isnan().any() for value in values)
        assert params["a"].tolist() == [1.0] * 3


def test_a_step_in_place_moves_the_modules_own_parameters():
    model = torch.nn.Linear(3, 2)
    params = dict(model.named_parameters())
    seat(params)
    step = Step(None, None, sgd(0.5), None, NoiseState(key(1)))
    state = StepState(None, NoiseState(key(1)), step.optimizer.init(params))
    before = copy.deepcopy(params)
    ones = {name: torch.ones_like(p) for name, p in params.items()}
    moved, state = step.update(params, ones, state, inplace=True)
    assert moved is params
    assert state.optimizer["step"] == 1
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name] - 0.5)


def test_seating_changes_the_memory_and_nothing_else():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    params, x = dict(model.named_parameters()), torch.randn(5, 4)
    before, identities = copy.deepcopy(model.state_dict()), [id(p) for p in model.parameters()]
    out = model(x)
    out.sum().backward()
    gradient = model[0].weight.grad
    del out
    seat(params)
    assert packed(params, flatten(params)[1]) is not None
    assert [id(p) for p in model.parameters()] == identities
    assert all(p.requires_grad for p in model.parameters())
    assert model[0].weight.grad is gradient
    assert_same(dict(model.state_dict()), dict(before))
    address = model[0].weight.data_ptr()
    seat(params)  # a second time there is nothing to do
    assert model[0].weight.data_ptr() == address


def _tied(a, b):
    return {"a": a, "b": a}


def _watched(a, b):
    return {"a": a, "b": b, "_": [a.detach()]}


def _strided(a, b):
    return {"a": a.t(), "b": b}


def _narrow(a, b):
    return {"a": a.bfloat16(), "b": b}


def _shared(a, b):
    return {"a": a.share_memory_(), "b": b}


@pytest.mark.parametrize("case", [_tied, _watched, _strided, _narrow, _shared])
def test_what_others_may_be_looking_at_stays_where_it_is(case):
    params = case(torch.randn(4, 3), torch.randn(3))
    held = params.pop("_", None)
    addresses = {name: p.data_ptr() for name, p in params.items()}
    seat(params)
    assert {name: p.data_ptr() for name, p in params.items()} == addresses
    del held


def test_neighbours_in_memory_of_another_owner_are_not_taken_for_one_tensor():
    # Two tensors may lie side by side by chance: the first one's memory ends where it ends.
    whole = torch.arange(6.0)
    a = torch.frombuffer(whole.numpy(), dtype=torch.float32, count=3)
    b = torch.frombuffer(whole.numpy(), dtype=torch.float32, count=3, offset=12)
    params = {"a": a, "b": b}
    assert packed(params, flatten(params)[1]) is None


def test_a_kernel_is_told_the_bias_of_a_mean_that_is_not_its_own():
    # An average of gradients over a second moment without debiasing: two steps in one kernel.
    def make():
        return chain(
            mean=ema(0.9), second=precondition(0.99, 1e-8, debias=False),
            lr=scale_by_learning_rate(0.1),
        )  # fmt: skip

    expected, _ = pure_run(make(), tree())
    params, _ = inplace_run(make(), seated(tree()))
    assert_same(params, expected, 1e-12)
    assert math.isfinite(sum(p.sum().item() for p in params.values()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["adamw-corrected", "radam-corrected", "rmsprop-corrected", "adagrad-corrected"]
)
def test_a_compiled_kernel_does_the_same(name, dtype, monkeypatch):
    # The compiler leaves this behind; monkeypatch takes it away again.
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    calls = []
    run = _compiled.run
    monkeypatch.setattr(_compiled, "run", lambda *x: calls.append(run(*x)) or calls[-1])
    expected, _ = pure_run(ALL[name](), tree(dtype))
    params, _ = inplace_run(copy.deepcopy(ALL[name]().compiled()), seated(tree(dtype)))
    assert_same(params, expected, 1e-12 if dtype == torch.float64 else 1e-5)
    assert calls
    if not all(calls):
        pytest.skip("no C++ compiler")


def test_without_a_compiler_a_compiled_optimizer_goes_on_as_it_would_have(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no g++")

    expected, _ = inplace_run(ALL["adamw-corrected"](), seated(tree()))
    _compiled._kernel.cache_clear()
    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match=r"goes on without.*no g\+\+"):
        params, _ = inplace_run(ALL["adamw-corrected"]().compiled(), seated(tree()))
    _compiled._kernel.cache_clear()
    assert_same(params, expected)


def test_schedule_free_stays_so_when_it_is_compiled():
    expected, _ = inplace_run(ALL["schedule_free"](), tree())
    params, state = inplace_run(ALL["schedule_free"]().compiled(), tree())
    assert_same(params, expected)
    assert state.x.keys() == params.keys()
