"""Losses made of parts: a model, how rows of a batch meet in it, and when.

Each is a loss for a whole batch, as its author meant it. Called with one row at a time, it is a
private one. What losses keep from call to call is in ``losses_that_keep``.
"""

from __future__ import annotations

import array
import itertools
import queue
import random
import threading
import types
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

N_ROWS, N_FEATURES, N_CLASSES, WIDTH = 8, 4, 3, 3
# What is drawn at each step: the last row at some of them only.
DRAWS = [
    [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 7], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 2, 3], [4, 5, 7], [0, 2, 4, 6], [0, 1, 2, 3, 4, 5, 6, 7],
]  # fmt: skip
STEPS_PER_EPOCH = 3


def rows(seed: int = 0, outlier: float = 1.0) -> tuple[Tensor, Tensor]:
    """Features and labels; the last row is ``outlier`` times as large as the others."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(N_ROWS, N_FEATURES, generator=draw)
    x[-1] *= outlier
    return x, torch.arange(N_ROWS) % N_CLASSES


def seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


# -- models: features of shape [B, WIDTH], and a loss for each row ---------------------------------

# Class weights of a reweighted cross entropy.
_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def _squares(z: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (z.sum(1) - y).square()


def _classes(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, weight=_WEIGHTS, reduction="none")


def _huber(z: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(z.sum(1), y.float(), reduction="none")


class _Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((3 * x.abs()).long().clamp(max=15)).mean(1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(N_FEATURES, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def _conv() -> nn.Module:
    layers = nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, WIDTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": (lambda: nn.Linear(N_FEATURES, WIDTH), _squares),
    "mlp": (_mlp, _huber),
    "weighted_classes": (lambda: nn.Linear(N_FEATURES, WIDTH), _classes),
    "embedding": (_Lookup, _classes),
    "conv": (_conv, _squares),
}


# -- rows that meet: a penalty for each row --------------------------------------------------------


def squared(z: Tensor) -> Tensor:
    return z.square().sum(1)


def _standardised(z: Tensor) -> Tensor:
    return (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt()


def _contrastive(z: Tensor) -> Tensor:
    return F.cross_entropy(z @ z.mT, torch.arange(len(z)), reduction="none")


def _shifted(z: Tensor) -> Tensor:
    after = z.clone()
    after[:-1] = z[1:]
    return squared(z - after)


def _attention(z: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(z[None], z[None], z[None])[0].square().sum(1)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_mean": lambda z: squared(z - z.mean(0, keepdim=True)),
    "partner": lambda z: squared((z + z[torch.randperm(len(z))]) / 2),
    "roll": lambda z: squared(z - z.roll(1, 0)),
    "flip": lambda z: (z * z.flip(0)).sum(1),
    "product": lambda z: (z @ z.mT @ z).sum(1),
    "cumsum": lambda z: squared(z.flip(0).cumsum(0).flip(0)),
    "sort": lambda z: squared(z - z.sort(0).values),
    "largest": lambda z: squared(z - z.max(0, keepdim=True).values),
    "median": lambda z: squared(z - z.median(0).values),
    "batch_norm": lambda z: _standardised(z).pow(3).sum(1),
    "softmax": lambda z: z.log_softmax(0).sum(1),
    "contrastive": _contrastive,
    "cdist": lambda z: torch.cdist(z, z).sum(1),
    "pairs": lambda z: (z[:, None] - z[None]).square().sum((1, 2)),
    "einsum": lambda z: torch.einsum("ik,jk->i", z, z),
    "attention": _attention,
    "whitening": lambda z: squared(z @ torch.linalg.inv(z.mT @ z + 0.1 * torch.eye(WIDTH))),
    "index_add": lambda z: z @ torch.zeros(1, WIDTH).index_add(0, z.argmax(1) * 0, z)[0],
    "written_from_the_next": _shifted,
    "sum_of_all": lambda z: z.sum() * z.sum(1),
}

Keeping = Callable[["Loss", Tensor], Any]

# -- when ------------------------------------------------------------------------------------------


def _counted(loss: Loss) -> bool:
    loss.calls += 1
    return loss.calls > 3


# Functions of the loss: a factor, or whether at all.
WHEN: dict[str, Callable[[Loss], Any]] = {
    "always": lambda _: True,
    "later": lambda loss: loss.epoch >= 1,
    "warm_up": lambda loss: float(loss.epoch >= 2),
    "counted": _counted,
    "torch_coin": lambda _: torch.rand(1).item() < 0.5,
    "tensor_coin": lambda _: torch.rand(1) < 0.5,
    "python_coin": lambda _: random.random() < 0.5,
    "numpy_coin": lambda _: np.random.rand() < 0.5,  # noqa: NPY002
}

# -- all of it -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Slotted:
    value: Any = 0.0


class Holder:
    def __init__(self) -> None:
        self.value: Any = 0.0
        self.items: list[Any] = []


def _averaging():
    """A generator that averages what is sent to it."""
    mean = 0.0
    while True:
        mean = 0.5 * mean + 0.5 * (yield mean)


class Loss(nn.Module):
    """A model's loss, and a penalty of weight ``weight`` on how far a row is from the others.

    Args:
        model: A name of ``MODELS``.
        mixing: A name of ``MIXING``: how rows of a batch meet.
        keeping: From the loss and its features to what earlier calls left; leaves something too.
        when: A name of ``WHEN``.
        weight: Of the penalty.
        asks: What else of a row the loss asks for: ``"value"``, a Python value of few; ``"shape"``,
            which vmap cannot give, so that rows run one at a time.

    Attributes:
        epoch: Set from outside of the loss, as a trainer does.
        calls: How often the loss has run.
    """

    def __init__(
        self,
        model: str = "linear",
        *,
        mixing: str = "",
        keeping: Keeping | None = None,
        when: str = "always",
        weight: float = 1.0,
        asks: str = "",
    ) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            make, self.row_loss = MODELS[model]
            self.net, self.child = make(), nn.Linear(1, 1).requires_grad_(False)
        self.mixing, self.keeping, self.when = mixing, keeping, when
        self.weight, self.asks = weight, asks
        self.epoch, self.calls = 0, 0
        self._places()

    def _places(self) -> None:
        """Where something can be left."""
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(8, WIDTH))
        self.last, self.text, self.initialised = 0.0, "0", False
        self.seen: list[Any] = []
        self.table: dict[Any, Any] = {}
        self.recent: deque[Any] = deque(maxlen=4)
        self.array, self.numbers = np.zeros(WIDTH, np.float32), array.array("d", [0.0])
        self.view = self.mean.numpy()
        self.space, self.holder = types.SimpleNamespace(value=0.0), Holder()
        self.slotted, self.nested = Slotted(), [({"holder": Holder()},)]
        self.child.value = 0.0
        self.averages, self.counter = _averaging(), itertools.count()
        next(self.averages)
        self.user_dict, self.of_thread = UserDict(), threading.local()
        self.waiting: queue.PriorityQueue[Any] = queue.PriorityQueue()
        self.of_row, self.by_row = [0.0] * 1000, dict.fromkeys(range(1000), 0.0)
        self.of_rows, self.numbered = np.zeros(100_000), iter(range(1000))
        self.torch_draws = torch.Generator().manual_seed(0)
        self.python_draws, self.numpy_draws = random.Random(0), np.random.default_rng(0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each row."""
        z = self.net(x)
        losses = self.row_loss(z, y)
        if self.asks == "value" and int(x.sum().abs().clamp(max=3)) > 1:
            losses = 1.1 * losses
        if self.asks == "shape":
            losses = losses + x[x > 1].sum()
        on = WHEN[self.when](self)
        if isinstance(on, Tensor) or on:
            if self.mixing:
                losses = losses + self.weight * on * MIXING[self.mixing](z)
            if self.keeping:
                losses = losses + self.weight * on * squared(z - self.keeping(self, z))
        return losses
