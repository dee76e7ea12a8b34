"""ε from above, and from not far above."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from opake_lightning.accounting import GaussianEvent, Process, process

REFERENCE = json.loads(
    (Path(__file__).parent.parent / "data" / "accounting.json").read_text(encoding="utf-8")
)
SAMPLED = REFERENCE["poisson_subsampled_gaussian"]
# More of the same kind, (sample rate, noise multiplier, steps, delta, ε) from PLDs at 1e-5.
MORE = [
    (256 / 60000, 0.7, 10547, 1e-5, 5.63968),
    (0.01, 0.8, 1000, 1e-5, 3.14101),
    (4096 / 50000, 3.0, 875, 1e-5, 3.60161),
    (0.5, 4.0, 100, 1e-5, 5.86872),
    (0.5, 1.0, 8, 1e-5, 9.3420),
    (0.2, 3.0, 50, 1 / 48000, 1.9608),
    (0.01, 77.13, 1000, 1e-5, 0.01000),
]


def steps(noise_multiplier: float, sample_rate: float = 1.0, n: int = 1) -> Process:
    return Process(((GaussianEvent(noise_multiplier, sample_rate), n),))


def parse(key: str) -> dict[str, float]:
    return {name: float(value) for name, value in (part.split("=") for part in key.split(","))}


def phi(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


# A grid in place of the formula, or a slack that rounds down.
@pytest.mark.parametrize(("key", "epsilon"), REFERENCE["gaussian_exact_eps"].items())
def test_gaussian_epsilon_is_exact_and_rounded_up(key, epsilon):
    setting = parse(key)
    got = steps(setting["sigma"]).epsilon_at(setting["delta"])
    assert epsilon <= got <= epsilon * (1 + 1e-8)


@pytest.mark.parametrize(("key", "delta"), REFERENCE["gaussian_exact_delta"].items())
def test_gaussian_delta_is_exact_and_rounded_up(key, delta):
    setting = parse(key)
    got = steps(setting["sigma"]).delta_at(setting["eps"])
    assert delta <= got <= delta * (1 + 1e-8)


# A grid too coarse for small ε, or an optimistic one.
@pytest.mark.parametrize("row", SAMPLED, ids=lambda row: row["name"])
def test_sampled_epsilon_is_never_below_a_finer_pld_and_close_to_it(row):
    got = steps(row["sigma"], row["q"], row["T"]).epsilon_at(row["delta"])
    fine = row["pld_eps_vdi1e-05"]
    assert fine * (1 - 1e-9) <= got <= fine * (1 + 1e-4)
    assert row["pld_eps_optimistic_vdi1e-4"] < got < row["rdp_eps"]


@pytest.mark.parametrize(("rate", "sigma", "n", "delta", "epsilon"), MORE)
def test_sampled_epsilon_of_published_settings(rate, sigma, n, delta, epsilon):
    assert steps(sigma, rate, n).epsilon_at(delta) == pytest.approx(epsilon, rel=3e-4)


def test_many_tiny_steps():
    # The grid that gives 0.0912 here is too coarse by 2 %; 0.08954 is where finer ones converge.
    assert steps(1.0, 1.6e-4, 18750).epsilon_at(1e-5) == pytest.approx(0.08954, rel=3e-4)


def test_many_tiny_steps_stay_bounded_from_above_if_not_tightly():
    # By the central limit one Gaussian. The grid's rounding piles up: safe, not tight.
    rate, n = 1e-5, 10**6
    limit = steps(1 / (rate * math.sqrt(n * math.expm1(0.25)))).epsilon_at(1e-5)
    assert limit < steps(2.0, rate, n).epsilon_at(1e-5) < 2 * limit


def exact_delta_of_one_step(sigma: float, rate: float, epsilon: float) -> float:
    """Integrate both pairs in closed form: no grid, no library."""
    x = -0.5 - sigma**2 * math.log(math.expm1(epsilon) / rate + 1)
    mixed = (1 - rate) * phi(x / sigma) + rate * phi((x + 1) / sigma)
    removing = mixed - math.exp(epsilon) * phi(x / sigma)
    if math.expm1(-epsilon) + rate <= 0:
        return removing
    x = 0.5 + sigma**2 * math.log(math.expm1(-epsilon) / rate + 1)
    mixed = (1 - rate) * phi(x / sigma) + rate * phi((x - 1) / sigma)
    return max(removing, phi(x / sigma) - math.exp(epsilon) * mixed)


# Mass that is dropped at an end or rounded to the wrong side, in either direction of adjacency.
@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("rate", [1e-3, 0.02, 0.5, 0.999])
def test_one_step_is_never_below_the_exact_delta_and_close_to_it(sigma, rate):
    step = steps(sigma, rate)
    for epsilon in np.linspace(0, 2 * rate / sigma, 9):
        exact = exact_delta_of_one_step(sigma, rate, float(epsilon))
        got = step.delta_at(float(epsilon))
        assert exact - 1e-15 <= got <= exact * 1.02 + 1e-12


def test_steps_may_differ_and_their_order_does_not_matter():
    half, eighth = steps(1.0, 0.5, 4), steps(1.0, 0.125, 4)
    assert (half + eighth).epsilon_at(1e-5) == pytest.approx(6.9001, rel=3e-4)
    assert (half + eighth).epsilon_at(1e-5) == (eighth + half).epsilon_at(1e-5)
    one_by_one = (steps(1.0, 0.5) + steps(1.0, 0.125)) * 4
    assert one_by_one.epsilon_at(1e-5) == (half + eighth).epsilon_at(1e-5)


def test_a_full_batch_among_sampled_ones_costs_what_it_costs_alone():
    # The sampled steps are next to nothing, so that only the full one is left to see.
    got = (steps(1.0) + steps(50.0, 1e-4, 3)).epsilon_at(1e-5)
    assert got == pytest.approx(4.3771780957, rel=3e-4)
    assert got >= 4.3771780957


def test_full_batches_add_up_to_one_gaussian():
    both = steps(3.0) + steps(4.0)
    assert both.epsilon_at(1e-5) == pytest.approx(steps(12 / 5).epsilon_at(1e-5), rel=1e-8)


def test_no_steps_are_free_and_steps_without_noise_are_not():
    assert Process().epsilon_at(1e-5) == 0.0
    assert Process().delta_at(1.0) == 0.0
    assert (steps(0.0, 0.01) * 0).epsilon_at(1e-5) == 0.0
    assert (steps(1.0, 0.01) + steps(0.0, 0.01)).epsilon_at(1e-5) == math.inf
    assert steps(0.0, 0.01).delta_at(1.0) == 1.0


def test_delta_at_undoes_epsilon_at():
    run = steps(1.1, 0.01, 1000)
    assert run.delta_at(run.epsilon_at(1e-5)) == pytest.approx(1e-5, rel=1e-5)
    assert run.delta_at(1e3) <= 1e-11


# Looking up a delta that is smaller than what the Fourier transform rounds.
@pytest.mark.parametrize(
    ("sigma", "rate", "n", "delta", "least", "most"),
    [
        (1.0, 0.01, 1000, 1e-12, 3.92, 4.42),  # by a grid of a hundred times the points; by RDP
        (2.0, 0.001, 249_000, 1e-10, 1.4, 1.68),
        (2.0, 0.001, 249_999, 1e-10, 1.4, 1.68),
        (1.0, 1e-6, 10**6, 1e-15, 0.5, 1.17),
    ],
)
def test_a_delta_below_rounding_gives_the_bound_of_renyi_divergences(
    sigma, rate, n, delta, least, most
):
    """The same steps without sampling, which were taken there, cost 720 and 33,000."""
    assert least < steps(sigma, rate, n).epsilon_at(delta) < most
    assert (steps(sigma) * n).epsilon_at(delta) > 100 * most


@pytest.mark.parametrize(("sigma", "rate", "n"), [(1.1, 0.01, 1000), (2.0, 0.001, 10**5)])
def test_there_is_no_cliff_where_rounding_takes_over(sigma, rate, n):
    run, exponents = steps(sigma, rate, n), range(-60, -15)
    found = [run.epsilon_at(10 ** (tenths / 4)) for tenths in exponents]
    assert all(a > b for a, b in itertools.pairwise(found))
    # A factor of 10^(1/4) in δ is worth a few per cent, also from one bound to the other.
    assert max(a / b for a, b in itertools.pairwise(found)) < 1.15


def test_divergences_that_rounding_has_eaten_say_nothing():
    """The library may take such a divergence for 0, or refuse its logarithm."""
    for rate in (1e-17, 1e-16, 1e-14):
        assert 0 <= steps(1.0, rate, 10).epsilon_at(1e-13) <= steps(1.0, 1e-9, 10).epsilon_at(1e-13)
    assert steps(1e9, 0.5, 10**6).epsilon_at(1e-13) <= steps(1e7, 0.5, 10**6).epsilon_at(1e-13)


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_huge_losses_do_not_overflow(sigma):
    epsilon = steps(sigma, 0.01, 1000).epsilon_at(1e-5)
    assert 0.01 * 1000 / (2 * sigma**2) < epsilon < 10**6


def test_a_large_delta():
    assert steps(1.1, 0.01, 1000).epsilon_at(0.5) == 0.0
    assert 0 < steps(0.4, 0.01, 1000).epsilon_at(0.5) < 3


@settings(max_examples=25)
@given(
    sigma=st.floats(0.4, 20),
    rate=st.floats(1e-3, 1),
    n=st.integers(1, 2000),
    more=st.integers(1, 50),
    delta=st.sampled_from([1e-8, 1e-5, 1e-3]),
)
def test_epsilon_grows_with_steps_and_the_coarse_bound_is_above_it(sigma, rate, n, more, delta):
    now, later = steps(sigma, rate, n), steps(sigma, rate, n + more)
    assert now.epsilon_at(delta) <= later.epsilon_at(delta)
    assert later.epsilon_at(delta) <= process.coarse_epsilon(later, delta)
    assert later.epsilon_at(delta) <= steps(sigma, 1.0, n + more).epsilon_at(delta)


def test_process_arithmetic():
    two = steps(1.0, 0.5, 2)
    assert 2 * two == two * 2 == two + two == steps(1.0, 0.5, 4)
    assert two * 0 == Process() == two * 0 + Process()
    assert (two + steps(2.0)).n_steps == 3
    assert (two + steps(2.0)) * 2 == two + steps(2.0) + two + steps(2.0)
    with pytest.raises(ValueError, match="number of repetitions"):
        two * -1
    with pytest.raises(TypeError, match="number of repetitions"):
        two * 2.0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(ValueError, match="delta must be in"):
        steps(1.0).epsilon_at(delta)


def test_events_are_checked():
    for sigma in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="noise_multiplier"):
            GaussianEvent(sigma)
    for rate in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="sample_rate"):
            GaussianEvent(1.0, rate)
    for epsilon in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="epsilon"):
            steps(1.0).delta_at(epsilon)
    assert GaussianEvent(1, 1) == GaussianEvent(1.0)
    for count in (-1, 1.5, True, "1"):
        with pytest.raises((ValueError, TypeError), match="count"):
            Process(((GaussianEvent(1.0), count),))  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [1e-7, 1e-6, 9e-6])
def test_the_bound_where_there_is_little_noise_is_above_the_truth_and_close_to_it(sigma):
    # The loss is N(1 / 2σ², 1 / σ²), and δ its tail but for far less than a millionth.
    truth = (0.5 / sigma + (1 - 1e-6) * stats.norm.isf(1e-5)) / sigma
    assert truth < steps(sigma).epsilon_at(1e-5) < truth * (1 + 1e-5)


@pytest.mark.parametrize("sigma", [0.5, 2.0, 1e3, 1e11, 1e13])
def test_epsilon_is_zero_from_the_delta_on_that_suffices(sigma):
    enough = special.gammainc(0.5, 0.125 / sigma**2)  # which is 2 Φ(1 / 2σ) - 1
    assert steps(sigma).epsilon_at(0.999 * enough) > 0
    assert steps(sigma).epsilon_at(1.001 * enough) == 0.0


@pytest.mark.parametrize("sigma", [1e-300, 1e-200, 1e-120])
def test_noise_too_small_for_floating_point_is_none(sigma):
    one = Process(((GaussianEvent(sigma), 1),))
    assert (one.epsilon_at(1e-5), one.delta_at(3.0)) == (math.inf, 1.0)


def test_noise_too_large_for_floating_point_costs_nothing_more():
    assert Process(((GaussianEvent(1e200), 10),)).epsilon_at(1e-5) <= 1e-9
