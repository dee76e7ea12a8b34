"""The general engine: per-example gradients by ``torch.func``, clipped and summed in microbatches.

It is right for everything that ``torch.func.vmap`` can run, at the price of holding one copy of
the gradient per example of a microbatch. The loss runs under the caller's autocast; norms,
factors and sums are computed outside of it, norms in float64 blocks (a plain float32 reduction
over 10⁷ numbers reads up to 4e-4 low, and every clipped gradient would exceed the bound by that).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, cast

import optree
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opake_lightning._tree import wide
from opake_lightning.dpsgd.clipping._engine import LARGE_NORM, Aux, ClippedSum, Request
from opake_lightning.dpsgd.clipping._record import Recorder
from opake_lightning.errors import PrivacyError

__all__ = ["clipped_sum", "without_autocast"]

# Elements of per-example gradients that a microbatch may hold unless the caller says: 256 MiB of
# float32, beyond which memory traffic costs more than smaller microbatches do.
_DEFAULT_ELEMENTS = 1 << 26
_NORM_BLOCK = 1 << 16


def clipped_sum(
    request: Request, *, microbatch_size: int | None, one_by_one: bool = False
) -> ClippedSum:
    """Answer ``request``, without keeping the gradients.

    Args:
        request: Its loss is called with one example at a time; the batch dimension is kept, with
            size 1.
        microbatch_size: Examples differentiated at once; None chooses by memory.
        one_by_one: Differentiate one example after the other, by ordinary autograd: slow, and right
            for everything that has a gradient.
    """
    layout, groups = request.layout, request.groups
    leaves = [p.detach() for p in request.params]
    flats = layout.zeros()
    sums = [view.view(-1) for view in layout.views(flats)]
    squares = layout.zeros() if request.square_factors_of else None
    square_sums = [view.view(-1) for view in layout.views(squares)] if squares else []
    size = microbatch_size or max(1, _DEFAULT_ELEMENTS // max(1, sum(p.numel() for p in leaves)))
    run = _PerExample(request)
    if one_by_one:
        size, run = 1, _OneByOne(request)
    norms = [request.no_norms()]
    aux: list[tuple[Tensor, ...]] = []
    for start in range(0, request.examples.size, size):
        rows = tuple(t[start : start + size] for t in request.examples.tensors)
        with without_autocast(request.device) as ambient:
            gradients, extra = run(leaves, rows, ambient)
            norm = _norms(gradients, groups, (request.n_groups, len(rows[0])))
            norm, divided_by = _tame(gradients, groups, norm)
            factors = (request.factors_of(norm) * divided_by).unbind()
            for total, gradient, group in zip(sums, gradients, groups, strict=True):
                rows_of = gradient.reshape(norm.shape[1], -1).to(total.dtype)
                total.addmv_(rows_of.t(), factors[group].to(total.dtype))
            if request.square_factors_of:
                factors = (request.square_factors_of(norm) * divided_by).unbind()
                _add_squares(square_sums, gradients, [factors[group] for group in groups])
            norms.append(norm)
            aux.append(extra)
    return ClippedSum(flats, torch.cat(norms, dim=1), run.rebuild_aux(aux), squares)


class _PerExample:
    """Gradients of single examples, vectorised over the rows of a microbatch."""

    def __init__(self, request: Request) -> None:
        self._request = request
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
        loss, aux = self._request.loss(leaves, tuple(t.unsqueeze(0) for t in example))
        if not isinstance(loss, Tensor) or loss.shape not in ((), (1,)):
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))
            raise ValueError(
                "the loss must be one number per example: for a batch with one example it must "
                f"return a tensor of shape (1,) or (), got {what}; reduce over everything but the "
                'batch dimension (reduction="none", then .mean(1) over tokens or pixels)'
            )
        aux_leaves, self._aux_spec = optree.tree_flatten(aux)
        for leaf in aux_leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"aux must hold tensors only, one row per example, got {type(leaf).__name__}"
                )
        rows = (_drop_batch_dim(cast("Tensor", leaf)).detach() for leaf in aux_leaves)
        return loss.reshape(()), tuple(rows)

    def rebuild_aux(self, chunks: list[tuple[Tensor, ...]]) -> Aux:
        if self._aux_spec is None or not self._request.has_aux:
            return None
        columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
        return optree.tree_unflatten(self._aux_spec, columns)


class _OneByOne(_PerExample):
    """The gradient of a single example, as autograd makes it."""

    def __call__(
        self, params: list[Tensor], rows: tuple[Tensor, ...], ambient: Callable[[], Any]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        leaves = [p.detach().requires_grad_() for p in params]
        row = tuple(t[0] for t in rows)
        watch = Recorder([], 1, {}, watching=True)
        watch.mark(row)
        with torch.enable_grad():
            try:
                with ambient(), watch:
                    loss, aux = self._loss(tuple(leaves), row)
            finally:
                if watch.refusal is not None:
                    raise PrivacyError(f"no engine may run this loss: {watch.refusal}")
            found: Any = [None] * len(leaves)
            if loss.requires_grad:
                # Not backward(), which would also write to what is not a parameter here.
                found = torch.autograd.grad(loss, leaves, allow_unused=True)
        gradients = [
            torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            for p, g in zip(params, found, strict=True)
        ]
        return [g.unsqueeze(0) for g in gradients], tuple(a.unsqueeze(0) for a in aux)


def _drop_batch_dim(leaf: Tensor) -> Tensor:
    return leaf.squeeze(0) if leaf.dim() and leaf.shape[0] == 1 else leaf


def _norms(gradients: list[Tensor], groups: tuple[int, ...], shape: tuple[int, int]) -> Tensor:
    """L2 norm of each row (second dimension) over the leaves of each group (first), float64."""
    device = gradients[0].device if gradients else torch.device("cpu")
    squares = torch.zeros(shape, dtype=torch.float64, device=device)
    totals = squares.unbind()
    rows = shape[1]
    columns = max(1, _NORM_BLOCK // rows)
    for gradient, group in zip(gradients, groups, strict=True):
        for block in gradient.reshape(rows, -1).split(columns, dim=1):
            norm = torch.linalg.vector_norm(block.to(wide(block.dtype)), dim=1, dtype=torch.float64)
            totals[group].addcmul_(norm, norm)
    return squares.sqrt_()


def _add_squares(sums: list[Tensor], gradients: list[Tensor], factors: list[Tensor]) -> None:
    """Add the squares of the scaled rows: a squared factor could leave the range of the dtype."""
    for total, gradient, factor in zip(sums, gradients, factors, strict=True):
        rows_of = gradient.reshape(len(factor), -1).to(total.dtype)
        total.add_((rows_of * factor.to(total.dtype)[:, None]).square_().sum(0))


def _tame(gradients: list[Tensor], groups: tuple[int, ...], norm: Tensor) -> tuple[Tensor, Tensor]:
    """Clear rows of ``gradients`` that are not finite, and divide very large ones.

    A factor of zero does not remove NaN or infinity, and the factor of a very large row has too
    few digits in float32. Looking at the norms tells that there are no such rows, as there almost
    never are. Entries of the list are replaced, not written to: leaves may share one gradient.

    Returns:
        The norms before the division, infinite in all groups where a row was cleared; and the power
        of two that each row was divided by, group by group.
    """
    divided_by = torch.ones_like(norm)
    odd = ~(norm <= LARGE_NORM)
    if not bool(odd.any()):
        return norm, divided_by
    rows = norm.shape[1]
    peak = torch.zeros_like(norm)
    for gradient, group in zip(gradients, groups, strict=True):
        if gradient.numel():
            largest = gradient.reshape(rows, -1).abs().amax(1).double()
            peak[group] = torch.maximum(peak[group], largest)  # NaN stays NaN
    finite = peak.isfinite().all(0)
    exponent = torch.where(odd & finite, torch.frexp(peak).exponent - 1, 0)
    divided_by = torch.pow(2.0, exponent.double())
    for index, (gradient, group) in enumerate(zip(gradients, groups, strict=True)):
        column = (-1, *(1 for _ in gradient.shape[1:]))
        smaller = gradient / divided_by[group].to(gradient.dtype).view(column)
        gradients[index] = torch.where(finite.view(column), smaller, 0)
    norm = _norms(gradients, groups, (len(norm), rows)) * divided_by
    return torch.where(finite & norm.isfinite().all(0), norm, torch.inf), divided_by


def _attention(params: tuple[Tensor, ...]) -> Any:
    # The fused CPU kernel has no batching rule: vmap would run it example by example, and warn.
    if params and params[0].device.type == "cpu":
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Generator[Callable[[], Any]]:
    """Leave autocast; yields a way to step back into it around the loss."""
    kind = device.type
    enabled = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind)

    def ambient() -> Any:
        # The cache of cast weights must not outlive a function transform.
        return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)

    with torch.autocast(kind, enabled=False) if enabled else contextlib.nullcontext():
        yield ambient if enabled else contextlib.nullcontext
