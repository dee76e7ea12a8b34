"""A clipping norm that is a function of the step: bound, sensitivity and noise follow it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opake_lightning.dpsgd.clipping import ClipState, auto_clipped_grad, clipped_grad
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.errors import PrivacyError
from opake_lightning.random import key
from opake_lightning.scheduling import linear_schedule
from opake_lightning.serialization import from_state_dict, state_dict

FALLING = linear_schedule(1.0, 0.5, transition_steps=2)


def linear(w: Tensor, x: Tensor) -> Tensor:
    """A loss whose gradient for an example is the example."""
    return x @ w


def test_every_step_is_clipped_to_the_norm_of_its_number_empty_ones_counted():
    grad_fn, state = clipped_grad(linear, clipping_norm=FALLING, expected_batch_size=4)
    noise_fn, noise_state = gaussian_noise(noise_multiplier=2.0, key=key(7))
    row = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    for step, (batch, bound) in enumerate([(row, 1.0), (None, 0.75), (row, 0.5), (row, 0.5)]):
        assert state.step == step
        grads, state = grad_fn(torch.zeros(2, dtype=torch.float64), batch, state=state)
        got = float(grads.pytree.norm())
        assert got == pytest.approx(0.0 if batch is None else bound / 4)
        assert grads.sensitivity == bound / 4
        noised, noise_state = noise_fn(grads, noise_state)
        assert noised.noise_stddev == 2.0 * bound / 4


def test_a_restored_state_goes_on_with_the_schedule():
    grad_fn, state = clipped_grad(linear, clipping_norm=FALLING)
    _, state = grad_fn(torch.zeros(2), torch.ones(1, 2), state=state)
    restored = from_state_dict(ClipState(), state_dict(state), strict=True)
    grads, _ = grad_fn(torch.zeros(2), torch.ones(1, 2), state=restored)
    assert grads.sensitivity == 0.75


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_value_that_is_no_norm_is_refused_when_its_step_comes(bad):
    grad_fn, state = clipped_grad(linear, clipping_norm=lambda step: [1.0, bad][step])
    _, state = grad_fn(torch.zeros(2), torch.ones(1, 2), state=state)
    with pytest.raises(ValueError, match="clipping_norm at step 1 must be a finite number > 0"):
        grad_fn(torch.zeros(2), torch.ones(1, 2), state=state)


def test_the_first_value_is_checked_at_once():
    with pytest.raises(ValueError, match="clipping_norm at step 0"):
        clipped_grad(linear, clipping_norm=lambda step: 0.0)
    with pytest.raises(TypeError, match="clipping_norm at step 0 must be a number"):
        clipped_grad(linear, clipping_norm=lambda step: "1")


def test_second_moments_follow_the_schedule():
    grad_fn, state = clipped_grad(
        linear, clipping_norm=FALLING, second_moment=True, expected_batch_size=4
    )
    _, state = grad_fn(torch.zeros(2), torch.ones(1, 2), state=state)
    grads, _ = grad_fn(torch.zeros(2), torch.ones(1, 2), state=state)
    assert (grads.projection_radius, grads.gradient.sensitivity) == (0.75, 0.75 / 4)


def test_automatic_clipping_has_no_schedule():
    with pytest.raises(PrivacyError, match="give a number here and the schedule to the optimizer"):
        auto_clipped_grad(linear, clipping_norm=FALLING)
