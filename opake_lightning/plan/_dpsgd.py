"""DP-SGD as a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.dpsgd.clipping import Adaptive, ClipState
from opake_lightning.dpsgd.clipping._fixed import per_example_grad_fn
from opake_lightning.dpsgd.clipping._rule import rule_of
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.dpsgd.sampling import expected_rate, poisson_indices
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.plan._base import (
    PlainDict,
    PrivateMechanism,
    PrivatePlan,
    calibrated,
    check_delta,
    check_target,
)
from opake_lightning.random import RngKey
from opake_lightning.step import Step

__all__ = ["DPSGD", "Mechanism"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPSGD(PrivatePlan):
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
        target_delta: δ, in (0, 1), that ε is stated at. Must be below 1 / dataset size, and should
            be well below it. Required with ``target_epsilon``; else 1e-5.
        allow_large_delta: Take a δ that is not.
        microbatch_size: Examples differentiated at once; bounds memory, does not change results.
            None chooses by what some of them take.
        engine: Gone, since one engine is exact for every loss; passing anything is an error.
        key: Key of the run. None draws 128 bits from the operating system; ``random.key(7)``
            reproduces a run, and gives no protection if the 7 is guessed. A run with another plan,
            optimizer, dataset or first weights has other noise.
        on_changed_plan: What resuming does where plan or inputs changed: ``"refuse"``, or
            ``"fork"``, which goes on with a new key, so that no noise is used for two gradients.
        key_in_checkpoint: False leaves all keys out of checkpoints, which then need ``key`` to be
            resumed, and do not tell what the noise was without it; they hold a digest of the key,
            and are refused with another one. One such key will do for many runs: each that starts
            anew has noise of its own, which its checkpoints, with the key, lead back to. One that
            a run without this option has used is in that run's checkpoints.

    Raises:
        PrivacyError: If not exactly one of ``noise_multiplier`` and ``target_epsilon`` is given,
            ``target_epsilon`` comes without ``target_delta``, ``clipping_norm`` is not finite, the
            counts of ``adaptive`` would cost more than σ, or ``key_in_checkpoint=False`` comes
            without a key.
        ValueError: If a number is out of range.

    >>> DPSGD(clipping_norm=1.0, target_epsilon=3.0, target_delta=1e-5).target_epsilon
    3.0
    """

    def __post_init__(self) -> None:
        """Check every argument."""
        PrivatePlan.__post_init__(self)
        rule = rule_of(self.clipping_norm)
        if (
            self.noise_multiplier is not None
            and isinstance(rule, Adaptive)
            and rule.count_noise_stddev is not None
        ):
            # Whatever the batch size.
            rule.gradient_noise_multiplier(float(self.noise_multiplier), 1.0)

    @override
    def drawing(self, n_examples: int, batch_size: int) -> str:
        """How the examples of a step are drawn, in words; the start-up table has the numbers."""
        del n_examples, batch_size
        return "Poisson batches"

    @override
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
            PrivacyError: If the batch is larger than the dataset, δ is not below 1 / n, there is a
                target but no planned end, or the target is already spent.
        """
        rate = expected_rate(batch_size, n_examples)
        check_delta(self, n_examples)
        made = spent.n_steps
        if self.noise_multiplier is not None:
            return Mechanism(self, self.noise_multiplier, n_examples, batch_size, None, made)
        check_target(self, planned_steps, spent)
        assert planned_steps

        def run(sigma: float) -> Ledger:
            return spent.spend(GaussianEvent(sigma, rate), planned_steps)

        return Mechanism(self, calibrated(self, run), n_examples, batch_size, planned_steps, made)


@dataclass(frozen=True, slots=True)
class Mechanism(PrivateMechanism):
    """DP-SGD with nothing left open; attributes as in :class:`PrivateMechanism`."""

    def __post_init__(self) -> None:
        """Check what needs all the numbers: the split of the noise."""
        _ = self.gradient_noise_multiplier

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
    @override
    def first_noise(self) -> float:
        """Noise on the gradient in every step, over its sensitivity."""
        return self.gradient_noise_multiplier

    @property
    def sample_rate(self) -> float:
        """Probability that a step draws a given example."""
        return self.batch_size / self.n_examples

    @property
    @override
    def event(self) -> GaussianEvent:
        """What one step costs, as the ledger records it."""
        return GaussianEvent(self.noise_multiplier, self.sample_rate)

    @override
    def told(self) -> PlainDict:
        """Nothing more: the numbers say it all."""
        return {}

    @override
    def rows(self) -> list[tuple[str, str]]:
        """What the start-up lines say of sampling and noise."""
        changes = callable(self.plan.clipping_norm) or isinstance(self.rule, Adaptive)
        return [
            ("sample rate q", f"{self.sample_rate:.6g}"),
            ("expected batch", f"{self.batch_size} of {self.n_examples} examples"),
            ("noise multiplier σ", f"{self.noise_multiplier:.6g}"),
            ("noise stddev σC/B", f"{self.noise_stddev:.6g}{' at first' if changes else ''}"),
        ]

    @override
    def indices(self, key: RngKey, step: int) -> NDArray[np.int64]:
        """The examples drawn at ``step``, by all ranks together."""
        return poisson_indices(key, step, n_examples=self.n_examples, sample_rate=self.sample_rate)

    @override
    def step(
        self,
        loss_fn: Callable[..., Any],
        optimizer: GradientTransformation,
        key: RngKey,
        params: Any = None,
    ) -> Step:
        """The step function for ``loss_fn(params, batch) -> (losses, aux)``."""
        del params
        rule = self.rule
        grad_fn = per_example_grad_fn(
            loss_fn,
            rule,
            has_aux=True,
            expected_batch_size=self.batch_size,
            microbatch_size=self.plan.microbatch_size,
        )
        clip_state = rule.begin(key) if isinstance(rule, Adaptive) else ClipState()
        noise_fn, noise_state = gaussian_noise(
            noise_multiplier=self.gradient_noise_multiplier, key=key
        )
        return Step(grad_fn, noise_fn, optimizer, clip_state, noise_state)
