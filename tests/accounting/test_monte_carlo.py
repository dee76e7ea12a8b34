"""Bounds from samples: of the right loss, never below the truth, and not far above it."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from opake_lightning.accounting import (
    BallsInBins,
    BMinSep,
    GaussianEvent,
    Process,
    WholeRun,
    calibrate,
    monte_carlo,
)
from opake_lightning.accounting._columns import banded_blocks
from opake_lightning.errors import PrivacyError

REFERENCE = json.loads(
    (Path(__file__).parent.parent / "data" / "mf_accounting.json").read_text(encoding="utf-8")
)["monte_carlo"]
N = 400_000


def of(row):
    """The cost that a row of the reference values is about."""
    common = {"noise_multiplier": row["noise_multiplier"], "n_steps": row["n_steps"]}
    if "n_bins" not in row:
        return BMinSep(
            **common,
            coefficients=tuple(row["coefficients"]),
            min_sep=row["min_sep"],
            sample_rate=row["sample_rate"],
        )
    c = row.get("coefficients") or row["lambda"] ** np.arange(row["n_steps"])
    return BallsInBins(**common, coefficients=tuple(c), n_bins=row["n_bins"])


def estimate(losses, epsilon, n):
    gains = monte_carlo._gains(losses, epsilon)
    mean = gains.sum() / n
    return mean, math.sqrt(max((gains @ gains / n - mean**2) / n, 0.0))


@pytest.mark.parametrize("name", REFERENCE)
def test_delta_in_both_directions_is_that_of_another_implementation(name):
    row = REFERENCE[name]
    losses = of(row).losses(N)
    for epsilon, directions in row["delta_at"].items():
        for ours, (mean, error) in zip(losses, directions.values(), strict=True):
            got, our_error = estimate(ours, float(epsilon), N)
            assert abs(got - mean) <= 5 * math.hypot(error, our_error)


@pytest.mark.parametrize("delta", ["0.01", "0.001", "0.0001"])
@pytest.mark.parametrize("name", REFERENCE)
def test_epsilon_is_a_little_above_the_estimate(name, delta):
    row = REFERENCE[name]
    estimated = row["epsilon_at"][delta]
    epsilon = of(row).epsilon_at(float(delta))
    assert estimated <= epsilon <= 1.06 * estimated
    if "cyclic_poisson_epsilon_at" in row:
        assert epsilon < 0.9 * row["cyclic_poisson_epsilon_at"][delta]


# ------------------------------------------------------------------------------------------
# Against every pattern of participation written out.


def patterns(n, b, p0):
    """Every pattern of participation with its probability, by following the waiting time."""
    p = p0 / (1 - p0 * (b - 1))
    found = {}
    for steps in itertools.product([0, 1], repeat=n):
        chances = np.full(b, p0)  # by how many steps there are still to wait
        chances[0] = 1 - (b - 1) * p0
        for used in steps:
            free = chances[0]
            chances = np.append(chances[1:], 0.0)
            if used:
                chances = np.zeros(b)
                chances[b - 1] = free * p
            else:
                chances[0] += free * (1 - p)
        if chances.sum() > 0:
            found[steps] = chances.sum()
    return found


@pytest.mark.parametrize(("n", "b", "p0"), [(8, 3, 0.2), (7, 1, 0.3), (5, 2, 0.5), (3, 5, 0.1)])
def test_the_recursion_is_the_sum_over_all_patterns(n, b, p0):
    every = patterns(n, b, p0)
    assert sum(every.values()) == pytest.approx(1, abs=1e-12)
    logs = np.random.default_rng(0).normal(0, 3, (n, 4))
    logs[:, 3] *= 300  # where exp overflows
    known = np.array(list(every)) @ logs + np.log(list(every.values()))[:, None]
    p = p0 / (1 - p0 * (b - 1))
    got = monte_carlo._suffixes(logs, min(p, 1.0), p0, b)
    assert got == pytest.approx(np.logaddexp.reduce(known), rel=1e-12)


@pytest.mark.parametrize(("n", "b", "p0"), [(6, 3, 0.2), (5, 1, 0.3), (5, 2, 0.5), (3, 5, 0.1)])
def test_every_pattern_is_drawn_as_often_as_it_should(n, b, p0):
    cost = BMinSep(noise_multiplier=1.0, coefficients=(1.0,), n_steps=n, min_sep=b, sample_rate=p0)
    drawn = cost._patterns(np.random.default_rng(1), N, min(p0 / (1 - p0 * (b - 1)), 1.0))
    codes, counts = np.unique(drawn.T @ 2 ** np.arange(n), return_counts=True)
    got = dict(zip(codes.astype(int), counts / N, strict=True))
    for steps, chance in patterns(n, b, p0).items():
        error = math.sqrt(chance * (1 - chance) / N)
        assert got.pop(int(np.array(steps) @ 2 ** np.arange(n)), 0) == pytest.approx(
            chance, abs=5 * error + 1e-9
        )
    assert not got


COSTS = {
    "b_min_sep": BMinSep(
        noise_multiplier=1.3, coefficients=(1, 0.6, 0.3), n_steps=40, min_sep=4, sample_rate=0.1
    ),
    "b_min_sep_normalized": BMinSep(
        noise_multiplier=1.3,
        coefficients=(2, 1, 1, 0.5),
        normalized=True,
        n_steps=37,
        min_sep=4,
        sample_rate=0.25,
    ),
    "short": BMinSep(
        noise_multiplier=0.8, coefficients=(1, 0.6, 0.3), n_steps=7, min_sep=3, sample_rate=0.2
    ),
    "short_normalized": BMinSep(
        noise_multiplier=1.0,
        coefficients=(1, 2, 2),
        normalized=True,
        n_steps=6,
        min_sep=3,
        sample_rate=0.15,
    ),
    "bins": BallsInBins(
        noise_multiplier=2.0, coefficients=(1, 0.8, 0.5, 0.1), n_steps=23, n_bins=7
    ),
    "bins_normalized": BallsInBins(
        noise_multiplier=1.5, coefficients=(1, 1, 1), normalized=True, n_steps=9, n_bins=12
    ),
}


def dense(cost):
    lag = np.subtract.outer(np.arange(cost.n_steps), np.arange(cost.n_steps))
    padded = np.zeros(cost.n_steps)
    padded[: len(cost.coefficients)] = cost.coefficients
    matrix = np.where(lag >= 0, padded[np.abs(lag)], 0)
    return matrix / np.linalg.norm(matrix, axis=0) if cost.normalized else matrix


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("bands", [1, 3, 40])
def test_blocks_of_columns_are_the_dense_matrix(bands, normalized):
    coefficients = tuple(0.9**lag for lag in range(bands))
    cost = BMinSep(
        noise_multiplier=1.0,
        coefficients=coefficients,
        normalized=normalized,
        n_steps=100,
        min_sep=bands,
        sample_rate=0.01,
    )
    matrix = dense(cost)
    products = matrix.T @ matrix
    blocks = banded_blocks(coefficients, normalized, 100)
    assert len(blocks) > 2
    for block in blocks:
        columns, gram = np.zeros((100, 100)), np.zeros((100, 100))
        columns[block.reach, block.steps] = block.columns
        gram[block.steps, block.around] = block.gram
        np.testing.assert_allclose(columns[:, block.steps], matrix[:, block.steps], atol=1e-15)
        np.testing.assert_allclose(gram[block.steps], products[block.steps], atol=1e-13)
    assert [i for block in blocks for i in range(100)[block.steps]] == [*range(100)]


# e^L is a density: a shift that is wrong, or drawn wrongly, shows in its mean.
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_the_likelihood_ratio_integrates_to_one(cost):
    remove, add = cost.draw(np.random.default_rng(3), 100_000)
    for values in (np.exp(-remove), np.exp(-add)):
        assert values.mean() == pytest.approx(1, abs=5 * values.std() / math.sqrt(100_000))


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_the_unamplified_cost_is_that_of_the_dense_matrix(cost):
    matrix = dense(cost)
    step = cost.min_sep if isinstance(cost, BMinSep) else cost.n_bins
    worst = max(np.linalg.norm(matrix[:, i::step].sum(axis=1)) for i in range(step))
    ((event, n),) = cost.unamplified.segments
    assert n == 1
    assert event.noise_multiplier == pytest.approx(cost.noise_multiplier / worst, rel=1e-12)


@pytest.mark.parametrize("name", ["bins", "bins_normalized", "short", "short_normalized"])
def test_both_directions_are_those_of_the_dense_mixture(name):
    cost = COSTS[name]
    sigma, matrix = cost.noise_multiplier, dense(cost)
    if isinstance(cost, BallsInBins):
        used = np.stack([np.arange(cost.n_steps) % cost.n_bins == i for i in range(cost.n_bins)])
        chances = np.full(cost.n_bins, 1 / cost.n_bins)
    else:
        every = patterns(cost.n_steps, cost.min_sep, cost.sample_rate)
        used, chances = np.array(list(every)), np.array(list(every.values()))
    means = used @ matrix.T
    rng = np.random.default_rng(4)
    noise = sigma * rng.standard_normal((N, cost.n_steps))
    drawn = rng.choice(len(means), size=N, p=chances / chances.sum())

    def loss(x):
        logs = (x @ means.T - (means**2).sum(axis=1) / 2) / sigma**2 + np.log(chances)
        return np.logaddexp.reduce(logs, axis=1)

    ours = cost.draw(np.random.default_rng(5), N)
    for got, known in zip(ours, (loss(noise + means[drawn]), -loss(noise)), strict=True):
        for epsilon in (0.0, 0.3, 1.0):
            (a, error), (c, another) = (estimate(v, epsilon, N) for v in (got, known))
            assert abs(a - c) <= 5 * math.hypot(error, another)


# ------------------------------------------------------------------------------------------
# Where the truth is known.


def gaussian(sigma, rate=1.0, n=1):
    return Process(((GaussianEvent(sigma, rate), n),))


def identity(kind, **given):
    return kind(coefficients=(1.0,), **given)


# What another accounting computes exactly, or as good as.
KNOWN = {
    "separation 1 is Poisson": (
        identity(BMinSep, noise_multiplier=1.0, n_steps=50, min_sep=1, sample_rate=0.1),
        gaussian(1.0, 0.1, 50),
    ),
    "one step": (
        identity(BMinSep, noise_multiplier=0.7, n_steps=1, min_sep=4, sample_rate=0.2),
        gaussian(0.7, 0.2),
    ),
    "one step at the largest rate": (
        identity(BMinSep, noise_multiplier=0.5, n_steps=1, min_sep=3, sample_rate=1 / 3),
        gaussian(0.5, 1 / 3),
    ),
    "one step of many bins": (
        identity(BallsInBins, noise_multiplier=0.8, n_steps=1, n_bins=5),
        gaussian(0.8, 0.2),
    ),
}


@pytest.mark.parametrize(("cost", "truth"), KNOWN.values(), ids=KNOWN)
def test_known_cases_are_bounded_and_met(cost, truth):
    for delta in (1e-2, 1e-3, 1e-4):
        true = truth.epsilon_at(delta) * (1 - 3e-4)  # what the truth may itself be too high by
        assert true <= cost.epsilon_at(delta) <= 1.09 * true
    assert truth.delta_at(1.0) * 0.999 <= cost.delta_at(1.0) <= 1.1 * truth.delta_at(1.0)
    # The larger of both directions; the samples are of the right loss, not only above it.
    (mean, error) = max(estimate(losses, 1.0, N) for losses in cost.losses(N))
    assert mean == pytest.approx(truth.delta_at(1.0), abs=5 * error)


@pytest.mark.parametrize(
    ("cost", "truth"),
    [
        (identity(BallsInBins, noise_multiplier=3.0, n_steps=9, n_bins=1), gaussian(1.0)),
        (
            identity(BMinSep, noise_multiplier=3.0, n_steps=9, min_sep=1, sample_rate=1.0),
            gaussian(1.0),
        ),
        (
            BallsInBins(noise_multiplier=5.0, coefficients=(1.0, 0.5), n_steps=8, n_bins=1),
            # Columns 0 to 6 add (1, .5), the last (1,): (1, 1.5, 1.5, ...), squares 1 + 7 * 2.25.
            gaussian(5 / math.sqrt(16.75)),
        ),
    ],
)
def test_without_chance_it_is_the_exact_gaussian(cost, truth):
    assert cost.epsilon_at(1e-5) == pytest.approx(truth.epsilon_at(1e-5), rel=1e-9)
    assert cost.delta_at(1.0) == pytest.approx(truth.delta_at(1.0), rel=1e-9)


@pytest.mark.slow
# With 0.8 confidence, at most a fifth of all seeds may be below the truth. The direction that
# matters gets half of that, so it is a tenth. Of the estimates themselves, half are.
def test_the_bound_is_below_the_truth_as_seldom_as_it_says():
    truth = gaussian(1.0, 0.1, 3)
    delta, n, seeds = 0.02, 2000, 300
    true = truth.epsilon_at(delta)
    below = {"bound": 0, "estimate": 0}
    for seed in range(seeds):
        cost = identity(
            BMinSep,
            noise_multiplier=1.0,
            n_steps=3,
            min_sep=1,
            sample_rate=0.1,
            confidence=0.8,
            n_samples=n,
            seed=seed,
        )
        below["bound"] += cost.epsilon_at(delta) < true
        below["estimate"] += max(estimate(side, true, n)[0] for side in cost.losses(n)) < delta
    assert below["bound"] / seeds <= 0.1 + 5 * math.sqrt(0.1 * 0.9 / seeds)
    assert 0.3 < below["estimate"] / seeds < 0.7


@pytest.mark.parametrize("n", [20, 300, 4000])
@pytest.mark.parametrize("mean", [0.003, 0.05, 0.4])
def test_a_true_mean_is_refuted_with_at_most_the_chance_allowed(n, mean):
    alpha = 0.05
    refuted = [k for k in range(n + 1) if monte_carlo._refuted(mean, np.ones(k), n, alpha)]
    assert binom.pmf(refuted, n, mean).sum() <= alpha
    if refuted:  # if few are refuted, so are fewer
        assert refuted == list(range(max(refuted) + 1))


# Within a few standard errors: the average over stakes gives little away.
def test_the_bound_on_a_mean_is_tight_with_many_samples():
    rng = np.random.default_rng(0)
    gains = rng.random(30_000) < 0.3
    bound = min(
        m
        for m in np.linspace(0.28, 0.4, 241)
        if monte_carlo._refuted(m, np.ones(gains.sum()), len(gains), 5e-4)
    )
    assert 0.3 < bound < 0.3 + 6 * math.sqrt(0.21 / 30_000)


# ------------------------------------------------------------------------------------------
# One answer, cheaply, or a refusal.


def test_the_answer_depends_on_nothing_but_the_numbers(monkeypatch):
    cost = COSTS["bins"]
    first = cost.epsilon_at(1e-3)
    monte_carlo._epsilon.cache_clear()
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert cost.epsilon_at(1e-3) == first
    assert first == pytest.approx(cost.rough_epsilon(1e-3), rel=0.2)


def test_more_noise_and_more_delta_cost_less():
    def cost(sigma):
        return BallsInBins(noise_multiplier=sigma, coefficients=(1, 0.5), n_steps=40, n_bins=10)

    by_noise = [cost(sigma).epsilon_at(1e-3) for sigma in (0.8, 1.0, 1.01, 1.5, 3.0)]
    by_delta = [cost(1.0).epsilon_at(delta) for delta in (1e-4, 1e-3, 1e-2, 0.1, 0.9)]
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_delta == sorted(by_delta, reverse=True)
    assert by_delta[-1] == 0.0
    assert cost(0.0).epsilon_at(1e-3) == math.inf
    assert cost(0.0).delta_at(1.0) == 1.0


def test_tiny_noise_costs_no_more_than_without_amplification():
    cost = BMinSep(
        noise_multiplier=0.02, coefficients=(1, 0.5), n_steps=8, min_sep=2, sample_rate=0.2
    )
    assert 1000 < cost.epsilon_at(1e-2) <= cost.unamplified.epsilon_at(1e-2)


@pytest.mark.parametrize("name", ["bins", "b_min_sep"])
def test_noise_is_calibrated_by_samples(name):
    def run(sigma):
        given = COSTS[name]
        values = {f: getattr(given, f) for f in given.__dataclass_fields__}
        return WholeRun(type(given)(**values | {"noise_multiplier": sigma}), given.n_steps)

    sigma = calibrate(run, target_epsilon=2.0, target_delta=1e-3)
    assert 2.0 * 0.999 < run(sigma).epsilon_at(1e-3) <= 2.0


def test_too_few_samples_are_refused_with_the_number_needed():
    cost = identity(BallsInBins, noise_multiplier=1.0, n_steps=4, n_bins=2, n_samples=1000)
    with pytest.raises(PrivacyError, match=r"delta=1e-05 is too small for n_samples=1000.*=829"):
        cost.epsilon_at(1e-5)
    with pytest.raises(PrivacyError, match="n_samples"):
        identity(BallsInBins, noise_multiplier=1.0, n_steps=4, n_bins=2).epsilon_at(1e-12)


def test_what_no_proof_covers_is_refused():
    with pytest.raises(PrivacyError, match=r"-0\.5.*without negative"):
        BallsInBins(noise_multiplier=1.0, coefficients=(1, -0.5), n_steps=4, n_bins=2)
    with pytest.raises(PrivacyError, match="3 diagonals, but min_sep=2"):
        BMinSep(noise_multiplier=1.0, coefficients=(1, 1, 1), n_steps=9, min_sep=2, sample_rate=0.1)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (BallsInBins, {"noise_multiplier": -1.0}),
        (BallsInBins, {"noise_multiplier": math.nan}),
        (BallsInBins, {"coefficients": ()}),
        (BallsInBins, {"coefficients": (0.0, 1.0)}),
        (BallsInBins, {"coefficients": (1.0, math.inf)}),
        (BallsInBins, {"n_steps": 0}),
        (BallsInBins, {"n_bins": 0}),
        (BallsInBins, {"confidence": 1.0}),
        (BallsInBins, {"n_samples": 0}),
        (BallsInBins, {"seed": -1}),
        (BallsInBins, {"normalized": 1}),
        (BMinSep, {"min_sep": 0}),
        (BMinSep, {"sample_rate": 0.0}),
        (BMinSep, {"sample_rate": 0.26}),
        (BMinSep, {"sample_rate": math.nan}),
    ],
)
def test_arguments_are_checked(kind, wrong):
    good = {"noise_multiplier": 1.0, "coefficients": (1.0,), "n_steps": 8}
    good |= {"n_bins": 4} if kind is BallsInBins else {"min_sep": 4, "sample_rate": 0.1}
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        kind(**good | wrong)


def test_queries_are_checked():
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="delta"):
            COSTS["bins"].epsilon_at(delta)
    with pytest.raises(ValueError, match="epsilon"):
        COSTS["bins"].delta_at(-1.0)


TINY_NOISE = (
    BallsInBins(noise_multiplier=1e-155, coefficients=(1.0,), n_steps=4, n_bins=2),
    BMinSep(noise_multiplier=1e-155, coefficients=(1.0,), n_steps=4, min_sep=2, sample_rate=0.25),
)


@pytest.mark.parametrize("cost", TINY_NOISE, ids=["bins", "b_min_sep"])
def test_noise_too_small_for_floating_point_costs_everything(cost):
    assert (cost.delta_at(1.0), cost.epsilon_at(1e-3)) == (1.0, math.inf)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("cost", TINY_NOISE, ids=["bins", "b_min_sep"])
def test_losses_that_are_no_numbers_are_as_bad_as_can_be(cost):
    assert cost.losses(64)[0].tolist() == [math.inf] * 64
