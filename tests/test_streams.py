"""Which stream each draw of a run comes from: a release with other streams would break resuming.

Each has a word of its own, so that no two purposes of a run's key ever share a stream.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch

from opake_lightning._normal import fill_normal, keystream
from opake_lightning.dpftrl.noise import identity_strategy, mf_gaussian_noise
from opake_lightning.dpftrl.sampling import (
    b_min_sep_indices,
    balls_in_bins_indices,
    cyclic_poisson_indices,
)
from opake_lightning.dpsgd.clipping import adaptive
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.dpsgd.sampling import poisson_indices
from opake_lightning.optimizers import sgd
from opake_lightning.random import (
    add_normal_,
    bernoulli_indices,
    fold_in,
    key,
    seeded,
    split,
    words,
)
from opake_lightning.step import Step, no_noise
from opake_lightning.types import ClippedPytree, SecondMomentClippedPytree

KEY, STEP = key(7), 3


def stream(*path: int | str):
    rng = KEY
    for part in path:
        rng = fold_in(rng, part)
    return rng


def normals(rng, stddev=1.0):
    return add_normal_(rng, torch.zeros(5), stddev)


def zeros(sensitivity=1.0):
    return ClippedPytree(torch.zeros(5), sensitivity)


def test_a_key_becomes_normal_numbers_by_a_digest():
    aes = hashlib.blake2b(b"normal", key=KEY.bits.to_bytes(16, "big"), digest_size=32).digest()
    expected = np.zeros(5, np.float32)
    fill_normal(keystream(aes), 0, expected)
    assert np.array_equal(normals(KEY).numpy(), expected)


def test_words_come_from_all_of_a_key():
    halves = np.array([KEY.bits & (2**64 - 1), KEY.bits >> 64], np.uint64)
    assert np.array_equal(words(KEY).random_raw(9), np.random.Philox(key=halves).random_raw(9))


def test_keys_come_from_keys():
    def digest(kind, data, rng=b""):
        message = b"opake_lightning\0" + kind + data
        return int.from_bytes(hashlib.blake2b(message, key=rng, digest_size=16).digest(), "big")

    assert key(300).bits == digest(b"key\0i", b"\x01\x2c")
    secret = KEY.bits.to_bytes(16, "big")
    assert fold_in(KEY, 300).bits == digest(b"fold_in\0i", b"\x01\x2c", secret)
    assert fold_in(KEY, "word").bits == digest(b"fold_in\0s", b"word", secret)
    assert split(KEY, 2) == (stream("split", 0), stream("split", 1))
    assert int(KEY.digest(), 16) == digest(b"digest\0s", b"", secret)


def test_noise():
    noise_fn, state = gaussian_noise(noise_multiplier=2.0, key=KEY)
    for step in range(2):
        noised, state = noise_fn(zeros(0.5), state)
        assert torch.equal(noised.pytree, normals(stream("gaussian_noise", step, 0)))


def test_noise_of_a_pair():
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=KEY)
    pair, _ = noise_fn(SecondMomentClippedPytree(zeros(), square=zeros()), state)
    for part, path in ((pair.gradient, (0,)), (pair.square, ("square", 0))):
        expected = normals(stream("gaussian_noise", 0, *path), part.noise_stddev)
        assert torch.equal(part.pytree, expected)


def test_correlated_noise():
    noise_fn, state = mf_gaussian_noise(
        torch.zeros(5),
        identity_strategy(),
        n_steps=2,
        noise_multiplier=1.0,
        key=KEY,
        second_moment_strategy=identity_strategy(),
        start=STEP,
    )
    pair, _ = noise_fn(SecondMomentClippedPytree(zeros(), square=zeros()), state)
    for part, path in ((pair.gradient, ()), (pair.square, ("square",))):
        expected = normals(stream("mf_gaussian", STEP, *path, 0), part.noise_stddev)
        torch.testing.assert_close(part.pytree, expected)


def test_counts_of_adaptive_clipping():
    state = adaptive(1.0).begin(KEY).on_stream(KEY, STEP)
    assert state.key == stream("adaptive_clipping", STEP)
    moved = adaptive(1.0).after(state, torch.zeros(1, 0, dtype=torch.float64), 100.0)
    count = add_normal_(
        fold_in(fold_in(state.key, "adaptive_clipping"), 0), torch.zeros(1).double(), 5.0
    )
    assert moved.clipping_norm == pytest.approx(np.exp(-0.2 * float(count) / 100))


def test_poisson_draws():
    drawn = poisson_indices(KEY, STEP, n_examples=100, sample_rate=0.2)
    assert np.array_equal(drawn, bernoulli_indices(stream("poisson_sampling", STEP), 100, 0.2))
    uniform = ((words(KEY).random_raw(28) >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    at = np.cumsum(np.floor(np.log(uniform) / np.log1p(-0.1)) + 1) - 1
    assert np.array_equal(bernoulli_indices(KEY, 100, 0.1), at[at < 100])


def test_parts_and_their_draws():
    def parts(word, start):
        return words(stream("horizon", start, word)).random_raw(100) % np.uint64(4)

    for start, step in ((0, 6), (4, 9)):
        mine = (step - start) % 4
        drawn = balls_in_bins_indices(KEY, step, n_examples=100, n_bins=4, start=start)
        assert np.array_equal(drawn, np.flatnonzero(parts("balls_in_bins", start) == mine))
        drawn = cyclic_poisson_indices(
            KEY, step, n_examples=100, n_groups=4, sample_rate=0.5, start=start
        )
        group = np.flatnonzero(parts("cyclic_poisson", start) == mine)
        chosen = stream("horizon", start, "cyclic_poisson_draw", step - start)
        assert np.array_equal(drawn, group[bernoulli_indices(chosen, len(group), 0.5)])


def test_renewals():
    first = b_min_sep_indices(KEY, 0, n_examples=100, min_sep=1, sample_rate=0.2)
    raw = words(stream("horizon", 0, "b_min_sep", "first")).random_raw(100)
    uniform = ((raw >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    assert np.array_equal(first, np.flatnonzero(np.log(uniform) / np.log1p(-0.2) < 1))


def test_what_the_loss_draws():
    def grad_fn(params, batch, *, state):
        return (torch.rand(3), None), state

    _, noise_state = gaussian_noise(noise_multiplier=0.0, key=KEY)
    step = Step(grad_fn, no_noise, sgd(0.1), None, noise_state)
    state = step.init(torch.zeros(3))
    for number in range(2):
        drawn, _, state = step.release(torch.zeros(3), None, state)
        with seeded(stream("forward", number, 0)):
            assert torch.equal(drawn, torch.rand(3))


def test_what_others_draw():
    with seeded(KEY):
        drawn = random.random()
    assert drawn == random.Random(stream("global").bits).random()
