"""What DP-SGD refuses is refused with correlated noise too, and some things more."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchopt

from opake_lightning import PrivacyBudget, PrivacyError
from opake_lightning.dpftrl.noise import band_mf_strategy, identity_strategy, lambda_cgd_strategy
from opake_lightning.dpsgd.clipping import per_group
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.scheduling import linear_schedule
from tests.trainer import helpers, test_refusals
from tests.trainer.cases_dpftrl import BAND, mf_plan
from tests.trainer.helpers import Net, fit, make_loader, make_trainer
from tests.trainer.test_refusals import refused

# Every test of test_refusals.py runs again here, with the other plan.
OTHERWISE = {
    "test_open_ended_run_with_a_target",
    "test_strategies_that_move_raw_gradients",  # its strategies can be used once
}
globals().update(
    {
        name: test
        for name, test in vars(test_refusals).items()
        if name.startswith("test_") and name not in OTHERWISE
    }
)


@pytest.fixture(autouse=True)
def _the_plan_is_dpftrl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (helpers, test_refusals):
        monkeypatch.setattr(module, "plan", mf_plan)


def test_the_plan_of_these_tests_is_the_other_one():
    assert type(Net().privacy).__name__ == "DPFTRL"


def test_strategies_that_move_raw_gradients_(tmp_path):
    refused(tmp_path, "strategy DDPStrategy .*raw gradients", strategy="ddp")


@pytest.mark.parametrize("options", [{}, {"target_epsilon": 3.0}])
def test_open_ended_run(options, tmp_path):
    refused(
        tmp_path,
        "DPFTRL correlates noise over a run of known length.*max_steps",
        module=Net(mf_plan(**options)),
        max_epochs=-1,
        callbacks=[PrivacyBudget(epsilon=100.0, delta=1e-5)],
    )


def test_a_finished_trainer_has_no_horizon(tmp_path):
    net = Net()
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(net, make_loader())
    with pytest.raises(PrivacyError, match=r"no step left to make.*max_epochs=1"):
        trainer.fit(net, make_loader())
    assert net.privacy_spent().n_steps == 4


@pytest.mark.parametrize(
    ("plan", "optimizer", "message"),
    [
        ({"strategy": band_mf_strategy(5)}, None, r"5 bands.* at most 4 of 24.*at most 4 bands"),
        ({"clipping_norm": per_group({"net.0": 1.0})}, None, "no pattern matches"),
        ({"clipping_norm": linear_schedule(1.0, 0.0, 7)}, None, "clipping_norm at step 7"),
        (
            {"second_moment_strategy": BAND},
            lambda: sgd(0.1),
            "sgd .*makes no use of squares.*take adam",
        ),
        (
            {"second_moment_strategy": BAND},
            lambda: adamw(0.1, noise_bias_correction=True),
            "set noise_bias_correction=False",
        ),
        (
            {"second_moment_strategy": BAND},
            lambda: torchopt.sgd(lr=0.1),
            "not one of this library's.*private second moment",
        ),
    ],
)
def test_what_does_not_go_with_the_plan(plan, optimizer, message, tmp_path):
    net = Net(mf_plan(**plan), optimizer)
    refused(tmp_path, message, module=net, error=(PrivacyError, ValueError))


class OneMoreEpoch(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        trainer.fit_loop.max_epochs = 3


@pytest.mark.parametrize(
    "strategy", [BAND, lambda_cgd_strategy(0.5), identity_strategy()], ids=lambda s: s.name
)
@pytest.mark.parametrize("sigma", [1.0, 0.0])
def test_no_step_goes_beyond_the_horizon(strategy, sigma, tmp_path):
    # Without noise too: the accounting is of a horizon, whatever it comes to.
    net = Net(mf_plan(strategy=strategy, noise_multiplier=sigma))
    trainer = make_trainer(tmp_path, callbacks=[OneMoreEpoch()])
    with pytest.raises(PrivacyError, match="8 steps, and they have been made"):
        trainer.fit(net, make_loader())
    assert net.privacy_spent().n_steps == trainer.global_step == 8
    _, whole = fit(tmp_path, Net(mf_plan(strategy=strategy, noise_multiplier=sigma)))
    for got, want in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want)
    assert net.privacy_spent() == whole.privacy_spent()
