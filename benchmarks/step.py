"""How long a whole private step takes, beside an ordinary one and beside other libraries.

    python benchmarks/step.py                                  # everything; half an hour
    python benchmarks/step.py --model b --batch 64 --rounds 30
    python benchmarks/step.py --only torch ours --no-memory
    python benchmarks/step.py --only fit                       # what Trainer.fit adds to the step

How to read it is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from models import MODELS
from peers import CONTENDERS, FLOOR, OURS, PEERS, NotHereError, Settings

TURN = 0.05  # seconds that a turn lasts at least, in steps of the floor
LONGEST_TURN = 1.0
WARM_UP = 2


def contender(name: str, letter: str, size: int, settings: Settings) -> Callable[[], object]:
    """One step of ``name``, ready to be called; everybody starts from the same weights."""
    torch.manual_seed(0)
    batch = MODELS[letter].batch(size)
    return CONTENDERS[name](MODELS[letter], batch, settings)


# -- time -----------------------------------------------------------------------------------------


def ready(
    names: list[str], letter: str, size: int, settings: Settings
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """The contenders, warmed up, and why others are missing."""
    steps: dict[str, Callable[[], object]] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            step = contender(name, letter, size, settings)
            for _ in range(WARM_UP):
                step()
            steps[name] = step
        except NotHereError as reason:
            missing[name] = str(reason)
        except Exception as error:  # noqa: BLE001  # a peer's failure is a result
            missing[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return steps, missing


def timed(step: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    """Seconds per step."""
    start = clock()
    for _ in range(times):
        step()
    return (clock() - start) / times


def in_turns(
    steps: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a step of each, and the median over rounds of its ratio to the floor."""
    rough = {name: timed(step, 1, clock) for name, step in steps.items()}
    many = max(1, round(TURN / rough[FLOOR]))
    times = {name: max(1, min(many, int(LONGEST_TURN / rough[name]))) for name in steps}
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


# -- memory ---------------------------------------------------------------------------------------


def resident(field: str) -> int:
    """Bytes of this process, now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])  # type: ignore[index]


def peak_of(name: str, letter: str, size: int, settings: Settings) -> int:
    """The most this process holds in three steps above what it held before the first."""
    # What code and threads take is not what a larger batch would need more of.
    contender(name, letter, 2, settings)()
    gc.collect()
    step = contender(name, letter, size, settings)
    gc.collect()
    before = resident("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    for _ in range(3):
        step()
    return resident("VmHWM") - before


def peaks(names: list[str], options: argparse.Namespace, letter: str, size: int) -> dict[str, int]:
    """Peak of each contender, in a process of its own."""
    out = {}
    for name in names:
        command = [
            sys.executable, __file__, "--model", letter, "--batch", str(size),
            "--threads", str(options.threads), "--peak-of", name,
        ]  # fmt: skip
        if options.microbatch:
            command += ["--microbatch", str(options.microbatch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            out[name] = int(json.loads(done.stdout.splitlines()[-1]))
    return out


# -- the table ------------------------------------------------------------------------------------


def table(letter: str, size: int, options: argparse.Namespace) -> None:
    """One model at one batch size."""
    settings = Settings(options.microbatch)
    names = [FLOOR, *(name for name in options.only if name not in (FLOOR, "fit"))]
    steps, missing = ready(names, letter, size, settings)
    clock = time.process_time if options.cpu_time else time.perf_counter
    took, ratios = in_turns(steps, options.rounds, clock)
    present = list(steps)
    steps.clear()
    gc.collect()
    peak = {} if options.no_memory else peaks(present, options, letter, size)
    count = sum(p.numel() for p in MODELS[letter].make().parameters())
    print(f"\n({letter}) {MODELS[letter].name}, {count / 1e6:.2f} M parameters, B = {size}")
    for name in present:
        line = f"  {name:14} {1e3 * took[name]:9.2f} ms   {ratios[name]:6.2f} x"
        if peak.get(FLOOR) and name in peak:
            line += f"   memory {peak[name] / 2**20:7.0f} MiB  {peak[name] / peak[FLOOR]:5.2f} x"
        print(line)
    for name, reason in missing.items():
        print(f"  {name:14} {reason}")
    for mine in (name for name in OURS if name in took):
        rivals = {name: ratios[name] / ratios[mine] for name in PEERS if name in ratios}
        if rivals:
            best = min(rivals, key=rivals.__getitem__)
            print(f"  {mine} is {rivals[best]:.2f} x as fast as {best}, the fastest peer")
    sys.stdout.flush()


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
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, help="default: the model's two sizes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--microbatch", type=int, help="default: the engine's own choice")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count CPU seconds; with --threads 1, for a machine that others use as well",
    )
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak-of", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        settings = Settings(options.microbatch)
        print(json.dumps(peak_of(options.peak_of, options.model[0], options.batch[0], settings)))
        return
    print(
        f"torch {torch.__version__}, {options.threads} threads, load {os.getloadavg()[0]:.1f}; "
        f"median of {options.rounds} rounds in turns"
    )
    if options.only != ["fit"]:
        for letter in options.model:
            for size in options.batch or MODELS[letter].sizes:
                table(letter, size, options)
    if "fit" in options.only:
        fitted(options)


if __name__ == "__main__":
    main()
