"""What a run says about itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities import rank_zero_info

from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.plan import NonPrivate, PrivateMechanism
from opake_lightning.trainer.callbacks import PrivacyBudget

if TYPE_CHECKING:
    from opake_lightning.trainer._run import Run

__all__ = ["PrivacySpent"]

# Steps between two evaluations of ε if the trainer's log_every_n_steps is 0, which logs nothing.
_INTERVAL = 50


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """What a module has spent.

    Attributes:
        epsilon: ε, an upper bound, for adding or removing one example of the training data; for
            blanking one, if ``plan["neighbours"]`` says so. Noise that is correlated over a run of
            declared length costs the whole of it from its first step on.
        delta: δ that ``epsilon`` is stated at.
        n_steps: Number of releases.
        plan: The plan's public numbers: clipping norm, noise multiplier, expected batch size, ...
            If ``plan["rows_may_mix_before_the_loss"]``, what is added or removed is one row of what
            ``collate_fn`` and batch hooks returned, and not one example of the data.
        complete: Whether all releases are known. If not, ``epsilon`` is a lower bound: a run was
            resumed without the record of released steps that lay beside its checkpoint, or weights
            were loaded from a file that says nothing of how they were trained.
    """

    epsilon: float
    delta: float
    n_steps: int
    plan: dict[str, Any]
    complete: bool = True

    def __str__(self) -> str:
        """One line.

        >>> print(PrivacySpent(2.9997, 1e-4, 72, {}))
        ε = 2.9997 at δ = 0.0001, 72 steps
        >>> print(PrivacySpent(0.0, 1e-5, 0, {}, complete=False))
        no record of what these weights have cost
        """
        if not self.n_steps and not self.complete:
            return "no record of what these weights have cost"
        sign, more = ("=", "") if self.complete else ("≥", ", and those that nobody recorded")
        return f"ε {sign} {self.epsilon:.5g} at δ = {self.delta:g}, {self.n_steps} steps{more}"


def summary(mechanism: PrivateMechanism | NonPrivate, *, steps: int | None, spent: Ledger) -> str:
    """The start-up lines of a fit of ``steps`` more steps, if that is known."""
    if isinstance(mechanism, NonPrivate):
        return "opake_lightning: NonPrivate() run, no clipping and no noise: ε = ∞."
    plan = mechanism.plan
    delta = plan.target_delta
    if plan.target_epsilon is not None:
        cost = ("target", f"ε = {plan.target_epsilon:g} at δ = {delta:g}")
    elif not steps:
        cost = ("ε", f"grows with every step, stated at δ = {delta:g}")
    else:
        event = mechanism.event
        # Any other costs the whole of its horizon from the first step on.
        whole = spent.spend(event, steps if isinstance(event, GaussianEvent) else 1)
        cost = ("projected ε", f"{_shown(whole.epsilon(delta))} at δ = {delta:g}")
    clipping = mechanism.clipping
    rows = [
        *mechanism.rows(),
        ("clipping norm C", clipping if isinstance(clipping, str) else f"{clipping:g}"),
        ("planned steps", "open-ended" if steps is None else f"{steps}"),
        cost,
    ]
    if mechanism.rows_may_mix_before_the_loss:
        rows.append(("rows", "may mix before the loss, in collate_fn or batch hooks"))
    if spent.n_steps:
        rows.append(("spent before", f"{spent.n_steps} steps"))
    lines = [f"  {name:<19} {value}" for name, value in rows]
    if mechanism.rows_may_mix_before_the_loss:
        lines.append(
            "  note: one example may move the gradients of others before the loss; the guarantee "
            "is for a change of one row after that"
        )
    if delta * mechanism.n_examples >= 1:
        lines.append(
            f"  note: δ = {delta:g} is not below 1 / {mechanism.n_examples} examples; it allows a "
            "mechanism that publishes one example outright"
        )
    return "\n".join(["opake_lightning: private run", *lines])


class Meter:
    """ε as it is logged during one fit: evaluated once for each interval between logged steps.

    Guarantee: what is logged at a step is at or above what had been spent by then. At every step
    that a logger writes, and after the last one, it is exactly that; in between it is ε of the next
    such step, since ε never falls from one step to the next.
    """

    def __init__(self) -> None:
        self._epsilon, self._valid_to, self._epoch = 0.0, -1, -1

    def show(self, run: Run, module: pl.LightningModule) -> None:
        """Log ε and δ after a step, if Lightning does not show them already.

        It shows what was logged until the epoch ends, and to log takes as long as a small model's
        forward pass.
        """
        trainer: Any = module.trainer
        n_steps, ahead, epoch = (
            run.record.n_steps,
            _steps_ahead(run, trainer),
            trainer.current_epoch,
        )
        held = n_steps == self._valid_to or (ahead and n_steps < self._valid_to)
        if held and epoch == self._epoch:
            return
        if not held:
            ledger, event = run.record.ledger, run.mechanism.event
            if isinstance(event, GaussianEvent):  # any other costs the same at every step
                ledger = ledger.spend(event, ahead)
            self._epsilon, self._valid_to = ledger.epsilon(run.delta), n_steps + ahead
        self._epoch = epoch
        shown: dict[str, Any] = {"on_step": True, "on_epoch": False, "batch_size": 1}
        module.log("privacy/epsilon", self._epsilon, **shown)
        module.log("privacy/delta", run.delta, **shown)
        # Of the bars alone, and short: they fit in one line of 80 columns.
        trainer._logger_connector._progress_bar_metrics["ε"] = _shown(self._epsilon)

    def finish(self, run: Run, trainer: Any) -> None:
        """Leave the exact value, whatever ended the fit."""
        if self._valid_to < 0:  # no step was made
            return
        every, ledger = trainer.log_every_n_steps, run.record.ledger
        # As a rule the last step was the one that the last evaluation was of.
        known = ledger.n_steps == self._valid_to
        epsilon = self._epsilon if known else ledger.epsilon(run.delta)
        last = {"privacy/epsilon": epsilon, "privacy/delta": run.delta}
        trainer.callback_metrics.update({name: torch.tensor(last[name]) for name in last})
        if not every or trainer.global_step % every:  # else a logger has it
            trainer._logger_connector.log_metrics(last, step=trainer.global_step - 1)
        if not run.mechanism.private:
            return
        path = getattr(trainer.checkpoint_callback, "best_model_path", "")
        target = run.record.plan.get("target_epsilon")
        cost = f"{'=' if run.record.complete else '≥'} {epsilon:.5g}"
        rank_zero_info(
            f"opake_lightning: private: ε {cost}{f' of {target:g}' if target else ''} at δ = "
            f"{run.delta:g}, {ledger.n_steps} steps{f'; checkpoint {path}' if path else ''}"
        )


def _steps_ahead(run: Run, trainer: Any) -> int:
    """Steps until the next one that is logged, or the last."""
    every, done = trainer.log_every_n_steps or _INTERVAL, trainer.global_step
    ahead: list[float] = [-done % every]
    if trainer.max_steps != -1:
        ahead.append(trainer.max_steps - done)
    if trainer.max_epochs not in (None, -1):
        length = trainer.num_training_batches  # inf for an iterable of unknown length
        epochs = trainer.max_epochs - trainer.current_epoch
        ahead.append(epochs * length - trainer.fit_loop.epoch_loop.batch_progress.current.ready)
    for callback in trainer.callbacks:
        if isinstance(callback, PrivacyBudget) and callback.last_step is not None:
            ahead.append(callback.last_step - run.record.step)
    return max(int(min(ahead)), 0)


def _shown(epsilon: float) -> str:
    """Two decimals, rounded up: a bound stays one."""
    return f"{math.ceil(100 * epsilon - 1e-6) / 100:.2f}" if math.isfinite(epsilon) else "∞"


def shorten_numbers(trainer: pl.Trainer) -> None:
    """Four significant digits in a rich bar: three decimals of a version number take a line."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and bar.theme.metrics_format == ".3f":
        # The default theme is one object for all bars, so it is replaced, not changed.
        bar.theme = replace(bar.theme, metrics_format=".4g")
