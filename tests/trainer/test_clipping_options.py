"""Every way to clip, through Trainer.fit: what it costs, what goes on, what is refused."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from opake_lightning.dpsgd.clipping import AdaptiveClipState, adaptive, per_group, per_layer
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.scheduling import linear_schedule
from tests.trainer.helpers import CLIPPING, Net, epsilon_after, fit, make_loader, make_trainer, plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]

ADAPTIVE = CLIPPING["adaptive"]
options = pytest.mark.parametrize("clipping", CLIPPING.values(), ids=CLIPPING.keys())


class Steps(Callback):
    """The clip state before the first step, and after every one."""

    def __init__(self) -> None:
        self.begin: Any = None
        self.clip: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin = pl_module._dp.state.clip

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.clip.append(pl_module._dp.state.clip)


def saved(path: Any, clipping: Any, **options: Any) -> Any:
    fit(
        path,
        Net(plan(clipping_norm=clipping, **options)),
        max_epochs=1,
        callbacks=[ModelCheckpoint(path, filename="a")],
    )
    return path / "a.ckpt"


def resumed(path: Any, clipping: Any, ckpt: Any, **options: Any) -> Net:
    net = Net(plan(clipping_norm=clipping, **options))
    make_trainer(path, max_epochs=2).fit(net, make_loader(), ckpt_path=ckpt)
    return net


@options
def test_a_run_costs_what_clipping_to_a_number_costs(tmp_path, clipping):
    _, net = fit(tmp_path, Net(plan(clipping_norm=clipping)))
    spent = net.privacy_spent()
    assert (spent.n_steps, spent.epsilon) == (8, epsilon_after(8))
    assert spent.plan["clipping_norm"] == net._dp.mechanism.fingerprint()["clipping_norm"]
    assert isinstance(spent.plan["clipping_norm"], str)


def test_the_norm_moves_from_step_to_step_and_may_be_seen(tmp_path):
    steps = Steps()
    trainer, _ = fit(tmp_path, Net(plan(clipping_norm=ADAPTIVE)), callbacks=[steps])
    norms = [clip.clipping_norm for clip in steps.clip]
    assert len(set(norms)) == 8
    assert norms[-1] != ADAPTIVE.clipping_norm
    shown = trainer.callback_metrics
    assert shown.keys() == {"privacy/epsilon", "privacy/delta", "privacy/clipping_norm"}
    assert shown["privacy/clipping_norm"] == pytest.approx(norms[-1])


@pytest.mark.parametrize("name", ["adaptive", "adaptive_groups", "clipping_schedule"])
def test_a_second_fit_goes_on_with_the_norm(tmp_path, name):
    net = Net(plan(clipping_norm=CLIPPING[name]))
    fit(tmp_path, net, max_epochs=1)
    before = net._dp.state.clip
    steps = Steps()
    fit(tmp_path, net, max_epochs=1, callbacks=[steps])
    assert [clip.step for clip in steps.clip] == [5, 6, 7, 8]
    if isinstance(before, AdaptiveClipState):
        _, whole = fit(tmp_path, Net(plan(clipping_norm=CLIPPING[name])), max_epochs=2)
        assert steps.begin.clipping_norms == before.clipping_norms
        assert steps.clip[-1].clipping_norms != before.clipping_norms
        assert len({clip.key for clip in [before, *steps.clip]}) == 5
        assert net._dp.mechanism.rule.bounds(steps.clip[-1]) == steps.clip[-1].clipping_norms
        assert whole._dp.state.clip.step == 8


def test_a_second_fit_with_another_clipping_starts_anew(tmp_path):
    net = Net(plan(clipping_norm=ADAPTIVE))
    fit(tmp_path, net, max_epochs=1)
    first = net._dp.state.clip
    net.privacy = plan(clipping_norm=replace(ADAPTIVE, learning_rate=1e-9))
    fit(tmp_path, net, max_epochs=1)
    second = net._dp.state.clip
    assert second.step == 4
    assert second.clipping_norm == pytest.approx(ADAPTIVE.clipping_norm)
    assert second.key != first.key  # the noise of the counts goes on with the run


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (1.0, ADAPTIVE, r"checkpoint 1.0, now 'adaptive\(0.1, target_quantile=0.5"),
        (ADAPTIVE, adaptive(0.2, count_noise_stddev=2.0), r"'adaptive\(0.1.*now 'adaptive\(0.2"),
        (ADAPTIVE, 1.0, "now 1.0"),
        (CLIPPING["groups"], per_group({"net.0": 1.0, "net.3": 0.5}), "net.0: 0.5.*net.0: 1.0"),
        (linear_schedule(1.0, 0.2, 6), linear_schedule(1.0, 0.2, 7), "transition_steps.* 6"),
    ],
)
def test_a_checkpoint_of_another_clipping_is_refused_or_forked(tmp_path, before, now, told):
    path = saved(tmp_path, before)
    with pytest.raises(CheckpointError, match=f"clipping_norm .*{told}"):
        resumed(tmp_path, now, path)
    net = resumed(tmp_path, now, path, on_changed_plan="fork")
    assert net.privacy_spent().n_steps == 8
    assert net._dp.state.clip.step == 4  # of the new clipping
    assert net._dp.mechanism.rule.bounds(net._dp.state.clip)


def test_a_fork_draws_other_noise_for_its_counts(tmp_path):
    path = saved(tmp_path, ADAPTIVE)
    on = resumed(tmp_path, ADAPTIVE, path)
    net = Net(plan(clipping_norm=ADAPTIVE, target_delta=1e-6, on_changed_plan="fork"))
    make_trainer(tmp_path, max_epochs=2).fit(net, make_loader(), ckpt_path=path)
    assert net._dp.state.clip.step == on._dp.state.clip.step == 8
    assert net._dp.state.clip.key != on._dp.state.clip.key
    assert net._dp.state.clip.clipping_norms != on._dp.state.clip.clipping_norms


def test_layers_of_the_module_itself(tmp_path):
    class Layered(Net):
        def configure_privacy(self) -> Any:
            return plan(clipping_norm=per_layer(1.0, self))

    _, net = fit(tmp_path, Layered())
    assert net._dp.mechanism.rule.groups.bounds == pytest.approx((0.5**0.5,) * 2)
    assert net._dp.mechanism.rule.groups.sensitivity == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("clipping", "message"),
    [
        (per_group({"net.0": 1.0}), r"no pattern matches 'net\.3\.bias', 'net\.3\.weight'"),
        (per_group({"net": 1.0, "head": 1.0}), "'head' matches no trained parameter"),
        (per_group({"net": 1.0, "net.0": 1.0}), "matches the patterns 'net' and"),
        (adaptive(), r"noise_multiplier=1 leaves nothing .*count_noise_stddev=0\.3"),
        (linear_schedule(1.0, 0.0, 7), "clipping_norm at step 7 must be a finite number > 0"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_spent(tmp_path, clipping, message):
    net = Net(plan(clipping_norm=clipping))
    with pytest.raises((PrivacyError, ValueError), match=message):
        fit(tmp_path, net)
    assert net.privacy_spent().n_steps == 0


def test_the_summary_says_how_it_clips_and_how_the_noise_begins(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        _, net = fit(tmp_path, Net(plan(clipping_norm=ADAPTIVE)), max_epochs=1)
    lines = dict(re.findall(r"^  (.+?)  +(.+)$", caplog.text, re.MULTILINE))
    assert lines["clipping norm C"].startswith("adaptive(0.1, target_quantile=0.5")
    sigma = net._dp.mechanism.gradient_noise_multiplier
    assert sigma > 1
    assert lines["noise stddev σC/B"] == f"{sigma * 0.1 / 6:.6g} at first"
