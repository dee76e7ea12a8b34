"""What a loss saw of an example ends with the step: only the released gradient goes on from it.

Fits with one drawn row replaced and all releases the same leave the same module, callbacks and
weights-only file, bit for bit; or the fit was refused before the release.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.losses import DRAWS, N_CLASSES, STEPS_PER_EPOCH, rows
from tests.losses_that_keep import KEEPING, LEFT
from tests.trainer.forced import Fit, Trained
from tests.trainer.modules_that_keep import ALLOWED, REFUSED, Classifier

# Without the last row, and with it, also at the end; the first one comes first where it is drawn.
FIVE = [DRAWS[4], DRAWS[0], DRAWS[2], DRAWS[1], DRAWS[5]]
ROWS = rows(outlier=10.0)


def _replaced(row: int, factor: float) -> tuple[Tensor, Tensor]:
    x, y = ROWS[0].clone(), ROWS[1].clone()
    x[row] *= factor
    y[row] = (y[row] + 1) % N_CLASSES
    return x, y


# The last row is ten times as large as the others.
REPLACED = (_replaced(-1, -0.3), _replaced(0, -3))

one_at_a_time = pytest.mark.filterwarnings("ignore:clipping one example at a time")

# -- what there is --------------------------------------------------------------------------------

# Lightning's and the run's own: they lead to the trainer, to the loader and to the noise's key.
_NOT_OURS = {"_trainer", "_fabric", "_dp", "_dp_arrived", "_dp_in_loss", "_dp_meter"}
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
    elif isinstance(value, itertools.count):
        out[path] = repr(value)
    elif isinstance(value, type(iter(range(1)))):
        out[path] = operator.length_hint(value)
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
    del saved["opake_lightning"]["lineage"]  # a name drawn for each run
    mine = [c for c in callbacks if type(c).__module__.startswith("tests.")]
    told = {name: float(value) for name, value in fit.trainer.callback_metrics.items()}
    states = [callback.state_dict() for callback in callbacks]
    return found([fit.module, mine, states, saved, told, LEFT])


def check(make: Callable[[], Any], path: Path, **options: Any) -> Fit | None:
    """The fit if it was refused; None if nothing of a replaced row is left."""
    one = Fit(make(), path, FIVE, data=ROWS, **options)
    if one.refusal is not None:
        return one
    left = all_of(one, path)
    for data in REPLACED:
        other = Fit(make(), path, FIVE, data=data, released=one.released, **options)
        if other.refusal is not None:
            return other
        assert differing(left, all_of(other, path)) == []
    return None


# -- what is refused ------------------------------------------------------------------------------


def _kept(name: str) -> Any:
    """The same places once more, by another way, take their time."""
    again = name.endswith(("_item", "_sign"))
    return pytest.param(f"keeping {name}", marks=[pytest.mark.slow] if again else [])


# What iterates cannot be put back.
_ITERATORS = (".averages.mean", ".counter", ".numbered")


@one_at_a_time
@pytest.mark.parametrize("name", [*REFUSED, *map(_kept, KEEPING)])
@pytest.mark.usefixtures("same_noise")
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


@one_at_a_time
@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.usefixtures("same_noise")
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
