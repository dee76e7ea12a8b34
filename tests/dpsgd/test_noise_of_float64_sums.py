"""Sums stay in float64 until they have their noise, and are rounded once, to the asked types."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opake_lightning import distributed
from opake_lightning._normal import fill_normal, keystream
from opake_lightning._pairs import projected_square, squares_of
from opake_lightning._tree import in_float64, layout_of, packed, unpack
from opake_lightning.distributed import sum_gradients
from opake_lightning.dpftrl.noise import (
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    identity_strategy,
    mf_gaussian_noise,
)
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.random import fold_in, key
from opake_lightning.types import ClippedPytree, SecondMomentClippedPytree
from tests.helpers import on_ranks

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
STDDEV = 0.5


def params() -> dict[str, Any]:
    """Types that take turns, so that the flat tensors are not in the order of the leaves."""
    return {
        "a": torch.zeros(3, 4),
        "b": [torch.zeros(5, dtype=F64), torch.zeros(2, dtype=BF16)],
        "c": torch.zeros(0, 7),
        "d": torch.zeros(()),
        "e": torch.zeros(2, 3, dtype=F64),
    }


DTYPES = (F32, F64, BF16, F32, F32, F64)


def sum_like(tree: Any, value: float = 0.0, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Any:
    """A sum of gradients for ``tree`` as clipping makes it: views of one flat tensor a group."""
    layout = in_float64(layout_of(tree))
    flats = [flat.fill_(value) for flat in layout.empty()]
    return ClippedPytree(unpack(flats, layout), 1.0, dtypes=dtypes)


def of(value: Any, sensitivity: float = 1.0) -> ClippedPytree:
    return ClippedPytree(torch.as_tensor(value, dtype=F64), sensitivity, dtypes=(F32,))


def independent(tree: Any, sigma: float) -> Any:
    return gaussian_noise(noise_multiplier=sigma, key=key(7))


def correlated(tree: Any, sigma: float, strategy: Any = None) -> Any:
    return mf_gaussian_noise(
        tree, strategy or identity_strategy(), n_steps=5, noise_multiplier=sigma, key=key(7)
    )


mechanisms = pytest.mark.parametrize("make", [independent, correlated])


def leaves(tree: Any) -> list[Tensor]:
    return [tree["a"], *tree["b"], tree["c"], tree["d"], tree["e"]]


@mechanisms
@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_every_leaf_is_released_in_its_type(make, sigma, inplace):
    noise_fn, state = make(params(), sigma)
    third = 1 / 3
    noised, _ = noise_fn(sum_like(params(), third), state, inplace=inplace)
    assert tuple(leaf.dtype for leaf in leaves(noised.pytree)) == DTYPES
    assert [leaf.shape for leaf in leaves(noised.pytree)] == [p.shape for p in leaves(params())]
    if sigma == 0:
        for leaf in leaves(noised.pytree):
            assert torch.equal(leaf, torch.full_like(leaf, third))


@mechanisms
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_what_is_released_is_packed_as_the_parameters_are(make, sigma):
    """Or the optimizer would copy it, leaf by leaf."""
    tree = {name: p for name, p in params().items() if name != "b"}
    noise_fn, state = make(tree, sigma)
    noised, _ = noise_fn(sum_like(tree, 1.0, (F32, F32, F32, F64)), state)
    flats = packed(noised.pytree, layout_of(tree))
    assert flats is not None
    assert [(flat.dtype, len(flat)) for flat in flats] == [(F32, 13), (F64, 6)]


@mechanisms
def test_the_sum_is_written_to_only_when_asked(make):
    noise_fn, state = make(params(), 1.0)
    grads = sum_like(params(), 1 / 3)
    kept = [leaf.clone() for leaf in leaves(grads.pytree)]
    versions = [leaf._version for leaf in leaves(grads.pytree)]
    pure, _ = noise_fn(grads, state)
    assert all(map(torch.equal, leaves(grads.pytree), kept))
    assert [leaf._version for leaf in leaves(grads.pytree)] == versions
    inplace, _ = noise_fn(grads, state, inplace=True)
    assert all(map(torch.equal, leaves(pure.pytree), leaves(inplace.pytree)))
    # No other memory where the type stays.
    assert inplace.pytree["e"].data_ptr() == grads.pytree["e"].data_ptr()


def test_the_noise_on_float32_is_that_of_float32_draws():
    """Whatever the sum is kept in: in float64 it would be other noise, and take longer."""
    n = 1001
    rng = fold_in(fold_in(fold_in(key(7), "gaussian_noise"), 0), 0)
    drawn = np.empty(n, np.float32)
    fill_normal(_source(rng), 0, drawn)
    noise_fn, state = independent(None, STDDEV)
    noised, _ = noise_fn(of(torch.zeros(n)), state)
    assert noised.noise_stddev == STDDEV
    assert np.array_equal(noised.pytree.numpy(), drawn * np.float32(STDDEV))
    # A sum that float32 can hold, plus that noise, is what it was when sums were float32.
    value = torch.linspace(-1, 1, n)
    noised, _ = noise_fn(of(value), state)
    assert torch.equal(noised.pytree, noise_fn(ClippedPytree(value, 1.0), state)[0].pytree)


def _source(rng: Any) -> Any:
    secret = rng.bits.to_bytes(16, "big")
    return keystream(hashlib.blake2b(b"normal", key=secret, digest_size=32).digest())


STREAMS = {
    "outputs": {"strategy": band_mf_strategy(3)},
    "buffers": {"strategy": blt_strategy(2)},
    "inputs": {"strategy": bisr_strategy(3), "memory": "store"},
    "drawn_again": {"strategy": bisr_strategy(3), "memory": "regenerate"},
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("inplace", [False, True])
def test_correlated_noise_is_that_of_float32_parameters(name, inplace):
    n = 40_000  # of which pieces are worked on
    (noise_fn, wide), (_, narrow) = (
        mf_gaussian_noise(
            torch.zeros(n), n_steps=5, noise_multiplier=1.0, key=key(7), **STREAMS[name]
        )
        for _ in range(2)
    )
    for _ in range(5):
        ours, wide = noise_fn(of(torch.full((n,), 1 / 3, dtype=F64)), wide, inplace=inplace)
        theirs, narrow = noise_fn(ClippedPytree(torch.zeros(n), 1.0), narrow)
        assert ours.pytree.dtype == F32
        assert ours.noise_stddev == theirs.noise_stddev
        assert torch.equal(ours.pytree, (theirs.pytree.double() + 1 / 3).float())


@mechanisms
def test_the_noise_is_there_once(make):
    n = 300_000
    noise_fn, state = make(torch.zeros(n), 2.0)
    noised, _ = noise_fn(of(torch.ones(n, dtype=F64), 0.25), state)
    noise = noised.pytree.double() - 1
    assert abs(float(noise.mean())) < 5 * STDDEV / math.sqrt(n)
    assert abs(float(noise.std()) / STDDEV - 1) < 5 / math.sqrt(2 * n)


@mechanisms
def test_rounding_comes_after_the_noise(make):
    """What float32 cannot tell apart is told apart by the mean of what is released."""
    n, big, sigma = 200_000, 2.0**24, 4.0
    noise_fn, state = make(torch.zeros(n), sigma)
    one, other = (
        noise_fn(of(torch.full((n,), value, dtype=F64)), state)[0].pytree.double().mean()
        for value in (big, big + 1)
    )
    # Numbers of this size are rounded to even ones, which moves each by at most 1.
    assert abs(float(other - one) - 1) < 5 * 2 / math.sqrt(n)


# --- a row more or less ---

ROWS, C = 20_000, 0.1


def row() -> Tensor:
    """A gradient of norm C whose multiples float32 has to round."""
    gradient = torch.arange(1.0, 1001.0, dtype=F64).sqrt()
    return C * gradient / gradient.norm()


def moved(kind: str, rank: int) -> Tensor:
    """The sum over ranks, each with half of the rows, with all of them and with one less."""
    half, layout = ROWS // 2, [torch.zeros(300), torch.zeros(700)]
    sums = []
    for rows in (half, half - (rank == 1)):
        part = (rows * row()).split([300, 700])
        grads = ClippedPytree(list(part), C, dtypes=(F32, F32))
        if kind == "float32":
            grads = ClippedPytree([leaf.float() for leaf in part], C)
        summed = sum_gradients(grads)
        assert summed.dtypes == grads.dtypes
        assert [leaf.shape for leaf in summed.pytree] == [leaf.shape for leaf in layout]
        sums.append(torch.cat(summed.pytree).double())
    return torch.stack(sums)


def moved_on_a_rank(rank: int) -> dict[str, Tensor]:
    return {kind: moved(kind, rank) for kind in ("float64", "float32")}


@pytest.mark.dist
def test_one_row_of_many_moves_the_sum_over_ranks_by_no_more_than_its_norm():
    ranks = on_ranks(moved_on_a_rank)
    for kind in ("float64", "float32"):
        assert torch.equal(ranks[0][kind], ranks[1][kind])
        full, less = ranks[0][kind]
        distance = float((full - less).norm()) / C
        # That the rows are such that it matters: in float32 the guarantee does not hold.
        assert (abs(distance - 1) < 1e-6) == (kind == "float64")


def test_sums_are_collected_in_float64(monkeypatch):
    seen = []

    def all_reduce(flat: Tensor, group: Any = None) -> None:
        seen.append((flat.dtype, flat.numel()))
        flat.mul_(2)

    monkeypatch.setattr(distributed, "world_size", lambda group=None: 2)
    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    for inplace in (False, True):
        grads = sum_like(params(), 1 / 3)
        summed = sum_gradients(grads, inplace=inplace)
        assert summed.dtypes == DTYPES
        for leaf, before in zip(leaves(summed.pytree), leaves(grads.pytree), strict=True):
            assert torch.equal(leaf, torch.full_like(leaf, 2 / 3, dtype=F64))
            assert leaf.numel() == 0 or (leaf.data_ptr() == before.data_ptr()) == inplace
    assert seen == [(F64, 15), (F64, 11)] * 2


# --- pairs ---


@pytest.mark.parametrize("inplace", [False, True])
@mechanisms
def test_both_parts_of_a_pair_are_rounded_to_their_types(make, inplace):
    if make is correlated:
        noise_fn, state = mf_gaussian_noise(
            params(),
            identity_strategy(),
            second_moment_strategy=identity_strategy(),
            n_steps=1,
            noise_multiplier=1.0,
            key=key(7),
        )
    else:
        noise_fn, state = make(params(), 1.0)
    for pair in (
        SecondMomentClippedPytree(sum_like(params(), 0.5), sum_like(params(), 0.5)),
        SecondMomentClippedPytree(sum_like(params(), 0.5), projection_radius=1.0),
    ):
        given = [pair.gradient] if pair.square is None else [pair.gradient, pair.square]
        kept = [[leaf.clone() for leaf in leaves(part.pytree)] for part in given]
        noised, _ = noise_fn(pair, state, inplace=inplace)
        for part in (noised.gradient, noised.square):
            assert tuple(leaf.dtype for leaf in leaves(part.pytree)) == DTYPES
        for part, before in zip(given, kept, strict=True):
            assert all(map(torch.equal, leaves(part.pytree), before)) != inplace


def test_the_square_of_the_aggregate_moves_by_no_more_than_its_bound():
    """One row of ten thousand: in float32, the square is rounded by a part of what it moves by."""
    batch, radius = 10_000, 1.0
    direction = row() / C
    pairs = [
        SecondMomentClippedPytree(of(rows / batch * direction, 1 / batch), projection_radius=radius)
        for rows in (batch, batch - 1)
    ]
    (one, _), (other, _) = (squares_of(pair, inplace=False) for pair in pairs)
    assert one.pytree.dtype == F64
    assert one.dtypes == (F32,)
    exact = direction.square() * (1 - (1 - 1 / batch) ** 2)
    assert float((one.pytree - other.pytree - exact).norm() / exact.norm()) < 1e-9
    assert float((one.pytree - other.pytree).norm()) <= one.sensitivity
    rounded = one.pytree.float().double() - other.pytree.float().double()
    assert float((rounded - exact).norm() / exact.norm()) > 1e-5


def test_squares_are_packed_as_the_sum_is():
    grads = sum_like(params(), 0.25)
    square = projected_square(grads.pytree, 10.0, grads.dtypes)
    assert packed(square, in_float64(layout_of(params()))) is not None
    for leaf in leaves(square):
        assert torch.equal(leaf, torch.full_like(leaf, 0.0625, dtype=F64))


# --- what cannot be ---


@mechanisms
def test_types_that_fit_no_gradient_are_refused(make):
    noise_fn, state = make(torch.zeros(3), 1.0)
    zeros = torch.zeros(3, dtype=F64)
    with pytest.raises(ValueError, match=r"1 leaves need as many dtypes, got \(\)"):
        noise_fn(ClippedPytree(zeros, 1.0, dtypes=()), state)
    with pytest.raises(TypeError, match=r"real floating-point types, not \(torch.int32,\)"):
        noise_fn(ClippedPytree(zeros, 1.0, dtypes=(torch.int32,)), state)


def test_correlated_noise_needs_the_types_of_its_template():
    noise_fn, state = correlated(torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match="leaves are of another type"):
        noise_fn(ClippedPytree(torch.zeros(3, dtype=F64), 1.0), state)
