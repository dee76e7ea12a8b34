r"""A gradient and its squares, released for the price of the gradient alone.

The pair is one Gaussian release: with :math:`\Delta_1` and :math:`\Delta_2` bounding how far one
example moves the gradient and the squares, and a share ρ of the budget for the squares,

.. math::

    s_1 = \sigma \Delta_1 / \sqrt{1 - \rho}, \qquad s_2 = \sigma \Delta_2 / \sqrt{\rho}

give :math:`(\Delta_1/s_1)^2 + (\Delta_2/s_2)^2 = 1/\sigma^2`: divided by its noise, the pair moves
by at most 1/σ, as a gradient released on its own does.

Squares of single examples, :math:`\frac1B \sum_i g_i \circ g_i` with
:math:`\lVert g_i \rVert \le C`: :math:`\lVert g \circ g \rVert \le \lVert g \rVert^2`, so
:math:`\Delta_1 = C/B`, :math:`\Delta_2 = C^2/B`; a gradient of one coordinate attains both.

Square of the aggregate, :math:`q = x \circ x` with x the projection of the gradient to a ball of
radius R. Projection to a convex set moves no two points apart, so one example moves x by some
:math:`r \le \min(C/B, 2R)`. Let y be the x of the neighbouring data, :math:`d = x - y`,
:math:`s = x + y`; then :math:`x \circ x - y \circ y = d \circ s`, and from
:math:`\lVert x \rVert, \lVert y \rVert \le R` follows
:math:`r^2 + \lVert s \rVert^2 + 2 \lvert d \cdot s \rvert \le 4 R^2`. Let p and n be the sums of
the positive and of the negated negative elements of :math:`d \circ s`;
:math:`t = (p + n) / r \le \lVert s \rVert` (Cauchy-Schwarz);
:math:`c = \lvert p - n \rvert = \lvert d \cdot s \rvert`. Then

.. math::

    \lVert d \circ s \rVert^2 \le p^2 + n^2 = (r^2 t^2 + c^2) / 2, \qquad
    r^2 + t^2 + 2 c \le 4 R^2, \qquad 0 \le c \le r t.

On the boundary :math:`t^2 = 4R^2 - r^2 - 2c` the bound is convex in c, so its maximum is at an end:
c = 0 gives :math:`r^2 (4R^2 - r^2)/2`, c = rt means t = 2R - r and gives :math:`r^2 (2R - r)^2`,

.. math::

    M_R(r) = \begin{cases}
        r^2 (2R - r)^2 & r \le 2R/3 \\
        2 r^2 (R^2 - r^2/4) & \text{else,} \end{cases}

the squared distance; attained by x, y on one axis, and from two dimensions on by
:math:`d = (a, a), s = (b, -b)`. It grows up to :math:`r = \sqrt2 R`, so
:math:`\Delta_2 = \sqrt{M_R(\min(C/B, \sqrt2 R))}`; and where :math:`C/B \le \sqrt2 R` one change
attains both bounds, so no smaller noise would do.

Source: Kalinin, Upadhyay, Lampert 2025 (arXiv:2502.06597), which bounds pairs under replacement of
a row. Departs from it: add/remove adjacency, under which the squares are not free; and the released
gradient is not projected, since its bound does not get smaller by it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opake_lightning._tree import layouts_of_sum, pack, unpack
from opake_lightning.types import ClippedPytree, SecondMomentClippedPytree

__all__ = ["noise_stddevs", "projected_square", "square_sensitivity", "squares_of"]

_NORM_BLOCK = 1 << 22


def square_sensitivity(distance: float, radius: float) -> float:
    """Δ₂ of the aggregate form.

    Args:
        distance: Largest L2 distance that one example moves the gradient by.
        radius: Radius of the ball that the gradient is projected to before it is squared.

    >>> square_sensitivity(0.25, 1.0)  # 1 - 0.75 ** 2
    0.4375
    """
    move = min(distance, math.sqrt(2) * radius)
    if move <= 2 / 3 * radius:
        return move * (2 * radius - move)
    return move * math.sqrt(2 * (radius + move / 2) * (radius - move / 2))


def noise_stddevs(
    grads: SecondMomentClippedPytree, noise_multiplier: float, square_share: float | None
) -> tuple[float, float]:
    r"""Standard deviations of the noise on the gradient and on its squares.

    Guarantee: any change that moves the gradient and the squares within their sensitivities moves
    the pair, each divided by its standard deviation, by at most 1 / ``noise_multiplier``.

    Args:
        grads: The pair; its tensors are not looked at.
        noise_multiplier: σ.
        square_share: ρ. None is 1/2 for the square of the aggregate; for squares of examples
            :math:`\Delta_2 / (\Delta_1 + \Delta_2)`, which makes :math:`s_1^2 + s_2^2` least.
    """
    first = grads.gradient.sensitivity
    if grads.square is not None:
        second = grads.square.sensitivity
        share = second / (first + second) if square_share is None else square_share
    else:
        assert grads.projection_radius is not None  # the pair has checked it
        second = square_sensitivity(first, grads.projection_radius)
        share = 0.5 if square_share is None else square_share
    return (
        noise_multiplier * (first / math.sqrt(1 - share)),
        noise_multiplier * (second / math.sqrt(share)),
    )


def squares_of(grads: SecondMomentClippedPytree, *, inplace: bool) -> tuple[ClippedPytree, bool]:
    """The squares that are to be released, and whether their memory may be written to.

    That of the aggregate is that of what is given, so that has to be the sum over all ranks.
    """
    if grads.square is not None:
        return grads.square, inplace
    assert grads.projection_radius is not None  # the pair has checked it
    total, radius = grads.gradient, grads.projection_radius
    return ClippedPytree(
        projected_square(total.pytree, radius, total.dtypes),
        square_sensitivity(total.sensitivity, radius),
        dtypes=total.dtypes,
    ), True


def projected_square(
    tree: Any, radius: float, dtypes: tuple[torch.dtype, ...] | None = None
) -> Any:
    """Elementwise square of ``tree``, projected to norm ``radius``; in new memory.

    With ``dtypes``, those that the square is released in, it is in float64: rounded before it has
    its noise, it could move by more than its bound.
    """
    layout, _ = layouts_of_sum(tree, dtypes)
    flats = pack(tree, layout)
    factor = _shrinking(flats, radius)
    squares = layout.empty()
    for flat, square in zip(flats, squares, strict=True):
        torch.mul(flat, factor.to(flat.device), out=square).square_()
    return unpack(squares, layout)


def _shrinking(flats: list[Tensor], radius: float) -> Tensor:
    """min(1, radius / norm), the norm over all ``flats`` in float64, without a device sync."""
    device = flats[0].device if flats else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        for block in flat.split(_NORM_BLOCK):
            norm = torch.linalg.vector_norm(block, dtype=torch.float64).to(device)
            total.addcmul_(norm, norm)
    norm = total.sqrt_()
    return torch.where(norm > radius, radius / norm, 1.0)
