"""Mechanisms of DP-SGD: sampled once, then repeated."""

from __future__ import annotations

import math

import pytest

from opake_lightning.accounting import GaussianEvent, Process, calibrate
from opake_lightning.dpsgd import accounting as dpsgd_acc
from opake_lightning.errors import PrivacyError


def test_gaussian_is_one_step_on_everything():
    assert dpsgd_acc.gaussian(1.3) == Process(((GaussianEvent(1.3, 1.0), 1),))
    assert dpsgd_acc.gaussian(0.0).epsilon_at(1e-5) == math.inf


def test_poisson_makes_the_batch_rate_the_rate_of_each_step():
    run = dpsgd_acc.poisson(dpsgd_acc.gaussian(1.1), sample_rate=0.01, n_steps=1000)
    assert run == dpsgd_acc.poisson(dpsgd_acc.gaussian(1.1), 0.01) * 1000
    assert run.epsilon_at(1e-5) == pytest.approx(1.51536, rel=3e-4)


def test_poisson_of_poisson_is_refused():
    sampled = dpsgd_acc.poisson(dpsgd_acc.gaussian(1.1), 0.01)
    with pytest.raises(PrivacyError, match=r"sampled already, at rate 0\.01"):
        dpsgd_acc.poisson(sampled, 0.5)


@pytest.mark.parametrize("n", [0, 2, 8])
def test_poisson_of_a_composition_is_refused(n):
    with pytest.raises(PrivacyError, match=f"got a mechanism of {n}"):
        dpsgd_acc.poisson(dpsgd_acc.gaussian(1.0) * n, 0.5)
    with pytest.raises(PrivacyError, match="got a mechanism of 2"):
        dpsgd_acc.poisson(dpsgd_acc.gaussian(1.0) + dpsgd_acc.gaussian(2.0), 0.5)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="noise_multiplier"):
        dpsgd_acc.gaussian(-1.0)
    for rate in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="sample_rate"):
            dpsgd_acc.poisson(dpsgd_acc.gaussian(1.0), rate)
    with pytest.raises(ValueError, match="n_steps"):
        dpsgd_acc.poisson(dpsgd_acc.gaussian(1.0), 0.5, n_steps=-1)


def test_a_run_is_calibrated_as_a_whole():
    sigma = calibrate(
        lambda nm: dpsgd_acc.poisson(dpsgd_acc.gaussian(nm), 0.01, 1000),
        target_epsilon=3.0,
        target_delta=1e-5,
    )
    assert sigma == pytest.approx(0.81358, rel=1e-3)
