"""Who takes part in ``step.py``: one whole training step each, on a model of ``models.py``.

A contender is a function of (model, batch, settings) that returns a function making one step in
place, or raises :class:`NotHereError` with the reason why it cannot take part. Every private step
clips to 1, adds noise with multiplier 1 and updates by AdamW with a learning rate of 1e-3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from typing import Any

import torch
from models import Model
from torch import Tensor, nn

from opake_lightning._tree import seat
from opake_lightning.accounting import Ledger
from opake_lightning.optimizers import adamw
from opake_lightning.plan import DPSGD
from opake_lightning.random import key

__all__ = ["CONTENDERS", "FLOOR", "OURS", "PEERS", "NotHereError", "Settings"]

LR, CLIP, NOISE = 1e-3, 1.0, 1.0
FLOOR = "torch"
OURS = ("ours", "ours, vmap")
PEERS = ("opacus hooks", "opacus ghost", "opake")


class NotHereError(RuntimeError):
    """A contender cannot take part; says why."""


@dataclass(frozen=True)
class Settings:
    """What a run of the benchmark has in common.

    Attributes:
        microbatch_size: For our engines; None leaves the choice to them.
    """

    microbatch_size: int | None = None


Step = Callable[[], object]


def plain_torch(model: Model, batch: tuple[Tensor, Tensor], settings: Settings) -> Step:
    """The floor: forward, mean loss, backward, fused AdamW; nothing private about it."""
    del settings
    net, (x, y) = model.make(), batch
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model.losses(net(x), y).mean().backward()
        optimizer.step()

    return step


def private_step(
    net: nn.Module, losses: Callable[..., Tensor], batch_size: int, **plan: Any
) -> tuple[Any, dict[str, Tensor], Any]:
    """Our step, its parameters, seated as the trainer seats them, and its first state."""
    params = dict(net.named_parameters())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        x, y = batch
        each = losses(torch.func.functional_call(net, params, (x,)), y)
        return each, (each.detach(), {})

    mechanism = DPSGD(clipping_norm=CLIP, noise_multiplier=NOISE, **plan).resolve(
        n_examples=1000 * batch_size, batch_size=batch_size, planned_steps=None, spent=Ledger()
    )
    seat(params)
    step = mechanism.step(loss_fn, adamw(LR), key(7))
    return step, params, step.init(params)


def ours(engine: str) -> Callable[[Model, tuple[Tensor, Tensor], Settings], Step]:
    """Our step with one of our engines, in place, as the trainer runs it."""

    def contender(model: Model, batch: tuple[Tensor, Tensor], settings: Settings) -> Step:
        try:
            step, params, state = private_step(
                model.make(),
                model.losses,
                len(batch[0]),
                engine=engine,
                microbatch_size=settings.microbatch_size,
            )
        except ValueError as refused:
            raise NotHereError(f"there is no engine {engine!r} yet") from refused

        def one_step() -> None:
            nonlocal state
            released, _, state = step.release(params, batch, state, inplace=True)
            with torch.no_grad():
                _, state = step.update(params, released, state, inplace=True)

        return one_step

    return contender


def _opacus() -> Any:
    if util.find_spec("opacus") is None:
        raise NotHereError("not installed: pip install --no-deps opacus opt_einsum")
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    import opacus.grad_sample
    import opacus.optimizers
    import opacus.utils.fast_gradient_clipping_utils

    return opacus


def opacus_hooks(model: Model, batch: tuple[Tensor, Tensor], settings: Settings) -> Step:
    """Opacus, with per-example gradients from module hooks."""
    del settings
    opacus, (x, y) = _opacus(), batch
    net = opacus.grad_sample.GradSampleModule(model.make())
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.AdamW(net.parameters(), lr=LR, fused=True),
        noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=len(x),
    )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        model.losses(net(x), y).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(model: Model, batch: tuple[Tensor, Tensor], settings: Settings) -> Step:
    """Opacus, with norms from layer inputs and outputs, and a second backward pass."""
    del settings
    opacus, (x, y) = _opacus(), batch
    net = opacus.grad_sample.GradSampleModuleFastGradientClipping(
        model.make(), max_grad_norm=CLIP, use_ghost_clipping=True
    )
    optimizer = opacus.optimizers.DPOptimizerFastGradientClipping(
        torch.optim.AdamW(net.parameters(), lr=LR, fused=True),
        noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=len(x),
    )  # fmt: skip
    loss = opacus.utils.fast_gradient_clipping_utils.DPTensorFastGradientClipping

    def step() -> None:
        optimizer.zero_grad()
        loss(net, optimizer, model.losses(net(x), y)).backward()
        optimizer.step()

    return step


def opake(model: Model, batch: tuple[Tensor, Tensor], settings: Settings) -> Step:
    """The reference library, as far as it can be installed."""
    del model, batch, settings
    if util.find_spec("opake") is None:
        raise NotHereError("its wheel (0.16.1) holds no code that could be run")
    raise NotHereError("an opake with code was found; write its step here")


CONTENDERS: dict[str, Callable[[Model, tuple[Tensor, Tensor], Settings], Step]] = {
    FLOOR: plain_torch,
    "ours": ours("one_pass"),
    "ours, vmap": ours("vmap"),
    "opacus hooks": opacus_hooks,
    "opacus ghost": opacus_ghost,
    "opake": opake,
}
