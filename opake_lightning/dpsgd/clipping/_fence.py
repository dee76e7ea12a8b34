"""The fence around a loss: what it writes ends with the call.

A step is a function of parameters and single examples. What a loss saw of one must not outlive the
call, nor reach another example through Python: so all places that a loss can write to are looked at
after each pass (:mod:`._places`).

* A tensor with a row for each example, wherever it is kept, is refused: a queue, a center, a
  codebook, a metric that is updated, a list of losses.
* Once the loss has read a Python value of the batch, whatever changes after that may carry it: an
  assignment, an in-place write, an array, an iterator. All of that is refused.
* Before that, or without it, what changes is the same for all examples: a counter, a normalised
  weight, a cache of positions.

Every pass of a step starts from the same state, and the state after the step is that after one
pass: how often a loss ran tells how many examples there were, and where they differed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from opake_lightning import _functorch
from opake_lightning._places import (
    ABSENT,
    Held,
    Places,
    below,
    put,
    set_state,
    state_of,
)
from opake_lightning.errors import PrivacyError

__all__ = ["Fence", "memory_of"]

# Recurrent layers renew these before they use them, whatever is there.
_RENEWED = {"_flat_weights", "_flat_weight_refs"}
# Python's and NumPy's own generators: rows of a pass share what they draw.
_GLOBAL: tuple[Any, ...] = (random._inst, np.random.mtrand._rand)  # type: ignore[attr-defined]


_Changed: TypeAlias = list[tuple[Held, dict[Any, Any]]]


class Fence:
    """What hangs on a loss's owners, as it was when the step began.

    Args:
        owners: Modules, functions, containers and objects that the loss may write to.
        before: The fence of the step before, which knows most places.
    """

    def __init__(self, owners: Sequence[Any] = (), before: Fence | None = None) -> None:
        self._owners = owners
        self._at_start = Places(owners) if before is None else before._at_start.renewed(owners)
        self._random = [*((g, state_of(g)) for g in _GLOBAL), *self._at_start.random]
        self._at_read = self._at_start
        self._tensors_at_read: list[tuple[Tensor, bool, Tensor]] = []
        self._first: list[tuple[Any, dict[Any, Any]]] | None = None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._written: list[tuple[Tensor, Tensor]] = []
        self._guarded = False
        self._drawn: set[int] = set()
        self.read = ""

    def refuse_hooks(self) -> None:
        """Refuse modules with hooks that change gradients: such hooks would not be run."""
        for held in self._at_start.held:
            for name in ("_backward_hooks", "_backward_pre_hooks"):
                if held.before.get(name):
                    raise PrivacyError(
                        f"{held.path} has a backward hook (register_full_backward_hook), which is "
                        "not run when every example has a gradient of its own; remove it, and "
                        "write what it does into the loss or the optimizer"
                    )

    # -- memory -----------------------------------------------------------------------------------

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with one that was there before the loss ran."""
        return memory_of(tensor) in self._tensors

    def name_of(self, tensor: Tensor) -> str:
        """The tensor's name on its owner, for a message."""
        found = self._tensors.get(memory_of(tensor))
        return "a tensor from outside of the loss" if found is None else found[1]

    @cached_property
    def _tensors(self) -> dict[int, tuple[Tensor, str]]:
        """Tensors that were there, with their names, by where their memory is."""
        return {
            memory_of(value): (value, below(held.path, key))
            for held in self._at_start.held
            for key, value in held.before.items()
            if isinstance(value, Tensor) and value.numel()
        }

    def keep(self, tensor: Tensor) -> None:
        """Remember the content of a tensor that is about to be written to, alike for all examples.

        Raises:
            PrivacyError: If the loss has read a Python value: whether it writes may depend on that.
        """
        if not self.owns(tensor):
            return
        if self.read:
            _refuse(f"writes to {self.name_of(tensor)}", self._because())
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = tensor, tensor.detach().clone()

    def guard_memory(self) -> None:
        """Remember the content of all tensors: for a loss that runs where writes are not seen."""
        if not self._guarded:
            self._guarded, self.read = True, ""
            for tensor, _ in self._tensors.values():
                self.keep(tensor)
            self._look_closer()

    # -- reading ----------------------------------------------------------------------------------

    def reads(self, place: str) -> None:
        """The loss is about to get a Python value of the batch, at ``place``.

        What is there at this moment depends on no example yet, and is what it must leave.
        """
        if not self.read:
            self.read = place
            same = not self._at_start.changed() and not self._at_start.gone_on()
            self._at_read = self._at_start if same else Places(self._owners)
            self._look_closer()

    def _look_closer(self) -> None:
        """From here on a plain value may say something, in long arrays and flags of tensors too."""
        for places in (self._at_start, self._at_read):
            places.remember_arrays()
        self._tensors_at_read = [
            (tensor, tensor.requires_grad, tensor.detach()) for tensor, _ in self._tensors.values()
        ]

    def _because(self) -> str:
        if not self.read:
            return "the loss runs one example at a time, so it may hold what an example says"
        return f"the loss read a value of the batch by {self.read}, so it may depend on that"

    # -- passes -----------------------------------------------------------------------------------

    def passed(self, *, strict: bool = False) -> None:
        """Look at what a pass has left, and put back what was there before it.

        Args:
            strict: The loss ran where tensors do not show whose they are: nothing may change.

        Raises:
            PrivacyError: If it left something that may depend on an example.
        """
        # Without a value of the batch, no name of an attribute can be made of one.
        changed = _cleared(self._at_start.changed(keys=strict or bool(self.read)))
        try:
            for held, now in changed:
                for key, value in now.items():
                    if held.before.get(key, ABSENT) is not value and _holds_example(value):
                        _refuse(
                            f"keeps a tensor of the batch in {below(held.path, key)}",
                            "it holds what examples say",
                        )
            if self._at_start.tagged():
                _refuse("gives a tensor an attribute", "it may hold what an example says")
            if strict or self.read:
                places = self._at_start if strict else self._at_read
                since = changed if places is self._at_start else _cleared(places.changed())
                self._refuse_changes(places, since, strict=strict)
            if path := self._at_start.gone_on():
                # There is no way to set it back for the next pass.
                why = (
                    "how often it does tells how many passes the examples took; use a plain number"
                )
                _refuse(f"changes {path} in place", why)
            self._agree([(held.place, now) for held, now in changed])
        finally:
            written = [(tensor, tensor.detach().clone()) for tensor, _ in self._kept.values()]
            self._restore([held for held, _ in changed])
        if self._first is None:
            self._first = [(held.place, now) for held, now in changed]
            self._written = written

    def _refuse_changes(self, places: Places, changed: _Changed, *, strict: bool) -> None:
        """Refuse all that has changed since ``places`` were looked at, and not been put back."""
        start = {id(held.place): held.before for held in self._at_start.held}
        for held, now in changed:
            first = start.get(id(held.place), held.before)
            for key, value in now.items():
                before = held.before.get(key, ABSENT)
                # What functional_call swapped before the read is back where it was at the start.
                if not (_same(before, value) or _same(first.get(key, ABSENT), value)):
                    _refuse(f"assigns to {below(held.path, key)}", self._because())
            if now.keys() not in (held.before.keys(), first.keys()):
                _refuse(f"changes {held.path}", self._because())
        if path := places.gone_on():
            _refuse(f"changes {path} in place", self._because())
        for generator, state in places.random:
            if not _equal_states(state_of(generator), state):
                _refuse(f"draws from a {type(generator).__name__} of its own", self._because())
        for tensor, tracked, content in self._tensors_at_read:
            if tensor.requires_grad != tracked:
                _refuse(f"changes requires_grad of {self.name_of(tensor)}", self._because())
            if memory_of(tensor) != memory_of(content):
                _refuse(f"swaps {self.name_of(content)} for another tensor", self._because())
        for tensor, content in self._kept.values() if strict else ():
            if not _equal(tensor.detach(), content):
                _refuse(f"writes to {self.name_of(tensor)}", self._because())

    def _agree(self, changed: list[tuple[Any, dict[Any, Any]]]) -> None:
        """Numbers that differ between passes tell examples apart."""
        first = {id(place): held for place, held in self._first or ()}
        for place, now in changed:
            other = first.get(id(place), {})
            for key, value in now.items():
                if isinstance(value, (int, float)) and key in other and other[key] != value:
                    _refuse(
                        f"assigns {value!r} to {key!r} for some examples",
                        f"{other[key]!r} for others",
                    )

    def restore(self) -> None:
        """Put back what was there when the step began."""
        self._restore([held for held, _ in self._at_start.changed()])
        self._at_start.put_back()
        for tensor, tracked, content in self._tensors_at_read:
            if memory_of(tensor) != memory_of(content):
                tensor.data = content
            if tensor.is_leaf and tensor.requires_grad != tracked:
                tensor.requires_grad_(tracked)

    def _restore(self, changed: list[Held]) -> None:
        self.read, self._at_read = "", self._at_start
        for held in changed:
            put(held.place, held.before)
        for number, (generator, state) in enumerate(self._random):
            if not _equal_states(state_of(generator), state):
                self._drawn.add(number)
                set_state(generator, state)
        _write(self._kept.values())

    def finish(self) -> None:
        """Leave what one pass left: a counter that went on, a normalised weight.

        Generators go on from a function of where they were: how much was drawn tells how many
        examples there were.
        """
        for place, held in self._first or ():
            put(place, held)
        for number in self._drawn:
            _go_on(self._random[number][0])
        _write(self._written)


def _cleared(changed: _Changed) -> _Changed:
    """Without what is renewed, and with a constant in place of its copies for each example."""
    for held, now in changed:
        now.update({key: held.before[key] for key in _RENEWED & now.keys() & held.before.keys()})
        for key, value in now.items():
            one = getattr(value, "_opake_same_for_all", None) if isinstance(value, Tensor) else None
            # Those that the loss wrote to are not kept so.
            if one is not None and _functorch.unwrapped(value)._version == 0:
                now[key] = one
    return changed


def _go_on(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(state, "big"))
    else:
        generator.random()


def _holds_example(value: Any, depth: int = 4) -> bool:
    """Whether a tensor with a row for each example is in ``value``."""
    if isinstance(value, Tensor):
        return _functorch.is_batched(value)
    if not depth or isinstance(value, (nn.Module, type)):
        return False
    if isinstance(value, dict):
        value = list(cast("dict[Any, Any]", value).values())
    elif not isinstance(value, (list, tuple, set, frozenset)):
        if not hasattr(value, "__dict__"):
            return False
        value = list(vars(value).values())
    return any(_holds_example(item, depth - 1) for item in cast("Iterable[Any]", value))


def _same(before: Any, value: Any) -> bool:
    """Whether two values say the same: one object, equal plain values, or containers of such."""
    if before is value:
        return True
    if type(before) is not type(value):
        return False
    if isinstance(value, (list, tuple)):
        pairs = zip(cast("Sequence[Any]", before), cast("Sequence[Any]", value), strict=False)
        return len(before) == len(cast("Any", value)) and all(_same(a, b) for a, b in pairs)
    return isinstance(value, (int, float, str, bool, bytes)) and before == value


def _equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):  # of NumPy
        return repr(a) == repr(b)
    return a == b


def _refuse(what: str, why: str) -> NoReturn:
    raise PrivacyError(
        f"the loss {what}, which outlives the call: {why}. Drop that, compute it on public data, "
        "or return it as an auxiliary output"
    )


def memory_of(tensor: Tensor) -> int:
    """The address of the memory behind ``tensor``; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except (RuntimeError, NotImplementedError):  # tensors without memory of their own
        return 0


def _write(contents: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give tensors a content, those that have another."""
    for tensor, content in contents:
        if not _equal(tensor.detach(), content):
            tensor.detach().copy_(content)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit but for NaN, which is one value."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
