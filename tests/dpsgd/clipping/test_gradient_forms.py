"""Forms in which the gradients of examples are held, each against the gradients themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opake_lightning.dpsgd.clipping import _gradients
from opake_lightning.dpsgd.clipping._alike import Alike
from opake_lightning.dpsgd.clipping._gradients import (
    Dense,
    Gradients,
    Outer,
    Pulled,
    Rows,
    total,
)


def _normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def _outer(a: Tensor, b: Tensor, shape: torch.Size | None = None) -> Outer:
    return Outer(a, b, len(a), shape)


def _forms() -> dict[str, Gradients]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return _normal(draw, *shape)

    ids = torch.randint(0, 5, (3, 6), generator=draw)
    leaf = normal(4, 6).requires_grad_()
    halves = leaf.t().chunk(2)
    return {
        "dense": Dense(normal(3, 2, 5)),
        "outer of one": _outer(normal(3, 1, 4), normal(3, 1, 6)),
        "outer": _outer(normal(3, 7, 4), normal(3, 7, 6)),
        "outer of few": _outer(normal(3, 2, 40), normal(3, 2, 60)),  # by products of pairs
        "outer of many": _outer(normal(3, 40, 4), normal(3, 40, 6)),  # formed
        "outer of another shape": _outer(normal(3, 7, 4), normal(3, 7, 6), torch.Size((2, 2, 6))),
        "rows": Rows(ids, normal(3, 6, 4), 5),
        "two outers": total([_outer(normal(3, 2, 4), normal(3, 2, 6)) for _ in range(2)]),
        "two dense": total([Dense(normal(3, 2, 5)) for _ in range(2)]),
        "outer and dense": total(
            [_outer(normal(3, 2, 4), normal(3, 2, 6)), Dense(normal(3, 4, 6))]
        ),
        "tied": total([Rows(ids, normal(3, 6, 4), 5), _outer(normal(3, 2, 5), normal(3, 2, 4))]),
        "slices": total(
            [Pulled(Dense(normal(3, 3, 4)), half, leaf, isometric=True) for half in halves]
        ),
        "overlapping": total(
            [
                Pulled(Dense(normal(3, 3, 6)), leaf[start : start + 3], leaf, isometric=True)
                for start in (0, 1)
            ]
        ),
        "computed": Pulled(Dense(normal(3, 4, 6)), leaf.exp(), leaf, isometric=False),
    }


@pytest.mark.parametrize("name", _forms())
def test_every_form_agrees_with_the_gradients_themselves(name):
    form = _forms()[name]
    rows = form.dense(slice(None))
    factors = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    columns = factors.view(-1, *[1] * len(form.shape))
    sums, squares = (torch.zeros(form.shape, dtype=torch.float64) for _ in range(2))
    form.add_weighted(factors, sums)
    written = torch.full_like(sums, torch.nan)
    form.write_weighted(factors, written)
    form.add_squares(factors, squares)
    forms = [form] if (formed := form.formed()) is None else [form, formed]
    for each in forms:
        torch.testing.assert_close(each.squared_norms(), rows.flatten(1).square().sum(1))
        torch.testing.assert_close(each.dense(slice(1, 2)), rows[1:2])
    torch.testing.assert_close(sums, (columns * rows).sum(0))
    torch.testing.assert_close(written, sums)
    torch.testing.assert_close(squares, (columns * rows).square().sum(0))
    assert (len(forms) == 2) is (name in ("outer of many", "computed"))


@pytest.mark.parametrize("kind", ["dense", "outer"])
def test_leaves_of_one_kind_are_looked_at_together(kind):
    draw = torch.Generator().manual_seed(0)
    members: list[Gradients] = [
        Dense(_normal(draw, 3, 2, 5))
        if kind == "dense"
        else _outer(_normal(draw, 3, 7, 2), _normal(draw, 3, 7, 5))
        for _ in range(4)
    ]
    assert len({member.kind() for member in members}) == 1
    together, factors = Alike(members), _normal(draw, 4, 3)
    outs = [torch.zeros(2, 5, dtype=torch.float64) for _ in members]
    together.add_weighted(factors, outs)
    for member, factor, norms, out in zip(
        members, factors, together.squared_norms(), outs, strict=True
    ):
        want = torch.zeros_like(out)
        member.add_weighted(factor, want)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(norms, member.squared_norms())


def test_what_cancels_keeps_its_digits():
    """‖Σ aₜbₜᵀ‖ of terms that nearly cancel; a float32 product of pairs is off by percents."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, 64, generator=draw), torch.randn(2, 1, 96, generator=draw)
    near = a * (1 + 1e-4 * torch.randn(a.shape, generator=draw))
    form = _outer(torch.cat([a, -near], 1), b.repeat(1, 2, 1))
    assert form._prefers_gram()
    want = (a.double() - near.double()).mT @ b.double()
    torch.testing.assert_close(
        form.squared_norms(), want.flatten(1).square().sum(1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("value", [1e-3, 7e-3, 0.3, 1.7])
def test_squares_are_summed_widely(value):
    """A plain float32 sum of 10⁷ equal squares is off by percents."""
    values = torch.full((1, 10**7 + 3), value)
    want = (10**7 + 3) * float(values[0, 0].double()) ** 2
    assert float(_gradients.squared_norms(values)) == pytest.approx(want, rel=6e-7)
