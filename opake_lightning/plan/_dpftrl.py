"""DP-FTRL as a plan: noise that is correlated over a run of known length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

from typing_extensions import override

from opake_lightning.accounting import Ledger
from opake_lightning.dpftrl.noise import Strategy
from opake_lightning.dpsgd.clipping import Adaptive
from opake_lightning.dpsgd.clipping._rule import rule_of
from opake_lightning.dpsgd.sampling import expected_rate
from opake_lightning.errors import PrivacyError
from opake_lightning.plan._base import PrivatePlan, calibrated, check_delta, check_target
from opake_lightning.plan._mf_mechanism import BANDED, MFMechanism, Sampling

__all__ = ["DPFTRL"]

SecondMoment: TypeAlias = Literal["aggregate", "per_example"]

_MONTE_CARLO = ("balls_in_bins", "b_min_sep")


@dataclass(frozen=True, slots=True, kw_only=True)
class DPFTRL(PrivatePlan):
    r"""DP-FTRL: per-example clipping, and noise that is correlated over the steps of the run.

    The noise of a step takes back part of the noise of the steps before, so that its sum, which is
    what the weights see, stays smaller. What it costs is decided for the run as a whole: by how
    often, and how many steps apart, one example takes part. So the plan chooses the sampling along
    with the noise, and needs to know the number of steps; the cost of all of them is spent with the
    first, and a run that ends early has cost no less.

    =====================  ============================================  =======================
    sampling               a batch                                       privacy
    =====================  ============================================  =======================
    ``"cyclic_poisson"``   Poisson draw from one of b random groups,     amplified; banded
                           in turn; b is the number of bands             strategies only
    ``"fixed_partition"``  one part of a random partition, the same in   not amplified; any
                           every pass                                    strategy
    ``"balls_in_bins"``    the same                                      amplified; by simulation
    ``"b_min_sep"``        random, with no example drawn twice in b      amplified; by simulation;
                           steps; b is the number of bands               banded strategies only
    ``"fixed_order"``      the next rows of the dataset                  not amplified; any
                                                                         strategy
    =====================  ============================================  =======================

    With ``"fixed_order"`` neighbouring datasets have one row blanked, with all others one row
    more or less.

    A second fit of a module, and a resumed run whose plan has changed (with
    ``on_changed_plan="fork"``), begins a new horizon: its noise starts over, from streams that have
    not been used, and is accounted for on its own, on top of all of the horizon before.

    Args:
        clipping_norm: As in :class:`DPSGD`, but not ``adaptive``: its counts have no place in the
            accounting of correlated noise.
        strategy: How noise is correlated: what one of :mod:`opake_lightning.dpftrl.noise` returned,
            such as ``band_mf_strategy(8)``.
        noise_multiplier: σ, standard deviation of the noise before it is correlated, over C; not to
            be compared across strategies. 0 clips without protecting (ε = ∞).
        target_epsilon: ε that the whole planned run may spend, including what the module has
            spent before.
        target_delta: As in :class:`DPSGD`.
        allow_large_delta: As in :class:`DPSGD`.
        sampling: One of the above; None is ``"cyclic_poisson"`` for banded strategies (independent
            noise has one band), ``"fixed_partition"`` for others.
        second_moment_strategy: Also release the squares of the gradient, with noise correlated like
            this, at no further cost; for optimizers that can use them, such as ``adamw``.
        second_moment: What is squared: the ``"aggregate"`` gradient, or the gradients
            ``"per_example"``, before they are summed.
        microbatch_size: As in :class:`DPSGD`.
        engine: As in :class:`DPSGD`.
        key: As in :class:`DPSGD`.
        on_changed_plan: As in :class:`DPSGD`; a fork begins a new horizon.
        key_in_checkpoint: As in :class:`DPSGD`. False is for strategies whose earlier noise can be
            drawn again from the key: ``identity_strategy``, ``lambda_cgd_strategy``,
            ``bisr_strategy``, which then takes as many draws a step as its bandwidth. All others
            keep past noise in the checkpoint, which is as secret as the key.

    Raises:
        PrivacyError: If noise, sampling and accounting would not agree.
        ValueError: If a number is out of range.

    Source: Kairouz et al. 2021 (arXiv:2103.00039); Choquette-Choo et al. 2023 (arXiv:2306.08153).

    >>> from opake_lightning.dpftrl.noise import lambda_cgd_strategy
    >>> plan = DPFTRL(clipping_norm=1.0, strategy=lambda_cgd_strategy(0.9), noise_multiplier=4.0)
    >>> plan.sampling_used
    'fixed_partition'
    """

    strategy: Strategy
    sampling: Sampling | None = None
    second_moment_strategy: Strategy | None = None
    second_moment: SecondMoment = "aggregate"

    needs_horizon: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check every argument, and that noise, sampling and accounting go together."""
        PrivatePlan.__post_init__(self)
        for name in ("strategy", "second_moment_strategy"):
            value = getattr(self, name)
            if not isinstance(value, Strategy) and (value is not None or name == "strategy"):
                raise TypeError(
                    f"{name} must be what a function of opake_lightning.dpftrl.noise returned, "
                    f"such as band_mf_strategy(8), got {value!r}"
                )
        if self.sampling is not None and self.sampling not in get_args(Sampling):
            raise ValueError(
                f"sampling must be one of {get_args(Sampling)} or None, got {self.sampling!r}"
            )
        if self.second_moment not in get_args(SecondMoment):
            raise ValueError(
                f"second_moment must be one of {get_args(SecondMoment)}, got {self.second_moment!r}"
            )
        if isinstance(rule_of(self.clipping_norm), Adaptive):
            raise PrivacyError(
                "adaptive clipping releases a noisy count at every step, which the accounting of "
                "correlated noise has no place for; give DPFTRL a number, a schedule or auto() as "
                "clipping_norm, or use DPSGD with adaptive"
            )
        _check_pairing(self)
        if not self.key_in_checkpoint:
            _check_memory(self)

    @property
    def sampling_used(self) -> Sampling:
        """The sampling, chosen by the strategy if it was left open."""
        if self.sampling is not None:
            return self.sampling
        return "fixed_partition" if self.bands is None else "cyclic_poisson"

    @property
    def bands(self) -> int | None:
        """Bands of the strategy, or of the wider one of two; None if one is not banded."""
        return _bands(self.strategy, self.second_moment_strategy)

    @override
    def drawing(self, n_examples: int, batch_size: int) -> str:
        """How the examples of a step are drawn, in words; the start-up table has other numbers."""
        parts = -(-n_examples // batch_size)
        MFMechanism(self, 1.0, n_examples, batch_size, 1)  # refuses what cannot be drawn
        match self.sampling_used:
            case "cyclic_poisson" if self.bands == 1:
                return f"Poisson batches, with rate {batch_size / n_examples:.6g}"
            case "cyclic_poisson":
                rate = (self.bands or 1) * batch_size / n_examples
                return (
                    f"cyclic Poisson batches: each example is in one of {self.bands} random "
                    f"groups, and step t draws those of group t mod {self.bands} with rate "
                    f"{rate:.6g}"
                )
            case "b_min_sep":
                return f"random batches, no example twice within {self.bands} steps"
            case "fixed_order":
                return f"batches in the order of the dataset, {parts} steps a pass"
            case _:
                return f"the {parts} parts of one random partition, the same in every pass"

    @override
    def resolve(
        self, *, n_examples: int, batch_size: int, planned_steps: int | None, spent: Ledger
    ) -> MFMechanism:
        """Fix everything that the plan leaves open.

        Args:
            n_examples: Size n of the dataset.
            batch_size: Expected batch size.
            planned_steps: Steps that are still to come: the horizon.
            spent: What has been spent before; counts towards ``target_epsilon``.

        Raises:
            PrivacyError: If there is no planned end; δ is not below 1 / n; the sampling cannot draw
                such batches; or the target is already spent.
        """
        expected_rate(batch_size, n_examples)
        check_delta(self, n_examples)
        if not planned_steps:
            raise PrivacyError(
                "DPFTRL correlates noise over a run of known length, but this run is open-ended; "
                "set Trainer(max_epochs=...) or max_steps"
            )

        def of(sigma: float) -> MFMechanism:
            return MFMechanism(self, sigma, n_examples, batch_size, planned_steps, spent.n_steps)

        if self.noise_multiplier is not None:
            return of(self.noise_multiplier)
        check_target(self, planned_steps, spent)
        _ = of(1.0)  # refuses what no multiplier would mend
        return of(calibrated(self, lambda sigma: spent.spend(of(sigma).event, planned_steps)))


def _check_pairing(plan: DPFTRL) -> None:
    """Refuse strategies and sampling that no accounting covers together."""
    sampling, second = plan.sampling_used, plan.second_moment_strategy
    if sampling in BANDED and plan.bands is None:
        wide = [s.describe() for s in (plan.strategy, second) if s is not None and s.bands is None]
        raise PrivacyError(
            f"sampling={sampling!r}: amplification by random draws is known only for banded "
            f"strategies, and {' and '.join(wide)} is not banded. Use sampling='fixed_partition' "
            "(or 'balls_in_bins', which is amplified), or a banded strategy: band_mf_strategy, "
            "bsr_strategy, identity_strategy"
        )
    if sampling in _MONTE_CARLO and second is not None and second != plan.strategy:
        raise PrivacyError(
            f"sampling={sampling!r} is accounted for by simulating one strategy, and no bound is "
            "known for squares with another; use second_moment_strategy=strategy, or "
            "sampling='cyclic_poisson' or 'fixed_partition'"
        )


def _check_memory(plan: DPFTRL) -> None:
    """Refuse strategies that would leave in a checkpoint what is as secret as the key."""
    for strategy in (plan.strategy, plan.second_moment_strategy):
        if strategy is not None and strategy.past_draws is None:
            raise PrivacyError(
                f"key_in_checkpoint=False with {strategy.describe()}: its noise depends on that of "
                "all steps before, which a checkpoint has to hold, and whoever reads it can "
                "subtract it. Use a strategy whose earlier noise is drawn again from the key "
                "(lambda_cgd_strategy, bisr_strategy, identity_strategy), or leave "
                "key_in_checkpoint=True and keep the checkpoints secret"
            )


def _bands(*strategies: Strategy | None) -> int | None:
    bands = [strategy.bands for strategy in strategies if strategy is not None]
    known = [b for b in bands if b is not None]
    return max(known) if len(known) == len(bands) else None
