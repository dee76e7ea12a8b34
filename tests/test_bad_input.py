"""Sizes at the ends of what there is: ten million examples, 10⁵ steps, noise of any size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import special

from opake_lightning.accounting import GaussianEvent, Ledger, Process
from opake_lightning.accounting.process import coarse_epsilon
from opake_lightning.dpftrl.noise import identity_strategy, mf_gaussian_noise
from opake_lightning.dpftrl.sampling import (
    b_min_sep_indices,
    balls_in_bins_indices,
    cyclic_poisson_indices,
    fixed_order_indices,
)
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.dpsgd.sampling import poisson_indices
from opake_lightning.random import key
from opake_lightning.scheduling import cosine_schedule, with_warmup
from opake_lightning.types import ClippedPytree

MANY = 10**7
BATCH = 4096

DRAWS: dict[str, Callable[[int], np.ndarray]] = {
    "poisson": lambda t: poisson_indices(key(1), t, n_examples=MANY, sample_rate=BATCH / MANY),
    "cyclic_poisson": lambda t: cyclic_poisson_indices(
        key(1), t, n_examples=MANY, n_groups=8, sample_rate=8 * BATCH / MANY
    ),
    "balls_in_bins": lambda t: balls_in_bins_indices(
        key(1), t, n_examples=MANY, n_bins=-(-MANY // BATCH)
    ),
    "b_min_sep": lambda t: b_min_sep_indices(
        key(1), t, n_examples=MANY, min_sep=8, sample_rate=BATCH / MANY
    ),
    "fixed_order": lambda t: fixed_order_indices(t, n_examples=MANY, batch_size=BATCH),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_step_on_ten_million_examples_takes_no_time_that_grows_with_them(name):
    """A loop over all examples in Python takes a second, or ten, in every step."""
    draw = DRAWS[name]
    draw(0)  # what is made once for a run
    start = time.process_time()
    sizes = [len(draw(t)) for t in range(1, 21)]
    assert (time.process_time() - start) / 20 < 0.05
    assert abs(np.mean(sizes) - BATCH) < 5 * math.sqrt(BATCH / 20)


def test_a_hundred_thousand_steps_are_spent_in_no_time():
    ledger, event = Ledger(), GaussianEvent(1.1, 0.001)
    start = time.process_time()
    for _ in range(10**5):
        ledger = ledger.spend(event)
    assert time.process_time() - start < 10
    assert ledger.to_dict() == Ledger().spend(event, 10**5).to_dict()
    ledger.epsilon(1e-5)
    start = time.process_time()
    for _ in range(100):
        ledger.epsilon(1e-5)
    assert (time.process_time() - start) / 100 < 1e-3


def test_the_bound_of_every_step_late_in_a_run_takes_less_than_a_millisecond():
    ledger, event = Ledger().spend(GaussianEvent(1.1, 0.01), 10**5), GaussianEvent(1.1, 0.01)
    ledger.epsilon_bound(1e-5)
    start = time.process_time()
    for _ in range(2000):
        ledger = ledger.spend(event)
        ledger.epsilon_bound(1e-5)
    assert (time.process_time() - start) / 2000 < 1e-3
    assert ledger.epsilon_bound(1e-5) >= ledger.epsilon(1e-5)


def test_a_schedule_has_a_value_at_every_step_of_a_long_run():
    schedule = with_warmup(cosine_schedule(1e-3, 0.0, 10**5), 1000)
    values = [schedule(t) for t in range(0, 2 * 10**5, 7)]
    assert all(0 <= value <= 1e-3 for value in values)
    assert values[-1] == 0


@pytest.mark.parametrize("rate", [1e-4, 0.25])
@pytest.mark.parametrize("steps", [1, 10**5])
def test_every_noise_has_an_epsilon(rate, steps):
    """Little noise makes a grid of losses too large for any memory; much leaves nothing on it."""
    sigmas = [1e-99, 1e-30, 1e-8, 1e-4, 5e-3, 0.01, 1e8, 1e16, 1e38, 1e99]
    runs = [Process(((GaussianEvent(sigma, rate), steps),)) for sigma in sigmas]
    found = [run.epsilon_at(1e-5) for run in runs]
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0 < found[4]
    deltas = [run.delta_at(1.0) for run in runs]
    assert deltas == sorted(deltas, reverse=True)
    assert all(
        coarse_epsilon(run, 1e-5) >= epsilon for run, epsilon in zip(runs, found, strict=True)
    )


@pytest.mark.parametrize("rate", [1e-3, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [1e5, 1e7, 1e9, 1e10, 1e11, 1e12, 1e13])
def test_much_noise_costs_no_less_than_it_does_and_warns_of_nothing(sigma, rate):
    """What is sampled a thousand times costs what one Gaussian with this sensitivity does."""
    mu = rate * math.sqrt(1000) * math.sqrt(math.expm1(sigma**-2))
    whole = special.gammainc(0.5, mu**2 / 8)  # δ at ε = 0
    run = Process(((GaussianEvent(sigma, rate), 1000),))
    assert whole <= run.delta_at(0.0) * (1 + 1e-6)
    assert run.delta_at(mu) <= run.delta_at(0.0)
    for delta in (1e-14, 1e-9, whole / 2):
        assert delta >= whole or run.epsilon_at(delta) > 0


@pytest.mark.parametrize(
    ("rate", "steps"),
    [
        *[(rate, steps) for rate in (1e-5, 1e-3, 0.5) for steps in (1, 1000)],
        pytest.param(1e-3, 10**6, marks=pytest.mark.slow),
    ],
)
def test_more_noise_never_costs_more_and_delta_is_a_probability(steps, rate):
    """Also where rounding takes over the grid, which differs from processor to processor."""
    runs = [Process(((GaussianEvent(10.0**n, rate), steps),)) for n in range(1, 14)]
    for epsilon in (0.0, 1e-9, 1e-3):
        deltas = [run.delta_at(epsilon) for run in runs]
        assert all(0 <= delta <= 1 for delta in deltas)
        rounded = 2e-13 * math.sqrt(steps)
        assert all(more <= less + rounded for less, more in pairwise(deltas))
    found = [run.epsilon_at(1e-9) for run in runs]
    assert all(map(math.isfinite, found))
    assert found == sorted(found, reverse=True)


@pytest.mark.slow
def test_ten_million_steps_are_still_told_from_steps_without_sampling():
    """By the central limit they are one Gaussian with μ = q √(T (exp(σ⁻²) - 1)): ε = 21.8."""
    process = Process(((GaussianEvent(1.1, 0.001), 10**7),))
    mu = 0.001 * math.sqrt(10**7 * math.expm1(1.1**-2))
    gaussian = Process(((GaussianEvent(1 / mu), 1),)).epsilon_at(1e-5)
    assert gaussian < process.epsilon_at(1e-5) < 1.05 * gaussian


@pytest.mark.parametrize("sigma", [1e-8, 1e-6, 9e-6])
def test_little_noise_costs_at_least_what_the_tail_of_its_loss_says(sigma):
    """The loss is N(m²/2, m²) with m = 1/σ: δ is half of P[loss > ε] at least, a little above ε."""
    epsilon = Process(((GaussianEvent(sigma), 1),)).epsilon_at(1e-5)
    m = 1 / sigma
    quantile = 4.0  # of the normal distribution, below that of 1e-5
    assert m * (m / 2 + quantile) <= epsilon <= m * (m / 2 + 5)


@pytest.mark.parametrize("sigma", [10.0, 1e4, 1e8, 1e16, 1e40])
def test_much_noise_is_not_taken_for_no_cost_at_all(sigma):
    """At ε = 0 δ is the mass that the two Gaussians do not share, 1 / (σ √(2π)) for large σ."""
    process, apart = Process(((GaussianEvent(sigma), 1),)), 1 / (sigma * math.sqrt(2 * math.pi))
    assert 0.999 * apart <= process.delta_at(0.0) <= 1.001 * apart + 1e-15
    assert process.epsilon_at(0.99 * apart) > 0 == process.epsilon_at(1.01 * apart)


@pytest.mark.parametrize("make", ["independent", "correlated"])
@pytest.mark.parametrize(
    ("sigma", "sensitivity"), [(1.0, 1e-45), (1.0, 1e36), (1e-20, 1e-20), (1e20, 1e20)]
)
def test_noise_that_rounds_to_nothing_or_to_infinity_is_refused(make, sigma, sensitivity):
    """1e-46 is zero in float32, while the gradient beneath it rounds to 1e-45 or to nothing."""
    tree = torch.zeros(4)
    if make == "independent":
        noise_fn, state = gaussian_noise(noise_multiplier=sigma, key=key(1))
    else:
        noise_fn, state = mf_gaussian_noise(
            tree, identity_strategy(), n_steps=4, noise_multiplier=sigma, key=key(1)
        )
    with pytest.raises(ValueError, match="float32 cannot hold"):
        noise_fn(ClippedPytree(tree, sensitivity), state)
    assert not tree.any()


@pytest.mark.parametrize("sensitivity", [1e-30, 1e30])
def test_noise_of_a_size_that_float32_can_hold_has_it(sensitivity):
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(1))
    noised, _ = noise_fn(ClippedPytree(torch.zeros(10**5), sensitivity), state)
    std = float(noised.pytree.double().std()) / sensitivity
    assert abs(std - 1) < 5 / math.sqrt(2 * 10**5)
