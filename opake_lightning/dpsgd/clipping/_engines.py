"""Which engine clips: the fastest one that is right for the loss at hand.

``one_pass`` is right where every use of a parameter has a rule and the first dimension of tensors
counts examples. The first is seen while it records; the second is tried out, whenever the loss does
something that it did not do before: norms and sums of a few examples are compared with those that
ordinary autograd finds for each of them alone. ``vmap`` is right for all that
``torch.func.vmap`` can run, and what neither can do is done one example at a time.

Once a step has left an engine, the run does not go back to it, nor does a run that is resumed: the
choice is part of the state.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from opake_lightning._tree import Layout
from opake_lightning.dpsgd.clipping import _one_pass, _vmap
from opake_lightning.dpsgd.clipping._engine import ClippedSum, Request

__all__ = ["ENGINES", "Choice", "Engine", "Engines"]

Engine: TypeAlias = Literal["auto", "one_pass", "vmap"]
ENGINES = ("auto", "one_pass", "vmap")

# What a choice may be, in the order in which they are tried.
_ONE_PASS, _VMAP, _ONE_BY_ONE = 0, 1, 2
# One pass sums squares in float32, and so misses gradients with a norm far below this one.
_LEAST_BOUND = 1e-10
# What vmap says of a loss that writes to a buffer; no engine may do that.
_MUTATION = ("mutate a captured Tensor",)


@dataclass(frozen=True, slots=True)
class Choice:
    """What has been found out about a loss.

    Attributes:
        engine: 0 for one pass, 1 for vmap, 2 for one example at a time.
        microbatch_size: Examples of one pass; 0 if nothing is known yet.
    """

    engine: int = 0
    microbatch_size: int = 0


@dataclass
class Engines:
    """The engine that was asked for, and what is known about the loss in this process."""

    asked: Engine
    _verified: _one_pass.Verified = field(default_factory=_one_pass.Verified)

    def clipped_sum(
        self,
        choice: Choice,
        request: Request,
        *,
        microbatch_size: int | None,
        least_bound: float,
    ) -> tuple[ClippedSum, Choice]:
        """Answer ``request`` by the engine of ``choice``; also returns the new choice.

        ``least_bound`` is the least norm that a gradient may be scaled to.

        Raises:
            ValueError: If the engine that was asked for cannot do the loss.
        """
        if self.asked == "vmap" or least_bound < _LEAST_BOUND:
            return _vmap.clipped_sum(request, microbatch_size=microbatch_size), choice
        before = _random_state(request.device)
        why = ""
        if choice.engine == _ONE_PASS:
            size = microbatch_size or choice.microbatch_size or None
            try:
                result, size = _one_pass.clipped_sum(
                    request, microbatch_size=size, verified=self._verified
                )
                return result, choice if microbatch_size else Choice(_ONE_PASS, size)
            except _one_pass.Unsupported as reason:
                why = _with_names(str(reason), request.layout)
                if self.asked == "one_pass":
                    raise ValueError(
                        f"engine='one_pass' cannot clip this loss: {why}; use engine='auto'"
                    ) from reason
            _restore_random_state(before)
        if choice.engine != _ONE_BY_ONE:
            try:
                result = _vmap.clipped_sum(request, microbatch_size=microbatch_size)
            except RuntimeError as error:
                if any(words in str(error) for words in _MUTATION):
                    raise
                why = f"torch.func.vmap cannot run the loss: {str(error).splitlines()[0]}"
                choice = Choice(_ONE_BY_ONE)
                _restore_random_state(before)
            else:
                if why:
                    _tell("by the general engine, which is slower", why)
                return result, Choice(_VMAP)
        # If it fails here, too, then this is the error to see: that of ordinary autograd.
        result = _vmap.clipped_sum(request, microbatch_size=1, one_by_one=True)
        if why:
            _tell("one example at a time, which is much slower", why)
        return result, choice


def _tell(how: str, why: str) -> None:
    warnings.warn(
        f"clipping {how}: {why} (engine='one_pass' makes this an error, engine='vmap' does not try "
        "the fast one)",
        stacklevel=2,
    )


def _with_names(text: str, layout: Layout) -> str:
    """``text`` with the names of parameters in place of their numbers."""
    for number, path in enumerate(layout.treespec.paths()):
        text = text.replace(f"{{{number}}}", "/".join(map(str, path)) or "the tensor")
    return text


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), (
        torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    )


def _restore_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
