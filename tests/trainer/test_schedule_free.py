"""Schedule-free trains y and shows x: in validation, tests, predictions, exports."""

from __future__ import annotations

import copy
import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from opake_lightning import OpakeDDP
from opake_lightning.optimizers import adamw, schedule_free, sgd
from tests.trainer.helpers import Points, Validated, make_loader, make_trainer, plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


class Net(Validated):
    """Keeps the weights that each kind of step saw."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def configure_optimizers(self):
        return schedule_free(sgd(lr=0.5), beta=0.7, warmup_steps=3)

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(("train", weights(self)))

    def validation_step(self, batch, batch_idx):
        self.seen.append(("validation", weights(self)))

    def test_step(self, batch, batch_idx):
        self.seen.append(("test", weights(self)))

    def predict_step(self, batch, batch_idx):
        self.seen.append(("predict", weights(self)))
        return self(batch[0])


def averaged(module):
    return {name: x.clone() for name, x in module._dp.published().items()}


def fit(path, module=None, *, ckpt=None, val=True, **kwargs):
    module = Net(plan()) if module is None else module
    every = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(path, **{"max_epochs": 2, "callbacks": [every], **kwargs})
    trainer.fit(module, make_loader(), DataLoader(Points(), 24) if val else None, ckpt_path=ckpt)
    return trainer, module


def test_validation_test_and_predict_see_the_average_and_training_does_not(tmp_path):
    trainer, module = fit(tmp_path, num_sanity_val_steps=0)
    kinds = [kind for kind, _ in module.seen]
    assert kinds == ["train"] * 4 + ["validation"] + ["train"] * 4 + ["validation"]
    assert not same(module.seen[3][1], module.seen[4][1])
    assert same(module.seen[-1][1], averaged(module))
    # Training went on from y, not from the x that was shown in between.
    _, alone = fit(tmp_path / "alone", val=False)
    trained = [seen for kind, seen in module.seen if kind == "train"]
    assert all(same(a, b) for a, (_, b) in zip(trained, alone.seen, strict=True))

    for run in (trainer.test, trainer.predict):
        run(module, DataLoader(Points(), 24))
        assert same(module.seen[-1][1], averaged(module))


@pytest.mark.parametrize("weights_only", [False, True])
def test_exports_hold_the_average(tmp_path, weights_only):
    saver = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1, save_weights_only=weights_only
    )
    _, module = fit(tmp_path, callbacks=[saver])
    assert same(weights(module), averaged(module))  # what state_dict() gives after fit
    loaded = Net.load_from_checkpoint(tmp_path / "step=6.ckpt", privacy=plan())
    _, short = fit(tmp_path / "short", max_steps=6)
    assert same(weights(loaded), averaged(short))
    assert not same(weights(loaded), short._dp.parked)


def test_resume_from_every_step_restores_both(tmp_path):
    _, whole = fit(tmp_path)
    for step in range(1, 8):
        _, resumed = fit(tmp_path / f"{step}", ckpt=tmp_path / f"step={step}.ckpt")
        assert same(weights(resumed), weights(whole))
        assert same(resumed._dp.parked, whole._dp.parked)
        assert resumed.privacy_spent() == whole.privacy_spent()


def test_a_validation_after_the_fit_leaves_the_weights_to_publish(tmp_path):
    trainer, module = fit(tmp_path, max_epochs=1)
    published = {name: w.clone() for name, w in weights(module).items()}
    trainer.validate(module, make_loader(shuffle=False), verbose=False)
    assert same(weights(module), published)


def test_a_second_fit_goes_on_from_the_weights_that_were_trained(tmp_path):
    _, module = fit(tmp_path, max_epochs=1)
    trained = {name: y.clone() for name, y in module._dp.parked.items()}
    module.seen.clear()
    fit(tmp_path / "second", module, max_epochs=1, num_sanity_val_steps=0)
    assert same(module.seen[0][1], trained)


def test_a_second_fit_from_other_weights_starts_from_them(tmp_path):
    _, module = fit(tmp_path, max_epochs=1)
    other = {name: torch.ones_like(p) for name, p in module.named_parameters()}
    module.load_state_dict(other)
    module.seen.clear()
    fit(tmp_path / "second", module, max_epochs=1, num_sanity_val_steps=0)
    assert same(module.seen[0][1], other)
    assert module._dp.state.step == 8  # while the noise goes on


def test_a_copy_shows_and_trains_the_same_weights(tmp_path):
    _, module = fit(tmp_path, max_epochs=1)
    twin = copy.deepcopy(module)
    assert same(weights(twin), weights(module))
    assert same(twin._dp.parked, module._dp.parked)


def test_learning_rate_monitor_shows_the_warmed_up_rate(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(
        tmp_path,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor(logging_interval="step")],
        max_steps=4,
        val=False,
    )
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    column = next(name for name in rows[0] if name.startswith("lr-"))
    rates = [float(row[column]) for row in rows if row[column]]
    assert rates == pytest.approx([0.5 / 3, 1.0 / 3, 0.5, 0.5])


def test_tied_weights_are_exported_under_both_names(tmp_path):
    class Tied(Net):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.again = self.net

        def configure_optimizers(self):
            return schedule_free(adamw(lr=0.1, betas=(0.0, 0.999)))

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4)
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[saver], strategy=OpakeDDP())
    module = Tied(plan())
    trainer.fit(module, make_loader())
    state = torch.load(tmp_path / "step=4.ckpt", weights_only=True)["state_dict"]
    for name, x in averaged(module).items():
        assert torch.equal(state[name], x)
        assert torch.equal(state[name.replace("net", "again", 1)], x)
