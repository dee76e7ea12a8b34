"""Schedule-free optimization: an average of iterates in place of a decaying learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast, final

import torch

from opake_lightning import _check
from opake_lightning._tree import Layout, pack
from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain
from opake_lightning.optimizers._stage import Flow, Stage
from opake_lightning.optimizers._stages import scale_by_learning_rate
from opake_lightning.optimizers.types import AverageState, ScheduleFreeState
from opake_lightning.scheduling import with_warmup

__all__ = ["average_iterates", "evaluation_params", "schedule_free"]


def schedule_free(
    base: NoiseAwareTransformation,
    beta: float = 0.9,
    *,
    warmup_steps: int = 0,
    weight_power: float = 0.0,
    weight_lr_power: float = 2.0,
) -> NoiseAwareTransformation:
    r"""Run ``base`` without a schedule, and average what it does.

    .. math::
        z_{t+1} &= z_t + u_t(\tilde g(y_t)) \\
        x_{t+1} &= (1-c_t)\,x_t + c_t z_{t+1}, \qquad c_t = w_t / \textstyle\sum_{s \le t} w_s,
            \qquad w_t = t^r \bigl(\max_{s \le t} lr_s\bigr)^p \\
        y_{t+1} &= (1-\beta)\,z_{t+1} + \beta x_{t+1}

    The parameters that you train are y: gradients are taken there, and so is the weight decay of
    ``base``. Evaluate, export and publish x, which is ``state.x``. At a constant learning rate it
    is the plain average of z.

    Noise goes into z as into any iterate. How much of it the average takes away depends on how the
    iterates are correlated, so there is no fixed factor to count on; the second moments of ``base``
    are corrected as they are without averaging.

    Args:
        base: An optimizer of this library, with a constant learning rate. β takes the place of its
            momentum: the published methods have ``sgd(lr)`` and ``adamw(lr, betas=(0.0, 0.999))``
            underneath, and with an average of gradients left on, as in ``adamw(lr)``, there are two
            momenta.
        beta: β in [0, 1).
        warmup_steps: Steps in which the learning rate rises linearly, reaching its value at the
            last of them; 0 for none. Small rates weigh little in the average.
        weight_power: r, at least 0; more than 0 favours late iterates.
        weight_lr_power: p, at least 0; 0 weighs warm-up steps like all others.

    Returns:
        The optimizer, whose state is a
        :class:`~opake_lightning.optimizers.types.ScheduleFreeState`. ``update`` needs ``params``,
        which must be what its last update made of them.

    Raises:
        TypeError: If ``base`` is not an optimizer of this library.
        ValueError: If a setting is outside its range, or ``base`` is schedule-free itself.

    Source: Defazio et al. 2024 (arXiv:2405.15682).
    Departs from it: x and z are both kept, where its program has z alone and works x out of y.

    >>> import torch
    >>> from opake_lightning.optimizers import sgd
    >>> optimizer, y = schedule_free(sgd(lr=0.1), beta=0.5), torch.zeros(1)
    >>> state = optimizer.init(y)
    >>> for gradient in (1.0, 1.0):
    ...     update, state = optimizer.update(torch.tensor([gradient]), state, params=y)
    ...     y = y + update
    >>> state.z, state.x, y  # z = -0.2, x = (-0.1 - 0.2) / 2, y = (z + x) / 2
    (tensor([-0.2000]), tensor([-0.1500]), tensor([-0.1750]))
    """
    if not isinstance(base, NoiseAwareTransformation):
        raise TypeError(
            f"schedule_free takes an optimizer of opake_lightning, got a {type(base).__name__}: "
            f"{base!r}; it has to know the learning rate of each step"
        )
    if "average" in base.stages:
        raise ValueError(
            f"{base.name} already averages its iterates; give the optimizer underneath"
        )
    stages = dict(base.stages)
    steps = _check.at_least("warmup_steps", warmup_steps, 0)
    if steps > 1:
        # Begins one above zero: the first step has a share of the rate, too.
        rate = with_warmup(base.lr, steps - 1, base.lr(0) / steps)
        name = next((key for key, stage in stages.items() if stage.schedule is not None), None)
        if name is None:
            raise ValueError(f"{base.name} has no learning rate to warm up; set warmup_steps=0")
        stages[name] = scale_by_learning_rate(rate)
    average = average_iterates(beta, weight_power=weight_power, weight_lr_power=weight_lr_power)
    inner = chain(f"schedule_free({base.name})", **stages, average=average)
    return NoiseAwareTransformation(
        _ScheduleFree(inner), name=inner.name, lr=inner.lr, stages=inner.stages
    )


def evaluation_params(state: Any) -> Any:
    """The parameters to evaluate and publish, if they are not the ones that are trained.

    Args:
        state: State of any optimizer, also of a ``torchopt.chain`` that begins with one of ours.

    Returns:
        The averaged parameters x of a :func:`schedule_free` optimizer; None for any other.

    >>> import torch
    >>> from opake_lightning.optimizers import sgd
    >>> evaluation_params(schedule_free(sgd(lr=0.1)).init(torch.ones(1)))
    tensor([1.])
    >>> evaluation_params(sgd(lr=0.1).init(torch.ones(1))) is None
    True
    """
    if isinstance(state, tuple) and state:
        return evaluation_params(cast("tuple[Any, ...]", state)[0])
    return state.x if isinstance(state, ScheduleFreeState) else None


def average_iterates(
    beta: float, *, weight_power: float = 0.0, weight_lr_power: float = 2.0
) -> Stage:
    """The last stage of a schedule-free optimizer: apply the update to z, move y towards x.

    Args:
        beta: Share of x in y, in [0, 1).
        weight_power: At least 0; see :func:`schedule_free`.
        weight_lr_power: At least 0; see :func:`schedule_free`.
    """
    return _AverageIterates(
        _check.fraction("beta", beta, zero=True, one=False),
        _check.non_negative("weight_power", weight_power),
        _check.non_negative("weight_lr_power", weight_lr_power),
    )


@final
@dataclass(frozen=True, slots=True)
class _AverageIterates(Stage):
    beta: float
    weight_power: float
    weight_lr_power: float
    stateful: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> AverageState:
        flats = pack(params, layout)
        return AverageState([x.clone() for x in flats], [z.clone() for z in flats], 0.0, 0.0)

    @property
    def needs_params(self) -> str:
        return "schedule_free"

    def update(self, flow: Flow, state: AverageState) -> AverageState:
        assert flow.params is not None  # the chain has seen to it
        max_lr = max(state.max_lr, flow.lr)
        weight = float((flow.step + 1) ** self.weight_power * max_lr**self.weight_lr_power)
        weight_sum = state.weight_sum + weight
        share = weight / weight_sum if weight_sum else 0.0
        direction: list[torch.Tensor] = []
        for x, z, y, u in zip(state.x, state.z, flow.params, flow.direction, strict=True):
            z.add_(u)
            x.lerp_(z, share)
            direction.append(torch.lerp(z, x, self.beta).sub_(y))
        flow.direction = direction
        return replace(state, weight_sum=weight_sum, max_lr=max_lr)


@final
@dataclass(frozen=True, slots=True)
class _ScheduleFree:
    inner: NoiseAwareTransformation

    def compiled(self) -> _ScheduleFree:
        return _ScheduleFree(self.inner.compiled())

    def init(self, params: Any) -> ScheduleFreeState:
        return ScheduleFreeState(self.inner.init(params))

    def update(
        self,
        updates: Any,
        state: ScheduleFreeState,
        *,
        params: Any = None,
        inplace: bool = False,
    ) -> tuple[Any, ScheduleFreeState]:
        update: Callable[..., Any] = self.inner.update
        updates, stages = update(updates, state.stages, params=params, inplace=inplace)
        return updates, ScheduleFreeState(stages)

    def step_(self, updates: Any, state: ScheduleFreeState, params: Any) -> ScheduleFreeState:
        return ScheduleFreeState(self.inner.step_(updates, state.stages, params))
