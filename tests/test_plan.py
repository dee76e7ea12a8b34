"""A plan refuses what it cannot keep, and its parts take the same numbers."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.dpftrl.noise import band_mf_strategy
from opake_lightning.dpsgd.sampling import poisson_indices, rank_share
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import sgd
from opake_lightning.plan import DPFTRL, DPSGD, NonPrivate
from opake_lightning.random import key

SIGMA = DPSGD(clipping_norm=0.5, noise_multiplier=2.0, key=key(7))
TARGET = DPSGD(clipping_norm=1.0, target_epsilon=3.0, target_delta=1e-5)


def resolve(plan: DPSGD, **changes: Any) -> Any:
    known = {"n_examples": 1000, "batch_size": 10, "planned_steps": 200, "spent": Ledger()}
    return plan.resolve(**{**known, **changes})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"clipping_norm": math.inf}, PrivacyError, "clipping_norm=inf bounds nothing"),
        ({"clipping_norm": 0.0}, ValueError, "clipping_norm must be a finite number > 0, got 0.0"),
        ({"clipping_norm": math.nan}, ValueError, "clipping_norm must be a finite number > 0"),
        ({"noise_multiplier": None}, PrivacyError, "give exactly one of noise_multiplier"),
        ({"target_epsilon": 3.0}, PrivacyError, "noise_multiplier=1.0, target_epsilon=3.0"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be a finite number >= 0"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be a finite number"),
        (
            {"noise_multiplier": None, "target_epsilon": 0.0},
            ValueError,
            "target_epsilon must be a finite number > 0, got 0.0",
        ),
        ({"target_delta": 0.0}, ValueError, r"target_delta must be in \(0, 1\), got 0.0"),
        ({"target_delta": 1.0}, ValueError, r"target_delta must be in \(0, 1\), got 1.0"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be >= 1, got 0"),
        ({"engine": "auto"}, TypeError, "engine='auto' is gone: one engine is exact"),
        ({"on_changed_plan": "go"}, ValueError, "on_changed_plan must be .* got 'go'"),
        ({"key": 7}, TypeError, r"key must be None or an RngKey \(random\.key\(7\).*, got a int"),
    ],
)
def test_a_plan_refuses_what_it_cannot_keep(fields, error, message):
    with pytest.raises(error, match=message):
        DPSGD(**{"clipping_norm": 1.0, "noise_multiplier": 1.0, **fields})


@pytest.mark.parametrize(
    ("plan", "known", "error", "message"),
    [
        (SIGMA, {"batch_size": 1001}, PrivacyError, r"batch_size=1001 .*\(1000 examples\)"),
        (SIGMA, {"n_examples": 0}, ValueError, "n_examples must be >= 1, got 0 .*dataset is empty"),
        (SIGMA, {"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        (
            TARGET,
            {"planned_steps": None},
            PrivacyError,
            "target_epsilon=3.0 needs a planned number",
        ),
        (TARGET, {"spent": Ledger().spend(GaussianEvent(0.3))}, PrivacyError, "1 steps have spent"),
    ],
)
def test_a_run_that_does_not_fit_its_plan_is_refused(plan, known, error, message):
    with pytest.raises(error, match=message):
        resolve(plan, **known)


def test_a_given_multiplier_needs_no_planned_end():
    mechanism = resolve(SIGMA, planned_steps=None)
    assert (mechanism.noise_multiplier, mechanism.planned_steps) == (2.0, None)
    assert mechanism.event == GaussianEvent(2.0, 0.01)


@pytest.mark.parametrize("spent", [Ledger(), Ledger().spend(GaussianEvent(1.0, 0.01), 500)])
def test_the_planned_run_with_what_was_spent_before_costs_the_target(spent):
    mechanism = resolve(TARGET, spent=spent)
    total = spent.spend(mechanism.event, 200).epsilon(1e-5)
    assert 0.99 * 3 < total <= 3
    assert mechanism.planned_steps == 200


def test_a_full_batch_is_a_rate_of_one():
    assert resolve(SIGMA, batch_size=1000).event == GaussianEvent(2.0, 1.0)


def test_the_draw_is_the_sampler_s_at_the_accounted_rate():
    mechanism = resolve(SIGMA)
    drawn: set[int] = set()
    rate = mechanism.event.sample_rate
    for step in range(2000):
        whole = poisson_indices(key(7), step, n_examples=1000, sample_rate=rate)
        assert mechanism.draw(key(7), step).tolist() == whole.tolist()
        drawn.update(whole.tolist())
    assert drawn == set(range(1000))  # of which 1000 e^-20 are never drawn on average
    whole = mechanism.draw(key(7), 3)
    part = mechanism.draw(key(7), 3, rank=1, world_size=2)
    assert np.array_equal(part, rank_share(whole, rank=1, world_size=2))


@pytest.mark.parametrize("microbatch", [None, 1])
def test_the_step_has_the_noise_and_the_divisor_that_are_accounted_for(microbatch):
    mechanism = resolve(replace(SIGMA, microbatch_size=microbatch))
    step = mechanism.step(lambda w, x: (0 * w[0] * x, x), sgd(lr=1.0), key(7))
    w = torch.zeros(50_000)
    released, _, state = step.release(w, torch.ones(3), step.init(w))
    stddev = 2.0 * 0.5 / 10  # σ C / expected batch
    assert released.noise_stddev == pytest.approx(stddev)
    measured = float(released.pytree.double().square().mean().sqrt())
    assert abs(measured - stddev) < 5 * stddev / math.sqrt(2 * len(w))
    assert state.step == 1


def test_the_clipping_norm_reaches_the_step():
    for bound in (0.5, 0.25):
        plan = replace(SIGMA, clipping_norm=bound, noise_multiplier=0.0)
        step = resolve(plan).step(lambda w, x: (x @ w, x), sgd(lr=1.0), key(7))
        w, _, _ = step(torch.zeros(2), torch.tensor([[3.0, 4.0]]), step.init(torch.zeros(2)))
        torch.testing.assert_close(w, -bound / 10 * torch.tensor([0.6, 0.8]))


# -- fingerprints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "known"),
    [
        (replace(SIGMA, clipping_norm=1.0), {}),
        (replace(SIGMA, noise_multiplier=1.0), {}),
        (replace(SIGMA, target_delta=1e-6), {}),
        (replace(SIGMA, key=key(8)), {}),
        (replace(SIGMA, key=None), {}),
        (SIGMA, {"n_examples": 1001}),
        (SIGMA, {"batch_size": 20}),
        (TARGET, {}),
    ],
)
def test_a_run_of_another_plan_has_another_fingerprint(plan, known):
    assert resolve(plan, **known).fingerprint() != resolve(SIGMA).fingerprint()


def test_what_changes_no_result_is_not_in_the_fingerprint():
    same = replace(SIGMA, microbatch_size=3, on_changed_plan="fork")
    assert resolve(same).fingerprint() == resolve(SIGMA).fingerprint()


def test_the_target_s_planned_steps_are_part_of_the_fingerprint():
    one, other = (resolve(TARGET, planned_steps=n).fingerprint() for n in (200, 300))
    assert {name for name in one if one[name] != other[name]} == {"planned_steps"}


def test_neither_fingerprint_nor_repr_holds_the_key():
    mechanism = resolve(SIGMA)
    text = json.dumps(mechanism.fingerprint()) + repr(mechanism) + repr(SIGMA)
    assert key(7).hex() not in text
    assert str(key(7).bits) not in text


def test_the_multiplier_of_a_checkpoint_replaces_the_calibrated_one():
    mechanism = resolve(SIGMA)
    other = mechanism.with_noise_multiplier(3.0)
    assert other.event == GaussianEvent(3.0, 0.01)
    assert other.fingerprint() == mechanism.fingerprint()
    with pytest.raises(FrozenInstanceError):
        SIGMA.clipping_norm = 2.0  # type: ignore[misc]


# -- without privacy ----------------------------------------------------------------------------


def test_a_run_without_privacy_takes_the_mean_of_the_batch_and_costs_everything():
    plan = NonPrivate()
    step = plan.step(lambda w, x: (x @ w, x), sgd(lr=1.0), key(7))
    w = torch.zeros(2)
    w, _, state = step(w, torch.tensor([[30.0, 40.0], [0.0, 2.0]]), step.init(w))
    assert w.tolist() == [-15.0, -21.0]  # neither clipped nor noised; divided by the two at hand
    assert state.step == 1
    assert Ledger().spend(plan.event).epsilon(1e-5) == math.inf
    assert plan.fingerprint() == {"plan": "NonPrivate"}
    assert not plan.private


# -- δ --------------------------------------------------------------------------------------------

PLANS = [DPSGD, partial(DPFTRL, strategy=band_mf_strategy(2))]


@pytest.mark.parametrize("make", PLANS)
def test_a_target_needs_its_delta(make):
    with pytest.raises(PrivacyError, match=r"target_epsilon=3.0 says nothing without target_delta"):
        make(clipping_norm=1.0, target_epsilon=3.0)
    assert make(clipping_norm=1.0, noise_multiplier=1.0).target_delta == 1e-5


@pytest.mark.parametrize("make", PLANS)
@pytest.mark.parametrize("given", [{}, {"target_delta": 1e-3}])
@pytest.mark.parametrize("cost", [{"noise_multiplier": 1.0}, {"target_epsilon": 3.0}])
def test_a_delta_that_is_not_below_one_example_is_refused(make, given, cost):
    """Also the one that nobody gave."""
    if "target_epsilon" in cost and not given:
        return
    plan = make(clipping_norm=1.0, **cost, **given)
    n = round(1 / plan.target_delta)
    how = {"batch_size": 10, "planned_steps": 4, "spent": Ledger()}
    with pytest.raises(PrivacyError, match=rf"target_delta={plan.target_delta:g} is not below 1 /"):
        plan.resolve(n_examples=n, **how)
    assert plan.resolve(n_examples=n - 1, **how).n_examples == n - 1
    meant = replace(plan, allow_large_delta=True)
    assert meant.resolve(n_examples=n, **how).n_examples == n


def test_allow_large_delta_is_yes_or_no():
    with pytest.raises(TypeError, match="allow_large_delta must be True or False, got 1"):
        DPSGD(clipping_norm=1.0, noise_multiplier=1.0, allow_large_delta=1)
