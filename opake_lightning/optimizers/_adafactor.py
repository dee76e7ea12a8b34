"""Adafactor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain
from opake_lightning.optimizers._factored import factored_precondition
from opake_lightning.optimizers._stages import (
    add_decayed_weights,
    clip_update_rms,
    scale_by_learning_rate,
    scale_by_parameter_rms,
)
from opake_lightning.scheduling import ScalarOrSchedule

__all__ = ["adafactor"]


def adafactor(
    lr: ScalarOrSchedule | None = None,
    eps: tuple[float, float] = (1e-30, 1e-3),
    weight_decay: float = 0.0,
    *,
    scale_parameter: bool | None = None,
    beta2_decay: float = -0.8,
    min_dim_size_to_factor: int = 1,
    update_rms_clip: float | None = 1.0,
    clip_per_tensor: bool = False,
    noise_bias_correction: bool = False,
    noise_floor: float = 1e-6,
    noise_floor_relative: float = 0.0,
) -> NoiseAwareTransformation:
    r"""Adafactor: a second moment that takes little memory, optionally corrected for privacy noise.

    .. math::
        U_t &= \tilde g_t / \sqrt{V_t}, \qquad
            V_{t,ij} = R_{t,i}\, C_{t,j} / \mathrm{mean}(R_t) \\
        u_t &= -lr_t \bigl( s_t\, U_t / \max(1, \mathrm{RMS}(U_t) / d) + \lambda\theta_{t-1} \bigr)

    :math:`R_t` and :math:`C_t` are averages of :math:`\tilde g_t^2 + eps_1` over rows and columns
    and, with the decay :math:`1 - t^{-0.8}`, over time; tensors of fewer than two dimensions keep
    all of V. Of tensors with more, such as convolutions, the last two dimensions are factored.

    Without ``lr`` steps are relative: :math:`lr_t = \min(10^{-2}, 1/\sqrt t)` and
    :math:`s_t = \max(eps_2, \mathrm{RMS}(\theta_{t-1}))`, one for each tensor. With ``lr``,
    :math:`s_t = 1`.

    Noise puts the same :math:`\varphi_t` into R, into C and into an unfactored V, and the
    correction takes it off each of them, :math:`\max(R - \varphi, \gamma, r\varphi)`. As the clip
    afterwards rescales the whole update, noise that outweighs the gradient everywhere is
    normalized away with or without it.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it; None for relative
            steps.
        eps: eps₁, added to the squares, and eps₂, the least scale of a tensor; each > 0.
        weight_decay: λ, at least 0, decoupled and multiplied by :math:`lr_t`; other than 0,
            ``update`` needs ``params``.
        scale_parameter: Use :math:`s_t` also with ``lr``, or not even without; by default just
            without ``lr``. Where it is used, ``update`` needs ``params``.
        beta2_decay: Exponent of t in the decay, below 0.
        min_dim_size_to_factor: Keep all of V for matrices with a smaller dimension than this.
        update_rms_clip: d > 0; None not to clip.
        clip_per_tensor: Clip each tensor by an RMS of its own, as the paper does; otherwise one RMS
            over the whole model is used, so that the proportions between tensors stay.
        noise_bias_correction: See :func:`adamw`.
        noise_floor: See :func:`adamw`.
        noise_floor_relative: See :func:`adamw`.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Shazeer & Stern 2018 (arXiv:1804.04235), Algorithms 4 and 6.
    Departs from it: the clip is over the whole model unless ``clip_per_tensor``. References differ
    in eps₁: it is added to the squares here and in the paper, torch has a lower bound on V.

    >>> import torch
    >>> optimizer, theta = adafactor(lr=0.1, update_rms_clip=None), torch.zeros(2, 2)
    >>> gradient = torch.tensor([[3.0, 3.0], [1.0, 1.0]])
    >>> update, _ = optimizer.update(gradient, optimizer.init(theta))
    >>> update  # R = (9, 1), C = (5, 5), mean(R) = 5: V = g², and the update is -0.1 · sign(g)
    tensor([[-0.1000, -0.1000],
            [-0.1000, -0.1000]])
    """
    relative = lr is None
    scaled = relative if scale_parameter is None else scale_parameter
    why = "lr=None" if relative else "scale_parameter=True"
    return chain(
        "adafactor",
        second_moment=factored_precondition(
            beta2_decay,
            eps[0],
            min_dim_size=min_dim_size_to_factor,
            correct=noise_bias_correction,
            floor=noise_floor,
            relative_floor=noise_floor_relative,
        ),
        clip=clip_update_rms(update_rms_clip, per_tensor=clip_per_tensor),
        scale=scale_by_parameter_rms(eps[1], why) if scaled else None,
        decay=add_decayed_weights(weight_decay, coupled=False),
        lr=scale_by_learning_rate(_RelativeStep() if lr is None else lr),
    )


@final
@dataclass(frozen=True, slots=True)
class _RelativeStep:
    most: float = 1e-2

    def __call__(self, step: int) -> float:
        return min(self.most, (step + 1) ** -0.5)
