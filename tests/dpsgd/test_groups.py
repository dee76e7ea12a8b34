"""Groups of parameters: who belongs to which, and how far one example moves all of them."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import (
    auto_clipped_grad,
    clipped_grad,
    per_group,
    per_layer,
)
from opake_lightning.dpsgd.clipping._groups import group_numbers
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.errors import PrivacyError
from opake_lightning.random import key
from opake_lightning.types import PerGroup
from tests.helpers import example_gradients, norm_of, trainable

SLACK = 1 + 1e-6
TWO = per_group({"a": 3.0, "b": 4.0})


def linear(params: Any, x: Tensor) -> Tensor:
    """A loss whose per-example gradient is the example, spread over two leaves."""
    return x[:, :2] @ params["a"] + x[:, 2] * params["b"]


def zeros(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"a": torch.zeros(2, dtype=dtype), "b": torch.zeros((), dtype=dtype)}


def numbers(groups: PerGroup, *names: str) -> dict[str, int]:
    treespec = optree.tree_structure(dict.fromkeys(names, torch.zeros(1)))
    return dict(zip(sorted(names), group_numbers(groups, treespec), strict=True))


# -- who belongs to which group -----------------------------------------------------------------


def test_layers_1_does_not_match_layers_10():
    names = [f"layers.{i}.{kind}" for i in range(12) for kind in ("weight", "bias")]
    found = numbers(per_group({"layers.1": 1.0}, default=2.0), *names)
    assert {name for name, group in found.items() if group == 0} == {
        "layers.1.weight",
        "layers.1.bias",
    }


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("net", {"net.1.weight", "net.2.weight", "net.1.bias"}),
        ("net.1", {"net.1.weight", "net.1.bias"}),
        ("net.1.bias", {"net.1.bias"}),
        ("net.*.weight", {"net.1.weight", "net.2.weight"}),
        ("*", {"net.1.weight", "net.2.weight", "net.1.bias", "net1.weight"}),
    ],
)
def test_a_pattern_is_the_beginning_of_a_path_part_by_part(pattern, matched):
    names = ("net.1.weight", "net.1.bias", "net.2.weight", "net1.weight")
    rest = None if len(matched) == len(names) else 1.0
    found = numbers(per_group({pattern: 1.0}, default=rest), *names)
    assert {name for name, group in found.items() if group == 0} == matched


def test_several_patterns_make_one_group_and_pytrees_have_paths_too():
    groups = per_group({("enc.0", "head"): 1.0, "enc.1": 2.0})
    tree = {"enc": (torch.zeros(1), [torch.zeros(1)]), "head": torch.zeros(1)}
    assert group_numbers(groups, optree.tree_structure(tree)) == (0, 1, 0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (per_group({"net.1": 1.0, "head": 1.0}), "'head' matches no trained parameter"),
        (per_group({"et": 1.0}, default=1.0), "'et' matches no .* the paths are 'net.1.weight'"),
        (per_group({"net.1.weigh": 1.0}, default=1.0), "'net.1.weigh' matches no"),
        (per_group({"net.1.weight.x": 1.0}, default=1.0), "'net.1.weight.x' matches no"),
        (per_group({"net": 1.0, "net.1": 1.0}), "'net.1.weight' matches the patterns 'net' and"),
        (per_group({("net", "*"): 1.0}), "matches the patterns 'net' and '\\*'"),
        (per_group({"net.1": 1.0}), "no pattern matches 'net.10.weight'.*default"),
        (per_group({"net": 1.0}, default=1.0), "default=1.0 has no parameter left"),
    ],
)
def test_patterns_that_do_not_fit_the_parameters_are_refused(groups, message):
    with pytest.raises(PrivacyError, match=message):
        numbers(groups, "net.1.weight", "net.10.weight")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: per_group({"a": 0.0}), "the bound of 'a' must be a finite number > 0, got 0.0"),
        (lambda: per_group({"a": math.nan}), "the bound of 'a'"),
        (lambda: per_group({"a": 1.0}, default=math.inf), "default must be a finite number > 0"),
        (lambda: per_group({"a.": 1.0}), "'a.' has an empty part"),
        (lambda: per_group({"": 1.0}), "'' has an empty part"),
        (lambda: per_group({(): 1.0}), "has no pattern"),
        (lambda: per_group({("a", "b"): 1.0, "b": 2.0}), "'b' is given twice"),
        (lambda: per_layer(-1.0, zeros()), "clipping_norm must be a finite number > 0"),
        (lambda: per_layer(1.0, zeros(), by="layer"), "by must be 'module' or 'parameter'"),
    ],
)
def test_malformed_groups_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_function_refuses_parameters_that_the_groups_do_not_cover():
    grad_fn, state = clipped_grad(linear, clipping_norm=per_group({"a": 1.0}))
    with pytest.raises(PrivacyError, match="no pattern matches 'b'"):
        grad_fn(zeros(), torch.ones(1, 3), state=state)


# -- sums and sensitivities ---------------------------------------------------------------------


def looped_by_group(loss_fn, params, batch, groups: PerGroup) -> list[Tensor]:
    """Sum of gradients clipped group by group in float64, one example after the other."""
    leaves, treespec = optree.tree_flatten(params)
    group_of = group_numbers(groups, treespec)
    total = [torch.zeros_like(leaf, dtype=torch.float64) for leaf in leaves]
    for gradient in example_gradients(loss_fn, params, batch):
        for number, bound in enumerate(groups.bounds):
            members = [i for i, group in enumerate(group_of) if group == number]
            factor = min(1.0, bound / max(norm_of([gradient[i] for i in members]), 1e-300))
            for i in members:
                total[i] += factor * gradient[i].double()
    return total


@pytest.mark.parametrize("microbatch", [None, 1, 3])
def test_the_sum_is_that_of_a_loop_over_examples_and_groups(microbatch):
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    params = trainable(net)

    def loss_fn(params, batch):
        x, y = batch
        return F.cross_entropy(torch.func.functional_call(net, params, x), y, reduction="none")

    batch = 3 * torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    for groups in (
        per_group({"0.weight": 0.3}, default=0.5),
        per_group({("0.bias", "2.weight"): 0.2, "2.bias": 0.1, "0.weight": 1.0}),
        per_layer(0.7, net),
        per_layer(0.7, net, by="parameter"),
    ):
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=groups, microbatch_size=microbatch)
        grads, _ = grad_fn(params, batch, state=state)
        want = looped_by_group(loss_fn, params, batch, groups)
        got = optree.tree_leaves(grads.pytree)
        assert norm_of([a - b for a, b in zip(got, want, strict=True)]) <= 1e-12 * norm_of(want)
        assert grads.sensitivity == pytest.approx(groups.sensitivity, rel=1e-15)


anything = st.one_of(
    st.floats(-100, 100),
    st.floats(width=32),  # with NaN and infinity
    st.sampled_from([1e30, -1e30, 3e38, 1e-30, 0.0]),
)


@given(
    rows=st.lists(st.tuples(anything, anything, anything), min_size=1, max_size=4),
    a=st.floats(1e-3, 1e3),
    b=st.floats(1e-3, 1e3),
    make=st.sampled_from([clipped_grad, auto_clipped_grad]),
    form=st.sampled_from([None, "per_example"]),
)
def test_one_example_less_moves_all_groups_together_by_at_most_the_sensitivity(
    rows, a, b, make, form
):
    for dtype in (torch.float64, torch.float32):
        grad_fn, state = make(linear, clipping_norm=per_group({"a": a, "b": b}), second_moment=form)
        x = torch.tensor(rows, dtype=dtype)
        (whole, _), (rest, _) = (grad_fn(zeros(dtype), part, state=state) for part in (x, x[:-1]))
        for name in ("gradient", "square") if form else (None,):
            one, other = (getattr(g, name) if name else g for g in (whole, rest))
            moved = norm_of([one.pytree[k].double() - other.pytree[k].double() for k in "ab"])
            # Sums of four in float32 round by some 1e-7 of what was added.
            rounding = 0 if dtype == torch.float64 else 4 * 3e-7 * one.sensitivity
            assert moved <= one.sensitivity * SLACK + rounding


def test_the_sensitivities_are_attained():
    grad_fn, state = clipped_grad(
        linear, clipping_norm=TWO, second_moment="per_example", expected_batch_size=2
    )
    grads, _ = grad_fn(zeros(), torch.tensor([[30.0, 0.0, 50.0]]).double(), state=state)
    gradient, square = grads.gradient.pytree, grads.square.pytree
    assert (gradient["a"].tolist(), float(gradient["b"])) == ([1.5, 0.0], 2.0)
    assert (float(square["a"][0]), float(square["b"])) == pytest.approx((4.5, 8.0))
    assert grads.gradient.sensitivity == 2.5  # hypot(3, 4) / 2
    assert grads.square.sensitivity == pytest.approx(math.hypot(9, 16) / 2, rel=1e-15)


def test_noise_is_the_same_on_every_coordinate_and_covers_all_groups():
    params = {"a": torch.zeros(40_000), "b": torch.zeros(40_000)}
    grad_fn, state = clipped_grad(
        lambda p, x: 0 * (p["a"].sum() + p["b"].sum()) * x, clipping_norm=TWO
    )
    grads, _ = grad_fn(params, torch.ones(2), state=state)
    noise_fn, noise_state = gaussian_noise(noise_multiplier=2.0, key=key(7))
    noised, _ = noise_fn(grads, noise_state)
    assert noised.noise_stddev == 10.0  # 2 * hypot(3, 4)
    for part in noised.pytree.values():
        measured = float(part.double().square().mean().sqrt())
        assert abs(measured - 10.0) < 5 * 10.0 / math.sqrt(2 * part.numel())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_example_that_is_not_finite_in_one_group_contributes_to_none(bad, dtype):
    grad_fn, state = clipped_grad(linear, clipping_norm=TWO)
    rows = torch.tensor([[0.5, 0.0, 1.0], [1.0, 1.0, bad], [bad, 1.0, 1.0]], dtype=dtype)
    grads, state = grad_fn(zeros(dtype), rows, state=state)
    assert [t.tolist() for t in grads.pytree.values()] == [[0.5, 0.0], 1.0]
    assert state.nonfinite_examples == 2
    assert grads.report.norms.tolist() == [[0.5, math.inf, math.inf], [1.0, math.inf, math.inf]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_huge_part_is_clipped_and_leaves_the_other_part_alone(dtype):
    grad_fn, state = clipped_grad(linear, clipping_norm=TWO)
    rows = torch.tensor([[3e37, 4e37, 0.25], [0.5, 0.0, -2e38]], dtype=dtype)
    grads, _ = grad_fn(zeros(dtype), rows, state=state)
    torch.testing.assert_close(grads.pytree["a"], torch.tensor([1.8 + 0.5, 2.4]).double())
    assert float(grads.pytree["b"]) == pytest.approx(-3.75)


def test_automatic_clipping_normalises_every_group():
    grad_fn, state = auto_clipped_grad(linear, clipping_norm=TWO, stability=1.0)
    grads, _ = grad_fn(zeros(), torch.tensor([[2.0, 0.0, 0.25]]).double(), state=state)
    assert [t.tolist() for t in grads.pytree.values()] == [[2.0, 0.0], 0.8]  # 3*2/3, 4*.25/1.25
    assert grads.sensitivity == 5.0


def test_per_layer_has_one_group_for_every_module_with_parameters_of_its_own():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
            self.net[2].bias.requires_grad_(False)

    module = Scaled()
    layers = per_layer(3.0, module)
    assert {frozenset(group) for group, _ in layers.groups} == {
        frozenset(["scale"]),
        frozenset(["net.0.weight", "net.0.bias"]),
        frozenset(["net.2.weight"]),
    }
    assert layers.bounds == pytest.approx([3**0.5] * 3)
    assert layers.sensitivity == pytest.approx(3.0)
    numbers(layers, *trainable(module))
    assert len(per_layer(3.0, module, by="parameter").groups) == 4


def test_one_group_of_everything_is_the_same_as_one_norm():
    x = 10 * torch.randn(5, 3)
    results = []
    for norm in (5.0, per_group({"*": 5.0})):
        grad_fn, state = clipped_grad(linear, clipping_norm=norm)
        results.append(grad_fn(zeros(torch.float32), x, state=state)[0])
    one, other = results
    assert one.sensitivity == other.sensitivity
    assert all(torch.equal(one.pytree[k], other.pytree[k]) for k in "ab")
