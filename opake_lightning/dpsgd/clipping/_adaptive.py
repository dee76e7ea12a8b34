r"""Adaptive clipping: the norm follows a quantile of the gradients' norms.

With γ the fraction of examples whose norm should be at most C, and
:math:`b_i = [\lVert g_i \rVert \le C]`, each step releases a noisy count and moves C by it:

.. math::

    \tilde b = \frac12 + \frac1m \Bigl(\sum_i (b_i - \tfrac12)
    + \mathcal N(0, \sigma_b^2)\Bigr), \qquad C \leftarrow C \exp(-\eta\, (\tilde b - \gamma)).

**Price.** An example's part of the count is ±1/2, so adding or removing one moves the count by at
most 1/2, and the sum of clipped gradients by at most C. Released together, the gradient with noise
:math:`z_\Delta C` and K counts (one per group of parameters), each divided by its noise, move by at
most

.. math:: \sqrt{z_\Delta^{-2} + K (2 \sigma_b)^{-2}} = 1 / z,

so the step is one Gaussian release at multiplier z if
:math:`z_\Delta = (z^{-2} - K (2\sigma_b)^{-2})^{-1/2}`, which needs
:math:`z < 2 \sigma_b / \sqrt K`. C itself is made from released numbers only, so clipping and noise
of the next step may depend on it: composition is adaptive.

Source: Andrew et al. 2021, Algorithm 1 and Theorem 1 (arXiv:1905.03871). Departs from it: m is the
expected batch size, where the paper divides by the number drawn, which is private; the estimate is
centred, so that an empty draw says nothing; C stays within [1e-14, 1e14].
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from opake_lightning import _check
from opake_lightning.distributed import sum_gradients
from opake_lightning.dpsgd.accounting import adaclip_noise_multiplier
from opake_lightning.dpsgd.clipping._fixed import GradFn, SecondMoment, per_example_grad_fn
from opake_lightning.dpsgd.clipping._rule import ClipState, Rule, bounds_of, describe
from opake_lightning.errors import PrivacyError
from opake_lightning.random import RngKey, add_normal_, fold_in
from opake_lightning.types import PerGroup

__all__ = ["Adaptive", "AdaptiveClipState", "adaptive", "adaptive_clipped_grad"]

_STREAM = "adaptive_clipping"
# Where all gradients are zero for long, C shrinks until float32 could not hold noise or squares.
_SMALLEST, _LARGEST = 1e-14, 1e14
_FALLEN = 1e-6  # of where a norm began
_DEFAULT_NOISE = 0.05  # of the expected batch size; the paper's choice


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClipState(ClipState):
    """State of an adaptive clipping function.

    Attributes:
        clipping_norms: The clipping norm of each group in the coming step. Released: made from
            noisy counts only.
        key: Key that the noise of the counts is drawn from. Secret. In a
            :class:`~opake_lightning.step.Step` it is a function of the run's key and step.
    """

    clipping_norms: tuple[float, ...]
    key: RngKey
    privacy_critical: ClassVar[bool] = True  # a checkpoint without all of it is refused

    @property
    def clipping_norm(self) -> float:
        """√ΣC_k²; with one group, its clipping norm."""
        return math.hypot(*self.clipping_norms)

    def on_stream(self, key: RngKey, step: int) -> AdaptiveClipState:
        """The same with the count noise of one release of a run."""
        return replace(self, key=fold_in(fold_in(key, _STREAM), step))


@dataclass(frozen=True, slots=True)
class Adaptive(Rule):
    """What :func:`adaptive` returns; its arguments are the attributes."""

    clipping_norm: float | PerGroup
    target_quantile: float
    learning_rate: float
    count_noise_stddev: float | None

    def __post_init__(self) -> None:
        """Check every argument."""
        if callable(self.clipping_norm):
            raise PrivacyError(
                f"clipping_norm={self.clipping_norm!r} is a schedule, but an adaptive norm follows "
                "the gradients; give the number to start from"
            )
        for bound in bounds_of(self.clipping_norm, 0):
            if not _SMALLEST <= bound <= self._largest:
                raise ValueError(
                    f"clipping_norm={bound!r} must be between {_SMALLEST:g} and {self._largest:g}, "
                    "where an adaptive norm stays; rescale the loss"
                )
        _check.fraction("target_quantile", self.target_quantile, zero=False, one=False)
        _check.positive("learning_rate", self.learning_rate)
        if self.count_noise_stddev is not None:
            _check.non_negative("count_noise_stddev", self.count_noise_stddev)

    def describe(self, steps: int | None = None) -> str | float:
        """The call that makes it."""
        del steps
        noise = self.count_noise_stddev
        return (
            f"adaptive({describe(self.clipping_norm)}, target_quantile={self.target_quantile!r}, "
            f"learning_rate={self.learning_rate!r}"
            f"{'' if noise is None else f', count_noise_stddev={noise!r}'})"
        )

    def begin(self, key: RngKey) -> AdaptiveClipState:
        """State before the first step."""
        return AdaptiveClipState(clipping_norms=bounds_of(self.clipping_norm, 0), key=key)

    def bounds(self, state: ClipState) -> tuple[float, ...]:
        """The norms that the counts so far have led to."""
        if not isinstance(state, AdaptiveClipState) or len(state.clipping_norms) != self.n_groups:
            raise TypeError(
                f"an adaptive clipping function of {self.n_groups} groups got the state {state!r}; "
                "pass the one that came with it, or that its last call returned"
            )
        return state.clipping_norms

    def noise_of_counts(self, expected_batch_size: float) -> float:
        """σ_b, in examples."""
        given = self.count_noise_stddev
        return _DEFAULT_NOISE * expected_batch_size if given is None else given

    def gradient_noise_multiplier(
        self, noise_multiplier: float, expected_batch_size: float
    ) -> float:
        """z_Δ, with which a whole step costs one release at ``noise_multiplier``.

        Raises:
            PrivacyError: If the counts alone cost more.
        """
        return adaclip_noise_multiplier(
            noise_multiplier,
            count_noise_stddev=self.noise_of_counts(expected_batch_size),
            n_groups=max(self.n_groups, 1),
        )

    def after(self, state: ClipState, norms: Tensor, divisor: float) -> ClipState:
        """Count, over all ranks, add noise once, and move each norm."""
        bounds = self.bounds(state)
        assert isinstance(state, AdaptiveClipState)
        limits = torch.tensor(bounds, dtype=norms.dtype, device=norms.device)[:, None]
        votes = (norms <= limits).to(norms.dtype) - 0.5
        # As in the sum, an example without a finite gradient counts for nothing.
        counts = torch.where(norms.isfinite(), votes, 0.0).sum(1)
        # On the CPU, so that ranks on any device draw the same noise.
        counts = sum_gradients(counts).cpu()
        stream = fold_in(fold_in(state.key, _STREAM), state.step)
        add_normal_(stream, counts, self.noise_of_counts(divisor))
        moved = tuple(
            self._moved(bound, 0.5 + count / divisor)
            for bound, count in zip(bounds, counts.tolist(), strict=True)
        )
        self._warn_if_fallen(bounds, moved)
        return replace(Rule.after(self, state, norms, divisor), clipping_norms=moved)

    def _warn_if_fallen(self, before: tuple[float, ...], moved: tuple[float, ...]) -> None:
        """Once, as a norm passes a millionth of where it began: it is made of noisy counts only."""
        for first, old, new in zip(bounds_of(self.clipping_norm, 0), before, moved, strict=True):
            if new < _FALLEN * first <= old:
                warnings.warn(
                    f"the adaptive clipping norm has fallen from {first:g} to {new:g}: by the "
                    "noisy counts most gradients are smaller still, as where the loss is constant "
                    "or its gradients are zero. Noise shrinks with it, and so do later gradients; "
                    "look at the loss, or take a fixed clipping_norm",
                    stacklevel=2,
                )

    def _moved(self, bound: float, fraction: float) -> float:
        # Held in, as exp would overflow before the ends below hold it.
        exponent = min(max(-self.learning_rate * (fraction - self.target_quantile), -99.0), 99.0)
        return min(max(bound * math.exp(exponent), _SMALLEST), self._largest)

    @property
    def _largest(self) -> float:
        # So that the norm over all groups stays within it too.
        return _LARGEST / math.sqrt(max(self.n_groups, 1))


def adaptive(
    clipping_norm: float | PerGroup = 0.1,
    *,
    target_quantile: float = 0.5,
    learning_rate: float = 0.2,
    count_noise_stddev: float | None = None,
) -> Adaptive:
    """Let the clipping norm follow a quantile: ``DPSGD(clipping_norm=adaptive())``.

    The plan's noise multiplier, given or calibrated, is that of the whole step: the noise on the
    gradient is a little larger, so that the count comes at no extra cost. See
    :func:`adaptive_clipped_grad` for how the norm moves.

    Args:
        clipping_norm: Where the norm starts, in units of the gradient; with ``per_group`` or
            ``per_layer`` every group's norm follows the quantile of that group.
        target_quantile: γ, the fraction of examples whose norm should be at most the clipping norm,
            in (0, 1): 0.9 clips one example in ten. (Some libraries count the clipped ones.)
        learning_rate: η; the norm moves by a factor of at most about exp(η) per step.
        count_noise_stddev: σ_b, noise on each count, in examples. None is 0.05 of the expected
            batch size. Must exceed half the noise multiplier, times √K with K groups.

    Raises:
        ValueError: If an argument is out of range.
        PrivacyError: From the plan, if the counts alone would cost more than the whole step may.

    >>> adaptive().gradient_noise_multiplier(1.0, expected_batch_size=100)  # (1 - 10**-2) ** -0.5
    1.005037815259212
    """
    return Adaptive(clipping_norm, target_quantile, learning_rate, count_noise_stddev)


def adaptive_clipped_grad(
    loss_fn: Callable[..., Any],
    *,
    clipping_norm: float | PerGroup = 0.1,
    expected_batch_size: float,
    key: RngKey,
    target_quantile: float = 0.5,
    learning_rate: float = 0.2,
    count_noise_stddev: float | None = None,
    argnums: int = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    has_aux: bool = False,
    microbatch_size: int | None = None,
    second_moment: SecondMoment | bool | None = None,
    projection_radius: float | None = None,
    engine: None = None,
) -> tuple[GradFn, AdaptiveClipState]:
    """As ``clipped_grad``, with a clipping norm that follows a quantile of the gradients' norms.

    Every call clips to the norm in the state, releases a noisy count of the examples that were
    within it, summed over all ranks, and returns the state with the norm moved by the count. On
    several ranks all must call it together, those whose part of the draw is empty too.

    Guarantee: adding or removing one example moves the returned pytree by an L2 distance of at most
    its ``sensitivity``, which follows the norm, and each count by at most 1/2. With
    ``gaussian_noise(noise_multiplier=adaclip_noise_multiplier(z, ...))`` gradient and counts are
    one Gaussian release at multiplier z. The state is released with them, apart from its key.

    Args:
        loss_fn: As in ``clipped_grad``.
        clipping_norm: As in :func:`adaptive`.
        expected_batch_size: m, public: what the gradient and the counts are divided by.
        key: Key of the run; the counts' noise has a stream of its own.
        target_quantile: As in :func:`adaptive`.
        learning_rate: As in :func:`adaptive`.
        count_noise_stddev: As in :func:`adaptive`; 0 adds nothing and protects nothing.
        argnums: As in ``clipped_grad``.
        batch_argnums: As in ``clipped_grad``.
        has_aux: As in ``clipped_grad``.
        microbatch_size: As in ``clipped_grad``.
        second_moment: As in ``clipped_grad``; the pair's noise follows the norm too.
        projection_radius: As in ``clipped_grad``; None is the norm of the step.
        engine: As in ``clipped_grad``.

    Returns:
        A function and its initial state, as from ``clipped_grad``.

    Raises:
        ValueError: If an argument is out of range.
        PrivacyError: If parameters and batch are the same argument.

    >>> import torch
    >>> from opake_lightning.random import key
    >>> grad_fn, state = adaptive_clipped_grad(
    ...     lambda w, x: x @ w, clipping_norm=1.0, expected_batch_size=2, key=key(7),
    ...     count_noise_stddev=0.0,
    ... )
    >>> x = torch.tensor([[3.0, 4.0], [0.6, 0.0]])
    >>> _, state = grad_fn(torch.zeros(2), x, state=state)
    >>> state.clipping_norm  # one of two examples is within 1, as asked
    1.0
    """
    rule = Adaptive(clipping_norm, target_quantile, learning_rate, count_noise_stddev)
    grad_fn = per_example_grad_fn(
        loss_fn, rule, argnums=argnums, batch_argnums=batch_argnums, has_aux=has_aux,
        expected_batch_size=expected_batch_size, microbatch_size=microbatch_size,
        second_moment=second_moment, projection_radius=projection_radius, engine=engine,
    )  # fmt: skip
    return grad_fn, rule.begin(key)
