r"""Independent Gaussian noise.

.. math:: \tilde g = \bar g + \mathcal N(0, (\sigma \Delta)^2 I)

with σ the noise multiplier and Δ the sensitivity that the clipped gradient carries, so that the
noise is right for a sum (Δ = C) and for a mean over the expected batch (Δ = C/B) alike. A pair of
gradient and squares gets two such noises, from unrelated streams, at the privacy of one; the
derivation is in :doc:`/second_moments`.

Noise is drawn in the type that is released (float32 for float32 parameters), added to a sum in
float64, and the result rounded once. Rounded before, the sum could move by more than Δ.

Source: Abadi et al. 2016, Algorithm 1 (arXiv:1607.00133).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, final, overload

from opake_lightning import _check
from opake_lightning._clipped import refuse_noised, release_of, require_bounded
from opake_lightning._pairs import noise_stddevs, squares_of
from opake_lightning.distributed import rank, sum_gradients, world_size
from opake_lightning.random import RngKey, add_normal_, fold_in
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

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

    @overload
    def __call__(
        self, grads: ClippedPytree, state: NoiseState, *, inplace: bool = False
    ) -> tuple[NoisedPytree, NoiseState]: ...

    @overload
    def __call__(
        self, grads: SecondMomentClippedPytree, state: NoiseState, *, inplace: bool = False
    ) -> tuple[SecondMomentNoiseOutput, NoiseState]: ...

    def __call__(self, grads: Any, state: NoiseState, *, inplace: bool = False) -> Any:
        """Release ``grads`` with noise."""
        ...


def gaussian_noise(
    *, noise_multiplier: float, key: RngKey, square_share: float | None = None
) -> tuple[NoiseFn, NoiseState]:
    """Noise whose standard deviation is ``noise_multiplier`` times the sensitivity.

    Guarantee: every coordinate of every leaf gets its own independent draw; streams of different
    steps are unrelated; the same key and step give the same noise on every rank, so adding it
    after the sum over ranks adds it once. A pair is one release: divided by its noise, it moves by
    at most 1 / ``noise_multiplier`` when one example is added or removed.

    Args:
        noise_multiplier: σ, without unit; >= 0. 0 adds nothing and protects nothing.
        key: Key of the run; see :func:`opake_lightning.random.fresh_key`.
        square_share: For pairs only: the part ρ of the privacy budget that the squares take, in
            (0, 1). The noise of the gradient is then larger by a factor 1/√(1-ρ) than it would be
            alone, that of the squares by 1/√ρ. None is 1/2 for the square of the aggregate, and
            C/(1 + C) for squares of examples clipped to C, which makes the sum of the two
            variances least.

    Returns:
        A function and its initial state: ``noised, state = noise_fn(grads, state)``, where
        ``grads`` is a :class:`~opake_lightning.types.ClippedPytree` and ``noised`` a
        :class:`~opake_lightning.types.NoisedPytree`; or a
        :class:`~opake_lightning.types.SecondMomentClippedPytree`, already summed over ranks, and a
        :class:`~opake_lightning.types.SecondMomentNoiseOutput`. What is released has the
        ``dtypes`` of ``grads``. With ``inplace=True`` the memory of ``grads`` may be written over,
        and is that of ``noised`` where the type stays.

    Raises:
        ValueError: If ``noise_multiplier`` is negative or not finite, or ``square_share`` is not
            between 0 and 1.
        PrivacyError: From ``noise_fn``, if it is given anything but a clipped gradient, or pair, of
            finite sensitivity.

    >>> import torch
    >>> from opake_lightning.random import key
    >>> from opake_lightning.types import ClippedPytree
    >>> noise_fn, state = gaussian_noise(noise_multiplier=2.0, key=key(7))
    >>> noised, state = noise_fn(ClippedPytree(torch.zeros(3), sensitivity=0.1), state)
    >>> noised.noise_stddev, state.step
    (0.2, 1)
    """
    sigma = _check.non_negative("noise_multiplier", noise_multiplier)
    if square_share is not None:
        square_share = _check.fraction("square_share", square_share, zero=False, one=False)

    return _GaussianNoise(sigma, square_share), NoiseState(key)


@final
@dataclass(frozen=True, slots=True)
class _GaussianNoise:
    """What :func:`gaussian_noise` returns first."""

    sigma: float
    square_share: float | None

    @overload
    def __call__(
        self, grads: ClippedPytree, state: NoiseState, *, inplace: bool = False
    ) -> tuple[NoisedPytree, NoiseState]: ...

    @overload
    def __call__(
        self, grads: SecondMomentClippedPytree, state: NoiseState, *, inplace: bool = False
    ) -> tuple[SecondMomentNoiseOutput, NoiseState]: ...

    def __call__(self, grads: Any, state: NoiseState, *, inplace: bool = False) -> Any:
        _require_clipped(grads)
        released = self._release(grads, state, inplace=inplace)
        return released, NoiseState(state.key, state.step + 1)

    def across_ranks(self, grads: Any, state: NoiseState, *, inplace: bool = False) -> Any:
        """As to call it with the sum over ranks of ``grads``, but with the noise made in shares.

        Every rank adds its part of the coordinates' noise to its part of the gradient, and then
        comes the sum. So all noise is drawn once, and takes each of W ranks 1/W of the time.
        Guarantee: the result is that of one process but for rounding, and equal on all ranks.
        """
        _require_clipped(grads)
        if isinstance(grads, SecondMomentClippedPytree) and grads.square is None:
            # What is squared is the sum without noise, so that has to come first.
            return self(sum_gradients(grads, inplace=inplace), state, inplace=True)
        released = self._release(grads, state, inplace=inplace, share=(rank(), world_size()))
        return released, NoiseState(state.key, state.step + 1)

    def _release(
        self,
        grads: ClippedPytree | SecondMomentClippedPytree,
        state: NoiseState,
        *,
        inplace: bool,
        share: tuple[int, int] = (0, 1),
    ) -> NoisedPytree | SecondMomentNoiseOutput:
        noised = partial(_noised, share=share)
        stream = fold_in(fold_in(state.key, "gaussian_noise"), state.step)
        if isinstance(grads, ClippedPytree):
            return noised(grads, self.sigma * grads.sensitivity, stream, inplace=inplace)
        first, second = noise_stddevs(grads, self.sigma, self.square_share)
        # Released first: they may be those of the gradient, which is then written to.
        squares, own = squares_of(grads, inplace=inplace)
        square = noised(squares, second, fold_in(stream, "square"), inplace=own)
        return SecondMomentNoiseOutput(
            noised(grads.gradient, first, stream, inplace=inplace), square
        )


def _noised(
    grads: ClippedPytree,
    stddev: float,
    stream: RngKey,
    *,
    inplace: bool,
    share: tuple[int, int],
) -> NoisedPytree:
    _check.size_of_noise("the standard deviation of the noise", stddev)
    release = release_of(grads, inplace=inplace, share=share)
    groups = zip(release.layout.groups, release.total, release.out, strict=True)
    for index, (group, flat, out) in enumerate(groups):
        rng = fold_in(stream, index)
        add_normal_(rng, flat, stddev, share=share, into=out, dtype=group.dtype)
    return NoisedPytree(release.noised(), stddev)


def _require_clipped(grads: Any) -> None:
    refuse_noised(grads, "gaussian_noise")
    require_bounded(grads, "gaussian_noise")
