"""One run of a loss, forward and backward, and the examples' gradients that come out of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opake_lightning import _functorch
from opake_lightning.dpsgd.clipping import _checks as _checks
from opake_lightning.dpsgd.clipping import _reads as _reads
from opake_lightning.dpsgd.clipping import _rules as _rules
from opake_lightning.dpsgd.clipping._alike import Alike
from opake_lightning.dpsgd.clipping._entries import (
    CHECKS_ALONE,
    Caution,
    Computed,
    Draws,
    Retry,
    Use,
)
from opake_lightning.dpsgd.clipping._fence import Fence
from opake_lightning.dpsgd.clipping._functions import line_of
from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients, Pulled, total
from opake_lightning.dpsgd.clipping._tape import Tape
from opake_lightning.errors import PrivacyError

__all__ = ["Alone", "Loss", "Pass", "run_alone", "run_pass"]

# Elements of gradients that a pass may form at a time.
_FORMED = 1 << 26
# Fewer gradients of a kind are looked at one by one.
_MANY = 4
# What torch raises where vmap cannot run something; a mistake of the loss's is raised again alone.
_FROM_VMAP = (
    RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError, KeyError,
)  # fmt: skip
# From the tensors of a batch to (loss, aux).
Loss = Callable[[tuple[Tensor, ...]], tuple[Any, Any]]


class Alone(Exception):  # noqa: N818  (nothing is wrong: examples run one at a time)
    """vmap cannot run the loss."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass found.

    Attributes:
        gradients: For each leaf, its examples' gradients; None if no example has any.
        aux: What the loss returned beside the losses, with a row for each example.
        size: Number of examples.
        kept_bytes: Memory of what was recorded, and of gradients that were formed.
        has_gradient: Whether the losses depend on anything that has one.
    """

    gradients: list[Gradients | None]
    aux: Any
    size: int
    kept_bytes: int
    has_gradient: bool
    _kinds: list[Any] = field(default_factory=list[Any])  # what _by_kind found

    def norms(self, groups: Sequence[int], n_groups: int, device: torch.device) -> Tensor:
        """L2 norms in each group of leaves, float64, shape [groups, size]."""
        squared = torch.zeros(n_groups, self.size, dtype=torch.float64, device=device)
        alike, others = self._by_kind()
        for numbers, bundle in alike:
            index = torch.tensor([groups[n] for n in numbers], device=device)
            squared.index_add_(0, index, bundle.squared_norms())
        for number, gradient in others:
            squared[groups[number]] += gradient.squared_norms()
        return squared.sqrt_()

    def add_weighted(
        self, factors: Tensor, groups: Sequence[int], sums: Sequence[Tensor], empty: set[int]
    ) -> None:
        """Add sums over examples of factor times gradient; factors have shape [groups, size].

        ``empty`` are the numbers of sums that hold nothing yet, not even zeros.
        """
        alike, others = self._by_kind()
        for numbers, bundle in alike:
            for n in empty.intersection(numbers):
                sums[n].zero_()
            empty.difference_update(numbers)
            weights = factors[[groups[n] for n in numbers]]
            bundle.add_weighted(weights, [sums[n] for n in numbers])
        for number, gradient in others:
            add = gradient.write_weighted if number in empty else gradient.add_weighted
            empty.discard(number)
            add(factors[groups[number]], sums[number])

    def add_squares(self, factors: Tensor, groups: Sequence[int], sums: Sequence[Tensor]) -> None:
        """Add the sums over examples of the squares of factor times gradient."""
        for group, gradient, out in zip(groups, self.gradients, sums, strict=True):
            if gradient is not None and gradient.shape.numel():
                gradient.add_squares(factors[group], out)

    def _by_kind(self) -> tuple[list[tuple[list[int], Alike]], list[tuple[int, Gradients]]]:
        if self._kinds:
            return self._kinds[0]
        kinds: dict[Hashable, list[int]] = {}
        others: list[tuple[int, Gradients]] = []
        for number, gradient in enumerate(self.gradients):
            if gradient is None or not gradient.shape.numel():
                continue
            kind = gradient.kind()
            if kind is None:
                others.append((number, gradient))
            else:
                kinds.setdefault((type(gradient), kind), []).append(number)
        alike: list[tuple[list[int], Alike]] = []
        for numbers in kinds.values():
            members = [cast("Gradients", self.gradients[n]) for n in numbers]
            if len(numbers) < _MANY:
                others += zip(numbers, members, strict=True)
            else:
                alike.append((numbers, Alike(members)))
        self._kinds.append((alike, others))
        return alike, others


def run_pass(
    loss_of: Loss,
    leaves: Sequence[Tensor],
    rows: tuple[Tensor, ...],
    fence: Fence,
    ambient: Callable[[], Any],
    *,
    caution: int = Caution.NONE,
    draws: Draws | None = None,
    own_rows: bool = False,
) -> Pass:
    """Run the loss of each row, vectorised, forward and backward.

    Args:
        loss_of: The loss and aux of a batch with one row.
        leaves: The parameters, each requiring a gradient; those that the loss uses.
        rows: The batch's tensors, each with one row per example.
        fence: Looks at what the loss leaves.
        ambient: Autocast around the loss.
        caution: See :class:`Caution`.
        draws: Set if the rows are a part of a batch.
        own_rows: Whether ``rows`` are copies, which the loss may write to.

    Raises:
        Alone: If vmap cannot run it.
        Retry: If it needs more caution.
        Split: If the loss asked for a Python value in which rows differ.
        PrivacyError: If the loss is refused.
    """
    size = len(rows[0])
    seen = _functorch.has_private_names()
    copies = [] if seen else [p.detach().expand(size, *p.shape).requires_grad_() for p in leaves]
    tapes: list[Tape] = []
    specs: list[Any] = []

    def one(wide: list[Tensor], *example: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        tape = Tape(
            leaves, size, fence, caution=caution, draws=draws, wide=None if seen else wide,
            batch=() if own_rows else rows,
        )  # fmt: skip
        tapes.append(tape)
        with ambient(), tape:
            loss, aux = loss_of(example)
        if tape.refusal is not None:
            raise tape.refusal
        if tape.failure:
            raise Alone(tape.failure)
        loss = _one_number(loss)
        if tape.is_parameter(loss):
            loss = tape.copy_for_each(loss)
        values, spec = optree.tree_flatten(aux)
        specs.append(spec)
        return loss.reshape(()), tuple([_row(value) for value in values])

    with torch.enable_grad(), _functorch.eagerly(), _functorch.checkpoints_called_directly():
        try:
            losses, aux = torch.func.vmap(one, randomness="different")(
                copies, *[t.detach().unsqueeze(1) for t in rows]
            )
            tape = tapes[0]
            fence.passed()
            gradients, kept = _backward(tape, losses, copies)
        except (PrivacyError, Alone, torch.OutOfMemoryError):
            raise
        except _FROM_VMAP as error:
            if tapes and (refusal := tapes[0].refusal) is not None:
                raise refusal from error
            why = tapes[0].failure if tapes else ""
            if not why:
                lines = str(error).splitlines() or [type(error).__name__]
                why = f"{line_of(error) or type(error).__name__}: {lines[0][:200]}"
            raise Alone(why) from error
        finally:
            for tape in tapes:
                tape.close()
    aux = optree.tree_unflatten(specs[0], [value.detach() for value in aux])
    return Pass(gradients, aux, size, kept, bool(losses.requires_grad))


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape not in ((), (1,)):
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))
        raise PrivacyError(
            "the loss must be one number per example: for a batch with one row it must return a "
            f"tensor of shape () or (1,), got {what}; take a mean or sum over everything but the "
            "batch dimension, such as .mean(1) over tokens or pixels"
        )
    return loss


def _row(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise PrivacyError(
            f"aux must hold tensors only, one row per example, got {type(value).__name__}"
        )
    return value.squeeze(0) if value.dim() and value.shape[0] == 1 else value


def _backward(
    tape: Tape, losses: Tensor, copies: Sequence[Tensor]
) -> tuple[list[Gradients | None], int]:
    """The examples' gradients of each leaf, and the memory of what was kept for them."""
    parts: list[list[Gradients]] = [[] for _ in tape.leaves]
    if not losses.requires_grad:
        return [None for _ in parts], tape.kept_bytes
    tape.found = _Collect(tape, parts)
    wide = list(tape.copies.values())
    inputs: list[Any] = [*tape.leaves, *copies, *[w for _, w in wide]]
    ends: list[Any] = [*tape.edges.values(), *tape.tracked, *tape.anchors.values()]
    # On one thread: hooks look at the tape.
    with torch.autograd.set_multithreading_enabled(False):
        found: Sequence[Tensor | None] = torch.autograd.grad(
            losses, cast("Any", inputs + ends), torch.ones_like(losses), allow_unused=True
        )
    with torch.no_grad():
        for index, gradient in zip(tape.edges, found[len(inputs) :], strict=False):
            if gradient is not None:
                tape.arrived(index, gradient)
    if tape.stale:
        # Its input was changed in place afterwards: autograd knows whether that matters.
        raise Retry(Caution.NO_RULES)
    n = len(tape.leaves)
    for number, gradient in enumerate(found[:n]):
        if gradient is not None:
            where = "in TorchScript or a torch.autograd.Function"
            if tape.hidden:
                where = f"{tape.hidden} in torch.func.grad, where torch.autograd.grad would do"
            raise Alone(f"a use of the parameter {{{number}}} that it does not see: {where}")
    for number, gradient in enumerate(found[n : n + len(copies)]):
        if gradient is not None:
            parts[number].append(Dense(gradient))
    for (computed, _), gradient in zip(wide, found[n + len(copies) :], strict=False):
        if gradient is not None:
            for number in sorted(computed.leaves):
                parts[number].append(_of_leaf(Dense(gradient), computed, tape.leaves[number]))
    gradients = [total(each) if each else None for each in parts]
    formed = sum(g.values.nbytes for g in gradients if isinstance(g, Dense))
    return gradients, tape.kept_bytes + formed


class _Collect:
    """Makes the examples' gradients of a use, as soon as that of its output is there."""

    def __init__(self, tape: Tape, parts: list[list[Gradients]]) -> None:
        self._tape, self._parts, self._room = tape, parts, _FORMED

    def __call__(self, use: Use, gradient: Tensor) -> None:
        leaves, counts = self._tape.leaves, self._tape.counts
        for param, make in use.gradients:
            inner = make(gradient)
            for number in sorted(param.leaves):
                part = _of_leaf(inner, param, leaves[number])
                if counts[number] == 1:
                    part = self._formed(part)
                self._parts[number].append(part)

    def _formed(self, part: Gradients) -> Gradients:
        """With every gradient there, if that saves time and there is room."""
        need = part.size * part.shape.numel()
        dense = part.formed() if need <= self._room else None
        if dense is None:
            return part
        self._room -= need
        return dense


def _of_leaf(inner: Gradients, param: Computed, leaf: Tensor) -> Gradients:
    if param.tensor is leaf:
        return inner
    return Pulled(inner, param.tensor, leaf, isometric=param.isometric)


# -- one example at a time -------------------------------------------------------------------------


class _Watch(TorchFunctionMode):
    """Refuses what a tape refuses, where nothing is vectorised."""

    level, caution = 0, Caution.NO_RULES

    def __init__(self) -> None:
        super().__init__()
        self.refusal: PrivacyError | None = None
        self.packed: dict[int, tuple[Tensor, int]] = {}

    def refuse(self, why: str) -> PrivacyError:
        self.refusal = self.refusal or PrivacyError(why)
        return self.refusal

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (check := CHECKS_ALONE.get(func)) is not None:
            answer = check(self, func, args, kwargs or {})
            if answer is not NotImplemented:
                return answer
        if func is torch.autograd.grad:
            # The loss's own gradient comes later.
            kwargs = {**(kwargs or {}), "retain_graph": True}
        return func(*args, **(kwargs or {}))


def run_alone(
    loss_of: Loss,
    leaves: Sequence[Tensor],
    row: tuple[Tensor, ...],
    fence: Fence,
    ambient: Callable[[], Any],
) -> Pass:
    """Run the loss of one row by ordinary autograd: slow, and right for all that has a gradient.

    Nothing shows here which tensors an example is in, so whatever the loss leaves is refused.
    """
    fence.guard_memory()
    watch = _Watch()
    with torch.enable_grad(), _functorch.eagerly(), _functorch.checkpoints_called_directly():
        try:
            with ambient(), watch:
                loss, aux = loss_of(tuple([t.detach() for t in row]))
        finally:
            if watch.refusal is not None:
                raise watch.refusal
        loss = _one_number(loss)
        fence.passed(strict=True)
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            # Not backward(), which would also write to what is not a parameter here.
            found = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    gradients = [
        None if g is None else Dense((g.to_dense() if g.is_sparse else g).unsqueeze(0))
        for g in found
    ]
    values, spec = optree.tree_flatten(aux)
    aux = optree.tree_unflatten(spec, [_row(value).detach().unsqueeze(0) for value in values])
    return Pass(list(gradients), aux, 1, 0, bool(loss.requires_grad))
