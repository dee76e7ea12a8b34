"""Hooks that Lightning calls around backward(), which a private run has not: refused, not ignored.

A step clips per-example gradients, sums them and adds noise in one function, and a functional
optimizer applies what that releases. No ``.grad`` is ever set. Called as always are, among others,
``on_before_optimizer_step`` (after the release, before the update) and ``on_train_batch_start`` and
``_end``.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from opake_lightning.errors import PrivacyError

__all__ = ["check_hooks"]

_SCHEDULE = (
    "give the learning rate as a function of the step: adamw(lr=with_warmup(cosine_schedule(...), "
    "...)), from opake_lightning.scheduling"
)
_CLIPPING = (
    "each example's gradient is clipped by the plan, DPSGD(clipping_norm=...), and what is done to "
    "the released one is a stage of the optimizer: optimizers.chain(...)"
)
_GRADIENT = (
    "there is no gradient of the batch to see or change before it has noise. Changes to the "
    "released one are a stage of the optimizer, optimizers.chain(...); diagnostics, which are not "
    "private, are logged with log_not_private = True"
)
_ZEROING = "gradients are not accumulated in .grad, so there is nothing to zero; leave it out"

_OF_MODULE = {
    "optimizer_step": f"the private step is made in training_step; {_SCHEDULE}",
    "optimizer_zero_grad": _ZEROING,
    "configure_gradient_clipping": _CLIPPING,
    "clip_gradients": _CLIPPING,
    "lr_scheduler_step": f"there are no torch LR schedulers; {_SCHEDULE}",
    "backward": _GRADIENT,
    "on_before_backward": _GRADIENT,
    "on_after_backward": _GRADIENT,
    "on_before_zero_grad": f"{_ZEROING}, or use on_before_optimizer_step",
}
_OF_CALLBACK = {name: why for name, why in _OF_MODULE.items() if hasattr(pl.Callback, name)}


def check_hooks(module: Any) -> None:
    """Refuse a module, or a callback, with a hook of its own that a private run never calls.

    A subclass may take the hook of a base class back: ``backward = LightningModule.backward``.

    Raises:
        PrivacyError: Naming the hook and what to use instead.
    """
    _check(module, pl.LightningModule, _OF_MODULE)
    for callback in module.trainer.callbacks:
        _check(callback, pl.Callback, _OF_CALLBACK)


def _check(owner: Any, base: type[Any], hooks: dict[str, str]) -> None:
    for name, why in hooks.items():
        kind, own = type(owner), name in vars(owner)
        if own or getattr(kind, name) is not getattr(base, name):
            source = next(each for each in kind.__mro__ if name in vars(each))
            of = "" if own or source is kind else f" (defined in {source.__name__})"
            raise PrivacyError(
                f"{kind.__name__} overrides {name}{of}, which a private run never calls: {why}"
            )
