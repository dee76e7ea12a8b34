r"""Automatic clipping: every gradient is normalised, so that there is no threshold to tune.

.. math:: \bar g = \frac{1}{B} \sum_i g_i \frac{R}{\lVert g_i \rVert_2 + \gamma}

The norm of a contribution is R·n/(n + γ) < R for a gradient of norm n, so adding or removing an
example moves the sum by less than R; with groups of parameters, each normalised to its own R_k, by
less than √ΣR_k². γ keeps a gradient of norm zero at zero, and tells apart
gradients that are small compared to it: those are scaled by R/γ, all others to about R.

Source: Bu et al. 2022, AUTO-S (arXiv:2206.07136). Departs from it: division by the expected batch
size, and R is kept as a factor, where the paper sets it to 1 because the learning rate absorbs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opake_lightning import _check
from opake_lightning.dpsgd.clipping._fixed import GradFn, SecondMoment, per_example_grad_fn
from opake_lightning.dpsgd.clipping._rule import ClipState, Rule, bounds_of, describe
from opake_lightning.errors import PrivacyError
from opake_lightning.types import PerGroup

__all__ = ["Auto", "auto", "auto_clipped_grad"]

_LARGEST_FACTOR = 1e30  # of a gradient of norm zero; float32 ends at 3e38


@dataclass(frozen=True, slots=True)
class Auto(Rule):
    """What :func:`auto` returns; its arguments are the attributes."""

    clipping_norm: float | PerGroup
    stability: float

    def __post_init__(self) -> None:
        """Check every argument."""
        if callable(self.clipping_norm):
            raise PrivacyError(
                f"clipping_norm={self.clipping_norm!r} is a schedule; in automatic clipping R "
                "scales the gradient and its noise alike, as the learning rate does, so give a "
                "number here and the schedule to the optimizer: adamw(lr=schedule)"
            )
        gamma = _check.positive("stability", self.stability)
        bound = max(bounds_of(self.clipping_norm, 0), default=0.0)
        if not bound / gamma <= _LARGEST_FACTOR:
            raise ValueError(
                f"stability={self.stability!r} is too small for clipping_norm={bound!r}: gradients "
                f"would be scaled by up to {bound / gamma:.0e}; choose at least "
                f"{bound / _LARGEST_FACTOR:.0e}"
            )

    def factors(self, norms: Tensor, bounds: Tensor | float) -> Tensor:
        """R / (norm + γ)."""
        return bounds / (norms + self.stability)

    def describe(self, steps: int | None = None) -> str | float:
        """The call that makes it."""
        del steps
        return f"auto({describe(self.clipping_norm)}, stability={self.stability!r})"


def auto(clipping_norm: float | PerGroup = 1.0, *, stability: float = 0.01) -> Auto:
    """Normalise every gradient, with no threshold to tune: ``DPSGD(clipping_norm=auto())``.

    Args:
        clipping_norm: R, what a large gradient is scaled to; also ``per_group`` or ``per_layer``.
        stability: γ, the norm that is scaled to R/2, in units of the gradient; > 0.

    Raises:
        ValueError: As :func:`auto_clipped_grad`.

    >>> auto().stability
    0.01
    """
    return Auto(clipping_norm, stability)


def auto_clipped_grad(
    loss_fn: Callable[..., Any],
    *,
    clipping_norm: float | PerGroup = 1.0,
    stability: float = 0.01,
    argnums: int = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    has_aux: bool = False,
    expected_batch_size: float | None = None,
    microbatch_size: int | None = None,
    second_moment: SecondMoment | bool | None = None,
    projection_radius: float | None = None,
    engine: None = None,
) -> tuple[GradFn, ClipState]:
    """Sum of per-example gradients g, each scaled by ``clipping_norm / (|g| + stability)``.

    Small gradients are scaled up, large ones down. Norms, gradients that are NaN or infinite,
    random numbers and shapes are treated as in
    :func:`~opake_lightning.dpsgd.clipping.clipped_grad`.

    Guarantee: adding or removing one example moves the returned pytree by an L2 distance of less
    than its ``sensitivity``, up to a relative 1e-6 of rounding.

    Args:
        loss_fn: As in ``clipped_grad``.
        clipping_norm: R, what a large gradient is scaled to, in units of the gradient; > 0. Or,
            with an R_k for each group of parameters, what :func:`per_group` or :func:`per_layer`
            returned; R is √ΣR_k² then.
        stability: γ, the norm that is scaled to R/2, in units of the gradient; > 0.
        argnums: As in ``clipped_grad``.
        batch_argnums: As in ``clipped_grad``.
        has_aux: As in ``clipped_grad``.
        expected_batch_size: As in ``clipped_grad``.
        microbatch_size: As in ``clipped_grad``.
        second_moment: As in ``clipped_grad``; squares are those of the scaled gradients.
        projection_radius: As in ``clipped_grad``.
        engine: As in ``clipped_grad``.

    Returns:
        A function and its initial state, as from ``clipped_grad``. The sensitivity is R, divided by
        the expected batch size.

    Raises:
        ValueError: If ``clipping_norm`` or ``stability`` is not finite and > 0, or their quotient
            is beyond 1e30, or another argument is out of range.
        PrivacyError: If parameters and batch are the same argument, or ``clipping_norm`` is a
            schedule.

    >>> import torch
    >>> grad_fn, state = auto_clipped_grad(lambda w, x: x @ w, clipping_norm=1.0)
    >>> grads, state = grad_fn(torch.zeros(2), torch.tensor([[3.0, 4.0]]), state=state)
    >>> grads.pytree  # (3, 4) / 5.01
    tensor([0.5988, 0.7984], dtype=torch.float64)
    """
    grad_fn = per_example_grad_fn(
        loss_fn, Auto(clipping_norm, stability),
        argnums=argnums, batch_argnums=batch_argnums, has_aux=has_aux,
        expected_batch_size=expected_batch_size, microbatch_size=microbatch_size,
        second_moment=second_moment, projection_radius=projection_radius, engine=engine,
    )  # fmt: skip
    return grad_fn, ClipState()
