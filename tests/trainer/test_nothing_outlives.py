"""What a loss saw of an example ends with the step: only the released gradient goes on from it.

Two fits with one drawn row replaced and all releases the same leave the same module, callbacks and
weights-only file, bit for bit; or the fit was refused before the release.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from tests.losses import DRAWS, N_CLASSES, N_FEATURES, STEPS_PER_EPOCH, WIDTH, rows
from tests.losses_that_keep import KEEPING, LEFT
from tests.trainer.forced import Fit, Trained

# Without the replaced row, and with it, also at the end.
FIVE = [DRAWS[4], DRAWS[0], DRAWS[2], DRAWS[1], DRAWS[5]]
ROWS = rows(outlier=10.0)
ONE_REPLACED = ROWS[0].clone(), ROWS[1].clone()
ONE_REPLACED[0][-1] *= -0.3
ONE_REPLACED[1][-1] = (ROWS[1][-1] + 1) % N_CLASSES

one_at_a_time = pytest.mark.filterwarnings("ignore:clipping one example at a time")

# -- what there is --------------------------------------------------------------------------------

# Lightning's and the run's own: they lead to the trainer, to the loader and to the noise's key.
_NOT_OURS = {"_trainer", "_fabric", "_dp", "_dp_arrived", "_dp_in_loss", "_dp_shown"}
_PLAIN = (int, float, complex, str, bytes, bool, type(None), bytearray, torch.dtype, torch.device)


def found(value: Any, path: str = "", seen: set[int] | None = None) -> dict[str, Any]:
    """Everything that can be reached from ``value``, by path, in a form that can be compared."""
    seen = set() if seen is None else seen
    if isinstance(value, _PLAIN):
        return {path: (type(value), value)}
    if id(value) in seen:
        return {}
    seen.add(id(value))
    below: dict[str, Any] = {}
    out: dict[str, Any] = {}
    if isinstance(value, Tensor):
        dense = value.detach().cpu()
        out[path] = value.dtype, tuple(value.shape), value.requires_grad, dense.numpy().tobytes()
        below = {"grad": value.grad if value.is_leaf else None, **vars(value)}
    elif isinstance(value, np.ndarray):
        out[path] = value.dtype, value.shape, value.tobytes()
    elif isinstance(value, torch.Generator):
        out[path] = value.get_state().numpy().tobytes()
    elif isinstance(value, (random.Random, np.random.Generator)):
        state = value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
        out[path] = repr(state)
    elif isinstance(value, dict):
        # Hooks have numbers that no other hook of the process has.
        numbered = path.endswith("_hooks")
        keys = [str(i) if numbered else repr(k) for i, k in enumerate(value)]
        below = dict(zip(keys, value.values(), strict=True))
        out[path] = len(value)
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        below = {str(i): v for i, v in enumerate(value)}
        out[path] = len(value)
    elif hasattr(value, "gi_frame"):
        below = {} if value.gi_frame is None else dict(value.gi_frame.f_locals)
    elif isinstance(value, (itertools.count, type(iter(range(1))))):
        out[path] = repr(value.__reduce__())
    elif hasattr(value, "cache_info"):
        out[path] = value.cache_info()
    elif isinstance(value, functools.partial):
        below = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif callable(value) and hasattr(value, "__code__"):
        cells = [c.cell_contents for c in value.__closure__ or ()]
        below = {"defaults": value.__defaults__, "cells": cells, **vars(value)}
    else:
        below = {**getattr(value, "__dict__", {})}
        names = [n for t in type(value).__mro__ for n in vars(t).get("__slots__", ())]
        below |= {name: getattr(value, name) for name in names if hasattr(value, name)}
        below |= _of_class(type(value))
    for name, child in below.items():
        if name.strip("'") not in _NOT_OURS:
            out |= found(child, f"{path}.{name}", seen)
    return out


def _of_class(kind: type) -> dict[str, Any]:
    """What may be kept on a class of a test."""
    return {
        f"{base.__name__}.{name}": value
        for base in kind.__mro__
        if base.__module__.startswith("tests.")
        for name, value in vars(base).items()
        if not callable(value) and not name.startswith("__")
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(path for path in a.keys() | b.keys() if a.get(path, "-") != b.get(path, "-"))


def all_of(fit: Fit, path: Path) -> dict[str, Any]:
    """What a fit leaves: the module, the callbacks and their states, and a weights-only file."""
    callbacks = fit.trainer.callbacks
    fit.trainer.save_checkpoint(path / "weights.ckpt", weights_only=True)
    saved = torch.load(path / "weights.ckpt", weights_only=True)
    del saved["opake_lightning"]["journal"]  # a name drawn for each run
    mine = [c for c in callbacks if type(c).__module__.startswith("tests.")]
    told = {name: float(value) for name, value in fit.trainer.callback_metrics.items()}
    states = [callback.state_dict() for callback in callbacks]
    return found([fit.module, mine, states, saved, told, LEFT])


def check(make: Callable[[], Any], path: Path, **options: Any) -> Fit | None:
    """The fit if it was refused; None if nothing of the replaced row is left."""
    one = Fit(make(), path, FIVE, data=ROWS, **options)
    if one.refusal is not None:
        return one
    other = Fit(make(), path, FIVE, data=ONE_REPLACED, released=one.released, **options)
    if other.refusal is not None:
        return other
    assert differing(all_of(one, path), all_of(other, path)) == []
    return None


# -- what is refused ------------------------------------------------------------------------------


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


def _kept(name: str) -> Any:
    """The same places once more, by another way, take their time."""
    again = name.endswith(("_item", "_sign"))
    return pytest.param(f"keeping {name}", marks=[pytest.mark.slow] if again else [])


# What iterates cannot be put back.
_ITERATORS = (".averages.mean", ".counter", ".numbered")


@one_at_a_time
@pytest.mark.parametrize("name", [*REFUSED, *map(_kept, KEEPING)])
def test_what_a_loss_keeps_is_refused_before_the_first_step(tmp_path, name):
    def make() -> Trained:
        if name in REFUSED:
            return Trained(REFUSED[name]())
        return Trained(keeping=name.removeprefix("keeping "))

    fit = check(make, tmp_path)
    if fit is None:
        # Lost as soon as it is written, which is as good: of a parameter, and to a copy.
        assert "gradient_slot" in name or "numpy_of" in name or "array" in name
        return
    assert fit.released == fit.sums == []
    # Whatever the loss wrote until then is not there any more.
    expected = make()
    expected.loss.epoch = fit.module.loss.epoch
    fit.module.state_dict()
    left = differing(found(expected.loss), found(fit.module.loss))
    assert left == [path for path in left if path in _ITERATORS]
    assert fit.module.privacy_spent().n_steps == 0


# -- what is reached through Lightning ------------------------------------------------------------


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.last: Any = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [float(x) for x in self.seen], "last": float(self.last)}


class InTheDataModule(pl.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.last = loader, 0.0

    def train_dataloader(self) -> Any:
        return self.loader


def _recorder(module: Any) -> Recorder:
    return next(c for c in module.trainer.callbacks if isinstance(c, Recorder))


def _of_dataset(module: Any, value: Tensor) -> None:
    module.trainer.train_dataloader.dataset.tensors[0][0] += value


THROUGH_LIGHTNING: dict[str, Callable[[Any, Tensor], Any]] = {
    "callback's list": lambda m, loss: _recorder(m).seen.append(loss.detach()),
    "callback's list of numbers": lambda m, loss: _recorder(m).seen.append(loss.item()),
    "callback's attribute": lambda m, loss: setattr(_recorder(m), "last", loss.item()),
    "callback's tensor": lambda m, loss: setattr(_recorder(m), "last", loss.detach()),
    "data module's attribute": lambda m, loss: setattr(m.trainer.datamodule, "last", loss.item()),
    "dataset": lambda m, loss: _of_dataset(m, loss.detach().mean()),
    "trainer's attribute": lambda m, loss: setattr(m.trainer, "last_loss", loss.item()),
    "metrics": lambda m, loss: m.trainer.callback_metrics.update(last=loss.detach()),
    "hyperparameters": lambda m, loss: m.hparams.update(last=loss.item()),
    "log": lambda m, loss: m.log("loss", loss.mean()),
    "log_dict": lambda m, loss: m.log_dict({"loss": loss.mean()}),
    "gradient": lambda m, loss: setattr(m.loss.net.weight, "grad", m.loss.net.weight * loss.mean()),
    "attribute of the module": lambda m, loss: setattr(m, "last", loss.item()),
    "should_stop": lambda m, loss: setattr(m.trainer, "should_stop", bool(loss.mean() > 1)),
}


class Through(Trained):
    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(Classifier())
        self.write = write

    def per_example_loss(self, batch: Any) -> Tensor:
        loss = super().per_example_loss(batch)
        self.write(self, loss)
        return loss


@one_at_a_time
@pytest.mark.parametrize("name", THROUGH_LIGHTNING)
def test_what_a_loss_reaches_through_the_trainer(tmp_path, name):
    write = THROUGH_LIGHTNING[name]
    options = {"hooks": [Recorder()], "through": InTheDataModule}
    fit = check(lambda: Through(write), tmp_path, **options)
    if fit is None:
        assert name == "gradient"
        return
    assert fit.released == []
    assert fit.trainer.callbacks[0].state_dict() == Recorder().state_dict()


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


@one_at_a_time
@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_the_same_for_all_rows_may_stay(tmp_path, name):
    made: list[Any] = []

    def make() -> Trained:
        made.append(ALLOWED[name]())
        return Trained(made[-1])

    assert check(make, tmp_path) is None
    for loss in made:
        getattr(loss, "check", lambda _: None)(len(FIVE))


# -- after a refusal ------------------------------------------------------------------------------


@one_at_a_time
@pytest.mark.parametrize(
    ("keeping", "asks"),
    [
        ("queue", ""),
        ("buffer_average_in_place", ""),
        ("buffer_of_item", ""),
        ("list_mean", ""),
        ("numpy_written", ""),
        ("class_item", ""),
        ("attribute_item", "shape"),
    ],
)
def test_a_refused_step_leaves_what_was_there_before_it(tmp_path, keeping, asks):
    fit = Fit(Trained(keeping=keeping, when="later", asks=asks), tmp_path, data=ROWS)
    # Until then it was the same as without what is refused.
    until_then = DRAWS[:STEPS_PER_EPOCH]
    plain = Fit(Trained(asks=asks), tmp_path, until_then, data=ROWS)
    module, run = fit.module, fit.module._dp
    assert fit.refusal is not None
    assert len(fit.released) == STEPS_PER_EPOCH
    assert module.privacy_spent().n_steps == run.state.step == STEPS_PER_EPOCH
    assert run.state.noise.step == STEPS_PER_EPOCH
    assert module.privacy_spent().epsilon == plain.module.privacy_spent().epsilon
    plain.module.loss.epoch = module.loss.epoch
    plain.module.loss.keeping, plain.module.loss.when = module.loss.keeping, "later"
    assert differing(found(plain.module.loss), found(module.loss)) == []
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    # Without it, a fit goes on, and so does the ledger.
    module.loss.keeping = None
    again = Fit(module, tmp_path, data=ROWS)
    assert again.refusal is None
    assert module.privacy_spent().n_steps == STEPS_PER_EPOCH + len(DRAWS)
