"""Squares that are released on their own."""

from __future__ import annotations

import pytest
import torch
import torchopt

from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import (
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamw,
    ademamix,
    chain,
    lion,
    radam,
    rmsprop,
    schedule_free,
    sgd,
)
from opake_lightning.optimizers._second_moment import ratio_bound
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

TAKERS = {
    "adam": adam,
    "adamw": adamw,
    "ademamix": ademamix,
    "radam": radam,
    "rmsprop": rmsprop,
    "adadelta": adadelta,
    "schedule_free": lambda **more: schedule_free(adamw(betas=(0.0, 0.999), **more)),
}
takers = pytest.mark.parametrize("make", TAKERS.values(), ids=TAKERS.keys())


def pair(gradient, square, stddev=0.1, square_stddev=0.1):
    return SecondMomentNoiseOutput(
        NoisedPytree(gradient, stddev), NoisedPytree(square, square_stddev)
    )


def squared(gradients):
    return {name: g * g for name, g in gradients.items()}


@takers
def test_exact_squares_give_the_plain_optimizer(make, problem):
    optimizer, params = make(), problem.params()
    first = second = optimizer.init(params)
    free = params
    for t in range(1, 41):
        g = problem.grads(t)
        updates, first = optimizer.update(pair(g, squared(g)), first, params=params)
        expected, second = optimizer.update(g, second, params=free)
        params = torchopt.apply_updates(params, updates, inplace=False)
        free = torchopt.apply_updates(free, expected, inplace=False)
        torch.testing.assert_close(params["W"], free["W"], rtol=0, atol=1e-12)
        torch.testing.assert_close(params["b"], free["b"], rtol=0, atol=1e-12)


@takers
def test_the_squares_take_the_place_of_those_of_the_noisy_gradient(make):
    optimizer, params = make(), torch.zeros(2, dtype=torch.float64)
    gradient = torch.tensor([1.0, 2.0], dtype=torch.float64)
    _, state = optimizer.update(
        pair(gradient, torch.full_like(params, 3.0)), optimizer.init(params), params=params
    )
    moment = getattr(state, "stages", state)["second_moment"]
    assert moment.square[0] == moment.square[1] > 0
    # The noise of the gradient is not in them.
    assert moment.noise == 0.0


@takers
@pytest.mark.parametrize("square", [-1.0, 0.0, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inplace", [False, True])
def test_useless_squares_leave_updates_small(make, square, dtype, inplace):
    torch.manual_seed(7)
    optimizer, params = make(), torch.zeros(1000, dtype=dtype)
    state = optimizer.init(params)
    for _ in range(50):
        gradient = torch.randn(1000, dtype=dtype) * 0.1
        given = pair(gradient, torch.full_like(params, square))
        updates, state = optimizer.update(given, state, params=params, inplace=inplace)
        assert updates.isfinite().all()
        assert updates.abs().max() < 10
        params = params + updates


@takers
def test_plain_gradients_after_useless_squares_leave_updates_finite(make):
    optimizer, params = make(), torch.zeros(3)
    state = optimizer.init(params)
    for t in range(30):
        gradient = torch.tensor([0.1, -0.2, 0.0])
        given = pair(gradient, torch.full((3,), -1.0)) if t < 10 else gradient
        updates, state = optimizer.update(given, state, params=params)
        assert updates.isfinite().all()
        assert updates.abs().max() < 10


@pytest.mark.parametrize("make", [adam, adamw], ids=["adam", "adamw"])
def test_where_squares_are_impossible_the_coordinate_moves_by_the_learning_rate(make):
    optimizer, params = make(lr=0.1), torch.zeros(3)
    gradient = torch.tensor([1e-3, -5.0, 1.0])
    squares = torch.tensor([-1.0, 0.0, 4.0])
    given = pair(gradient, squares)
    updates, _ = optimizer.update(given, optimizer.init(params), params=params)
    torch.testing.assert_close(updates, torch.tensor([-0.1, 0.1, -0.05]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 50])
@pytest.mark.parametrize(("mean_decay", "decay"), [(0.9, 0.999), (0.9, 0.7), (0.0, 0.99), (0.5, 0)])
@pytest.mark.parametrize("debias", [True, False])
def test_no_real_squares_exceed_the_bound(n, mean_decay, decay, debias):
    # The largest n² / v over all streams is where g_k is proportional to w_k / u_k.
    k = torch.arange(n, dtype=torch.float64)
    w = (1 - mean_decay) * mean_decay**k / (1 - mean_decay**n)
    u = (1 - decay) * decay**k / (1 - decay**n if debias else 1)
    bound = ratio_bound(mean_decay, decay, n, debias=debias)
    if decay == 0 and n > 1:
        assert bound == 1e4
        return
    g = w / u
    assert ((w * g).sum() ** 2 / (u * g * g).sum()).item() == pytest.approx(bound, rel=1e-9)


def test_the_bound_of_adams_defaults_and_of_settings_that_have_none():
    assert ratio_bound(0.9, 0.999, 10**6, debias=True) ** 0.5 == pytest.approx(7.27, abs=0.01)
    assert ratio_bound(0.999, 0.9, 10**6, debias=True) == 1e4


@pytest.mark.parametrize(
    "make", [adam, radam, rmsprop, adadelta], ids=["adam", "radam", "rmsprop", "adadelta"]
)
def test_coupled_weight_decay_goes_into_the_squares(make, problem):
    # With exact squares it must be what decay added to the gradient is.
    optimizer, params = make(weight_decay=0.3), problem.params()
    first = second = optimizer.init(params)
    for t in range(1, 13):
        g = problem.grads(t)
        got, first = optimizer.update(pair(g, squared(g)), first, params=params)
        expected, second = optimizer.update(g, second, params=params)
        torch.testing.assert_close(got["W"], expected["W"], rtol=1e-9, atol=1e-12)
        params = torchopt.apply_updates(params, got, inplace=False)


def test_coupled_weight_decay_by_hand():
    optimizer = adam(betas=(0.9, 0.5), weight_decay=0.5)
    params = torch.tensor([2.0])
    _, state = optimizer.update(
        pair(torch.tensor([3.0]), torch.tensor([-1.0])), optimizer.init(params), params=params
    )
    # -1 + 2 · 0.5 · 2 · 3 + 0.5² · 2² = 6, of which half is kept.
    assert state["second_moment"].square.item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (sgd(0.1), "sgd"),
        (lion(), "lion"),
        (adagrad(), "adagrad"),
        (adagrad(noise_bias_correction=True), "adagrad"),
        (adafactor(0.1), "adafactor"),
        (schedule_free(sgd(0.1)), r"schedule_free\(sgd\)"),
        (schedule_free(adagrad()), r"schedule_free\(adagrad\)"),
        (chain("mine"), "mine"),
    ],
)
def test_optimizers_without_use_for_the_squares_refuse_them(optimizer, name):
    params = torch.ones(2)
    with pytest.raises(PrivacyError, match=rf"^{name} got a SecondMomentNoiseOutput, but makes no"):
        optimizer.update(pair(params, params), optimizer.init(params), params=params)
    assert optimizer.square_refusal


@pytest.mark.parametrize("name", TAKERS)
def test_the_two_ways_around_the_noise_are_not_combined(name):
    optimizer, params = TAKERS[name](noise_bias_correction=True), torch.ones(2)
    with pytest.raises(PrivacyError, match=r"\(noise_bias_correction=True\) got a SecondMoment"):
        optimizer.update(pair(params, params), optimizer.init(params), params=params)
    assert optimizer.square_refusal
    assert not TAKERS[name]().square_refusal


def test_private_pairs_are_refused():
    clipped = SecondMomentClippedPytree(ClippedPytree(torch.ones(2), 1.0), projection_radius=1.0)
    optimizer = adam()
    with pytest.raises(PrivacyError, match=r"SecondMomentClippedPytree.*clipped\.gradient\.pytree"):
        optimizer.update(clipped, optimizer.init(torch.ones(2)))
