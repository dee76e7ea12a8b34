r"""Normal numbers from an AES-256 keystream, on the CPU.

The keystream of AES-256 in counter mode is cut into words; two words make two independent standard
normal numbers (Box & Muller 1958):

.. math:: R = \sqrt{-2 \ln u}, \qquad z_1 = R \cos \varphi, \quad z_2 = R \sin \varphi,

with u uniform in (0, 1) and φ uniform in [-π, π). A block's words are those of the nonce that its
number is, so blocks can be made in any order, by any thread or process, and
are the same; and whoever does not know the key cannot tell the stream from random, which is more
than can be said of a Mersenne Twister: of that, 624 outputs give away all others.

A 32-bit u would end the tails at 6.7 standard deviations, and put few, far apart values before
that. So where u is below 2⁻¹⁶, 32 more bits, of a nonce that nothing else uses, are put behind
those it has; tails then reach to 9.4. float64 numbers have 64 bits at once.

The keystream is what AES-GCM (NIST SP 800-38D) makes of zeros, and its tag is dropped: a processor
that has instructions for it makes that faster than the counter mode alone, which is all that is
needed of it. While it is made no other thread can run, so its time counts more than once.

NumPy does the arithmetic: its vector kernels release the interpreter, so that threads do it in
parallel, and their last bits do not depend on the number of threads. They may depend on which of
its kernels a machine's processor gets.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

__all__ = ["BLOCK", "fill_normal", "keystream"]

# Numbers in a block. What a block works on stays in the cache; with fewer, threads mostly wait
# for each other between NumPy's calls.
BLOCK = 1 << 17
_ZEROS = memoryview(bytes(8 * BLOCK))
_TAG = 16  # bytes
# Words of a radius that get more bits, and in which nonces these are: in none that a block has.
_MORE_BITS_BELOW = 1 << 16
_MORE_BITS_FROM = 1 << 95


def keystream(key: bytes) -> AESGCM:
    """The source of one draw's blocks, from 32 secret bytes."""
    return AESGCM(key)


def fill_normal(source: AESGCM, block: int, out: NDArray[Any]) -> None:
    """Fill ``out`` with the independent N(0, 1) of one block.

    Args:
        source: What :func:`keystream` made for this one draw: a block's words are used once.
        block: Number of the block, from 0.
        out: float32 or float64 array of one dimension, of at most BLOCK elements. Those of a
            shorter one are not the first of a longer one.
    """
    single = out.dtype == np.float32
    n = (len(out) + 1) // 2
    words = _words(source, block, 2 * n * (4 if single else 8))
    # The second half of an odd number of elements is one short, and the last sine is left out.
    cosine, sine = out[:n], out[n:] if len(out) == 2 * n else np.empty(n, out.dtype)
    radius = np.empty(n, out.dtype)
    if single:
        _uniform_and_angle(source, block, words, radius, sine)
    else:
        _uniform_and_angle_64(words, radius, sine)
    np.log(radius, out=radius)
    np.multiply(radius, -2, out=radius)
    np.sqrt(radius, out=radius)
    np.cos(sine, out=cosine)
    np.sin(sine, out=sine)
    np.multiply(cosine, radius, out=cosine)
    np.multiply(sine, radius, out=sine)
    if len(out) < 2 * n:
        out[n:] = sine[:-1]


def _uniform_and_angle(
    source: AESGCM,
    block: int,
    words: NDArray[np.uint8],
    uniform: NDArray[Any],
    angle: NDArray[Any],
) -> None:
    n = len(uniform)
    first = words.view(np.uint32)[:n]
    np.copyto(uniform, first, casting="unsafe")
    np.add(uniform, 0.5, out=uniform)
    np.multiply(uniform, 2.0**-32, out=uniform)
    if first.min() < _MORE_BITS_BELOW:
        few = np.flatnonzero(first < _MORE_BITS_BELOW)
        more = _words(source, _MORE_BITS_FROM + block, 4 * len(few)).view(np.uint32)
        bits = first[few] + (more + 0.5) * 2.0**-32
        uniform[few] = bits * 2.0**-32
    np.copyto(angle, words.view(np.int32)[n:], casting="unsafe")
    np.multiply(angle, math.pi * 2.0**-31, out=angle)


def _uniform_and_angle_64(
    words: NDArray[np.uint8], uniform: NDArray[Any], angle: NDArray[Any]
) -> None:
    n = len(uniform)
    np.copyto(uniform, words.view(np.uint64)[:n], casting="unsafe")
    np.add(uniform, 0.5, out=uniform)
    np.multiply(uniform, 2.0**-64, out=uniform)
    np.copyto(angle, words.view(np.int64)[n:], casting="unsafe")
    np.multiply(angle, math.pi * 2.0**-63, out=angle)


def _words(source: AESGCM, nonce: int, n_bytes: int) -> NDArray[np.uint8]:
    """The first bytes of the keystream of one nonce; read only."""
    made = source.encrypt(nonce.to_bytes(12, "big"), _ZEROS[:n_bytes], None)
    return np.frombuffer(made, np.uint8, len(made) - _TAG)
