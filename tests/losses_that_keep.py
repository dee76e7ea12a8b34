"""Losses in which a call leaves something of its rows for the next, wherever that can be.

Each entry of ``KEEPING`` takes a loss and its features, and returns what earlier calls left.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.losses import WIDTH, Keeping, Loss

LEFT: dict[str, Any] = {}
LAST = 0.0
KEEPING: dict[str, Keeping] = {}


def _kept(keeping: Keeping) -> Keeping:
    KEEPING[keeping.__name__] = keeping
    return keeping


def _swap(get: Callable[[Loss], Any], put: Callable[[Loss, Any], None], of: Any) -> Keeping:
    """Return what is there, and put ``of(z, what is there)`` in its place."""

    def keeping(loss: Loss, z: Tensor) -> Any:
        before = get(loss)
        put(loss, of(z, before))
        return before

    return keeping


def _mean(z: Tensor, before: Any) -> Tensor:
    del before
    return z.detach().mean(0)


def _item(z: Tensor, before: Any) -> float:
    del before
    return z.mean().item()


def _sign(z: Tensor, before: Any) -> Any:
    """A number that goes on for some rows only."""
    return before + 1.0 if z.mean() > 0 else before


def _attribute(path: str) -> tuple[Callable[[Loss], Any], Callable[[Loss, Any], None]]:
    *way, last = path.split(".")

    def get(loss: Loss) -> Any:
        return getattr(functools.reduce(getattr, way, loss), last)

    def put(loss: Loss, value: Any) -> None:
        setattr(functools.reduce(getattr, way, loss), last, value)

    return get, put


_WAYS = {"mean": _mean, "item": _item, "sign": _sign}
_PLACES = {
    "attribute": _attribute("last"),
    "object": _attribute("holder.value"),
    "namespace": _attribute("space.value"),
    "slots": _attribute("slotted.value"),
    "child": _attribute("child.value"),
    "class": (lambda loss: type(loss).on_class, lambda loss, v: setattr(type(loss), "on_class", v)),
    "nested": (
        lambda loss: loss.nested[0][0]["holder"].value,
        lambda loss, v: setattr(loss.nested[0][0]["holder"], "value", v),
    ),
    "dict": (lambda loss: loss.table.get(1, 0.0), lambda loss, v: loss.table.update({1: v})),
    "module_dict": (lambda _: LEFT.get(1, 0.0), lambda _, v: LEFT.update({1: v})),
    "tensor_attribute": (
        lambda loss: getattr(loss.mean, "kept", 0.0),
        lambda loss, v: setattr(loss.mean, "kept", v),
    ),
    "list": (lambda loss: sum(loss.seen, 0.0), lambda loss, v: loss.seen.append(v)),
    "deque": (lambda loss: sum(loss.recent, 0.0), lambda loss, v: loss.recent.append(v)),
    "list_of_object": (
        lambda loss: sum(loss.holder.items, 0.0),
        lambda loss, v: loss.holder.items.append(v),
    ),
    "user_dict": (
        lambda loss: loss.user_dict.get(1, 0.0),
        lambda loss, v: loss.user_dict.update({1: v}),
    ),
    "priority_queue": (
        lambda loss: loss.waiting.queue[0] if loss.waiting.queue else 0.0,
        lambda loss, v: loss.waiting.put(v),
    ),
    "of_thread": (
        lambda loss: getattr(loss.of_thread, "value", 0.0),
        lambda loss, v: setattr(loss.of_thread, "value", v),
    ),
    "long_list": (
        lambda loss: loss.of_row[500],
        lambda loss, v: loss.of_row.__setitem__(500, v),
    ),
    "long_dict": (
        lambda loss: loss.by_row[500],
        lambda loss, v: loss.by_row.__setitem__(500, v),
    ),
    "default_of_static_method": (
        lambda loss: sum(loss.keep(), 0.0),
        lambda loss, v: loss.keep(v),
    ),
    "list_of_class": (
        lambda loss: sum(loss.list_of_class, 0.0),
        lambda loss, v: loss.list_of_class.append(v),
    ),
}
KEEPING.update(
    {f"{place}_{way}": _swap(*_PLACES[place], of) for place in _PLACES for way, of in _WAYS.items()}
)

# In the memory of a tensor, by a function of what is there and of the new mean.
_WRITES: dict[str, Callable[[Loss, Tensor], Any]] = {
    "average_in_place": lambda loss, m: loss.mean.mul_(0.9).add_(m, alpha=0.1),
    "through_data": lambda loss, m: loss.mean.data.mul_(0.9).add_(m),
    "data_assigned": lambda loss, m: setattr(loss.mean, "data", m),
    "through_detach": lambda loss, m: loss.mean.detach().copy_(m),
    "slice_assigned": lambda loss, m: loss.mean.__setitem__(slice(1), m[:1]),
    "slice_copied": lambda loss, m: loss.mean[:1].copy_(m[:1]),
    "view_added": lambda loss, m: loss.mean.view(-1).add_(m),
    "foreach": lambda loss, m: torch._foreach_add_([loss.mean], [m]),
    "out": lambda loss, m: torch.add(loss.mean, m, out=loss.mean),
    "set": lambda loss, m: loss.mean.set_(m),
    "index_add": lambda loss, m: loss.mean.index_add_(0, torch.arange(WIDTH), m),
    "lerp": lambda loss, m: loss.mean.lerp_(m, 0.1),
    "at_index": lambda loss, m: loss.mean.__setitem__(m.argmax(), 1.0),
    "by_mask": lambda loss, m: loss.mean.masked_fill_(m > 0, 1.0),
    "of_item": lambda loss, m: loss.mean.fill_(m.mean().item()),
    "one_of_item": lambda loss, m: loss.mean.__setitem__(0, m.mean().item()),
    "frozen_weight": lambda loss, m: loss.child.weight.data.add_(m.mean()),
    "initialised": lambda loss, m: nn.init.constant_(loss.mean, m.mean().item()),
    "swapped": lambda loss, m: torch.utils.swap_tensors(
        loss.mean, torch.full((WIDTH,), m.mean().item())
    ),
    "numpy_of_buffer": lambda loss, m: loss.mean.numpy().__setitem__(slice(None), m.numpy()),
    "numpy_of_data": lambda loss, m: loss.mean.data.numpy().__setitem__(slice(None), m.numpy()),
    "asarray": lambda loss, m: np.asarray(loss.mean).__setitem__(slice(None), m.numpy()),
    "dlpack": lambda loss, m: np.from_dlpack(loss.mean).__setitem__(slice(None), m.numpy()),
    "storage": lambda loss, m: loss.mean.untyped_storage().__setitem__(3, int(m.mean() > 0)),
    "numpy_view": lambda loss, m: loss.view.__setitem__(slice(None), m.numpy()),
    "through_numpy": lambda loss, m: torch.from_numpy(loss.view).copy_(m),
}


def _writing(write: Callable[[Loss, Tensor], Any]) -> Keeping:
    def keeping(loss: Loss, z: Tensor) -> Tensor:
        before = loss.mean + loss.child.weight[0]
        with torch.no_grad():
            write(loss, z.detach().mean(0))
        return before

    return keeping


KEEPING.update({f"buffer_{name}": _writing(write) for name, write in _WRITES.items()})


def fresh(keeping: str = "", **parts: Any) -> Loss:
    """A loss of a class of its own, as some keep things on the class; nothing is left of others."""
    global LAST
    LEFT.clear()
    LAST = 0.0

    def keep(*values: Any, kept: list[Any] = []) -> list[Any]:  # noqa: B006 - the place in question
        kept.extend(values)
        return kept

    own = {"on_class": 0.0, "list_of_class": [], "keep": staticmethod(keep)}
    kind = type("Fresh", (Loss,), own)
    return kind(keeping=KEEPING[keeping] if keeping else None, **parts)


@_kept
def queue(loss: Loss, z: Tensor) -> Tensor:
    before = loss.queue.mean(0)
    loss.queue = torch.cat([z.detach(), loss.queue])[:8]
    return before


@_kept
def counts_of_labels(loss: Loss, z: Tensor) -> Tensor:
    before = loss.mean
    loss.mean = loss.mean + F.one_hot(z.argmax(1), WIDTH).sum(0)
    return before


@_kept
def buffer_for_some_rows(loss: Loss, z: Tensor) -> Tensor:
    before = loss.mean.clone()
    if z.mean() > 0:
        loss.mean.add_(1)
    return before


@_kept
def replaced_for_some_rows(loss: Loss, z: Tensor) -> Tensor:
    before = loss.mean
    if z.mean() > 0:
        loss.mean = loss.mean + 1
    return before


@_kept
def set_up_by_the_first_batch(loss: Loss, z: Tensor) -> Tensor:
    """As ActNorm is."""
    if not loss.initialised:
        loss.mean.data.copy_(z.detach().mean(0))
        loss.initialised = True
    return loss.mean.clone()


@_kept
def cached_property(loss: Loss, z: Tensor) -> Tensor:
    if "center" not in vars(loss):
        loss.__dict__["center"] = z.detach().mean(0)
    return loss.__dict__["center"]


@_kept
def numpy_assigned(loss: Loss, z: Tensor) -> Tensor:
    before = torch.from_numpy(loss.array)
    loss.array = z.detach().mean(0).numpy()
    return before


@_kept
def numpy_written(loss: Loss, z: Tensor) -> Tensor:
    before = torch.from_numpy(loss.array.copy())
    loss.array[:] = z.detach().mean(0).numpy()
    return before


@_kept
def numpy_for_some_rows(loss: Loss, z: Tensor) -> Tensor:
    before = torch.from_numpy(loss.array.copy())
    if z.mean() > 0:
        loss.array += 1
    return before


@_kept
def long_array(loss: Loss, z: Tensor) -> float:
    before = float(loss.of_rows[7777])
    loss.of_rows[7777] = z.mean().item()
    return before


@_kept
def builtin_iterator(loss: Loss, z: Tensor) -> float:
    return float(next(loss.numbered)) if z.mean() > 0 else 0.0


@_kept
def array_of_numbers(loss: Loss, z: Tensor) -> float:
    before = loss.numbers[0]
    loss.numbers[0] = z.mean().item()
    return before


@_kept
def text(loss: Loss, z: Tensor) -> float:
    before = float(loss.text)
    loss.text = str(z.mean().item())
    return before


@_kept
def printed(loss: Loss, z: Tensor) -> float:
    before = float(sum(map(ord, loss.text)) % 7)
    loss.text = f"{z.detach()}"
    return before


@_kept
def a_global(loss: Loss, z: Tensor) -> float:
    global LAST
    before, LAST = LAST, z.mean().item()
    return before


@_kept
def a_global_for_some_rows(loss: Loss, z: Tensor) -> float:
    global LAST
    before = LAST
    if z.mean() > 0:
        LAST += 1.0
    return before


@_kept
def gradient_slot(loss: Loss, z: Tensor) -> Any:
    weight = next(loss.net.parameters())
    before = 0.0 if weight.grad is None else weight.grad.sum()
    weight.grad = torch.ones_like(weight) * z.detach().mean()
    return before


@_kept
def generator(loss: Loss, z: Tensor) -> float:
    return loss.averages.send(z.mean().item())


@_kept
def count_of_passes(loss: Loss, z: Tensor) -> float:
    """How often a loss ran tells how many values there were to split by."""
    bool(z.mean() > 0)
    return float(next(loss.counter))


@_kept
def own_torch_generator(loss: Loss, z: Tensor) -> Any:
    bool(z.mean() > 0)
    return 10 * torch.rand(1, generator=loss.torch_draws)


@_kept
def own_python_generator(loss: Loss, z: Tensor) -> float:
    bool(z.mean() > 0)
    return 10 * loss.python_draws.random()


@_kept
def own_numpy_generator(loss: Loss, z: Tensor) -> float:
    bool(z.mean() > 0)
    return 10 * loss.numpy_draws.random()


@_kept
def hook(loss: Loss, z: Tensor) -> float:
    before = float(len(loss.child._forward_hooks))
    if z.mean() > 0:
        loss.child.register_forward_hook(lambda *_: None)
    return before


@_kept
def hook_that_keeps(loss: Loss, z: Tensor) -> Any:
    """A hook that holds what was there when it was registered."""
    kept = z.detach().mean(0)
    before = [h.keywords["kept"] for h in loss.child._forward_hooks.values()]
    loss.child.register_forward_hook(functools.partial(lambda *_, kept: None, kept=kept))
    return before[-1] if before else 0.0


@_kept
def frozen_for_some_rows(loss: Loss, z: Tensor) -> float:
    before = loss.child.weight.requires_grad
    if z.mean() > 0:
        loss.child.weight.requires_grad_(not before)
    return float(before)


@_kept
def mode_for_some_rows(loss: Loss, z: Tensor) -> float:
    before = loss.child.training
    if z.mean() > 0:
        loss.child.train(not before)
    return float(before)


@_kept
def written_where_errors_are_caught(loss: Loss, z: Tensor) -> Tensor:
    before = loss.mean.clone()
    with contextlib.suppress(Exception):
        loss.mean.add_(z.detach().mean(0))
    return before
