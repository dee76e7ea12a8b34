"""What one module has released so far, and how its next release is made."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opake_lightning.accounting import Ledger
from opake_lightning.errors import CheckpointError
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.plan import Mechanism, NonPrivate
from opake_lightning.random import RngKey, fold_in, fresh_key
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.step import Step, StepState
from opake_lightning.trainer.report import PrivacySpent, public_plan

__all__ = ["Run"]

_VERSION = 1


class Run:
    """The live state of one module; it outlives a fit, so that a second one goes on counting.

    The ledger and the step state are replaced together, right after noise has been added and
    before the parameters move: an exception at any point leaves both from the same step, and what
    was released is always counted.

    Attributes:
        ledger: What has been spent, in this process and before.
        state: Key, counters and optimizer state; None before the first fit.
    """

    def __init__(self, ledger: Ledger | None = None, plan: dict[str, Any] | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.state: StepState | None = None
        self.plan = plan or {}
        self.mechanism: Mechanism | NonPrivate | None = None
        self.params: dict[str, Tensor] = {}
        self._optimizer: GradientTransformation | None = None
        self._loss_fn: Callable[..., Any] | None = None
        self._step: Step | None = None
        self._optimizer_name = ""

    # -- preparing a fit ------------------------------------------------------------------------

    def prepare(
        self,
        mechanism: Mechanism | NonPrivate,
        optimizer: GradientTransformation,
        params: dict[str, Tensor],
        loss_fn: Callable[..., Any],
        key: RngKey,
    ) -> None:
        """Get ready for a fit: adopt what the last one left, or start with ``key``."""
        before, name = self.state, self._optimizer_name
        self.params, self._optimizer, self._loss_fn = params, optimizer, loss_fn
        self._optimizer_name = _name_of(optimizer)
        self._use(mechanism, before.noise.key if before else key)
        assert self._step is not None
        fresh = self._step.init(params)
        if before is not None:
            fresh = replace(fresh, noise=before.noise)
            if name == self._optimizer_name:
                fresh = replace(fresh, optimizer=_adopt(fresh.optimizer, before.optimizer))
        self.state = fresh

    def _use(self, mechanism: Mechanism | NonPrivate, key: RngKey) -> None:
        assert self._loss_fn is not None and self._optimizer is not None
        self.mechanism = mechanism
        self.plan = public_plan(mechanism)
        self._step = mechanism.step(self._loss_fn, self._optimizer, key)

    def position(self) -> tuple[RngKey, int]:
        """Key of the run and number of the next step, for the loader."""
        assert self.state is not None
        return self.state.noise.key, self.state.step

    # -- one step -------------------------------------------------------------------------------

    def release(self, batch: Any) -> tuple[Any, Any]:
        """Spend one step on ``batch``: the released gradient, and the loss's auxiliary output."""
        assert self._step is not None and self.state is not None and self.mechanism is not None
        released, aux, state = self._step.release(self.params, batch, self.state, inplace=True)
        self.state, self.ledger = state, self.ledger.spend(self.mechanism.event)
        return released, aux

    def apply(self, released: Any) -> None:
        """Move the parameters, in place."""
        assert self._step is not None and self.state is not None
        with torch.no_grad():
            _, self.state = self._step.update(self.params, released, self.state, inplace=True)

    def learning_rate(self) -> float | None:
        """Rate that the next update applies; None if the optimizer does not tell."""
        rate = getattr(self._optimizer, "lr", None)
        if rate is None or self.state is None:
            return None
        return float(rate(self.state.step)) if callable(rate) else float(rate)

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
        """A module's past, read from a checkpoint without its secrets: a new fit takes a new key."""
        try:
            _check_version(saved)
            return cls(Ledger.from_dict(saved["ledger"]), dict(saved["plan"]))
        except KeyError as missing:
            raise CheckpointError(f"the checkpoint's privacy record lacks {missing}") from None

    # -- saving and resuming --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs, as tensors and plain values. Secret: it holds the key."""
        assert self.mechanism is not None and self.state is not None
        return {
            **self.public(),
            "fingerprint": self.mechanism.fingerprint(),
            "optimizer": self._optimizer_name,
            "state": state_dict(self.state),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where ``saved`` stopped; nothing changes unless all of it is right.

        Raises:
            CheckpointError: If ``saved`` is incomplete, or of another plan or optimizer; the
                fields that differ are named.
        """
        assert self.mechanism is not None and self.state is not None
        missing = {"ledger", "fingerprint", "optimizer", "state", "plan"} - saved.keys()
        if missing:
            raise CheckpointError(f"the checkpoint's private state lacks {sorted(missing)}")
        _check_version(saved)
        forked = self._compare(saved)
        state = from_state_dict(self.state, saved["state"], strict=True)
        ledger = Ledger.from_dict(saved["ledger"])
        mechanism = self.mechanism
        if isinstance(mechanism, Mechanism) and not forked:
            mechanism = mechanism.with_noise_multiplier(saved["plan"]["noise_multiplier"])
        if forked:
            key = fold_in(fold_in(state.noise.key, "fork"), secrets.token_hex(16))
            state = replace(state, noise=replace(state.noise, key=key))
        self._use(mechanism, state.noise.key)
        self.state, self.ledger = state, ledger

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
        plan = getattr(self.mechanism, "plan", self.mechanism)
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
        copy = Run(self.ledger, dict(self.plan))
        copy._optimizer_name = self._optimizer_name
        if self.state is not None:
            noise = replace(self.state.noise, key=fold_in(fresh_key(), self.state.noise.key.hex()))
            template = replace(self.state, noise=noise)
            copy.state = replace(
                template, optimizer=_adopt(self.state.optimizer, self.state.optimizer)
            )
        memo[id(self)] = copy
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """What another process of the same run needs; functions and parameters are made there."""
        kept = ("ledger", "state", "plan", "_optimizer_name")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`."""
        self.__init__()
        self.__dict__.update(kept)


def _adopt(template: Any, before: Any) -> Any:
    """Optimizer state ``before``, copied, if it fits ``template``; else ``template``."""
    try:
        return from_state_dict(template, state_dict(before), strict=True)
    except CheckpointError:
        return template


def _name_of(optimizer: GradientTransformation) -> str:
    return str(getattr(optimizer, "name", "") or f"a TorchOpt {type(optimizer).__name__}")


def _check_version(saved: dict[str, Any]) -> None:
    if saved.get("version") != _VERSION:
        raise CheckpointError(
            f"the checkpoint's privacy record has version {saved.get('version')!r}, this release "
            f"reads version {_VERSION}"
        )
