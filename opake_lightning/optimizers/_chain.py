"""Optimizers as named stages one after the other.

A gradient passes through the stages and comes out as the update. What happens at the border is done
here, once: which kinds of gradient are taken, the packing into flat tensors, copies of the state
unless it may be written in place, the type of the result. So a stage is arithmetic on flat tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, final

import optree
import torch
from torch import Tensor
from torchopt.base import ChainedGradientTransformation, GradientTransformation

from opake_lightning import _check
from opake_lightning._tree import (
    Layout,
    bases,
    flatten,
    layout_of,
    pack,
    packed,
    readable,
    unpack,
)
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers._blocks import Pass, recipe_for
from opake_lightning.optimizers._stage import Flats, Flow, Stage, tree_fields
from opake_lightning.scheduling import Schedule, constant_schedule
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

__all__ = ["Functions", "NoiseAwareTransformation", "chain", "is_noise_aware"]

_foreach_add_: Callable[..., None] = cast("Any", torch)._foreach_add_


class Functions(Protocol):
    """What a :class:`NoiseAwareTransformation` is made of."""

    def init(self, params: Any) -> Any:
        """As the transformation's."""
        ...

    def update(
        self, updates: Any, state: Any, *, params: Any = None, inplace: bool = False
    ) -> tuple[Any, Any]:
        """As the transformation's."""
        ...

    def step_(self, updates: Any, state: Any, params: Any) -> Any:
        """As the transformation's."""
        ...

    def compiled(self) -> Functions:
        """As the transformation's."""
        ...


@final
class NoiseAwareTransformation(GradientTransformation):
    """A gradient transformation that takes raw and noised gradients, and refuses clipped ones.

    ``init(params)`` gives the state. ``update(updates, state, *, params=None, inplace=False)``
    gives the updates, to be added to the parameters, and the new state. No argument is written to
    unless ``inplace=True``, which lets it write into the tensors of ``state`` and ``updates``.
    ``update`` takes a pytree of gradients (a run without privacy), a
    :class:`~opake_lightning.types.NoisedPytree`, whose noise level noise-aware stages use, or a
    :class:`~opake_lightning.types.SecondMomentNoiseOutput`, and returns a plain pytree in the types
    of ``params``, or of the gradient without them.

    ``step_(updates, state, params)`` updates in place and adds the updates to ``params``, in place,
    too; it returns the state. It is the faster way where whoever calls owns all three. Parameters
    that lie one after the other in memory, as those of one flat tensor do, are updated by a fused
    kernel of torch where there is one, whose results differ in the last digits. ``update`` takes
    such a kernel on the CPU, too, while there is no noise to take off.

    Attributes:
        name: Name of the factory, such as ``"adamw"``.
        lr: Learning rate as a function of the step.
        stages: The stages by name.
        square_refusal: Why squares released on their own (a
            :class:`~opake_lightning.types.SecondMomentNoiseOutput`) are refused, and what to do
            instead; empty where they are taken.
    """

    name: str
    lr: Schedule
    stages: Mapping[str, Stage]
    square_refusal: str
    step_: Callable[[Any, Any, Any], Any]
    _functions: Functions

    def __new__(
        cls, functions: Functions, *, name: str, lr: Schedule, stages: Mapping[str, Stage]
    ) -> NoiseAwareTransformation:
        """Keep the attributes beside the pair of functions."""
        self = super().__new__(cls, functions.init, functions.update)
        self.step_ = functions.step_
        self._functions = functions
        self.name = name
        self.lr = lr
        self.stages = stages
        self.square_refusal = _why_no_square(name, stages)
        return self

    def compiled(self) -> NoiseAwareTransformation:
        """The same optimizer, whose ``step_`` takes noise off by a kernel compiled for it.

        It brings something to large models on a CPU, with ``noise_bias_correction`` of Adam, AdamW,
        RAdam, RMSprop or Adagrad. The first step takes long, as a C++ compiler runs; where there is
        none, a warning says so and all goes on without. Results differ in the last digits, so
        resume with what you trained with.
        """
        return type(self)(
            self._functions.compiled(), name=self.name, lr=self.lr, stages=self.stages
        )

    def __getnewargs_ex__(self) -> tuple[tuple[Any], dict[str, Any]]:
        """Arguments with which a copy is made."""
        kept = {"name": self.name, "lr": self.lr, "stages": self.stages}
        return (self._functions,), kept

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, lr={self.lr})"


def chain(name: str = "chain", /, **stages: Stage | None) -> NoiseAwareTransformation:
    """The optimizer that passes a gradient through ``stages`` in their order.

    Args:
        name: Name of the optimizer.
        **stages: Stages by name; the name is the path of the stage's state in a checkpoint, so it
            does not depend on which other stages there are. None is left out.

    >>> import torch
    >>> from opake_lightning.optimizers import scale_by_learning_rate, trace
    >>> optimizer = chain(momentum=trace(0.9), lr=scale_by_learning_rate(0.1))
    >>> updates, state = optimizer.update(torch.ones(1), optimizer.init(torch.zeros(1)))
    >>> updates, state["step"], state["momentum"]
    (tensor([-0.1000]), 1, TraceState(trace=tensor([1.])))
    """
    if "step" in stages:
        raise ValueError("a stage cannot be named 'step': that entry of the state is the count")
    present = {key: stage for key, stage in stages.items() if stage is not None}
    schedules = [stage.schedule for stage in present.values() if stage.schedule is not None]
    if len(schedules) > 1:
        raise ValueError(f"{name} has {len(schedules)} stages that apply a learning rate; keep one")
    parts = _Chain(name, present, schedules[0] if schedules else constant_schedule(1.0))
    return NoiseAwareTransformation(parts, name=name, lr=parts.lr, stages=present)


def is_noise_aware(transformation: GradientTransformation) -> bool:
    """Whether ``transformation`` takes a :class:`~opake_lightning.types.NoisedPytree`.

    This library's optimizers do, and a ``torchopt.chain`` that begins with one.

    >>> import torchopt
    >>> is_noise_aware(chain()), is_noise_aware(torchopt.sgd(lr=0.1))
    (True, False)
    """
    if isinstance(transformation, ChainedGradientTransformation):
        transformation = transformation.transformations[0]
    return isinstance(transformation, NoiseAwareTransformation)


def _why_no_square(name: str, stages: Mapping[str, Stage]) -> str:
    """Why an optimizer of these stages refuses squares released on their own, or nothing."""
    uses = {stage.on_square for stage in stages.values()}
    if "corrects" in uses:
        return (
            f"{name}(noise_bias_correction=True) got a SecondMomentNoiseOutput: both keep noise "
            "out of the second moment, and together they would take it off twice; set "
            "noise_bias_correction=False, or pass output.gradient"
        )
    if "uses" not in uses:
        return (
            f"{name} got a SecondMomentNoiseOutput, but makes no use of squares that are released "
            "on their own; release none (no second_moment when clipping, no second_moment_strategy "
            "in DPFTRL), which lowers the noise on the gradient, or take adam, adamw, radam, "
            "ademamix, rmsprop or adadelta"
        )
    return ""


@final
@dataclass(frozen=True, slots=True)
class _Chain:
    name: str
    stages: Mapping[str, Stage]
    lr: Schedule
    compile: bool = False

    def compiled(self) -> _Chain:
        return replace(self, compile=True)

    def init(self, params: Any) -> dict[str, Any]:
        layout = layout_of(params)
        return {"step": 0} | {
            name: _closed(stage, stage.init(layout, params), layout, {})
            for name, stage in self._stateful.items()
        }

    @property
    def _stateful(self) -> dict[str, Stage]:
        return {name: stage for name, stage in self.stages.items() if stage.stateful}

    @torch.no_grad()
    def update(
        self,
        updates: Any,
        state: Mapping[str, Any],
        *,
        params: Any = None,
        inplace: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        layout = layout_of(self._released(updates)[0] if params is None else params)
        return self._run(updates, state, params, layout, inplace=inplace, leaves=None)

    @torch.no_grad()
    def step_(self, updates: Any, state: Mapping[str, Any], params: Any) -> dict[str, Any]:
        leaves, layout = flatten(params)
        moves, new = self._run(updates, state, params, layout, inplace=True, leaves=leaves)
        if moves is None:
            # They were written to as one tensor, of which autograd knows nothing.
            torch.autograd.graph.increment_version(leaves)
        elif leaves:
            _foreach_add_(leaves, cast("list[Tensor]", optree.tree_leaves(moves)))
        return new

    def _run(
        self,
        updates: Any,
        state: Mapping[str, Any],
        params: Any,
        layout: Layout,
        *,
        inplace: bool,
        leaves: list[Tensor] | None,
    ) -> tuple[Any, dict[str, Any]]:
        """The updates, or None if they could be added to ``leaves``, and the new state.

        Args:
            updates: As the public methods take them.
            state: Likewise.
            params: Likewise.
            layout: That of the parameters, or of the gradient without them.
            inplace: Whether the tensors of the state and of the gradient may be written to.
            leaves: Those of the parameters, if the updates are to be added to them.
        """
        gradient, variance, square = self._released(updates)
        # All that can be wrong is found before anything is written in place.
        needs_params = self._checked(state, params)
        step: int = state["step"]
        lr = _check.non_negative(f"the learning rate at step {step}", self.lr(step))
        opened, kept, own = self._opened(state, layout)
        target = bases(leaves, own) if leaves is not None and own == layout else None
        whole = [stage.whole for stage in self.stages.values()]
        in_pieces = not inplace and bool(whole) and not any(whole)
        read = cast("Callable[..., Flats]", readable if in_pieces else pack)
        flats = read(gradient, own)
        values = read(params, own) if needs_params and target is None else target
        flow = Flow(
            flats, flats, variance, None if square is None else read(square, own), step, lr,
            values, own,
        )  # fmt: skip
        after = None if target is None else self._fused(flow, opened, target)
        buffer = flats
        if after is None:
            fresh = opened
            if not inplace:
                buffer = own.empty()
                fresh = {n: _empty(self.stages[n], each, own) for n, each in opened.items()}
            after = Pass(self.stages, opened, fresh, buffer, target).run(flow)
        new = {"step": step + 1} | {
            name: _closed(self.stages[name], each, own, kept[name] if inplace else {})
            for name, each in after.items()
        }
        if target is not None:
            return None, new
        if own is layout and layout.wide:
            return unpack(buffer, own), new
        return _as_types_of(gradient if params is None else params, buffer, own), new

    def _fused(self, flow: Flow, opened: Mapping[str, Any], target: Flats) -> dict[str, Any] | None:
        """The new states, if one kernel could do all of it; nothing has happened otherwise."""
        found = recipe_for(self.stages, flow, opened, compiled=self.compile)
        if found is None or not found[0].runs_on(target):
            return None
        found[0].run(target, flow.gradient)
        return found[1]

    def _released(self, updates: Any) -> tuple[Any, float, Any]:
        """The gradients, the variance of their noise, and their squares if released."""
        if isinstance(updates, (ClippedPytree, SecondMomentClippedPytree)):
            one = isinstance(updates, ClippedPytree)
            raise PrivacyError(
                f"optimizer.update() got a {type(updates).__name__}, which has no noise yet; pass "
                f"what the noise mechanism returned, or clipped.{'' if one else 'gradient.'}pytree "
                "for a run that is meant to be non-private"
            )
        square = None
        if isinstance(updates, SecondMomentNoiseOutput):
            refusal = _why_no_square(self.name, self.stages)
            if refusal:
                raise PrivacyError(refusal)
            updates, square = updates.gradient, updates.square.pytree
        if isinstance(updates, NoisedPytree):
            stddev = _check.non_negative("noise_stddev", updates.noise_stddev)
            return updates.pytree, stddev**2, square
        return updates, 0.0, square

    def _checked(self, state: Mapping[str, Any], params: Any) -> bool:
        """Whether the parameters are needed; raises if they, or parts of the state, are missing."""
        expected = ["step", *self._stateful]
        if set(state) != set(expected):
            raise ValueError(
                f"the state has the entries {sorted(state)}, this optimizer keeps "
                f"{sorted(expected)}; pass what its own init() or update() returned"
            )
        needs = [stage.needs_params for stage in self.stages.values() if stage.needs_params]
        if needs and params is None:
            raise ValueError(f"{needs[0]} needs the parameters; call update(..., params=params)")
        return bool(needs)

    def _opened(
        self, state: Mapping[str, Any], layout: Layout
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]], Layout]:
        """States with flat tensors for pytrees, the pytrees that are views of them, the layout."""
        found = self._found(state, layout)
        if any(flats is None for each in found.values() for flats in each.values()):
            # What is wrong is a matter of the state's layout, which may be another.
            name = next(iter(found))
            layout = layout_of(self.stages[name].like_params(state[name]))
            found = self._found(state, layout)
        opened: dict[str, Any] = {}
        kept: dict[str, dict[str, Any]] = {}
        for name, each in found.items():
            other = self.stages[name].layouts(layout)
            trees = {field: getattr(state[name], field) for field in each}
            opened[name] = replace(
                state[name],
                **{
                    field: pack(trees[field], other.get(field, layout)) if flats is None else flats
                    for field, flats in each.items()
                },
            )
            kept[name] = {field: trees[field] for field in each if each[field] is not None}
        return opened, kept, layout

    def _found(
        self, state: Mapping[str, Any], layout: Layout
    ) -> dict[str, dict[str, Flats | None]]:
        """For each stage and pytree of its state, the flat tensors that it consists of views of."""
        found: dict[str, dict[str, Flats | None]] = {}
        for name, stage in self._stateful.items():
            own, other = state[name], stage.layouts(layout)
            found[name] = {
                field: packed(getattr(own, field), other.get(field, layout))
                for field in tree_fields(own)
            }
        return found


def _empty(stage: Stage, state: Any, layout: Layout) -> Any:
    """``state`` with new flat tensors of any content."""
    other = stage.layouts(layout)
    return replace(state, **{n: other.get(n, layout).empty() for n in tree_fields(state)})


def _closed(stage: Stage, state: Any, layout: Layout, kept: Mapping[str, Any]) -> Any:
    """``state`` with pytrees of views for its flat tensors: those of ``kept``, or new ones."""
    other = stage.layouts(layout)
    trees = {
        name: kept[name] if name in kept else unpack(getattr(state, name), other.get(name, layout))
        for name in tree_fields(state)
    }
    return replace(state, **trees)


def _as_types_of(like: Any, flats: Flats, layout: Layout) -> Any:
    leaves = [
        view.to(leaf.device, leaf.dtype)
        for view, leaf in zip(layout.views(flats), layout.leaves(like), strict=True)
    ]
    return optree.tree_unflatten(layout.treespec, leaves)
