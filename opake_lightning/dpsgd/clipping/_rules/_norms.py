"""Normalisation of an example by itself, with scale and shift."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning.dpsgd.clipping._entries import NoRule, rule_for
from opake_lightning.dpsgd.clipping._gradients import Gradients
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []

_group_norm_backward = cast("Any", torch.ops.aten).native_group_norm_backward


# Scale, shift, how many last dimensions they are over (0: they are over channels), and the function
# of an input, a scale and a shift.
_Norm = tuple[Any, Any, int, Callable[[Tensor, Any, Any], Tensor]]


def _layer_norm(
    func: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, *eps: Any, **more: Any
) -> _Norm:
    def run(x: Tensor, w: Any, b: Any) -> Tensor:
        return func(x, normalized_shape, w, b, *eps, **more)

    return weight, bias, len(normalized_shape), run


def _rms_norm(func: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> _Norm:
    return weight, None, len(normalized_shape), lambda x, w, _: func(x, normalized_shape, w, eps)


def _channel_norm(
    func: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: Any,
    *rest: Any,
) -> _Norm:
    """By statistics that are given, or those of each image alone."""
    if training and (func is torch.batch_norm or running_mean is not None):
        raise NoRule  # it would take those of all rows, or write to what is given

    def run(x: Tensor, w: Any, b: Any) -> Tensor:
        images = x.flatten(0, 1)
        out = func(images, w, b, running_mean, running_var, training, *rest)
        return out.unflatten(0, x.shape[:2])

    return weight, bias, 0, run


_NORMS: dict[Any, Callable[..., _Norm]] = {
    functional.layer_norm: _layer_norm, torch.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm, torch.rms_norm: _rms_norm,
    torch.instance_norm: _channel_norm, torch.batch_norm: _channel_norm,
}  # fmt: skip


@rule_for(*_NORMS, row_wise=True)
def _norm(tape: Tape, func: Any, input: Tensor, *args: Any, **options: Any) -> Tensor:
    """Y = w x̂ + b: dw = Σₜ dyₜ x̂ₜ, db = Σₜ dyₜ."""
    weight, bias, last, run = _NORMS[func](func, *args, **options)
    others = any(map(tape.is_data, args)) or any(map(tape.is_data, options.values()))
    if not tape.is_data(input) or others or (not last and input.dim() < 3):
        raise NoRule
    output = run(input, tape.value(weight), tape.value(bias))
    reduced = partial(tape.summed, keep=last) if last else partial(_by_channel, tape)

    def weights(dy: Tensor) -> Gradients:
        with torch.no_grad():
            return reduced(dy * run(input.detach(), None, None).to(dy.dtype))

    return tape.record(func.__name__, output, [(weight, weights), (bias, reduced)], input)


def _by_channel(tape: Tape, values: Tensor) -> Gradients:
    return tape.summed(values.flatten(3).sum(3) if values.dim() > 3 else values, 1)


@rule_for(functional.group_norm, torch.group_norm, row_wise=True)
def _group_norm(
    tape: Tape,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """With what its kernels keep and return: to normalise again would take longer."""
    if input.dim() < 3 or not tape.is_data(input) or tape.is_data(weight) or tape.is_data(bias):
        raise NoRule
    # Under autocast a narrow input meets wide weights, which the kernel does not take.
    x = input.flatten(0, 1).to(input.dtype if weight is None else weight.dtype)
    n, channels, places = x.shape[0], x.shape[1], x.shape[2:].numel()
    if channels % num_groups or not places:
        raise NoRule
    output, mean, rstd = torch.native_group_norm(
        x.contiguous(), tape.value(weight), tape.value(bias), n, channels, places, num_groups, eps
    )

    def weights(dy: Tensor) -> Gradients:
        # The channels of all rows beside each other, as if of a single one: so the gradients of
        # scales are not summed over rows.
        one = (1, n * channels, places)
        found = _group_norm_backward(
            dy.reshape(one), x.detach().reshape(one).to(dy.dtype),
            mean.detach().reshape(1, -1), rstd.detach().reshape(1, -1),
            dy.new_empty(n * channels), *one, n * num_groups, [False, True, False],
        )  # fmt: skip
        return tape.summed(found[1].view(n, channels), 1)

    uses = [(weight, weights), (bias, partial(_by_channel, tape))]
    return tape.record("group_norm", output.view(input.shape), uses, input)
