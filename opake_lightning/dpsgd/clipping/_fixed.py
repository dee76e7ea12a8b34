r"""Clipping to a fixed norm.

.. math:: \bar g = \frac{1}{B} \sum_i g_i \min\!\left(1, \frac{C}{\lVert g_i \rVert_2}\right)

Source: Abadi et al. 2016, Algorithm 1 (arXiv:1607.00133). Departs from it: the sum is divided by
the *expected* batch size, a public constant, never by the number of examples that were drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from opake_lightning import _check
from opake_lightning._tree import layout_of, unpack
from opake_lightning.dpsgd.clipping._batch import examples_of
from opake_lightning.dpsgd.clipping._vmap import clipped_sum
from opake_lightning.errors import PrivacyError
from opake_lightning.types import ClippedPytree

__all__ = ["ClipState", "GradFn", "clipped_grad"]


@dataclass(frozen=True, slots=True)
class ClipState:
    """State of a clipping function.

    Attributes:
        nonfinite_examples: How many examples so far had a gradient that was NaN or infinite and
            therefore contributed zero. Not private: it is exact.
    """

    nonfinite_examples: int = 0


class GradFn(Protocol):
    """What :func:`clipped_grad` returns first."""

    def __call__(self, *args: Any, state: ClipState) -> tuple[Any, ClipState]:
        """Clipped gradient at ``args``, which are the loss function's."""
        ...


def clipped_grad(
    loss_fn: Callable[..., Any],
    *,
    clipping_norm: float,
    argnums: int = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    has_aux: bool = False,
    expected_batch_size: float | None = None,
    microbatch_size: int | None = None,
) -> tuple[GradFn, ClipState]:
    """Sum of per-example gradients, each scaled down to an L2 norm of at most ``clipping_norm``.

    The norm of an example is taken over all parameters together, in float64. A tied parameter
    counts once, with its summed gradient; a parameter that the loss never touches has a zero
    gradient. An example whose gradient is NaN or infinite contributes zero and is counted. If the
    loss draws random numbers (dropout), every example draws its own.

    Guarantee: adding or removing one example moves the returned pytree by an L2 distance of at
    most its ``sensitivity``, up to a relative 1e-6 of rounding.

    Args:
        loss_fn: ``loss_fn(params, batch, ...)``: the loss of the examples of a batch. It is called
            with one example at a time, as a batch of size 1, and returns a tensor of shape (1,) or
            ().
        clipping_norm: The bound C, in units of the gradient; > 0.
        argnums: Position of the parameters: a pytree of floating-point tensors, all trained.
        batch_argnums: Position(s) of the batch: pytrees whose tensors have one row per example.
            ``None`` as the batch is an empty draw.
        has_aux: If true, ``loss_fn`` returns (loss, aux), aux being a pytree of tensors.
        expected_batch_size: Divide the sum by this public constant, and the sensitivity with it.
            Never pass the size of the batch at hand: under Poisson sampling it is private.
        microbatch_size: How many examples are differentiated at once. Bounds memory; the result
            does not depend on it. None chooses so that per-example gradients take 256 MiB.

    Returns:
        A function and its initial state. ``grads, state = grad_fn(params, batch, state=state)``
        with ``grads`` a :class:`~opake_lightning.types.ClippedPytree` in float32 or wider, or
        ``(grads, aux), state`` with ``has_aux``; aux then has one row per example, and is None for
        an empty batch.

    Raises:
        ValueError: If ``clipping_norm`` is not finite and > 0, or another argument is out of range.
        PrivacyError: If parameters and batch are the same argument.

    >>> import torch
    >>> def loss_fn(w, batch):
    ...     x, y = batch
    ...     return 0.5 * (x @ w - y) ** 2
    >>> grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    >>> batch = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.ones(2)
    >>> grads, state = grad_fn(torch.zeros(2), batch, state=state)  # -(3, 4) / 5 - (0.3, 0.4)
    >>> grads.pytree
    tensor([-0.9000, -1.2000])
    """
    bound = _check.positive(
        "clipping_norm", clipping_norm, why="noise is proportional to it; use NonPrivate for none"
    )
    scale = _check.positive(
        "expected_batch_size", 1.0 if expected_batch_size is None else expected_batch_size
    )
    if microbatch_size is not None:
        _check.positive_int("microbatch_size", microbatch_size)
    batch_at = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    for position in (argnums, *batch_at):
        _check.at_least("argnums and batch_argnums", position, 0)
    if argnums in batch_at or not batch_at:
        raise PrivacyError(f"argnums={argnums} must differ from batch_argnums={batch_argnums}")

    def factors_of(norms: Tensor) -> Tensor:
        factors = torch.where(norms > bound, bound / norms, 1.0)
        return torch.where(norms.isfinite(), factors, 0.0) / scale

    def grad_fn(*args: Any, state: ClipState) -> tuple[Any, ClipState]:
        if len(args) <= max(argnums, *batch_at):
            raise TypeError(f"expected at least {max(argnums, *batch_at) + 1} positional arguments")
        params = args[argnums]
        layout = layout_of(params)

        def loss_of(params: Any, batch: tuple[Any, ...]) -> Any:
            filled = list(args)
            filled[argnums] = params
            for position, value in zip(batch_at, batch, strict=True):
                filled[position] = value
            return loss_fn(*filled)

        result = clipped_sum(
            loss_of,
            layout.leaves(params),
            layout,
            examples_of(tuple(args[position] for position in batch_at)),
            factors_of,
            has_aux=has_aux,
            microbatch_size=microbatch_size,
        )
        lost = int((~result.norms.isfinite()).sum())
        grads = ClippedPytree(unpack(result.flats, layout), bound / scale)
        new_state = replace(state, nonfinite_examples=state.nonfinite_examples + lost)
        return ((grads, result.aux) if has_aux else grads), new_state

    return grad_fn, ClipState()
