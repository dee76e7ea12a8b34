"""In-place writes: to tensors that the loss makes, to the batch, and to what outlives the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import ALONE, B, Case, Spec, normal, of_function, of_module, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)

W = {"w": (4, 5)}
T = 3  # steps
WIDE: dict[str, Any] = {"caution": 1, "beyond_vmap": True}
Of = Callable[[Any, Tensor], Tensor]


def _of(of: Of, **known: Any) -> Spec:
    return of_function(of, W, (T, 5), **known)


# -- tensors that the loss makes ------------------------------------------------------------------


def _slices(p: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), T, 4, dtype=x.dtype)
    out[:, 1:] = F.linear(x[:, 1:], p["w"])
    out[:, 0] = F.linear(x[:, 0], p["w"]).tanh()
    return out


def _steps(p: Any, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), T, 4)
    for t in range(T):
        out[:, t] = F.linear(x[:, t], p["w"]) + (out[:, t - 1] if t else 0)
    return out


def _rows(p: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 4, dtype=x.dtype)
    for i in range(len(x)):
        out[i] = F.linear(x[i], p["w"]).mean(0)
    return out


def _empty(p: Any, x: Tensor) -> Tensor:
    out = torch.empty(len(x), T, 4, dtype=x.dtype)
    out.copy_(F.linear(x, p["w"]))
    return out


def _like(p: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x[..., :4])
    out += F.linear(x, p["w"])
    return out


def _memory(p: Any, x: Tensor) -> Tensor:
    """A memory that is read and written, step by step."""
    memory = torch.zeros(len(x), 4, dtype=x.dtype)
    for t in range(T):
        memory = memory * 0.9
        memory += F.linear(x[:, t], p["w"]).tanh()
    return memory


def _running_mean(p: Any, x: Tensor) -> Tensor:
    mean = torch.zeros(4, dtype=x.dtype)
    for t in range(T):
        mean.mul_(0.9).add_(F.linear(x[:, t], p["w"]).mean(0), alpha=0.1)
    return mean[None]


def _total(p: Any, x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for t in range(T):
        total += F.linear(x[:, t], p["w"]).sin().mean()
    return total.reshape(1, 1)


def _total_of_one(p: Any, x: Tensor) -> Tensor:
    total = torch.zeros(1, dtype=x.dtype)
    total += F.linear(x, p["w"]).mean((0, 1, 2))
    total -= p["w"].square().sum()
    return total[:, None]


def _penalty(p: Any, x: Tensor) -> Tensor:
    penalty = torch.zeros((), dtype=x.dtype)
    for w in p.values():
        penalty += w.pow(2).sum()
    return F.linear(x, p["w"]) + 0.1 * penalty


def _penalty_of_parameters_then_of_the_example(p: Any, x: Tensor) -> Tensor:
    penalty = torch.zeros((), dtype=x.dtype)
    penalty += p["w"].pow(2).sum()
    penalty += F.linear(x, p["w"]).pow(2).sum()
    return F.linear(x, p["w"]) + penalty


def _scattered(p: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 3, 4, dtype=x.dtype)
    index = (x[..., :1] > 0).long().expand(-1, -1, 4)
    return out.scatter_add_(1, index, F.linear(x, p["w"]))


def _put(p: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 5, dtype=x.dtype)
    out.index_put_(
        (torch.arange(len(x))[:, None], torch.tensor([[0, 2, 0]])),
        F.linear(x, p["w"])[..., 0],
        accumulate=True,
    )
    return out


def _masked(p: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), T, 4, dtype=x.dtype)
    out.masked_fill_(F.linear(x, p["w"]) > 0, 1.0)
    return out * F.linear(x, p["w"])


def _diagonal(p: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 4, 4, dtype=x.dtype)
    out.diagonal(dim1=1, dim2=2).copy_(F.linear(x[:, 0], p["w"]))
    return out @ p["w"]


def _views(p: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), T, 4, dtype=x.dtype)
    first, second = out[:, :1], out.view(len(x), -1)
    first += F.linear(x[:, :1], p["w"])
    second[:, 4:] = F.linear(x[:, 1:], p["w"]).flatten(1)
    return out.sin()


def _filled(p: Any, x: Tensor) -> Tensor:
    out = torch.ones(len(x), 4, dtype=x.dtype)
    out[:, 0].fill_(2.0)  # the same for all
    out *= F.linear(x.mean(1), p["w"])
    return out


def _mask(p: Any, x: Tensor) -> Tensor:
    """Makes a mask by loops, as people do."""
    mask = torch.ones(len(x), T, T, dtype=x.dtype)
    for i in range(len(x)):
        for j in range(T):
            mask[i, j, : j + 1] = x[i, j, 0]
    return mask @ F.linear(x, p["w"])


def _local(p: Any, x: Tensor) -> Tensor:
    kept: dict[str, Any] = {"rows": []}
    for t in range(T):
        kept["rows"].append(F.linear(x[:, t], p["w"]))
    kept["last"] = kept["rows"].pop()
    return torch.stack(kept["rows"], 1) + kept["last"][:, None]


def _arange(p: Any, x: Tensor) -> Tensor:
    positions = torch.arange(T, dtype=x.dtype)[None].repeat(len(x), 1)
    positions -= x.mean(2)
    return F.linear(x, p["w"]) * positions[..., None]


def _out(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        buffer = torch.empty(len(x), T, 5, dtype=x.dtype)
        torch.mul(x, 2.0, out=buffer)
    return F.linear(buffer, p["w"])


def _activated(p: Any, x: Tensor) -> Tensor:
    h = F.linear(x, p["w"])
    h.mul_(2).add_(0.1)
    return F.leaky_relu_(h, 0.3)


def _overwritten_output(p: Any, x: Tensor) -> Tensor:
    h = F.linear(x, p["w"])
    h[:, 0] = 0
    h[..., 1] *= 2
    return h


def _same_memory(p: Any, x: Tensor) -> Tensor:
    h = F.linear(x, p["w"])
    flat = h.view(-1)
    flat += 1
    return h * F.linear(x, p["w"].sin())


CASES |= {
    "written-slices": _of(_slices, **WIDE),
    "written-steps": _of(_steps),
    "written-rows": _of(_rows, **WIDE),
    "written-to-an-empty-tensor": _of(_empty, **WIDE),
    "written-to-a-tensor-like-the-example": _of(_like),
    "written-memory": _of(_memory, **WIDE),
    "written-running-mean": _of(_running_mean, **WIDE, mixes=True),
    "written-total": _of(_total, **WIDE, mixes=True),
    "written-total-of-one": _of(_total_of_one, **WIDE, mixes=True),
    "written-penalty": _of(_penalty, beyond_vmap=True),
    "written-penalty-and-loss": _of(_penalty_of_parameters_then_of_the_example, **WIDE, mixes=True),
    "written-by-scatter": _of(_scattered, **WIDE),
    "written-by-index-put": _of(_put, **WIDE),
    "written-mask": _of(_masked, **WIDE),
    "written-diagonal": _of(_diagonal, **WIDE),
    "written-views": _of(_views, **WIDE),
    "written-constants-then-the-example": _of(_filled, **WIDE),
    "written-by-two-loops": _of(_mask, **WIDE),
    "written-list-of-the-loss-s-own": _of(_local),
    "written-positions": _of(_arange, **WIDE),
    "written-to-out": _of(_out, **ALONE),
    "written-activations": _of(_activated),
    "written-parts-of-activations": _of(_overwritten_output),
    "written-by-another-view": _of(_same_memory),
}

# -- the batch itself -----------------------------------------------------------------------------


def _scaled_batch(p: Any, x: Tensor) -> Tensor:
    x *= 2
    return F.linear(x, p["w"])


def _scaled_then_a_branch(p: Any, x: Tensor) -> Tensor:
    x *= 2
    x[:, 0] += 1
    out = F.linear(x, p["w"])
    return out if bool(x[0, 0, 1] > 0) else 2 * out


def _scaled_then_a_write(p: Any, x: Tensor) -> Tensor:
    x *= 2
    return _slices(p, x)


def _masked_tokens(p: Any, x: Tensor) -> Tensor:
    x[x > 1] = 0.0
    return F.linear(x, p["w"])


CASES |= {
    "batch-scaled-in-place": _of(_scaled_batch),
    # Whatever runs again must find the batch as it was.
    "batch-scaled-in-place-then-a-branch": of_function(
        _scaled_then_a_branch,
        W,
        torch.linspace(-3, 2, B * T * 5).view(B, T, 5),
        passes=2,
        mixes=True,
        beyond_vmap=True,
    ),
    "batch-scaled-in-place-then-a-write": _of(_scaled_then_a_write, **WIDE),
    "batch-masked-in-place": _of(_masked_tokens, beyond_vmap=True),
}

# -- what outlives the call -----------------------------------------------------------------------


class _Kept(nn.Module):
    """A linear layer, and something else that ``write`` does to it."""

    def __init__(self, write: Callable[[Any, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.out = nn.Linear(5, 4)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("queue", torch.zeros(8, 5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: Any = []
        self.number: Any = 0
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(x)
        self.write(self, x.detach(), out.detach())
        return out


def _kept(write: Callable[[Any, Tensor, Tensor], Any], **known: Any) -> Spec:
    return Spec(
        lambda dtype: of_module(_Kept(write), torch.randn(B, T, 5), dtype=dtype, own=True), **known
    )


def _assign(
    name: str, value: Callable[[Any, Tensor], Any]
) -> Callable[[Any, Tensor, Tensor], None]:
    return lambda self, x, out: setattr(self, name, value(self, x))


def _in_place(name: str, write: Callable[[Tensor, Tensor], Any]) -> Any:
    return lambda self, x, out: write(getattr(self, name), x)


def _without_gradients(self: Any, x: Tensor, out: Tensor) -> None:
    with torch.no_grad():
        self.mean.mul_(0.9).add_(x.mean((0, 1)))


def _fill(x: Tensor) -> Tensor:
    room = torch.zeros(x.shape[1:], dtype=x.dtype)
    room[:] = x[0]
    return room


OUTLIVES = "outlives"
CASES |= {
    "keeps-a-running-mean": _kept(
        _in_place("mean", lambda m, x: m.lerp_(x.mean((0, 1)), 0.1)), refused=OUTLIVES
    ),
    "keeps-a-running-mean-without-gradients": _kept(_without_gradients, refused=OUTLIVES),
    "keeps-a-mean-by-data": _kept(
        lambda self, x, out: setattr(self.mean, "data", x.mean((0, 1))), refused=OUTLIVES
    ),
    "keeps-a-mean-by-writing-to-data": _kept(
        lambda self, x, out: self.mean.data.copy_(x.mean((0, 1))), refused=OUTLIVES
    ),
    "keeps-a-mean-by-a-detached-alias": _kept(
        lambda self, x, out: self.mean.detach().add_(x.mean((0, 1))), refused=OUTLIVES
    ),
    "keeps-a-queue": _kept(
        lambda self, x, out: self.queue.__setitem__(slice(0, T), x[0]), refused=OUTLIVES
    ),
    "keeps-a-queue-by-concatenation": _kept(
        _assign("queue", lambda self, x: torch.cat([self.queue[1:], x[0, :1]])), refused=OUTLIVES
    ),
    "keeps-a-mean-by-assignment": _kept(
        _assign("mean", lambda self, x: 0.9 * self.mean + 0.1 * x.mean((0, 1))), refused=OUTLIVES
    ),
    "keeps-the-batch": _kept(_assign("seen", lambda self, x: x), refused=OUTLIVES),
    "keeps-a-list-of-outputs": _kept(
        lambda self, x, out: self.seen.append(out.mean()), refused=OUTLIVES
    ),
    "keeps-a-number": _kept(
        _assign("number", lambda self, x: (x.sum() * 0).item() + 1), refused=OUTLIVES
    ),
    "keeps-whether-it-was-positive": _kept(
        _assign("number", lambda self, x: 1 if x.abs().sum() > 0 else 2), refused=OUTLIVES
    ),
    "keeps-an-array": _kept(
        _assign("seen", lambda self, x: (x[0, 0] * 0).numpy()), refused=OUTLIVES
    ),
    "keeps-what-follows-from-a-shape": _kept(
        _assign("number", lambda self, x: x[0, x[0, :, 0] > -9].shape[0]), refused=OUTLIVES
    ),
    "writes-to-a-parameter": _kept(
        lambda self, x, out: self.out.weight.data.mul_(x.mean()), refused=OUTLIVES
    ),
    "writes-to-a-parameter-without-gradients": _kept(
        lambda self, x, out: torch.no_grad()(lambda: self.out.bias.add_(1.0))(),
        refused="parameter",
    ),
    "counts-its-calls": _kept(_assign("number", lambda self, x: self.number + 1)),
    "counts-its-calls-in-a-tensor": _kept(_in_place("calls", lambda c, x: c.add_(1))),
    "counts-its-calls-in-a-list": _kept(lambda self, x, out: self.seen.append(1)),
    "caches-its-positions": _kept(
        _assign("seen", lambda self, x: torch.arange(x.shape[1], dtype=x.dtype))
    ),
    "caches-a-tensor-that-it-fills": _kept(
        _assign("seen", lambda self, x: _fill(x)), caution=1, refused=OUTLIVES
    ),
    "caches-a-normalised-weight": _kept(
        _assign("seen", lambda self, x: self.out.weight.detach() / self.out.weight.norm())
    ),
}


@case(refused=OUTLIVES)
def keeps_a_codebook(dtype):
    # An exponential moving average of what is assigned to each code.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, 5)
            self.register_buffer("codes", torch.randn(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.out(x)
            chosen = F.one_hot(torch.cdist(h, self.codes[None]).argmin(-1), 3).to(h.dtype)
            with torch.no_grad():
                means = chosen.flatten(0, 1).T @ h.flatten(0, 1) / 3
                self.codes.copy_(0.9 * self.codes + 0.1 * means)
            return h + (chosen @ self.codes - h).detach()

    return of_module(Net(), torch.randn(B, T, 5), dtype=dtype, own=True)


@case(refused=OUTLIVES)
def keeps_in_a_closure(dtype):
    seen: list[Tensor] = []
    params = normal(dtype, w=(4, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        seen.append(x.mean())
        return F.linear(x, p["w"]).sin().sum(1)

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


@case(refused=OUTLIVES)
def keeps_in_a_nonlocal(dtype):
    last: Any = None
    params = normal(dtype, w=(4, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        nonlocal last
        last = x.mean()
        return F.linear(x, p["w"]).sin().sum(1)

    assert last is None
    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))
