"""Who takes part in ``step.py``: one whole training step each, on a model of ``models.py``.

A contender is a function of (model, batch, settings) that returns a function making one step in
place, or raises :class:`NotHereError` with the reason why it cannot take part. Every private step
clips to 1, adds noise with multiplier 1 and updates by AdamW with a learning rate of 1e-3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, util
from typing import Any

import torch
import torchopt
from models import Model
from torch import Tensor, nn

from opake_lightning._tree import seat
from opake_lightning.accounting import Ledger
from opake_lightning.optimizers import adamw
from opake_lightning.plan import DPSGD
from opake_lightning.random import key

__all__ = ["CONTENDERS", "FLOOR", "OURS", "PEERS", "NotHereError", "Settings", "opake_part"]

LR, CLIP, NOISE = 1e-3, 1.0, 1.0
FLOOR = "torch"
OURS = "ours"
PEERS = ("opacus hooks", "opacus ghost", "opake")


class NotHereError(RuntimeError):
    """A contender cannot take part; says why."""


@dataclass(frozen=True)
class Settings:
    """What a run of the benchmark has in common.

    Attributes:
        microbatch_size: For our step; None leaves the choice to it.
    """

    microbatch_size: int | None = None


Step = Callable[[], object]


def plain_torch(model: Model, batch: tuple[Any, Tensor], settings: Settings) -> Step:
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

    def loss_fn(_: dict[str, Tensor], batch: tuple[Any, Tensor]) -> tuple[Tensor, Any]:
        x, y = batch
        each = losses(net(x), y)  # by the module's own parameters, as in the trainer
        return each, (each.detach(), {})

    fixed = {"clipping_norm": CLIP, "noise_multiplier": NOISE, "target_delta": 1e-8}
    mechanism = DPSGD(**fixed, **plan).resolve(
        n_examples=1000 * batch_size, batch_size=batch_size, planned_steps=None, spent=Ledger()
    )
    seat(params)
    step = mechanism.step(loss_fn, adamw(LR), key(7))
    return step, params, step.init(params)


def ours(model: Model, batch: tuple[Any, Tensor], settings: Settings) -> Step:
    """Our step, in place, as the trainer runs it."""
    step, params, state = private_step(
        model.make(), model.losses, len(batch[1]), microbatch_size=settings.microbatch_size
    )

    def one_step() -> None:
        nonlocal state
        released, _, state = step.release(params, batch, state, inplace=True)
        with torch.no_grad():
            _, state = step.update(params, released, state, inplace=True)

    return one_step


def _opacus() -> Any:
    if util.find_spec("opacus") is None:
        raise NotHereError("not installed: pip install --no-deps opacus opt_einsum")
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    import opacus.grad_sample
    import opacus.optimizers
    import opacus.utils.fast_gradient_clipping_utils

    return opacus


def opacus_hooks(model: Model, batch: tuple[Any, Tensor], settings: Settings) -> Step:
    """Opacus, with per-example gradients from module hooks."""
    del settings
    opacus, (x, y) = _opacus(), batch
    net = opacus.grad_sample.GradSampleModule(model.make())
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.AdamW(net.parameters(), lr=LR, fused=True),
        noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=len(y),
    )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        model.losses(net(x), y).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(model: Model, batch: tuple[Any, Tensor], settings: Settings) -> Step:
    """Opacus, with norms from layer inputs and outputs, and a second backward pass."""
    del settings
    opacus, (x, y) = _opacus(), batch
    net = opacus.grad_sample.GradSampleModuleFastGradientClipping(
        model.make(), max_grad_norm=CLIP, use_ghost_clipping=True
    )
    optimizer = opacus.optimizers.DPOptimizerFastGradientClipping(
        torch.optim.AdamW(net.parameters(), lr=LR, fused=True),
        noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=len(y),
    )  # fmt: skip
    loss = opacus.utils.fast_gradient_clipping_utils.DPTensorFastGradientClipping

    def step() -> None:
        optimizer.zero_grad()
        loss(net, optimizer, model.losses(net(x), y)).backward()
        optimizer.step()

    return step


def opake_part(name: str) -> Any:
    """A public module of opake, whose own wheel holds no code."""
    try:
        return import_module(f"opake.{name}")
    except ImportError as error:
        raise NotHereError(
            "not installed: pip install --no-deps opake-base opake-engine opake-optimizers "
            "opake-dpsgd opake-dpftrl opake-accounting"
        ) from error


def opake(model: Model, batch: tuple[Any, Tensor], settings: Settings) -> Step:
    """Opake, with per-example gradients from vmap, and its own AdamW, as it has no other."""
    del settings
    dpsgd, optimizers = opake_part("dpsgd"), opake_part("optimizers")
    functional, random = opake_part("functional"), opake_part("random")
    net, params, _ = functional.make_functional(
        model.make(), disable_autograd_tracking=True, partition_trainable=True
    )

    def loss_fn(params: dict[str, Tensor], x: Any, y: Tensor) -> Tensor:
        return model.losses(net(params, x), y).squeeze(0)

    clip_fn, clip = dpsgd.clipped_grad(
        functional.with_batch_dim(loss_fn, batch_argnums=(1, 2)),
        batch_argnums=(1, 2), clipping_norm=CLIP, normalize_by=len(batch[1]),
    )  # fmt: skip
    noise_fn, noise = dpsgd.gaussian_noise(noise_multiplier=NOISE, key=random.key(7))
    optimizer = optimizers.adamw(LR)
    state = optimizer.init(params)

    def step() -> None:
        nonlocal params, clip, noise, state
        grads, clip = clip_fn(params, *batch, state=clip)
        noised, noise = noise_fn(grads, noise)
        with torch.no_grad():
            updates, state = optimizer.update(noised, state, params=params)
            params = torchopt.apply_updates(params, updates, inplace=True)

    return step


CONTENDERS: dict[str, Callable[[Model, tuple[Any, Tensor], Settings], Step]] = {
    FLOOR: plain_torch,
    "ours": ours,
    "opacus hooks": opacus_hooks,
    "opacus ghost": opacus_ghost,
    "opake": opake,
}
