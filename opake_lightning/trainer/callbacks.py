"""Callbacks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from opake_lightning import _check
from opake_lightning.errors import PrivacyError

__all__ = ["PrivacyBudget"]


class PrivacyBudget(pl.Callback):
    """Stop training before the step that would spend more than a budget.

    Guarantee: no step is made after which ``module.privacy_spent()`` at ``delta`` would exceed
    ``epsilon``; ``min_epochs`` and ``min_steps`` do not override that.

    Args:
        epsilon: ε, > 0.
        delta: δ that ``epsilon`` is stated at, in (0, 1).

    Attributes:
        last_step: How many steps the budget allows, of all that the module has made; None before
            a fit begins.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon = _check.positive("epsilon", epsilon)
        self.delta = _check.fraction("delta", delta, zero=False, one=False)
        self.last_step: int | None = None
        self._segment = ""
        self._minimum: tuple[int | None, int | None] | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Work out how many steps the budget allows."""
        self._look_ahead(_run_of(pl_module))
        self._stop_if_spent(trainer, pl_module)

    def _look_ahead(self, run: Any) -> None:
        self._segment = run.record.segment
        record, ledger = run.record, run.record.ledger
        more = ledger.steps_within(run.mechanism.event, self.epsilon, self.delta)
        self.last_step = record.step + record.to_repeat + more
        if not more and not ledger.epsilon(self.delta) <= self.epsilon:
            # Steps that a resumed run repeats cost nothing new, but here there is nothing to spend.
            self.last_step = record.step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Refuse the step that would overspend, should anything have kept the run going."""
        run = _run_of(pl_module)
        if run.record.segment != self._segment:  # another hook came after and had it open another
            self._look_ahead(run)
        if self.last_step is not None and run.record.step >= self.last_step:
            raise PrivacyError(
                f"the next step would spend more than ε = {self.epsilon} at δ = {self.delta}; "
                f"{self.last_step} steps are allowed and have been made"
            )

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Stop if this was the last step that the budget allows."""
        self._stop_if_spent(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the trainer its minimum back, for a fit without the budget."""
        if self._minimum is not None:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = self._minimum
            self._minimum = None

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """As at the end."""
        self.on_train_end(trainer, pl_module)

    def _stop_if_spent(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = _run_of(pl_module).record.step
        if self.last_step is None or steps < self.last_step:
            return
        rank_zero_info(
            f"PrivacyBudget: stopping after {steps} steps; another one would spend more than "
            f"ε = {self.epsilon:g} at δ = {self.delta:g}."
        )
        trainer.should_stop = True
        # A minimum number of epochs or steps must not carry the run past the budget.
        loop = trainer.fit_loop
        self._minimum = self._minimum or (loop.min_epochs, loop.epoch_loop.min_steps)
        loop.min_epochs, loop.epoch_loop.min_steps = 0, None


def _run_of(module: pl.LightningModule) -> Any:  # a Run, which this file must not know
    run: Any = getattr(module, "_dp", None)
    if getattr(run, "mechanism", None) is None:
        raise PrivacyError(
            f"PrivacyBudget needs a DPModule, got {type(module).__name__}, which spends nothing"
        )
    return run
