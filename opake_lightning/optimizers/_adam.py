"""Adam and AdamW."""

from __future__ import annotations

from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain
from opake_lightning.optimizers._precondition import precondition
from opake_lightning.optimizers._stages import (
    add_decayed_weights,
    clip_update_rms,
    ema,
    scale_by_learning_rate,
)
from opake_lightning.scheduling import ScalarOrSchedule

__all__ = ["adam", "adamw"]


def adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    noise_bias_correction: bool = False,
    noise_floor: float = 1e-6,
    noise_floor_relative: float = 0.0,
    update_rms_clip: float | None = None,
) -> NoiseAwareTransformation:
    r"""Adam, as ``torch.optim.Adam``, optionally corrected for privacy noise.

    It is :func:`adamw` with coupled weight decay: :math:`\lambda\theta` is added to the gradient
    before the two averages, and with ``weight_decay=0`` the two are the same.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
        betas: Decay of the two averages, each in [0, 1).
        eps: Added to the denominator; > 0.
        weight_decay: λ, at least 0; other than 0, ``update`` needs ``params``.
        noise_bias_correction: See :func:`adamw`.
        noise_floor: See :func:`adamw`.
        noise_floor_relative: See :func:`adamw`.
        update_rms_clip: See :func:`adamw`.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Kingma & Ba 2015 (arXiv:1412.6980); with the correction, DP-AdamBC (arXiv:2312.14334).
    Departs from it: ``eps`` is added to the denominator. DP-AdamBC has none; ``eps=1e-30`` gives
    its numbers.

    >>> import torch
    >>> optimizer = adam(lr=0.1)
    >>> update, _ = optimizer.update(torch.tensor([3.0]), optimizer.init(torch.zeros(1)))
    >>> round(update.item(), 6)  # the first step is -lr · sign(gradient)
    -0.1
    """
    return _adam(
        "adam", lr, betas, eps, weight_decay,
        coupled=True,
        correct=noise_bias_correction,
        floor=noise_floor,
        relative_floor=noise_floor_relative,
        rms=update_rms_clip,
    )  # fmt: skip


def adamw(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    decoupled_weight_decay: bool = True,
    noise_bias_correction: bool = False,
    noise_floor: float = 1e-6,
    noise_floor_relative: float = 0.0,
    update_rms_clip: float | None = None,
) -> NoiseAwareTransformation:
    r"""AdamW, as ``torch.optim.AdamW``, optionally corrected for privacy noise.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1-\beta_1)\,\tilde g_t, \qquad \hat m_t = m_t / (1-\beta_1^t) \\
        v_t &= \beta_2 v_{t-1} + (1-\beta_2)\,\tilde g_t^2, \qquad \hat v_t = v_t / (1-\beta_2^t) \\
        u_t &= -lr_t \bigl( \hat m_t / (\sqrt{\hat v_t} + eps) + \lambda\theta_{t-1} \bigr)

    With the correction, :math:`\sqrt{\hat v_t}` becomes
    :math:`\sqrt{\max(\hat v_t - \hat\varphi_t, \gamma, r\hat\varphi_t)}`, where
    :math:`\hat\varphi_t` is the same average of the noise's variance as :math:`\hat v_t` is of the
    squares. With a :class:`~opake_lightning.types.SecondMomentNoiseOutput`, :math:`v_t` averages
    the squares that were released on their own; where they leave :math:`\hat v_t` too small to be
    an average of squares, or negative, :math:`\hat m_t^2` stands in for it. Coupled weight decay is
    added in there as well, by :math:`(g + \lambda\theta)^2 = g^2 + 2\lambda\theta g +
    \lambda^2\theta^2`. The two are never combined.

    **Choosing γ.** Where the noise outweighs the gradient, :math:`\hat v - \hat\varphi` is about as
    often below zero as above, and the coordinate is floored: it moves by
    :math:`lr\,\hat m/\sqrt\gamma`. As :math:`\hat m` is then mostly noise, γ is the knob between
    this optimizer and a bolder, noisier one. With γ = ``noise_stddev**2`` (of the gradient as it
    comes in, after division by the batch size) no such coordinate moves further than without the
    correction; each hundredth of it lets it move ten times as far. The default of 1e-6 moves it by
    at most 1000 lr m̂ and suits a ``noise_stddev`` of some 1e-3; 1e-8, which DP-AdamBC's program
    has, moves it by 10 000 lr m̂. Always choose it together with the learning rate. r does the same
    without units: no coordinate moves more than :math:`\sqrt{1 + 1/r}` times as far as without the
    correction, whatever the noise is and however it changes; 1.4 times with r = 1, ten times with
    r = 0.01. The higher of the two floors counts.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator; > 0.
        weight_decay: λ, at least 0; other than 0, ``update`` needs ``params``.
        decoupled_weight_decay: Off, λθ is added to the gradient before the averages
            (:func:`adam`).
        noise_bias_correction: Correct the second moment for the noise that
            :class:`~opake_lightning.types.NoisedPytree` says its gradient carries. As long as no
            noise comes in, this changes nothing, to the last bit.
        noise_floor: γ > 0, in the units of the squared gradient.
        noise_floor_relative: r, at least 0, as a share of the noise's variance.
        update_rms_clip: Divide :math:`\hat m / (\sqrt{\hat v} + eps)` by max(1, RMS / this), with
            one RMS for the whole model; None for never.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101); the correction is Algorithm 2 of Chooi et
    al. (arXiv:2511.07843); the clip after StableAdamW (arXiv:2304.13013).
    Departs from it: StableAdamW clips each tensor by an RMS of its own.

    >>> import torch
    >>> from opake_lightning.types import NoisedPytree
    >>> optimizer = adamw(lr=0.1, weight_decay=0, noise_bias_correction=True)
    >>> theta = torch.zeros(1, dtype=torch.float64)
    >>> state = optimizer.init(theta)
    >>> for gradient in (1.0, 0.2, -0.4):
    ...     noised = NoisedPytree(torch.tensor([gradient], dtype=theta.dtype), noise_stddev=0.5)
    ...     update, state = optimizer.update(noised, state)
    ...     theta = theta + update
    ...     print(f"{theta.item():.12f}")  # at first -0.1 · 1 / (sqrt(1 - 0.25) + 1e-8)
    -0.115470052505
    -0.226938100524
    -0.283203695589
    """
    return _adam(
        "adamw", lr, betas, eps, weight_decay,
        coupled=not decoupled_weight_decay,
        correct=noise_bias_correction,
        floor=noise_floor,
        relative_floor=noise_floor_relative,
        rms=update_rms_clip,
    )  # fmt: skip


def _adam(
    name: str,
    lr: ScalarOrSchedule,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    *,
    coupled: bool,
    correct: bool,
    floor: float,
    relative_floor: float,
    rms: float | None,
) -> NoiseAwareTransformation:
    beta1, beta2 = betas
    decay = add_decayed_weights(weight_decay, coupled=coupled)
    return chain(
        name,
        l2=decay if coupled else None,
        first_moment=ema(beta1),
        second_moment=precondition(
            beta2,
            eps,
            correct=correct,
            floor=floor,
            relative_floor=relative_floor,
            mean_decay=beta1,
        ),
        clip=clip_update_rms(rms),
        decay=None if coupled else decay,
        lr=scale_by_learning_rate(lr),
    )
