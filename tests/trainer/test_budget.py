"""PrivacyBudget stops before the step that would overspend, whatever else wants to go on."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from opake_lightning import PrivacyBudget, PrivacyError
from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.plan import NonPrivate
from opake_lightning.random import key
from opake_lightning.trainer._record import RunRecord
from tests.trainer.helpers import (
    BATCH_SIZE,
    N_EXAMPLES,
    Net,
    assert_same,
    make_loader,
    make_trainer,
    plan,
    snapshot,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]

EVENT = GaussianEvent(1.0, BATCH_SIZE / N_EXAMPLES)


def costs(n_steps: int, delta: float = 1e-5) -> float:
    return Ledger().spend(EVENT, n_steps).epsilon(delta)


def fit(path: Path, *callbacks: Any, net: Net | None = None, ckpt: Any = None, **trainer: Any):
    net = net or Net()
    fitter = make_trainer(path, callbacks=list(callbacks), **trainer)
    fitter.fit(net, make_loader(), ckpt_path=ckpt)
    return net, fitter


@pytest.mark.parametrize(
    "limits",
    [
        {"max_epochs": -1},
        {"max_epochs": 50},
        {"max_epochs": -1, "min_epochs": 3},
        {"max_epochs": -1, "min_steps": 30},
        {"max_epochs": -1, "min_epochs": 3, "min_steps": 30},
        {"max_epochs": -1, "max_steps": 40},
    ],
)
@pytest.mark.parametrize("n_steps", [1, 4, 6])
def test_stops_after_the_last_step_that_fits(n_steps, limits, tmp_path):
    # Halfway to the next step's cost: the budget is not met exactly, as it never is in practice.
    budget = (costs(n_steps) + costs(n_steps + 1)) / 2
    net, trainer = fit(tmp_path, PrivacyBudget(budget, delta=1e-5), **limits)
    spent = net.privacy_spent()
    assert spent.n_steps == trainer.global_step == n_steps
    assert spent.n_steps == Ledger().steps_within(EVENT, budget, 1e-5)
    assert spent.epsilon <= budget < costs(n_steps + 1)


def test_a_budget_that_is_met_exactly_is_not_overspent(tmp_path):
    net, _ = fit(tmp_path, PrivacyBudget(costs(5), delta=1e-5), max_epochs=-1)
    assert net.privacy_spent().n_steps == 5


def test_the_budgets_delta_counts_not_the_plans(tmp_path):
    net, _ = fit(tmp_path, PrivacyBudget(costs(5, 1e-3), delta=1e-3), max_epochs=-1)
    assert net.privacy_spent().n_steps == 5
    assert net.privacy_spent().epsilon == costs(5, 1e-5) > costs(5, 1e-3)


def test_a_run_that_ends_earlier_is_left_alone(tmp_path):
    net, _ = fit(tmp_path, PrivacyBudget(costs(20), delta=1e-5), max_epochs=2)
    assert net.privacy_spent().n_steps == 8


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "min_steps": 20}])
def test_no_step_is_made_when_all_is_spent(limits, tmp_path):
    net, _ = fit(tmp_path, max_epochs=1)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    _, trainer = fit(tmp_path, PrivacyBudget(costs(4), delta=1e-5), net=net, **limits)
    assert trainer.global_step == 0
    assert net.privacy_spent().n_steps == 4
    torch.testing.assert_close(dict(net.state_dict()), weights, rtol=0, atol=0)


def test_not_even_a_first_step_fits(tmp_path):
    net, trainer = fit(tmp_path, PrivacyBudget(0.01, delta=1e-5), max_epochs=-1)
    assert net.privacy_spent().n_steps == trainer.global_step == 0


def test_noise_of_zero_spends_any_budget_at_once(tmp_path):
    budget = PrivacyBudget(100.0, delta=1e-5)
    for privacy in (plan(noise_multiplier=0.0), NonPrivate()):
        net, _ = fit(tmp_path, budget, net=Net(privacy), max_epochs=2)
        assert net.privacy_spent().n_steps == 0


def test_a_second_fit_counts_what_the_first_spent(tmp_path):
    net, _ = fit(tmp_path, max_epochs=1)
    fit(tmp_path, PrivacyBudget(costs(7), delta=1e-5), net=net, max_epochs=-1)
    assert net.privacy_spent().n_steps == 7


def test_whoever_keeps_the_run_going_meets_an_error(tmp_path):
    class GoesOn(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = False

    net = Net()
    with pytest.raises(PrivacyError, match="3 steps are allowed and have been made"):
        fit(tmp_path, PrivacyBudget(costs(3), delta=1e-5), GoesOn(), net=net)
    assert net.privacy_spent().n_steps == 3


def test_a_stopped_run_stops_again_at_once_and_a_larger_budget_goes_on(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="stop", save_on_train_epoch_end=True)
    fit(tmp_path, PrivacyBudget(costs(6), delta=1e-5), save, max_epochs=-1)
    ckpt = tmp_path / "stop.ckpt"
    net, trainer = fit(tmp_path, PrivacyBudget(costs(6), delta=1e-5), ckpt=ckpt, max_epochs=-1)
    assert net.privacy_spent().n_steps == trainer.global_step == 6
    net, trainer = fit(tmp_path, PrivacyBudget(costs(9), delta=1e-5), ckpt=ckpt, max_epochs=-1)
    assert net.privacy_spent().n_steps == trainer.global_step == 9
    whole, other = fit(tmp_path, PrivacyBudget(costs(9), delta=1e-5), max_epochs=-1)
    assert_same(snapshot(net, trainer), snapshot(whole, other))


def test_the_trainer_gets_its_minimum_back(tmp_path):
    """A later fit without the budget must not find its min_steps gone."""
    _, trainer = fit(tmp_path, PrivacyBudget(costs(3), delta=1e-5), min_steps=20, min_epochs=2)
    assert (trainer.min_steps, trainer.min_epochs) == (20, 2)


def test_stops_even_if_another_callback_wanted_to_stop_before(tmp_path):
    """Lightning ignores that wish until min_steps; the budget does not wait for it."""

    class WantsToStop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = True

    budget = PrivacyBudget(costs(3), delta=1e-5)
    net, _ = fit(tmp_path, WantsToStop(), budget, min_steps=20, max_epochs=-1)
    assert net.privacy_spent().n_steps == 3


def test_only_a_dp_module_has_a_budget(tmp_path):
    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = make_trainer(tmp_path, strategy="auto", callbacks=[PrivacyBudget(1.0, 1e-5)])
    with pytest.raises(PrivacyError, match="needs a DPModule, got Plain"):
        trainer.fit(Plain(), make_loader())


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
def test_a_budget_is_positive(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        PrivacyBudget(epsilon, delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_delta_is_a_probability(delta):
    with pytest.raises(ValueError, match="delta"):
        PrivacyBudget(1.0, delta=delta)


def test_a_segment_that_another_hook_opens_has_an_end_of_its_own():
    """Its steps may cost more than those that the budget was counted in."""

    def run(key_number: int, sigma: float) -> Any:
        record = RunRecord("f00", key(key_number))
        event = GaussianEvent(sigma, 1.0)
        return SimpleNamespace(record=record, mechanism=SimpleNamespace(event=event))

    budget, module = PrivacyBudget(5.0, 1e-5), SimpleNamespace(_dp=run(1, 8.0))
    budget.on_train_start(None, module)
    allowed = budget.last_step
    module._dp = run(2, 2.0)
    budget.on_train_batch_start(None, module, None, 0)
    assert budget.last_step == Ledger().steps_within(GaussianEvent(2.0, 1.0), 5.0, 1e-5) < allowed
