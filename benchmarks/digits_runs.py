"""Private runs on scikit-learn's digits: every optimizer, tuned, at ε = 3 and δ = 1e-4.

The learning rate of each is chosen with some keys and its accuracy measured with others. The data,
the number of steps and the batch size are those of examples/digits.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional as F

from opake_lightning.accounting import Ledger
from opake_lightning.dpsgd.clipping import clipped_grad
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.optimizers import (
    adadelta,
    adafactor,
    adagrad,
    adamw,
    ademamix,
    lion,
    radam,
    rmsprop,
    schedule_free,
    sgd,
)
from opake_lightning.plan import DPSGD, Mechanism, PrivateMechanism
from opake_lightning.random import RngKey, add_normal_, fold_in, key
from opake_lightning.step import Step

STEPS, BATCH = 180, 256
TUNING, REPORTED = (1, 2, 3), tuple(range(11, 19))
MODELS = {"softmax": (64, 10), "network": (64, 64, 10)}
Grid = tuple[float, ...]
Maker = Callable[[float], Any]


def corrected(r: float = 0.0, gamma: float = 1e-12) -> dict[str, Any]:
    """The options that switch the correction on."""
    return {"noise_bias_correction": True, "noise_floor_relative": r, "noise_floor": gamma}


# What is left of a corrected second moment: a share r of the noise's variance, or γ itself.
FLOORS: dict[str, dict[str, Any]] = {
    "no correction": {},
    "r = 1": corrected(1.0),
    "r = 0.1": corrected(0.1),
    "r = 0.01": corrected(0.01),
    "γ = 1e-6": corrected(0.0, 1e-6),
    "γ = 1e-8": corrected(0.0, 1e-8),
}


def rates(low: float, n: int = 6) -> Grid:
    """``n`` learning rates from ``low`` up, two a decade."""
    ladder = [float(f"{digit}e{exponent}") for exponent in range(-4, 3) for digit in (1, 3)]
    return tuple(ladder[ladder.index(low) :][:n])


def contestants() -> dict[str, tuple[Maker, Grid]]:
    """Every optimizer that is measured, and the learning rates it is tried with."""
    off: dict[str, Any] = {"weight_decay": 0.0}

    def family(make: Any, grid: Grid, variants: dict[str, dict[str, Any]], **more: Any) -> None:
        for name, options in variants.items():
            title = f"`{make.__name__}`" + (f", {name}" if name else "")
            entries[title] = (lambda lr, o=options: make(lr, **o, **more)), grid

    entries: dict[str, tuple[Maker, Grid]] = {}
    plain, r_tenth, r_one = {"": {}}, {"r = 0.1": corrected(0.1)}, {"r = 1": corrected(1.0)}
    gamma = {"γ = 1e-6": corrected(0.0, 1e-6)}
    floors = {"" if not o else name: o for name, o in FLOORS.items()}
    family(sgd, rates(0.03), {"momentum 0.9": {"momentum": 0.9}})
    family(adamw, rates(1e-4, 7), floors, **off)
    entries["`adamw`, private squares"] = (lambda lr: adamw(lr, **off)), rates(1e-3)
    family(radam, rates(3e-3), plain | r_tenth)
    family(ademamix, rates(1e-3), plain | r_tenth)
    family(rmsprop, rates(3e-4), plain | r_one | r_tenth | gamma)
    family(adagrad, rates(1e-3, 7), plain | r_one | r_tenth | gamma)
    family(adadelta, rates(1.0), plain | r_one)
    family(lion, rates(1e-4, 7), plain)
    family(adafactor, rates(1e-3), plain | r_tenth)
    entries["`schedule_free(sgd)`"] = (lambda lr: schedule_free(sgd(lr))), rates(0.3)
    entries["`schedule_free(adamw)`"] = (
        (lambda lr: schedule_free(adamw(lr, betas=(0.0, 0.999), **off))),
        rates(1e-3),
    )
    return entries


@cache
def digits_data() -> list[Tensor]:
    """Training and test images, training and test labels; the example's split."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=360, stratify=y, random_state=0)
    return [torch.tensor(part, dtype=torch.float32) for part in parts[:2]] + [
        torch.tensor(part) for part in parts[2:]
    ]


def scores(params: list[Tensor], x: Tensor) -> Tensor:
    """Logits of a network with tanh between its layers."""
    for i in range(0, len(params), 2):
        x = (x if i == 0 else x.tanh()) @ params[i].T + params[i + 1]
    return x


def losses(params: list[Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Loss of every example."""
    x, y = batch
    return F.cross_entropy(scores(params, x), y, reduction="none"), {}


def build_step(mechanism: Mechanism, optimizer: Any, rng: RngKey, *, pair: bool) -> Step:
    """The step of the plan, or the same with squares released along with the gradient."""
    if not pair:
        return mechanism.step(losses, optimizer, rng)
    grad_fn, clip = clipped_grad(
        losses,
        clipping_norm=1.0,
        has_aux=True,
        expected_batch_size=BATCH,
        second_moment="aggregate",
    )
    noise_fn, noise = gaussian_noise(
        noise_multiplier=mechanism.noise_multiplier, key=rng, square_share=0.1
    )
    return Step(grad_fn, noise_fn, optimizer, clip, noise)


def start(model: str, rng: RngKey) -> list[Tensor]:
    """Weights and biases before training."""
    params = []
    for i, (n, m) in enumerate(zip(MODELS[model], MODELS[model][1:], strict=False)):
        weight = torch.zeros(m * n)
        if model != "softmax":  # a convex problem starts from zero
            add_normal_(fold_in(fold_in(rng, "init"), i), weight, n**-0.5)
        params += [weight.view(m, n), torch.zeros(m)]
    return params


def run(
    mechanism: PrivateMechanism, step: Step, params: list[Tensor], rng: RngKey, n_steps: int
) -> tuple[list[Tensor], Any]:
    """Make ``n_steps`` steps: the parameters and the optimizer's state."""
    train_x, _, train_y, _ = digits_data()
    state = step.init(params)
    for t in range(n_steps):
        drawn = torch.from_numpy(mechanism.draw(rng, t))
        params, _, state = step(params, (train_x[drawn], train_y[drawn]), state, inplace=True)
    return params, state.optimizer


def accuracy(params: list[Tensor]) -> float:
    """Accuracy on the test images, in per cent."""
    _, test_x, _, test_y = digits_data()
    return 100 * float((scores(params, test_x).argmax(1) == test_y).float().mean())


def train(job: tuple[str, str, float, int]) -> float:
    """Test accuracy in per cent of one private run."""
    model, name, lr, seed = job
    plan = DPSGD(clipping_norm=1.0, target_epsilon=3.0, target_delta=1e-4)
    mechanism = plan.resolve(
        n_examples=len(digits_data()[0]), batch_size=BATCH, planned_steps=STEPS, spent=Ledger()
    )
    rng = key(seed)
    optimizer = contestants()[name][0](lr)
    step = build_step(mechanism, optimizer, rng, pair="squares" in name)
    params, state = run(mechanism, step, start(model, rng), rng, STEPS)
    return accuracy(state.x if name.startswith("`schedule_free") else params)


def measure(jobs: int) -> dict[str, Any]:
    """Tune each optimizer's learning rate on some keys, measure it on others."""
    entries = contestants()
    tuning = [
        (m, o, lr, s)
        for m in MODELS
        for o, (_, grid) in entries.items()
        for lr in grid
        for s in TUNING
    ]
    with get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        found = dict(zip(tuning, pool.imap(train, tuning), strict=True))
        result: dict[str, Any] = {m: {o: {} for o in entries} for m in MODELS}
        for m, o in [(m, o) for m in MODELS for o in entries]:
            curve = {
                lr: statistics.mean(found[m, o, lr, s] for s in TUNING) for lr in entries[o][1]
            }
            result[m][o] = {"curve": curve, "best": max(curve, key=lambda lr: curve[lr])}
        final = [(m, o, result[m][o]["best"], s) for m in MODELS for o in entries for s in REPORTED]
        for (m, o, _, _), accuracy in zip(final, pool.imap(train, final), strict=True):
            result[m][o].setdefault("final", []).append(accuracy)
    return result
