"""AdEMAMix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from opake_lightning import _check
from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain
from opake_lightning.optimizers._precondition import precondition
from opake_lightning.optimizers._stages import (
    add_decayed_weights,
    add_slow_ema,
    ema,
    scale_by_learning_rate,
)
from opake_lightning.scheduling import ScalarOrSchedule

__all__ = ["ademamix"]


def ademamix(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    alpha: float = 5.0,
    alpha_warmup_steps: int | None = None,
    beta3_warmup_steps: int | None = None,
    noise_bias_correction: bool = False,
    noise_floor: float = 1e-6,
    noise_floor_relative: float = 0.0,
) -> NoiseAwareTransformation:
    r"""AdEMAMix: AdamW with a second, slow average of gradients.

    .. math::
        m_{1,t} &= \beta_1 m_{1,t-1} + (1-\beta_1)\,\tilde g_t, \qquad
            \hat m_{1,t} = m_{1,t} / (1-\beta_1^t) \\
        m_{2,t} &= \beta_{3,t} m_{2,t-1} + (1-\beta_{3,t})\,\tilde g_t \\
        u_t &= -lr_t \bigl( (\hat m_{1,t} + \alpha_t m_{2,t}) / (\sqrt{\hat v_t} + eps)
               + \lambda\theta_{t-1} \bigr)

    The slow average is not debiased. Under warm-up over T steps, with t = 1 at the first,
    :math:`\alpha_t = \alpha \min(1, t/T)`, and β₃ rises from β₁ such that the half-life of the slow
    average grows in a straight line:

    .. math:: \beta_{3,t} = \min\Bigl( \exp\frac{\ln\beta_1 \ln\beta_3}
              {(1 - t/T) \ln\beta_3 + (t/T) \ln\beta_1},\; \beta_3 \Bigr)

    The noise correction, and squares that are released on their own, are :func:`adamw`'s.

    Args:
        lr: Learning rate, or a function from the step (0 at the first) to it.
        betas: β₁, β₂ and β₃, each in [0, 1).
        eps: Added to the denominator; > 0.
        weight_decay: λ, at least 0, decoupled; other than 0, ``update`` needs ``params``.
        alpha: α, at least 0: weight of the slow average.
        alpha_warmup_steps: Steps over which α is reached; None to have it from the start.
        beta3_warmup_steps: Steps over which β₃ is reached; None to have it from the start. Takes
            β₁ and β₃ above 0.
        noise_bias_correction: See :func:`adamw`.
        noise_floor: See :func:`adamw`.
        noise_floor_relative: See :func:`adamw`.

    Returns:
        The optimizer.

    Raises:
        ValueError: If a setting is outside its range.

    Source: Pagliardini et al. 2024 (arXiv:2409.03137).

    >>> import torch
    >>> optimizer = ademamix(lr=0.1, betas=(0.9, 0.999, 0.5), alpha=5)
    >>> update, _ = optimizer.update(torch.tensor([3.0]), optimizer.init(torch.zeros(1)))
    >>> round(update.item(), 6)  # -0.1 (3 + 5 · 0.5 · 3) / 3
    -0.35
    """
    beta1, beta2, beta3 = betas
    _check.fraction("beta3", beta3, zero=True, one=False)
    if beta3_warmup_steps is not None and not (beta1 > 0 and beta3 > 0):
        raise ValueError(
            f"beta3_warmup_steps={beta3_warmup_steps!r} needs beta1 and beta3 > 0, got "
            f"betas={betas!r}"
        )
    alpha = _check.non_negative("alpha", alpha)
    return chain(
        "ademamix",
        first_moment=ema(beta1),
        slow_moment=add_slow_ema(
            _Alpha(alpha, _warmup("alpha_warmup_steps", alpha_warmup_steps)),
            _Beta3(beta1, beta3, _warmup("beta3_warmup_steps", beta3_warmup_steps)),
        ),
        second_moment=precondition(
            beta2,
            eps,
            correct=noise_bias_correction,
            floor=noise_floor,
            relative_floor=noise_floor_relative,
            mean_decay=beta1,
            slow_weight=alpha,
        ),
        decay=add_decayed_weights(weight_decay, coupled=False),
        lr=scale_by_learning_rate(lr),
    )


def _warmup(name: str, n: int | None) -> int:
    return 0 if n is None else _check.positive_int(name, n)


@final
@dataclass(frozen=True, slots=True)
class _Alpha:
    alpha: float
    warmup_steps: int

    def __call__(self, step: int) -> float:
        t = step + 1
        return self.alpha if t >= self.warmup_steps else t * self.alpha / self.warmup_steps


@final
@dataclass(frozen=True, slots=True)
class _Beta3:
    start: float
    end: float
    warmup_steps: int

    def __call__(self, step: int) -> float:
        t = step + 1
        if t >= self.warmup_steps:
            return self.end
        done = t / self.warmup_steps
        first, last = math.log(self.start), math.log(self.end)
        return min(math.exp(first * last / ((1 - done) * last + done * first)), self.end)
