"""What all private plans have in common, and all mechanisms that they become."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from opake_lightning import _check
from opake_lightning._tree import layout_of
from opake_lightning.accounting import Ledger, calibrate
from opake_lightning.dpsgd.clipping import Adaptive, Auto
from opake_lightning.dpsgd.clipping._engine import LARGE_NORM, refuse_engine
from opake_lightning.dpsgd.clipping._groups import group_numbers
from opake_lightning.dpsgd.clipping._rule import Rule, bounds_of, check_steps, rule_of
from opake_lightning.dpsgd.sampling import rank_share
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.random import RngKey
from opake_lightning.scheduling import Schedule
from opake_lightning.step import Step
from opake_lightning.types import PerGroup

__all__ = [
    "PlainDict",
    "PrivateMechanism",
    "PrivatePlan",
    "calibrated",
    "check_delta",
    "check_target",
]

PlainDict: TypeAlias = dict[str, str | int | float | None]


# What other libraries call the options of a plan.
_ELSEWHERE = {
    "max_grad_norm": "clipping_norm=",
    "l2_norm_clip": "clipping_norm=",
    "sigma": "noise_multiplier=",
    "noise": "noise_multiplier=",
    "epsilon": "target_epsilon=",
    "delta": "target_delta=",
    "sample_rate": "the loader's batch_size / len(dataset)",
    "batch_size": "the loader's batch_size",
    "epochs": "the trainer's max_epochs",
    "secure_mode": "always on: noise on the CPU is from an AES-256 keystream",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatePlan(ABC):
    """The options of every private plan; each plan explains them."""

    clipping_norm: float | PerGroup | Schedule | Adaptive | Auto
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_delta: float = cast("float", None)  # 1e-5, unless there is a target_epsilon
    allow_large_delta: bool = False
    microbatch_size: int | None = None
    engine: None = None
    key: RngKey | None = None
    on_changed_plan: Literal["refuse", "fork"] = "refuse"
    key_in_checkpoint: bool = True

    private: ClassVar[bool] = True
    # Whether the noise is made for a number of steps that must be known when the run begins.
    needs_horizon: ClassVar[bool] = False

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Name ours where a name of another library is given."""
        del args
        for name, ours in _ELSEWHERE.items():
            if name in options:
                raise TypeError(f"{cls.__name__} has no {name}=; it is {ours} here")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check every argument."""
        if self.clipping_norm == float("inf"):
            raise PrivacyError(
                "clipping_norm=inf bounds nothing, so no noise would be enough; give a finite "
                "bound, or use NonPrivate() for a run without privacy"
            )
        rule_of(self.clipping_norm)
        for name in ("clipping_norm", "noise_multiplier", "target_epsilon", "target_delta"):
            # One of numpy's is a float, too, but a checkpoint that holds it loads only with pickle.
            if isinstance(value := getattr(self, name), float):
                object.__setattr__(self, name, float(value))
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise PrivacyError(
                "give exactly one of noise_multiplier (and read ε off the run) and target_epsilon "
                f"(and σ is calibrated); got noise_multiplier={self.noise_multiplier!r}, "
                f"target_epsilon={self.target_epsilon!r}"
            )
        if self.noise_multiplier is not None:
            _check.non_negative("noise_multiplier", self.noise_multiplier)
        if self.target_epsilon is not None:
            _check.positive("target_epsilon", self.target_epsilon)
        if self.target_delta is None:  # pyright: ignore[reportUnnecessaryComparison]
            if self.target_epsilon is not None:
                raise PrivacyError(
                    f"target_epsilon={self.target_epsilon!r} says nothing without target_delta: "
                    "give the δ that it is to hold at, well below 1 / number of examples"
                )
            object.__setattr__(self, "target_delta", 1e-5)
        _check.fraction("target_delta", self.target_delta, zero=False, one=False)
        if not isinstance(self.allow_large_delta, bool):
            raise TypeError(
                f"allow_large_delta must be True or False, got {self.allow_large_delta!r}"
            )
        if self.microbatch_size is not None:
            _check.positive_int("microbatch_size", self.microbatch_size)
        refuse_engine(self.engine)
        if self.on_changed_plan not in ("refuse", "fork"):
            raise ValueError(
                f"on_changed_plan must be 'refuse' or 'fork', got {self.on_changed_plan!r}"
            )
        if self.key is not None and not isinstance(self.key, RngKey):
            raise TypeError(
                "key must be None or an RngKey (random.key(7), random.key_from_file(path)), got a "
                f"{type(self.key).__name__}"
            )
        if not isinstance(self.key_in_checkpoint, bool):
            raise TypeError(
                f"key_in_checkpoint must be True or False, got {self.key_in_checkpoint!r}"
            )
        if self.key is None and not self.key_in_checkpoint:
            raise PrivacyError(
                "key_in_checkpoint=False needs a key that is kept elsewhere, or no checkpoint "
                "could be resumed; make one with random.write_key_file(path), and give "
                "key=random.key_from_file(path)"
            )

    @abstractmethod
    def drawing(self, n_examples: int, batch_size: int) -> str:
        """How the examples of a step are drawn, in words."""

    @abstractmethod
    def resolve(
        self, *, n_examples: int, batch_size: int, planned_steps: int | None, spent: Ledger
    ) -> PrivateMechanism:
        """Fix everything that the plan leaves open.

        Args:
            n_examples: Size n of the dataset.
            batch_size: Expected batch size.
            planned_steps: Steps that are still to come; None if the run has no planned end.
            spent: What has been spent before; counts towards ``target_epsilon``.

        Raises:
            PrivacyError: If the batch is larger than the dataset, or there is a target but no
                planned end, or the target is already spent.
        """


@dataclass(frozen=True, slots=True)
class PrivateMechanism(ABC):
    """A private plan with nothing left open; sampler, noise and accountant read the same fields.

    Attributes:
        plan: The plan.
        noise_multiplier: σ.
        n_examples: Size of the dataset.
        batch_size: Expected batch size, the public divisor.
        planned_steps: Steps that σ, or correlated noise, was made for; None if any number will do.
        start: How many steps the module had made when these began.
        fit_steps: Steps of the whole fit that these are part of, if a fork began within one; None
            if they are all of it.
        rows_may_mix_before_the_loss: Whether the guarantee is for a change of one row of what
            ``collate_fn`` and batch hooks return, which may make one row of several examples.
    """

    plan: Any
    noise_multiplier: float
    n_examples: int
    batch_size: int
    planned_steps: int | None
    start: int = 0
    fit_steps: int | None = None
    rows_may_mix_before_the_loss: bool = False

    private: ClassVar[bool] = True

    # -- what a mechanism must say of itself ------------------------------------------------------

    @property
    @abstractmethod
    def event(self) -> Any:
        """What one step costs, as the ledger records it."""

    @property
    @abstractmethod
    def first_noise(self) -> float:
        """Noise on the gradient in the first step, over its sensitivity."""

    @abstractmethod
    def indices(self, key: RngKey, step: int) -> NDArray[np.int64]:
        """The examples drawn at ``step``, by all ranks together."""

    @abstractmethod
    def step(
        self,
        loss_fn: Callable[..., Any],
        optimizer: GradientTransformation,
        key: RngKey,
        params: Any = None,
    ) -> Step:
        """The step function for ``loss_fn(params, batch) -> (losses, aux)``.

        Args:
            loss_fn: Losses of a batch, one per example, and auxiliary output.
            optimizer: Any functional optimizer.
            key: Key of the run.
            params: The parameters, for a mechanism that keeps state of their shape.
        """

    @abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """What the start-up lines say of sampling and noise."""

    @abstractmethod
    def told(self) -> PlainDict:
        """What sets this run apart from others of the same kind, apart from numbers all have."""

    # -- what all have in common ------------------------------------------------------------------

    @property
    def rule(self) -> Rule:
        """How gradients are clipped."""
        return rule_of(self.plan.clipping_norm)

    @property
    def clipping(self) -> str | float:
        """The clipping norm in one plain value, a number or what it is made by."""
        return self.rule.describe(self._whole_fit)

    @property
    def noise_stddev(self) -> float:
        """Noise standard deviation of the first step, in units of the mean gradient."""
        sensitivity = math.hypot(*bounds_of(self.rule.clipping_norm, 0))
        return self.first_noise * sensitivity / self.batch_size

    def check(self, params: Any, n_steps: int | None = None) -> None:
        """Refuse what clipping could not go through with.

        Args:
            params: The parameters that will be trained.
            n_steps: Number of steps that will be made, if it is known.

        Raises:
            PrivacyError: If the groups of ``per_group`` do not cover the parameters, each once.
            ValueError: If a schedule comes to a value that is no clipping norm; or float32 cannot
                hold gradients, noise or their squares of this size.
        """
        rule = self.rule
        if rule.groups is not None:
            group_numbers(rule.groups, layout_of(params).treespec)
        check_steps(rule.clipping_norm, n_steps or 1)
        told = f"of the mean gradient (batch_size={self.batch_size}, {_told(self.plan)})"
        sensitivity = math.hypot(*bounds_of(rule.clipping_norm, 0)) / self.batch_size
        _check.size_of_noise(f"clipping_norm / batch_size {told}", sensitivity)
        stddev = _check.size_of_noise(f"the noise's standard deviation {told}", self.noise_stddev)
        if not stddev <= LARGE_NORM:
            raise ValueError(
                f"the noise's standard deviation {told} is {stddev!r}; of anything above "
                f"{LARGE_NORM:g} no square fits into float32, as adaptive optimizers need it. "
                "Lower clipping_norm or noise_multiplier, or rescale the loss"
            )

    def check_optimizer(self, optimizer: GradientTransformation, params: Any) -> None:
        """Refuse an optimizer that cannot use what is released.

        Raises:
            PrivacyError: If it cannot.
        """
        del optimizer, params  # all can use a noisy gradient

    def check_step(self, done: int) -> None:
        """Refuse a step that was not planned.

        Args:
            done: How many steps the module has made.

        Raises:
            PrivacyError: If all planned steps have been made.
        """
        if self.planned_steps is not None and done >= self.start + self.planned_steps:
            raise PrivacyError(
                f"the noise was calibrated to {self.planned_steps} steps, and they have been made; "
                f"another one {self._another_step}"
            )

    @property
    def _another_step(self) -> str:
        return (
            "would spend more than target_epsilon. Start another fit with a larger target, or more "
            "steps from the beginning"
        )

    def draw(
        self, key: RngKey, step: int, *, rank: int = 0, world_size: int = 1
    ) -> NDArray[np.int64]:
        """One rank's share of the examples drawn at ``step``."""
        return rank_share(self.indices(key, step), rank=rank, world_size=world_size)

    @property
    def _whole_fit(self) -> int | None:
        return self.planned_steps if self.fit_steps is None else self.fit_steps

    def fingerprint(self) -> PlainDict:
        """What must be equal for a run to go on with the same streams; holds no secret."""
        key = self.plan.key
        return {
            "plan": type(self.plan).__name__,
            "clipping_norm": self.clipping,
            "noise_multiplier": self.plan.noise_multiplier,
            "target_epsilon": self.plan.target_epsilon,
            "target_delta": self.plan.target_delta,
            "n_examples": self.n_examples,
            "batch_size": self.batch_size,
            "planned_steps": self._whole_fit,
            "key": None if key is None else key.digest(),
            "rows_may_mix_before_the_loss": self.rows_may_mix_before_the_loss,
            **self.told(),
        }

    def public(self) -> PlainDict:
        """The numbers that may be published with the weights."""
        return {
            "plan": type(self.plan).__name__,
            "clipping_norm": self.clipping,
            "noise_multiplier": self.noise_multiplier,
            "target_epsilon": self.plan.target_epsilon,
            "target_delta": self.plan.target_delta,
            "n_examples": self.n_examples,
            "batch_size": self.batch_size,
            "planned_steps": self.planned_steps,
            "rows_may_mix_before_the_loss": self.rows_may_mix_before_the_loss,
            **self.told(),
        }

    def with_noise_multiplier(self, sigma: float) -> Self:
        """The same mechanism with the σ that a checkpoint was calibrated to."""
        return replace(self, noise_multiplier=sigma)

    def beginning_at(self, step: int) -> Self:
        """The same mechanism for a module that has made ``step`` steps."""
        return replace(self, start=step)

    def resumed(self, noise_multiplier: float, planned_steps: int | None, start: int) -> Self:
        """The mechanism of a checkpoint with the same fingerprint, which may be of a fork."""
        part = planned_steps != self.planned_steps
        return replace(
            self,
            noise_multiplier=noise_multiplier,
            planned_steps=planned_steps,
            start=start,
            fit_steps=self.planned_steps if part else self.fit_steps,
        )

    def forked(self, spent: Ledger, *, left: int | None) -> PrivateMechanism:
        """The mechanism for the ``left`` steps of a fit of which another one made the first."""
        if self.planned_steps is None:
            return self.beginning_at(spent.n_steps)
        rest = self.plan.resolve(
            n_examples=self.n_examples,
            batch_size=self.batch_size,
            planned_steps=max(left or 0, 1),
            spent=spent,
        )
        mix = self.rows_may_mix_before_the_loss
        return replace(rest, fit_steps=self.planned_steps, rows_may_mix_before_the_loss=mix)


def _told(plan: PrivatePlan) -> str:
    return f"clipping_norm={plan.clipping_norm!r}, noise_multiplier={plan.noise_multiplier!r}"


def check_delta(plan: PrivatePlan, n_examples: int) -> None:
    """Refuse a δ so large that nobody is protected, unless the plan says that it is meant.

    Raises:
        PrivacyError: If δ is not below 1 / ``n_examples``.
    """
    if plan.target_delta * n_examples >= 1 and not plan.allow_large_delta:
        # A guarantee depends on it: whoever publishes one example outright has this δ, and any ε.
        raise PrivacyError(
            f"target_delta={plan.target_delta:g} is not below 1 / {n_examples} examples, so it "
            "allows a mechanism that publishes one of them outright; give a smaller one, such as "
            f"target_delta={0.1 / n_examples:.0e}, or allow_large_delta=True if it is meant"
        )


def check_target(plan: PrivatePlan, planned_steps: int | None, spent: Ledger) -> None:
    """Refuse a ``target_epsilon`` that no noise can keep.

    Raises:
        PrivacyError: If there is no planned end, or the target is spent.
    """
    if not planned_steps:
        raise PrivacyError(
            f"target_epsilon={plan.target_epsilon} needs a planned number of steps to calibrate"
            " the noise to, but this run is open-ended; set Trainer(max_epochs=...) or "
            "max_steps, or give noise_multiplier and stop the run with PrivacyBudget"
        )
    assert plan.target_epsilon is not None
    # Calibration aims at the last hundredth of the target, so beyond it there is nothing left;
    # it would find some enormous noise_multiplier, which trains nothing.
    before = spent.epsilon(plan.target_delta)
    if not before <= 0.99 * plan.target_epsilon:
        raise PrivacyError(
            f"target_epsilon={plan.target_epsilon} covers all that a module ever spends, and "
            f"{spent.n_steps} steps have spent ε = {before:.4g} at δ = {plan.target_delta:g} "
            "already; raise target_epsilon to train on, or start from new weights"
        )


def calibrated(plan: PrivatePlan, run: Callable[[float], Any]) -> float:
    """The σ at which ``run(σ)``, everything the module will have done, costs the plan's target."""
    assert plan.target_epsilon is not None
    return calibrate(run, target_epsilon=plan.target_epsilon, target_delta=plan.target_delta)
