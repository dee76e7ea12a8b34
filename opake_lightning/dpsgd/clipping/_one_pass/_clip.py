"""A batch, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from opake_lightning.dpsgd.clipping import _vmap
from opake_lightning.dpsgd.clipping._engine import LARGE_NORM, Aux, ClippedSum, Request
from opake_lightning.dpsgd.clipping._one_pass._engine import Pass, run_pass
from opake_lightning.dpsgd.clipping._one_pass._verify import (
    Undecided,
    Verified,
    free_bytes,
    same_random,
)
from opake_lightning.dpsgd.clipping._uses import Unsupported

__all__ = ["clipped_sum"]

# Bytes of what one pass keeps. On the CPU, more passes of less take less time: the memory of one
# serves the next, and new memory costs more than what is computed in it.
_PASS_BYTES = 1 << 28
_PASS_BYTES_ELSEWHERE = 1 << 30
_MOST = 512
# What is recorded is part of what autograd keeps.
_KEPT = 4


def clipped_sum(
    request: Request, *, microbatch_size: int | None, verified: Verified
) -> tuple[ClippedSum, int]:
    """Answer ``request`` in one pass per microbatch.

    Returns:
        The sum, and the size of a microbatch.

    Raises:
        Unsupported: If it would not be exact.
    """
    run = _Microbatches(request, verified)
    size = microbatch_size or run.affordable()
    step = size or _MOST
    with torch.no_grad():
        for start in range(0, request.examples.size, step):
            run.add(tuple(t[start : start + step] for t in request.examples.tensors))
    return run.result(), size


class _Microbatches:
    def __init__(self, request: Request, verified: Verified) -> None:
        self._request, self._verified = request, verified
        layout = request.layout
        self._flats = layout.zeros()
        self._sums = layout.views(self._flats)
        self._squares = layout.zeros() if request.square_factors_of else None
        self._square_sums = layout.views(self._squares) if self._squares else []
        self._norms = [request.no_norms()]
        self._aux: list[Aux] = []

    def add(self, rows: tuple[Tensor, ...]) -> None:
        """Add the examples of one microbatch."""
        if len(rows[0]) == 1:
            norms, aux = self._alone(rows)
        else:
            norms, aux = self._together(rows)
        self._norms.append(norms)
        self._aux.append(aux)

    def result(self) -> ClippedSum:
        """The sums."""
        aux = None
        if self._request.has_aux and self._aux:
            aux = optree.tree_map(lambda *parts: torch.cat(parts), *self._aux)
        return ClippedSum(self._flats, torch.cat(self._norms, dim=1), aux, self._squares)

    def affordable(self) -> int:
        """How many examples to take at once, a power of two, found with two of them."""
        if self._request.examples.size < 2:
            return 0
        rows = tuple(t[:2] for t in self._request.examples.tensors)
        with same_random(self._request.params):
            each = self._pass(rows).kept_bytes / 2
        room = _PASS_BYTES if self._request.device.type == "cpu" else _PASS_BYTES_ELSEWHERE
        room = min(room, free_bytes(self._request.device) / _KEPT / 2)
        return 1 << max(0, min(int(room / max(1.0, each)), _MOST).bit_length() - 1)

    def _pass(self, rows: tuple[Tensor, ...]) -> Pass:
        with _vmap.without_autocast(self._request.device) as ambient:
            return run_pass(
                lambda leaves: self._loss(leaves, rows), self._request.params, rows, ambient
            )

    def _loss(self, leaves: Sequence[Tensor], rows: tuple[Tensor, ...]) -> tuple[Any, Any]:
        losses, aux = self._request.loss(leaves, rows)
        size = len(rows[0])

        def own(leaf: Any) -> Tensor:
            return _rows_of(leaf, size)

        return losses, optree.tree_map(own, aux)

    def _together(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, Aux]:
        found = self._pass(rows)
        norms = found.norms(self._request.groups, self._request.n_groups, self._request.device)
        usual = (norms <= LARGE_NORM).all(0)
        if not bool(usual.all()):
            return self._apart(rows, usual, found.aux)
        if not self._verified.knows(found.signature):
            try:
                self._verified.check(self._loss, self._request.params, rows, found.signature)
            except Undecided:
                return self._apart(rows, torch.zeros_like(usual), found.aux)
        found.add_weighted(self._request.factors_of(norms), self._request.groups, self._sums)
        if self._request.square_factors_of is not None:
            found.add_squares(
                self._request.square_factors_of(norms), self._request.groups, self._square_sums
            )
        return norms, found.aux

    def _apart(self, rows: tuple[Tensor, ...], usual: Tensor, aux: Aux) -> tuple[Tensor, Aux]:
        """NaN times zero is NaN: examples with odd gradients are not in the product with others."""
        n = len(usual)
        norms = torch.zeros(
            self._request.n_groups, n, dtype=torch.float64, device=self._request.device
        )
        many = int(usual.sum()) > 1
        if many:
            norms[:, usual], _ = self._together(tuple(t[usual] for t in rows))
        for i in range(n):
            if not (many and bool(usual[i])):
                norms[:, i : i + 1], _ = self._alone(tuple(t[i : i + 1] for t in rows))
        return norms, aux

    def _alone(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, Aux]:
        """One example by the general engine."""
        alone = replace(self._request, examples=self._request.examples.of(rows))
        result = _vmap.clipped_sum(alone, microbatch_size=1, one_by_one=True)
        for total, flat in zip(self._flats, result.flats, strict=True):
            total.add_(flat)
        for total, flat in zip(self._squares or [], result.squares or [], strict=True):
            total.add_(flat)
        return result.norms, result.aux


def _rows_of(leaf: Any, size: int) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"aux must hold tensors only, one row per example, got {type(leaf).__name__}"
        )
    if not leaf.dim() or len(leaf) != size:
        raise Unsupported(
            f"an auxiliary output has shape {tuple(leaf.shape)}, not a row for each of {size} "
            "examples"
        )
    return leaf.detach()
