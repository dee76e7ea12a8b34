"""Optimizers as named stages one after the other.

A gradient passes through the stages and comes out as the update. What happens at the border is done
here, once: which kinds of gradient are taken, the packing into flat tensors, copies of the state
unless it may be written in place, the type of the result. So a stage is arithmetic on flat tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias, cast, final

import optree
import torch
from torch import Tensor
from torchopt.base import ChainedGradientTransformation, GradientTransformation

from opake_lightning import _check
from opake_lightning._tree import Layout, layout_of, pack, unpack
from opake_lightning.errors import PrivacyError
from opake_lightning.scheduling import Schedule, constant_schedule
from opake_lightning.types import ClippedPytree, NoisedPytree

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
        step: Number of updates before this one.
        lr: Learning rate of this step.
        params: The parameters, if a stage asked for them.
    """

    gradient: Flats
    direction: Flats
    variance: float
    step: int
    lr: float
    params: Flats | None


class Stage(ABC):
    """One stage of a chain; its settings are its attributes, its state is passed in and out.

    In a state given to or returned by a stage, flat tensors stand in place of pytrees, and the
    stage may write into them.
    """

    __slots__ = ()
    stateful: ClassVar[bool] = False

    def init(self, layout: Layout) -> Any:
        """The first state of a stateful stage."""
        return None

    @property
    def needs_params(self) -> str:
        """The setting because of which parameters are needed, as the user typed it, or nothing."""
        return ""

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
    ``update`` takes a pytree of gradients (a run without privacy) or a
    :class:`~opake_lightning.types.NoisedPytree`, whose noise level noise-aware stages use, and
    returns a plain pytree in the types of ``params``, or of the gradient without them.

    Attributes:
        name: Name of the factory, such as ``"adamw"``.
        lr: Learning rate as a function of the step.
    """

    name: str
    lr: Schedule

    def __new__(
        cls, init: Any, update: Any, *, name: str, lr: Schedule
    ) -> NoiseAwareTransformation:
        """Keep the two attributes beside the pair of functions."""
        self = super().__new__(cls, init, update)
        self.name = name
        self.lr = lr
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Arguments with which a copy is made."""
        return (self.init, self.update), {"name": self.name, "lr": self.lr}

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
    parts = _Chain(present, schedules[0] if schedules else constant_schedule(1.0))
    return NoiseAwareTransformation(parts.init, parts.update, name=name, lr=parts.lr)


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


@final
@dataclass(frozen=True, slots=True)
class _Chain:
    stages: Mapping[str, Stage]
    lr: Schedule

    def init(self, params: Any) -> dict[str, Any]:
        layout = layout_of(params)
        return {"step": 0} | {
            name: _closed(stage.init(layout), layout)
            for name, stage in self.stages.items()
            if stage.stateful
        }

    @torch.no_grad()
    def update(
        self,
        updates: Any,
        state: Mapping[str, Any],
        *,
        params: Any = None,
        inplace: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        gradient, variance = _released(updates)
        # All that can be wrong is found before anything is written in place.
        needs_params = self._checked(state, params)
        step: int = state["step"]
        lr = _check.non_negative(f"the learning rate at step {step}", self.lr(step))
        layout = layout_of(next(_trees(state), gradient if params is None else params))
        flats = pack(gradient, layout)
        opened = {
            name: _opened(state[name], layout, inplace=inplace)
            for name, stage in self.stages.items()
            if stage.stateful
        }
        flow = Flow(
            flats, flats, variance, step, lr, pack(params, layout) if needs_params else None
        )
        new: dict[str, Any] = {"step": step + 1}
        for name, stage in self.stages.items():
            flow, after = stage.update(flow, opened.get(name))
            if stage.stateful:
                new[name] = _closed(after, layout, state[name] if inplace else None)
        direction = _unshared(flow.direction, [*flats, *_flat_tensors(opened)])
        return _as_types_of(gradient if params is None else params, direction, layout), new

    def _checked(self, state: Mapping[str, Any], params: Any) -> bool:
        """Whether the parameters are needed; raises if they, or parts of the state, are missing."""
        expected = ["step", *(name for name, stage in self.stages.items() if stage.stateful)]
        if set(state) != set(expected):
            raise ValueError(
                f"the state has the entries {sorted(state)}, this optimizer keeps "
                f"{sorted(expected)}; pass what its own init() or update() returned"
            )
        needs = [stage.needs_params for stage in self.stages.values() if stage.needs_params]
        if needs and params is None:
            raise ValueError(f"{needs[0]} needs the parameters; call update(..., params=params)")
        return bool(needs)


def _released(updates: Any) -> tuple[Any, float]:
    """The gradients and the variance of their noise."""
    if isinstance(updates, ClippedPytree):
        raise PrivacyError(
            "optimizer.update() got a ClippedPytree, which has no noise yet; pass what the noise "
            "mechanism returned, or clipped.pytree for a run that is meant to be non-private"
        )
    if isinstance(updates, NoisedPytree):
        return updates.pytree, _check.non_negative("noise_stddev", updates.noise_stddev) ** 2
    return updates, 0.0


def _tree_fields(state: Any) -> list[str]:
    """Names of the fields of a stage's state that hold pytrees."""
    return [f.name for f in fields(state) if not isinstance(getattr(state, f.name), (int, float))]


def _trees(state: Mapping[str, Any]) -> Iterator[Any]:
    """The pytrees in the state of a whole optimizer."""
    for stage in state.values():
        if not isinstance(stage, int):
            yield from (getattr(stage, name) for name in _tree_fields(stage))


def _flat_tensors(opened: Mapping[str, Any]) -> Iterator[Tensor]:
    for flats in _trees(opened):
        yield from flats


def _opened(state: Any, layout: Layout, *, inplace: bool) -> Any:
    """``state`` with flat tensors for its pytrees: its own ones to write in place, else copies."""
    flats = {name: pack(getattr(state, name), layout) for name in _tree_fields(state)}
    if not inplace:
        flats = {name: [flat.clone() for flat in each] for name, each in flats.items()}
    return replace(state, **flats)


def _closed(state: Any, layout: Layout, before: Any = None) -> Any:
    """``state`` with pytrees of views for its flat tensors.

    The pytrees of ``before`` are kept where the flat tensors are still the ones behind them.
    """
    trees: dict[str, Any] = {}
    for name in _tree_fields(state):
        flats: Flats = getattr(state, name)
        tree = None if before is None else getattr(before, name)
        same = before is not None and _lie_in(tree, flats, layout)
        trees[name] = tree if same else unpack(flats, layout)
    return replace(state, **trees)


def _lie_in(tree: Any, flats: Flats, layout: Layout) -> bool:
    leaves = cast("list[Tensor]", optree.tree_leaves(tree))
    return all(
        flat.data_ptr() == leaves[group.members[0]].data_ptr()
        for flat, group in zip(flats, layout.groups, strict=True)
    )


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
