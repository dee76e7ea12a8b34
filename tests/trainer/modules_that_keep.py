"""Losses whose modules keep something from call to call: what is refused, and what may stay."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from tests.losses import N_CLASSES, N_FEATURES, WIDTH


class Classifier(nn.Module):
    """A linear layer, and a place for what a test adds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(N_FEATURES, WIDTH)
        self.epoch = 0

    def features(self, x: Tensor) -> Tensor:
        return self.net(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.features(x), y, reduction="none")


REFUSED: dict[str, Callable[[], nn.Module]] = {}


def refused(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    REFUSED[kind.__name__] = kind
    return kind


class Table(Classifier):
    """Features from a table whose rows are rescaled when they are looked up."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def features(self, x: Tensor) -> Tensor:
        ids = (100 * x.abs()).long().clamp(max=999)
        rows = self.table(ids)
        return self.net((rows.mean(1) if rows.dim() == 3 else rows)[:, :N_FEATURES])


for _kind, _frozen in itertools.product((nn.Embedding, nn.EmbeddingBag), (False, True)):
    REFUSED[f"{_kind.__name__} with max_norm, {'frozen' if _frozen else 'trained'}"] = (
        lambda kind=_kind, frozen=_frozen: Table(
            kind(1000, 16, max_norm=1.0).requires_grad_(not frozen)
        )
    )


@refused
class AccuracyInTheLoss(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x)
        self.accuracy.update(z, y)
        return F.cross_entropy(z, y, reduction="none")


@refused
class MetricCalledInTheLoss(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        self.mean(loss)
        return loss


@refused
class TrainedWeightWritten(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.net.weight.data += 0.01 * x.mean()
        return super().forward(x, y)


@refused
class Codebook(Classifier):
    """Vector quantisation whose codes are averages of what was assigned to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.randn(4, WIDTH))
        self.register_buffer("count", torch.ones(4))

    def features(self, x: Tensor) -> Tensor:
        z = self.net(x)
        nearest = torch.cdist(z, self.code).argmin(1)
        chosen = F.one_hot(nearest, 4).to(z.dtype)
        self.count.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.code.data.mul_(0.9).add_(chosen.mT @ z.detach(), alpha=0.1)
        return z + (self.code[nearest] - z).detach()


@refused
class QueueWithPointer(Classifier):
    """MoCo's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(16, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def features(self, x: Tensor) -> Tensor:
        z, start = self.net(x), int(self.pointer)
        self.queue[start : start + len(z)] = z.detach()
        self.pointer[0] = (start + len(z)) % 16
        return z


@refused
class Bank(Classifier):
    """A memory bank with an entry for each label."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(N_CLASSES, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x)
        self.bank[y] = z.detach()
        return F.cross_entropy(z, y, reduction="none")


@refused
class Center(Classifier):
    """DINO's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        z = self.net(x)
        self.center = 0.9 * self.center + 0.1 * z.detach().mean(0)
        return z - self.center


@refused
class ListOfLosses(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        self.losses.append(loss)
        return loss


@refused
class LabelsSeen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.labels: set[int] = set()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.labels.add(int(y))
        return super().forward(x, y)


@refused
class CallsForSomeRows(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            self.calls += 1
        return super().forward(x, y)


@refused
class ActivationsKeptByAHook(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}

    def features(self, x: Tensor) -> Tensor:
        hook = self.net.register_forward_hook(lambda *io: self.seen.update(last=io[2].detach()))
        z = self.net(x)
        hook.remove()
        return z


@refused
class FirstBatchCached(Classifier):
    @functools.lru_cache  # noqa: B019 - what a user might do
    def shift(self) -> Tensor:
        return self.last.detach().mean(0)

    def features(self, x: Tensor) -> Tensor:
        self.last = z = self.net(x)
        z = z - self.shift()
        del self.last
        return z


@refused
class InstanceNormThatTracks(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.net(x)[:, None])[:, 0]


# -- what is allowed ------------------------------------------------------------------------------

ALLOWED: dict[str, Callable[[], nn.Module]] = {}


def allowed(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    ALLOWED[kind.__name__] = kind
    return kind


@allowed
class Counters(Classifier):
    """A buffer, a number and a list that go on by one at each step, however many rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.calls, self.temperature, self.seen = 0, 1.0, []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps.add_(1)
        self.replaced = self.replaced + 1
        self.calls += 1
        self.temperature *= 0.9
        self.seen.append(self.calls)
        return super().forward(x, y) / self.temperature

    def check(self, steps: int) -> None:
        assert (float(self.steps), float(self.replaced), self.calls) == (steps, steps, steps)
        assert self.temperature == pytest.approx(0.9**steps)
        assert self.seen == list(range(1, steps + 1))


@allowed
class CounterBeforeABranch(Classifier):
    """How many passes its branch takes depends on the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.steps.add_(1)
        loss = super().forward(x, y)
        return 2 * loss if x.sum() > 0 else loss

    def check(self, steps: int) -> None:
        assert (float(self.steps), self.calls) == (steps, steps)


@allowed
class OldSpectralNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.utils.spectral_norm(self.net)


@allowed
class SpectralNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.net)


@allowed
class Rotary(Classifier):
    """Angles that are computed when they are first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def features(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = torch.arange(x.shape[1]).float().cos()
            self.angles = self.cache[x.shape[1]]
        return self.net(x * self.angles)

    def check(self, steps: int) -> None:
        del steps
        assert list(self.cache) == [N_FEATURES]


@allowed
class TargetNetwork(Classifier):
    """Follows the weights, which are released."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(N_FEATURES, WIDTH).requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return self.net(x) - self.target(x)
