"""Ways to a gradient that no model case takes: parts of weights, and many layers of one kind."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import _pass as passes
from opake_lightning.dpsgd.clipping import clipped_grad, per_group, per_layer
from tests.dpsgd.clipping.case import ALONE, B, Case, Spec, of_function, of_module, truth_of
from tests.dpsgd.clipping.test_engine import quiet, wrong_in_parts
from tests.dpsgd.test_groups import looped_by_group
from tests.helpers import norm_of

MASK = torch.randn(2, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[0, 5, 2], [5, 5, 1], [3, 5, 0], [4, 4, 5]])


def equal_layers() -> nn.Sequential:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(5, 5), nn.Tanh())])


def _attention(p: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=p["w"])


def _of_cosine_without_gradient(p: Any, x: Tensor) -> Tensor:
    return F.linear(x, (2 * p["w"]).sin()) + 0 * F.linear(x, p["w"].cos()).detach()


def _penalty(p: Any, x: Tensor) -> Tensor:
    """On the gradient of a weight that another one is computed of."""
    out = F.linear(x, p["w"]) + F.linear(x.sin(), 2 * p["w"])
    (gradient,) = torch.autograd.grad(out.square().sum(), p["w"], create_graph=True)
    return out + gradient.square().sum()


def _scattered(p: Any, x: Tensor) -> Tensor:
    return torch.select_scatter(x, F.linear(x[:, 0], p["w"]), 1, -1)


def _written_after_its_use(p: Any, x: Tensor) -> Tensor:
    twice = 2 * p["w"]
    out = F.linear(x, twice)
    twice.mul_(p["w"])
    return out + F.linear(x.sin(), twice)


def _assembled(p: Any, x: Tensor) -> Tensor:
    whole = torch.zeros_like(p["w"])
    whole[0], whole[1:] = p["w"][1], 2 * p["w"][:-1]
    return F.linear(x, whole)


CASES: dict[str, Spec] = {
    "equal-layers": Spec(lambda d: of_module(equal_layers(), torch.randn(B, 5), dtype=d)),
    "equal-layers-of-tokens": Spec(
        lambda d: of_module(equal_layers(), torch.randn(B, 3, 5), dtype=d)
    ),
    "view-of-what-is-computed": of_function(
        lambda p, x: F.linear(x, (2 * p["w"]).t()), {"w": (5, 3)}, (5,)
    ),
    "computed-and-left-out": of_function(_of_cosine_without_gradient, {"w": (3, 5)}, (5,)),
    "rows-and-every-other": of_function(
        lambda p, x: F.linear(x, p["w"][::2]) + F.linear(x.sin(), p["w"][3:]), {"w": (6, 5)}, (5,)
    ),
    "computed-of-a-part-and-the-rest": of_function(
        lambda p, x: F.linear(x, p["w"][:3]) + F.linear(x.sin(), 3 * p["w"][3:]),
        {"w": (6, 5)},
        (5,),
    ),
    "large-and-used-twice": of_function(
        lambda p, x: F.linear(x, p["w"]) + torch.einsum("bj,ij->bi", x.sin(), p["w"]),
        {"w": (300, 300)},
        (300,),
    ),
    "negative-padding": of_function(
        lambda p, i: F.embedding(i, p["w"], padding_idx=-1), {"w": (6, 4)}, IDS
    ),
    "bag-with-negative-padding": of_function(
        lambda p, i: F.embedding_bag(i, p["w"], mode="sum", padding_idx=-1), {"w": (6, 4)}, IDS
    ),
    "learned-mask": of_function(_attention, {"w": (3, 3)}, (2, 3, 4)),
    "learned-mask-of-heads": of_function(_attention, {"w": (2, 3, 3)}, (2, 3, 4)),
    "mask-of-groups": of_function(
        lambda p, x: F.scaled_dot_product_attention(F.linear(x, p["w"]), x, x, attn_mask=MASK),
        {"w": (4, 4)},
        (2, 2, 3, 4),
    ),
    "row-that-requires-a-gradient": of_function(
        lambda p, x: F.linear(x.requires_grad_(), p["w"]), {"w": (3, 5)}, (5,)
    ),
    "penalty-where-others-are-computed": of_function(_penalty, {"w": (3, 5)}, (5,), **ALONE),
    "one-loss-for-all-rows": of_function(
        lambda p, x: p["w"].square().sum(), {"w": (3, 5)}, (5,), loss=lambda out: out
    ),
    "written-after-its-use": of_function(_written_after_its_use, {"w": (3, 5)}, (5,), **ALONE),
    "assembled-of-parts": of_function(_assembled, {"w": (3, 5)}, (5,)),
    "product-of-two": of_function(
        lambda p, x: F.linear(x, p["w"] * p["v"]), {"w": (3, 5), "v": (3, 5)}, (5,)
    ),
    "output-written-to": of_function(
        lambda p, x: F.conv1d(x, p["w"]).relu_(), {"w": (3, 2, 2)}, (2, 5)
    ),
    "scattered-to-the-end": of_function(_scattered, {"w": (5, 5)}, (4, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_more_ways_equal_a_loop(name):
    torch.manual_seed(0)
    spec = CASES[name]
    case = spec.make(torch.float64)
    with quiet(spec):
        assert wrong_in_parts(case, truth_of(case), 1e-10) == []


@pytest.fixture
def bundles(monkeypatch):
    """How many leaves each bundle of equal ones has."""
    found: list[int] = []
    alike = passes.Alike

    def noted(members: Any) -> Any:
        found.append(len(members))
        return alike(members)

    monkeypatch.setattr(passes, "Alike", noted)
    return found


@pytest.mark.parametrize("shape", [(5,), (3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_layers_are_clipped_each_in_its_own_group(bundles, shape, dtype):
    torch.manual_seed(0)
    net = equal_layers().to(dtype)
    case = of_module(net, 3 * torch.randn(B, *shape), dtype=dtype)
    norms = example_norms(case)
    for groups in (
        per_layer(0.7 * norms, net),
        per_layer(0.7 * norms, net, by="parameter"),
        per_group({("0", "4"): 0.05 * norms, ("2.weight", "6"): 0.6 * norms}, default=0.2 * norms),
    ):
        grad_fn, state = clipped_grad(case.loss_fn, clipping_norm=groups, microbatch_size=B)
        grads, _ = grad_fn(case.params, case.batch, state=state)
        clipped = grads.report.norms > torch.tensor(groups.bounds, dtype=torch.float64)[:, None]
        assert 0 < int(clipped.sum()) < clipped.numel()
        want = looped_by_group(case.loss_fn, case.params, case.batch, groups)
        got = optree.tree_leaves(grads.pytree)
        slack = 1e-12 if dtype == torch.float64 else 1e-6
        for a, b in zip(got, want, strict=True):
            assert norm_of([a - b]) <= slack * norm_of(want)
    assert bundles == [6, 6] * 3


def example_norms(case: Case) -> float:
    """A typical norm of one example's gradient."""
    return sorted(truth_of(case).norms)[B // 2]


FROZEN = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
USES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "weights": (lambda x, p: F.linear(x, p), (2, 3)),
    "biases": (lambda x, p: F.linear(x, FROZEN, p), (3,)),
    "vectors": (lambda x, p: x * p, (3,)),
}


@pytest.mark.parametrize("name", USES)
def test_the_last_of_many_rows_moves_equal_layers_by_the_bound(bundles, name):
    """In one microbatch, whose sum in float32 would lose a part of it."""
    use, shape = USES[name]
    torch.manual_seed(0)
    params = {f"p{i}": torch.randn(shape) for i in range(5)}
    row = torch.randn(3)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return torch.stack([use(x, p).sum(1) for p in params.values()]).sum(0)

    def sum_of(size: int, bound: float) -> list[Tensor]:
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=bound, microbatch_size=size)
        return list(grad_fn(params, row.expand(size, 3), state=state)[0].pytree.values())

    alone = norm_of(sum_of(1, 1e9))
    for bound in (0.3 * alone, 0.7 * alone):
        both = zip(sum_of(2000, bound), sum_of(1999, bound), strict=True)
        assert abs(norm_of([a - b for a, b in both]) / bound - 1) < 1e-6
    assert set(bundles) == {5}
