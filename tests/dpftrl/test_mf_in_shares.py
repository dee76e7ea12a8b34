"""Correlated noise made in shares on several ranks: the same as on one, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from opake_lightning.distributed import sum_gradients
from opake_lightning.dpftrl.noise import (
    MFNoise,
    _mechanism,
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    identity_strategy,
    lambda_cgd_strategy,
    mf_gaussian_noise,
)
from opake_lightning.errors import CheckpointError
from opake_lightning.random import elements_of, key
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.types import ClippedPytree, SecondMomentClippedPytree
from tests.helpers import on_ranks

N, STEPS, SAVED = 300_000, 4, 2  # some blocks, of which every rank makes some
SCHEMA = {"min_sep": 4, "max_participations": 1}
FORMS: dict[str, dict[str, Any]] = {
    "outputs": {"strategy": band_mf_strategy(3)},
    "buffers": {"strategy": blt_strategy(2)},
    "inputs": {"strategy": bisr_strategy(3), "memory": "store"},
    "drawn_again": {"strategy": bisr_strategy(3), "memory": "regenerate"},
    "float64": {"strategy": band_mf_strategy(3)},
    "float64_per_example": {
        "strategy": band_mf_strategy(2),
        "second_moment_strategy": identity_strategy(),
    },
    "nothing": {"strategy": lambda_cgd_strategy(0.7)},
    "per_example": {
        "strategy": band_mf_strategy(2),
        "second_moment_strategy": identity_strategy(),
    },
    "aggregate": {
        "strategy": band_mf_strategy(2),
        "second_moment_strategy": band_mf_strategy(2),
    },
}


def tree(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((N,), value),
        "b": torch.full((7,), value, dtype=torch.float64),
        "none": torch.zeros(0),
    }


def made(name: str) -> tuple[MFNoise, Any]:
    return mf_gaussian_noise(
        tree(0.0), n_steps=STEPS, noise_multiplier=2.0, key=key(7), **SCHEMA, **FORMS[name]
    )


def gradient(name: str, ranks: int) -> Any:
    """This rank's part of a gradient whose sum is 1 everywhere."""
    part, dtypes = tree(1 / ranks), None
    if name.startswith("float64"):
        dtypes = part["b"].dtype, part["none"].dtype, part["w"].dtype  # in leaf order
        # A little more than 1, or many sums with noise would lie between two float32 numbers.
        value = (1 + 1e-9) / ranks
        part = {path: torch.full_like(leaf.double(), value) for path, leaf in part.items()}
    grads = ClippedPytree(part, 0.25, dtypes=dtypes)
    if name.endswith("per_example"):
        square = {path: leaf.clone() for path, leaf in part.items()}
        return SecondMomentClippedPytree(grads, ClippedPytree(square, 0.25**2, dtypes=dtypes))
    if name == "aggregate":
        return SecondMomentClippedPytree(grads, projection_radius=1.0)
    return grads


def leaves(noised: Any) -> list[torch.Tensor]:
    parts = [noised] if hasattr(noised, "pytree") else [noised.gradient, noised.square]
    return [leaf for part in parts for leaf in part.pytree.values()]


def work(ranks: int, inplace: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in FORMS:
        noise_fn, state = made(name)
        released = []
        for t in range(STEPS):
            if t == SAVED:
                out[f"{name} as it was"] = state.share
                state = noise_fn.whole(state)
                out[f"{name} saved"] = state_dict(state)
            noised, state = noise_fn.across_ranks(gradient(name, ranks), state, inplace=inplace)
            released += leaves(noised)
        out[name] = released
        out[f"{name} parted"] = state.share
    return out


def work_of_3(rank: int) -> dict[str, Any]:
    return work(3, inplace=bool(rank))


@pytest.fixture(scope="module")
def three() -> list[Any]:
    return on_ranks(work_of_3, 3)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return work(1, inplace=False)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", FORMS)
def test_three_ranks_release_what_one_does(three, alone, name):
    for rank in three:
        assert all(map(torch.equal, rank[name], three[0][name]))
        for ours, theirs in zip(rank[name], alone[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
            if name.startswith("float64") and ours.dtype == torch.float32:
                assert int((ours != theirs).sum()) <= 5  # rounded once, and so to the same
    noise_fn, state = made(name)
    for t in range(STEPS):  # and one that is not asked to share
        noised, state = noise_fn(sum_gradients(gradient(name, 1)), state)
        mine = leaves(noised)
        assert all(map(torch.equal, mine, alone[name][t * len(mine) : (t + 1) * len(mine)]))


@pytest.mark.dist
@pytest.mark.parametrize("name", FORMS)
def test_what_is_saved_is_whole_and_goes_on_alone(three, alone, name):
    saved = alone[f"{name} saved"]
    for rank in three:
        found = rank[f"{name} saved"]
        assert found.keys() == saved.keys()
        for path, value in found.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(value, saved[path]), path
    noise_fn, state = made(name)
    state = from_state_dict(state, three[0][f"{name} saved"], strict=True)
    released = []
    for _ in range(SAVED, STEPS):
        noised, state = noise_fn(gradient(name, 1), state)
        released += leaves(noised)
    rest = alone[name][-len(released) :]
    assert all(map(torch.equal, released, rest))


@pytest.mark.dist
@pytest.mark.parametrize("name", FORMS)
def test_a_state_knows_what_it_remembers(three, name):
    shared = name not in ("drawn_again", "nothing", "aggregate")
    for number, rank in enumerate(three):
        share = (number, 3) if shared else (0, 1)
        assert rank[f"{name} as it was"] == rank[f"{name} parted"] == share


@pytest.mark.parametrize("share", [(0, 2), (1, 2), (2, 3)])
def test_a_part_is_not_taken_for_the_whole(share):
    noise_fn, state = made("outputs")
    state = replace(state, share=share)
    for use in (
        lambda: noise_fn(gradient("outputs", 1), state),
        lambda: noise_fn.across_ranks(gradient("outputs", 1), state),
        lambda: noise_fn.whole(state),
    ):
        with pytest.raises(
            CheckpointError, match=rf"sharded over {share[1]} ranks.* holds shard {share[0]}"
        ):
            use()
    restored = from_state_dict(made("outputs")[1], state_dict(state), strict=True)
    assert restored.share == share


def test_a_rank_does_not_go_on_with_the_part_of_another(monkeypatch):
    noise_fn, state = made("outputs")
    monkeypatch.setattr(_mechanism, "world_size", lambda: 2)
    monkeypatch.setattr(_mechanism, "rank", lambda: 1)
    with pytest.raises(
        CheckpointError, match=r"sharded over 2 ranks.*shard 0 .this is rank 1 of 2"
    ):
        noise_fn.across_ranks(gradient("outputs", 2), replace(state, share=(0, 2)))


def test_what_is_squared_is_projected_first():
    """Or the squares move by more than their noise is made for."""
    strategy = identity_strategy()
    noise_fn, state = mf_gaussian_noise(
        torch.zeros(2),
        strategy,
        second_moment_strategy=strategy,
        n_steps=2,
        noise_multiplier=1e-9,
        key=key(7),
    )
    far = ClippedPytree(torch.tensor([3.0, 4.0]), 0.25)
    pair, _ = noise_fn(SecondMomentClippedPytree(far, projection_radius=1.0), state)
    torch.testing.assert_close(pair.square.pytree, torch.tensor([0.36, 0.64]))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_pair_goes_on_with_the_share_that_its_horizon_has(share):
    grads = gradient("aggregate", 1)
    noise_fn, state = mf_gaussian_noise(
        tree(0.0),
        n_steps=3,
        noise_multiplier=1.0,
        key=key(7),
        square_share=0.5,
        **SCHEMA,
        **FORMS["aggregate"],
    )
    _, state = noise_fn(grads, state)
    with pytest.raises(CheckpointError, match="one share holds for the whole horizon"):
        noise_fn(grads, replace(state, square_share=share))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 65_536, 65_537, 300_000])
def test_shares_cover_everything_once(n, ranks):
    like = torch.empty(n)
    shares = [elements_of(like, (rank, ranks)) for rank in range(ranks)]
    assert [place for begin, end in shares for place in range(begin, end)] == list(range(n))
