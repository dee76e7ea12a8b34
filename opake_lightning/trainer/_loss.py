"""What ``per_example_loss`` returned, checked before anything is made of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opake_lightning.errors import PrivacyError

__all__ = ["losses_of", "require_gradient"]


def losses_of(out: Any) -> tuple[Tensor, Any]:
    """The losses, one per example, and the auxiliary output, {} if there is none.

    Raises:
        PrivacyError: If ``out`` is something else.
    """
    if isinstance(out, tuple) and len(out) != 2:
        raise PrivacyError(
            f"per_example_loss returned a tuple of {len(out)}; return the losses alone, or "
            "(losses, dict of auxiliary tensors)"
        )
    losses, aux = out if isinstance(out, tuple) else (out, {})
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses)
        raise PrivacyError(
            f"per_example_loss must return one loss per example, a tensor of shape [B], got "
            f'{what}; use reduction="none", and .mean(1) over tokens or pixels, never over the '
            "batch"
        )
    if not losses.is_floating_point():
        raise PrivacyError(
            f"per_example_loss returned losses of dtype {losses.dtype}, which have no gradient; "
            "return real floating-point losses, not counts or predictions"
        )
    return losses, aux


def require_gradient(losses: Tensor) -> None:
    """Refuse losses without a gradient, of which every step would be a release of noise alone.

    For the first step of a fit only: later losses may be constant, and what becomes of a step that
    others went before must not depend on data.

    Raises:
        PrivacyError: If ``losses`` follow from no trainable parameter.
    """
    if losses.numel() and not losses.requires_grad:
        raise PrivacyError(
            "the losses that per_example_loss returned depend on no trainable parameter (they were "
            "detached, made under no_grad, or of frozen layers alone), so every step would spend "
            "privacy on noise alone; return losses that have a gradient"
        )
