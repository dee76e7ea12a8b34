from __future__ import annotations

import math

import pytest

from opake_lightning.scheduling import (
    constant_schedule,
    cosine_schedule,
    linear_schedule,
    with_warmup,
)

DECAYS = pytest.mark.parametrize("decay", [linear_schedule, cosine_schedule])


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
    ],
)
def test_bad_settings_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()
