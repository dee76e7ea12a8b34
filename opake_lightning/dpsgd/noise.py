r"""Independent Gaussian noise.

.. math:: \tilde g = \bar g + \mathcal N(0, (\sigma \Delta)^2 I)

with σ the noise multiplier and Δ the sensitivity that the clipped gradient carries, so that the
noise is right for a sum (Δ = C) and for a mean over the expected batch (Δ = C/B) alike.

Source: Abadi et al. 2016, Algorithm 1 (arXiv:1607.00133).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from opake_lightning import _check
from opake_lightning._tree import layout_of, pack, unpack
from opake_lightning.errors import PrivacyError
from opake_lightning.random import RngKey, add_normal_, fold_in
from opake_lightning.types import ClippedPytree, NoisedPytree

__all__ = ["NoiseFn", "NoiseState", "gaussian_noise"]


@dataclass(frozen=True, slots=True)
class NoiseState:
    """State of a noise mechanism.

    Attributes:
        key: Key of the run. Secret.
        step: Number of releases so far; the next one uses stream ``step`` of the key.
    """

    key: RngKey
    step: int = 0
    privacy_critical: ClassVar[bool] = True  # a checkpoint without all of it is refused


class NoiseFn(Protocol):
    """What :func:`gaussian_noise` returns first."""

    def __call__(
        self, grads: ClippedPytree, state: NoiseState, *, inplace: bool = False
    ) -> tuple[NoisedPytree, NoiseState]:
        """Release ``grads`` with noise."""
        ...


def gaussian_noise(*, noise_multiplier: float, key: RngKey) -> tuple[NoiseFn, NoiseState]:
    """Noise whose standard deviation is ``noise_multiplier`` times the sensitivity.

    Guarantee: every coordinate of every leaf gets its own independent draw; streams of different
    steps are unrelated; the same key and step give the same noise on every rank, so adding it
    after the sum over ranks adds it once.

    Args:
        noise_multiplier: σ, without unit; >= 0. 0 adds nothing and protects nothing.
        key: Key of the run; see :func:`opake_lightning.random.fresh_key`.

    Returns:
        A function and its initial state: ``noised, state = noise_fn(grads, state)``, where
        ``grads`` is a :class:`~opake_lightning.types.ClippedPytree` and ``noised`` a
        :class:`~opake_lightning.types.NoisedPytree`. With ``inplace=True`` the noise is added to
        the memory of ``grads``.

    Raises:
        ValueError: If ``noise_multiplier`` is negative or not finite.
        PrivacyError: From ``noise_fn``, if it is given anything but a ``ClippedPytree`` of finite
            sensitivity.

    >>> import torch
    >>> from opake_lightning.random import key
    >>> from opake_lightning.types import ClippedPytree
    >>> noise_fn, state = gaussian_noise(noise_multiplier=2.0, key=key(7))
    >>> noised, state = noise_fn(ClippedPytree(torch.zeros(3), sensitivity=0.1), state)
    >>> noised.noise_stddev, state.step
    (0.2, 1)
    """
    sigma = _check.non_negative("noise_multiplier", noise_multiplier)

    def noise_fn(
        grads: ClippedPytree, state: NoiseState, *, inplace: bool = False
    ) -> tuple[NoisedPytree, NoiseState]:
        _require_clipped(grads)
        stddev = sigma * grads.sensitivity
        layout = layout_of(grads.pytree)
        flats = pack(grads.pytree, layout)
        if not inplace:
            flats = [flat.clone() for flat in flats]
        stream = fold_in(fold_in(state.key, "gaussian_noise"), state.step)
        for index, flat in enumerate(flats):
            add_normal_(fold_in(stream, index), flat, stddev)
        return NoisedPytree(unpack(flats, layout), stddev), NoiseState(state.key, state.step + 1)

    return noise_fn, NoiseState(key)


def _require_clipped(grads: Any) -> None:
    if isinstance(grads, NoisedPytree):
        raise PrivacyError("gaussian_noise got a NoisedPytree, which already has its noise")
    if not isinstance(grads, ClippedPytree):
        raise PrivacyError(
            f"gaussian_noise needs a ClippedPytree, whose sensitivity sets the noise, got "
            f"{type(grads).__name__}; pass what clipped_grad's function returned"
        )
    if not (grads.sensitivity > 0 and math.isfinite(grads.sensitivity)):
        raise PrivacyError(
            f"no finite noise can cover a sensitivity of {grads.sensitivity!r}; clip first"
        )
