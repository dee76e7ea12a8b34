"""Products with a parameter, in every form that torch has for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import B, Case, Spec, normal, of_function, of_module, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)

W = {"w": (5, 3)}  # on the right of x, [..., 5]
V = {"v": (5,)}
L = {"w": (3, 5)}  # on the left of x, [..., 5, n]

# -- vectors and matrices -------------------------------------------------------------------------

# x[0] is a vector: of a batch of one row, its only one.
CASES |= {
    "matmul-vector-matrix": of_function(lambda p, x: (x[0] @ p["w"])[None], W, (5,), mixes=True),
    "matmul-matrix-vector": of_function(lambda p, x: (p["w"] @ x[0])[None], L, (5,), mixes=True),
    "matmul-vector-vector": of_function(
        lambda p, x: (x[0] @ p["v"]).reshape(1, 1), V, (5,), mixes=True
    ),
    "matmul-vector-vector-left": of_function(
        lambda p, x: (p["v"] @ x[0]).reshape(1, 1), V, (5,), mixes=True
    ),
    "matmul-batch-vector": of_function(lambda p, x: x @ p["v"], V, (4, 5)),
    "matmul-of-images": of_function(lambda p, x: x @ p["w"], W, (2, 4, 5)),
    "matmul-left-of-images": of_function(lambda p, x: p["w"] @ x, L, (2, 5, 4)),
    "matmul-of-a-matrix-alone": of_function(
        lambda p, x: (x[0] @ p["w"])[None], W, (4, 5), mixes=True
    ),
    "matmul-left-of-a-matrix-alone": of_function(
        lambda p, x: (p["w"] @ x[0])[None], L, (5, 4), mixes=True
    ),
    "matmul-transposed": of_function(lambda p, x: x @ p["w"].T, L, (5,)),
    "matmul-of-a-transposed-input": of_function(lambda p, x: x.mT @ p["w"], W, (5, 4)),
    "rmatmul": of_function(lambda p, x: p["w"].__rmatmul__(x), W, (4, 5)),
    "mm": of_function(lambda p, x: x.mm(p["w"]), W, (5,)),
    "mm-left": of_function(lambda p, x: torch.mm(p["w"], x.T).T, L, (5,)),
    "mv": of_function(lambda p, x: x.mv(p["v"])[:, None], V, (5,)),
    "mv-left": of_function(lambda p, x: torch.mv(p["w"], x[0])[None], L, (5,), mixes=True),
    "dot": of_function(lambda p, x: torch.dot(x[0], p["v"]).reshape(1, 1), V, (5,), mixes=True),
    "inner": of_function(lambda p, x: torch.inner(x, p["w"]), L, (4, 5)),
    "vecdot": of_function(lambda p, x: torch.linalg.vecdot(x, p["v"]), V, (4, 5)),
    "multi-dot": of_function(
        lambda p, x: torch.linalg.multi_dot([x, p["w"], p["u"]]), {**W, "u": (3, 4)}, (5,)
    ),
    "product-of-two-parameters-first": of_function(
        lambda p, x: x @ (p["w"] @ p["u"]), {**W, "u": (3, 4)}, (2, 5)
    ),
    "product-of-three-parameters": of_function(
        lambda p, x: x @ p["w"] @ p["u"] @ p["w"].T, {**W, "u": (3, 3)}, (2, 5)
    ),
    "linear-of-a-vector": of_function(
        lambda p, x: F.linear(x[0], p["w"], p["b"])[None], {**L, "b": (3,)}, (5,), mixes=True
    ),
    "linear-with-a-vector-as-weight": of_function(lambda p, x: F.linear(x, p["v"]), V, (4, 5)),
    "linear-with-a-bias-of-the-example": of_function(
        lambda p, x: F.linear(x, p["w"], x[0, 0, :3]), L, (4, 5), mixes=True
    ),
    "linear-of-a-parameter-by-a-weight-of-the-example": of_function(
        lambda p, x: F.linear(p["w"], x[0])[None], W | {"w": (4, 5)}, (3, 5), mixes=True
    ),
}

# -- batches of matrices on either side -----------------------------------------------------------

CASES |= {
    "matmul-batched-right": of_function(lambda p, x: x @ p["w"], {"w": (2, 5, 3)}, (2, 4, 5)),
    "matmul-batched-left": of_function(lambda p, x: p["w"] @ x, {"w": (2, 3, 5)}, (2, 5, 4)),
    "matmul-batched-broadcast": of_function(
        lambda p, x: x[:, :, None] @ p["w"], {"w": (3, 5, 2)}, (2, 4, 5)
    ),
    "matmul-batched-left-broadcast": of_function(
        lambda p, x: p["w"] @ x[:, None], {"w": (3, 2, 5)}, (5, 4)
    ),
    "matmul-each-example-by-a-batch-of-one": of_function(
        lambda p, x: x @ p["w"], {"w": (1, 5, 3)}, (4, 5)
    ),
    "matmul-vector-by-a-batch": of_function(
        lambda p, x: (x[0] @ p["w"])[None], {"w": (2, 5, 3)}, (5,), mixes=True
    ),
    "bmm": of_function(lambda p, x: torch.bmm(x, p["w"].expand(len(x), -1, -1)), W, (4, 5)),
    "bmm-left": of_function(lambda p, x: torch.bmm(p["w"].expand(len(x), -1, -1), x), L, (5, 4)),
    "bmm-of-heads": of_function(
        lambda p, x: torch.bmm(x.flatten(0, 1), p["w"].repeat(len(x), 1, 1)).unflatten(0, (-1, 2)),
        {"w": (2, 5, 3)},
        (2, 4, 5),
    ),
    "addmm-bias-vector": of_function(
        lambda p, x: torch.addmm(p["b"], x, p["w"]), {**W, "b": (3,)}, (5,)
    ),
    "addmm-bias-of-one": of_function(
        lambda p, x: torch.addmm(p["b"], x, p["w"]), {**W, "b": (1,)}, (5,)
    ),
    "addmm-bias-row": of_function(
        lambda p, x: torch.addmm(p["b"], x, p["w"]), {**W, "b": (1, 3)}, (5,)
    ),
    "addmm-scaled": of_function(
        lambda p, x: p["b"].addmm(x, p["w"], beta=0.5, alpha=2.0), {**W, "b": (3,)}, (5,)
    ),
    "addmm-to-the-example": of_function(lambda p, x: torch.addmm(x[:, :3], x, p["w"]), W, (5,)),
    "addmm-left": of_function(
        lambda p, x: torch.addmm(p["b"], p["w"], x.T).T, {**L, "b": (3, 1)}, (5,)
    ),
    "addmm-of-a-frozen-product": of_function(
        lambda p, x: torch.addmm(p["b"], x, torch.ones(5, 3, dtype=x.dtype)), {"b": (3,)}, (5,)
    ),
    "addmv": of_function(
        lambda p, x: torch.addmv(p["b"], p["w"], x[0])[None], {**L, "b": (3,)}, (5,), mixes=True
    ),
    "addr": of_function(
        lambda p, x: torch.addr(p["m"], x[0], p["v"])[None], {"m": (5, 5), **V}, (5,), mixes=True
    ),
    "baddbmm": of_function(
        lambda p, x: torch.baddbmm(p["b"], x, p["w"].expand(len(x), -1, -1), beta=0.5, alpha=2),
        {**W, "b": (1, 1, 3)},
        (4, 5),
    ),
    "addbmm": of_function(
        lambda p, x: torch.addbmm(p["b"], x, p["w"].expand(len(x), -1, -1))[None],
        {**W, "b": (4, 3)},
        (4, 5),
        mixes=True,
    ),
}

# -- sums over letters ----------------------------------------------------------------------------


def _einsum(equation: str, *inputs: tuple[int, ...], mixes: bool = False, **params: Any) -> Spec:
    """The batch's tensors come first."""
    names = list(params)

    def of(p: Any, *batch: Tensor) -> Tensor:
        return torch.einsum(equation, *batch, *[p[name] for name in names])

    return of_function(of, params, *inputs, mixes=mixes)


CASES |= {
    "einsum-linear": _einsum("bi,ij->bj", (5,), w=(5, 3)),
    "einsum-with-spaces": _einsum("b t i , o i -> b t o", (4, 5), w=(3, 5)),
    "einsum-ellipsis": _einsum("...i,ij->...j", (2, 4, 5), w=(5, 3)),
    "einsum-ellipsis-in-both": _einsum("...i,...i->...", (4, 5), w=(4, 5)),
    "einsum-implicit-output": _einsum("bi,ij", (5,), w=(5, 3)),
    "einsum-outer": _einsum("bi,j->bij", (5,), v=(3,)),
    "einsum-letter-summed-in-the-parameter-alone": _einsum("bi,ij->bi", (5,), w=(5, 3)),
    "einsum-diagonal-of-a-parameter": _einsum("bi,ii->bi", (5,), w=(5, 5)),
    "einsum-two-parameters": _einsum("bi,ij,jk->bk", (5,), w=(5, 3), u=(3, 4)),
    "einsum-one-parameter-twice": of_function(
        lambda p, x: torch.einsum("bi,ij,jk->bk", x, p["w"], p["w"]), {"w": (5, 5)}, (5,)
    ),
    "einsum-bilinear": _einsum("bi,bj,oij->bo", (5,), (4,), w=(3, 5, 4)),
    "einsum-experts": _einsum("btd,edf->betf", (4, 5), w=(2, 5, 3)),
    "einsum-time-first": of_function(
        lambda p, x: torch.einsum("tbi,ij->btj", x.transpose(0, 1), p["w"]), W, (4, 5)
    ),
    "einsum-parameter-first": of_function(
        lambda p, x: torch.einsum("oi,bti->bto", p["w"], x), L, (4, 5)
    ),
    "einsum-sublists": of_function(
        lambda p, x: torch.einsum(x, [0, 1], p["w"], [1, 2], [0, 2]), W, (5,)
    ),
    "einsum-scaled-by-a-scalar": _einsum("bi,->bi", (5,), s=()),
    "tensordot": of_function(
        lambda p, x: torch.tensordot(x, p["w"], dims=([2, 1], [0, 1])), {"w": (5, 4, 3)}, (4, 5)
    ),
    "tensordot-by-number": of_function(
        lambda p, x: torch.tensordot(x, p["w"], dims=2), {"w": (4, 5, 3)}, (4, 5)
    ),
    "tensordot-left": of_function(
        lambda p, x: torch.tensordot(p["w"], x, dims=([1], [1])).T, L, (5,)
    ),
    "outer": of_function(lambda p, x: torch.outer(x[0], p["v"])[None], V, (5,), mixes=True),
    "outer-left": of_function(lambda p, x: torch.outer(p["v"], x[0])[None], V, (4,), mixes=True),
    "kron": of_function(
        lambda p, x: torch.kron(x, p["w"][None])[0][None], {"w": (2, 3)}, (4, 5), mixes=True
    ),
    "cartesian-products-by-broadcasting": of_function(
        lambda p, x: (x[:, :, None] * p["v"]).sum(1), V, (4,)
    ),
    "distances-to-prototypes": of_function(
        lambda p, x: torch.cdist(x, p["w"]), {"w": (3, 5)}, (5,)
    ),
    "distances-to-prototypes-of-sequences": of_function(
        lambda p, x: torch.cdist(x, p["w"][None]), {"w": (3, 5)}, (4, 5)
    ),
    "cosine-similarity": of_function(
        lambda p, x: F.cosine_similarity(x[:, None], p["w"], dim=-1), {"w": (3, 5)}, (5,)
    ),
    "pairwise-distance": of_function(lambda p, x: F.pairwise_distance(x, p["v"])[:, None], V, (5,)),
    "cross-product": of_function(
        lambda p, x: torch.linalg.cross(x, p["v"].expand_as(x)), {"v": (3,)}, (4, 3)
    ),
    "solve": of_function(
        lambda p, x: torch.linalg.solve(p["w"] + 3 * torch.eye(5, dtype=x.dtype), x.mT).mT,
        {"w": (5, 5)},
        (2, 5),
    ),
    "matrix-exponential": of_function(
        lambda p, x: x @ torch.matrix_exp(p["w"]), {"w": (5, 5)}, (2, 5)
    ),
}

# -- bilinear layers ------------------------------------------------------------------------------


@case()
def bilinear_of_sequences(dtype):
    net = nn.Bilinear(3, 4, 5)
    return of_module(net, torch.randn(B, 6, 3), torch.randn(B, 6, 4), dtype=dtype)


@case()
def bilinear_without_bias(dtype):
    net = nn.Bilinear(3, 4, 5, bias=False)
    return of_module(net, torch.randn(B, 3), torch.randn(B, 4), dtype=dtype)


@case()
def bilinear_frozen_weight(dtype):
    net = nn.Bilinear(3, 4, 5)
    net.weight.requires_grad_(requires_grad=False)
    return of_module(net, torch.randn(B, 3), torch.randn(B, 4), dtype=dtype)


@case()
def bilinear_of_an_example_with_itself(dtype):
    net = nn.Bilinear(3, 3, 2).to(dtype)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = net

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(x, x)

    return of_module(Net(), torch.randn(B, 3), dtype=dtype)


@case()
def bilinear_with_a_parameter_as_input(dtype):
    params = normal(dtype, token=(1, 3), w=(2, 3, 4), b=(2,))

    def of(p: Any, x: Tensor) -> Tensor:
        return F.bilinear(p["token"].expand(len(x), -1), x, p["w"], p["b"]).sin().sum(1)

    return Case(params, of, torch.randn(B, 4, dtype=dtype))


# -- arguments by name ----------------------------------------------------------------------------

CASES |= {
    "matmul-by-name": of_function(lambda p, x: torch.matmul(input=x, other=p["w"]), W, (5,)),
    "mm-by-name": of_function(lambda p, x: x.mm(mat2=p["w"]), W, (5,)),
    "addmm-by-name": of_function(
        lambda p, x: torch.addmm(p["b"], mat1=x, mat2=p["w"]), {**W, "b": (3,)}, (5,)
    ),
    "linear-by-name": of_function(
        lambda p, x: F.linear(bias=p["b"], weight=p["w"], input=x), {**L, "b": (3,)}, (5,)
    ),
    "einsum-of-a-list": of_function(lambda p, x: torch.einsum("bi,ij->bj", [x, p["w"]]), W, (5,)),
}
