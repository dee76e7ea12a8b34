"""Normal numbers from a keystream: whose values they are, and that they are normal."""

from __future__ import annotations

import hashlib
import math
import multiprocessing

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from opake_lightning import _normal
from opake_lightning._normal import BLOCK, fill_normal, keystream
from opake_lightning.random import add_normal_, fold_in, key, visit_normals

KEY = bytes(range(32))
both = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def numbers(n, dtype=np.float32, aes=KEY, blocks=None):
    out = np.zeros(n, dtype)
    for block in blocks or range(-(-n // BLOCK)):
        fill_normal(keystream(aes), block, out[block * BLOCK : (block + 1) * BLOCK])
    return out


def words(nonce, n, kind):
    """What AES-256 in counter mode gives after ``nonce``: GCM counts from 1, which is the tag's."""
    start = nonce.to_bytes(12, "big") + (2).to_bytes(4, "big")
    cipher = Cipher(algorithms.AES(KEY), modes.CTR(start)).encryptor()
    return np.frombuffer(cipher.update(bytes(n * np.dtype(kind).itemsize)), kind)


@both
def test_numbers_are_box_muller_of_the_keystream(dtype):
    bits, unsigned = (32, np.uint32) if dtype == np.float32 else (64, np.uint64)
    n = BLOCK + 1001  # of an odd number, the last pair's second is left out
    got = numbers(n, dtype)
    for block, size in ((0, BLOCK), (1, 1001)):
        half = (size + 1) // 2
        raw = words(block, 2 * half, unsigned)
        u = (raw[:half].astype(float) + 0.5) / 2.0**bits
        turn = raw[half:].astype(float) / 2.0**bits
        radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * turn
        pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
        # A u next to 1 is rounded, so in float32 a radius next to 0 is coarse.
        close = 2e-5 if bits == 32 else 1e-12
        np.testing.assert_allclose(got[block * BLOCK :][:size], pairs, rtol=0, atol=close)


@both
def test_a_block_is_the_same_whoever_makes_it(dtype):
    n = 5 * BLOCK + 77
    whole = numbers(n, dtype)
    parts = sum(numbers(n, dtype, blocks=range(i, j)) for i, j in ((4, 6), (0, 1), (1, 4)))
    assert np.array_equal(whole, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_block_of_a_draw_is_its_own_and_in_its_place(dtype):
    """However it is cut into pieces: noise that comes twice would be subtracted from itself."""
    n, visited = 3 * BLOCK + 77, torch.zeros(3 * BLOCK + 77, dtype=dtype)
    whole = add_normal_(key(7), torch.zeros(n, dtype=dtype), 1.0)

    def visit(drawn, begin, length):
        visited[begin : begin + length] += drawn[0]

    visit_normals([key(7)], visited, visit)
    assert torch.equal(visited, whole)
    visit_normals([key(8), key(7)], visited, lambda drawn, *place: visit(drawn[1:], *place))
    assert torch.equal(visited, whole + whole)  # each of several keys has its own
    secret = key(7).bits.to_bytes(16, "big")
    aes = hashlib.blake2b(b"normal", key=secret, digest_size=32).digest()
    assert np.array_equal(whole.numpy(), numbers(n, whole.numpy().dtype, aes=aes))
    assert len(set(whole.tolist())) > 0.95 * n


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_values_do_not_depend_on_the_number_of_threads(threads, monkeypatch):
    out = torch.zeros(40 * BLOCK + 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    add_normal_(key(7), out, 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(out, add_normal_(key(7), torch.zeros_like(out), 1.0))


def test_a_thread_that_fails_is_heard(monkeypatch):
    """Else a part would have no noise, and nobody would know."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    out = torch.zeros(40 * BLOCK)

    def fails(drawn, begin, size):
        if begin + size == len(out):
            raise MemoryError

    with pytest.raises(MemoryError):
        visit_normals([key(7)], out, fails)


def noise_by_threads():
    return add_normal_(key(7), torch.zeros(40 * BLOCK), 1.0).numpy()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    """Those of its parent are not there, and would be waited for."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    mine = noise_by_threads()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        its = pool.apply_async(noise_by_threads).get(timeout=20)
    assert np.array_equal(mine, its)


@both
def test_they_are_normal(dtype):
    n = 1 << 22
    got = numbers(n, dtype).astype(float)
    # Moments of a standard normal number, and the standard errors of their estimates.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(got**power) - mean) < 5 * math.sqrt(variance / n)
    assert stats.kstest(got, "norm").pvalue > 1e-6
    inside = np.sort(np.abs(got))
    # As many beyond 3, 4 and 5 as there should be: five standard deviations of a Poisson count.
    for far in (3, 4, 5):
        expected = n * math.erfc(far / math.sqrt(2))
        assert abs(n - np.searchsorted(inside, far) - expected) < 5 * math.sqrt(expected) + 1


def test_neighbours_halves_blocks_and_keys_are_independent():
    n = 4 * BLOCK
    got, other = numbers(n).astype(float), numbers(n, aes=bytes(32)).astype(float)
    half = BLOCK // 2
    pairs = {
        "neighbours": (got[:-1], got[1:]),
        "the two of one pair": (got[:half], got[half:BLOCK]),
        "blocks": (got[:BLOCK], got[BLOCK : 2 * BLOCK]),
        "keys": (got, other),
        "squares of the two of one pair": (got[:half] ** 2 - 1, got[half:BLOCK] ** 2 - 1),
    }
    for name, (a, b) in pairs.items():
        scale = math.sqrt(np.mean(a * a) * np.mean(b * b))
        assert abs(np.mean(a * b)) < 5 * scale / math.sqrt(len(a)), name


def test_small_words_get_more_bits():
    # Every word of a radius is 3 here: without further bits all radii would be equal.
    n = 1000
    uniform, angle = np.empty(n, np.float32), np.empty(n, np.float32)
    raw = np.full(2 * n, 3, np.uint32)
    _normal._uniform_and_angle(keystream(KEY), 0, raw.view(np.uint8), uniform, angle)
    more = words(_normal._MORE_BITS_FROM, n, np.uint32)
    np.testing.assert_allclose(uniform, (3 + more / 2.0**32) / 2.0**32, rtol=2e-7)
    assert len(np.unique(uniform)) > 0.9 * n
    raw[:n] = 0
    _normal._uniform_and_angle(keystream(KEY), 0, raw.view(np.uint8), uniform, angle)
    assert math.sqrt(-2 * math.log(2.0**-65)) > 9.4
    assert uniform.min() > 0
    assert math.sqrt(-2 * math.log(uniform.min())) > 7  # of a thousand words of 0


def test_no_part_of_the_keystream_is_used_twice(monkeypatch):
    """Each block asks for one nonce, and for one of the other half if radii need more bits."""
    asked = []

    def listening(source, nonce, n_bytes):
        asked.append((nonce, n_bytes))
        return words_of(source, nonce, n_bytes)

    words_of = _normal._words
    monkeypatch.setattr(_normal, "_words", listening)
    monkeypatch.setattr(_normal, "_MORE_BITS_BELOW", 1 << 20)  # so that every block needs some
    numbers(3 * BLOCK)
    nonces = [nonce for nonce, _ in asked]
    assert sorted(nonces) == [0, 1, 2, *(2**95 + block for block in range(3))]
    assert max(n_bytes for _, n_bytes in asked) <= 16 * (2**32 - 2)  # what GCM has for a nonce


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_standard_deviation_is_right(dtype):
    unit = add_normal_(key(7), torch.zeros(1001, dtype=dtype), 1.0)
    for stddev in (1e-20, 1e-5, 3.0, 1e20):
        out = add_normal_(key(7), torch.zeros(1001, dtype=dtype), stddev)
        torch.testing.assert_close(out, unit * stddev, rtol=1e-6, atol=0)


def test_streams_of_a_run_share_no_words():
    """The AES key of a draw is a digest of its RngKey: other draws, other streams."""
    draws = [
        add_normal_(rng, torch.zeros(64), 1.0)
        for rng in (key(7), key(8), fold_in(key(7), 0), fold_in(key(7), 1))
    ]
    for index, draw in enumerate(draws):
        assert all(not set(draw.tolist()) & set(other.tolist()) for other in draws[:index])
