"""The correction of second moments for noise."""

from __future__ import annotations

import math

import pytest
import torch

from opake_lightning.optimizers import (
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamw,
    ademamix,
    radam,
    rmsprop,
    schedule_free,
)
from opake_lightning.optimizers._second_moment import correction
from opake_lightning.optimizers.types import SecondMomentState
from opake_lightning.types import NoisedPytree

N_STEPS, N, STDDEV, BETA2 = 2000, 4096, 0.3, 0.99


def by_ema(t):
    return BETA2, 1 - BETA2


def by_sum(t):
    return 1.0, 1.0


def by_power(t):
    return 1 - t**-0.8, t**-0.8


# Settings under which the average of squares has the decay of the function beside them.
ADAPTIVE = {
    "adam": (lambda **more: adam(0.1, (0.9, BETA2), **more), by_ema),
    "adamw": (lambda **more: adamw(0.1, (0.9, BETA2), **more), by_ema),
    "radam": (lambda **more: radam(0.1, (0.9, BETA2), **more), by_ema),
    "ademamix": (lambda **more: ademamix(0.1, (0.9, BETA2, 0.99), **more), by_ema),
    "adafactor": (lambda **more: adafactor(0.1, update_rms_clip=None, **more), by_power),
    "rmsprop": (lambda **more: rmsprop(0.1, BETA2, **more), by_ema),
    "adagrad": (lambda **more: adagrad(0.1, **more), by_sum),
    "adadelta": (lambda **more: adadelta(0.1, BETA2, **more), by_ema),
}
adaptive = pytest.mark.parametrize(
    "make", [make for make, _ in ADAPTIVE.values()], ids=ADAPTIVE.keys()
)


@pytest.fixture(scope="module", params=ADAPTIVE)
def after_pure_noise(request):
    """v and φ after 2000 steps of nothing but noise of known size, Σ w and Σ w² of the squares."""
    make, decay = ADAPTIVE[request.param]
    torch.manual_seed(11)
    params = torch.zeros(N, dtype=torch.float64)
    optimizer = make(noise_bias_correction=True, noise_floor=1e-3)
    state, total, squares = optimizer.init(params), 0.0, 0.0
    for t in range(1, N_STEPS + 1):
        noise = torch.randn(N, dtype=torch.float64) * STDDEV
        updates, state = optimizer.update(
            NoisedPytree(noise, STDDEV), state, params=params, inplace=True
        )
        keep, add = decay(t)
        total, squares = keep * total + add, keep**2 * squares + add**2
    assert updates.isfinite().all()
    moment = state["second_moment"]
    return moment.square, moment.noise, total, squares


def test_uncorrected_second_moment_of_pure_noise_settles_at_its_variance(after_pure_noise):
    square, _, total, squares = after_pure_noise
    # Σ w = 1 for an average and T for Adagrad's sum; one v has variance 2 σ⁴ Σ w².
    error = STDDEV**2 * math.sqrt(2 * squares / N)
    assert abs(square.mean().item() - total * STDDEV**2) < 5 * error


def test_corrected_second_moment_of_pure_noise_settles_at_its_floor(after_pure_noise):
    square, noise, total, squares = after_pure_noise
    assert noise == pytest.approx(total * STDDEV**2)
    opened = SecondMomentState([square], noise)
    floor = 5 * STDDEV**2 * math.sqrt(2 * squares)
    (left,) = opened.denoised(correction(correct=True, floor=floor, relative_floor=0.0))
    # v - φ is within 5 standard errors of zero, but for the tail of a sum of squares.
    assert (left == floor).double().mean().item() > 0.999
    (unfloored,) = opened.denoised(correction(correct=True, floor=1e-300, relative_floor=0.0))
    half = (unfloored == 1e-300).double().mean().item()
    # The median of v lies a little below its mean; skewness over 6, in standard deviations.
    assert abs(half - 0.5) < 0.03 + 5 * 0.5 / math.sqrt(N)
    (relative,) = opened.denoised(correction(correct=True, floor=1e-300, relative_floor=1.0))
    assert (relative == noise).double().mean().item() > 0.999


def test_rows_and_columns_of_pure_noise_settle_at_its_variance_too():
    torch.manual_seed(12)
    shape = (48, 64)
    optimizer = adafactor(0.1, noise_bias_correction=True)
    params = torch.zeros(shape, dtype=torch.float64)
    state, squares = optimizer.init(params), 0.0
    for t in range(1, N_STEPS + 1):
        noise = torch.randn(shape, dtype=torch.float64) * STDDEV
        updates, state = optimizer.update(NoisedPytree(noise, STDDEV), state, inplace=True)
        squares = (1 - t**-0.8) ** 2 * squares + t**-1.6
    moment = state["second_moment"]
    assert moment.noise == pytest.approx(STDDEV**2)
    for factor, n in ((moment.row, shape[1]), (moment.col, shape[0])):
        spread = STDDEV**2 * math.sqrt(2 * squares / n)
        assert (factor - STDDEV**2).abs().max().item() < 5 * spread
    assert updates.isfinite().all()


@adaptive
@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: NoisedPytree(g, 0.0)])
def test_without_noise_the_correction_changes_no_bit(make, wrap, problem):
    on = make(noise_bias_correction=True, noise_floor=0.1, noise_floor_relative=0.5)
    off, params = make(), problem.params()
    first, second = on.init(params), off.init(params)
    for t in range(1, 21):
        got, first = on.update(wrap(problem.grads(t)), first, params=params)
        expected, second = off.update(problem.grads(t), second, params=params)
        assert torch.equal(got["W"], expected["W"])
        assert torch.equal(got["b"], expected["b"])


@adaptive
def test_noise_changes_nothing_while_the_correction_is_off(make, problem):
    optimizer, params = make(), problem.params()
    first = second = optimizer.init(params)
    for t in range(1, 21):
        got, first = optimizer.update(NoisedPytree(problem.grads(t), 0.3), first, params=params)
        expected, second = optimizer.update(problem.grads(t), second, params=params)
        assert torch.equal(got["W"], expected["W"])
    # It is counted nevertheless, so that a resumed run may switch the correction on.
    assert first["second_moment"].noise > 0


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("adam", 0.99 * (0.01 * 0.01) + 0.01 * 0.09),
        ("adamw", 0.99 * (0.01 * 0.01) + 0.01 * 0.09),
        ("radam", 0.99 * (0.01 * 0.01) + 0.01 * 0.09),
        ("ademamix", 0.99 * (0.01 * 0.01) + 0.01 * 0.09),
        ("rmsprop", 0.99 * (0.01 * 0.01) + 0.01 * 0.09),
        ("adadelta", 0.99 * (0.01 * 0.01) + 0.01 * 0.09),
        ("adagrad", 0.01 + 0.09),
        ("adafactor", (1 - 2**-0.8) * 0.01 + 2**-0.8 * 0.09),
    ],
)
def test_noise_of_changing_size_goes_through_the_recursion_of_the_squares(name, after):
    optimizer = ADAPTIVE[name][0](noise_bias_correction=True)
    params = torch.ones(2)
    state = optimizer.init(params)
    for stddev in (0.1, 0.3):
        _, state = optimizer.update(NoisedPytree(params, stddev), state, params=params)
    assert state["second_moment"].noise == pytest.approx(after)


@pytest.mark.parametrize(
    ("make", "size", "phi"),
    [
        (lambda **more: adam(0.1, eps=1e-30, **more), 0.1, 1.0),
        (lambda **more: adamw(0.1, eps=1e-30, weight_decay=0, **more), 0.1, 1.0),
        (lambda **more: ademamix(0.1, (0.9, 0.999, 0.8), 1e-30, **more), 0.1 * (1 + 5 * 0.2), 1.0),
        (lambda **more: adafactor(0.1, update_rms_clip=None, **more), 0.1, 1.0),
        (lambda **more: rmsprop(0.1, eps=1e-30, **more), 0.1, 0.01),
        (lambda **more: adagrad(0.1, eps=1e-30, **more), 0.1, 1.0),
        (lambda **more: adadelta(0.1, eps=1.0, **more), 0.1 * 1e-2 / math.sqrt(1.0001), 0.1),
        (lambda **more: schedule_free(adamw(0.1, eps=1e-30, weight_decay=0, **more)), 0.1, 1.0),
    ],
    ids=[name for name in ADAPTIVE if name != "radam"] + ["schedule_free"],
)
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_a_floored_coordinate_moves_by_lr_over_root_gamma(make, size, phi, relative, shape):
    gamma = 1e-4
    floor = {"noise_floor": gamma, "noise_floor_relative": 0.0}
    if relative:  # phi is φ̂ after one step with noise of variance 1
        floor = {"noise_floor": gamma / 10, "noise_floor_relative": gamma / phi}
    optimizer, params = make(noise_bias_correction=True, **floor), torch.zeros(shape)
    noised = NoisedPytree(torch.full(shape, 0.01), 1.0)
    updates, _ = optimizer.update(noised, optimizer.init(params), params=params)
    torch.testing.assert_close(updates, torch.full(shape, -size), rtol=1e-4, atol=0)


def test_radam_takes_off_all_noise_since_the_first_step():
    floored = radam(0.1, eps=1e-30, noise_bias_correction=True, noise_floor=1e-4)
    state = floored.init(torch.zeros(1))
    for _ in range(6):
        updates, state = floored.update(NoisedPytree(torch.tensor([0.01]), 1.0), state)
    # The sixth is the first that is rectified, with r = 0.0258 (see the published table).
    assert updates.item() == pytest.approx(-0.1 * 0.02582111280185855, rel=1e-5)


def test_adadelta_takes_off_the_noise_of_its_own_steps():
    # By plain numbers, one coordinate at a time.
    rho, eps, gamma, relative = 0.8, 1e-3, 1e-4, 0.5
    optimizer = adadelta(
        1.0, rho, eps,
        noise_bias_correction=True, noise_floor=gamma, noise_floor_relative=relative,
    )  # fmt: skip
    torch.manual_seed(5)
    gradients = torch.randn(30, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 5.0])
    stddevs = [0.3, 0.0, 0.7] * 10
    state = optimizer.init(gradients[0])
    v, d, phi_v, phi_d = [0.0] * 3, [0.0] * 3, 0.0, [0.0] * 3
    for g, stddev in zip(gradients, stddevs, strict=True):
        updates, state = optimizer.update(NoisedPytree(g, stddev), state)
        phi_v = rho * phi_v + (1 - rho) * stddev**2
        for i in range(3):
            v[i] = rho * v[i] + (1 - rho) * g[i].item() ** 2
            below = max(v[i] - phi_v, gamma, relative * phi_v)
            c = math.sqrt(max(d[i] - phi_d[i], 0) + eps) / math.sqrt(below + eps)
            assert updates[i].item() == pytest.approx(-c * g[i].item(), rel=1e-10)
            d[i] = rho * d[i] + (1 - rho) * (c * g[i].item()) ** 2
            phi_d[i] = rho * phi_d[i] + (1 - rho) * (c * stddev) ** 2
    assert state["second_moment"].step_noise.tolist() == pytest.approx(phi_d)
    assert state["second_moment"].step_square.tolist() == pytest.approx(d)


def test_adafactor_takes_the_noise_off_each_factor():
    optimizer = adafactor(1.0, update_rms_clip=None, noise_bias_correction=True, noise_floor=0.25)
    gradient = torch.tensor([[3.0, 1.0], [1.0, 1.0]])
    updates, _ = optimizer.update(NoisedPytree(gradient, 1.0), optimizer.init(gradient))
    # R = C = (5, 1); less 1 and floored, (4, 0.25), of mean 2.125.
    factor = torch.tensor([4.0, 0.25])
    expected = -gradient / (torch.outer(factor, factor) / 2.125).sqrt()
    torch.testing.assert_close(updates, expected)


def test_coupled_weight_decay_is_not_noise():
    optimizer = adam(weight_decay=0.5, noise_bias_correction=True)
    params = torch.ones(2)
    updates = NoisedPytree(torch.zeros(2), 0.5)
    _, state = optimizer.update(updates, optimizer.init(params), params=params)
    assert state["second_moment"].noise == pytest.approx(0.001 * 0.25)
    torch.testing.assert_close(state["second_moment"].square, torch.full((2,), 0.001 * 0.25))


@pytest.mark.parametrize("make", [radam, lambda lr, **more: radam(lr, (0.9, 0.99), **more)])
@pytest.mark.parametrize("relative", [0.0, 1.0])
def test_radam_stays_small_where_rectification_begins(make, relative):
    torch.manual_seed(3)
    optimizer = make(1e-3, noise_bias_correction=True, noise_floor_relative=relative)
    state, largest = optimizer.init(torch.zeros(1000)), 0.0
    for _ in range(10):
        noised = NoisedPytree(torch.randn(1000) * 0.1, 0.1)
        updates, state = optimizer.update(noised, state)
        largest = max(largest, updates.abs().max().item())
    assert 0 < largest < 10
