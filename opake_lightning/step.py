r"""One private training step, as a pure function.

.. math::

    \bar g_t = \sum_{\text{ranks}} \sum_{i \in \text{draw}_t} \mathrm{clip}(g_i), \qquad
    \tilde g_t = \bar g_t + \text{noise}_t, \qquad
    \theta_{t+1} = \theta_t + \mathrm{update}(\tilde g_t)

:class:`Step` holds the three functions and nothing that changes; :class:`StepState` holds all that
changes. :meth:`Step.release` is where privacy is spent: once it has returned, the step must be
counted, whatever becomes of the update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import optree
import torch
from torch import Tensor

from opake_lightning.distributed import rank, sum_gradients, world_size
from opake_lightning.dpftrl.noise._mechanism import MFNoiseState
from opake_lightning.dpsgd.clipping import AdaptiveClipState
from opake_lightning.dpsgd.noise import NoiseState
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import (
    GradientTransformation,
    NoiseAwareTransformation,
    is_noise_aware,
)
from opake_lightning.random import fold_in, seeded
from opake_lightning.types import NoisedPytree, SecondMomentNoiseOutput

__all__ = ["Step", "StepState", "mean_grad", "no_noise"]

# One launch for all parameters, as torch.optim does it.
_foreach_add: Callable[..., list[Tensor]] = cast("Any", torch)._foreach_add
_foreach_add_: Callable[..., None] = cast("Any", torch)._foreach_add_


@dataclass(frozen=True, slots=True)
class StepState:
    """All that changes from step to step, apart from the parameters.

    Attributes:
        clip: State of the clipping function.
        noise: State of the noise mechanism: the key of the run and the number of releases.
        optimizer: State of the optimizer.
    """

    clip: Any
    noise: NoiseState | MFNoiseState
    optimizer: Any

    @property
    def step(self) -> int:
        """Number of releases so far, which is the number of the next step."""
        return self.noise.step


@dataclass(frozen=True, slots=True)
class Step:
    """Clip, sum over ranks, add noise, update.

    Attributes:
        grad_fn: ``(grads, aux), state = grad_fn(params, batch, state=state)``, as
            :func:`opake_lightning.dpsgd.clipping.clipped_grad` makes it with ``has_aux=True``.
        noise_fn: ``noised, state = noise_fn(grads, state)``. If it has a method ``across_ranks``,
            that gets this rank's part of the gradient, and returns the noised sum over ranks.
        optimizer: Any functional optimizer, ours or TorchOpt's.
        clip_state: Initial state of ``grad_fn``.
        noise_state: Initial state of ``noise_fn``.
        seed_forward: Whether random numbers that the loss draws from global generators are made a
            function of (key, step, rank), so that an interrupted run repeats them.
    """

    grad_fn: Callable[..., Any]
    noise_fn: Callable[..., Any]
    optimizer: GradientTransformation
    clip_state: Any
    noise_state: NoiseState | MFNoiseState
    seed_forward: bool = True

    def init(self, params: Any) -> StepState:
        """State before the first step."""
        detached = optree.tree_map(_detached, params)
        return StepState(self.clip_state, self.noise_state, self.optimizer.init(detached))

    def release(
        self,
        params: Any,
        batch: Any,
        state: StepState,
        *,
        inplace: bool = False,
        watch: Callable[[Any], object] | None = None,
    ) -> tuple[Any, Any, StepState]:
        """Noisy gradient of this rank's part of the draw, summed over ranks.

        Args:
            params: Parameters, a pytree of tensors; not written to.
            batch: This rank's examples; None if it drew none.
            state: State before the step.
            inplace: Sum over ranks, and add noise if the type stays, in the memory of the clipped
                gradient, which is fresh.
            watch: Called with the clipped gradient, summed over ranks, before it gets its noise.
                What it sees is not private.

        Returns:
            The released gradient, equal on all ranks; the auxiliary output of the loss, which is
            neither private nor summed; and the state, with the release counted.
        """
        clip = state.clip
        if isinstance(clip, AdaptiveClipState):
            # One source for all noise: a run that forks, or goes on counting, forks the counts'.
            clip = clip.on_stream(state.noise.key, state.step)
        if self.seed_forward:
            stream = fold_in(fold_in(state.noise.key, "forward"), state.step)
            with seeded(fold_in(stream, rank()), _device_of(params)):
                (grads, aux), clip = self.grad_fn(params, batch, state=clip)
        else:
            (grads, aux), clip = self.grad_fn(params, batch, state=clip)
        if watch is not None:
            watch(sum_gradients(grads))
        # Noise is best made in shares, before the sum, by a mechanism that can.
        across_ranks = getattr(self.noise_fn, "across_ranks", None)
        if across_ranks is None:
            grads, across_ranks = sum_gradients(grads, inplace=inplace), self.noise_fn
        released, noise = across_ranks(grads, state.noise, inplace=inplace)
        return released, aux, replace(state, clip=clip, noise=noise)

    def update(
        self, params: Any, released: Any, state: StepState, *, inplace: bool = False
    ) -> tuple[Any, StepState]:
        """Parameters after the update, and the state.

        With ``inplace=True`` the parameters, the optimizer's state and ``released`` are
        overwritten. It is fastest for parameters that :func:`opake_lightning._tree.seat` has put
        one after the other.
        """
        if inplace and isinstance(self.optimizer, NoiseAwareTransformation):
            optimizer = self.optimizer.step_(released, state.optimizer, params)
            return params, replace(state, optimizer=optimizer)
        detached = optree.tree_map(_detached, params)
        if not is_noise_aware(self.optimizer):
            if isinstance(released, SecondMomentNoiseOutput):
                raise PrivacyError(
                    "the optimizer is not one of this library's, so it cannot use the private "
                    "second moment that was paid for; take adam, adamw, ademamix, radam, rmsprop "
                    "or adadelta, or leave second_moment out"
                )
            if isinstance(released, NoisedPytree):
                released = released.pytree
        updates, optimizer = self.optimizer.update(
            released, state.optimizer, params=detached, inplace=inplace
        )
        leaves, treespec = optree.tree_flatten(detached)
        moves = cast("list[Tensor]", optree.tree_leaves(updates))
        if inplace or not leaves:
            if leaves:
                _foreach_add_(leaves, moves)
            moved = params
        else:
            # Updates may be wider than the parameters, which keep their type.
            sums = _foreach_add(leaves, moves)
            sums = [new.to(leaf.dtype) for new, leaf in zip(sums, leaves, strict=True)]
            moved = optree.tree_unflatten(treespec, sums)
        return moved, replace(state, optimizer=optimizer)

    def __call__(
        self, params: Any, batch: Any, state: StepState, *, inplace: bool = False
    ) -> tuple[Any, Any, StepState]:
        """One whole step: parameters, auxiliary output, state."""
        released, aux, state = self.release(params, batch, state, inplace=inplace)
        params, state = self.update(params, released, state, inplace=inplace)
        return params, aux, state


def mean_grad(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Plain gradient of the mean loss, in the form that :class:`Step` takes.

    For a run that is meant to be non-private: ``loss_fn(params, batch)`` returns (losses, aux);
    the mean is over the batch at hand, and over ranks as DistributedDataParallel takes it.
    """

    def grad_fn(params: Any, batch: Any, *, state: Any) -> tuple[tuple[Any, Any], Any]:
        found, treespec = optree.tree_flatten(params)
        leaves = cast("list[Tensor]", found)
        # The very tensors where they can have a gradient: a module's loss uses its own.
        tracked = [
            leaf if leaf.requires_grad and leaf.is_leaf else _tracked(leaf) for leaf in leaves
        ]
        losses, aux = loss_fn(optree.tree_unflatten(treespec, tracked), batch)
        grads = torch.autograd.grad(losses.mean() / world_size(), tracked, materialize_grads=True)
        return (optree.tree_unflatten(treespec, grads), aux), state

    return grad_fn


def no_noise(grads: Any, state: NoiseState, *, inplace: bool = False) -> tuple[Any, NoiseState]:
    """Return ``grads`` as they are and count the step."""
    del inplace
    return grads, replace(state, step=state.step + 1)


def _detached(leaf: Tensor) -> Tensor:
    return leaf.detach()


def _tracked(leaf: Tensor) -> Tensor:
    return leaf.detach().requires_grad_()


def _device_of(params: Any) -> torch.device:
    leaves = optree.tree_leaves(params)
    return cast("Tensor", leaves[0]).device if leaves else torch.device("cpu")
