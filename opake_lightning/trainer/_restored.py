"""What a run that goes on takes from an earlier one, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from opake_lightning.accounting import Ledger
from opake_lightning.dpsgd.clipping import AdaptiveClipState, ClipState
from opake_lightning.errors import CheckpointError
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.plan import PrivateMechanism
from opake_lightning.serialization import from_state_dict, state_dict
from opake_lightning.step import StepState

__all__ = [
    "VERSION",
    "Flat",
    "adopted",
    "anew",
    "check_complete",
    "check_version",
    "check_weights",
    "clipping_from",
    "name_of",
    "require_own",
    "resumed",
    "unfolded",
    "write_weights",
]

VERSION = 2
_NEEDED = {
    *("ledger", "trail", "released", "forks", "journal", "begun", "plan", "fingerprint"),
    *("optimizer", "state", "words", "key_digest", "holds_keys", "training_weights"),
    *("inputs", "weights"),
}


@dataclass(frozen=True, slots=True)
class Flat:
    """A state from another process, as a flat dictionary, until a template of it is there."""

    values: dict[str, Any]


def write_weights(params: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Let ``params`` have the values of ``weights``."""
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(weights[name])


def adopted(template: Any, before: Any) -> Any:
    """Optimizer state ``before``, copied, if it fits ``template``; else ``template``."""
    values = before.values if isinstance(before, Flat) else state_dict(before)
    try:
        return from_state_dict(template, values, strict=True)
    except CheckpointError:
        return template


def unfolded(before: StepState, fresh: StepState) -> StepState:
    """``before`` with what is :class:`Flat` as ``fresh`` is made, if it is the same."""
    clip = adopted(fresh.clip, before.clip) if isinstance(before.clip, Flat) else before.clip
    optimizer = before.optimizer
    if isinstance(optimizer, Flat):
        optimizer = adopted(fresh.optimizer, optimizer)
    return replace(before, clip=clip, optimizer=optimizer)


def clipping_from(before: Any, fresh: Any) -> Any:
    """Clip state ``fresh`` with the step, and the norms, that ``before`` came to."""
    if not isinstance(fresh, ClipState) or not isinstance(before, ClipState):
        return fresh
    fresh = replace(fresh, step=before.step)
    if isinstance(fresh, AdaptiveClipState) and isinstance(before, AdaptiveClipState):
        fresh = replace(fresh, clipping_norms=before.clipping_norms)
    return fresh


def anew(part: str, values: dict[str, Any], fresh: StepState) -> dict[str, Any]:
    """A saved state of which one part, of another kind, is replaced by that of ``fresh``."""
    kept = {path: v for path, v in values.items() if path.partition("/")[0] != part}
    begin = {path: v for path, v in state_dict(fresh).items() if path.partition("/")[0] == part}
    return {**kept, **begin}


def require_own(state: Any, fresh: Any, made: Ledger) -> None:
    """Refuse noise whose past is not that of this run."""
    if state.step != made.n_steps:
        raise CheckpointError(
            f"the ledger in the checkpoint counts {made.n_steps} steps, but its noise is that of "
            f"noise/step {state.step}; the checkpoint is damaged"
        )
    for name in ("strategy", "start"):
        theirs, ours = getattr(state, name, None), getattr(fresh, name, None)
        if theirs != ours:
            raise CheckpointError(
                f"the noise in the checkpoint has {name} {theirs!r}, but the run that it describes "
                f"has {ours!r}; the checkpoint is damaged, or was made by another release"
            )


def resumed(mechanism: PrivateMechanism, plan: dict[str, Any], begun: int) -> PrivateMechanism:
    """The mechanism of a checkpoint that has the same fingerprint."""
    for name in ("noise_multiplier", "planned_steps"):
        if name not in plan:
            raise CheckpointError(f"the checkpoint's private state lacks its {name}")
    return mechanism.resumed(plan["noise_multiplier"], plan["planned_steps"], begun)


def check_weights(module: nn.Module, params: dict[str, Tensor], loaded: dict[str, Any]) -> None:
    """Refuse a checkpoint without some trained weights, which ``strict_loading=False`` lets pass.

    Raises:
        CheckpointError: If a trained weight of ``module`` is not among ``loaded``.
    """
    names: dict[int, list[str]] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            names.setdefault(value.data_ptr(), []).append(name)
    known = {name: names.get(param.data_ptr(), []) for name, param in params.items()}
    missing = [n for n, places in known.items() if places and not loaded.keys() & set(places)]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks trained weights: {', '.join(missing)}; the run would go on from "
            "others, with the checkpoint's optimizer state and ledger. Save them with it, or start "
            "a new run with load_from_checkpoint"
        )


def name_of(optimizer: GradientTransformation) -> str:
    """What an optimizer is called in a checkpoint."""
    return str(getattr(optimizer, "name", "") or f"a TorchOpt {type(optimizer).__name__}")


def check_complete(saved: dict[str, Any]) -> None:
    """Refuse the private state of another release, or one of which a part is missing."""
    check_version(saved)
    if missing := _NEEDED - saved.keys():
        raise CheckpointError(f"the checkpoint's private state lacks {sorted(missing)}")


def check_version(saved: dict[str, Any]) -> None:
    """Refuse the privacy record of another release."""
    if saved.get("version") != VERSION:
        raise CheckpointError(
            f"the checkpoint's privacy record has version {saved.get('version')!r}, this release "
            f"reads version {VERSION}; version 1 is that of opake_lightning 0.1, which can go on "
            "from it (its sums round in another way, so a run ends with the release it began in)"
        )
