"""A plan with correlated noise: noise, sampling and accounting are of one run, or refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.dpftrl import accounting
from opake_lightning.dpftrl.noise import (
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.dpftrl.sampling import (
    b_min_sep_indices,
    balls_in_bins_indices,
    cyclic_poisson_indices,
    fixed_order_indices,
)
from opake_lightning.dpsgd.clipping import adaptive, auto, per_group
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.plan import DPFTRL, DPSGD
from opake_lightning.random import key
from opake_lightning.scheduling import linear_schedule
from opake_lightning.types import NoisedPytree, SecondMomentNoiseOutput

BAND, LAMBDA, BLT = band_mf_strategy(4), lambda_cgd_strategy(0.9), blt_strategy(2)
SIGMA = DPFTRL(strategy=BAND, clipping_norm=0.5, noise_multiplier=2.0, key=key(7))
SAMPLING = {
    "cyclic_poisson": BAND,
    "b_min_sep": BAND,
    "fixed_partition": LAMBDA,
    "balls_in_bins": LAMBDA,
    "fixed_order": LAMBDA,
}
samplings = pytest.mark.parametrize("sampling", SAMPLING)


def resolve(plan: Any, **changes: Any) -> Any:
    known = {"n_examples": 100, "batch_size": 10, "planned_steps": 35, "spent": Ledger()}
    return plan.resolve(**{**known, **changes})


def of(sampling: str, **changes: Any) -> Any:
    return replace(SIGMA, sampling=sampling, strategy=SAMPLING[sampling], **changes)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"strategy": band_mf_strategy}, TypeError, r"strategy .* such as band_mf_strategy\(8\)"),
        ({"second_moment_strategy": 8}, TypeError, "second_moment_strategy must be what"),
        ({"sampling": "poisson"}, ValueError, "sampling must be one of .*got 'poisson'"),
        ({"second_moment": "both"}, ValueError, "second_moment must be one of .*got 'both'"),
        ({"clipping_norm": adaptive()}, PrivacyError, "adaptive clipping releases a noisy count"),
        (
            {"clipping_norm": adaptive(per_group({"a": 1.0}, default=1.0))},
            PrivacyError,
            "accounting of correlated noise has no place for",
        ),
        ({"clipping_norm": math.inf}, PrivacyError, "clipping_norm=inf bounds nothing"),
        ({"noise_multiplier": None}, PrivacyError, "give exactly one of noise_multiplier"),
        ({"target_epsilon": 1.0}, PrivacyError, "give exactly one of noise_multiplier"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be a finite number >= 0"),
        ({"target_delta": 1.0}, ValueError, "target_delta must be in"),
        ({"on_changed_plan": "go"}, ValueError, "on_changed_plan must be 'refuse' or 'fork'"),
        ({"key": 7}, TypeError, "key must be None or an RngKey"),
        # What draws at random needs noise that forgets.
        (
            {"strategy": LAMBDA, "sampling": "cyclic_poisson"},
            PrivacyError,
            r"'cyclic_poisson'.*lambda_cgd\(lam=0\.9.* not banded.*fixed_partition.*band_mf",
        ),
        (
            {"strategy": BLT, "sampling": "cyclic_poisson"},
            PrivacyError,
            r"blt\(n_buffers=2.* is not banded",
        ),
        (
            {"strategy": bisr_strategy(4), "sampling": "b_min_sep"},
            PrivacyError,
            r"'b_min_sep'.*bisr\(bandwidth=4.* is not banded",
        ),
        (
            {"second_moment_strategy": BLT, "sampling": "cyclic_poisson"},
            PrivacyError,
            r" and blt\(n_buffers=2.* is not banded",
        ),
        # Simulated is one strategy.
        (
            {"second_moment_strategy": bsr_strategy(4), "sampling": "b_min_sep"},
            PrivacyError,
            "'b_min_sep' .* no bound is known for squares with another",
        ),
        (
            {"second_moment_strategy": LAMBDA, "sampling": "balls_in_bins"},
            PrivacyError,
            "'balls_in_bins' .* no bound is known for squares with another",
        ),
    ],
)
def test_a_plan_refuses_what_does_not_go_together(fields, error, message):
    with pytest.raises(error, match=message):
        DPFTRL(**{"strategy": BAND, "clipping_norm": 1.0, "noise_multiplier": 1.0, **fields})


@pytest.mark.parametrize(
    ("plan", "known", "error", "message"),
    [
        (SIGMA, {"planned_steps": None}, PrivacyError, "run of known length, .* open-ended"),
        (SIGMA, {"planned_steps": 0}, PrivacyError, "run of known length"),
        (of("fixed_order"), {"planned_steps": None}, PrivacyError, "run of known length"),
        (SIGMA, {"batch_size": 101}, PrivacyError, r"batch_size=101 .*\(100 examples\)"),
        (
            SIGMA,
            {"batch_size": 30},
            PrivacyError,
            r"4 bands .* at most 25 of 100 .* not batch_size=30; use at most 3 bands, a smaller",
        ),
        (of("b_min_sep"), {"batch_size": 26}, PrivacyError, "at most 25 of 100 examples"),
        (
            replace(SIGMA, noise_multiplier=None, target_epsilon=1.0),
            {"spent": Ledger().spend(GaussianEvent(0.3))},
            PrivacyError,
            "1 steps have spent",
        ),
    ],
)
def test_a_run_that_does_not_fit_its_plan_is_refused(plan, known, error, message):
    with pytest.raises(error, match=message):
        resolve(plan, **known)


def test_steps_beyond_the_horizon_are_refused():
    mechanism = resolve(SIGMA).beginning_at(7)
    mechanism.check_step(7 + 34)
    with pytest.raises(
        PrivacyError, match=r"35 steps, .* have been made; another one has no noise"
    ):
        mechanism.check_step(7 + 35)


@pytest.mark.parametrize(
    ("strategy", "second", "sampling"),
    [
        (BAND, None, "cyclic_poisson"),
        (identity_strategy(), None, "cyclic_poisson"),
        (bsr_strategy(3), BAND, "cyclic_poisson"),
        (LAMBDA, None, "fixed_partition"),
        (BLT, None, "fixed_partition"),
        (BAND, LAMBDA, "fixed_partition"),
    ],
)
def test_sampling_follows_the_strategy_unless_it_is_given(strategy, second, sampling):
    plan = replace(SIGMA, strategy=strategy, second_moment_strategy=second)
    assert plan.sampling_used == sampling
    assert resolve(plan).sampling == sampling
    assert replace(plan, sampling="fixed_order").sampling_used == "fixed_order"


# -- sampling and accounting agree ----------------------------------------------------------------


@samplings
def test_who_is_drawn_is_what_is_accounted_for(sampling):
    n, steps = 600, 35
    mechanism = resolve(of(sampling), n_examples=n, batch_size=60)
    hit = np.zeros((steps, n), dtype=int)
    for step in range(steps):
        hit[step, mechanism.draw(key(1), step)] = 1
    sizes = hit.sum(1)
    assert abs(sizes.mean() - 60) < 5 * math.sqrt(60 / steps)
    assert hit.sum(0).max() <= mechanism.max_participations
    near = np.lib.stride_tricks.sliding_window_view(hit, mechanism.min_sep, axis=0).sum(-1)
    assert near.max() == 1
    if sampling == "cyclic_poisson":
        assert (mechanism.min_sep, mechanism.sample_rate) == (4, pytest.approx(0.4))
        turns = hit[: steps - 3].reshape(-1, 4, n).sum(0)
        assert ((turns > 0).sum(0) <= 1).all()  # one group each
    elif sampling == "b_min_sep":
        assert (mechanism.min_sep, mechanism.sample_rate) == (4, pytest.approx(0.1))
    else:
        assert mechanism.min_sep == 10
        assert np.array_equal(hit[:10], hit[10:20])
        assert (hit[:10].sum(0) == 1).all()


def test_what_each_sampling_costs():
    matrix = LAMBDA.matrix(35)
    sensitivity = matrix.sensitivity(10, 4)
    for sampling in ("fixed_partition", "fixed_order"):
        run = resolve(of(sampling)).event
        ((event, count),) = run.cost.segments
        assert (count, event.sample_rate, run.n_steps) == (1, 1.0, 35)
        assert event.noise_multiplier == pytest.approx(2.0 / sensitivity)
    mechanism = accounting.mf_gaussian(2.0, BAND)
    assert resolve(of("cyclic_poisson")).event == accounting.poisson(
        mechanism, sample_rate=0.4, n_steps=35, n_groups=4
    )
    assert resolve(of("b_min_sep")).event == accounting.b_min_sep(
        mechanism, sample_rate=0.1, min_sep=4, n_steps=35
    )
    assert resolve(of("balls_in_bins")).event == accounting.balls_in_bins(
        accounting.mf_gaussian(2.0, LAMBDA), n_bins=10, n_steps=35
    )


def test_hand_worked_costs():
    # Full batches, nine steps, independent noise: every example nine times, S = 3.
    plan = replace(SIGMA, strategy=identity_strategy(), noise_multiplier=9.0)
    for sampling in ("fixed_partition", "cyclic_poisson"):
        run = resolve(replace(plan, sampling=sampling), batch_size=100, planned_steps=9).event
        assert run.epsilon_at(1e-5) == pytest.approx(1.2711, abs=5e-5)
    # The partition of the digits into 11: at most 20 times.
    digits = resolve(
        replace(plan, sampling="fixed_partition"),
        n_examples=1437,
        batch_size=131,
        planned_steps=220,
    )
    assert (digits.min_sep, digits.max_participations) == (11, 20)
    assert digits.sensitivity == pytest.approx(math.sqrt(20))


def test_independent_noise_on_poisson_draws_costs_what_dp_sgd_does():
    ftrl = resolve(replace(SIGMA, strategy=identity_strategy()))
    sgd_ = resolve(DPSGD(clipping_norm=0.5, noise_multiplier=2.0))
    assert Ledger().spend(ftrl.event, 35).epsilon(1e-5) == Ledger().spend(sgd_.event, 35).epsilon(
        1e-5
    )
    assert ftrl.noise_stddev == sgd_.noise_stddev


def test_more_bands_of_the_squares_make_more_groups():
    plan = replace(SIGMA, strategy=bsr_strategy(2), second_moment_strategy=BAND)
    mechanism = resolve(plan)
    assert (mechanism.min_sep, mechanism.sample_rate) == (4, pytest.approx(0.4))


def test_a_strategy_left_open_is_optimised_for_the_schema():
    mechanism = resolve(replace(SIGMA, strategy=BLT, second_moment_strategy=BLT))
    assert mechanism.strategy == BLT.for_participation(10, 4)
    assert mechanism.second_moment_strategy == mechanism.strategy
    assert "min_sep=10, max_participations=4" in mechanism.fingerprint()["strategy"]
    ((event, _),) = mechanism.event.cost.segments
    assert event.noise_multiplier == pytest.approx(2.0 / mechanism.sensitivity)


def test_no_noise_costs_everything():
    for sampling in SAMPLING:
        run = resolve(of(sampling, noise_multiplier=0.0)).event
        assert run.epsilon_at(1e-5) == math.inf


@pytest.mark.parametrize("sampling", ["cyclic_poisson", "fixed_partition", "fixed_order"])
@pytest.mark.parametrize(
    "spent",
    [
        Ledger(),
        Ledger().spend(GaussianEvent(2.0, 0.1), 20),
        Ledger().spend(resolve(replace(SIGMA, noise_multiplier=5.0)).event, 3),
    ],
    ids=["nothing", "dp-sgd", "part of a horizon"],
)
def test_the_horizon_with_what_was_spent_before_costs_the_target(sampling, spent):
    mechanism = resolve(of(sampling, noise_multiplier=None, target_epsilon=4.0), spent=spent)
    assert mechanism.start == mechanism.event.start == spent.n_steps
    total = spent.spend(mechanism.event).epsilon(1e-5)
    assert 0.99 * 4 < total <= 4
    assert spent.spend(mechanism.event, 35).epsilon(1e-5) == total


def test_simulated_accounting_can_be_calibrated():
    plan = of("b_min_sep", noise_multiplier=None, target_epsilon=4.0, target_delta=1e-2)
    plan = replace(plan, allow_large_delta=True)  # runs are simulated, and their number is 1 / δ
    mechanism = resolve(plan)
    assert 0.99 * 4 < mechanism.event.epsilon_at(1e-2) <= 4
    unamplified = replace(plan, sampling="cyclic_poisson")
    assert mechanism.noise_multiplier < resolve(unamplified).noise_multiplier


# -- horizons -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [name for name in SAMPLING if name != "fixed_order"])
def test_every_horizon_has_draws_of_its_own(sampling):
    first = resolve(of(sampling))
    second = first.beginning_at(35)
    a = [first.draw(key(1), t).tolist() for t in range(35)]
    b = [second.draw(key(1), 35 + t).tolist() for t in range(35)]
    assert sum(x == y for x, y in zip(a, b, strict=True)) < 3
    assert a == [first.draw(key(1), t).tolist() for t in range(35)]


@samplings
@pytest.mark.parametrize("start", [0, 6])
def test_draws_are_the_sampler_s_from_where_the_horizon_begins(sampling, start):
    horizon = {"n_examples": 100, "start": start}
    draw = {
        "cyclic_poisson": partial(cyclic_poisson_indices, key(1), n_groups=4, sample_rate=0.4),
        "b_min_sep": partial(b_min_sep_indices, key(1), min_sep=4, sample_rate=0.1),
        "fixed_order": partial(fixed_order_indices, batch_size=10),
    }.get(sampling, partial(balls_in_bins_indices, key(1), n_bins=10))
    mechanism = resolve(of(sampling)).beginning_at(start)
    for step in range(start, start + 35):
        assert mechanism.draw(key(1), step).tolist() == draw(step, **horizon).tolist()


@samplings
def test_the_noise_is_made_for_the_participations_that_are_accounted_for(sampling):
    mechanism = resolve(of(sampling))
    step = mechanism.step(flat_loss, sgd(lr=1.0), key(7), torch.zeros(3))
    assert step.noise_fn.sensitivity == mechanism.sensitivity


def test_every_horizon_has_noise_of_its_own_and_begins_independent():
    plan = replace(SIGMA, clipping_norm=1.0, strategy=lambda_cgd_strategy(0.9))
    w = torch.zeros(20_000)
    seen = []
    for start in (0, 2):
        mechanism = resolve(plan, planned_steps=2).beginning_at(start)
        step = mechanism.step(flat_loss, sgd(lr=1.0), key(7), w)
        state = step.init(w)
        assert (state.noise.step, state.noise.start) == (start, start)
        for _ in range(2):
            released, _, state = step.release(w, torch.ones(3), state)
            seen.append(released.pytree / 0.2)
        with pytest.raises(PrivacyError, match="n_steps=2"):
            step.release(w, torch.ones(3), state)
    z = torch.stack(seen)
    expected = torch.eye(4)
    expected[1, 1] = expected[3, 3] = 1.81
    expected[0, 1] = expected[1, 0] = expected[2, 3] = expected[3, 2] = -0.9
    assert (z @ z.T / len(w) - expected).abs().max() < 5 * 2 * 1.81 / math.sqrt(len(w))


# -- noise and clipping ---------------------------------------------------------------------------


def flat_loss(w: Any, x: Any) -> Any:
    return 0 * w[0] * x, x


@pytest.mark.parametrize(
    "strategy",
    [BAND, LAMBDA, BLT, bisr_strategy(3), bsr_strategy(3, normalized=True), identity_strategy()],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("microbatch", [None, 1])
def test_the_noise_is_the_strategy_s_with_the_public_divisor(strategy, microbatch):
    n = 5
    plan = replace(SIGMA, strategy=strategy, microbatch_size=microbatch)
    mechanism = resolve(plan, planned_steps=n)
    w = torch.zeros(20_000)
    step = mechanism.step(flat_loss, sgd(lr=1.0), key(7), w)
    state, seen = step.init(w), []
    inverse = np.linalg.inv(mechanism.strategy.matrix(n).dense())
    for t in range(n):
        released, _, state = step.release(w, torch.ones(t), state)  # whatever is drawn
        unit = 2.0 * 0.5 / 10  # σ C / expected batch
        assert released.noise_stddev == pytest.approx(unit * np.linalg.norm(inverse[t]))
        seen.append(released.pytree.double().numpy() / unit)
    z = np.stack(seen)
    covariance = inverse @ inverse.T
    scale = np.sqrt(np.outer(covariance.diagonal(), covariance.diagonal()))
    assert (np.abs(z @ z.T / len(w) - covariance) / scale).max() < 5 * math.sqrt(2 / len(w))
    assert mechanism.noise_stddev == pytest.approx(unit * inverse[0, 0])


@pytest.mark.parametrize("form", ["aggregate", "per_example"])
def test_squares_are_released_if_they_have_a_strategy(form):
    plan = replace(
        SIGMA, second_moment_strategy=identity_strategy(), second_moment=form, strategy=BAND
    )
    mechanism = resolve(plan)
    w = torch.zeros(4)
    batch = torch.tensor([[3.0, 4.0, 0.0, 0.0], [-3.0, -4.0, 0.0, 0.0]])
    for noise, expected in ((0.0, None), (2.0, mechanism.noise_stddev)):
        quiet = mechanism.with_noise_multiplier(noise)
        step = quiet.step(lambda w, x: (x @ w, x), adamw(lr=1.0), key(7), w)
        state = step.init(w)
        released, _, state = step.release(w, batch, state)
        assert isinstance(released, SecondMomentNoiseOutput)
        if expected is not None:
            assert released.gradient.noise_stddev == pytest.approx(expected)
            continue
        # {g, -g}: nothing of the aggregate, two squares over ten of the examples.
        squares = released.square.pytree
        want = [0.25 * 0.36 * 0.2, 0.25 * 0.64 * 0.2, 0, 0] if form == "per_example" else [0] * 4
        torch.testing.assert_close(squares, torch.tensor(want, dtype=squares.dtype))
    alone = resolve(replace(SIGMA, strategy=BAND))
    assert alone.event == mechanism.event  # at no further cost
    step = alone.step(lambda w, x: (x @ w, x), adamw(lr=1.0), key(7), w)
    released, _, _ = step.release(w, batch, step.init(w))
    assert isinstance(released, NoisedPytree)


@pytest.mark.parametrize(
    "clipping",
    [auto(), per_group({"a": 3.0, "b": 4.0}), linear_schedule(1.0, 0.5, transition_steps=100)],
)
def test_other_ways_to_clip_cost_the_same(clipping):
    plan = replace(SIGMA, clipping_norm=clipping)
    mechanism = resolve(plan)
    params = {"a": torch.zeros(2), "b": torch.zeros(())}
    mechanism.check(params, 35)
    assert mechanism.event == resolve(SIGMA).event
    step = mechanism.step(
        lambda p, x: (x[:, :2] @ p["a"] + x[:, 2] * p["b"], x), sgd(lr=1.0), key(7), params
    )
    state, seen = step.init(params), []
    for t in range(3):
        released, _, state = step.release(
            params, torch.tensor([[30.0, 40.0, 5.0]]), state, watch=seen.append
        )
        row = mechanism.strategy.matrix(35).row_norms()[t]
        assert released.noise_stddev == pytest.approx(2.0 * seen[-1].sensitivity * row)


# -- what is told ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "known"),
    [
        (replace(SIGMA, strategy=band_mf_strategy(4, momentum=0.9)), {}),
        (replace(SIGMA, strategy=band_mf_strategy(4, error="max")), {}),
        (replace(SIGMA, strategy=band_mf_strategy(3)), {}),
        (replace(SIGMA, sampling="fixed_partition"), {}),
        (replace(SIGMA, sampling="b_min_sep"), {}),
        (replace(SIGMA, second_moment_strategy=BAND), {}),
        (replace(SIGMA, second_moment_strategy=BAND, second_moment="per_example"), {}),
        (replace(SIGMA, clipping_norm=1.0), {}),
        (replace(SIGMA, noise_multiplier=1.0), {}),
        (replace(SIGMA, target_delta=1e-6), {}),
        (replace(SIGMA, key=key(8)), {}),
        (SIGMA, {"n_examples": 101}),
        (SIGMA, {"batch_size": 9}),
        (SIGMA, {"planned_steps": 36}),
        (DPSGD(clipping_norm=0.5, noise_multiplier=2.0, key=key(7)), {}),
    ],
)
def test_a_run_of_another_plan_has_another_fingerprint(plan, known):
    assert resolve(plan, **known).fingerprint() != resolve(SIGMA).fingerprint()


def test_what_changes_no_result_is_not_in_the_fingerprint():
    same = replace(
        SIGMA,
        microbatch_size=3,
        on_changed_plan="fork",
        sampling="cyclic_poisson",
        second_moment="per_example",
    )
    assert resolve(same).fingerprint() == resolve(SIGMA).fingerprint()
    later = resolve(SIGMA).beginning_at(35)
    assert later.fingerprint() == resolve(SIGMA).fingerprint()


def test_neither_what_is_told_nor_a_repr_holds_the_key():
    mechanism = resolve(SIGMA)
    text = json.dumps([mechanism.fingerprint(), mechanism.public()]) + repr(mechanism)
    assert key(7).hex() not in text
    assert str(key(7).bits) not in text


@samplings
def test_batches_are_told_in_words(sampling):
    words = of(sampling).drawing(100, 10)
    told = {
        "cyclic_poisson": r"each example is in one of 4 random groups, .* rate 0\.4",
        "b_min_sep": "no example twice within 4 steps",
        "fixed_partition": "the 10 parts of one random partition",
        "balls_in_bins": "the 10 parts of one random partition",
        "fixed_order": "in the order of the dataset, 10 steps a pass",
    }
    assert re.search(told[sampling], words)
    kind = resolve(of(sampling)).public()["neighbours"]
    assert kind == ("blank one" if sampling == "fixed_order" else "add or remove one")


def test_a_horizon_begins_with_the_first_rows_of_the_dataset():
    later = resolve(of("fixed_order")).beginning_at(7)
    assert later.draw(key(1), 7).tolist() == list(range(10))
