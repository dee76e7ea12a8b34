"""Fits whose draws are given, and maybe their releases, so that two differ in one row only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opake_lightning import DPModule
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import sgd
from opake_lightning.step import Step
from opake_lightning.trainer._run import Run
from opake_lightning.trainer.data import PoissonLoader
from tests.losses import DRAWS, N_ROWS, rows, seed_globals
from tests.losses_that_keep import fresh
from tests.trainer.helpers import make_trainer, plan

# Rows of the dataset; those beyond the first eight are drawn by nobody.
N_EXAMPLES = 3 * N_ROWS


class Trained(DPModule):
    """Trains a loss of rows (features, labels).

    Args:
        loss: The loss; its ``epoch`` is kept up to date.
        bound: The clipping norm.
    """

    def __init__(self, loss: nn.Module | None = None, bound: float = 1.0, **parts: Any) -> None:
        super().__init__()
        self.loss = fresh(**parts) if loss is None else loss
        self.bound = bound

    def on_train_epoch_start(self) -> None:
        self.loss.epoch = self.current_epoch

    def per_example_loss(self, batch: Any) -> Tensor:
        return self.loss(*batch)

    def configure_privacy(self) -> Any:
        return plan(clipping_norm=self.bound)

    def configure_optimizers(self) -> Any:
        return sgd(lr=0.05)


class Fit:
    """A fit over given draws, an epoch having three of them.

    Args:
        module: The module to fit.
        path: Where the trainer may write.
        draws: Which rows each step gets.
        data: Features and labels; :func:`tests.losses.rows` by default.
        released: Releases of another fit, which this one gets in place of its own.
        hooks: Callbacks.
        through: Makes a data module of the loader.
        loader: For the PoissonLoader.

    Attributes:
        sums: Clipped sum of each step, before its noise.
        released: What each step released.
        refusal: Why the fit was refused, None if it went through.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        path: Path,
        draws: Sequence[Sequence[int]] = DRAWS,
        *,
        data: tuple[Tensor, Tensor] | None = None,
        released: Sequence[Any] | None = None,
        hooks: Sequence[pl.Callback] = (),
        through: Callable[[PoissonLoader], Any] = lambda loader: loader,
        **loader: Any,
    ) -> None:
        self.module, self.draws, self._forced = module, draws, released
        self.sums: list[Tensor] = []
        self.released: list[Any] = []
        self.refusal: PrivacyError | None = None
        x, y = rows() if data is None else data
        x = torch.cat([x, torch.zeros(N_EXAMPLES - len(x), x.shape[1])])
        y = torch.cat([y, torch.zeros(N_EXAMPLES - len(y), dtype=y.dtype)])
        self.loader = PoissonLoader(TensorDataset(x, y), N_ROWS, **loader)
        self.trainer = make_trainer(
            path, max_steps=len(draws), max_epochs=-1, callbacks=list(hooks)
        )
        seed_globals(0)
        with mock.patch.object(Run, "draw", self._draw), self._watched():
            try:
                self.trainer.fit(module, through(self.loader))
            except PrivacyError as refusal:
                self.refusal = refusal

    def _draw(self, key: Any, step: int, *, rank: int, world_size: int) -> Any:
        return np.array(self.draws[step % len(self.draws)], dtype=np.int64)

    def _watched(self) -> Any:
        release: Callable[..., Any] = Step.release

        def watched(
            step: Step, params: Any, batch: Any, state: Any, *, watch: Any = None, **options: Any
        ) -> Any:
            def see(grads: Any) -> None:
                # Not the average: how large the batch should be is no matter here.
                flat = torch.cat([g.flatten() for g in grads.pytree.values()])
                self.sums.append(N_ROWS * flat)
                if watch is not None:
                    watch(grads)

            released, aux, state = release(step, params, batch, state, watch=see, **options)
            if self._forced is not None and len(self.released) < len(self._forced):
                released = copy.deepcopy(self._forced[len(self.released)])
            self.released.append(copy.deepcopy(released))
            return released, aux, state

        return mock.patch.object(Step, "release", watched)
