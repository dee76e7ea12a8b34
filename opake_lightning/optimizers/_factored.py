r"""Adafactor's second moment: row and column averages in place of a matrix.

Of the squares of a matrix of gradients only the averages over rows and over columns are kept,

.. math:: R \leftarrow \beta_t R + (1-\beta_t)\,\mathrm{mean}_j(\tilde g_{ij}^2 + eps), \qquad
          C \leftarrow \beta_t C + (1-\beta_t)\,\mathrm{mean}_i(\tilde g_{ij}^2 + eps),

and :math:`V_{ij} = R_i C_j / \mathrm{mean}(R)` stands for the whole. Noise adds :math:`\sigma^2` to
every element and so to every average: one φ is what it adds to R, to C, and to the squares of a
tensor that is not factored. It is taken off each factor before they are multiplied.

Source: Shazeer & Stern 2018 (arXiv:1804.04235), Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import lru_cache
from typing import Any, ClassVar, cast, final

import optree
import torch
from torch import Tensor

from opake_lightning import _check
from opake_lightning._tree import Layout, layout_of
from opake_lightning.optimizers._second_moment import Correction, SecondMomentState, correction
from opake_lightning.optimizers._stage import Flow, Stage
from opake_lightning.optimizers.types import FactoredState

__all__ = ["factored_precondition"]


def factored_precondition(
    decay_exponent: float,
    eps: float,
    *,
    min_dim_size: int = 1,
    correct: bool = False,
    floor: float = 1e-6,
    relative_floor: float = 0.0,
) -> Stage:
    r"""Divide the direction by the root of a factored second moment.

    Args:
        decay_exponent: The decay at step t (1 at the first) is :math:`1 - t^{decay\_exponent}`;
            below 0.
        eps: Added to the squares; > 0.
        min_dim_size: Factor tensors whose last two dimensions are at least this; at least 1.
        correct: Subtract from each factor what noise is expected to have added to it.
        floor: γ, the least that is left of a corrected factor; > 0.
        relative_floor: r, the least that is left as a share of what was subtracted; at least 0.
    """
    _check.positive("-beta2_decay", -decay_exponent)
    return _Factored(
        decay_exponent,
        _check.positive("eps[0]", eps),
        _check.positive_int("min_dim_size_to_factor", min_dim_size),
        correction(correct=correct, floor=floor, relative_floor=relative_floor),
    )


@final
@dataclass(frozen=True, slots=True)
class _Factored(Stage):
    decay_exponent: float
    eps: float
    min_dim_size: int
    correction: Correction
    stateful: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def init(self, layout: Layout, params: Any) -> FactoredState:
        own = _layouts(layout, self.min_dim_size)
        return FactoredState(own["row"].zeros(), own["col"].zeros(), own["square"].zeros(), 0.0)

    def layouts(self, layout: Layout) -> Mapping[str, Layout]:
        return _layouts(layout, self.min_dim_size)

    def like_params(self, state: FactoredState) -> Any:
        return optree.tree_map(_like, state.row, state.col, state.square)

    @property
    def reads_gradient(self) -> bool:
        return True

    def update(self, flow: Flow, state: FactoredState) -> FactoredState:
        add = float((flow.step + 1) ** self.decay_exponent)
        layouts = _layouts(flow.layout, self.min_dim_size)
        factored = [_is_factored(shape, self.min_dim_size) for shape in flow.layout.shapes]
        directions = flow.layout.views(flow.direction)
        gradients = directions
        if flow.gradient is not flow.direction:
            gradients = flow.layout.views(flow.gradient)
        parts = {name: layouts[name].zeros() for name in ("row", "col", "square")}
        views = {name: layouts[name].views(flats) for name, flats in parts.items()}
        for gradient, split, *leaf in zip(gradients, factored, *views.values(), strict=True):
            _averages(gradient, *leaf, split=split)
        noise = 0.0
        for name, flats in parts.items():
            for flat, limit in zip(flats, _largest_squares(flow), strict=True):
                flat.clamp_(max=limit).add_(self.eps)
            moment = SecondMomentState(getattr(state, name), state.noise)
            moment = moment.step(flats, flow.variance, keep=1 - add, add=add, squared=True)
            parts[name], noise = moment.denoised(self.correction), moment.noise
        for name in ("col", "square"):
            parts[name] = [flat.rsqrt() for flat in parts[name]]
        views = [layouts[name].views(flats) for name, flats in parts.items()]
        for direction, split, *leaf in zip(directions, factored, *views, strict=True):
            _divide(direction, *leaf, split=split)
        return changed(state, noise=noise)


def _averages(gradient: Tensor, row: Tensor, col: Tensor, square: Tensor, *, split: bool) -> None:
    """Fill in the averages of one tensor's squares, or all of its squares."""
    if split:
        squares = gradient * gradient
        torch.mean(squares, -1, out=row)
        torch.mean(squares, -2, out=col)
    else:
        torch.mul(gradient, gradient, out=square)


def _divide(direction: Tensor, row: Tensor, col: Tensor, square: Tensor, *, split: bool) -> None:
    """Divide by the root of V; of ``col`` and ``square``, the inverse roots are given."""
    if split:
        row = (row / row.mean(dim=-1, keepdim=True)).rsqrt_()
        direction.mul_(row.unsqueeze(-1)).mul_(col.unsqueeze(-2))
    else:
        direction.mul_(square)


def _largest_squares(flow: Flow) -> list[float]:
    # Squares that overflow would leave inf / inf in the quotient of the factors.
    return [torch.finfo(flat.dtype).max / max(flat.numel(), 1) for flat in flow.gradient]


def _is_factored(shape: torch.Size, min_dim_size: int) -> bool:
    return len(shape) >= 2 and shape.numel() > 0 and min(shape[-2:]) >= min_dim_size


def _like(row: Tensor, col: Tensor, square: Tensor) -> Tensor:
    if not row.numel():
        return square
    return row.unsqueeze(-1).expand(*row.shape, col.shape[-1])


@lru_cache(maxsize=32)
def _layouts(layout: Layout, min_dim_size: int) -> dict[str, Layout]:
    """Layouts of the three pytrees of the state."""
    kinds = {index: group for group in layout.groups for index in group.members}
    trees: dict[str, list[Tensor]] = {"row": [], "col": [], "square": []}
    for index, shape in enumerate(layout.shapes):
        none = torch.Size((0,))
        shapes = {"row": none, "col": none, "square": shape}
        if _is_factored(shape, min_dim_size):
            shapes = {"row": shape[:-1], "col": shape[:-2] + shape[-1:], "square": none}
        group = kinds[index]
        for name, leaves in trees.items():
            one = torch.empty((), dtype=group.dtype, device=group.device)
            leaves.append(one.expand(shapes[name]))
    return {
        name: layout_of(cast("Any", optree.tree_unflatten(layout.treespec, leaves)))
        for name, leaves in trees.items()
    }
