"""Batches as trees: any nesting of containers, taken apart into leaves and put together again.

Containers are tuple, list, deque, dict and their subclasses (namedtuple, OrderedDict, defaultdict),
every other Mapping (UserDict, a tokenizer's BatchEncoding), dataclasses, and the classes that are
registered with optree in :data:`~opake_lightning._tree.BATCH_NAMESPACE`. Anything else is a leaf;
None is neither, it stays where it is.

An object is taken apart by its *state*: what its built-in base class stores, its slots, and its
``__dict__``. So a new one needs no constructor, which may refuse other shapes; it shares nothing
mutable with the given one; and no attribute beside the content (a BatchEncoding's encodings of all
texts) gets past whoever replaces the leaves.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MemberDescriptorType
from typing import Any, TypeAlias, cast

import optree
import torch
from torch import Tensor

from opake_lightning._tree import BATCH_NAMESPACE

__all__ = ["Parts", "take_apart"]

# Takes the leaves that belong to it, and returns a new container with them. That of a leaf is next.
_Build: TypeAlias = Callable[[Iterator[Any]], Any]

# Never containers; looked for first because there may be many. A Size is a tuple of integers only.
_LEAVES = frozenset({str, bytes, int, float, bool, torch.Size})

# Containers that store things outside of attributes, each before what it is a subclass of.
_BUILT_IN: tuple[Any, ...] = (tuple, list, deque, OrderedDict, defaultdict, dict)


@dataclass(frozen=True, slots=True)
class Parts:
    """The leaves of some trees, and how to put the trees together.

    Attributes:
        leaves: Tensors, and what stands in for everything else.
        places: Where each of them is, as Python code: ``batch['ids'][0]``.
    """

    leaves: list[Any]
    places: list[str]
    _builds: tuple[_Build, ...]

    def assemble(self, leaves: Iterable[Any]) -> tuple[Any, ...]:
        """New trees with other leaves, as many as there were."""
        rest = iter(leaves)
        return tuple([build(rest) for build in self._builds])


def take_apart(trees: tuple[Any, ...], stand_in: Callable[[str], Any] | None = None) -> Parts:
    """Take ``trees`` apart, which are called ``batch``, or ``batch[0]``, ... if there are several.

    Args:
        trees: Any containers.
        stand_in: From the place of a leaf that is not a tensor to what takes its place; None keeps
            it.

    Raises:
        ValueError: If a container contains itself.
    """
    walk = _Walk(stand_in)
    places = ["batch"] if len(trees) == 1 else [f"batch[{i}]" for i in range(len(trees))]
    try:
        builds = tuple([walk(tree, place) for tree, place in zip(trees, places, strict=True)])
    except RecursionError:
        raise ValueError(
            "the batch contains itself, or is nested too deep; return plain containers of tensors "
            "from the collate_fn"
        ) from None
    return Parts(walk.leaves, walk.places, builds)


class _Walk:
    def __init__(self, stand_in: Callable[[str], Any] | None) -> None:
        self._stand_in = stand_in
        self.leaves: list[Any] = []
        self.places: list[str] = []

    def __call__(self, node: Any, place: str) -> _Build:
        kind = cast("type[Any]", type(node))
        if isinstance(node, Tensor):
            return self._leaf(node, place)
        if node is None:
            return _none
        # Most batches end here; the other branches would do the same, slower.
        if kind is tuple or kind is list:
            items = [self(item, f"{place}[{i}]") for i, item in enumerate(node)]
            return lambda leaves: cast("Any", kind([build(leaves) for build in items]))
        if kind is dict:
            values = {key: self(value, f"{place}[{key!r}]") for key, value in node.items()}
            return lambda leaves: {key: build(leaves) for key, build in values.items()}
        if kind not in _LEAVES:
            if _is_registered(kind):
                return self._registered(node, place)
            if isinstance(node, Mapping):
                return self._mapping(cast("Mapping[Any, Any]", node), place)
            if isinstance(node, (tuple, list, deque)) or hasattr(kind, "__dataclass_fields__"):
                return self._object(node, place)
        return self._leaf(node if self._stand_in is None else self._stand_in(place), place)

    def _leaf(self, leaf: Any, place: str) -> _Build:
        self.leaves.append(leaf)
        self.places.append(place)
        return next

    def _registered(self, node: Any, place: str) -> _Build:
        children, metadata, entries, unflatten = optree.tree_flatten_one_level(
            node, namespace=BATCH_NAMESPACE
        )
        builds = [
            self(child, f"{place}[{entry!r}]")
            for child, entry in zip(children, entries, strict=True)
        ]
        return lambda leaves: unflatten(
            cast("Any", metadata), tuple([build(leaves) for build in builds])
        )

    def _mapping(self, node: Mapping[Any, Any], place: str) -> _Build:
        keys, start = list(node), len(self.leaves)
        try:
            build = self._object(node, place)
            new = build(iter(self.leaves[start:]))
            _ = [new[key] for key in keys]
            if list(new) == keys:
                return build
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - of the class's own methods, which may raise anything
            pass
        # Its methods need something of its state that was replaced, or its state is out of Python's
        # reach; the items are all that a Mapping promises to have.
        del self.leaves[start:], self.places[start:]
        return self({key: node[key] for key in keys}, place)

    def _object(self, node: Any, place: str) -> _Build:
        stored = self._stored(node, place)
        namespace = _namespace(node)
        state = [
            (put, self(value, _place_of(name, value, node, place)))
            for name, value, put in _state(node, namespace)
        ]
        # A class of dicts whose attributes are its items.
        itself = namespace is node

        def build(leaves: Iterator[Any]) -> Any:
            new = stored(leaves)
            for put, child in state:
                put(new, child(leaves))
            if itself:
                object.__setattr__(new, "__dict__", new)
            return new

        return build

    def _stored(self, node: Any, place: str) -> _Build:
        """What the built-in class below the node's stores, in an object without other state."""
        kind = cast("type[Any]", type(node))
        base = next((base for base in _BUILT_IN if isinstance(node, base)), None)
        if base is None:
            return lambda leaves: object.__new__(kind)
        # Methods of the built-in class throughout: those of a subclass may do something else.
        if issubclass(base, dict):
            items = [(key, self(v, f"{place}[{key!r}]")) for key, v in base.items(node)]
        else:
            names = [f".{field}" for field in getattr(kind, "_fields", ())]
            names += [f"[{i}]" for i in range(len(names), base.__len__(node))]
            values = zip(names, base.__iter__(node), strict=True)
            items = [(name, self(v, place + name)) for name, v in values]
        if base is tuple:
            # What torch.max returns looks like a namedtuple, and is not for tuple to make.
            make = kind if optree.is_structseq_class(kind) else partial(tuple.__new__, kind)
            return lambda leaves: make([build(leaves) for _, build in items])
        options: tuple[Any, ...] = ()
        if isinstance(node, deque):
            options = ((), node.maxlen)
        elif base is defaultdict:
            options = (node.default_factory,)

        def build(leaves: Iterator[Any]) -> Any:
            new = base.__new__(kind)
            base.__init__(new, *options)
            for key, child in items:
                if issubclass(base, dict):
                    base.__setitem__(new, key, child(leaves))
                else:
                    base.append(new, child(leaves))
            return new

        return build


def _none(leaves: Iterator[Any]) -> None:
    del leaves


def _is_registered(kind: type[Any]) -> bool:
    if kind in (
        OrderedDict,
        defaultdict,
        deque,
    ):  # with optree itself, whose older versions sort keys
        return False
    entry = cast("Any", optree.register_pytree_node).get(kind, namespace=BATCH_NAMESPACE)
    return entry is not None and entry.type is kind


def _place_of(name: str, value: Any, node: Any, place: str) -> str:
    """The place of an attribute; one that holds the items of a Mapping has that of the Mapping."""
    holds_items = (
        isinstance(node, Mapping)
        and isinstance(value, Mapping)
        and value.keys() == cast("Mapping[Any, Any]", node).keys()
    )
    return place if holds_items else f"{place}.{name}"


def _state(
    node: Any, namespace: dict[str, Any]
) -> Iterator[tuple[str, Any, Callable[[Any, Any], None]]]:
    """Name, value and how to set it, of every attribute of the object itself."""
    for slot in _slots(type(node)):
        try:
            value = slot.__get__(node)
        except AttributeError:  # never set
            continue
        yield slot.__name__, value, slot.__set__
    if namespace is not node:
        for name, value in list(namespace.items()):
            yield name, value, partial(_set, name)


@lru_cache(maxsize=64)
def _slots(kind: type[Any]) -> tuple[MemberDescriptorType, ...]:
    return tuple(
        value
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for value in vars(base).values()
        if isinstance(value, MemberDescriptorType)
    )


def _namespace(node: Any) -> dict[str, Any]:
    # Not by getattr: a class may look up in its items what it is asked for, and they are not there
    # before the object is complete.
    try:
        return object.__getattribute__(node, "__dict__")
    except AttributeError:
        return {}


def _set(name: str, node: Any, value: Any) -> None:
    # Past frozen, properties and a __setattr__ of the class.
    _namespace(node)[name] = value
