"""One module, several fits: noise and ledger go on; only reset_privacy sets them back."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from opake_lightning import OpakeDDP, PoissonLoader, PrivacyError
from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.plan import NonPrivate
from opake_lightning.random import key
from opake_lightning.scheduling import linear_schedule
from opake_lightning.serialization import state_dict
from opake_lightning.trainer import _past
from opake_lightning.trainer._keys import derive
from opake_lightning.trainer._run import Fit, Run
from tests.trainer.cases_dpftrl import mf_plan
from tests.trainer.helpers import Net, Points, make_loader, make_trainer, plan, run_fit, saver


def still(privacy: Any = None) -> Net:
    """A module whose parameters are 0 and whose loss is flat: an update is nothing but noise."""
    return Flat(privacy or plan(), lambda: sgd(lr=1.0))


class Flat(Net):
    def per_example_loss(self, batch: Any) -> torch.Tensor:
        return 0.0 * super().per_example_loss(batch)


def noise_of_fit(net: Net, path: Any, n: int = 24, batch_size: int = 6) -> list[torch.Tensor]:
    """Fit for one epoch; the noise that each step added, in units of σ·C."""
    seen: list[torch.Tensor] = []

    before = torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            nonlocal before
            now = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
            seen.append((before - now) * batch_size)
            before = now

    trainer = make_trainer(path, max_epochs=1, callbacks=[Watch()])
    trainer.fit(net, make_loader(Points(n), batch_size=batch_size))
    return seen


def reused(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return any(torch.allclose(x, y, atol=1e-4) for x in a for y in b)


def test_three_fits_compose_and_never_repeat_noise(tmp_path):
    net = still()
    fits = [noise_of_fit(net, tmp_path, *sizes) for sizes in [(24, 6), (24, 6), (30, 10)]]
    assert [len(fit) for fit in fits] == [4, 4, 3]
    assert not reused(fits[0], fits[1])
    assert not reused(fits[0] + fits[1], fits[2])
    expected = Ledger().spend(GaussianEvent(1.0, 0.25), 8).spend(GaussianEvent(1.0, 1 / 3), 3)
    assert net._dp.record.ledger == expected
    assert net._dp.state.noise.step == 11
    spent = net.privacy_spent()
    assert (spent.n_steps, spent.epsilon) == (11, expected.epsilon(1e-5))


def test_the_same_noise_is_recognised(tmp_path):
    """The other tests would pass on anything if ``reused`` never said yes."""
    a, b = noise_of_fit(still(), tmp_path), noise_of_fit(still(), tmp_path)
    assert reused(a, b)
    assert not reused(a, noise_of_fit(still(plan(key=key(8))), tmp_path))


def test_reset_privacy_zeroes_the_ledger_and_takes_another_key(tmp_path):
    net = still()
    first = noise_of_fit(net, tmp_path)
    net.reset_privacy()
    assert net.privacy_spent().n_steps == 0
    assert net.privacy_spent().epsilon == 0
    second = noise_of_fit(net, tmp_path)
    net.reset_privacy()
    net.reset_privacy()
    third = noise_of_fit(net, tmp_path)
    # The plan names its key, and still each fit on what may be other data has its own noise.
    assert not reused(first, second)
    assert not reused(first + second, third)
    assert net.privacy_spent().n_steps == 4


def test_a_reset_module_has_other_noise_from_the_same_weights_too(tmp_path):
    """It is for other people's data, of which a key sees only some rows."""
    net = Net()
    first = copy.deepcopy(net.state_dict())
    make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    before = net._dp.record.key
    net.reset_privacy()
    net.load_state_dict(first)
    make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    assert net._dp.record.key != before


def test_reset_privacy_of_a_new_module_changes_nothing(tmp_path):
    net = still()
    net.reset_privacy()
    assert reused(noise_of_fit(net, tmp_path), noise_of_fit(still(), tmp_path))


def test_a_deep_copy_goes_on_counting_with_its_own_noise(tmp_path):
    net = still()
    noise_of_fit(net, tmp_path)
    twin = copy.deepcopy(net)
    assert twin.privacy_spent() == net.privacy_spent()
    mine, its = noise_of_fit(net, tmp_path), noise_of_fit(twin, tmp_path)
    assert not reused(mine, its)
    assert net.privacy_spent().n_steps == twin.privacy_spent().n_steps == 8


def test_a_deep_copy_has_the_past_of_its_original_and_is_not_moved_by_it(tmp_path):
    class Copies(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, at: int) -> None:
            if at == 2:
                self.twin, self.past = copy.deepcopy(module)._dp, module._dp.record.released
                self.moments = [m.clone() for m in moments_of(module._dp.state.optimizer)]

    net, copies = Net(plan(), lambda: adamw(0.1)), Copies()
    for _ in range(2):
        run_fit(net, tmp_path, copies, max_epochs=1)
    assert copies.twin.record.released == copies.past
    assert [segment.n_steps for segment in copies.past.values()] == [4, 2]
    assert len(copies.moments) > 1
    assert all(map(torch.equal, moments_of(copies.twin.optimizer), copies.moments))


def moments_of(state: Any) -> list[torch.Tensor]:
    return [value for value in state_dict(state).values() if isinstance(value, torch.Tensor)]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_a_copy_of_a_run_that_is_behind_its_record_counts_all_of_it(tmp_path):
    run_fit(still(), tmp_path, saver(tmp_path), max_epochs=1)
    net = still()
    run_fit(net, tmp_path, ckpt=tmp_path / "step=3.ckpt", max_steps=3, max_epochs=-1)
    twin = copy.deepcopy(net)
    assert twin.privacy_spent().n_steps == net.privacy_spent().n_steps == 4
    noise_of_fit(twin, tmp_path)
    assert twin.privacy_spent().n_steps == 8


def test_weights_from_a_checkpoint_do_not_bring_back_its_noise(tmp_path):
    net = still()
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(net, make_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    first = noise_of_fit(still(), tmp_path)  # what that fit used
    loaded = Flat.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded.privacy, loaded.optimizer = plan(), lambda: sgd(lr=1.0)
    assert loaded.privacy_spent().n_steps == 4
    assert not reused(first, noise_of_fit(loaded, tmp_path))
    assert loaded.privacy_spent().n_steps == 8
    twin = Flat.load_from_checkpoint(tmp_path / "a.ckpt")
    twin.privacy, twin.optimizer = plan(), lambda: sgd(lr=1.0)
    assert not reused(noise_of_fit(copy.deepcopy(twin), tmp_path), noise_of_fit(twin, tmp_path))


def test_whatever_begins_anew_has_a_key_of_its_own(tmp_path):
    """Also if the plan names the key, and whatever the runs before have come to."""
    keys, short, long = {key(7)}, still(), still()
    for net, epochs in ((short, 1), (long, 2)):
        trainer = make_trainer(tmp_path, max_epochs=epochs)
        trainer.fit(net, make_loader())
        path = tmp_path / f"{epochs}.ckpt"
        trainer.save_checkpoint(path)
        keys.add(key_of_next_fit(Flat.load_from_checkpoint(path, privacy=plan()), tmp_path))
        loaded = Flat.load_from_checkpoint(path, privacy=plan())
        for twin in (copy.deepcopy(loaded), copy.deepcopy(loaded)):
            keys.add(key_of_next_fit(twin, tmp_path))
        for module in (net, loaded, net, loaded):
            module.reset_privacy()
            keys.add(key_of_next_fit(module, tmp_path))
    assert len(keys) == 1 + 2 * 7


def test_optimizer_state_is_adopted_only_by_the_same_optimizer(tmp_path):
    net = Net(optimizer=lambda: adamw(lr=0.01))
    for _ in range(2):
        make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    assert net._dp.state.optimizer["step"] == 8
    net.optimizer = lambda: sgd(lr=linear_schedule(1.0, 0.0, 10))
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(net, make_loader())
    assert net._dp.state.optimizer["step"] == 4
    assert net._dp.state.noise.step == 12
    # What LearningRateMonitor shows is what the next update applies.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.6)


def test_target_epsilon_counts_what_was_spent_before(tmp_path):
    net = Net(plan(noise_multiplier=2.0))
    make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    before = net.privacy_spent().epsilon
    net.privacy = plan(target_epsilon=3.0)
    make_trainer(tmp_path, max_epochs=2).fit(net, make_loader())
    spent = net.privacy_spent()
    assert 0 < before < 2.97 < spent.epsilon <= 3.0
    assert spent.n_steps == 12
    (_, four), (event, eight) = net._dp.record.ledger.process.segments
    assert (four, eight) == (4, 8)
    assert event.noise_multiplier == spent.plan["noise_multiplier"]


def test_target_epsilon_already_spent_is_refused_before_a_step(tmp_path):
    net = Net()
    make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    weights = copy.deepcopy(net.state_dict())
    net.privacy = plan(target_epsilon=1.0)
    with pytest.raises(PrivacyError, match=r"target_epsilon=1\.0"):
        make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    assert net.privacy_spent().n_steps == 4
    torch.testing.assert_close(net.state_dict(), weights, rtol=0, atol=0)


@pytest.mark.parametrize(("n", "batch_size"), [(24, 12), (24, 8), (24, 4), (24, 6)])
def test_one_trainer_twice_hits_the_target_whatever_the_length_of_an_epoch(n, batch_size, tmp_path):
    """Lightning's own estimate takes the first fit's epochs for as long as the second's."""
    net = Net(plan(noise_multiplier=3.0))
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(net, make_loader())
    net.privacy = plan(target_epsilon=3.0)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(net, make_loader(Points(n), batch_size=batch_size))
    spent = net.privacy_spent()
    assert spent.n_steps == 8 + 2 * (n // batch_size)
    assert 2.97 < spent.epsilon <= 3.0


def test_a_finished_trainer_is_named_instead_of_called_open_ended(tmp_path):
    net = Net()
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(net, make_loader())
    trainer.fit(net, make_loader())  # nothing left to do, as in Lightning
    assert net.privacy_spent().n_steps == 4
    net.privacy = plan(target_epsilon=9.0)
    with pytest.raises(PrivacyError, match=r"no step left to make.*max_epochs=1"):
        trainer.fit(net, make_loader())


def test_no_step_goes_beyond_the_plan(tmp_path):
    class OneMoreEpoch(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            trainer.fit_loop.max_epochs = 3

    net = Net(plan(target_epsilon=3.0))
    with pytest.raises(PrivacyError, match="calibrated to 8 steps"):
        make_trainer(tmp_path, callbacks=[OneMoreEpoch()]).fit(net, make_loader())
    assert net.privacy_spent().n_steps == 8
    assert net.privacy_spent().epsilon <= 3.0


def test_private_after_non_private_stays_infinite(tmp_path):
    net = Net(NonPrivate())
    make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    net.privacy = plan()
    make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    assert net.privacy_spent().epsilon == float("inf")
    assert net.privacy_spent().n_steps == 8


@pytest.mark.parametrize(
    ("strategy", "loader"),
    [("opake_ddp", make_loader), ("auto", lambda: PoissonLoader(Points(), 6))],
    ids=["opake_ddp", "single device"],
)
def test_reloaded_loaders_go_on_where_the_last_one_stopped(tmp_path, strategy, loader):
    class Loads(Net):
        def train_dataloader(self):
            return loader()

        def on_train_epoch_start(self):
            """Overridden without super(), which must not matter."""

    once, every = Net(), Loads()
    make_trainer(tmp_path).fit(once, make_loader())
    make_trainer(tmp_path, strategy=strategy, reload_dataloaders_every_n_epochs=1).fit(every)
    torch.testing.assert_close(once.state_dict(), every.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("mechanism", [plan, mf_plan])
def test_a_fit_after_another_shares_no_noise_with_a_checkpoint_that_goes_on(mechanism, tmp_path):
    """Both come to step 4, with other data, and their difference must not be without noise."""

    def resumed(**trainer: Any) -> Net:
        net = still(mechanism())
        fitter = make_trainer(tmp_path, max_epochs=2, **trainer)
        fitter.fit(net, make_loader(), ckpt_path=tmp_path / "half.ckpt")
        return net

    half = still(mechanism())
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[StopAfter(4)])
    trainer.fit(half, make_loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    keys = {half._dp.state.noise.key, *(key_of_next_fit(half, tmp_path) for _ in range(2))}
    assert len(keys) == 3
    assert resumed()._dp.state.noise.key in keys  # the run itself, to its end
    for steps in (1, 2):  # another past each time; the same one would come to the same noise
        keys.add(key_of_next_fit(resumed(callbacks=[StopAfter(steps)]), tmp_path))
    assert len(keys) == 5


def test_a_fit_after_a_resume_that_had_nothing_left_to_do_shares_no_noise_either(tmp_path):
    keys, end = {key(7)}, tmp_path / "end.ckpt"
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(still(), make_loader())
    trainer.save_checkpoint(end)
    for data in (Points(30), Points(31)):
        net = still()
        make_trainer(tmp_path, max_epochs=1).fit(net, make_loader(), ckpt_path=end)
        keys |= {net._dp.state.noise.key, key_of_next_fit(net, tmp_path, data)}
    assert len(keys) == 4


def key_of_next_fit(net: Net, path: Any, data: Any = None) -> Any:
    make_trainer(path, max_epochs=1).fit(net, make_loader(data or Points(30), batch_size=10))
    return net._dp.state.noise.key


class StopAfter(pl.Callback):
    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.left -= 1
        trainer.should_stop = self.left <= 0


@pytest.mark.parametrize("fits", [0, 1])
def test_what_is_loaded_from_one_pickle_twice_shares_no_noise(fits, tmp_path):
    net = still()
    noise_of_fit(net, tmp_path)
    if not fits:  # its live key has not been used yet
        net = copy.deepcopy(net)
    nets = [net]
    for _ in range(2):
        twin = still()
        twin._dp = pickle.loads(pickle.dumps(net._dp))
        nets.append(twin)
    noises = [noise_of_fit(net, tmp_path) for net in nets]
    assert not any(reused(a, b) for a, b in itertools.combinations(noises, 2))
    assert [net.privacy_spent().n_steps for net in nets] == [8, 8, 8]


def test_processes_that_a_module_is_spawned_into_share_no_key_either(tmp_path, monkeypatch):
    """Unless it is our launcher that starts them, which says that they are one run."""
    net = still()
    noise_of_fit(net, tmp_path)
    monkeypatch.setattr(_past, "get_spawning_popen", lambda: "one")
    sent = pickle.dumps(net._dp)
    monkeypatch.undo()
    keys = {net._dp.record.key}
    for _ in range(2):
        twin = still()
        twin._dp = pickle.loads(sent)
        assert twin._dp.record.key == net._dp.record.key  # of which it may go on
        keys.add(key_of_next_fit(twin, tmp_path))
    assert len(keys) == 3


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("fits", [0, 1])
def test_processes_that_a_run_is_forked_into_share_no_key(fits, tmp_path):
    net = still()
    noise_of_fit(net, tmp_path)
    net = net if fits else copy.deepcopy(net)

    def next_key() -> str:
        return key_of_next_fit(net, tmp_path).hex()

    def in_a_fork() -> str:
        out, into = os.pipe()
        child = os.fork()
        if not child:
            os.write(into, next_key().encode())
            os._exit(0)
        os.waitpid(child, 0)
        return os.read(out, 100).decode()

    assert len({in_a_fork(), in_a_fork(), next_key()}) == 3
    assert net._dp.record.path[-1].startswith("fit::")  # while the run itself is reproducible


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_second_fit_in_started_processes_is_reproducible(method, tmp_path):
    net = Net(plan(), partial(adamw, 0.05))
    for _ in range(2):
        trainer = make_trainer(tmp_path, strategy=OpakeDDP(start_method=method), max_epochs=1)
        trainer.fit(net, make_loader())
    assert [entry.split(":")[:2] for entry in net._dp.record.path] == [["fit", ""]] * 2


@pytest.mark.parametrize(("kind", "part"), [(Fit, "step"), (Run, "go_on")])
def test_a_fit_that_fails_before_its_first_step_leaves_no_used_key(
    kind, part, tmp_path, monkeypatch
):
    net = still()
    noise_of_fit(net, tmp_path)
    before = net._dp.state.noise.key
    kept = getattr(kind, part)
    monkeypatch.setattr(kind, part, lambda: "which takes more arguments")
    with pytest.raises(TypeError, match="takes 0 positional arguments"):
        noise_of_fit(net, tmp_path)
    assert (net._dp.state.noise.key, net.privacy_spent().n_steps) == (before, 4)
    monkeypatch.setattr(kind, part, kept)
    noise_of_fit(net, tmp_path)
    assert before != net._dp.state.noise.key == derive(key(7), net._dp.record.path)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_steps_without_privacy_count_while_recorded_ones_are_repeated(tmp_path):
    save = saver(tmp_path / "a", every=1)
    make_trainer(tmp_path, callbacks=[save]).fit(Net(), make_loader())
    net = Net()
    make_trainer(tmp_path, callbacks=[StopAfter(1)]).fit(
        net, make_loader(), ckpt_path=tmp_path / "a" / "step=4.ckpt"
    )
    assert net.privacy_spent().n_steps == 8  # 5 of which it has made itself
    net.privacy = NonPrivate()
    make_trainer(tmp_path, max_epochs=-1, max_steps=2).fit(net, make_loader())
    spent = net.privacy_spent()
    assert (spent.n_steps, spent.epsilon) == (10, float("inf"))


class FailsOnce(Net):
    """Its loss raises in a process that was started, at step 3, while ``fails`` is set."""

    fails = False

    def per_example_loss(self, batch: Any) -> torch.Tensor:
        if self.fails and self.trainer.global_step == 3:
            raise ValueError("the loss of the user")
        return super().per_example_loss(batch)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("fits", [0, 1])
def test_started_processes_that_fail_have_used_their_keys_and_are_counted(fits, tmp_path):
    def fit(folder: str) -> None:
        strategy = OpakeDDP(start_method="spawn")
        save = saver(tmp_path / folder, every=1)
        trainer = make_trainer(tmp_path, max_epochs=1, strategy=strategy, callbacks=[save])
        trainer.fit(net, make_loader())

    def used(folder: str) -> str:
        saved = torch.load(next((tmp_path / folder).glob("*.ckpt")), weights_only=True)
        return saved["optimizer_states"][0]["opake_lightning"]["key_digest"]

    net = FailsOnce(plan(), partial(adamw, 0.05))
    for _ in range(fits):
        fit("a")
    net.fails = True
    with pytest.raises(Exception, match="the loss of the user"):
        fit("b")
    net.fails = False
    fit("c")
    assert used("b") != used("c")
    # The first fit's record, which is where the main process can look, knows of them as well.
    assert net.privacy_spent().n_steps == (4 + 3 + 4 if fits else 4)
    assert net.privacy_spent().complete == bool(fits)


def test_second_and_third_fits_are_reproducible(tmp_path):
    """As long as nothing was resumed, who names a key gets the same run again."""
    ends = []
    for _ in range(2):
        net = still()
        fits = [noise_of_fit(net, tmp_path) for _ in range(3)]
        ends.append(torch.stack(fits[1] + fits[2]))
    assert torch.equal(*ends)
