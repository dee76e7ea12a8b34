"""A batch: microbatch by microbatch, part by part, and what is added up."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from opake_lightning import _functorch
from opake_lightning._tree import in_float64
from opake_lightning.dpsgd.clipping._engine import LARGE_NORM, ClippedSum, Request
from opake_lightning.dpsgd.clipping._entries import Draws, Retry, Split, WritesToBatch
from opake_lightning.dpsgd.clipping._fence import Fence
from opake_lightning.dpsgd.clipping._gradients import Dense
from opake_lightning.dpsgd.clipping._groups import names_of
from opake_lightning.dpsgd.clipping._pass import Alone, Pass, run_alone, run_pass
from opake_lightning.errors import PrivacyError

__all__ = ["Engine"]

# Bytes of what one pass keeps. On the CPU, more passes of less take less time: the memory of one
# serves the next, and new memory costs more than what is computed in it.
_PASS_BYTES = 1 << 28
_PASS_BYTES_ELSEWHERE = 1 << 30
_MOST = 512
# What is recorded is part of what autograd keeps.
_KEPT = 4
# How many examples show what one takes.
_SAMPLE = 2
# Parts into which Python values may split a microbatch; beyond that, one at a time is no slower.
_PARTS = 8
# Norms whose squares float32 may lose, if the bound is as small.
_SMALL_NORM = 1e-9

# Elements of sums that take longer to be filled with zeros than to be asked whether they are.
_LARGE = 1 << 20

# Numbers of no row.
_AFTER, _OF_MICROBATCH = 1 << 62, 1 << 61

Rows = tuple[Tensor, ...]


@dataclass
class Engine:
    """What clips, and what it has said in this process."""

    _said: set[str] = field(default_factory=set[str])
    _looked_for_unused: bool = False
    _fence: Fence | None = None
    copies_rows: bool = False  # as the loss writes to its batch

    def clipped_sum(
        self, request: Request, *, caution: int, size: int
    ) -> tuple[ClippedSum, int, int]:
        """Answer ``request``.

        Args:
            request: The batch and what to do with it.
            caution: How passes begin, as the last call returned it.
            size: Examples of a microbatch; 0 chooses by what some of them take.

        Returns:
            The sum, and the caution and the size to go on with.

        Raises:
            PrivacyError: If the loss is refused. Nothing it wrote is left.
        """
        fence = self._fence = Fence(request.owners, self._fence)
        fence.refuse_hooks()
        batch = _Batch(self, request, fence, caution)
        try:
            with torch.no_grad(), _without_autocast(request.device) as batch.ambient:
                size = batch.run(size)
                batch.require_gradient()
        except BaseException:
            fence.restore()
            raise
        fence.finish()
        batch.random.go_on()
        # Not within the step: a list that catches warnings is a place that the fence looks at.
        if (why := batch.ran_alone) and why not in self._said:
            self._said.add(why)
            warnings.warn(
                f"clipping one example at a time, which is much slower: {why}", stacklevel=2
            )
        if request.examples.size and not self._looked_for_unused:
            self._looked_for_unused = True
            batch.warn_of_unused()
        return batch.result(), batch.caution, size


class _Batch:
    ambient: Callable[[], Any] = contextlib.nullcontext  # the autocast around the loss

    def __init__(self, engine: Engine, request: Request, fence: Fence, caution: int) -> None:
        self._engine, self._request, self._fence, self.caution = engine, request, fence, caution
        self.random = _Random(request.device)
        layout = in_float64(request.layout)
        # Small sums are filled with zeros: it takes less than to write the first of each.
        large = sum(p.numel() for p in request.params) > _LARGE
        self._sums = layout.views(layout.empty() if large else layout.zeros())
        # Sums that hold nothing, not even zeros.
        self._empty = set(range(len(request.params))) if large else set[int]()
        squared = request.square_scale is not None
        self._square_sums = layout.views(layout.zeros()) if squared else None
        # Of each pass: which examples, and what was found of them.
        none = torch.zeros(request.n_groups, 0, dtype=torch.float64, device=request.device)
        self._index, self._norms = [torch.arange(0)], [none]
        self._aux: list[Any] = []
        self._used = [False] * len(request.params)
        self._has_gradient = False
        self.ran_alone = ""  # why the last rows that did ran alone

    def run(self, size: int) -> int:
        """Add all examples; returns how many a microbatch has."""
        examples, start = self._request.examples, 0
        while start < examples.size:
            stop = start + (size or _SAMPLE)
            if start:
                # Not from where the last microbatch left it: a loss may seed it by what a row says.
                self.random.of_row(_OF_MICROBATCH + start)
            kept = 0
            for index, found in self._passes(tuple([t[start:stop] for t in examples.tensors])):
                self._index.append(start + index)
                self._norms.append(self._add(found))
                self._aux.append(found.aux)
                kept += found.kept_bytes
            start = stop
            if not size and examples.size > 1:
                size = _affordable(kept / _SAMPLE, self._request.device)
        return size

    def result(self) -> ClippedSum:
        """The sums."""
        for number in self._empty:
            self._sums[number].zero_()
        order, aux = torch.cat(self._index).argsort(), None
        if self._request.has_aux and self._aux:
            aux = optree.tree_map(lambda *parts: torch.cat(parts)[order], *self._aux)
        norms = torch.cat(self._norms, dim=1)[:, order]
        return ClippedSum(self._sums, norms, aux, self._square_sums)

    def warn_of_unused(self) -> None:
        """Name the parameters that noise moves, and nothing else."""
        names = names_of(self._request.layout.treespec)
        leaves = zip(names, self._request.params, self._used, strict=True)
        unused = [name for name, leaf, used in leaves if leaf.numel() and not used]
        if unused and any(self._used):
            shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" * (len(unused) > 8))
            warnings.warn(
                f"no example's loss has a gradient for {shown}: noise moves what is trained, and "
                "nothing else moves these. If that is meant to stay as it is (a target network, a "
                "frozen twin), call requires_grad_(False) before the fit",
                stacklevel=2,
            )

    def require_gradient(self) -> None:
        """Refuse losses without one, of which every step would be a release of noise alone."""
        request = self._request
        if request.needs_gradient and request.examples.size and not self._has_gradient:
            raise PrivacyError(
                "the loss depends on no trainable parameter (it was detached, made under no_grad, "
                "or of frozen layers alone), so every step would spend privacy on noise alone; "
                "return a loss that has a gradient"
            )

    # -- parts ------------------------------------------------------------------------------------

    def _passes(self, rows: Rows) -> Generator[tuple[Tensor, Pass]]:
        """The parts of a microbatch, each with what a pass over it found."""
        n, start = len(rows[0]), _Random(self._request.device)
        waiting, done = [Draws(n, torch.arange(n))], 0
        while waiting:
            part = waiting.pop(0)
            try:
                found = self._with_caution(rows, part, start)
            except Split as split:
                self._fence.restore()
                parts = part.split(split.values)
                if done + len(waiting) + len(parts) <= _PARTS:
                    waiting = [*parts, *waiting]
                    continue
                why = (
                    f"the loss asks for a Python value of each example by {split.place}; keep it a "
                    "tensor (torch.where in place of if, no .item())"
                )
            except Alone as reason:
                self._fence.restore()
                why = self._request.with_names(
                    f"torch.func.vmap cannot run {reason}; write it in other operations, with "
                    "shapes that do not depend on values, or give it a per_example_rule"
                )
            else:
                done += 1
                yield part.rows, found
                continue
            for i in part.rows.tolist():
                start.of_row(i)
                row = tuple([t[i : i + 1].clone() for t in rows])
                request = self._request
                alone = run_alone(request.loss, request.params, row, self._fence, self.ambient)
                # Not before: what fails here as well is the loss's own mistake, and says so itself.
                self.ran_alone = why
                yield torch.tensor([i]), alone

    def _with_caution(self, rows: Rows, part: Draws, start: _Random) -> Pass:
        """A pass with as much caution as it takes."""
        draws = None
        if len(part.rows) < part.whole:
            draws, rows = part, tuple([t[part.rows.to(t.device)] for t in rows])
        again = draws is not None
        while True:
            if again:
                start.again()
            # Where writes to the batch are not seen, every pass has rows of its own.
            copies = self._engine.copies_rows or not _functorch.has_private_names()
            try:
                return run_pass(
                    self._request.loss,
                    self._request.params,
                    tuple([t.clone() for t in rows]) if copies else rows,
                    self._fence,
                    self.ambient,
                    caution=self.caution,
                    draws=draws,
                    own_rows=copies,
                )
            except WritesToBatch:
                self._fence.restore()
                self._engine.copies_rows = again = True
            except Retry as retry:
                self._fence.restore()
                if retry.caution <= self.caution:
                    raise Alone("the loss's writes to its own tensors") from None
                self.caution, again = retry.caution, True

    # -- sums -------------------------------------------------------------------------------------

    def _add(self, found: Pass) -> Tensor:
        """Add the examples of a pass, and return their norms."""
        request = self._request
        self._has_gradient |= found.has_gradient
        for number, gradient in enumerate(found.gradients):
            self._used[number] |= gradient is not None
        norms = found.norms(request.groups, request.n_groups, request.device)
        usual = norms <= LARGE_NORM
        if request.least_bound < _SMALL_NORM:
            usual &= norms >= _SMALL_NORM
        if bool(usual.all()):
            self._sum(found, norms)
            return norms
        # NaN times zero is NaN: examples with odd gradients are not in one product with others. In
        # float64 norms and factors of whatever float32 holds have digits enough.
        for i in range(found.size):
            rows = [
                None if g is None else Dense(g.dense(slice(i, i + 1)).double())
                for g in found.gradients
            ]
            norms[:, i] = norm = _norms(rows, request.groups, norms[:, i])
            if bool(norm.isfinite().all()):
                self._sum(Pass(list(rows), None, 1, 0, has_gradient=True), norm[:, None])
        return norms

    def _sum(self, found: Pass, norms: Tensor) -> None:
        request = self._request
        factors = request.factors_of(norms)
        found.add_weighted(factors, request.groups, self._sums, self._empty)
        if request.square_scale is not None and self._square_sums is not None:
            found.add_squares(factors * request.square_scale, request.groups, self._square_sums)


def _norms(gradients: Sequence[Dense | None], groups: tuple[int, ...], like: Tensor) -> Tensor:
    """Norm of one example in each group, infinite in all if it is not finite in one."""
    norms = torch.zeros_like(like)
    for gradient, group in zip(gradients, groups, strict=True):
        if gradient is not None and gradient.values.numel():
            peak = gradient.values.abs().amax()  # of NaN is NaN
            part = peak * (gradient.values / peak.clamp(min=1e-300)).norm()
            norms[group] = torch.hypot(norms[group], part)
    return norms if bool(norms.isfinite().all()) else torch.full_like(like, torch.inf)


def _affordable(each: float, device: torch.device) -> int:
    """How many examples to take at once, a power of two, if one takes so many bytes."""
    room = _PASS_BYTES if device.type == "cpu" else _PASS_BYTES_ELSEWHERE
    room = min(room, _free_bytes(device) / _KEPT / 2)
    return 1 << max(0, min(int(room / max(1.0, each)), _MOST).bit_length() - 1)


def _free_bytes(device: torch.device) -> float:
    """Memory that is free on ``device``."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return float("inf")


class _Random:
    """The state of random numbers before a microbatch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device else None

    def again(self) -> None:
        """Draw from here again."""
        torch.set_rng_state(self._cpu)
        if self._device and self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def go_on(self) -> None:
        """If anything was drawn, draw from here on what follows from where this was.

        How much was drawn tells how many examples there were, and where they differed.
        """
        if not torch.equal(torch.get_rng_state(), self._cpu):
            self.of_row(_AFTER)

    def of_row(self, i: int) -> None:
        """Draw what belongs to one row, however many ran before it."""
        digest = hashlib.blake2b(self._cpu.numpy().tobytes(), salt=i.to_bytes(8, "big")).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "big"))


@contextlib.contextmanager
def _without_autocast(device: torch.device) -> Generator[Callable[[], Any]]:
    """Leave autocast; yields a way to step back into it around the loss."""
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        yield contextlib.nullcontext
        return
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        # The cache of cast weights must not outlive a function transform.
        yield partial(torch.autocast, kind, dtype=dtype, cache_enabled=False)
