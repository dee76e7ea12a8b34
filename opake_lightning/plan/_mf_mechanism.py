"""DP-FTRL with nothing left open."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import optree
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from opake_lightning._pairs import noise_stddevs
from opake_lightning.accounting import WholeRun
from opake_lightning.dpftrl import accounting as dpftrl_accounting
from opake_lightning.dpftrl.noise import Strategy, mf_gaussian_noise
from opake_lightning.dpftrl.sampling import (
    b_min_sep_indices,
    balls_in_bins_indices,
    cyclic_poisson_indices,
    fixed_order_indices,
)
from opake_lightning.dpsgd.clipping import ClipState
from opake_lightning.dpsgd.clipping._fixed import per_example_grad_fn
from opake_lightning.dpsgd.clipping._rule import bounds_of
from opake_lightning.dpsgd.noise import NoiseState
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.plan._base import PlainDict, PrivateMechanism
from opake_lightning.random import RngKey
from opake_lightning.step import Step, no_noise
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

__all__ = ["BANDED", "MFMechanism", "Sampling"]

Sampling: TypeAlias = Literal[
    "cyclic_poisson", "fixed_partition", "balls_in_bins", "b_min_sep", "fixed_order"
]

BANDED = ("cyclic_poisson", "b_min_sep")
_PARTITIONS = ("fixed_partition", "balls_in_bins", "fixed_order")


@dataclass(frozen=True, slots=True)
class MFMechanism(PrivateMechanism):
    """DP-FTRL with nothing left open; attributes as in :class:`PrivateMechanism`.

    ``planned_steps`` is the horizon n, and never None.
    """

    def __post_init__(self) -> None:
        """Check what needs all the numbers: that the sampling can draw such batches."""
        b, n, size = self.min_sep, self.n_examples, self.batch_size
        if self.sampling in BANDED and b * size > n:
            word = "groups" if self.sampling == "cyclic_poisson" else "steps apart"
            raise PrivacyError(
                f"sampling={self.sampling!r} with {b} bands draws each example at most once in {b} "
                f"steps ({word}: {b}), so a batch can have at most {n // b} of {n} examples, not "
                f"batch_size={size}; use at most {max(n // size, 1)} bands, a smaller batch, or "
                "sampling='fixed_partition'"
            )

    @property
    def n_steps(self) -> int:
        """The horizon n."""
        assert self.planned_steps is not None
        return self.planned_steps

    @property
    def sampling(self) -> Sampling:
        """How batches are drawn."""
        return self.plan.sampling_used

    @property
    def min_sep(self) -> int:
        """Least number of steps from one participation of an example to its next."""
        if self.sampling in _PARTITIONS:
            return -(-self.n_examples // self.batch_size)
        return self.plan.bands

    @property
    def max_participations(self) -> int:
        """How often an example takes part at most."""
        return -(-self.n_steps // self.min_sep)

    @property
    def sample_rate(self) -> float:
        """Chance that a step draws an example, in cyclic sampling one whose turn it is."""
        turns = self.min_sep if self.sampling == "cyclic_poisson" else 1
        return turns * self.batch_size / self.n_examples

    @property
    def strategy(self) -> Strategy:
        """How noise is correlated, optimised for how often examples take part."""
        return self._fitted(self.plan.strategy)

    @property
    def second_moment_strategy(self) -> Strategy | None:
        """The same for the squares, if they are released."""
        second = self.plan.second_moment_strategy
        return None if second is None else self._fitted(second)

    def _fitted(self, strategy: Strategy) -> Strategy:
        return strategy.for_participation(self.min_sep, self.max_participations)

    @property
    def sensitivity(self) -> float:
        """How far one example moves the correlated sums, in clipping norms; S in the formulas."""
        matrix = self.strategy.matrix(self.n_steps)
        return matrix.sensitivity(self.min_sep, self.max_participations)

    @property
    @override
    def first_noise(self) -> float:
        """Noise on the gradient in the first step, over its sensitivity."""
        first = self.noise_multiplier * float(self.strategy.matrix(self.n_steps).row_norms()[0])
        if self.second_moment_strategy is None:
            return first
        # The squares take their part of the budget, whatever their strategy.
        bounds = bounds_of(self.rule.clipping_norm, 0)
        norm = math.hypot(*bounds)
        gradient = ClippedPytree(None, norm / self.batch_size)
        if self.plan.second_moment == "aggregate":
            pair = SecondMomentClippedPytree(gradient, projection_radius=norm)
        else:
            most = math.hypot(*(bound**2 for bound in bounds))
            square = ClippedPytree(None, most / self.batch_size)
            pair = SecondMomentClippedPytree(gradient, square=square)
        return noise_stddevs(pair, first, None)[0] / gradient.sensitivity

    @property
    @override
    def event(self) -> WholeRun:
        """What the horizon costs, as the ledger records it with each of its steps."""
        whole = _cost(
            self.sampling,
            float(self.noise_multiplier),
            self.strategy,
            self.n_steps,
            self.min_sep,
            self.sample_rate,
        )
        return replace(whole, start=self.start)

    @property
    @override
    def _another_step(self) -> str:
        return (
            "has no noise and no place in the accounting, which are for the declared horizon. "
            "Start another fit, which is a horizon of its own, or more steps from the beginning"
        )

    @override
    def check_optimizer(self, optimizer: GradientTransformation, params: Any) -> None:
        """Refuse an optimizer that would not use squares, by giving it some.

        Raises:
            PrivacyError: If squares are released, and it does not take them.
        """
        if self.second_moment_strategy is None:
            return
        zeros = optree.tree_map(torch.zeros_like, params)
        nothing = NoisedPytree(zeros, 1.0)
        trial = Step(no_noise, no_noise, optimizer, None, NoiseState(RngKey(0)))
        trial.update(zeros, SecondMomentNoiseOutput(nothing, nothing), trial.init(zeros))

    @override
    def told(self) -> PlainDict:
        """Strategy, sampling, and what they come to."""
        second = self.second_moment_strategy
        return {
            "strategy": self.strategy.describe(),
            "sampling": self.sampling,
            "min_sep": self.min_sep,
            "second_moment_strategy": None if second is None else second.describe(),
            "second_moment": None if second is None else self.plan.second_moment,
            "neighbours": "blank one" if self.sampling == "fixed_order" else "add or remove one",
        }

    @override
    def fingerprint(self) -> PlainDict:
        """As of every plan, and how the noise is remembered, unless it is as usual."""
        # Drawn again, it is summed in another order: the last digits differ.
        again = {"noise_memory": "regenerate"} if self._draws_again else {}
        return {**PrivateMechanism.fingerprint(self), **again}

    @property
    def _draws_again(self) -> bool:
        """Whether more than the draw before is drawn again from the key, not to be stored."""
        strategies = (self.plan.strategy, self.plan.second_moment_strategy)
        draws = [s.past_draws or 0 for s in strategies if s is not None]
        return not self.plan.key_in_checkpoint and max(draws) > 1

    @override
    def rows(self) -> list[tuple[str, str]]:
        """What the start-up lines say of sampling and noise."""
        second = self.second_moment_strategy
        norms = self.strategy.matrix(self.n_steps).row_norms()
        first = self.noise_stddev
        last = first * float(norms[-1] / norms[0])
        rows = [
            ("strategy", self.strategy.describe()),
            ("sampling", self.sampling),
            ("an example", f"at most {self.max_participations} times, {self.min_sep} steps apart"),
            ("expected batch", f"{self.batch_size} of {self.n_examples} examples"),
            ("noise multiplier σ", f"{self.noise_multiplier:.6g}"),
            ("sensitivity S", f"{self.sensitivity:.6g}"),
            ("noise stddev σC/B", f"{first:.6g} at first, {last:.6g} at the end"),
            ("horizon", f"{self.n_steps} steps, paid for by the first"),
        ]
        if second is not None:
            rows.append(("squares", f"{self.plan.second_moment}, {second.describe()}"))
        if self.sampling == "fixed_order":
            rows.append(("neighbours", "datasets with one row blanked"))
        return rows

    @override
    def indices(self, key: RngKey, step: int) -> NDArray[np.int64]:
        """The examples drawn at ``step``, by all ranks together.

        Every horizon has groups and draws of its own.
        """
        n, start = self.n_examples, self.start
        match self.sampling:
            case "cyclic_poisson":
                groups, rate = self.min_sep, self.sample_rate
                return cyclic_poisson_indices(
                    key, step, n_examples=n, n_groups=groups, sample_rate=rate, start=start
                )
            case "b_min_sep":
                apart, rate = self.min_sep, self.sample_rate
                return b_min_sep_indices(
                    key, step, n_examples=n, min_sep=apart, sample_rate=rate, start=start
                )
            case "fixed_order":
                size = self.batch_size
                return fixed_order_indices(step, n_examples=n, batch_size=size, start=start)
            case _:
                bins = self.min_sep
                return balls_in_bins_indices(key, step, n_examples=n, n_bins=bins, start=start)

    @override
    def step(
        self,
        loss_fn: Callable[..., Any],
        optimizer: GradientTransformation,
        key: RngKey,
        params: Any = None,
    ) -> Step:
        """The step function for ``loss_fn(params, batch) -> (losses, aux)``."""
        second = self.second_moment_strategy
        grad_fn = per_example_grad_fn(
            loss_fn,
            self.rule,
            has_aux=True,
            expected_batch_size=self.batch_size,
            microbatch_size=self.plan.microbatch_size,
            second_moment=None if second is None else self.plan.second_moment,
        )
        noise_fn, noise_state = mf_gaussian_noise(
            optree.tree_map(_as_gradient, params),
            self.strategy,
            n_steps=self.n_steps,
            noise_multiplier=self.noise_multiplier,
            key=key,
            min_sep=self.min_sep,
            max_participations=self.max_participations,
            second_moment_strategy=second,
            memory="regenerate" if self._draws_again else "auto",
            start=self.start,
        )
        return Step(grad_fn, noise_fn, optimizer, ClipState(), noise_state)


@lru_cache(maxsize=256)
def _cost(
    sampling: Sampling,
    sigma: float,
    strategy: Strategy,
    n_steps: int,
    min_sep: int,
    sample_rate: float,
) -> WholeRun:
    """What a horizon costs; the participations are as many as the steps allow."""
    mechanism = dpftrl_accounting.mf_gaussian(sigma, strategy)
    match sampling:
        case "cyclic_poisson":
            return dpftrl_accounting.poisson(
                mechanism, sample_rate=sample_rate, n_steps=n_steps, n_groups=min_sep
            )
        case "b_min_sep":
            return dpftrl_accounting.b_min_sep(
                mechanism, sample_rate=sample_rate, min_sep=min_sep, n_steps=n_steps
            )
        case "balls_in_bins":
            return dpftrl_accounting.balls_in_bins(mechanism, n_bins=min_sep, n_steps=n_steps)
        case _:
            return dpftrl_accounting.unamplified(mechanism, n_steps=n_steps, min_sep=min_sep)


def _as_gradient(param: Tensor) -> Tensor:
    """Something of the shape and type that the parameter's clipped gradient has."""
    param = param.detach()
    return param if param.dtype in (torch.float32, torch.float64) else param.float()
