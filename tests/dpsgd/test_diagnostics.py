"""Diagnostics say what clipping and noise did, whatever is in the batch."""

from __future__ import annotations

import math

import pytest
import torch

from opake_lightning.distributed import sum_gradients
from opake_lightning.dpsgd.clipping import clipped_grad, not_private_diagnostics, per_group
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.random import key


def clipped(rows, norm=1.0, **options):
    grad_fn, state = clipped_grad(
        lambda p, x: x[:, 0] * p[0] + x[:, 1] * p[1], clipping_norm=norm, **options
    )
    params = [torch.zeros((), dtype=torch.float64)] * 2
    return grad_fn(params, torch.tensor(rows, dtype=torch.float64).view(-1, 2), state=state)[0]


def test_norms_are_those_before_clipping_and_the_signal_is_what_is_left():
    grads = clipped([[3.0, 4.0], [0.3, 0.4], [0.6, 0.8]], expected_batch_size=10)
    assert not_private_diagnostics(sum_gradients(grads), noise_multiplier=2.0) == pytest.approx(
        {
            "clip_fraction": 1 / 3,
            "norm_p10": 0.6,
            "norm_median": 1.0,
            "norm_p90": 1.0 + 0.8 * 4.0,
            "signal_to_noise": (2.5 / 10) / (2.0 * 0.1 * math.sqrt(2)),
        }
    )


def test_with_groups_the_fraction_is_over_all_parts_and_norms_are_whole():
    grads = clipped(
        [[3.0, 4.0], [0.3, 0.4]], per_group({"0": 5.0, "1": 1.0}), second_moment="per_example"
    )
    seen = not_private_diagnostics(grads)
    assert (seen["clip_fraction"], seen["norm_median"]) == pytest.approx((0.25, 2.75))


def test_an_example_without_a_finite_gradient_does_not_count():
    seen = not_private_diagnostics(clipped([[3.0, 4.0], [math.nan, 0.0], [math.inf, 1.0]]))
    assert (seen["clip_fraction"], seen["norm_p90"]) == pytest.approx((1.0, 5.0))


@pytest.mark.parametrize("rows", [[], [[math.nan, 0.0]]])
def test_nothing_to_speak_of_is_left_out(rows):
    assert not_private_diagnostics(clipped(rows)) == {}
    assert not_private_diagnostics(clipped(rows), noise_multiplier=1.0) == {"signal_to_noise": 0.0}
    assert not_private_diagnostics(clipped(rows), noise_multiplier=0.0) == {}


def test_what_is_released_holds_no_report():
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    noised, _ = noise_fn(clipped([[3.0, 4.0]]), state)
    assert not hasattr(noised, "report")
