"""How long the noise of one step takes, correlated and not.

    python benchmarks/noise.py                          # both sizes, all strategies
    python benchmarks/noise.py --size small --only band_mf_8 lambda_cgd

All of a table is measured in one process, in turns, and shown as ratios of medians: other work on
the machine then disturbs all of it alike.

- *to plain* is to ``gaussian_noise`` in place, at the same size: what correlation costs.
- *to normal_* is to ``Tensor.normal_`` on one flat tensor, which only draws.
- *state* is what is remembered from step to step, as a multiple of the gradient.
- *above* is the most that a step allocates on top of gradient and state, against both.

Rows are ``noise_fn(grads, state, inplace=True)``, as the trainer calls it; *pure* ones leave their
arguments alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import optree
import torch
from machine import described
from torch.profiler import ProfilerActivity, profile

from opake_lightning import _pool
from opake_lightning._tree import layout_of, unpack
from opake_lightning.dpftrl.noise import (
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    identity_strategy,
    lambda_cgd_strategy,
    mf_gaussian_noise,
)
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.random import key
from opake_lightning.types import ClippedPytree

# Matrices and biases by turns: 1.0 million elements in 150 tensors, 25 million in 300.
SIZES = {"small": (150, 115), "large": (300, 408)}
N_STEPS = 2000
STRATEGIES = {
    "identity": (identity_strategy(), "auto"),
    "band_mf_8": (band_mf_strategy(bands=8), "auto"),
    "band_mf_64": (band_mf_strategy(bands=64), "auto"),
    "blt_3": (blt_strategy(n_buffers=3), "auto"),
    "lambda_cgd": (lambda_cgd_strategy(0.9), "auto"),
    "lambda_cgd_stored": (lambda_cgd_strategy(0.9), "store"),
    "bisr_4": (bisr_strategy(4), "auto"),
    "bisr_4_again": (bisr_strategy(4), "regenerate"),
}
Step = Callable[[], object]


def gradient(size: str) -> ClippedPytree:
    """As the clipping code makes it: leaves are views of one flat tensor."""
    n, width = SIZES[size]
    shapes = [(width,) if i % 2 else (width, width) for i in range(n)]
    layout = layout_of({f"layers.{i}": torch.empty(shape) for i, shape in enumerate(shapes)})
    return ClippedPytree(unpack(layout.zeros(), layout), 0.01)


def step_of(noise_fn: Any, state: Any, grads: ClippedPytree, *, inplace: bool) -> Step:
    def step() -> None:
        nonlocal state
        noised, state = noise_fn(grads, state, inplace=inplace)
        if inplace:
            del noised

    return step


def warm_up_of(name: str) -> int:
    """Steps until all that is remembered is in use."""
    last = name.rpartition("_")[2]
    return int(last) if last.isdigit() else 3


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Milliseconds of each, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def allocated(step: Step) -> int:
    """The most bytes that ``step`` holds at a time of what it allocates."""
    # Memory that was there before counts as well, if it is taken for this step.
    taken = 0
    empty = _pool.empty

    def counting(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal taken
        before = _pool.pool.lent
        flat = empty(n, dtype, device)
        taken += _pool.pool.lent - before
        return flat

    _pool.empty = counting
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    _pool.empty = empty
    kineto = profiled.profiler.kineto_results
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most + taken


def table(size: str, only: list[str], rounds: int, *, pure: bool) -> list[dict[str, str]]:
    """One line for each way to make noise."""
    grads = gradient(size)
    own = sum(leaf.nbytes for leaf in optree.tree_leaves(grads.pytree))
    flat = torch.empty(own // 4)
    steps: dict[str, Step] = {"normal_": flat.normal_}
    kept = {"normal_": 0, "plain": 0}
    noise_fn, state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    steps["plain"] = step_of(noise_fn, state, grads, inplace=True)
    for name in only:
        strategy, memory = STRATEGIES[name]
        noise_fn, state = mf_gaussian_noise(
            grads.pytree, strategy, n_steps=N_STEPS, noise_multiplier=1.0, key=key(7),
            memory=memory,
        )  # fmt: skip
        for inplace in (True, False) if pure else (True,):
            label = name if inplace else f"{name} pure"
            fresh = state if inplace else noise_fn.initial(key(7))
            steps[label] = step_of(noise_fn, fresh, grads, inplace=inplace)
            kept[label] = sum(leaf.nbytes for leaf in optree.tree_leaves(fresh.buffers))
    for name, step in steps.items():
        for _ in range(warm_up_of(name.removesuffix(" pure"))):
            step()
    above = {name: allocated(step) for name, step in steps.items()}
    took = medians(steps, rounds)
    return [
        {
            "noise": name,
            "ms": f"{took[name]:.2f}",
            "to plain": f"{took[name] / took['plain']:.2f}",
            "to normal_": f"{took[name] / took['normal_']:.2f}",
            "state": f"{kept[name] / own:.2f}",
            "above": f"{100 * above[name] / (own + kept[name]):.1f} %",
        }
        for name in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, help="default: 60 for small, 9 for large")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pure", action="store_true", help="measure the pure form as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for size in SIZES if options.size == "both" else [options.size]:
        n, width = SIZES[size]
        total = n // 2 * (width * width + width)
        print(f"\n{n} tensors, {total / 1e6:.1f} million float32; {described()}")
        rounds = options.rounds or (60 if size == "small" else 9)
        lines = table(size, options.only, rounds, pure=options.pure)
        widths = {
            name: max(len(line[name]) for line in [*lines, {name: name}]) for name in lines[0]
        }
        for line in [{name: name for name in widths}, *lines]:
            print("  ".join(line[name].ljust(width) for name, width in widths.items()), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
