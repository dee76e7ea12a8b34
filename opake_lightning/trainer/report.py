"""What a run says about itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar

from opake_lightning.dpsgd.clipping import Adaptive
from opake_lightning.dpsgd.clipping._rule import bounds_of
from opake_lightning.plan import Mechanism, NonPrivate

__all__ = ["PrivacySpent"]


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """What a module has spent.

    Attributes:
        epsilon: ε, an upper bound, for adding or removing one example of the training data.
        delta: δ that ``epsilon`` is stated at.
        n_steps: Number of releases.
        plan: The plan's public numbers: clipping norm, noise multiplier, expected batch size, ...
    """

    epsilon: float
    delta: float
    n_steps: int
    plan: dict[str, Any]


def public_plan(mechanism: Mechanism | NonPrivate) -> dict[str, Any]:
    """The numbers of a mechanism that may be published with the weights."""
    if isinstance(mechanism, NonPrivate):
        return {"plan": "NonPrivate", "target_delta": mechanism.target_delta}
    return {
        "plan": "DPSGD",
        "clipping_norm": mechanism.clipping,
        "noise_multiplier": mechanism.noise_multiplier,
        "target_epsilon": mechanism.plan.target_epsilon,
        "target_delta": mechanism.plan.target_delta,
        "n_examples": mechanism.n_examples,
        "batch_size": mechanism.batch_size,
        "planned_steps": mechanism.planned_steps,
    }


def summary(mechanism: Mechanism | NonPrivate, *, steps: int | None, spent_steps: int) -> str:
    """The start-up lines."""
    if isinstance(mechanism, NonPrivate):
        return "opake_lightning: NonPrivate() run, no clipping and no noise: ε = ∞."
    plan = mechanism.plan
    delta = plan.target_delta
    target = "none (σ given)" if plan.target_epsilon is None else f"ε = {plan.target_epsilon:g}"
    rows = [
        ("sample rate q", f"{mechanism.sample_rate:.6g}"),
        ("expected batch", f"{mechanism.batch_size} of {mechanism.n_examples} examples"),
        ("noise multiplier σ", f"{mechanism.noise_multiplier:.6g}"),
        ("clipping norm C", _clipping(mechanism)),
        ("noise stddev σC/B", _noise(mechanism)),
        ("planned steps", "open-ended" if steps is None else f"{steps}"),
        ("target", f"{target} at δ = {delta:g}"),
        ("engine", plan.engine),
    ]
    if spent_steps:
        rows.append(("spent before", f"{spent_steps} steps"))
    lines = [f"  {name:<19} {value}" for name, value in rows]
    if delta * mechanism.n_examples >= 1:
        lines.append(
            f"  note: δ = {delta:g} is not below 1 / {mechanism.n_examples} examples; it allows a "
            "mechanism that publishes one example outright"
        )
    return "\n".join(["opake_lightning: private run", *lines])


def _clipping(mechanism: Mechanism) -> str:
    clipping = mechanism.clipping
    return clipping if isinstance(clipping, str) else f"{clipping:g}"


def _noise(mechanism: Mechanism) -> str:
    clip = mechanism.plan.clipping_norm
    sensitivity = math.hypot(*bounds_of(mechanism.rule.clipping_norm, 0))
    sigma = mechanism.gradient_noise_multiplier
    begins = " at first" if callable(clip) or isinstance(clip, Adaptive) else ""
    return f"{sigma * sensitivity / mechanism.batch_size:.6g}{begins}"


def make_delta_legible(trainer: pl.Trainer) -> None:
    """Show four significant digits in a rich bar, whose three decimals make δ = 1e-5 read 0.000."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and bar.theme.metrics_format == ".3f":
        # The default theme is one object for all bars, so it is replaced, not changed.
        bar.theme = replace(bar.theme, metrics_format=".4g")
