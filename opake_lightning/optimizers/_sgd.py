"""Stochastic gradient descent."""

from __future__ import annotations

from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain
from opake_lightning.optimizers._stages import (
    add_decayed_weights,
    scale_by_learning_rate,
    trace,
)
from opake_lightning.scheduling import ScalarOrSchedule

__all__ = ["sgd"]


def sgd(
    lr: ScalarOrSchedule,
    momentum: float = 0.0,
    *,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> NoiseAwareTransformation:
    r"""SGD with momentum, as ``torch.optim.SGD``.

    .. math:: b_t = \mu\, b_{t-1} + (1 - \tau)(\tilde g_t + \lambda\theta_{t-1}), \qquad
              u_t = -lr_t\, b_t

    It squares nothing, so noise, being zero on average, needs no correction.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
        momentum: μ, at least 0.
        dampening: τ in [0, 1]; does not apply to the first step.
        nesterov: Look ahead along the momentum. Needs momentum > 0 and no dampening.
        weight_decay: λ, at least 0, of L2 regularization; other than 0, ``update`` needs
            ``params``.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Polyak 1964; Sutskever et al. 2013 for the form of Nesterov's momentum.

    >>> import torch
    >>> optimizer = sgd(lr=0.1, momentum=0.9)
    >>> state = optimizer.init(torch.zeros(1))
    >>> for gradient in (1.0, 1.0):
    ...     update, state = optimizer.update(torch.tensor([gradient]), state)
    >>> round(update.item(), 6)  # -0.1 (0.9 · 1 + 1)
    -0.19
    """
    return chain(
        "sgd",
        decay=add_decayed_weights(weight_decay, coupled=True),
        momentum=trace(momentum, dampening=dampening, nesterov=nesterov),
        lr=scale_by_learning_rate(lr),
    )
