"""What a run says about itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar

from opake_lightning.plan import NonPrivate, PrivateMechanism

__all__ = ["PrivacySpent"]


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
    """

    epsilon: float
    delta: float
    n_steps: int
    plan: dict[str, Any]


def summary(
    mechanism: PrivateMechanism | NonPrivate, *, steps: int | None, spent_steps: int
) -> str:
    """The start-up lines."""
    if isinstance(mechanism, NonPrivate):
        return "opake_lightning: NonPrivate() run, no clipping and no noise: ε = ∞."
    plan = mechanism.plan
    delta = plan.target_delta
    target = "none (σ given)" if plan.target_epsilon is None else f"ε = {plan.target_epsilon:g}"
    clipping = mechanism.clipping
    rows = [
        *mechanism.rows(),
        ("clipping norm C", clipping if isinstance(clipping, str) else f"{clipping:g}"),
        ("planned steps", "open-ended" if steps is None else f"{steps}"),
        ("target", f"{target} at δ = {delta:g}"),
    ]
    if mechanism.rows_may_mix_before_the_loss:
        rows.append(("rows", "may mix before the loss, in collate_fn or batch hooks"))
    if spent_steps:
        rows.append(("spent before", f"{spent_steps} steps"))
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


def make_delta_legible(trainer: pl.Trainer) -> None:
    """Show four significant digits in a rich bar, whose three decimals make δ = 1e-5 read 0.000."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and bar.theme.metrics_format == ".3f":
        # The default theme is one object for all bars, so it is replaced, not changed.
        bar.theme = replace(bar.theme, metrics_format=".4g")
