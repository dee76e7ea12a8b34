"""Losses that ask for Python values of an example; ``passes`` is how many answers there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import B, Case, Spec, normal, of_module, reduced, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)

# Row by row: a number, a count of steps.
NUMBERS = (0.5, -1.0, 0.5, 2.0)
COUNTS = torch.tensor([2, 1, 4, 2])
READS: dict[str, Any] = {"beyond_vmap": True}


def _read(of: Callable[[Any, Tensor, Tensor], Tensor], *numbers: float, **known: Any) -> Spec:
    """The spec of ``of(p, x, n)``, ``n`` being NUMBERS, or others; an answer depends on those."""

    def make(dtype: torch.dtype) -> Case:
        numbers_ = torch.tensor(numbers or NUMBERS, dtype=dtype)
        x = torch.randn(len(numbers_), 6, 5, dtype=dtype)
        params = normal(dtype, w=(4, 5), v=(4, 5), u=(5, 5))
        return Case(params, lambda p, batch: _loss(of, p, *batch), (x, numbers_))

    return Spec(make, **{**READS, "mixes": True, **known})


def _counted(of: Callable[[Any, Tensor, Tensor], Tensor], **known: Any) -> Spec:
    """The same with COUNTS, which are integers."""

    def make(dtype: torch.dtype) -> Case:
        params = normal(dtype, w=(4, 5), v=(4, 5), u=(5, 5))
        batch = torch.randn(B, 6, 5, dtype=dtype), COUNTS.clone()
        return Case(params, lambda p, batch: _loss(of, p, *batch), batch)

    return Spec(make, **{**READS, "mixes": True, "passes": 3, **known})


def _loss(of: Any, p: Any, x: Tensor, n: Tensor) -> Tensor:
    # Every case uses all parameters.
    return reduced(of(p, x, n)) + 0.1 * sum(w.sin().mean() for w in p.values())  # type: ignore[no-any-return]


def _double(p: Any, x: Tensor, *, yes: bool) -> Tensor:
    out = F.linear(x, p["w"])
    return 2 * out if yes else out + 1


# -- yes or no ------------------------------------------------------------------------------------


def _elif(p: Any, x: Tensor, n: Tensor) -> Tensor:
    if n < 0:
        return F.linear(x, p["w"])
    if n > 1:
        return F.linear(x, p["v"])
    return F.linear(x, p["w"] + p["v"])


def _try(p: Any, x: Tensor, n: Tensor) -> Tensor:
    try:
        yes = bool(n > 0)
    except Exception:  # noqa: BLE001 - what a loss catches must not hide what the engine throws
        yes = False
    return _double(p, x, yes=yes)


def _finally(p: Any, x: Tensor, n: Tensor) -> Tensor:
    try:
        return _double(p, x, yes=bool(n > 0))
    finally:
        x = x * 2


CASES |= {
    "branch": _read(lambda p, x, n: _double(p, x, yes=n > 0), passes=2),  # type: ignore[arg-type]
    "branch-of-bool": _read(lambda p, x, n: _double(p, x, yes=bool(n > 0)), passes=2),
    "branch-of-three": _read(_elif, passes=3),
    "branch-within-a-try": _read(_try, passes=2),
    "branch-with-a-finally": _read(_finally, passes=2),
    "branch-by-and": _read(lambda p, x, n: _double(p, x, yes=n > 0 and n < 1), passes=3),  # type: ignore[arg-type]
    "branch-by-not": _read(lambda p, x, n: _double(p, x, yes=not n > 0), passes=2),
    "branch-by-any": _read(lambda p, x, n: _double(p, x, yes=bool((n > 1).any())), passes=2),
    "branch-by-all": _read(lambda p, x, n: _double(p, x, yes=(n > 0).all()), passes=2),  # type: ignore[arg-type]
    "branch-by-item": _read(lambda p, x, n: _double(p, x, yes=n.sum().item() > 0), passes=3),
    "branch-by-is-nonzero": _read(
        lambda p, x, n: _double(p, x, yes=torch.is_nonzero(n > 0)), passes=2
    ),
    "branch-on-what-is-computed": _read(
        lambda p, x, n: _double(p, x, yes=bool((F.linear(x, p["w"]).mean() * 0 + n).max() > 0)),
        passes=2,
    ),
    "branch-all-alike": _read(lambda p, x, n: _double(p, x, yes=bool(n.abs() < 9)), passes=1),
    "branches-one-after-another": _read(
        lambda p, x, n: _double(p, _double(p, x, yes=bool(n > 0)) @ p["w"], yes=bool(n < 1)),
        passes=3,
    ),
    "branch-in-a-branch": _read(
        lambda p, x, n: _double(p, x, yes=bool(n < 1)) if n > 0 else F.linear(x, p["v"]), passes=3
    ),
    "conditional-expression": _read(
        lambda p, x, n: F.linear(x, p["w"] if n.item() > 0 else p["v"]), passes=3
    ),
    "assertion": _read(lambda p, x, n: _asserted(x) @ p["u"], passes=1, mixes=False),
    "comparison-of-two-examples-parts": _read(
        lambda p, x, n: _double(p, x, yes=bool(x[0, 0, 0] * 0 + n > x[0, 0, 1] * 0)), passes=2
    ),
    "builtin-max": _read(lambda p, x, n: F.linear(x, p["w"]) * max(n[0], 0 * n[0]), passes=2),
    "builtin-abs-and-round": _read(
        lambda p, x, n: F.linear(x, p["w"]) * abs(n)[:, None, None].round(),
        passes=1,
        mixes=False,
    ),
    "builtin-sorted": _read(
        lambda p, x, n: F.linear(x, p["w"]) * sorted([n[0], 0 * n[0] + 0.3])[0], passes=2
    ),
    "in": _read(lambda p, x, n: _double(p, x, yes=0.5 in n), passes=2),
    "in-a-list-of-numbers": _read(lambda p, x, n: _double(p, x, yes=n.item() in [2.0]), passes=3),
    "equal": _read(
        lambda p, x, n: _double(p, x, yes=torch.equal(n, torch.full_like(n, 0.5))), passes=2
    ),
    "equal-method": _read(lambda p, x, n: _double(p, x, yes=n.equal(n.abs())), passes=2),
    "equal-of-other-shapes": _read(
        lambda p, x, n: _double(p, x, yes=torch.equal(n, x)), passes=1, mixes=False
    ),
    "allclose": _read(
        lambda p, x, n: _double(p, x, yes=torch.allclose(n, n.abs(), atol=1e-3)), passes=2
    ),
    "isfinite": _read(
        lambda p, x, n: _double(p, x, yes=bool(torch.isfinite(x).all())), passes=1, mixes=False
    ),
}


def _asserted(x: Tensor) -> Tensor:
    assert not x.isnan().any()
    assert x.abs().max() < 1e3
    return x


# -- numbers --------------------------------------------------------------------------------------


def _while(p: Any, x: Tensor, n: Tensor) -> Tensor:
    left = n.clone()
    while left > 0:
        x, left = (x @ p["u"]).tanh(), left - 1
    return x


def _while_true(p: Any, x: Tensor, n: Tensor) -> Tensor:
    step = 0
    while True:
        x, step = (x @ p["u"]).tanh(), step + 1
        if step >= n:
            return x


def _for(p: Any, x: Tensor, n: Tensor) -> Tensor:
    for _ in range(int(n)):
        x = (x @ p["u"]).tanh()
    return x


def _heads(p: Any, x: Tensor, n: Tensor) -> Tensor:
    heads = {1: p["w"], 2: p["v"], 4: p["w"] + p["v"]}
    return F.linear(x, heads[int(n)])


def _match(p: Any, x: Tensor, n: Tensor) -> Tensor:
    match n.tolist():
        case [1]:
            return F.linear(x, p["w"])
        case [2]:
            return F.linear(x, p["v"])
        case _:
            return x


CASES |= {
    "item": _counted(lambda p, x, n: F.linear(x, p["w"]) * n.item()),
    "item-of-one-element": _counted(lambda p, x, n: F.linear(x, p["w"]) * n[0].item()),
    "int": _counted(lambda p, x, n: F.linear(x, p["w"]) * int(n)),
    "float": _counted(lambda p, x, n: F.linear(x, p["w"]) * float(n)),
    "float-of-what-has-a-gradient": _read(
        lambda p, x, n: F.linear(x, p["w"]) * float((p["w"].sum() * n).detach()), passes=3
    ),
    "complex": _counted(lambda p, x, n: F.linear(x, p["w"]) * complex(n).real),
    "index": _counted(lambda p, x, n: F.linear(x, p["w"]) * [0, 3, 5, 7, 9][n[0]]),
    "range": _counted(_for),
    "while": _counted(_while),
    "while-true": _counted(_while_true),
    "slice": _counted(lambda p, x, n: F.linear(x[:, : int(n)], p["w"]).mean(1)),
    "slice-by-a-tensor": _counted(lambda p, x, n: F.linear(x[:, : n[0]], p["w"]).mean(1)),
    "last-step": _counted(lambda p, x, n: F.linear(x[:, n[0] - 1], p["w"]), passes=1),
    "last-step-by-a-number": _counted(lambda p, x, n: F.linear(x[:, int(n) - 1], p["w"])),
    "narrow": _counted(lambda p, x, n: F.linear(x.narrow(1, 0, int(n)), p["w"]).mean(1)),
    "split": _counted(
        lambda p, x, n: F.linear(x.split([int(n), 6 - int(n)], 1)[0], p["w"]).mean(1)
    ),
    "shape-made-of-a-value": _counted(
        lambda p, x, n: F.linear(x, p["w"]).sum(1) * torch.ones(int(n), 1, dtype=x.dtype).sum()
    ),
    "to-the-longest": _counted(
        # Of one row, the longest is itself.
        lambda p, x, n: F.linear(x[:, : n.max()], p["w"]).mean(1)
    ),
    "arange-of-the-longest": _counted(
        lambda p, x, n: F.linear(x[:, torch.arange(int(n.max()))], p["w"]).mean(1)
    ),
    "formatted": _counted(lambda p, x, n: F.linear(x, p["w"]) * int(f"{n.amax(0).item()}")),
    "heads-by-label": _counted(_heads),
    "match": _counted(_match),
    "tolist": _counted(lambda p, x, n: F.linear(x, p["w"]) * n.tolist()[0]),
    "tolist-of-several": _read(
        lambda p, x, n: F.linear(x, p["w"]) * sum((n[:, None] * torch.ones(3).to(n)).tolist()[0]),
        passes=3,
    ),
    "numpy": _counted(lambda p, x, n: F.linear(x, p["w"]) * int(n.numpy().sum())),
    "numpy-of-an-array": _counted(lambda p, x, n: F.linear(x, p["w"]) * float(np.asarray(n).max())),
    "numpy-there-and-back": _counted(
        lambda p, x, n: F.linear(x, p["w"]) * torch.from_numpy(n.numpy() ** 2)[:, None, None],
        mixes=False,
    ),
    "numpy-of-several": _read(
        lambda p, x, n: (
            F.linear(x, p["w"])
            * float(np.median((n[:, None] * torch.arange(1, 4).to(n)).detach().cpu().numpy()))
        ),
        passes=3,
    ),
    "numpy-writes": _counted(lambda p, x, n: F.linear(x, p["w"]) * _written(n.numpy())),
    "argmax-chooses": _read(
        lambda p, x, n: F.linear(x, (p["w"], p["v"])[int(torch.stack([0 * n[0], n[0]]).argmax())]),
        passes=2,
    ),
    "rounded": _read(lambda p, x, n: F.linear(x, p["w"]) * round(n.item()), passes=3),
    "math": _read(lambda p, x, n: F.linear(x, p["w"]) * math.exp(n), passes=3),
    "enumerated": _counted(
        lambda p, x, n: sum(F.linear(x[:, i], p["w"]) * k for i, k in enumerate(n.tolist()))  # type: ignore[misc]
    ),
}
CASES["builtin-abs-and-round"] = replace(CASES["builtin-abs-and-round"], beyond_vmap=False)


def _written(values: Any) -> int:
    # An array may share its memory with what the other rows are to see.
    values *= 3
    return int(values.sum())


# -- values that compare in a way of their own ----------------------------------------------------

NAN, INF = math.nan, math.inf
CASES |= {
    "nan-twice": _read(
        lambda p, x, n: F.linear(x, p["w"]) * (1 if math.isnan(n.item()) else 2),
        NAN,
        1.0,
        NAN,
        1.0,
        passes=2,
    ),
    "nan-in-an-array": _read(
        lambda p, x, n: (
            F.linear(x, p["w"])
            * float(np.nan_to_num((n[:, None] * torch.ones(2).to(n)).numpy(), nan=7.0).sum())
        ),
        NAN,
        1.0,
        NAN,
        1.0,
        passes=2,
    ),
    "nan-and-infinity-in-an-array": _read(
        lambda p, x, n: (
            F.linear(x, p["w"])
            * float(
                np.nan_to_num((n[:, None] * torch.ones(2).to(n)).numpy(), nan=7.0, posinf=3.0).sum()
            )
        ),
        NAN,
        INF,
        NAN,
        INF,
        passes=2,
    ),
    "zero-and-minus-zero": _read(
        # Equal as numbers, and yet another result.
        lambda p, x, n: F.linear(x, p["w"]) * (2 + math.copysign(1.0, n.item())),
        0.0,
        -0.0,
        0.0,
        -0.0,
        passes=2,
    ),
    "zero-and-minus-zero-by-float": _read(
        lambda p, x, n: F.linear(x, p["w"]) * (2 + math.copysign(1.0, float(n))),
        0.0,
        -0.0,
        0.0,
        -0.0,
        passes=2,
    ),
    "true-and-one": _read(
        lambda p, x, n: _double(p, x, yes=bool(n == 1)), 1.0, 0.0, 1.0, 0.0, passes=2
    ),
}

# -- what fails for some examples -----------------------------------------------------------------


def _factor(p: Any, x: Tensor, n: Tensor) -> Tensor:
    """A Cholesky factor, of a matrix with more on its diagonal if that is what it takes."""
    matrix = (x.mT @ x) / 6 + n[:, None, None] * torch.eye(5, dtype=x.dtype)
    try:
        factor = torch.linalg.cholesky(matrix)
    except RuntimeError:
        factor = torch.linalg.cholesky(matrix + 9 * torch.eye(5, dtype=x.dtype))
    return factor @ p["u"]


def _vectorised_or_not(p: Any, x: Tensor, n: Tensor) -> Tensor:
    """Two ways, one of which vmap cannot run."""
    try:
        kept = x[x > n[:, None, None]]
    except RuntimeError:
        kept = x[:, 0]
    return F.linear(x, p["w"]) * kept.mean()


CASES |= {
    "retry-where-it-fails": _read(_factor, passes=0, alone=B),
    "other-way-where-vmap-fails": _read(_vectorised_or_not, passes=0, alone=B),
}

# -- more answers than passes are worth -----------------------------------------------------------

TEN = tuple(0.1 * i for i in range(1, 11))
CASES |= {
    "eight-answers": _read(lambda p, x, n: F.linear(x, p["w"]) * n.item(), *TEN[:8], passes=8),
    "nine-answers": _read(
        lambda p, x, n: F.linear(x, p["w"]) * n.item(), *TEN[:9], passes=0, alone=9
    ),
    "nine-answers-of-some": _read(
        # Half of the rows answer alike before the others are asked.
        lambda p, x, n: F.linear(x, p["w"]) * (n.item() if n > 0 else 2.0),
        *TEN[:9],
        *(-1.0,) * 5,
        passes=1,
        alone=9,
    ),
}

# -- what has another shape for each example ------------------------------------------------------

DYNAMIC: dict[str, Any] = {"passes": 0, "alone": B}
CASES |= {
    "masked-select": _read(
        lambda p, x, n: _first(F.linear(x, p["w"]), x > n[:, None, None]), **DYNAMIC
    ),
    "boolean-index": _read(
        lambda p, x, n: F.linear(x[x[..., 0] > n[:, None]], p["w"]).sum(0, keepdim=True), **DYNAMIC
    ),
    "nonzero": _read(
        lambda p, x, n: F.linear(x[0, (x[0, :, 0] > n[0]).nonzero()[:, 0]], p["w"]).sum(
            0, keepdim=True
        ),
        **DYNAMIC,
    ),
    "where-of-one-argument": _read(
        lambda p, x, n: F.linear(x[torch.where(x[..., 0] > n[:, None])], p["w"]).sum(0)[None],
        **DYNAMIC,
    ),
    "unique": _read(
        lambda p, x, n: F.linear(x, p["w"]) * len(torch.unique((3 * x).long())), **DYNAMIC
    ),
    "one-hot-without-a-number": _counted(
        lambda p, x, n: F.linear(x[:, : F.one_hot(n).shape[1]], p["w"]).mean(1), **DYNAMIC
    ),
    "repeat-interleave-by-the-example": _counted(
        lambda p, x, n: F.linear(x.repeat_interleave(n[0], 1), p["w"])[:, -1] * n, **DYNAMIC
    ),
    "bincount": _counted(
        lambda p, x, n: F.linear(x, p["w"]) * torch.bincount(n).to(x).std(unbiased=False), **DYNAMIC
    ),
    "bincount-of-a-length": _counted(
        lambda p, x, n: F.linear(x, p["w"]) * torch.bincount(n, minlength=9)[2] + x[..., :4],
        passes=1,
    ),
}


def _first(out: Tensor, mask: Tensor) -> Tensor:
    return out.mean((1, 2), keepdim=True) * out.masked_select(mask[..., :4]).sum()


# -- what every batch has -------------------------------------------------------------------------

ALIKE: dict[str, Any] = {"passes": 1, "mixes": False, "beyond_vmap": False}
CASES |= {
    "len": _read(lambda p, x, n: F.linear(x, p["w"]).view(len(x), -1), **ALIKE),
    "size": _read(lambda p, x, n: F.linear(x, p["w"]).view(x.size(0), -1) / x.size(1), **ALIKE),
    "shape": _read(lambda p, x, n: F.linear(x, p["w"]).reshape(x.shape[0], -1), **ALIKE),
    "numel": _read(lambda p, x, n: F.linear(x, p["w"]) / x[0].numel(), **ALIKE),
    "iterated-rows": _read(
        lambda p, x, n: torch.stack(
            [F.linear(row, p["w"]) * k for row, k in zip(x, n, strict=True)]
        ),
        **ALIKE,
    ),
    "unbound-rows": _read(
        lambda p, x, n: torch.cat([F.linear(row, p["w"])[None] for row in x.unbind(0)]), **ALIKE
    ),
    "rows-by-index": _read(
        lambda p, x, n: torch.stack([F.linear(x[i], p["w"]) * n[i] for i in range(len(x))]), **ALIKE
    ),
    "first-step": _read(lambda p, x, n: F.linear(x[:, 0], p["w"]), **ALIKE),
    "arange-of-rows": _read(lambda p, x, n: F.linear(x, p["w"])[torch.arange(len(x)), 2], **ALIKE),
    "sorted-rows": _read(
        lambda p, x, n: F.linear(x[n.argsort()], p["w"])[n.argsort().argsort()], **ALIKE
    ),
    "dtype-and-device": _read(
        lambda p, x, n: (
            F.linear(x, p["w"])
            if x.dtype.is_floating_point
            and x.device.type == "cpu"
            and not x.is_sparse
            and x.is_contiguous()
            else x
        ),
        **ALIKE,
    ),
}


@case(passes=2, mixes=True, beyond_vmap=True)
def module_that_skips_a_layer(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            if x.sum() > 0:
                h = self.second(h).tanh()
            return self.out(h)

    x = torch.randn(B, 5)
    x = (x - x.mean(1, keepdim=True)) + torch.tensor([[0.1], [-0.1], [0.1], [0.1]])
    return of_module(Net(), x, dtype=dtype, own=True)
