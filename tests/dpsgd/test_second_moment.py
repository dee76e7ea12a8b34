"""Pairs of a gradient and its squares: what they hold, and that they cost one Gaussian release."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opake_lightning import _pairs
from opake_lightning._pairs import projected_square, square_sensitivity
from opake_lightning.distributed import sum_gradients
from opake_lightning.dpsgd.clipping import auto_clipped_grad, clipped_grad
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.errors import PrivacyError
from opake_lightning.random import key
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)
from tests.helpers import example_gradients, norm_of, on_ranks

FORMS = ("aggregate", "per_example")
MAKERS = {"clipped": clipped_grad, "auto": auto_clipped_grad}
all_forms = pytest.mark.parametrize("form", FORMS)
all_makers = pytest.mark.parametrize("maker", MAKERS)


def linear(w: Tensor, x: Tensor) -> Tensor:
    """A loss whose gradient for an example is the example."""
    return x @ w


def pair_of(rows: Any, *, maker: str = "clipped", **options: Any) -> SecondMomentClippedPytree:
    """The clipped pair of examples whose gradients are ``rows``."""
    grad_fn, state = MAKERS[maker](linear, **options)
    grads, _ = grad_fn(torch.zeros(rows.shape[1], dtype=rows.dtype), rows, state=state)
    return grads


def released(
    pair: SecondMomentClippedPytree, noise_multiplier: float = 0.0, **options: Any
) -> SecondMomentNoiseOutput:
    noise_fn, state = gaussian_noise(noise_multiplier=noise_multiplier, key=key(7), **options)
    return noise_fn(pair, state)[0]


def stddevs(pair: SecondMomentClippedPytree, noise_multiplier: float, **options: Any) -> Any:
    out = released(pair, noise_multiplier, **options)
    return out.gradient.noise_stddev, out.square.noise_stddev


def whitened_move(rows: Tensor, *, share: float | None = None, **options: Any) -> float:
    """How far the first of ``rows`` moves the pair divided by its noise, at multiplier 1."""
    with_it, without = pair_of(rows, **options), pair_of(rows[1:], **options)
    exact, other = released(with_it), released(without)
    first, second = stddevs(with_it, 1.0, square_share=share)
    return math.hypot(
        norm_of([exact.gradient.pytree - other.gradient.pytree]) / first,
        norm_of([exact.square.pytree - other.square.pytree]) / second,
    )


# --- one example moves the whitened pair by at most 1/sigma ---


def rows_near_the_worst(kind: int, count: int, dim: int, scale: float) -> Tensor:
    """Batches of the sorts that come near the bound, and plain random ones."""
    axis = torch.zeros(dim, dtype=torch.float64)
    axis[torch.randint(dim, ())] = 1.0
    if kind == 0:  # all along one axis, the square's steepest direction
        rows = axis * torch.ones(count, 1, dtype=torch.float64)
    elif kind == 1:  # the first against, or orthogonal to, all others
        rows = torch.cat([torch.randn(1, dim, dtype=torch.float64), axis.expand(count - 1, dim)])
    elif kind == 2:  # one direction
        rows = torch.randn(dim, dtype=torch.float64).expand(count, dim).clone()
    else:
        rows = torch.randn(count, dim, dtype=torch.float64)
    lengths = scale * torch.rand(count, 1, dtype=torch.float64) * 3
    return torch.where(torch.rand(()) < 0.7, 50 * scale, lengths) * F.normalize(rows, dim=1)


@all_forms
@all_makers
@pytest.mark.parametrize(
    ("norm", "radius", "batch"),
    [(1.0, 1.0, 4.0), (0.1, 0.1, 8.0), (10.0, 3.0, 2.0), (0.5, 4.0, 1.0), (1.0, 0.3, 1.0)],
)
def test_one_example_moves_the_whitened_pair_by_at_most_one_over_sigma(
    form: str, maker: str, norm: float, radius: float, batch: float
) -> None:
    options: dict[str, Any] = {"clipping_norm": norm, "expected_batch_size": batch}
    options |= {"second_moment": form, "maker": maker}
    if form == "aggregate":
        options["projection_radius"] = radius
    worst = 0.0
    for trial in range(80):
        rows = rows_near_the_worst(trial % 4, 1 + trial % 13, 1 + trial % 5, norm)
        worst = max(worst, whitened_move(rows, share=(None, 0.1, 0.8)[trial % 3], **options))
    assert 0.5 < worst <= 1 + 1e-9


def test_the_bound_is_attained_so_no_smaller_noise_would_do() -> None:
    axis = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    examples: dict[str, Any] = {"clipping_norm": 2.0, "expected_batch_size": 5.0}
    one = whitened_move(9 * axis, second_moment="per_example", **examples)
    assert one == pytest.approx(1, rel=1e-12)
    # Small steps: from the surface of the ball inwards. Here R = 1 and C/B = 0.25.
    options: dict[str, Any] = {"clipping_norm": 1.0, "second_moment": "aggregate"}
    inwards = whitened_move(axis.repeat(4, 1), expected_batch_size=4.0, **options)
    assert inwards == pytest.approx(1, rel=1e-12)
    # Large steps, C/B > 2R/3: across the ball, d = (a, a) and s = (b, -b).
    a, b = math.sqrt(0.5), math.sqrt(1.5)
    across = torch.tensor([[a, a], [(b - a) / 2, -(b + a) / 2]], dtype=torch.float64)
    assert whitened_move(across, expected_batch_size=1.0, **options) == pytest.approx(1, rel=1e-12)


def points_of_ball(count: int, dim: int, radius: float) -> Tensor:
    """Points of the ball, half of them on its surface."""
    out = F.normalize(torch.randn(count, dim, dtype=torch.float64), dim=1)
    inside = torch.rand(count, 1, dtype=torch.float64) ** (1 / dim)
    return radius * torch.where(torch.rand(count, 1) < 0.5, 1.0, inside) * out


@pytest.mark.parametrize("dim", [1, 2, 3, 7])
def test_square_sensitivity_bounds_a_search_over_pairs_of_points(dim: int) -> None:
    for radius in (1.0, 0.2, 5.0):
        x = points_of_ball(20_000, dim, radius)
        step = 2 * radius * torch.rand(20_000, 1, dtype=torch.float64)
        y = x + points_of_ball(20_000, dim, 1.0) * step
        y *= (radius / y.norm(dim=1, keepdim=True)).clamp_max(1)
        moved = (x.square() - y.square()).norm(dim=1).tolist()
        for r, move in zip((x - y).norm(dim=1).tolist(), moved, strict=True):
            assert move <= square_sensitivity(r, radius) + 1e-14 * radius**2


def test_square_sensitivity_is_what_a_grid_over_the_disc_attains() -> None:
    circle = torch.arange(0, 360, 2, dtype=torch.float64).deg2rad()
    rings = torch.linspace(0, 1, 13, dtype=torch.float64)[:, None, None]
    disc = (rings * torch.stack([circle.cos(), circle.sin()], 1)).reshape(-1, 2)
    apart = torch.cdist(disc, disc, compute_mode="donot_use_mm_for_euclid_dist")
    moved = torch.cdist(disc**2, disc**2, compute_mode="donot_use_mm_for_euclid_dist")
    for distance in (1 / 12, 0.25, 2 / 3, 0.9, 1.2, 1.5, 2.0):
        found = float(moved[apart <= distance + 1e-12].max())
        bound = square_sensitivity(distance, 1.0)
        assert 0.97 * bound <= found <= bound * (1 + 1e-12)


# lambda, R, D, S^2 of projected pairs, where D <= sqrt(2) R.
PROJECTED = [
    (0.5, 1.0, 1.0, 1.75),
    (0.5, 1.0, 0.25, 0.158203125),
    (5.0, 1.0, 0.1, 0.1905),
    (0.5, 1.0, 1 / 256, 4.5657274313271046e-05),
]


@pytest.mark.parametrize(("weight", "radius", "distance", "want"), PROJECTED)
def test_joint_sensitivity_of_the_aggregate_has_the_published_values(
    weight: float, radius: float, distance: float, want: float
) -> None:
    second = square_sensitivity(distance, radius)
    assert distance**2 + weight * second**2 == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("weight", "distance", "want"), [(0.5, 2.0, 4.0), (2.0, 1.9, 6.25)])
def test_beyond_sqrt_two_radii_the_bound_covers_the_projected_pair(
    weight: float, distance: float, want: float
) -> None:
    """There the gradient, which is released as it is, moves further than its projection."""
    assert distance**2 + weight * square_sensitivity(distance, 1.0) ** 2 >= want


# --- the noise ---

PUBLISHED = [
    (1.0, 1.0, 1.0, 1.4142135623730951, 1.4142135623730951),
    (0.1, 1.0, 1.0, 0.10488088481701517, 0.033166247903554005),
    (1.0, 1.1, 256.0, 0.006076698900821894, 0.006076698900821894),
    (0.5, 0.8, 100.0, 0.004898979485566356, 0.0034641016151377548),
    (10.0, 1.0, 1.0, 33.166247903554, 104.88088481701516),
]


@all_makers
@pytest.mark.parametrize(("norm", "sigma", "batch", "first", "second"), PUBLISHED)
def test_per_example_noise_has_the_published_values(
    maker: str, norm: float, sigma: float, batch: float, first: float, second: float
) -> None:
    options: dict[str, Any] = {"clipping_norm": norm, "expected_batch_size": batch}
    pair = pair_of(torch.ones(1, 2), maker=maker, second_moment="per_example", **options)
    assert stddevs(pair, sigma) == pytest.approx((first, second), rel=1e-14)


def test_aggregate_noise_by_hand() -> None:
    options: dict[str, Any] = {"clipping_norm": 2.0, "expected_batch_size": 8.0}
    pair = pair_of(torch.ones(1, 2), second_moment="aggregate", projection_radius=1.0, **options)
    # C/B = 0.25, and 1 - 0.75^2 = 0.4375; half of the budget each.
    assert stddevs(pair, 2.0) == pytest.approx((2 * 0.25 * 2**0.5, 2 * 0.4375 * 2**0.5))
    want = 2 * 0.25 / 0.9**0.5, 2 * 0.4375 / 0.1**0.5
    assert stddevs(pair, 2.0, square_share=0.1) == pytest.approx(want)


def test_aggregate_noise_follows_the_units_of_the_loss() -> None:
    """Scaling loss, norm and radius by c scales the two noises by c and c squared."""
    options: dict[str, Any] = {"second_moment": True, "expected_batch_size": 8.0}
    one = stddevs(pair_of(torch.ones(1, 2), clipping_norm=1.0, **options), 1.0)
    ten = stddevs(pair_of(torch.ones(1, 2), clipping_norm=10.0, **options), 1.0)
    assert ten == pytest.approx((10 * one[0], 100 * one[1]))


@all_forms
def test_both_streams_have_the_noise_they_tell_and_share_none(form: str) -> None:
    n = 200_000
    pair = pair_of(torch.zeros(1, n), clipping_norm=1, expected_batch_size=4, second_moment=form)
    noise_fn, state = gaussian_noise(noise_multiplier=1.5, key=key(7))
    out, state = noise_fn(pair, state)
    again, _ = noise_fn(pair, state)
    draws = [
        part.pytree / part.noise_stddev
        for part in (out.gradient, out.square, again.gradient, again.square)
    ]
    assert state.step == 1
    for i, draw in enumerate(draws):
        assert abs(float(draw.mean())) < 5 / n**0.5
        assert abs(float(draw.std()) - 1) < 5 / (2 * n) ** 0.5
        for other in draws[:i]:
            for lag in (0, 1):
                shifted = float((draw * other.roll(lag)).mean())
                assert abs(shifted) < 5 / n**0.5


@all_forms
def test_noise_writes_to_its_arguments_only_when_asked(form: str) -> None:
    rows = torch.randn(5, 3, dtype=torch.float64)  # float32 would be released elsewhere
    pair = pair_of(rows, clipping_norm=1, expected_batch_size=2, second_moment=form)
    tensors = [pair.gradient.pytree] + ([pair.square.pytree] if pair.square else [])
    before = [(t.clone(), t._version) for t in tensors]
    fresh = released(pair, 1.0)
    for tensor, (value, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    reused, _ = noise_fn(pair, state, inplace=True)
    assert torch.equal(reused.gradient.pytree, fresh.gradient.pytree)
    assert torch.equal(reused.square.pytree, fresh.square.pytree)
    assert reused.gradient.pytree.data_ptr() == pair.gradient.pytree.data_ptr()


# --- what is squared ---


def net_loss(params: Any, batch: Any) -> Tensor:
    x, y = batch
    hidden = torch.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return F.cross_entropy(hidden @ params["out"], y, reduction="none")


def net() -> tuple[Any, Any]:
    w, b, out, x = (torch.randn(*s, dtype=torch.float64) for s in ((6, 4), (4,), (4, 3), (7, 6)))
    return {"in": {"w": w, "b": b}, "out": out}, (x, torch.randint(0, 3, (7,)))


def factor(norm: float, maker: str) -> float:
    return min(1.0, 0.4 / norm) if maker == "clipped" else 0.4 / (norm + 0.01)


@all_makers
@pytest.mark.parametrize("microbatch", [None, 1, 3])
def test_both_forms_equal_a_loop_over_examples(maker: str, microbatch: int | None) -> None:
    params, batch = net()
    options: dict[str, Any] = {"clipping_norm": 0.4, "expected_batch_size": 10.0}
    options["microbatch_size"] = microbatch
    scaled = [
        [factor(norm_of(leaves), maker) * leaf for leaf in leaves]
        for leaves in example_gradients(net_loss, params, batch)
    ]
    mean = [sum(parts) / 10 for parts in zip(*scaled, strict=True)]
    squares = [sum(p.square() for p in parts) / 10 for parts in zip(*scaled, strict=True)]
    shrunk = min(1.0, 0.05 / norm_of(mean))
    assert shrunk < 1
    grad_fn, state = MAKERS[maker](net_loss, second_moment="per_example", **options)
    pair, _ = grad_fn(params, batch, state=state)
    aggregate_fn, state = MAKERS[maker](
        net_loss, second_moment="aggregate", projection_radius=0.05, **options
    )
    aggregate, _ = aggregate_fn(params, batch, state=state)
    out, total = released(pair), released(aggregate)
    for got, want in (
        (out.gradient, mean),
        (out.square, squares),
        (total.gradient, mean),
        (total.square, [(shrunk * leaf).square() for leaf in mean]),
    ):
        for a, b in zip(optree.tree_leaves(got.pytree), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert pair.square is not None
    assert (pair.gradient.sensitivity, pair.square.sensitivity) == pytest.approx((0.04, 0.016))


def test_opposite_gradients_have_no_aggregate_square() -> None:
    rows = torch.tensor([[0.6, 0.8], [-0.6, -0.8]])
    options: dict[str, Any] = {"clipping_norm": 1.0, "expected_batch_size": 2.0}
    total = released(pair_of(rows, second_moment="aggregate", **options))
    single = released(pair_of(rows, second_moment="per_example", **options))
    assert total.square.pytree.tolist() == [0.0, 0.0]
    assert single.square.pytree.tolist() == pytest.approx([0.36, 0.64])


def test_the_square_is_projected_and_the_gradient_is_not() -> None:
    pair = pair_of(
        torch.tensor([[3.0, 4.0]] * 4),
        clipping_norm=1.0,
        expected_batch_size=2.0,
        second_moment="aggregate",
    )
    out = released(pair)
    assert pair.projection_radius == 1.0
    assert out.gradient.pytree.tolist() == pytest.approx([1.2, 1.6])
    assert out.square.pytree.tolist() == pytest.approx([0.36, 0.64])


def test_projection_takes_the_norm_over_dtypes_and_never_stretches() -> None:
    tree = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float64)}
    out = projected_square(tree, 1.0)
    assert [float(leaf) for leaf in out.values()] == pytest.approx([0.36, 0.64])
    assert [leaf.dtype for leaf in out.values()] == [torch.float32, torch.float64]
    assert float(projected_square(tree, 50.0)["a"]) == 9.0
    assert projected_square({}, 1.0) == {}
    assert float(projected_square(torch.zeros(2), 1.0).sum()) == 0.0


@all_forms
@all_makers
@pytest.mark.parametrize("empty", [None, torch.zeros(0, 3)])
def test_an_empty_batch_is_a_pair_of_zeros(form: str, maker: str, empty: Any) -> None:
    grad_fn, state = MAKERS[maker](
        linear, clipping_norm=1.0, expected_batch_size=2.0, second_moment=form
    )
    pair, _ = grad_fn(torch.ones(3), empty, state=state)
    exact, noisy = released(pair), released(pair, 1.0)
    assert not exact.gradient.pytree.any()
    assert not exact.square.pytree.any()
    assert noisy.gradient.pytree.all()
    assert noisy.square.pytree.all()


def test_aux_comes_along() -> None:
    grad_fn, state = clipped_grad(
        lambda w, x: (x @ w, {"sum": x.sum(1)}),
        clipping_norm=1.0,
        has_aux=True,
        second_moment="per_example",
    )
    (pair, aux), _ = grad_fn(torch.zeros(2), torch.ones(3, 2), state=state)
    assert isinstance(pair, SecondMomentClippedPytree)
    assert aux["sum"].tolist() == [2.0, 2.0, 2.0]


@all_makers
def test_squares_of_extreme_examples_stay_within_the_bound(maker: str) -> None:
    """Rows of 1e30 and 1e-30, one that is infinite, and many coordinates in float32."""
    rows = torch.randn(4, 100_003)
    rows *= torch.tensor([1e30, 1e-30, 1.0, torch.inf])[:, None]
    grad_fn, state = MAKERS[maker](linear, clipping_norm=0.1, second_moment="per_example")
    for row, count in zip(rows.split(1), (0, 0, 0, 1), strict=True):
        pair, after = grad_fn(torch.zeros(100_003), row, state=state)
        assert after.nonfinite_examples == count
        assert norm_of([pair.gradient.pytree]) <= 0.1 * (1 + 1e-6)
        assert float(pair.square.pytree.double().sum()) <= 0.01 * (1 + 1e-6)
        assert float(pair.square.pytree.double().sum()) == pytest.approx(
            norm_of([pair.gradient.pytree]) ** 2, rel=1e-5
        )


# --- ranks ---


def rank_pair(rank: int) -> list[Tensor]:
    rows = torch.tensor([[0.6, 0.8]]) * (1 if rank == 0 else -1)
    total = pair_of(rows, clipping_norm=1, expected_batch_size=1, second_moment="aggregate")
    single = pair_of(rows, clipping_norm=1, second_moment="per_example")
    assert single.square is not None
    kept = single.square.pytree.clone()
    summed = [released(sum_gradients(pair)) for pair in (total, single)]
    assert torch.equal(single.square.pytree, kept)
    again = released(sum_gradients(single, inplace=True))
    return [out.square.pytree for out in (*summed, again)]


@pytest.mark.dist
def test_the_square_of_the_aggregate_is_that_of_the_sum_over_ranks() -> None:
    for total, single, again in on_ranks(rank_pair):
        assert total.tolist() == [0.0, 0.0]
        assert single.tolist() == again.tolist() == pytest.approx([0.72, 1.28])


@all_forms
def test_a_sum_over_one_rank_keeps_the_pair(form: str) -> None:
    pair = pair_of(torch.ones(2, 2), clipping_norm=1, expected_batch_size=2, second_moment=form)
    summed = sum_gradients(pair)
    assert torch.equal(released(summed).square.pytree, released(pair).square.pytree)
    assert stddevs(summed, 1.0) == stddevs(pair, 1.0)


# --- refusals ---

NOISED = SecondMomentNoiseOutput(
    NoisedPytree(torch.zeros(2), 1.0), NoisedPytree(torch.zeros(2), 1.0)
)
CLIPPED = ClippedPytree(torch.zeros(2), 1.0)


@pytest.mark.parametrize(
    "grads",
    [
        NOISED,
        torch.zeros(2),
        (CLIPPED, CLIPPED),
        SecondMomentClippedPytree(NoisedPytree(torch.zeros(2), 1.0), square=CLIPPED),  # type: ignore[arg-type]
        SecondMomentClippedPytree(CLIPPED, square=torch.zeros(2)),  # type: ignore[arg-type]
        SecondMomentClippedPytree(CLIPPED, square=ClippedPytree(torch.zeros(2), math.nan)),
        SecondMomentClippedPytree(ClippedPytree(torch.zeros(2), math.inf), square=CLIPPED),
        SecondMomentClippedPytree(CLIPPED, projection_radius=math.nan),
        SecondMomentClippedPytree(CLIPPED, projection_radius=0.0),
    ],
)
def test_noise_refuses_what_is_not_a_clipped_pair(grads: Any) -> None:
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    with pytest.raises(PrivacyError):
        noise_fn(grads, state)


def test_noise_is_not_added_to_a_noised_pair() -> None:
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    with pytest.raises(PrivacyError, match="SecondMomentNoiseOutput, which already has its noise"):
        noise_fn(NOISED, state)  # type: ignore[call-overload]


def test_noised_pairs_are_not_summed_over_ranks() -> None:
    with pytest.raises(PrivacyError, match="SecondMomentNoiseOutput"):
        sum_gradients(NOISED)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, math.nan])
def test_a_share_of_the_budget_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="square_share"):
        gaussian_noise(noise_multiplier=1.0, key=key(7), square_share=share)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"second_moment": "mean"}, "second_moment must be"),
        ({"second_moment": "aggregate"}, "expected_batch_size"),
        ({"second_moment": "per_example", "projection_radius": 1.0}, "leave it out"),
        ({"projection_radius": 1.0}, "leave it out"),
        ({"second_moment": True, "projection_radius": math.nan}, "projection_radius"),
        ({"second_moment": True, "projection_radius": 1e20}, "rescale the loss"),
        (
            {"second_moment": "per_example", "clipping_norm": 1e-20, "expected_batch_size": 2.0},
            "rescale the loss",
        ),
    ],
)
@all_makers
def test_options_that_fit_no_form_are_refused(maker: str, options: Any, match: str) -> None:
    extra = {"stability": 1e-20} if maker == "auto" else {}
    with pytest.raises(ValueError, match=match):
        MAKERS[maker](linear, **({"clipping_norm": 1.0} | extra | options))


def test_a_pair_says_what_is_squared_and_that_it_is_not_a_tensor() -> None:
    for both in ({}, {"square": CLIPPED, "projection_radius": 1.0}):
        with pytest.raises(ValueError, match="either square"):
            SecondMomentClippedPytree(CLIPPED, **both)
    with pytest.raises(AttributeError, match=r"add noise first.*\.gradient\.pytree"):
        SecondMomentClippedPytree(CLIPPED, square=CLIPPED).shape  # noqa: B018
    with pytest.raises(AttributeError, match=r"pass \.gradient"):
        NOISED.shape  # noqa: B018
    assert optree.tree_leaves(NOISED) == [NOISED]


def test_what_is_just_beyond_the_radius_is_projected() -> None:
    square = _pairs.projected_square({"w": torch.tensor([1.005, 0.0])}, 1.0)
    assert float(square["w"][0]) == pytest.approx(1.0, rel=1e-6)


@all_makers
@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, "per_example"),
        ({"expected_batch_size": 4.0}, "aggregate"),
        ({"projection_radius": 2.0}, "aggregate"),
    ],
    ids=str,
)
def test_true_is_the_form_that_what_is_given_makes_possible(maker, options, form):
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    told = pair_of(rows, maker=maker, clipping_norm=1.0, second_moment=True, **options)
    named = pair_of(rows, maker=maker, clipping_norm=1.0, second_moment=form, **options)
    assert told.projection_radius == named.projection_radius
    assert (told.square is None) == (named.square is None) == (form == "aggregate")
