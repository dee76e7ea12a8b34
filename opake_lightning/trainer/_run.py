"""What one module has released so far, and how its next release is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opake_lightning._tree import seat
from opake_lightning.distributed import world_size
from opake_lightning.dpsgd.noise import NoiseState
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.optimizers import GradientTransformation, evaluation_params
from opake_lightning.plan import NonPrivate, PrivateMechanism
from opake_lightning.random import RngKey
from opake_lightning.serialization import from_state_dict
from opake_lightning.step import Step, StepState
from opake_lightning.trainer._copies import brought_back, copied, to_bring_back
from opake_lightning.trainer._correlated import TORN, Remembering, require_whole, whole
from opake_lightning.trainer._diagnostics import Diagnostics
from opake_lightning.trainer._inputs import Inputs, release_bits, weights_digest
from opake_lightning.trainer._journal import Journal, Spending, later
from opake_lightning.trainer._keys import (
    derived,
    first_words,
    key_of,
    on_key_of,
    record_of,
    with_keys,
)
from opake_lightning.trainer._rate import rate_of
from opake_lightning.trainer._recorded import Recorded, refuse_to_repeat
from opake_lightning.trainer._restored import (
    VERSION,
    adopted,
    anew,
    check_complete,
    check_version,
    check_weights,
    clipping_from,
    name_of,
    require_own,
    resumed,
    unfolded,
    write_weights,
)
from opake_lightning.trainer._together import require_same_checkpoint
from opake_lightning.trainer.report import PrivacySpent

__all__ = ["Run"]

# What keeps a step from being complete, from when it matters until it no longer does.
_UPDATE = (
    "the last step was interrupted after its release, which is counted, before the parameters had "
    "moved, so the weights belong to no step"
)

_MADE_ANEW = {"mechanism", "params", "_optimizer", "_loss_fn", "_steps_left", "_step", "_weights"}


class Run(Recorded):
    """The live state of one module; it outlives a fit, so that a second one goes on counting.

    The ledger and the step state are replaced together, right after noise has been added and
    before the parameters move: an exception at any point leaves both from the same step, and what
    was released is always counted.

    Attributes:
        state: Key, counters and optimizer state; None before the first fit.
        begun: How many steps had been spent when this fit began.
        inputs: What the steps follow from beside plan and key; None in a run without privacy.
    """

    def __init__(self, plan: dict[str, Any] | None = None, *, lineage: str = "") -> None:
        super().__init__()
        self.state: StepState | None = None
        self.begun = 0
        self.inputs: Inputs | None = None
        self.plan: dict[str, Any] = plan or {}
        self.mechanism: PrivateMechanism | NonPrivate | None = None
        self.params: dict[str, Tensor] = {}
        self._optimizer: GradientTransformation | None = None
        self._loss_fn: Callable[..., Any] | None = None
        self._steps_left: Callable[[], int | None] = lambda: None
        self._step: Step | None = None
        self._optimizer_name = ""
        self._lineage = lineage  # what sets it apart from an earlier run of the same key
        self._weights: tuple[nn.Module, dict[str, Any], dict[str, Any]] | None = None
        # The weights to train on, while the module shows the ones to publish.
        self._parked: dict[str, Tensor] | None = None
        # What the step at hand has begun and not finished; "" if nothing.
        self._unfinished = ""

    # -- preparing a fit ------------------------------------------------------------------------

    def prepare(
        self,
        mechanism: PrivateMechanism | NonPrivate,
        optimizer: GradientTransformation,
        params: dict[str, Tensor],
        loss_fn: Callable[..., Any],
        key: RngKey,
        steps_left: Callable[[], int | None] = lambda: None,
        *,
        resuming: bool = False,
        inputs: Inputs | None = None,
        rounding: str = "",
    ) -> None:
        """Get ready for a fit: adopt what the last one left, or start with ``key``.

        ``steps_left`` tells how many steps there are still to come, for a run that forks;
        ``resuming`` that a checkpoint is loaded next, which brings its own place in the streams;
        ``rounding`` what the last digits of a step depend on.

        Streams go on where the ledger is, on a key of each fit's own; correlated noise begins anew.
        """
        seat(params)  # one after the other in memory, they are updated in one operation
        self.inputs, self.rounding = inputs, rounding
        before, name = self.state, self._optimizer_name
        if before is None:
            self.journal = Journal()
            self.words = first_words(mechanism, self._lineage, shared=self._shared)
            key = derived(key, self.words)
        else:
            before, self.words = on_key_of(mechanism, key, before, self.words)
            if not resuming:
                new_key = self.for_another_fit(before.noise.key)
                before = replace(before, noise=replace(before.noise, key=new_key))
            self.state = before  # with its words, whatever fails from here on
        clipping = self.plan.get("clipping_norm")
        self.params, self._optimizer, self._loss_fn = params, optimizer, loss_fn
        self._steps_left, self._optimizer_name = steps_left, name_of(optimizer)
        if isinstance(mechanism, PrivateMechanism):
            mechanism = mechanism.beginning_at(self.made.n_steps)
        step = self._step_of(mechanism, before.noise.key if before else key)
        self._take(mechanism, step)
        fresh = step.init(params)
        fresh = replace(fresh, noise=replace(fresh.noise, step=self.made.n_steps))
        if before is not None:
            before = self.state = unfolded(before, fresh)
            if clipping == self.plan.get("clipping_norm"):
                fresh = replace(fresh, clip=clipping_from(before.clip, fresh.clip))
            if name == self._optimizer_name and self._find_training_weights():
                fresh = replace(fresh, optimizer=adopted(fresh.optimizer, before.optimizer))
        self._parked, self._unfinished = None, ""
        self.state, self.begun = fresh, self.made.n_steps

    def _find_training_weights(self) -> bool:
        """Whether the module has the weights that the last fit's optimizer state belongs to."""
        published = self.published()
        if published is None:
            return True
        if self._parked is None or self._parked.keys() != self.params.keys():
            return False
        if not all(torch.equal(p, published[n].to(p)) for n, p in self.params.items()):
            return False  # someone loaded others since
        self.train_weights()
        return True

    def _step_of(self, mechanism: PrivateMechanism | NonPrivate, key: RngKey) -> Step:
        assert self._loss_fn is not None
        assert self._optimizer is not None
        return mechanism.step(self._loss_fn, self._optimizer, key, self.params)

    def _take(self, mechanism: PrivateMechanism | NonPrivate, step: Step) -> None:
        self.mechanism = mechanism
        # What was spent before is in the same ledger, and cannot be made to mean more.
        mixed = self.ledger.n_steps and self.plan.get("rows_may_mix_before_the_loss")
        self.plan = {**mechanism.public()}
        if mixed:
            self.plan["rows_may_mix_before_the_loss"] = True
        noise_fn, first = step.noise_fn, step.noise_state
        if getattr(first, "buffers", None):
            noise_fn = Remembering(noise_fn, self._begin_correlated)
        # Without the noise's first buffers: they will be written over, or are not used at all.
        self._step = replace(step, noise_fn=noise_fn, noise_state=NoiseState(first.key))

    def _begin_correlated(self) -> None:
        self._unfinished = TORN

    def position(self) -> tuple[RngKey, int]:
        """Key of the run and number of the next step, for the loader."""
        assert self.state is not None
        return self.state.noise.key, self.state.step

    @property
    def at_first_step(self) -> bool:
        """Whether this fit is private and has not released anything yet."""
        private = isinstance(self.mechanism, PrivateMechanism)
        return private and self.state is not None and self.state.step == self.begun

    def draw(self, key: RngKey, step: int, *, rank: int, world_size: int) -> NDArray[np.int64]:
        """One rank's share of the examples drawn at ``step``, for the loader."""
        assert isinstance(self.mechanism, PrivateMechanism)
        return self.mechanism.draw(key, step, rank=rank, world_size=world_size)

    # -- one step -------------------------------------------------------------------------------

    def release(self, batch: Any, seen: dict[str, float] | None = None) -> tuple[Any, Any]:
        """Spend one step on ``batch``: the released gradient, and the loss's auxiliary output.

        ``seen`` is filled with diagnostics, which are not private.
        """
        assert self._step is not None
        assert self.state is not None
        assert self.mechanism is not None
        if isinstance(self.mechanism, PrivateMechanism):
            self.mechanism.check_step(self.made.n_steps)
        if self._unfinished:
            raise PrivacyError(f"{self._unfinished}; start another fit")
        own = self.own.then(self.mechanism.event, self.made_by, self.learning_rate())
        # Unless it repeats what it knows to have been released, that is more than before.
        spending = later(self.spending, own)
        self._used = True
        diagnostics = Diagnostics() if seen is not None and self.mechanism.private else None
        # Another rank may have the sum, and its noise, as soon as this one has given its share.
        if world_size() > 1:
            self.journal.record(spending)
        released, aux, state = self._step.release(
            self.params, batch, self.state, inplace=True, watch=diagnostics
        )
        try:
            if world_size() == 1:
                self.journal.record(spending)
        finally:
            # An interrupt that comes while it is recorded finds it counted here as well.
            again = spending == self.spending
            self.state, self.own, self.spending, self._unfinished = state, own, spending, _UPDATE
        if self.mechanism.private:
            self._prove(released, again=again)
        if seen is not None and diagnostics is not None:
            seen.update(diagnostics.told(released))
        return released, aux

    def _prove(self, released: Any, *, again: bool) -> None:
        """Note the bits of the step that was just made, or compare them, if it was made before.

        A guarantee depends on it: nothing of a step that came out otherwise is given out.
        """
        if not self.journal.directories:  # as on all ranks but one
            return
        step, bits = self.made.n_steps - 1, release_bits(released)
        if again:
            places = [*self.journal.directories, *self.directories]
            known = self.journal.bits_of(step, self.own.trail, places)
            if known is not None and known != bits:
                raise CheckpointError(
                    f"step {step} was made before, and came out otherwise now, so its noise would "
                    "be used for two gradients. Nothing of it was given out. What changed is not "
                    "among what is compared: the code of the loss, other rows of the data, frozen "
                    "weights, the number of threads, or the kind of processor. Undo it, or resume "
                    'with on_changed_plan="fork" and a plan with another key'
                )
        self.journal.note_bits(step, self.own.trail, bits)

    def apply(self, released: Any) -> None:
        """Move the parameters, in place."""
        assert self._step is not None
        assert self.state is not None
        with torch.no_grad():
            _, self.state = self._step.update(self.params, released, self.state, inplace=True)
        self._unfinished = ""

    def learning_rate(self, ahead: int = 0, state: StepState | None = None) -> float | None:
        """Rate that the next update applies, or a later one; None if the optimizer hides it."""
        state = state or self.state
        if self._optimizer is None or state is None:
            return None
        return rate_of(self._optimizer, state, ahead)

    # -- weights to train on, and weights to publish ----------------------------------------------

    def published(self) -> dict[str, Tensor] | None:
        """The weights to evaluate and export, by name, if they are not the ones being trained."""
        return None if self.state is None else evaluation_params(self.state.optimizer)

    def publish_weights(self) -> None:
        """Let the module show the weights to evaluate and export, until training goes on."""
        published = self.published()
        if published is not None and self._parked is None:
            self._parked = {name: p.detach().clone() for name, p in self.params.items()}
            write_weights(self.params, published)

    def train_weights(self) -> None:
        """Let the module have the weights to train on again."""
        if self._parked is not None:
            write_weights(self.params, self._parked)
            self._parked = None

    # -- reporting ------------------------------------------------------------------------------

    @property
    def delta(self) -> float:
        """δ that ε is reported at."""
        return float(self.plan.get("target_delta", NonPrivate.target_delta))

    def spent(self) -> PrivacySpent:
        """What has been spent so far."""
        ledger = self.ledger
        return PrivacySpent(ledger.epsilon(self.delta), self.delta, ledger.n_steps, dict(self.plan))

    def public(self) -> dict[str, Any]:
        """The part that may be published with the weights; holds no key."""
        return {
            "version": VERSION,
            "ledger": self.ledger.to_dict(),
            "forks": list(self.forks),
            "plan": dict(self.plan),
            "journal": self.journal.name,
        }

    @classmethod
    def from_public(cls, saved: dict[str, Any]) -> Run:
        """A module's past, from a checkpoint without its secrets: a new fit takes a new key."""
        try:
            check_version(saved)
            parts = {"ledger": saved["ledger"], "forks": saved["forks"], "trail": ""}
            spent = Spending.from_dict(parts)
            # A plan may name its key, and the checkpoint's steps have used that key's noise.
            lineage = f"after {spent.ledger.to_dict()}" if spent.ledger.n_steps else ""
            run = cls(dict(saved["plan"]), lineage=lineage)
            run.spending, run.own, run.journal = spent, spent, Journal(saved["journal"])
            return run
        except KeyError as missing:
            raise CheckpointError(f"the checkpoint's privacy record lacks {missing}") from None

    def successor(self) -> Run:
        """A run that has spent nothing and shares no stream with this one."""
        if self.state is None:
            lineage = self._lineage and f"{self._lineage}, reset"
        else:
            lineage = f"reset {self.state.noise.key.digest()} {self.state.step}"
        run = Run(lineage=lineage)
        run._shared = self._shared and self.state is None
        return run

    # -- saving and resuming --------------------------------------------------------------------

    def consolidate(self) -> None:
        """Get together for a checkpoint what ranks have in shares; every rank must call it."""
        self.state = whole(self._step, self.state)

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs, as tensors and plain values.

        Secret: it holds the key, unless the plan says ``key_in_checkpoint=False``.

        Raises:
            CheckpointError: If the last step was interrupted where it cannot go on from.
        """
        assert self.mechanism is not None
        assert self.state is not None
        if self._unfinished:
            raise CheckpointError(
                f"no checkpoint is made here: {self._unfinished}; resume from an earlier checkpoint"
            )
        require_whole(self.state)
        self._used = True  # by whoever resumes it
        return {
            **self.public(),
            "released": self.spending.to_dict(),
            "ledger": self.made.to_dict(),
            "trail": self.own.trail,
            "fingerprint": self.mechanism.fingerprint(),
            "optimizer": self._optimizer_name,
            "begun": self.begun,
            **record_of(self.state, self.words, keys=self._plan.key_in_checkpoint),
            "training_weights": self._training_weights(),
            "inputs": self.inputs and self.inputs.saved(self.state.noise.key),
            "weights": weights_digest(self._weights_to_train()),
        }

    def _training_weights(self) -> dict[str, Tensor] | None:
        """Copies of the weights to train on, if the checkpoint's own are the published ones."""
        if self.published() is None:
            return None
        weights = self._weights_to_train()
        return {name: weight.detach().clone() for name, weight in weights.items()}

    def _weights_to_train(self) -> dict[str, Tensor]:
        return self.params if self._parked is None else self._parked

    def keep_weights(self, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Remember ``module``'s weights: Lightning loads a checkpoint's before its state."""
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        self._weights = module, weights, checkpoint

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Go on where ``saved`` stopped; nothing changes, weights included, unless all is right.

        Raises:
            CheckpointError: If ``saved`` is incomplete, or of another plan or optimizer.
            PrivacyError: If ranks would go on from different checkpoints.
        """
        kept, self._weights = self._weights, None
        try:
            # Every rank has read a file of its own, which may be another one on another machine.
            require_same_checkpoint(saved)
            if saved is None:
                raise CheckpointError(
                    "the checkpoint's optimizer state was not written by opake_lightning, so it "
                    "holds no ledger and no key; start a new run from its weights"
                )
            if kept is not None:
                check_weights(kept[0], self.params, kept[2]["state_dict"])
            self.load_state_dict(saved)
        except Exception:
            if kept is not None:
                kept[0].load_state_dict(kept[1])
            raise

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """As :meth:`resume`, for the run without the weights."""
        assert self.mechanism is not None
        assert self.state is not None
        check_complete(saved)
        mechanism, differ = self.mechanism, self._changed_plan(saved)
        forked = self._forks(differ)
        key = key_of(saved, self._plan, forked=forked)
        if not forked:
            forked = self._forks(self._changed_inputs(saved, key))
        values = with_keys(saved, self.state, key)
        clipping = mechanism.fingerprint().get("clipping_norm")
        if saved["fingerprint"].get("clipping_norm") != clipping:
            values = anew("clip", values, self.state)
        journal, begun = Journal(saved["journal"]), int(saved["begun"])
        words, template, step = tuple(saved["words"]), self.state, None
        if forked:
            values = anew("noise", values, template)
        else:
            if isinstance(mechanism, PrivateMechanism):
                mechanism = resumed(mechanism, saved["plan"], begun)
            step = self._step_of(mechanism, key)
            # A fork has a shorter horizon than the whole fit, and its noise may remember less.
            template = replace(template, noise=step.noise_state)
        state = from_state_dict(template, values, strict=True)
        known = self.known_of(journal, Spending.from_dict(saved["released"]))
        parts = {"ledger": saved["ledger"], "forks": known.forks, "trail": saved["trail"]}
        own = Spending.from_dict(parts)
        if not forked and isinstance(mechanism, PrivateMechanism):
            forked = not self._repeats(mechanism, own, words, known, state)
        if forked or step is None:
            assert isinstance(self.mechanism, PrivateMechanism)  # NonPrivate never forks
            mechanism = self.mechanism.forked(known.ledger, left=self._steps_left())
            step = self._step_of(mechanism, key)
        else:
            require_own(state.noise, step.noise_state, own.ledger)
        self.spending, self.own, self.journal, self.words = known, own, journal, words
        self._used = self._shared = True
        if forked:
            begun = known.ledger.n_steps
            state = replace(state, noise=replace(step.noise_state, key=self.fork(key), step=begun))
        if mechanism.private:
            self.go_on_recording()
        self.plan = {**saved["plan"]}
        self._take(mechanism, step)
        self.state, self.begun, self._unfinished = state, begun, ""
        if saved["training_weights"] is not None:
            write_weights(self.params, saved["training_weights"])

    def _repeats(
        self,
        mechanism: PrivateMechanism,
        own: Spending,
        words: tuple[str, ...],
        known: Spending,
        state: StepState,
    ) -> bool:
        """Whether to repeat what is recorded after the checkpoint; False to fork, or raises."""
        made = own.ledger.n_steps
        after = known.ledger.n_steps - made
        if not after:
            return True
        try:
            rates = (self.learning_rate(ahead, state) for ahead in range(after))
            again = own.then(mechanism.event, (*words, self.rounding), *rates)
        except PrivacyError:  # more than the horizon has
            again = None
        if again != known and not self._may_fork():
            refuse_to_repeat(made, after)
        return again == known

    def _changed_plan(self, saved: dict[str, Any]) -> list[str]:
        """What of the plan differs from a checkpoint's, in words."""
        assert self.mechanism is not None
        if saved["optimizer"] != self._optimizer_name:
            raise CheckpointError(
                f"the checkpoint was made with {saved['optimizer']}, this run uses "
                f"{self._optimizer_name}; resume with the same optimizer, or start a new run from "
                "the weights with load_from_checkpoint"
            )
        ours, theirs = self.mechanism.fingerprint(), saved["fingerprint"]
        if ours.get("key") is None:
            # No key asked for: the checkpoint's is as good as any.
            ours, theirs = {**ours, "key": None}, {**theirs, "key": None}
        return [
            f"{'the digest of the key' if k == 'key' else k} "
            f"(checkpoint {theirs.get(k)!r}, now {ours.get(k)!r})"
            for k in sorted(ours.keys() | theirs.keys())
            if ours.get(k) != theirs.get(k)
        ]

    def _changed_inputs(self, saved: dict[str, Any], key: RngKey) -> list[str]:
        """What else the coming steps follow from, and differs, in words."""
        if self.inputs is None or saved["inputs"] is None:
            return []
        differ = self.inputs.changed(saved["inputs"], key)
        # Weights to train on that are not the published ones are in the record itself.
        own = saved["training_weights"] is not None
        if not own and weights_digest(self.params) != saved["weights"]:
            differ.append(
                "the weights (those in the file are not the ones that training had come to, as "
                "where a callback saved an average in their place; give the trainer that callback)"
            )
        return differ

    def _forks(self, differ: list[str]) -> bool:
        """Whether to go on with a new key; raises if that is needed and the plan forbids it."""
        if not differ or self._may_fork():
            return bool(differ)
        # Noise of one key and step for two gradients: their difference would have none.
        raise CheckpointError(
            "the checkpoint belongs to another plan, and going on would use its noise for other "
            f"gradients; these differ: {', '.join(differ)}. Resume with the same plan, data, "
            'optimizer and trainer limits, or set on_changed_plan="fork" to go on with a new key'
        )

    def _may_fork(self) -> bool:
        return self._plan.on_changed_plan == "fork"

    @property
    def _plan(self) -> Any:
        return getattr(self.mechanism, "plan", self.mechanism)

    # -- copies ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        """A copy that goes on with its own key: two modules must not use the same noise."""
        memo[id(self)] = copy = copied(self)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """What another process of the same run needs; functions and parameters are made there.

        A pickle that goes anywhere else, as of ``torch.save(module)``, holds the public past alone:
        whoever reads it could take away the noise of a live key.
        """
        if get_spawning_popen() is None:
            return {"public": self.public(), "_since": self._since}
        kept = {name: value for name, value in vars(self).items() if name not in _MADE_ANEW}
        return {**kept, "process": 0}  # of which there may be several

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`."""
        self.__init__()
        if (public := kept.pop("public", None)) is not None:
            # A pickle may be read twice, and a plan may name its key.
            kept = {**vars(Run.from_public(public)), **kept, "_shared": True}
        self.__dict__.update(kept)

    def to_plain(self) -> dict[str, Any]:
        """What a second fit, in another process, goes on from. Secret."""
        return to_bring_back(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Run:
        """Undo :meth:`to_plain`, as far as a second fit needs it."""
        return brought_back(cls(), values)
