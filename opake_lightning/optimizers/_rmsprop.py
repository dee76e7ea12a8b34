"""RMSprop, Adagrad and Adadelta: no average of gradients, only of their squares."""

from __future__ import annotations

from opake_lightning import _check
from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain
from opake_lightning.optimizers._precondition import (
    precondition,
    precondition_by_sum,
    scale_by_past_steps,
)
from opake_lightning.optimizers._stages import add_decayed_weights, scale_by_learning_rate, trace
from opake_lightning.scheduling import ScalarOrSchedule

__all__ = ["adadelta", "adagrad", "rmsprop"]


def rmsprop(
    lr: ScalarOrSchedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    momentum: float = 0.0,
    noise_bias_correction: bool = False,
    noise_floor: float = 1e-6,
    noise_floor_relative: float = 0.0,
) -> NoiseAwareTransformation:
    r"""RMSprop, as ``torch.optim.RMSprop``, optionally corrected for privacy noise.

    .. math:: v_t = \alpha v_{t-1} + (1-\alpha)\,\tilde g_t^2, \qquad
              b_t = \mu\, b_{t-1} + \tilde g_t / (\sqrt{v_t} + eps), \qquad u_t = -lr_t\, b_t

    Nothing is debiased, so the correction is not either:
    :math:`\varphi_t = \alpha \varphi_{t-1} + (1-\alpha)\,\sigma_t^2` is taken off as it is. Squares
    that are released on their own are taken as by :func:`adamw`; where they leave v too small to
    be an average of squares, :math:`\tilde g_t^2` stands in for it.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
        alpha: α in [0, 1).
        eps: Added to the denominator; > 0.
        weight_decay: λ, at least 0, of L2 regularization; other than 0, ``update`` needs
            ``params``.
        momentum: μ, at least 0.
        noise_bias_correction: See :func:`adamw`.
        noise_floor: See :func:`adamw`.
        noise_floor_relative: See :func:`adamw`.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Tieleman & Hinton 2012, lecture 6.5; the correction is DP-AdamBC's (arXiv:2312.14334)
    with α's average. References differ in where eps goes: outside the root here and in torch,
    inside it in optax by default.

    >>> import torch
    >>> optimizer = rmsprop(lr=0.1, alpha=0.75)
    >>> update, _ = optimizer.update(torch.tensor([3.0]), optimizer.init(torch.zeros(1)))
    >>> round(update.item(), 6)  # -0.1 · 3 / sqrt(0.25 · 9)
    -0.2
    """
    _check.fraction("alpha", alpha, zero=True, one=False)
    return chain(
        "rmsprop",
        l2=add_decayed_weights(weight_decay, coupled=True),
        second_moment=precondition(
            alpha,
            eps,
            debias=False,
            correct=noise_bias_correction,
            floor=noise_floor,
            relative_floor=noise_floor_relative,
        ),
        momentum=trace(momentum),
        lr=scale_by_learning_rate(lr),
    )


def adagrad(
    lr: ScalarOrSchedule = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    *,
    initial_accumulator_value: float = 0.0,
    noise_bias_correction: bool = False,
    noise_floor: float = 1e-6,
    noise_floor_relative: float = 0.0,
) -> NoiseAwareTransformation:
    r"""Adagrad, as ``torch.optim.Adagrad``, optionally corrected for privacy noise.

    .. math:: v_t = v_{t-1} + \tilde g_t^2, \qquad u_t = -lr_t\, \tilde g_t / (\sqrt{v_t} + eps)

    v forgets nothing, so noise adds :math:`t\sigma^2` to it after t steps and in the end decides
    the step size alone. The correction subtracts the same sum,
    :math:`\varphi_t = \varphi_{t-1} + \sigma_t^2`. A difference of two growing sums scatters in
    proportion to :math:`\sigma^2\sqrt t`: ``noise_floor_relative`` keeps its floor in step with
    that, a fixed ``noise_floor`` does not.

    Squares that are released on their own are refused: their noise would add up in the sum.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
        eps: Added to the denominator; > 0.
        weight_decay: λ, at least 0, of L2 regularization; other than 0, ``update`` needs
            ``params``.
        initial_accumulator_value: What v starts from, at least 0.
        noise_bias_correction: See :func:`adamw`.
        noise_floor: See :func:`adamw`.
        noise_floor_relative: See :func:`adamw`.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Duchi et al. 2011. References differ in where eps goes: outside the root here and in
    torch, inside it in optax.

    >>> import torch
    >>> optimizer, state = adagrad(lr=0.1), adagrad().init(torch.zeros(1))
    >>> for gradient in (3.0, 4.0):
    ...     update, state = optimizer.update(torch.tensor([gradient]), state)
    >>> round(update.item(), 6)  # -0.1 · 4 / sqrt(9 + 16)
    -0.08
    """
    return chain(
        "adagrad",
        l2=add_decayed_weights(weight_decay, coupled=True),
        second_moment=precondition_by_sum(
            eps,
            init_value=initial_accumulator_value,
            correct=noise_bias_correction,
            floor=noise_floor,
            relative_floor=noise_floor_relative,
        ),
        lr=scale_by_learning_rate(lr),
    )


def adadelta(
    lr: ScalarOrSchedule = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    noise_bias_correction: bool = False,
    noise_floor: float = 1e-6,
    noise_floor_relative: float = 1.0,
) -> NoiseAwareTransformation:
    r"""Adadelta, as ``torch.optim.Adadelta``, optionally corrected for privacy noise.

    .. math::
        v_t &= \rho v_{t-1} + (1-\rho)\,\tilde g_t^2, \qquad
            \Delta_t = c_t\, \tilde g_t, \quad c_t = \sqrt{d_{t-1} + eps} / \sqrt{v_t + eps} \\
        d_t &= \rho d_{t-1} + (1-\rho)\,\Delta_t^2, \qquad u_t = -lr_t\, \Delta_t

    Noise is in both averages. In v it has the variance σ², in d, as :math:`\Delta_t` is linear in
    the gradient, :math:`c_t^2\sigma^2` on every coordinate:

    .. math:: \varphi^v_t = \rho \varphi^v_{t-1} + (1-\rho)\,\sigma_t^2, \qquad
              \varphi^d_t = \rho \varphi^d_{t-1} + (1-\rho)\,c_t^2 \sigma_t^2

    The correction takes both off: :math:`\max(v - \varphi^v, \gamma, r\varphi^v)` below and
    :math:`\max(d - \varphi^d, 0)` above. d feeds on the steps it makes: with a floor much below
    φ, noise that is divided by it makes them a hundred times larger. So r is 1 here unless you say
    otherwise: the denominator then is at least :math:`\sqrt{v/2}`.

    Squares that are released on their own are taken as by :func:`adamw`; where they leave v too
    small to be an average of squares, :math:`\tilde g_t^2` stands in for it.

    Args:
        lr: Factor of the step, or a function from the step (0 at the first) to it.
        rho: ρ in [0, 1).
        eps: Added inside both roots, and what the first steps are made of; > 0.
        weight_decay: λ, at least 0, of L2 regularization; other than 0, ``update`` needs
            ``params``.
        noise_bias_correction: See :func:`adamw`.
        noise_floor: γ > 0, of v.
        noise_floor_relative: r, at least 0, of v.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Zeiler 2012 (arXiv:1212.5701). The correction has no published source; it carries the
    variance of the noise through the two averages.

    >>> import torch
    >>> optimizer = adadelta(rho=0.75, eps=1.0)
    >>> update, _ = optimizer.update(torch.tensor([4.0]), optimizer.init(torch.zeros(1)))
    >>> round(update.item(), 6)  # -4 · sqrt(0 + 1) / sqrt(0.25 · 16 + 1)
    -1.788854
    """
    return chain(
        "adadelta",
        l2=add_decayed_weights(weight_decay, coupled=True),
        second_moment=scale_by_past_steps(
            rho,
            eps,
            correct=noise_bias_correction,
            floor=noise_floor,
            relative_floor=noise_floor_relative,
        ),
        lr=scale_by_learning_rate(lr),
    )
