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
from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients, squared_norms
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []

_backward: Callable[..., tuple[Tensor, ...]] = cast("Any", torch.ops.aten).convolution_backward

# Elements of formed gradients that are looked at together.
_CHUNK = 1 << 20


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
        self,
        input: Tensor,
        gradient: Tensor,
        shape: torch.Size,
        size: int,
        how: tuple[list[int], list[int], list[int], int],
    ) -> None:
        kind = wide(gradient.dtype)
        self.input, self.gradient = input.detach().to(kind), gradient.to(kind)
        self.shape, self.size, self._how = shape, size, how
        self._per = len(input) // size  # rows of one example

    def _weight(self, input: Tensor, gradient: Tensor, copies: int) -> Tensor:
        """Weight gradient, of ``copies`` groups of channels each with a weight of its own."""
        stride, padding, dilation, groups = self._how
        weight = input.new_empty(1).expand(copies * self.shape[0], *self.shape[1:])
        return _backward(
            gradient, input, weight, None, stride, padding, dilation, False,
            [0] * len(stride), copies * groups, [False, True, False],
        )[1]  # fmt: skip

    def dense(self, rows: slice) -> Tensor:
        """The gradients of some examples."""
        start, stop, _ = rows.indices(self.size)
        n, per = stop - start, self._per
        x = self.input[start * per : stop * per]
        dy = self.gradient[start * per : stop * per]
        if (places := self._as_product(x)) is not None:
            out = torch.bmm(dy.flatten(2), places.flatten(2).mT)
        else:
            # Rows become channels: as many groups as there are rows.
            out = self._weight(x.flatten(0, 1)[None], dy.flatten(0, 1)[None], n * per)
        out = out.reshape(n, per, *self.shape)
        return out.sum(1) if per > 1 else out[:, 0]

    def _as_product(self, x: Tensor) -> Tensor | None:
        """The input at the places of the output, if each is made of a single place."""
        stride, padding, _, groups = self._how
        if self.shape[2:].numel() > 1 or any(padding) or groups > 1:
            return None
        taken = [slice(None, 1 + s * (n - 1), s) for s, n in zip(stride, self._places, strict=True)]
        return x[(..., *taken)]

    @property
    def _places(self) -> torch.Size:
        return self.gradient.shape[2:]

    def chunks(self) -> list[slice]:
        """Rows to look at together: some, as a convolution of one has too little to do."""
        step = max(4, _CHUNK // self.shape.numel())
        return [slice(start, start + step) for start in range(0, self.size, step)]

    def formed(self) -> Dense | None:
        """All of them: to read them once more takes less than another convolution."""
        if len(self.chunks()) == 1:
            values = self.dense(slice(None))
            return Dense(values, squared_norms(values))
        values = _pool.empty(
            self.size * self.shape.numel(), self.gradient.dtype, self.gradient.device
        ).view(self.size, *self.shape)
        norms: list[Tensor] = []
        for rows in self.chunks():
            norms.append(squared_norms(values[rows].copy_(self.dense(rows))))
        return Dense(values, torch.cat(norms))

    # Neither norms from products of places nor a sum of all rows at once: where places cancel, what
    # is left of a float32 sum is rounding, which only the gradient that was formed has the norm of.


def _tuple(value: Any, n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(cast("Sequence[int]", value))
    return values * n if len(values) == 1 else values


def _folded(tape: Tape, input: Tensor, weight: Tensor, bias: Any) -> Tensor:
    """The images of all examples as one batch: a convolution treats each by itself."""
    other = tape.is_data(weight) or tape.is_data(bias) or tape.is_parameter(input)
    if other or not tape.is_data(input) or input.dim() != weight.dim() + 1:
        raise NoRule  # of a single image, or with a weight made of the batch
    return input.flatten(0, 1)


def _recorded(
    tape: Tape,
    name: str,
    output: Tensor,
    weight: Tensor,
    weights: Callable[[Tensor], Gradients],
    bias: Any,
    input: Tensor,
) -> Tensor:
    def biases(dy: Tensor) -> Gradients:
        return tape.summed(dy.flatten(3).sum(3), 1)

    output = output.unflatten(0, input.shape[:2])
    return tape.record(name, output, [(weight, weights), (bias, biases)], input)


@rule_for(torch.conv1d, torch.conv2d, torch.conv3d)
def _conv(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    images, n = _folded(tape, input, weight, bias), weight.dim() - 2
    stride, dilation = _tuple(stride, n), _tuple(dilation, n)
    output = func(images, tape.value(weight), tape.value(bias), stride, padding, dilation, groups)
    asymmetric: list[int] = []
    if padding == "valid":
        padding = 0
    elif padding == "same":
        both = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        asymmetric = [side for total in reversed(both) for side in (total // 2, total - total // 2)]
        padding = 0
    padding = _tuple(padding, n)

    def weights(dy: Tensor) -> Gradients:
        x = images.detach().to(dy.dtype)
        x = functional.pad(x, asymmetric) if asymmetric else x
        how = (stride, padding, dilation, groups)
        return _Convolution(x, dy.flatten(0, 1), weight.shape, tape.size, how)

    return _recorded(tape, "convolution", output, weight, weights, bias, input)


@rule_for(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def _transposed(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """The adjoint of a convolution: input and gradient of the output change places."""
    images, n = _folded(tape, input, weight, bias), weight.dim() - 2
    output = func(
        images, tape.value(weight), tape.value(bias), stride, padding, output_padding, groups,
        dilation,
    )  # fmt: skip

    def weights(dy: Tensor) -> Gradients:
        x = images.detach().to(dy.dtype)
        how = (_tuple(stride, n), _tuple(padding, n), _tuple(dilation, n), groups)
        return _Convolution(dy.flatten(0, 1), x, weight.shape, tape.size, how)

    return _recorded(tape, "transposed convolution", output, weight, weights, bias, input)
