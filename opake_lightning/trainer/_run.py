"""One fit at work: its steps, its weights, its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from opake_lightning import _check
from opake_lightning.distributed import rank, world_size
from opake_lightning.dpsgd.noise import NoiseState
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.optimizers import GradientTransformation, evaluation_params
from opake_lightning.optimizers.types import ScheduleFreeState
from opake_lightning.plan import NonPrivate, PrivateMechanism
from opake_lightning.random import RngKey
from opake_lightning.serialization import state_dict
from opake_lightning.step import Step, StepState
from opake_lightning.trainer._correlated import TORN, Remembering, require_whole, whole
from opake_lightning.trainer._diagnostics import Diagnostics, counted_on_rank_zero
from opake_lightning.trainer._inputs import Inputs, Weights, release_bits, weights_digest
from opake_lightning.trainer._past import Past
from opake_lightning.trainer._record import RunRecord

__all__ = ["Fit", "Loading", "Run", "write_weights"]

# What keeps a step from being complete, from when it matters until it no longer does.
_NOT_RESUMED = (
    "nothing has been resumed from the checkpoint that was given: resuming failed, or the "
    "optimizer's state in it never came, which an on_load_checkpoint may have removed"
)
_UPDATE = (
    "the last step was interrupted after its release, which is counted, before the parameters had "
    "moved, so the weights belong to no step"
)


@dataclass(frozen=True)
class Fit:
    """What one fit is made of; none of it changes.

    Attributes:
        mechanism: The plan, resolved.
        optimizer: Any functional optimizer.
        params: The trained parameters, by name; moved in place.
        loss_fn: ``loss_fn(params, batch) -> (losses, aux)``.
        inputs: What the steps follow from, beside the key.
        rounding: What the last digits of a step depend on: who makes it again comes to the same
            release only with the same.
        steps_left: Tells how many steps there are still to come, for a run that forks.
    """

    mechanism: PrivateMechanism | NonPrivate
    optimizer: GradientTransformation
    params: dict[str, Tensor]
    loss_fn: Callable[..., Any]
    inputs: Inputs
    rounding: str = ""
    steps_left: Callable[[], int | None] = field(default=lambda: None)

    @property
    def plan(self) -> Any:
        """The plan, as its user made it."""
        return getattr(self.mechanism, "plan", self.mechanism)

    def step(self, mechanism: PrivateMechanism | NonPrivate, key: RngKey) -> Step:
        """The step function of ``mechanism``, which may be that of a fork."""
        return mechanism.step(self.loss_fn, self.optimizer, key, self.params)


@dataclass(frozen=True)
class Loading:
    """A checkpoint whose weights Lightning has loaded into a module, and whose state comes next.

    Attributes:
        module: The module.
        past: What it had before.
        weights: Its weights before, copied.
        names: What the checkpoint has weights for.
        directories: Where a record may be of what was released since.
    """

    module: Any
    past: Past | None
    weights: dict[str, Any]
    names: frozenset[str]
    directories: list[Path]

    @classmethod
    def into(cls, module: Any, checkpoint: Mapping[str, Any], directories: list[Path]) -> Loading:
        """What is to be remembered of ``module`` before the checkpoint's weights are loaded."""
        weights = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in module.state_dict().items()
        }
        return cls(module, module._dp, weights, frozenset(checkpoint["state_dict"]), directories)

    def undo(self) -> None:
        """Let the module be as it was."""
        self.module.load_state_dict(self.weights)
        self.module._dp = self.past


class Run(Past):
    """The live state of one fit.

    Record and step state are replaced together, right after noise has been added and before the
    parameters move: an exception at any point leaves both from the same step, and what was released
    is always counted.

    Attributes:
        fit: What the fit is made of.
        mechanism: The fit's, or that of a fork of it.
        state: Key, counters and optimizer state.
        stepped: Whether a step was made since the fit began, or a checkpoint was loaded.
        loading: The checkpoint that is about to be resumed.
        directories: Where there may be a record of it.
    """

    def __init__(
        self,
        fit: Fit,
        past: Past,
        mechanism: PrivateMechanism | NonPrivate,
        step: Step,
        state: StepState,
    ) -> None:
        super().__init__(past.record, past.journal, past.since)
        self.fit, self.process, self.given = fit, past.process, past.given
        self.directories: list[Path] = []
        self.loading: Loading | None = None
        self._weights = Weights(fit.params)
        self.go_on(past.record, mechanism, step, state)

    @classmethod
    def to_be_resumed(cls, fit: Fit, past: Past, step: Step) -> Run:
        """One that has the past of the weights, and makes no step until it is resumed."""
        run = cls(fit, past, fit.mechanism, step, step.init(fit.params))
        run._unfinished = _NOT_RESUMED
        return run

    def go_on(
        self,
        record: RunRecord,
        mechanism: PrivateMechanism | NonPrivate,
        step: Step,
        state: StepState,
    ) -> None:
        """Make the coming steps with these, and the weights that are there."""
        self.record, self.mechanism, self.state = record, mechanism, state
        # What the step at hand has begun and not finished; "" if nothing.
        self._unfinished = ""
        # Whether there was a step since, and whether a checkpoint was made after the last one.
        self.stepped, self._saved = False, False
        self._come_to = self._weights.bits()
        noise_fn, first = step.noise_fn, step.noise_state
        if getattr(first, "buffers", None):
            noise_fn = Remembering(noise_fn, self._begin_correlated)
        # Without the noise's first buffers: they will be written over, or are not used at all.
        self._step = replace(step, noise_fn=noise_fn, noise_state=NoiseState(first.key))

    def _begin_correlated(self) -> None:
        self._unfinished = TORN

    def position(self) -> tuple[RngKey, int]:
        """Key of the run and number of the next step, for the loader."""
        return self.state.noise.key, self.state.step

    @property
    def params(self) -> dict[str, Tensor]:
        """The trained parameters, by name."""
        return self.fit.params

    @property
    def resumed(self) -> bool:
        """False until a run that is :meth:`to_be_resumed` is."""
        return self._unfinished != _NOT_RESUMED

    def require_resumed(self) -> None:
        """Raise if nothing was loaded into a run that is :meth:`to_be_resumed`.

        Raises:
            CheckpointError: With what may have happened.
        """
        if not self.resumed:
            raise CheckpointError(f"{_NOT_RESUMED}. Nothing was spent")

    @property
    def at_first_step(self) -> bool:
        """Whether this fit is private and has not released anything yet."""
        return self.mechanism.private and self.state.step == self.record.begun

    def draw(self, key: RngKey, step: int, *, rank: int, world_size: int) -> NDArray[np.int64]:
        """One rank's share of the examples drawn at ``step``, for the loader."""
        assert isinstance(self.mechanism, PrivateMechanism)
        return self.mechanism.draw(key, step, rank=rank, world_size=world_size)

    # -- one step -------------------------------------------------------------------------------

    def release(self, batch: Any, seen: dict[str, float] | None = None) -> tuple[Any, Any]:
        """Spend one step on ``batch``: the released gradient, and the loss's auxiliary output.

        ``seen`` is filled with diagnostics, which are not private.
        """
        if isinstance(self.mechanism, PrivateMechanism):
            self.mechanism.check_step(self.record.step)
        if self._unfinished:
            raise PrivacyError(f"{self._unfinished}; start another fit")
        if self.process != os.getpid():
            raise PrivacyError(
                "this process is a copy of the one that makes the run's steps, with the same key; "
                "call Trainer.fit in each of them"
            )
        record = self.record.released_one(self.mechanism.event, self.fit.rounding)
        repeated = record.released is self.record.released
        diagnostics = Diagnostics() if seen is not None and self.mechanism.private else None
        # Another rank may have the sum, and its noise, as soon as this one has given its share.
        if world_size() > 1 and not repeated:
            self.journal.append(record.known)
        released, aux, state = self._step.release(
            self.params, batch, self.state, inplace=True, watch=diagnostics
        )
        try:
            if world_size() == 1 and not repeated:
                self.journal.append(record.known)
        finally:
            # An interrupt that comes while it is recorded finds it counted here as well.
            self.state, self.record, self._unfinished = state, record, _UPDATE
        self.stepped = True
        if self.mechanism.private:
            self._prove(released)
        if seen is not None and diagnostics is not None:
            seen.update(diagnostics.told(released))
        return released, aux

    def _prove(self, released: Any) -> None:
        """Note the bits of the step that was just made, unless it was made before, with others.

        A guarantee depends on it: nothing of a step that came out otherwise is given out. It is
        asked of every step, as another process may be making the same ones at this time.
        """
        if rank() or not (self.journal.directories or self.directories):
            return
        step = self.record.step - self.record.begun - 1
        bits = release_bits(released)
        if not self.journal.prove(self.record.segment, step, bits, self.directories):
            raise CheckpointError(
                f"step {self.record.step - 1} was made before, and came out otherwise now, so "
                "its noise would be used for two gradients. Nothing of it was given out. What "
                "changed is not among what is compared: the code of the loss, other rows of "
                "the data, frozen weights, the number of threads, or the kind of processor. "
                'Undo it, or resume with on_changed_plan="fork" and a plan with another key'
            )

    def apply(self, released: Any) -> None:
        """Move the parameters, in place."""
        with torch.no_grad():
            _, self.state = self._step.update(self.params, released, self.state, inplace=True)
        self._unfinished, self._saved = "", False
        if self.mechanism.private:
            self._come_to = self._weights.bits()

    def learning_rate(self) -> float | None:
        """Rate that the next update applies; None if the optimizer hides it.

        Raises:
            TypeError: If a schedule returns something else than a number.
            ValueError: If it is negative or not finite.
        """
        rate: Any = getattr(self.fit.optimizer, "lr", None)
        if rate is None:
            return None
        # The optimizer's own count: a second fit with another optimizer starts its schedule anew.
        own = self.state.optimizer
        own = own.stages if isinstance(own, ScheduleFreeState) else own
        step: int = own["step"] if isinstance(own, dict) and "step" in own else self.state.step
        value = rate(step) if callable(rate) else rate
        return _check.non_negative(f"the learning rate at step {step}", value)

    # -- weights to train on, and weights to publish ----------------------------------------------

    def published(self) -> dict[str, Tensor] | None:
        """The weights to evaluate and export, by name, if they are not the ones being trained."""
        return evaluation_params(self.state.optimizer)

    def publish_weights(self) -> None:
        """Let the module show the weights to evaluate and export, until training goes on."""
        published = self.published()
        if published is not None and self.parked is None:
            self.parked = {name: p.detach().clone() for name, p in self.params.items()}
            write_weights(self.params, published)

    def train_weights(self) -> None:
        """Let the module have the weights to train on again."""
        if self.parked is not None:
            write_weights(self.params, self.parked)
            self.parked = None

    @property
    def moved(self) -> bool:
        """Whether the weights to train on are others than those that training has come to.

        A guarantee depends on it: only with these may the noise of the coming steps be used, as
        whoever makes the run again comes to them.
        """
        weights = self._weights if self.parked is None else Weights(self.parked)
        return not all(map(torch.equal, weights.bits(), self._come_to))

    @contextmanager
    def in_hook(self, name: str) -> Generator[None]:
        """Let what a hook of the module does to the weights be a part of training.

        Raises:
            PrivacyError: If they were saved before, so that a run that is resumed would not have
                what the hook has done.
        """
        moved = not self.mechanism.private or self.moved
        yield
        if moved or not self.moved:
            return
        if self._saved:
            raise PrivacyError(
                f"{name} changed the weights after a checkpoint of this step had been made, as "
                "callbacks come before the module: a run resumed from it would use the noise of "
                "the coming steps for other gradients. Change them in on_train_batch_start or "
                "on_train_epoch_start, which a resumed run comes to as well"
            )
        self._come_to = self._weights.bits()

    # -- saving ---------------------------------------------------------------------------------

    def consolidate(self) -> None:
        """Get together for a checkpoint what ranks have in shares; every rank must call it."""
        state = whole(self._step, self.state)
        self.state = replace(state, clip=counted_on_rank_zero(state.clip))

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs, as tensors and plain values.

        Secret: it holds the key, unless the plan says ``key_in_checkpoint=False``.

        Raises:
            CheckpointError: If the last step was interrupted where it cannot go on from.
        """
        if self._unfinished:
            raise CheckpointError(
                f"no checkpoint is made here: {self._unfinished}; resume from an earlier checkpoint"
            )
        require_whole(self.state)
        kept = self.params if self.parked is None else self.parked
        digest = ""
        if self.mechanism.private and not self.moved:
            digest, self._saved = weights_digest(kept), True
        elif self.mechanism.private:
            rank_zero_warn(
                "opake_lightning: a checkpoint is made while the module has other weights than "
                "training has come to, as an average that a callback shows. Its ledger counts, and "
                "a run does not go on from it, except with a new key"
            )
        training = None
        if self.published() is not None:  # the checkpoint's own are the published ones
            training = {name: weight.detach().clone() for name, weight in kept.items()}
        return {
            "record": self.record.to_plain(secret=self.fit.plan.key_in_checkpoint),
            "key_digest": self.record.segment,
            "state": state_dict(self.state, keys=False),
            "weights": digest,
            "training_weights": training,
        }

    # -- what a later fit goes on from ------------------------------------------------------------

    def past(self) -> Past:
        """What is left of this fit for the next one."""
        past = Past(self.record, self.journal, self.since)
        past.clip, past.optimizer = self.state.clip, self.state.optimizer
        past.optimizer_name, past.parked = self.fit.inputs.optimizer, self.parked
        past.process, past.given = self.process, self.given
        return past


def write_weights(params: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Let ``params`` have the values of ``weights``."""
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(weights[name])
