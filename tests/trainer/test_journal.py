"""What was released after the last checkpoint is not forgotten when the process is."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from opake_lightning import CheckpointError, PoissonLoader, PrivacyBudget
from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.optimizers import adamw
from opake_lightning.random import RngKey
from opake_lightning.scheduling import linear_schedule
from opake_lightning.step import Step
from opake_lightning.trainer import _run
from opake_lightning.trainer._journal import Journal, read
from opake_lightning.trainer._record import Known, Segment, new_lineage
from tests.trainer.helpers import (
    BATCH_SIZE,
    N_EXAMPLES,
    Net,
    Points,
    assert_same,
    epsilon_after,
    made,
    make_loader,
    plan,
    run_fit,
    saver,
    snapshot,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]

EVENT = GaussianEvent(1.0, BATCH_SIZE / N_EXAMPLES)


class Dies(pl.Callback):
    """Ends the fit after some steps as a kill would: nothing more is saved."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.after:
            raise RuntimeError("killed")


class Tells(pl.Callback):
    """Records ε and the count before the first step and after each one."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.counts.append(module.privacy_spent().n_steps)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.counts.append(module.privacy_spent().n_steps)


def killed(path: Path, after: int = 5, net: Net | None = None, **trainer: Any) -> Path:
    """A run that saved after step 3, and died after step 5; its checkpoint."""
    with pytest.raises(RuntimeError, match="killed"):
        run_fit(net or Net(), path, saver(path), Dies(after), **trainer)
    return path / "step=3.ckpt"


def key_of_checkpoint(path: Path) -> RngKey:
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["opake_lightning"]
    return RngKey.from_hex(saved["record"]["key"])


def record_of(path: Path) -> Path:
    (file,) = path.glob("opake-*.steps")
    return file


# -- resuming the same plan -----------------------------------------------------------------------


@pytest.mark.parametrize("trainer", [{}, {"strategy": "auto"}], ids=["opake_ddp", "single_device"])
def test_lost_steps_are_spent_at_once_and_not_twice(trainer, tmp_path):
    def loader() -> Any:
        return PoissonLoader(Points(), BATCH_SIZE) if trainer else make_loader()

    ckpt = killed(tmp_path, loader=loader(), **trainer)
    resumed, whole, tells = Net(), Net(), Tells()
    end = run_fit(resumed, tmp_path, tells, ckpt=ckpt, loader=loader(), **trainer)
    assert tells.counts == [5, 5, 5, 6, 7, 8]
    other = tmp_path / "whole"
    assert_same(snapshot(resumed, end), snapshot(whole, run_fit(whole, other)))
    assert resumed.privacy_spent().epsilon == epsilon_after(8)


def test_lost_steps_of_a_second_fit_are_made_again_on_its_key(tmp_path):
    """The key has words of its own by then, which are those that the record's digest knows."""

    def fitted_once() -> Net:
        net = Net()
        run_fit(net, tmp_path / "first", max_epochs=1)
        return net

    ckpt = killed(tmp_path, net=fitted_once())
    resumed, whole, tells = Net(), fitted_once(), Tells()
    end = run_fit(resumed, tmp_path, tells, ckpt=ckpt)
    assert tells.counts[:2] == [9, 9]
    assert_same(snapshot(resumed, end), snapshot(whole, run_fit(whole, tmp_path / "whole")))


def test_a_resume_that_dies_too_forgets_nothing(tmp_path):
    ckpt = killed(tmp_path, after=7, net=Net())
    ckpt.rename(tmp_path / "first.ckpt")
    for _ in range(2):
        net, tells = Net(), Tells()
        with pytest.raises(RuntimeError, match="killed"):
            run_fit(net, tmp_path, tells, Dies(4), ckpt=tmp_path / "first.ckpt")
        assert tells.counts[0] == net.privacy_spent().n_steps == 7
        assert count(net._dp.journal.lineage, tmp_path) == 7


def test_a_checkpoint_made_while_steps_are_repeated_knows_of_all(tmp_path):
    """It may be taken to where the record is not."""
    ckpt = killed(tmp_path, after=6)
    elsewhere = tmp_path / "elsewhere"
    run_fit(Net(), elsewhere, saver(elsewhere, every=1), ckpt=ckpt, max_steps=4, max_epochs=-1)
    for file in tmp_path.rglob("opake-*"):
        file.unlink()
    tells = Tells()
    with pytest.warns(UserWarning, match="no record"):
        run_fit(Net(), elsewhere, tells, ckpt=elsewhere / "step=4.ckpt")
    assert tells.counts == [6, 6, 6, 7, 8]
    assert Net.load_from_checkpoint(elsewhere / "step=4.ckpt").privacy_spent().n_steps == 6


def test_the_record_is_found_beside_other_checkpoints_of_the_trainer(tmp_path):
    ckpt = killed(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    moved = shutil.copy(ckpt, scratch / "a.ckpt")
    for where in ({"default_root_dir": tmp_path}, {"callbacks": [saver(tmp_path)]}):
        tells = Tells()
        callbacks = [tells, *where.pop("callbacks", [])]
        run_fit(Net(), scratch, *callbacks, ckpt=moved, **where)
        assert tells.counts[0] >= 5
        for file in scratch.glob("*.steps"):
            file.unlink()


def test_without_a_record_the_checkpoints_count_is_a_lower_bound(tmp_path, capsys):
    ckpt = killed(tmp_path)
    record_of(tmp_path).unlink()
    net, tells = Net(), Tells()
    with pytest.warns(UserWarning, match="no record of released steps .* lower bound"):
        trainer = run_fit(net, tmp_path, tells, ckpt=ckpt)
    assert tells.counts == [3, 4, 5, 6, 7, 8]
    assert not net.privacy_spent().complete
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert not Net.load_from_checkpoint(tmp_path / "again.ckpt").privacy_spent().complete
    run_fit(net, tmp_path, max_epochs=1)
    assert not net.privacy_spent().complete
    net.reset_privacy()  # which says that the past does not matter
    assert net.privacy_spent().complete


def test_the_module_itself_remembers_what_no_file_does(tmp_path):
    net = Net()
    ckpt = killed(tmp_path, net=net)
    record_of(tmp_path).unlink()
    tells = Tells()
    with pytest.warns(UserWarning, match="no record"):  # others may have made more
        run_fit(net, tmp_path, tells, ckpt=ckpt)
    assert tells.counts == [5, 5, 5, 6, 7, 8]


def test_a_module_that_resumes_another_run_has_spent_what_that_had(tmp_path):
    ckpt, net, tells = killed(tmp_path), Net(), Tells()
    run_fit(net, tmp_path / "other")
    run_fit(net, tmp_path, tells, ckpt=ckpt)
    assert tells.counts == [5, 5, 5, 6, 7, 8]


@pytest.mark.parametrize("budget", [5, 7])
def test_a_budget_lets_steps_be_repeated_and_no_more(budget, tmp_path):
    ckpt = killed(tmp_path)
    net = Net()
    run_fit(net, tmp_path, PrivacyBudget(epsilon_after(budget), 1e-5), ckpt=ckpt)
    assert net._dp.record.step == net.privacy_spent().n_steps == budget


def test_an_overspent_budget_stops_at_once(tmp_path):
    ckpt = killed(tmp_path)
    net = Net()
    run_fit(net, tmp_path, PrivacyBudget(epsilon_after(4), 1e-5), ckpt=ckpt)
    assert net._dp.record.step == 3
    assert net.privacy_spent().n_steps == 5


def test_repeated_steps_meet_a_target(tmp_path):
    def net() -> Net:
        return Net(plan(target_epsilon=3.0))

    ckpt = killed(tmp_path, net=net())
    resumed, whole = net(), net()
    end = run_fit(resumed, tmp_path, ckpt=ckpt)
    assert_same(snapshot(resumed, end), snapshot(whole, run_fit(whole, tmp_path / "whole")))
    assert 2.97 < resumed.privacy_spent().epsilon <= 3.0


# -- what would not be a repetition ---------------------------------------------------------------


def test_another_learning_rate_would_meet_the_same_noise(tmp_path):
    ckpt = killed(tmp_path)
    schedule = linear_schedule(0.05, 0.01, transition_steps=6)
    for rate in (0.01, schedule):
        with pytest.raises(CheckpointError, match=r"these differ: the learning rates\."):
            run_fit(Net(optimizer=lambda rate=rate: adamw(rate)), tmp_path, ckpt=ckpt)


def test_a_schedule_is_repeated_as_it_was(tmp_path):
    def net() -> Net:
        return Net(optimizer=lambda: adamw(linear_schedule(0.05, 0.01, transition_steps=6)))

    ckpt = killed(tmp_path, net=net())
    resumed = net()
    run_fit(resumed, tmp_path, ckpt=ckpt)
    assert resumed.privacy_spent().n_steps == 8


def test_a_fork_counts_the_lost_steps_in_addition(tmp_path):
    ckpt = killed(tmp_path)
    net, tells = Net(plan(clipping_norm=2.0, on_changed_plan="fork")), Tells()
    run_fit(net, tmp_path, tells, ckpt=ckpt)
    assert tells.counts == [5, 6, 7, 8, 9, 10]
    assert made(net) == [5, 5]
    assert net._dp.state.noise.key != key_of_checkpoint(ckpt)
    assert net._dp.record.ledger == Ledger().spend(EVENT, 10)


def test_a_fork_that_died_is_counted_by_the_next(tmp_path):
    ckpt = killed(tmp_path)

    def fork() -> Net:
        return Net(plan(clipping_norm=2.0, on_changed_plan="fork"))

    for spent in (5, 7):
        net, tells = fork(), Tells()
        with pytest.raises(RuntimeError, match="killed"):
            run_fit(net, tmp_path, tells, Dies(5), ckpt=ckpt)
        assert tells.counts == [spent, spent + 1, spent + 2]
    assert made(net) == [5, 2, 2]
    # The run itself makes its own steps again, and those of the forks stay counted.
    net, tells = Net(), Tells()
    run_fit(net, tmp_path, tells, ckpt=ckpt)
    assert tells.counts == [9, 9, 9, 10, 11, 12]
    assert sorted(made(net)) == [2, 2, 8]


def test_forks_that_run_at_once_are_all_counted(tmp_path):
    """Each began before the other was recorded, and writes a file of its own."""
    ckpt, both = killed(tmp_path), []

    class Another(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, at: int) -> None:
            if trainer.global_step == 4:
                both.append(Net(plan(clipping_norm=3.0, on_changed_plan="fork")))
                run_fit(both[0], tmp_path, ckpt=ckpt)

    one = Net(plan(clipping_norm=2.0, on_changed_plan="fork"))
    run_fit(one, tmp_path, Another(), ckpt=ckpt)
    assert made(one) == [5, 5]
    assert made(both[0]) == [5, 1, 5]
    run_fit(again := Net(), tmp_path, ckpt=ckpt)
    assert sorted(made(again)) == [5, 5, 8]
    assert again.privacy_spent().n_steps == 18


def test_forks_are_in_the_public_record(tmp_path):
    ckpt = killed(tmp_path)
    net = Net(plan(clipping_norm=2.0, on_changed_plan="fork"))
    trainer = run_fit(net, tmp_path, ckpt=ckpt)
    trainer.save_checkpoint(tmp_path / "public.ckpt", weights_only=True)
    public = torch.load(tmp_path / "public.ckpt", weights_only=True)["opake_lightning"]
    record = Net.load_from_checkpoint(tmp_path / "public.ckpt")._dp.record
    assert record.public().to_plain(secret=False) == public
    ledgers = [segment["ledger"] for segment in public["released"].values()]
    assert ledgers == [{"segments": [[1.0, 0.25, 5]]}] * 2


def test_a_fork_plans_for_what_is_left_of_the_target(tmp_path):
    ckpt = killed(tmp_path, net=Net(plan(noise_multiplier=2.0)))
    net = Net(plan(target_epsilon=4.0, on_changed_plan="fork"))
    run_fit(net, tmp_path, ckpt=ckpt)
    assert net.privacy_spent().n_steps == 5 + 5
    assert 3.96 < net.privacy_spent().epsilon <= 4.0


def test_a_checkpoint_of_the_first_fit_resumes_after_a_second(tmp_path):
    """It makes its own steps again, on its own key, and those of the second stay counted."""
    net = Net()
    run_fit(net, tmp_path, saver(tmp_path), max_epochs=1)
    first = key_of_checkpoint(tmp_path / "step=3.ckpt")
    net.privacy = plan(noise_multiplier=2.0)
    run_fit(net, tmp_path, max_epochs=1)
    second = net._dp.state.noise.key
    resumed, tells = Net(), Tells()
    run_fit(resumed, tmp_path, tells, ckpt=tmp_path / "step=3.ckpt", max_epochs=3)
    assert tells.counts == [8, 8, *range(9, 17)]
    assert resumed._dp.state.noise.key == first != second
    assert sorted(made(resumed)) == [4, 12]


def test_a_second_fit_in_the_middle_of_repeated_steps_gets_a_new_key(tmp_path):
    ckpt = killed(tmp_path)
    net = Net()
    run_fit(net, tmp_path, ckpt=ckpt, max_steps=4, max_epochs=-1)
    assert (net._dp.record.step, net.privacy_spent().n_steps) == (4, 5)
    run_fit(net, tmp_path, max_epochs=1)
    assert net._dp.state.noise.key != key_of_checkpoint(ckpt)
    assert made(net) == [5, 4]
    assert net._dp.record.step == net.privacy_spent().n_steps == 9


@pytest.mark.parametrize(("ranks", "counted"), [(1, 3), (2, 4)])
def test_a_step_is_recorded_before_another_rank_may_have_its_sum(
    ranks, counted, tmp_path, monkeypatch
):
    """On one rank after it, so that one that failed costs nothing."""
    release = Step.release

    def dies(self: Step, params: Any, batch: Any, state: Any, **how: Any) -> Any:
        if state.step == 3:
            raise RuntimeError("killed")
        return release(self, params, batch, state, **how)

    monkeypatch.setattr(Step, "release", dies)
    monkeypatch.setattr(_run, "world_size", lambda: ranks)
    net = Net()
    with pytest.raises(RuntimeError, match="killed"):
        run_fit(net, tmp_path, saver(tmp_path))
    assert count(net._dp.journal.lineage, tmp_path) == counted


# -- load_from_checkpoint -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "passed_on",
    [lambda net: net, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))],
    ids=["as it is", "copied", "pickled"],
)
def test_a_new_fit_from_a_checkpoint_counts_what_came_after_it(passed_on, tmp_path):
    ckpt = killed(tmp_path)
    net, tells = passed_on(Net.load_from_checkpoint(ckpt)), Tells()
    assert net.privacy_spent().n_steps == 3  # of these weights
    run_fit(net, tmp_path, tells, max_epochs=1)
    assert tells.counts == [5, 6, 7, 8, 9]


def test_a_record_that_knows_less_than_the_checkpoint_takes_nothing_away(tmp_path):
    ckpt = killed(tmp_path)
    record_of(tmp_path).unlink()  # and an older one is put back
    name = torch.load(ckpt, weights_only=True)["opake_lightning"]["lineage"]
    Journal(name).keep_in(tmp_path, Known())
    net = Net.load_from_checkpoint(ckpt)
    run_fit(net, tmp_path, max_epochs=1)
    assert net.privacy_spent().n_steps == 3 + 4


def test_what_came_after_counts_towards_a_target(tmp_path):
    ckpt = killed(tmp_path, net=Net(plan(noise_multiplier=2.0)))
    net = Net.load_from_checkpoint(ckpt)
    net.privacy = plan(target_epsilon=4.0)
    run_fit(net, tmp_path, max_epochs=1)
    assert net.privacy_spent().n_steps == 9
    assert 3.96 < net.privacy_spent().epsilon <= 4.0


# -- the file -------------------------------------------------------------------------------------


def steps(n: int) -> Known:
    return Known({"a" * 32: Segment(Ledger().spend(EVENT, n), ((0, "1 rank"),))})


def written(path: Path, n: int) -> tuple[Journal, Path]:
    journal = Journal(new_lineage())
    journal.keep_in(path, Known())
    for step in range(1, n + 1):
        journal.append(steps(step))
    return journal, record_of(path)


def count(lineage: str, path: Path) -> int:
    """How many steps are recorded."""
    return sum(segment.n_steps for segment in (read(lineage, [path]) or Known()).released.values())


def test_the_record_tells_no_secret(tmp_path):
    net = Net()
    killed(tmp_path, net=net)
    content, rng = record_of(tmp_path).read_bytes(), net._dp.state.noise.key
    forms = [rng.hex().encode(), *(rng.bits.to_bytes(16, order) for order in ("big", "little"))]
    assert not any(form in content for form in forms)
    lines = [line.split(b" ", 1)[1] for line in content.split(b"\n") if b"{" in line]
    spent = max((json.loads(line) for line in lines), key=str)
    segment = {"ledger": {"segments": [[1.0, 0.25, 5]]}, "rounding": [[0, net._dp.fit.rounding]]}
    assert spent == {"released": {net._dp.record.segment: segment}, "complete": True}


def test_the_file_does_not_grow(tmp_path):
    journal, file = written(tmp_path, 3000)
    assert file.stat().st_size == 1024
    assert read(journal.lineage, [tmp_path]) == steps(3000)


def test_a_ledger_that_outgrows_its_place_gets_a_larger_one(tmp_path):
    journal, file = written(tmp_path, 3)
    ledger = Ledger()
    for n in range(4, 40):
        ledger = ledger.spend(GaussianEvent(1.0 + n / 10, 0.123456789), n)
        more = Known({"b": Segment(ledger, ((0, "1"), (n - 1, "2")))})
        journal.append(known := steps(3).joined(more))
        assert read(journal.lineage, [tmp_path]) == known
    assert file.stat().st_size > 1024


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("n", [6, 7])
def test_a_damaged_line_leaves_the_one_before(n, slot, tmp_path):
    journal, file = written(tmp_path, n)
    content = bytearray(file.read_bytes())
    content[slot * 512 + 20] ^= 4
    file.write_bytes(content)
    assert count(journal.lineage, tmp_path) in (n, n - 1)


def test_a_file_that_was_cut_off_tells_what_is_left(tmp_path):
    journal, file = written(tmp_path, 6)
    content = file.read_bytes()
    for size in (1023, 700, 512, 300):
        file.write_bytes(content[:size])
        assert count(journal.lineage, tmp_path) in (5, 6)


@pytest.mark.parametrize("content", [b"", b"\0" * 1024, b"garbage\n" * 100, b"00000000 {}\n"])
def test_garbage_is_no_count(content, tmp_path):
    ckpt = killed(tmp_path)
    record_of(tmp_path).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"record of released steps .* is damaged"):
        run_fit(Net(), tmp_path, ckpt=ckpt)
    loaded = Net.load_from_checkpoint(ckpt)  # of which nobody asks what came after it
    for net in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert net.privacy_spent().n_steps == 3
        with pytest.raises(CheckpointError, match=r"record of released steps .* is damaged"):
            run_fit(net, tmp_path)


def test_a_name_leads_nowhere_else(tmp_path):
    with pytest.raises(CheckpointError, match="corrupt checkpoint: bad journal id"):
        read("../../etc/passwd", [tmp_path])


def test_no_checkpoint_no_file(tmp_path):
    run_fit(Net(), tmp_path)
    assert not list(tmp_path.iterdir())
    run_fit(Net(), tmp_path, saver(tmp_path, every=2, save_weights_only=True))
    assert not list(tmp_path.glob("*.steps"))


def test_a_checkpoint_directory_that_was_deleted_stops_nothing(tmp_path):
    class Deletes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                shutil.rmtree(tmp_path / "a")

    net = Net()
    run_fit(net, tmp_path, saver(tmp_path / "a", every=3, save_top_k=1), Deletes(), max_epochs=1)
    assert net.privacy_spent().n_steps == 4


def test_a_record_that_was_deleted_is_there_again_with_the_next_checkpoint(tmp_path):
    class Deletes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                record_of(tmp_path).unlink()

    with pytest.raises(RuntimeError, match="killed"):
        run_fit(Net(), tmp_path, saver(tmp_path), Deletes(), Dies(7))
    run_fit(net := Net(), tmp_path, tells := Tells(), ckpt=tmp_path / "step=3.ckpt")
    # Another process may have recorded there, too.
    assert (tells.counts[0], net.privacy_spent().complete) == (7, False)


def test_a_folder_that_was_deleted_and_restored_is_recorded_in_again(tmp_path):
    """What is written to a file that has no name any more, nobody finds."""

    class Restores(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                shutil.copytree(tmp_path / "a", tmp_path / "copy")
                shutil.rmtree(tmp_path / "a")
                shutil.copytree(tmp_path / "copy", tmp_path / "a")

    with pytest.raises(RuntimeError, match="killed"):
        run_fit(Net(), tmp_path, saver(tmp_path / "a"), Restores(), Dies(6))
    run_fit(Net(), tmp_path / "b", tells := Tells(), ckpt=tmp_path / "a" / "step=3.ckpt")
    assert tells.counts[0] == 6


def test_the_last_checkpoint_has_a_record_beside_it(tmp_path):
    journal, file = written(tmp_path, 3)
    file.unlink()
    journal.keep_in(tmp_path, steps(3))
    assert read(journal.lineage, [tmp_path]) == replace(steps(3), complete=False)


def test_whoever_lost_the_record_tells_the_next_one(tmp_path):
    """It begins a new one, which is not the whole of it."""
    ckpt = killed(tmp_path)
    record_of(tmp_path).unlink()
    with pytest.warns(UserWarning, match="no record"):
        run_fit(Net(), tmp_path, ckpt=ckpt)
    run_fit(net := Net(), tmp_path, ckpt=ckpt)
    assert not net.privacy_spent().complete


def test_a_step_that_cannot_be_recorded_is_not_applied(tmp_path, monkeypatch):
    net, weights = Net(), {}

    class Breaks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                weights.update({n: p.detach().clone() for n, p in net.named_parameters()})

                def pwrite(*args: Any) -> int:
                    raise OSError(5, "Input/output error")

                monkeypatch.setattr(os, "pwrite", pwrite)

    with pytest.raises(CheckpointError, match="cannot be recorded"):
        run_fit(net, tmp_path, saver(tmp_path), Breaks())
    monkeypatch.undo()
    torch.testing.assert_close(dict(net.named_parameters()), weights, rtol=0, atol=0)
    assert net.privacy_spent().n_steps == 5  # counted all the same
    end = run_fit(resumed := Net(), tmp_path, ckpt=tmp_path / "step=3.ckpt")
    assert_same(
        snapshot(resumed, end), snapshot(whole := Net(), run_fit(whole, tmp_path / "whole"))
    )


def test_a_record_of_a_step_is_one_write(tmp_path, monkeypatch):
    journal, _ = written(tmp_path, 10)
    calls: list[str] = []

    def counted(name: str) -> Any:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    for name in ("open", "pwrite", "stat", "fsync"):
        monkeypatch.setattr(os, name, counted(name))
    for n in (100, 101):
        journal.append(steps(n))
    assert calls == ["stat", "pwrite"] * 2


def test_files_are_closed(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for n in range(3):
        folder = tmp_path / str(n)
        folder.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            written(folder, 3)
    assert len(os.listdir("/proc/self/fd")) == before
