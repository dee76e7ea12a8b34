"""That a gradient and its squares, in two correlated streams, cost what one stream costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from opake_lightning._pairs import projected_square, square_sensitivity
from opake_lightning.dpftrl.noise import (
    MFNoiseState,
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
    mf_gaussian_noise,
)
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.random import key
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)
from tests.dpftrl.mf_cases import DATA, draws

FORMS = ("aggregate", "per_example")
PAIRS = {
    "bsr p64 .9/.999": (bsr_strategy(64, momentum=0.9), bsr_strategy(64, momentum=0.999)),
    "bsr p200 .9/.999": (bsr_strategy(200, momentum=0.9), bsr_strategy(200, momentum=0.999)),
    "bisr p4 .9/.999": (bisr_strategy(4, momentum=0.9), bisr_strategy(4, momentum=0.999)),
    "bisr p4 0/.9": (bisr_strategy(4), bisr_strategy(4, momentum=0.9)),
    "lcgd .5/.99": (lambda_cgd_strategy(0.5), lambda_cgd_strategy(0.99)),
}
SMALL = {
    "banded": (bsr_strategy(3, momentum=0.9), bsr_strategy(2)),
    "bands over min_sep": (bsr_strategy(8), bsr_strategy(8, momentum=0.999)),
    "bisr": (bisr_strategy(4, momentum=0.9), bisr_strategy(4, momentum=0.999)),
    "normalized": (bisr_strategy(4, normalized=True), lambda_cgd_strategy(0.9, normalized=True)),
    "lambda_cgd": (lambda_cgd_strategy(0.5), lambda_cgd_strategy(0.99)),
    "blt": (blt_strategy(n_buffers=2), identity_strategy()),
    "band_mf": (band_mf_strategy(bands=3), band_mf_strategy(bands=3, momentum=0.9)),
    "turned round": (lambda_cgd_strategy(0.99), identity_strategy()),
}
SCHEMAS = [(6, 2, 3), (7, 1, 7), (8, 3, 3), (12, 4, 3), (12, 5, 2), (11, 4, 3)]
DIM = 3


def pair_of(form: str, norm: float, *, batch: float = 1.0, radius: float = 1.0) -> Any:
    gradient = ClippedPytree(torch.zeros(DIM, dtype=torch.float64), norm / batch)
    if form == "aggregate":
        return SecondMomentClippedPytree(gradient, projection_radius=radius)
    square = ClippedPytree(torch.zeros(DIM, dtype=torch.float64), norm**2 / batch)
    return SecondMomentClippedPytree(gradient, square=square)


def stddevs(strategies: Any, n: int, schema: Any, pair: Any, **options: Any) -> tuple[float, float]:
    """s_1 and s_2, from what the mechanism says its noise is at its first step, with sigma 1."""
    first, second = strategies
    noise_fn, state = mf_gaussian_noise(
        torch.zeros(DIM, dtype=torch.float64),
        first,
        n_steps=n,
        noise_multiplier=1.0,
        key=key(7),
        second_moment_strategy=second,
        min_sep=schema and schema[0],
        max_participations=schema and schema[1],
        **options,
    )
    out, _ = noise_fn(pair, state)
    return (
        out.gradient.noise_stddev / float(first.matrix(n).row_norms()[0]),
        out.square.noise_stddev / float(second.matrix(n).row_norms()[0]),
    )


def patterns(n: int, min_sep: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every set of steps at which one example may take part, but those within others."""
    for count in range(1, most + 1):
        for steps in itertools.combinations(range(n), count):
            if all(b - a >= min_sep for a, b in itertools.pairwise(steps)):
                yield steps


def attacks(form: str, norm: float, radius: float, count: int) -> Iterator[tuple[Any, Any]]:
    """How an example moves the gradients and the squares of ``count`` steps: [count, DIM] each."""
    rng = np.random.default_rng(count)
    axis = np.eye(DIM)[:1]
    aims = [np.repeat(axis, count, 0), axis * (-1.0) ** np.arange(count)[:, None]]
    aims += [rng.normal(size=(count, DIM)) for _ in range(4)]
    aims += [np.eye(DIM)[rng.integers(DIM, size=count)] * rng.choice([-1, 1], (count, 1))]
    for aim in aims:
        move = norm * aim / np.linalg.norm(aim, axis=1, keepdims=True)
        if form == "per_example":
            yield move, move**2
            continue
        # Others put the aggregate where the square is steepest, opposite, or anywhere.
        anywhere = rng.normal(size=aim.shape)
        for others in (radius * move / norm, -0.3 * radius * move / norm, anywhere):
            with_it, without = (
                np.stack([projected_square(torch.from_numpy(x), radius).numpy() for x in rows])
                for rows in (others, others - move)
            )
            yield move, with_it - without


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_no_example_moves_the_whitened_pair_by_more_than_is_accounted(
    schema: tuple[int, int, int], case: str, form: str
) -> None:
    n, min_sep, most = schema
    norm, radius = 0.7, 1.3
    first, second = SMALL[case]
    s1, s2 = stddevs((first, second), n, (min_sep, most), pair_of(form, norm, radius=radius))
    accounted = first.matrix(n).sensitivity(min_sep, most)
    one, two = first.matrix(n).dense() / s1, second.matrix(n).dense() / s2
    worst = 0.0
    found = list(patterns(n, min_sep, most))
    # The set that moves most, and as many others as time allows.
    most_often = tuple(range(0, n, min_sep))[:most]
    for steps in [*found[:: max(1, len(found) // 60)], found[-1], most_often]:
        for move, square in attacks(form, norm, radius, len(steps)):
            whole = (
                np.linalg.norm(one[:, steps] @ move) ** 2
                + np.linalg.norm(two[:, steps] @ square) ** 2
            )
            worst = max(worst, math.sqrt(whole))
    assert worst <= accounted * (1 + 1e-9)
    assert worst >= 0.5 * accounted  # the search looks where it matters


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["banded", "bisr", "lambda_cgd", "turned round"])
def test_what_is_accounted_is_attained_along_one_axis(case: str, form: str) -> None:
    # So no smaller noise would do. All Gram matrices here are nonnegative, and their worst sets are
    # the same.
    n, min_sep, most = 12, 4, 3
    strategies = SMALL[case]
    norm, radius = 0.2, 1.0
    s1, s2 = stddevs(strategies, n, (min_sep, most), pair_of(form, norm))
    steps = [0, 4, 8]
    second = norm**2 if form == "per_example" else square_sensitivity(norm, radius)
    moved = [
        np.linalg.norm(strategy.matrix(n).dense()[:, steps].sum(1)) * delta / s
        for strategy, delta, s in zip(strategies, (norm, second), (s1, s2), strict=True)
    ]
    one, two = (strategy.matrix(n) for strategy in strategies)
    accounted = one.sensitivity(min_sep, most)
    ratio = two.sensitivity(min_sep, most) / accounted
    by_column = two.max_column_norm() / one.max_column_norm()
    if ratio >= by_column:
        assert math.hypot(*moved) == pytest.approx(accounted, rel=1e-12)
    else:  # more noise than this schema needs, for that of cyclic Poisson sampling
        assert math.hypot(*moved) < accounted


@pytest.mark.parametrize("case", DATA["pairs"], ids=lambda case: case["strategies"])
@pytest.mark.parametrize("norm", [0.1, 1.0])
def test_squares_that_are_moved_more_often_get_the_noise_for_it(case: Any, norm: float) -> None:
    # Allocated by column norms, bisr p4 .9/.999 would have 0.65 (C = 0.1) and 0.515 (C = 1) of the
    # noise multiplier that it is accounted with.
    schema, sizes = (case["min_sep"], case["k"]), (norm * case["c1"], norm**2 * case["c2"])
    share = sizes[1] / sum(sizes)
    pair = pair_of("per_example", norm)
    s1, s2 = stddevs(PAIRS[case["strategies"]], case["n"], schema, pair, square_share=share)
    assert s1 == pytest.approx(norm / math.sqrt(1 - share), rel=1e-12)
    assert s2 == pytest.approx(norm**2 * case["S2"] / case["S1"] / math.sqrt(share), rel=1e-9)
    moved = (norm * case["S1"] / s1) ** 2 + (norm**2 * case["S2"] / s2) ** 2
    assert moved == pytest.approx(case["claimed_sq"], rel=1e-9)
    by_column = norm**2 * case["c2"] / case["c1"] / math.sqrt(share)
    exposed = (norm * case["S1"] / s1) ** 2 + (norm**2 * case["S2"] / by_column) ** 2
    if norm == case["C"]:
        assert exposed == pytest.approx(case["true_mahalanobis_sq"], rel=1e-9)
    elif case["strategies"] == "bisr p4 .9/.999":
        assert math.sqrt(moved / exposed) == pytest.approx(0.515, abs=5e-4)


def test_every_worked_pair_is_run() -> None:
    assert PAIRS.keys() == {case["strategies"] for case in DATA["pairs"]}


def test_without_min_sep_banded_pairs_are_those_of_cyclic_poisson_sampling() -> None:
    # The horizon cuts off columns, so that S_2 / S_1 is not the ratio of column norms. Amplified
    # accounting takes each participation for itself, the other takes all of them at once.
    first, second = bsr_strategy(2), bsr_strategy(5, momentum=0.999)
    for strategies in ((first, second), (second, first)):
        for n in range(1, 13):
            share, pair = 0.3, pair_of("per_example", 1.0)
            s1, s2 = stddevs(strategies, n, None, pair, square_share=share)
            one, two = (strategy.matrix(n) for strategy in strategies)
            schema = [matrix.sensitivity(min(5, n)) for matrix in (one, two)]
            column = [matrix.max_column_norm() for matrix in (one, two)]
            for size1, size2 in (schema, column):
                assert (size1 / s1) ** 2 + (size2 / s2) ** 2 <= size1**2 * (1 + 1e-12)


@pytest.mark.parametrize("strategy", [blt_strategy(n_buffers=2), bisr_strategy(3)])
def test_one_strategy_for_both_needs_no_schema(strategy: Any) -> None:
    s1, s2 = stddevs((strategy, strategy), 20, None, pair_of("aggregate", 0.1))
    plain, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    out, _ = plain(pair_of("aggregate", 0.1), state)
    assert (s1, s2) == pytest.approx((out.gradient.noise_stddev, out.square.noise_stddev))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (bsr_strategy(4), bisr_strategy(4)),
        (lambda_cgd_strategy(0.5), lambda_cgd_strategy(0.9)),
        (blt_strategy(n_buffers=2), bsr_strategy(3)),
    ],
)
def test_pairs_that_depend_on_the_schema_ask_for_it(first: Any, second: Any) -> None:
    with pytest.raises(PrivacyError, match="give min_sep"):
        stddevs((first, second), 20, None, pair_of("aggregate", 0.1))


# --- shares ---


@pytest.mark.parametrize("form", FORMS)
def test_both_noises_are_those_of_independent_noise_but_for_the_ratio(form: str) -> None:
    plain, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    pair = pair_of(form, 0.3, batch=2.0)
    out, _ = plain(pair, state)
    first, second = PAIRS["lcgd .5/.99"]
    s1, s2 = stddevs((first, second), 12, (4, 3), pair)
    ratio = second.matrix(12).sensitivity(4, 3) / first.matrix(12).sensitivity(4, 3)
    ratio = max(ratio, second.matrix(12).max_column_norm() / first.matrix(12).max_column_norm())
    assert s1 == pytest.approx(out.gradient.noise_stddev)
    assert s2 == pytest.approx(out.square.noise_stddev * ratio)


def test_the_share_is_one_number_for_the_whole_horizon() -> None:
    # The default share of squares of examples is C / (1 + C), and C may follow a schedule. With a
    # share of its own for each step, one that takes part twice could move the gradient of a step
    # that left the squares little, and the squares of one that left the gradient little.
    tree = torch.zeros(DIM, dtype=torch.float64)
    strategies = SMALL["bisr"]
    noise_fn, state = mf_gaussian_noise(
        tree, strategies[0], n_steps=6, noise_multiplier=1.0, key=key(7), min_sep=2,
        second_moment_strategy=strategies[1],
    )  # fmt: skip
    assert state.square_share == 0.0
    rows = [strategy.matrix(6).row_norms() for strategy in strategies]
    seen = []
    for t, norm in enumerate((1.0, 10.0, 0.01)):
        out, state = noise_fn(pair_of("per_example", norm), state)
        assert state.square_share == pytest.approx(0.5, rel=1e-14)
        seen.append(
            (out.gradient.noise_stddev / norm / rows[0][t],
             out.square.noise_stddev / norm**2 / rows[1][t])
        )  # fmt: skip
    for later in seen[1:]:
        assert later == pytest.approx(seen[0], rel=1e-12)


def test_shares_that_change_would_cost_more_than_is_accounted() -> None:
    # What the test above is for: an example that takes part at every step, and all of whose budget
    # goes to the gradient where its columns are long, and to the squares where they are short.
    one, two = bisr_strategy(4, momentum=0.999).matrix(6), identity_strategy().matrix(6)
    accounted = one.sensitivity(1)
    ratio = two.sensitivity(1) / accounted
    moved = [
        math.hypot(
            np.linalg.norm(one.dense() @ (1 - np.array(shares))),
            np.linalg.norm(two.dense() @ np.array(shares)) / ratio,
        )
        for shares in itertools.product((0.0, 1.0), repeat=6)
    ]
    assert max(moved) > 1.001 * accounted
    fixed = [np.linalg.norm(m.dense().sum(1)) / r for m, r in ((one, 1.0), (two, ratio))]
    assert math.hypot(*fixed) / math.sqrt(2) == pytest.approx(accounted)


def test_a_given_share_is_taken() -> None:
    pair = pair_of("per_example", 1.0)
    s1, s2 = stddevs(SMALL["lambda_cgd"], 12, (4, 3), pair, square_share=0.1)
    half1, half2 = stddevs(SMALL["lambda_cgd"], 12, (4, 3), pair, square_share=0.5)
    assert s1 / half1 == pytest.approx(math.sqrt(0.5 / 0.9))
    assert s2 / half2 == pytest.approx(math.sqrt(5))


# --- the two streams ---


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["banded", "bisr", "normalized", "blt"])
def test_each_stream_is_the_dense_inverse_times_draws_of_its_own(
    case: str, form: str, inplace: bool
) -> None:
    n, tree = 9, {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(5)}
    noise_fn, state = mf_gaussian_noise(
        tree, SMALL[case][0], n_steps=n, noise_multiplier=1.0, key=key(7), min_sep=3,
        second_moment_strategy=SMALL[case][1],
    )  # fmt: skip
    got: dict[str, list[Any]] = {"": [], "square": []}
    for _ in range(n):
        gradient = ClippedPytree({k: torch.full_like(v, 0.1) for k, v in tree.items()}, 0.5)
        if form == "aggregate":
            pair = SecondMomentClippedPytree(gradient, projection_radius=100.0)
        else:
            squares = {k: torch.full_like(v, 0.01) for k, v in tree.items()}
            pair = SecondMomentClippedPytree(gradient, square=ClippedPytree(squares, 0.25))
        out, state = noise_fn(pair, state, inplace=inplace)
        got[""].append((out.gradient, 0.1))
        got["square"].append((out.square, 0.01))
    for (word, outs), strategy in zip(got.items(), SMALL[case], strict=True):
        matrix = strategy.matrix(n)
        for group, name in enumerate("ab"):
            z = torch.stack([draws(key(7), tree, t, word)[group] for t in range(n)]).double()
            x = torch.linalg.solve(torch.from_numpy(matrix.dense()), z)
            for t, (noised, exact) in enumerate(outs):
                scale = noised.noise_stddev / float(matrix.row_norms()[t])
                have = noised.pytree[name].double().flatten() - exact
                tolerance = 1e-10 if name == "a" else 1e-5
                torch.testing.assert_close(have, scale * x[t], rtol=tolerance, atol=tolerance)


def test_a_pair_is_written_to_only_when_asked() -> None:
    noise_fn, state = mf_gaussian_noise(
        torch.zeros(DIM, dtype=torch.float64), SMALL["banded"][0], n_steps=4, noise_multiplier=1.0,
        key=key(7), second_moment_strategy=SMALL["banded"][1],
    )  # fmt: skip
    pair = pair_of("per_example", 1.0)
    leaves = [pair.gradient.pytree, pair.square.pytree, *state.buffers.values()]
    before = [leaf._version for leaf in leaves]
    pure, _ = noise_fn(pair, state)
    assert [leaf._version for leaf in leaves] == before
    donated, after = noise_fn(pair, state, inplace=True)
    assert torch.equal(donated.square.pytree, pure.square.pytree)
    assert donated.square.pytree.data_ptr() == pair.square.pytree.data_ptr()
    assert after.buffers["square"] is state.buffers["square"]


def test_a_pair_resumes_bit_for_bit_and_keeps_its_share() -> None:
    def run(steps: int, state: MFNoiseState) -> tuple[Any, MFNoiseState]:
        out = None
        for _ in range(steps):
            out, state = noise_fn(pair_of("per_example", 2.0 + state.step), state)
        return out, state

    options: dict[str, Any] = {"n_steps": 12, "noise_multiplier": 1.0, "min_sep": 4}
    first, second = SMALL["bisr"]
    tree = torch.zeros(DIM, dtype=torch.float64)
    noise_fn, fresh = mf_gaussian_noise(
        tree, first, second_moment_strategy=second, key=key(7), **options
    )
    want, _ = run(12, fresh)
    _, state = run(5, fresh)
    _, template = mf_gaussian_noise(
        tree, first, second_moment_strategy=second, key=key(8), **options
    )
    flat = state_dict(state)
    assert {"buffers/gradient", "buffers/square"} <= flat.keys()
    got, state = run(7, from_state_dict(template, flat))
    assert torch.equal(got.gradient.pytree, want.gradient.pytree)
    assert torch.equal(got.square.pytree, want.square.pytree)
    assert state.square_share == pytest.approx(2 / 3)
    for path in flat:
        with pytest.raises(CheckpointError, match="lacks"):
            from_state_dict(template, {k: v for k, v in flat.items() if k != path})


# --- refusals ---

CLIPPED = ClippedPytree(torch.zeros(DIM), 1.0)
NOISED = NoisedPytree(torch.zeros(DIM), 1.0)


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (CLIPPED, "needs a SecondMomentClippedPytree, got ClippedPytree"),
        (torch.zeros(DIM), "needs a SecondMomentClippedPytree, got Tensor"),
        (SecondMomentNoiseOutput(NOISED, NOISED), "already has its noise"),
        (SecondMomentClippedPytree(NOISED, square=CLIPPED), "needs a ClippedPytree"),  # type: ignore[arg-type]
        (SecondMomentClippedPytree(CLIPPED, square=NOISED), "needs a ClippedPytree"),  # type: ignore[arg-type]
        (
            SecondMomentClippedPytree(CLIPPED, square=ClippedPytree(torch.zeros(DIM), math.nan)),
            "sensitivity of nan",
        ),
        (SecondMomentClippedPytree(CLIPPED, projection_radius=math.nan), "projection_radius"),
    ],
)
def test_what_is_no_clipped_pair_is_refused(grads: Any, message: str) -> None:
    noise_fn, state = mf_gaussian_noise(
        torch.zeros(DIM), bsr_strategy(2), n_steps=4, noise_multiplier=1.0, key=key(7),
        second_moment_strategy=bsr_strategy(3),
    )  # fmt: skip
    with pytest.raises(PrivacyError, match=message):
        noise_fn(grads, state)


def test_a_pair_without_a_strategy_for_its_squares_is_refused() -> None:
    noise_fn, state = mf_gaussian_noise(
        torch.zeros(DIM), bsr_strategy(2), n_steps=4, noise_multiplier=1.0, key=key(7)
    )
    with pytest.raises(PrivacyError, match="give mf_gaussian_noise a second_moment_strategy"):
        noise_fn(pair_of("aggregate", 1.0), state)
