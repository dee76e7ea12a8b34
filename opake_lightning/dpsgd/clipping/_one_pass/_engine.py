"""One forward and one backward pass, and what comes out of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opake_lightning.dpsgd.clipping._functions import unwatched
from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients, Pulled, total
from opake_lightning.dpsgd.clipping._one_pass._rules import RULES
from opake_lightning.dpsgd.clipping._record import Recorder
from opake_lightning.dpsgd.clipping._uses import Computed, Use

__all__ = ["Pass", "run_pass"]

# The mode that is active during the backward pass would take the call itself for the loss's.
_grad = unwatched(torch.autograd.grad)
# Elements of gradients that a pass may form at a time.
_FORMED = 1 << 25
# The functions that were called, and where parameters appear among them: name of the operation,
# leaves, whether rows are examples.
Signature = tuple[int, tuple[tuple[str, tuple[int, ...], bool], ...]]


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass over a microbatch found.

    Attributes:
        gradients: For each leaf, its examples' gradients; None if no example has any.
        aux: What the loss returned beside the losses, detached.
        signature: What was recorded; passes with the same one are right or wrong together.
        size: Number of examples.
        kept_bytes: Memory of what was recorded, and of gradients that were formed.
    """

    gradients: list[Gradients | None]
    aux: Any
    signature: Signature
    size: int
    kept_bytes: int

    def norms(self, groups: Sequence[int], n_groups: int, device: torch.device) -> Tensor:
        """L2 norms in each group of leaves, float64, shape [groups, size]."""
        squared = torch.zeros(n_groups, self.size, dtype=torch.float64, device=device)
        for group, gradient in zip(groups, self.gradients, strict=True):
            if gradient is not None and gradient.shape.numel():
                squared[group] += gradient.squared_norms()
        return squared.sqrt_()

    def add_weighted(self, factors: Tensor, groups: Sequence[int], sums: Sequence[Tensor]) -> None:
        """Add sums over examples of factor times gradient; factors have shape [groups, size]."""
        for group, gradient, out in zip(groups, self.gradients, sums, strict=True):
            if gradient is not None and gradient.shape.numel():
                gradient.add_weighted(factors[group], out)

    def add_squares(self, factors: Tensor, groups: Sequence[int], sums: Sequence[Tensor]) -> None:
        """Add the sums over examples of the squares of factor times gradient."""
        for group, gradient, out in zip(groups, self.gradients, sums, strict=True):
            if gradient is not None and gradient.shape.numel():
                gradient.add_squares(factors[group], out)


def run_pass(
    loss_of: Callable[[list[Tensor]], tuple[Any, Any]],
    params: Sequence[Tensor],
    data: Sequence[Tensor],
    ambient: Callable[[], Any],
    *,
    calm: bool = False,
) -> Pass:
    """Run the loss of a microbatch forward and backward.

    Args:
        loss_of: From leaves to (losses, aux), of ``data``.
        params: The parameters.
        data: The batch's tensors, each with one row per example.
        ambient: Autocast around the loss.
        calm: Without random numbers.

    Raises:
        Unsupported: If the loss uses a parameter in a way that has no rule.
    """
    size = len(data[0])
    leaves = [p.detach().requires_grad_() for p in params]
    recorder = Recorder(leaves, size, RULES, calm=calm)
    recorder.mark(list(data))
    with torch.enable_grad():
        with ambient(), _eagerly(), recorder:
            losses, aux = loss_of(leaves)
        if recorder.refusal is not None:
            raise recorder.refusal
        if not isinstance(losses, Tensor) or losses.shape != (size,):
            what = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise recorder.refuse(
                f"the loss of {size} examples is {what}, not a number for each (shape ({size},), "
                'as with reduction="none")'
            )
        signature = recorder.path, tuple(recorder.signature)
        try:
            gradients = _backward(recorder, losses, params)
        finally:
            recorder.close()
        formed = sum(g.values.nbytes for g in gradients if isinstance(g, Dense))
        return Pass(gradients, aux, signature, size, recorder.kept_bytes + formed)


def _eagerly() -> Any:
    """Run compiled parts of the loss as they are: they would be traced through the recorder."""
    # Where nothing has been compiled, the compiler has not been loaded, and that takes seconds.
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def _backward(
    recorder: Recorder, losses: Tensor, params: Sequence[Tensor]
) -> list[Gradients | None]:
    """The examples' gradients of each leaf."""
    leaves = recorder.leaves
    parts: list[list[Gradients]] = [[] for _ in leaves]
    if losses.requires_grad:
        collect = _Collect(recorder, parts)
        recorder.found = collect
        recorder.replay(params)
        try:
            # On the thread that the recorder is active on.
            with recorder, torch.autograd.set_multithreading_enabled(False):
                found = _grad(
                    losses,
                    [*leaves, *recorder.anchors.values()],
                    torch.ones_like(losses),
                    allow_unused=True,
                )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # If it is the loss that is wrong, another engine will say so.
            raise recorder.refuse(
                f"its backward pass failed: {str(error).splitlines()[0]}"
            ) from error
        if recorder.refusal is not None:
            raise recorder.refusal
        for number, gradient in enumerate(found[: len(leaves)]):
            if gradient is not None:
                raise recorder.refuse(
                    f"parameter {{{number}}} is used in an operation without a rule"
                )
    return [total(each) if each else None for each in parts]


class _Collect:
    """Makes the examples' gradients of a use, as soon as that of its output is there."""

    def __init__(self, recorder: Recorder, parts: list[list[Gradients]]) -> None:
        self._recorder, self._parts, self._room = recorder, parts, _FORMED

    def __call__(self, use: Use, gradient: Tensor) -> None:
        leaves, counts = self._recorder.leaves, self._recorder.counts
        for param, make in use.gradients:
            inner = make(gradient.detach())
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
