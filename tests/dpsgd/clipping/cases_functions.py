"""Parts that hide what they do: checkpoints, functions with their own gradients, TorchScript."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.dpsgd.clipping.case import (
    ALONE,
    B,
    Case,
    Spec,
    of_function,
    of_module,
    own_parameters,
    reduced,
    registry,
)

CASES: dict[str, Spec] = {}
case = registry(CASES)

W = {"w": (4, 5), "v": (4,)}

# -- checkpoints ----------------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.block = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
        self.last = nn.Linear(6, 2)
        self.how = how
        if "frozen" in how:
            self.first.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        old = "old" in self.how
        if "sequential" in self.how:
            h = checkpoint_sequential(self.block, 2, h, use_reentrant=old)
        elif "inputs-require" in self.how:
            h = checkpoint(self.block, h.detach().requires_grad_(), use_reentrant=old)
        elif "keywords" in self.how:
            h = checkpoint(lambda x, scale: self.block(x) * scale, h, scale=2.0, use_reentrant=old)
        else:
            h = checkpoint(self.block, h, use_reentrant=old)
        return self.last(h)


CASES |= {
    f"checkpoint-{how}": Spec(
        lambda dtype, how=how: of_module(
            _Checkpointed(how), torch.randn(B, 3, 5), dtype=dtype, own=True
        ),
        **known,
    )
    for how, known in {
        "new": {},
        "old": {},
        # Torch's own re-entrant form has no gradient behind inputs that have none: what comes out
        # then is the loss without the checkpoint, which is what was meant.
        "new-behind-a-frozen-part": {},
        "new-sequential": {},
        "old-sequential": {},
        "new-keywords": {},
        "new-inputs-require-gradients": {"unused": True, "beyond_vmap": True},
        "old-inputs-require-gradients": {"unused": True, "beyond_vmap": True},
    }.items()
}

# -- functions with a gradient of their own -------------------------------------------------------


class _Product(torch.autograd.Function):
    """x @ w.T with a backward of its own, in the form that function transforms need."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x


class _OfWhatIsNeeded(_Product):
    """Gradients of what requires one, and of nothing else."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad
        return dy @ w if needs_x else None, dy.t() @ x if needs_w else None


class _ByItsOwnVmap(torch.autograd.Function):
    """The same with a batching rule that is written out."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return torch.matmul(dy, w), torch.matmul(dy.mT, x)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> tuple[Tensor, int]:
        x, w = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, w), in_dims, strict=True)
        )
        return _ByItsOwnVmap.apply(x, w), 0  # type: ignore[return-value]


class _Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x


class _PassedOn(torch.autograd.Function):
    """The gradient goes through as it is, and needs nothing of the forward pass."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _Centred(_PassedOn):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x - x.mean(0) if len(x) > 1 else x.clone()

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x - x.mean(in_dims[0], keepdim=True), in_dims[0]


class _Reversed(_PassedOn):
    """A gradient that is turned round, as adversarial domain adaptation has it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return -0.5 * dy


class _OldReversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * dy


class _Rounded(_PassedOn):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul(4).round() / 4


FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "with-a-generated-rule": (lambda p, x: _Product.apply(x, p["w"]), {}),
    # Such a method gets all rows, and might mix them.
    "with-a-rule-of-its-own": (lambda p, x: _ByItsOwnVmap.apply(x, p["w"]), ALONE),
    "that-mixes-by-a-rule-of-its-own": (
        lambda p, x: _Centred.apply(F.linear(x, p["w"])),
        {"mixes": True, **ALONE},
    ),
    "of-what-is-needed": (
        lambda p, x: _OfWhatIsNeeded.apply(_OfWhatIsNeeded.apply(x, p["w"]).sin(), p["w"][:, :4]),
        {},
    ),
    "of-what-is-needed-behind-a-parameter": (
        lambda p, x: _OfWhatIsNeeded.apply(F.linear(x, p["w"]), torch.eye(4, dtype=x.dtype)),
        {},
    ),
    "of-a-parameter-alone": (lambda p, x: F.linear(x, _Rounded.apply(p["w"])), {}),
    "of-the-example-alone": (lambda p, x: _Rounded.apply(F.linear(x, p["w"])), {}),
    "reversed": (lambda p, x: _Reversed.apply(F.linear(x, p["w"]).tanh()), {}),
    "old": (lambda p, x: _Old.apply(x, p["w"]), ALONE),
    "old-reversed": (lambda p, x: _OldReversed.apply(F.linear(x, p["w"]).tanh()), ALONE),
    "old-of-a-parameter-alone": (lambda p, x: F.linear(x, _OldReversed.apply(p["w"])), ALONE),
}
CASES |= {
    f"function-{name}": of_function(
        lambda p, x, of=of: of(p, x) * p["v"], W, (5,), beyond_vmap=True, **known
    )
    for name, (of, known) in FUNCTIONS.items()
}

# -- TorchScript ----------------------------------------------------------------------------------


def _scripted(dtype: torch.dtype) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises other ways to compile
        return torch.jit.trace(
            nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype),
            torch.zeros(1, 5, dtype=dtype),
        )


@case(**ALONE)
def torchscript(dtype):
    net = _scripted(dtype)
    return Case(own_parameters(net), lambda p, x: reduced(net(x)), torch.randn(B, 5, dtype=dtype))


@case(**ALONE)
def torchscript_within_a_network(dtype):
    net = nn.Sequential(nn.Linear(5, 5), _scripted(dtype), nn.Linear(2, 2)).to(dtype)
    return Case(own_parameters(net), lambda p, x: reduced(net(x)), torch.randn(B, 5, dtype=dtype))
