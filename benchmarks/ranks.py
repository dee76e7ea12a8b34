"""What sharing the noise saves each rank, and what the sum over ranks costs.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py
    OMP_NUM_THREADS=1 python benchmarks/ranks.py --ranks 4 --millions 10 --rounds 15

In every round, one after the other on the same ranks and with nothing in between:

- *all of it*: rank 0 makes the noise of all coordinates, while the others wait;
- *its share*: every rank makes its share, all at the same time;
- *the sum*: one all_reduce of the flat gradient over gloo;
- *a release*: the mechanism's own ``across_ranks``, which is the last two;
- *banded, whole* and *banded, shared*: a release with noise that is correlated over 8 steps, where
  every rank makes all of it after the sum, or its share before.

A ratio is the median over rounds of that round's. The ranks need as many processors: with fewer,
the time in which a rank waits for one counts as its own. ``--cpu-time`` counts computed seconds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import described

from opake_lightning.distributed import leave_group, sum_gradients
from opake_lightning.dpftrl.noise import band_mf_strategy, mf_gaussian_noise
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.random import add_normal_, fold_in, key
from opake_lightning.types import ClippedPytree


def seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    dist.barrier()
    start = clock()
    work()
    return clock() - start


class Banded:
    """Two streams of correlated noise, which go on from round to round."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.noise_fn, state = mf_gaussian_noise(
            {"w": flat}, band_mf_strategy(8), n_steps=1000, noise_multiplier=1.0, key=key(8)
        )
        self.states = {"whole": state, "shared": copy.deepcopy(state)}

    def whole(self) -> None:
        """Sum, and then all of the noise."""
        grads = sum_gradients(ClippedPytree({"w": self.flat}, 1e-3), inplace=True)
        _, self.states["whole"] = self.noise_fn(grads, self.states["whole"], inplace=True)

    def shared(self) -> None:
        """A share of the noise, and then the sum."""
        grads = ClippedPytree({"w": self.flat}, 1e-3)
        _, self.states["shared"] = self.noise_fn.across_ranks(
            grads, self.states["shared"], inplace=True
        )


def one_round(
    flat: torch.Tensor, banded: Banded, number: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of each part on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stream = fold_in(key(7), number)
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=fold_in(stream, "release"))
    parts = {
        "all of it": lambda: rank or add_normal_(fold_in(stream, 0), flat, 1e-3),
        "its share": lambda: add_normal_(fold_in(stream, 1), flat, 1e-3, share=(rank, ranks)),
        "the sum": lambda: dist.all_reduce(flat),
        "a release": lambda: noise_fn.across_ranks(
            ClippedPytree({"w": flat}, 1e-3), state, inplace=True
        ),
        "banded, whole": banded.whole,
        "banded, shared": banded.shared,
    }
    names = list(parts)
    if number % 2:
        names.reverse()  # neither is always the one that finds the memory warm
    took = {name: seconds(parts[name], clock) for name in names}
    flat.div_(ranks**4)  # as the sums have made it larger
    return took


def rank_main(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    flat = torch.zeros(round(arguments.millions * 1e6))
    banded = Banded(flat)
    one_round(flat, banded, 0, clock)
    rounds = [one_round(flat, banded, number, clock) for number in range(1, arguments.rounds + 1)]
    gathered: list[Any] = [None] * arguments.ranks
    dist.all_gather_object(gathered, rounds)
    if rank == 0:
        report(gathered, arguments)
    leave_group()


def report(gathered: list[list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    alone = [times["all of it"] for times in gathered[0]]
    print(
        f"{arguments.millions:g} M coordinates, {arguments.ranks} ranks, "
        f"median of {arguments.rounds} rounds; each rank: {described()}"
    )
    print(f"  all of it, on one rank      {1e3 * statistics.median(alone):8.2f} ms   1.00 x")
    for rank, rounds in enumerate(gathered):
        share = [times["its share"] for times in rounds]
        ratio = statistics.median(s / a for s, a in zip(share, alone, strict=True))
        print(
            f"  its share, on rank {rank}        {1e3 * statistics.median(share):8.2f} ms   "
            f"{ratio:.2f} x"
        )
    for name in ("the sum", "a release", "banded, whole", "banded, shared"):
        slowest = [max(r[i][name] for r in gathered) for i in range(arguments.rounds)]
        ratio = statistics.median(s / a for s, a in zip(slowest, alone, strict=True))
        print(
            f"  {name:<14} (slowest rank) {1e3 * statistics.median(slowest):8.2f} ms   "
            f"{ratio:.2f} x"
        )
    of_it = [
        max(r[i]["the sum"] for r in gathered) / max(r[i]["a release"] for r in gathered)
        for i in range(arguments.rounds)
    ]
    print(f"  the sum is {statistics.median(of_it):.0%} of a release")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=float, default=25.0, help="of coordinates, float32")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cpu-time", action="store_true", help="count computed seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
