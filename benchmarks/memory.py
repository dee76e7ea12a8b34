"""The most memory that a step holds: the first, which may try things out, and later ones.

    python benchmarks/memory.py                            # a GPT of 149 M parameters; minutes
    python benchmarks/memory.py --model c --batch 256 --only ours "opacus ghost"
    python benchmarks/memory.py --beside ../old            # another checkout's as well

Each contender is measured in a process of its own, above what that held with model and batch loaded
and nothing done.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import described, environment_of, package, require, reset_peak, resident
from models import MODELS
from peers import CONTENDERS, FLOOR, OURS, NotHereError, Settings
from turns import Step, contender

__all__ = ["Peaks", "peaks_of"]

LATER = 2


@dataclass(frozen=True)
class Peaks:
    """Bytes that a step holds at most, and seconds that it takes: the first, and later ones."""

    first: int
    later: int
    first_seconds: float
    later_seconds: float


def _peak_and_seconds(step: Step, times: int, above: int) -> tuple[int, float]:
    reset_peak()
    start = time.perf_counter()
    for _ in range(times):
        step()
    return resident("VmHWM") - above, (time.perf_counter() - start) / times


def measured(name: str, letter: str, size: int, settings: Settings) -> Peaks:
    """Peaks of this process."""
    # What code and threads take is not what a larger model needs more of. A warm-up on the model
    # itself would leave memory behind that is used again, and hide a part of what is measured.
    contender(name, "b", 2, settings)()
    gc.collect()
    step = contender(name, letter, size, settings)
    gc.collect()
    before = resident("VmRSS")
    first, first_seconds = _peak_and_seconds(step, 1, before)
    later, later_seconds = _peak_and_seconds(step, LATER, before)
    return Peaks(first, later, first_seconds, later_seconds)


def peaks_of(
    name: str, letter: str, size: int, options: argparse.Namespace, checkout: Path | None = None
) -> Peaks | str:
    """Peaks of a process of its own, by the package of ``checkout``; or why there are none."""
    command = [
        sys.executable, __file__, "--model", letter, "--batch", str(size), "--serve",
        "--threads", str(options.threads), "--only", name,
    ]  # fmt: skip
    if options.microbatch:
        command += ["--microbatch", str(options.microbatch)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment_of(checkout)
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"failed: {reason[-1][:90]}"
    found = json.loads(done.stdout.splitlines()[-1])
    require(checkout, found["package"])
    return found["missing"] if "missing" in found else Peaks(**found["peaks"])


def serve(options: argparse.Namespace) -> None:
    """What a child does: measure one contender, and print what was found for its parent."""
    found: dict[str, object] = {"package": str(package())}
    letter, size, name = options.model[0], options.batch[0], options.only[0]
    try:
        found["peaks"] = asdict(measured(name, letter, size, Settings(options.microbatch)))
    except NotHereError as reason:
        found["missing"] = str(reason)
    print(json.dumps(found))


def table(letter: str, size: int, options: argparse.Namespace) -> None:
    """One model at one batch size."""
    print(f"\n{MODELS[letter].title(letter)}, B = {size}")
    print(f"  {'':16}{'first step':>17}{'later steps':>29}")
    rows: list[tuple[str, str, Path | None]] = [(FLOOR, FLOOR, None)]
    for name in options.only:
        if name != FLOOR:
            rows.append((name, name, None))
        if name == OURS and options.beside:
            rows.append((f"{OURS}, beside", name, options.beside))
    floor: Peaks | None = None
    for label, name, checkout in rows:
        found = peaks_of(name, letter, size, options, checkout)
        if isinstance(found, str):
            print(f"  {label:16}{found}", flush=True)
            continue
        floor = floor or found
        first, later = found.first / floor.first, found.later / floor.later
        print(
            f"  {label:16}"
            f"{found.first / 2**20:6.0f} MiB {first:5.2f} x {found.first_seconds:6.2f} s    "
            f"{found.later / 2**20:6.0f} MiB {later:5.2f} x {found.later_seconds:6.2f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["gpt"])
    parser.add_argument("--batch", nargs="+", type=int, help="default: the model's sizes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=[FLOOR, OURS])
    parser.add_argument("--microbatch", type=int, help="default: the engine's own choice")
    parser.add_argument("--beside", type=Path, metavar="PATH", help="another checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.serve:
        serve(options)
        return
    print(described())
    for letter in options.model:
        for size in options.batch or MODELS[letter].sizes:
            table(letter, size, options)


if __name__ == "__main__":
    main()
