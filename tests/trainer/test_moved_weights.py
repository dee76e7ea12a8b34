"""The noise of a step is for the weights that training came to: what else changes them is seen."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from opake_lightning import CheckpointError, PrivacyError
from opake_lightning.optimizers import schedule_free, sgd
from tests.trainer.cases_dpftrl import mf_plan
from tests.trainer.helpers import (
    Net,
    Validated,
    made,
    make_loader,
    make_trainer,
    plan,
    run_fit,
    saver,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]
SHOWN = "ignore:.*other weights than training has come to"


class Adds(pl.Callback):
    """Changes the weights in one hook."""

    def __init__(self, amount: float, hook: str = "on_train_start") -> None:
        setattr(self, hook, self._add)
        self.amount = amount

    def _add(self, trainer: Any, module: Any, *args: Any) -> None:
        add(module, self.amount)


def add(module: Any, amount: float) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.add_(amount)


class Clamps(Validated):
    """Changes its weights in a hook of its own, named by the class that inherits it."""

    def clamp(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)


class AtEpochEnd(Clamps):
    def on_train_epoch_end(self) -> None:
        self.clamp()


class AtBatchEnd(Clamps):
    def on_train_batch_end(self, *args: Any) -> None:
        self.clamp()


class AtBatchStart(Clamps):
    def on_train_batch_start(self, *args: Any) -> None:
        self.clamp()


class Halves(pl.Callback):
    """Shows half of each weight in validation, as a callback would an average."""

    def __init__(self, save: Any = None) -> None:
        self.save = save

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = {name: p.detach().clone() for name, p in module.named_parameters()}
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.save is not None:
            trainer.save_checkpoint(self.save)
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(self.kept[name])


def fit(module: Any, path: Any, *callbacks: Any, ckpt: Any = None, **kwargs: Any) -> Any:
    trainer = make_trainer(path, callbacks=list(callbacks), num_sanity_val_steps=0, **kwargs)
    trainer.fit(module, make_loader(), make_loader(shuffle=False), ckpt_path=ckpt)
    return trainer


# -- before the first step ------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_fit_start"])
@pytest.mark.parametrize("privacy", [plan, mf_plan], ids=["gaussian", "correlated"])
def test_weights_that_a_hook_gives_a_fit_have_a_key_of_their_own(privacy, hook, tmp_path):
    """Else two runs with one named key would add the same noise to two gradients."""
    keys: list[str] = []
    for amount in (0.0, 0.5, 0.6, 0.6):
        module = Net(privacy())
        run_fit(module, tmp_path, Adds(amount, hook), max_steps=1)
        keys.append(module._dp.record.segment)
        assert module.privacy_spent().n_steps == 1
    assert len(set(keys)) == 3
    assert keys[2] == keys[3]  # and it can be made again


def test_such_a_fit_is_resumed_as_itself(tmp_path):
    whole, resumed = Net(), Net()
    run_fit(whole, tmp_path, saver(tmp_path, 3), Adds(0.5))
    run_fit(resumed, tmp_path, ckpt=tmp_path / "step=3.ckpt")
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
    assert made(resumed) == [8]


def test_a_resumed_run_whose_weights_a_hook_changes_is_another_one(tmp_path):
    run_fit(Net(), tmp_path, saver(tmp_path, 3))
    module = Net()
    with pytest.raises(CheckpointError, match="a hook changed them after the checkpoint was load"):
        run_fit(module, tmp_path, Adds(0.5), ckpt=tmp_path / "step=3.ckpt")
    assert module.privacy_spent().n_steps == 8  # all that is recorded
    forked = Net(plan(on_changed_plan="fork"))
    run_fit(forked, tmp_path, Adds(0.5), ckpt=tmp_path / "step=3.ckpt")
    assert made(forked) == [8, 5]


# -- while a checkpoint is made -------------------------------------------------------------------


@pytest.mark.filterwarnings(SHOWN)
def test_an_average_that_is_left_in_the_module_does_not_go_on_with_the_noise(tmp_path):
    """The checkpoint of the same step, with its own weights, does."""
    trainer = run_fit(Net(), tmp_path, saver(tmp_path, 4), WeightAveraging(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "elsewhere" / "end.ckpt")
    with pytest.raises(CheckpointError, match="these differ: the weights"):
        run_fit(Net(), tmp_path, ckpt=tmp_path / "elsewhere" / "end.ckpt")
    run_fit(Net(), tmp_path, WeightAveraging(), ckpt=tmp_path / "step=4.ckpt")


@pytest.mark.filterwarnings(SHOWN)
def test_weights_that_are_shown_in_validation_are_not_gone_on_from(tmp_path):
    fit(Validated(), tmp_path, Halves(tmp_path / "shown.ckpt"), max_epochs=1)
    with pytest.raises(CheckpointError, match="these differ: the weights"):
        fit(Validated(), tmp_path, ckpt=tmp_path / "shown.ckpt")


def test_the_weights_behind_those_that_are_shown_are_resumed(tmp_path):
    fit(Validated(), tmp_path, saver(tmp_path, 4), Halves())
    resumed, whole = Validated(), Validated()
    fit(resumed, tmp_path, Halves(), ckpt=tmp_path / "step=4.ckpt")
    fit(whole, tmp_path / "whole", Halves())
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


@pytest.mark.filterwarnings(SHOWN)
def test_a_callback_that_swaps_weights_for_a_file_of_each_step(tmp_path):
    class Average(Halves):
        """Swaps, saves and swaps back, as a checkpoint callback for averages does."""

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            self.on_validation_start(trainer, module)
            self.save = f"{trainer.default_root_dir}/average-{trainer.global_step}.ckpt"
            self.on_validation_end(trainer, module)

    run_fit(Net(), tmp_path, Average(), saver(tmp_path, 1), max_steps=3)
    with pytest.raises(CheckpointError, match="these differ: the weights"):
        run_fit(Net(), tmp_path, ckpt=tmp_path / "average-2.ckpt")
    run_fit(module := Net(), tmp_path, ckpt=tmp_path / "step=2.ckpt")
    assert made(module) == [8]


def test_weights_to_publish_are_not_taken_for_moved_ones(tmp_path):
    """They are shown after the fit, and those to train on are in the run; so nothing is warned."""
    trainer = run_fit(Net(optimizer=lambda: schedule_free(sgd(0.05))), tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "end.ckpt", weights_only=False)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["optimizer_states"][0]
    assert saved["opake_lightning"]["weights"]


# -- hooks of the module are a part of training ----------------------------------------------------


@pytest.mark.parametrize("kind", [AtEpochEnd, AtBatchStart])
def test_a_module_that_clamps_its_weights_is_resumed_as_it_is(kind, tmp_path):
    at_end = ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True
    )
    whole, resumed = kind(), kind()
    fit(whole, tmp_path, at_end)
    fit(resumed, tmp_path / "b", ckpt=tmp_path / "step=4.ckpt")
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
    assert resumed.privacy_spent().n_steps == 8


def test_weights_that_are_changed_after_they_were_saved_end_the_run(tmp_path):
    """A resumed run would have the ones before, and the noise of the next step."""
    module = AtBatchEnd()
    with pytest.raises(PrivacyError, match=r"on_train_batch_end changed the weights after .* made"):
        fit(module, tmp_path, saver(tmp_path, 2))
    assert module.privacy_spent().n_steps == 2
    fit(AtBatchEnd(), tmp_path)  # without such a checkpoint it is no matter
    fit(AtBatchStart(), tmp_path, saver(tmp_path, 2))


def test_a_hook_that_changes_nothing_may_come_after_a_checkpoint(tmp_path):
    class Looks(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            self.looked = [float(p.detach().sum()) for p in self.parameters()]

    run_fit(Looks(), tmp_path, saver(tmp_path, 1))


def test_another_process_does_not_make_the_steps_of_a_run(tmp_path, monkeypatch):
    module = Net()
    with pytest.raises(PrivacyError, match="is a copy of the one that makes the run's steps"):
        run_fit(module, tmp_path, Elsewhere(monkeypatch))
    assert module.privacy_spent().n_steps == 0


class Elsewhere(pl.Callback):
    """From the start of training on it is another process."""

    def __init__(self, monkeypatch: Any) -> None:
        self.monkeypatch = monkeypatch

    def on_train_batch_start(self, *args: Any) -> None:
        self.monkeypatch.setattr("opake_lightning.trainer._run.os.getpid", lambda: -1)
