"""Normalisation, with scale and shift and without, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import B, Case, Spec, of_function, of_module, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)


def _behind(layer: nn.Module, *shape: int) -> nn.Module:
    """The layer behind a scale of its channels, so that there is a gradient through it as well."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    for name, buffer in layer.named_buffers():
        if "running" in name:
            nn.init.uniform_(buffer, 0.5, 2.0)
    return nn.Sequential(_Scale(shape[0] if len(shape) > 1 else shape[-1], len(shape)), layer)


class _Scale(nn.Module):
    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels, *[1] * (dim - 1)) + 0.5)
        self.shift = nn.Parameter(torch.randn(channels, *[1] * (dim - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift * x.square()


def _of(make: Callable[[], nn.Module], *shape: int, train: bool = False, **known: Any) -> Spec:
    def of(dtype: torch.dtype) -> Case:
        net = _behind(make(), *shape).train(train)
        return of_module(net, torch.randn(B, *shape), dtype=dtype)

    return Spec(of, **known)


CASES |= {
    "layer-norm-of-vectors": _of(lambda: nn.LayerNorm(6), 6),
    "layer-norm-of-tokens": _of(lambda: nn.LayerNorm(6), 3, 6),
    "layer-norm-of-everything": _of(lambda: nn.LayerNorm((2, 3, 4)), 2, 3, 4),
    "layer-norm-plain": _of(lambda: nn.LayerNorm(6, elementwise_affine=False), 3, 6),
    "layer-norm-of-tokens-without-bias": _of(lambda: nn.LayerNorm(6, bias=False), 3, 6),
    "group-norm-of-vectors": _of(lambda: nn.GroupNorm(2, 6), 6),
    "group-norm-of-sequences": _of(lambda: nn.GroupNorm(3, 6), 6, 4),
    "group-norm-of-images": _of(lambda: nn.GroupNorm(3, 6), 6, 4, 3),
    "group-norm-of-volumes": _of(lambda: nn.GroupNorm(2, 4), 4, 2, 3, 2),
    "group-norm-of-one-group": _of(lambda: nn.GroupNorm(1, 6), 6, 4, 3),
    "group-norm-of-a-group-each": _of(lambda: nn.GroupNorm(6, 6), 6, 4, 3),
    "group-norm-plain": _of(lambda: nn.GroupNorm(2, 6, affine=False), 6, 4),
    "instance-norm-of-sequences": _of(lambda: nn.InstanceNorm1d(3, affine=True), 3, 5),
    "instance-norm-of-images": _of(lambda: nn.InstanceNorm2d(3, affine=True), 3, 4, 4),
    "instance-norm-of-volumes": _of(lambda: nn.InstanceNorm3d(3, affine=True), 3, 2, 3, 2),
    "instance-norm-plain": _of(lambda: nn.InstanceNorm2d(3), 3, 4, 4),
    "instance-norm-by-its-statistics": _of(
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), 3, 4, 4
    ),
    "instance-norm-that-keeps-statistics": _of(
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        3,
        4,
        4,
        train=True,
        refused="statistics|writes",
    ),
    "rms-norm-of-tokens": _of(lambda: nn.RMSNorm(6), 3, 6),
    "rms-norm-of-two-dimensions": _of(lambda: nn.RMSNorm((3, 6), eps=1e-3), 2, 3, 6),
    "rms-norm-plain": _of(lambda: nn.RMSNorm(6, elementwise_affine=False), 3, 6),
    "local-response-norm": _of(lambda: nn.LocalResponseNorm(3, alpha=0.5), 5, 4, 4),
    "cross-map-norm": _of(lambda: nn.CrossMapLRN2d(3, alpha=0.5), 5, 4, 4, passes=0, alone=B),
    "batch-norm-by-its-statistics-1d": _of(lambda: nn.BatchNorm1d(6), 6),
    "batch-norm-by-its-statistics-of-sequences": _of(lambda: nn.BatchNorm1d(6), 6, 4),
    "batch-norm-by-its-statistics-2d": _of(lambda: nn.BatchNorm2d(3), 3, 4, 4),
    "batch-norm-by-its-statistics-3d": _of(lambda: nn.BatchNorm3d(3), 3, 2, 3, 2),
    "batch-norm-plain": _of(lambda: nn.BatchNorm2d(3, affine=False), 3, 4, 4),
    # Of one row, the mean over the batch is that of its own places.
    "batch-norm-without-statistics": _of(
        lambda: nn.BatchNorm2d(3, track_running_stats=False), 3, 4, 4, train=True, mixes=True
    ),
    "batch-norm-without-statistics-in-evaluation": _of(
        lambda: nn.BatchNorm2d(3, track_running_stats=False), 3, 4, 4, mixes=True
    ),
    "batch-norm-that-keeps-statistics": _of(
        lambda: nn.BatchNorm2d(3), 3, 4, 4, train=True, refused="keeps statistics"
    ),
    "batch-norm-of-one-value": _of(
        lambda: nn.BatchNorm1d(6, track_running_stats=False),
        6,
        train=True,
        refused="Expected more than 1 value per channel",
    ),
}

AFFINE = {"gain": (6,), "shift": (6,)}
CASES |= {
    "layer-norm-of-frozen-inputs": of_function(
        lambda p, x: F.layer_norm(x, (6,), p["gain"], p["shift"]), AFFINE, (3, 6)
    ),
    "layer-norm-with-a-shift-alone": of_function(
        lambda p, x: F.layer_norm(x, (6,), None, p["shift"]),
        AFFINE | {"gain": (1,)},
        (3, 6),
        unused=True,
    ),
    "layer-norm-of-a-parameter": of_function(
        lambda p, x: x * F.layer_norm(p["w"], (6,), p["gain"]), {"w": (3, 6), "gain": (6,)}, (3, 6)
    ),
    "layer-norm-used-twice": of_function(
        lambda p, x: F.layer_norm(
            F.layer_norm(x, (6,), p["gain"], p["shift"]).tanh(), (6,), p["gain"], p["shift"]
        ),
        AFFINE,
        (3, 6),
    ),
    "layer-norm-conditioned-on-the-example": of_function(
        # As diffusion transformers do: scale and shift of the example's own.
        lambda p, x: F.layer_norm(x, (6,)) * F.linear(x.mean(1), p["w"])[:, None] + p["shift"],
        {"w": (6, 6), "shift": (6,)},
        (3, 6),
    ),
    "layer-norm-with-weights-of-the-example": of_function(
        lambda p, x: F.layer_norm(x, (6,), F.linear(x[0, 0], p["w"]), p["shift"]),
        {"w": (6, 6), "shift": (6,)},
        (3, 6),
        mixes=True,
    ),
    "rms-norm-by-hand": of_function(
        lambda p, x: p["gain"] * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
        {"gain": (6,)},
        (3, 6),
    ),
    "normalised": of_function(
        lambda p, x: F.normalize(F.linear(x, p["w"]), dim=-1) @ F.normalize(p["c"], dim=0),
        {"w": (4, 6), "c": (4, 3)},
        (6,),
    ),
    "softmaxes": of_function(
        lambda p, x: F.softmax(x * p["gain"], -1) * F.log_softmax(x + p["shift"], 0).exp(),
        AFFINE,
        (6,),
        mixes=True,
    ),
}
