"""Calls that are refused, or answered in a way of their own, whatever tensors they get."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from opake_lightning import _functorch
from opake_lightning._functorch import outside
from opake_lightning.dpsgd.clipping._entries import Caution, Retry, check_of
from opake_lightning.dpsgd.clipping._functions import place_of
from opake_lightning.dpsgd.clipping._tape import Tape

__all__: list[str] = []


def _given(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


# -- losses that are another number on one row -----------------------------------------------------


@check_of(functional.cross_entropy, functional.nll_loss)
def _weighted_mean(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A mean that divides by weights, or by how many labels are kept.

    On one row the weight of its class cancels, and a row whose label is ignored is 0 / 0. The
    default ``ignore_index`` may ignore tokens: their mean over one row is what it says, and a row
    without any counts as a gradient that is not finite, so for nothing, as it should.
    """
    given = _given("input target weight size_average ignore_index reduce reduction", args, kwargs)
    if given.get("reduction", "mean") != "mean" or given.get("size_average") is False:
        return NotImplemented
    what = "weight" if given.get("weight") is not None else ""
    if given.get("ignore_index", -100) != -100:
        what = "ignore_index"
    if what:
        raise tape.refuse(
            f"{place_of(func)} takes a mean with {what}=: of one example that is divided by its "
            f"own {'weight, which cancels' if what == 'weight' else 'count of kept labels'}. Pass "
            'reduction="none", and divide by a constant (the number of labels in a row, say)'
        )
    return NotImplemented


# -- what writes to a weight -----------------------------------------------------------------------


@check_of(functional.embedding, functional.embedding_bag)
def _max_norm(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _given("input weight padding_or_offsets max_norm", args, kwargs).get("max_norm") is not None:
        raise tape.refuse(
            f"{place_of(func)} with max_norm= rescales the rows of the weight whose ids occur, so "
            "that the weight tells which did; leave max_norm out, or renormalise all rows outside "
            "of the loss"
        )
    return NotImplemented


_STATISTICS = {
    functional.batch_norm: "input running_mean running_var weight bias training",
    torch.batch_norm: "input weight bias running_mean running_var training",
    functional.instance_norm: "input running_mean running_var weight bias use_input_stats",
    torch.instance_norm: "input weight bias running_mean running_var use_input_stats",
}


@check_of(*_STATISTICS)
def _statistics(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _given(_STATISTICS[func], args, kwargs)
    own = given.get("training", given.get("use_input_stats", func is functional.instance_norm))
    if own and given.get("running_mean") is not None:
        raise tape.refuse(
            f"{place_of(func)} in training mode keeps statistics of the examples; use GroupNorm or "
            "LayerNorm, or put it in eval mode"
        )
    return NotImplemented


# -- gradients that the loss takes itself ----------------------------------------------------------


@check_of(torch.autograd.grad)
def _own_gradient(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` within the loss, such as for a gradient penalty.

    Examples do not depend on each other, so the gradient of their sum has a row for each.
    """
    given = _given("outputs inputs grad_outputs retain_graph create_graph", args, kwargs)
    outputs, inputs = (_listed(given.pop(name)) for name in ("outputs", "inputs"))
    if not _in_tape(tape) or any(map(_functorch.is_tracked, outputs)):
        return NotImplemented  # torch.func of the loss's own
    if tape.caution < Caution.NO_RULES:
        # Rules detach parameters, and a second derivative has to see them.
        raise Retry(Caution.NO_RULES)
    upstream = given.pop("grad_outputs", None)
    if upstream is None and any(output.dim() and output.numel() != 1 for output in outputs):
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if any(tape.is_parameter(p) for p in inputs) and any(
        not computed.tensor.is_leaf for computed, _ in tape.copies.values()
    ):
        raise RuntimeError("the gradient of a parameter that others are computed of")
    inputs = [tape.copy_for_each(p) if tape.is_parameter(p) else p for p in inputs]
    if not all(map(_functorch.is_batched, inputs)):
        # Such a gradient would be the sum over examples: a guarantee depends on this line.
        raise RuntimeError("the gradient of what is the same for all examples")
    with outside():
        rows = [_inner(value) for value in outputs]
        seeds = (
            [torch.ones_like(row) for row in rows]
            if upstream is None
            else [_inner(u).expand_as(row) for u, row in zip(_listed(upstream), rows, strict=True)]
        )
        given["retain_graph"] = True  # the loss's own gradient comes later
        found = func(rows, [_inner(value) for value in inputs], seeds, **given)
        dims = [_functorch.batch_dim_of(value) for value in inputs]
        return tuple(
            None if g is None else _functorch.add_batch_dim(g, dim, tape.level)
            for g, dim in zip(found, dims, strict=True)
        )


def _in_tape(tape: Any) -> bool:
    """Whether the call is seen by a tape, and not within a transform of the loss's own."""
    return bool(tape.level) and _functorch.level_now() == tape.level


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _inner(value: Tensor) -> Tensor:
    return _functorch.unwrapped(value) if _functorch.is_batched(value) else value


_tracks: Any = cast("Any", Tensor.requires_grad)


@check_of(Tensor.requires_grad_, _tracks.__set__)
def _track(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss wants gradients of what an example says: the tensor behind it has them."""
    value = args[0]
    if not (_in_tape(tape) and _functorch.is_batched(value)):
        return NotImplemented
    inner = _inner(value)
    with outside():
        if inner.is_leaf:
            inner.requires_grad_(*args[1:], **kwargs)
            tape.tracked.append(inner)
    return value if func is Tensor.requires_grad_ else None


@check_of(_tracks.__get__)
def _is_tracked(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(tape, Tape) and not _functorch.has_private_names():
        raise RuntimeError("whether a tensor of an example requires a gradient")
    if _in_tape(tape) and _functorch.is_batched(args[0]):
        return _inner(args[0]).requires_grad
    return NotImplemented


@check_of(Tensor.backward, torch.autograd.backward)
def _backward(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise tape.refuse(
        f"the loss calls {place_of(func)}, which adds raw gradients up in .grad; return the loss, "
        "or take torch.autograd.grad of what the example says"
    )


@check_of(cast("Any", Tensor.grad).__set__)
def _assigned(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise tape.refuse(
        f"the loss assigns to .grad ({place_of(func)}), which outlives it; drop that, or keep what "
        "it needs in a local variable"
    )


@check_of(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
def _hook(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise tape.refuse(
        f"the loss calls {place_of(func)}; hooks on gradients are not run when every example has "
        "its own. Write what it does into the loss, as a torch.autograd.Function with setup_context"
    )


@check_of(_functorch.custom_function_call)
def _own_vmap(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A ``vmap`` of the loss's own gets the rows of all examples, and could mix them."""
    if args[0].vmap is not torch.autograd.Function.vmap:
        raise RuntimeError(f"the vmap method of {args[0].__name__}; generate_vmap_rule=True does")
    return NotImplemented


# -- paths that are off ----------------------------------------------------------------------------


@check_of(cast("Any", torch)._nested_tensor_from_mask_left_aligned)
def _no_nested(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """TransformerEncoder's nested tensors have another shape for each example."""
    return False


# -- what vmap does row by row ---------------------------------------------------------------------


@check_of(Tensor.scatter_)
def _scatter(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As ``pack_padded_sequence`` uses it: what it returns apart has a batching rule."""
    if not tape.level or kwargs or _functorch.physical_of(args[0], tape.level) is None:
        return NotImplemented
    return args[0].copy_(torch.scatter(*args))


# -- what vmap gets wrong --------------------------------------------------------------------------


@check_of(torch.select_scatter, Tensor.select_scatter)
def _select_scatter(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Under vmap torch adds the gradient of the source up, once for each place along ``dim``."""
    if kwargs or not isinstance(tape, Tape):
        return NotImplemented
    input, source, dim, index = args
    dim %= input.dim()
    shape = [-1 if d == dim else 1 for d in range(input.dim())]
    with tape:
        places = torch.arange(input.shape[dim], device=input.device).reshape(shape)
        return torch.where(places == index % input.shape[dim], source.unsqueeze(dim), input)
