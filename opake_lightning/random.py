"""Explicit randomness: a key is 128 secret bits, and every use of it is named.

There is no global state and no default seed. A stream is derived from (key, purpose, step) by a
cryptographic hash, so that two different derivations never give related streams, and the same
derivation gives the same stream in any process, in any order, after any number of restarts.

On the CPU noise comes from a cryptographic keystream (:mod:`opake_lightning._normal`), so nothing
that is released tells what was, or will be, added elsewhere. On CUDA it comes from Philox, which is
fast, passes statistical tests and is not cryptographic.

A key comes from the operating system (:func:`fresh_key`); from a file that only its owner can read
(:func:`write_key_file`, :func:`key_from_file`) or from the environment
(:func:`key_from_environment`), so that it can be kept apart from the checkpoints, with a plan's
``key_in_checkpoint=False``; or, to reproduce a run, from a number (:func:`key`).
"""

from __future__ import annotations

import hashlib
import math
import os
import random as _python_random
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opake_lightning import _check
from opake_lightning._normal import BLOCK, fill_normal, keystream
from opake_lightning._rng_key import (
    BITS,
    RngKey,
    fold_in,
    fresh_key,
    key,
    key_from_environment,
    key_from_file,
    require_key,
    split,
    write_key_file,
)

__all__ = [
    "RngKey",
    "add_normal_",
    "adding",
    "bernoulli_indices",
    "elements_of",
    "fold_in",
    "fresh_key",
    "generator",
    "key",
    "key_from_environment",
    "key_from_file",
    "seeded",
    "split",
    "visit_normals",
    "words",
    "write_key_file",
]

# Elements that one thread works on at a time: of more, torch would share out the work to further
# threads.
_PIECE = 1 << 14
# On CUDA a block is one generator and one kernel.
_BLOCK_ELSEWHERE = 1 << 22
# Blocks for each thread that make it worth its while: for some milliseconds after an operation,
# torch's own threads wait for the next one, and take the processor that it would run on.
_WORTH_A_THREAD = 3


def generator(rng: RngKey, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator on ``device`` that starts from all of ``rng``."""
    require_key(rng)
    device = torch.device(device)
    out = torch.Generator(device=device)
    raw = rng.bits.to_bytes(BITS // 8, "big")
    if device.type == "cpu":
        out.set_state(_mersenne_state(raw))
    else:
        # A counter-based generator: 64 bits of key go to the seed; the start of the counter takes
        # the rest, kept a multiple of four and far from overflow.
        out.manual_seed(int.from_bytes(raw[:8], "big", signed=True))
        if device.type == "cuda":
            out.set_offset((int.from_bytes(raw[8:], "big") >> 4) & ~3)
    return out


def add_normal_(
    rng: RngKey,
    out: Tensor,
    stddev: float,
    *,
    share: tuple[int, int] = (0, 1),
    into: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Add independent N(0, stddev²) to every element of the flat tensor ``out``, in place.

    The values depend on ``rng``, the size, ``dtype`` and the device type; not on the number of
    threads. Element i of two tensors of different size need not get the same value.

    Args:
        rng: Key of this one draw; never use a key for two draws.
        out: One-dimensional float32 or float64 tensor.
        stddev: Standard deviation, in the units of ``out``; 0 leaves ``out`` as it is.
        share: (r, W): only what the r-th of W processes has to add, so that all of them together
            add to each element once. The same values whatever W is.
        into: Write the sums here, rounded once, and not to ``out``: a tensor like it that may have
            another type.
        dtype: Type that the noise is drawn and scaled in; by default that of the result.

    Returns:
        What has been written to.
    """
    stddev = _check.non_negative("stddev", stddev)
    target = out if into is None else into
    for each in (out, target):
        if each.dim() != 1 or each.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"out must be a flat float32 or float64 tensor, got {each.dtype} {each.shape}"
            )
    if (target.shape, target.device) != (out.shape, out.device):
        raise ValueError(
            f"into must have the size and device of out, got {len(target)} elements on "
            f"{target.device} for {len(out)} on {out.device}"
        )

    if stddev > 0:
        add = adding(out, target)

        def visit(drawn: list[Tensor], begin: int, size: int) -> None:
            del size
            add(drawn[0], stddev, begin)

        # A whole block at a time: what adds it does not share out the work to further threads.
        visit_normals([rng], out, visit, share=share, piece=BLOCK, dtype=dtype or target.dtype)
    elif target is not out:
        begin, end = elements_of(out, share)
        target[begin:end].copy_(out[begin:end])
    return target


def adding(total: Tensor, into: Tensor) -> Callable[[Tensor, float, int], None]:
    """A function ``add(noise, scale, begin)``, for one piece of flat tensors after the other.

    It writes total + scale * noise, the product rounded to the type of ``noise``, the sum to that
    of ``into``, which may be ``total``. It may be called from several threads, and overwrites
    ``noise``.
    """
    total, into = total.detach(), into.detach()
    if total.device.type != "cpu":

        def add_elsewhere(noise: Tensor, scale: float, begin: int) -> None:
            part, out = (each.narrow(0, begin, len(noise)) for each in (total, into))
            torch.add(part, noise.mul_(scale), out=out)

        return add_elsewhere
    # NumPy's threads are its caller's.
    source, target = total.numpy(), into.numpy()

    def add(noise: Tensor, scale: float, begin: int) -> None:
        scaled = noise.numpy()
        end = begin + len(scaled)
        np.multiply(scaled, scale, out=scaled)
        if source.dtype == target.dtype == scaled.dtype:
            np.add(source[begin:end], scaled, out=target[begin:end])
            return
        # One conversion after the other, in the cache, takes less than NumPy's of mixed types.
        exact = scaled.astype(np.float64)
        np.add(exact, source[begin:end], out=exact)
        np.copyto(target[begin:end], exact, casting="same_kind")

    return add


def visit_normals(
    keys: Sequence[RngKey],
    like: Tensor,
    visit: Callable[[list[Tensor], int, int], None],
    *,
    share: tuple[int, int] = (0, 1),
    piece: int = _PIECE,
    dtype: torch.dtype | None = None,
) -> None:
    """Draw one vector of independent N(0, 1) for each key, and show them a piece at a time.

    What is made of several vectors as large as a model is best made while a piece of each is in
    the cache: each then travels through memory once, and not once for every operation.

    Args:
        keys: One for each vector; never use a key for two vectors.
        like: Flat float32 or float64 tensor whose size, type and device the vectors have.
        visit: Called for every piece, once, in any order and from several threads: with one tensor
            for each key, which it may write to and must not keep; where the piece begins; and its
            length.
        share: (r, W): only the pieces of the r-th of W processes.
        piece: Elements of a piece, on the CPU; torch gives work on more of them to further threads.
        dtype: Type of the vectors, if not that of ``like``.
    """
    total, on_cpu = like.numel(), like.device.type == "cpu"
    size, blocks = _blocks(like, share)
    piece = piece if on_cpu else size
    threads = min(torch.get_num_threads(), max(1, len(blocks) // _WORTH_A_THREAD))
    threads = threads if on_cpu else 1
    sources = [_source(key, like.device) for key in keys]

    def work(part: range) -> None:
        scratch = [like.new_empty(size, dtype=dtype) for _ in keys]
        for block in part:
            begin, end = block * size, min(block * size + size, total)
            for fill, whole in zip(sources, scratch, strict=True):
                fill(block, whole[: end - begin])
            for at in range(begin, end, piece):
                length = min(piece, end - at)
                visit([whole.narrow(0, at - begin, length) for whole in scratch], at, length)

    # Each thread has a stretch of its own, and so pages of memory of its own.
    parts = [_stretch(blocks, n, threads) for n in range(threads)]
    others = [_workers(os.getpid(), threads - 1).submit(work, part) for part in parts[1:]]
    work(parts[0])
    for other in others:
        other.result()


def _source(rng: RngKey, device: torch.device) -> Callable[[int, Tensor], None]:
    """A function that fills a tensor with the numbers of one block."""
    if device.type == "cpu":
        require_key(rng)
        secret = rng.bits.to_bytes(BITS // 8, "big")
        aes = hashlib.blake2b(b"normal", key=secret, digest_size=32).digest()
        source = keystream(aes)
        return lambda block, out: fill_normal(source, block, out.numpy())
    return lambda block, out: _fill_elsewhere(fold_in(rng, block), out)


def _fill_elsewhere(rng: RngKey, out: Tensor) -> None:
    out.normal_(generator=generator(rng, out.device))


def _blocks(like: Tensor, share: tuple[int, int]) -> tuple[int, range]:
    """Elements of a block, and which blocks the share consists of."""
    size = min(BLOCK if like.device.type == "cpu" else _BLOCK_ELSEWHERE, like.numel())
    return size, _stretch(range(-(-like.numel() // size) if size else 0), *share)


def elements_of(like: Tensor, share: tuple[int, int]) -> tuple[int, int]:
    """Where a share of a vector like ``like`` begins and ends, as :func:`visit_normals` takes it.

    >>> elements_of(torch.empty(200_000), (1, 2))
    (131072, 200000)
    """
    size, blocks = _blocks(like, share)
    return min(blocks.start * size, like.numel()), min(blocks.stop * size, like.numel())


def _stretch(whole: range, part: int, parts: int) -> range:
    """The ``part``-th of ``parts`` stretches of ``whole``, as equal in length as can be."""
    return whole[len(whole) * part // parts : len(whole) * (part + 1) // parts]


def words(rng: RngKey) -> np.random.Philox:
    """A source of 64-bit words, ``words(rng).random_raw(n)``; as secret as ``rng``."""
    require_key(rng)
    return np.random.Philox(key=np.frombuffer(rng.bits.to_bytes(16, "little"), np.uint64))


def bernoulli_indices(rng: RngKey, n: int, rate: float) -> NDArray[np.int64]:
    r"""Which of ``n`` independent trials succeed, ascending; possibly none.

    The gaps between successes are geometric, so the cost is proportional to the number of them:

    .. math:: \text{gap} = 1 + \lfloor \ln U / \ln(1-q) \rfloor, \quad U \sim (0, 1]

    Args:
        rng: Key of this one draw.
        n: Number of trials, > 0.
        rate: Chance q of success, in (0, 1].

    Source: Devroye 1986, Non-Uniform Random Variate Generation, X.2 (geometric waiting times).

    >>> bernoulli_indices(key(7), 3, 1.0)
    array([0, 1, 2])
    """
    if rate == 1:
        return np.arange(n, dtype=np.int64)
    source = words(rng)
    scale = math.log1p(-rate)
    chunk = int(n * rate + 6 * math.sqrt(n * rate)) + 8
    found: list[NDArray[np.int64]] = []
    last = -1
    while last < n:
        uniform = ((source.random_raw(chunk) >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
        gaps = np.minimum(np.log(uniform) / scale, float(n)).astype(np.int64) + 1
        positions = last + np.cumsum(gaps)
        found.append(positions[positions < n])
        last = int(positions[-1])
    return np.concatenate(found)


@contextmanager
def seeded(rng: RngKey, device: torch.device | str = "cpu") -> Generator[None]:
    """Run a block with Python's, NumPy's and torch's global generators started from ``rng``.

    Code that is not ours (dropout, a dataset's augmentations) draws from global generators; inside
    this block what it draws is a function of ``rng``. All are put back afterwards.
    """
    device = torch.device(device)
    raw = fold_in(rng, "global").bits
    kept = _python_random.getstate(), np.random.get_state()  # noqa: NPY002 - what others draw from
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=True):
        torch.default_generator.set_state(_mersenne_state(raw.to_bytes(BITS // 8, "big")))
        if device.type == "cuda":
            torch.cuda.manual_seed(raw & ((1 << 63) - 1))
        _python_random.seed(raw)
        np.random.seed(np.frombuffer(raw.to_bytes(16, "big"), np.uint32))  # noqa: NPY002
        try:
            yield
        finally:
            _python_random.setstate(kept[0])
            np.random.set_state(kept[1])  # noqa: NPY002


@lru_cache(maxsize=4)
def _workers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that wait for the next draw; those of a parent process are not there in its fork."""
    del process
    return ThreadPoolExecutor(threads, thread_name_prefix="opake_lightning_noise")


def _mersenne_state(raw: bytes) -> Tensor:
    """A CPU generator state whose 624 words all come from ``raw``."""
    state = torch.Generator().manual_seed(0).get_state()
    words = hashlib.shake_256(b"mt19937\0" + raw).digest(624 * 4)
    view = state.numpy()
    # get_state() is: seed (8 bytes), left (4), seeded (4), next (8), then one 8-byte slot a word.
    view[24 : 24 + 624 * 8].view(np.uint64)[:] = np.frombuffer(words, np.uint32)
    return state
