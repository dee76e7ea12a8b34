"""Steps that only look like those which a resumed run would repeat."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from opake_lightning import CheckpointError
from opake_lightning.optimizers import adamw
from opake_lightning.trainer import _inputs
from tests.trainer.helpers import Net, made, plan, run_fit, saver

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


def steps(n: int) -> dict[str, Any]:
    return {"max_steps": n, "max_epochs": -1}


def test_all_rates_since_the_checkpoint_must_be_the_same(tmp_path, monkeypatch):
    """The last one is not enough: the gradients that lead to it follow from those before.

    As where schedules differ between the steps whose rates are compared with every checkpoint.
    """
    monkeypatch.setattr(_inputs, "_RATES", [])

    def slower() -> Net:
        return Net(optimizer=lambda: adamw(0.01))

    run_fit(Net(), tmp_path, saver(tmp_path, every=1), **steps(5))
    run_fit(slower(), tmp_path, ckpt=tmp_path / "step=5.ckpt", **steps(7))
    for net in (slower(), Net()):
        with pytest.raises(CheckpointError, match="made before, and came out otherwise"):
            run_fit(net, tmp_path, ckpt=tmp_path / "step=3.ckpt", **steps(7))
    # Those who made the last steps may make them again.
    run_fit(net := slower(), tmp_path, ckpt=tmp_path / "step=5.ckpt", **steps(7))
    assert net.privacy_spent().n_steps == 7


def test_steps_of_another_branch_that_cost_as_much_are_not_repeated(tmp_path):
    """A fork that made no step, and the run that it is from, go on from the same ledger."""

    def forked(how: Any = "refuse") -> Net:
        return Net(plan(clipping_norm=2.0, on_changed_plan=how))

    run_fit(Net(), tmp_path, saver(tmp_path, every=1), **steps(4))
    end = run_fit(forked("fork"), tmp_path, ckpt=tmp_path / "step=4.ckpt", **steps(4))
    end.save_checkpoint(tmp_path / "fork.ckpt")
    run_fit(net := Net(), tmp_path, ckpt=tmp_path / "step=4.ckpt", **steps(6))
    assert (made(net), net.privacy_spent().n_steps) == ([6], 6)
    # The run itself may be killed, and repeats its own.
    run_fit(net := Net(), tmp_path, ckpt=tmp_path / "step=4.ckpt", **steps(6))
    assert net.privacy_spent().n_steps == 6
    # The fork goes on in its own segment, and asks for no other.
    run_fit(net := forked(), tmp_path, ckpt=tmp_path / "fork.ckpt", **steps(6))
    assert sorted(made(net)) == [2, 6]


def test_a_key_that_was_saved_before_its_first_step_is_not_given_to_another_fit(tmp_path):
    class Saves(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "start.ckpt")
            raise RuntimeError("stopped")

    net, resumed = Net(), Net()
    with pytest.raises(RuntimeError, match="stopped"):
        run_fit(net, tmp_path, Saves())
    net.privacy = plan(clipping_norm=2.0)
    run_fit(net, tmp_path)
    run_fit(resumed, tmp_path, ckpt=tmp_path / "start.ckpt")
    assert resumed._dp.state.noise.key != net._dp.state.noise.key
    assert sorted(made(resumed)) == [8, 8]
