"""That noise goes on after a restart as if nothing had happened, or not at all."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import optree
import pytest
import torch

from opake_lightning.dpftrl.noise import MFNoiseState, bisr_strategy, mf_gaussian_noise
from opake_lightning.errors import CheckpointError
from opake_lightning.random import key
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.types import ClippedPytree
from tests.dpftrl.mf_cases import STRATEGIES, noise, released, template, zeros_like

every_strategy = pytest.mark.parametrize("name", STRATEGIES)
N = 11


def reloaded(state: Any) -> Any:
    """What a file gives back of the state's dictionary."""
    file = io.BytesIO()
    torch.save(state_dict(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_strategy
@pytest.mark.parametrize("inplace", [False, True])
def test_a_restart_at_any_step_is_bit_equal(name: str, inplace: bool) -> None:
    tree = template()
    noise_fn, state = noise(name, N, tree, start=3)
    files, want = [], []
    for _ in range(N):
        files.append(reloaded(state))
        noised, state = noise_fn(ClippedPytree(zeros_like(tree), 1.0), state, inplace=inplace)
        want.append(noised.pytree)
    for at, flat in enumerate(files):
        again, fresh = noise(name, N, tree, start=3, seed=99)
        state = from_state_dict(fresh, flat)
        for t in range(at, min(at + 6, N)):
            noised, state = again(ClippedPytree(zeros_like(tree), 1.0), state, inplace=inplace)
            assert optree.tree_all(optree.tree_map(torch.equal, noised.pytree, want[t]))
        assert state.key == key(7)


def test_buffers_are_saved_by_leaf_and_hold_nothing_else() -> None:
    tree = template()
    noise_fn, state = noise("bsr", N, tree)
    _, state = released(noise_fn, state, 2, tree)
    flat = state_dict(state)
    assert flat["buffers/gradient/layer/weight"].shape == (4, 3, 4)
    assert flat["buffers/gradient/head/1"].shape == (4, 0, 3)
    assert (flat["step"], flat["start"], flat["key"]) == (2, 0, key(7).hex())
    # Five rows' worth of elements in a file, not the memory that they are views of.
    for value in flat.values():
        if isinstance(value, torch.Tensor):
            assert value.untyped_storage().nbytes() == value.nbytes


@every_strategy
def test_a_state_restored_in_part_is_refused(name: str) -> None:
    tree = template()
    noise_fn, state = noise(name, N, tree)
    _, state = released(noise_fn, state, 2, tree)
    flat = state_dict(state)
    for path in flat:
        less = {other: value for other, value in flat.items() if other != path}
        with pytest.raises(CheckpointError, match="lacks"):
            from_state_dict(state, less)


OTHERS: dict[str, dict[str, Any]] = {
    "another strategy": {"strategy": bisr_strategy(4)},
    "another horizon": {"n_steps": 12},
    "another start": {"start": 1},
    "another schema": {"min_sep": 3},
    "other participations": {"min_sep": 2, "max_participations": 3},
    "less noise": {"noise_multiplier": 0.5},
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS.keys())
def test_a_state_of_other_settings_is_refused_in_the_same_memory(changed: dict[str, Any]) -> None:
    tree = torch.zeros(3)
    options: dict[str, Any] = {"strategy": bisr_strategy(4, momentum=0.9), "n_steps": 11}
    options |= {"noise_multiplier": 1.0, "key": key(7), "min_sep": 2}
    noise_fn, state = mf_gaussian_noise(tree, **options)
    other, fresh = mf_gaussian_noise(tree, **(options | changed))
    _, state = released(noise_fn, state, 2, tree)
    restored = from_state_dict(fresh, state_dict(state))
    for mixed in (state, restored):
        with pytest.raises(CheckpointError, match="the noise state is that of") as error:
            other(ClippedPytree(tree, 1.0), mixed)
        assert state.strategy in str(error.value)
        assert fresh.strategy in str(error.value)


@pytest.mark.parametrize("name", ["band_mf", "blt", "identity"])
def test_a_state_of_another_shape_does_not_load(name: str) -> None:
    tree = {"w": torch.zeros(3)}
    noise_fn, state = noise("bsr", N, tree)
    _, fresh = noise(name, N, tree)
    with pytest.raises(CheckpointError):
        from_state_dict(fresh, state_dict(released(noise_fn, state, 1, tree)[1]))
    _, wider = noise("bsr", N, {"w": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="shape"):
        from_state_dict(wider, state_dict(state))


def test_other_memory_is_refused_since_it_was_not_kept_up_to_date() -> None:
    tree = torch.zeros(3)
    options: dict[str, Any] = {"n_steps": 6, "noise_multiplier": 1.0, "key": key(7)}
    store, state = mf_gaussian_noise(tree, bisr_strategy(3), memory="store", **options)
    again, _ = mf_gaussian_noise(tree, bisr_strategy(3), memory="regenerate", **options)
    _, state = released(store, state, 2, tree)
    with pytest.raises(CheckpointError, match="memory="):
        again(ClippedPytree(tree, 1.0), state)


def test_noise_of_a_matrix_that_came_out_otherwise_is_not_gone_on_with() -> None:
    tree = torch.zeros(3)
    noise_fn, state = noise("blt", N, tree)
    _, state = released(noise_fn, state, 2, tree)
    (numbers,) = state.numbers.values()
    rounded = dataclasses.replace(state, numbers={"gradient": numbers * (1 + 1e-13)})
    assert (
        noise_fn(ClippedPytree(tree, 1.0), rounded)[1].numbers is noise_fn.initial(key(7)).numbers
    )
    other = dataclasses.replace(state, numbers={"gradient": numbers * (1 + 1e-6)})
    with pytest.raises(CheckpointError, match="depends on the kind of processor"):
        noise_fn(ClippedPytree(tree, 1.0), other)


def damaged(state: MFNoiseState, **changes: Any) -> MFNoiseState:
    return dataclasses.replace(state, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 1, "step": 3}, "the noise state is that of"),
        ({"step": 1}, "no run has that begins at step 2"),
        ({"square_share": 1.0}, "no run has"),
        ({"square_share": float("nan")}, "no run has"),
        ({"buffers": {}}, "has buffers \\[\\], expected \\['gradient'\\]: memory= differs"),
        ({"numbers": {}}, "other numbers for the strategy of the gradient"),
        ({"buffers": {"gradient": {"w": torch.zeros(3, 3)}}}, "another structure or other shapes"),
        ({"buffers": {"gradient": {"v": torch.zeros(4, 3)}}}, "another structure or other shapes"),
        ({"buffers": {"gradient": {"w": torch.zeros(4, 3).double()}}}, "must be torch.float32"),
    ],
)
def test_a_damaged_state_is_refused(changes: dict[str, Any], message: str) -> None:
    tree = {"w": torch.zeros(3)}
    noise_fn, state = noise("bsr", N, tree, start=2)
    with pytest.raises(CheckpointError, match=message):
        noise_fn(ClippedPytree(tree, 1.0), damaged(state, **changes))


def test_what_is_no_state_is_refused() -> None:
    noise_fn, _ = noise("bsr", N, torch.zeros(3))
    with pytest.raises(TypeError, match=r"expected the MFNoiseState .* got a int"):
        noise_fn(ClippedPytree(torch.zeros(3), 1.0), 3)  # type: ignore[arg-type]


def test_a_horizon_that_was_refused_or_failed_has_written_nothing() -> None:
    tree = {"w": torch.ones(3), "v": torch.ones(2)}
    noise_fn, state = noise("bsr", N, tree)
    _, state = released(noise_fn, state, 2, tree)
    kept = optree.tree_map(torch.clone, state.buffers)
    bad = damaged(state, buffers={"gradient": {"w": state.buffers["gradient"]["w"]}})
    with pytest.raises(CheckpointError):
        noise_fn(ClippedPytree(tree, 1.0), bad, inplace=True)
    with pytest.raises(ValueError, match="does not have the structure"):
        noise_fn(ClippedPytree({"w": torch.ones(3)}, 1.0), state, inplace=True)
    assert torch.equal(tree["w"], torch.ones(3))
    assert optree.tree_all(optree.tree_map(torch.equal, state.buffers, kept))


def test_buffers_that_lie_elsewhere_are_read_as_they_are() -> None:
    # At the address of a matrix of ours, in memory as large, but with rows otherwise apart.
    tree = torch.zeros(3)
    noise_fn, state = noise("bsr", N, tree)
    _, state = released(noise_fn, state, 4, tree)
    large = torch.full((64, 3), 1e6)
    large[:4] = state.buffers["gradient"]
    moved = damaged(state, buffers={"gradient": large[:4]})
    want, _ = noise_fn(ClippedPytree(tree, 1.0), state)
    got, after = noise_fn(ClippedPytree(tree.clone(), 1.0), moved, inplace=True)
    assert torch.equal(got.pytree, want.pytree)
    assert after.buffers["gradient"].stride() == state.buffers["gradient"].stride()


def test_buffers_in_each_others_place_are_read_as_they_are() -> None:
    tree = {name: torch.zeros(3) for name in "abc"}
    noise_fn, state = noise("bsr", N, tree)
    _, state = released(noise_fn, state, 4, tree)
    kept = state.buffers["gradient"]
    swapped = {"a": kept["a"], "b": kept["c"], "c": kept["b"]}
    got, want = (
        noise_fn(ClippedPytree(tree, 1.0), damaged(state, buffers={"gradient": buffers}))[0].pytree
        for buffers in (swapped, optree.tree_map(torch.clone, swapped))
    )
    assert optree.tree_all(optree.tree_map(torch.equal, got, want))
