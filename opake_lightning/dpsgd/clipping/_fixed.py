r"""Clipping to a fixed norm.

.. math:: \bar g = \frac{1}{B} \sum_i g_i \min\!\left(1, \frac{C}{\lVert g_i \rVert_2}\right)

C is a number, a function of the step, or one number for each group of parameters
(:func:`~opake_lightning.dpsgd.clipping.per_group`). With ``second_moment`` the result also carries
what the squares of the gradient are released from; :doc:`/second_moments` has the two forms and
their sensitivities.

Source: Abadi et al. 2016, Algorithm 1 (arXiv:1607.00133). Departs from it: the sum is divided by
the *expected* batch size, a public constant, never by the number of examples that were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import optree
import torch
from torch import Tensor

from opake_lightning import _check
from opake_lightning._places import owners_of
from opake_lightning._tree import Layout, layout_of
from opake_lightning.dpsgd.clipping._batch import examples_of
from opake_lightning.dpsgd.clipping._clip import Engine
from opake_lightning.dpsgd.clipping._engine import ClippedSum, Request, refuse_engine
from opake_lightning.dpsgd.clipping._functions import definition_of
from opake_lightning.dpsgd.clipping._groups import group_numbers
from opake_lightning.dpsgd.clipping._rule import ClippingNorm, ClipState, Fixed, Rule, bounds_of
from opake_lightning.errors import PrivacyError
from opake_lightning.types import ClippedPytree, ClipReport, SecondMomentClippedPytree

__all__ = ["GradFn", "SecondMoment", "clipped_grad", "per_example_grad_fn"]

SecondMoment = Literal["aggregate", "per_example"]
Bounds = tuple[float, ...]  # of the groups
# Squares of norms in this range, and noise in proportion to them, stay well inside float32.
_SQUARABLE = (1e-15, 1e15)


class GradFn(Protocol):
    """What the clipping functions return first."""

    def __call__(self, *args: Any, state: Any) -> tuple[Any, Any]:
        """Clipped gradient at ``args``, which are the loss function's."""
        ...


def clipped_grad(
    loss_fn: Callable[..., Any],
    *,
    clipping_norm: ClippingNorm,
    argnums: int = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    has_aux: bool = False,
    expected_batch_size: float | None = None,
    microbatch_size: int | None = None,
    second_moment: SecondMoment | bool | None = None,
    projection_radius: float | None = None,
    engine: None = None,
) -> tuple[GradFn, ClipState]:
    """Sum of per-example gradients, each scaled down to an L2 norm of at most ``clipping_norm``.

    The norm of an example is taken over all parameters together. A tied parameter counts once, with
    its summed gradient; a parameter that the loss never touches has a zero gradient. An example
    whose gradient is NaN or infinite contributes zero and is counted. If the loss draws random
    numbers with a row for each example (dropout), every example has its own.

    Guarantee: adding or removing one example moves the returned pytree by an L2 distance of at
    most its ``sensitivity``, up to a relative 1e-6 of rounding.

    Args:
        loss_fn: ``loss_fn(params, batch, ...)``: one loss per example, shape (B,). It is called
            with batches of any size from 1 on, and must not mix the examples of one; what returns
            a single number is called with one example at a time, which is slower.
        clipping_norm: The bound C, in units of the gradient; > 0. Or, with a bound for each group
            of parameters, what :func:`per_group` or :func:`per_layer` returned: then norms are
            taken group by group, and C is √ΣC_k². Or a public function of the step (the number of
            calls so far, kept in the state), such as a schedule of
            :mod:`opake_lightning.scheduling`.
        argnums: Position of the parameters: a pytree of floating-point tensors, all trained.
        batch_argnums: Position(s) of the batch: pytrees whose tensors have one row per example.
            ``None`` as the batch is an empty draw.
        has_aux: If true, ``loss_fn`` returns (loss, aux), aux being a pytree of tensors.
        expected_batch_size: Divide the sum by this public constant, and the sensitivity with it.
            Never pass the size of the batch at hand: under Poisson sampling it is private.
        microbatch_size: How many examples are differentiated at once. Bounds memory; the result
            does not depend on it. None lets the engine choose, by what it keeps of an example.
        second_moment: Also prepare the release of squared gradients: ``"aggregate"`` for the square
            of the whole gradient, ``"per_example"`` for the sum of squares of single examples'
            clipped gradients, divided by ``expected_batch_size`` once. True is the first where a
            radius is known, by ``projection_radius`` or ``expected_batch_size``, and else the
            second. None (or False) for the gradient alone.
        projection_radius: With ``"aggregate"``: the aggregate is projected to this L2 norm before
            it is squared; in units of the returned gradient. None means ``clipping_norm``, and
            needs an ``expected_batch_size``.
        engine: Gone, since one engine is exact for every loss; passing anything is an error.

    Returns:
        A function and its initial state. ``grads, state = grad_fn(params, batch, state=state)``
        with ``grads`` a :class:`~opake_lightning.types.ClippedPytree` in float32 or wider, or
        ``(grads, aux), state`` with ``has_aux``; aux then has one row per example, and is None for
        an empty batch. With ``second_moment``, ``grads`` is a
        :class:`~opake_lightning.types.SecondMomentClippedPytree`.

    Raises:
        ValueError: If ``clipping_norm`` is not finite and > 0, or another argument is out of range.
        PrivacyError: If parameters and batch are the same argument; from the function, if the
            patterns of ``per_group`` do not put every parameter into one group.

    >>> import torch
    >>> def loss_fn(w, batch):
    ...     x, y = batch
    ...     return 0.5 * (x @ w - y) ** 2
    >>> grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0)
    >>> batch = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.ones(2)
    >>> grads, state = grad_fn(torch.zeros(2), batch, state=state)  # -(3, 4) / 5 - (0.3, 0.4)
    >>> grads.pytree
    tensor([-0.9000, -1.2000], dtype=torch.float64)
    """
    grad_fn = per_example_grad_fn(
        loss_fn, Fixed(clipping_norm),
        argnums=argnums, batch_argnums=batch_argnums, has_aux=has_aux,
        expected_batch_size=expected_batch_size, microbatch_size=microbatch_size,
        second_moment=second_moment, projection_radius=projection_radius, engine=engine,
    )  # fmt: skip
    return grad_fn, ClipState()


def per_example_grad_fn(
    loss_fn: Callable[..., Any],
    rule: Rule,
    *,
    argnums: int = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    has_aux: bool = False,
    expected_batch_size: float | None = None,
    microbatch_size: int | None = None,
    second_moment: SecondMoment | bool | None = None,
    projection_radius: float | None = None,
    engine: None = None,
) -> GradFn:
    """The function that clips by ``rule``; other arguments are those of :func:`clipped_grad`."""
    scale = _check.positive(
        "expected_batch_size", 1.0 if expected_batch_size is None else expected_batch_size
    )
    if microbatch_size is not None:
        _check.positive_int("microbatch_size", microbatch_size)
    refuse_engine(engine)
    batch_at = _batch_positions(argnums, batch_argnums)
    clipping = Engine()
    form = _form_of(second_moment, projection_radius, expected_batch_size)
    _radius_of(form, bounds_of(rule.clipping_norm, 0), projection_radius)

    def grad_fn(*args: Any, state: ClipState) -> tuple[Any, ClipState]:
        if len(args) < (least := max(argnums, *batch_at) + 1):
            raise TypeError(f"expected at least {least} positional arguments")
        params = args[argnums]
        layout = layout_of(params)
        bounds = rule.bounds(state)

        def loss_of(params: Any, batch: tuple[Any, ...]) -> Any:
            filled = list(args)
            filled[argnums] = params
            for position, value in zip(batch_at, batch, strict=True):
                filled[position] = value
            return loss_fn(*filled)

        leaves = [_tracked(leaf) for leaf in layout.leaves(params)]
        groups = (0,) * len(leaves)
        if rule.groups is not None:
            groups = group_numbers(rule.groups, layout.treespec)
        request = Request(
            loss_of,
            leaves,
            layout,
            examples_of(tuple(args[position] for position in batch_at)),
            owners_of(loss_fn),
            needs_gradient=getattr(loss_fn, "needs_gradient", False),
            least_bound=min(bounds, default=1.0),
            groups=groups,
            factors_of=partial(_factors, rule, bounds, scale),
            # (sqrt(B) * factor / B * g)^2 = (factor * g)^2 / B
            square_scale=math.sqrt(scale) if form == "per_example" else None,
            has_aux=has_aux,
        )
        try:
            result, caution, size = clipping.clipped_sum(
                request, caution=state.caution, size=microbatch_size or state.microbatch_size
            )
        except PrivacyError as error:
            error.add_note(f"In the loss {definition_of(loss_fn)}.")
            raise
        radius = _radius_of(form, bounds, projection_radius)
        grads = _clipped(result, layout, bounds, scale, radius)
        state = rule.after(state, result.norms, scale)
        state = replace(state, caution=caution, microbatch_size=0 if microbatch_size else size)
        return ((grads, result.aux) if has_aux else grads), state

    return grad_fn


def _tracked(leaf: Tensor) -> Tensor:
    """The very tensor if it can have a gradient: the loss may hold it under other names too."""
    if leaf.requires_grad and leaf.is_leaf:
        if leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None):
            raise PrivacyError(
                f"a parameter of shape {tuple(leaf.shape)} has a gradient hook, which is not run "
                "when every example has a gradient of its own; remove it, and write what it does "
                "into the loss or the optimizer"
            )
        return leaf
    return leaf.detach().requires_grad_()


def _factors(rule: Rule, bounds: Bounds, divided_by: float, norms: Tensor) -> Tensor:
    limits: Tensor | float = bounds[0]
    if len(bounds) > 1:
        limits = torch.tensor(bounds, dtype=norms.dtype, device=norms.device)[:, None]
    return torch.where(norms.isfinite(), rule.factors(norms, limits), 0.0) / divided_by


def _clipped(
    result: ClippedSum, layout: Layout, bounds: Bounds, scale: float, radius: float | None
) -> ClippedPytree | SecondMomentClippedPytree:
    released = {i: group.dtype for group in layout.groups for i in group.members}
    dtypes = tuple([released[i] for i in range(len(released))])

    def pytree(sums: Any, sensitivity: float, report: ClipReport | None) -> ClippedPytree:
        tree = optree.tree_unflatten(layout.treespec, sums)
        return ClippedPytree(tree, sensitivity / scale, report, dtypes)

    gradient = pytree(result.sums, math.hypot(*bounds), ClipReport(result.norms, bounds))
    if result.squares is not None:
        # The squares of a group have a norm of at most C_k^2.
        most = math.hypot(*(bound**2 for bound in bounds))
        return SecondMomentClippedPytree(gradient, square=pytree(result.squares, most, None))
    if radius is not None:
        return SecondMomentClippedPytree(gradient, projection_radius=radius)
    return gradient


def _batch_positions(argnums: int, batch_argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    batch_at = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    for position in (argnums, *batch_at):
        _check.at_least("argnums and batch_argnums", position, 0)
    if argnums in batch_at or not batch_at:
        raise PrivacyError(f"argnums={argnums} must differ from batch_argnums={batch_argnums}")
    return batch_at


def _form_of(
    second_moment: object, projection_radius: float | None, expected_batch_size: float | None
) -> SecondMoment | None:
    form = second_moment
    known = projection_radius is not None or expected_batch_size is not None
    if isinstance(form, bool):
        form = ("aggregate" if known else "per_example") if form else None
    if form not in ("aggregate", "per_example", None):
        raise ValueError(
            f"second_moment must be 'aggregate', 'per_example' or None, got {second_moment!r}"
        )
    if projection_radius is not None and form != "aggregate":
        raise ValueError(
            f"projection_radius={projection_radius!r} is for second_moment='aggregate' only; "
            "leave it out"
        )
    if form == "aggregate" and not known:
        raise ValueError(
            "second_moment='aggregate' squares the gradient within a ball around zero: pass "
            "expected_batch_size, so that the ball of radius clipping_norm fits the mean gradient, "
            "or projection_radius in the units of the sum"
        )
    return form


def _radius_of(
    form: SecondMoment | None, bounds: Bounds, projection_radius: float | None
) -> float | None:
    """The projection radius of the aggregate form; None for the others."""
    if form is None:
        return None
    name = "clipping_norm" if form == "per_example" else "projection_radius"
    norm = math.hypot(*bounds) if projection_radius is None else projection_radius
    least, most = _SQUARABLE
    if not least <= _check.positive(name, norm) <= most:
        raise ValueError(
            f"{name}={norm!r} must be between {least} and {most} for second moments, whose noise "
            "is proportional to its square; rescale the loss"
        )
    return float(norm) if form == "aggregate" else None
