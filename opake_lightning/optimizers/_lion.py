"""Lion."""

from __future__ import annotations

from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain
from opake_lightning.optimizers._stages import (
    add_decayed_weights,
    interpolated_sign,
    scale_by_learning_rate,
)
from opake_lightning.scheduling import ScalarOrSchedule

__all__ = ["lion"]


def lion(
    lr: ScalarOrSchedule = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> NoiseAwareTransformation:
    r"""Lion: steps of one size, in the direction of a sign.

    .. math::
        u_t &= -lr_t \bigl( \mathrm{sign}(\beta_1 m_{t-1} + (1-\beta_1)\,\tilde g_t)
               + \lambda\theta_{t-1} \bigr) \\
        m_t &= \beta_2 m_{t-1} + (1-\beta_2)\,\tilde g_t

    It has no second moment, so there is nothing to correct. A coordinate of pure noise moves as far
    as any other: start from a learning rate three to ten times smaller than AdamW's.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
        betas: β₁ and β₂, each in [0, 1).
        weight_decay: λ, at least 0, decoupled; other than 0, ``update`` needs ``params``.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Chen et al. 2023 (arXiv:2302.06675).

    >>> import torch
    >>> optimizer = lion(lr=0.1)
    >>> update, _ = optimizer.update(torch.tensor([3.0, 0.0]), optimizer.init(torch.zeros(2)))
    >>> update
    tensor([-0.1000, -0.0000])
    """
    beta1, beta2 = betas
    return chain(
        "lion",
        first_moment=interpolated_sign(beta1, beta2),
        decay=add_decayed_weights(weight_decay, coupled=False),
        lr=scale_by_learning_rate(lr),
    )
