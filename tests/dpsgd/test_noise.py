"""That the noise is there once, has the size it says, and never repeats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from opake_lightning.dpsgd.clipping import clipped_grad
from opake_lightning.dpsgd.noise import NoiseState, gaussian_noise
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.random import key
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.types import ClippedPytree, NoisedPytree, SecondMomentClippedPytree

BLOCK = 1 << 17  # what one generator fills


def noise(
    pytree: Any, *, sigma: float = 1.0, sensitivity: float = 1.0, seed: int = 7, step: int = 0
) -> Any:
    noise_fn, _ = gaussian_noise(noise_multiplier=sigma, key=key(seed))
    return noise_fn(ClippedPytree(pytree, sensitivity), NoiseState(key(seed), step))[0].pytree


def assert_stddev(x: Tensor, stddev: float) -> None:
    """Within five standard errors, those of the mean and of the standard deviation."""
    x, n = x.double(), x.numel()
    assert abs(float(x.mean())) < 5 * stddev / math.sqrt(n)
    assert abs(float(x.square().mean().sqrt()) - stddev) < 5 * stddev / math.sqrt(2 * n)


def assert_uncorrelated(x: Tensor, y: Tensor) -> None:
    x, y = x.double().flatten(), y.double().flatten()
    assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 5 / math.sqrt(x.numel())


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("rows", [None, 0, 1, 10, 25])
def test_noise_on_the_mean_has_one_size_whatever_was_drawn(rows, microbatch):
    # Zero gradients, C = 1, σ = 2, expected batch 10: 0.2 per coordinate.
    grad_fn, clip_state = clipped_grad(
        lambda w, x: 0 * (w[0] * x),
        clipping_norm=1.0,
        expected_batch_size=10,
        microbatch_size=microbatch,
    )
    noise_fn, state = gaussian_noise(noise_multiplier=2.0, key=key(1))
    batch = None if rows is None else torch.ones(rows)
    grads, _ = grad_fn(torch.zeros(100_000), batch, state=clip_state)
    noised, state = noise_fn(grads, state)
    assert_stddev(noised.pytree, 0.2)
    assert noised.noise_stddev == 0.2
    assert state == NoiseState(key(1), 1)


@pytest.mark.parametrize(("sensitivity", "stddev"), [(1.0, 3.0), (1000.0, 3000.0)])
def test_noise_is_proportional_to_the_sensitivity(sensitivity, stddev):
    assert_stddev(noise(torch.zeros(100_000), sigma=3.0, sensitivity=sensitivity), stddev)


def test_noise_of_parameters_steps_and_keys_is_unrelated():
    zeros = {"a": torch.zeros(250, 400), "b": torch.zeros(250, 400)}
    draws = [
        noise(zeros, seed=seed, step=step)[name]
        for seed, step in ((7, 0), (7, 1), (8, 0))
        for name in zeros
    ]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert_uncorrelated(one, other)


def test_float32_and_float64_leaves_each_get_their_own_noise():
    out = noise({"a": torch.zeros(50_000), "b": torch.zeros(50_000, dtype=torch.float64)})
    assert (out["a"].dtype, out["b"].dtype) == (torch.float32, torch.float64)
    assert_stddev(out["a"], 1.0)
    assert_stddev(out["b"], 1.0)
    assert_uncorrelated(out["a"], out["b"])
    # From one generator, fewer than 16 numbers of either type would be the same ones.
    out = noise({"a": torch.zeros(9), "b": torch.zeros(9, dtype=torch.float64)})
    assert bool(((out["a"].double() - out["b"]).abs() > 1e-3).all())


@pytest.mark.parametrize("size", [1, 15, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_no_value_repeats_or_is_missing_at_block_boundaries(size):
    x = noise(torch.zeros(size, dtype=torch.float64))
    assert len(x.unique()) == size
    assert bool((x != 0).all())
    if size > 2 * BLOCK:
        assert_uncorrelated(x[:BLOCK], x[BLOCK : 2 * BLOCK])


def test_noise_is_normal_in_every_moment_and_in_its_distribution():
    n = 2 * BLOCK
    x = noise(torch.zeros(n)).double()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (5, 0), (6, 15)):
        variance = math.prod(range(1, 2 * power, 2)) - moment**2
        assert abs(float((x**power).mean()) - moment) < 5 * math.sqrt(variance / n)
    ordered = 0.5 * torch.special.erfc(-x.sort().values / math.sqrt(2))
    gap = float((ordered - (torch.arange(n) + 0.5) / n).abs().max())
    assert gap * math.sqrt(n) < 2.7  # Kolmogorov: exceeded with probability 2 exp(-2 · 2.7²) ~ 1e-6


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_noise_does_not_depend_on_the_number_of_threads(threads, monkeypatch):
    monkeypatch.setattr("opake_lightning.random._WORTH_A_THREAD", 1)
    draws = []
    for count in (1, 2, 3):
        threads(count)
        draws.append(noise(torch.zeros(5 * BLOCK // 2)))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


def test_step_t_has_the_same_noise_whatever_came_before():
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    for _ in range(3):
        out, state = noise_fn(ClippedPytree(torch.ones(40), 1.0), state)
    assert torch.equal(out.pytree, noise(torch.ones(40), step=2))


def test_noise_does_not_touch_global_randomness():
    before = torch.get_rng_state()
    one = noise(torch.zeros(50))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    assert torch.equal(one, noise(torch.zeros(50)))


@pytest.mark.parametrize("sigma", [0.0, 0])
def test_no_noise_at_multiplier_zero(sigma):
    noise_fn, state = gaussian_noise(noise_multiplier=sigma, key=key(7))
    x = torch.randn(20)
    out, state = noise_fn(ClippedPytree({"x": x}, 1.0), state)
    assert torch.equal(out.pytree["x"], x)
    assert (out.noise_stddev, state.step) == (0.0, 1)


def test_arguments_are_written_to_only_when_asked():
    flat = torch.arange(6.0)
    grads = ClippedPytree({"a": flat[:4].view(2, 2), "b": flat[4:]}, 1.0)
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    pure, _ = noise_fn(grads, state)
    assert flat._version == 0
    assert torch.equal(flat, torch.arange(6.0))
    assert state == NoiseState(key(7), 0)
    inplace, _ = noise_fn(grads, state, inplace=True)
    for name, leaf in inplace.pytree.items():
        assert torch.equal(leaf, pure.pytree[name])
        assert leaf.data_ptr() == grads.pytree[name].data_ptr()


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (torch.zeros(3), "needs a ClippedPytree, whose sensitivity sets the noise, got Tensor"),
        (NoisedPytree(torch.zeros(3), 1.0), "got a NoisedPytree, which already has its noise"),
        (ClippedPytree(torch.zeros(3), math.inf), "no finite noise can cover a sensitivity of inf"),
        (ClippedPytree(torch.zeros(3), math.nan), "no finite noise can cover a sensitivity of nan"),
        (ClippedPytree(torch.zeros(3), 0.0), r"no finite noise can cover a sensitivity of 0\.0"),
    ],
)
def test_what_has_no_known_sensitivity_is_refused(grads, message):
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    for add in (noise_fn, noise_fn.across_ranks):
        with pytest.raises(PrivacyError, match=message):
            add(grads, state)


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf])
def test_a_multiplier_that_is_not_a_size_is_refused(sigma):
    with pytest.raises(ValueError, match="noise_multiplier must be a finite number >= 0"):
        gaussian_noise(noise_multiplier=sigma, key=key(7))


def test_a_missing_key_is_an_error():
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=42)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an RngKey, got a int"):
        noise_fn(ClippedPytree(torch.zeros(3), 1.0), state)


def test_what_is_squared_is_the_sum_over_ranks_not_its_parts(monkeypatch):
    def doubled(grads, inplace=False):
        if isinstance(grads, torch.Tensor):
            return 2 * grads
        return replace(grads, gradient=ClippedPytree(2 * grads.gradient.pytree, 1.0))

    monkeypatch.setattr("opake_lightning.dpsgd.noise.sum_gradients", doubled)
    noise_fn, state = gaussian_noise(noise_multiplier=0.0, key=key(7))
    part = SecondMomentClippedPytree(ClippedPytree(torch.ones(2), 1.0), projection_radius=9.0)
    pair, _ = noise_fn.across_ranks(part, state)
    assert torch.equal(pair.gradient.pytree, torch.full((2,), 2.0))
    assert torch.equal(pair.square.pytree, torch.full((2,), 4.0))


@pytest.mark.parametrize("lost", ["key", "step"])
def test_a_state_without_its_place_in_the_streams_is_not_restored(lost):
    """Also by who does not ask for strictness: noise that starts over would come twice."""
    saved = state_dict(NoiseState(key(7), 5))
    del saved[lost]
    with pytest.raises(CheckpointError, match=f"lacks '{lost}'"):
        from_state_dict(NoiseState(key(8)), saved)


@pytest.mark.parametrize("sensitivity", [1e-40, 1e36])
def test_a_gradient_that_float32_cannot_hold_is_refused_whatever_its_noise(sensitivity):
    noise_fn, state = gaussian_noise(noise_multiplier=1e-3 / sensitivity, key=key(7))
    with pytest.raises(ValueError, match=r"the sensitivity of the gradient is .*float32"):
        noise_fn(ClippedPytree(torch.zeros(3), sensitivity), state)
