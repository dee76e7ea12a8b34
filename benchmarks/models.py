"""The models that whole training steps are measured on.

Each is an ordinary module and a loss with one value per example, so that every contender runs the
same code. What a contender could stumble over without need (tied weights, position ids of batch
size 1, operations in place, dropout) is left out: these are for speed. (a) to (d) are ordinary;
the others are what a private step may find hard: attention masks, a kernel for a whole recurrent
network, many small tensors, and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Model"]

CLASSES = 10


@dataclass(frozen=True)
class Model:
    """A model, its loss, and a batch of n examples.

    Attributes:
        make: A new module, from torch's global generator.
        batch: The module's argument, a pytree, and labels, of n examples.
        sizes: The batch sizes it is measured at.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Tensor]]
    sizes: tuple[int, ...] = (64, 256)

    def title(self, letter: str) -> str:
        """The first line of its tables."""
        count = sum(p.numel() for p in self.make().parameters())
        return f"({letter}) {self.name}, {count / 1e6:.2f} M parameters"

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
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x))))


@dataclass(frozen=True)
class _Shape:
    """Of a transformer."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    tokens: int

    def text(self, n: int) -> tuple[Tensor, Tensor]:
        """Tokens, and what comes after each."""
        ids = torch.randint(0, self.vocabulary, (n, self.tokens + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class _Transformer(nn.Module):
    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        width = shape.width
        self.token = nn.Embedding(shape.vocabulary, width)
        self.position = nn.Embedding(shape.tokens, width)
        self.blocks = nn.Sequential(*(_Block(width, shape.heads) for _ in range(shape.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        return self.head(self.norm(self.blocks(self.token(ids) + self.position(positions))))


class _Bert(nn.Module):
    """A BERT of transformers; its argument is the ids, or the ids and a mask of the padding."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.bert = BertForSequenceClassification(
            BertConfig(
                vocab_size=BERT.vocabulary, hidden_size=BERT.width, num_labels=CLASSES,
                num_hidden_layers=BERT.layers, num_attention_heads=BERT.heads,
                intermediate_size=4 * BERT.width, max_position_embeddings=BERT.tokens,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        ids, mask = x if isinstance(x, tuple) else (x, None)
        return self.bert(input_ids=ids, attention_mask=mask).logits


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class _Linears(nn.Module):
    """Many small layers; each adds little, so that nothing vanishes or explodes in 300 of them."""

    def __init__(self, n: int = 300, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) / len(self.layers)
        return x


def _images(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(0, CLASSES, (n,)))


def _sentences(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, BERT.vocabulary, (n, BERT.tokens))
    return ids, torch.randint(0, CLASSES, (n,))


def _padded(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    ids, labels = _sentences(n)
    lengths = torch.randint(BERT.tokens // 4, BERT.tokens + 1, (n, 1))
    kept = torch.arange(BERT.tokens) < lengths
    return (ids * kept, kept.long()), labels


SMALL = _Shape(vocabulary=8000, width=256, layers=4, heads=4, tokens=128)
BERT = _Shape(vocabulary=1000, width=64, layers=2, heads=4, tokens=32)
GPT = _Shape(vocabulary=41_500, width=768, layers=12, heads=12, tokens=128)
MODELS = {
    "a": Model("MLP 784-1024-1024-10", _mlp, _images(784)),
    "b": Model("DP-MNIST convnet", _convnet, _images(1, 28, 28)),
    "c": Model("GroupNorm ResNet, 3x32x32", _resnet, _images(3, 32, 32)),
    "d": Model("transformer, 128 tokens", lambda: _Transformer(SMALL), SMALL.text, (16, 64)),
    "bert": Model("BERT, 32 tokens", _Bert, _sentences, (64,)),
    "bert-mask": Model("BERT, up to 32 tokens, padded", _Bert, _padded, (64,)),
    "lstm": Model("LSTM, 2 layers, 32 steps", _LSTM, _images(32, 64), (64,)),
    "linears": Model("300 linear layers, 16 wide", _Linears, _images(16), (16,)),
    "gpt": Model("GPT, 128 tokens", lambda: _Transformer(GPT), GPT.text, (4,)),
}
