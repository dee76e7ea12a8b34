"""Rules of a user's own, and whether they are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from opake_lightning.dpsgd.clipping._entries import NoRule, Retry, rule_for
from opake_lightning.dpsgd.clipping._fence import Fence
from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients
from opake_lightning.dpsgd.clipping._pass import Alone, run_pass
from opake_lightning.dpsgd.clipping._tape import Tape

__all__ = ["check_rule", "per_example_rule"]

ExampleGradients = Callable[..., Sequence[Tensor | None]]


def per_example_rule(
    gradients: ExampleGradients,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Say what single examples' gradients of an operation are.

    A decorator for the function that a model calls. Without it, an operation that hides its use of
    a parameter (a kernel of one's own, a ``torch.autograd.Function`` without ``setup_context``) has
    examples run one at a time. The function itself must treat rows independently, and be
    differentiable with respect to the tensors of the batch.

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

        def rule(tape: Tape, _: Any, *args: Any, **kwargs: Any) -> Tensor:
            name = getattr(func, "__name__", "an operation")
            if any(tape.is_data(value) for value in kwargs.values()):
                raise NoRule
            values = [_one_row(arg) if tape.is_data(arg) else tape.value(arg) for arg in args]
            output = func(*values, **kwargs)

            def of(index: int, dy: Tensor) -> Gradients:
                found = gradients(dy.squeeze(1), *values, **kwargs)[index]
                shape = (tape.size, *values[index].shape)
                if found is None or found.shape != shape:
                    got = None if found is None else tuple(found.shape)
                    raise ValueError(
                        f"the rule of {name} returned {got} for argument {index}; it must "
                        f"return one gradient for each example, shape {shape}"
                    )
                return Dense(found)

            pairs = [(arg, partial(of, index)) for index, arg in enumerate(args)]
            data = [arg for arg in args if tape.is_data(arg)]
            return tape.record(name, output.unsqueeze(1), pairs, *data)

        rule_for(overridable, row_wise=True)(rule)
        return overridable

    return decorate


def _one_row(value: Tensor) -> Tensor:
    """[B, 1, ...] to [B, ...]: what the function gets of an example has one row."""
    if value.dim() < 2 or value.shape[1] != 1:
        raise NoRule
    return value.squeeze(1)


def check_rule(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    """Compare a rule with what autograd finds for each example alone.

    Args:
        func: The decorated function, or any torch function.
        *args: Its arguments: those that require a gradient are the parameters, other tensors the
            batch, with one row per example, two at least.
        **kwargs: Its keyword arguments, none of them parameters.

    Raises:
        AssertionError: If an example's gradient is off by more than rounding.
        ValueError: If the function runs one example at a time, or there is nothing to compare.
    """
    tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    places = [i for i in tensors if args[i].requires_grad]
    others = [i for i in tensors if not args[i].requires_grad]
    batch = tuple([args[i] for i in others])
    if not places or not batch or len(batch[0]) < 2:
        raise ValueError("check_rule needs a parameter, and a batch of at least two examples")
    params = [args[i].detach().requires_grad_() for i in places]
    weights: dict[torch.Size, Tensor] = {}

    def loss_of(rows: Sequence[Tensor]) -> Tensor:
        filled = list(args)
        for place, value in zip((*places, *others), (*params, *rows), strict=True):
            filled[place] = value
        out = func(*filled, **kwargs)
        if out.shape not in weights:
            draw = torch.Generator().manual_seed(0)
            weights[out.shape] = torch.randn(out.shape, generator=draw).to(out.dtype)
        return (out * weights[out.shape]).sum()

    # Not within the vmap: what is drawn there is another number for each example.
    loss_of([t[:1] for t in batch])
    try:
        found = run_pass(lambda rows: (loss_of(rows), ()), params, batch, Fence(), nullcontext)
    except (Alone, Retry) as reason:
        raise ValueError(f"examples of it run one at a time: {reason}") from reason
    for i in range(found.size):
        loss = loss_of([t[i : i + 1] for t in batch])
        wants = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
        for place, got, want in zip(places, found.gradients, wants, strict=True):
            with torch.no_grad():
                row = torch.zeros_like(want) if got is None else got.dense(slice(i, i + 1))[0]
            torch.testing.assert_close(
                row.to(want), want, rtol=1e-4, atol=1e-5,
                msg=lambda text, p=place, i=i: f"argument {p}, example {i}: {text}",
            )  # fmt: skip
