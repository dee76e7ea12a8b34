"""What a run of correlated noise costs, by the steps in which one example takes part."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from opake_lightning.accounting import (
    BallsInBins,
    BMinSep,
    GaussianEvent,
    Ledger,
    Process,
    WholeRun,
    calibrate,
)
from opake_lightning.dpftrl import accounting as dpftrl_acc
from opake_lightning.dpftrl.noise import (
    StrategyMatrix,
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.dpsgd import accounting as dpsgd_acc
from opake_lightning.errors import PrivacyError

REFERENCE = json.loads(
    (Path(__file__).parent.parent / "data" / "mf_accounting.json").read_text(encoding="utf-8")
)


def two_bands(nm=1.0):
    """A strategy with coefficients (1, 0.5), which is the square root of prefix sums cut short."""
    return dpftrl_acc.mf_gaussian(nm, bsr_strategy(2))


class Custom:
    """A strategy as a user may write one."""

    def __init__(self, *coefficients):
        self.coefficients = np.array(coefficients)
        self.bands = len(coefficients)

    def matrix(self, n_steps):
        return StrategyMatrix(n_steps, self.coefficients)


def multiplier(run):
    ((event, n),) = run.cost.segments
    assert n == 1
    assert event.sample_rate == 1
    return event.noise_multiplier


@pytest.mark.parametrize("row", REFERENCE["cyclic_poisson"], ids=str)
def test_cyclic_poisson_is_never_below_the_reference_and_close(row):
    strategy = bsr_strategy(row["bands"], normalized=True)
    run = dpftrl_acc.poisson(
        dpftrl_acc.mf_gaussian(row["noise_multiplier"], strategy),
        sample_rate=row["group_sampling_prob"],
        n_steps=row["n_steps"],
    )
    # The reference is a bound itself, on a fixed grid.
    within = 1e-9 if row["exact"] else 3e-4
    epsilon = run.epsilon_at(row["delta"])
    assert row["epsilon"] * (1 - within) <= epsilon <= row["epsilon"] * (1 + 1e-3)


def test_the_call_of_the_documents():
    strategy = band_mf_strategy(bands=8, momentum=0.9)
    q, n = 0.08, 400

    def process(nm):
        mechanism = dpftrl_acc.mf_gaussian(nm, strategy)
        return dpftrl_acc.poisson(mechanism, sample_rate=q, n_steps=n)

    nm = calibrate(process, target_epsilon=3.0, target_delta=1e-5)
    assert 0.999 * 3.0 < process(nm).epsilon_at(1e-5) <= 3.0
    assert process(nm).n_steps == 400


@pytest.mark.parametrize(
    ("mechanism", "schema", "sensitivity"),
    [
        # 0 and 4: (1, .5, 0, 0, 1, .5, 0, 0).
        (two_bands(), {"n_steps": 8, "min_sep": 4}, math.sqrt(2.5)),
        (two_bands(), {"n_steps": 8, "min_sep": 4, "max_participations": 1}, math.sqrt(1.25)),
        # Every step: (1, 1.5, 1.5, 1.5).
        (two_bands(), {"n_steps": 4, "min_sep": 1}, math.sqrt(7.75)),
        (
            dpftrl_acc.mf_gaussian(1.0, identity_strategy()),
            {"n_steps": 81, "min_sep": 9},
            3.0,
        ),
        (
            dpftrl_acc.mf_gaussian(1.0, lambda_cgd_strategy(0.9)),
            {"n_steps": 1000, "min_sep": 100},
            7.25493593,
        ),
    ],
)
def test_unamplified_counts_every_participation(mechanism, schema, sensitivity):
    run = dpftrl_acc.unamplified(mechanism, **schema)
    assert multiplier(run) == pytest.approx(1 / sensitivity, rel=1e-8)
    assert run.n_steps == schema["n_steps"]


def test_nine_participations_of_independent_noise():
    run = dpftrl_acc.unamplified(
        dpftrl_acc.mf_gaussian(9.0, identity_strategy()), n_steps=90, min_sep=10
    )
    assert run.epsilon_at(1e-5) == pytest.approx(1.2711, abs=5e-5)


def test_independent_noise_on_one_group_is_dpsgd():
    run = dpftrl_acc.poisson(dpftrl_acc.mf_gaussian(1.1, identity_strategy()), 0.01, 1000)
    assert run.cost == dpsgd_acc.poisson(dpsgd_acc.gaussian(1.1), 0.01, 1000)


# Columns (1, .5) have norm sqrt(1.25), and seven steps are four rounds of two groups.
def test_cyclic_poisson_counts_rounds_and_column_norms():
    run = dpftrl_acc.poisson(two_bands(nm=2.0), 0.3, 7)
    assert run.cost == Process(((GaussianEvent(2 / math.sqrt(1.25), 0.3), 4),))
    wider = dpftrl_acc.poisson(two_bands(nm=2.0), 0.3, 7, n_groups=3)
    assert wider.cost == Process(((GaussianEvent(2 / math.sqrt(1.25), 0.3), 3),))


def test_fewer_groups_than_bands_are_refused():
    mechanism = dpftrl_acc.mf_gaussian(1.0, bsr_strategy(4))
    with pytest.raises(PrivacyError, match="n_groups=3 is less than the 4 bands"):
        dpftrl_acc.poisson(mechanism, 0.1, 100, n_groups=3)
    # A run of one step has one band, whatever the strategy.
    assert dpftrl_acc.poisson(mechanism, 0.1, 1, n_groups=1).n_steps == 1


@pytest.mark.parametrize(
    "strategy", [blt_strategy(2), bisr_strategy(4), lambda_cgd_strategy(0.9)], ids=lambda s: s.name
)
def test_what_is_not_banded_is_not_amplified_by_poisson_sampling(strategy):
    mechanism = dpftrl_acc.mf_gaussian(1.0, strategy)
    with pytest.raises(PrivacyError, match=rf"{strategy.name}.*not one.*balls_in_bins"):
        dpftrl_acc.poisson(mechanism, 0.1, 100)
    with pytest.raises(PrivacyError, match=rf"{strategy.name}.*not one.*unamplified"):
        dpftrl_acc.b_min_sep(mechanism, sample_rate=0.01, min_sep=10, n_steps=100)


def test_sampled_costs_have_the_numbers_of_the_strategy():
    normalized = dpftrl_acc.mf_gaussian(1.5, bsr_strategy(2, normalized=True))
    run = dpftrl_acc.b_min_sep(
        normalized, sample_rate=0.1, min_sep=4, n_steps=30, confidence=0.9, n_samples=1000
    )
    assert run.n_steps == 30
    assert run.cost == BMinSep(
        noise_multiplier=1.5,
        coefficients=(1.0, 0.5),
        normalized=True,
        n_steps=30,
        min_sep=4,
        sample_rate=0.1,
        confidence=0.9,
        n_samples=1000,
    )
    run = dpftrl_acc.balls_in_bins(two_bands(1.5), n_bins=3, n_steps=5, n_samples=1000)
    assert run.cost == BallsInBins(
        noise_multiplier=1.5, coefficients=(1.0, 0.5), n_steps=5, n_bins=3, n_samples=1000
    )


# The whole way from a strategy that is not banded.
def test_lambda_cgd_in_bins_is_the_reference():
    row = REFERENCE["monte_carlo"]["lambda_cgd_in_bins"]
    run = dpftrl_acc.balls_in_bins(
        dpftrl_acc.mf_gaussian(row["noise_multiplier"], lambda_cgd_strategy(row["lambda"])),
        n_bins=row["n_bins"],
        n_steps=row["n_steps"],
    )
    assert row["epsilon_at"]["0.001"] <= run.epsilon_at(1e-3) <= 1.06 * row["epsilon_at"]["0.001"]


def test_negative_coefficients_are_refused_where_columns_are_mixed():
    mechanism = dpftrl_acc.mf_gaussian(1.0, Custom(1.0, -0.5))
    with pytest.raises(PrivacyError, match="without negative"):
        dpftrl_acc.balls_in_bins(mechanism, n_bins=4, n_steps=8)
    assert dpftrl_acc.unamplified(mechanism, n_steps=8, min_sep=4).epsilon_at(1e-5) > 0


USES = {
    "unamplified": lambda m: dpftrl_acc.unamplified(m, n_steps=4, min_sep=2),
    "poisson": lambda m: dpftrl_acc.poisson(m, 0.5, 4),
    "b_min_sep": lambda m: dpftrl_acc.b_min_sep(m, sample_rate=0.1, min_sep=2, n_steps=4),
    "balls_in_bins": lambda m: dpftrl_acc.balls_in_bins(m, n_bins=2, n_steps=4),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nothing_is_amplified_twice(use):
    runs = [first(two_bands()) for first in USES.values()]
    for spent in (*runs, dpsgd_acc.gaussian(1.0), dpsgd_acc.poisson(dpsgd_acc.gaussian(1.0), 0.5)):
        with pytest.raises(PrivacyError, match="amplification counts once"):
            use(spent)
    with pytest.raises(TypeError, match="mf_gaussian"):
        use(1.0)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_run_is_whole(use):
    run = use(two_bands())
    assert isinstance(run, WholeRun)
    assert Ledger().spend(run).epsilon(1e-2) == run.epsilon_at(1e-2)
    with pytest.raises(PrivacyError, match="one release"):
        run * 2
    with pytest.raises(PrivacyError, match="declared 4 steps"):
        Ledger().spend(run, 5)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_noise_is_no_privacy(use):
    assert use(two_bands(0.0)).epsilon_at(1e-2) == math.inf


def test_scaling_the_matrix_changes_nothing():
    # Noise is sigma C^-1 z, so C and 3 C with three times the noise are one mechanism.
    for use in USES.values():
        scaled = use(dpftrl_acc.mf_gaussian(3.0, Custom(3.0, 1.5)))
        assert scaled.epsilon_at(1e-3) == pytest.approx(use(two_bands()).epsilon_at(1e-3), rel=1e-6)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="noise_multiplier"):
        two_bands(-1.0)
    with pytest.raises(TypeError, match=r"strategy.*band_mf_strategy\(8\), got 3"):
        dpftrl_acc.mf_gaussian(1.0, 3)
    for rate in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="sample_rate"):
            dpftrl_acc.poisson(two_bands(), rate, 10)
    with pytest.raises(ValueError, match="n_steps"):
        dpftrl_acc.poisson(two_bands(), 0.5, 0)
    with pytest.raises(ValueError, match="min_sep"):
        dpftrl_acc.unamplified(two_bands(), n_steps=4, min_sep=0)
    with pytest.raises(ValueError, match="n_bins"):
        dpftrl_acc.balls_in_bins(two_bands(), n_bins=0, n_steps=4)
    with pytest.raises(ValueError, match="more than 1 / min_sep"):
        dpftrl_acc.b_min_sep(two_bands(), sample_rate=0.3, min_sep=4, n_steps=9)
