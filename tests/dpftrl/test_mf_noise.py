"""That the noise of every strategy is C^-1 Z: the right size, never twice, in fixed memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opake_lightning._tree import layout_of, unpack
from opake_lightning.dpftrl.noise import (
    Buffers,
    MFNoiseState,
    Outputs,
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
    mf_gaussian_noise,
)
from opake_lightning.dpftrl.noise._stream import stream_of
from opake_lightning.errors import PrivacyError
from opake_lightning.random import add_normal_, adding, key, visit_normals
from opake_lightning.types import ClippedPytree, NoisedPytree
from tests.dpftrl.mf_cases import (
    DATA,
    FROM_DRAWS,
    STRATEGIES,
    draws,
    flats,
    noise,
    released,
    template,
)

BLOCK = 1 << 17  # what one generator fills
PIECE = 1 << 14  # what is worked on at a time
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def solved(strategy: Any, n: int, z: list[Tensor]) -> Tensor:
    """C^-1 z, dense, in float64."""
    return torch.linalg.solve(torch.from_numpy(strategy.matrix(n).dense()), torch.stack(z).double())


# --- what the noise is ---


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(STRATEGIES)),
    n=st.integers(1, 15),
    start=st.sampled_from([0, 1, 40]),
    seed=st.integers(0, 2**64),
    sizes=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), min_size=1, max_size=5
    ),
    memory=st.sampled_from(["auto", "store", "regenerate"]),
    sigma=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_noise_is_the_dense_inverse_times_the_draws(
    name: str, n: int, start: int, seed: int, sizes: Any, memory: Any, sigma: float
) -> None:
    tree = [
        torch.zeros(rows, columns, dtype=torch.float64 if double else torch.float32)
        for rows, columns, double in sizes
    ]
    memory = "store" if name not in FROM_DRAWS else memory
    noise_fn, state = noise(name, n, tree, sigma=sigma, seed=seed, start=start, memory=memory)
    got, _ = released(noise_fn, state, n, tree, sensitivity=0.5)
    for group, like in enumerate(flats(tree)):
        z = [draws(key(seed), tree, start + t)[group] for t in range(n)]
        want = 0.5 * sigma * solved(STRATEGIES[name], n, z)
        have = torch.stack([flats(noised.pytree)[group] for noised in got]).double()
        tolerance = 1e-10 if like.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            have, want, rtol=tolerance, atol=tolerance * max(1.0, 0.5 * sigma)
        )


@every_strategy
@pytest.mark.parametrize("n", [1, 2, 40])
def test_leaves_of_every_kind_get_noise_of_long_and_short_runs(name: str, n: int) -> None:
    tree = template()
    noise_fn, state = noise(name, n, tree)
    got, _ = released(noise_fn, state, n, tree)
    types = [(leaf.dtype, leaf.shape) for leaf in optree.tree_leaves(got[-1].pytree)]
    assert types == [
        (torch.float32 if leaf.dtype == torch.bfloat16 else leaf.dtype, leaf.shape)
        for leaf in optree.tree_leaves(tree)
    ]
    for group, tolerance in ((0, 1e-5), (1, 1e-10)):
        z = [draws(key(7), tree, t)[group] for t in range(n)]
        have = torch.stack([flats(noised.pytree)[group] for noised in got]).double()
        want = solved(STRATEGIES[name], n, z)
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


def test_noise_over_several_blocks_is_the_same_sum_of_the_same_draws() -> None:
    # Where stretches, blocks and rows meet, nothing is skipped or taken twice.
    tree = {"a": torch.zeros(BLOCK + 11), "b": torch.zeros(PIECE + 5), "c": torch.zeros(3)}
    for name in ("bsr", "blt", "bisr", "lambda_cgd"):
        noise_fn, state = noise(name, 7, tree)
        got, _ = released(noise_fn, state, 7, tree)
        want = solved(STRATEGIES[name], 7, [draws(key(7), tree, t)[0] for t in range(7)])
        have = torch.stack([flats(noised.pytree)[0] for noised in got]).double()
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


EXAMPLES = {
    "outputs (1, .5, .25)": Outputs((1.0, 0.5, 0.25)),
    "buffers (.9, .5) (.3, .2)": Buffers((0.9, 0.5), (0.3, 0.2)),
    "bsr 4 .9": bsr_strategy(4, momentum=0.9),
    "bisr 4": bisr_strategy(4),
    "bisr 4 normalized": bisr_strategy(4, normalized=True),
    "lambda_cgd .9": lambda_cgd_strategy(0.9),
    "lambda_cgd .9 normalized": lambda_cgd_strategy(0.9, normalized=True),
}


def test_every_worked_example_is_run() -> None:
    assert EXAMPLES.keys() == DATA["streamed"].keys() - {"z"}


@pytest.mark.parametrize("memory", ["store", "regenerate"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_streamed_examples(name: str, memory: Any) -> None:
    z = torch.tensor(DATA["streamed"]["z"], dtype=torch.float64)
    example = EXAMPLES[name]
    scales = np.ones(8)
    if not isinstance(example, (Outputs, Buffers)):
        scales, example = example.matrix(8).scales(), example.recurrence(8)
    if memory == "regenerate" and isinstance(example, (Outputs, Buffers)):
        with pytest.raises(ValueError, match='memory="regenerate" is for strategies whose inverse'):
            stream_of(example, memory)
        return
    stream = stream_of(example, memory)
    ring, got = torch.zeros(stream.rows, 1, dtype=torch.float64), []
    for t in range(8):
        out = torch.zeros(1, dtype=torch.float64)
        drawn = [z[t - lag, None].clone() for lag in range(stream.draws(t))]
        stream.at(t, float(scales[t]), ring, adding(out, out))(drawn, 0, 1)
        got.append(out.item())
    assert got == pytest.approx(DATA["streamed"][name], abs=1e-12)


# --- its size ---


@pytest.mark.parametrize("name", DATA["row_norms"])
def test_the_stddev_of_a_step_is_the_row_norm_of_the_inverse(name: str) -> None:
    tree = torch.zeros(2)
    noise_fn, state = mf_gaussian_noise(
        tree, EXAMPLES[name], n_steps=8, noise_multiplier=3.0, key=key(7)
    )
    got, _ = released(noise_fn, state, 8, tree, sensitivity=0.25)
    stddevs = [noised.noise_stddev / 0.75 for noised in got]
    assert stddevs == pytest.approx(DATA["row_norms"][name], rel=1e-12)


@every_strategy
def test_the_noise_has_the_stddev_that_it_says(name: str) -> None:
    tree, n = torch.zeros(40_000), 12
    noise_fn, state = noise(name, n, tree, sigma=2.0)
    got, _ = released(noise_fn, state, n, tree, sensitivity=0.1)
    inverse = np.linalg.inv(STRATEGIES[name].matrix(n).dense())
    for t, noised in enumerate(got):
        x, size = noised.pytree.double(), tree.numel()
        assert noised.noise_stddev == pytest.approx(0.2 * np.linalg.norm(inverse[t]), rel=1e-9)
        assert abs(float(x.mean())) < 5 * noised.noise_stddev / math.sqrt(size)
        measured = float(x.square().mean().sqrt())
        assert abs(measured - noised.noise_stddev) < 5 * noised.noise_stddev / math.sqrt(2 * size)


def test_the_identity_is_independent_noise() -> None:
    tree = torch.zeros(40_000)
    noise_fn, state = noise("identity", 5, tree, sigma=2.0)
    assert state.buffers == {}
    got, _ = released(noise_fn, state, 5, tree, sensitivity=0.1)
    assert {noised.noise_stddev for noised in got} == {0.2}
    correlation = torch.corrcoef(torch.stack([noised.pytree for noised in got]))
    assert float((correlation - torch.eye(5)).abs().max()) < 5 / math.sqrt(40_000)


def test_a_clipping_norm_that_changes_scales_the_noise_of_its_own_step_only() -> None:
    tree, norms = torch.zeros(9, dtype=torch.float64), [1.0, 0.1, 30.0, 2.0]
    noise_fn, state = noise("bsr", 4, tree)
    want, _ = released(noise_fn, state, 4, tree)
    for norm, fixed in zip(norms, want, strict=True):
        noised, state = noise_fn(ClippedPytree(torch.zeros_like(tree), norm), state)
        torch.testing.assert_close(noised.pytree, norm * fixed.pytree, rtol=1e-12, atol=0)
        assert noised.noise_stddev == pytest.approx(norm * fixed.noise_stddev, rel=1e-12)


@every_strategy
def test_no_noise_at_multiplier_zero_but_steps_are_counted(name: str) -> None:
    x = torch.randn(20)
    noise_fn, state = noise(name, 2, x, sigma=0.0)
    for step in (1, 2):
        noised, state = noise_fn(ClippedPytree(x, 1.0), state)
        assert torch.equal(noised.pytree, x)
        assert (noised.noise_stddev, state.step) == (0.0, step)
    with pytest.raises(PrivacyError, match="n_steps=2"):
        noise_fn(ClippedPytree(x, 1.0), state)


def test_sensitivity_is_that_of_the_schema_and_does_not_scale_the_noise() -> None:
    tree = torch.zeros(1)
    options: dict[str, Any] = {"n_steps": 9, "noise_multiplier": 9.0, "key": key(7)}
    noise_fn, state = mf_gaussian_noise(tree, identity_strategy(), min_sep=1, **options)
    assert noise_fn.sensitivity == pytest.approx(3.0)
    assert released(noise_fn, state, 1, tree)[0][0].noise_stddev == 9.0
    few, _ = mf_gaussian_noise(
        tree, identity_strategy(), min_sep=2, max_participations=4, **options
    )
    assert few.sensitivity == pytest.approx(2.0)
    unknown, _ = mf_gaussian_noise(tree, identity_strategy(), **options)
    assert unknown.sensitivity is None


# --- never twice ---


@every_strategy
def test_two_horizons_of_one_key_share_no_noise(name: str) -> None:
    tree, n = torch.zeros(20_000), 4
    noise_fn, state = noise(name, n, tree)
    first, state = released(noise_fn, state, n, tree)
    again, state = noise(name, n, tree, start=state.step)
    second, state = released(again, state, n, tree)
    assert (state.step, state.start) == (8, 4)
    both = torch.corrcoef(torch.stack([noised.pytree for noised in (*first, *second)]))
    assert float(both[:n, n:].abs().max()) < 5 / math.sqrt(20_000)


def test_the_noise_ends_with_the_horizon() -> None:
    tree = torch.zeros(3)
    noise_fn, state = noise("lambda_cgd", 2, tree, start=5)
    _, state = released(noise_fn, state, 2, tree)
    message = r"all n_steps=2 steps .* are done.*mf_gaussian_noise\(\.\.\., start=7\)"
    with pytest.raises(PrivacyError, match=message):
        noise_fn(ClippedPytree(tree, 1.0), state)


def test_keys_and_steps_and_dtypes_have_unrelated_draws() -> None:
    tree = {"a": torch.zeros(9), "b": torch.zeros(9, dtype=torch.float64)}
    seen = [
        flat.double()
        for seed in (7, 8)
        for noised in released(*noise("identity", 3, tree, seed=seed), 3, tree)[0]
        for flat in flats(noised.pytree)
    ]
    values = torch.cat(seen)
    assert len(values.unique()) == len(values)
    # From one generator, fewer than 16 numbers of either type would be the same ones.
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert bool(((one - other).abs() > 1e-5).all())


@pytest.mark.parametrize("size", [1, 15, PIECE + 1, BLOCK, 13 * BLOCK + 17])
def test_draws_are_those_of_plain_noise(size: int) -> None:
    like = torch.zeros(size)
    got = [torch.zeros(size), torch.zeros(size)]

    def visit(drawn: list[Tensor], begin: int, length: int) -> None:
        for out, z in zip(got, drawn, strict=True):
            out[begin : begin + length].add_(z)

    visit_normals([key(1), key(2)], like, visit)
    for out, seed in zip(got, (1, 2), strict=True):
        assert torch.equal(out, add_normal_(key(seed), torch.zeros(size), 1.0))


def weight_of(z: Tensor, other: Tensor, vector: Tensor) -> float:
    """By how much the vector has z, relative to how much it has the other, by least squares."""
    basis = torch.stack([z, other], 1).double()
    found = torch.linalg.lstsq(basis, vector.double()[:, None]).solution[:, 0]
    return float(found[0] / found[1])


@pytest.mark.parametrize("memory", ["regenerate", "store"])
def test_float32_does_not_round_a_coefficient_that_adds_up(memory: Any) -> None:
    # Rounded to float32 it would be wrong by 1.4e-8, which over 1e5 steps changes the sensitivity.
    tree, lam = torch.zeros(200_000), 0.99999
    noise_fn, state = mf_gaussian_noise(
        tree, lambda_cgd_strategy(lam), n_steps=9, noise_multiplier=1.7, key=key(7), memory=memory
    )
    seen, _ = released(noise_fn, state, 2, tree)
    (z0,), (z1,) = (draws(key(7), tree, step) for step in (0, 1))
    assert weight_of(z0, z1, seen[1].pytree) == pytest.approx(-lam, abs=1e-9)


def test_float32_does_not_round_how_much_a_buffer_keeps() -> None:
    tree, strategy = torch.zeros(200_000), blt_strategy(1)
    recurrence = strategy.recurrence(50_000)
    noise_fn, state = mf_gaussian_noise(
        tree, strategy, n_steps=50_000, noise_multiplier=1.7, key=key(7)
    )
    seen, state = released(noise_fn, state, 2, tree)
    (z0,), (z1,) = (draws(key(7), tree, step) for step in (0, 1))
    # S_2 = theta S_1 + x_1, with S_1 = x_0 = z_0.
    theta = weight_of(z0, z1, state.buffers["gradient"][0]) - weight_of(z0, z1, seen[1].pytree)
    assert theta == pytest.approx(recurrence.theta[0], abs=1e-9)


@pytest.mark.parametrize("name", ["bsr", "blt", "bisr", "lambda_cgd"])
def test_noise_does_not_depend_on_the_number_of_threads(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("opake_lightning.random._WORTH_A_THREAD", 1)
    tree, before, got = torch.zeros(5 * BLOCK // 2 + 3), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            got.append(released(*noise(name, 6, tree), 6, tree)[0][-1].pytree)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


# --- what it writes to, and how much it holds ---


def versions(tree: Any) -> list[int]:
    return [leaf._version for leaf in optree.tree_leaves(tree)]


@every_strategy
def test_arguments_are_written_to_only_when_asked(name: str) -> None:
    # As clipping makes it, of leaves that lie in one flat tensor of their type.
    layout = layout_of(optree.tree_map(torch.Tensor.double, template()) | {"wide": torch.zeros(9)})
    tree = unpack([flat.normal_() for flat in layout.zeros()], layout)
    noise_fn, state = noise(name, 6, tree)
    _, state = released(noise_fn, state, 3, tree)
    grads = ClippedPytree(tree, 1.0)
    kept = optree.tree_map(torch.clone, (tree, state.buffers))
    before = versions((tree, state.buffers))
    pure, after = noise_fn(grads, state)
    assert versions((tree, state.buffers)) == before
    assert optree.tree_all(optree.tree_map(torch.equal, (tree, state.buffers), kept))
    assert (state.step, after.step) == (3, 4)
    more, _ = noise_fn(grads, after)
    donated, state = noise_fn(grads, state, inplace=True)
    assert optree.tree_all(optree.tree_map(torch.equal, donated.pytree, pure.pytree))
    assert optree.tree_all(optree.tree_map(torch.equal, state.buffers, after.buffers))
    again, _ = noise_fn(ClippedPytree(kept[0], 1.0), state, inplace=True)
    assert optree.tree_all(optree.tree_map(torch.equal, again.pytree, more.pytree))


@every_strategy
def test_in_place_nothing_moves_and_memory_stays_what_it_was(name: str) -> None:
    flat = torch.zeros(9)
    # One type has no elements: it must not make the others move.
    tree = {"a": flat[:6].view(2, 3), "b": flat[6:], "c": torch.zeros(0, dtype=torch.float64)}
    noise_fn, state = noise(name, 30, tree)
    rows = {
        "identity": 0, "band_mf": 3, "band_mf momentum": 2, "blt": 2, "bsr": 4,
        "bsr normalized": 3, "bisr": 3, "bisr normalized": 3,
    }.get(name, 0)  # fmt: skip
    leaves = optree.tree_leaves(state.buffers)
    assert [leaf.shape[0] for leaf in leaves] == ([rows] * 3 if rows else [])
    places = [leaf.data_ptr() for leaf in leaves]
    for _ in range(30):
        noised, state = noise_fn(ClippedPytree(tree, 1.0), state, inplace=True)
        assert noised.pytree["b"].data_ptr() == tree["b"].data_ptr()
        assert optree.tree_leaves(state.buffers) == leaves or not rows
        assert [leaf.data_ptr() for leaf in optree.tree_leaves(state.buffers)] == places


def test_noise_does_not_depend_on_where_leaves_lie() -> None:
    flat = torch.zeros(20)
    lying = {"a": flat[:12].view(3, 4), "b": flat[12:]}
    apart = {"a": torch.zeros(4, 3).t(), "b": torch.zeros(16)[::2]}
    got = [released(*noise("bsr", 6, tree), 6, tree)[0][-1].pytree for tree in (lying, apart)]
    assert torch.equal(got[0]["a"], got[1]["a"])
    assert torch.equal(got[0]["b"], got[1]["b"])


def test_noise_does_not_touch_global_randomness() -> None:
    tree = torch.zeros(50)
    before = torch.get_rng_state()
    one = released(*noise("blt", 3, tree), 3, tree)[0][-1]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    assert torch.equal(one.pytree, released(*noise("blt", 3, tree), 3, tree)[0][-1].pytree)


# --- refusals ---


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        (torch.zeros(3), PrivacyError, "needs a ClippedPytree, .* got Tensor"),
        (NoisedPytree(torch.zeros(3), 1.0), PrivacyError, "NoisedPytree, which already has"),
        (ClippedPytree(torch.zeros(3), math.inf), PrivacyError, "sensitivity of inf"),
        (ClippedPytree(torch.zeros(3), math.nan), PrivacyError, "sensitivity of nan"),
        (ClippedPytree(torch.zeros(3), 0.0), PrivacyError, r"sensitivity of 0\.0"),
        (ClippedPytree(torch.zeros(4), 1.0), ValueError, r"leaf 0 has shape \(4,\), not \(3,\)"),
        (ClippedPytree((torch.zeros(3),), 1.0), ValueError, "does not have the structure"),
        (ClippedPytree(torch.zeros(3).double(), 1.0), ValueError, "leaves are of another type"),
    ],
)
def test_what_the_noise_is_not_for_is_refused(grads: Any, error: Any, message: str) -> None:
    noise_fn, state = noise("bsr", 4, torch.zeros(3))
    with pytest.raises(error, match=message):
        noise_fn(grads, state)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"n_steps": 0}, ValueError, "n_steps must be >= 1"),
        ({"n_steps": 2.0}, TypeError, "n_steps must be an int"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be"),
        ({"key": 42}, TypeError, "expected an RngKey, got a int"),
        ({"start": -1}, ValueError, "start must be >= 0"),
        ({"min_sep": 0}, ValueError, "min_sep must be >= 1"),
        ({"min_sep": 2, "max_participations": 0}, ValueError, "max_participations must be >= 1"),
        ({"max_participations": 2}, ValueError, "says nothing without min_sep"),
        ({"memory": "disk"}, ValueError, 'memory must be "auto", "store" or "regenerate"'),
        ({"memory": "regenerate"}, ValueError, "strategies whose inverse is banded"),
        ({"square_share": 0.5}, ValueError, "square_share is for pairs"),
        ({"strategy": "band_mf"}, TypeError, "strategy must be made by identity_strategy"),
        ({"second_moment_strategy": 3}, TypeError, "strategy must be made by identity_strategy"),
        ({"template": torch.zeros(3, dtype=torch.int64)}, TypeError, "int64"),
    ],
)
def test_arguments_out_of_range_are_refused(changed: Any, error: Any, message: str) -> None:
    options: dict[str, Any] = {"template": torch.zeros(3), "strategy": band_mf_strategy(bands=2)}
    options |= {"n_steps": 4, "noise_multiplier": 1.0, "key": key(7)}
    with pytest.raises(error, match=message):
        mf_gaussian_noise(**(options | changed))


def test_neither_state_nor_function_shows_what_is_secret() -> None:
    tree = torch.zeros(3)
    noise_fn, state = noise("bsr", 4, tree)
    _, state = released(noise_fn, state, 2, tree)
    assert isinstance(state, MFNoiseState)
    assert "buffers" not in repr(state)
    assert "secret" in repr(state)
    assert "bsr(bands=5" in repr(noise_fn)
    assert "over 4 steps from step 0" in repr(noise_fn)
