"""Convolutions, in one to three dimensions, with every option."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import B, Case, Spec, of_function, of_module, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)

SIZES = {1: (11,), 2: (7, 8), 3: (4, 5, 6)}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 3, 2)}
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def _layer(dim: int, make: Callable[[], nn.Module]) -> Spec:
    def of(dtype: torch.dtype) -> Case:
        return of_module(make(), torch.randn(B, 4, *SIZES[dim]), dtype=dtype)

    return Spec(of)


OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "without-bias": {"bias": False},
    "strided": {"stride": 2},
    "dilated": {"dilation": 2, "padding": 2},
    "padded": {"padding": 1},
    "grouped": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4},
    "all-at-once": {"stride": 2, "dilation": 2, "padding": 2, "groups": 2},
    "same": {"padding": "same"},
    "same-dilated": {"padding": "same", "dilation": 2, "groups": 2},
    "valid": {"padding": "valid", "stride": 2},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect": {"padding": 1, "padding_mode": "reflect", "stride": 2},
    "replicate": {"padding": 1, "padding_mode": "replicate", "groups": 2},
    "same-circular": {"padding": "same", "padding_mode": "circular"},
    "same-replicate": {"padding": "same", "padding_mode": "replicate", "dilation": 2},
}
TRANSPOSED_OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "without-bias": {"bias": False},
    "strided": {"stride": 2},
    "strided-with-output-padding": {"stride": 2, "output_padding": 1},
    "dilated": {"dilation": 2, "padding": 1},
    "grouped": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4},
    "all-at-once": {"stride": 3, "dilation": 2, "padding": 2, "output_padding": 2, "groups": 2},
}
CASES |= {
    f"conv-{dim}d-{name}": _layer(
        dim, lambda dim=dim, options=options: CONV[dim](4, 8, KERNELS[dim], **options)
    )
    for dim in (1, 2, 3)
    for name, options in OPTIONS.items()
}
CASES |= {
    f"conv-transpose-{dim}d-{name}": _layer(
        dim, lambda dim=dim, options=options: TRANSPOSED[dim](4, 8, KERNELS[dim], **options)
    )
    for dim in (1, 2, 3)
    for name, options in TRANSPOSED_OPTIONS.items()
}

# -- by the kernel, and by what is trained --------------------------------------------------------


@case()
def conv_as_large_as_the_image(dtype):
    return of_module(nn.Conv2d(2, 5, (6, 7)), torch.randn(B, 2, 6, 7), dtype=dtype)


@case()
def conv_pointwise_grouped(dtype):
    return of_module(nn.Conv2d(4, 6, 1, groups=2), torch.randn(B, 4, 5, 5), dtype=dtype)


@case()
def conv_pointwise_padded(dtype):
    return of_module(nn.Conv2d(3, 5, 1, padding=1), torch.randn(B, 3, 5, 5), dtype=dtype)


@case()
def conv_frozen_weight(dtype):
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.ConvTranspose2d(3, 2, 3))
    for layer in (net[0], net[2]):
        layer.weight.requires_grad_(requires_grad=False)
    return of_module(net, torch.randn(B, 2, 6, 6), dtype=dtype)


@case()
def conv_frozen_bias(dtype):
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.ConvTranspose1d(3, 2, 3))
    for layer in (net[0], net[2]):
        layer.bias.requires_grad_(requires_grad=False)
    return of_module(net, torch.randn(B, 2, 9), dtype=dtype)


@case()
def conv_behind_conv(dtype):
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2),
        nn.GELU(),
        nn.Conv2d(3, 4, 2),
        nn.GELU(),
        nn.ConvTranspose2d(4, 2, 3, stride=2),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(2, 1, 3),
    )
    return of_module(net, torch.randn(B, 2, 9, 9), dtype=dtype)


@case()
def conv_many_channels(dtype):
    # Pairs of places take less than the gradient.
    return of_module(nn.Conv2d(24, 32, 3), torch.randn(B, 24, 4, 4), dtype=dtype)


@case(mixes=True)
def conv_of_an_image_alone(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.back = nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(3, 1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.back(self.conv(x[0]).tanh())[None]  # [channels, height, width]

    return of_module(Net(), torch.randn(B, 2, 6, 6), dtype=dtype)


# -- weights that are not used as they are --------------------------------------------------------

CASES |= {
    "conv-masked-weight": of_function(
        lambda p, x: F.conv2d(x, p["w"] * torch.ones(3, 3, dtype=x.dtype).tril(), padding=1),
        {"w": (4, 2, 3, 3)},
        (2, 5, 5),
    ),
    "conv-weight-used-transposed-too": of_function(
        lambda p, x: F.conv_transpose2d(F.conv2d(x, p["w"]).tanh(), p["w"]),
        {"w": (4, 2, 3, 3)},
        (2, 5, 5),
    ),
    "conv-weight-used-as-a-linear-one-too": of_function(
        lambda p, x: F.linear(F.conv1d(x, p["w"]).mean(2), p["w"].flatten(1).T),
        {"w": (4, 2, 3)},
        (2, 7),
    ),
    "conv-with-a-weight-of-the-example": of_function(
        # A generated filter: each example has a weight of its own.
        lambda p, x: F.conv2d(x, F.linear(x.mean((2, 3)), p["w"]).view(3, 2, 2, 2)),
        {"w": (24, 2)},
        (2, 5, 5),
        mixes=True,
    ),
    "conv-of-a-parameter-by-the-example": of_function(
        # Cross-correlation of a learned image with a template.
        lambda p, x: F.conv2d(p["image"], x),
        {"image": (1, 2, 6, 6)},
        (2, 3, 3),
        mixes=True,
    ),
    "conv-bias-of-the-example": of_function(
        lambda p, x: F.conv1d(x, p["w"], x[0, :, 0]), {"w": (2, 2, 3)}, (2, 7), mixes=True
    ),
    "conv-below-the-functional-layer": of_function(
        lambda p, x: torch.convolution(x, p["w"], p["b"], [2, 1], [1, 0], [1, 1], False, [0, 0], 1),
        {"w": (3, 2, 3, 2), "b": (3,)},
        (2, 6, 6),
    ),
    "conv-tbc": of_function(
        lambda p, x: torch.conv_tbc(x.transpose(0, 1).contiguous(), p["w"], p["b"], 1).transpose(
            0, 1
        ),
        {"w": (3, 4, 5), "b": (5,)},
        (7, 4),
    ),
    "unfolded-by-hand": of_function(
        lambda p, x: p["w"] @ F.unfold(x, 3, padding=1), {"w": (4, 18)}, (2, 5, 5)
    ),
    "folded-by-hand": of_function(
        lambda p, x: F.fold(x @ p["w"], (4, 4), 2, stride=2).flatten(1),
        {"w": (4, 4)},
        (4, 4),
    ),
    "pixel-shuffle": of_function(
        lambda p, x: F.pixel_shuffle(F.conv2d(x, p["w"]), 2), {"w": (8, 2, 3, 3)}, (2, 5, 5)
    ),
}


@case()
def conv_reflection_by_a_layer(dtype):
    net = nn.Sequential(nn.ReflectionPad2d((1, 2, 0, 1)), nn.Conv2d(2, 3, 3), nn.ZeroPad2d(1))
    return of_module(net, torch.randn(B, 2, 6, 6), dtype=dtype)


@case()
def pooling_of_every_kind(dtype):
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 3, 3, padding=1),
        nn.AvgPool2d(2, 1),
        nn.Conv2d(3, 3, 1),
        nn.LPPool2d(2, 2, 1),
        nn.AdaptiveMaxPool2d((2, 1)),
    )
    return of_module(net, torch.randn(B, 2, 9, 9), dtype=dtype)


@case()
def pooling_of_many_channels(dtype):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 9, 3), nn.Linear(9, 3)

        def forward(self, x):
            h = F.max_pool2d(self.conv(x).relu(), 2, 1, 1, 1, True)  # zeros are ties
            h, places = F.max_pool2d(h, 2, return_indices=True)
            return self.out((h + torch.max_pool2d(places / 9, 1)).mean((2, 3)))

    return of_module(Net(), torch.randn(B, 2, 9, 9), dtype=dtype)
