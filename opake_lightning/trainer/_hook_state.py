"""What collate functions and batch hooks leave behind.

One that keeps something of a batch (its mean, a queue of rows) could hand it to the loss of every
row, past the batch itself. So a trial run also sees what has changed in all places that the
function can write to, and puts everything back: attributes, containers, buffers, and generators of
random numbers of its own. Iterators, and arrays and other tensors written to in place, are seen and
not put back.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opake_lightning._places import (
    ABSENT,
    Places,
    below,
    content_of,
    put,
    set_state,
    state_of,
)

__all__ = ["HookState", "same", "version_of"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class HookState:
    """What could be written to, as it was when this was made.

    Args:
        owners: Modules, functions and other objects.
    """

    def __init__(self, owners: list[Any]) -> None:
        self._places = Places(owners)
        self._tensors = [
            (value, _name(held.path, key), version_of(value))
            for held in self._places.held
            for key, value in held.before.items()
            if isinstance(value, Tensor)
        ]
        self._buffers = [
            (buffer, buffer.clone(), version_of(buffer))
            for owner in owners
            if isinstance(owner, nn.Module)
            for buffer in owner.buffers()
        ]

    def changes(self) -> dict[str, Any]:
        """Copies of what differs now, by name."""
        found: dict[str, Any] = {}
        for held, now in self._places.changed():
            for key in now.keys() | held.before.keys():
                value = now.get(key, ABSENT)
                if value is not held.before.get(key, ABSENT):
                    found[_name(held.path, key)] = _content(value)
        for tensor, name, version in self._tensors:
            if version_of(tensor) != version:
                found[name] = tensor.detach().clone()
        for value, name, content in self._places.values:
            if (now := content_of(value)) != content:
                found[name] = now
        return found

    def generators(self) -> list[Any]:
        """Where generators of random numbers are that belong to what could be written to."""
        states = [state_of(generator) for generator, _ in self._places.random]
        return [_content(state) for state in states]

    def put_back(self) -> None:
        """Let everything be as it was."""
        for held, _ in self._places.changed():
            put(held.place, held.before)
        for generator, state in self._places.random:
            set_state(generator, state)
        with torch.no_grad():
            for buffer, value, version in self._buffers:
                if version_of(buffer) != version:
                    buffer.copy_(value)


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` has been written to; tensors made for inference do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def same(a: Any, b: Any) -> bool:
    """Whether two things that a :class:`HookState` told are the same, and all NaN are the same."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _name(path: str, key: Any) -> str:
    name = below(path, key)
    return name if name[:1].isidentifier() else f"a variable around it {name}".rstrip()


def _content(value: Any, depth: int = 4) -> Any:
    """A copy that compares by content; of an object without any, its type."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, _PLAIN):
        return value
    if depth and isinstance(value, dict):
        return {key: _content(child, depth - 1) for key, child in value.items()}
    if depth and isinstance(value, (list, tuple, deque, set)):
        return [_content(child, depth - 1) for child in value]
    if depth and hasattr(value, "__dict__") and not isinstance(value, type):
        return _content(vars(value), depth - 1)
    return type(value)
