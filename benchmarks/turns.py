"""Time of steps that take turns, so that other work on the machine disturbs them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
from models import MODELS
from peers import CONTENDERS, FLOOR, NotHereError, Settings

__all__ = ["Step", "clock_of", "contender", "in_turns", "ready", "timed", "times_of"]

TURN = 0.05  # seconds that a turn lasts at least, in steps of the floor
LONGEST_TURN = 1.0
WARM_UP = 2
Step = Callable[[], object]
Clock = Callable[[], float]


def clock_of(*, cpu_time: bool) -> Clock:
    """Seconds computed by all threads of this process, or seconds on the wall."""
    return time.process_time if cpu_time else time.perf_counter


def contender(name: str, letter: str, size: int, settings: Settings) -> Step:
    """One step of ``name``, ready to be called; everybody starts from the same weights."""
    torch.manual_seed(0)
    batch = MODELS[letter].batch(size)
    return CONTENDERS[name](MODELS[letter], batch, settings)


def ready(
    names: list[str], letter: str, size: int, settings: Settings
) -> tuple[dict[str, Step], dict[str, str]]:
    """The contenders, warmed up, and why others are missing."""
    steps: dict[str, Step] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            step = contender(name, letter, size, settings)
            for _ in range(WARM_UP):
                step()
            steps[name] = step
        except NotHereError as reason:
            missing[name] = str(reason)
        except Exception as error:  # noqa: BLE001  # a contender's failure is a result
            first_line = (str(error).splitlines() or [""])[0]
            missing[name] = f"failed: {type(error).__name__}: {first_line[:90]}"
    return steps, missing


def timed(step: Step, times: int, clock: Clock) -> float:
    """Seconds per step."""
    start = clock()
    for _ in range(times):
        step()
    return (clock() - start) / times


def times_of(rough: dict[str, float]) -> dict[str, int]:
    """Steps in a turn of each, from rough seconds per step."""
    many = max(1, round(TURN / rough[FLOOR]))
    return {name: max(1, min(many, int(LONGEST_TURN / each))) for name, each in rough.items()}


def in_turns(
    steps: dict[str, Step], rounds: int, clock: Clock
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a step of each, and the median over rounds of its ratio to the floor."""
    times = times_of({name: timed(step, 1, clock) for name, step in steps.items()})
    took: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, step in steps.items():
            took[name].append(timed(step, times[name], clock))
    gc.enable()
    ratios = {
        name: statistics.median(a / b for a, b in zip(each, took[FLOOR], strict=True))
        for name, each in took.items()
    }
    return {name: statistics.median(each) for name, each in took.items()}, ratios
