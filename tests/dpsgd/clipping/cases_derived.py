"""Weights that are computed of parameters, shared, or held where nobody looks for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from tests.dpsgd.clipping.case import (
    ALONE,
    B,
    Case,
    Spec,
    normal,
    of_function,
    of_module,
    own_parameters,
    reduced,
    registry,
)

CASES: dict[str, Spec] = {}
case = registry(CASES)

W = {"w": (4, 5)}


def _old(make: Callable[..., nn.Module], layer: nn.Module, **options: Any) -> nn.Module:
    """One of the functions before parametrizations, without the notice that there are those."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(layer, **options)


def _layers(make: Callable[[], tuple[nn.Module, nn.Module]], *, own: bool, train: bool) -> Spec:
    """A convolution and a linear layer, each wrapped."""

    def of(dtype: torch.dtype) -> Case:
        conv, linear = make()
        net = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), linear, nn.Tanh(), nn.Linear(4, 2))
        return of_module(net.train(train), torch.randn(B, 2, 4, 4), dtype=dtype, own=own)

    return Spec(of)


def _plain() -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(2, 3, 3), nn.Linear(12, 4)


class _Scaled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / w.square().sum().sqrt()


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def _parametrized(part: nn.Module) -> tuple[nn.Module, nn.Module]:
    layers = _plain()
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", part)
    return layers


WRAPPED: dict[str, Callable[[], Any]] = {
    "weight-norm": lambda: map(parametrizations.weight_norm, _plain()),
    "weight-norm-of-the-whole": lambda: (
        parametrizations.weight_norm(layer, dim=None) for layer in _plain()
    ),
    "spectral-norm": lambda: map(parametrizations.spectral_norm, _plain()),
    "orthogonal": lambda: (_plain()[0], parametrizations.orthogonal(_plain()[1])),
    "orthogonal-by-householder": lambda: (
        _plain()[0],
        parametrizations.orthogonal(_plain()[1], orthogonal_map="householder"),
    ),
    "orthogonal-by-cayley": lambda: (
        _plain()[0],
        parametrizations.orthogonal(_plain()[1], orthogonal_map="cayley"),
    ),
    "parametrized": lambda: _parametrized(_Scaled()),
    "old-weight-norm": lambda: (_old(weight_norm, layer) for layer in _plain()),
    "old-spectral-norm": lambda: (_old(spectral_norm, layer) for layer in _plain()),
    "pruned": lambda: (prune.random_unstructured(layer, "weight", 0.4) for layer in _plain()),
    "pruned-twice": lambda: (
        prune.ln_structured(prune.l1_unstructured(layer, "weight", 0.2), "weight", 0.3, 2, 0)
        for layer in _plain()
    ),
}
CASES |= {
    f"{name}-{'own' if own else 'handed-over'}": _layers(
        make,
        own=own,
        # In training the power iteration goes on with each call, so rows would come in an order.
        train="spectral" not in name,
    )
    for name, make in WRAPPED.items()
    for own in (True, False)
}


@case()
def parametrized_cached(dtype):
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 2))
    net[0].weight = torch.randn(4, 5)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                return self.net[0](x).tanh() + self.net(x).sum(1, keepdim=True)

    return of_module(Net(), torch.randn(B, 5), dtype=dtype, own=True)


@case()
def symmetric_weight(dtype):
    layer = nn.Linear(5, 5)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return of_module(layer, torch.randn(B, 5), dtype=dtype, own=True)


# -- adapters -------------------------------------------------------------------------------------


class _DoRA(nn.Module):
    """Magnitude times direction, the direction with a product of low rank added."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(4, 2))
        self.magnitude = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.b @ self.a
        norm = weight.detach().norm(dim=1)
        return F.linear(x, (self.magnitude / norm)[:, None] * weight, self.base.bias)


class _IA3(nn.Module):
    """Scales of activations between frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(5, 6).requires_grad_(requires_grad=False),
            nn.Linear(6, 5).requires_grad_(requires_grad=False),
        )
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.scale * self.up(x).relu())


class _LoHa(nn.Module):
    """The elementwise product of two products of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(requires_grad=False)
        self.left = nn.ParameterList([torch.randn(4, 2), torch.randn(2, 5)])
        self.right = nn.ParameterList([torch.randn(4, 2), torch.randn(2, 5)])

    def forward(self, x: Tensor) -> Tensor:
        added = (self.left[0] @ self.left[1]) * (self.right[0] @ self.right[1])
        return F.linear(x, self.base.weight + added, self.base.bias)


class _Prefix(nn.Module):
    """Learned tokens in front of those of the example, frozen layers behind."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, 5))
        self.body = nn.TransformerEncoderLayer(5, 1, 6, 0.0, batch_first=True)
        self.body.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.cat([self.prompt.expand(len(x), -1, -1), x], 1))


CASES |= {
    name: Spec(
        lambda dtype, make=make: of_module(make(), torch.randn(B, 3, 5), dtype=dtype, own=True)
    )
    for name, make in {"dora": _DoRA, "ia3": _IA3, "loha": _LoHa, "prefix": _Prefix}.items()
}

# -- shared, and under other names ----------------------------------------------------------------


@case()
def registered_twice(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.second = self.first
            self.third = nn.Linear(5, 5)
            self.third.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x).tanh()).tanh())

    return of_module(Net(), torch.randn(B, 5), dtype=dtype, own=True)


class _Hidden(nn.Module):
    """Parameters that are registered, and used by way of something that is not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 2)
        w, b = self.second.weight, self.second.bias
        self.functions: Any = {
            "list": [w, b],
            "dict": {"w": w, "b": b},
            "layers": [self.second],
            "partial": partial(F.linear, weight=w, bias=b),
            "closure": lambda x: F.linear(x, w, b),
            "method": self.second.forward,
        }[how]
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x, held = self.first(x).tanh(), self.functions
        if self.how == "list":
            return F.linear(x, *held)
        if self.how == "dict":
            return F.linear(x, held["w"], held["b"])
        return held[0](x) if self.how == "layers" else held(x)


CASES |= {
    f"alias-by-{how}": Spec(
        lambda dtype, how=how: of_module(
            _Hidden(how).to(dtype), torch.randn(B, 5), dtype=dtype, own=True
        )
    )
    for how in ("list", "dict", "layers", "partial", "closure", "method")
}


@case()
def loss_as_a_partial(dtype):
    net = nn.Linear(5, 2).to(dtype)

    def loss_of(scale: float, params: Any, x: Tensor, *, module: nn.Module) -> Tensor:
        del params
        return scale * reduced(module(x))

    loss_fn = partial(loss_of, 2.0, module=net)
    return Case(own_parameters(net), loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def loss_as_a_method(dtype):
    class Net(nn.Linear):
        def loss(self, params: Any, x: Tensor) -> Tensor:
            del params
            return reduced(self(x))

    net = Net(5, 2).to(dtype)
    return Case(own_parameters(net), net.loss, torch.randn(B, 5, dtype=dtype))


@case()
def loss_as_an_object(dtype):
    class Loss:
        def __init__(self) -> None:
            self.net = nn.Linear(5, 2).to(dtype)

        def __call__(self, params: Any, x: Tensor) -> Tensor:
            del params
            return reduced(self.net(x))

    loss_fn = Loss()
    return Case(own_parameters(loss_fn.net), loss_fn, torch.randn(B, 5, dtype=dtype))


@case(**ALONE)
def ensemble_by_vmap(dtype):
    # Members' weights are stacked, as torch.func.stack_module_state does.
    params = normal(dtype, w=(3, 4, 5), b=(3, 4))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        each = torch.func.vmap(lambda w, b: F.linear(x, w, b))(p["w"], p["b"])
        return reduced(each.movedim(0, 1))

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def ensemble_stacked_in_the_loss(dtype):
    params = {f"w{i}": torch.randn(4, 5, dtype=dtype) for i in range(3)}

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        stacked = torch.stack(list(p.values()))
        return reduced(torch.einsum("bi,eoi->beo", x, stacked))

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


# -- computed of parameters alone -----------------------------------------------------------------


def _straight_through(w: Tensor) -> Tensor:
    return w + (w.mul(4).round().div(4) - w).detach()


def _in_place(w: Tensor) -> Tensor:
    w = w * 2
    w[0] = 0.0
    w[1] += w[2]
    w.mul_(0.5)
    return w


def _filled(w: Tensor) -> Tensor:
    out = torch.zeros(4, 5, dtype=w.dtype)
    out[::2] = w[::2]
    out[1, 1:] = w[1, 1:] * 2
    return out


DERIVED: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda w: w.clone(),
    "sigmoid": lambda w: w.sigmoid(),
    "exponential": lambda w: w.exp(),
    "softmax": lambda w: w.softmax(1),
    "centred": lambda w: w - w.mean(1, keepdim=True),
    "normalised": lambda w: F.normalize(w, dim=1),
    "standardised": lambda w: F.layer_norm(w, (5,)),
    "straight-through": _straight_through,
    "signs": lambda w: w + (w.sign() - w).detach(),
    "written-to": _in_place,
    "filled": _filled,
    "of-rows": lambda w: torch.stack([w[3], w[0], w[1] + w[2], w[0]]),
    "of-overlapping-rows": lambda w: torch.cat([w[::2] * 2, w[1:3].sin()]) + w[[0]],
    "of-a-view-of-what-is-computed": lambda w: (w * 2).view(5, 4)[1:].t().repeat(1, 2)[:, :5],
    "of-parts-of-what-is-computed": lambda w: torch.cat(list(w.exp().chunk(2)), 0) - w.exp()[:1],
    "of-chosen-rows": lambda w: w[torch.tensor([0, 3, 3, 1])],
    "of-a-part-padded": lambda w: F.pad(w[:2, 1:], (0, 1, 1, 1)),
    "flipped": lambda w: w.flip(0).roll(1, 1),
    "of-its-outer-product": lambda w: w @ w.T @ w,
    "convolved": lambda w: F.conv1d(w[:, None], w[:1, None, :3], padding=1)[:, 0],
    "low-triangle": lambda w: w.tril(),
    "by-singular-values": lambda w: torch.linalg.svd(w, full_matrices=False)[0] @ w[:, :4].T @ w,
    "by-fourier": lambda w: torch.fft.irfft(torch.fft.rfft(w), n=5),
    "of-a-view-of-itself": lambda w: w.view(5, 4).t().contiguous(),
    "without-a-gradient": lambda w: w.detach() * w.mean(),
    "with-a-branch": lambda w: w * 2 if bool(w.sum() > 0) else w * 3,
    "with-an-item": lambda w: w * float(w.detach().abs().max()),
    "in-half": lambda w: w.float().to(w.dtype),
    "checked": lambda w: w if torch.isfinite(w).all() and w.shape == (4, 5) else w * 0,
}
KNOWN: dict[str, dict[str, Any]] = {
    "by-fourier": {"caution": 2},
    "filled": {"beyond_vmap": True},
    # Without torch's private names, a parameter's value cannot be told from an example's.
    "with-a-branch": {"beyond_vmap": True},
    "with-an-item": {"beyond_vmap": True},
    "checked": {"beyond_vmap": True},
}
CASES |= {
    f"derived-{name}": of_function(
        lambda p, x, f=f: F.linear(x, f(p["w"])), W, (3, 5), **KNOWN.get(name, {})
    )
    for name, f in DERIVED.items()
}
CASES |= {
    "derived-used-twice": of_function(
        lambda p, x: (lambda w: F.linear(F.linear(x, w), w.T) + x @ w[:2].T.sum(1, keepdim=True))(
            p["w"].sin()
        ),
        W,
        (3, 5),
    ),
    "derived-used-in-part": of_function(
        # One use of what is computed is left out of the loss.
        lambda p, x: (lambda w: F.linear(x, w) + 0 * F.linear(x, w[:, :5]).detach())(p["w"].exp()),
        W,
        (3, 5),
    ),
    "every-other-row-beside-the-last": of_function(
        lambda p, x: F.linear(x, p["w"][::2]) * 2 + F.linear(x, p["w"][2:]), W, (3, 5)
    ),
    "derived-of-two": of_function(
        lambda p, x: F.linear(x, p["w"] * p["g"][:, None] + p["v"] @ p["w"]),
        {**W, "g": (4,), "v": (4, 4)},
        (3, 5),
    ),
    "derived-and-direct": of_function(
        lambda p, x: F.linear(x, p["w"]) + F.linear(x, p["w"].square()) * p["w"].mean(), W, (3, 5)
    ),
    "derived-with-a-part-of-the-example": of_function(
        lambda p, x: x @ (p["w"].T * x.mean((1, 2))[:, None, None]), W, (3, 5)
    ),
    "derived-by-a-loop": of_function(
        lambda p, x: F.linear(x, _powers(p["w"], 3)), {"w": (5, 5)}, (3, 5)
    ),
    "derived-of-all-parameters": of_function(
        lambda p, x: x * torch.cat([v.flatten() for v in p.values()]).std(),
        {**W, "u": (3,)},
        (3, 5),
    ),
}


def _powers(w: Tensor, n: int) -> Tensor:
    out = torch.eye(len(w), dtype=w.dtype)
    for _ in range(n):
        out = out @ w
    return out
