"""Each sampler keeps the law that its accounting assumes, at every step, asked in any order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from opake_lightning import random as rng
from opake_lightning.dpftrl import sampling
from opake_lightning.dpftrl.sampling import (
    b_min_sep_indices,
    balls_in_bins_indices,
    cyclic_poisson_indices,
    fixed_order_indices,
)
from opake_lightning.errors import PrivacyError
from opake_lightning.random import RngKey, key

SAMPLERS: dict[str, Any] = {
    "cyclic_poisson": lambda k, t, n: cyclic_poisson_indices(
        k, t, n_examples=n, n_groups=3, sample_rate=0.3
    ),
    "one_group": lambda k, t, n: cyclic_poisson_indices(
        k, t, n_examples=n, n_groups=1, sample_rate=0.1
    ),
    "balls_in_bins": lambda k, t, n: balls_in_bins_indices(k, t, n_examples=n, n_bins=10),
    "b_min_sep": lambda k, t, n: b_min_sep_indices(k, t, n_examples=n, min_sep=4, sample_rate=0.1),
    "b_min_sep_of_1": lambda k, t, n: b_min_sep_indices(
        k, t, n_examples=n, min_sep=1, sample_rate=0.1
    ),
    "b_min_sep_full": lambda k, t, n: b_min_sep_indices(
        k, t, n_examples=n, min_sep=10, sample_rate=0.1
    ),
}
samplers = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


def drawn(sampler: Any, n: int, steps: int, seed: int = 7) -> Any:
    """Zeros and ones, a row for each step and a column for each example."""
    hit = np.zeros((steps, n))
    for step in range(steps):
        hit[step, sampler(key(seed), step, n)] = 1
    return hit


def forget() -> None:
    sampling._parts.cache_clear()
    sampling._renewals.cache_clear()


@samplers
def test_every_step_draws_each_example_at_the_mean_rate(sampler):
    # Of a sampler that starts cold, the first steps would stand out.
    n, steps = 40_000, 45
    hit = drawn(sampler, n, steps)
    assert np.abs(hit.mean(1) - 0.1).max() < 5 * math.sqrt(0.09 / n)
    # Examples are alike: the mean of each third of them.
    thirds = hit[:, : n - n % 3].reshape(steps, 3, -1)
    assert np.abs(thirds.mean(2) - 0.1).max() < 5 * math.sqrt(0.09 / (n // 3))


@samplers
def test_examples_are_independent(sampler):
    # The number drawn is binomial, and neighbours in the dataset, near and far, do not attract.
    n, keys = 400, 400
    step = 17
    hit = np.zeros((keys, n))
    for seed in range(keys):
        hit[seed, sampler(key(seed), step, n)] = 1
    sizes = hit.sum(1)
    assert abs(sizes.mean() - n / 10) < 5 * math.sqrt(n * 0.09 / keys)
    assert abs(sizes.var(ddof=1) - n * 0.09) < 5 * n * 0.09 * math.sqrt(2.1 / keys)
    for lag in (1, 2, 200):
        joint = ((hit[:, lag:] - 0.1) * (hit[:, :-lag] - 0.1)).mean() / 0.09
        assert abs(joint) < 5 / math.sqrt(keys * (n - lag))


@samplers
def test_a_draw_depends_on_key_and_step_alone(sampler):
    steps = [0, 1, 2, 3, 17, 18, 40, 41, 95, 200]
    forget()
    forwards = {t: sampler(key(7), t, 300).tolist() for t in steps}
    backwards = {t: sampler(key(7), t, 300).tolist() for t in reversed(steps)}
    alone = {}
    for t in steps:
        forget()
        sampler(key(8), t + 3, 300)  # another run in between
        alone[t] = sampler(key(7), t, 300).tolist()
    assert forwards == backwards == alone
    assert len({tuple(draw) for draw in forwards.values()}) > 3
    assert sampler(key(8), 40, 300).tolist() != forwards[40]


@samplers
def test_a_draw_is_ascending_and_the_caller_s_own(sampler):
    first = sampler(key(7), 4, 300)
    assert first.dtype == np.int64
    assert bool((np.diff(first) > 0).all())
    kept = first.tolist()
    first[:] = -1
    assert sampler(key(7), 4, 300).tolist() == kept


@samplers
def test_no_stream_is_used_twice(sampler, monkeypatch):
    forget()
    used: list[Any] = []
    for module, name in ((sampling, "words"), (rng, "words")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda stream, original=original: used.append(stream) or original(stream)
        )
    for t in range(60):
        sampler(key(7), t, 300)
    forget()
    assert len(used) == len(set(used)) > 0


def law(steps: int, b: int, rate: float) -> dict[tuple[int, ...], float]:
    """Chance of each pattern of draws of one example, from the definition."""
    chance = rate / (1 - (b - 1) * rate)
    found: dict[tuple[int, ...], float] = {}
    starts = dict.fromkeys(range(1, b), rate) | {0: 1 - (b - 1) * rate}
    for pattern in itertools.product((0, 1), repeat=steps):
        total = 0.0
        for start, weight in starts.items():
            waits, probability = start, weight
            for hit in pattern:
                if waits:
                    probability *= 0 if hit else 1
                    waits -= 1
                else:
                    probability *= chance if hit else 1 - chance
                    waits = b - 1 if hit else 0
            total += probability
        if total > 0:
            found[pattern] = total
    return found


@pytest.mark.parametrize(("b", "rate"), [(1, 0.3), (2, 0.1), (2, 0.45), (3, 0.2), (4, 0.249)])
def test_b_min_sep_has_exactly_the_law_that_is_accounted_for(b, rate):
    steps, n = 9, 100_000
    expected = law(steps, b, rate)
    assert sum(expected.values()) == pytest.approx(1)
    hit = np.zeros((steps, n), dtype=np.int64)
    for step in range(steps):
        hit[step, b_min_sep_indices(key(3), step, n_examples=n, min_sep=b, sample_rate=rate)] = 1
    codes = np.bincount((1 << np.arange(steps)) @ hit, minlength=1 << steps)
    probabilities = np.zeros(1 << steps)
    for pattern, probability in expected.items():
        probabilities[sum(bit << t for t, bit in enumerate(pattern))] = probability
    assert codes[probabilities == 0].sum() == 0
    often = n * probabilities > 10
    p = probabilities[often]
    z = (codes[often] - n * p) / np.sqrt(n * p * (1 - p))
    assert np.abs(z).max() < 5
    cells = int(often.sum())
    assert abs((z**2 * (1 - p)).sum() - cells) < 5 * math.sqrt(2 * cells) + 1


@pytest.mark.parametrize(("b", "rate"), [(2, 0.2), (10, 0.09), (10, 0.1)])
def test_b_min_sep_late_in_a_run(b, rate):
    n, first, steps = 20_000, 3000, 4 * b
    hit = np.zeros((steps, n))
    for t in range(steps):
        drawn = b_min_sep_indices(key(5), first + t, n_examples=n, min_sep=b, sample_rate=rate)
        hit[t, drawn] = 1
    window = np.lib.stride_tricks.sliding_window_view(hit, b, axis=0).sum(-1)
    assert window.max() == 1
    chance = rate / (1 - (b - 1) * rate)
    # Whether one that was in none of the last b-1 batches is in the next.
    before = np.lib.stride_tricks.sliding_window_view(hit, b - 1, axis=0)[:-1].sum(-1) == 0
    trials = int(before.sum())
    successes = int((hit[b - 1 :] * before).sum())
    spread = math.sqrt(max(chance * (1 - chance), 0) * trials)
    assert abs(successes - chance * trials) <= 5 * spread + 1e-6 * trials


def test_groups_and_bins_are_multinomial_and_fixed_for_the_run():
    n, parts = 600, 6
    sizes = []
    for seed in range(300):
        bins = [balls_in_bins_indices(key(seed), t, n_examples=n, n_bins=parts) for t in range(12)]
        for t in range(6):
            assert np.array_equal(bins[t], bins[t + 6])
        assert sorted(np.concatenate(bins[:6]).tolist()) == list(range(n))
        sizes.append([len(part) for part in bins[:6]])
    mean, variance = n / parts, n / parts * (1 - 1 / parts)
    counts = np.asarray(sizes, dtype=float)
    assert np.abs(counts.mean(0) - mean).max() < 5 * math.sqrt(variance / 300)
    # Bins of equal size would have none.
    assert abs(counts.var(0).mean() - variance) < 5 * variance * math.sqrt(2 / (300 * 5))


def test_cyclic_poisson_stays_in_its_group_and_draws_anew_in_every_round():
    n, rounds = 300, 400
    hit = np.zeros((3 * rounds, n))
    for t in range(3 * rounds):
        hit[t, SAMPLERS["cyclic_poisson"](key(7), t, n)] = 1
    turns = hit.reshape(rounds, 3, n).sum(0)
    assert ((turns > 0).sum(0) == 1).all()  # one group each
    z = (turns.max(0) - 0.3 * rounds) / math.sqrt(rounds * 0.21)
    assert np.abs(z).max() < 5
    assert abs((z**2).sum() - n) < 5 * math.sqrt(2 * n)


def test_one_group_is_poisson_sampling_with_everyone_in_it():
    drawn = cyclic_poisson_indices(key(7), 5, n_examples=9, n_groups=1, sample_rate=1.0)
    assert drawn.tolist() == list(range(9))


def test_a_group_or_a_bin_may_be_empty():
    for t in range(50):
        arguments = {"n_examples": 2, "n_groups": 50}
        assert len(cyclic_poisson_indices(key(1), t, sample_rate=0.5, **arguments)) <= 2
    sizes = [len(balls_in_bins_indices(key(1), t, n_examples=2, n_bins=50)) for t in range(50)]
    assert sum(sizes) == 2


def test_streams_of_different_samplers_are_unrelated():
    a = [balls_in_bins_indices(key(7), t, n_examples=100, n_bins=4).tolist() for t in range(4)]
    b = [
        cyclic_poisson_indices(key(7), t, n_examples=100, n_groups=4, sample_rate=1.0).tolist()
        for t in range(4)
    ]
    assert a != b


def test_fixed_order_goes_through_the_data_again_and_again():
    passes = [fixed_order_indices(t, n_examples=7, batch_size=3).tolist() for t in range(6)]
    assert passes == [[0, 1, 2], [3, 4, 5], [6]] * 2


def test_the_cost_of_b_min_sep_is_that_of_what_is_drawn(monkeypatch):
    forget()
    used = 0
    original = sampling._uniform

    def counted(stream: RngKey, size: int) -> Any:
        nonlocal used
        used += size
        return original(stream, size)

    monkeypatch.setattr(sampling, "_uniform", counted)
    n, steps = 10_000, 500
    for t in range(steps):
        b_min_sep_indices(key(7), t, n_examples=n, min_sep=5, sample_rate=0.01)
    forget()
    assert used < 2 * n + 1.1 * (steps + 100) * n * 0.01


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SAMPLERS["cyclic_poisson"](key(7), -1, 5), ValueError, "step must be >= 0"),
        (lambda: SAMPLERS["balls_in_bins"](key(7), -1, 5), ValueError, "step must be >= 0"),
        (lambda: SAMPLERS["b_min_sep"](key(7), -1, 5), ValueError, "step must be >= 0"),
        (lambda: SAMPLERS["b_min_sep"](key(7), 0, 0), ValueError, "n_examples must be >= 1"),
        (lambda: SAMPLERS["balls_in_bins"](key(7), 0, 0), ValueError, "n_examples must be >= 1"),
        (
            lambda: balls_in_bins_indices(key(7), 0, n_examples=5, n_bins=0),
            ValueError,
            "n_bins must be >= 1",
        ),
        (
            lambda: cyclic_poisson_indices(key(7), 0, n_examples=5, n_groups=0, sample_rate=0.1),
            ValueError,
            "n_groups must be >= 1",
        ),
        (
            lambda: cyclic_poisson_indices(
                key(7), 0, n_examples=5, n_groups=2, sample_rate=math.nan
            ),
            ValueError,
            "sample_rate must be in",
        ),
        (
            lambda: b_min_sep_indices(key(7), 0, n_examples=100, min_sep=3, sample_rate=0.34),
            PrivacyError,
            r"min_sep=3 .* sample_rate=0\.34; use a batch of at most n / min_sep = 33\.3333",
        ),
        (lambda: fixed_order_indices(-1, n_examples=5, batch_size=2), ValueError, "step"),
        (lambda: fixed_order_indices(0, n_examples=5, batch_size=0), ValueError, "batch_size"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "draw",
    [
        lambda step, start: balls_in_bins_indices(
            key(7), step, n_examples=4000, n_bins=10, start=start
        ),
        lambda step, start: cyclic_poisson_indices(
            key(7), step, n_examples=4000, n_groups=10, sample_rate=1.0, start=start
        ),
        lambda step, start: b_min_sep_indices(
            key(7), step, n_examples=4000, min_sep=10, sample_rate=0.1, start=start
        ),
    ],
    ids=["balls in bins", "cyclic poisson", "b-min-sep"],
)
def test_another_horizon_has_groups_of_its_own(draw):
    # What the first has told about who is where must not help with the second.
    first, second = set(draw(3, 0).tolist()), set(draw(23, 20).tolist())
    rate = 0.1
    expected, sd = 4000 * rate**2, math.sqrt(4000 * rate**2)
    assert abs(len(first & second) - expected) < 5 * sd
    with pytest.raises(ValueError, match="step must be >= 20, got 19"):
        draw(19, 20)
