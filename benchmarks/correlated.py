"""What correlated noise is worth: in theory, and in runs on scikit-learn's digits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import torch
from digits_runs import REPORTED, TUNING, accuracy, digits_data, losses, run, start
from drawing import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, Made, canvas, mean_error, short, table

from opake_lightning import DPFTRL
from opake_lightning.accounting import Ledger
from opake_lightning.dpftrl.noise import (
    Strategy,
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
    prefix_workload,
)
from opake_lightning.optimizers import sgd
from opake_lightning.plan import MFMechanism
from opake_lightning.random import key

HORIZONS = (50, 75, 100, 150, 200, 300, 500, 750, 1000, 1500, 2000)
LISTED = (100, 500, 2000)
PASSES = 10

# The strategy for a separation, and how it is drawn.
Look = tuple[Callable[[int], Strategy], str, str, str]
LINES: dict[str, Look] = {
    "identity": (lambda b: identity_strategy(), BLACK, "o", "-"),
    "bsr, 8 bands": (lambda b: bsr_strategy(8), PURPLE, "v", "-"),
    "band_mf, 8 bands": (lambda b: band_mf_strategy(8), BLUE, "s", "-"),
    "bisr, 8": (lambda b: bisr_strategy(8), ORANGE, "^", "-"),
    "lambda_cgd, 0.9": (lambda b: lambda_cgd_strategy(0.9), RED, "D", "-"),
    "blt, 3 buffers": (lambda b: blt_strategy(3, error="mean"), GREEN, "P", "-"),
    "band_mf, n/10 bands": (band_mf_strategy, BLUE, "s", "--"),
}


def errors(make: Callable[[int], Strategy], n: int, passes: int) -> float:
    """Sensitivity times the error of the sums of gradients, RMS over the steps."""
    separation = n // passes
    matrix = make(separation).for_participation(separation, passes).matrix(n)
    return matrix.sensitivity(separation, passes) * matrix.rmse(prefix_workload()).mean


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights for labels, the same order from below, each at least ``gap`` times the one below."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for below, i in pairwise(order):
        placed[i] = max(placed[i], gap * placed[below])
    return placed


def error() -> Made:
    """Error of the sums of gradients over the length of a run."""
    figure, axes = canvas(2, height=4.2, share=True)
    rows = {name: [name] for name in LINES}
    for axis, passes, title in (
        (axes[0], 1, "each example takes part once"),
        (axes[1], PASSES, "ten times, n/10 steps apart"),
    ):
        lines = {
            name: [errors(look[0], n, passes) for n in HORIZONS]
            for name, look in LINES.items()
            if passes > 1 or not name.endswith("n/10 bands")
        }
        labels = spread([line[-1] for line in lines.values()], 1.17)
        for (name, line), height in zip(lines.items(), labels, strict=True):
            _, colour, marker, dash = LINES[name]
            axis.plot(HORIZONS, line, color=colour, marker=marker, ls=dash, ms=4, lw=1.5)
            axis.plot([2100, 2600], [line[-1], height], color=colour, lw=0.8, clip_on=False)
            axis.text(2750, height, name, va="center", fontsize=8.5)
        axis.set(xscale="log", yscale="log", xlabel="steps n", xlim=(46, 2200), ylim=(1.8, 115))
        axis.set_title(title, fontsize=10, loc="left")
        for which, ticks in (("x", (50, 100, 200, 500, 2000)), ("y", (2, 5, 10, 20, 50, 100))):
            axis.set(**{f"{which}ticks": ticks, f"{which}ticklabels": ticks})
            axis.tick_params(axis=which, which="minor", length=0, labelleft=False)
        for name, row in rows.items():
            line = lines.get(name)
            row += [short(line[HORIZONS.index(n)], 3) if line else "–" for n in LISTED]
    axes[0].set_ylabel("error of the sums of gradients\n(sensitivity × RMS over steps)")
    head = ["", *(f"once, n = {n}" for n in LISTED), *(f"ten times, n = {n}" for n in LISTED)]
    return figure, table(head, list(rows.values()))


# -- runs on digits ------------------------------------------------------------------------------

EPOCHS, BATCH, EPSILONS, DELTA = 20, 128, (1.0, 3.0, 8.0), 1e-4
RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
PARTS = 12  # batches of a pass
RUNS: dict[str, tuple[Strategy, str]] = {
    "identity (DP-SGD)": (identity_strategy(), "cyclic_poisson"),
    "identity": (identity_strategy(), "fixed_partition"),
    "band_mf, 4 bands": (band_mf_strategy(4), "cyclic_poisson"),
    "band_mf, 4 bands ": (band_mf_strategy(4), "b_min_sep"),
    "band_mf, 4 bands  ": (band_mf_strategy(4), "balls_in_bins"),
    "band_mf, 12 bands": (band_mf_strategy(PARTS), "fixed_partition"),
    "bsr, 12 bands": (bsr_strategy(PARTS), "fixed_partition"),
    "bisr, 4": (bisr_strategy(4), "fixed_partition"),
    "lambda_cgd, 0.9": (lambda_cgd_strategy(0.9), "fixed_partition"),
    "blt, 3 buffers": (blt_strategy(3), "fixed_partition"),
    "blt, 3 buffers ": (blt_strategy(3), "balls_in_bins"),
}


def mechanism_of(name: str, epsilon: float, sigma: float | None = None) -> MFMechanism:
    """The mechanism of a run; σ is calibrated if it is not given."""
    strategy, sampling = RUNS[name]
    plan = DPFTRL(
        clipping_norm=1.0,
        strategy=strategy,
        sampling=sampling,
        target_epsilon=epsilon,
        target_delta=DELTA,
    )
    if sigma is not None:
        plan = replace(plan, target_epsilon=None, noise_multiplier=sigma)
    return plan.resolve(
        n_examples=len(digits_data()[0]),
        batch_size=BATCH,
        planned_steps=EPOCHS * PARTS,
        spent=Ledger(),
    )


def calibrate(job: tuple[str, float]) -> float:
    """σ of a run."""
    return mechanism_of(*job).noise_multiplier


def train(job: tuple[str, float, float, float, int]) -> float:
    """Test accuracy in per cent of one run of softmax regression with plain SGD."""
    name, epsilon, sigma, lr, seed = job
    mechanism, rng = mechanism_of(name, epsilon, sigma), key(seed)
    params = start("softmax", rng)
    step = mechanism.step(losses, sgd(lr), rng, params)
    return accuracy(run(mechanism, step, params, rng, mechanism.n_steps)[0])


def measure(jobs: int) -> dict[str, Any]:
    """Calibrate; tune the learning rate on some keys; measure it on others."""
    cases = [(name, epsilon) for name in RUNS for epsilon in EPSILONS]
    with get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        sigmas = dict(zip(cases, pool.imap(calibrate, cases), strict=True))
        tuning = [(*case, sigmas[case], lr, s) for case in cases for lr in RATES for s in TUNING]
        found = dict(zip(tuning, pool.imap(train, tuning), strict=True))
        best = {
            case: max(
                RATES,
                key=lambda lr: statistics.mean(found[*case, sigmas[case], lr, s] for s in TUNING),
            )
            for case in cases
        }
        final = [(*case, sigmas[case], best[case], s) for case in cases for s in REPORTED]
        reached = dict(zip(final, pool.imap(train, final), strict=True))
    result: dict[str, Any] = {name: {} for name in RUNS}
    for case in cases:
        name, epsilon = case
        result[name][f"{epsilon:g}"] = {
            "sigma": sigmas[case],
            "best": best[case],
            "final": [reached[*case, sigmas[case], best[case], s] for s in REPORTED],
        }
    return result


def accuracies(raw: dict[str, Any]) -> Made:
    """What a run of given ε reaches, and the error of its sums of gradients."""
    head = ["", "batches"]
    for epsilon in EPSILONS:
        head += [f"ε = {epsilon:g}: error", "accuracy, %"]
    rows = []
    for name, (_, sampling) in RUNS.items():
        row = [name.strip(), f"`{sampling}`"]
        for epsilon in EPSILONS:
            found = raw[name][f"{epsilon:g}"]
            run = mechanism_of(name, epsilon, found["sigma"])
            noise = run.strategy.matrix(run.n_steps).rmse(prefix_workload()).mean
            row += [f"{found['sigma'] * noise:.1f}", mean_error(found["final"])]
        rows.append(row)
    return None, table(head, rows)
