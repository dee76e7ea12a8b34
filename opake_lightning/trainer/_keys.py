"""How a run comes to its key, and finds it again if its checkpoint does not hold it.

The live key of a run is the plan's, or one from the operating system, with a few words folded in,
one after the other: what a run starts after, a token for each fork and each copy, and, if the key
is kept apart from checkpoints, one for the run. The words are public, and checkpoints hold them. So
whoever has the plan's key can go on without the live one, and a checkpoint may leave it out: a
digest, from which no key can be computed, then tells whether the right one was found.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch.distributed as dist

from opake_lightning.distributed import world_size
from opake_lightning.errors import CheckpointError
from opake_lightning.random import RngKey, fold_in
from opake_lightning.serialization import from_state_dict, key_paths, state_dict
from opake_lightning.step import StepState

__all__ = [
    "common_token",
    "derived",
    "first_words",
    "key_of",
    "on_key_of",
    "record_of",
    "with_keys",
]

_NOISE_KEY = "noise/key"


def derived(root: RngKey, words: Iterable[str]) -> RngKey:
    """The key that ``words`` make of ``root``."""
    return reduce(fold_in, words, root)


def first_words(mechanism: Any, lineage: str, *, shared: bool = False) -> tuple[str, ...]:
    """The words of a run that begins; ``shared`` if others may begin with the same lineage.

    A key that is kept apart from checkpoints is kept for many runs, which may see different data,
    so each gets noise of its own. One that is not kept apart names a run, to be made again.
    """
    plan = getattr(mechanism, "plan", mechanism)
    own = () if plan.key_in_checkpoint and not shared else (f"run {common_token()}",)
    return (lineage, *own) if lineage else own


def common_token() -> str:
    """Something never seen before, the same on all ranks; public."""
    token = [secrets.token_hex(16)]
    if world_size() > 1:
        dist.broadcast_object_list(token)
    return token[0]


def on_key_of(
    mechanism: Any, root: RngKey, state: StepState, words: tuple[str, ...]
) -> tuple[StepState, tuple[str, ...]]:
    """``state`` and ``words`` for a fit that goes on.

    A key that is kept apart from checkpoints begins again at ``root``: an earlier fit's may be in
    one of its checkpoints, and all that follows from it by words is known to who reads that.
    """
    plan = getattr(mechanism, "plan", mechanism)
    if plan.key_in_checkpoint:
        return state, words
    words = first_words(mechanism, "")
    return replace(state, noise=replace(state.noise, key=derived(root, words))), words


def record_of(state: StepState, words: tuple[str, ...], *, keys: bool) -> dict[str, Any]:
    """What a checkpoint holds of ``state``, with or without its keys."""
    return {
        "state": state_dict(state, keys=keys),
        "words": list(words),
        "key_digest": state.noise.key.digest(),
        "holds_keys": keys,
    }


def key_of(saved: dict[str, Any], plan: Any, *, forked: bool) -> RngKey:
    """The live key of a checkpoint.

    Args:
        saved: What :func:`record_of` made.
        plan: The plan at hand; if it keeps keys out of checkpoints, the key comes from it.
        forked: The plan is another one, and goes on with a new key.

    Raises:
        CheckpointError: If there is no key, or it is another one than the checkpoint's.
    """
    values, words = saved["state"], saved["words"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CheckpointError(f"corrupt checkpoint: bad key derivation {words!r}")
    stored = plan.key_in_checkpoint and saved["holds_keys"]
    if stored:
        found = {path: value for path, value in values.items() if path == _NOISE_KEY}
        template = {"noise": {"key": RngKey(0)}}
        key = from_state_dict(template, found, strict=True)["noise"]["key"]
    elif plan.key is not None:
        key = derived(plan.key, words)
    else:
        raise CheckpointError(
            "the checkpoint holds no key, as it was saved with key_in_checkpoint=False, so the "
            "plan must name the one that it was made with: key=random.key_from_file(path)"
        )
    if key.digest() != saved["key_digest"] and (stored or not forked):
        source = "in the checkpoint" if stored else "of the plan"
        raise CheckpointError(
            f"the key {source} is not the one that the checkpoint's noise is from (digests "
            f"{key.digest()} and {saved['key_digest']}, after the same words); give the plan the "
            'right key, or set on_changed_plan="fork" to go on with a new one'
        )
    return key


def with_keys(saved: dict[str, Any], template: StepState, key: RngKey) -> dict[str, Any]:
    """The values of a checkpoint's state, with ``key`` in the places that a key was left out of."""
    # Those apart from the noise's own are replaced at each step by what follows from it.
    left_out = {} if saved["holds_keys"] else dict.fromkeys(key_paths(template), key.hex())
    return {**left_out, **saved["state"], _NOISE_KEY: key.hex()}
