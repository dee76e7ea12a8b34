"""What single examples' gradients are, operation by operation.

A rule is called in place of a torch function that got a parameter together with data. It runs the
function with parameters detached, and records how the examples' gradients come from that of the
output. In formulas ``dy`` is that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients, Outer, Rows
from opake_lightning.dpsgd.clipping._record import Recorder

__all__ = ["RULES", "rule_for"]

_group_norm_backward = cast("Any", torch.ops.aten).native_group_norm_backward

RULES: dict[Any, Callable[..., Any]] = {}

_Rule = TypeVar("_Rule", bound=Callable[..., Any])


def rule_for(*funcs: Any) -> Callable[[_Rule], _Rule]:
    """Make the decorated function the rule of ``funcs``."""

    def decorate(rule: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(funcs, rule))
        return rule

    return decorate


def _flat(recorder: Recorder, value: Tensor) -> Tensor:
    """Shape [size, T, last dimension]."""
    return recorder.per_example(value).flatten(1, -2)


def _summed(recorder: Recorder, gradient: Tensor, keep: int) -> Dense:
    """Sum over everything but the example and the last ``keep`` dimensions."""
    values = recorder.per_example(gradient)
    between = list(range(1, values.dim() - keep))
    return Dense(values.sum(between) if between else values)


# -- matrix products --------------------------------------------------------------------------


@rule_for(functional.linear)
def _linear(recorder: Recorder, func: Any, input: Tensor, weight: Any, bias: Any = None) -> Tensor:
    """Y = x Wᵀ + b: dW = Σₜ dyₜ xₜᵀ, db = Σₜ dyₜ."""
    recorder.require_data(input, "linear")
    if recorder.is_data(weight) or recorder.is_data(bias) or weight.dim() != 2:
        raise recorder.refuse("linear has a weight or bias that depends on the batch")
    output = func(input, recorder.value(weight), recorder.value(bias))

    def weights(gradient: Tensor) -> Gradients:
        # As under autocast, the input has the type of the output.
        return Outer(_flat(recorder, gradient), _flat(recorder, input.to(output.dtype)))

    def biases(gradient: Tensor) -> Gradients:
        return _summed(recorder, gradient, 1)

    return recorder.record("linear", output, [(weight, weights), (bias, biases)], input)


@rule_for(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def _matmul(recorder: Recorder, func: Any, left: Tensor, right: Tensor) -> Tensor:
    if recorder.is_parameter(left):
        return _matmul_left(recorder, func, left, right)
    recorder.require_data(left, "matmul")
    if left.dim() < 2:
        raise recorder.refuse("matmul of a vector that depends on the batch")
    output = func(left, right.detach())

    def weights(gradient: Tensor) -> Gradients:
        x, dy = left.to(output.dtype), gradient
        if right.dim() == 1:
            dy = dy.unsqueeze(-1)
        if right.dim() <= 2:
            return Outer(_flat(recorder, x), _flat(recorder, dy), right.shape)
        # One matrix per head or group, the same for all examples.
        products = recorder.per_example(x.mT @ dy)
        between = list(range(1, products.dim() - right.dim()))
        values = products.sum(between) if between else products
        spread = [d for d, n in enumerate(right.shape[:-2], 1) if n == 1]
        return Dense(values.sum(spread, keepdim=True) if spread else values)

    if right.dim() > 2 and right.dim() >= left.dim():
        raise recorder.refuse("matmul with a parameter of as many dimensions as the batch")
    return recorder.record("matmul", output, [(right, weights)], left)


def _matmul_left(recorder: Recorder, func: Any, left: Tensor, right: Tensor) -> Tensor:
    """Y = W x: dW = dy xᵀ."""
    recorder.require_data(right, "matmul")
    if left.dim() != 2 or right.dim() < 3:
        raise recorder.refuse("matmul of a parameter on the left")
    output = func(left.detach(), right)

    def weights(gradient: Tensor) -> Gradients:
        return Outer(_flat(recorder, gradient.mT), _flat(recorder, right.to(output.dtype).mT))

    return recorder.record("matmul", output, [(left, weights)], right)


@rule_for(torch.addmm, Tensor.addmm)
def _addmm(
    recorder: Recorder, func: Any, bias: Tensor, left: Tensor, right: Tensor, **scale: Any
) -> Tensor:
    """Y = b + x W."""
    recorder.require_data(left, "addmm")
    if scale or recorder.is_data(right) or recorder.is_data(bias) or bias.dim() != 1:
        raise recorder.refuse("addmm with a scale, or a bias that is not a vector")
    output = func(recorder.value(bias), left, recorder.value(right))

    def weights(gradient: Tensor) -> Gradients:
        return Outer(_flat(recorder, left.to(output.dtype)), _flat(recorder, gradient))

    def biases(gradient: Tensor) -> Gradients:
        summed = _summed(recorder, gradient, 1).values
        return Dense(summed.sum(1, keepdim=True) if bias.shape[0] == 1 else summed)

    return recorder.record("addmm", output, [(bias, biases), (right, weights)], left)


@rule_for(torch.functional.einsum)
def _einsum(recorder: Recorder, func: Any, equation: Any, *operands: Any) -> Tensor:
    """One parameter among operands of which the first letter of the result is the example."""
    values: list[Tensor] = list(operands[0] if isinstance(operands[0], (tuple, list)) else operands)
    places = [i for i, value in enumerate(values) if recorder.is_parameter(value)]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(places) != 1:
        raise recorder.refuse(f"einsum {equation!r} with {len(places)} parameters")
    inputs, result = equation.replace(" ", "").split("->")
    letters, place = inputs.split(","), places[0]
    param, own = values[place], letters[place]
    others = [(x, y) for i, (x, y) in enumerate(zip(letters, values, strict=True)) if i != place]
    example = result[:1]
    known = set(result).union(*[x for x, _ in others])
    if (
        not example
        or example in own
        or not set(own) <= known
        or any(len(set(x)) != len(x) for x in letters)
        or not any(x[:1] == example and recorder.is_data(y) for x, y in others)
    ):
        raise recorder.refuse(f"einsum {equation!r} does not have the example first")
    output = func(equation, *[recorder.value(value) for value in values])
    if len(output) != recorder.size:
        raise recorder.refuse(f"einsum {equation!r} returned {len(output)} rows")

    def gradients(gradient: Tensor) -> Gradients:
        terms = ",".join([result, *[x for x, _ in others]])
        return Dense(
            torch.einsum(f"{terms}->{example}{own}", gradient, *[y.to(gradient) for _, y in others])
        )

    return recorder.record("einsum", output, [(param, gradients)], *[y for _, y in others])


# -- tables -----------------------------------------------------------------------------------


@rule_for(torch.embedding)
def _embedding(
    recorder: Recorder,
    func: Any,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Row lookup: row ``indices[t]`` gets dyₜ."""
    recorder.require_data(indices, "embedding")
    if scale_grad_by_freq:
        raise recorder.refuse("embedding with scale_grad_by_freq counts over the whole batch")
    output = func(weight.detach(), indices, padding_idx, scale_grad_by_freq, sparse)

    def gradients(gradient: Tensor) -> Gradients:
        ids = recorder.per_example(indices).flatten(1)
        values = gradient.reshape(*ids.shape, -1)
        if padding_idx >= 0:
            values = values.masked_fill((ids == padding_idx).unsqueeze(-1), 0)
        return Rows(ids, values, weight.shape[0])

    return recorder.record("embedding", output, [(weight, gradients)], indices)


@rule_for(Tensor.__getitem__)
def _getitem(recorder: Recorder, func: Any, table: Any, index: Any) -> Tensor:
    """A table indexed by integers of the batch."""
    if isinstance(index, tuple) and len(cast("tuple[Any, ...]", index)) == 1:
        index = cast("Any", index)[0]
    index = cast("Any", index)
    integers = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if not recorder.is_parameter(table) or not integers:
        raise recorder.refuse("indexing with parameters other than table[integers]")
    recorder.require_data(index, "indexing")
    output = func(table.detach(), index)

    def gradients(gradient: Tensor) -> Gradients:
        ids = recorder.per_example(index).flatten(1).long() % table.shape[0]
        values = gradient.reshape(*ids.shape, -1)
        rows = Rows(ids, values, table.shape[0])
        rows.shape = table.shape if table.dim() == 2 else rows.shape
        return rows

    if table.dim() != 2:
        raise recorder.refuse("indexing of a parameter that is not a matrix")
    return recorder.record("indexing", output, [(table, gradients)], index)


@rule_for(functional.embedding_bag)
def _embedding_bag(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Tensor,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum or mean of rows."""
    recorder.require_data(input, "embedding_bag")
    unusual = scale_grad_by_freq or max_norm is not None or include_last_offset
    if (
        unusual
        or offsets is not None
        or mode == "max"
        or input.dim() != 2
        or recorder.is_parameter(per_sample_weights)
    ):
        raise recorder.refuse("embedding_bag other than sums and means of the rows of a matrix")
    output = func(
        input, recorder.value(weight), None, None, norm_type, False, mode, sparse,
        per_sample_weights, False, padding_idx,
    )  # fmt: skip

    def gradients(gradient: Tensor) -> Gradients:
        kept = torch.ones_like(input, dtype=gradient.dtype)
        if padding_idx is not None:
            kept = (input != padding_idx % weight.shape[0]).to(gradient.dtype)
        share = kept if per_sample_weights is None else kept * per_sample_weights
        if mode == "mean":
            share = share / kept.sum(1, keepdim=True).clamp(min=1)
        values = gradient.unsqueeze(1) * share.unsqueeze(-1)
        ids = recorder.per_example(input).flatten(1)
        return Rows(ids, values.reshape(*ids.shape, -1), weight.shape[0])

    inputs = [input] if per_sample_weights is None else [input, per_sample_weights]
    return recorder.record("embedding_bag", output, [(weight, gradients)], *inputs)


# -- normalisation ----------------------------------------------------------------------------


def _affine(
    recorder: Recorder,
    name: str,
    output: Tensor,
    plain: Callable[[], Tensor],
    weight: Any,
    bias: Any,
    input: Tensor,
    *,
    last: int,
) -> Tensor:
    """Y = w x̂ + b, with w and b over the last ``last`` dimensions, or the second if 0."""

    def reduced(values: Tensor) -> Gradients:
        if last:
            return _summed(recorder, values, last)
        by_channel = values.reshape(*values.shape[:2], -1).sum(2)
        return _summed(recorder, by_channel, 1)

    def weights(gradient: Tensor) -> Gradients:
        with torch.no_grad():
            return reduced(gradient * plain().to(gradient.dtype))

    return recorder.record(name, output, [(weight, weights), (bias, reduced)], input)


@rule_for(torch.layer_norm)
def _layer_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    recorder.require_data(input, "layer_norm")
    value = recorder.value
    output = func(input, normalized_shape, value(weight), value(bias), eps, cudnn_enable)
    return _affine(
        recorder, "layer_norm", output,
        lambda: func(input.detach(), normalized_shape, None, None, eps, cudnn_enable),
        weight, bias, input, last=len(normalized_shape),
    )  # fmt: skip


@rule_for(torch.rms_norm)
def _rms_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: Any = None,
) -> Tensor:
    recorder.require_data(input, "rms_norm")
    output = func(input, normalized_shape, recorder.value(weight), eps)
    return _affine(
        recorder, "rms_norm", output, lambda: func(input.detach(), normalized_shape, None, eps),
        weight, None, input, last=len(normalized_shape),
    )  # fmt: skip


@rule_for(torch.group_norm)
def _group_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    recorder.require_data(input, "group_norm")
    value = recorder.value
    n, channels = input.shape[:2]
    places = input.shape[2:].numel()
    output, mean, rstd = torch.native_group_norm(
        input.contiguous(), value(weight), value(bias), n, channels, places, num_groups, eps
    )

    def both(gradient: Tensor) -> tuple[Tensor, ...]:
        # The channels of all rows beside each other, as if of a single one: so the gradients of
        # scale and shift are not summed over rows.
        one = (1, n * channels, places)
        return _group_norm_backward(
            gradient.reshape(one), input.detach().reshape(one).to(gradient.dtype),
            mean.detach().reshape(1, -1), rstd.detach().reshape(1, -1),
            gradient.new_empty(n * channels), 1, n * channels, places, n * num_groups,
            [False, True, True],
        )  # fmt: skip

    def made(index: int) -> Callable[[Tensor], Gradients]:
        return lambda dy: _summed(recorder, both(dy)[index].view(n, channels), 1)

    return recorder.record("group_norm", output, [(weight, made(1)), (bias, made(2))], input)


@rule_for(torch.instance_norm)
def _instance_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    *rest: Any,
) -> Tensor:
    recorder.require_data(input, "instance_norm")
    if use_input_stats and running_mean is not None:
        raise recorder.refuse("instance_norm keeps statistics of the batch in a buffer")
    stats = (running_mean, running_var, use_input_stats, *rest)
    output = func(input, recorder.value(weight), recorder.value(bias), *stats)
    return _affine(
        recorder, "instance_norm", output, lambda: func(input.detach(), None, None, *stats),
        weight, bias, input, last=0,
    )  # fmt: skip


@rule_for(torch.batch_norm)
def _batch_norm(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    *rest: Any,
) -> Tensor:
    recorder.require_data(input, "batch_norm")
    if training:
        raise recorder.refuse("batch_norm in train mode mixes examples")
    stats = (running_mean, running_var, training, *rest)
    output = func(input, recorder.value(weight), recorder.value(bias), *stats)
    return _affine(
        recorder, "batch_norm", output, lambda: func(input.detach(), None, None, *stats),
        weight, bias, input, last=0,
    )  # fmt: skip


# -- element by element -----------------------------------------------------------------------

_NAMES = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "maximum",
    "minimum", "where", "lerp", "addcmul", "addcdiv", "add_", "sub_", "mul_", "div_", "addcmul_",
    "addcdiv_", "__rsub__", "__rdiv__", "__rtruediv__", "__pow__", "__rpow__", "rsub",
)  # fmt: skip
_ELEMENTWISE = [
    getattr(owner, name) for name in _NAMES for owner in (torch, Tensor) if hasattr(owner, name)
]


@rule_for(*_ELEMENTWISE)
def _elementwise(recorder: Recorder, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Each example has its own copy of the parameter, the gradient of which autograd computes."""
    name = getattr(func, "__name__", "an operation")
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    if recorder.is_parameter(args[0]) and name.endswith("_") and not name.startswith("_"):
        raise recorder.refuse(f"{name} writes to a parameter during the loss")
    shape = torch.broadcast_shapes(*[value.shape for value in tensors])
    for value in tensors:
        if recorder.is_data(value) and value.shape[:1] != shape[:1]:
            raise recorder.refuse(f"{name} broadcasts the batch's own first dimension")
    others = [v for v in tensors if not recorder.is_parameter(v) and v.is_floating_point()]

    def own(value: Any) -> Any:
        if not recorder.is_parameter(value):
            return value
        # A tensor without dimensions does not decide what type the result has.
        kind = others[0].dtype if not value.dim() and others else None
        return recorder.spread(value, shape, name, dtype=kind)

    out = func(*[own(v) for v in args], **{key: own(v) for key, v in kwargs.items()})
    return recorder.mark(out)
