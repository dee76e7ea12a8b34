"""What a run shows: loggers, progress bars, the summary, the metrics."""

from __future__ import annotations

import csv
import logging
import math
import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from opake_lightning import DPModule, NonPrivate, PrivacyBudget
from opake_lightning.accounting import process
from opake_lightning.optimizers import sgd
from opake_lightning.scheduling import cosine_schedule, linear_schedule, with_warmup
from opake_lightning.trainer import report
from tests.trainer.helpers import (
    N_EXAMPLES,
    Net,
    epsilon_after,
    fit,
    make_loader,
    make_trainer,
    plan,
    saver,
)


class Ramp(DPModule):
    """The loss is w itself, every example is drawn at every step: the gradient is 1."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.moves = []

    def per_example_loss(self, batch):
        return 0.0 * batch[0].double().sum(1) + self.w

    def configure_privacy(self):
        return plan(noise_multiplier=0.0)

    def configure_optimizers(self):
        return sgd(self.schedule)

    def on_train_batch_start(self, batch, batch_idx):
        self.before = self.w.item()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.moves.append(self.w.item() - self.before)


@pytest.mark.parametrize(
    "schedule",
    [
        linear_schedule(0.5, 0.1, 8),
        with_warmup(cosine_schedule(0.5, 0.0, 10), 4),
        lambda step: 0.5 * 0.1**step,
    ],
    ids=["linear", "warm-up", "function"],
)
def test_logged_rate_is_the_applied_rate(tmp_path, schedule):
    module = Ramp(schedule)
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(
        tmp_path,
        logger=logger,
        log_every_n_steps=1,
        max_steps=10,
        max_epochs=-1,
        callbacks=[LearningRateMonitor(logging_interval="step")],
    )
    trainer.fit(module, make_loader(batch_size=N_EXAMPLES))
    logged = [float(row["lr-sgd"]) for row in rows(logger, "lr-sgd")]
    assert logged == pytest.approx([schedule(step) for step in range(10)], rel=1e-6)
    assert module.moves == pytest.approx([-rate for rate in logged], rel=1e-6, abs=1e-12)


# -- what is logged ------------------------------------------------------------------------------


def rows(logger, column):
    logger.save()
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    name = next(key for key in found[0] if key.startswith(column))
    return [row for row in found if row[name]]


def test_loggers_get_the_epsilon_of_their_step(tmp_path):
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    fit(tmp_path, logger=loggers, log_every_n_steps=3, max_epochs=3)
    written = rows(loggers[0], "privacy/epsilon")
    steps = [int(row["step"]) + 1 for row in written]
    assert {3, 6, 9, 12} <= set(steps)
    for row, n in zip(written, steps, strict=True):
        assert float(row["privacy/epsilon"]) == pytest.approx(epsilon_after(n), rel=1e-6)
        assert float(row["privacy/delta"]) == pytest.approx(1e-5)
    events = EventAccumulator(loggers[1].log_dir).Reload()
    for event in events.Scalars("privacy/epsilon"):
        assert event.value == pytest.approx(epsilon_after(event.step + 1), rel=1e-6)


class StopAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == self.step


class StopAfterEpoch(EarlyStopping):
    """Stops after the module's last hook of the epoch, as monitoring callbacks do."""

    def __init__(self, epoch):
        super().__init__("privacy/epsilon", check_on_train_epoch_end=True)
        self.epoch = epoch

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch == self.epoch


class Shown(pl.Callback):
    """What ε the bars show after each step."""

    def on_train_start(self, trainer, pl_module):
        self.epsilon = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        shown = trainer.callback_metrics["privacy/epsilon"].item()
        assert shown >= pl_module.privacy_spent().epsilon * (1 - 1e-6)
        self.epsilon.append(shown)


def test_epsilon_between_logged_steps_is_that_of_the_next_one(tmp_path):
    shown = Shown()
    fit(tmp_path, log_every_n_steps=5, max_epochs=3, callbacks=[shown])
    ends = [5] * 5 + [10] * 5 + [12] * 2
    assert shown.epsilon == pytest.approx([epsilon_after(n) for n in ends], rel=1e-6)


@pytest.mark.parametrize("every", [0, 10, 40])
def test_epsilon_is_evaluated_once_for_each_interval(tmp_path, monkeypatch, every):
    evaluated = []
    exact = process._epsilon

    def counted(totals, *args):
        evaluated.append(sum(count for _, count in totals))
        return exact(totals, *args)

    monkeypatch.setattr(process, "_epsilon", counted)
    fit(tmp_path, log_every_n_steps=every, max_epochs=15)  # 60 steps
    interval = every or 50
    assert set(evaluated) == {*range(interval, 60, interval), 60}
    assert len(evaluated) <= len(set(evaluated)) + 2  # once more before the fit, and as it ends


@pytest.mark.parametrize(
    "how",
    [
        {"max_epochs": 2},
        {"max_epochs": -1, "max_steps": 7},
        {"max_epochs": 40, "callbacks": [StopAt(37)]},
        {"max_epochs": 40, "callbacks": [StopAfterEpoch(1)]},
        {"max_epochs": 40, "callbacks": [PrivacyBudget(5.0, 1e-5)]},
        {"max_epochs": 2, "limit_train_batches": 3},
    ],
    ids=["epochs", "steps", "stopped", "stopped after the epoch", "budget", "limit"],
)
def test_metrics_after_fit_are_what_was_spent(tmp_path, how):
    callbacks, logger = [*how.get("callbacks", []), Shown()], CSVLogger(tmp_path)
    trainer, net = fit(tmp_path, **{**how, "callbacks": callbacks, "logger": logger})
    spent = net.privacy_spent()
    assert trainer.callback_metrics["privacy/epsilon"].item() == pytest.approx(spent.epsilon)
    assert trainer.callback_metrics["privacy/delta"].item() == pytest.approx(spent.delta)
    last = rows(logger, "privacy/epsilon")[-1]
    assert float(last["privacy/epsilon"]) == pytest.approx(spent.epsilon)
    assert int(last["step"]) == spent.n_steps - 1


def test_epsilon_is_not_shown_above_the_budget(tmp_path):
    shown = Shown()
    fit(tmp_path, max_epochs=-1, callbacks=[PrivacyBudget(5.0, 1e-5), shown])
    assert max(shown.epsilon) <= 5.0


def test_a_second_fit_shows_what_both_have_spent(tmp_path):
    shown = Shown()
    _, net = fit(tmp_path, max_epochs=5, callbacks=[shown])
    fit(tmp_path, net, max_epochs=1, callbacks=[shown])
    assert shown.epsilon == pytest.approx([epsilon_after(24)] * 4, rel=1e-6)


@pytest.mark.parametrize(
    ("bar", "shown"),
    [
        (TQDMProgressBar, "ε="),
        (RichProgressBar, "ε: "),
    ],
)
@pytest.mark.parametrize(
    ("privacy", "last"), [(plan(target_epsilon=3.0), 3.0), (plan(), epsilon_after(8))]
)
def test_bars_show_epsilon_in_one_line_of_80_columns(
    tmp_path, capsys, monkeypatch, bar, shown, privacy, last
):
    monkeypatch.setenv("COLUMNS", "80")
    logger = CSVLogger(tmp_path)  # whose version is in the bar, too
    fit(tmp_path, Net(privacy), enable_progress_bar=True, callbacks=[bar()], logger=logger)
    terminal = "".join(capsys.readouterr())
    told = f"{shown}{report._shown(last)}"
    lines = [line for line in re.split(r"[\r\n]", terminal) if told in line]
    assert lines, terminal[-500:]
    assert all("Epoch 1" in line and "4/4" in line for line in lines[-1:])
    assert "delta" not in terminal


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (2.9997, "3.00"),
        (3.0, "3.00"),
        (2.981, "2.99"),
        (1e-4, "0.01"),
        (0.0, "0.00"),
        (math.inf, "∞"),
    ],
)
def test_two_decimals_are_rounded_up(epsilon, shown):
    assert report._shown(epsilon) == shown


def test_the_last_line_tells_what_was_spent(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        _, net = fit(tmp_path, Net(plan(target_epsilon=3.0)), callbacks=[saver(tmp_path)])
        fit(tmp_path / "b", Net(plan()))
    told = re.findall(r"opake_lightning: private: (.*)", caplog.text)
    epsilon = net.privacy_spent().epsilon
    saved = tmp_path / "step=6.ckpt"
    assert told[0] == f"ε = {epsilon:.5g} of 3 at δ = 1e-05, 8 steps; checkpoint {saved}"
    assert told[1] == f"ε = {epsilon_after(8):.5g} at δ = 1e-05, 8 steps"


def test_the_first_lines_project_what_a_planned_run_will_spend(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        _, net = fit(tmp_path, Net(plan()))
        fit(tmp_path, net)
        fit(tmp_path, Net(plan()), max_epochs=-1, callbacks=[PrivacyBudget(5.0, 1e-5)])
    told = re.findall(r"^  (projected ε|ε)  +(.*)$", caplog.text, re.MULTILINE)
    first, second = (report._shown(epsilon_after(n)) for n in (8, 16))
    assert told == [
        ("projected ε", f"{first} at δ = 1e-05"),
        ("projected ε", f"{second} at δ = 1e-05"),
        ("ε", "grows with every step, stated at δ = 1e-05"),
    ]


def test_summary_names_the_numbers_of_the_run(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        _, net = fit(tmp_path, Net(plan(target_epsilon=3.0, clipping_norm=0.5)))
    assert "the training DataLoader now draws Poisson batches." in caplog.text
    lines = re.findall(r"^  (.+?)  +(.+)$", caplog.text, re.MULTILINE)
    sigma = net.privacy_spent().plan["noise_multiplier"]
    assert dict(lines) == {
        "sample rate q": "0.25",
        "expected batch": "6 of 24 examples",
        "noise multiplier σ": f"{sigma:.6g}",
        "clipping norm C": "0.5",
        "noise stddev σC/B": f"{sigma * 0.5 / 6:.6g}",
        "planned steps": "8",
        "target": "ε = 3 at δ = 1e-05",
    }


class Auxiliary(Net):
    def per_example_loss(self, batch):
        loss = super().per_example_loss(batch)
        return loss, {"hit": (self(batch[0]).argmax(1) == batch[1]).float()}


@pytest.mark.parametrize("privacy", [plan(), NonPrivate()], ids=["DPSGD", "NonPrivate"])
def test_nothing_without_noise_is_logged_unless_asked_for(tmp_path, privacy):
    trainer, _ = fit(tmp_path, Auxiliary(privacy), max_epochs=1)
    assert trainer.callback_metrics.keys() == {"privacy/epsilon", "privacy/delta"}

    module = Auxiliary(privacy)
    module.log_not_private = True
    trainer, _ = fit(tmp_path, module, max_epochs=1)
    shown = trainer.callback_metrics
    of_clipping = {"clip_fraction", "norm_p10", "norm_median", "norm_p90", "signal_to_noise"}
    asked = {"loss", "hit", "nonfinite_examples"} | (of_clipping if privacy.private else set())
    assert shown.keys() - {"privacy/epsilon", "privacy/delta"} == {
        f"not_private/{name}" for name in asked
    }
    assert 0.1 < shown["not_private/loss"] < 3.0
    if privacy.private:
        assert shown["not_private/norm_p10"] <= shown["not_private/norm_p90"] < 10


# -- the rest of the trainer ---------------------------------------------------------------------


def test_what_was_spent_at_another_delta(tmp_path):
    _, net = fit(tmp_path, Net())
    for delta in (1e-3, 1e-7):
        spent = net.privacy_spent(delta)
        assert (spent.delta, spent.epsilon) == (delta, net._dp.record.ledger.epsilon(delta))
    assert net.privacy_spent(1e-7).epsilon > net.privacy_spent().epsilon
    with pytest.raises(ValueError, match="delta must be"):
        net.privacy_spent(delta=0.0)
    with pytest.raises(ValueError, match="delta must be"):
        Net().privacy_spent(delta=1.5)
