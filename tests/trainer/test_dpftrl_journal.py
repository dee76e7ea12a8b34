"""Steps of a horizon that were made after the last checkpoint are counted, and repeated as one."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optree
import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from opake_lightning import CheckpointError, PrivacyBudget, PrivacyError
from opake_lightning.dpftrl.noise import MFNoise, band_mf_strategy
from opake_lightning.optimizers import adamw
from opake_lightning.trainer._journal import read
from tests.trainer.cases_dpftrl import ALL, BAND, mf_plan
from tests.trainer.helpers import Net, assert_same, made, plan, run_fit, saver, snapshot
from tests.trainer.test_journal import Dies, Tells

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no last"),
]


def mf_net(**changes: Any) -> Net:
    return Net(mf_plan(**changes))


def killed(path: Path, after: int = 5, net: Net | None = None, **trainer: Any) -> Path:
    """A run of eight steps that saved after step 3, and died after step 5; its checkpoint."""
    with pytest.raises(RuntimeError, match="killed"):
        run_fit(net or mf_net(), path, saver(path), Dies(after), **trainer)
    return path / "step=3.ckpt"


def horizons(net: Net) -> list[tuple[int, int, int]]:
    """Of each: where it began, how long it is, and how much of it has been made."""
    return [(run.start, run.n_steps, done) for run, done in net._dp.record.ledger.horizons]


@pytest.fixture
def once(monkeypatch):
    """Sees to it that no stream of noise, and no draw, ever meets two gradients."""
    original, met = MFNoise._release, {}

    def watched(self: MFNoise, grads: Any, state: Any, **how: Any) -> Any:
        gradient = b"".join(g.numpy().tobytes() for g in optree.tree_leaves(grads.pytree))
        assert met.setdefault((state.key, state.step), gradient) == gradient
        return original(self, grads, state, **how)

    monkeypatch.setattr(MFNoise, "_release", watched)
    return met


# -- resuming the same plan -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_lost_steps_are_repeated_and_not_added(name, tmp_path):
    ckpt = killed(tmp_path, net=mf_net(**ALL[name]))
    resumed, whole, tells = mf_net(**ALL[name]), mf_net(**ALL[name]), Tells()
    end = run_fit(resumed, tmp_path, tells, ckpt=ckpt)
    assert tells.counts == [5, 5, 5, 6, 7, 8]
    assert horizons(resumed) == [(0, 8, 8)]
    assert_same(snapshot(resumed, end), snapshot(whole, run_fit(whole, tmp_path / "whole")))


def test_a_run_that_dies_again_and_again(tmp_path, once):
    ckpt = killed(tmp_path)
    for after, told in ((4, 5), (7, 5), (5, 7)):
        net, tells = mf_net(), Tells()
        with pytest.raises(RuntimeError, match="killed"):
            run_fit(net, tmp_path, tells, Dies(after), ckpt=ckpt)
        assert tells.counts[0] == told
        assert net._dp.state.noise.step == net._dp.record.step == after
    run_fit(net := mf_net(), tmp_path, ckpt=ckpt)
    assert horizons(net) == [(0, 8, 8)]
    assert len(once) == 8


def test_all_is_paid_from_the_first_step_and_repeated_for_nothing(tmp_path):
    net = mf_net()
    ckpt = killed(tmp_path, net=net)
    paid = net.privacy_spent().epsilon
    resumed = mf_net()
    run_fit(resumed, tmp_path, PrivacyBudget(paid, 1e-5), ckpt=ckpt)
    assert (resumed.privacy_spent().epsilon, resumed.privacy_spent().n_steps) == (paid, 8)
    stopped = mf_net()
    run_fit(stopped, tmp_path / "b", PrivacyBudget(0.99 * paid, 1e-5), ckpt=ckpt)
    assert stopped._dp.record.step == 3


def test_a_second_horizon_is_repeated_as_well(tmp_path, once):
    def twice(*callbacks: Any, ckpt: Any = None, path: Path = tmp_path) -> Net:
        net = mf_net()
        run_fit(net, path, max_epochs=1)
        net.end = run_fit(net, path, *callbacks, ckpt=ckpt)
        return net

    with pytest.raises(RuntimeError, match="killed"):
        twice(saver(tmp_path), Dies(6))
    resumed = mf_net()
    end = run_fit(resumed, tmp_path, ckpt=tmp_path / "step=3.ckpt")
    assert horizons(resumed) == [(0, 4, 4), (4, 8, 8)]
    whole = twice(path=tmp_path / "whole")
    assert_same(snapshot(resumed, end), snapshot(whole, whole.end))
    assert len(once) == 12


def test_noise_that_was_cut_short_was_not_released(tmp_path, monkeypatch, once):
    """On one rank a step counts when its noise is whole; until then nothing has been seen of it."""
    watched, calls = MFNoise._release, []

    def cut_short(*args: Any, **kwargs: Any) -> Any:
        calls.append(watched(*args, **kwargs))
        if len(calls) == 5:
            raise ArithmeticError
        return calls[-1]

    monkeypatch.setattr(MFNoise, "_release", cut_short)
    net = mf_net()
    with pytest.raises(CheckpointError, match=r"no checkpoint .* while noise was being added"):
        run_fit(net, tmp_path, saver(tmp_path), OnExceptionCheckpoint(tmp_path))
    assert not (tmp_path / "on_exception.ckpt").exists()
    with pytest.raises(PrivacyError, match="another fit"):
        net._dp.release(None)
    assert read(net._dp.journal.lineage, [tmp_path]) == net._dp.record.known
    assert horizons(net) == [(0, 8, 4)]
    monkeypatch.setattr(MFNoise, "_release", watched)
    end = run_fit(resumed := mf_net(), tmp_path, ckpt=tmp_path / "step=3.ckpt")
    assert_same(snapshot(resumed, end), snapshot(whole := mf_net(), run_fit(whole, tmp_path / "w")))


# -- what would not be a repetition ---------------------------------------------------------------


def test_a_fork_counts_both_horizons_and_the_lost_steps(tmp_path, once):
    ckpt = killed(tmp_path)
    net, tells = mf_net(clipping_norm=2.0, on_changed_plan="fork"), Tells()
    run_fit(net, tmp_path, tells, ckpt=ckpt)
    assert tells.counts == [5, 6, 7, 8, 9, 10]
    assert horizons(net) == [(0, 8, 5), (5, 5, 5)]
    assert made(net) == [5, 5]
    state = net._dp.state.noise
    assert (state.start, state.step) == (5, 10)
    costs = [run.epsilon_at(1e-5) for run, _ in net._dp.record.ledger.horizons]
    assert net.privacy_spent().epsilon > max(costs)


@pytest.mark.parametrize("to_dpftrl", [True, False])
def test_a_fork_to_another_mechanism_counts_the_lost_steps(to_dpftrl, tmp_path):
    plans = [plan(on_changed_plan="fork"), mf_plan(on_changed_plan="fork")]
    before, now = plans if to_dpftrl else reversed(plans)
    ckpt = killed(tmp_path, net=Net(before))
    net = Net(now)
    run_fit(net, tmp_path, ckpt=ckpt)
    assert net.privacy_spent().n_steps == net._dp.state.noise.step == 5 + 5
    assert horizons(net) == ([(5, 5, 5)] if to_dpftrl else [(0, 8, 5)])


def test_a_fork_that_died_is_counted_by_the_next(tmp_path, once):
    ckpt = killed(tmp_path)
    for spent in (5, 7):
        net, tells = mf_net(strategy=band_mf_strategy(2), on_changed_plan="fork"), Tells()
        with pytest.raises(RuntimeError, match="killed"):
            run_fit(net, tmp_path, tells, Dies(5), ckpt=ckpt)
        assert tells.counts == [spent, spent + 1, spent + 2]
    assert horizons(net) == [(0, 8, 5), (5, 5, 2), (7, 5, 2)]
    run_fit(net := mf_net(), tmp_path, ckpt=ckpt)  # the run itself
    assert sorted(horizons(net)) == [(0, 8, 8), (5, 5, 2), (7, 5, 2)]


def test_forks_that_began_at_one_step_are_each_paid_whole(tmp_path):
    ckpt, nets = killed(tmp_path), []
    record = (tmp_path / ckpt.name, *tmp_path.glob("*.steps"))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for file in record:
            shutil.copy(file, tmp_path / folder)
        nets.append(mf_net(clipping_norm=2.0, on_changed_plan="fork"))
        save = saver(tmp_path / folder, 1, filename=f"{folder}-{{step}}")
        run_fit(nets[-1], tmp_path / folder, save, ckpt=tmp_path / folder / ckpt.name)
        assert horizons(nets[-1]) == [(0, 8, 5), (5, 5, 5)]
    for file in (tmp_path / "b").glob("*.steps"):
        file.rename(tmp_path / "a" / f"{file.stem}b.steps")
    resumed = mf_net(clipping_norm=2.0, on_changed_plan="fork")
    run_fit(resumed, tmp_path, ckpt=tmp_path / "a" / "a-step=7.ckpt")
    assert sorted(horizons(resumed)) == [(0, 8, 5), (5, 5, 5), (6, 5, 5)]
    assert resumed.privacy_spent().epsilon > nets[0].privacy_spent().epsilon


def test_a_budget_pays_for_a_horizon_of_which_there_is_no_step_yet(tmp_path):
    """Another fork's, that began at the same step, is not taken for it."""

    class Saves(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "begun.ckpt")
            raise RuntimeError("killed")

    def fork() -> Net:
        return mf_net(noise_multiplier=2.0, on_changed_plan="fork")

    ckpt, other = killed(tmp_path), fork()
    with pytest.raises(RuntimeError, match="killed"):
        run_fit(fork(), tmp_path, Saves(), ckpt=ckpt)
    with pytest.raises(RuntimeError, match="killed"):
        run_fit(other, tmp_path, Dies(5), ckpt=ckpt)
    begun, spent = fork(), other.privacy_spent()
    budget = PrivacyBudget(spent.epsilon + 0.1, spent.delta)
    run_fit(begun, tmp_path, budget, ckpt=tmp_path / "begun.ckpt")
    assert begun.privacy_spent() == spent


def test_a_fork_that_died_after_saving_is_resumed_as_itself(tmp_path, once):
    ckpt = killed(tmp_path)

    def fork() -> Net:
        return mf_net(clipping_norm=2.0, on_changed_plan="fork")

    with pytest.raises(RuntimeError, match="killed"):
        run_fit(fork(), tmp_path, saver(tmp_path / "on"), Dies(7), ckpt=ckpt)
    net, tells = fork(), Tells()
    run_fit(net, tmp_path, tells, ckpt=tmp_path / "on" / "step=6.ckpt")
    assert tells.counts == [9, 9, 10]
    assert horizons(net) == [(0, 8, 5), (5, 5, 5)]
    assert len(once) == 5 + 5


def test_a_fork_that_is_shorter_than_its_bands_is_resumed_as_itself(tmp_path, once):
    """Its noise remembers less than that of the whole fit, which its plan describes."""
    end = {"max_steps": 5, "max_epochs": -1}
    run_fit(mf_net(), tmp_path, saver(tmp_path), max_steps=3, max_epochs=-1)

    def fork() -> Net:
        return mf_net(clipping_norm=2.0, on_changed_plan="fork")

    whole = fork()
    trainer = run_fit(
        whole, tmp_path, saver(tmp_path / "on", 1), ckpt=tmp_path / "step=3.ckpt", **end
    )
    again = run_fit(resumed := fork(), tmp_path, ckpt=tmp_path / "on" / "step=4.ckpt", **end)
    assert_same(snapshot(resumed, again), snapshot(whole, trainer))
    assert horizons(resumed) == [(0, 3, 3), (3, 2, 2)]
    assert len(once) == 5


def test_another_learning_rate_would_meet_the_same_noise(tmp_path, once):
    ckpt = killed(tmp_path)
    with pytest.raises(CheckpointError, match=r"these differ: the learning rates\."):
        run_fit(Net(mf_plan(), lambda: adamw(0.01)), tmp_path, ckpt=ckpt)
    forked = Net(mf_plan(on_changed_plan="fork"), lambda: adamw(0.01))
    run_fit(forked, tmp_path, ckpt=ckpt)
    assert horizons(forked) == [(0, 8, 5), (5, 5, 5)]


def test_more_steps_than_the_horizon_has_are_not_repeated(tmp_path, once):
    """A second fit of the same plan is a second horizon, with noise of its own."""
    net = mf_net()
    run_fit(net, tmp_path, saver(tmp_path))
    run_fit(net, tmp_path, max_epochs=1)
    assert horizons(net) == [(0, 8, 8), (8, 4, 4)]
    run_fit(again := mf_net(), tmp_path, ckpt=tmp_path / "step=3.ckpt")
    assert sorted(horizons(again)) == [(0, 8, 8), (8, 4, 4)]


def test_a_second_fit_in_the_middle_of_repeated_steps_begins_after_all_of_them(tmp_path, once):
    ckpt = killed(tmp_path)
    net = mf_net()
    with pytest.raises(RuntimeError, match="killed"):
        run_fit(net, tmp_path, Dies(4), ckpt=ckpt)
    assert (net._dp.record.step, net.privacy_spent().n_steps) == (4, 5)
    run_fit(net, tmp_path, max_epochs=1)
    assert horizons(net) == [(0, 8, 5), (5, 4, 4)]
    state = net._dp.state.noise
    assert (state.start, state.step) == (5, 9)
    assert len(once) == 5 + 4


@pytest.mark.parametrize("privacy", [plan(), mf_plan()], ids=["dpsgd", "dpftrl"])
def test_the_same_module_resumes_again_in_the_middle_of_repeated_steps(privacy, tmp_path):
    ckpt = killed(tmp_path, net=Net(privacy))
    net = Net(privacy)
    with pytest.raises(RuntimeError, match="killed"):
        run_fit(net, tmp_path, Dies(4), ckpt=ckpt)
    end = run_fit(net, tmp_path, ckpt=ckpt)
    assert made(net) == [8]
    assert_same(snapshot(net, end), snapshot(whole := Net(privacy), run_fit(whole, tmp_path / "w")))


# -- load_from_checkpoint -------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_a_new_fit_from_a_checkpoint_counts_what_came_after_it(copied, tmp_path, once):
    ckpt = killed(tmp_path)
    net, tells = Net.load_from_checkpoint(ckpt, privacy=mf_plan()), Tells()
    assert net.privacy_spent().n_steps == 3  # of these weights
    if copied:
        net = copy.deepcopy(net)
    run_fit(net, tmp_path, tells, max_epochs=1)
    assert tells.counts == [5, 6, 7, 8, 9]
    assert horizons(net) == [(0, 8, 5), (5, 4, 4)]
    assert net._dp.state.noise.start == 5


def test_the_record_is_small_and_tells_no_buffers(tmp_path):
    killed(tmp_path, net=mf_net(second_moment_strategy=BAND))
    (file,) = tmp_path.glob("*.steps")
    assert file.stat().st_size <= 2048
    assert b"buffer" not in file.read_bytes()
