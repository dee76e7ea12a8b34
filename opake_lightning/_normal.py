r"""Normal numbers from an AES-256 keystream, on the CPU.

The keystream of AES-256 in counter mode is cut into words; two words make two independent standard
normal numbers (Box & Muller 1958):

.. math:: R = \sqrt{-2 \ln u}, \qquad z_1 = R \cos \varphi, \quad z_2 = R \sin \varphi,

with u uniform in (0, 1) and φ uniform in [-π, π). A block's words begin at a place in the stream
that its number alone decides, so blocks can be made in any order, by any thread or process, and
are the same; and whoever does not know the key cannot tell the stream from random, which is more
than can be said of a Mersenne Twister: of that, 624 outputs give away all others.

A 32-bit u would end the tails at 6.7 standard deviations, and put few, far apart values before
that. So where u is below 2⁻¹⁶, 32 more bits, from a stretch of the stream that nothing else uses,
are put behind those it has; tails then reach to 9.4. float64 numbers have 64 bits at once.

NumPy does the arithmetic: its vector kernels release the interpreter, so that threads do it in
parallel, and their last bits do not depend on the number of threads. They may depend on which of
its kernels a machine's processor gets.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

__all__ = ["BLOCK", "fill_normal"]

# Numbers in a block. What a block works on stays in the cache; with less, threads would mostly wait
# for each other between NumPy's calls.
BLOCK = 1 << 16
_BYTES = 8 * BLOCK  # of keystream that each block owns, which float32 uses half of
_ZEROS = memoryview(bytes(_BYTES))
# Words of a radius that get more bits, and where these are: far behind what any block owns.
_MORE_BITS_BELOW = 1 << 16
_MORE_BITS_FROM = 1 << 120


def fill_normal(key: bytes, block: int, out: NDArray[Any]) -> None:
    """Fill ``out`` with the independent N(0, 1) of one block.

    Args:
        key: 32 secret bytes, for this one draw: a block's words are used once for a key.
        block: Number of the block, from 0.
        out: float32 or float64 array of one dimension, of at most BLOCK elements. Those of a
            shorter one are not the first of a longer one.
    """
    single = out.dtype == np.float32
    n = (len(out) + 1) // 2
    words = np.empty(2 * n * (4 if single else 8), np.uint8)
    stream = _stream(key, block * (_BYTES // 16))
    stream.update_into(_ZEROS[: len(words)], cast("Any", words))
    # The second half of an odd number of elements is one short, and the last sine is left out.
    cosine, sine = out[:n], out[n:] if len(out) == 2 * n else np.empty(n, out.dtype)
    radius = np.empty(n, out.dtype)
    if single:
        _uniform_and_angle(key, block, words, radius, sine)
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
    key: bytes, block: int, words: NDArray[np.uint8], uniform: NDArray[Any], angle: NDArray[Any]
) -> None:
    n = len(uniform)
    first = words.view(np.uint32)[:n]
    np.copyto(uniform, first, casting="unsafe")
    np.add(uniform, 0.5, out=uniform)
    np.multiply(uniform, 2.0**-32, out=uniform)
    if first.min() < _MORE_BITS_BELOW:
        few = np.flatnonzero(first < _MORE_BITS_BELOW)
        place = _MORE_BITS_FROM + block * (_BYTES // 16)
        more = _stream(key, place).update(bytes(4 * len(few)))
        bits = first[few] + (np.frombuffer(more, np.uint32) + 0.5) * 2.0**-32
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


def _stream(key: bytes, place: int) -> CipherContext:
    """The keystream from its ``place``-th 16 bytes on."""
    return Cipher(algorithms.AES(key), modes.CTR(place.to_bytes(16, "big"))).encryptor()
