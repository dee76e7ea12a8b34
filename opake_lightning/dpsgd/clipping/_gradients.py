r"""Gradients of single examples with respect to one tensor, mostly without forming them.

What an operation does to a parameter is kept in the form in which it comes: inputs and gradients of
outputs. Each form knows its examples' norms, their weighted sum, and, some rows at a time, the
gradients themselves.

**Precision.** What is summed must have the norm that was found, or more than the bound comes
through. So a gradient is either formed, in the type that it has, and its norm is that of what was
formed; or norm and sum both come from the same factors in float64. And sums over examples are
float64: in float32 the sum of 20,000 aligned gradients moves by 1.0004 of one when it is removed.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import cast, final

import torch
from torch import Tensor

from opake_lightning import _pool
from opake_lightning._tree import wide

__all__ = [
    "FORMED_FROM",
    "Dense",
    "Gradients",
    "Outer",
    "Places",
    "Pulled",
    "Rows",
    "Sum",
    "as_float64",
    "by_example",
    "squared_norms",
    "total",
]

# Elements of formed gradients that are looked at together: they stay in cache.
_CHUNK = 1 << 18
# Elements of one float32 sum of squares: of equal ones, the root of 2^8 is off by at most 3e-7, of
# 2^12 by 4e-6.
_BLOCK = 1 << 8
# Places t from which on a second product over them takes longer than to write and read gradients.
FORMED_FROM = 16
# Binary digits of a float64 sum that are kept where it goes through another type.
_DIGITS = 48
# A product in float64 takes about as long as four in float32.
_GRAM_COST = 4
# Elements of gradients so small that calls take longer than what is computed.
_SMALL = 1 << 14


class Gradients(ABC):
    """Gradients of examples with respect to a tensor.

    Attributes:
        shape: Shape of the tensor.
        size: Number of examples.
    """

    shape: torch.Size
    size: int

    @abstractmethod
    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples, shape [rows, *shape], float32 or float64."""

    def squared_norms(self) -> Tensor:
        """Squared L2 norms, float64, shape [size]."""
        return torch.cat([squared_norms(self.dense(rows)) for rows in self.chunks()])

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        """Add the sum of ``factors[i]`` times the i-th gradient to ``out``, both float64."""
        for rows in self.chunks():
            _add_weighted(self.dense(rows), factors[rows], out)

    def write_weighted(self, factors: Tensor, out: Tensor) -> None:
        """The same, whatever ``out`` holds; to fill it with zeros takes as long as to read it."""
        self.add_weighted(factors, out.zero_())

    def kind(self) -> Hashable:
        """What it has in common with gradients that can be looked at together; None: nothing."""
        return None

    def add_squares(self, factors: Tensor, out: Tensor) -> None:
        """Add the sum of the squares of ``factors[i]`` times the i-th gradient to ``out``."""
        for rows in self.chunks():
            # Multiplied before they are squared: a squared factor could leave float32's range.
            column = factors[rows].to(out.dtype).view(-1, *[1] * len(self.shape))
            out.add_((self.dense(rows).to(out.dtype) * column).square_().sum(0))

    def formed(self) -> Dense | None:
        """The same with every gradient there, if that takes less time in the end, else None."""
        return None

    def chunks(self) -> list[slice]:
        """Rows to look at together."""
        step = max(1, _CHUNK // max(1, self.shape.numel()))
        return [slice(start, start + step) for start in range(0, self.size, step)]


@final
class Dense(Gradients):
    """Gradients that are there, shape [size, *shape], and maybe their squared norms."""

    def __init__(self, values: Tensor, norms: Tensor | None = None) -> None:
        self.values, self._norms = values, norms
        self.shape, self.size = values.shape[1:], len(values)

    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples."""
        return _wide(self.values[rows])

    def squared_norms(self) -> Tensor:
        """Squared norms."""
        return squared_norms(_wide(self.values)) if self._norms is None else self._norms

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        """Add the weighted sum to ``out``."""
        _add_weighted(self.values, factors, out)

    def write_weighted(self, factors: Tensor, out: Tensor) -> None:
        """The same, whatever ``out`` holds."""
        _add_weighted(self.values, factors, out, keep=0)

    def kind(self) -> Hashable:
        """Small ones of one shape."""
        small = self._norms is None and self.shape.numel() <= _SMALL
        return (self.values.shape, self.values.dtype, self.values.device) if small else None


@final
class Places(Gradients):
    """Sums over all places of an example, as that of a bias is.

    Args:
        values: Of any shape that has size · T · shape elements, in this order.
        size: Number of examples.
        keep: How many dimensions, the last ones, are the tensor's.
    """

    def __init__(self, values: Tensor, size: int, keep: int) -> None:
        self.values, self.size = values, size
        self.shape = values.shape[values.dim() - keep :]

    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples."""
        return _wide(by_example(self.values, self.size, self.shape)[rows]).sum(1)

    def formed(self) -> Dense | None:
        """All of them, unless they are so small that others of their kind wait for them."""
        return Dense(self.dense(slice(None))) if self.kind() is None else None

    def kind(self) -> Hashable:
        """Small ones of one shape."""
        if self.values.numel() > _SMALL:
            return None
        return self.values.shape, self.shape, self.values.dtype, self.values.device


@final
class Outer(Gradients):
    r"""Sums of outer products, :math:`G_i = \sum_t a_{it} b_{it}^\top`: a matrix in a product.

    Args:
        a: Of any shape that has size · T · rows of the matrix elements, rows last.
        b: The same with columns of the matrix.
        size: Number of examples.
        shape: The tensor's shape, if it is not [rows, columns].
    """

    def __init__(self, a: Tensor, b: Tensor, size: int, shape: torch.Size | None = None) -> None:
        self._raw = a, b
        self._matrix = torch.Size((a.shape[-1], b.shape[-1]))
        self.shape, self.size = shape or self._matrix, size
        self._length = a.numel() // max(1, size * a.shape[-1])  # T

    @cached_property
    def a(self) -> Tensor:
        """Shape [size, T, rows of the matrix]."""
        return _wide(by_example(self._raw[0], self.size, self._matrix[:1]))

    @cached_property
    def b(self) -> Tensor:
        """Shape [size, T, columns of the matrix]."""
        return _wide(by_example(self._raw[1], self.size, self._matrix[1:]))

    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples."""
        return torch.bmm(self.a[rows].mT, self.b[rows]).view(-1, *self.shape)

    def squared_norms(self) -> Tensor:
        """Squared norms, by whichever way takes less."""
        if self._length == 1:
            # In float64: one of them may be too small, or too large, for a float32 square.
            self.a, self.b = as_float64(self.a), as_float64(self.b)  # which the sum needs as well
            return squared_norms(self.a) * squared_norms(self.b)
        # In float64: what cancels over t would leave too few digits of a float32 product.
        if self._prefers_gram():
            a, b = as_float64(self.a), as_float64(self.b)
            return (torch.bmm(a, a.mT) * torch.bmm(b, b.mT)).sum((1, 2)).clamp_(min=0)
        pairs = ((as_float64(self.a[rows]), as_float64(self.b[rows])) for rows in self.chunks())
        return torch.cat([squared_norms(torch.bmm(a.mT, b)) for a, b in pairs])

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        """Add the weighted sum to ``out``, as one matrix product."""
        self._product(factors, out, 1)

    def write_weighted(self, factors: Tensor, out: Tensor) -> None:
        """The same, whatever ``out`` holds."""
        self._product(factors, out, 0)

    def _product(self, factors: Tensor, out: Tensor, keep: int) -> None:
        length, (p, q) = self._length, self._matrix
        matrix = out.view(self._matrix)
        step = max(1, _CHUNK // max(1, length * min(p, q)), 512 // max(1, length))
        for start in range(0, self.size, step):
            rows = slice(start, start + step)
            a, b, column = self.a[rows], self.b[rows], factors[rows, None, None]
            a, b = (a * column, b) if p <= q else (a, b * column)
            a, b = as_float64(a), as_float64(b)
            matrix.addmm_(a.reshape(-1, p).t(), b.reshape(-1, q), beta=1 if start else keep)

    def kind(self) -> Hashable:
        """Small ones of one shape."""
        a, b = self._raw
        if self.shape.numel() > _SMALL or max(a.numel(), b.numel()) > _SMALL:
            return None
        return a.shape, b.shape, self.shape, a.dtype, b.dtype, a.device

    def _prefers_gram(self) -> bool:
        """Whether products of all pairs of t take less than the gradient itself."""
        p, q = self._matrix
        return _GRAM_COST * self._length * (p + q) <= p * q

    def formed(self) -> Dense | None:
        """All of them: to read them once more takes less than another product over t."""
        if self._length < FORMED_FROM or self._prefers_gram():
            return None
        values = _pool.empty(self.size * self.shape.numel(), self.a.dtype, self.a.device)
        values = values.view(self.size, *self._matrix)
        norms: list[Tensor] = []
        for rows in self.chunks():
            norms.append(squared_norms(torch.bmm(self.a[rows].mT, self.b[rows], out=values[rows])))
        return Dense(values.view(self.size, *self.shape), torch.cat(norms))

    def joined(self, other: Outer) -> Outer:
        """The sum of both, which is one more of this kind."""
        a, b = torch.cat([self.a, other.a], 1), torch.cat([self.b, other.b], 1)
        return Outer(a, b, self.size, self.shape)

    @staticmethod
    def of_all(members: Sequence[Outer]) -> Outer:
        """The gradients of leaves of one kind as those of one, leaf after leaf."""
        a, b = (torch.stack([m._raw[i] for m in members]) for i in (0, 1))
        return Outer(a, b, len(members) * members[0].size, members[0].shape)


@final
class Rows(Gradients):
    r"""Rows of a table that were looked up: row ``ids[i, t]`` gets ``values[i, t]``.

    Args:
        ids: Shape [size, T].
        values: Shape [size, T, columns].
        length: Number of rows of the table.
    """

    def __init__(self, ids: Tensor, values: Tensor, length: int) -> None:
        self.ids, self.values = ids, _wide(values)
        self.shape, self.size = torch.Size((length, values.shape[2])), len(ids)

    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples."""
        ids, values = self.ids[rows], self.values[rows]
        n, length = len(ids), self.shape[0]
        place = ids + length * torch.arange(n, device=ids.device)[:, None]
        table = values.new_zeros(n * length, self.shape[1])
        return table.index_add_(0, place.flatten(), values.flatten(0, 1)).view(n, *self.shape)

    def squared_norms(self) -> Tensor:
        """Squared norms, from the rows that an example looked up."""
        example = torch.arange(self.size, device=self.ids.device)[:, None]
        place, where = (self.ids + self.shape[0] * example).unique(return_inverse=True)
        rows = self.values.new_zeros(len(place), self.shape[1], dtype=torch.float64)
        rows.index_add_(0, where.flatten(), self.values.flatten(0, 1).double())
        norms = torch.zeros(self.size, dtype=torch.float64, device=self.ids.device)
        return norms.index_add_(0, place // self.shape[0], squared_norms(rows))

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        """Add the weighted sum to ``out``."""
        values = self.values.double() * factors[:, None, None]
        out.index_add_(0, self.ids.flatten(), values.flatten(0, 1))


@final
class Pulled(Gradients):
    """Gradients with respect to a leaf, from those of a tensor that was computed of it.

    Args:
        inner: Gradients of the computed tensor.
        computed: That tensor, with its graph.
        leaf: The leaf.
        isometric: Whether it holds elements of the leaf, each at most once.
    """

    def __init__(
        self, inner: Gradients, computed: Tensor, leaf: Tensor, *, isometric: bool
    ) -> None:
        self.inner, self.computed, self.leaf = inner, computed, leaf
        self.isometric = isometric
        self.shape, self.size = leaf.shape, inner.size

    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples."""
        return _wide(self._pull(self.inner.dense(rows), batched=True))

    def squared_norms(self) -> Tensor:
        """Squared norms."""
        return self.inner.squared_norms() if self.isometric else super().squared_norms()

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        """Add the weighted sum to ``out``."""
        if not self.isometric:
            # Arithmetic of the sum would round as much as a sum in its type does.
            super().add_weighted(factors, out)
            return
        inner = torch.zeros(self.inner.shape, dtype=torch.float64, device=out.device)
        self.inner.add_weighted(factors, inner)
        # Elements are only moved, so float64 can be moved some digits at a time, in another type.
        kind = self.computed.dtype
        parts = math.ceil(_DIGITS / (1 - math.log2(torch.finfo(kind).eps)))
        for _ in range(parts if inner.numel() else 0):
            scale = float(inner.abs().amax()) or 1.0  # float16 would leave its range
            part = (inner / scale).to(kind)
            out.add_(self._pull(part, batched=False), alpha=scale)
            inner.sub_(part.double(), alpha=scale)

    def formed(self) -> Dense | None:
        """All of them, if each would have to be computed twice."""
        if self.isometric:
            return None
        return Dense(torch.cat([self.dense(rows) for rows in self.chunks()]))

    def _pull(self, gradient: Tensor, *, batched: bool) -> Tensor:
        gradient = gradient.to(self.computed.dtype)
        try:
            return self._pulled(gradient, batched=batched)
        except RuntimeError:
            if not batched:
                raise
            # Not every operation has a rule for many gradients at once.
            return torch.stack([self._pulled(row, batched=False) for row in gradient])

    def _pulled(self, gradient: Tensor, *, batched: bool) -> Tensor:
        found = torch.autograd.grad(
            self.computed,
            self.leaf,
            gradient,
            retain_graph=True,
            is_grads_batched=batched,
            allow_unused=True,
        )
        if (pulled := cast("Tensor | None", found[0])) is not None:
            return pulled
        # Undefined, which is zero: that of a count of what is not zero, say.
        return self.leaf.new_zeros((len(gradient), *self.shape) if batched else self.shape)

    def span(self) -> tuple[int, int] | None:
        """First and last element of the leaf that it holds, if it holds those in between."""
        same = self.computed.untyped_storage().data_ptr() == self.leaf.untyped_storage().data_ptr()
        if not self.isometric or not same or not self.computed.is_contiguous():
            return None
        begin = int(self.computed.storage_offset())
        return begin, begin + self.computed.numel()


@final
class Sum(Gradients):
    """Gradients of a leaf that was used several times; norms are of the sums."""

    def __init__(self, parts: list[Gradients]) -> None:
        self.parts = parts
        self.shape, self.size = parts[0].shape, parts[0].size

    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples."""
        first, *others = [part.dense(rows) for part in self.parts]
        out = first.clone()
        for other in others:
            out.add_(other)
        return out

    def squared_norms(self) -> Tensor:
        """Squared norms."""
        if _disjoint(self.parts):
            return torch.stack([part.squared_norms() for part in self.parts]).sum(0)
        if (crossed := self._crossed()) is not None:
            return crossed
        return super().squared_norms()

    def _crossed(self) -> Tensor | None:
        """Squared norms of a table that is read and multiplied with, as tied embeddings are.

        ‖R + A‖² = ‖R‖² + ‖A‖² + 2⟨R, A⟩, and the rows that R has are few.
        """
        if len(self.parts) != 2:
            return None
        rows, product = sorted(self.parts, key=lambda part: isinstance(part, Outer))
        if not isinstance(rows, Rows) or not isinstance(product, Outer):
            return None
        if product.a.shape[2] != rows.shape[0] or product.shape != rows.shape:
            return None
        index = rows.ids[:, None].expand(-1, product.a.shape[1], -1)
        at_rows = product.a.gather(2, index).double()  # [size, s, t]
        pairs = torch.bmm(product.b.double(), rows.values.double().mT)
        crossed = rows.squared_norms() + product.squared_norms()
        return crossed.add_((at_rows * pairs).sum((1, 2)), alpha=2).clamp_(min=0)

    def add_weighted(self, factors: Tensor, out: Tensor) -> None:
        """Add the weighted sum to ``out``."""
        if not _disjoint(self.parts) and self._crossed() is None:
            # What was formed is what is summed: parts that cancel would leave too few digits.
            super().add_weighted(factors, out)
            return
        for part in self.parts:
            part.add_weighted(factors, out)


def total(parts: list[Gradients]) -> Gradients:
    """Gradients of a leaf from those of each of its uses."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, (Dense, Places)) for part in parts):
        return Dense(torch.stack([part.dense(slice(None)) for part in parts]).sum(0))
    first, *others = parts
    if isinstance(first, Outer) and all(isinstance(part, Outer) for part in others):
        for part in others:
            assert isinstance(part, Outer)
            first = first.joined(part)
        return first
    return Sum(parts)


def _disjoint(parts: list[Gradients]) -> bool:
    """Whether each part is of other elements of the leaf."""
    spans = [part.span() if isinstance(part, Pulled) else None for part in parts]
    found = sorted(span for span in spans if span is not None)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(found))
    return apart and len(found) == len(parts)


def squared_norms(values: Tensor) -> Tensor:
    """Squared L2 norm of each row, in float64.

    Squares are summed in the type that they have over a few hundred numbers at most, and these
    sums in float64: a plain float32 sum over 10⁷ numbers reads up to 4e-4 low.
    """
    rows = values.reshape(len(values), -1)
    n, length = rows.shape
    if rows.dtype == torch.float64 or not rows.numel():
        return torch.linalg.vector_norm(rows.double(), dim=1).square_()
    whole = length - length % _BLOCK
    total = torch.zeros(n, dtype=torch.float64, device=rows.device)
    if whole:
        norms = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
        total += norms.double().square_().sum(1)
    if whole < length:
        total += torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square_()
    return total


def _add_weighted(values: Tensor, factors: Tensor, out: Tensor, *, keep: int = 1) -> None:
    if not values.numel():
        if not keep:
            out.zero_()
        return
    rows, total = values.reshape(len(values), -1), out.view(-1)
    step = max(1, _CHUNK // len(rows))
    for start in range(0, rows.shape[1], step):
        columns = slice(start, start + step)
        total[columns].addmv_(as_float64(rows[:, columns]).t(), factors, beta=keep)


def by_example(values: Tensor, size: int, shape: torch.Size) -> Tensor:
    """Shape [size, T, *shape], T all places of an example."""
    places = values.numel() // max(1, size * shape.numel())
    if not values.numel():
        places = values.shape[: values.dim() - len(shape)].numel() // size
    return values.reshape(size, places, *shape)


def as_float64(values: Tensor) -> Tensor:
    """The same in float64, in memory that is used again: the pages of new memory cost more."""
    if values.dtype == torch.float64:
        return values
    out = _pool.empty(values.numel(), torch.float64, values.device)
    return out.view(values.shape).copy_(values)


def _wide(values: Tensor) -> Tensor:
    kind = wide(values.dtype)
    return values if values.dtype == kind else values.to(kind)
