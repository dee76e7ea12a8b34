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


def forms(rank: int, ranks: int) -> dict[str, Any]:
    gradient = ClippedPytree(tree(rank, ranks), SENSITIVITY)
    square = ClippedPytree(tree(rank, ranks), SENSITIVITY**2)
    return {
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
        before = leaves(grads) if name == "gradient" else []
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
@pytest.mark.parametrize("form", ["gradient", "per_example", "aggregate"])
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
def test_the_noise_is_there_once(three):
    noise = three[0]["gradient"][0].double() - 1
    assert abs(noise.std() / (SIGMA * SENSITIVITY) - 1) < 5 / math.sqrt(2 * N)
    # In every part of it, whoever made that.
    for part in noise.chunk(12):
        assert abs(part.std() / (SIGMA * SENSITIVITY) - 1) < 5 / math.sqrt(2 * len(part))
