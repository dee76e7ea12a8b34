"""A run interrupted anywhere and resumed equals the run that was not, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from opake_lightning import PoissonLoader, PrivacyBudget
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.scheduling import cosine_schedule
from tests.trainer.helpers import (
    BATCH_SIZE,
    Draws,
    Net,
    Points,
    Validated,
    make_loader,
    make_trainer,
    plan,
    seed_globals,
    snapshot,
)

# The resuming fits leave out the callbacks that interrupted the first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:..fit.ckpt_path=.last.. is set, but there is no last"),
]

N_STEPS = 8  # two epochs of four steps
SEED = iter(range(10**6))


class Augmented(Points):
    """Adds noise to x from all three global generators, as augmentation libraries do."""

    def __getitem__(self, index: int) -> Any:
        x, y, index = super().__getitem__(index)
        noise = 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.randn())  # noqa: NPY002
        return x + noise + 0.1 * torch.randn(x.shape), y, index


class Scheduled(Net):
    """Asks Lightning for the number of steps while it makes its optimizer."""

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        return adamw(lr=cosine_schedule(0.1, 0.01, steps))


def every_step(path: Path, **kwargs: Any) -> ModelCheckpoint:
    kwargs = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", **kwargs}
    return ModelCheckpoint(path, **kwargs)


class Case:
    """One way to train: everything that a fit is made from, made anew for each fit."""

    def __init__(
        self,
        *,
        net: Callable[[], Net] = Net,
        data: Callable[[], Any] = Points,
        val: bool = False,
        single_device: bool = False,
        loader: dict[str, Any] | None = None,
        **trainer: Any,
    ) -> None:
        self.net, self.data, self.val, self.single_device = net, data, val, single_device
        self.loader, self.trainer = loader or {}, trainer

    def fit(
        self, path: Path, *callbacks: Callback, ckpt: str | Path | None = None, **trainer: Any
    ) -> tuple[dict[str, Any], dict[int, list[int]]]:
        """State at the end, and what each step drew."""
        seed_globals(next(SEED))  # an earlier process's global generators are not there to lean on
        net, draws = self.net(), Draws()
        if self.val:
            net.__class__ = _validated(type(net))
        trainer = {**self.trainer, **trainer, "callbacks": [draws, *callbacks]}
        if self.single_device:
            trainer["strategy"] = "auto"
            loader = PoissonLoader(self.data(), BATCH_SIZE, **self.loader)
        else:
            loader = make_loader(self.data(), **self.loader)
        val = make_loader(shuffle=False) if self.val else None
        fitter = make_trainer(path, **trainer)
        fitter.fit(net, loader, val, ckpt_path=ckpt)
        return snapshot(net, fitter), draws.seen


@cache
def _validated(net: type[Net]) -> type[Net]:
    return type(net.__name__, (Validated, net), {})


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    differ = [
        name
        for name in a
        if not (
            torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name]
        )
    ]
    assert not differ


def check_resume(case: Case, path: Path, steps: list[int], n_steps: int = N_STEPS) -> None:
    """Resume from the checkpoint after each of ``steps``; compare with the run that made it."""
    whole, drawn = case.fit(path, every_step(path))
    assert sorted(drawn) == list(range(n_steps))
    assert whole["global_step"] == whole["n_steps"] == n_steps
    for step in steps:
        resumed, redrawn = case.fit(path, ckpt=path / f"step={step}.ckpt")
        assert redrawn == {t: drawn[t] for t in range(step, n_steps)}
        assert_same(resumed, whole)


CASES = {
    "plain": Case(),
    "single_device": Case(single_device=True),
    "dropout": Case(net=lambda: Net(dropout=0.5)),
    "augmentation": Case(data=Augmented),
    "momentum": Case(net=lambda: Net(optimizer=lambda: sgd(lr=0.1, momentum=0.9))),
    "schedule_from_estimated_steps": Case(net=Scheduled),
    "validation": Case(val=True, net=lambda: Net(dropout=0.5)),
    "validation_mid_epoch": Case(val=True, val_check_interval=2),
    "target_epsilon": Case(net=lambda: Net(plan(target_epsilon=3.0))),
    "max_steps": Case(max_steps=N_STEPS, max_epochs=-1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_resume_from_every_step(case, tmp_path):
    check_resume(case, tmp_path, list(range(1, N_STEPS + 1)))


@pytest.mark.parametrize("val", [False, True])
def test_resume_when_lightning_limits_the_batches(val, tmp_path):
    case = Case(limit_train_batches=3, max_epochs=3, val=val)
    check_resume(case, tmp_path, list(range(1, 10)), n_steps=9)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("single_device", [False, True])
def test_resume_with_workers(single_device, persistent, tmp_path):
    case = Case(
        data=Augmented,
        single_device=single_device,
        loader={"num_workers": 2, "persistent_workers": persistent},
    )
    check_resume(case, tmp_path, [3, 4])
    # Read ahead by workers or not, the same draws and the same augmentations.
    alone, _ = Case(data=Augmented).fit(tmp_path)
    together, _ = case.fit(tmp_path)
    assert_same(alone, together)


@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize("when", ["on_train_epoch_end", "on_validation_end"])
def test_resume_from_epoch_end(when, val, tmp_path):
    case = Case(val=val, max_epochs=3)
    save = ModelCheckpoint(
        tmp_path,
        save_top_k=-1,
        filename="{epoch}",
        save_on_train_epoch_end=when == "on_train_epoch_end",
        every_n_epochs=1,
    )
    whole, drawn = case.fit(tmp_path, save)
    for epoch in range(3):
        path = tmp_path / f"epoch={epoch}.ckpt"
        if not val and when == "on_validation_end":
            assert not path.exists()
            continue
        resumed, redrawn = case.fit(tmp_path, ckpt=path)
        assert redrawn == {t: drawn[t] for t in range(4 * (epoch + 1), 12)}
        assert_same(resumed, whole)


def test_resume_from_a_checkpoint_made_by_validation_mid_epoch(tmp_path):
    case = Case(val=True, val_check_interval=2, net=lambda: Net(dropout=0.5))
    save = ModelCheckpoint(
        tmp_path, save_top_k=-1, filename="{step}", monitor="val_loss", auto_insert_metric_name=True
    )
    whole, drawn = case.fit(tmp_path, save)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 4
    for file in files:
        resumed, redrawn = case.fit(tmp_path, ckpt=file)
        assert redrawn.items() <= drawn.items()
        assert_same(resumed, whole)


class Interrupt(Callback):
    """Raises in one hook at one step, as a full disk or an impatient user would."""

    def __init__(self, hook: str, step: int) -> None:
        self.hook, self.step = hook, step

    def _maybe(self, hook: str, step: int) -> None:
        if (hook, step) == (self.hook, self.step):
            raise RuntimeError("interrupted")

    def on_train_batch_start(self, trainer, *args):
        self._maybe("start", trainer.global_step)

    def on_train_batch_end(self, trainer, *args):
        self._maybe("end", trainer.global_step)

    def on_train_epoch_end(self, trainer, *args):
        self._maybe("epoch_end", trainer.global_step)

    def on_validation_end(self, trainer, *args):
        self._maybe("validation_end", trainer.global_step)


class Breaks(Net):
    """Raises while the gradient of the step after ``fail_at`` is computed."""

    fail_at: int | None = None

    def per_example_loss(self, batch):
        if self.training and self.trainer.global_step == self.fail_at:
            raise RuntimeError("interrupted")
        return super().per_example_loss(batch)


class SaveOnException(OnExceptionCheckpoint):
    """Lightning removes the file in teardown, so copy it there."""

    def teardown(self, trainer, *args, **kwargs):
        if os.path.exists(self.ckpt_path):
            os.rename(self.ckpt_path, self.ckpt_path + ".kept")


@pytest.mark.parametrize("step", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("hook", ["start", "loss", "end", "epoch_end", "validation_end"])
def test_resume_after_an_exception(hook, step, tmp_path):
    if hook in ("epoch_end", "validation_end") and step % 4:
        pytest.skip("the hook runs at the end of an epoch of four steps")
    if hook in ("start", "loss") and step == N_STEPS:
        pytest.skip("no step follows the last")
    case = Case(val=True, net=lambda: Breaks(dropout=0.5))
    whole, drawn = case.fit(tmp_path)
    broken = Case(val=True, net=lambda: _breaking(step if hook == "loss" else None))
    with pytest.raises(RuntimeError, match="interrupted"):
        broken.fit(tmp_path, Interrupt(hook, step), SaveOnException(tmp_path))
    resumed, redrawn = case.fit(tmp_path, ckpt=tmp_path / "on_exception.ckpt.kept")
    assert redrawn == {t: drawn[t] for t in range(step, N_STEPS)}
    assert_same(resumed, whole)


def _breaking(step: int | None) -> Breaks:
    net = Breaks(dropout=0.5)
    net.fail_at = step
    return net


@pytest.mark.parametrize("step", [2, 4, 7])
@pytest.mark.parametrize("val", [False, True])
def test_resume_after_a_budget_stop(val, step, tmp_path):
    # An open-ended run: Lightning takes a stop in mid-epoch for the end of the epoch, so a number
    # of epochs would be another number of steps.
    case = Case(max_steps=N_STEPS, max_epochs=-1, val=val)
    whole, drawn = case.fit(tmp_path)
    budget = PrivacyBudget(whole_epsilon(step), delta=1e-5)
    save = ModelCheckpoint(tmp_path, filename="stop", save_on_train_epoch_end=True)
    stopped, _ = case.fit(tmp_path, budget, save)
    assert stopped["n_steps"] == step
    resumed, redrawn = case.fit(tmp_path, ckpt=tmp_path / "stop.ckpt")
    assert redrawn == {t: drawn[t] for t in range(step, N_STEPS)}
    assert_same(resumed, whole)


def whole_epsilon(step: int) -> float:
    """A budget that allows exactly ``step`` steps of the usual plan."""
    from opake_lightning.accounting import GaussianEvent, Ledger

    event = GaussianEvent(1.0, BATCH_SIZE / len(Points()))
    return Ledger().spend(event, step).epsilon(1e-5)


def test_three_batches_an_epoch_resumed_twice_is_nine_steps(tmp_path):
    def fit(epochs: int, ckpt: Path | None = None) -> dict[str, Any]:
        save = ModelCheckpoint(tmp_path, filename=f"after-{epochs}", save_top_k=-1)
        case = Case(loader={"batch_size": 8}, max_epochs=epochs)
        return case.fit(tmp_path, save, ckpt=ckpt)[0]

    for epochs in (1, 2, 3):
        ckpt = tmp_path / f"after-{epochs - 1}.ckpt" if epochs > 1 else None
        end = fit(epochs, ckpt)
        assert end["n_steps"] == end["global_step"] == end["noise/step"] == 3 * epochs
    (tmp_path / "whole").mkdir()
    whole, _ = Case(loader={"batch_size": 8}, max_epochs=3).fit(tmp_path / "whole")
    assert_same(end, whole)


def test_resume_a_resumed_run(tmp_path):
    case = Case(net=lambda: Net(dropout=0.5), loader={"num_workers": 2})
    whole, drawn = case.fit(tmp_path, every_step(tmp_path))
    again = tmp_path / "again"
    case.fit(again, every_step(again), ckpt=tmp_path / "step=3.ckpt", max_epochs=-1, max_steps=6)
    resumed, redrawn = case.fit(again, ckpt=again / "step=5.ckpt")
    assert redrawn == {t: drawn[t] for t in range(5, N_STEPS)}
    assert_same(resumed, whole)


_CHILD = """
import sys
from pathlib import Path
from tests.trainer.test_resume import KILLED, every_step, Callback

class Tell(Callback):
    def on_train_batch_start(self, trainer, *args):
        print(trainer.global_step, flush=True)

path = Path(sys.argv[1])
KILLED.fit(path, every_step(path), Tell())
"""
KILLED = Case(net=lambda: Net(dropout=0.5), max_epochs=10)


def test_resume_after_sigkill(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    steps = (int(line) for line in child.stdout if line.strip().isdigit())
    assert any(step == 7 for step in steps)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    saved = sorted(int(file.stem.split("=")[1]) for file in tmp_path.glob("step=*.ckpt"))
    assert saved[:7] == [1, 2, 3, 4, 5, 6, 7]
    resumed, _ = KILLED.fit(tmp_path, ckpt=tmp_path / f"step={saved[-1]}.ckpt")
    whole, _ = KILLED.fit(tmp_path)
    assert whole["n_steps"] == 40
    assert_same(resumed, whole)
