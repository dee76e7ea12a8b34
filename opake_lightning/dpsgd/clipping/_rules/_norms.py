"""Normalisation of an example by itself, with scale and shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning.dpsgd.clipping._entries import NoRule, rule_for
from opake_lightning.dpsgd.clipping._gradients import Gradients
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []

_group_norm_backward = cast("Any", torch.ops.aten).native_group_norm_backward


def _affine(
    tape: Tape,
    name: str,
    output: Tensor,
    plain: Callable[[], Tensor],
    weight: Any,
    bias: Any,
    input: Tensor,
    *,
    last: int,
) -> Tensor:
    """Y = w x̂ + b, w and b over the last ``last`` dimensions, or the second of a batch if 0."""

    def reduced(values: Tensor) -> Gradients:
        if last:
            return tape.summed(values, last)
        by_channel = values.flatten(3).sum(3) if values.dim() > 3 else values
        return tape.summed(by_channel, 1)

    def weights(dy: Tensor) -> Gradients:
        with torch.no_grad():
            return reduced(dy * plain().to(dy.dtype))

    return tape.record(name, output, [(weight, weights), (bias, reduced)], input)


def _check(tape: Tape, input: Tensor, *others: Any) -> None:
    if not tape.is_data(input) or any(tape.is_data(other) for other in others):
        raise NoRule


@rule_for(functional.layer_norm, row_wise=True)
def _layer_norm(
    tape: Tape,
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    _check(tape, input, weight, bias)
    output = func(input, normalized_shape, tape.value(weight), tape.value(bias), eps)
    return _affine(
        tape, "layer_norm", output,
        lambda: func(input.detach(), normalized_shape, None, None, eps),
        weight, bias, input, last=len(normalized_shape),
    )  # fmt: skip


@rule_for(torch.layer_norm)
def _torch_layer_norm(
    tape: Tape, func: Any, input: Tensor, shape: Sequence[int], *rest: Any
) -> Tensor:
    del func
    return _layer_norm(tape, functional.layer_norm, input, shape, *rest[:3])


@rule_for(functional.rms_norm, torch.rms_norm, row_wise=True)
def _rms_norm(
    tape: Tape,
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: Any = None,
) -> Tensor:
    _check(tape, input, weight)
    output = func(input, normalized_shape, tape.value(weight), eps)
    return _affine(
        tape, "rms_norm", output, lambda: func(input.detach(), normalized_shape, None, eps),
        weight, None, input, last=len(normalized_shape),
    )  # fmt: skip


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
    del func, cudnn_enabled
    _check(tape, input, weight, bias)
    if input.dim() < 3:
        raise NoRule
    # Under autocast a narrow input meets wide weights, which the kernel does not take.
    x = input.flatten(0, 1).to(input.dtype if weight is None else weight.dtype)
    n, channels, places = x.shape[0], x.shape[1], x.shape[2:].numel()
    if channels % num_groups or not places:
        raise NoRule
    output, mean, rstd = torch.native_group_norm(
        x.contiguous(), tape.value(weight), tape.value(bias), n, channels, places, num_groups, eps
    )

    def both(dy: Tensor) -> tuple[Tensor, ...]:
        # The channels of all rows beside each other, as if of a single one: so the gradients of
        # scale and shift are not summed over rows.
        one = (1, n * channels, places)
        return _group_norm_backward(
            dy.reshape(one), x.detach().reshape(one).to(dy.dtype),
            mean.detach().reshape(1, -1), rstd.detach().reshape(1, -1),
            dy.new_empty(n * channels), 1, n * channels, places, n * num_groups,
            [False, True, True],
        )  # fmt: skip

    def made(index: int) -> Callable[[Tensor], Gradients]:
        return lambda dy: tape.summed(both(dy)[index].view(n, channels), 1)

    output = output.view(input.shape)
    return tape.record("group_norm", output, [(weight, made(1)), (bias, made(2))], input)


@rule_for(torch.instance_norm, row_wise=True)
def _instance_norm(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    *rest: Any,
) -> Tensor:
    _check(tape, input, weight, bias)
    if use_input_stats and running_mean is not None:
        raise NoRule  # it would write to them
    return _by_statistics(
        tape, func, input, weight, bias, (running_mean, running_var, use_input_stats, *rest)
    )


@rule_for(torch.batch_norm, row_wise=True)
def _batch_norm(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    *rest: Any,
) -> Tensor:
    _check(tape, input, weight, bias, running_mean, running_var)
    if training:
        raise NoRule
    return _by_statistics(
        tape, func, input, weight, bias, (running_mean, running_var, training, *rest)
    )


def _by_statistics(
    tape: Tape, func: Any, input: Tensor, weight: Any, bias: Any, stats: tuple[Any, ...]
) -> Tensor:
    """One of the functions over channels, the second dimension of a batch of images."""
    if input.dim() < 3:
        raise NoRule
    # Rows of a batch are independent of each other here, so those of all examples are one batch.
    x, both = input.flatten(0, 1), input.shape[:2]
    output = func(x, tape.value(weight), tape.value(bias), *stats).unflatten(0, both)
    return _affine(
        tape, func.__name__, output,
        lambda: func(x.detach(), None, None, *stats).unflatten(0, both),
        weight, bias, input, last=0,
    )  # fmt: skip
