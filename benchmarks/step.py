"""How long a whole private step takes, beside an ordinary one and beside other libraries.

    python benchmarks/step.py                                  # everything; an hour
    python benchmarks/step.py --model b --batch 64 --rounds 30
    python benchmarks/step.py --only torch ours --no-memory
    python benchmarks/step.py --beside ../old --model a linears   # another checkout's step
    python benchmarks/step.py --only fit                       # what Trainer.fit adds to the step

How to read it is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from pathlib import Path

import torch
from beside import compare
from machine import described
from memory import Peaks, peaks_of
from models import MODELS
from peers import CONTENDERS, FLOOR, OURS, PEERS, Settings
from turns import clock_of, in_turns, ready


def table(letter: str, size: int, options: argparse.Namespace) -> None:
    """One model at one batch size."""
    settings = Settings(options.microbatch)
    names = [FLOOR, *(name for name in options.only if name not in (FLOOR, "fit"))]
    steps, missing = ready(names, letter, size, settings)
    if FLOOR not in steps:
        print(f"\n({letter}) {MODELS[letter].name}: {missing[FLOOR]}")
        return
    took, ratios = in_turns(steps, options.rounds, clock_of(cpu_time=options.cpu_time))
    present = list(steps)
    steps.clear()
    gc.collect()
    peak = {} if options.no_memory else peaks(present, options, letter, size)
    print(f"\n{MODELS[letter].title(letter)}, B = {size}")
    for name in present:
        line = f"  {name:14} {1e3 * took[name]:9.2f} ms   {ratios[name]:6.2f} x"
        if peak.get(FLOOR) and name in peak:
            line += f"   memory {peak[name] / 2**20:7.0f} MiB  {peak[name] / peak[FLOOR]:5.2f} x"
        print(line)
    for name, reason in missing.items():
        print(f"  {name:14} {reason}")
    rivals = {name: ratios[name] for name in PEERS if name in ratios}
    if OURS in ratios and rivals:
        best = min(rivals, key=rivals.__getitem__)
        print(
            f"  {OURS} is {rivals[best] / ratios[OURS]:.2f} x as fast as {best}, the fastest peer"
        )
    sys.stdout.flush()


def peaks(names: list[str], options: argparse.Namespace, letter: str, size: int) -> dict[str, int]:
    """The most that each contender holds in any step."""
    found = {name: peaks_of(name, letter, size, options) for name in names}
    return {
        name: max(each.first, each.later) for name, each in found.items() if isinstance(each, Peaks)
    }


def fitted(options: argparse.Namespace) -> None:
    """What ``Trainer.fit`` costs over a bare loop that loads the same batches."""
    from fit import SIZE, overhead

    each, bare = overhead(steps=40 * options.rounds)
    ratios = [a / b for a, b in zip(each, bare, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"\nTrainer.fit, model (b), B = {SIZE}: {1e3 * statistics.median(each):.2f} ms a step, "
        f"bare loop {1e3 * statistics.median(bare):.2f} ms: {statistics.median(ratios):.3f} x "
        f"(half of the steps between {low:.3f} and {high:.3f})"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    names = [*CONTENDERS, "fit"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    timed = [letter for letter in MODELS if letter != "gpt"]
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=timed)
    parser.add_argument("--batch", nargs="+", type=int, help="default: the model's sizes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", nargs="+", choices=names, help='default: all; with --beside "ours"'
    )
    parser.add_argument("--microbatch", type=int, help="default: the step's own choice")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count CPU seconds; with --threads 1, for a machine that others use as well",
    )
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument(
        "--beside", type=Path, metavar="PATH", help="another checkout: time both, in turns"
    )
    options = parser.parse_args()
    options.only = options.only or ([OURS] if options.beside else names)
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    seconds = "processor time" if options.cpu_time else "wall time"
    print(f"{described()}; {seconds}, median of {options.rounds} rounds in turns")
    if options.only != ["fit"]:
        for letter in options.model:
            for size in options.batch or MODELS[letter].sizes:
                (compare if options.beside else table)(letter, size, options)
    if "fit" in options.only and not options.beside:
        fitted(options)


if __name__ == "__main__":
    main()
