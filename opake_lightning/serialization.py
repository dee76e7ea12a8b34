"""States as flat dictionaries of plain values, and back.

A state is any nesting of dataclasses and pytree containers with tensors, numbers, strings, ``None``
and keys at the bottom. Its dictionary has one entry for each of these, under the path that leads
there (``"second_moment/square/layer.weight"``), and loads with ``torch.load(weights_only=True)``.

A path that is missing from the dictionary keeps the value of the template, so that a state which
has gained a field can be restored from an older checkpoint. Two things are never filled in: keys
(:class:`~opake_lightning.random.RngKey`), and everything inside a dataclass that declares
``privacy_critical: ClassVar[bool] = True``. Noise that starts over, or a counter that does, would
release the same noise twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import optree
from torch import Tensor

from opake_lightning.errors import CheckpointError
from opake_lightning.random import RngKey

__all__ = ["Plain", "from_state_dict", "key_paths", "state_dict"]

Plain: TypeAlias = Tensor | int | float | bool | str | None

# Exactly these: a subclass such as numpy.float64 does not load under weights_only.
_PLAIN = (int, float, bool, str, type(None))


def state_dict(state: Any, *, keys: bool = True) -> dict[str, Plain]:
    """Flatten ``state`` into a dictionary from path to value.

    Tensors are copied, so the dictionary does not change when training goes on in place, and saving
    it stores their elements only, not the larger tensor they may be views of.

    Args:
        state: Nested dataclasses and pytree containers of tensors and plain values.
        keys: False leaves every key out, to be kept elsewhere. What a mechanism remembers of its
            noise is as secret as the key, and stays.

    Returns:
        A flat dictionary. A key appears as 32 hexadecimal digits: whoever reads the dictionary of a
        noise state can subtract its noise.

    Raises:
        TypeError: If a value is of a type that has no plain form.

    >>> state_dict({"lr": 0.1, "moments": (1, None)})
    {'lr': 0.1, 'moments/0': 1, 'moments/1': None}
    """
    flat: dict[str, Plain] = {}
    for path, leaf, _ in _leaves(state, "", critical=False):
        if path in flat:
            raise ValueError(f"two parts of the state have the path {path!r}; rename one of them")
        if isinstance(leaf, RngKey):
            if keys:
                flat[path] = leaf.hex()
        elif isinstance(leaf, Tensor):
            flat[path] = leaf.detach().clone()
        elif type(leaf) in _PLAIN:
            flat[path] = cast("Plain", leaf)
        else:
            raise TypeError(
                f"{path!r} is a {type(leaf).__name__}: {leaf!r}; a state may hold tensors, "
                "numbers, strings, None and keys, in dataclasses and pytree containers"
            )
    return flat


def key_paths(state: Any) -> list[str]:
    """Where the keys of ``state`` are in its dictionary.

    >>> from opake_lightning.random import key
    >>> key_paths({"noise": {"key": key(7), "step": 0}})
    ['noise/key']
    """
    leaves = _leaves(state, "", critical=False)
    return [path for path, leaf, _ in leaves if isinstance(leaf, RngKey)]


def from_state_dict(template: Any, flat: Mapping[str, Plain], *, strict: bool = False) -> Any:
    """Rebuild a state like ``template`` with the values of ``flat``.

    Args:
        template: A state of the same construction, such as a fresh ``init(params)``. It is not
            changed. Loaded tensors take its dtypes and devices.
        flat: What :func:`state_dict` returned. Its tensors are copied.
        strict: Refuse a ``flat`` that lacks any path; otherwise a missing path keeps the template's
            value, unless it is critical for privacy (see the module's description).

    Returns:
        The restored state.

    Raises:
        CheckpointError: If a path that must be there is missing, a path is unknown, or a value has
            another shape or type than the template's.

    >>> from_state_dict({"step": 0, "new": 5}, {"step": 7})
    {'step': 7, 'new': 5}
    """
    known = {path: critical for path, _, critical in _leaves(template, "", critical=False)}
    _refuse("does not know", [path for path in flat if path not in known])
    _refuse(
        "lacks",
        [path for path, critical in known.items() if path not in flat and (strict or critical)],
    )
    return _rebuild(template, "", flat)


def _refuse(what: str, paths: list[str]) -> None:
    if paths:
        subject = "the template" if what == "does not know" else "the saved state"
        raise CheckpointError(
            f"{subject} {what} {', '.join(map(repr, paths))}; restore with the optimizer, plan and "
            "model that the state was saved with"
        )


def _leaves(node: Any, path: str, *, critical: bool) -> list[tuple[str, Any, bool]]:
    """(path, leaf, whether it is critical for privacy) of everything below ``node``."""
    critical = critical or bool(getattr(type(node), "privacy_critical", False))
    children = _children(node)
    if children is None:
        return [(path, node, critical or isinstance(node, RngKey))]
    return [
        leaf
        for name, child in children.items()
        for leaf in _leaves(child, _join(path, name), critical=critical)
    ]


def _children(node: Any) -> dict[Any, Any] | None:
    """What lies one level below ``node``, by name; None for a leaf."""
    if isinstance(node, RngKey):
        return None
    if _is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    paths, children, treespec = optree.tree_flatten_with_path(
        node, is_leaf=lambda other: other is not node, none_is_leaf=True
    )
    if optree.treespec_is_leaf(treespec):
        return None
    names = [path[0] for path in paths]
    if optree.is_namedtuple(node):
        names = list(node._fields)
    return dict(zip(names, children, strict=True))


def _rebuild(node: Any, path: str, flat: Mapping[str, Plain]) -> Any:
    children = _children(node)
    if children is None:
        return _restored(node, flat[path], path) if path in flat else node
    new = {name: _rebuild(child, _join(path, name), flat) for name, child in children.items()}
    if _is_dataclass(node):
        return dataclasses.replace(node, **new)
    treespec = optree.tree_structure(
        node, is_leaf=lambda other: other is not node, none_is_leaf=True
    )
    return optree.tree_unflatten(treespec, list(new.values()))


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _join(path: str, name: object) -> str:
    # "/" separates, so one inside a name is written "~1", and "~" itself "~0" (as in RFC 6901).
    escaped = str(name).replace("~", "~0").replace("/", "~1")
    return f"{path}/{escaped}" if path else escaped


def _restored(like: Any, value: Any, path: str) -> Any:
    """``value`` as what ``like`` is."""
    if isinstance(like, Tensor) and isinstance(value, Tensor):
        if like.shape != value.shape:
            raise CheckpointError(
                f"{path!r} has shape {tuple(value.shape)} in the saved state, but the template has "
                f"{tuple(like.shape)}; restore with the model that the state was saved with"
            )
        return value.detach().to(like.device, like.dtype, copy=True)
    if isinstance(like, RngKey) and isinstance(value, str):
        try:
            return RngKey.from_hex(value)
        except ValueError as error:
            raise CheckpointError(f"{path!r} is not a key; the saved state is damaged") from error
    if like is None:
        return value.detach().clone() if isinstance(value, Tensor) else value
    if type(like) is type(value):
        return value
    if type(like) is float and type(value) is int:
        return float(value)
    raise CheckpointError(
        f"{path!r} is a {type(value).__name__} in the saved state, but the template has a "
        f"{type(like).__name__}; restore with the settings that the state was saved with"
    )
