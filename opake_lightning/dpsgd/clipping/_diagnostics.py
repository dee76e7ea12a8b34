"""What clipping and noise do to the gradients: numbers for the one who tunes, not for release."""

from __future__ import annotations

import math
from typing import cast

import optree
import torch
from torch import Tensor

from opake_lightning.types import ClippedPytree, SecondMomentClippedPytree

__all__ = ["not_private_diagnostics"]

_QUANTILES = {"norm_p10": 0.1, "norm_median": 0.5, "norm_p90": 0.9}


def not_private_diagnostics(
    grads: ClippedPytree | SecondMomentClippedPytree, *, noise_multiplier: float | None = None
) -> dict[str, float]:
    """Clip fraction, quantiles of the norms and signal-to-noise ratio of one step.

    Not private: these are exact numbers about the examples of the batch, and publishing them is
    outside every guarantee.

    Args:
        grads: What a clipping function returned, or its sum over ranks. Fractions and quantiles are
            about the examples of this rank.
        noise_multiplier: That of the noise to come, for the signal-to-noise ratio; None or 0 leaves
            it out.

    Returns:
        ``clip_fraction``, the part of the examples whose norm was above the clipping norm (averaged
        over the groups, if there are several); ``norm_p10``, ``norm_median`` and ``norm_p90`` of
        the whole gradients before clipping; and ``signal_to_noise``, the norm of the clipped sum
        over the expected norm of its noise. What has no examples to speak of is left out, and those
        without a finite gradient do not count.

    >>> from opake_lightning.types import ClipReport
    >>> report = ClipReport(torch.tensor([[5.0, 0.5]]), (1.0,))
    >>> grads = ClippedPytree(torch.tensor([-0.9, -1.2]), 1.0, report)
    >>> not_private_diagnostics(grads)["clip_fraction"]
    0.5
    """
    gradient = grads.gradient if isinstance(grads, SecondMomentClippedPytree) else grads
    found: dict[str, float] = {}
    if gradient.report is not None:
        norms = gradient.report.norms
        norms = norms[:, norms.isfinite().all(0)]
        if norms.numel():
            bounds = torch.tensor(gradient.report.bounds, dtype=norms.dtype, device=norms.device)
            found["clip_fraction"] = float((norms > bounds[:, None]).double().mean())
            whole = torch.linalg.vector_norm(norms, dim=0)
            for name, fraction in _QUANTILES.items():
                found[name] = float(whole.quantile(fraction))
    if noise_multiplier:
        leaves = cast("list[Tensor]", optree.tree_leaves(gradient.pytree))
        signal = math.hypot(*(float(leaf.double().norm()) for leaf in leaves))
        size = sum(leaf.numel() for leaf in leaves)
        if size:
            noise = noise_multiplier * gradient.sensitivity * math.sqrt(size)
            found["signal_to_noise"] = signal / noise
    return found
