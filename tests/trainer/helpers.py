"""A module, a dataset and a trainer small enough that a test can afford a dozen fits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from opake_lightning import DPSGD, DPModule, OpakeDDP, PrivacyError
from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.dpsgd.clipping import adaptive, auto, per_group
from opake_lightning.optimizers import adamw
from opake_lightning.plan import Plan
from opake_lightning.random import key
from opake_lightning.scheduling import linear_schedule
from opake_lightning.serialization import state_dict
from opake_lightning.trainer._record import RunRecord

N_EXAMPLES = 24
BATCH_SIZE = 6
N_FEATURES = 5
N_CLASSES = 3


# Every way to clip that is not a number; the count's noise is made for batches of six.
CLIPPING: dict[str, Any] = {
    "groups": per_group({"net.0": 0.5, "net.3": 1.0}),
    "adaptive": adaptive(count_noise_stddev=2.0),
    "adaptive_groups": adaptive(
        per_group({"net.0.weight": 0.5}, default=1.0), count_noise_stddev=2.0
    ),
    "auto": auto(),
    "clipping_schedule": linear_schedule(1.0, 0.2, transition_steps=6),
}


class Points(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Examples (x, y, index): the index tells a test who was drawn."""

    def __init__(self, n: int = N_EXAMPLES, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, N_FEATURES, generator=draw)
        self.y = torch.randint(N_CLASSES, (n,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[index], self.y[index], torch.tensor(index)


def plan(**changes: Any) -> DPSGD:
    """The usual plan: σ = 1, C = 1, δ = 1e-5, key(7)."""
    usual = {"clipping_norm": 1.0, "noise_multiplier": 1.0, "target_delta": 1e-5, "key": key(7)}
    kwargs = {**usual, **changes}
    if kwargs.get("target_epsilon") is not None and "noise_multiplier" not in changes:
        del kwargs["noise_multiplier"]
    return DPSGD(**kwargs)


class Net(DPModule):
    """A linear layer, a dropout layer (off by default) and another linear layer."""

    def __init__(
        self,
        privacy: Plan | None = None,
        optimizer: Callable[[], Any] | None = None,
        dropout: float = 0.0,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.privacy = plan() if privacy is None else privacy
        self.optimizer = optimizer or partial(adamw, lr=0.05)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(N_FEATURES, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, N_CLASSES)
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def per_example_loss(self, batch: Any) -> Tensor:
        x, y, *_ = batch
        return F.cross_entropy(self(x), y, reduction="none")

    def configure_privacy(self) -> Plan:
        return self.privacy

    def configure_optimizers(self) -> Any:
        return self.optimizer()


class Validated(Net):
    """The same, with a validation loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.per_example_loss(batch).mean(), sync_dist=True)


def make_loader(dataset: Any = None, batch_size: int = BATCH_SIZE, **kwargs: Any) -> DataLoader:
    """A shuffling DataLoader over ``Points()``."""
    kwargs.setdefault("shuffle", True)
    return DataLoader(Points() if dataset is None else dataset, batch_size=batch_size, **kwargs)


def make_trainer(path: Path, **kwargs: Any) -> pl.Trainer:
    """A quiet CPU trainer under ``path``, without logger and checkpoints unless asked for."""
    return pl.Trainer(
        **{
            "default_root_dir": path,
            "accelerator": "cpu",
            "devices": 1,
            "strategy": OpakeDDP(),
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": any(
                isinstance(c, pl.callbacks.Checkpoint) for c in kwargs.get("callbacks", ())
            ),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **kwargs,
        }
    )


def run_fit(
    net: Any, path: Path, *callbacks: Any, ckpt: Any = None, loader: Any = None, **trainer: Any
) -> pl.Trainer:
    """Fit ``net`` under ``path``, from ``ckpt`` on if there is one; the trainer."""
    fitter = make_trainer(path, callbacks=list(callbacks), **trainer)
    fitter.fit(net, loader or make_loader(), ckpt_path=ckpt)
    return fitter


def saver(path: Path, every: int = 3, **kwargs: Any) -> ModelCheckpoint:
    """Saves every few steps, and keeps all of it."""
    kwargs = {"save_top_k": -1, "filename": "{step}", "every_n_train_steps": every, **kwargs}
    return ModelCheckpoint(path, **kwargs)


class Draws(pl.Callback):
    """Records, for every step, the step's number and the indices that it drew."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        index = batch["index"] if isinstance(batch, dict) else batch[2]
        self.seen[trainer.global_step] = index.tolist()


def seed_globals(seed: int) -> None:
    """Put the three global generators where another process would have them."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def snapshot(net: Net, trainer: pl.Trainer) -> dict[str, Any]:
    """All that a resumed run must share with an uninterrupted one, in one flat dict."""
    run = net._dp
    assert run is not None
    assert run.state is not None
    spent = net.privacy_spent()
    params = {f"params/{name}": p.detach().clone() for name, p in net.named_parameters()}
    return {
        **params,
        **state_dict(run.state, keys=False),
        "key": run.state.noise.key.hex(),
        "ledger": run.record.ledger.to_dict(),
        "epsilon": spent.epsilon,
        "n_steps": spent.n_steps,
        "plan": spent.plan,
        "global_step": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Both snapshots are equal, bit for bit; names what is not."""
    assert a.keys() == b.keys()
    differ = [
        name
        for name in a
        if not (
            torch.equal(a[name], b[name])
            if isinstance(a[name], torch.Tensor)
            else a[name] == b[name]
        )
    ]
    assert not differ, f"these differ: {differ}"


def epsilon_after(steps):
    event = GaussianEvent(1.0, BATCH_SIZE / N_EXAMPLES)
    return Ledger().spend(event, steps).epsilon(1e-5)


def fit(path, module=None, *, val=False, **kwargs):
    """Fit, and return the trainer and the module."""
    module = Net() if module is None else module
    trainer = make_trainer(path, **kwargs)
    trainer.fit(module, make_loader(), DataLoader(Points(), 8) if val else None)
    return trainer, module


def refused(path, match, module=None, loader=None, spent=0, **trainer):
    """A fit that must be refused with ``match``, before the step after the first ``spent``."""
    module = Net() if module is None else module
    seed_globals(0)
    fitter = make_trainer(path, **trainer)
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    with pytest.raises(PrivacyError, match=match):
        fitter.fit(module, make_loader() if loader is None else loader)
    assert module.privacy_spent().n_steps == fitter.global_step == spent
    if not spent:
        assert all(torch.equal(value, before[n]) for n, value in module.named_parameters())
    return module


def accepted(path, module=None, loader=None, steps=4, **trainer):
    """A fit of one epoch that must go well and make ``steps``; the module."""
    module = Net() if module is None else module
    fitter = make_trainer(path, **{"max_epochs": 1, **trainer})
    fitter.fit(module, make_loader() if loader is None else loader)
    assert module.privacy_spent().n_steps == steps
    return module


def made(module: Any) -> list[int]:
    """How many steps are known of each segment of the module's run."""
    return [segment.n_steps for segment in module._dp.record.released.values()]


@contextmanager
def on_plans_key() -> Iterator[None]:
    """Let a named key be that of the first fit, whatever its inputs."""
    opened = RunRecord.opened

    def as_named(self: RunRecord, word: str, nonce: str, inputs: str) -> RunRecord:
        del inputs
        if self.path or nonce:
            return opened(self, word, nonce, "")
        return replace(self, path=("named",), begun=0, step=0)

    with mock.patch.object(RunRecord, "opened", as_named):
        yield
