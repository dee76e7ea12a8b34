"""The general engine: per-example gradients by ``torch.func``, clipped and summed in microbatches.

It is right for everything that ``torch.func.vmap`` can run, at the price of holding one copy of
the gradient per example of a microbatch. The loss runs under the caller's autocast; norms,
factors and sums are computed outside of it, norms in float64 blocks (a plain float32 reduction
over 10⁷ numbers reads up to 4e-4 low, and every clipped gradient would exceed the bound by that).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

import optree
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opake_lightning._tree import Layout, wide
from opake_lightning.dpsgd.clipping._batch import Examples

__all__ = ["Aux", "ClippedSum", "clipped_sum"]

# Elements of per-example gradients that a microbatch may hold unless the caller says: 256 MiB of
# float32, beyond which memory traffic costs more than smaller microbatches do.
_DEFAULT_ELEMENTS = 1 << 26
_NORM_BLOCK = 1 << 16
# Squares of larger norms, or factors as small as their inverse, may leave the range of the dtype.
_LARGE_NORM = 1e15

Aux = Any


@dataclass(frozen=True, slots=True)
class ClippedSum:
    """What an engine returns.

    Attributes:
        flats: The weighted sum of per-example gradients, packed.
        norms: L2 norm of each example's gradient before clipping, float64, shape [B].
        aux: What the loss returned beside the loss, one row per example; None for an empty batch.
        squares: The weighted sum of their squares, packed; None unless asked for.
    """

    flats: list[Tensor]
    norms: Tensor
    aux: Aux
    squares: list[Tensor] | None = None


def clipped_sum(
    loss_of: Callable[[Any, tuple[Any, ...]], Any],
    params: list[Tensor],
    layout: Layout,
    examples: Examples,
    factors_of: Callable[[Tensor], Tensor],
    *,
    has_aux: bool,
    microbatch_size: int | None,
    square_factors_of: Callable[[Tensor], Tensor] | None = None,
) -> ClippedSum:
    """Sum over examples of ``factor(norm) * gradient``, without keeping the gradients.

    Args:
        loss_of: Loss of (params, batch arguments), called with one example at a time; the batch
            dimension is kept, with size 1.
        params: Leaves of the parameters, in the layout's order.
        layout: Layout of the parameters.
        examples: The batch.
        factors_of: From norms (float64, [B]) to factors (float64, [B]); must be 0 where the norm
            is not finite.
        has_aux: Whether the loss returns (loss, aux).
        microbatch_size: Examples differentiated at once; None chooses by memory.
        square_factors_of: Like ``factors_of``, for gradients that are squared before they are
            summed; None leaves the squares out.
    """
    leaves = [p.detach() for p in params]
    flats = layout.zeros()
    sums = [view.view(-1) for view in layout.views(flats)]
    squares = layout.zeros() if square_factors_of else None
    square_sums = [view.view(-1) for view in layout.views(squares)] if squares else []
    size = microbatch_size or max(1, _DEFAULT_ELEMENTS // max(1, sum(p.numel() for p in params)))
    run = _PerExample(loss_of, layout, examples, has_aux=has_aux)
    device = params[0].device if params else torch.device("cpu")
    norms: list[Tensor] = []
    aux: list[tuple[Tensor, ...]] = []
    for start in range(0, examples.size, size):
        rows = tuple(t[start : start + size] for t in examples.tensors)
        with _without_autocast(device) as ambient:
            gradients, extra = run(leaves, rows, ambient)
            norm, divided_by = _tame(gradients, _norms(gradients, len(rows[0])))
            factors = factors_of(norm) * divided_by
            for total, gradient in zip(sums, gradients, strict=True):
                rows_of = gradient.reshape(len(norm), -1).to(total.dtype)
                total.addmv_(rows_of.t(), factors.to(total.dtype))
            if square_factors_of:
                _add_squares(square_sums, gradients, square_factors_of(norm) * divided_by)
            norms.append(norm)
            aux.append(extra)
    joined = torch.cat(norms) if norms else torch.zeros(0, dtype=torch.float64, device=device)
    return ClippedSum(flats, joined, run.rebuild_aux(aux), squares)


class _PerExample:
    """Gradients of single examples, vectorised over the rows of a microbatch."""

    def __init__(
        self,
        loss_of: Callable[[Any, tuple[Any, ...]], Any],
        layout: Layout,
        examples: Examples,
        *,
        has_aux: bool,
    ) -> None:
        self._loss_of = loss_of
        self._layout = layout
        self._examples = examples
        self._has_aux = has_aux
        self._aux_spec: optree.PyTreeSpec | None = None

    def __call__(
        self, params: list[Tensor], rows: tuple[Tensor, ...], ambient: Callable[[], Any]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        def loss(leaves: tuple[Tensor, ...], *example: Tensor) -> tuple[Tensor, Any]:
            with ambient(), _attention(leaves):
                return self._loss(leaves, example)

        per_example = torch.func.vmap(
            torch.func.grad(loss, has_aux=True),
            in_dims=(None, *(0 for _ in rows)),
            randomness="different",
        )
        try:
            gradients, aux = per_example(tuple(params), *rows)
        except RuntimeError as error:
            error.add_note(
                "This happened while the loss ran on one example at a time under torch.func.vmap, "
                "where values cannot steer Python (.item(), `if tensor:`) and module buffers "
                "cannot be written in place."
            )
            raise
        return list(gradients), tuple(aux)

    def _loss(
        self, leaves: tuple[Tensor, ...], example: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        params = optree.tree_unflatten(self._layout.treespec, leaves)
        batch = self._examples.rebuild(tuple(t.unsqueeze(0) for t in example))
        out = self._loss_of(params, batch)
        if self._has_aux and not (isinstance(out, tuple) and len(cast("Any", out)) == 2):
            raise TypeError(f"with has_aux=True the loss must return (loss, aux), got {type(out)}")
        loss, aux = cast("tuple[Any, Any]", out) if self._has_aux else (out, ())
        if not isinstance(loss, Tensor) or loss.shape not in ((), (1,)):
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))
            raise ValueError(
                "the loss must be one number per example: for a batch with one example it must "
                f"return a tensor of shape (1,) or (), got {what}; reduce over everything but the "
                'batch dimension (reduction="none", then .mean(1) over tokens or pixels)'
            )
        aux_leaves, self._aux_spec = optree.tree_flatten(cast("Any", aux))
        for leaf in aux_leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"aux must hold tensors only, one row per example, got {type(leaf).__name__}"
                )
        rows = (_drop_batch_dim(cast("Tensor", leaf)).detach() for leaf in aux_leaves)
        return loss.reshape(()), tuple(rows)

    def rebuild_aux(self, chunks: list[tuple[Tensor, ...]]) -> Aux:
        if self._aux_spec is None or not self._has_aux:
            return None
        columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
        return optree.tree_unflatten(self._aux_spec, columns)


def _drop_batch_dim(leaf: Tensor) -> Tensor:
    return leaf.squeeze(0) if leaf.dim() and leaf.shape[0] == 1 else leaf


def _norms(gradients: list[Tensor], rows: int) -> Tensor:
    """L2 norm over all leaves of each row, float64, [rows]."""
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.zeros(rows, dtype=torch.float64, device=device)
    columns = max(1, _NORM_BLOCK // rows)
    for gradient in gradients:
        for block in gradient.reshape(rows, -1).split(columns, dim=1):
            norm = torch.linalg.vector_norm(block.to(wide(block.dtype)), dim=1, dtype=torch.float64)
            total.addcmul_(norm, norm)
    return total.sqrt_()


def _add_squares(sums: list[Tensor], gradients: list[Tensor], factors: Tensor) -> None:
    """Add the squares of the scaled rows: a squared factor could leave the range of the dtype."""
    for total, gradient in zip(sums, gradients, strict=True):
        rows_of = gradient.reshape(len(factors), -1).to(total.dtype)
        total.add_((rows_of * factors.to(total.dtype)[:, None]).square_().sum(0))


def _tame(gradients: list[Tensor], norm: Tensor) -> tuple[Tensor, Tensor]:
    """Clear rows of ``gradients`` that are not finite, and divide very large ones.

    A factor of zero does not remove NaN or infinity, and the factor of a very large row has too
    few digits in float32. Looking at B norms tells that there are no such rows, as there almost
    never are. Entries of the list are replaced, not written to: leaves may share one gradient.

    Returns:
        The norms before the division, infinite where a row was cleared; and the power of two that
        each row was divided by.
    """
    divided_by = torch.ones_like(norm)
    odd = ~(norm <= _LARGE_NORM)
    if not bool(odd.any()):
        return norm, divided_by
    flat = [gradient.reshape(len(norm), -1) for gradient in gradients if gradient.numel()]
    peak = torch.stack([g.abs().amax(1).double() for g in flat]).amax(0)
    finite = peak.isfinite()
    exponent = torch.where(odd & finite, torch.frexp(peak).exponent - 1, 0)
    divided_by = torch.pow(2.0, exponent.double())
    for index, gradient in enumerate(gradients):
        column = (-1, *(1 for _ in gradient.shape[1:]))
        smaller = gradient / divided_by.to(gradient.dtype).view(column)
        gradients[index] = torch.where(finite.view(column), smaller, 0)
    norm = torch.where(finite, _norms(gradients, len(norm)) * divided_by, torch.inf)
    return norm, divided_by


def _attention(params: tuple[Tensor, ...]) -> Any:
    # The fused CPU kernel has no batching rule: vmap would run it example by example, and warn.
    if params and params[0].device.type == "cpu":
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_autocast(device: torch.device) -> Generator[Callable[[], Any]]:
    """Leave autocast; yields a way to step back into it around the loss."""
    kind = device.type
    enabled = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind)

    def ambient() -> Any:
        # The cache of cast weights must not outlive a function transform.
        return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)

    with torch.autocast(kind, enabled=False) if enabled else contextlib.nullcontext():
        yield ambient if enabled else contextlib.nullcontext
