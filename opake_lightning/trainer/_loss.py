"""``per_example_loss`` as the function that clipping differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from opake_lightning.errors import PrivacyError

__all__ = ["ModuleLoss", "is_in_loss"]

_running: list[Any] = []


def is_in_loss(module: Any) -> bool:
    """Whether ``per_example_loss`` of ``module`` is being called."""
    return any(each is module for each in _running)


class ModuleLoss:
    """The loss of a module, at the module's own parameters.

    Args:
        module: Its ``per_example_loss`` is called.
        at_first_step: Tells whether the step is the first of a fit.
        whole: Whether it is called with a whole batch, for a run that is not private.
    """

    def __init__(self, module: Any, at_first_step: Callable[[], bool], *, whole: bool) -> None:
        self._module, self._at_first_step, self._whole = module, at_first_step, whole

    @property
    def owners(self) -> list[Any]:
        """What the loss may not leave anything of an example in."""
        trainer = getattr(self._module, "_trainer", None)
        if trainer is None:
            return [self._module]
        # Its properties, such as callback_metrics, are dicts of the second.
        held = vars(trainer), vars(trainer._logger_connector)
        return [self._module, *trainer.callbacks, trainer.datamodule, *held]

    @property
    def needs_gradient(self) -> bool:
        """At the first step of a fit; what becomes of later ones must not depend on data."""
        return self._at_first_step()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What messages say where it is."""
        return self._module.per_example_loss

    def __call__(self, params: Any, batch: Any) -> tuple[Tensor, Any]:
        """(loss, (loss, aux)); ``params`` are the module's own, and there already."""
        del params
        _running.append(self._module)  # not on the module, where the fence would see it change
        try:
            out = self._module.per_example_loss(batch)
        finally:
            _running.pop()
        losses, aux = _parts(out)
        if self._whole and losses.dim() > 1:
            raise PrivacyError(
                "per_example_loss must return a number, or one for each example, got shape "
                f"{tuple(losses.shape)}"
            )
        return losses, (losses.detach(), aux)


def _parts(out: Any) -> tuple[Tensor, Any]:
    """The losses, and the auxiliary output, {} if there is none."""
    if isinstance(out, tuple) and len(out) != 2:
        raise PrivacyError(
            f"per_example_loss returned a tuple of {len(out)}; return the loss alone, or "
            "(loss, dict of auxiliary tensors)"
        )
    losses, aux = out if isinstance(out, tuple) else (out, {})
    if not isinstance(losses, Tensor):
        raise PrivacyError(
            f"per_example_loss must return one number per example, a tensor of shape () or (1,) "
            f"for a batch of one row, got {type(losses)}"
        )
    if not losses.is_floating_point():
        raise PrivacyError(
            f"per_example_loss returned losses of dtype {losses.dtype}, which have no gradient; "
            "return real floating-point losses, not counts or predictions"
        )
    return losses, aux
