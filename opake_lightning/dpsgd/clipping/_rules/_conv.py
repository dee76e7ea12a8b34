"""Convolutions: an example's weight gradient is a convolution, too, and all are one of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning import _pool
from opake_lightning._tree import wide
from opake_lightning.dpsgd.clipping._entries import NoRule, rule_for
from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients, Outer, squared_norms
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []

_backward: Callable[..., tuple[Tensor, ...]] = cast("Any", torch.ops.aten).convolution_backward

# Elements of formed gradients that are looked at together.
_CHUNK = 1 << 20
# Up to so many output positions, or channels, im2col and a matrix product take less than a grouped
# convolution.
_FEW_PLACES, _FEW_CHANNELS = 64, 3


@final
class _Convolution(Gradients):
    """Weight gradients of a convolution.

    Args:
        input: Shape [size * k, channels, ...], padded already where padding is not symmetric.
        gradient: Of the output, shape [size * k, channels out, ...].
        shape: Of the weight.
        size: Number of examples.
        how: stride, padding, dilation, groups.
    """

    def __init__(
        self, input: Tensor, gradient: Tensor, shape: torch.Size, size: int, how: tuple[Any, ...]
    ) -> None:
        kind = wide(gradient.dtype)
        self.input, self.gradient = input.detach().to(kind), gradient.to(kind)
        self.shape, self.size = shape, size
        *steps, self._groups = how
        self._stride, self._padding, self._dilation = [_tuple(s, len(shape) - 2) for s in steps]
        self._per = len(input) // size  # rows of one example

    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples."""
        start, stop, _ = rows.indices(self.size)
        n, per = stop - start, self._per
        x, dy = (t[start * per : stop * per] for t in (self.input, self.gradient))
        # Rows become channels: as many groups as there are rows, each with a weight of its own.
        x, dy = x.flatten(0, 1)[None], dy.flatten(0, 1)[None]
        weight = x.new_empty(1).expand(n * per * self.shape[0], *self.shape[1:])
        out = _backward(
            dy, x, weight, None, self._stride, self._padding, self._dilation, False,
            [0] * len(self._stride), n * per * self._groups, [False, True, False],
        )[1]  # fmt: skip
        out = out.reshape(n, per, *self.shape)
        return out.sum(1) if per > 1 else out[:, 0]

    def as_product(self) -> Gradients:
        """The same as outer products over places, if that takes less time, else itself."""
        if self._groups > 1:
            return self
        places, kernel = self.gradient.shape[2:], self.shape[2:]
        if kernel.numel() == 1 and not any(self._padding):
            ends = zip(self._stride, places, strict=True)
            at = [slice(None, 1 + s * (n - 1), s) for s, n in ends]
            taken = self.input[(..., *at)].flatten(2)
        elif places.numel() <= _FEW_PLACES or self.input.shape[1] <= _FEW_CHANNELS:
            taken = self._patches()
        else:
            return self
        return Outer(self.gradient.flatten(2).mT, taken.mT, self.size, self.shape)

    def _patches(self) -> Tensor:
        """What each place of the output is made of, shape [size * k, channels * kernel, places]."""
        x = self.input
        if any(self._padding):
            x = functional.pad(x, [n for n in reversed(self._padding) for _ in range(2)])
        (images, channels, *inner), places = x.stride(), self.gradient.shape[2:]
        steps = [s * d for s, d in zip(inner, self._dilation, strict=True)]
        steps += [s * n for s, n in zip(inner, self._stride, strict=True)]
        shape = (*x.shape[:2], *self.shape[2:], *places)
        view = x.as_strided(shape, (images, channels, *steps))
        out = _pool.empty(view.numel(), x.dtype, x.device).view(shape).copy_(view)
        return out.view(len(x), -1, places.numel())

    def chunks(self) -> list[slice]:
        """Rows to look at together: some, as a convolution of one has too little to do."""
        step = max(4, _CHUNK // self.shape.numel())
        return [slice(start, start + step) for start in range(0, self.size, step)]

    def formed(self) -> Dense | None:
        """All of them: to read them once more takes less than another convolution."""
        if len(self.chunks()) == 1:
            values = self.dense(slice(None))
            return Dense(values, squared_norms(values))
        count = self.size * self.shape.numel()
        values = _pool.empty(count, self.gradient.dtype, self.gradient.device)
        values = values.view(self.size, *self.shape)
        norms: list[Tensor] = []
        for rows in self.chunks():
            norms.append(squared_norms(values[rows].copy_(self.dense(rows))))
        return Dense(values, torch.cat(norms))

    # No float32 sum of all rows at once: where places cancel, what is left of it is rounding, which
    # only the gradient that was formed has the norm of.


def _tuple(value: Any, n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(cast("Sequence[int]", value))
    return values * n if len(values) == 1 else values


def _how(stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1) -> tuple[Any, ...]:
    return stride, padding, dilation, groups


def _how_transposed(
    stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: Any = 1, dilation: Any = 1
) -> tuple[Any, ...]:
    del output_padding  # of a gradient it says nothing that its shape does not
    return stride, padding, dilation, groups


_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


@rule_for(torch.conv1d, torch.conv2d, torch.conv3d, *_TRANSPOSED)
def _conv(
    tape: Tape, func: Any, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **more: Any
) -> Tensor:
    """The images of all examples as one batch: a convolution treats each by itself."""
    other = tape.is_data(weight) or tape.is_data(bias) or tape.is_parameter(input)
    if other or not tape.is_data(input) or input.dim() != weight.dim() + 1:
        raise NoRule  # of a single image, or with a weight made of the batch
    images = input.flatten(0, 1)
    output = func(images, tape.value(weight), tape.value(bias), *args, **more)

    def weights(dy: Tensor) -> Gradients:
        x, dy = images.detach().to(dy.dtype), dy.flatten(0, 1)
        if func in _TRANSPOSED:
            # The adjoint of a convolution: input and gradient of the output change places.
            how = _how_transposed(*args, **more)
            return _Convolution(dy, x, weight.shape, tape.size, how).as_product()
        stride, padding, dilation, groups = _how(*args, **more)
        if padding == "same":
            # Half on each side, and what is odd behind.
            sizes = zip(_tuple(dilation, weight.dim() - 2), weight.shape[2:], strict=True)
            total = [d * (k - 1) for d, k in sizes]
            x = functional.pad(x, [n for t in reversed(total) for n in (t // 2, t - t // 2)])
        padding = 0 if isinstance(padding, str) else padding
        how = stride, padding, dilation, groups
        return _Convolution(x, dy, weight.shape, tape.size, how).as_product()

    def biases(dy: Tensor) -> Gradients:
        return tape.summed(dy.flatten(3).sum(3), 1)

    output = output.unflatten(0, input.shape[:2])
    return tape.record("convolution", output, [(weight, weights), (bias, biases)], input)
