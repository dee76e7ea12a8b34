"""Rules of a user's own for the one-pass engine, and whether they are right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients
from opake_lightning.dpsgd.clipping._one_pass import RULES, Unsupported, run_pass
from opake_lightning.dpsgd.clipping._record import Recorder

__all__ = ["check_rule", "per_example_rule"]

ExampleGradients = Callable[..., Sequence[Tensor | None]]


def per_example_rule(
    gradients: ExampleGradients,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Tell the one-pass engine what single examples' gradients of an operation are.

    A decorator for the function that a model calls. Without it, an operation that the engine does
    not know (a kernel of one's own, a ``torch.autograd.Function``) sends the loss to a slower
    engine. The function itself must be differentiable with respect to the tensors of the batch.

    Args:
        gradients: Called with the gradient of the output, shape [B, ...], and the function's own
            arguments; returns, for each positional argument, its gradient for every example, of
            shape ``[B, *argument.shape]``, or None for what is not a parameter.

    Returns:
        The decorator. Parameters must be passed to the decorated function by position.

    >>> @per_example_rule(lambda dy, x, w: (None, dy * x))
    ... def scaled(x, w):
    ...     return x * w
    >>> check_rule(scaled, torch.randn(3, 2), torch.nn.Parameter(torch.randn(2)))
    """

    def decorate(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def tensors(*args: Any, **kwargs: Any) -> list[Any]:
            return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

        overridable: Any = wrap_torch_function(tensors)(func)

        def rule(recorder: Recorder, _: Any, *args: Any, **kwargs: Any) -> Tensor:
            name = getattr(func, "__name__", "an operation")
            values = [recorder.value(arg) for arg in args]
            data = [arg for arg in args if isinstance(arg, Tensor) and recorder.is_data(arg)]
            for value in data:
                recorder.require_rows(value, name)
            output = func(*values, **kwargs)

            def of(index: int) -> Callable[[Tensor], Gradients]:
                def make(gradient: Tensor) -> Gradients:
                    found = gradients(gradient, *values, **kwargs)[index]
                    shape = (recorder.size, *values[index].shape)
                    if found is None or found.shape != shape:
                        got = None if found is None else tuple(found.shape)
                        raise ValueError(
                            f"the rule of {name} returned {got} for argument {index}; it must "
                            f"return one gradient for each example, shape {shape}"
                        )
                    return Dense(found)

                return make

            pairs = [(arg, of(index)) for index, arg in enumerate(args)]
            return recorder.record(name, output, pairs, *data)

        RULES[overridable] = rule
        return overridable

    return decorate


def check_rule(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    """Compare a rule with what autograd finds for each example alone.

    Args:
        func: The decorated function, or any that the one-pass engine has a rule for.
        *args: Its arguments: those that require a gradient are the parameters, other tensors the
            batch, with one row per example, two at least.
        **kwargs: Its keyword arguments, none of them parameters.

    Raises:
        AssertionError: If an example's gradient is off by more than rounding.
        ValueError: If the engine does not take the function, or there is nothing to compare.
    """
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
    batch = [a for a in args if isinstance(a, Tensor) and not a.requires_grad]
    if not places or not batch or len(batch[0]) < 2:
        raise ValueError("check_rule needs a parameter, and a batch of at least two examples")
    weights: dict[torch.Size, Tensor] = {}

    def loss_of(leaves: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        left, given = list(rows), list(leaves)
        filled = [
            given.pop(0) if i in places else left.pop(0) if isinstance(a, Tensor) else a
            for i, a in enumerate(args)
        ]
        out = func(*filled, **kwargs).flatten(1)
        draw = torch.Generator().manual_seed(0)
        shape = out.shape[1:]
        if shape not in weights:
            weights[shape] = torch.randn(shape, generator=draw).to(out)
        return (out * weights[shape]).sum(1)

    params = [args[i] for i in places]
    try:
        found = run_pass(
            lambda leaves: (loss_of(leaves, batch), ()), params, batch, contextlib.nullcontext
        )
    except Unsupported as reason:
        raise ValueError(f"the one-pass engine does not take it: {reason}") from reason
    for number, (place, got) in enumerate(zip(places, found.gradients, strict=True)):
        for i in range(found.size):
            leaves = [p.detach().requires_grad_() for p in params]
            loss = loss_of(leaves, [t[i : i + 1] for t in batch]).sum()
            (want,) = torch.autograd.grad(
                loss, leaves[number], allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                row = torch.zeros_like(want) if got is None else got.dense(slice(i, i + 1))[0]
            torch.testing.assert_close(
                row.to(want), want, rtol=1e-4, atol=1e-5,
                msg=lambda text, p=place, i=i: f"argument {p}, example {i}: {text}",
            )  # fmt: skip
