"""Noise that meets the target from below, at any scale, in a few evaluations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from dp_accounting.pld import privacy_loss_distribution

from opake_lightning.accounting import GaussianEvent, Process, calibrate, process
from opake_lightning.errors import PrivacyError

REFERENCE = json.loads(
    (Path(__file__).parent.parent / "data" / "accounting.json").read_text(encoding="utf-8")
)


def steps(noise_multiplier: float, sample_rate: float = 1.0, n: int = 1) -> Process:
    return Process(((GaussianEvent(noise_multiplier, sample_rate), n),))


@pytest.mark.parametrize(("key", "row"), REFERENCE["gaussian_calibrated_sigma"].items())
def test_gaussian_noise_is_never_below_the_exact_one(key, row):
    target = {k: float(v) for k, v in (part.split("=") for part in key.split(","))}
    sigma = calibrate(steps, target_epsilon=target["eps"], target_delta=target["delta"])
    assert row["sigma"] * (1 - 1e-12) <= sigma <= row["sigma"] * (1 + 1e-3)


@pytest.mark.parametrize("row", REFERENCE["calibrated_sigma"], ids=str)
def test_sampled_noise_is_never_below_the_plds(row):
    sigma = calibrate(
        lambda sigma: steps(sigma, row["q"], row["T"]),
        target_epsilon=row["eps"],
        target_delta=row["delta"],
    )
    assert row["sigma_pld"] * (1 - 1e-9) <= sigma <= row["sigma_pld"] * (1 + 1e-3)


# Another grid, built by the library alone: below the target, or the noise is too little.
def test_the_result_meets_the_target_by_another_accountant():
    sigma = calibrate(lambda s: steps(s, 0.01, 1000), target_epsilon=3.0, target_delta=1e-5)
    pld = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=0.01, value_discretization_interval=1e-4
    ).self_compose(1000)
    assert 3.0 * 0.999 < pld.get_epsilon_for_delta(1e-5) <= 3.0


@pytest.mark.parametrize(
    ("rate", "n", "epsilon", "delta", "sigma"),
    [
        (0.01, 1000, 0.01, 1e-5, 77.13),
        (0.01, 1000, 49.0, 1e-5, 0.33551),
        (0.01, 1000, 57.0, 1e-5, 0.31996),
        (1.0, 1, 4.3772, 1e-5, 1.0),
        (0.01, 1000, 1.0, 0.5, 0.44974),
        (1.0, 500, 1.0, 1e-6, math.sqrt(500) * 4.224678889),
        (0.01, 1000, 500.0, 1e-5, 0.1469),
    ],
)
def test_extreme_targets(rate, n, epsilon, delta, sigma):
    got = calibrate(lambda s: steps(s, rate, n), target_epsilon=epsilon, target_delta=delta)
    assert got == pytest.approx(sigma, rel=1e-3)
    assert 0.999 * epsilon < steps(got, rate, n).epsilon_at(delta) <= epsilon


# A search that creeps along one side of the root: right in the end, after a minute.
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 57.0])
def test_few_exact_evaluations_are_needed(epsilon, monkeypatch):
    exact = []
    epsilon_at = process._epsilon.__wrapped__

    def counted(totals, delta, coarser):
        exact.append(coarser == 1)
        return epsilon_at(totals, delta, coarser)

    monkeypatch.setattr(process, "_epsilon", counted)
    calibrate(lambda s: steps(s, 0.01, 1000), target_epsilon=epsilon, target_delta=1e-5)
    assert sum(exact) <= 4
    assert len(exact) <= 14


def test_what_was_spent_before_counts():
    past = steps(1.0, 0.01, 1000)
    sigma = calibrate(lambda s: past + steps(s, 0.01, 1000), target_epsilon=2.5, target_delta=1e-5)
    assert 0.999 * 2.5 < (past + steps(sigma, 0.01, 1000)).epsilon_at(1e-5) <= 2.5
    alone = calibrate(lambda s: steps(s, 0.01, 2000), target_epsilon=2.5, target_delta=1e-5)
    assert sigma > alone > 1.0


# False position alone never gets there: the curve is flat on one side.
def test_a_history_that_leaves_almost_nothing():
    past = steps(1.0, 0.01, 1000)
    run = lambda s: past + steps(s, 0.01, 1000)  # noqa: E731
    sigma = calibrate(run, target_epsilon=1.84, target_delta=1e-5)
    assert 0.999 * 1.84 < run(sigma).epsilon_at(1e-5) <= 1.84


def test_a_hair_above_the_target_is_above_it():
    target = steps(1.0).epsilon_at(1e-5) * (1 - 1e-9)
    assert calibrate(steps, target_epsilon=target, target_delta=1e-5) > 1.0


def test_a_history_that_costs_more_than_the_target_is_refused():
    past = steps(1.0, 0.01, 1000)
    with pytest.raises(PrivacyError, match=r"out of reach.*fewer steps"):
        calibrate(lambda s: past + steps(s, 0.01, 9), target_epsilon=1.0, target_delta=1e-5)
    with pytest.raises(PrivacyError, match="out of reach"):
        calibrate(lambda s: steps(0.0) + steps(s), target_epsilon=1.0, target_delta=1e-5)


def test_a_target_that_needs_no_noise_is_refused():
    # Ten draws at 1 % hit an example less often than delta allows to publish it.
    with pytest.raises(PrivacyError, match=r"asks for no noise.*target_delta"):
        calibrate(lambda s: steps(s, 0.01, 10), target_epsilon=1.0, target_delta=0.5)


def test_a_process_that_jumps_over_the_target_is_refused():
    with pytest.raises(PrivacyError, match="continuously"):
        calibrate(lambda s: steps(1.0 if s < 2 else 9.0), target_epsilon=1.0, target_delta=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_epsilon": 0.0},
        {"target_epsilon": math.nan},
        {"target_delta": 0.0},
        {"target_delta": math.nan},
        {"tolerance": 0.0},
        {"tolerance": 0.5},
    ],
)
def test_arguments_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        calibrate(steps, **({"target_epsilon": 1.0, "target_delta": 1e-5} | wrong))
