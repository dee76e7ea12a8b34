"""What noise may be added to, and how: a clipped gradient, whose sensitivity sets its size.

The sum is float64 and what is released usually float32. It is rounded once, after the noise; so
rounding is a function of what is private already, and costs nothing. Before the noise it would:
sums of neighbouring data that are rounded can be further apart than the sums are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from opake_lightning import _check
from opake_lightning._tree import Layout, layouts_of_sum, pack, room_for, unpack
from opake_lightning.distributed import sum_flats_
from opake_lightning.errors import PrivacyError
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

__all__ = ["Release", "refuse_noised", "release_of", "require_bounded"]


@final
@dataclass(frozen=True, slots=True)
class Release:
    """A sum, and where it goes with its noise.

    Attributes:
        total: The sum; if noise is made in shares, this rank's part of it.
        out: Where to write that with its noise: what will be released, or, of a part, memory of
            its own type, as it is not to be rounded yet. May be ``total``.
        layout: That of what will be released; its groups have the types that noise is drawn in.
        dtypes: What is rounded to, if not the types of ``layout``.
        in_shares: Whether ``total`` is a part.
    """

    total: list[Tensor]
    out: list[Tensor]
    layout: Layout
    dtypes: tuple[torch.dtype, ...] | None
    in_shares: bool

    def noised(self) -> Any:
        """What is released, once ``out`` has the noise: the sum over ranks, rounded."""
        out = self.out
        if self.in_shares:
            sum_flats_(out)
            out = room_for(out, self.layout, inplace=True)
            for exact, flat in zip(self.out, out, strict=True):
                flat.copy_(exact)
        return unpack(out, self.layout, self.dtypes)


def release_of(grads: ClippedPytree, *, inplace: bool, share: tuple[int, int]) -> Release:
    """The release of ``grads`` by ranks of which each adds a ``share`` of the noise.

    Args:
        grads: The sum, over all ranks if one share is the whole noise, (0, 1), else this rank's.
        inplace: Whether the memory of ``grads`` may be written to.
        share: (r, W), as :func:`~opake_lightning.random.add_normal_` takes it.
    """
    of_sum, layout = layouts_of_sum(grads.pytree, grads.dtypes)
    total = pack(grads.pytree, of_sum)
    in_shares = share != (0, 1)
    out = room_for(total, of_sum if in_shares else layout, inplace=inplace)
    if in_shares and not inplace:
        # Other ranks' shares of the noise leave the rest as it is.
        total = out = [new.copy_(flat) for new, flat in zip(out, total, strict=True)]
    return Release(total, out, layout, grads.dtypes, in_shares)


def refuse_noised(grads: Any, who: str) -> None:
    """Refuse what has been released already; ``who`` was given it."""
    if isinstance(grads, (NoisedPytree, SecondMomentNoiseOutput)):
        raise PrivacyError(f"{who} got a {type(grads).__name__}, which already has its noise")


def require_bounded(grads: Any, who: str) -> None:
    """Refuse all but a gradient or pair, of which noise of finite size can cover every part.

    Raises:
        PrivacyError: If something was not clipped, or a bound is not finite.
        ValueError: If a sensitivity is of a size that float32 cannot hold.
    """
    if not isinstance(grads, SecondMomentClippedPytree):
        _require_sensitivity(grads, who)
        return
    for part in (grads.gradient, grads.square):
        if part is not None:
            _require_sensitivity(part, who)
    radius = grads.projection_radius
    if radius is not None and not (radius > 0 and math.isfinite(radius)):
        raise PrivacyError(f"projection_radius must be finite and > 0, got {radius!r}")


def _require_sensitivity(grads: Any, who: str) -> None:
    if not isinstance(grads, ClippedPytree):
        raise PrivacyError(
            f"{who} needs a ClippedPytree, whose sensitivity sets the noise, got "
            f"{type(grads).__name__}; pass what clipped_grad's function returned"
        )
    if not (grads.sensitivity > 0 and math.isfinite(grads.sensitivity)):
        raise PrivacyError(
            f"no finite noise can cover a sensitivity of {grads.sensitivity!r}; clip first"
        )
    _check.size_of_noise("the sensitivity of the gradient", grads.sensitivity)
