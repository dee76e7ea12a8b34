from __future__ import annotations

import json
import math
import pickle

import pytest
import torch

from opake_lightning import scheduling
from opake_lightning.scheduling import (
    constant_schedule,
    cosine_restarts_schedule,
    cosine_schedule,
    exponential_schedule,
    inverse_sqrt_schedule,
    linear_schedule,
    polynomial_schedule,
    schedule_from_dict,
    schedule_to_dict,
    warmup_stable_decay_schedule,
    with_warmup,
)


def polynomial(init_value, end_value, transition_steps, transition_begin=0):
    return polynomial_schedule(init_value, end_value, 1.0, transition_steps, transition_begin)


DECAYS = pytest.mark.parametrize("decay", [linear_schedule, cosine_schedule, polynomial])
ALL = {
    "constant_schedule": constant_schedule(0.1),
    "linear_schedule": linear_schedule(0.3, 0.1, 7, 5),
    "cosine_schedule": cosine_schedule(0.3, 0.1, 7, 5),
    "polynomial_schedule": polynomial_schedule(0.3, 0.1, 2, 7, 5),
    "exponential_schedule": exponential_schedule(0.3, 0.5, 7, 5, staircase=True, end_value=0.1),
    "inverse_sqrt_schedule": inverse_sqrt_schedule(0.3, 7),
    "warmup_stable_decay_schedule": warmup_stable_decay_schedule(0.3, 5, 7, 9, 0.1, 0.2),
    "cosine_restarts_schedule": cosine_restarts_schedule(
        0.3, 0.1, 7, 5, period_factor=2, init_factor=0.5
    ),
    "with_warmup": with_warmup(with_warmup(0.3, 3, 0.2), 7, 0.1),
}
every_schedule = pytest.mark.parametrize("schedule", ALL.values(), ids=ALL.keys())


@DECAYS
def test_decay_holds_both_ends_exactly(decay):
    schedule = decay(0.3, 0.1, transition_steps=7, transition_begin=5)
    assert [schedule(step) for step in (0, 4, 5)] == [0.3] * 3
    assert [schedule(step) for step in (12, 13, 10**9)] == [0.1] * 3


@DECAYS
def test_decay_is_halfway_at_half_time_and_falls_throughout(decay):
    schedule = decay(1.0, 0.0, transition_steps=100, transition_begin=100)
    values = [schedule(step) for step in range(100, 201)]
    assert values[50] == pytest.approx(0.5, abs=1e-15)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 101


def test_a_quarter_of_the_cosine():
    assert cosine_schedule(1.0, 0.0, 8)(2) == pytest.approx((1 + math.sqrt(0.5)) / 2)


def test_warmup_joins_the_schedule_at_the_same_absolute_step():
    decay = cosine_schedule(
        init_value=1e-3, end_value=0.0, transition_steps=900, transition_begin=100
    )
    schedule = with_warmup(decay, transition_steps=100)
    assert schedule(0) == 0.0
    assert schedule(50) == pytest.approx(5e-4)
    assert [schedule(step) for step in (100, 300, 1000)] == [decay(s) for s in (100, 300, 1000)]
    assert schedule(100) == 1e-3


def test_warmup_starts_at_init_value_and_takes_a_constant():
    schedule = with_warmup(0.5, transition_steps=4, init_value=0.1)
    assert [schedule(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


def test_warmup_rises_to_one_value_even_while_the_schedule_moves():
    schedule = with_warmup(linear_schedule(1.0, 0.0, 10), transition_steps=5)
    assert [schedule(step) for step in range(7)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.4])


def test_equal_schedules_compare_equal_and_show_their_settings():
    assert with_warmup(constant_schedule(0.1), 5) == with_warmup(0.1, 5)
    assert linear_schedule(1.0, 0.0, 5) != linear_schedule(1.0, 0.0, 6)
    assert "transition_steps=5" in repr(linear_schedule(1.0, 0.0, 5))


def test_every_schedule_has_a_case():
    rest = {"as_schedule", "schedule_to_dict", "schedule_from_dict"}
    assert {name for name in scheduling.__all__ if name[0].islower()} - rest == ALL.keys()


@every_schedule
def test_written_down_in_plain_values_and_read_back(schedule):
    written = json.loads(json.dumps(schedule_to_dict(schedule)))
    assert ALL[written["name"]] == schedule
    assert schedule_from_dict(written) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@every_schedule
def test_a_plain_function_of_the_step(schedule):
    values = [schedule(step) for step in range(100)]
    assert all(type(value) is float and 0.05 <= value <= 0.3 + 1e-12 for value in values)
    assert [schedule(step) for step in reversed(range(100))] == values[::-1]
    assert type(schedule(10**9)) is float


def test_what_is_read_back_is_checked():
    with pytest.raises(TypeError, match="is not a schedule of opake_lightning"):
        schedule_to_dict(lambda step: 0.1)
    with pytest.raises(TypeError, match="is not a schedule of opake_lightning"):
        schedule_to_dict(with_warmup(lambda step: 0.1, 5))
    with pytest.raises(ValueError, match="there is no schedule 'as_schedule'"):
        schedule_from_dict({"name": "as_schedule"})
    with pytest.raises(ValueError, match=r"constant_schedule takes \['value'\], got \['rate'\]"):
        schedule_from_dict({"name": "constant_schedule", "rate": 0.1})
    with pytest.raises(ValueError, match="value must be"):
        schedule_from_dict({"name": "constant_schedule", "value": math.nan})


def test_polynomial_by_hand():
    schedule = polynomial_schedule(1.0, 0.2, 3, transition_steps=4, transition_begin=2)
    assert schedule(3) == pytest.approx(0.2 + 0.8 * 0.75**3)
    assert [schedule(step) for step in (0, 2, 6, 7)] == [1.0, 1.0, 0.2, 0.2]


def test_exponential_by_hand():
    smooth = exponential_schedule(1.0, 0.25, transition_steps=4, transition_begin=2)
    assert [smooth(step) for step in (0, 2, 4, 6, 10)] == [1.0, 1.0, 0.5, 0.25, 0.0625]
    stairs = exponential_schedule(1.0, 0.25, 4, staircase=True, end_value=0.1)
    assert [stairs(step) for step in (0, 3, 4, 7, 8)] == [1.0, 1.0, 0.25, 0.25, 0.1]


def test_inverse_square_root_falls_after_its_timescale():
    schedule = inverse_sqrt_schedule(0.1, timescale=100)
    assert [schedule(step) for step in (0, 100)] == [0.1, 0.1]
    assert schedule(101) < 0.1
    assert schedule(10_000) == pytest.approx(0.01)


def test_warmup_stable_decay_without_warmup_begins_at_its_peak():
    schedule = warmup_stable_decay_schedule(0.5, 0, 3, 2, init_value=0.1, end_value=0.1)
    assert [schedule(step) for step in range(7)] == pytest.approx([0.5] * 4 + [0.3, 0.1, 0.1])


@pytest.mark.parametrize("period_factor", [1, 2, 3])
def test_restarts_equal_torch(period_factor):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, T_0=5, T_mult=period_factor, eta_min=0.1
    )
    ours = cosine_restarts_schedule(0.3, 0.1, 5, period_factor=period_factor)
    for step in range(60):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("period_factor", [1, 2])
def test_each_restart_begins_lower(period_factor):
    schedule = cosine_restarts_schedule(
        1.0, 0.0, 4, 3, period_factor=period_factor, init_factor=0.5
    )
    second, third = 7, 7 + 4 * period_factor
    assert [schedule(step) for step in (0, 3, second, third)] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: constant_schedule(math.nan), "value must be"),
        (lambda: linear_schedule(-1.0, 0.0, 5), "init_value must be"),
        (lambda: linear_schedule(1.0, math.inf, 5), "end_value must be"),
        (lambda: cosine_schedule(1.0, 0.0, 0), "transition_steps must be >= 1"),
        (lambda: cosine_schedule(1.0, 0.0, 5, -1), "transition_begin must be >= 0"),
        (lambda: with_warmup(0.1, 0), "transition_steps must be >= 1"),
        (lambda: with_warmup(math.nan, 3), "schedule must be"),
        (lambda: polynomial_schedule(1.0, 0.0, 0.0, 5), "power must be"),
        (lambda: exponential_schedule(1.0, 1.5, 5), "decay_rate must be"),
        (lambda: exponential_schedule(1.0, 0.0, 5), "decay_rate must be"),
        (lambda: exponential_schedule(1.0, 0.5, 5, end_value=math.nan), "end_value must be"),
        (lambda: inverse_sqrt_schedule(0.1, 0), "timescale must be"),
        (lambda: warmup_stable_decay_schedule(0.1, -1, 5, 5), "warmup_steps must be"),
        (lambda: warmup_stable_decay_schedule(0.1, 5, 5, 0), "decay_steps must be"),
        (lambda: warmup_stable_decay_schedule(math.nan, 5, 5, 5), "peak_value must be"),
        (lambda: cosine_restarts_schedule(1.0, 0.0, 5, period_factor=0), "period_factor must be"),
        (lambda: cosine_restarts_schedule(1.0, 0.0, 5, init_factor=2.0), "init_factor must be"),
    ],
)
def test_bad_settings_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()
