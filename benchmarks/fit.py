"""What ``Trainer.fit`` adds to the step that it runs, and what privacy adds to a fit.

    python benchmarks/fit.py              # a small module's private fit beside NonPrivate's
    python benchmarks/step.py --only fit  # Trainer.fit beside a bare loop, on model (b)

Ratios are of times taken in turns, in one process.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from machine import described
from models import MODELS
from peers import CLIP, LR, NOISE, private_step
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from opake_lightning import DPSGD, DPModule, NonPrivate
from opake_lightning.optimizers import adamw
from opake_lightning.random import key
from opake_lightning.trainer import PoissonLoader

__all__ = ["overhead"]

MODEL, SIZE, N_EXAMPLES, WARM_UP = MODELS["b"], 64, 6400, 10


class Module(DPModule):
    """Model (b), as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MODEL.make()

    def per_example_loss(self, batch: Any) -> Tensor:
        x, y = batch
        return MODEL.losses(self.net(x), y)

    def configure_privacy(self) -> DPSGD:
        return DPSGD(clipping_norm=CLIP, noise_multiplier=NOISE, key=key(7))

    def configure_optimizers(self) -> Any:
        return adamw(LR)


class Small(DPModule):
    """A perceptron for 8 × 8 digits, whose steps are short beside what a fit does around them."""

    def __init__(self, plan: DPSGD | NonPrivate) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.plan = plan

    def per_example_loss(self, batch: Any) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self.net(x), y, reduction="none")

    def configure_privacy(self) -> DPSGD | NonPrivate:
        return self.plan

    def configure_optimizers(self) -> Any:
        return adamw(LR)


class _Clock(pl.Callback):
    """Seconds from the first step to the last."""

    @override
    def on_train_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    @override
    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._start


class _Turns(pl.Callback):
    """After every step of the fit, one of a bare loop: other work disturbs both alike."""

    def __init__(self, bare: Iterator[None]) -> None:
        self._bare = bare
        self._since: float | None = None
        self.fit: list[float] = []
        self.loop: list[float] = []

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        # From the end of a step to the end of the next is all that a step of a fit takes.
        if self._since is not None:
            self.fit.append(time.perf_counter() - self._since)
        start = time.perf_counter()
        next(self._bare)
        self._since = time.perf_counter()
        self.loop.append(self._since - start)


def _bare_loop(data: TensorDataset) -> Iterator[None]:
    """The same steps on the same draws, loaded the same way."""
    torch.manual_seed(0)
    step, params, state = private_step(MODEL.make(), MODEL.losses, SIZE)
    loader = PoissonLoader(data, SIZE, key=key(7))
    while True:
        for batch in loader:
            released, _, state = step.release(params, batch, state, inplace=True)
            with torch.no_grad():
                _, state = step.update(params, released, state, inplace=True)
            yield


def _trainer(callback: pl.Callback, **limits: Any) -> pl.Trainer:
    """One that says nothing and writes nothing."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[callback], **limits,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def overhead(steps: int) -> tuple[list[float], list[float]]:
    """Seconds that each step took under ``fit`` and in the bare loop; the first few left out."""
    data = TensorDataset(*MODEL.batch(N_EXAMPLES))
    turns = _Turns(_bare_loop(data))
    trainer = _trainer(turns, max_steps=steps)
    torch.manual_seed(0)
    trainer.fit(Module(), PoissonLoader(data, SIZE))
    # The n-th of a fit is timed from the end of the one before, so there is one less of them.
    return turns.fit[WARM_UP:], turns.loop[WARM_UP + 1 :]


def small(epochs: int) -> dict[str, float]:
    """Seconds of a fit of the small module without privacy and with it."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1797,), generator=generator)
    data = TensorDataset(torch.rand(1797, 64, generator=generator), labels)
    seconds: dict[str, float] = {}
    for plan in (NonPrivate(), DPSGD(clipping_norm=CLIP, noise_multiplier=NOISE)):
        clock = _Clock()
        trainer = _trainer(clock, max_epochs=epochs)  # a strategy would set the threads anew
        plain = DataLoader(data, batch_size=SIZE, shuffle=True)
        trainer.fit(Small(plan), PoissonLoader(data, SIZE) if plan.private else plain)
        seconds[type(plan).__name__] = clock.seconds
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=10, help="of 29 steps")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    small(1)
    rounds = [small(options.epochs) for _ in range(options.rounds)]
    print(f"{described()}; a fit of {29 * options.epochs} steps, median of {len(rounds)} in turns")
    for name in rounds[0]:
        took = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each[name] / each["NonPrivate"] for each in rounds)
        print(f"  {name:<12} {1e3 * took / (29 * options.epochs):6.2f} ms a step  {ratio:5.2f} x")


if __name__ == "__main__":
    main()
