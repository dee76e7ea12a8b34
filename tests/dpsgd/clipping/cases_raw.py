"""Parameters outside of layers: scales, tokens, adapters, products, and how autograd is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.dpsgd.clipping.case import B, Case, Spec, normal, of_module, reduced, registry
from tests.helpers import trainable

CASES: dict[str, Spec] = {}
case = registry(CASES)

# -- products with a weight -----------------------------------------------------------------------


@case()
def shared_scalar(dtype):
    # d(3 w w x)/dw = 6 w x: one norm over the summed gradient.
    params = {"w": torch.tensor(1.5, dtype=dtype)}
    return Case(params, lambda p, x: 3 * p["w"] * p["w"] * x, torch.randn(B, dtype=dtype))


@case()
def scalar_and_vector(dtype):
    params = normal(dtype, scale=(), shift=(5,))
    return Case(
        params, lambda p, x: reduced(p["scale"] * x + p["shift"]), torch.randn(B, 5, dtype=dtype)
    )


@case()
def zero_size(dtype):
    params = normal(dtype, w=(3, 5), none=(0, 5), nothing=(0,))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(x, torch.cat([p["w"], p["none"]])))

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def zero_size_linear(dtype):
    params = normal(dtype, w=(3, 5), none=(0, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(x, p["w"])) + F.linear(x, p["none"]).sum(1)

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def weight_on_the_right(dtype):
    params = normal(dtype, w=(5, 3), v=(3, 4))
    return Case(
        params,
        lambda p, x: reduced(torch.matmul(x @ p["w"], p["v"])),
        torch.randn(B, 2, 5, dtype=dtype),
    )


@case()
def weight_on_the_left(dtype):
    params = normal(dtype, w=(3, 5))
    return Case(params, lambda p, x: reduced(p["w"] @ x), torch.randn(B, 5, 2, dtype=dtype))


@case()
def weight_vector(dtype):
    params = normal(dtype, w=(5,))
    return Case(params, lambda p, x: (x @ p["w"]).square(), torch.randn(B, 5, dtype=dtype))


@case()
def weight_transposed_by_hand(dtype):
    params = normal(dtype, w=(3, 5), b=(3,))
    return Case(params, lambda p, x: reduced(x @ p["w"].T + p["b"]), torch.randn(B, 5, dtype=dtype))


@case()
def batched_product_of_experts(dtype):
    params = normal(dtype, experts=(2, 5, 3), gate=(2, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        each = torch.einsum("bd,edf->bef", x, p["experts"])
        return reduced((F.linear(x, p["gate"]).softmax(-1)[..., None] * each).sum(1))

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def einsum_layers(dtype):
    params = normal(dtype, w=(2, 4, 5), out=(2, 4, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        heads = torch.einsum("btd,hkd->bhtk", x, p["w"]).tanh()
        return reduced(torch.einsum("bhtk,hkd->btd", heads, p["out"]))

    return Case(params, loss_fn, torch.randn(B, 3, 5, dtype=dtype))


# -- tokens, scales, positions --------------------------------------------------------------------


@case()
def class_token(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 5))
            self.mix, self.out = nn.Linear(4, 4), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
            return self.out(self.mix(x.transpose(1, 2)).transpose(1, 2)[:, 0])

    return of_module(Net(), torch.randn(B, 3, 5), dtype=dtype)


@case()
def learned_positions_sliced(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(9, 5))
            self.out = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((x + self.positions[: x.shape[1]]).tanh())

    return of_module(Net(), torch.randn(B, 4, 5), dtype=dtype)


@case()
def layer_scale(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 5)
            self.gamma = nn.Parameter(torch.rand(5))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gamma * self.body(x)

    return of_module(Net(), torch.randn(B, 3, 5), dtype=dtype)


@case()
def logit_scale(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 3), nn.Linear(4, 3)
            self.logit_scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x, y = F.normalize(self.first(x), dim=-1), F.normalize(self.second(y), dim=-1)
            return self.logit_scale.exp() * (x * y).sum(1, keepdim=True)

    return of_module(Net(), torch.randn(B, 5), torch.randn(B, 4), dtype=dtype)


@case()
def mask_token(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.out = nn.Parameter(torch.randn(5)), nn.Linear(5, 2)

        def forward(self, x: Tensor, masked: Tensor) -> Tensor:
            return self.out(torch.where(masked[..., None], self.token, x).tanh())

    batch = torch.randn(B, 6, 5), torch.rand(B, 6) < 0.4
    return of_module(Net(), *batch, dtype=dtype)


@case()
def parameter_as_the_first_state(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(4))
            self.step = nn.Linear(7, 4)

        def forward(self, x: Tensor) -> Tensor:
            state = self.first.expand(len(x), -1)
            for t in range(x.shape[1]):
                state = self.step(torch.cat([state, x[:, t]], 1)).tanh()
            return state

    return of_module(Net(), torch.randn(B, 3, 3), dtype=dtype)


@case()
def penalty_on_the_weight(dtype):
    # A term that no example owns is part of every example's loss.
    params = normal(dtype, w=(3, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(x, p["w"])) + 0.1 * p["w"].square().sum()

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


# -- adapters and parametrizations ----------------------------------------------------------------


class _LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 4.0


@case()
def lora(dtype):
    net = nn.Sequential(_LoRA(), nn.Tanh(), nn.Linear(5, 3).requires_grad_(requires_grad=False))
    return of_module(net, torch.randn(B, 4, 6), dtype=dtype)


@case()
def lora_products(dtype):
    base = torch.randn(5, 6, dtype=dtype)
    params = normal(dtype, a=(6, 2), b=(2, 5))
    return Case(
        params,
        lambda p, x: reduced(F.linear(x, base) + x @ p["a"] @ p["b"] * 0.5),
        torch.randn(B, 3, 6, dtype=dtype),
    )


@case()
def lora_merged(dtype):
    base = torch.randn(5, 6, dtype=dtype)
    params = normal(dtype, a=(2, 6), b=(5, 2))
    return Case(
        params,
        lambda p, x: reduced(F.linear(x, base + 0.5 * p["b"] @ p["a"])),
        torch.randn(B, 3, 6, dtype=dtype),
    )


@case()
def weight_norm(dtype):
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 2))
    return of_module(net, torch.randn(B, 5), dtype=dtype)


@case()
def weight_standardised_conv(dtype):
    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            mean = self.weight.mean((1, 2, 3), keepdim=True)
            std = self.weight.std((1, 2, 3), keepdim=True)
            return self._conv_forward(x, (self.weight - mean) / (std + 1e-5), self.bias)

    net = nn.Sequential(Conv(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
    return of_module(net, torch.randn(B, 2, 5, 5), dtype=dtype)


@case(dtypes=(torch.float32,))
def weight_in_another_type(dtype):
    # Kept in one type, used in another, as hand-written mixed precision does.
    params = normal(dtype, w=(3, 5), b=(3,))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(x.double(), p["w"].double(), p["b"].double())).to(dtype)

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


# -- how autograd is used -------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.block = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


@case()
def checkpointed(dtype):
    return of_module(_Checkpointed(), torch.randn(B, 3, 5), dtype=dtype)


@case()
def detached_branch(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.probe = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            body = self.body(x)
            return torch.cat([body, self.probe(body.detach())], -1)

    return of_module(Net(), torch.randn(B, 3, 5), dtype=dtype)


@case(unused=True)
def part_without_gradient(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x) - target

    return of_module(Net(), torch.randn(B, 5), dtype=dtype)


@case()
def branch_on_a_shape(dtype):
    net = nn.Linear(5, 5).to(dtype)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for _ in range(x.shape[1]):
            x = torch.func.functional_call(net, params, (x,)).tanh()
        return reduced(x)

    return Case(trainable(net), loss_fn, torch.randn(B, 3, 5, dtype=dtype))


@case()
def some_rows_have_no_loss(dtype):
    # Rows whose gradient is zero, as fully padded ones have.
    net = nn.Linear(5, 3).to(dtype)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, weight = batch
        return weight * reduced(torch.func.functional_call(net, params, (x,)))

    weight = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=dtype)
    return Case(trainable(net), loss_fn, (torch.randn(B, 5, dtype=dtype), weight))
