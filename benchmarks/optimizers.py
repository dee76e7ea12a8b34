"""How long one update takes, beside torch.optim, TorchOpt and opake.

    python benchmarks/optimizers.py                      # both sizes, all optimizers
    python benchmarks/optimizers.py --size small --only adamw sgd

Everything in one table row is measured in one process, in turns, and shown as a ratio of medians:
other work on the machine then disturbs all of it alike. A ratio below 1 is in our favour.

- *in place* is what the trainer does: ``step_`` on seated parameters, update and apply, against the
  fastest form of the same torch optimizer (loop, foreach, fused).
- *corrected* is the same with ``noise_bias_correction`` on, against the same torch optimizer, which
  does not have it.
- *compiled* is *corrected* with ``optimizer.compiled()``, where that makes a difference.
- *pure* is ``update`` and ``torchopt.apply_updates`` without writing to anything, against the same
  of TorchOpt's optimizer.
- *opake* and *opake, corrected* are that library's update and application, against the same torch
  optimizer: how often *in place* and *corrected* go into them is how much faster those are.
- *memory* is the most that an update in place allocates, against what is there anyway (parameters,
  gradient, state).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import optree
import torch
import torchopt
from machine import described
from peers import NotHereError, opake_part
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from opake_lightning import _pool, optimizers
from opake_lightning._tree import flatten, seat, unpack
from opake_lightning.types import NoisedPytree

# Matrices and biases by turns: 1.0 million elements in 150 tensors, 25 million in 300.
SIZES = {"small": (150, 115), "large": (300, 408)}
WARM_UP = 8  # RAdam is something else in its first five steps


@dataclass(frozen=True)
class Case:
    """One optimizer here and elsewhere.

    Attributes:
        ours: Makes it, from our module of optimizers or that of opake, which has the same names.
        torchs: Makes torch's, which has none of some; then it is AdamW that they are compared to.
    """

    ours: Callable[[Any], Callable[..., Any]]
    torchs: Callable[..., Any]
    forms: tuple[str, ...] = ("loop", "foreach")
    torchopts: Callable[..., Any] | None = None
    corrects: bool = True
    compiles: bool = False


def _schedule_free(library: Any) -> Callable[..., Any]:
    return lambda lr, **more: library.schedule_free(library.adamw(lr, betas=(0.0, 0.999), **more))


FUSED = ("loop", "foreach", "fused")
CASES = {
    "adamw": Case(lambda o: o.adamw, torch.optim.AdamW, FUSED, torchopt.adamw, compiles=True),
    "adam": Case(lambda o: o.adam, torch.optim.Adam, FUSED, torchopt.adam, compiles=True),
    "sgd": Case(
        lambda o: partial(o.sgd, momentum=0.9),
        partial(torch.optim.SGD, momentum=0.9),
        FUSED, partial(torchopt.sgd, momentum=0.9), corrects=False,
    ),
    "adagrad": Case(
        lambda o: o.adagrad, torch.optim.Adagrad, FUSED, torchopt.adagrad, compiles=True
    ),
    "rmsprop": Case(
        lambda o: o.rmsprop, torch.optim.RMSprop, torchopts=torchopt.rmsprop, compiles=True
    ),
    "radam": Case(lambda o: o.radam, torch.optim.RAdam, torchopts=torchopt.radam, compiles=True),
    "adadelta": Case(lambda o: o.adadelta, torch.optim.Adadelta, torchopts=torchopt.adadelta),
    "adafactor": Case(lambda o: o.adafactor, torch.optim.Adafactor),
    "lion": Case(lambda o: o.lion, torch.optim.AdamW, FUSED, corrects=False),
    "ademamix": Case(lambda o: o.ademamix, torch.optim.AdamW, FUSED),
    "schedule_free": Case(_schedule_free, torch.optim.AdamW, FUSED),
}  # fmt: skip
LR = 1e-3
STDDEV = 0.01


def tensors(size: str) -> dict[str, Tensor]:
    n, width = SIZES[size]
    shapes = [(width,) if i % 2 else (width, width) for i in range(n)]
    return {f"layers.{i}": torch.randn(shape) * 0.1 for i, shape in enumerate(shapes)}


def in_torch(make: Callable[..., Any], form: str, size: str) -> Callable[[], object]:
    params = [torch.nn.Parameter(value) for value in tensors(size).values()]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    how = {"foreach": form == "foreach"} | ({"fused": True} if form == "fused" else {})
    return make(params, lr=LR, **how).step


def in_place(optimizer: Any, size: str, stddev: float) -> tuple[Callable[[], object], int]:
    """The update, and the bytes of what is there anyway."""
    params = {name: torch.nn.Parameter(value) for name, value in tensors(size).items()}
    seat(params)
    layout = flatten(params)[1]
    # As the clipping code makes it.
    gradient = unpack([flat.normal_(std=0.01) for flat in layout.zeros()], layout)
    state = optimizer.init(params)

    def update() -> None:
        nonlocal state
        # Its memory may be written over, as the trainer's is; what it holds is not the point.
        state = optimizer.step_(NoisedPytree(gradient, stddev), state, params)

    held = [params, gradient, *states_of(state)]
    return update, sum(leaf.nbytes for leaf in optree.tree_leaves(held))


def states_of(state: Any) -> list[Any]:
    stages = [x for x in getattr(state, "stages", state).values() if not isinstance(x, int)]
    values = [getattr(stage, field) for stage in stages for field in stage.__slots__]
    return [value for value in values if not isinstance(value, (int, float))]


def pure(optimizer: Any, size: str, **how: Any) -> Callable[[], object]:
    params, gradient = tensors(size), tensors(size)
    state = optimizer.init(params)

    def update() -> None:
        nonlocal params, state
        moves, state = optimizer.update(gradient, state, params=params, **how)
        params = torchopt.apply_updates(params, moves, inplace=False)

    return update


def in_opake(optimizer: Any, size: str, stddev: float) -> Callable[[], object]:
    """The update and its application, as opake's own loop would make them."""
    params, gradient = tensors(size), tensors(size)
    noised = opake_part("types").noised(gradient, max_norm=1.0, noise_stddev=stddev)
    state = optimizer.init(params)

    def update() -> None:
        nonlocal params, state
        moves, state = optimizer.update(noised, state, params=params)
        params = torchopt.apply_updates(params, moves, inplace=True)

    return update


def medians(updates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, taken in turns."""
    for update in updates.values():
        for _ in range(WARM_UP):
            update()
    times: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(rounds):
        for name, update in updates.items():
            start = time.perf_counter()
            update()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def allocated(update: Callable[[], object]) -> int:
    """The most bytes that ``update`` holds at a time of what it allocates."""
    for _ in range(WARM_UP):
        update()
    # Memory that was there before counts as well, if it is taken for this update.
    taken = 0
    empty = _pool.empty

    def counting(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        nonlocal taken
        before = _pool.pool.lent
        flat = empty(n, dtype, device)
        taken += _pool.pool.lent - before
        return flat

    _pool.empty = counting
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        update()
    _pool.empty = empty
    kineto = profiled.profiler.kineto_results
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most + taken


def row(name: str, case: Case, size: str, rounds: int, opake: ModuleType | None) -> dict[str, str]:
    """One line of the table."""
    updates: dict[str, Callable[[], object]] = {}
    for form in case.forms:
        updates[form] = in_torch(case.torchs, form, size)
    make = case.ours(optimizers)
    plain, held = in_place(make(lr=LR), size, 0.0)
    updates["in place"] = plain
    if case.corrects:
        corrected = make(lr=LR, noise_bias_correction=True)
        updates["corrected"], _ = in_place(corrected, size, STDDEV)
        if case.compiles:
            updates["compiled"], _ = in_place(corrected.compiled(), size, STDDEV)
    if opake is not None:
        theirs = case.ours(opake)
        updates["opake"] = in_opake(theirs(lr=LR), size, 0.0)
        if case.corrects:
            correct = theirs(lr=LR, noise_bias_correction=True)
            updates["opake, corrected"] = in_opake(correct, size, STDDEV)
    memory = allocated(plain)
    took = medians(updates, rounds)
    best = min(case.forms, key=took.__getitem__)
    functional: dict[str, float] = {}
    if case.torchopts is not None:
        both = {"ours": make(lr=LR), "torchopt": case.torchopts(lr=LR)}
        runs = {
            "ours": pure(both["ours"], size),
            "torchopt": pure(both["torchopt"], size, inplace=False),
        }
        functional = medians(runs, max(3, rounds // 3))
    gc.collect()
    line = {"optimizer": name, "torch": f"{took[best]:.2f} ms ({best})"}
    for key in ("in place", "corrected", "compiled", "opake", "opake, corrected"):
        line[key] = f"{took[key] / took[best]:.2f}" if key in took else ""
    line["pure"] = f"{functional['ours'] / functional['torchopt']:.2f}" if functional else ""
    line["memory"] = f"{100 * memory / held:.1f} % ({memory / 2**20:.1f} MiB)"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, help="default: 60 for small, 15 for large")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    opake = None
    try:
        opake = opake_part("optimizers")
    except NotHereError as reason:
        print(f"opake: {reason}")
    for size in SIZES if options.size == "both" else [options.size]:
        n, width = SIZES[size]
        total = n // 2 * (width * width + width)
        print(f"\n{n} tensors, {total / 1e6:.1f} million float32; {described()}")
        widths: dict[str, int] = {}
        for name in options.only:
            rounds = options.rounds or (60 if size == "small" else 15)
            line = row(name, CASES[name], size, rounds, opake)
            if not widths:
                widths = {key: max(len(key), 18 if key == "torch" else 13) + 2 for key in line}
                print("".join(key.ljust(width) for key, width in widths.items()))
            print("".join(line[key].ljust(width) for key, width in widths.items()), flush=True)


if __name__ == "__main__":
    main()
