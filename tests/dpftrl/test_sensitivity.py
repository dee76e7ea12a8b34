"""The sensitivity under a participation schema: never below the truth, exact where it says so."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opake_lightning.dpftrl.noise import (
    StrategyMatrix,
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.dpftrl.noise import _sensitivity as module

TABLE = json.loads((Path(__file__).parents[1] / "data" / "mf_streams.json").read_text())[
    "sensitivity"
]
# What forces each way of finding a bound that does not try all sets.
LIMITS = {
    "as it is": {},
    "no trying": {"_MAX_SETS": 0},
    "corner alone": {"_MAX_SETS": 0, "_MAX_PROGRAMME": 0},
    "blocks of columns": {"_MAX_PAIRS_N": 0},
    "large blocks": {"_MAX_PAIRS_N": 0, "_BLOCKS": 3},
}


def sets_of(n, min_sep, count):
    for size in range(1, count + 1):
        for steps in itertools.combinations(range(n), size):
            if all(b - a >= min_sep for a, b in itertools.pairwise(steps)):
                yield steps


def by_trying(matrix, min_sep, count):
    """Return the largest norm over sets and signs, and the largest root of sums of |Gram|."""
    dense = matrix.dense()
    gram = np.abs(dense.T @ dense)
    signed, bound = 0.0, 0.0
    for steps in sets_of(matrix.n_steps, min_sep, count):
        columns = dense[:, steps]
        bound = max(bound, float(gram[np.ix_(steps, steps)].sum()))
        for signs in itertools.product((1.0, -1.0), repeat=len(steps) - 1):
            signed = max(signed, float(np.sum((columns @ (1.0, *signs)) ** 2)))
    return math.sqrt(signed), math.sqrt(bound)


def check(matrix, min_sep, count):
    found = matrix.sensitivity_bound(min_sep, count)
    most = min(count or matrix.n_steps, -(-matrix.n_steps // min_sep))
    attained, bound = by_trying(matrix, min_sep, most)
    assert found.value >= bound * (1 - 1e-12)
    if found.exact:
        assert found.value == pytest.approx(attained, rel=1e-10)
    return found, attained


numbers = st.floats(-1, 1).map(lambda x: round(x, 3))


@pytest.mark.parametrize("limits", LIMITS.values(), ids=list(LIMITS.keys()))
@given(
    first=st.sampled_from([1.0, 0.3, -0.5]),
    others=st.lists(numbers, max_size=8),
    n=st.integers(1, 9),
    min_sep=st.integers(1, 5),
    count=st.none() | st.integers(1, 4),
    positive=st.booleans(),
    normalized=st.booleans(),
)
def test_never_below_any_set_with_any_signs(
    limits, first, others, n, min_sep, count, positive, normalized
):
    coefficients = np.array([first, *others])[:n]
    if positive:
        coefficients = np.abs(coefficients)
    if np.count_nonzero(coefficients[1:]):
        coefficients = np.trim_zeros(coefficients, "b")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(module, name, value)
        check(StrategyMatrix(n, coefficients, normalized), min_sep, count)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("n", "min_sep", "count"), [(12, 4, None), (12, 1, 3), (11, 5, 2)])
@pytest.mark.parametrize("first", [1.0, -0.5])
def test_signed_diagonals_of_longer_runs(first, n, min_sep, count, normalized):
    rng = np.random.default_rng(n)
    for _ in range(5):
        coefficients = np.concatenate([[first], rng.uniform(-1, 1, n - 1)])
        check(StrategyMatrix(n, coefficients, normalized), min_sep, count)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_tabulated_values(case):
    kind, size, momentum, normalized = case["strategy"]
    if kind == "lambda_cgd":
        strategy = lambda_cgd_strategy(momentum, normalized=normalized)
    else:
        make = bsr_strategy if kind == "bsr" else bisr_strategy
        strategy = make(size, momentum=momentum, normalized=normalized)
    found = strategy.matrix(case["n"]).sensitivity_bound(case["min_sep"], case["k"])
    assert found.value == pytest.approx(case["value"], rel=1e-10)
    assert found.exact


@pytest.mark.parametrize(
    "strategy",
    [
        identity_strategy(),
        band_mf_strategy(3),
        band_mf_strategy(5, 0.9),
        blt_strategy(3),
        blt_strategy(3, min_sep=4),
        bsr_strategy(7),
        bisr_strategy(3),
        bisr_strategy(5, momentum=0.9, normalized=True),
        lambda_cgd_strategy(0.9),
        lambda_cgd_strategy(0.5, normalized=True),
    ],
    ids=lambda strategy: strategy.describe(),
)
@pytest.mark.parametrize(
    ("min_sep", "count"), [(1, 3), (2, None), (3, 2), (4, None), (5, None), (11, None), (40, None)]
)
def test_exact_for_strategies_of_the_package(strategy, min_sep, count):
    found, attained = check(strategy.matrix(11), min_sep, count)
    assert found.exact
    assert found.value == pytest.approx(attained, rel=1e-12)


def test_takes_part_as_often_as_fits_unless_told_otherwise():
    matrix = identity_strategy().matrix(9)
    assert matrix.sensitivity(1) == pytest.approx(3.0)
    assert matrix.sensitivity(4) == pytest.approx(math.sqrt(3))
    assert matrix.sensitivity(4, 2) == pytest.approx(math.sqrt(2))
    assert matrix.sensitivity(4, 100) == pytest.approx(math.sqrt(3))


def test_separate_bands_add_up_and_those_that_meet_cost_more():
    matrix = band_mf_strategy(8).matrix(400)
    assert matrix.sensitivity(8, 10) == pytest.approx(math.sqrt(10))
    assert matrix.sensitivity(4, 10) > 1.2 * math.sqrt(10)


def test_the_worst_set_of_diagonals_that_rise_is_not_that_of_the_first_steps():
    # Columns 0 and 2 do not meet, 0 and 3 do.
    matrix = StrategyMatrix(8, np.array([1.0, 0.0, 0.0, 1.0]))
    found, _ = check(matrix, 2, 2)
    assert found.value == pytest.approx(math.sqrt(6))


def test_few_participations_can_be_worse_than_all_that_fit():
    # Three fit only at steps 0, 2 and 4, whose columns do not meet; those of 0 and 3 do.
    found, _ = check(StrategyMatrix(5, np.array([1.0, 0.0, 0.0, 1.0])), 2, None)
    assert found.value == pytest.approx(math.sqrt(5))


def test_opposite_gradients_count_where_columns_are_opposed():
    matrix = StrategyMatrix(6, np.array([1.0, -0.5]))
    found, attained = check(matrix, 1, 2)
    assert found.value == pytest.approx(math.sqrt(2 * 1.25 + 2 * 0.5))
    assert found.exact
    assert attained == found.value


def test_signs_that_no_gradients_attain_are_an_upper_bound():
    # Inner products of the columns of three steps whose signs contradict each other.
    found, attained = check(StrategyMatrix(5, np.array([1.0, 0.0, -1.0, -1.0])), 1, 3)
    assert not found.exact
    assert found.value > attained * 1.01


@pytest.mark.parametrize(
    "strategy",
    [
        bisr_strategy(4, normalized=True),
        lambda_cgd_strategy(0.9, normalized=True),
        bsr_strategy(64, normalized=True),
    ],
    ids=lambda strategy: strategy.describe(),
)
@pytest.mark.parametrize(("min_sep", "count"), [(100, None), (10, None), (3, 7), (1, None)])
@pytest.mark.parametrize(("blocks", "loose"), [(400, 1.06), (8, 3.0)])
def test_blocks_of_columns_bound_all_pairs_closely(
    monkeypatch, strategy, min_sep, count, blocks, loose
):
    matrix = strategy.matrix(1000)
    pairs = matrix.sensitivity_bound(min_sep, count)
    monkeypatch.setattr(module, "_MAX_PAIRS_N", 0)
    monkeypatch.setattr(module, "_BLOCKS", blocks)
    bound = matrix.sensitivity_bound(min_sep, count)
    assert pairs.value * (1 - 1e-12) <= bound.value <= pairs.value * loose
    assert bound.exact == (strategy.bands is not None and strategy.bands <= min_sep)


def test_a_hundred_thousand_steps():
    n = 100_000
    spaced = bisr_strategy(4).matrix(n).sensitivity_bound(1000)
    assert spaced.exact
    assert spaced.value == pytest.approx(10 * 1.27373559, rel=1e-6)
    normalized = lambda_cgd_strategy(0.9, normalized=True).matrix(n).sensitivity_bound(1000)
    assert normalized.value == pytest.approx(10.0, rel=1e-6)
    flat = blt_strategy(2, min_sep=1000).matrix(n)
    assert flat.sensitivity_bound(1000).exact


def test_rounding_of_a_flat_tail_does_not_cost_exactness():
    c = np.concatenate([[1.0], np.full(3000, 0.01)])
    c[2::2] += 1e-17
    c[5] += 2e-18
    found = StrategyMatrix(3001, c).sensitivity_bound(100)
    assert found.exact
    assert found.value == pytest.approx(
        StrategyMatrix(3001, np.minimum.accumulate(c)).sensitivity(100), rel=1e-12
    )
