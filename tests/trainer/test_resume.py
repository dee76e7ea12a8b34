"""A run interrupted anywhere and resumed equals the run that was not, bit for bit."""

from __future__ import annotations

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
    CLIPPING,
    N_FEATURES,
    Draws,
    Net,
    Points,
    Validated,
    assert_same,
    make_loader,
    make_trainer,
    plan,
    seed_globals,
    snapshot,
)

# The resuming fits leave out the callbacks that interrupted the first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no last"),
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


class Demanding(Net):
    """Writes into memory of its own, and branches: from the first step on, passes are others."""

    def per_example_loss(self, batch: Any) -> Any:
        x, y, *_ = batch
        padded = torch.zeros(1, N_FEATURES)
        padded[:, :] = x
        loss = super().per_example_loss((padded, y))
        return 2 * loss if int(y) else loss


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
    "demanding_loss": Case(net=lambda: Demanding(dropout=0.5)),
    "augmentation": Case(data=Augmented),
    "momentum": Case(net=lambda: Net(optimizer=lambda: sgd(lr=0.1, momentum=0.9))),
    "schedule_from_estimated_steps": Case(net=Scheduled),
    "validation": Case(val=True, net=lambda: Net(dropout=0.5)),
    "validation_mid_epoch": Case(val=True, val_check_interval=2),
    "target_epsilon": Case(net=lambda: Net(plan(target_epsilon=3.0))),
    "reloaded": Case(reload_dataloaders_every_n_epochs=1),
    "reloaded_single_device": Case(reload_dataloaders_every_n_epochs=1, single_device=True),
    "max_steps": Case(max_steps=N_STEPS, max_epochs=-1),
    **{
        name: Case(net=lambda clipping=clipping: Net(plan(clipping_norm=clipping)))
        for name, clipping in CLIPPING.items()
    },
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
        again = tmp_path / "again"
        resumed, redrawn = case.fit(again, every_step(again), ckpt=path)
        assert redrawn == {t: drawn[t] for t in range(4 * (epoch + 1), 12)}
        assert_same(resumed, whole)
        if epoch < 2:
            twice, _ = case.fit(tmp_path, ckpt=again / f"step={4 * epoch + 6}.ckpt")
            assert_same(twice, whole)


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
        def interrupt(trainer: Any, *args: Any) -> None:
            if trainer.global_step == step and not trainer.sanity_checking:
                raise RuntimeError("interrupted")

        if hook != "loss":
            setattr(self, hook, interrupt)


class Breaks(Net):
    """Raises while the gradient of the step after ``fail_at`` is computed."""

    fail_at: int | None = None

    def per_example_loss(self, batch):
        if self.training and self.trainer.global_step == self.fail_at:
            raise RuntimeError("interrupted")
        return super().per_example_loss(batch)


HOOKS = {
    "on_train_batch_start": [1, 3, 4, 5],
    "loss": [1, 3, 4, 5],
    "on_train_batch_end": [1, 3, 4, 5, 8],
    "on_train_epoch_start": [0, 4],
    "on_train_epoch_end": [4, 8],
    "on_validation_start": [4, 8],
    "on_validation_batch_end": [4, 8],
    "on_validation_end": [4, 8],
}


@pytest.mark.parametrize(
    ("hook", "step"), [(hook, step) for hook, steps in HOOKS.items() for step in steps]
)
def test_resume_after_an_exception(hook, step, tmp_path):
    case = Case(val=True, net=lambda: Breaks(dropout=0.5))
    whole, drawn = case.fit(tmp_path)
    broken = Case(val=True, net=lambda: _breaking(step if hook == "loss" else None))
    with pytest.raises(RuntimeError, match="interrupted"):
        broken.fit(tmp_path, Interrupt(hook, step), OnExceptionCheckpoint(tmp_path))
    again = tmp_path / "again"
    resumed, redrawn = case.fit(again, every_step(again), ckpt=tmp_path / "on_exception.ckpt")
    assert redrawn == {t: drawn[t] for t in range(step, N_STEPS)}
    assert_same(resumed, whole)
    for second in range(step + 1, N_STEPS):
        twice, _ = case.fit(tmp_path, ckpt=again / f"step={second}.ckpt")
        assert_same(twice, whole)


def _breaking(step: int | None) -> Breaks:
    net = Breaks(dropout=0.5)
    net.fail_at = step
    return net


class SaveAfter(Callback):
    """Saves when Lightning takes the run for finished."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path / "fit-end.ckpt")


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": N_STEPS}])
@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize("step", [2, 4, 5, 8])
def test_resume_after_a_stop(step, val, limits, tmp_path):
    """Lightning takes a stop in mid-epoch for the end of the epoch, and would skip the rest."""
    case = Case(val=val, net=lambda: Net(dropout=0.5), **limits)
    whole, drawn = case.fit(tmp_path)
    stops = {"budget": {}, "max_steps": {"max_steps": step}}
    for name, limit in stops.items():
        budget = PrivacyBudget(whole_epsilon(step), delta=1e-5)
        save = ModelCheckpoint(tmp_path / name, filename="epoch-end", save_on_train_epoch_end=True)
        callbacks = [save, SaveAfter(tmp_path / name), *([budget] if name == "budget" else [])]
        stopped, _ = case.fit(tmp_path, *callbacks, **limit)
        assert stopped["n_steps"] == step
        for file in ("epoch-end", "fit-end"):
            again = tmp_path / name / f"{file}-again"
            resumed, redrawn = case.fit(
                again, every_step(again), ckpt=tmp_path / name / f"{file}.ckpt"
            )
            assert redrawn == {t: drawn[t] for t in range(step, N_STEPS)}
            assert_same(resumed, whole)
            for second in range(step + 1, N_STEPS):
                twice, _ = case.fit(again, ckpt=again / f"step={second}.ckpt")
                assert_same(twice, whole)


def test_dropout_is_new_at_every_step(tmp_path):
    """Resumable randomness must not be the same randomness over and over."""

    class Watched(Net):
        log_not_private = True

    class Losses(Callback):
        def on_train_start(self, *args: Any) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.seen.append(float(trainer.callback_metrics["not_private/loss"]))

    for rate, different in ((0.0, 1), (0.5, N_STEPS)):
        losses = Losses()
        net = Watched(dropout=rate, optimizer=lambda: sgd(lr=0.0))
        trainer = make_trainer(tmp_path, max_epochs=N_STEPS, callbacks=[losses])
        trainer.fit(net, make_loader(batch_size=len(Points())))  # everyone, at every step
        assert len(losses.seen) == N_STEPS
        assert len(set(losses.seen)) == different


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


@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize("first", range(1, N_STEPS))
def test_resume_a_resumed_run_from_every_step(first, val, tmp_path):
    """Lightning 2.6 forgets to count an epoch after a resume from its very last batch."""
    case = Case(val=val, net=lambda: Net(dropout=0.5), max_epochs=2)
    whole, drawn = case.fit(tmp_path, every_step(tmp_path))
    again = tmp_path / "again"
    case.fit(again, every_step(again), ckpt=tmp_path / f"step={first}.ckpt")
    for second in range(first + 1, N_STEPS):
        resumed, redrawn = case.fit(again, ckpt=again / f"step={second}.ckpt")
        assert redrawn == {t: drawn[t] for t in range(second, N_STEPS)}
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
