"""Small networks, and how layers are put together in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opake_lightning._tree import seat
from tests.dpsgd.clipping.case import B, Case, Spec, normal, of_module, reduced, registry
from tests.helpers import trainable

CASES: dict[str, Spec] = {}
case = registry(CASES)


@case()
def convnet_with_inplace_relu(dtype):
    net = nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 5), nn.ReLU(inplace=True), nn.Linear(5, 3),
    )  # fmt: skip
    return of_module(net, torch.randn(B, 1, 10, 10), dtype=dtype)


class _Block(nn.Module):
    """A residual block with GroupNorm; the sum is in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, outer)
        self.skip = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        out += self.skip(x)
        return F.relu(out, inplace=True)


@case()
def resnet_with_group_norm(dtype):
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        _Block(4, 4, 1), _Block(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    net = net.to(dtype)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(torch.func.functional_call(net, params, (x,)), y, reduction="none")

    batch = torch.randn(B, 3, 8, 8, dtype=dtype), torch.randint(0, 3, (B,))
    return Case(trainable(net), loss_fn, batch)


@case()
def inplace_residual(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x += self.second(x.tanh())
            x.mul_(0.5).add_(1.0)
            return x

    return of_module(Net(), torch.randn(B, 3, 5), dtype=dtype)


@case()
def tied_embedding_and_head(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.mix = nn.Linear(4, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(ids)).tanh())

    tied = of_module(Net(), torch.randint(0, 6, (B, 5)), dtype=dtype)
    assert len(tied.params) == 3
    return tied


@case(unused=True)
def unused_and_frozen(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(5, 5).requires_grad_(requires_grad=False)
            self.used, self.unused = nn.Linear(5, 3), nn.Linear(2, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x).tanh())

    return of_module(Net(), torch.randn(B, 5), dtype=dtype)


@case(unused=True)
def output_that_the_loss_leaves_out(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            body = self.body(x)
            self.second(body)  # an auxiliary head, of no interest today
            return self.first(body)

    return of_module(Net(), torch.randn(B, 5), dtype=dtype)


@case()
def three_inputs_and_several_passes(dtype):
    net = nn.Linear(4, 4).to(dtype)

    def loss_fn(params: Any, batch: dict[str, Tensor]) -> Tensor:
        out = [torch.func.functional_call(net, params, (x,)) for x in batch.values()]
        return F.triplet_margin_loss(*out, margin=9.0, reduction="none")

    batch = {name: torch.randn(B, 4, dtype=dtype) for name in ("anchor", "same", "other")}
    return Case(trainable(net), loss_fn, batch)


@case()
def batch_of_three_in_place_of_four(dtype):
    return of_module(
        nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3)), torch.randn(3, 6), dtype=dtype
    )


@case()
def many_layers_of_one_kind(dtype):
    # Looked at together: small weights and biases of one shape.
    layers = [nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh()) for _ in range(6)]
    return of_module(nn.Sequential(*layers), torch.randn(B, 3, 5), dtype=dtype)


@case()
def many_layers_of_which_some_are_used_twice(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in [*self.layers, *self.layers[:2]]:
                x = layer(x).tanh()
            return x

    return of_module(Net(), torch.randn(B, 5), dtype=dtype)


@case()
def large_layers_used_twice(dtype):
    # Too large to be formed for all rows at once.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(300, 300)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())[..., :5]

    return of_module(Net(), torch.randn(B, 2, 300), dtype=dtype)


@case()
def wide_convolutions(dtype):
    net = nn.Sequential(nn.Conv1d(64, 96, 1), nn.Tanh(), nn.Conv1d(96, 64, 3), nn.AvgPool1d(2))
    return of_module(net, torch.randn(B, 64, 7), dtype=dtype)


# -- how a weight is handed over ------------------------------------------------------------------


@case()
def called_by_keyword(dtype):
    params = normal(dtype, w=(3, 2, 3, 3), b=(3,), v=(4, 3), gain=(4,), shift=(4,))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        x = F.conv2d(input=x, weight=p["w"], bias=p["b"], stride=2, padding=1)
        x = F.linear(weight=p["v"], input=x.mean((2, 3)))
        return reduced(F.layer_norm(x, [4], bias=p["shift"], weight=p["gain"]))

    return Case(params, loss_fn, torch.randn(B, 2, 6, 6, dtype=dtype))


@case()
def called_below_the_functional_layer(dtype):
    params = normal(dtype, table=(7, 4), w=(4, 4, 2), gain=(4,), shift=(4,))

    def loss_fn(p: Any, ids: Tensor) -> Tensor:
        x = torch.embedding(p["table"], ids).transpose(1, 2)
        x = torch.conv1d(x, p["w"]).transpose(1, 2)
        return reduced(torch.layer_norm(x, [4], p["gain"], p["shift"]))

    return Case(params, loss_fn, torch.randint(0, 7, (B, 5)))


@case()
def one_tensor_under_two_names(dtype):
    # Two parameters that happen to be equal, down to their memory: each has its own gradient.
    w = torch.randn(5, 5, dtype=dtype)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(F.linear(x, p["a"]).tanh(), p["b"]))

    return Case({"a": w, "b": w}, loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def parameters_in_one_piece_of_memory(dtype):
    net = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
    seat(dict(net.named_parameters()))
    return of_module(net, torch.randn(B, 3, 5), dtype=dtype)


@case()
def weight_also_used_detached(dtype):
    params = normal(dtype, w=(5, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return reduced(F.linear(F.linear(x, p["w"]).tanh(), p["w"].detach()))

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))


@case()
def nested_parameters_and_batches(dtype):
    # Nested batches and nested parameters.
    params = {"layers": [normal(dtype, w=(4, 5), b=(4,)), normal(dtype, w=(2, 4), b=(2,))]}

    def loss_fn(p: Any, batch: Any) -> Tensor:
        (x, (y,)), x2 = batch["pair"], batch["x"]
        first, second = p["layers"]
        hidden = F.linear(x + x2, first["w"], first["b"]).tanh()
        return F.cross_entropy(F.linear(hidden, second["w"], second["b"]), y, reduction="none")

    pair = (torch.randn(B, 5, dtype=dtype), (torch.randint(0, 2, (B,)),))
    return Case(params, loss_fn, {"pair": pair, "x": torch.randn(B, 5, dtype=dtype)})


# -- rows that are not where they are looked for --------------------------------------------------


@case()
def linear_on_a_constant(dtype):
    # The same for every row, and of batch size 1.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.randn(1, 3, 2))
            self.place, self.token = nn.Linear(2, 4), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.token(x) * self.place(self.places)

    return of_module(Net(), torch.randn(B, 3, 5), dtype=dtype)


@case()
def linear_on_as_many_constants_as_rows(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.randn(B, 2))
            self.place, self.token = nn.Linear(2, 4), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.token(x) * self.place(self.places)

    return of_module(Net(), torch.randn(B, B, 5), dtype=dtype)


@case()
def frames_folded_into_the_batch(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            frames = self.conv(x.flatten(0, 1)).tanh().mean((2, 3))
            return self.out(frames.unflatten(0, x.shape[:2]).mean(1))

    return of_module(Net(), torch.randn(B, 3, 2, 5, 5), dtype=dtype)


@case()
def frames_first(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            frames = self.conv(x.transpose(0, 1).flatten(0, 1)).tanh().mean((2, 3))
            return self.out(frames.unflatten(0, (x.shape[1], -1)).mean(0))

    return of_module(Net(), torch.randn(B, 3, 2, 5, 5), dtype=dtype)


@case(refused="modified by an inplace operation")
def input_overwritten_after_its_use(dtype):
    # Autograd refuses it; whoever keeps the input himself must not use what it has become.
    params = normal(dtype, w=(5, 5), v=(3, 5))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        hidden = F.linear(x, p["w"])
        out = F.linear(hidden, p["v"])
        hidden.mul_(2)
        return reduced(out)

    return Case(params, loss_fn, torch.randn(B, 5, dtype=dtype))
