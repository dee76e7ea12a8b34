"""Plans: what a run promises, in one object that makes its parts agree.

A plan is what a user writes down. Together with what only the data and the trainer know (the size
of the dataset, the batch size, the number of steps) it becomes a :class:`Mechanism`, from which
sampler, clipping, noise and accounting all take the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from opake_lightning import _check
from opake_lightning._tree import layout_of
from opake_lightning.accounting import GaussianEvent, Ledger, calibrate
from opake_lightning.dpsgd import accounting as dpsgd_accounting
from opake_lightning.dpsgd.clipping import Adaptive, Auto, ClipState
from opake_lightning.dpsgd.clipping._engines import ENGINES, Engine
from opake_lightning.dpsgd.clipping._fixed import per_example_grad_fn
from opake_lightning.dpsgd.clipping._groups import group_numbers
from opake_lightning.dpsgd.clipping._rule import Rule, check_steps, rule_of
from opake_lightning.dpsgd.noise import NoiseState, gaussian_noise
from opake_lightning.dpsgd.sampling import expected_rate, poisson_indices, rank_share
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.random import RngKey, fold_in
from opake_lightning.scheduling import Schedule
from opake_lightning.step import Step, mean_grad, no_noise
from opake_lightning.types import PerGroup

__all__ = ["DPSGD", "Mechanism", "NonPrivate", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPSGD:
    """DP-SGD: Poisson sampling, per-example clipping, independent Gaussian noise.

    Give either ``noise_multiplier`` (and read ε off the run) or ``target_epsilon`` (and the noise
    is calibrated to the planned number of steps).

    Args:
        clipping_norm: L2 bound C on each example's gradient, in units of the gradient: a number; a
            function of the step; or what ``per_group``, ``per_layer``, ``adaptive`` or ``auto`` of
            :mod:`opake_lightning.dpsgd.clipping` returned.
        noise_multiplier: σ, noise standard deviation over C; 0 clips without protecting (ε = ∞).
            With ``adaptive`` that of the whole step, its counts included.
        target_epsilon: ε that the whole planned run may spend, including what the module has
            spent before.
        target_delta: δ, in (0, 1), that ε is stated at. Should be well below 1 / dataset size.
        microbatch_size: Examples differentiated at once; bounds memory, does not change results.
            None lets the engine choose.
        engine: How per-example gradients are clipped, which changes results by rounding only:
            ``"auto"`` takes the fastest that is right, ``"one_pass"`` insists on the fastest,
            ``"vmap"`` is the general one.
        key: Key of the run. None draws 128 bits from the operating system; ``random.key(7)``
            reproduces a run, and protects nobody from someone who knows the 7.
        on_changed_plan: What resuming a checkpoint of another plan does: ``"refuse"``, or
            ``"fork"``, which goes on with a new key, so that no noise is used for two gradients.

    Raises:
        PrivacyError: If not exactly one of ``noise_multiplier`` and ``target_epsilon`` is given,
            ``clipping_norm`` is not finite, or the counts of ``adaptive`` would cost more than σ.
        ValueError: If a number is out of range.

    >>> DPSGD(clipping_norm=1.0, target_epsilon=3.0, target_delta=1e-5).target_epsilon
    3.0
    """

    clipping_norm: float | PerGroup | Schedule | Adaptive | Auto
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_delta: float = 1e-5
    microbatch_size: int | None = None
    engine: Engine = "auto"
    key: RngKey | None = None
    on_changed_plan: Literal["refuse", "fork"] = "refuse"

    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check every argument."""
        if self.clipping_norm == float("inf"):
            raise PrivacyError(
                "clipping_norm=inf bounds nothing, so no noise would be enough; give a finite "
                "bound, or use NonPrivate() for a run without privacy"
            )
        rule = rule_of(self.clipping_norm)
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise PrivacyError(
                "give exactly one of noise_multiplier (and read ε off the run) and target_epsilon "
                f"(and σ is calibrated); got noise_multiplier={self.noise_multiplier!r}, "
                f"target_epsilon={self.target_epsilon!r}"
            )
        if self.noise_multiplier is not None:
            sigma = _check.non_negative("noise_multiplier", self.noise_multiplier)
            if isinstance(rule, Adaptive) and rule.count_noise_stddev is not None:
                rule.gradient_noise_multiplier(sigma, 1.0)  # whatever the batch size
        if self.target_epsilon is not None:
            _check.positive("target_epsilon", self.target_epsilon)
        _check.fraction("target_delta", self.target_delta, zero=False, one=False)
        if self.microbatch_size is not None:
            _check.positive_int("microbatch_size", self.microbatch_size)
        for name, options in (
            ("engine", ENGINES),
            ("on_changed_plan", ("refuse", "fork")),
        ):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {options}, got {getattr(self, name)!r}")
        if self.key is not None and not isinstance(self.key, RngKey):
            raise TypeError(f"key must be None or an RngKey (random.key(7)), got {self.key!r}")

    def resolve(
        self, *, n_examples: int, batch_size: int, planned_steps: int | None, spent: Ledger
    ) -> Mechanism:
        """Fix everything that the plan leaves open.

        Args:
            n_examples: Size n of the dataset.
            batch_size: Expected batch size; the sample rate is ``batch_size / n_examples``.
            planned_steps: Steps that are still to come; None if the run has no planned end.
            spent: What has been spent before; counts towards ``target_epsilon``.

        Raises:
            PrivacyError: If the batch is larger than the dataset, or there is a target but no
                planned end, or the target is already spent.
        """
        rate = expected_rate(batch_size, n_examples)
        if self.noise_multiplier is not None:
            return Mechanism(self, self.noise_multiplier, n_examples, batch_size, None)
        if not planned_steps:
            raise PrivacyError(
                f"target_epsilon={self.target_epsilon} needs a planned number of steps to calibrate"
                " the noise to, but this run is open-ended; set Trainer(max_epochs=...) or "
                "max_steps, or give noise_multiplier and stop the run with PrivacyBudget"
            )

        def process(sigma: float) -> Any:
            one = dpsgd_accounting.poisson(dpsgd_accounting.gaussian(sigma), sample_rate=rate)
            return spent.process + one * planned_steps

        assert self.target_epsilon is not None
        # Calibration aims at the last hundredth of the target, so beyond it there is nothing left;
        # it would find some enormous noise_multiplier, which trains nothing.
        before = spent.epsilon(self.target_delta)
        if not before <= 0.99 * self.target_epsilon:
            raise PrivacyError(
                f"target_epsilon={self.target_epsilon} covers all that a module ever spends, and "
                f"{spent.n_steps} steps have spent ε = {before:.4g} at δ = {self.target_delta:g} "
                "already; raise target_epsilon to train on, or start from new weights"
            )
        sigma = calibrate(
            process, target_epsilon=self.target_epsilon, target_delta=self.target_delta
        )
        return Mechanism(self, sigma, n_examples, batch_size, planned_steps)


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A plan with nothing left open; sampler, noise and accountant read the same fields.

    Attributes:
        plan: The plan.
        noise_multiplier: σ.
        n_examples: Size of the dataset.
        batch_size: Expected batch size, the public divisor.
        planned_steps: Steps that σ was calibrated for; None if σ was given.
    """

    plan: DPSGD
    noise_multiplier: float
    n_examples: int
    batch_size: int
    planned_steps: int | None

    def __post_init__(self) -> None:
        """Check what needs all the numbers: the split of the noise."""
        _ = self.gradient_noise_multiplier

    @property
    def rule(self) -> Rule:
        """How gradients are clipped."""
        return rule_of(self.plan.clipping_norm)

    @property
    def gradient_noise_multiplier(self) -> float:
        """Noise standard deviation of the gradient over its sensitivity.

        Adaptive clipping takes a part of the budget, which ``noise_multiplier`` is the whole of.

        Raises:
            PrivacyError: If it would take more than that.
        """
        if isinstance(self.rule, Adaptive):
            return self.rule.gradient_noise_multiplier(self.noise_multiplier, self.batch_size)
        return self.noise_multiplier

    @property
    def clipping(self) -> str | float:
        """The clipping norm in one plain value, a number or what it is made by."""
        return self.rule.describe(self.planned_steps)

    def check(self, params: Any, n_steps: int | None = None) -> None:
        """Refuse what clipping could not go through with.

        Args:
            params: The parameters that will be trained.
            n_steps: Number of steps that will be made, if it is known.

        Raises:
            PrivacyError: If the groups of ``per_group`` do not cover the parameters, each once.
            ValueError: If a schedule comes to a value that is no clipping norm.
        """
        rule = self.rule
        if rule.groups is not None:
            group_numbers(rule.groups, layout_of(params).treespec)
        check_steps(rule.clipping_norm, n_steps or 1)

    @property
    def sample_rate(self) -> float:
        """Probability that a step draws a given example."""
        return self.batch_size / self.n_examples

    @property
    def event(self) -> GaussianEvent:
        """What one step costs, as the ledger records it."""
        return GaussianEvent(self.noise_multiplier, self.sample_rate)

    def fingerprint(self) -> dict[str, str | int | float | None]:
        """What must be equal for a run to go on with the same streams; holds no secret."""
        key = self.plan.key
        return {
            "plan": "DPSGD",
            "clipping_norm": self.clipping,
            "noise_multiplier": self.plan.noise_multiplier,
            "target_epsilon": self.plan.target_epsilon,
            "target_delta": self.plan.target_delta,
            "n_examples": self.n_examples,
            "batch_size": self.batch_size,
            "planned_steps": self.planned_steps,
            "key": None if key is None else fold_in(key, "fingerprint").hex(),
        }

    def with_noise_multiplier(self, sigma: float) -> Mechanism:
        """The same mechanism with the σ that a checkpoint was calibrated to."""
        return replace(self, noise_multiplier=sigma)

    def draw(
        self, key: RngKey, step: int, *, rank: int = 0, world_size: int = 1
    ) -> NDArray[np.int64]:
        """One rank's share of the examples drawn at ``step``."""
        drawn = poisson_indices(key, step, n_examples=self.n_examples, sample_rate=self.sample_rate)
        return rank_share(drawn, rank=rank, world_size=world_size)

    def step(
        self, loss_fn: Callable[..., Any], optimizer: GradientTransformation, key: RngKey
    ) -> Step:
        """The step function for ``loss_fn(params, batch) -> (losses, aux)``."""
        rule = self.rule
        grad_fn = per_example_grad_fn(
            loss_fn,
            rule,
            has_aux=True,
            expected_batch_size=self.batch_size,
            microbatch_size=self.plan.microbatch_size,
            engine=self.plan.engine,
        )
        clip_state = rule.begin(key) if isinstance(rule, Adaptive) else ClipState()
        noise_fn, noise_state = gaussian_noise(
            noise_multiplier=self.gradient_noise_multiplier, key=key
        )
        return Step(grad_fn, noise_fn, optimizer, clip_state, noise_state)


@dataclass(frozen=True, slots=True)
class NonPrivate:
    """No clipping, no noise, no sampling: ordinary training, reported as ε = ∞.

    The user's loader is left as it is and the gradient is the mean over the batch at hand, so a
    run equals the same module trained by Lightning with the matching torch optimizer.
    """

    target_delta: ClassVar[float] = 1e-5
    private: ClassVar[bool] = False
    key: ClassVar[None] = None
    on_changed_plan: ClassVar[str] = "refuse"
    noise_multiplier: ClassVar[float] = 0.0

    @property
    def event(self) -> GaussianEvent:
        """A step without noise."""
        return GaussianEvent(0.0, 1.0)

    def fingerprint(self) -> dict[str, str | int | float | None]:
        """What must be equal for a run to go on."""
        return {"plan": "NonPrivate"}

    def step(
        self, loss_fn: Callable[..., Any], optimizer: GradientTransformation, key: RngKey
    ) -> Step:
        """The step function for ``loss_fn(params, batch) -> (losses, aux)``."""
        state = NoiseState(key)
        return Step(mean_grad(loss_fn), no_noise, optimizer, None, state, seed_forward=False)


Plan = DPSGD | NonPrivate
