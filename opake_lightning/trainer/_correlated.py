"""Noise that remembers, in a run that may be interrupted or have several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from opake_lightning.errors import CheckpointError
from opake_lightning.step import Step, StepState

__all__ = ["TORN", "Remembering", "require_whole", "whole"]

TORN = (
    "the run was interrupted while noise was being added, and the noise that the next steps would "
    "subtract is lost"
)


@dataclass(frozen=True, slots=True)
class Remembering:
    """A noise function that says so before what it remembers is written over.

    Attributes:
        noise_fn: What :func:`~opake_lightning.dpftrl.noise.mf_gaussian_noise` made.
        begin: Called at the start of each release.
    """

    noise_fn: Any
    begin: Callable[[], None]

    def __call__(self, grads: Any, state: Any, *, inplace: bool = False) -> Any:
        """Release ``grads``, summed over ranks."""
        self.begin()
        return self.noise_fn(grads, state, inplace=inplace)

    def across_ranks(self, grads: Any, state: Any, *, inplace: bool = False) -> Any:
        """Release the sum over ranks of ``grads``."""
        self.begin()
        return self.noise_fn.across_ranks(grads, state, inplace=inplace)


def whole(step: Step, state: StepState) -> StepState:
    """``state`` with what all ranks remember; every rank must call it.

    Raises:
        CheckpointError: If the ranks are not together any more.
    """
    if not isinstance(step.noise_fn, Remembering):
        return state
    return replace(state, noise=step.noise_fn.noise_fn.whole(state.noise))


def require_whole(state: StepState) -> None:
    """Refuse to save what one rank remembers of the noise that several make in shares."""
    if getattr(state.noise, "share", (0, 1)) != (0, 1):
        raise CheckpointError(
            "this rank remembers its share of the correlated noise only; save with "
            "trainer.save_checkpoint on all ranks, which puts the shares together"
        )
