"""Where Python code can keep things: what hangs on an object, and how to see that it has changed.

A *holder* (a dictionary, list, object with slots, class, closure cell, ...) is compared by the
identity of what it holds. A *value* that changes in place (an array of NumPy, an iterator) is
compared by its content.
"""

from __future__ import annotations

import argparse
import array
import functools
import gc
import io
import itertools
import operator
import queue
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "ABSENT",
    "Held",
    "Places",
    "below",
    "content_of",
    "owners_of",
    "put",
    "set_state",
    "state_of",
]

ABSENT = object()
_Cell = types.CellType
_ATOMS = {
    int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size,
    torch.memory_format, types.BuiltinFunctionType, weakref.ref, range, slice,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, type(Ellipsis),
}  # fmt: skip
# Objects and classes of these are no place where a loss leaves things, and lead to all there is.
_FOREIGN = {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "opake_lightning", "numpy",
    "builtins", "typing", "abc", "enum", "functools", "weakref", "logging", "threading",
    "hypothesis", "_pytest", "pytest", "optree", "torchmetrics", "types", "dataclasses", "re", "os",
    "pathlib", "_thread", "transformers", "peft", "jsonargparse", "multiprocessing", "asyncio",
    "concurrent", "importlib", "inspect", "unittest", "sys", "warnings", "contextvars",
}  # fmt: skip
# Beyond these a holder is compared by its length and its ends.
_LONG, _ENDS = 100_000, 8
# Bytes of an array that are always compared; those of a longer one are if the loss reads values,
# and of one beyond the second limit, which is data, as many spread over it.
_BYTES, _MANY_BYTES = 1 << 16, 1 << 24
_MOST = 50_000  # places; who has more keeps data there
# What torch.nn.Module keeps of hooks: dictionaries that are mostly empty, seen by their lengths.
_HOOKS = (
    "_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_non_persistent_buffers_set",
)  # fmt: skip
_DROPPED = {"_parameters", "_buffers", "_modules", "__dict__", ""}
# What callables are made of.
_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.partial: ("func", "args", "keywords"),
}
_CACHED: Any = type(functools.lru_cache(len))
_ARRAYS = (np.ndarray, bytearray, array.array, memoryview)
_FILES = (io.StringIO, io.BytesIO)
_RANDOM = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


@dataclass(slots=True)
class Held:
    """A holder, its name, and what it held."""

    place: Any
    path: str
    before: dict[Any, Any]

    def changed(self) -> dict[Any, Any] | None:
        """What it holds, if that is not what it held."""
        now, before = _contents(self.place), self.before
        same = len(now) == len(before) and all(
            before.get(key, ABSENT) is value for key, value in now.items()
        )
        return None if same else now


class Places:
    """All places that can be reached from some owners.

    Args:
        owners: Modules, functions, containers and other objects.

    Attributes:
        held: The holders.
        values: Values that change in place, with their names and contents.
        random: Generators of random numbers, with their states.
        tensors: All tensors; most have no attributes, and get none.
    """

    def __init__(self, owners: Sequence[Any]) -> None:
        self._owners = owners
        self.held: list[Held] = []
        self.values: list[tuple[Any, str, Any]] = []
        self._large: list[tuple[Any, str]] = []
        self.random: list[tuple[Any, Any]] = []
        self.tensors: list[Tensor] = []
        # Those that others have taken the place of: they may be held somewhere else as well.
        self._replaced: list[weakref.ref[Tensor]] = []
        self._hooks: list[tuple[str, list[Any], int]] = []
        self._seen: set[int] = set()
        for owner in owners:
            self._visit(owner, "")
        self._sort()

    def _sort(self) -> None:
        """Most holders are dictionaries, and many are empty: they are asked of in every step."""
        self._empty = [h for h in self.held if type(h.place) in (dict, set) and not h.before]
        self._empty_places = [h.place for h in self._empty]
        self._filled = [
            (h, h.place, [*h.before], [*h.before.values()])
            for h in self.held
            if (h.before or type(h.place) not in (dict, set)) and type(h.place) is not _Cell
        ]
        self._cells = [
            (h, h.place, h.before.get("", ABSENT)) for h in self.held if type(h.place) is _Cell
        ]

    def changed(self, *, keys: bool = True) -> list[tuple[Held, dict[Any, Any]]]:
        """Holders that hold something else than they did, with what they hold.

        With ``keys=False`` one is missed that holds the same under other names.
        """
        maybe = [
            held
            for held, place, names, values in self._filled
            if type(place) is not dict
            or len(place) != len(values)
            or not all(map(operator.is_, place.values(), values))
            or (keys and not all(map(operator.is_, place, names)))
        ]
        if any(self._empty_places):
            maybe += [held for held in self._empty if held.place]
        maybe += [held for held, cell, value in self._cells if _in_cell(cell) is not value]
        return [(held, now) for held in maybe if (now := held.changed()) is not None]

    def tagged(self) -> bool:
        """Whether a tensor has got attributes, which it had none of."""
        seen = self._seen
        return any(t.__dict__ and id(t.__dict__) not in seen for t in self._all_tensors())

    def _all_tensors(self) -> Iterable[Tensor]:
        alive = [t for each in self._replaced if (t := each()) is not None]
        return itertools.chain(self.tensors, alive)

    def put_back(self) -> None:
        """What can be undone of changes in place, and of attributes that tensors have got."""
        for tensor in self._all_tensors() if self.tagged() else ():
            if id(tensor.__dict__) not in self._seen:
                vars(tensor).clear()
        for _, hooks, count in self._hooks:
            while sum(map(len, hooks)) > count:
                max(hooks, key=len).popitem()
        for value, _, content in self.values:
            whole = isinstance(content, bytes) and len(content) == getattr(value, "nbytes", -1)
            if whole and isinstance(value, np.ndarray):
                value[...] = np.frombuffer(content, value.dtype).reshape(value.shape)

    def remember_arrays(self) -> None:
        """From here on look at long arrays, too: a value that was read can be written to them."""
        self.values += [(value, path, _bytes_of(value)) for value, path in self._large]
        self._large.clear()

    def gone_on(self) -> str:
        """The name of a value that has changed in place, "" if none has."""
        for name, hooks, count in self._hooks:
            if sum(map(len, hooks)) != count:
                return name
        # Memory that is told by its bytes may be long, so no others are copied.
        return next(
            (
                path
                for value, path, old in self.values
                if (_bytes_of(value) if isinstance(old, bytes) else content_of(value)) != old
            ),
            "",
        )

    def renewed(self, owners: Sequence[Any]) -> Places:
        """The places as they are now, of the same owners or of others."""
        same = len(owners) == len(self._owners) and all(map(operator.is_, owners, self._owners))
        changed = self.changed(keys=False) if same else []
        gone: list[Any] = []
        come: list[Any] = []
        for held, now in changed:
            before = held.before
            gone += [v for k, v in before.items() if now.get(k, ABSENT) is not v]
            come += [v for k, v in now.items() if before.get(k, ABSENT) is not v]
        # What hangs on a new object has to be found; of numbers, also as tensors, nothing does.
        if not (same and all(map(_is_bare, gone)) and all(map(_is_bare, come))) or self.gone_on():
            return Places(owners)
        for held, now in changed:
            held.before = now
        if changed:
            self._sort()
            self._exchange(gone, come)
        self.random = [(generator, state_of(generator)) for generator, _ in self.random]
        return self

    def _exchange(self, gone: list[Any], come: list[Any]) -> None:
        """Go on with other bare tensors, such as those of logged metrics, of every step."""
        left = {id(value) for value in gone if isinstance(value, Tensor)}
        new = {id(value): value for value in come if isinstance(value, Tensor)}
        alive = [each for each in self._replaced if each() is not None]
        self._replaced = alive + [weakref.ref(t) for t in self.tensors if id(t) in left]
        kept = [t for t in self.tensors if id(t) not in left and id(t) not in new]
        self.tensors = [*kept, *new.values()]

    def _visit(self, value: Any, path: str) -> None:
        kind = cast("Any", type(value))
        if kind in _ATOMS or id(value) in self._seen or len(self.held) > _MOST:
            return
        if isinstance(value, torch.jit.ScriptModule):
            return  # its methods are new objects each time that they are asked for
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append(value)
            if value.__dict__:
                self._seen.add(id(value.__dict__))
                self._hold(value.__dict__, path)
        elif isinstance(value, (dict, list, set, deque, _Cell)):
            self._hold(value, path)
        elif isinstance(value, (tuple, frozenset)):
            for key, child in enumerate(cast("Iterable[Any]", value)):
                self._visit(child, below(path, key))
        elif isinstance(value, _ARRAYS) and np.asarray(value).nbytes > _BYTES:
            self._large.append((value, path))
        elif isinstance(value, (*_ARRAYS, *_FILES, queue.SimpleQueue)) or (
            isinstance(value, Iterator) and not hasattr(value, "__dict__")
        ):
            self.values.append((value, path, content_of(value)))
        elif isinstance(value, _RANDOM):
            self.random.append((value, state_of(value)))
        else:
            self._visit_object(value, kind, path)

    def _visit_object(self, value: Any, kind: Any, path: str) -> None:
        if isinstance(value, types.FunctionType):
            self._visit_function(value, path)
        elif isinstance(value, tuple(_PARTS)):
            for name in next(names for of, names in _PARTS.items() if isinstance(value, of)):
                self._visit(getattr(value, name), path)
        elif isinstance(value, _CACHED):
            self.values.append((value, path, content_of(value)))
            self._visit(value.__wrapped__, path)
        elif isinstance(value, type):
            if not _is_foreign(value.__module__):
                self._hold(value, path or value.__name__)
        elif isinstance(
            value, (nn.Module, types.SimpleNamespace, argparse.Namespace, threading.local)
        ) or not _leads_everywhere(kind.__module__):
            path = path or kind.__name__
            for base in kind.__mro__:
                if not _is_foreign(base.__module__):
                    self._visit(base, base.__name__)
            if isinstance(value, nn.Module):
                hooks = [value.__dict__[name] for name in _HOOKS if name in value.__dict__]
                self._hooks.append((f"the hooks of {path}", hooks, sum(map(len, hooks))))
                for name, child in cast("Any", value)._modules.items():  # all of them, however many
                    self._visit(child, below(path, name))
            elif any(vars(base).get("__slots__") for base in kind.__mro__):
                self._hold(value, path)
            if hasattr(value, "__dict__"):
                self._visit(vars(value), path)

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        if _is_foreign(function.__module__ or ""):
            return
        for cell in function.__closure__ or ():
            self._visit(cell, "")
        for child in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            self._visit(child, path)
        # What it and its neighbours may rebind by `global`, and the containers among it.
        around = function.__globals__
        if id(around) not in self._seen:
            self._seen.add(id(around))
            before = _contents(around)
            self.held.append(Held(around, around.get("__name__", ""), before))
            for key, child in before.items():
                if isinstance(child, (dict, list, set, deque, *_ARRAYS)) and key[:2] != "__":
                    self._visit(child, str(key))

    def _hold(self, value: Any, path: str) -> None:
        before = _contents(value)
        self.held.append(Held(value, path, before))
        for key, child in before.items():
            if type(child) not in _ATOMS and key not in _HOOKS:
                self._visit(child, below(path, key))


def _is_bare(value: Any) -> bool:
    """Whether nothing hangs on ``value``: a number, or a tensor without attributes."""
    return type(value) in _ATOMS or (type(value) is Tensor and not value.__dict__)


def owners_of(loss_fn: Any) -> list[Any]:
    """What a loss function may write to: its ``owners`` if it names them, else itself."""
    return list(loss_fn.owners) if hasattr(loss_fn, "owners") else [loss_fn]


def below(path: str, key: Any) -> str:
    """The name of what is at ``key`` of a place."""
    if isinstance(key, str):
        return path if key in _DROPPED else f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def content_of(value: Any) -> Any:
    """A value that differs when ``value`` was written to, or has gone on."""
    if isinstance(value, types.GeneratorType):
        frame = cast("Any", value).gi_frame
        if frame is None:
            return None
        local = frame.f_locals.items()
        return frame.f_lasti, [(k, v if type(v) in _ATOMS else id(v)) for k, v in local]
    if isinstance(value, _CACHED):
        return value.cache_info().misses
    if isinstance(value, _FILES):
        return None if value.closed else value.getvalue()
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    if not isinstance(value, _ARRAYS):
        inside = [value, *gc.get_referents(value)]  # of a cycle, a zip: iterators
        return repr(value), [operator.length_hint(item, -1) for item in inside]
    return _bytes_of(value)


def _bytes_of(value: Any) -> Any:
    flat = np.asarray(value).reshape(-1)
    if flat.nbytes > _MANY_BYTES:
        flat = flat[:: len(flat) >> 16]
    return list(map(id, flat)) if flat.dtype == object else flat.tobytes()


def state_of(generator: Any) -> Any:
    """The state of a generator of random numbers."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    name, numbers, *rest = generator.get_state()
    return name, numbers.tobytes(), rest


def set_state(generator: Any, state: Any) -> None:
    """Undo what was drawn after ``state``."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        name, numbers, rest = state
        generator.set_state((name, np.frombuffer(numbers, dtype=np.uint32), *rest))
    else:
        generator.set_state(state)


def _contents(place: Any) -> dict[Any, Any]:
    """What a holder holds, by key."""
    if isinstance(place, dict):
        held = cast("dict[Any, Any]", place)
        return dict(held) if len(held) <= _LONG else _ends(list(held.items()), len(held))
    if isinstance(place, (list, deque)):
        items = list(enumerate(cast("Iterable[Any]", place)))
        return dict(items) if len(items) <= _LONG else _ends(items, len(items))
    if isinstance(place, set):
        return {id(value): value for value in cast("set[Any]", place)}
    if isinstance(place, _Cell):
        value = _in_cell(place)
        return {} if value is ABSENT else {"": value}
    if isinstance(place, type):
        return dict(vars(place))
    names = [n for base in type(place).__mro__ for n in _slots(base)]
    return {name: getattr(place, name) for name in names if hasattr(place, name)}


def _in_cell(cell: _Cell) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return ABSENT


def _slots(base: type) -> Iterable[str]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _ends(items: list[tuple[Any, Any]], length: int) -> dict[Any, Any]:
    return {**dict(items[:_ENDS]), **dict(items[-_ENDS:]), _Length(length): None}


class _Length(int):
    """How long a holder is that was not looked at as a whole."""


def put(place: Any, held: dict[Any, Any]) -> None:
    """Give a holder back what it held; of a long one, its length."""
    length = next((key for key in held if isinstance(key, _Length)), None)
    if length is not None:
        if isinstance(place, (list, deque)):
            while len(cast("list[Any]", place)) > length:
                cast("list[Any]", place).pop()
        elif isinstance(place, dict):
            for key in list(cast("dict[Any, Any]", place))[length:]:
                del place[key]
    elif isinstance(place, dict):
        place.clear()
        place.update(held)
    elif isinstance(place, (list, deque)):
        cast("list[Any]", place).clear()
        cast("list[Any]", place).extend(held.values())
    elif isinstance(place, set):
        place.clear()
        place.update(held.values())
    elif isinstance(place, _Cell):
        if held:
            place.cell_contents = held[""]
    else:
        now = _contents(place)
        for name in now.keys() - held.keys():
            delattr(place, name)
        for name, value in held.items():
            if now.get(name, ABSENT) is not value:
                setattr(place, name, value)


def _leads_everywhere(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def _is_foreign(module: str) -> bool:
    root = module.partition(".")[0]
    return _leads_everywhere(module) or (root in sys.stdlib_module_names and root != "__main__")
