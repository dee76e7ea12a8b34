"""Every kind of container that a batch may be."""

from __future__ import annotations

import gc
import types
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from opake_lightning._tree import BATCH_NAMESPACE


class Text:
    """Something that is not a tensor, and must not reach a loss."""


class Pair(NamedTuple):
    x: Any
    rest: Any


class CheckedPair(Pair):
    """Whose constructor refuses other numbers of rows."""

    def __new__(cls, x: Tensor, rest: Any) -> CheckedPair:
        assert len(x) == 2
        return super().__new__(cls, x, rest)


class Registered:
    """A container that only optree knows."""

    def __init__(self, x: Tensor, rest: Any) -> None:
        self.x, self.rest = x, rest


optree.register_pytree_node(
    Registered,
    lambda r: ((r.x, r.rest), None),
    lambda _, children: Registered(*children),
    namespace=BATCH_NAMESPACE,
)


@dataclass
class Record:
    x: Tensor
    rest: Any
    made: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert len(self.x) == 2
        self.made = [self.rest]
        self.undeclared = {"text": self.rest}


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    rest: Any

    def __new__(cls, x: Tensor, rest: Any) -> Frozen:
        del x, rest
        return super().__new__(cls)

    def __post_init__(self) -> None:
        assert len(self.x) == 2


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    rest: Any

    def __post_init__(self) -> None:
        assert len(self.x) == 2


class AttributeDict(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class DotDict(dict[str, Any]):
    __slots__ = ()
    __getattr__ = dict.__getitem__


class LabelledDict(OrderedDict[str, Any]):
    """With an attribute beside its items."""

    label: Any

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("made by its constructor only")


class LabelledList(list[Any]):
    label: Any


class Encoding(UserDict[str, Any]):
    """As tokenizers return: items that are attributes, too, and state beside them."""

    def __init__(self, items: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(items)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class ReadOnly(Mapping[str, Any]):
    """A Mapping of the user's, whose items cannot be set."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Renamed(ReadOnly):
    """A Mapping that cannot look up without the strings it holds."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(items)
        self._names = {key.upper(): key for key in items}

    def __getitem__(self, key: str) -> Any:
        return self._items[self._names[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


class AnyCase(ReadOnly):
    """A Mapping that cannot tell its keys without the strings it holds."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__({key.lower(): (key, value) for key, value in items.items()})

    def __getitem__(self, key: str) -> Any:
        return self._items[key.lower()][1]

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self._items.values())


@dataclass(frozen=True, slots=True)
class Case:
    """A batch with one tensor at least and one :class:`Text`.

    Attributes:
        make: The batch around a tensor.
        get: The tensor, from the batch.
        becomes: The class of the batch that a loss gets, if it is another.
    """

    make: Callable[[Tensor], Any]
    get: Callable[[Any], Tensor] = lambda batch: batch["x"]
    becomes: type | None = None


def _labelled_dict(x: Tensor) -> LabelledDict:
    made = OrderedDict.__new__(LabelledDict)
    OrderedDict.__setitem__(made, "x", x)
    made.label = Text()
    return made


def _labelled_list(x: Tensor) -> LabelledList:
    made = LabelledList([x])
    made.label = Text()
    return made


def _batch_encoding(x: Tensor) -> Any:
    made = pytest.importorskip("transformers").BatchEncoding({"x": x, "text": [Text()]})
    made._encodings = [Text()]  # of the tokenizer: all tokens, as words
    return made


def _model_output(x: Tensor) -> Any:
    generic = pytest.importorskip("transformers.utils").ModelOutput

    @dataclass
    class Output(generic):
        x: Any = None
        text: Any = None

    return Output(x, Text())


def _x(batch: Any) -> Tensor:
    return batch.x


CASES: dict[str, Case] = {
    "tuple": Case(lambda x: (x, Text()), lambda b: b[0]),
    "list": Case(lambda x: [Text(), None, x], lambda b: b[2]),
    "dict": Case(lambda x: {"x": x, "text": ["a", Text()], "n": 3}),
    "ordered dict": Case(lambda x: OrderedDict(text=Text(), x=x)),
    "default dict": Case(lambda x: defaultdict(list, x=x, text=Text())),
    "deque": Case(lambda x: deque([x, Text()], maxlen=2), lambda b: b[0]),
    "namedtuple": Case(lambda x: Pair(x, Text()), _x),
    "checked namedtuple": Case(lambda x: CheckedPair(x, Text()), _x),
    "structseq": Case(
        lambda x: (torch.max(torch.stack([x, x - 1]), 0), Text()), lambda b: b[0].values
    ),
    "registered": Case(lambda x: Registered(x, Text()), _x),
    "dataclass": Case(lambda x: Record(x, Text()), _x),
    "frozen dataclass": Case(lambda x: Frozen(x, Text()), _x),
    "slots dataclass": Case(lambda x: Slotted(x, Text()), _x),
    "attribute dict": Case(lambda x: AttributeDict(x=x, text=Text()), _x),
    "dot dict": Case(lambda x: DotDict(x=x, text=Text()), _x),
    "dict subclass": Case(_labelled_dict),
    "list subclass": Case(_labelled_list, lambda b: b[0]),
    "UserDict": Case(lambda x: UserDict(x=x, text=Text())),
    "UserDict subclass": Case(lambda x: Encoding({"x": x, "text": Text()}, [Text()]), _x),
    "BatchEncoding": Case(_batch_encoding, _x),
    "ModelOutput": Case(_model_output, _x),
    "ChainMap": Case(lambda x: ChainMap({"text": Text()}, {"x": x})),
    "read-only Mapping": Case(lambda x: ReadOnly({"x": x, "text": Text()})),
    "opaque Mapping": Case(
        lambda x: Renamed({"x": x, "text": Text()}), lambda b: b["X"], becomes=dict
    ),
    "any-case Mapping": Case(
        lambda x: AnyCase({"X": x, "text": Text()}), lambda b: b["X"], becomes=dict
    ),
    "mapping proxy": Case(lambda x: types.MappingProxyType({"x": x, "text": Text()}), becomes=dict),
    "nested": Case(
        lambda x: Encoding({"deep": [Frozen(x, {"pair": Pair(UserDict(x=x), deque([Text()]))})]}),
        lambda b: b.deep[0].rest["pair"].x["x"],
    ),
}

all_containers = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def reachable(batch: Any) -> dict[int, Any]:
    """All objects to be got at from ``batch``, by id; code and tensors are not looked into."""
    found: dict[int, Any] = {}
    left = [batch]
    while left:
        node = left.pop()
        # By type: an isinstance is a use of what is withheld.
        if id(node) in found or issubclass(type(node), (type, types.FunctionType)):
            continue
        found[id(node)] = node
        if not issubclass(type(node), Tensor):
            left += gc.get_referents(node)
    return found
