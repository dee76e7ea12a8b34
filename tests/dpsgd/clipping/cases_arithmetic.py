"""Arithmetic with a parameter, function by function; parameters among the tensors of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import B, Spec, of_function, of_module, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)

X = (3, 5)  # of an example
# A parameter broadcasts in every way, and with a dimension of size one.
SHAPES = {
    "scalar": (),
    "one": (1,),
    "row": (5,),
    "column": (3, 1),
    "all": (3, 5),
    "more": (2, 1, 5),
}


def _positive(t: Tensor) -> Tensor:
    return t.abs() + 0.5


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, w: x + w,
    "radd": lambda x, w: w + x,
    "sub": lambda x, w: x - w,
    "rsub": lambda x, w: w - x,
    "mul": lambda x, w: x * w,
    "rmul": lambda x, w: w * x,
    "div": lambda x, w: x / _positive(w),
    "rdiv": lambda x, w: w / _positive(x),
}
CASES |= {
    f"{name}-{kind}": of_function(
        # A dimension in front of the examples would be another layout: "more" has one behind them.
        lambda p, x, f=f, kind=kind: f(x[:, None] if kind == "more" else x, p["w"]),
        {"w": shape},
        X,
    )
    for name, f in BINARY.items()
    for kind, shape in SHAPES.items()
}

OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow": lambda x, w: _positive(x) ** w,
    "rpow": lambda x, w: _positive(w) ** x,
    "torch-pow": lambda x, w: torch.pow(_positive(w), x),
    "remainder": lambda x, w: torch.remainder(w, _positive(x)),
    "fmod": lambda x, w: torch.fmod(w * 5, _positive(x)),
    "maximum": lambda x, w: torch.maximum(x, w),
    "minimum": lambda x, w: torch.minimum(w, x),
    "clamp": lambda x, w: x.clamp(min=w - 0.5, max=w + 0.5),
    "add-scaled": lambda x, w: torch.add(x, w, alpha=2),
    "sub-scaled": lambda x, w: x.sub(w, alpha=0.5),
    "addcmul": lambda x, w: torch.addcmul(x, x, w, value=0.5),
    "addcdiv": lambda x, w: torch.addcdiv(w, x, _positive(w)),
    "lerp": lambda x, w: torch.lerp(x, w.expand_as(x), 0.3),
    "lerp-by-a-parameter": lambda x, w: torch.lerp(x, x.square(), w.sigmoid()),
    "where": lambda x, w: torch.where(x > 0, x, w),
    "where-a-parameter-says": lambda x, w: torch.where(w > 0, x * w, x - w),
    "masked-fill": lambda x, w: x.masked_fill(x > 0, w.sum()),
    "atan2": lambda x, w: torch.atan2(w, x),
    "hypot": lambda x, w: torch.hypot(x, w),
    "logaddexp": lambda x, w: torch.logaddexp(x, w),
    "xlogy": lambda x, w: torch.xlogy(x, _positive(w)),
    "copysign": lambda x, w: torch.copysign(w, x),
    "dist": lambda x, w: (x - w).norm(dim=-1, keepdim=True),
    "by-name": lambda x, w: torch.add(input=x, other=w),
    "where-by-name": lambda x, w: torch.where(condition=x > 0, input=x, other=w),
    "expanded-by-name": lambda x, w: x + w.expand(size=(len(x), 3, 5)),
    "broadcast-by-name": lambda x, w: x + torch.broadcast_to(w, size=(len(x), 3, 5)),
    "of-two-uses": lambda x, w: x * w + w,
    "comparison-without-a-gradient": lambda x, w: (x > w) * x * w,
    "chain-of-scalars": lambda x, w: 2 * (1 - w) * x / 3 + 0.5 * w**2 - x.size(1),
    "numbers-and-rows": lambda x, w: (2 - (3 / (4 + (x * w).square())) * -0.5 + 1) / 7,
    "rows-and-rows": lambda x, w: (x * w).add(x, alpha=2).sub(x).mul(x).tanh().div(x + 9),
    "rows-by-name": lambda x, w: torch.mul(input=x * w, other=x) + torch.mul(x, other=x * w),
    "rows-of-other-shapes": lambda x, w: _of_other_shapes((x * w)[0, 0, :4]),
    "rows-of-other-types": lambda x, w: (x * w) * (x > 0) + (x * w) / (x > 0).add(1),
    "rows-rounded": lambda x, w: x * w + torch.div(x, 1 + x.abs(), rounding_mode="floor"),
    "activations": lambda x, w: F.silu(F.gelu(x * w, approximate="tanh").relu().sigmoid()),
    "activations-in-place": lambda x, w: F.relu(F.silu(x * w + 1, inplace=True), True),
    "softplus": lambda x, w: F.softplus(w) * x,
    "leaky": lambda x, w: torch.where(x > 0, x, x * w),
    "gate-of-both": lambda x, w: torch.sigmoid(x * w) * x,
    "glu": lambda x, w: F.glu(torch.cat([x, x * w], -1), -1),
    "outer-sum": lambda x, w: (x[..., None] + w).logsumexp(-1),
    "huber-of-the-difference": lambda x, w: F.smooth_l1_loss(x, w.expand_as(x), reduction="none"),
    "in-place-add": lambda x, w: (x * 1).add_(w),
    "in-place-mul": lambda x, w: x.clone().mul_(w),
    "in-place-operator": lambda x, w: _in_place(x.clone(), w),
    "in-place-into-a-slice": lambda x, w: _into_a_slice(x.clone(), w),
    "in-place-copy": lambda x, w: torch.empty_like(x).copy_(w) * x,
    "in-place-lerp": lambda x, w: x.clone().lerp_(w.expand_as(x).contiguous(), 0.5),
    "in-place-masked": lambda x, w: x.clone().masked_fill_(x > 0, w.mean()),
    "concatenated": lambda x, w: torch.cat([x, w.expand(len(x), 2, 5)], 1).cumsum(1),
    "stacked": lambda x, w: torch.stack([x, w.expand_as(x)], 1).prod(1),
    "repeated": lambda x, w: x * w.repeat(3, 1),
    "tiled": lambda x, w: x * w.tile((3, 1)),
    "repeat-interleaved": lambda x, w: x * w[:3].repeat_interleave(5).view(3, 5),
    "padded": lambda x, w: x * F.pad(w[1:], (0, 1), value=2.0),
    "rolled": lambda x, w: x * w.roll(2, 0),
    "flipped": lambda x, w: x * w.flip(0),
    "split": lambda x, w: x[..., :2] * w.split([2, 3])[0] + w.split([2, 3])[1][:2],
    "chunked": lambda x, w: x[..., :3] * w.chunk(2)[0] + w.chunk(2)[1].sum(),
    "unbound": lambda x, w: sum(x[..., i] * v for i, v in enumerate(w.unbind())),  # type: ignore[misc]
    "iterated": lambda x, w: torch.stack([x[..., i] * v for i, v in enumerate(w)], -1),
    "one-element": lambda x, w: x * w[2],
    "every-other": lambda x, w: x[..., ::2] * w[::2],
    "last-elements": lambda x, w: x[..., -2:] * w[-2:] + w[..., -1],
    "new-axis": lambda x, w: x * w[None, None],
    "chosen-by-a-list": lambda x, w: x * w[[0, 0, 2, 1, 4]],
    "chosen-by-a-mask": lambda x, w: x[..., :2] * w[torch.arange(5) > 2],
    "as-strided": lambda x, w: x * w.as_strided((3, 5), (0, 1)),
    "scattered": lambda x, w: x.scatter_add(
        2, torch.zeros(len(x), 3, 1, dtype=torch.int64), w[:1].expand(len(x), 3, 1)
    ),
    "index-added": lambda x, w: x.index_add(2, torch.tensor([1, 1]), w[:2].expand(len(x), 3, 2)),
    "index-copied": lambda x, w: x.index_copy(
        2, torch.tensor([4, 0]), w[:2].expand(len(x), 3, 2)
    ).cumsum(2),
    "index-put": lambda x, w: x.index_put((torch.arange(len(x)), torch.tensor(1)), w).cumsum(1),
    "select-scattered": lambda x, w: torch.select_scatter(x, w.expand(len(x), 5), 1, 0).cumsum(1),
    "cumulative": lambda x, w: x * w.cumsum(0) + w.exp().cumsum(0).log(),
    "sorted": lambda x, w: x * w.sort().values,
    "greatest": lambda x, w: x * w.max() - w.topk(2).values.sum(),
    "of-its-statistics": lambda x, w: x * (w - w.mean()) / (w.std() + 1) + w.var(),
    "of-its-norm": lambda x, w: x * w / w.norm() + torch.linalg.vector_norm(w, 3),
    "softmax-of-a-parameter": lambda x, w: x * w.softmax(0),
    "spline": lambda x, w: sum(c * x.sin() ** i for i, c in enumerate(w)),  # type: ignore[misc]
    "meshed": lambda x, w: torch.meshgrid(w[:3], w, indexing="ij")[0] * x,
    "flattened": lambda x, w: (x * w.view(1, 5).flatten()).flatten(1),
    "in-another-type": lambda x, w: (x.float() * w.float()).to(x.dtype),
    "complex": lambda x, w: (torch.complex(x, x.sin()) * torch.complex(w, w.cos())).abs(),
    "fourier": lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w), 5),
    "polar": lambda x, w: (
        (torch.view_as_complex(torch.stack([x, -x], -1)) * torch.polar(torch.ones_like(w), w)).real
    ),
}


def _in_place(x: Tensor, w: Tensor) -> Tensor:
    x += w
    x *= w
    x -= 2 * w
    return x


def _into_a_slice(x: Tensor, w: Tensor) -> Tensor:
    x[:, 0] = w
    x[:, 1] += w
    x[:, 2, 1:] = w[1:] * 2
    return x


def _of_other_shapes(v: Tensor) -> Tensor:
    # As long as there are rows: a vector of each, taken for a matrix, would fit.
    assert len(v) == B
    return (v.outer(v) * v)[None]


KNOWN: dict[str, dict[str, Any]] = {
    "rows-of-other-shapes": {"mixes": True},
    "chosen-by-a-mask": {"beyond_vmap": True},
    "complex": {"caution": 2},
    "fourier": {"caution": 2},
    "polar": {"caution": 2},
}
CASES |= {
    f"arithmetic-{name}": of_function(
        lambda p, x, f=f: f(x, p["w"]), {"w": (5,)}, X, **KNOWN.get(name, {})
    )
    for name, f in OTHERS.items()
}

# -- modules and functions with parameters of their own -------------------------------------------

CASES |= {
    "grid-of-a-learned-transform": of_function(
        # A spatial transformer whose transform is one for all.
        lambda p, x: F.grid_sample(
            x,
            F.affine_grid(p["theta"].expand(len(x), -1, -1), x.shape, align_corners=False),
            align_corners=False,
        ),
        {"theta": (1, 2, 3)},
        (2, 4, 4),
    ),
    "grid-of-the-example": of_function(
        lambda p, x: F.grid_sample(
            x,
            F.affine_grid(
                F.linear(x.mean((2, 3)), p["w"]).view(-1, 2, 3), x.shape, align_corners=False
            ),
            align_corners=False,
        ),
        {"w": (6, 2)},
        (2, 4, 4),
    ),
    "interpolated-positions": of_function(
        lambda p, x: x + F.interpolate(p["pos"], (4, 6), mode="bicubic"),
        {"pos": (1, 2, 3, 3)},
        (2, 4, 6),
    ),
    "interpolated-positions-nearest": of_function(
        lambda p, x: x * F.interpolate(p["pos"], scale_factor=2), {"pos": (1, 2, 2, 3)}, (2, 4, 6)
    ),
    "prelu-of-one": of_function(lambda p, x: F.prelu(x, p["w"]), {"w": (1,)}, X),
    "prelu-of-channels": of_function(lambda p, x: F.prelu(x, p["w"]), {"w": (3,)}, X),
    "rotary": of_function(
        lambda p, x: (
            lambda h: h * p["f"].cos() + torch.cat([-h[..., 3:], h[..., :3]], -1) * p["f"].sin()
        )(x @ p["w"]),
        {"w": (5, 6), "f": (3, 6)},
        X,
    ),
}


@case()
def prelu_layers(dtype):
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.PReLU(3), nn.Flatten(), nn.Linear(12, 4), nn.PReLU())
    return of_module(net, torch.randn(B, 2, 4, 4), dtype=dtype)


@case()
def mixture_of_experts_chosen_softly(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(5, 3)
            self.experts = nn.ModuleList([nn.Linear(5, 4) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            gates = self.gate(x).softmax(-1)
            return sum(gates[..., i, None] * f(x) for i, f in enumerate(self.experts))  # type: ignore[return-value]

    return of_module(Net(), torch.randn(B, *X), dtype=dtype)


@case()
def mixture_of_experts_of_the_best_two(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(5, 3)
            self.experts = nn.Parameter(torch.randn(3, 5, 4))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            each = torch.einsum("bi,bkij->bkj", x, self.experts[chosen])
            return (weights[..., None] * each).sum(1)

    return of_module(Net(), torch.randn(B, 5), dtype=dtype)


@case()
def radial_basis_functions(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres, self.log_width = (
                nn.Parameter(torch.randn(4, 5)),
                nn.Parameter(torch.zeros(4)),
            )
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            squared = (x[:, None] - self.centres).square().sum(-1)
            return self.out((-squared * self.log_width.exp()).exp())

    return of_module(Net(), torch.randn(B, 5), dtype=dtype)
