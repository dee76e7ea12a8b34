"""Which parameters can be trained privately."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from opake_lightning.errors import PrivacyError

__all__ = ["check_parameters"]

_TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that could not be updated as the released gradient says.

    Raises:
        PrivacyError: Naming the parameter and what to do instead.
    """
    named = list(parameters)
    for complaint in _complaints(named):
        raise PrivacyError(complaint)
    trained = [(name, p) for name, p in named if p.requires_grad]
    if not any(p.numel() for _, p in trained):
        why = "all of them are empty" if trained else "requires_grad is False for all of them"
        raise PrivacyError(f"the module has no trainable parameter ({why})")
    for complaint in _overlaps(trained):
        raise PrivacyError(complaint)


def _complaints(named: list[tuple[str, nn.Parameter]]) -> Iterator[str]:
    for name, parameter in named:
        # First what has no data of its own to look at.
        if isinstance(parameter, UninitializedParameter):
            yield (
                f"parameter {name} is not initialised yet (lazy module); run one forward pass on "
                "public or random data before fit"
            )
        if type(parameter.data).__name__ == "DTensor":  # whose import takes a second
            yield (
                f"parameter {name} is a DTensor (fully_shard or parallelize_module): its gradient "
                "is summed or spread over ranks before it could be clipped per example; leave the "
                "model whole, and use Trainer(strategy=OpakeDDP()) for several devices"
            )
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in _TRAINABLE:
            yield (
                f"parameter {name} has dtype {parameter.dtype}; only real floating-point "
                "parameters of 16 bits and more can be trained privately. Store complex ones as "
                "torch.view_as_real, and freeze others with requires_grad_(False)"
            )
        if parameter.layout != torch.strided:
            yield (
                f"parameter {name} has layout {parameter.layout}; noise covers every element, so "
                "only dense parameters can be trained privately: use parameter.to_dense()"
            )
        if not bool(torch.isfinite(parameter.detach()).all()):
            yield (
                f"parameter {name} holds NaN or infinity, so no example will have a finite "
                "gradient and every step would spend privacy on noise alone; start from other "
                "weights"
            )


def _overlaps(trained: list[tuple[str, nn.Parameter]]) -> Iterator[str]:
    """Complaints about elements that lie in one place of memory, and would be updated twice."""
    filled = [(name, p.detach()) for name, p in trained if p.numel()]
    for name, p in filled:
        if p.numel() > _reach(p):
            yield (
                f"parameter {name} is expanded: several of its elements lie in one place of "
                "memory, but each gets noise of its own; use its .clone(), or expand a smaller "
                "parameter in the loss"
            )
    reaching: list[tuple[str, Tensor]] = []  # as far as the next one, from where they are placed
    for name, p in sorted(filled, key=lambda item: item[1].data_ptr()):
        reaching = [(before, q) for before, q in reaching if _end(q) > p.data_ptr()]
        for before, q in reaching:
            if _meet(q, p):
                yield (
                    f"parameters {before} and {name} share memory but are two parameters, so that "
                    "each would be updated with the other's gradient as well; for tied weights use "
                    "one nn.Parameter in both places, else .clone() one of them"
                )
        reaching.append((name, p))


def _end(tensor: Tensor) -> int:
    """Address behind the last element."""
    return tensor.data_ptr() + _reach(tensor) * tensor.element_size()


def _reach(tensor: Tensor) -> int:
    """How many elements there are from the first to the last one in memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose stretches of memory overlap have an element in common."""
    if a.element_size() != b.element_size() or (a.is_contiguous() and b.is_contiguous()):
        return True
    start = min(a.storage_offset(), b.storage_offset())
    taken = torch.zeros(max(t.storage_offset() - start + _reach(t) for t in (a, b))).bool()
    taken.as_strided(a.shape, a.stride(), a.storage_offset() - start).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset() - start).any())
