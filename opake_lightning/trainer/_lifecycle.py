"""How a fit begins, and how it goes on from a checkpoint: in its segment, in another, or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from opake_lightning._tree import seat
from opake_lightning.distributed import rank, require_equal
from opake_lightning.dpsgd.clipping import AdaptiveClipState, ClipState
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.optimizers import evaluation_params
from opake_lightning.plan import PrivateMechanism
from opake_lightning.random import RngKey
from opake_lightning.serialization import from_state_dict, key_paths, state_dict
from opake_lightning.step import Step, StepState
from opake_lightning.trainer._diagnostics import counted_once
from opake_lightning.trainer._inputs import Inputs, state_digest, weights_digest
from opake_lightning.trainer._journal import Journal, read_on_rank_zero
from opake_lightning.trainer._keys import common_nonce, key_of
from opake_lightning.trainer._past import Past, carried_over, flat
from opake_lightning.trainer._rank_failure import require_same_checkpoint
from opake_lightning.trainer._record import Known, RunRecord
from opake_lightning.trainer._run import Fit, Run, write_weights

__all__ = ["begin", "begin_resumed", "begin_steps", "compared", "resume"]

_MAY_MIX = "rows_may_mix_before_the_loss"
_OF_CLIP = ("step", "clipping_norms")  # what a fit takes over of the clipping before
# What reading a value of the wrong kind raises, wherever it is found to be one.
_DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_NEEDED = {"record", "key_digest", "state", "weights", "training_weights"}


# -- a fit that begins ----------------------------------------------------------------------------


def begin(past: Past, fit: Fit, root: RngKey) -> Run:
    """Open a segment for ``fit``; what was released since the module was loaded counts from here.

    Args:
        past: What the module keeps of the fits before.
        fit: What this one is made of.
        root: The plan's key, or a new one.
    """
    if past.unreadable:
        raise CheckpointError(past.unreadable)
    if past.process != os.getpid():  # as where a process was forked: others may go on with its key
        past = past.copied()
    seat(fit.params)  # one after the other in memory, they are updated in one operation
    optimizer = _carried_optimizer(past, fit)
    mechanism = fit.mechanism
    clip = past.clip if _clipping_of(past.record.plan) == _clipping_of(mechanism.public()) else None
    record = past.record.knowing(past.since).rooted(root, apart=_is_apart(fit))
    # A run that names its key can be made again, as far as its inputs can be told. All others get a
    # key that nobody comes to again.
    again = fit.plan.key is not None and not _is_apart(fit)
    if again and not fit.inputs.rows and mechanism.private:
        again = False
        rank_zero_info(
            "opake_lightning: rows of the training data are not the same when they are read again, "
            "or are of types that cannot be compared. So the plan's key is not used as it is, and "
            "another run with it has other noise."
        )
    if isinstance(mechanism, PrivateMechanism):
        mechanism = mechanism.beginning_at(record.n_steps)
    record = _opened(
        record, "fit", "" if again else common_nonce(), fit, mechanism, optimizer, clip
    )
    step = fit.step(mechanism, record.live_key)
    noise = replace(step.noise_state, step=record.begun)
    state = StepState(_carried_clip(clip, step.clip_state), noise, optimizer)
    same = record.lineage == past.journal.lineage
    begun = Past(record, past.journal if same else Journal(record.lineage))
    begun.given = past.given
    return Run(fit, begun, mechanism, step, state)


def begin_resumed(past: Past, fit: Fit, root: RngKey) -> Run:
    """A run that a checkpoint is loaded into next, which brings its own place in the streams."""
    seat(fit.params)
    return Run.to_be_resumed(fit, past, fit.step(fit.mechanism, root))


def begin_steps(run: Run) -> None:
    """Have a segment of the weights at hand, which hooks may have changed, before the first step.

    Raises:
        CheckpointError: If they are not those of the checkpoint that is resumed, and the plan does
            not allow a fork; or if nothing was resumed.
    """
    run.require_resumed()
    if not run.mechanism.private or run.stepped:
        return
    moved = run.moved
    require_equal({"whether a hook has changed the weights before the first step": moved})
    if not moved:
        return
    fit, state = run.fit, run.state
    if run.at_first_step:
        mechanism = run.mechanism
        record = _opened(run.record, "moved", "", fit, mechanism, state.optimizer, state.clip)
    else:
        _forks(fit.plan, ["the weights (a hook changed them after the checkpoint was loaded)"])
        record, mechanism = _forked(run.record, fit, run.record.live_key, state)
    step = fit.step(mechanism, record.live_key)
    noise = replace(step.noise_state, step=record.begun)
    run.go_on(record, mechanism, step, replace(state, noise=noise))


def _forked(
    record: RunRecord, fit: Fit, key: RngKey, state: StepState
) -> tuple[RunRecord, PrivateMechanism]:
    """A segment for the steps that are left, on a key that nobody comes to again."""
    assert isinstance(fit.mechanism, PrivateMechanism)  # NonPrivate never forks
    mechanism = fit.mechanism.forked(record.ledger, left=fit.steps_left())
    record = record.rooted(fit.plan.key or key, apart=_is_apart(fit))
    nonce, optimizer = common_nonce(), state.optimizer
    return _opened(record, "fork", nonce, fit, mechanism, optimizer, state.clip), mechanism


def _opened(
    record: RunRecord, word: str, nonce: str, fit: Fit, mechanism: Any, optimizer: Any, clip: Any
) -> RunRecord:
    """A segment of ``mechanism`` from the weights and states at hand."""
    before = record.live_key
    inputs = replace(fit.inputs, plan=dict(mechanism.fingerprint()))
    carried = {path: flat(clip)[path] for path in sorted(flat(clip)) if path.startswith(_OF_CLIP)}
    digest = inputs.digest(
        before,
        sorted(mechanism.public().items()),
        weights_digest(fit.params),
        *map(state_digest, (optimizer, carried)),
    )
    opened = record.opened(word, nonce, digest)
    plan = dict(mechanism.public())
    # What was spent before is in the same ledger, and cannot be made to mean more.
    if record.released and record.plan.get(_MAY_MIX):
        plan[_MAY_MIX] = True
    return replace(opened, inputs=inputs.saved(opened.live_key), plan=plan)


def _carried_optimizer(past: Past, fit: Fit) -> Any:
    """Optimizer state for a fit after another, whose weights to train on are put back."""
    fresh = fit.optimizer.init({name: p.detach() for name, p in fit.params.items()})
    if past.optimizer is None or past.optimizer_name != fit.inputs.optimizer:
        return fresh
    carried = carried_over(fresh, past.optimizer)
    published = None if carried is fresh else evaluation_params(carried)
    if published is None:
        return carried
    if past.parked is None or past.parked.keys() != fit.params.keys():
        return fresh
    if not all(torch.equal(p, published[n].to(p)) for n, p in fit.params.items()):
        return fresh  # someone loaded others since
    write_weights(fit.params, past.parked)
    return carried


def _carried_clip(before: Any, fresh: Any) -> Any:
    """Clip state ``fresh`` with the step, and the norms, that ``before`` came to."""
    before = carried_over(fresh, before)
    if not isinstance(fresh, ClipState) or not isinstance(before, ClipState):
        return fresh
    fresh = replace(fresh, step=before.step)
    if isinstance(fresh, AdaptiveClipState) and isinstance(before, AdaptiveClipState):
        fresh = replace(fresh, clipping_norms=before.clipping_norms)
    return fresh


# -- a run that goes on ---------------------------------------------------------------------------


def resume(run: Run, saved: Any) -> None:
    """Go on where ``saved`` stopped; nothing changes, weights included, unless all is right.

    Raises:
        CheckpointError: If ``saved`` is incomplete, or of another plan or optimizer.
        PrivacyError: If ranks would go on from different checkpoints.
    """
    loading, run.loading = run.loading, None
    try:
        # Every rank has read a file of its own, which may be another one on another machine.
        require_same_checkpoint(saved)
        if saved is None:
            raise CheckpointError(
                "the checkpoint's optimizer state was not written by opake_lightning, so it "
                "holds no ledger and no key; start a new run from its weights"
            )
        if loading is not None:
            _check_weights(loading.module, run.params, loading.names)
        _resume(run, saved, [] if loading is None else loading.directories)
    except BaseException as error:
        if loading is not None:
            loading.undo()
        if isinstance(error, _DAMAGED) and not isinstance(error, PrivacyError):
            raise CheckpointError(
                f"the checkpoint's private state is damaged, or of another release: {error!r}"
            ) from error
        raise


def _resume(run: Run, saved: dict[str, Any], directories: list[Path]) -> None:
    fit, plan, template = run.fit, run.fit.plan, run.state
    private, mechanism = fit.mechanism.private, fit.mechanism
    record, key, forked = compared(saved, fit.inputs, plan, lambda: weights_digest(run.params))
    step: Step | None = None
    # Keys apart from the noise's own are replaced at each step by what follows from it.
    values = {**dict.fromkeys(key_paths(template), key.hex()), **saved["state"]}
    if _clipping_of(record.plan) != _clipping_of(mechanism.public()):
        values = _anew("clip", values, template)
    if forked:
        values = _anew("noise", values, template)
    else:
        if isinstance(mechanism, PrivateMechanism):
            mechanism = _as_saved(mechanism, record)
        step = fit.step(mechanism, key)
        # A fork has a shorter horizon than the whole fit, and its noise may remember less.
        template = replace(template, noise=step.noise_state)
    state = from_state_dict(template, values, strict=True)
    found = read_on_rank_zero(record.lineage, directories) if private else Known()
    journal = Journal(record.lineage)
    if run.record.lineage == record.lineage:
        if run.process == os.getpid():
            journal = run.journal
        # Of the weights that are given up it is no matter whether their cost was known.
        record = record.knowing(Known(run.record.released), run.since)
        if run.resumed:  # so it goes back to an earlier step of its own
            found = (found or Known()).joined(run.record.known)
    record = replace(record.knowing(found or Known(complete=False)), key=key)
    if not forked and private and record.to_repeat:
        forked = _repeats_otherwise(record, fit)
    if forked or step is None:
        record, mechanism = _forked(record, fit, key, state)
        step = fit.step(mechanism, record.live_key)
        state = replace(state, noise=replace(step.noise_state, step=record.begun))
    else:
        _require_own(state.noise, step.noise_state, record)
    if found is None:
        rank_zero_warn(
            f"opake_lightning: there is no record of released steps (opake-{record.lineage}.*."
            "steps) beside the checkpoint. Steps that were made after it was saved are not "
            "counted, so the ε that is told is a lower bound if there were any; copy the record "
            "with the checkpoint"
        )
    if private:
        _go_on_recording(journal, directories, record)
    run.journal, run.directories, run.since = journal, directories, Known()
    run.process = os.getpid()
    state = replace(state, clip=counted_once(state.clip))
    if saved["training_weights"] is not None:
        write_weights(run.params, saved["training_weights"])
    run.go_on(record, mechanism, step, state)


def compared(
    saved: Mapping[str, Any], inputs: Inputs, plan: Any, weights: Callable[[], str]
) -> tuple[RunRecord, RngKey, bool]:
    """The record in ``saved``, its key, and whether to go on with another one.

    A guarantee depends on it: who goes on with the key has the inputs that its steps were made of.

    Args:
        saved: What :meth:`Run.state_dict` made.
        inputs: What this run has.
        plan: As its user made it.
        weights: Digest of those that were loaded.

    Raises:
        CheckpointError: If inputs differ, and the plan does not allow a fork.
    """
    record = RunRecord.from_plain(saved.get("record", saved))
    if missing := _NEEDED - saved.keys():
        raise CheckpointError(f"the checkpoint's private state lacks {sorted(missing)}")
    if record.inputs is None:
        raise CheckpointError("the checkpoint's private state lacks the inputs of its run")
    forked = _forks(plan, inputs.changed_plan(record.inputs))
    key = key_of(record.key, record.path, saved["key_digest"], plan, forked=forked)
    made, counted = record.step - record.begun, replace(record, key=key).n_open
    if counted < made and not forked:  # whoever goes on would make them again for nothing
        raise CheckpointError(
            f"corrupt checkpoint: {made} steps were made on its key, and {counted} are counted"
        )
    if not forked and plan.private:
        differ = inputs.changed(record.inputs, key)
        # Weights to train on that are not the published ones are in the record itself.
        own = saved["training_weights"] is not None
        if not own and weights() != saved["weights"]:
            differ.append(
                "the weights (those in the file are not the ones that training had come to, as "
                "where a callback saved an average in their place; give the trainer that callback)"
            )
        forked = _forks(plan, differ)
    return record, key, forked


def _forks(plan: Any, differ: list[str]) -> bool:
    """Whether to go on with a new key; raises if that is needed and the plan forbids it."""
    if not differ or plan.on_changed_plan == "fork":
        return bool(differ)
    # Noise of one key and step for two gradients: their difference would have none.
    raise CheckpointError(
        "the checkpoint belongs to another plan, and going on would use its noise for other "
        f"gradients; these differ: {', '.join(differ)}. Resume with the same plan, data, "
        'optimizer and trainer limits, or set on_changed_plan="fork" to go on with a new key'
    )


def _repeats_otherwise(record: RunRecord, fit: Fit) -> bool:
    """Whether lost steps would come out otherwise, so that the run forks; raises if it may not."""
    made = record.released[record.segment]
    others = made.rounding_since(record.step - record.begun) - {fit.rounding}
    if others and fit.plan.on_changed_plan != "fork":
        raise CheckpointError(
            f"after this checkpoint, of {record.step} steps, the run made {record.to_repeat} more, "
            f"with {' and '.join(sorted(others))}, and not with {fit.rounding}, which changes last "
            "digits: to make them again would use their noise for other gradients. Resume as they "
            'were made, or from a later checkpoint, or set on_changed_plan="fork" to go on with a '
            "new key"
        )
    return bool(others)


def _as_saved(mechanism: PrivateMechanism, record: RunRecord) -> PrivateMechanism:
    """The mechanism of a checkpoint that has the same fingerprint."""
    for name in ("noise_multiplier", "planned_steps"):
        if name not in record.plan:
            raise CheckpointError(f"the checkpoint's private state lacks its {name}")
    plan = record.plan
    return mechanism.resumed(plan["noise_multiplier"], plan["planned_steps"], record.begun)


def _anew(part: str, values: dict[str, Any], fresh: StepState) -> dict[str, Any]:
    """A saved state of which one part, of another kind, is replaced by that of ``fresh``."""
    kept = {path: v for path, v in values.items() if path.partition("/")[0] != part}
    begin = {path: v for path, v in state_dict(fresh).items() if path.partition("/")[0] == part}
    return {**kept, **begin}


def _require_own(state: Any, fresh: Any, record: RunRecord) -> None:
    """Refuse noise whose past is not that of this run."""
    if state.step != record.step:
        raise CheckpointError(
            f"the record in the checkpoint counts {record.step} steps, but its noise is that of "
            f"noise/step {state.step}; the checkpoint is damaged"
        )
    for name in ("strategy", "start"):
        theirs, ours = getattr(state, name, None), getattr(fresh, name, None)
        if theirs != ours:
            raise CheckpointError(
                f"the noise in the checkpoint has {name} {theirs!r}, but the run that it describes "
                f"has {ours!r}; the checkpoint is damaged, or was made by another release"
            )


def _check_weights(module: nn.Module, params: dict[str, Tensor], loaded: frozenset[str]) -> None:
    """Refuse a checkpoint without some trained weights, which ``strict_loading=False`` lets pass.

    Raises:
        CheckpointError: If a trained weight of ``module`` is not among ``loaded``.
    """
    names: dict[int, list[str]] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            names.setdefault(value.data_ptr(), []).append(name)
    known = {name: names.get(param.data_ptr(), []) for name, param in params.items()}
    missing = [n for n, places in known.items() if places and not loaded & set(places)]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks trained weights: {', '.join(missing)}; the run would go on from "
            "others, with the checkpoint's optimizer state and ledger. Save them with it, or start "
            "a new run with load_from_checkpoint"
        )


def _go_on_recording(journal: Journal, directories: list[Path], record: RunRecord) -> None:
    """Record the coming releases where the next resume will look for them."""
    if rank():
        return
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            journal.keep_in(directory, record.known)
        except OSError:  # such as an archive that may only be read
            continue
        return
    if directories:
        rank_zero_info(
            "opake_lightning: steps cannot be recorded beside the checkpoint that is resumed, "
            "which cannot be written to; they will be from the next checkpoint on."
        )


def _is_apart(fit: Fit) -> bool:
    return not fit.plan.key_in_checkpoint


def _clipping_of(plan: Mapping[str, Any]) -> Any:
    return plan.get("clipping_norm")
