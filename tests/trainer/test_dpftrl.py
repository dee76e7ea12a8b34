"""Correlated noise through Trainer.fit: who is drawn, what is added, what each horizon costs."""

from __future__ import annotations

import copy
import logging
import math
import re
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from opake_lightning import PoissonLoader, PrivacyBudget
from opake_lightning.dpftrl.noise import (
    bisr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.plan import DPSGD, NonPrivate
from opake_lightning.random import key
from tests.trainer.cases_dpftrl import ALL, BAND, MECHANISMS, mf_plan
from tests.trainer.helpers import Draws, Net, Points, fit, make_loader, make_trainer, plan
from tests.trainer.test_second_fit import Flat, noise_of_fit, reused

LAMBDA = lambda_cgd_strategy(0.5)


def flat(**changes: Any) -> Net:
    """A module whose loss is flat: an update is nothing but noise."""
    return Flat(mf_plan(**changes), lambda: sgd(lr=1.0))


# -- one horizon ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("single_device", [False, True])
def test_batches_are_those_of_the_plan(name, single_device, tmp_path, caplog):
    draws, net = Draws(), Net(mf_plan(**MECHANISMS[name]))
    loader = PoissonLoader(Points(), 6) if single_device else make_loader()
    strategy = {"strategy": "auto"} if single_device else {}
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path, callbacks=[draws], **strategy).fit(net, loader)
    mechanism = net._dp.mechanism
    live, _ = net._dp.position()
    assert draws.seen == {t: mechanism.draw(live, t).tolist() for t in range(8)}
    log = f"training DataLoader now draws {net.privacy.drawing(24, 6)}."
    assert (log in caplog.text) is not single_device


@pytest.mark.parametrize("name", ALL)
def test_the_whole_horizon_is_spent_with_its_first_step(name, tmp_path):
    class Shown(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            seen.append(
                (float(trainer.callback_metrics["privacy/epsilon"]), module.privacy_spent())
            )

    seen: list[Any] = []
    _, net = fit(tmp_path, Net(mf_plan(**{**ALL[name], "target_delta": 0.01})), callbacks=[Shown()])
    assert [spent.n_steps for _, spent in seen] == list(range(1, 9))
    cost = net._dp.mechanism.event.epsilon_at(0.01)
    assert 0.1 < cost < 50
    for shown, spent in seen:
        assert spent.epsilon == cost
        assert shown == pytest.approx(cost)
    assert net.privacy_spent().plan == net._dp.mechanism.public()


def test_a_run_that_ends_early_has_cost_no_less(tmp_path):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = True

    _, stopped = fit(tmp_path, Net(mf_plan()), callbacks=[Stop()])
    _, whole = fit(tmp_path, Net(mf_plan()))
    assert stopped.privacy_spent().n_steps == 1
    assert stopped.privacy_spent().epsilon == whole.privacy_spent().epsilon


def test_the_horizon_is_what_the_trainer_will_make(tmp_path):
    for limits, steps in (
        ({"max_epochs": 3}, 12),
        ({"max_epochs": -1, "max_steps": 5}, 5),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
    ):
        _, net = fit(tmp_path, Net(mf_plan(strategy=LAMBDA)), **limits)
        ((run, done),) = net._dp.record.ledger.horizons
        assert run.n_steps == done == steps
        assert net._dp.mechanism.n_steps == steps


@pytest.mark.parametrize(
    ("strategy", "inverse"),
    [
        (identity_strategy(), [1.0]),
        (LAMBDA, [1.0, -0.5]),
        (bisr_strategy(3), [1.0, -0.5, -0.125]),
    ],
    ids=["identity", "lambda_cgd", "bisr"],
)
def test_the_noise_of_a_run_is_correlated_and_divided_by_the_expected_batch(
    strategy, inverse, tmp_path
):
    class Wide(Flat):
        def __init__(self) -> None:
            super().__init__(mf_plan(strategy=strategy, noise_multiplier=2.0), lambda: sgd(lr=1.0))
            self.net = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 4000))

    # σ C / B is 1/3 whatever is drawn; noise_of_fit gives it back in units of C.
    noise = torch.stack(noise_of_fit(Wide(), tmp_path)).double() / 2.0
    rows = np.zeros((4, 4))
    for lag, value in enumerate(inverse):
        rows += value * np.eye(4, k=-lag)
    error = noise @ noise.T / noise.shape[1] - torch.from_numpy(rows @ rows.T)
    assert error.abs().max() < 5 * 1.3 * math.sqrt(2 / noise.shape[1])


def test_every_part_of_the_plan_is_in_the_summary(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        _, net = fit(
            tmp_path,
            Net(mf_plan(strategy=LAMBDA, target_epsilon=3.0, second_moment_strategy=LAMBDA)),
        )
    lines = dict(re.findall(r"^  (.+?)  +(.+)$", caplog.text, re.MULTILINE))
    sigma = net.privacy_spent().plan["noise_multiplier"]
    # Half of the budget goes to the squares.
    stddev = sigma / 6 * math.sqrt(2)
    assert lines == {
        "strategy": "lambda_cgd(lam=0.5, normalized=False)",
        "sampling": "fixed_partition",
        "an example": "at most 2 times, 4 steps apart",
        "expected batch": "6 of 24 examples",
        "noise multiplier σ": f"{sigma:.6g}",
        "sensitivity S": f"{net._dp.mechanism.sensitivity:.6g}",
        "noise stddev σC/B": f"{stddev:.6g} at first, {stddev * 1.25**0.5:.6g} at the end",
        "horizon": "8 steps, paid for by the first",
        "squares": "aggregate, lambda_cgd(lam=0.5, normalized=False)",
        "clipping norm C": "1",
        "planned steps": "8",
        "target": "ε = 3 at δ = 1e-05",
    }


@pytest.mark.parametrize("name", ["band_mf", "pair_band_mf_identity"])
@pytest.mark.usefixtures("same_noise")
def test_diagnostics_know_the_noise_of_the_step(name, tmp_path):
    class Ratios(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            shown.append(dict(trainer.callback_metrics))

    class Told(Net):
        log_not_private = True

    shown: list[Any] = []
    first, second = (
        Told(mf_plan(**ALL[name], noise_multiplier=sigma), lambda: adamw(lr=0.0))
        for sigma in (1.0, 2.0)
    )
    for net in (first, second):
        fit(tmp_path, net, max_epochs=1, callbacks=[Ratios()])
    ratios = [float(metrics["not_private/signal_to_noise"]) for metrics in shown]
    assert ratios[:4] == pytest.approx([2 * r for r in ratios[4:]])
    assert {"not_private/loss", "not_private/clip_fraction"} <= shown[0].keys()


def test_signal_to_noise_follows_the_rows_of_the_inverse(tmp_path):
    class Same(Net):
        log_not_private = True

        def per_example_loss(self, batch: Any) -> torch.Tensor:
            # One gradient for all, so the signal is the number drawn.
            return 9.0 * self.net[0].bias.sum() + 0.0 * super().per_example_loss(batch)

    class Ratios(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            shown.append(float(trainer.callback_metrics["not_private/signal_to_noise"]))

    shown: list[float] = []
    net = Same(mf_plan(strategy=LAMBDA, sampling="fixed_order"), lambda: sgd(0.1))
    fit(tmp_path, net, max_epochs=1, callbacks=[Ratios()])
    size = sum(p.numel() for p in net.parameters())
    rows = [1.0, *[math.sqrt(1.25)] * 3]
    assert shown == pytest.approx([6 / (row * math.sqrt(size)) for row in rows], rel=1e-5)


@pytest.mark.parametrize("second", [None, "aggregate", "per_example"])
def test_microbatches_change_nothing(second, tmp_path):
    pair = {} if second is None else {"second_moment_strategy": BAND, "second_moment": second}
    nets = [Net(mf_plan(microbatch_size=size, **pair)) for size in (None, 1, 4)]
    for net in nets:
        fit(tmp_path, net)
    for other in nets[1:]:
        for a, b in zip(nets[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_squares_reach_the_optimizer(tmp_path):
    _, with_squares = fit(tmp_path, Net(mf_plan(second_moment_strategy=BAND)))
    moments = [v for v in with_squares._dp.state.optimizer.values() if hasattr(v, "signed")]
    assert [moment.signed for moment in moments] == [True]
    _, without = fit(tmp_path, Net(mf_plan()))
    assert with_squares.privacy_spent().epsilon == without.privacy_spent().epsilon


# -- budgets and targets --------------------------------------------------------------------------


def test_a_budget_allows_a_horizon_whole_or_not_at_all(tmp_path):
    _, free = fit(tmp_path, Net(mf_plan()))
    cost = free.privacy_spent().epsilon
    for budget, steps in ((cost, 8), (0.999 * cost, 0)):
        net = Net(mf_plan())
        trainer = make_trainer(tmp_path, callbacks=[PrivacyBudget(budget, 1e-5)], min_steps=3)
        trainer.fit(net, make_loader())
        assert net.privacy_spent().n_steps == steps


@pytest.mark.parametrize("before", [plan(noise_multiplier=2.0), mf_plan(noise_multiplier=4.0)])
@pytest.mark.parametrize("name", ["band_mf", "blt", "pair_lambda_cgd_blt"])
def test_a_target_counts_what_was_spent_before(before, name, tmp_path):
    net = Net(before)
    fit(tmp_path, net, max_epochs=1)
    assert 0 < net.privacy_spent().epsilon < 5
    net.privacy = mf_plan(target_epsilon=6.0, **ALL[name])
    fit(tmp_path, net)
    spent = net.privacy_spent()
    assert spent.n_steps == 12
    assert 0.99 * 6 < spent.epsilon <= 6


def test_dp_sgd_s_target_counts_a_horizon_before(tmp_path):
    net = Net(mf_plan(noise_multiplier=4.0))
    fit(tmp_path, net, max_epochs=1)
    net.privacy = plan(target_epsilon=6.0)
    fit(tmp_path, net)
    spent = net.privacy_spent()
    assert spent.n_steps == 12
    assert 0.99 * 6 < spent.epsilon <= 6
    alone = plan(target_epsilon=6.0)
    _, other = fit(tmp_path, Net(alone))
    assert other.privacy_spent().plan["noise_multiplier"] < spent.plan["noise_multiplier"]


# -- several fits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [BAND, LAMBDA, identity_strategy()], ids=lambda s: s.name)
def test_a_second_fit_is_a_new_horizon_with_noise_and_draws_of_its_own(strategy, tmp_path):
    net = flat(strategy=strategy)
    first = noise_of_fit(net, tmp_path)
    draws = [net._dp.mechanism.draw(key(7), t).tolist() for t in range(4)]
    once = net.privacy_spent().epsilon
    second = noise_of_fit(net, tmp_path)
    assert [net._dp.mechanism.draw(key(7), 4 + t).tolist() for t in range(4)] != draws
    assert not reused(first, second)
    state = net._dp.state.noise
    assert (state.step, state.start) == (8, 4)
    assert state.key != key(7)  # a checkpoint of the first fit may go on with that
    (one, a), (two, b) = net._dp.record.ledger.horizons
    assert (one.start, one.n_steps, a, two.start, two.n_steps, b) == (0, 4, 4, 4, 4, 4)
    assert net.privacy_spent().epsilon > once
    # Its noise does not lean on that of the horizon before: fresh buffers.
    z = torch.stack([*first, *second]).double()
    correlation = torch.corrcoef(z)[:4, 4:]
    assert correlation.abs().max() < 5 / math.sqrt(z.shape[1])


def test_a_horizon_cut_short_is_followed_by_a_new_one(tmp_path):
    net = Net(mf_plan())
    fit(tmp_path, net, max_epochs=2, max_steps=3)
    fit(tmp_path, net, callbacks=[StopAfter(2)])
    fit(tmp_path, net)
    runs = [(run.start, run.n_steps, done) for run, done in net._dp.record.ledger.horizons]
    assert runs == [(0, 3, 3), (3, 8, 2), (5, 8, 8)]
    assert net.privacy_spent().n_steps == 13


class StopAfter(pl.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.steps


@pytest.mark.parametrize("strategy", [identity_strategy(), LAMBDA], ids=lambda s: s.name)
def test_dp_sgd_before_and_after_does_not_use_its_noise(strategy, tmp_path):
    net = flat(strategy=strategy)
    fits = []
    for privacy in (plan(), net.privacy, plan(), net.privacy):
        net.privacy = privacy
        fits.append(noise_of_fit(net, tmp_path))
        assert net._dp.state.noise.step == 4 * len(fits)
    for i, one in enumerate(fits):
        assert not any(reused(one, other) for other in fits[:i])
    ledger = net._dp.record.ledger
    assert ledger.process.n_steps == 8
    assert [run.start for run, _ in ledger.horizons] == [4, 12]


@pytest.mark.parametrize("first", [NonPrivate(), mf_plan()], ids=["after", "before"])
def test_with_a_run_without_privacy_nothing_is_private(first, tmp_path):
    net = Net(first)
    fit(tmp_path, net, max_epochs=1)
    net.privacy = mf_plan() if first == NonPrivate() else NonPrivate()
    fit(tmp_path, net, max_epochs=1)
    assert net.privacy_spent().epsilon == math.inf
    assert net.privacy_spent().n_steps == 8


def test_weights_of_a_checkpoint_begin_a_new_horizon_with_a_new_key(tmp_path):
    net = flat()
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(net, make_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    first = noise_of_fit(flat(), tmp_path)
    loaded = Flat.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.privacy_spent() == net.privacy_spent()
    loaded.privacy, loaded.optimizer = net.privacy, lambda: sgd(lr=1.0)
    assert not reused(first, noise_of_fit(loaded, tmp_path))
    # Two horizons alike in all but where they begin, and both are counted.
    (one, _), (two, _) = loaded._dp.record.ledger.horizons
    assert (one.start, two.start, one.cost) == (0, 4, two.cost)
    state = loaded._dp.state.noise
    assert (state.step, state.start) == (8, 4)
    twin = Net(mf_plan())
    fit(tmp_path, twin, max_epochs=1)
    fit(tmp_path, twin, max_epochs=1)
    assert loaded.privacy_spent().epsilon == twin.privacy_spent().epsilon


def test_reset_privacy_forgets_the_horizon_and_its_key(tmp_path):
    net = flat()
    first = noise_of_fit(net, tmp_path)
    net.reset_privacy()
    assert (net.privacy_spent().n_steps, net.privacy_spent().epsilon) == (0, 0.0)
    assert not reused(first, noise_of_fit(net, tmp_path))
    assert [run.start for run, _ in net._dp.record.ledger.horizons] == [0]


def test_a_deep_copy_goes_on_with_a_horizon_of_its_own(tmp_path):
    net = flat()
    noise_of_fit(net, tmp_path)
    twin = copy.deepcopy(net)
    assert twin.privacy_spent() == net.privacy_spent()
    mine, its = noise_of_fit(net, tmp_path), noise_of_fit(twin, tmp_path)
    assert not reused(mine, its)
    assert twin.privacy_spent() == net.privacy_spent()


def test_a_copy_in_the_middle_of_a_run_does_not_touch_its_noise(tmp_path):
    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            trainer_of, module._trainer = module._trainer, None
            copies.append(copy.deepcopy(module))
            module._trainer = trainer_of

    copies: list[Net] = []
    _, watched = fit(tmp_path, Net(mf_plan()), callbacks=[Copies()])
    _, alone = fit(tmp_path, Net(mf_plan()))
    for a, b in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [twin.privacy_spent().n_steps for twin in copies] == list(range(1, 9))
    for twin in (copies[2], copies[5]):
        begun = twin.privacy_spent().n_steps
        fit(tmp_path, twin, max_epochs=1)
        assert [run.start for run, _ in twin._dp.record.ledger.horizons] == [0, begun]


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["band_mf", "lambda_cgd_bins", "pair_blt_bisr"])
def test_checkpoints_are_plain_and_exports_hold_no_secret(name, tmp_path):
    trainer, net = fit(tmp_path, Net(mf_plan(**ALL[name])))
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    whole = torch.load(tmp_path / "all.ckpt", weights_only=True)
    run = whole["optimizer_states"][0]["opake_lightning"]
    assert run["record"]["key"] == net._dp.record.key.hex()
    export = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    text = str({k: v for k, v in export.items() if k != "state_dict"})
    assert not any(secret.hex() in text for secret in (key(7), net._dp.record.key))
    assert "noise/" not in text
    loaded = Net.load_from_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert loaded.privacy_spent() == net.privacy_spent()


def test_dpftrl_is_named_where_plans_are(tmp_path):
    with pytest.raises(TypeError, match=r"DPSGD\(\.\.\.\), DPFTRL\(\.\.\.\) or NonPrivate\(\)"):
        fit(tmp_path, Net("DPFTRL"))
    assert isinstance(plan(), DPSGD)
