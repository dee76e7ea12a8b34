"""What ``Trainer.fit`` adds to the step that it runs; for ``step.py``."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from models import MODELS
from peers import CLIP, LR, NOISE, private_step
from torch import Tensor
from torch.utils.data import TensorDataset
from typing_extensions import override

from opake_lightning import DPSGD, DPModule
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


def overhead(steps: int) -> tuple[list[float], list[float]]:
    """Seconds that each step took under ``fit`` and in the bare loop; the first few left out."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    data = TensorDataset(*MODEL.batch(N_EXAMPLES))
    turns = _Turns(_bare_loop(data))
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, callbacks=[turns],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(Module(), PoissonLoader(data, SIZE))
    # The n-th of a fit is timed from the end of the one before, so there is one less of them.
    return turns.fit[WARM_UP:], turns.loop[WARM_UP + 1 :]
