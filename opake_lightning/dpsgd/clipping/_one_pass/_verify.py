"""Trying out whether one pass finds what single examples have.

A recording cannot tell a batch of sequences from a sequence of batches, nor see that examples were
mixed. Both change the gradients: so the first time that a loss does something, the norms and a
weighted sum of a few examples are compared with ordinary autograd's of each of them alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from opake_lightning._tree import wide
from opake_lightning.dpsgd.clipping._one_pass._engine import Pass, Signature, run_pass
from opake_lightning.dpsgd.clipping._record import Recorder
from opake_lightning.dpsgd.clipping._uses import Unsupported

__all__ = ["Undecided", "Verified", "free_bytes", "same_random"]

# How many examples are compared, and how far, in relation to the norm, they may be off. What is
# wrong is off by its own size. What is right is off by rounding; but in float32 a ReLU may be open
# in a batch and shut for the example alone, so float64 is tried first.
_COMPARED = 3
# How many examples are in the batch that they are compared in; one takes time and memory.
_FEW = 8
_TOLERANCE, _LOOSE_TOLERANCE = 1e-5, 5e-2
# Of gradients whose squares leave the range of float32 nothing can be told.
_LEAST = 1e-12
# Memory for each parameter that a comparison in float64 may need, some of it to spare.
_BYTES = 100
# How far from the parameters it is compared: in relation to their size, and at least.
_AWAY, _AWAY_FROM_ZERO = 0.05, 0.01
# Rounding of a parameter with a small gradient, in relation to the whole.
_SLACK = 1e-3

Loss = Callable[[Sequence[Tensor], tuple[Tensor, ...]], tuple[Any, Any]]


class Verified:
    """What a loss was seen to do right."""

    def __init__(self) -> None:
        self._seen: set[Signature] = set()

    def knows(self, signature: Signature) -> bool:
        """Whether passes with this signature are right."""
        return signature in self._seen

    def check(
        self,
        loss_of: Loss,
        params: Sequence[Tensor],
        rows: tuple[Tensor, ...],
        signature: Signature,
    ) -> None:
        """Compare one pass over ``rows``, which had this signature, with single examples.

        Nothing outside is changed: random numbers go on as if this had not happened.

        Raises:
            Unsupported: If they differ, or cannot be compared.
            Undecided: If there is nothing to compare.
        """
        if not params:
            return
        few = len(rows[0]) > _FEW
        part = tuple(t[:: -(-len(t) // _FEW)] for t in rows) if few else rows
        self._try(loss_of, params, part, signature if not few else None)
        if not self.knows(signature):
            # As many examples do something that a few do not.
            self._try(loss_of, params, rows, signature)

    def _try(
        self,
        loss_of: Loss,
        params: Sequence[Tensor],
        rows: tuple[Tensor, ...],
        signature: Signature | None,
    ) -> None:
        off = torch.autocast(params[0].device.type, enabled=False)
        with same_random(params), off:
            try:
                if sum(p.numel() for p in params) * _BYTES <= free_bytes(params[0].device):
                    same = tuple(t.double() if t.is_floating_point() else t for t in rows)
                    near = _elsewhere(params, torch.float64)
                    found = self._run(loss_of, near, same, _TOLERANCE)
                else:
                    near = _elsewhere(params, None)
                    found = self._run(loss_of, near, rows, _LOOSE_TOLERANCE)
            except _Mismatch:
                raise
            except (RuntimeError, TypeError, ValueError, Unsupported):
                # Not every loss can be had in another type than the one it was written for.
                found = self._run(loss_of, params, rows, _LOOSE_TOLERANCE)
            self._seen.update((found,) if signature is None else (found, signature))

    def _run(
        self, loss_of: Loss, params: Sequence[Tensor], rows: tuple[Tensor, ...], tolerance: float
    ) -> Signature:
        before = torch.get_rng_state()
        batch = run_pass(
            lambda leaves: loss_of(leaves, rows), params, rows, contextlib.nullcontext, calm=True
        )
        with torch.no_grad():
            self._compare(loss_of, params, rows, batch, tolerance)
        if not torch.equal(before, torch.get_rng_state()):
            raise _Mismatch(
                "it draws random numbers in a way that cannot be repeated, so that a batch cannot "
                "be compared with its examples"
            )
        return batch.signature

    def _compare(
        self,
        loss_of: Loss,
        params: Sequence[Tensor],
        rows: tuple[Tensor, ...],
        batch: Pass,
        tolerance: float,
    ) -> None:
        device = params[0].device
        groups = range(len(params))
        norms = batch.norms(groups, len(params), device)
        factors = torch.zeros(batch.size, dtype=torch.float64, device=device)
        sums = [torch.zeros(p.shape, dtype=wide(p.dtype), device=device) for p in params]
        wanted = [torch.zeros_like(s) for s in sums]
        chosen = {round(k * (batch.size - 1) / (_COMPARED - 1)) for k in range(_COMPARED)}
        for k, i in enumerate(sorted(chosen), 1):
            single = _single_gradients(loss_of, params, tuple(t[i : i + 1] for t in rows))
            alone = torch.stack([_norm(g) for g in single])
            if not bool(alone.isfinite().all()):
                raise Unsupported("an example has no finite gradient, and so cannot be compared")
            self._near(norms[:, i] - alone, alone, tolerance)
            # Different weights, so that one example cannot stand for another.
            factors[i] = k
            for want, gradient in zip(wanted, single, strict=True):
                want.add_(gradient, alpha=k)
        if not max(map(_norm, wanted)) > _LEAST:
            raise Undecided
        batch.add_weighted(factors.expand(len(params), -1), groups, sums)
        off = torch.stack([_norm(a - b) for a, b in zip(sums, wanted, strict=True)])
        self._near(off, torch.stack([_norm(want) for want in wanted]), tolerance)

    @staticmethod
    def _near(off: Tensor, sizes: Tensor, tolerance: float) -> None:
        """Refuse if what is ``off`` is more than rounding, for any parameter."""
        right = off.abs() <= tolerance * (sizes + _SLACK * _norm(sizes)) + _LEAST
        if not bool(right.all()):
            number = int(right.logical_not().nonzero()[0, 0])
            raise _Mismatch(
                f"the gradient of {{{number}}} in a batch is not that of its examples one by one: "
                "the loss mixes examples, or does not have them in the first dimension throughout"
            )


class Undecided(Exception):  # noqa: N818
    """The examples have no gradient that could be compared."""


class _Mismatch(Unsupported):
    """One pass has found something else than single examples have."""


def _elsewhere(params: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Parameters near by: where one is zero, others may have no gradient to compare."""
    draw = torch.Generator().manual_seed(0)
    out: list[Tensor] = []
    for param in params:
        value = param.detach().to(dtype or param.dtype)
        size = _norm(value) / max(1, value.numel()) ** 0.5
        step = torch.randn(value.shape, generator=draw).to(value)
        out.append(value + step * float(_AWAY * size + _AWAY_FROM_ZERO))
    return out


def _norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values.double())


def _single_gradients(
    loss_of: Loss, params: Sequence[Tensor], row: tuple[Tensor, ...]
) -> list[Tensor]:
    """Gradients of one example, by ordinary autograd and without random numbers."""
    leaves = [p.detach().requires_grad_() for p in params]
    with torch.enable_grad():
        with Recorder([], 1, {}, calm=True):
            losses, _ = loss_of(leaves, row)
        found: Any = [None] * len(leaves)
        if losses.requires_grad:
            found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
    return [g.to_dense() if g.is_sparse else g for g in found]


@contextlib.contextmanager
def same_random(params: Sequence[Tensor]) -> Generator[None]:
    """Random numbers go on afterwards as if nothing had happened."""
    devices = [params[0].device] if params and params[0].device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def free_bytes(device: torch.device) -> float:
    """Memory that is free on ``device``."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return float("inf")
