"""What several test files need: a brute-force reference for clipping, and a way to start ranks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from opake_lightning.distributed import leave_group


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Rows of every tensor of a batch."""
    return optree.tree_map(lambda leaf: leaf[start:stop], batch)


def example_gradients(loss_fn: Callable[..., Any], params: Any, batch: Any) -> list[list[Tensor]]:
    """Gradients of one example after the other, by plain autograd."""
    leaves, treespec = optree.tree_flatten(params)
    size = len(optree.tree_leaves(batch)[0])
    out = []
    for i in range(size):
        tracked = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        loss = loss_fn(optree.tree_unflatten(treespec, tracked), rows_of(batch, i, i + 1))
        out.append(list(torch.autograd.grad(loss.sum(), tracked, materialize_grads=True)))
    return out


def norm_of(leaves: list[Tensor]) -> float:
    return float(sum(leaf.double().square().sum() for leaf in leaves)) ** 0.5


def looped(loss_fn: Callable[..., Any], params: Any, batch: Any, bound: float) -> list[Tensor]:
    """Sum of clipped gradients in float64, one example after the other."""
    total = [torch.zeros_like(leaf, dtype=torch.float64) for leaf in optree.tree_leaves(params)]
    for gradient in example_gradients(loss_fn, params, batch):
        factor = min(1.0, bound / max(norm_of(gradient), 1e-300))
        for part, leaf in zip(total, gradient, strict=True):
            part += factor * leaf.double()
    return total


def distance(got: Any, want: list[Tensor]) -> float:
    """L2 distance relative to the length of ``want``."""
    pairs = zip(optree.tree_leaves(got), want, strict=True)
    return norm_of([a.double() - b for a, b in pairs]) / max(norm_of(want), 1e-300)


def trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def on_ranks(work: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    """What ``work(rank)``, a function of a module, returns in each process of a gloo group."""
    # A server without threads that has imported torch once, which takes longer than the work.
    multiprocessing.set_forkserver_preload(["tests.helpers", "pytest", "hypothesis"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank_main, (work, world_size, folder), nprocs=world_size, start_method="forkserver"
        )
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(world_size)]


def _rank_main(rank: int, work: Callable[[int], Any], world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        torch.save(work(rank), f"{folder}/{rank}.pt")
    finally:
        leave_group()
