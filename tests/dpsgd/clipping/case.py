"""What a model case is, and the brute-force truth that the engine is held against."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

from opake_lightning.dpsgd.clipping import ClipState, _clip, clipped_grad
from tests.helpers import norm_of, rows_of, trainable

B = 4
BOTH = (torch.float32, torch.float64)
DOUBLE = (torch.float64,)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# Of a case whose rows all run one at a time.
ALONE: dict[str, Any] = {"passes": 0, "alone": B}


@dataclass(frozen=True)
class Case:
    """Parameters, a loss of (params, batch) that is one number for a batch of one row, and a batch.

    Parameters that require a gradient are a module's own, and the loss may find them there.
    """

    params: dict[str, Any]
    loss_fn: Callable[[dict[str, Tensor], Any], Tensor]
    batch: Any

    @property
    def size(self) -> int:
        return len(optree.tree_leaves(self.batch)[0])


@dataclass(frozen=True)
class Spec:
    """How to make a case, and what is known of it.

    Attributes:
        make: The case in a given dtype.
        passes: How many vectorised passes the whole batch takes as one microbatch.
        alone: How many of its rows run one at a time.
        caution: With how much caution passes begin in the end; see ``ClipState``.
        refused: What the refusal says; "" if there is a right result.
        mixes: On the whole batch the loss is another one, or none per row. The truth is the loop
            over rows of one all the same, by definition.
        dtypes: The dtypes that the case exists in.
        unused: Some parameter gets no gradient from any row, which is said.
        beyond_vmap: Rows may run one at a time where vmap's own way is all there is: without rules,
            or without torch's private names.
    """

    make: Callable[[torch.dtype], Case]
    passes: int = 1
    alone: int = 0
    caution: int = 0
    refused: str = ""
    mixes: bool = False
    dtypes: tuple[torch.dtype, ...] = BOTH
    unused: bool = False
    beyond_vmap: bool = False


Make = Callable[[torch.dtype], Case]


def registry(cases: dict[str, Spec]) -> Callable[..., Callable[[Make], Make]]:
    """A decorator that files a factory under its name, dashes for underscores."""

    def case(**known: Any) -> Callable[[Make], Make]:
        def file(make: Make) -> Make:
            cases[make.__name__.strip("_").replace("_", "-")] = Spec(make, **known)
            return make

        return file

    return case


def build(name: str, spec: Spec, dtype: torch.dtype) -> Case:
    """The case, the same wherever and whenever it is built."""
    torch.manual_seed(zlib.crc32(name.encode()))
    return spec.make(dtype)


def reduced(out: Tensor) -> Tensor:
    """One number per row, to which every output contributes differently."""
    flat = out.flatten(1)
    return (flat.sin() * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)).mean(1)


def of_module(
    module: nn.Module,
    *inputs: Tensor,
    dtype: torch.dtype,
    loss: Callable[[Any], Tensor] = reduced,
    own: bool = False,
    **options: Any,
) -> Case:
    """The case of a module that is called with ``inputs``, floating-point ones cast.

    Args:
        module: Called by ``torch.func.functional_call``, or as it is with ``own``: then the loss
            uses the module's parameters as whatever it is that holds them.
        inputs: The batch.
        dtype: Of module and inputs.
        loss: From the module's output to the loss.
        own: See ``module``.
        options: Keyword arguments of the call, the same for all rows.
    """
    module = module.to(dtype)
    batch = tuple(_cast(x, dtype) for x in inputs)

    def loss_fn(params: dict[str, Tensor], batch: Any) -> Tensor:
        return loss(torch.func.functional_call(module, params, batch, options))

    def own_loss(params: dict[str, Tensor], batch: Any) -> Tensor:
        del params
        return loss(module(*batch, **options))

    if not own:
        return Case(trainable(module), loss_fn, batch)
    return Case(own_parameters(module), own_loss, batch)


def of_function(
    of: Callable[..., Tensor],
    params: dict[str, tuple[int, ...]],
    *inputs: tuple[int, ...] | Tensor,
    loss: Callable[[Any], Tensor] = reduced,
    **known: Any,
) -> Spec:
    """The spec of ``of(p, *batch)``.

    Args:
        of: Its output has the examples first.
        params: Shapes of normal parameters.
        inputs: The shape of one example of each normal input, or the input.
        loss: From the output to the loss.
        known: What is known of the case.
    """

    def make(dtype: torch.dtype) -> Case:
        batch = tuple(
            _cast(x.clone(), dtype) if isinstance(x, Tensor) else torch.randn(B, *x, dtype=dtype)
            for x in inputs
        )
        return Case(normal(dtype, **params), lambda p, batch: loss(of(p, *batch)), batch)

    return Spec(make, **known)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The module's trainable parameters themselves."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def normal(dtype: torch.dtype, /, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Named normal parameters, of a size that keeps activations moderate."""
    return {
        name: torch.randn(shape, dtype=dtype) / max(1, shape[-1] if shape else 1) ** 0.5
        for name, shape in shapes.items()
    }


# -- the truth ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Gradients of single examples, by plain autograd, one example after the other."""

    gradients: list[list[Tensor]]

    @property
    def norms(self) -> list[float]:
        return [norm_of(gradient) for gradient in self.gradients]

    def sums(self, bound: float, power: int = 1) -> list[Tensor]:
        """Sum of the clipped gradients, or of their squares, in float64."""
        total = [torch.zeros_like(leaf, dtype=torch.float64) for leaf in self.gradients[0]]
        for gradient, factor in zip(self.gradients, self._factors(bound), strict=True):
            for part, leaf in zip(total, gradient, strict=True):
                part += (factor * leaf.double()) ** power
        return total

    def error_of(self, got: Any, bound: float, power: int = 1) -> float:
        """The largest relative L2 error of a leaf.

        Leaves that are tiny are held to a tenth of all, and sums that cancel to what they would
        be if examples were independent of each other.
        """
        want = self.sums(bound, power)
        pairs = zip(self.norms, self._factors(bound), strict=True)
        usual = sum((norm * factor) ** (2 * power) for norm, factor in pairs) ** 0.5
        least = 0.1 * max(norm_of(want), usual if power == 1 else 0.0)
        return max(
            norm_of([a.double() - b]) / max(norm_of([b]), least, 1e-300)
            for a, b in zip(optree.tree_leaves(got), want, strict=True)
        )

    def _factors(self, bound: float) -> list[float]:
        return [min(1.0, bound / max(norm, 1e-300)) for norm in self.norms]


def tracked(case: Case) -> dict[str, Any]:
    """The parameters, each requiring a gradient."""
    return optree.tree_map(
        lambda leaf: leaf if leaf.requires_grad else leaf.clone().requires_grad_(), case.params
    )


def truth_of(case: Case) -> Truth:
    params = tracked(case)
    leaves = optree.tree_leaves(params)
    gradients = []
    for i in range(case.size):
        for leaf in leaves:
            leaf.grad = None
        loss = case.loss_fn(params, own(rows_of(case.batch, i, i + 1)))
        assert loss.shape in ((), (1,))
        # Not torch.autograd.grad, which re-entrant checkpoints do not allow.
        loss.sum().backward()
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        gradients.append([g.to_dense() if g.is_sparse else g for g in found])
    for leaf in leaves:
        leaf.grad = None
    return Truth(gradients)


# -- the engine -----------------------------------------------------------------------------------


def clipped(case: Case, bound: float, *, caution: int = 0, **options: Any) -> Any:
    """What ``clipped_grad`` returns for the case's batch, and the state after it."""
    grad_fn, _ = clipped_grad(case.loss_fn, clipping_norm=bound, **options)
    return grad_fn(case.params, own(case.batch), state=ClipState(caution=caution))


def own(batch: Any) -> Any:
    """A copy: a loss may write to its batch."""
    return optree.tree_map(Tensor.clone, batch)


@dataclass
class Count:
    """How a loss was run.

    Attributes:
        passes: Vectorised passes that came to an end.
        alone: Rows that ran one at a time.
        tries: Passes that began, those included that were split, or begun again with more caution.
    """

    passes: int = 0
    alone: int = 0
    tries: int = 0


@contextmanager
def counted() -> Iterator[Count]:
    """Count passes while inside."""
    count = Count()
    run_pass, run_alone = _clip.run_pass, _clip.run_alone

    def counted_pass(*args: Any, **kwargs: Any) -> Any:
        count.tries += 1
        found = run_pass(*args, **kwargs)
        count.passes += 1
        return found

    def counted_alone(*args: Any, **kwargs: Any) -> Any:
        count.alone += 1
        return run_alone(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_clip, "run_pass", counted_pass)
        patch.setattr(_clip, "run_alone", counted_alone)
        yield count
