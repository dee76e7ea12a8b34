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
from opake_lightning.optimizers._chain import Flow, Stage
from opake_lightning.optimizers._second_moment import Correction, SecondMomentState, correction
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

    def init(self, layout: Layout, params: Any) -> FactoredState:
        own = _layouts(layout, self.min_dim_size)
        return FactoredState(own["row"].zeros(), own["col"].zeros(), own["square"].zeros(), 0.0)

    def layouts(self, layout: Layout) -> Mapping[str, Layout]:
        return _layouts(layout, self.min_dim_size)

    def like_params(self, state: FactoredState) -> Any:
        return optree.tree_map(_like, state.row, state.col, state.square)

    def update(self, flow: Flow, state: FactoredState) -> tuple[Flow, FactoredState]:
        add = float((flow.step + 1) ** self.decay_exponent)
        own = _layouts(flow.layout, self.min_dim_size)
        squares = [self._squares(g) for g in flow.layout.views(flow.gradient)]
        parts = {
            "row": [_mean(s, -1, whole=whole) for s, whole in self._with_kind(squares)],
            "col": [_mean(s, -2, whole=whole) for s, whole in self._with_kind(squares)],
            "square": [s if whole else s.new_empty(0) for s, whole in self._with_kind(squares)],
        }
        noise, denoised = 0.0, dict[str, list[Tensor]]()
        for name, news in parts.items():
            flats = getattr(state, name)
            # The flat tensors take part through their views, so nothing is copied together.
            moment = SecondMomentState(own[name].views(flats), state.noise)
            moment = moment.step(news, flow.variance, keep=1 - add, add=add)
            denoised[name], noise = moment.denoised(self.correction), moment.noise
        out = [flat.clone() for flat in flow.direction]
        leaves = zip(flow.layout.views(out), *denoised.values(), strict=True)
        for leaf, row, col, square in leaves:
            if self._is_factored(leaf.shape):
                row = (row / row.mean(dim=-1, keepdim=True)).rsqrt_()
                leaf.mul_(row.unsqueeze(-1)).mul_(col.rsqrt_().unsqueeze(-2))
            else:
                leaf.mul_(square.rsqrt_())
        return changed(flow, direction=out), changed(state, noise=noise)

    def _squares(self, gradient: Tensor) -> Tensor:
        # Squares that overflow would leave inf / inf in the quotient of the factors.
        most = torch.finfo(gradient.dtype).max / max(gradient.numel(), 1)
        return (gradient * gradient).clamp_(max=most).add_(self.eps)

    def _is_factored(self, shape: torch.Size) -> bool:
        return _is_factored(shape, self.min_dim_size)

    def _with_kind(self, squares: list[Tensor]) -> list[tuple[Tensor, bool]]:
        return [(square, not self._is_factored(square.shape)) for square in squares]


def _is_factored(shape: torch.Size, min_dim_size: int) -> bool:
    return len(shape) >= 2 and shape.numel() > 0 and min(shape[-2:]) >= min_dim_size


def _mean(square: Tensor, dim: int, *, whole: bool) -> Tensor:
    return square.new_empty(0) if whole else square.mean(dim=dim)


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
