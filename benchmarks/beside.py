"""The same steps by this checkout and another, in turns; for ``step.py --beside``.

Each checkout has a process of its own, which imports that ``opake_lightning`` and this folder's
benchmarks, and waits at a pipe to be told which step to make how often. The plain step of torch is
measured in both: where the two differ in that, it is by the noise of the measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from machine import environment_of, package, require
from models import MODELS
from peers import FLOOR, Settings
from turns import clock_of, ready, timed, times_of

__all__ = ["compare"]

Took = dict[tuple[str, str], list[float]]  # seconds per step by side and contender, round by round


class Child:
    """A process with steps of one checkout.

    Attributes:
        rough: Seconds of a step of each contender, roughly.
        missing: Why other contenders are not there.
    """

    def __init__(self, checkout: Path, letter: str, size: int, options: argparse.Namespace) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment_of(checkout),
        )  # fmt: skip
        names = [FLOOR, *(name for name in options.only if name not in (FLOOR, "fit"))]
        told = {
            "names": names, "letter": letter, "size": size, "threads": options.threads,
            "microbatch": options.microbatch, "cpu_time": options.cpu_time,
        }  # fmt: skip
        found = self._ask(told)
        require(checkout, found["package"])
        self.rough: dict[str, float] = found["rough"]
        self.missing: dict[str, str] = found["missing"]

    def seconds(self, name: str, times: int) -> float:
        """Seconds per step, of so many."""
        return self._ask({"name": name, "times": times})

    def end(self) -> None:
        """Let the process end, and its memory with it."""
        self._process.communicate()

    def _ask(self, what: dict[str, Any]) -> Any:
        pipe = self._process
        assert pipe.stdin is not None
        assert pipe.stdout is not None
        pipe.stdin.write(json.dumps(what) + "\n")
        pipe.stdin.flush()
        answer = pipe.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of a checkout ended with exit code {pipe.wait()}")
        return json.loads(answer)


def compare(letter: str, size: int, options: argparse.Namespace) -> None:
    """Measure one model at one batch size, and print its table."""
    sides = {
        "here": Child(package(), letter, size, options),
        "beside": Child(options.beside, letter, size, options),
    }
    print(f"\n{MODELS[letter].title(letter)}, B = {size}")
    for label, side in sides.items():
        for name, reason in side.missing.items():
            print(f"  {name:14} {label}: {reason}")
    if all(FLOOR in side.rough for side in sides.values()):
        took = _in_turns(sides, options.rounds)
        for name in dict.fromkeys(name for _, name in took):
            print(_line(name, took))
    for side in sides.values():
        side.end()
    sys.stdout.flush()


def _in_turns(sides: dict[str, Child], rounds: int) -> Took:
    times = times_of({name: each for side in sides.values() for name, each in side.rough.items()})
    took: Took = defaultdict(list)
    for number in range(rounds):
        # Whoever comes first finds other data in the caches.
        order = list(sides) if number % 2 else list(reversed(sides))
        for name, many in times.items():
            for label in order:
                if name in sides[label].rough:
                    took[label, name].append(sides[label].seconds(name, many))
    return took


def _line(name: str, took: Took) -> str:
    """One contender: milliseconds, ratio to the floor of the same side, and of the two sides."""
    line = f"  {name:14}"
    for label in ("here", "beside"):
        if each := took.get((label, name)):
            floor = _ratios(each, took[label, FLOOR])
            line += f"{1e3 * statistics.median(each):9.2f} ms {statistics.median(floor):6.2f} x "
            line += f"{label}  "
    if ("here", name) in took and ("beside", name) in took:
        both = _ratios(took["here", name], took["beside", name])
        low, high = both[len(both) // 4], both[-1 - len(both) // 4]
        line += f"here ÷ beside {statistics.median(both):.3f} ({low:.3f} to {high:.3f})"
    return line


def _ratios(some: list[float], others: list[float]) -> list[float]:
    """Round by round, in order of size."""
    return sorted(a / b for a, b in zip(some, others, strict=True))


def serve() -> None:
    """What a child does: get steps ready, then make and time as many as it is told, until EOF."""
    # What libraries print must not get into the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    told = json.loads(sys.stdin.readline())
    torch.set_num_threads(told["threads"])
    clock = clock_of(cpu_time=told["cpu_time"])
    settings = Settings(told["microbatch"])
    steps, missing = ready(told["names"], told["letter"], told["size"], settings)
    rough = {name: timed(step, 1, clock) for name, step in steps.items()}
    gc.collect()
    gc.disable()
    answer({"package": str(package()), "rough": rough, "missing": missing})
    for line in sys.stdin:
        order = json.loads(line)
        answer(timed(steps[order["name"]], order["times"], clock))


if __name__ == "__main__":
    serve()
