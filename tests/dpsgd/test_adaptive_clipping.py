"""Adaptive clipping: the norm finds its quantile, and the counts are paid for, once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opake_lightning.dpsgd.accounting import adaclip, adaclip_noise_multiplier, gaussian, poisson
from opake_lightning.dpsgd.clipping import (
    AdaptiveClipState,
    ClipState,
    adaptive,
    adaptive_clipped_grad,
    per_group,
    per_layer,
)
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.optimizers import sgd
from opake_lightning.random import add_normal_, fold_in, key
from opake_lightning.scheduling import linear_schedule
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.step import Step
from tests.helpers import on_ranks

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data" / "adaptive_clipping.json").read_text(encoding="utf-8")
)
ZERO = torch.zeros(2, dtype=torch.float64)
TWO = per_group({"0": 1.0, "1": 1.0})


def linear(w: Tensor, x: Tensor) -> Tensor:
    """A loss whose gradient for an example is the example."""
    return x @ w


def rows_of_norms(*norms: float) -> Tensor:
    return torch.tensor([[0.6 * n, 0.8 * n] for n in norms], dtype=torch.float64)


def quiet(**options: Any) -> Any:
    """Without noise on the count: for tests of arithmetic only."""
    known = {"clipping_norm": 1.0, "expected_batch_size": 4, "count_noise_stddev": 0.0}
    return adaptive_clipped_grad(linear, **{**known, "key": key(7), **options})


# -- the price ----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: f"{row['gradient']}-{row['n_groups']}")
def test_the_split_has_the_reference_values(row):
    counts = {"count_noise_stddev": row["count_noise_stddev"], "n_groups": row["n_groups"]}
    ((event, steps),) = adaclip(gaussian(row["gradient"]), **counts).segments
    assert event.noise_multiplier == pytest.approx(row["together"], rel=1e-9)
    assert (event.sample_rate, steps) == (1.0, 1)
    split = row["gradient_for_that_much_in_all"]
    if split is None:
        with pytest.raises(PrivacyError, match="leaves nothing for the gradient"):
            adaclip_noise_multiplier(row["gradient"], **counts)
    else:
        got = adaclip_noise_multiplier(row["gradient"], **counts)
        assert got == pytest.approx(split, rel=1e-9)


@given(
    z=st.floats(0.05, 50),
    n_groups=st.integers(1, 50),
    room=st.floats(1.001, 1e6),
)
def test_gradient_and_counts_together_move_by_one_over_z(z, n_groups, room):
    sigma_b = room * z * math.sqrt(n_groups) / 2
    split = adaclip_noise_multiplier(z, count_noise_stddev=sigma_b, n_groups=n_groups)
    moved = 1 / split**2 + n_groups * (0.5 / sigma_b) ** 2
    assert moved == pytest.approx(1 / z**2, rel=1e-9)
    together = adaclip(gaussian(split), count_noise_stddev=sigma_b, n_groups=n_groups)
    assert together.segments[0][0].noise_multiplier == pytest.approx(z, rel=1e-9)


@pytest.mark.parametrize(("z", "sigma_b", "n_groups"), [(1.0, 0.5, 1), (1.1, 0.5, 1), (2, 2, 4)])
def test_counts_that_cost_more_than_the_step_are_refused(z, sigma_b, n_groups):
    with pytest.raises(PrivacyError, match=r"noise_multiplier below 2 \* .* count_noise_stddev"):
        adaclip_noise_multiplier(z, count_noise_stddev=sigma_b, n_groups=n_groups)


def test_without_noise_there_is_no_protection():
    assert adaclip_noise_multiplier(0.0, count_noise_stddev=1.0) == 0.0
    assert adaclip(gaussian(0.0), count_noise_stddev=1.0).epsilon_at(1e-5) == math.inf
    assert adaclip(gaussian(1.0), count_noise_stddev=0.0).epsilon_at(1e-5) == math.inf


def test_counts_are_added_to_one_step_on_all_examples():
    counts = {"count_noise_stddev": 5.0}
    assert poisson(adaclip(gaussian(1.0), **counts), 0.1, n_steps=3).n_steps == 3
    with pytest.raises(PrivacyError, match=r"sampled already, at rate 0\.1"):
        adaclip(poisson(gaussian(1.0), 0.1), **counts)
    with pytest.raises(PrivacyError, match="mechanism of 2; pass"):
        adaclip(gaussian(1.0) * 2, **counts)
    with pytest.raises(ValueError, match="n_groups must be >= 1"):
        adaclip(gaussian(1.0), n_groups=0, **counts)


@pytest.mark.parametrize("count_noise", [None, 7.0])
def test_the_default_noise_of_a_count_is_a_twentieth_of_the_expected_batch(count_noise):
    rule = adaptive(per_group({"a": 1.0, "b": 1.0}), count_noise_stddev=count_noise)
    expected = adaclip_noise_multiplier(1.0, count_noise_stddev=count_noise or 5.0, n_groups=2)
    assert rule.gradient_noise_multiplier(1.0, expected_batch_size=100) == expected


# -- how the norm moves -------------------------------------------------------------------------


def test_the_norm_moves_by_the_centred_count_over_the_expected_batch():
    grad_fn, state = quiet()
    grads, state = grad_fn(ZERO, rows_of_norms(0.5, 2.0, 3.0), state=state)
    # Votes 1/2, -1/2, -1/2: the fraction is 1/2 - 1/8, an eighth less than asked.
    assert state.clipping_norms == pytest.approx((math.exp(0.2 / 8),), rel=1e-15)
    assert (grads.sensitivity, state.step) == (0.25, 1)
    assert grads.pytree.tolist() == pytest.approx([0.6 * 2.5 / 4, 0.8 * 2.5 / 4])


def test_the_next_step_clips_to_the_moved_norm_and_its_noise_follows():
    grad_fn, state = quiet()
    noise_fn, noise_state = gaussian_noise(noise_multiplier=3.0, key=key(7))
    for _ in range(5):
        before = state.clipping_norm
        grads, state = grad_fn(ZERO, rows_of_norms(50.0), state=state)
        assert float(grads.pytree.norm()) == pytest.approx(before / 4)
        noised, noise_state = noise_fn(grads, noise_state)
        assert noised.noise_stddev == pytest.approx(3.0 * before / 4, rel=1e-12)
        assert state.clipping_norm > before


def test_an_example_on_the_norm_counts_as_within_it():
    grad_fn, state = quiet()
    _, state = grad_fn(ZERO, torch.tensor([[1.0, 0.0]]).double(), state=state)
    assert state.clipping_norm == pytest.approx(math.exp(-0.2 / 8))


def test_an_empty_draw_moves_the_norm_by_noise_alone():
    grad_fn, state = quiet()
    for batch in (None, rows_of_norms()[:0].reshape(0, 2)):
        grads, after = grad_fn(ZERO, batch, state=state)
        assert after.clipping_norms == (1.0,)
        assert (after.step, grads.pytree.tolist()) == (1, [0.0, 0.0])


def test_an_example_without_a_finite_gradient_does_not_count():
    grad_fn, state = quiet()
    rows = torch.tensor([[math.nan, 0.0], [math.inf, 0.0]], dtype=torch.float64)
    _, state = grad_fn(ZERO, rows, state=state)
    assert (state.clipping_norms, state.nonfinite_examples) == ((1.0,), 2)


@given(
    rows=st.lists(st.tuples(st.floats(), st.floats(-10, 10)), min_size=1, max_size=5),
    bounds=st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)),
)
def test_one_example_less_moves_every_count_by_at_most_a_half(rows, bounds):
    def loss(params, x):
        return x[:, 0] * params[0] + x[:, 1] * params[1]

    grad_fn, state = adaptive_clipped_grad(
        loss,
        clipping_norm=per_group({"0": bounds[0], "1": bounds[1]}),
        expected_batch_size=4,
        key=key(7),
        count_noise_stddev=0.0,
        learning_rate=1.0,
    )
    x = torch.tensor(rows, dtype=torch.float64)
    params = [torch.zeros((), dtype=torch.float64)] * 2
    (_, whole), (_, rest) = (grad_fn(params, part, state=state) for part in (x, x[:-1]))
    for one, other in zip(whole.clipping_norms, rest.clipping_norms, strict=True):
        assert abs(math.log(one / other)) * 4 <= 0.5 * (1 + 1e-9)


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
def test_the_norm_finds_the_quantile_that_was_asked_for(quantile):
    grad_fn, state = adaptive_clipped_grad(
        linear, expected_batch_size=200, key=key(7), target_quantile=quantile
    )
    draw = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(400):
        size = int(torch.poisson(torch.tensor(200.0), generator=draw))
        # Median 30, three hundred times where the norm starts.
        norms = 30 * torch.randn(size, generator=draw, dtype=torch.float64).exp()
        _, state = grad_fn(ZERO, torch.stack([norms, 0 * norms], 1), state=state)
        seen.append(state.clipping_norm)
    found = torch.tensor(seen[100:]).log().mean()
    asked = math.log(30) + math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * quantile - 1)))
    # A log norm off by h is pulled back by 0.2 * density * h per step, so the mean of 300 has a
    # standard error of (noise of the fraction / density) / sqrt(300).
    density = math.exp(-((asked - math.log(30)) ** 2) / 2) / math.sqrt(2 * math.pi)
    error = math.hypot(0.05, 0.5 / math.sqrt(200)) / density / math.sqrt(300)
    assert abs(float(found) - asked) < 5 * error + 0.01  # and a little for the curvature


def test_every_group_finds_its_own_quantile():
    def loss(params, x):
        return x[:, 0] * params[0] + x[:, 1] * params[1]

    grad_fn, state = adaptive_clipped_grad(
        loss, clipping_norm=TWO, expected_batch_size=200, key=key(7), learning_rate=0.5
    )
    params = [torch.zeros((), dtype=torch.float64)] * 2
    x = torch.rand(200, 2, dtype=torch.float64) * torch.tensor([10.0, 0.1])
    for _ in range(100):
        grads, state = grad_fn(params, x, state=state)
    assert state.clipping_norms == pytest.approx((5.0, 0.05), rel=0.2)
    assert grads.sensitivity == pytest.approx(math.hypot(*grads.report.bounds) / 200)


@pytest.mark.filterwarnings("ignore:the adaptive clipping norm has fallen:UserWarning")
def test_the_norm_stays_where_float32_can_hold_it_and_its_square():
    for target, end in ((0.001, 1e-14), (0.999, 1e14)):
        grad_fn, state = quiet(target_quantile=target, learning_rate=1e4)
        for _ in range(5):
            grads, state = grad_fn(ZERO, None, state=state)
        assert state.clipping_norms == (end,)
        assert math.isfinite(grads.sensitivity)


def test_the_norm_over_all_groups_stays_there_too():
    four = dict.fromkeys("abcd", 0.9e14)
    with pytest.raises(ValueError, match=r"must be between 1e-14 and 5e\+13"):
        adaptive(per_group(four))
    assert adaptive(per_group(dict.fromkeys("abcd", 4.9e13)))


def test_a_norm_that_falls_as_all_gradients_are_zero_is_said_once():
    # All four are within the norm, half of them are asked for: a factor of exp(-10 / 2) a step.
    grad_fn, state = quiet(clipping_norm=3.0, learning_rate=10.0)
    zeros = torch.zeros(4, 2, dtype=torch.float64)
    for _ in range(2):  # to 1.4e-4
        _, state = grad_fn(ZERO, zeros, state=state)
    message = r"has fallen from 3 to 9\.17707e-07: .* its gradients are zero.* look at the loss"
    with pytest.warns(UserWarning, match=message):
        _, state = grad_fn(ZERO, zeros, state=state)
    for batch in (zeros, None):
        _, state = grad_fn(ZERO, batch, state=state)
    assert state.clipping_norm < 1e-8


def test_a_group_whose_norm_falls_is_said_beside_one_that_stays():
    grad_fn, state = adaptive_clipped_grad(
        lambda params, x: x * params[0] + 0 * x * params[1],
        clipping_norm=per_group({"0": 1.0, "1": 2.0}),
        expected_batch_size=2,
        key=key(7),
        count_noise_stddev=0.0,
        learning_rate=30.0,
    )
    params = [torch.zeros((), dtype=torch.float64)] * 2
    x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"has fallen from 2 to 6\.1") as said:
        _, state = grad_fn(params, x, state=state)
    assert len(said) == 1
    assert state.clipping_norms == pytest.approx((1.0, 2 * math.exp(-15)))


# -- the noise of the counts --------------------------------------------------------------------


def moves(seed: int, steps: int) -> Tensor:
    """Noise of each count in examples, [step, group], read off empty draws."""
    grad_fn, state = adaptive_clipped_grad(
        lambda p, x: x * (p[0] + p[1]),
        clipping_norm=TWO,
        expected_batch_size=100,
        key=key(seed),
        learning_rate=0.01,
    )
    seen = [state.clipping_norms]
    for _ in range(steps):
        _, state = grad_fn([torch.zeros(()), torch.zeros(())], None, state=state)
        seen.append(state.clipping_norms)
    return -torch.tensor(seen, dtype=torch.float64).log().diff(dim=0) / 0.01 * 100


def test_every_count_of_every_step_has_its_own_noise_of_the_stated_size():
    noise = moves(7, 1000)
    n = noise.numel()
    assert abs(noise.std() - 5.0) < 5 * 5.0 / math.sqrt(2 * n)
    assert abs(noise.mean()) < 5 * 5.0 / math.sqrt(n)
    assert abs(torch.corrcoef(noise.T)[0, 1]) < 5 / math.sqrt(len(noise))
    assert len(set(noise.flatten().tolist())) == n
    torch.testing.assert_close(moves(7, 3), noise[:3])
    assert not torch.equal(moves(8, 3), noise[:3])


def test_counts_and_gradient_share_a_key_but_no_noise():
    gradient = torch.zeros(2, dtype=torch.float64)
    add_normal_(fold_in(fold_in(fold_in(key(7), "gaussian_noise"), 0), 0), gradient, 5.0)
    assert not set(gradient.tolist()) & set(moves(7, 1).flatten().tolist())
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    grad_fn, clip = quiet(count_noise_stddev=5.0)
    grads, after = grad_fn(ZERO, None, state=clip)
    noised, _ = noise_fn(grads, state)
    count = -math.log(after.clipping_norm) / 0.2 * 4 / 5
    assert min(abs(noised.pytree / grads.sensitivity - count)) > 1e-3


def stepping(streams: int = 7) -> Step:
    grad_fn, clip = adaptive_clipped_grad(
        lambda w, x: (x @ w, x), expected_batch_size=4, key=key(1), has_aux=True
    )
    noise_fn, noise = gaussian_noise(noise_multiplier=1.0, key=key(streams))
    return Step(grad_fn, noise_fn, sgd(lr=0.1), clip, noise)


def test_in_a_step_the_counts_noise_is_a_function_of_the_run_s_key_and_step():
    def norms_of(step: Step, first: int) -> float:
        state = step.init(torch.zeros(2))
        noise = type(state.noise)(state.noise.key, first)
        _, _, state = step.release(torch.zeros(2), None, type(state)(state.clip, noise, None))
        return state.clip.clipping_norm

    assert norms_of(stepping(), 0) == norms_of(stepping(), 0)
    # Another run, and the same run further on, though the clip state is new.
    assert len({norms_of(stepping(), 0), norms_of(stepping(8), 0), norms_of(stepping(), 1)}) == 3


def counted_on_ranks(rank: int) -> Any:
    x = rows_of_norms(0.01, 0.05, 0.5, 2.0, 3.0, 0.02)
    shares = [[x[:4], None, x[:1]], [x[4:], None, None]]
    return clipping_norms_of(shares[rank])


def clipping_norms_of(batches: list[Any]) -> list[float]:
    grad_fn, state = adaptive_clipped_grad(linear, expected_batch_size=4, key=key(7))
    seen = []
    for batch in batches:
        _, state = grad_fn(ZERO, batch, state=state)
        seen.append(state.clipping_norm)
    return seen


@pytest.mark.dist
def test_two_ranks_count_together_and_draw_one_noise():
    x = rows_of_norms(0.01, 0.05, 0.5, 2.0, 3.0, 0.02)
    alone = clipping_norms_of([x, None, x[:1]])
    assert on_ranks(counted_on_ranks) == [alone, alone]


# -- states and arguments -----------------------------------------------------------------------


def test_a_restored_state_goes_on_bit_for_bit(tmp_path):
    grad_fn, fresh = adaptive_clipped_grad(linear, expected_batch_size=4, key=key(7))
    state = fresh
    for _ in range(3):
        _, state = grad_fn(ZERO, rows_of_norms(1.0, 2.0), state=state)
    torch.save(state_dict(state), tmp_path / "clip.pt")
    saved = torch.load(tmp_path / "clip.pt", weights_only=True)
    restored = from_state_dict(fresh, saved)
    assert restored == state
    assert (
        grad_fn(ZERO, rows_of_norms(1.0), state=restored)[1]
        == grad_fn(ZERO, rows_of_norms(1.0), state=state)[1]
    )
    del saved["clipping_norms/0"]
    with pytest.raises(CheckpointError, match="lacks 'clipping_norms/0'"):
        from_state_dict(fresh, saved)


def test_a_state_hides_its_key():
    assert key(7).hex() not in repr(quiet()[1])
    assert str(key(7).bits) not in repr(quiet()[1])


def test_second_moments_follow_the_norm():
    grad_fn, state = quiet(second_moment=True)
    _, state = grad_fn(ZERO, rows_of_norms(5.0, 5.0), state=state)
    grads, _ = grad_fn(ZERO, rows_of_norms(5.0), state=state)
    assert grads.projection_radius == state.clipping_norm > 1.0
    assert grads.gradient.sensitivity == state.clipping_norm / 4
    grad_fn, state = quiet(second_moment="per_example")
    _, state = grad_fn(ZERO, rows_of_norms(5.0, 5.0), state=state)
    grads, _ = grad_fn(ZERO, rows_of_norms(5.0), state=state)
    assert grads.square.sensitivity == pytest.approx(state.clipping_norm**2 / 4)
    assert float(grads.square.pytree.sum()) == pytest.approx(state.clipping_norm**2 / 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clipping_norm": 0.0}, ValueError, "clipping_norm must be a finite number > 0"),
        ({"clipping_norm": 1e20}, ValueError, "clipping_norm=1e\\+20 must be between"),
        ({"clipping_norm": linear_schedule(1.0, 0.5, 3)}, PrivacyError, "is a schedule"),
        ({"target_quantile": 0.0}, ValueError, "target_quantile must be in \\(0, 1\\)"),
        ({"target_quantile": 1.0}, ValueError, "target_quantile must be in \\(0, 1\\)"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate must be a finite number > 0"),
        ({"count_noise_stddev": -1.0}, ValueError, "count_noise_stddev must be a finite"),
        ({"count_noise_stddev": math.nan}, ValueError, "count_noise_stddev must be a finite"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size must be a finite"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        quiet(**options)


@pytest.mark.parametrize(
    "state", [ClipState(), AdaptiveClipState(clipping_norms=(1.0, 1.0), key=key(7))]
)
def test_another_function_s_state_is_refused(state):
    grad_fn, _ = quiet()
    with pytest.raises(TypeError, match="adaptive clipping function of 1 groups got the state"):
        grad_fn(ZERO, None, state=state)


def test_per_layer_gives_every_layer_its_own_adaptive_norm():
    params = {"a.w": torch.zeros(2), "a.b": torch.zeros(2), "b.w": torch.zeros(2)}
    _, state = quiet(clipping_norm=per_layer(1.0, params))
    assert state.clipping_norms == pytest.approx((0.5**0.5, 0.5**0.5))
    assert state.clipping_norm == pytest.approx(1.0)
