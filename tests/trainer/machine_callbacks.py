"""What a fit of ``test_machine.py`` is watched, stopped and broken by."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from tests.trainer.machine_observer import DELTA, KilledError, Saved, all_of, digest, weights_of


class Track(pl.Callback):
    """After each step: what was released is counted, the weights are what they were before."""

    def __init__(self, machine: Any, save_first: bool) -> None:
        self._machine, self._save_first, self._epsilon = machine, save_first, 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._check(pl_module)
        if self._save_first:
            self._save(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._check(pl_module)
        run, weights = pl_module._dp, weights_of(pl_module)
        place = digest(run.state.noise.key.hex().encode()), run.state.step
        assert self._machine.weights.setdefault(place, weights) == weights
        if trainer.global_step % 2 == 0:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._check(pl_module)
        self._save(trainer, pl_module)

    def _check(self, module: Any) -> None:
        ledger = module._dp.record.ledger
        assert ledger.n_steps == len(all_of(self._machine.observer.past.known))
        epsilon = ledger.epsilon(DELTA)
        assert epsilon >= self._epsilon
        self._epsilon = epsilon

    def _save(self, trainer: Any, module: Any) -> None:
        machine = self._machine
        past = machine.observer.past
        path = past.folder / f"{len(machine.saved)}.ckpt"
        trainer.save_checkpoint(path)
        machine.saved.append(Saved(path, past, trainer.global_step, weights_of(module)))


class Stop(pl.Callback):
    """Asks the trainer to stop after some steps, as a budget does."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._left -= 1
        trainer.should_stop = trainer.should_stop or self._left <= 0


class Break(pl.Callback):
    """Raises in one place, after some steps of this fit."""

    def __init__(self, where: str, after: int) -> None:
        self._where, self._left = where, after

    def _break(self, where: str) -> None:
        if where == self._where and self._left == 0:
            raise KilledError(where)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        run, loss, apply = pl_module._dp, pl_module.per_example_loss, pl_module._dp.apply

        def breaking_loss(batch: Any) -> Any:
            self._break("loss")
            return loss(batch)

        def breaking_apply(released: Any) -> None:
            run.__dict__.pop("apply")
            self._break("apply")
            apply(released)
            run.apply = breaking_apply

        if self._where == "loss":
            pl_module.per_example_loss = breaking_loss
        if self._where == "apply":
            run.apply = breaking_apply

    def on_train_batch_start(self, *args: Any) -> None:
        self._break("on_train_batch_start")

    def on_train_batch_end(self, *args: Any) -> None:
        self._break("batch_end")
        self._left -= 1
