"""A run with correlated noise that is interrupted and resumed equals one that was not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from opake_lightning import CheckpointError, PrivacyError
from opake_lightning.dpftrl.noise import (
    MFNoise,
    band_mf_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.optimizers import adamw
from opake_lightning.scheduling import linear_schedule
from opake_lightning.serialization import state_dict
from tests.trainer.cases_dpftrl import ALL, BAND, mf_plan
from tests.trainer.helpers import (
    Net,
    Points,
    assert_same,
    make_loader,
    make_trainer,
    plan,
    saver,
    snapshot,
)
from tests.trainer.test_resume import Case, check_resume, every_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]


@pytest.mark.parametrize("name", ALL)
def test_resume_from_every_step(name, tmp_path):
    case = Case(net=lambda: Net(mf_plan(**ALL[name]), dropout=0.5))
    check_resume(case, tmp_path, list(range(1, 9)))


OPTIONS: dict[str, dict[str, Any]] = {
    "target": {"target_epsilon": 4.0},
    "target_of_a_pair": {"target_epsilon": 4.0, "second_moment_strategy": BAND},
    "schedule": {"clipping_norm": linear_schedule(1.0, 0.2, transition_steps=6)},
    "no_noise": {"noise_multiplier": 0.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_resume_with_other_options(name, tmp_path):
    case = Case(net=lambda: Net(mf_plan(**OPTIONS[name])), single_device=name == "schedule")
    check_resume(case, tmp_path, [3, 5])


def test_resume_by_steps_and_with_workers(tmp_path):
    case = Case(net=lambda: Net(mf_plan()), max_epochs=-1, max_steps=6, loader={"num_workers": 1})
    check_resume(case, tmp_path, [1, 4, 5], n_steps=6)


def saved(path: Any, privacy: Any, **trainer: Any) -> Any:
    """The checkpoint of a run that ended after four steps of eight."""

    class Ends(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("killed")

    fitter = make_trainer(path, callbacks=[every_step(path), Ends()], **trainer)
    with pytest.raises(RuntimeError, match="killed"):
        fitter.fit(Net(privacy), make_loader())
    return path / "step=4.ckpt"


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # field: (changed plan, changed loader, changed trainer)
    "strategy": ({"strategy": band_mf_strategy(3, momentum=0.5)}, {}, {}),
    "sampling": ({"sampling": "fixed_partition"}, {}, {}),
    "planned_steps": ({}, {}, {"max_epochs": 3}),
    "second_moment_strategy": ({"second_moment_strategy": BAND}, {}, {}),
    "n_examples": ({}, {"dataset": Points(25)}, {}),
    "batch_size": ({}, {"batch_size": 8}, {}),
    "noise_multiplier": ({"noise_multiplier": 1.5}, {}, {}),
    "clipping_norm": ({"clipping_norm": 2.0}, {}, {}),
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_plan_is_refused_by_name(field, tmp_path):
    changed, loader, trainer = CHANGES[field]
    path = saved(tmp_path, mf_plan())
    net = Net(mf_plan(**changed))
    with pytest.raises(CheckpointError, match=rf"these differ: (\w+ \(.*\), )*{field} \("):
        make_trainer(tmp_path, **trainer).fit(net, make_loader(**loader), ckpt_path=path)
    assert net.privacy_spent().n_steps == 0


def test_the_form_of_the_squares_is_part_of_the_plan(tmp_path):
    path = saved(tmp_path, mf_plan(second_moment_strategy=BAND))
    net = Net(mf_plan(second_moment_strategy=BAND, second_moment="per_example"))
    with pytest.raises(CheckpointError, match=r"second_moment .*'aggregate', now 'per_example'"):
        make_trainer(tmp_path).fit(net, make_loader(), ckpt_path=path)


@pytest.mark.parametrize("field", CHANGES)
def test_a_fork_begins_a_new_horizon_and_counts_the_old_one_whole(field, tmp_path):
    changed, loader, trainer = CHANGES[field]
    path = saved(tmp_path, mf_plan())
    net = Net(mf_plan(**changed, on_changed_plan="fork"))
    fitter = make_trainer(tmp_path, **trainer)
    fitter.fit(net, make_loader(**loader), ckpt_path=path)
    (old, before), (new, after) = net._dp.record.ledger.horizons
    assert (old.n_steps, old.start, before) == (8, 0, 4)
    assert new.start == 4
    # Lightning is done early if the epoch that it comes back to has become longer.
    assert after == fitter.global_step - 4 == (1 if field == "n_examples" else new.n_steps)
    state = net._dp.state.noise
    assert (state.step, state.start) == (fitter.global_step, 4)
    assert state.key != plan().key
    both = net.privacy_spent().epsilon
    assert both > max(old.epsilon_at(1e-5), new.epsilon_at(1e-5))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (plan(), mf_plan(on_changed_plan="fork")),
        (mf_plan(), plan(on_changed_plan="fork")),
        (
            mf_plan(second_moment_strategy=identity_strategy()),
            mf_plan(strategy=lambda_cgd_strategy(0.5), on_changed_plan="fork"),
        ),
    ],
    ids=["to_dpftrl", "to_dpsgd", "from_a_pair"],
)
def test_a_fork_to_another_mechanism(before, now, tmp_path):
    path = saved(tmp_path, before)
    with pytest.raises(CheckpointError, match="these differ"):
        make_trainer(tmp_path).fit(
            Net(replace(now, on_changed_plan="refuse")), make_loader(), ckpt_path=path
        )
    net = Net(now)
    make_trainer(tmp_path).fit(net, make_loader(), ckpt_path=path)
    assert net.privacy_spent().n_steps == 8
    assert net._dp.state.noise.step == 8
    ledger = net._dp.record.ledger
    assert ledger.process.n_steps + sum(done for _, done in ledger.horizons) == 8
    assert len(ledger.horizons) == sum(hasattr(p, "strategy") for p in (before, now))


def test_a_fork_meets_its_target_with_what_is_left(tmp_path):
    path = saved(tmp_path, mf_plan(noise_multiplier=4.0))
    net = Net(mf_plan(target_epsilon=6.0, on_changed_plan="fork"))
    make_trainer(tmp_path).fit(net, make_loader(), ckpt_path=path)
    spent = net.privacy_spent()
    assert spent.n_steps == 8
    assert 0.99 * 6 < spent.epsilon <= 6


@pytest.mark.parametrize("options", [{"noise_multiplier": 2.0}, {"target_epsilon": 9.0}])
def test_a_fork_is_resumed_as_itself(options, tmp_path):
    path = saved(tmp_path, mf_plan(noise_multiplier=4.0))
    (tmp_path / "fork").mkdir()

    def changed() -> Net:
        return Net(mf_plan(**options, on_changed_plan="fork"))

    whole = changed()
    a = make_trainer(tmp_path, callbacks=[every_step(tmp_path / "fork")])
    a.fit(whole, make_loader(), ckpt_path=path)
    assert len(whole._dp.record.ledger.horizons) == 2
    for step in (5, 7):
        resumed = changed()
        b = make_trainer(tmp_path)
        b.fit(resumed, make_loader(), ckpt_path=tmp_path / "fork" / f"step={step}.ckpt")
        assert_same(snapshot(resumed, b), snapshot(whole, a))


def test_a_checkpoint_of_a_second_horizon_resumes(tmp_path):
    def twice(callbacks: Any = (), ckpt: Any = None) -> dict[str, Any]:
        net = Net(mf_plan(), lambda: adamw(0.05))
        if ckpt is None:
            make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
        trainer = make_trainer(tmp_path, callbacks=list(callbacks))
        trainer.fit(net, make_loader(), ckpt_path=ckpt)
        return snapshot(net, trainer)

    whole = twice([saver(tmp_path)])
    assert_same(twice(ckpt=tmp_path / "step=6.ckpt"), whole)
    save = saver(tmp_path, filename="again-{step}")
    assert_same(twice([save], ckpt=tmp_path / "step=3.ckpt"), whole)
    assert_same(twice(ckpt=tmp_path / "again-step=6.ckpt"), whole)
    assert whole["n_steps"] == 12
    assert (whole["noise/start"], whole["noise/step"]) == (4, 12)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("noise/start", lambda v: v + 1, r"has start 1, but .* has 0"),
        ("noise/strategy", lambda v: v.replace("3", "2"), "has strategy 'band_mf"),
        ("noise/buffers/gradient/net.0.weight", None, "noise/buffers/gradient/net.0.weight"),
        ("noise/square_share", None, "noise/square_share"),
        ("noise/step", lambda v: v - 1, "counts 4 steps, but .* noise/step 3"),
    ],
)
def test_a_damaged_past_is_refused(path, change, message, tmp_path):
    file = saved(tmp_path, mf_plan())
    checkpoint = torch.load(file, weights_only=True)
    state = checkpoint["optimizer_states"][0]["opake_lightning"]["state"]
    if change is None:
        del state[path]
    else:
        state[path] = change(state[path])
    torch.save(checkpoint, tmp_path / "damaged.ckpt")
    net = Net(mf_plan())
    with pytest.raises(CheckpointError, match=message):
        make_trainer(tmp_path).fit(net, make_loader(), ckpt_path=tmp_path / "damaged.ckpt")
    assert net.privacy_spent().n_steps == 0


def test_a_resumed_run_ends_with_its_horizon(tmp_path):
    """Resuming with other limits of the trainer must not go past what the noise was made for."""
    path = saved(tmp_path, mf_plan())
    net = Net(mf_plan())
    with pytest.raises((CheckpointError, PrivacyError), match="planned_steps"):
        make_trainer(tmp_path, max_epochs=-1, max_steps=20).fit(net, make_loader(), ckpt_path=path)


@pytest.mark.parametrize("strategy", [BAND, lambda_cgd_strategy(0.5)], ids=lambda s: s.name)
def test_noise_that_was_cut_short_is_neither_saved_nor_gone_on_with(
    strategy, tmp_path, monkeypatch
):
    """A half-updated memory would correlate the next steps' noise in another way."""
    original, calls = MFNoise._release, []

    def cut_short(*args: Any, **kwargs: Any) -> Any:
        calls.append(original(*args, **kwargs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(MFNoise, "_release", cut_short)
    net = Net(mf_plan(strategy=strategy))
    trainer = make_trainer(tmp_path, callbacks=[every_step(tmp_path)])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(net, make_loader())
    monkeypatch.undo()
    assert net.privacy_spent().n_steps == 2
    remembers = strategy == BAND
    if remembers:
        with pytest.raises(CheckpointError, match=r"interrupted while noise .* earlier checkpoint"):
            trainer.save_checkpoint(tmp_path / "torn.ckpt")
        with pytest.raises(PrivacyError, match=r"interrupted while noise .* another fit"):
            net._dp.release(None)
    else:
        trainer.save_checkpoint(tmp_path / "torn.ckpt")  # its memory is the key
    whole = Net(mf_plan(strategy=strategy))
    a = make_trainer(tmp_path)
    a.fit(whole, make_loader())
    for name in ["step=2.ckpt", *([] if remembers else ["torn.ckpt"])]:
        resumed = Net(mf_plan(strategy=strategy))
        b = make_trainer(tmp_path)
        b.fit(resumed, make_loader(), ckpt_path=tmp_path / name)
        assert_same(snapshot(resumed, b), snapshot(whole, a))
    fit_on = make_trainer(tmp_path, max_epochs=1)
    fit_on.fit(net, make_loader())
    assert [(run.start, done) for run, done in net._dp.record.ledger.horizons] == [(0, 2), (2, 4)]


def test_resume_in_mixed_precision(tmp_path):
    case = Case(net=lambda: Net(mf_plan(second_moment_strategy=BAND)), precision="bf16-mixed")
    check_resume(case, tmp_path, [1, 5])


def test_double_precision(tmp_path):
    net = Net(mf_plan(second_moment_strategy=BAND))
    make_trainer(tmp_path, precision="64-true").fit(net, make_loader())
    leaves = state_dict(net._dp.state.noise)
    assert {v.dtype for v in leaves.values() if isinstance(v, torch.Tensor)} == {torch.float64}


@pytest.mark.parametrize("privacy", [plan(), mf_plan()], ids=["dpsgd", "dpftrl"])
def test_a_run_from_the_weights_of_a_checkpoint_resumes(privacy, tmp_path):
    path = saved(tmp_path, mf_plan())

    def loaded(ckpt: Any = None, callbacks: Any = ()) -> dict[str, Any]:
        net = Net.load_from_checkpoint(path, privacy=privacy, weights_only=True)
        trainer = make_trainer(tmp_path, max_epochs=1, callbacks=list(callbacks))
        trainer.fit(net, make_loader(), ckpt_path=ckpt)
        return snapshot(net, trainer)

    (tmp_path / "on").mkdir()
    whole = loaded(callbacks=[every_step(tmp_path / "on")])
    assert whole["noise/step"] == whole["n_steps"] == 8
    assert_same(loaded(ckpt=tmp_path / "on" / "step=2.ckpt"), whole)
