"""Keys, streams, and the block that makes other people's randomness repeat."""

from __future__ import annotations

import math
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opake_lightning.random import (
    RngKey,
    add_normal_,
    fold_in,
    fresh_key,
    generator,
    key,
    seeded,
    split,
)

bits = st.integers(0, 2**128 - 1)


def draw(rng: RngKey, n: int = 8) -> list[float]:
    return torch.randn(n, generator=generator(rng)).tolist()


@given(value=bits)
def test_a_key_survives_hex_and_hides_from_print(value):
    rng = RngKey(value)
    assert RngKey.from_hex(rng.hex()) == rng
    assert pickle.loads(pickle.dumps(rng)) == rng
    assert len(rng.hex()) == 32
    assert {repr(rng), str(rng), f"{rng}"} == {"RngKey(<secret>)"}


@given(value=bits, bit=st.integers(0, 127))
def test_every_bit_of_a_key_changes_the_stream(value, bit):
    assert draw(RngKey(value)) != draw(RngKey(value ^ (1 << bit)))


@pytest.mark.parametrize("shared", [32, 64, 127])
def test_keys_that_agree_in_their_low_bits_have_unrelated_streams(shared):
    one, other = (
        torch.randn(20_000, generator=generator(RngKey(5 + (high << shared)))) for high in (0, 1)
    )
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / math.sqrt(20_000)


def test_every_word_of_the_generator_comes_from_the_key():
    states = torch.stack([generator(key(seed)).get_state() for seed in range(64)])
    words = states[:, 24 : 24 + 624 * 8].reshape(64, 624, 8)
    assert bool((words[:, :, :4].amax(0) > words[:, :, :4].amin(0)).all())
    assert not words[:, :, 4:].any()


def test_derived_keys_are_all_different_and_stay_the_same():
    root = key(7)
    derived = [
        root,
        key(8),
        key(2**200),
        *(fold_in(root, data) for data in (0, 1, 255, 256, 2**70, "", "0", "1", "split", "a", "ä")),
        *split(root, 3),
        fold_in(fold_in(root, 1), 2),
        fold_in(fold_in(root, 2), 1),
        fold_in(key(8), 0),
    ]
    assert len(set(derived)) == len(derived)
    # A checkpoint of today must continue tomorrow: these are part of the format.
    assert key(7).hex() == "da7bf5eb0c83fdbd2cf450db720b2e7e"
    assert fold_in(key(7), "noise").hex() == "ffa494dbfe35a34dbda3408508014606"
    assert split(root, 3) == split(root, 5)[:3]


def test_a_fresh_key_does_not_come_from_a_global_seed():
    keys = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        keys.append(fresh_key())
    assert keys[0] != keys[1]
    assert max(k.bits for k in (*keys, *(fresh_key() for _ in range(20)))) >> 120


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: key(-1), ValueError, "seed must be >= 0, got -1"),
        (lambda: key(1.0), TypeError, r"seed must be an int, got 1\.0"),
        (lambda: RngKey(-1), ValueError, "a key must be in"),
        (lambda: RngKey(2**128), ValueError, "a key must be in"),
        (lambda: fold_in(key(1), -1), ValueError, "data must be >= 0, got -1"),
        (lambda: fold_in(7, 1), TypeError, "expected an RngKey, got a int"),
        (
            lambda: generator(None),
            TypeError,
            r"expected an RngKey, got a NoneType.*random\.key\(seed\)",
        ),
        (lambda: split(key(1), 0), ValueError, "n must be >= 1, got 0"),
        (lambda: add_normal_(key(1), torch.zeros(2, 2), 1.0), TypeError, "flat float32 or float64"),
        (lambda: add_normal_(key(1), torch.zeros(2).half(), 1.0), TypeError, "torch.float16"),
        (
            lambda: add_normal_(key(1), torch.zeros(2), 1.0, into=torch.zeros(2).half()),
            TypeError,
            "torch.float16",
        ),
        (
            lambda: add_normal_(key(1), torch.zeros(2), 1.0, into=torch.zeros(3)),
            ValueError,
            "got 3 elements on cpu for 2 on cpu",
        ),
        (lambda: add_normal_(key(1), torch.zeros(2), -1.0), ValueError, "stddev must be a finite"),
        (lambda: add_normal_(key(1), torch.zeros(2), math.nan), ValueError, "stddev must be"),
    ],
)
def test_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_normal_numbers_are_added_to_what_is_there():
    out = torch.ones(1000, dtype=torch.float64)
    added = add_normal_(key(7), out, 2.0)
    assert added is out
    unit = add_normal_(key(7), torch.zeros(1000, dtype=torch.float64), 1.0)
    torch.testing.assert_close(out, 1 + 2 * unit)
    assert torch.equal(add_normal_(key(7), torch.ones(5), 0.0), torch.ones(5))
    assert add_normal_(key(7), torch.zeros(0), 1.0).shape == (0,)


@pytest.mark.parametrize("n", [1, 1000, 300_000])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_of_the_noise_are_the_whole_once(n, ranks):
    whole = add_normal_(key(7), torch.zeros(n), 2.0)
    shares = [
        add_normal_(key(7), torch.zeros(n), 2.0, share=(rank, ranks)) for rank in range(ranks)
    ]
    assert torch.equal(torch.stack(shares).sum(0), whole)
    assert ((torch.stack(shares) != 0).sum(0) == 1).all()


@pytest.mark.parametrize("n", [1, 40, 300_000])
@pytest.mark.parametrize("types", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_sums_with_noise_are_written_elsewhere_rounded_once(n, types):
    total, into = torch.full((n,), 1 / 3, dtype=types[0]), torch.empty(n, dtype=types[1])
    added = add_normal_(key(7), total, 2.0, into=into)
    assert added is into
    assert torch.equal(total, torch.full((n,), 1 / 3, dtype=types[0]))
    noise = add_normal_(key(7), torch.zeros(n, dtype=types[1]), 2.0)
    assert torch.equal(into, (total.double() + noise.double()).to(types[1]))
    assert torch.equal(add_normal_(key(7), total, 0.0, into=into), total.to(types[1]))


@pytest.mark.parametrize("stddev", [0.0, 2.0])
def test_of_what_is_written_elsewhere_a_share_is_a_share(stddev):
    n = 300_000
    total = torch.ones(n, dtype=torch.float64)
    whole = add_normal_(key(7), total, stddev, into=torch.empty(n))
    shares = [
        add_normal_(key(7), total, stddev, share=(rank, 3), into=torch.zeros(n))
        for rank in range(3)
    ]
    assert torch.equal(torch.stack(shares).sum(0), whole)


def test_float32_noise_can_be_added_in_float64():
    out = torch.full((300_000,), 1 / 3, dtype=torch.float64)
    for rank in range(2):
        add_normal_(key(7), out, 2.0, share=(rank, 2), dtype=torch.float32)
    assert torch.equal(out, 1 / 3 + add_normal_(key(7), torch.zeros(300_000), 2.0).double())


# -- seeded -------------------------------------------------------------------------------------


def globals_now() -> tuple[object, ...]:
    numpy = np.random.get_state()  # noqa: NPY002
    return (
        random.getstate(),
        numpy[0],
        numpy[1].tobytes(),
        numpy[2:],
        torch.get_rng_state().tolist(),
    )


def draw_globals() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_a_seeded_block_repeats_and_leaves_no_trace():
    before = globals_now()
    with seeded(key(7)):
        first = draw_globals()
    assert globals_now() == before
    draw_globals()
    with seeded(key(7)):
        assert draw_globals() == first
        with seeded(key(8)):
            inner = draw_globals()
        after = draw_globals()
    with seeded(key(7)):
        draw_globals()
        assert draw_globals() == after  # the inner block took nothing from the outer one
    assert all(a != b for a, b in zip(first, inner, strict=True))


def test_a_seeded_block_restores_after_an_exception():
    def fail_inside() -> None:
        with seeded(key(7)):
            draw_globals()
            raise KeyError

    before = globals_now()
    with pytest.raises(KeyError):
        fail_inside()
    assert globals_now() == before


@given(high=st.integers(1, 2**64 - 1))
def test_a_seeded_block_uses_all_of_the_key(high):
    with seeded(RngKey(5)):
        low = draw_globals()
    with seeded(RngKey(5 + (high << 64))):
        assert all(a != b for a, b in zip(low, draw_globals(), strict=True))


@pytest.mark.gpu
def test_streams_on_cuda_use_all_of_the_key_and_are_normal():
    n = (1 << 22) + 1000
    base = add_normal_(key(7), torch.zeros(n, device="cuda"), 1.0)
    assert torch.equal(base, add_normal_(key(7), torch.zeros(n, device="cuda"), 1.0))
    assert abs(float(base.double().mean())) < 5 / math.sqrt(n)
    assert abs(float(base.double().square().mean()) - 1) < 5 * math.sqrt(2 / n)
    for bit in (8, 40, 70, 127):
        one, other = (
            torch.randn(10_000, device="cuda", generator=generator(RngKey(b), "cuda"))
            for b in (5, 5 ^ (1 << bit))
        )
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.05
    before = torch.cuda.get_rng_state()
    with seeded(key(7), "cuda"):
        first = torch.rand(3, device="cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())
    with seeded(key(7), "cuda"):
        assert torch.equal(first, torch.rand(3, device="cuda"))
