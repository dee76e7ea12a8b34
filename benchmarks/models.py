"""The four models that whole training steps are timed on.

Each is an ordinary module and a loss with one value per example, so that every contender runs the
same code. What a contender could stumble over without need (tied weights, position ids of batch
size 1, operations in place) is left out: these are for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Model"]

VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS = 8000, 256, 4, 4, 128


@dataclass(frozen=True)
class Model:
    """A model, its loss, and a batch of n examples.

    Attributes:
        make: A new module, from torch's global generator.
        batch: Inputs and labels of n examples.
        sizes: The batch sizes it is measured at.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    sizes: tuple[int, int] = (64, 256)

    @staticmethod
    def losses(out: Tensor, labels: Tensor) -> Tensor:
        """One loss per example; over tokens the mean of them."""
        if out.dim() == 2:
            return F.cross_entropy(out, labels, reduction="none")
        each = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
        return each.view(labels.shape).mean(1)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, outer)
        same = inner == outer and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.skip(x))


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, padding=1, bias=False), nn.GroupNorm(8, 40), nn.ReLU(),
        _Residual(40, 40, 1), _Residual(40, 40, 1), _Residual(40, 80, 2), _Residual(80, 80, 1),
        _Residual(80, 160, 2), _Residual(160, 160, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10),
    )  # fmt: skip


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x))))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        return self.head(self.norm(self.blocks(self.token(ids) + self.position(positions))))


def _images(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(0, 10, (n,)))


def _text(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (n, TOKENS + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


MODELS = {
    "a": Model("MLP 784-1024-1024-10", _mlp, _images(784)),
    "b": Model("DP-MNIST convnet", _convnet, _images(1, 28, 28)),
    "c": Model("GroupNorm ResNet, 3x32x32", _resnet, _images(3, 32, 32)),
    "d": Model("transformer, 128 tokens", _Transformer, _text, (16, 64)),
}
