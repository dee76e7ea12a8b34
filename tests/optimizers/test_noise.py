"""The correction of second moments for noise."""

from __future__ import annotations

import math

import pytest
import torch

from opake_lightning.optimizers import adam, adamw
from opake_lightning.optimizers.types import SecondMomentState
from opake_lightning.types import NoisedPytree

ADAPTIVE = pytest.mark.parametrize("make", [adam, adamw])
N_STEPS, N, STDDEV, BETA2 = 2000, 4096, 0.3, 0.99


@pytest.fixture(scope="module")
def pure_noise_state():
    """Adam's state after 2000 steps of nothing but noise of known size."""
    torch.manual_seed(11)
    optimizer = adam(0.1, (0.9, BETA2))
    params = torch.zeros(N, dtype=torch.float64)
    state = optimizer.init(params)
    for _ in range(N_STEPS):
        noise = torch.randn(N, dtype=torch.float64) * STDDEV
        _, state = optimizer.update(NoisedPytree(noise, STDDEV), state, inplace=True)
    return state


def test_uncorrected_second_moment_of_pure_noise_settles_at_its_variance(pure_noise_state):
    mean = pure_noise_state["second_moment"].square.mean().item()
    # One v has variance 2 σ⁴ (1 - β₂) / (1 + β₂).
    error = STDDEV**2 * math.sqrt(2 * (1 - BETA2) / (1 + BETA2) / N)
    assert abs(mean - STDDEV**2) < 5 * error


def test_corrected_second_moment_of_pure_noise_settles_at_its_floor(pure_noise_state):
    moment = pure_noise_state["second_moment"]
    opened = SecondMomentState([moment.square], moment.noise)
    spread = STDDEV**2 * math.sqrt(2 * (1 - BETA2) / (1 + BETA2))
    floor = 5 * spread
    (left,) = opened.denoised(correct=True, floor=floor, weight=1.0)
    # v - φ is within 5 standard errors of zero, but for the tail of a sum of squares.
    assert (left == floor).double().mean().item() > 0.999
    assert opened.denoised(correct=False, floor=floor)[0].mean().item() > floor / 2
    (unfloored,) = opened.denoised(correct=True, floor=1e-300)
    half = (unfloored == 1e-300).double().mean().item()
    # The median of v lies a little below its mean; skewness over 6, in standard deviations.
    assert abs(half - 0.5) < 0.03 + 5 * 0.5 / math.sqrt(N)


@ADAPTIVE
@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: NoisedPytree(g, 0.0)])
def test_without_noise_the_correction_changes_no_bit(make, wrap, problem):
    on, off = make(noise_bias_correction=True, noise_floor=0.1), make()
    params = problem.params()
    first, second = on.init(params), off.init(params)
    for t in range(1, 21):
        got, first = on.update(wrap(problem.grads(t)), first, params=params)
        expected, second = off.update(problem.grads(t), second, params=params)
        assert torch.equal(got["W"], expected["W"])
        assert torch.equal(got["b"], expected["b"])


@ADAPTIVE
def test_noise_changes_nothing_while_the_correction_is_off(make, problem):
    optimizer, params = make(), problem.params()
    first = second = optimizer.init(params)
    for t in range(1, 21):
        got, first = optimizer.update(NoisedPytree(problem.grads(t), 0.3), first, params=params)
        expected, second = optimizer.update(problem.grads(t), second, params=params)
        assert torch.equal(got["W"], expected["W"])
    # It is counted nevertheless, so that a resumed run may switch the correction on.
    assert first["second_moment"].noise == pytest.approx(0.09 * (1 - 0.999**20))


def test_a_floored_coordinate_moves_by_lr_m_over_root_gamma():
    optimizer = adam(lr=0.1, eps=1e-30, noise_bias_correction=True, noise_floor=1e-4)
    state = optimizer.init(torch.zeros(1))
    updates, _ = optimizer.update(NoisedPytree(torch.tensor([0.01]), 1.0), state)
    assert updates.item() == pytest.approx(-0.1 * 0.01 / 1e-2)


def test_coupled_weight_decay_is_not_noise():
    optimizer = adam(weight_decay=0.5, noise_bias_correction=True)
    params = torch.ones(2)
    updates = NoisedPytree(torch.zeros(2), 0.5)
    _, state = optimizer.update(updates, optimizer.init(params), params=params)
    assert state["second_moment"].noise == pytest.approx(0.001 * 0.25)
    torch.testing.assert_close(state["second_moment"].square, torch.full((2,), 0.001 * 0.25))
