"""Train a private classifier on scikit-learn's digits, at ε = 3 and δ = 1e-4.

    python examples/digits.py            # a new secret key every time
    python examples/digits.py --key 7    # the same run every time

Prints one table and leaves a run folder with the checkpoint, the metrics and a picture.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opake_lightning import DPSGD, DPModule, OpakeDDP
from opake_lightning.optimizers import GradientTransformation, adamw
from opake_lightning.random import RngKey, key

EPSILON, DELTA = 3.0, 1e-4


class Digits(DPModule):
    """Softmax regression on 8 by 8 pixels."""

    def __init__(self, rng: RngKey | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)
        for parameter in self.net.parameters():
            nn.init.zeros_(parameter)
        self.rng = rng

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def per_example_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="none")

    def configure_privacy(self) -> DPSGD:
        return DPSGD(clipping_norm=1.0, target_epsilon=EPSILON, target_delta=DELTA, key=self.rng)

    def configure_optimizers(self) -> GradientTransformation:
        return adamw(lr=0.03, weight_decay=0.0)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_accuracy("val/accuracy", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_accuracy("test/accuracy", batch)

    def _log_accuracy(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        accuracy = (self(x).argmax(1) == y).float().mean()
        self.log(name, accuracy, on_epoch=True, batch_size=len(y), sync_dist=True)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on and 360 to test on, pixels in [0, 1]."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=360, stratify=y, random_state=0)
    x_train, x_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    y_train, y_test = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def picture(metrics: Path, out: Path) -> None:
    """Accuracy and ε over steps, side by side on one time axis."""
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    right = left.twinx()
    for axis, name, colour in (
        (left, "val/accuracy", "tab:blue"),
        (right, "privacy/epsilon", "tab:red"),
    ):
        points = [(int(r["step"]) + 1, float(r[name])) for r in rows if r.get(name)]
        axis.plot(*zip(*points, strict=True), color=colour, marker=".")
        axis.tick_params(axis="y", colors=colour)
    left.set(xlabel="step", ylim=(0, 1), title=f"Digits, private to ε = {EPSILON:g}, δ = {DELTA:g}")
    left.set_ylabel("accuracy on held-out digits", color="tab:blue")
    right.set_ylabel("ε spent", color="tab:red")
    right.set_ylim(0, EPSILON * 1.05)
    left.grid(alpha=0.3)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def train(
    model: Digits, *, epochs: int, batch_size: int, shuffle: bool = True, **options: Any
) -> dict[str, str]:
    """Train and test; what it came to, as cells of a table. ``options`` are the trainer's."""
    train_set, test_set = digits()
    trainer = L.Trainer(
        strategy=OpakeDDP(),
        accelerator="cpu",
        max_epochs=epochs,
        enable_model_summary=False,
        **options,
    )
    start = time.perf_counter()
    trainer.fit(
        model,
        DataLoader(train_set, batch_size=batch_size, shuffle=shuffle),
        DataLoader(test_set, batch_size=360),
    )
    seconds = time.perf_counter() - start
    [result] = trainer.test(model, DataLoader(test_set, batch_size=360), verbose=False)
    spent = model.privacy_spent()
    return {
        "test accuracy": f"{result['test/accuracy']:.3f}",
        "ε": f"{spent.epsilon:.4f}",
        "δ": f"{spent.delta:g}",
        "σ": f"{spent.plan['noise_multiplier']:.4f}",
        "steps": f"{spent.n_steps}",
        "seconds": f"{seconds:.1f}",
    }


def show(title: str, cells: dict[str, str]) -> None:
    """Print a table of one row."""
    table = Table(title=title)
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    Console().print(table)


def main() -> None:
    """Train, test, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--key", type=int, help="a number that makes the run reproducible")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256, help="expected batch size")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of run folders")
    args = parser.parse_args()

    logger = CSVLogger(args.out, name="digits")
    folder = Path(logger.log_dir)
    cells = train(
        Digits(None if args.key is None else key(args.key)),
        epochs=args.epochs,
        batch_size=args.batch_size,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(folder, filename="digits")],
    )
    picture(folder / "metrics.csv", folder / "digits.png")
    show("Digits, trained privately", cells)
    Console().print(f"checkpoint, metrics and picture are in {folder}", highlight=False)


if __name__ == "__main__":
    main()
