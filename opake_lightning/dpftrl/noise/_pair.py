r"""A gradient and its squares in two streams of correlated noise, at the price of one.

Two streams, each with a matrix of its own. At every step that an
example takes part in, it moves the gradient by at most :math:`\Delta_1` and the squares by at most
:math:`\Delta_2`; so it moves :math:`C_1` times the gradients by at most :math:`\Delta_1 S_1`, and
:math:`C_2` times the squares by at most :math:`\Delta_2 S_2`. With a share ρ for the squares,

.. math::

    s_1 = \frac{\sigma \Delta_1}{\sqrt{1 - \rho}}, \qquad
    s_2 = \frac{\sigma \Delta_2}{\sqrt{\rho}} \, r, \qquad r \ge \frac{S_2}{S_1},
    \qquad\text{give}\qquad
    \Bigl(\frac{\Delta_1 S_1}{s_1}\Bigr)^2 + \Bigl(\frac{\Delta_2 S_2}{s_2}\Bigr)^2
    \le \frac{S_1^2}{\sigma^2} (1 - \rho + \rho),

the single Gaussian of the gradient alone. Three things that are easily missed:

- :math:`S_2 / S_1` is not the ratio of the column norms :math:`\kappa_2 / \kappa_1`, which is that
  for one participation. With n = 1000, separation 100 and 10 participations, BISR of bandwidth 4
  for momenta 0.9 and 0.999 has a ratio of 15.6, where column norms have 7.7; allocated by these,
  and with most of the budget for the squares, the run would have the privacy of half its noise
  multiplier.
- Amplification by cyclic Poisson sampling accounts for each participation on its own. C is then
  banded, with no more bands than steps lie between two participations, so participations move
  disjoint rows, and each is a Gaussian release of sensitivity
  :math:`\Delta_1 \kappa_1, \Delta_2 \kappa_2`. The same sum, with κ for S, asks for
  :math:`r \ge \kappa_2 / \kappa_1`. So r is the larger of the two (they are equal if the horizon
  cuts off no column), and the run may be accounted for either way.
- ρ is one number for the whole horizon. The bound adds up products :math:`\Delta_s \Delta_t` of two
  steps, so that a larger share for the squares at one step is not made up for by a smaller one at
  another. What depends on a clipping norm that changes is therefore decided at the first step.

Source: Choquette-Choo et al. 2023 (arXiv:2306.08153), Theorem 4, for cyclic Poisson sampling;
Kalinin, Upadhyay, Lampert 2025 (arXiv:2502.06597), for pairs. Departs from the last: add/remove
adjacency, and examples that take part more than once.
"""

from __future__ import annotations

from opake_lightning import _check
from opake_lightning._pairs import noise_stddevs
from opake_lightning.dpftrl.noise._strategies import Strategy
from opake_lightning.errors import PrivacyError
from opake_lightning.types import SecondMomentClippedPytree

__all__ = ["default_share", "schema_of", "square_ratio"]


def schema_of(
    first: Strategy,
    second: Strategy | None,
    n_steps: int,
    min_sep: int | None,
    max_participations: int | None,
) -> tuple[int, int] | None:
    """(steps between participations, most participations), if known; raises if it must be."""
    if min_sep is None:
        if max_participations is not None:
            raise ValueError(
                f"max_participations={max_participations} says nothing without min_sep; give both"
            )
        if second is None:
            return None
        if first.bands is None or second.bands is None:
            if first == second:  # the same matrix twice: r = 1 under every schema
                return None
            raise PrivacyError(
                "how the budget of a pair is to be shared depends on how often an example takes "
                "part; give min_sep, the least number of steps from one participation to the next "
                "(for batches that partition the data: the number of steps in one pass)"
            )
        min_sep = min(n_steps, max(first.bands, second.bands))
    most = -(-n_steps // _check.positive_int("min_sep", min_sep))
    if max_participations is not None:
        most = min(most, _check.positive_int("max_participations", max_participations))
    return min_sep, most


def square_ratio(
    first: Strategy, second: Strategy, n_steps: int, schema: tuple[int, int] | None
) -> float:
    """The r of the module's description."""
    if first == second:
        return 1.0
    assert schema is not None  # schema_of has refused
    one, two = first.matrix(n_steps), second.matrix(n_steps)
    return max(
        two.sensitivity(*schema) / one.sensitivity(*schema),
        two.max_column_norm() / one.max_column_norm(),
    )


def default_share(grads: SecondMomentClippedPytree) -> float:
    """The share that :func:`noise_stddevs` takes if it is given none."""
    # The noise of the squares is proportional to its root.
    half, own = noise_stddevs(grads, 1.0, 0.5)[1], noise_stddevs(grads, 1.0, None)[1]
    return 0.5 * (half / own) ** 2
