"""Noise made in shares on several ranks: once in all, the same as on one, equal on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from opake_lightning.distributed import sum_gradients
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.random import key
from opake_lightning.types import ClippedPytree, SecondMomentClippedPytree
from tests.helpers import on_ranks

N = 300_000  # some blocks, of which every rank makes some
SIGMA, SENSITIVITY = 2.0, 0.25


def tree(rank: int, ranks: int) -> dict[str, Any]:
    """This rank's part of a gradient whose sum is 1 everywhere."""
    part = 1 / ranks
    return {
        "w": torch.full((N,), part),
        "b": torch.full((7,), part, dtype=torch.float64),
        "none": torch.zeros(0),
    }


def exact(part: dict[str, Any], ranks: int, sensitivity: float) -> ClippedPytree:
    """The part in float64, to be released in the types that it has."""
    # A little more than 1, or many sums with noise would lie in the middle of two float32 numbers.
    value = (1 + 1e-9) / ranks
    leaves = {name: torch.full_like(leaf.double(), value) for name, leaf in part.items()}
    dtypes = part["b"].dtype, part["none"].dtype, part["w"].dtype  # in leaf order
    return ClippedPytree(leaves, sensitivity, dtypes=dtypes)


def forms(rank: int, ranks: int) -> dict[str, Any]:
    part = tree(rank, ranks)
    gradient, square = (ClippedPytree(part, s) for s in (SENSITIVITY, SENSITIVITY**2))
    in_float64, its_square = (exact(part, ranks, s) for s in (SENSITIVITY, SENSITIVITY**2))
    return {
        "float64": in_float64,
        "float64_per_example": SecondMomentClippedPytree(in_float64, its_square),
        "float64_aggregate": SecondMomentClippedPytree(in_float64, projection_radius=1.0),
        "gradient": gradient,
        "per_example": SecondMomentClippedPytree(gradient, square),
        "aggregate": SecondMomentClippedPytree(gradient, projection_radius=1.0),
    }


def leaves(noised: Any) -> list[torch.Tensor]:
    parts = [noised] if hasattr(noised, "pytree") else [noised.gradient, noised.square]
    return [leaf for part in parts for leaf in part.pytree.values()]


def work(rank: int, ranks: int) -> dict[str, Any]:
    noise_fn, state = gaussian_noise(noise_multiplier=SIGMA, key=key(7))
    out = {}
    for name, grads in forms(rank, ranks).items():
        before = leaves(grads) if name in ("gradient", "float64") else []
        kept = [leaf.clone() for leaf in before]
        noised, after = noise_fn.across_ranks(grads, state)
        assert after.step == 1
        assert all(map(torch.equal, before, kept))
        out[name] = leaves(noised)
    return out


def work_of_3(rank: int) -> dict[str, Any]:
    return work(rank, 3)


@pytest.fixture(scope="module")
def three() -> list[Any]:
    return on_ranks(work_of_3, 3)


@pytest.mark.dist
@pytest.mark.parametrize("form", forms(0, 1))
def test_three_ranks_release_what_one_does(three, form):
    alone = work(0, 1)[form]
    noise_fn, state = gaussian_noise(noise_multiplier=SIGMA, key=key(7))
    called = leaves(noise_fn(sum_gradients(forms(0, 1)[form]), state)[0])
    assert all(map(torch.equal, alone, called))
    for rank in three:
        assert all(map(torch.equal, rank[form], three[0][form]))
        for ours, theirs in zip(rank[form], alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.dist
def test_of_float64_parts_all_ranks_release_what_one_does_to_the_bit(three):
    """They are rounded once: in float32, a third of a sum and noise are, before they are summed."""
    for form in ("float64", "float64_per_example"):
        for rank in three:
            for ours, theirs in zip(rank[form], work(0, 1)[form], strict=True):
                assert ours.dtype == theirs.dtype
                # But for sums in float64 that end next to where float32 rounds the other way.
                assert int((ours != theirs).sum()) <= (5 if ours.dtype == torch.float32 else 7)


@pytest.mark.dist
@pytest.mark.parametrize("form", ["gradient", "float64"])
def test_the_noise_is_there_once(three, form):
    noise = three[0][form][0].double() - 1
    assert abs(noise.std() / (SIGMA * SENSITIVITY) - 1) < 5 / math.sqrt(2 * N)
    # In every part of it, whoever made that.
    for part in noise.chunk(12):
        assert abs(part.std() / (SIGMA * SENSITIVITY) - 1) < 5 / math.sqrt(2 * len(part))
