"""That the draw is a Poisson sample, a pure function of key and step, and cheap."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opake_lightning import random as rng
from opake_lightning.dpsgd.sampling import poisson_indices, rank_share
from opake_lightning.random import key


def draws(n: int, q: float, steps: int, seed: int = 7) -> Any:
    """One row of zeros and ones per step."""
    hit = np.zeros((steps, n), dtype=np.float64)
    for step in range(steps):
        hit[step, poisson_indices(key(seed), step, n_examples=n, sample_rate=q)] = 1
    return hit


@pytest.mark.parametrize(
    ("n", "q"), [(1, 0.3), (2, 0.999), (9, 0.5), (30, 0.1), (30, 0.97), (1000, 1e-3)]
)
def test_each_example_is_drawn_at_the_rate(n, q):
    steps = 4000
    counts = draws(n, q, steps).sum(0)
    z = (counts - steps * q) / math.sqrt(steps * q * (1 - q))
    assert abs(z.sum()) / math.sqrt(n) < 5
    if steps * q * (1 - q) > 10:
        assert np.abs(z).max() < 5
    # Chi-squared: its variance is that of n squares of a standardised binomial.
    fourth = 3 + (1 - 6 * q * (1 - q)) / (steps * q * (1 - q))
    assert abs((z**2).sum() - n) < 5 * math.sqrt(n * (fourth - 1))


def test_examples_and_steps_are_independent_in_pairs():
    n, q, steps = 8, 0.4, 8000
    hit = (draws(n, q, steps) - q) / math.sqrt(q * (1 - q))
    joint = hit.T @ hit / math.sqrt(steps)
    assert np.abs(joint[~np.eye(n, dtype=bool)]).max() < 5
    lagged = hit[1:].T @ hit[:-1] / math.sqrt(steps - 1)
    assert np.abs(lagged).max() < 5


def test_the_number_drawn_varies_as_a_binomial():
    # A batch of fixed size, or a shuffled pass, would have variance 0.
    n, q, steps = 200, 0.05, 4000
    sizes = draws(n, q, steps).sum(1)
    variance = n * q * (1 - q)
    assert abs(sizes.mean() - n * q) < 5 * math.sqrt(variance / steps)
    assert abs(sizes.var() - variance) < 5 * variance * math.sqrt(2.2 / steps)


def test_nearly_always_empty_at_a_tiny_rate():
    sizes = draws(100, 1e-5, 5000).sum(1)  # five hits expected
    assert 0 < sizes.sum() < 5 + 5 * math.sqrt(5)
    assert len(poisson_indices(key(1), 0, n_examples=100, sample_rate=1e-300)) == 0


class Words:
    """Stands for the generator: known words, counted."""

    def __init__(self, words: Any = None) -> None:
        self.words, self.drawn, self.calls = words, 0, 0
        self._source = np.random.Philox(1)

    def random_raw(self, size: int) -> Any:
        self.calls += 1
        if self.words is not None and self.calls == 1:
            return self.words
        self.drawn += size
        return self._source.random_raw(size)


@pytest.mark.parametrize("q", [0.5, 0.1, 0.003, 0.9])
def test_gaps_follow_the_geometric_law_exactly(q, monkeypatch):
    # Fed all multiples of 2⁻¹⁶, gap k must come out q (1-q)^(k-1) of the times, give or take one.
    size = 1 << 16
    monkeypatch.setattr(rng, "words", lambda _: Words(np.arange(size, dtype="u8") << 48))
    n = int(20 * size / q)
    found = poisson_indices(key(7), 0, n_examples=n, sample_rate=q)[:size]
    gaps = np.diff(found, prepend=-1)
    k = np.arange(1, 200)
    counts = (gaps[:, None] == k).sum(0)
    assert np.abs(counts - size * q * (1 - q) ** (k - 1)).max() <= 1
    assert gaps.min() == 1


def test_the_cost_is_that_of_what_is_drawn(monkeypatch):
    n, q = 10**7, 1e-4
    words = Words()
    monkeypatch.setattr(rng, "words", lambda _: words)
    for step in range(20):
        found = poisson_indices(key(7), step, n_examples=n, sample_rate=q)
        assert abs(len(found) - n * q) < 6 * math.sqrt(n * q)
    assert words.drawn < 20 * 2 * n * q


def test_a_second_helping_of_words_goes_on_where_the_first_ended(monkeypatch):
    # Rarely the first guess at how many gaps there are is too small; here always.
    short = Words(np.full(3, 1 << 63, dtype="u8"))  # three gaps of 1 at q = 0.6
    monkeypatch.setattr(rng, "words", lambda _: short)
    found = poisson_indices(key(7), 0, n_examples=1000, sample_rate=0.6)
    assert found[:3].tolist() == [0, 1, 2]
    assert short.calls == 2
    assert bool((np.diff(found) > 0).all())
    assert abs(len(found) - 600) < 5 * math.sqrt(1000 * 0.24)


def test_the_draw_depends_on_key_and_step_alone():
    def draw(seed: int, step: int) -> list[int]:
        return poisson_indices(key(seed), step, n_examples=1000, sample_rate=0.1).tolist()

    forwards = [draw(7, step) for step in range(5)]
    np.random.seed(5)  # noqa: NPY002 - to show that it changes nothing
    assert [draw(7, step) for step in reversed(range(5))] == forwards[::-1]
    assert len({tuple(d) for d in [*forwards, draw(8, 0)]}) == 6


def test_an_expected_pass_sees_63_percent_of_the_rows():
    n, batch, steps = 59_904, 128, 468
    q = batch / n
    seen = np.zeros(n, dtype=bool)
    for step in range(steps):
        seen[poisson_indices(key(7), step, n_examples=n, sample_rate=q)] = True
    p = 1 - (1 - q) ** steps
    assert p == pytest.approx(0.6325, abs=5e-5)
    assert abs(seen.sum() - n * p) < 5 * math.sqrt(n * p * (1 - p))


@given(
    n=st.integers(1, 300),
    q=st.one_of(st.floats(1e-12, 1), st.sampled_from([1.0, 1 - 2**-53, 1e-200])),
    step=st.integers(0, 10**9),
    ranks=st.integers(1, 5),
)
def test_draws_are_ascending_indices_shared_out_among_the_ranks(n, q, step, ranks):
    drawn = poisson_indices(key(7), step, n_examples=n, sample_rate=q)
    assert drawn.dtype == np.int64
    assert bool((np.diff(drawn) > 0).all())
    assert len(drawn) == 0 or (drawn[0] >= 0 and drawn[-1] < n)
    if q == 1:
        assert len(drawn) == n
    shares = [rank_share(drawn, rank=r, world_size=ranks) for r in range(ranks)]
    assert sorted(np.concatenate(shares).tolist()) == drawn.tolist()
    sizes = [len(s) for s in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("n_examples", 0, "n_examples must be >= 1, got 0"),
        ("sample_rate", 0.0, r"sample_rate must be in \(0, 1\], got 0.0"),
        ("sample_rate", 1.5, r"sample_rate must be in \(0, 1\], got 1.5"),
        ("sample_rate", math.nan, r"sample_rate must be in \(0, 1\], got nan"),
        ("step", -1, "step must be >= 0, got -1"),
    ],
)
def test_arguments_out_of_range_are_refused(argument, value, message):
    arguments = {"step": 0, "n_examples": 3, "sample_rate": 0.5, argument: value}
    with pytest.raises(ValueError, match=message):
        poisson_indices(key(7), arguments.pop("step"), **arguments)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_has_no_share(rank):
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 2\), got {rank}"):
        rank_share(np.arange(3), rank=rank, world_size=2)
