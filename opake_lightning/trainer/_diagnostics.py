"""What a step's clipping and noise did, for the one who tunes; on several ranks, on all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opake_lightning.distributed import rank, world_size
from opake_lightning.dpsgd.clipping import not_private_diagnostics
from opake_lightning.types import SecondMomentClippedPytree, SecondMomentNoiseOutput

__all__ = ["Diagnostics", "counted_on_rank_zero", "counted_once", "means", "total"]


class Diagnostics:
    """Watches one step: called with the clipped gradient, before its memory gets the noise."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._sensitivity = 1.0

    def __call__(self, grads: Any) -> None:
        """Look at the clipped gradient."""
        gradient = grads.gradient if isinstance(grads, SecondMomentClippedPytree) else grads
        self._sensitivity = gradient.sensitivity
        # A rank that drew nothing has none, and takes part all the same.
        own = gradient.report and replace(gradient.report, norms=gradient.report.norms.cpu())
        reports = [report for report in _of_all_ranks(own) if report is not None]
        if reports:
            norms = torch.cat([report.norms for report in reports], dim=1)
            gradient = replace(gradient, report=replace(reports[0], norms=norms))
        self._seen = not_private_diagnostics(gradient, noise_multiplier=1.0)

    def told(self, released: Any) -> dict[str, float]:
        """What there was to see, against the noise that was really added."""
        gradient = released.gradient if isinstance(released, SecondMomentNoiseOutput) else released
        seen = dict(self._seen)
        ratio = seen.pop("signal_to_noise", None)
        noise = gradient.noise_stddev / self._sensitivity
        if ratio is not None and noise > 0:
            seen["signal_to_noise"] = ratio / noise
        return seen


def means(values: dict[str, Tensor]) -> dict[str, float]:
    """The mean of each over the examples of all ranks; every rank must call it, also with none."""
    sums = {name: (float(v.double().sum()), v.numel()) for name, v in values.items()}
    everywhere = _of_all_ranks(sums)
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for each in everywhere for name in each):
        pairs = [each[name] for each in everywhere if name in each]
        if count := sum(n for _, n in pairs):
            found[name] = sum(part for part, _ in pairs) / count
    return found


def total(count: int) -> int:
    """The sum over all ranks; every rank must call it."""
    return sum(_of_all_ranks(count))


def counted_on_rank_zero(clip: Any) -> Any:
    """Clipping state where rank 0, which is saved, has what all have counted; all must call it."""
    if world_size() == 1 or not hasattr(clip, "nonfinite_examples"):
        return clip
    return counted_once(replace(clip, nonfinite_examples=total(clip.nonfinite_examples)))


def counted_once(clip: Any) -> Any:
    """The same without the count, on all ranks but the first: the ranks' counts are added up."""
    return replace(clip, nonfinite_examples=0) if rank() and clip is not None else clip


def _of_all_ranks(value: Any) -> list[Any]:
    found = [value] * world_size()
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found
