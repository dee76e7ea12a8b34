"""Every way to clip, as an option of the plan: one price, another step, another fingerprint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.dpsgd.clipping import adaptive, auto, per_group, per_layer
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.plan import DPSGD
from opake_lightning.random import key
from opake_lightning.scheduling import cosine_schedule, linear_schedule

PARAMS = {"a": torch.zeros(2), "b": torch.zeros(())}
FALLING = linear_schedule(1.0, 0.5, transition_steps=100)
OPTIONS: dict[str, Any] = {
    "number": 1.0,
    "groups": per_group({"a": 3.0, "b": 4.0}),
    "other groups": per_group({"a": 3.0}, default=4.0),
    "another rest": per_group({"a": 3.0}, default=5.0),
    "layers": per_layer(1.0, PARAMS, by="parameter"),
    "adaptive": adaptive(),
    "adaptive from 1": adaptive(1.0),
    "adaptive to 0.9": adaptive(target_quantile=0.9),
    "slowly adaptive": adaptive(learning_rate=0.1),
    "noisily adaptive": adaptive(count_noise_stddev=10.0),
    "adaptive groups": adaptive(per_group({"a": 3.0, "b": 4.0})),
    "auto": auto(),
    "stabler auto": auto(stability=0.1),
    "auto groups": auto(per_group({"a": 3.0, "b": 4.0})),
    "schedule": FALLING,
    "other schedule": cosine_schedule(1.0, 0.5, transition_steps=100),
    "own schedule": lambda step: 1.0 / (1 + step),
    "other own schedule": lambda step: 1.0 if step < 100 else 0.5,
}
options = pytest.mark.parametrize("clipping", OPTIONS.values(), ids=OPTIONS.keys())


def resolve(clipping: Any, **changes: Any) -> Any:
    known = {"n_examples": 1000, "batch_size": 100, "planned_steps": 200, "spent": Ledger()}
    plan = DPSGD(clipping_norm=clipping, noise_multiplier=2.0, key=key(7))
    return replace(plan, **changes.pop("plan", {})).resolve(**{**known, **changes})


def loss_fn(params: Any, x: Any) -> Any:
    """Its gradient for an example is the example."""
    return x[:, :2] @ params["a"] + x[:, 2] * params["b"], x[:, 0]


@options
def test_a_step_costs_the_plan_s_multiplier_however_it_clips(clipping):
    mechanism = resolve(clipping)
    mechanism.check(PARAMS, 200)
    assert mechanism.event == GaussianEvent(2.0, 0.1)
    target = {"noise_multiplier": None, "target_epsilon": 3.0}
    sigma = resolve(clipping, plan=target).noise_multiplier
    assert sigma == resolve(1.0, plan=target).noise_multiplier


@options
def test_the_noise_is_that_of_the_sensitivity(clipping):
    mechanism = resolve(clipping)
    step = mechanism.step(loss_fn, sgd(lr=1.0), key(7))
    state = step.init(PARAMS)
    seen: list[Any] = []
    for _ in range(3):
        released, _, state = step.release(
            PARAMS, torch.tensor([[30.0, 40.0, 5.0]]), state, watch=seen.append
        )
        bounds = seen[-1].report.bounds
        assert seen[-1].sensitivity == pytest.approx(math.hypot(*bounds) / 100)
        sigma = mechanism.gradient_noise_multiplier
        assert released.noise_stddev == pytest.approx(sigma * math.hypot(*bounds) / 100)
    norm = math.hypot(*seen[0].report.bounds)
    assert mechanism.noise_stddev == pytest.approx(mechanism.first_noise * norm / 100)
    first = [seen[0].pytree[name].norm().item() * 100 for name in PARAMS]
    if len(seen[0].report.bounds) == 2:
        assert first == pytest.approx(seen[0].report.bounds, rel=2e-2)  # AUTO-S comes close
    else:
        assert math.hypot(*first) == pytest.approx(seen[0].report.bounds[0], rel=2e-2)


def test_only_adaptive_clipping_pays_for_its_counts_with_the_gradient_s_noise():
    for name, clipping in OPTIONS.items():
        mechanism = resolve(clipping)
        if "adaptive" not in name:
            assert mechanism.gradient_noise_multiplier == 2.0
            continue
        sigma_b = clipping.count_noise_stddev or 5.0
        counts = clipping.n_groups / (2 * sigma_b) ** 2
        assert 1 / mechanism.gradient_noise_multiplier**2 + counts == pytest.approx(1 / 4)


def test_every_option_has_its_own_fingerprint():
    prints = {name: resolve(clipping).fingerprint() for name, clipping in OPTIONS.items()}
    assert all(type(p["clipping_norm"]) in (str, float) for p in prints.values())
    assert len({json.dumps(p) for p in prints.values()}) == len(OPTIONS)


@options
def test_the_same_option_has_the_same_fingerprint(clipping):
    assert resolve(clipping).fingerprint() == resolve(clipping).fingerprint()


def test_a_number_is_its_own_fingerprint():
    assert resolve(1).fingerprint()["clipping_norm"] == 1.0


def test_a_schedule_of_one_s_own_is_known_by_its_values():
    """At 0, the powers of two and the last step, which is where it may be told from others."""
    target = {"noise_multiplier": None, "target_epsilon": 3.0}
    written = resolve(lambda step: step + 1.0, plan=target).fingerprint()["clipping_norm"]
    steps = [0, 1, 2, 4, 8, 16, 32, 64, 128, 199]
    values = ", ".join(f"{step}: {step + 1.0}" for step in steps)
    assert written == f"schedule with the values {values}"


def test_a_schedule_s_fingerprint_does_not_depend_on_the_process():
    # A function's repr holds its address; a resumed run is another process.
    for make in (lambda: FALLING, lambda: lambda step: 1.0 / (1 + step)):
        one, other = (resolve(make()).fingerprint()["clipping_norm"] for _ in range(2))
        assert one == other


@pytest.mark.parametrize(
    ("clipping", "error", "message"),
    [
        ("1.0", TypeError, "clipping_norm must be a number"),
        (None, TypeError, "clipping_norm must be a number"),
        (lambda step: 0.0, ValueError, "clipping_norm at step 0"),
        (adaptive(count_noise_stddev=1.0), PrivacyError, "noise_multiplier=2 leaves nothing"),
        (
            adaptive(OPTIONS["groups"], count_noise_stddev=1.4),
            PrivacyError,
            r"2 count\(s\) .* sqrt\(2\) = 1.9799",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_at_construction(clipping, error, message):
    with pytest.raises(error, match=message):
        DPSGD(clipping_norm=clipping, noise_multiplier=2.0)


def test_a_split_that_only_the_batch_size_tells_is_refused_when_it_is_known():
    resolve(adaptive(), batch_size=21)
    with pytest.raises(PrivacyError, match=r"deviation count_noise_stddev=1 .* a larger batch"):
        resolve(adaptive(), batch_size=20)
    target = {"noise_multiplier": None, "target_epsilon": 0.05}
    with pytest.raises(PrivacyError, match="leaves nothing for the gradient"):
        resolve(adaptive(), plan=target)


def test_a_schedule_that_comes_to_zero_is_refused_if_the_run_gets_there():
    to_zero = resolve(linear_schedule(1.0, 0.0, transition_steps=200))
    with pytest.raises(ValueError, match="clipping_norm at step 200 must be a finite number > 0"):
        to_zero.check(PARAMS, 201)
    to_zero.check(PARAMS, 200)
    to_zero.check(PARAMS)


@pytest.mark.parametrize("bad", range(9))
def test_a_schedule_without_a_norm_at_any_step_of_the_run_is_refused_before_it_begins(bad):
    values = [1.0] * 9
    values[bad] = math.nan
    with pytest.raises(ValueError, match=f"clipping_norm at step {bad} must be a finite number"):
        resolve(values.__getitem__).check(PARAMS, 9)


def test_a_schedule_may_end_where_the_run_does():
    resolve([1.0, 0.5, 0.25].__getitem__, planned_steps=None).fingerprint()


def test_groups_that_do_not_cover_the_parameters_are_refused():
    with pytest.raises(PrivacyError, match="no pattern matches 'b'"):
        resolve(per_group({"a": 1.0})).check(PARAMS)
    with pytest.raises(PrivacyError, match="'c' matches no trained parameter"):
        resolve(per_group({"c": 1.0}, default=1.0)).check(PARAMS)


def test_a_noise_aware_optimizer_sees_the_noise_of_every_adaptive_step():
    mechanism = resolve(adaptive(1.0, learning_rate=2.0))
    optimizer = adamw(lr=0.1, noise_bias_correction=True)
    step = mechanism.step(loss_fn, optimizer, key(7))
    params, state, phi = PARAMS, step.init(PARAMS), 0.0
    for _ in range(4):
        stddev = mechanism.gradient_noise_multiplier * state.clip.clipping_norm / 100
        params, _, state = step(params, torch.full((50, 3), 9.0), state)
        phi = 0.999 * phi + 0.001 * stddev**2
    variances = [v for v in state.optimizer.values() if hasattr(v, "noise")]
    assert state.clip.clipping_norm > 2.0
    assert [v.noise for v in variances] == pytest.approx([phi])
