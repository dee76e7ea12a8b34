"""A resume that fails: whatever has been loaded by then is counted, and nothing goes on from it."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from opake_lightning import CheckpointError, PrivacyError
from opake_lightning.optimizers import adamw
from opake_lightning.random import key
from opake_lightning.trainer import _lifecycle
from tests.trainer.helpers import Net, made, make_loader, make_trainer, plan, run_fit, saver
from tests.trainer.test_journal import Dies, killed

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")


class Forgets(Net):
    """Takes away what a run is resumed from."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


class ForgetsInCallback(pl.Callback):
    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


class Larger(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(2, 2)


def weights_of(path: Any) -> Any:
    return torch.load(path, weights_only=True)["state_dict"]


def has(module: Net, weights: Any) -> bool:
    return all(torch.equal(p, weights[name]) for name, p in module.state_dict().items())


@pytest.mark.parametrize(
    ("make", "callbacks"), [(Forgets, []), (Net, [ForgetsInCallback()])], ids=["module", "callback"]
)
def test_a_checkpoint_that_is_not_resumed_is_no_start_of_a_run(make, callbacks, tmp_path):
    """Its steps would be made on the plan's own key, whatever the data."""
    ckpt, module = killed(tmp_path), make()
    trainer = make_trainer(tmp_path, callbacks=callbacks)
    with pytest.raises(CheckpointError, match="nothing has been resumed from the checkpoint"):
        trainer.fit(module, make_loader(), ckpt_path=ckpt)
    assert module.privacy_spent().n_steps == 3  # of the weights that it has
    with pytest.raises(CheckpointError, match="no checkpoint is made here: nothing has been res"):
        trainer.save_checkpoint(tmp_path / "odd.ckpt")
    run_fit(module, tmp_path / "b", max_steps=1)
    assert module.privacy_spent().n_steps == 5 + 1


def fails_to_configure() -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("past", [False, True], ids=["new", "fitted"])
@pytest.mark.parametrize(
    ("change", "loader", "error"),
    [
        ({"optimizer": fails_to_configure}, make_loader(), ZeroDivisionError),
        ({}, make_loader(batch_size=100), PrivacyError),
    ],
    ids=["optimizer", "loader"],
)
def test_weights_that_were_loaded_before_it_failed_are_counted(
    past, change, loader, error, tmp_path
):
    ckpt, module = killed(tmp_path), Net(plan(key=key(8)))
    if past:
        run_fit(module, tmp_path / "a", max_steps=2)
    vars(module).update(change)
    with pytest.raises(error):
        run_fit(module, tmp_path, ckpt=ckpt, loader=loader)
    assert has(module, weights_of(ckpt))
    spent = module.privacy_spent()
    assert (spent.n_steps, spent.complete) == (3 + 2 * past, True)
    module.optimizer = partial(adamw, lr=0.05)
    run_fit(module, tmp_path / "b", max_steps=1)
    assert module.privacy_spent().n_steps == 5 + 2 * past + 1  # two were made after it was saved


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupt_leaves_the_module_as_it_was(error, tmp_path, monkeypatch):
    ckpt, module = killed(tmp_path), Net(plan(key=key(8)))
    run_fit(module, tmp_path / "a", max_steps=2)
    before = {name: p.clone() for name, p in module.state_dict().items()}

    def interrupted(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(_lifecycle, "compared", interrupted)
    with pytest.raises((error, SystemExit)):
        run_fit(module, tmp_path, ckpt=ckpt)
    assert has(module, before)
    assert module.privacy_spent().n_steps == 2


def test_weights_of_which_only_some_fit_are_taken_back(tmp_path):
    ckpt, module = killed(tmp_path), Larger()
    before = {name: p.clone() for name, p in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        run_fit(module, tmp_path, ckpt=ckpt)
    assert has(module, before)
    assert module.privacy_spent().n_steps == 0


def test_what_is_known_of_one_run_is_not_another_ones(tmp_path):
    """A module that was loaded from one run, and resumes another, has spent what that one has."""
    one = killed(tmp_path / "a", after=7)
    other = killed(tmp_path / "b", after=4, net=Net(plan(key=key(5))))
    module = Net.load_from_checkpoint(one, privacy=plan(key=key(5)))
    run_fit(module, tmp_path / "b", ckpt=other, max_steps=4)
    assert made(module) == [4]
    run_fit(module, tmp_path / "c", max_steps=1)
    assert module.privacy_spent().n_steps == 5


def test_a_run_goes_back_to_a_step_of_its_own(tmp_path):
    class GoesBack(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            (optimizer,) = trainer.optimizers
            if trainer.global_step == 2:
                self.kept = (
                    optimizer.state_dict(),
                    {name: p.clone() for name, p in module.state_dict().items()},
                )
            if trainer.global_step == 4 and module._dp.record.step == 4:
                module.load_state_dict(self.kept[1])
                optimizer.load_state_dict(self.kept[0])
                assert module._dp.record.step == 2

    module = Net()
    run_fit(module, tmp_path, GoesBack(), max_epochs=1)
    spent = module.privacy_spent()
    assert (spent.n_steps, spent.complete) == (4, True)


def test_the_past_is_not_given_up_in_the_middle_of_a_fit(tmp_path):
    class Resets(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.reset_privacy()

    module = Net()
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"reset_privacy\(\) during a fit"):
            run_fit(module, tmp_path, Resets())
        assert module.privacy_spent().n_steps == 1
        module.reset_privacy()
        assert module.privacy_spent().n_steps == 0


# -- weights that come from elsewhere -------------------------------------------------------------


def test_other_weights_in_a_module_that_has_a_past_may_have_cost_more(tmp_path):
    costly, module = Net(), Net()
    run_fit(costly, tmp_path, max_epochs=4)
    run_fit(module, tmp_path, max_steps=1)
    module.load_state_dict(costly.state_dict())
    assert not module.privacy_spent().complete


def test_the_best_of_ones_own_weights_cost_what_is_counted(tmp_path):
    module = Net()
    run_fit(module, tmp_path, max_steps=1)
    best = {name: p.clone() for name, p in module.state_dict().items()}
    trainer = run_fit(module, tmp_path, max_steps=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    for weights in (best, weights_of(tmp_path / "a.ckpt")):
        module.load_state_dict(weights)
        assert module.privacy_spent().complete
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({**best, "net.0.weight": torch.zeros(2, 2)})
    assert not module.privacy_spent().complete  # torch has loaded all others


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("way", ["load_from_checkpoint", "test"])
def test_what_came_after_a_checkpoint_is_found_however_it_is_loaded(way, linked, tmp_path):
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            pass

    ckpt = killed(tmp_path / "run")
    if linked:
        (tmp_path / "best.ckpt").symlink_to(ckpt)
        ckpt = tmp_path / "best.ckpt"
    if way == "test":
        module = Tested()
        trainer = make_trainer(tmp_path / "test")
        trainer.test(module, make_loader(shuffle=False), ckpt_path=ckpt, verbose=False)
    else:
        module = Tested.load_from_checkpoint(ckpt)
    spent = module.privacy_spent()
    assert (spent.n_steps, spent.complete) == (3, True)
    run_fit(module, tmp_path / "b", max_steps=1)
    assert module.privacy_spent().n_steps == 6


def test_a_fork_of_the_process_records_in_a_file_of_its_own(tmp_path, monkeypatch):
    """Both would write over what the other one has released."""
    module = Net(plan(on_changed_plan="fork"))
    with pytest.raises(RuntimeError, match="killed"):
        run_fit(module, tmp_path, saver(tmp_path), Dies(5))
    monkeypatch.setattr("os.getpid", lambda: -1)
    module.optimizer = partial(adamw, lr=0.01)
    run_fit(module, tmp_path, ckpt=tmp_path / "step=3.ckpt")
    assert len(list(tmp_path.glob("*.steps"))) == 2
    assert made(module) == [5, 5]
