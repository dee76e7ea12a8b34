"""RAdam."""

from __future__ import annotations

from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain
from opake_lightning.optimizers._precondition import rectified_precondition
from opake_lightning.optimizers._stages import add_decayed_weights, ema, scale_by_learning_rate
from opake_lightning.scheduling import ScalarOrSchedule

__all__ = ["radam"]


def radam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    decoupled_weight_decay: bool = False,
    noise_bias_correction: bool = False,
    noise_floor: float = 1e-6,
    noise_floor_relative: float = 0.0,
) -> NoiseAwareTransformation:
    r"""RAdam, as ``torch.optim.RAdam``, optionally corrected for privacy noise.

    .. math::
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1-\beta_2^t}, \quad
        \rho_\infty = \frac{2}{1-\beta_2} - 1, \qquad
        u_t = -lr_t \begin{cases} r_t\, \hat m_t \sqrt{1-\beta_2^t} / (\sqrt{v_t} + eps)
            & \rho_t > 5 \\ \hat m_t & \text{else} \end{cases}

    with :math:`r_t^2 = (\rho_t-4)(\rho_t-2)\rho_\infty / ((\rho_\infty-4)(\rho_\infty-2)\rho_t)`
    and the two averages of Adam. In the first steps (five of them for every β₂ from 0.9 to 0.999) v
    is not read, so the noise in it cannot do harm. It is counted from the first step on all the
    same: once v is read, all that went into it is taken off.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the root of v before it is debiased; > 0.
        weight_decay: λ, at least 0; other than 0, ``update`` needs ``params``.
        decoupled_weight_decay: Add λθ to the update, not to the gradient.
        noise_bias_correction: See :func:`adamw`.
        noise_floor: See :func:`adamw`.
        noise_floor_relative: See :func:`adamw`.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Liu et al. 2020 (arXiv:1908.03265).
    Departs from it: v is read from :math:`\rho_t > 5` on, as in torch and optax; the paper has 4.
    References differ in where eps goes: it is added to :math:`\sqrt{v_t}` here and in torch, to
    :math:`\sqrt{\hat v_t}` in optax.

    >>> import torch
    >>> optimizer = radam(lr=0.1)
    >>> update, _ = optimizer.update(torch.tensor([3.0]), optimizer.init(torch.zeros(1)))
    >>> round(update.item(), 6)  # not yet rectified: -0.1 · 3
    -0.3
    """
    beta1, beta2 = betas
    decay = add_decayed_weights(weight_decay, coupled=not decoupled_weight_decay)
    return chain(
        "radam",
        l2=None if decoupled_weight_decay else decay,
        first_moment=ema(beta1),
        second_moment=rectified_precondition(
            beta2,
            eps,
            correct=noise_bias_correction,
            floor=noise_floor,
            relative_floor=noise_floor_relative,
            mean_decay=beta1,
        ),
        decay=decay if decoupled_weight_decay else None,
        lr=scale_by_learning_rate(lr),
    )
