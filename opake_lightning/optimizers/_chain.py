"""Optimizers as named stages one after the other.

A gradient passes through the stages and comes out as the update. What happens at the border is done
here, once: which kinds of gradient are taken, the packing into flat tensors, copies of the state
unless it may be written in place, the type of the result. So a stage is arithmetic on flat tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias, cast, final

import optree
import torch
from torch import Tensor
from torchopt.base import ChainedGradientTransformation, GradientTransformation

from opake_lightning import _check
from opake_lightning._tree import Layout, layout_of, pack, unpack
from opake_lightning.errors import PrivacyError
from opake_lightning.scheduling import Schedule, constant_schedule
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

__all__ = ["Flats", "Flow", "NoiseAwareTransformation", "Stage", "chain", "is_noise_aware"]

Flats: TypeAlias = list[Tensor]


@final
@dataclass(frozen=True, slots=True)
class Flow:
    """What passes from stage to stage in one update. A stage writes into none of its tensors.

    Attributes:
        gradient: The released gradient, with coupled weight decay: what second moments square.
        direction: What has become of it so far; after the last stage, the update.
        variance: Of the noise on each coordinate of ``gradient``.
        square: The square of ``gradient``, if an estimate of it was released on its own.
        step: Number of updates before this one.
        lr: Learning rate of this step.
        params: The parameters, if a stage asked for them.
        layout: Where each leaf lies in the flat tensors.
    """

    gradient: Flats
    direction: Flats
    variance: float
    square: Flats | None
    step: int
    lr: float
    params: Flats | None
    layout: Layout


class Stage(ABC):
    """One stage of a chain; its settings are its attributes, its state is passed in and out.

    In a state given to or returned by a stage, flat tensors stand in place of pytrees, and the
    stage may write into them.
    """

    __slots__ = ()
    stateful: ClassVar[bool] = False

    def init(self, layout: Layout, params: Any) -> Any:
        """The first state of a stateful stage, which shares no memory with ``params``."""
        return None

    def layouts(self, layout: Layout) -> Mapping[str, Layout]:
        """Layouts of the pytrees in its state that are not shaped like the parameters."""
        return {}

    def like_params(self, state: Any) -> Any:
        """A pytree shaped and typed like the parameters' flat tensors, from a closed state."""
        return getattr(state, _tree_fields(state)[0])

    @property
    def needs_params(self) -> str:
        """The setting because of which parameters are needed, as the user typed it, or nothing."""
        return ""

    @property
    def on_square(self) -> Literal["ignores", "uses", "corrects"]:
        """What it does with squares that are released on their own.

        ``"corrects"`` is for a stage that would use them but takes noise off the square of the
        gradient instead.
        """
        return "ignores"

    @property
    def schedule(self) -> Schedule | None:
        """The learning rate as a function of the step, in the stage that applies it."""
        return None

    @abstractmethod
    def update(self, flow: Flow, state: Any) -> tuple[Flow, Any]:
        """Pass ``flow`` on, and the new state."""


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

    def __new__(
        cls, init: Any, update: Any, *, name: str, lr: Schedule, stages: Mapping[str, Stage]
    ) -> NoiseAwareTransformation:
        """Keep the attributes beside the pair of functions."""
        self = super().__new__(cls, init, update)
        self.name = name
        self.lr = lr
        self.stages = stages
        self.square_refusal = _why_no_square(name, stages)
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Arguments with which a copy is made."""
        kept = {"name": self.name, "lr": self.lr, "stages": self.stages}
        return (self.init, self.update), kept

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
    return NoiseAwareTransformation(
        parts.init, parts.update, name=name, lr=parts.lr, stages=present
    )


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
            "on their own; leave second_moment out of the clipping function, which lowers the "
            "noise on the gradient, or take adam, adamw, radam, ademamix, rmsprop or adadelta"
        )
    return ""


@final
@dataclass(frozen=True, slots=True)
class _Chain:
    name: str
    stages: Mapping[str, Stage]
    lr: Schedule

    def init(self, params: Any) -> dict[str, Any]:
        layout = layout_of(params)
        return {"step": 0} | {
            name: _closed(stage, stage.init(layout, params), layout)
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
        gradient, variance, square = self._released(updates)
        # All that can be wrong is found before anything is written in place.
        needs_params = self._checked(state, params)
        step: int = state["step"]
        lr = _check.non_negative(f"the learning rate at step {step}", self.lr(step))
        layout = self._layout(state, gradient if params is None else params)
        flats = pack(gradient, layout)
        flow = Flow(
            flats, flats, variance, None if square is None else pack(square, layout), step, lr,
            pack(params, layout) if needs_params else None, layout,
        )  # fmt: skip
        opened = {
            name: _opened(stage, state[name], layout, inplace=inplace)
            for name, stage in self._stateful.items()
        }
        new: dict[str, Any] = {"step": step + 1}
        for name, stage in self.stages.items():
            flow, after = stage.update(flow, opened.get(name))
            if stage.stateful:
                new[name] = _closed(stage, after, layout, state[name] if inplace else None)
        direction = _unshared(flow.direction, [*flats, *_flat_tensors(opened)])
        return _as_types_of(gradient if params is None else params, direction, layout), new

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

    def _layout(self, state: Mapping[str, Any], tree: Any) -> Layout:
        """The state's layout, or that of ``tree`` if no stage keeps one."""
        name = next(iter(self._stateful), None)
        return layout_of(tree if name is None else self.stages[name].like_params(state[name]))


def _tree_fields(state: Any) -> list[str]:
    """Names of the fields of a stage's state that hold pytrees."""
    return [f.name for f in fields(state) if not isinstance(getattr(state, f.name), (int, float))]


def _flat_tensors(opened: Mapping[str, Any]) -> Iterator[Tensor]:
    for state in opened.values():
        for name in _tree_fields(state):
            yield from getattr(state, name)


def _opened(stage: Stage, state: Any, layout: Layout, *, inplace: bool) -> Any:
    """``state`` with flat tensors for its pytrees: its own ones to write in place, else copies."""
    other = stage.layouts(layout)
    flats = {
        name: pack(getattr(state, name), other.get(name, layout)) for name in _tree_fields(state)
    }
    if not inplace:
        flats = {name: [flat.clone() for flat in each] for name, each in flats.items()}
    return replace(state, **flats)


def _closed(stage: Stage, state: Any, layout: Layout, before: Any = None) -> Any:
    """``state`` with pytrees of views for its flat tensors.

    The pytrees of ``before`` are kept where the flat tensors are still the ones behind them.
    """
    trees: dict[str, Any] = {}
    other = stage.layouts(layout)
    for name in _tree_fields(state):
        flats: Flats = getattr(state, name)
        own = other.get(name, layout)
        tree = None if before is None else getattr(before, name)
        same = before is not None and _lie_in(tree, flats, own)
        trees[name] = tree if same else unpack(flats, own)
    return replace(state, **trees)


def _lie_in(tree: Any, flats: Flats, layout: Layout) -> bool:
    leaves = cast("list[Tensor]", optree.tree_leaves(tree))
    for flat, group in zip(flats, layout.groups, strict=True):
        # An empty leaf has no address.
        first = next((leaves[i] for i in group.members if leaves[i].numel()), None)
        if first is not None and flat.data_ptr() != first.data_ptr():
            return False
    return True


def _unshared(flats: Flats, others: list[Tensor]) -> Flats:
    """``flats``, copied where they are one of ``others``: whoever gets them may write to them."""
    taken = {other.data_ptr() for other in others}
    return [flat.clone() if flat.data_ptr() in taken else flat for flat in flats]


def _as_types_of(like: Any, flats: Flats, layout: Layout) -> Any:
    leaves = [
        view.to(leaf.device, leaf.dtype)
        for view, leaf in zip(layout.views(flats), layout.leaves(like), strict=True)
    ]
    return optree.tree_unflatten(layout.treespec, leaves)
