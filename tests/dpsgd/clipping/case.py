"""What a model case is, and the brute-force truth that engines are held against."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import optree
import torch
from torch import Tensor, nn

from opake_lightning.dpsgd.clipping import clipped_grad
from tests.helpers import example_gradients, norm_of, trainable

# exact: the one-pass engine does it itself, without falling back.
# falls back: it must notice that it cannot, and leave the step to another engine.
# either: it may do either, so long as the result is right.
# refused: there is no right result, so every engine must raise.
Expects = Literal["exact", "falls back", "either", "refused"]

B = 4
BOTH = (torch.float32, torch.float64)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass(frozen=True)
class Case:
    """Parameters, a loss of (params, batch) with one value per row, and a batch."""

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
        expects: What the one-pass engine has to do.
        vmap: What the general engine says where it cannot do the case; None where it can. Who
            falls back on it may then refuse, or go another way, but never be wrong.
        mixes: The loss of a row depends on the other rows of the batch.
        dtypes: The dtypes that the case exists in.
    """

    make: Callable[[torch.dtype], Case]
    expects: Expects = "exact"
    vmap: str | dict[torch.dtype, str] | None = None
    mixes: bool = False
    dtypes: tuple[torch.dtype, ...] = BOTH

    def beyond_vmap(self, dtype: torch.dtype) -> str | None:
        return self.vmap.get(dtype) if isinstance(self.vmap, dict) else self.vmap


def registry(cases: dict[str, Spec]) -> Callable[..., Any]:
    """A decorator that files a factory under its name, dashes for underscores."""

    def case(expects: Expects = "exact", **known: Any) -> Callable[..., Any]:
        def file(make: Callable[[torch.dtype], Case]) -> Callable[[torch.dtype], Case]:
            cases[make.__name__.strip("_").replace("_", "-")] = Spec(make, expects, **known)
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
    loss: Callable[[Tensor], Tensor] = reduced,
) -> Case:
    """The case of a module that is called with ``inputs``, floating-point ones cast."""
    module = module.to(dtype)
    batch = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)

    def loss_fn(params: dict[str, Tensor], batch: Any) -> Tensor:
        return loss(torch.func.functional_call(module, params, batch))

    return Case(trainable(module), loss_fn, batch)


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
        for gradient, norm in zip(self.gradients, self.norms, strict=True):
            factor = min(1.0, bound / max(norm, 1e-300))
            for part, leaf in zip(total, gradient, strict=True):
                part += (factor * leaf.double()) ** power
        return total


def truth_of(case: Case) -> Truth:
    return Truth(example_gradients(case.loss_fn, case.params, case.batch))


def error_of(got: Any, want: list[Tensor]) -> float:
    """The largest relative L2 error of a leaf; leaves that are tiny are held to a tenth of all."""
    leaves = optree.tree_leaves(got)
    least = 0.1 * norm_of(want)
    return max(
        norm_of([a.double() - b]) / max(norm_of([b]), least, 1e-300)
        for a, b in zip(leaves, want, strict=True)
    )


# -- engines --------------------------------------------------------------------------------------


def has_engines() -> bool:
    return "engine" in inspect.signature(clipped_grad).parameters


def clipped(case: Case, bound: float, *, engine: str = "vmap", **options: Any) -> Any:
    """What ``clipped_grad`` returns for the case's batch by the given engine."""
    if has_engines():
        options["engine"] = engine
    grad_fn, state = clipped_grad(case.loss_fn, clipping_norm=bound, **options)
    return grad_fn(case.params, case.batch, state=state)[0]
