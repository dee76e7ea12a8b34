"""Strategies in closed form: coefficients, inverses, streaming and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from opake_lightning.dpftrl.noise import (
    Buffers,
    Inputs,
    Outputs,
    StrategyMatrix,
    Workload,
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    iterate_workload,
    lambda_cgd_strategy,
    prefix_workload,
    velocity_workload,
)
from opake_lightning.scheduling import constant_schedule, cosine_schedule, with_warmup

DATA = Path(__file__).parents[1] / "data"
STREAMS = json.loads((DATA / "mf_streams.json").read_text())
CLOSED_FORM = json.loads((DATA / "mf_closed_form.json").read_text())["values"]
WORKLOADS = {
    "prefix": prefix_workload(),
    "momentum0.9_velocity": velocity_workload(0.9),
    "prefix_momentum0.9": iterate_workload(0.9),
    "prefix_momentum0.95": iterate_workload(0.95),
}
STRATEGIES = {
    "identity": identity_strategy(),
    "band_mf": band_mf_strategy(bands=8, momentum=0.9),
    "band_mf wide": band_mf_strategy(300, error="max"),
    "blt": blt_strategy(),
    "blt of several participations": blt_strategy(4, min_sep=5),
    "bsr": bsr_strategy(4, momentum=0.9, decay=0.99),
    "bsr normalized": bsr_strategy(4, normalized=True),
    "bisr": bisr_strategy(6, momentum=0.5),
    "bisr normalized": bisr_strategy(6, normalized=True),
    "lambda_cgd": lambda_cgd_strategy(0.9),
    "lambda_cgd normalized": lambda_cgd_strategy(0.9, normalized=True),
    "lambda_cgd of 0": lambda_cgd_strategy(0.0),
}
every_strategy = pytest.mark.parametrize(
    "strategy", STRATEGIES.values(), ids=list(STRATEGIES.keys())
)


def named(name: str, n: int):
    if name == "identity":
        return identity_strategy()
    if name.startswith("sqrt_toeplitz"):
        return bsr_strategy(n)
    if found := re.match(r"(bsr|bisr)_p(\d+)_a([\d.]+)_b([\d.]+)", name):
        make = bsr_strategy if found[1] == "bsr" else bisr_strategy
        return make(int(found[2]), decay=float(found[3]), momentum=float(found[4]))
    return lambda_cgd_strategy(float(name.removeprefix("lambda_cgd_")))


def streamed(recurrence, z):
    """Run a recurrence as its docstring says."""
    x = np.zeros(len(z))
    if isinstance(recurrence, Buffers):
        theta, omega = np.array(recurrence.theta), np.array(recurrence.omega)
        state = np.zeros(len(theta))
        for t in range(len(z)):
            x[t] = z[t] - omega @ state
            state = theta * state + x[t]
        return x
    weights = recurrence.coefficients
    for t in range(len(z)):
        past = range(1, min(t + 1, len(weights)))
        if isinstance(recurrence, Outputs):
            x[t] = (z[t] - sum(weights[j] * x[t - j] for j in past)) / weights[0]
        else:
            x[t] = weights[0] * z[t] + sum(weights[j] * z[t - j] for j in past)
    return x


@pytest.mark.parametrize("name", sorted(set(STREAMS["coefficients"])))
def test_coefficients_are_those_of_the_papers(name):
    expected = np.array(STREAMS["coefficients"][name])
    if name == "sqrt_toeplitz_first10":
        found = bsr_strategy(10).matrix(50).coefficients
    elif name == "inv_sqrt_first10":
        found = bisr_strategy(10).matrix(50).inverse_coefficients()[:10]
    else:
        matrix = named(name, 50).matrix(50)
        found = matrix.inverse_coefficients()[:8] if "bisr" in name else matrix.coefficients
    assert found == pytest.approx(expected, abs=1e-12)


def test_square_root_times_itself_is_the_workload_and_times_the_inverse_root_is_one():
    root = bsr_strategy(30, momentum=0.9, decay=0.99).matrix(30).dense()
    inverse = bisr_strategy(30, momentum=0.9, decay=0.99).matrix(30)
    lag = np.subtract.outer(np.arange(30), np.arange(30))
    column = [sum(0.99 ** (t - i) * 0.9**i for i in range(t + 1)) for t in range(30)]
    assert root @ root == pytest.approx(np.where(lag >= 0, np.array(column)[lag], 0), abs=1e-12)
    assert root == pytest.approx(inverse.dense(), abs=1e-12)


STREAMED = {
    "bsr p4 a1 b.9": bsr_strategy(4, momentum=0.9),
    "bisr p4 a1 b0 unnormalized": bisr_strategy(4),
    "bisr p4 a1 b0 column-normalized": bisr_strategy(4, normalized=True),
    "lambda_cgd .9 unnormalized": lambda_cgd_strategy(0.9),
    "lambda_cgd .9 column-normalized": lambda_cgd_strategy(0.9, normalized=True),
}


@pytest.mark.parametrize("name", STREAMED)
def test_streams_are_the_tabulated_ones(name):
    z, strategy = np.array(STREAMS["streams"]["z"]), STREAMED[name]
    noise = strategy.matrix(8).scales() * streamed(strategy.recurrence(8), z)
    assert noise == pytest.approx(np.array(STREAMS["streams"][name]), abs=1e-12)


def test_streams_of_given_coefficients_and_buffers_are_the_tabulated_ones():
    streams = STREAMS["streams"]
    z = np.array(streams["z"])
    banded = streamed(Outputs((1.0, 0.5, 0.25)), z)
    assert banded == pytest.approx(np.array(streams["banded_toeplitz c=[1,.5,.25]"]), abs=1e-12)
    buffers = streamed(Buffers((0.9, 0.5), (0.3, 0.2)), z)
    assert buffers == pytest.approx(np.array(streams["blt C^-1 z"]), abs=1e-12)
    # The coefficients belong to the same buffers: C times the stream is the input.
    c = StrategyMatrix(8, np.array(streams["blt theta=.9,.5 omega=.3,.2 coefs"]))
    assert c.dense() @ buffers == pytest.approx(z, abs=1e-12)


@every_strategy
@pytest.mark.parametrize("n", [1, 2, 3, 5, 40])
def test_recurrence_and_matrix_are_one_another(strategy, n):
    matrix = strategy.matrix(n)
    z = np.random.default_rng(1).standard_normal(n)
    noise = matrix.scales() * streamed(strategy.recurrence(n), z)
    dense = matrix.dense()
    assert dense @ noise == pytest.approx(z, abs=1e-10)
    assert matrix.row_norms() == pytest.approx(np.linalg.norm(np.linalg.inv(dense), axis=1))
    assert matrix.column_norms() == pytest.approx(np.linalg.norm(dense, axis=0))
    assert matrix.max_column_norm() == pytest.approx(np.linalg.norm(dense, axis=0).max())
    bands = sum(np.abs(np.diag(dense, -i)).max() > 0 for i in range(n))
    if strategy.bands is not None:
        assert bands == min(strategy.bands, n)
    elif n == 40:
        assert bands == n


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("bsr p4 b.9", bsr_strategy(4, momentum=0.9)),
        ("lambda_cgd .9", lambda_cgd_strategy(0.9)),
        ("bisr p4 b0", bisr_strategy(4)),
    ],
)
def test_row_norms_are_the_tabulated_ones(name, strategy):
    expected = np.array(STREAMS["row_norms"][name])
    assert strategy.matrix(100).row_norms()[:8] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("n", CLOSED_FORM)
def test_errors_are_the_tabulated_ones(n, workload):
    for name, values in CLOSED_FORM[n][workload].items():
        matrix = named(name, int(n)).matrix(int(n))
        error = matrix.rmse(WORKLOADS[workload])
        for key, expected in values.items():
            schema = key[key.index("_", key.index("s")) + 1 :].removeprefix("rmse_")
            found = re.match(r"b(\d+)_k(\d+)", schema)
            sensitivity = (
                matrix.sensitivity(int(found[1]), int(found[2]))
                if found
                else matrix.max_column_norm()
            )
            size = error.max if "max" in key else error.mean if "mean" in key else 1.0
            assert size * sensitivity == pytest.approx(expected, rel=1e-9), (name, key)


@every_strategy
@pytest.mark.parametrize(
    "workload",
    [
        prefix_workload(),
        velocity_workload(0.9),
        iterate_workload(0.9),
        prefix_workload(with_warmup(cosine_schedule(1.0, 0.0, 30), 5)),
        iterate_workload(0.9, cosine_schedule(1.0, 0.1, 30)),
    ],
    ids=Workload.describe,
)
def test_error_is_that_of_the_dense_product(strategy, workload):
    n = 37
    matrix = strategy.matrix(n)
    dense = np.zeros((n, n))
    for step in range(n):
        dense[step, : step + 1] = workload.row(step)
    squares = np.sum((dense @ np.linalg.inv(matrix.dense())) ** 2, axis=1)
    error = matrix.rmse(workload)
    assert error.max == pytest.approx(np.sqrt(squares.max()))
    assert error.mean == pytest.approx(np.sqrt(squares.mean()))


def test_workload_with_a_schedule_is_the_recursion_of_sgd_with_momentum():
    schedule, gradients = cosine_schedule(1.0, 0.0, 10), np.random.default_rng(2).normal(size=12)
    velocity, position, positions = 0.0, 0.0, []
    for step, gradient in enumerate(gradients):
        velocity = 0.8 * velocity + gradient
        position += schedule(step) * velocity
        positions.append(position)
    workload = iterate_workload(0.8, schedule)
    assert workload.apply(gradients) == pytest.approx(np.array(positions))
    assert workload.row(11) @ gradients == pytest.approx(position)


def test_momentum_is_velocity_for_optimised_strategies_and_its_sum_for_square_roots():
    assert band_mf_strategy(4, 0.9) == band_mf_strategy(4, workload=velocity_workload(0.9))
    assert blt_strategy(2, momentum=0.9) == blt_strategy(2, workload=velocity_workload(0.9))
    full = bsr_strategy(50, momentum=0.9).matrix(50)
    squared = np.convolve(full.coefficients, full.coefficients)[:50]
    assert squared == pytest.approx(iterate_workload(0.9).row(49)[::-1])


@every_strategy
def test_equal_strategies_share_one_matrix_that_nobody_can_change(strategy):
    matrix = strategy.matrix(20)
    assert strategy.matrix(20) is matrix
    assert hash(strategy) == hash(strategy.for_participation(20, 1)) or strategy.name == "blt"
    with pytest.raises(ValueError, match="read-only"):
        matrix.coefficients[0] = 2.0


def test_descriptions_tell_strategies_apart_and_hold_no_address():
    texts = [strategy.describe() for strategy in STRATEGIES.values()]
    assert len(set(texts)) == len(texts)
    assert bsr_strategy(4).describe() == bsr_strategy(4).describe()

    def half(step: int) -> float:
        return 0.5

    def third(step: int) -> float:
        return 1 / 3

    own = [prefix_workload(f).describe() for f in (half, third, lambda step: 0.5)]
    assert len(set(own)) == 3
    assert not any("0x" in text for text in own)
    assert (
        "0.25" in band_mf_strategy(4, workload=prefix_workload(constant_schedule(0.25))).describe()
    )


def test_only_a_buffered_strategy_without_a_schema_takes_the_schema_it_is_given():
    left_open, fixed = blt_strategy(2), blt_strategy(2, min_sep=7, max_participations=3)
    assert left_open.for_participation(7, 3) == fixed
    assert fixed.for_participation(9, None) is fixed
    assert bsr_strategy(4).for_participation(7, 3) == bsr_strategy(4)


def test_no_memory_is_needed_where_no_noise_is_correlated():
    assert lambda_cgd_strategy(0.0).recurrence(10) == Inputs((1.0,))
    assert identity_strategy().recurrence(10) == Inputs((1.0,))
    assert lambda_cgd_strategy(0.5).recurrence(10) == Inputs((1.0, -0.5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: band_mf_strategy(0), "bands must be >= 1"),
        (lambda: band_mf_strategy(2, 1.0), r"momentum must be in \[0, 1\)"),
        (lambda: band_mf_strategy(2, error="median"), 'error must be "mean" or "max"'),
        (lambda: band_mf_strategy(2, 0.9, workload=prefix_workload()), "not both"),
        (lambda: blt_strategy(0), "n_buffers must be >= 1"),
        (lambda: blt_strategy(11), "n_buffers must be at most 10"),
        (lambda: blt_strategy(2, min_sep=0), "min_sep must be >= 1"),
        (lambda: blt_strategy(2, max_participations=2), "needs min_sep"),
        (lambda: bsr_strategy(-1), "bands must be >= 1"),
        (lambda: bsr_strategy(2, decay=0.0), r"decay must be in \(0, 1\]"),
        (lambda: bisr_strategy(2, momentum=float("nan")), "momentum must be in"),
        (lambda: lambda_cgd_strategy(1.0), r"lam must be in \[0, 1\)"),
        (lambda: bsr_strategy(2).matrix(0), "n_steps must be >= 1"),
        (lambda: bsr_strategy(2).matrix(5).sensitivity(0), "min_sep must be >= 1"),
        (lambda: bsr_strategy(2).matrix(5).sensitivity(1, 0), "max_participations must be >= 1"),
        (
            lambda: prefix_workload(lambda step: -1.0).row(3),
            "finite numbers >= 0, got -1.0 at step 0",
        ),
        (
            lambda: band_mf_strategy(2, workload=prefix_workload(lambda step: 0.0)).matrix(9),
            "0 at all of the 9 steps",
        ),
        (lambda: StrategyMatrix(2, np.ones(3)), "1 to n_steps=2"),
        (lambda: StrategyMatrix(2, np.array([0.0, 1.0])), "the first not 0"),
        (lambda: StrategyMatrix(2, np.array([1.0, np.nan])), "must be finite"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: prefix_workload(0.1),
        lambda: band_mf_strategy(2, workload=np.ones(3)),
        lambda: bsr_strategy(2.0),
    ],
)
def test_wrong_kinds_of_arguments_are_named(call):
    with pytest.raises(TypeError, match="must be"):
        call()
