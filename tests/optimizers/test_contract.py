"""What every optimizer promises, run over all of them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torchopt

from opake_lightning import optimizers
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import (
    _factored,
    _precondition,
    _stages,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamw,
    ademamix,
    lion,
    radam,
    rmsprop,
    schedule_free,
    sgd,
)
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.types import ClippedPytree, NoisedPytree

CASES = {
    "sgd": lambda lr=0.1, **more: sgd(lr, momentum=0.9, **more),
    "adam": lambda lr=0.1, **more: adam(lr, noise_bias_correction=True, **more),
    "adamw": lambda lr=0.1, **more: adamw(
        lr, noise_bias_correction=True, update_rms_clip=1.0, **{"weight_decay": 0.0} | more
    ),
    "radam": lambda lr=0.1, **more: radam(
        lr, betas=(0.9, 0.99), noise_bias_correction=True, noise_floor_relative=0.1, **more
    ),
    "lion": lambda lr=0.1, **more: lion(lr, **more),
    "ademamix": lambda lr=0.1, **more: ademamix(
        lr, betas=(0.9, 0.999, 0.99), alpha_warmup_steps=9, beta3_warmup_steps=9,
        noise_bias_correction=True, **more,
    ),
    "adafactor": lambda lr=0.1, **more: adafactor(
        lr, noise_bias_correction=True, **more
    ),
    "rmsprop": lambda lr=0.1, **more: rmsprop(
        lr, momentum=0.5, noise_bias_correction=True, **more
    ),
    "adagrad": lambda lr=0.1, **more: adagrad(lr, noise_bias_correction=True, **more),
    "adadelta": lambda lr=0.1, **more: adadelta(
        lr, eps=0.1, noise_bias_correction=True, **more
    ),
    "schedule_free": lambda lr=0.1, **more: schedule_free(
        adamw(lr, (0.0, 0.999), noise_bias_correction=True, **{"weight_decay": 0.0} | more),
        weight_power=8.0,
    ),
}  # fmt: skip
all_optimizers = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


def test_every_optimizer_has_a_case():
    factories = {name for name in optimizers.__all__ if name[0].islower()}
    rest = {"chain", "is_noise_aware", "average_iterates", "evaluation_params"}
    rest.update(_stages.__all__, _precondition.__all__, _factored.__all__)
    assert factories - rest == CASES.keys()


class Pair(NamedTuple):
    left: Any
    right: Any


def tree(fill=1.0, dtype=torch.float32):
    torch.manual_seed(3)
    leaves = iter(torch.randn(5, 24).to(dtype) * fill)
    return {
        "W": next(leaves).reshape(4, 6),
        "nested": Pair(
            [next(leaves)[:3], None], OrderedDict(z=next(leaves)[0], a=next(leaves)[:0])
        ),
        "T": next(leaves).reshape(6, 4).t(),
    }


def leaves(x):
    return optree.tree_leaves(x)


def run(optimizer, params, gradients, state=None, **how):
    state = optimizer.init(params) if state is None else state
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params=params, **how)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return params, state


def noised(n, stddev=0.1, fill=1.0, dtype=torch.float32):
    """Gradients that differ from step to step, each with noise of its own."""
    return [
        NoisedPytree(
            optree.tree_map(lambda x, k=k: x * (0.5 + k) * (-1) ** k, tree(fill, dtype)), s
        )
        for k, s in zip(range(n), itertools.cycle([stddev, 0.0, 2 * stddev]), strict=False)
    ]


def assert_same(first, second):
    for a, b in zip(leaves(first), leaves(second), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# What the bowl asks of those whose step is not about the learning rate.
BOWL_RATES = {"adagrad": 3.0, "adadelta": 1.0, "schedule_free": 0.3}


@pytest.mark.parametrize("name", CASES)
def test_finds_the_minimum_of_a_bowl(name):
    target = torch.tensor([1.0, -2.0, 3.0])
    rate = BOWL_RATES.get(name, 0.1)
    params, optimizer = {"x": torch.zeros(3)}, CASES[name](lambda step: rate / (1 + step / 20))
    state = optimizer.init(params)
    for _ in range(600):
        updates, state = optimizer.update({"x": params["x"] - target}, state, params=params)
        params = torchopt.apply_updates(params, updates)
    torch.testing.assert_close(params["x"], target, atol=2e-2, rtol=0)


@all_optimizers
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_structure_and_types_are_those_of_the_parameters(make, dtype):
    optimizer, params = make(), tree(dtype=dtype)
    gradient = NoisedPytree(tree(0.1, torch.float32), 0.1)
    updates, state = optimizer.update(gradient, optimizer.init(params), params=params)
    assert optree.tree_structure(updates) == optree.tree_structure(params)
    for update, param in zip(leaves(updates), leaves(params), strict=True):
        assert (update.dtype, update.shape) == (dtype, param.shape)
        assert not update.requires_grad
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [x for x in state_dict(state).values() if isinstance(x, torch.Tensor)]
    assert tensors
    assert {x.dtype for x in tensors} == {wide}


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"schedule_free"}))
def test_without_parameters_updates_have_the_gradients_types(name):
    optimizer = CASES[name]()
    gradient = tree(dtype=torch.bfloat16)
    updates, _ = optimizer.update(gradient, optimizer.init(tree()))
    assert {x.dtype for x in leaves(updates)} == {torch.bfloat16}


@all_optimizers
def test_bfloat16_parameters_are_updated_as_if_all_were_float32(make):
    params = tree(dtype=torch.bfloat16)
    gradients = noised(12)
    narrow, wide = make(weight_decay=0.1), make(weight_decay=0.1)
    wide_params = optree.tree_map(torch.Tensor.float, params)
    state, wide_state = narrow.init(params), wide.init(wide_params)
    for gradient in gradients:
        got, state = narrow.update(gradient, state, params=params)
        expected, wide_state = wide.update(gradient, wide_state, params=wide_params)
        assert_same(got, optree.tree_map(lambda x: x.to(torch.bfloat16), expected))


def frozen(x):
    return [(leaf, leaf._version, leaf.clone()) for leaf in leaves(x)]


@all_optimizers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_are_not_written_to(make, dtype):
    optimizer, params = make(weight_decay=0.1), tree(dtype=dtype)
    _, state = run(optimizer, params, noised(2))
    gradient = noised(3)[-1]
    before = frozen([params, gradient.pytree, state_tensors(state)])
    updates, new = optimizer.update(gradient, state, params=params)
    for leaf in leaves(updates):  # torchopt's transforms write to what they are given
        leaf.add_(1)
    for leaf, version, value in before:
        assert leaf._version == version
        assert torch.equal(leaf, value)
    assert [getattr(s, "stages", s)["step"] for s in (state, new)] == [2, 3]


@all_optimizers
def test_in_place_equals_pure_bit_for_bit_and_keeps_the_state_where_it_is(make):
    optimizer, params = make(weight_decay=0.1), tree()
    expected, expected_state = run(optimizer, params, noised(12))
    start = optimizer.init(params)
    got, state = run(optimizer, params, noised(12), start, inplace=True)
    assert_same(got, expected)
    assert_same(state_dict(state), state_dict(expected_state))
    pairs = list(zip(state_tensors(start), state_tensors(state), strict=True))
    assert pairs
    assert all(before is after for before, after in pairs)


@all_optimizers
def test_in_place_updates_leave_the_parameters_alone(make):
    # One flat tensor is packed without a copy, so a state could end up in the same memory.
    optimizer, params = make(weight_decay=0.1), torch.ones(4)
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(torch.ones(4), state, params=params, inplace=True)
        updates.add_(1)
    assert params.tolist() == [1.0] * 4


def state_tensors(state):
    stages = getattr(state, "stages", state).values()
    fields = [getattr(s, f) for s in stages for f in getattr(s, "__slots__", ())]
    return [x for field in fields for x in leaves(field) if isinstance(x, torch.Tensor)]


@all_optimizers
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_resumed_run_equals_unbroken_run(make, at, inplace, tmp_path):
    make_one = lambda: make(lambda step: 0.1 / (1 + step), weight_decay=0.1)  # noqa: E731
    gradients, optimizer = noised(12), make_one()
    unbroken, last = run(optimizer, tree(), gradients, inplace=inplace)
    params, state = run(optimizer, tree(), gradients[:at], inplace=inplace)
    torch.save(state_dict(state), tmp_path / "state.pt")

    optimizer = make_one()
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    state = from_state_dict(optimizer.init(params), loaded, strict=True)
    resumed, state = run(optimizer, params, gradients[at:], state, inplace=inplace)
    assert_same(resumed, unbroken)
    assert_same(state_dict(state), state_dict(last))


@all_optimizers
def test_refuses_private_gradients_by_name(make):
    optimizer, params = make(), tree()
    clipped = ClippedPytree(params, sensitivity=1.0)
    with pytest.raises(PrivacyError, match=r"got a ClippedPytree.*or clipped\.pytree"):
        optimizer.update(clipped, optimizer.init(params), params=params)


@all_optimizers
@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_gradients_keep_parameters_finite(make, scale, dtype):
    for gradients in (noised(12, 0.1, scale, dtype), noised(12, 0.1 * scale, scale, dtype)):
        params, state = run(make(), tree(dtype=dtype), gradients)
        assert all(x.isfinite().all() for x in leaves(params))
        # The squares of 1e30 do not fit float32; they are infinite, as in torch, but never NaN.
        assert not any(x.isnan().any() for x in leaves(state_dict(state)) if torch.is_tensor(x))


@all_optimizers
@pytest.mark.parametrize(
    "params", [{}, {"a": torch.zeros(0)}, torch.tensor(2.0), (None, torch.zeros(1))]
)
def test_empty_and_scalar_trees(make, params):
    gradient = optree.tree_map(lambda x: x + 1, params)
    got, _ = run(make(weight_decay=0.1), params, [gradient] * 11)
    assert optree.tree_structure(got) == optree.tree_structure(params)
    assert all(torch.all(after < before) for before, after in zip(leaves(params), leaves(got)))  # noqa: B905


@all_optimizers
def test_weight_decay_without_parameters_is_an_error_that_changes_nothing(make):
    optimizer, params = make(weight_decay=0.25), tree()
    state = optimizer.init(params)
    before = state_dict(state)
    with pytest.raises(ValueError, match=r"weight_decay=0.25 needs the parameters.*params=params"):
        optimizer.update(params, state, inplace=True)
    assert_same(state_dict(state), before)


@all_optimizers
def test_schedules_are_asked_for_step_zero_first(make):
    asked = []
    optimizer = make(lambda step: asked.append(step) or 0.1)
    run(optimizer, tree(), noised(3))
    assert asked == [0, 1, 2]
    assert optimizer.lr(5) == 0.1


@all_optimizers
def test_a_schedule_that_gives_no_rate_is_an_error_that_changes_nothing(make):
    optimizer, params = make(lambda step: float("nan")), tree()
    state = optimizer.init(params)
    before = state_dict(state)
    with pytest.raises(ValueError, match="the learning rate at step 0 must be"):
        optimizer.update(params, state, params=params, inplace=True)
    assert_same(state_dict(state), before)


@all_optimizers
def test_composes_with_torchopt(make):
    params, gradients = tree(), noised(11)
    chained = torchopt.chain(make(), torchopt.transform.scale(0.5))
    assert optimizers.is_noise_aware(chained)
    expected, state = tree(), make().init(params)
    chained_state = chained.init(params)
    for gradient in gradients:
        half, chained_state = chained.update(gradient, chained_state, params=params)
        whole, state = make().update(gradient, state, params=params)
        assert_same(half, optree.tree_map(lambda x: x * 0.5, whole))
        expected = torchopt.apply_updates(expected, half)
    assert not torch.equal(expected["W"], params["W"])


@all_optimizers
def test_another_structure_or_state_is_refused(make):
    optimizer, params = make(), {"a": torch.zeros(2)}
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="structures differ"):
        optimizer.update({"b": torch.zeros(2)}, state, params=params)
    with pytest.raises(ValueError, match=r"a: expected shape \(2,\), got \(3,\)"):
        optimizer.update({"a": torch.zeros(3)}, state, params=params)
    matrix = {"a": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"a: expected shape \(2, 2\), got \(2, 3\)"):
        optimizer.update({"a": torch.zeros(2, 3)}, optimizer.init(matrix), params=matrix)
    with pytest.raises(ValueError, match="pass what its own init"):
        optimizer.update(params, type(state)({"step": 0}), params=params)
    with pytest.raises(ValueError, match="noise_stddev must be"):
        optimizer.update(NoisedPytree(params, float("nan")), state, params=params)


@pytest.mark.parametrize("name", CASES)
def test_knows_its_name_and_rate(name):
    optimizer = CASES[name](0.25)
    assert optimizer.name == ("schedule_free(adamw)" if name == "schedule_free" else name)
    assert optimizer.lr(3) == 0.25
    assert name in repr(optimizer)
