"""How a run comes to its keys, and finds one again that its checkpoint does not hold.

A key is derived from the one before it by folding in one public *entry*,
``word:nonce:digest of the inputs``; the row of entries from the root is the *key derivation path*.
The root is the plan's key, or one from the operating system. So other inputs come to another key,
on any machine, and whoever has the root can derive the key of a checkpoint that does not hold it: a
digest, from which no key can be computed, then tells whether the right one was found.

The nonce keeps apart what a digest of inputs cannot. It is empty where a run shall be made again:
if the plan names its key, and does not keep it apart from checkpoints.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import reduce
from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from opake_lightning.distributed import world_size
from opake_lightning.errors import CheckpointError
from opake_lightning.random import RngKey, fold_in

__all__ = ["common_nonce", "derive", "digest_of", "entry_of", "key_of"]


def digest_of(*parts: object) -> str:
    """32 hexadecimal digits of plain values."""
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def entry_of(word: str, nonce: str = "", inputs: str = "") -> str:
    """One entry of a key derivation path."""
    return f"{word}:{nonce}:{inputs}"


def derive(root: RngKey, path: Iterable[str]) -> RngKey:
    """The key at the end of a key derivation path."""
    return reduce(fold_in, path, root)


def common_nonce() -> str:
    """Something never seen before, the same on all ranks; public."""
    nonce = [secrets.token_hex(16)]
    if world_size() > 1:
        dist.broadcast_object_list(nonce)
    return nonce[0]


def key_of(
    stored: RngKey | None, path: tuple[str, ...], digest: str, plan: Any, *, forked: bool
) -> RngKey:
    """The live key of a checkpoint.

    Args:
        stored: The key that the checkpoint holds, if it holds one.
        path: Its key derivation path.
        digest: What :meth:`RngKey.digest` told of the key that its noise is from.
        plan: The plan at hand; if it keeps keys out of checkpoints, the key comes from it.
        forked: The plan is another one, and goes on with a new key.

    Raises:
        CheckpointError: If there is no key, or it is another one than the checkpoint's.
    """
    stored = stored if plan.key_in_checkpoint else None
    if stored is not None:
        key = stored
    elif plan.key is not None:
        key = derive(plan.key, path)
    else:
        raise CheckpointError(
            "the checkpoint holds no key, as it was saved with key_in_checkpoint=False, so the "
            "plan must name the one that it was made with: key=random.key_from_file(path)"
        )
    if key.digest() != digest and (stored is not None or not forked):
        source = "of the plan" if stored is None else "in the checkpoint"
        raise CheckpointError(
            f"the key {source} is not the one that the checkpoint's noise is from (digests "
            f"{key.digest()} and {digest}, after the same key derivation); give the plan the right "
            'key, or set on_changed_plan="fork" to go on with a new one'
        )
    return key
