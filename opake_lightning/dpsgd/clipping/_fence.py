"""The fence around a loss: what it writes ends with the call.

A step is a function of parameters and single examples. What a loss saw of one must not outlive the
call, nor reach another example through Python: so all that hangs on the module (or on the functions
and containers that a functional loss closes over) is looked at after each pass.

* A tensor with a row for each example, wherever it is kept, is refused: a queue, a center, a
  codebook, a metric that is updated, a list of losses.
* A plain number may be assigned (a counter), unless the loss has read a Python value of the batch
  in this call: then it may carry that.
* A tensor that is the same for all examples is fine: a normalised weight, a cache of positions.

Every pass of a step starts from the same state, and the state after the step is that after one
pass: how often a loss ran tells how many examples there were, and where they differed.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from opake_lightning.dpsgd.clipping import _torch
from opake_lightning.errors import PrivacyError

__all__ = ["Fence", "owners_of"]

_ATOMS = {
    int, float, str, bool, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size,
    Tensor, nn.Parameter, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
}  # fmt: skip
# Objects of these are no place where a loss leaves things, and some lead to everything there is.
_FOREIGN = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "opake_lightning", "numpy")
# Beyond these a container is compared by its length and its ends.
_LONG, _ENDS = 256, 8
# What torch.nn.Module keeps about itself, none of it the loss's.
_OF_MODULES = {
    "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_non_persistent_buffers_set",
}  # fmt: skip
_DROPPED = {"_parameters", "_buffers", "_modules", "__dict__"}
_ABSENT = object()


class Fence:
    """What hangs on a loss's owners, as it was when the step began.

    Args:
        owners: Modules, containers and objects that the loss may write to.
    """

    def __init__(self, owners: Iterable[Any] = ()) -> None:
        self._places: list[tuple[Any, dict[Any, Any], str]] = []
        self._seen: set[int] = set()
        for owner in owners:
            self._collect(owner, "")
        self._first: list[tuple[Any, dict[Any, Any]]] | None = None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._written: list[tuple[Tensor, Tensor]] = []
        self._memory: dict[int, str] | None = None
        self._guarded = False

    # -- what there is ----------------------------------------------------------------------------

    def _collect(self, value: Any, path: str) -> None:
        kind = cast("Any", type(value))
        if kind in _ATOMS or id(value) in self._seen:
            return
        if isinstance(value, (dict, list, set, deque, types.CellType)):
            self._seen.add(id(value))
            held = _contents(value)
            self._places.append((value, held, path))
            for key, child in held.items():
                if type(child) not in _ATOMS and key not in _OF_MODULES:
                    self._collect(child, _below(path, key))
        elif isinstance(value, (tuple, frozenset)):
            for key, child in enumerate(cast("Iterable[Any]", value)):
                self._collect(child, _below(path, key))
        elif isinstance(value, nn.Module) or (
            hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in _FOREIGN
        ):
            self._seen.add(id(value))
            self._collect(vars(value), path or type(value).__name__)

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with one that was there before the loss ran."""
        return _memory_of(tensor) in self._addresses()

    def name_of(self, tensor: Tensor) -> str:
        """The tensor's name on its owner, for a message."""
        return self._addresses().get(_memory_of(tensor), "a tensor from outside of the loss")

    def _addresses(self) -> dict[int, str]:
        if self._memory is None:
            self._memory = {
                _memory_of(value): _below(path, key)
                for _, held, path in self._places
                for key, value in held.items()
                if isinstance(value, Tensor) and value.numel()
            }
        return self._memory

    # -- writes to memory -------------------------------------------------------------------------

    def keep(self, tensor: Tensor) -> None:
        """Remember the content of a tensor that is about to be written to, alike for all examples."""
        if id(tensor) not in self._kept and self.owns(tensor):
            self._kept[id(tensor)] = tensor, tensor.detach().clone()

    def guard_memory(self) -> None:
        """Remember the content of all tensors: for a loss that runs where writes are not seen."""
        if not self._guarded:
            self._guarded = True
            for _, held, _ in self._places:
                for value in held.values():
                    if isinstance(value, Tensor):
                        self.keep(value)

    # -- passes -----------------------------------------------------------------------------------

    def passed(self, read: str, *, strict: bool = False) -> None:
        """Look at what a pass has left, and put back what was there before it.

        Args:
            read: Where the loss read a Python value of the batch; "" if it did not.
            strict: The loss ran where tensors do not show whose they are: nothing may change.

        Raises:
            PrivacyError: If it left something that may depend on an example.
        """
        changed: list[tuple[Any, dict[Any, Any]]] = []
        try:
            for place, before, path in self._places:
                now = _contents(place)
                if len(now) == len(before) and all(
                    [before.get(key, _ABSENT) is value for key, value in now.items()]
                ):
                    continue
                for key, value in now.items():
                    if before.get(key, _ABSENT) is not value:
                        _look(value, before.get(key), _below(path, key), read, strict=strict)
                changed.append((place, now))
            if strict:
                self._refuse_written()
            self._agree(changed)
        finally:
            written = [(tensor, tensor.detach().clone()) for tensor, _ in self._kept.values()]
            self.restore()
        if self._first is None:
            self._first, self._written = changed, written

    def _refuse_written(self) -> None:
        for tensor, content in self._kept.values():
            if not _equal(tensor.detach(), content):
                _refuse(f"wrote to {self.name_of(tensor)}", "it may hold what an example says")

    def _agree(self, changed: list[tuple[Any, dict[Any, Any]]]) -> None:
        """Numbers that differ between passes tell examples apart."""
        if self._first is None:
            return
        first = {id(place): held for place, held in self._first}
        for place, now in changed:
            other = first.get(id(place), {})
            for key, value in now.items():
                if isinstance(value, (int, float)) and key in other and other[key] != value:
                    _refuse(f"assigned {value!r} to {key!r} for some examples", f"{other[key]!r} "
                            "for others")  # fmt: skip

    def restore(self) -> None:
        """Put back what was there when the step began."""
        for place, before, _ in self._places:
            now = _contents(place)
            if len(now) != len(before) or any(
                [before.get(key, _ABSENT) is not value for key, value in now.items()]
            ):
                _fill(place, before)
        for tensor, content in self._kept.values():
            if not _equal(tensor.detach(), content):
                with torch.no_grad():
                    tensor.detach().copy_(content)

    def finish(self) -> None:
        """Leave what one pass left: a counter that went on, a normalised weight."""
        for place, held in self._first or ():
            _fill(place, held)
        with torch.no_grad():
            for tensor, content in self._written:
                if not _equal(tensor.detach(), content):
                    tensor.detach().copy_(content)


def owners_of(loss_fn: Any) -> list[Any]:
    """What a loss function may write to: its ``owners`` if it names them, else what it refers to."""
    if hasattr(loss_fn, "owners"):
        return list(loss_fn.owners)
    found: list[Any] = []
    waiting, seen = [loss_fn], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            waiting += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType):
            waiting += _referred(value, found)
        elif isinstance(value, (nn.Module, dict, list, set, deque)) or (
            type(value) not in _ATOMS
            and hasattr(value, "__dict__")
            and not callable(getattr(value, "__get__", None))
        ):
            found.append(value)
    return found


def _referred(function: types.FunctionType, found: list[Any]) -> list[Any]:
    """What a function gets from around it; its cells are added to ``found``."""
    cells = [cell for cell in function.__closure__ or () if _filled(cell)]
    found += cells
    names = function.__code__.co_names
    around = [function.__globals__[name] for name in names if name in function.__globals__]
    local = (types.FunctionType, dict, list, set, deque, nn.Module)
    mine = function.__module__
    around = [
        value for value in around
        if isinstance(value, local) and getattr(value, "__module__", mine) == mine
    ]  # fmt: skip
    return [cell.cell_contents for cell in cells] + around


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _contents(place: Any) -> dict[Any, Any]:
    """What a container holds, by key."""
    if isinstance(place, dict):
        held = cast("dict[Any, Any]", place)
        return dict(held) if len(held) <= _LONG else _ends(list(held.items()), len(held))
    if isinstance(place, types.CellType):
        return {"": place.cell_contents} if _filled(place) else {}
    if isinstance(place, set):
        return {id(value): value for value in cast("set[Any]", place)}
    held = list(cast("Iterable[Any]", place))
    return dict(enumerate(held)) if len(held) <= _LONG else _ends(list(enumerate(held)), len(held))


def _ends(items: list[tuple[Any, Any]], length: int) -> dict[Any, Any]:
    # The length stands for what is between: as one of the small numbers that are one object.
    return {**dict(items[:_ENDS]), **dict(items[-_ENDS:]), ("length", length): None}


def _fill(place: Any, held: dict[Any, Any]) -> None:
    """Give a container back what it held."""
    if any(isinstance(key, tuple) and key[:1] == ("length",) for key in held):
        long = cast("tuple[str, int]", next(k for k in held if isinstance(k, tuple))) [1]
        if isinstance(place, (list, deque)):
            while len(place) > long:
                place.pop()
        return
    if isinstance(place, types.CellType):
        if held:
            place.cell_contents = held[""]
        return
    place.clear()
    if isinstance(place, dict):
        place.update(held)
    elif isinstance(place, set):
        place.update(held.values())
    else:
        place.extend(held.values())


def _look(value: Any, before: Any, path: str, read: str, *, strict: bool, depth: int = 4) -> None:
    """Refuse a value that may depend on an example."""
    if isinstance(value, Tensor):
        if _torch.is_batched(value):
            _refuse(f"keeps a tensor of the batch in {path}", "it holds what examples say")
        if strict or read:
            _refuse(f"assigns a tensor to {path}", _because(read))
    elif depth and isinstance(value, (list, tuple, set, deque)):
        for item in cast("Iterable[Any]", value):
            _look(item, None, path, read, strict=strict, depth=depth - 1)
    elif depth and isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            _look(item, None, path, read, strict=strict, depth=depth - 1)
    elif isinstance(value, (nn.Module, types.FunctionType, type)) or value is None:
        return
    elif depth and hasattr(value, "__dict__"):
        _look(vars(value), None, path, read, strict=strict, depth=depth - 1)
    elif (strict or read) and not (type(value) is type(before) and bool(value == before)):
        _refuse(f"assigns {type(value).__name__} to {path}", _because(read))


def _because(read: str) -> str:
    if not read:
        return "the loss runs one example at a time, so it may hold what an example says"
    return f"the loss read a value of the batch by {read}, so it may hold that"


def _refuse(what: str, why: str) -> NoReturn:
    raise PrivacyError(
        f"the loss {what}, which outlives the call: {why}. Drop that, compute it on public data, or "
        "return it as an auxiliary output"
    )


def _below(path: str, key: Any) -> str:
    if key in _DROPPED or key == "":
        return path
    return f"{path}.{key}" if isinstance(key, str) and path else str(key) if not path else (
        f"{path}[{key!r}]"
    )


def _memory_of(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except (RuntimeError, NotImplementedError):  # tensors without memory of their own
        return 0


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit but for NaN, which is one value."""
    if a.shape != b.shape:
        return False
    if a.is_floating_point():
        return torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)) and torch.equal(
            a.isnan(), b.isnan()
        )
    return torch.equal(a, b)
