"""The stages one after the other, over stretches of the flat tensors that stay in cache.

So a model passes between memory and processor once for all stages, not once for each operation,
and what a stage computes on the way takes little room. A stage that has to see the whole model ends
a run of such stages; what the direction is by then is kept in one buffer of the model's size.
Where one kernel can do what all of the stages do, it is given the stretches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import groupby, repeat
from typing import Any, final

import torch
from torch import Tensor

from opake_lightning.optimizers._fused import Recipe, stretch
from opake_lightning.optimizers._stage import Flats, Flow, Stage, tree_fields

__all__ = ["Pass", "recipe_for"]

# Elements of a stretch: for each thread, or on another device.
_BLOCK = 1 << 17
_BLOCK_ELSEWHERE = 1 << 22


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """One way of a gradient through the stages.

    Attributes:
        stages: By name.
        before: Their states, with flat tensors for pytrees.
        after: States whose flat tensors the new states are written to; those of ``before`` to
            write in place.
        buffer: Flat tensors for the direction; may be those of the gradient.
        params: Flat tensors that the update is added to; None to leave it in ``buffer``.
    """

    stages: Mapping[str, Stage]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    buffer: Flats
    params: Flats | None

    def run(self, flow: Flow) -> dict[str, Any]:
        """Pass ``flow`` through; returns the new states."""
        runs = [(whole, dict(part)) for whole, part in groupby(self.stages.items(), _sees_whole)]
        new = dict(self.after)
        # The buffer may be the gradient, and keeps no more than a direction.
        late = any(stage.reads_gradient for _, part in runs[1:] for stage in part.values())
        if late or not flow.direction:
            self._copy(self.stages)
            new.update(_through(self.stages, flow, self.after, owned=False))
            self._finish(flow, self.buffer, self.params)
            return new
        for index, (whole, part) in enumerate(runs):
            params = self.params if index == len(runs) - 1 else None
            if whole:
                self._finish(flow, self.buffer, None)
                self._copy(part)
                new.update(_through(part, flow, self.after, owned=True))
            else:
                new.update(self._in_blocks(part, flow, params))
                if params is not None:
                    return new
                flow.direction, flow.scale, flow.divisor = self.buffer, 1.0, None
        self._finish(flow, self.buffer, self.params)
        return new

    def _in_blocks(
        self, part: Mapping[str, Stage], flow: Flow, params: Flats | None
    ) -> dict[str, Any]:
        stateful = [name for name, stage in part.items() if stage.stateful]
        last: dict[str, Any] | None = {}
        for index, flat in enumerate(flow.direction):
            share = 64 if self.after is self.before else 1
            size = stretch(flow.direction, _most(flat), share=share)
            own = {name: _pieces(self.after[name], index, size) for name in stateful}
            olds = {name: _pieces(self.before[name], index, size) for name in stateful}
            places = zip(
                _flow_pieces(flow, index, size),
                _column(self.buffer, index, size),
                _column(params, index, size),
                strict=False,
            )
            for k, (piece, buffer, target) in enumerate(places):
                states = {name: pieces[k] for name, pieces in own.items()}
                if self.after is not self.before:
                    for name in stateful:
                        _copy_state(olds[name][k], states[name])
                last = self._by_kernel(part, piece, states, buffer) if target is None else None
                if last is None:
                    last = _through(part, piece, states, owned=False)
                    self._finish(piece, buffer, target)
        assert last is not None
        return {name: _with_numbers(self.after[name], last[name]) for name in stateful}

    def _by_kernel(
        self, part: Mapping[str, Stage], flow: Flow, states: Mapping[str, Any], buffer: Flats
    ) -> dict[str, Any] | None:
        """The new states, if one kernel could write the update to ``buffer``."""
        found = recipe_for(part, flow, states) if len(part) == len(self.stages) else None
        # The kernels' way to take noise off rounds more than the stages'.
        if found is None or found[0].takes_noise_off or not found[0].runs_on(flow.gradient):
            return None
        recipe, after = found
        # In place, the buffer is the gradient.
        moves = buffer if self.after is not self.before else [b.new_empty(b.shape) for b in buffer]
        recipe.fill(moves, flow.gradient, flow.params)
        if moves is not buffer:
            for flat, move in zip(buffer, moves, strict=True):
                flat.copy_(move)
        return after

    def _copy(self, part: Mapping[str, Stage]) -> None:
        if self.after is not self.before:
            for name, stage in part.items():
                if stage.stateful:
                    _copy_state(self.before[name], self.after[name])

    @staticmethod
    def _finish(flow: Flow, buffer: Flats, params: Flats | None) -> None:
        if params is not None:
            _settle(flow, owned=flow.direction is buffer)
            for param, d in zip(params, flow.direction, strict=True):
                param.add_(d)
            return
        for flat, d in zip(buffer, flow.direction, strict=True):
            if flow.divisor is not None:
                torch.div(d, flow.divisor.to(d), out=flat).mul_(flow.scale)
            elif flow.scale != 1:
                torch.mul(d, flow.scale, out=flat)
            elif d is not flat:
                flat.copy_(d)
        flow.direction, flow.scale, flow.divisor = buffer, 1.0, None


def recipe_for(
    stages: Mapping[str, Stage], flow: Flow, states: Mapping[str, Any], *, compiled: bool = False
) -> tuple[Recipe, dict[str, Any]] | None:
    """What the stages make of ``flow`` as numbers for one kernel, and the states after it."""
    recipe = Recipe(flow.step, flow.variance, flow.lr, compiled, possible=flow.square is None)
    after: dict[str, Any] = {}
    for name, stage in stages.items():
        state = stage.fuse(recipe, states.get(name))
        if not recipe.possible:
            return None
        if stage.stateful:
            after[name] = state
    return recipe, after


def _sees_whole(item: tuple[str, Stage]) -> bool:
    return item[1].whole


def _most(flat: Tensor) -> int:
    return _BLOCK * torch.get_num_threads() if flat.device.type == "cpu" else _BLOCK_ELSEWHERE


def _through(
    part: Mapping[str, Stage], flow: Flow, states: Mapping[str, Any], *, owned: bool
) -> dict[str, Any]:
    """Pass ``flow`` through ``part``, giving the new states."""
    new: dict[str, Any] = {}
    for name, stage in part.items():
        _settle(flow, owned=owned)
        if stage.whole and not owned:
            flow.direction = [d.clone() for d in flow.direction]
        after = stage.update(flow, states.get(name))
        if stage.stateful:
            new[name] = after
    return new


def _settle(flow: Flow, *, owned: bool) -> None:
    """Multiply and divide the direction as it is to be; in place if it is ours to write to."""
    divisor, scale = flow.divisor, flow.scale
    if divisor is not None:
        places = flow.direction if owned else [None] * len(flow.direction)
        pairs = zip(flow.direction, places, strict=True)
        flow.direction = [torch.div(d, divisor.to(d), out=place) for d, place in pairs]
    if scale != 1:
        places = flow.direction if owned else [None] * len(flow.direction)
        pairs = zip(flow.direction, places, strict=True)
        flow.direction = [torch.mul(d, scale, out=place) for d, place in pairs]
    flow.divisor, flow.scale = None, 1.0


def _flow_pieces(flow: Flow, index: int, size: int) -> Iterator[Flow]:
    """``flow`` in stretches of one of its flat tensors, one at a time: they fill up on the way."""
    other = None if flow.direction is flow.gradient else flow.direction
    columns = [
        _column(flats, index, size) for flats in (flow.gradient, other, flow.square, flow.params)
    ]
    for g, d, square, params in zip(*columns, strict=False):
        direction = g if d is None else d
        yield replace(flow, gradient=g, direction=direction, square=square, params=params)


def _column(flats: Flats | None, index: int, size: int) -> Iterable[Any]:
    """Stretches of one flat tensor, each as a list of one; or None for each, without end."""
    if flats is None:
        return repeat(None)
    return ([piece] for piece in flats[index].split(size))


def _pieces(state: Any, index: int, size: int) -> list[Any]:
    """``state`` in stretches of one of its flat tensors."""
    columns: list[Any] = []
    for field in fields(state):
        value = getattr(state, field.name)
        number = isinstance(value, (int, float))
        columns.append(repeat(value) if number else _column(value, index, size))
    return [type(state)(*row) for row in zip(*columns, strict=False)]


def _copy_state(old: Any, new: Any) -> None:
    for name in tree_fields(old):
        for source, target in zip(getattr(old, name), getattr(new, name), strict=True):
            target.copy_(source)


def _with_numbers(state: Any, other: Any) -> Any:
    """``state`` with the numbers of ``other``."""
    trees = set(tree_fields(state))
    numbers = {f.name: getattr(other, f.name) for f in fields(state) if f.name not in trees}
    return replace(state, **numbers)
