"""Train, stop, kill, resume, change, copy, in any order; what must hold is checked after each.

All checkpoints of one machine lie in one folder, beside the records of their runs, until some are
copied elsewhere. What must be counted, and what must be refused, is the model's to say
(:mod:`tests.trainer.machine_observer`).
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import secrets
import shutil
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from opake_lightning import CheckpointError, PrivacyError
from opake_lightning.accounting import Ledger
from opake_lightning.dpsgd import noise as independent_noise
from opake_lightning.dpsgd.sampling import rank_share
from opake_lightning.random import RngKey, key
from opake_lightning.trainer._run import Run
from tests.trainer.helpers import Net, Points, make_loader, make_trainer, on_plans_key
from tests.trainer.machine_callbacks import Break, Stop, Track
from tests.trainer.machine_observer import (
    CHANGES,
    CORRELATED,
    DELTA,
    Horizon,
    KilledError,
    Observer,
    Past,
    Record,
    Releases,
    Saved,
    Setup,
    all_of,
    epsilon_of,
    weights_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no record of released steps:UserWarning"),
]

SETUPS = [
    *(Setup(kind) for kind in ("dpsgd", "banded", "partition", "target")),
    *(Setup(kind, key(7)) for kind in ("dpsgd", "banded", "partition", "target")),
    # What banded noise has to take back is as secret as the key, and in the checkpoint.
    *(Setup(kind, key(7), apart=True) for kind in ("dpsgd", "partition", "target")),
]
PLACES = ["on_train_batch_start", "loss", "noise", "apply", "batch_end"]


class Machine(RuleBasedStateMachine):
    """The module at hand, what it was made from, and all checkpoints so far."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name)
        self.observer = Observer()
        self.saved: list[Saved] = []
        self.weights: dict[tuple[str, int], str] = {}
        self.numbers = itertools.count()

    def teardown(self) -> None:
        self._folder.cleanup()

    # -- rules ----------------------------------------------------------------------------------

    @initialize(setup=st.sampled_from(SETUPS), steps=st.integers(1, 5), save_first=st.booleans())
    def begin(self, setup: Setup, steps: int, save_first: bool) -> None:
        self.net = setup.net()
        past = Past(setup, self.path, next(self.numbers), self.new_horizon(setup))
        self.train(past, stop=steps, save_first=save_first)

    @rule(
        change=st.sampled_from([None, *CHANGES]), steps=st.integers(1, 4), save_first=st.booleans()
    )
    def another_fit(self, change: str | None, steps: int, save_first: bool) -> None:
        self.fit_again(change, stop=steps, save_first=save_first)

    @rule(where=st.sampled_from(PLACES), after=st.integers(0, 2), save_first=st.booleans())
    def exception(self, where: str, after: int, save_first: bool) -> None:
        """An exception in a fit, and the same module is trained on."""
        try:
            self.fit_again(None, kill=(where, after), save_first=save_first)
        except KilledError:
            self.fit_again("batch_size", stop=1)

    @rule(where=st.data(), steps=st.integers(1, 6), elsewhere=st.booleans(), same=st.booleans())
    def resume(self, where: Any, steps: int, elsewhere: bool, same: bool) -> None:
        """With the record of the run there, or as a file that was copied elsewhere."""
        self.resume_from(self.choose(where), elsewhere=elsewhere, same=same, stop=steps)

    @rule(
        where=st.data(),
        change=st.sampled_from([None, *CHANGES]),
        elsewhere=st.sampled_from(["neither", "before", "after"]),
        kill=st.sampled_from(PLACES),
        after=st.integers(0, 3),
        save_first=st.booleans(),
    )
    def kill(
        self, where: Any, change: str, elsewhere: str, kill: str, after: int, save_first: bool
    ) -> None:
        """The process dies in the middle of a resumed fit: its last checkpoint is what is left."""
        saved, count = self.choose(where), len(self.saved)
        try:
            how = {"how": "fork", "elsewhere": elsewhere == "before", "save_first": save_first}
            self.resume_from(saved, change, **how, kill=(kill, after))
        except KilledError:
            saved = self.saved[-1] if len(self.saved) > count else saved
            self.resume_from(saved, how="fork", elsewhere=elsewhere == "after", stop=1)

    @rule(
        where=st.data(),
        change=st.sampled_from([*CHANGES]),
        how=st.sampled_from(["refuse", "fork"]),
        steps=st.integers(1, 4),
        elsewhere=st.booleans(),
        save_first=st.booleans(),
    )
    def change(
        self, where: Any, change: str, how: str, steps: int, elsewhere: bool, save_first: bool
    ) -> None:
        """Resume with something changed: refused by name, or with a key of its own."""
        more = {"elsewhere": elsewhere, "stop": steps, "save_first": save_first}
        self.resume_from(self.choose(where), change, how=how, **more)

    @rule(
        where=st.data(),
        change=st.sampled_from([None, *CHANGES]),
        published=st.booleans(),
        steps=st.integers(1, 3),
    )
    def reload_weights(self, where: Any, change: str | None, published: bool, steps: int) -> None:
        """Train on from weights alone: the ledger comes along, and no key does."""
        saved = self.publish() if published and self.is_ready() else self.choose(where)
        self.load(saved)
        self.fit_again(change, stop=steps)

    @rule(take=st.booleans(), change=st.sampled_from([None, *CHANGES]))
    def deepcopy(self, take: bool, change: str | None) -> None:
        """Two modules go on, one of them a copy."""
        twin, past = copy.deepcopy(self.net), replace(self.past, record=Record())
        assert twin.privacy_spent() == self.net.privacy_spent()
        both = [(self.net, self.past), (twin, past)]
        for self.net, self.past in both if take else reversed(both):
            self.fit_again(change, stop=1)
            change = None

    @rule()
    def query(self) -> None:
        one, other = self.net.privacy_spent(), self.net.privacy_spent()
        assert one == other
        assert self.net._dp.record.ledger.epsilon_bound(DELTA) >= one.epsilon
        assert Ledger.from_dict(self.net._dp.record.ledger.to_dict()) == self.net._dp.record.ledger

    @precondition(lambda self: self.is_ready())
    @rule(world_size=st.integers(2, 4))
    def change_world_size(self, world_size: int) -> None:
        """What W ranks would do at this step comes to what one does.

        Ranks are taken one after the other, in one process; other tests have real ones.
        """
        run = self.net._dp
        rng, step = run.position()
        whole = run.draw(rng, step, rank=0, world_size=1)
        shares = [run.draw(rng, step, rank=r, world_size=world_size) for r in range(world_size)]
        assert np.array_equal(np.sort(np.concatenate(shares)), whole)
        assert all(
            np.array_equal(s, rank_share(whole, rank=r, world_size=world_size))
            for r, s in enumerate(shares)
        )
        noise = torch.zeros(300_000)  # several blocks
        expected = independent_noise.add_normal_(rng, torch.zeros_like(noise), 1.5)
        for r in range(world_size):
            independent_noise.add_normal_(rng, noise, 1.5, share=(r, world_size))
        assert torch.equal(noise, expected)

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def no_noise_is_used_for_two_gradients(self) -> None:
        assert not self.observer.faults, self.observer.faults

    @invariant()
    def the_ledger_counts_what_was_released(self) -> None:
        """No fewer, nor more: what a kill interrupts here was recorded, or was not released."""
        seen = all_of(self.past.known)
        assert self.net.privacy_spent().n_steps == len(seen)
        assert len({release.stream for release in seen}) == len(seen)  # a step, a stream

    @invariant()
    def epsilon_is_that_of_another_accountant(self) -> None:
        spent, theirs = self.net.privacy_spent(), epsilon_of(self.past.known)
        assert theirs <= spent.epsilon * 1.001
        assert spent.epsilon <= theirs * 1.001
        target = self.past.setup.target if self.is_ready() else None
        if target is not None and spent.plan.get("target_epsilon") == target:
            assert spent.epsilon <= target

    @invariant()
    def an_unbroken_run_would_be_here_too(self) -> None:
        past, run = self.past, self.net._dp
        if past.unbroken:
            path = _unbroken(past.setup, run.state.noise.key)
            assert weights_of(self.net) == path[run.state.step]

    # -- inside ---------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Not so a module that was only loaded, or whose last fit was refused."""
        return isinstance(self.net._dp, Run)

    def choose(self, where: Any) -> Saved:
        """One of the checkpoints, by number: they are too long to print."""
        return self.saved[where.draw(st.integers(0, len(self.saved) - 1))]

    def new_horizon(self, setup: Setup, n_steps: int | None = None) -> Horizon | None:
        if setup.kind not in CORRELATED:
            return None
        return Horizon(next(self.numbers), setup, n_steps or setup.max_steps)

    def fit_again(self, change: str | None, **how: Any) -> None:
        """Fit the module at hand once more; a target that is spent refuses it."""
        setup, counted = self.past.setup.changed(change), self.past.counted()
        part, horizon = next(self.numbers), self.new_horizon(setup)
        past = self.past.begun(setup, part, horizon, after=counted)
        self.net.privacy, self.net.optimizer = setup.plan(), setup.optimizer
        try:
            self.train(past, **how)
        except PrivacyError as error:
            if not _is_spent(error, setup, counted):
                raise

    def resume_from(
        self,
        saved: Saved,
        change: str | None = None,
        *,
        how: str = "refuse",
        elsewhere: bool = False,
        same: bool = False,
        **fit: Any,
    ) -> None:
        """Resume: repeat what is recorded, or be refused, or go on with a new key."""
        setup = saved.past.setup.changed(change)
        if elsewhere:
            saved = self.copy_elsewhere(saved)
        before = saved.past.setup
        named = None if setup == before else before.refused_for(change)
        known, forks = saved.recorded(), named is not None
        if forks and how == "refuse":
            self.expect_refusal(saved, setup, named)
            return
        past = replace(saved.past, setup=setup, known=known)
        if forks:
            left = max(setup.max_steps - saved.global_step, 1)
            past = past.begun(setup, next(self.numbers), self.new_horizon(setup, left), after=known)
        if same and self.is_ready() and self.past.record is past.record:
            self.net.privacy, self.net.optimizer = setup.plan(how), setup.optimizer
        else:
            self.net = setup.net(how)
        try:
            self.train(past, ckpt=saved, **fit)
        except PrivacyError as error:
            if not forks or not _is_spent(error, setup, known):
                raise
            self.load(saved)

    def expect_refusal(self, saved: Saved, setup: Setup, named: str) -> None:
        net, told = setup.net(), rf"these differ: ([\w ]+ \(.*\), )*{re.escape(named)}[ .]"
        weights, past = weights_of(net), replace(saved.past, setup=setup)
        with (
            self.observer.watching(past),
            pytest.raises(CheckpointError, match=told),
        ):
            self.trainer(past).fit(net, self.loader(setup), ckpt_path=saved.path)
        assert weights_of(net) == weights
        assert net.privacy_spent().n_steps == 0

    def copy_elsewhere(self, saved: Saved) -> Saved:
        """A checkpoint in a folder that has no record of its run."""
        folder = self.path / f"elsewhere {next(self.numbers)}"
        folder.mkdir()
        past = replace(saved.past, folder=folder, record=Record(saved.past.known))
        return replace(saved, path=Path(shutil.copy(saved.path, folder)), past=past)

    def publish(self) -> Saved:
        """The module at hand, as a file of weights: no run goes on from it."""
        path = self.past.folder / "weights.ckpt"
        self.net.trainer.save_checkpoint(path, weights_only=True)
        content = path.read_bytes()
        assert self.net._dp.state.noise.key.hex().encode() not in content
        net, setup = self.past.setup.net(), self.past.setup
        with pytest.raises(CheckpointError, match="weights only"):
            self.trainer(self.past).fit(net, self.loader(setup), ckpt_path=path)
        return Saved(path, self.past, 0, weights_of(self.net))

    def load(self, saved: Saved) -> None:
        """Take up the weights of a checkpoint."""
        setup = saved.past.setup
        kwargs: dict[str, Any] = {"privacy": setup.plan(), "optimizer": setup.optimizer}
        self.net = Net.load_from_checkpoint(saved.path, weights_only=True, **kwargs)
        assert weights_of(self.net) == saved.weights
        since = saved.past.record.known
        self.past = replace(saved.past, setup=setup, record=Record(), since=since, unbroken=False)

    def trainer(self, past: Past, *callbacks: pl.Callback) -> pl.Trainer:
        limits = {"max_steps": past.setup.max_steps, "max_epochs": -1}
        return make_trainer(past.folder, **limits, callbacks=[*callbacks])

    def loader(self, setup: Setup) -> Any:
        return make_loader(Points(setup.n_examples), setup.batch_size)

    def train(
        self,
        past: Past,
        *,
        ckpt: Saved | None = None,
        stop: int | None = None,
        kill: tuple[str, int] | None = None,
        save_first: bool = False,
    ) -> None:
        """Fit the module at hand, which comes from ``past``, and note what becomes of it."""
        observer = self.observer
        observer.fail_after = kill[1] if kill and kill[0] == "noise" else None
        callbacks = [Break(*kill)] if kill else []
        callbacks += [Track(self, save_first), *([Stop(stop)] if stop else [])]
        trainer = self.trainer(past, *callbacks)
        path = None if ckpt is None else ckpt.path
        try:
            with observer.watching(past):
                trainer.fit(self.net, self.loader(past.setup), ckpt_path=path)
        finally:
            self.net.__dict__.pop("per_example_loss", None)
            vars(self.net._dp).pop("apply", None)
            self.past = observer.past


def _is_spent(error: PrivacyError, setup: Setup, counted: Releases) -> bool:
    """Whether a fit was refused because there is nothing left of its target, and rightly."""
    told = "covers all that a module ever spends" in str(error)
    return told and setup.target is not None and epsilon_of(counted) > 0.98 * setup.target


@lru_cache(maxsize=64)
def _unbroken(setup: Setup, rng: RngKey) -> dict[int, str]:
    """The weights after each step of a run on this key that nothing happens to."""
    net = replace(setup, key=rng, apart=False).net()
    weights = {0: weights_of(net)}

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            weights[trainer.global_step] = weights_of(pl_module)

    with tempfile.TemporaryDirectory() as folder, on_plans_key():
        limits = {"max_steps": setup.max_steps, "max_epochs": -1}
        trainer = make_trainer(Path(folder), **limits, callbacks=[Note()])
        trainer.fit(net, make_loader(Points(setup.n_examples), setup.batch_size))
    return weights


# -- the tests --------------------------------------------------------------------------------


# A failure is told as it was found: to find a shorter one takes minutes, and the longer test does.
_FOUND = {"phases": (Phase.generate,), "report_multiple_bugs": False}


@pytest.mark.slow  # most of it for the other accountant
def test_machine() -> None:
    """The same ones each time, from the profile in ``conftest.py``."""
    quick = settings(max_examples=3, stateful_step_count=10, **_FOUND)
    run_state_machine_as_test(Machine, settings=quick)


@pytest.mark.slow
def test_machine_for_longer() -> None:
    """More of them; MACHINE_SEED=... looks at others, and MACHINE_SEED=new at others each time."""
    number = os.environ.get("MACHINE_SEED", "1")
    number = secrets.randbelow(2**32) if number == "new" else int(number)

    @seed(number)
    class Seeded(Machine):
        pass

    longer = settings(
        derandomize=False, max_examples=10, stateful_step_count=20, report_multiple_bugs=False
    )
    try:
        run_state_machine_as_test(Seeded, settings=longer)
    except BaseException as error:
        error.add_note(f"To see it again, set MACHINE_SEED={number}")
        raise
