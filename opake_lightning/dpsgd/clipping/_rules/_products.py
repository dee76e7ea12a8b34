"""Matrix products."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning.dpsgd.clipping._entries import NoRule, rule_for
from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []


@rule_for(functional.linear)
def _linear(tape: Tape, func: Any, input: Tensor, weight: Any, bias: Any = None) -> Tensor:
    """Y = x Wᵀ + b: dW = Σₜ dyₜ xₜᵀ, db = Σₜ dyₜ."""
    if not tape.is_data(input) or tape.is_data(weight) or tape.is_data(bias) or weight.dim() != 2:
        raise NoRule
    # All places below each other: so the output is no view, and may be written to.
    places = input.reshape(-1, input.shape[-1])
    output = func(places, tape.value(weight), tape.value(bias))

    def weights(dy: Tensor) -> Gradients:
        return tape.outer(dy, input.detach())

    uses = [(weight, weights), (bias, partial(tape.summed, keep=1))]
    output = tape.record("linear", output, uses, input)
    return output.view(*input.shape[:-1], output.shape[-1])


@rule_for(functional.bilinear)
def _bilinear(
    tape: Tape, func: Any, input1: Tensor, input2: Tensor, weight: Any, bias: Any = None
) -> Tensor:
    """Y_o = Σ_ij x_i W_oij z_j + b_o: dW = Σₜ (dyₜ ⊗ xₜ) zₜᵀ."""
    of_data = [tape.is_data(value) for value in (input1, input2, weight, bias)]
    if of_data != [True, True, False, False]:
        raise NoRule
    output = func(input1, input2, tape.value(weight), tape.value(bias))

    def weights(dy: Tensor) -> Gradients:
        x, z = (tape.rows(value.detach().to(dy.dtype), 1) for value in (input1, input2))
        pairs = tape.rows(dy, 1).unsqueeze(3) * x.unsqueeze(2)
        return tape.outer(pairs.flatten(2), z, weight.shape)

    uses = [(weight, weights), (bias, partial(tape.summed, keep=1))]
    return tape.record("bilinear", output, uses, input1, input2)


@rule_for(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv)
def _matmul(tape: Tape, func: Any, left: Tensor, right: Tensor) -> Tensor:
    """Y = x W: dW = Σₜ xₜ dyₜᵀ, or Y = W x: dW = dy xᵀ."""
    param, data = (left, right) if tape.is_parameter(left) else (right, left)
    # With the examples in front, a vector of each would be taken for a matrix.
    if not tape.is_data(data) or tape.is_data(param) or data.dim() < 3:
        raise NoRule
    if param.dim() not in ((2,) if param is left else (1, 2)):
        raise NoRule

    def weights(dy: Tensor) -> Gradients:
        x = data.detach().to(dy.dtype)
        if param is left:
            return tape.outer(dy.mT, x.mT)
        return tape.outer(x, dy.unsqueeze(-1) if param.dim() == 1 else dy, param.shape)

    output = torch.matmul(tape.value(left), tape.value(right))
    return tape.record("matmul", output, [(param, weights)], data)


@rule_for(torch.addmm, Tensor.addmm)
def _addmm(
    tape: Tape, func: Any, bias: Tensor, left: Tensor, right: Tensor, **scale: Any
) -> Tensor:
    """Y = b + x W."""
    plain = tape.is_data(left) and not tape.is_data(right) and not tape.is_data(bias)
    if scale or not plain or bias.dim() != 1 or tape.is_parameter(left):
        raise NoRule
    output = functional.linear(left, tape.value(right).t(), tape.value(bias))

    def weights(dy: Tensor) -> Gradients:
        return tape.outer(left.detach().to(dy.dtype), dy)

    def biases(dy: Tensor) -> Gradients:
        return tape.summed(dy.sum(-1, keepdim=True) if bias.shape[0] == 1 else dy, 1)

    return tape.record("addmm", output, [(bias, biases), (right, weights)], left)


@rule_for(torch.functional.einsum)
def _einsum(tape: Tape, func: Any, equation: Any, *operands: Any) -> Tensor:
    """One parameter among operands, each of whose letters occurs elsewhere too."""
    values: list[Tensor] = list(operands[0] if isinstance(operands[0], (tuple, list)) else operands)
    places = [i for i, value in enumerate(values) if tape.is_parameter(value)]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(places) != 1:
        raise NoRule
    inputs, result = equation.replace(" ", "").split("->")
    letters, place = inputs.split(","), places[0]
    free = [x for x in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if x not in equation]
    known = set(result).union(*[x for i, x in enumerate(letters) if i != place])
    own, param = letters[place], values[place]
    if not free or not set(own) <= known or any(len(set(x)) != len(x) for x in letters):
        raise NoRule
    example = free[0]
    letters = [example + x if tape.is_data(v) else x for x, v in zip(letters, values, strict=True)]
    others = [(x, v) for i, (x, v) in enumerate(zip(letters, values, strict=True)) if i != place]
    terms = ",".join(letters)
    output = func(f"{terms}->{example}{result}", *[tape.value(value) for value in values])

    def gradients(dy: Tensor) -> Gradients:
        terms = ",".join([example + result, *[x for x, _ in others]])
        factors = [v.detach().to(dy) for _, v in others]
        return Dense(torch.einsum(f"{terms}->{example}{own}", dy, *factors))

    return tape.record("einsum", output, [(param, gradients)], *[v for _, v in others])
