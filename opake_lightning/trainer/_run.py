"""What one module has released so far, and how its next release is made."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from opake_lightning._tree import seat
from opake_lightning.accounting import Ledger
from opake_lightning.distributed import world_size
from opake_lightning.dpsgd.clipping import AdaptiveClipState, ClipState
from opake_lightning.dpsgd.noise import NoiseState
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.optimizers import GradientTransformation, evaluation_params
from opake_lightning.optimizers.types import ScheduleFreeState
from opake_lightning.plan import NonPrivate, PrivateMechanism
from opake_lightning.random import RngKey, fold_in, fresh_key
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.step import Step, StepState
from opake_lightning.trainer._diagnostics import Diagnostics
from opake_lightning.trainer.report import PrivacySpent

__all__ = ["Run"]

_VERSION = 1
_TORN = (
    "the run was interrupted while noise was being added, and what the noise of the next steps "
    "must take back is lost"
)


class Run:
    """The live state of one module; it outlives a fit, so that a second one goes on counting.

    The ledger and the step state are replaced together, right after noise has been added and
    before the parameters move: an exception at any point leaves both from the same step, and what
    was released is always counted.

    Attributes:
        ledger: What has been spent, in this process and before.
        state: Key, counters and optimizer state; None before the first fit.
        begun: How many steps had been spent when this fit began.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        plan: dict[str, Any] | None = None,
        *,
        lineage: str = "",
    ) -> None:
        self.ledger = ledger or Ledger()
        self.state: StepState | None = None
        self.begun = 0
        self.plan: dict[str, Any] = plan or {}
        self.mechanism: PrivateMechanism | NonPrivate | None = None
        self.params: dict[str, Tensor] = {}
        self._optimizer: GradientTransformation | None = None
        self._loss_fn: Callable[..., Any] | None = None
        self._steps_left: Callable[[], int | None] = lambda: None
        self._step: Step | None = None
        self._optimizer_name = ""
        # What sets this run apart from an earlier one that may have used the same key.
        self._lineage = lineage
        self._weights: tuple[nn.Module, dict[str, Any]] | None = None
        # The weights to train on, while the module shows the ones to publish.
        self._parked: dict[str, Tensor] | None = None
        # Whether an exception came while correlated noise was being added.
        self._torn = False

    # -- preparing a fit ------------------------------------------------------------------------

    def prepare(
        self,
        mechanism: PrivateMechanism | NonPrivate,
        optimizer: GradientTransformation,
        params: dict[str, Tensor],
        loss_fn: Callable[..., Any],
        key: RngKey,
        steps_left: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Get ready for a fit: adopt what the last one left, or start with ``key``.

        ``steps_left`` tells how many steps there are still to come, for a run that forks.

        Streams go on where the ledger is, so that no step of any fit has those of another; noise
        that is correlated begins anew.
        """
        if self._lineage:
            key = fold_in(key, self._lineage)
        # One after the other in memory, parameters are updated in one operation.
        seat(params)
        before, name = self.state, self._optimizer_name
        clipping = self.plan.get("clipping_norm")
        self.params, self._optimizer, self._loss_fn = params, optimizer, loss_fn
        self._steps_left = steps_left
        self._optimizer_name = _name_of(optimizer)
        if isinstance(mechanism, PrivateMechanism):
            mechanism = mechanism.beginning_at(self.ledger.n_steps)
        step = self._made(mechanism, before.noise.key if before else key)
        self._take(mechanism, step)
        fresh = step.init(params)
        fresh = replace(fresh, noise=replace(fresh.noise, step=self.ledger.n_steps))
        if before is not None:
            if clipping == self.plan.get("clipping_norm"):
                fresh = replace(fresh, clip=_go_on_clipping(fresh.clip, before.clip))
            if name == self._optimizer_name and self._find_training_weights():
                fresh = replace(fresh, optimizer=_adopt(fresh.optimizer, before.optimizer))
        self._parked, self._torn = None, False
        self.state, self.begun = fresh, self.ledger.n_steps

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

    def _made(self, mechanism: PrivateMechanism | NonPrivate, key: RngKey) -> Step:
        assert self._loss_fn is not None
        assert self._optimizer is not None
        return mechanism.step(self._loss_fn, self._optimizer, key, self.params)

    def _take(self, mechanism: PrivateMechanism | NonPrivate, step: Step) -> None:
        self.mechanism = mechanism
        self.plan = {**mechanism.public()}
        # Without the noise's first buffers: they will be written over, or are not used at all.
        self._step = replace(step, noise_state=NoiseState(step.noise_state.key))

    def position(self) -> tuple[RngKey, int]:
        """Key of the run and number of the next step, for the loader."""
        assert self.state is not None
        return self.state.noise.key, self.state.step

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
            self.mechanism.check_step(self.ledger.n_steps)
        if self._torn:
            raise PrivacyError(f"{_TORN}; start another fit, which begins a new horizon")
        # First, as it may refuse the step.
        ledger = self.ledger.spend(self.mechanism.event)
        diagnostics = Diagnostics() if seen is not None and self.mechanism.private else None

        def before_noise(grads: Any) -> None:
            if diagnostics is not None:
                diagnostics(grads)
            # From here on what correlated noise remembers is written over.
            self._torn = bool(getattr(self.state.noise if self.state else None, "buffers", None))

        released, aux, state = self._step.release(
            self.params, batch, self.state, inplace=True, watch=before_noise
        )
        self.state, self.ledger = state, ledger
        self._torn = False
        if seen is not None and diagnostics is not None:
            seen.update(diagnostics.told(released))
        return released, aux

    def apply(self, released: Any) -> None:
        """Move the parameters, in place."""
        assert self._step is not None
        assert self.state is not None
        with torch.no_grad():
            _, self.state = self._step.update(self.params, released, self.state, inplace=True)

    def learning_rate(self) -> float | None:
        """Rate that the next update applies; None if the optimizer does not tell."""
        rate: Any = getattr(self._optimizer, "lr", None)
        if rate is None or self.state is None:
            return None
        # The optimizer's own count: a second fit with another optimizer starts its schedule anew.
        state = self.state.optimizer
        state = state.stages if isinstance(state, ScheduleFreeState) else state
        counted = isinstance(state, dict) and "step" in state
        step: int = state["step"] if counted else self.state.step
        return float(cast("float", rate(step) if callable(rate) else rate))

    # -- weights to train on, and weights to publish ----------------------------------------------

    def published(self) -> dict[str, Tensor] | None:
        """The weights to evaluate and export, by name, if they are not the ones being trained."""
        return None if self.state is None else evaluation_params(self.state.optimizer)

    def publish_weights(self) -> None:
        """Let the module show the weights to evaluate and export, until training goes on."""
        published = self.published()
        if published is not None and self._parked is None:
            self._parked = {name: p.detach().clone() for name, p in self.params.items()}
            _write(self.params, published)

    def train_weights(self) -> None:
        """Let the module have the weights to train on again."""
        if self._parked is not None:
            _write(self.params, self._parked)
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
        return {"version": _VERSION, "ledger": self.ledger.to_dict(), "plan": dict(self.plan)}

    @classmethod
    def from_public(cls, saved: dict[str, Any]) -> Run:
        """A module's past, from a checkpoint without its secrets: a new fit takes a new key."""
        try:
            _check_version(saved)
            ledger = Ledger.from_dict(saved["ledger"])
            # A plan may name its key, and the checkpoint's steps have used that key's noise.
            lineage = f"after {ledger.to_dict()}" if ledger.n_steps else ""
            return cls(ledger, dict(saved["plan"]), lineage=lineage)
        except KeyError as missing:
            raise CheckpointError(f"the checkpoint's privacy record lacks {missing}") from None

    def successor(self) -> Run:
        """A run that has spent nothing and shares no stream with this one."""
        if self.state is None:
            return Run(lineage=self._lineage)
        return Run(lineage=fold_in(self.state.noise.key, f"reset {self.state.step}").hex())

    # -- saving and resuming --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs, as tensors and plain values. Secret: it holds the key."""
        assert self.mechanism is not None
        assert self.state is not None
        if self._torn:
            raise CheckpointError(f"{_TORN}, so it cannot be saved; resume an earlier checkpoint")
        return {
            **self.public(),
            "fingerprint": self.mechanism.fingerprint(),
            "optimizer": self._optimizer_name,
            "begun": self.begun,
            "state": state_dict(self.state),
            "training_weights": self._training_weights(),
        }

    def _training_weights(self) -> dict[str, Tensor] | None:
        """Copies of the weights to train on, if the checkpoint's own are the published ones."""
        if self.published() is None:
            return None
        weights = self.params if self._parked is None else self._parked
        return {name: weight.detach().clone() for name, weight in weights.items()}

    def keep_weights(self, module: nn.Module) -> None:
        """Remember ``module``'s weights: Lightning loads a checkpoint's before its state."""
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        self._weights = module, weights

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Go on where ``saved`` stopped; nothing changes, weights included, unless all is right.

        Raises:
            CheckpointError: If ``saved`` is incomplete, or of another plan or optimizer; the
                fields that differ are named.
        """
        kept, self._weights = self._weights, None
        try:
            if saved is None:
                raise CheckpointError(
                    "the checkpoint's optimizer state was not written by opake_lightning, so it "
                    "holds no ledger and no key; start a new run from its weights"
                )
            self.load_state_dict(saved)
        except Exception:
            if kept is not None:
                kept[0].load_state_dict(kept[1])
            raise

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """As :meth:`resume`, for the run without the weights."""
        assert self.mechanism is not None
        assert self.state is not None
        _check_version(saved)
        needed = ("ledger", "fingerprint", "optimizer", "begun", "state", "plan")
        missing = {*needed, "training_weights"} - saved.keys()
        if missing:
            raise CheckpointError(f"the checkpoint's private state lacks {sorted(missing)}")
        forked = self._compare(saved)
        mechanism = self.mechanism
        values = saved["state"]
        if saved["fingerprint"].get("clipping_norm") != mechanism.fingerprint().get(
            "clipping_norm"
        ):
            values = _anew("clip", values, self.state)
        key: RngKey | None = None
        if forked:
            key = fold_in(fold_in(_key_in(values), "fork"), _common_token())
            values = _anew("noise", values, self.state)
        state = from_state_dict(self.state, values, strict=True)
        ledger, begun = Ledger.from_dict(saved["ledger"]), int(saved["begun"])
        if isinstance(mechanism, PrivateMechanism):
            mechanism = (
                mechanism.forked(ledger, left=self._steps_left())
                if forked
                else _resumed(mechanism, saved["plan"], begun)
            )
        step = self._made(mechanism, key or state.noise.key)
        if forked:
            state = replace(state, noise=replace(step.noise_state, step=ledger.n_steps))
            begun = ledger.n_steps
        _require_own(state.noise, step.noise_state, ledger)
        self._take(mechanism, step)
        self.state, self.ledger, self.begun, self._torn = state, ledger, begun, False
        if saved["training_weights"] is not None:
            _write(self.params, saved["training_weights"])

    def _compare(self, saved: dict[str, Any]) -> bool:
        """Whether to fork; raises if the plans differ and the plan does not allow it."""
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
        differ = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
        if not differ:
            return False
        plan: Any = getattr(self.mechanism, "plan", self.mechanism)
        if plan.on_changed_plan == "fork":
            return True
        told = [
            "key" if k == "key" else f"{k} (checkpoint {theirs.get(k)!r}, now {ours.get(k)!r})"
            for k in differ
        ]
        raise CheckpointError(
            "the checkpoint belongs to another plan, and going on would use its noise for other "
            f"gradients; these differ: {', '.join(told)}. Resume with the same plan, data and "
            'trainer limits, or set on_changed_plan="fork" to go on with a new key'
        )

    # -- copies ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        """A copy that goes on with its own key: two modules must not use the same noise."""
        copy = Run(self.ledger, dict(self.plan), lineage=secrets.token_hex(16))
        copy._optimizer_name = self._optimizer_name
        if self.state is not None:
            # Buffers of correlated noise stay behind: the copy's next fit begins a new horizon.
            key = fold_in(fresh_key(), self.state.noise.key.hex())
            noise = NoiseState(key, self.state.noise.step)
            template = replace(self.state, noise=noise)
            copy.state = replace(
                template, optimizer=_adopt(self.state.optimizer, self.state.optimizer)
            )
        copy._parked = None if self._parked is None else dict(self._parked)
        memo[id(self)] = copy
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """What another process of the same run needs; functions and parameters are made there."""
        kept = ("ledger", "state", "plan", "begun", "_optimizer_name", "_lineage", "_parked")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`."""
        self.__init__()
        self.__dict__.update(kept)


def _write(params: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(weights[name])


def _adopt(template: Any, before: Any) -> Any:
    """Optimizer state ``before``, copied, if it fits ``template``; else ``template``."""
    try:
        return from_state_dict(template, state_dict(before), strict=True)
    except CheckpointError:
        return template


def _go_on_clipping(fresh: Any, before: Any) -> Any:
    """Clip state ``fresh`` with the step, and the norms, that ``before`` came to."""
    if not isinstance(fresh, ClipState) or not isinstance(before, ClipState):
        return fresh
    fresh = replace(fresh, step=before.step)
    if isinstance(fresh, AdaptiveClipState) and isinstance(before, AdaptiveClipState):
        fresh = replace(fresh, clipping_norms=before.clipping_norms)
    return fresh


def _anew(part: str, values: dict[str, Any], fresh: StepState) -> dict[str, Any]:
    """A saved state of which one part, of another kind, is replaced by that of ``fresh``."""
    kept = {path: v for path, v in values.items() if path.partition("/")[0] != part}
    begin = {path: v for path, v in state_dict(fresh).items() if path.partition("/")[0] == part}
    return {**kept, **begin}


def _key_in(values: dict[str, Any]) -> RngKey:
    """The key of a saved state, whatever its noise is like."""
    found = {path: value for path, value in values.items() if path == "noise/key"}
    template = {"noise": {"key": RngKey(0)}}
    return from_state_dict(template, found, strict=True)["noise"]["key"]


def _require_own(state: Any, fresh: Any, ledger: Ledger) -> None:
    """Refuse noise whose past is not that of this run."""
    if state.step != ledger.n_steps:
        raise CheckpointError(
            f"the ledger in the checkpoint counts {ledger.n_steps} steps, but its noise is that of "
            f"noise/step {state.step}; the checkpoint is damaged"
        )
    for name in ("strategy", "start"):
        theirs, ours = getattr(state, name, None), getattr(fresh, name, None)
        if theirs != ours:
            raise CheckpointError(
                f"the noise in the checkpoint has {name} {theirs!r}, but the run that it describes "
                f"has {ours!r}; the checkpoint is damaged, or was made by another release"
            )


def _resumed(mechanism: PrivateMechanism, plan: dict[str, Any], begun: int) -> PrivateMechanism:
    """The mechanism of a checkpoint that has the same fingerprint."""
    for name in ("noise_multiplier", "planned_steps"):
        if name not in plan:
            raise CheckpointError(f"the checkpoint's private state lacks its {name}")
    return mechanism.resumed(plan["noise_multiplier"], plan["planned_steps"], begun)


def _common_token() -> str:
    """Something never seen before, the same on all ranks."""
    token = [secrets.token_hex(16)]
    if world_size() > 1:
        dist.broadcast_object_list(token)
    return token[0]


def _name_of(optimizer: GradientTransformation) -> str:
    return str(getattr(optimizer, "name", "") or f"a TorchOpt {type(optimizer).__name__}")


def _check_version(saved: dict[str, Any]) -> None:
    if saved.get("version") != _VERSION:
        raise CheckpointError(
            f"the checkpoint's privacy record has version {saved.get('version')!r}, this release "
            f"reads version {_VERSION}"
        )
