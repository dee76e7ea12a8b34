"""The fits that one and two processes must agree on; torchrun runs this file as a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opake_lightning.optimizers import adamw, sgd
from opake_lightning.trainer._diagnostics import total
from tests.trainer.helpers import CLIPPING, Draws, Net, Points, make_loader, make_trainer, plan

SIGMA, BATCH_SIZE = 2.0, 10


class Silent(Net):
    """Its loss does not depend on its parameters, so an update is noise and nothing else."""

    def __init__(self) -> None:
        super().__init__(plan(noise_multiplier=SIGMA), lambda: sgd(1.0))
        self.net = nn.Linear(100, 100, bias=False)
        nn.init.zeros_(self.net.weight)

    def per_example_loss(self, batch: Any) -> Tensor:
        return batch[0].sum(1) + 0.0 * self.net.weight.sum()


class Moves(pl.Callback):
    """Records what every step adds to the parameters."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self._before = nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        after = nn.utils.parameters_to_vector(pl_module.parameters()).detach()
        self.seen.append(after - self._before)


class Logged(Net):
    """Logs what carries no noise."""

    log_not_private = True


class Validated(Net):
    """Logs the validation loss, and what carries no noise."""

    log_not_private = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.per_example_loss(batch).mean(), sync_dist=True)


def exact(seed: int = 1) -> Net:
    """A run without noise; each rank starts from other weights, and rank 0's must win."""
    return Validated(plan(noise_multiplier=0.0), lambda: adamw(0.05), seed=seed)


def learned(net: pl.LightningModule) -> Tensor:
    """All parameters in one vector."""
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def fits(out: Path, devices: int, rank: int = 0, **how: Any) -> dict[str, Any]:
    """A few short fits, and what a test wants to know of them."""
    kwargs = {"strategy": "opake_ddp", "devices": devices, "num_sanity_val_steps": 0, **how}
    net, draws = exact(seed=1 + rank), Draws()
    trainer = make_trainer(out, callbacks=[draws], max_steps=16, max_epochs=-1, **kwargs)
    trainer.fit(net, make_loader(batch_size=2), DataLoader(Points(), 4))
    result = {
        "exact": learned(net),
        "draws": draws.seen,
        "global_step": trainer.global_step,
        "metrics": trainer.callback_metrics,
        "total": total(3 + rank),
    }

    quiet, moves = Silent(), Moves()
    make_trainer(out, callbacks=[moves], max_steps=4, max_epochs=-1, **kwargs).fit(
        quiet, make_loader(batch_size=BATCH_SIZE)
    )
    result["moves"] = torch.stack(moves.seen)

    # Each by itself: how a part of a draw is clipped, and what the ranks count together.
    for name, clipping in CLIPPING.items():
        clipped = Net(plan(clipping_norm=clipping), lambda: adamw(0.05), seed=1 + rank)
        make_trainer(out, max_epochs=1, **kwargs).fit(clipped, make_loader())
        norms = clipped._dp.state.clip.clipping_norms if "adaptive" in name else ()
        result[name] = {"weights": learned(clipped), "norms": torch.tensor(norms)}

    saver = ModelCheckpoint(out, save_top_k=-1)  # "epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"
    saved = Net(plan(target_epsilon=3.0), lambda: adamw(0.05))
    make_trainer(out, callbacks=[saver], max_epochs=2, **kwargs).fit(saved, make_loader())
    spent = saved.privacy_spent()
    result["dropped"] = dropped(out / "dropped", kwargs)
    return {**result, "saved": learned(saved), "epsilon": spent.epsilon, "steps": spent.n_steps}


def dropped(out: Path, kwargs: dict[str, Any]) -> list[int]:
    """How many examples were dropped by all ranks, before and after a resume."""
    data, found = Points(), list[int]()
    data.x[::3] = float("nan")
    saver = ModelCheckpoint(out, filename="half")
    for steps in (4, 8):
        net = Logged()
        trainer = make_trainer(out, callbacks=[saver], max_steps=steps, max_epochs=-1, **kwargs)
        path = out / "half.ckpt" if steps == 8 else None
        trainer.fit(net, make_loader(data), ckpt_path=path, weights_only=True)
        found.append(int(trainer.callback_metrics["not_private/nonfinite_examples"]))
    return found


if __name__ == "__main__":
    import os

    where, me = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(fits(where, 2, me), where / f"rank{me}.pt")
