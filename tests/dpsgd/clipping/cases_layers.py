"""Layers, each with options that are not the default ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import B, Case, Spec, of_module, reduced, registry
from tests.helpers import trainable

CASES: dict[str, Spec] = {}
case = registry(CASES)

# -- linear ---------------------------------------------------------------------------------------


@case()
def linear_2d(dtype):
    return of_module(nn.Linear(6, 4), torch.randn(B, 6), dtype=dtype)


@case()
def linear_3d_without_bias(dtype):
    return of_module(nn.Linear(6, 4, bias=False), torch.randn(B, 5, 6), dtype=dtype)


@case()
def linear_4d(dtype):
    return of_module(nn.Linear(6, 4), torch.randn(B, 3, 2, 6), dtype=dtype)


@case()
def linear_many_rows(dtype):
    # Rows outnumber the weight's elements: the other side of any choice by size.
    return of_module(nn.Linear(3, 2), torch.randn(B, 40, 3), dtype=dtype)


@case()
def linear_wide(dtype):
    return of_module(nn.Linear(40, 30), torch.randn(B, 2, 40), dtype=dtype)


@case()
def linear_of_one_token(dtype):
    return of_module(nn.Linear(6, 4), torch.randn(B, 1, 6), dtype=dtype)


@case()
def linear_of_a_transposed_view(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x.transpose(1, 2)).transpose(1, 2)  # over tokens, as an MLP-Mixer

    return of_module(Net(), torch.randn(B, 5, 6), dtype=dtype)


@case()
def linear_used_twice(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    return of_module(Net(), torch.randn(B, 3, 5), dtype=dtype)


@case()
def linear_used_on_inputs_of_different_rank(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.layer(x.mean(1))[:, None]

    return of_module(Net(), torch.randn(B, 3, 5), dtype=dtype)


@case()
def linear_bias_only(dtype):
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("bias" in name)
    return of_module(net, torch.randn(B, 2, 6), dtype=dtype)


@case()
def linear_frozen_bias(dtype):
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].bias.requires_grad_(requires_grad=False)
    return of_module(net, torch.randn(B, 6), dtype=dtype)


@case()
def one_output_squeezed(dtype):
    return of_module(
        nn.Linear(6, 1), torch.randn(B, 6), dtype=dtype, loss=lambda out: out.squeeze(-1).square()
    )


@case()
def bilinear(dtype):
    return of_module(nn.Bilinear(3, 4, 5), torch.randn(B, 3), torch.randn(B, 4), dtype=dtype)


@case()
def prelu(dtype):
    net = nn.Sequential(nn.Linear(6, 5), nn.PReLU(5), nn.Linear(5, 3), nn.PReLU())
    return of_module(net, torch.randn(B, 6), dtype=dtype)


# -- convolutions ---------------------------------------------------------------------------------


@case()
def conv1d(dtype):
    layer = nn.Conv1d(4, 8, 3, stride=2, padding=1, dilation=2, groups=4)
    return of_module(layer, torch.randn(B, 4, 11), dtype=dtype)


@case()
def conv1d_same(dtype):
    layer = nn.Conv1d(3, 4, 5, padding="same", dilation=2, bias=False)
    return of_module(layer, torch.randn(B, 3, 9), dtype=dtype)


@case()
def conv1d_causal(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.pad(x, (2, 0)))

    return of_module(Net(), torch.randn(B, 3, 9), dtype=dtype)


@case()
def conv2d(dtype):
    layer = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
    return of_module(layer, torch.randn(B, 2, 9, 8), dtype=dtype)


@case()
def conv2d_stride_that_leaves_a_rest(dtype):
    # The last rows and columns are never looked at.
    return of_module(nn.Conv2d(2, 3, 3, stride=3), torch.randn(B, 2, 10, 11), dtype=dtype)


@case()
def conv2d_valid(dtype):
    return of_module(nn.Conv2d(2, 3, 3, padding="valid"), torch.randn(B, 2, 7, 7), dtype=dtype)


@case()
def conv2d_same_even_kernel(dtype):
    layer = nn.Conv2d(2, 3, (2, 4), padding="same")
    return of_module(layer, torch.randn(B, 2, 6, 7), dtype=dtype)


@case()
def conv2d_circular(dtype):
    layer = nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular")
    return of_module(layer, torch.randn(B, 2, 6, 7), dtype=dtype)


@case()
def conv2d_reflect(dtype):
    layer = nn.Conv2d(2, 4, 3, padding=2, stride=2, groups=2, padding_mode="reflect")
    return of_module(layer, torch.randn(B, 2, 6, 7), dtype=dtype)


@case()
def conv2d_depthwise_separable(dtype):
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.ReLU(), nn.Conv2d(6, 4, 1, bias=False)
    )
    return of_module(net, torch.randn(B, 3, 6, 6), dtype=dtype)


@case()
def conv2d_pointwise_strided(dtype):
    return of_module(nn.Conv2d(3, 5, 1, stride=2, bias=False), torch.randn(B, 3, 7, 7), dtype=dtype)


@case()
def conv2d_channels_last(dtype):
    net = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(B, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    return of_module(net, x, dtype=dtype)


@case()
def conv2d_large_image(dtype):
    # More positions than weights, and the other way round in the second layer.
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 24, 8, stride=8))
    return of_module(net, torch.randn(B, 1, 18, 18), dtype=dtype)


@case()
def conv2d_used_twice(dtype):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.max_pool2d(self.conv(x).tanh(), 2))

    return of_module(Net(), torch.randn(B, 2, 6, 6), dtype=dtype)


@case()
def conv3d(dtype):
    layer = nn.Conv3d(2, 4, (3, 2, 1), stride=(1, 2, 1), padding=(1, 0, 1), groups=2)
    return of_module(layer, torch.randn(B, 2, 4, 5, 3), dtype=dtype)


@case()
def conv_transpose2d(dtype):
    layer = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2)
    return of_module(layer, torch.randn(B, 4, 4, 5), dtype=dtype)


@case()
def conv_transpose1d(dtype):
    layer = nn.ConvTranspose1d(3, 4, 4, stride=3, bias=False)
    return of_module(layer, torch.randn(B, 3, 5), dtype=dtype)


# -- embeddings -----------------------------------------------------------------------------------


def _ids(*shape: int, below: int = 7) -> Tensor:
    return torch.randint(0, below, shape)


@case()
def embedding_padding_idx(dtype):
    return of_module(nn.Embedding(7, 4, padding_idx=2), _ids(B, 9), dtype=dtype)


@case()
def embedding_one_id_per_row(dtype):
    return of_module(nn.Embedding(7, 4), _ids(B), dtype=dtype)


@case()
def embedding_of_images_of_ids(dtype):
    return of_module(nn.Embedding(7, 4), _ids(B, 3, 5), dtype=dtype)


@case()
def embedding_repeated_ids(dtype):
    ids = torch.tensor([[1, 1, 1, 1, 1], [1, 2, 1, 2, 1], [0, 0, 0, 0, 3], [6, 5, 4, 3, 2]])
    return of_module(nn.Embedding(7, 4), ids, dtype=dtype)


class _Positions(nn.Module):
    """Position ids are [1, T], whatever the batch."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 4, sparse=sparse)
        self.position = nn.Embedding(9, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position(torch.arange(ids.shape[1])[None])


@case()
def embedding_broadcast_ids(dtype):
    return of_module(_Positions(), _ids(B, 5), dtype=dtype)


@case()
def embedding_expanded_ids(dtype):
    class Net(_Positions):
        def forward(self, ids: Tensor) -> Tensor:
            return self.token(ids) * self.position(torch.arange(ids.shape[1]).expand_as(ids))

    return of_module(Net(), _ids(B, 5), dtype=dtype)


class _UnbatchedPositions(_Positions):
    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) * self.position(torch.arange(ids.shape[1]))


@case()
def embedding_unbatched_ids(dtype):
    return of_module(_UnbatchedPositions(), _ids(B, 5), dtype=dtype)


@case()
def embedding_unbatched_ids_as_many_as_rows(dtype):
    # Ids of shape [T] with as many tokens as rows: the first size is B, yet it is not the batch.
    return of_module(_UnbatchedPositions(), _ids(B, B), dtype=dtype)


@case()
def embedding_scale_grad_by_freq(dtype):
    # Divided by how often an id occurs in its own row, not in the batch.
    return of_module(nn.Embedding(5, 4, scale_grad_by_freq=True), _ids(B, 9, below=5), dtype=dtype)


@case(beyond_vmap=True)
def embedding_sparse(dtype):
    return of_module(nn.Embedding(7, 4, sparse=True), _ids(B, 5), dtype=dtype)


@case()
def embedding_bag_sum(dtype):
    return of_module(nn.EmbeddingBag(7, 4, mode="sum"), _ids(B, 5), dtype=dtype)


@case()
def embedding_bag_mean_with_padding(dtype):
    bag = nn.EmbeddingBag(7, 4, mode="mean", padding_idx=1)
    ids = torch.tensor([[1, 1, 3, 4], [0, 2, 5, 1], [3, 3, 3, 3], [2, 1, 1, 1]])
    return of_module(bag, ids, dtype=dtype)


@case()
def embedding_bag_max(dtype):
    return of_module(nn.EmbeddingBag(7, 4, mode="max"), _ids(B, 5), dtype=dtype)


@case()
def embedding_bag_weighted(dtype):
    net = nn.EmbeddingBag(7, 4, mode="sum").to(dtype)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        ids, weights = batch
        out = torch.func.functional_call(net, params, (ids,), {"per_sample_weights": weights})
        return reduced(out)

    return Case(trainable(net), loss_fn, (_ids(B, 5), torch.rand(B, 5, dtype=dtype)))


@case()
def embedding_bag_offsets(dtype):
    net = nn.EmbeddingBag(7, 4, mode="mean").to(dtype)

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        starts = torch.arange(0, ids.numel(), ids.shape[1])
        return reduced(torch.func.functional_call(net, params, (ids.flatten(), starts)))

    return Case(trainable(net), loss_fn, _ids(B, 5))


# -- normalisation --------------------------------------------------------------------------------


@case()
def layer_norm(dtype):
    net = nn.LayerNorm((3, 5), eps=1e-3)
    nn.init.normal_(net.weight)
    return of_module(net, torch.randn(B, 2, 3, 5), dtype=dtype)


@case()
def layer_norm_2d_without_bias(dtype):
    return of_module(nn.LayerNorm(5, bias=False), torch.randn(B, 5), dtype=dtype)


@case()
def layer_norm_without_affine(dtype):
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False))
    return of_module(net, torch.randn(B, 3, 5), dtype=dtype)


@case()
def group_norm(dtype):
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6, eps=1e-3))
    return of_module(net, torch.randn(B, 2, 5, 6), dtype=dtype)


@case()
def group_norm_2d(dtype):
    return of_module(nn.GroupNorm(2, 6), torch.randn(B, 6), dtype=dtype)


@case()
def instance_norm(dtype):
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True))
    return of_module(net, torch.randn(B, 2, 6, 6), dtype=dtype)


@case()
def rms_norm(dtype):
    net = nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6, eps=1e-4))
    return of_module(net, torch.randn(B, 3, 5), dtype=dtype)


@case()
def batch_norm_eval(dtype):
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    nn.init.uniform_(net[1].running_var, 0.5, 2.0)
    nn.init.normal_(net[1].running_mean)
    return of_module(net.eval(), torch.randn(B, 2, 6, 6), dtype=dtype)
