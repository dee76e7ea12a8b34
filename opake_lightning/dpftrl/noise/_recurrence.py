r"""How the product :math:`x = T^{-1} z` is computed one entry at a time.

:math:`T` is lower triangular and Toeplitz. Three forms cover all strategies; each remembers few
earlier vectors, however many steps there are. A strategy with normalised columns multiplies
:math:`x_t` by the scale of step :math:`t` afterwards, outside of the recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Buffers", "Inputs", "Outputs", "Recurrence"]


@dataclass(frozen=True, slots=True)
class Outputs:
    r"""Banded :math:`T`: remembers the last ``len(coefficients) - 1`` outputs.

    .. math:: x_t = \Bigl(z_t - \sum_{j=1}^{p-1} c_j x_{t-j}\Bigr) / c_0

    Outputs before the first step count as zero.

    Args:
        coefficients: :math:`c_0, \ldots, c_{p-1}`, the diagonals of :math:`T`.
    """

    coefficients: tuple[float, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        """All that determines the matrix, over a given number of steps."""
        return self.coefficients


@dataclass(frozen=True, slots=True)
class Inputs:
    r"""Banded :math:`T^{-1}`: remembers the last ``len(coefficients) - 1`` inputs.

    .. math:: x_t = \sum_{j=0}^{p-1} q_j z_{t-j}

    Inputs before the first step count as zero.

    Args:
        coefficients: :math:`q_0, \ldots, q_{p-1}`, the diagonals of :math:`T^{-1}`.
    """

    coefficients: tuple[float, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        """As of :class:`Outputs`."""
        return self.coefficients


@dataclass(frozen=True, slots=True)
class Buffers:
    r"""Diagonals that are sums of exponentials: remembers one buffer :math:`S_i` for each.

    .. math:: x_t = z_t - \sum_i \omega_i S_i, \qquad S_i \leftarrow \theta_i S_i + x_t

    Buffers are zero before the first step. :math:`\theta_i = 1` is allowed.

    Args:
        theta: How much of each buffer is kept, in [0, 1], falling.
        omega: How much of each buffer is subtracted.
    """

    theta: tuple[float, ...]
    omega: tuple[float, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        """As of :class:`Outputs`."""
        return self.theta + self.omega


Recurrence: TypeAlias = Outputs | Inputs | Buffers
