"""A small private run in processes that are forked, watched and killed; for ``faults.py``."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optree
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from opake_lightning import DPFTRL, DPSGD, CheckpointError, DPModule, OpakeDDP
from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.dpftrl.noise import band_mf_strategy
from opake_lightning.optimizers import adamw
from opake_lightning.random import key
from opake_lightning.trainer._checkpoint_io import check_seal
from opake_lightning.trainer._run import Run

__all__ = [
    "N_STEPS",
    "SAVE_EVERY",
    "Life",
    "Outcome",
    "Seen",
    "best_checkpoint",
    "outcome",
    "seen",
    "warm_up",
]

N_EXAMPLES, BATCH_SIZE, EPOCHS, SAVE_EVERY = 120, 6, 3, 7
N_STEPS = EPOCHS * N_EXAMPLES // BATCH_SIZE
_EVENT = GaussianEvent(1.0, BATCH_SIZE / N_EXAMPLES)
_BANDS = band_mf_strategy(4)


class Net(DPModule):
    """Two layers, with dropout, so that a wrong random number would show."""

    def __init__(self, clipping_norm: float = 1.0, *, correlated: bool = False) -> None:
        super().__init__()
        self.clipping_norm, self.correlated = clipping_norm, correlated
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

    def per_example_loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="none")

    def configure_privacy(self) -> DPSGD | DPFTRL:
        options: dict[str, Any] = {
            "clipping_norm": self.clipping_norm,
            "noise_multiplier": 1.0,
            "key": key(7),
            "on_changed_plan": "refuse" if self.clipping_norm == 1.0 else "fork",
        }
        return DPFTRL(strategy=_BANDS, **options) if self.correlated else DPSGD(**options)

    def configure_optimizers(self) -> Any:
        return adamw(0.05)


@dataclass
class Life:
    """One process of each rank, from its start to its end.

    Attributes:
        folder: Checkpoints.
        notes: What the observer writes; ``folder`` by default.
        ranks: 1 or 2.
        clipping_norm: Other than 1.0 it is another plan, which forks.
        correlated: Whether noise is correlated over steps, as in DP-FTRL.
        spoil: Called in the process before the fit, to prepare a fault.
    """

    folder: Path
    ranks: int = 1
    clipping_norm: float = 1.0
    correlated: bool = False
    spoil: Callable[[int], None] | None = None
    notes: Path | None = None
    _children: list[int] = field(default_factory=list)

    @property
    def _notes(self) -> Path:
        return self.notes or self.folder

    def start(self) -> None:
        """Fork the processes; they resume from the last good checkpoint."""
        ckpt = best_checkpoint(self.folder)
        port = _free_port()
        for rank in range(self.ranks):
            child = os.fork()
            if child == 0:
                self._live(rank, port, ckpt)
            self._children.append(child)

    def end_after(self, seconds: float, victims: list[int] | None = None) -> bool:
        """Kill after ``seconds``; whether the processes had come to their end before.

        Args:
            seconds: From now.
            victims: Ranks that are killed at that instant; the others go soon after. Default: all.
        """
        until = time.monotonic() + seconds
        left = list(self._children)
        while left and time.monotonic() < until:
            left = [child for child in left if not _ended(child)]
            time.sleep(0.0005)
        first = self._children if victims is None else [self._children[rank] for rank in victims]
        for child in set(first) & set(left):
            os.kill(child, signal.SIGKILL)
        if left and victims is not None:
            time.sleep(0.05)
        # Nobody but this process waits for them, so they are there, if only as what they were.
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._children.clear()
        return not left

    def wait(self, limit: float = 120.0) -> None:
        """Let it come to its end, and raise if it does not."""
        if not self.end_after(limit):
            raise TimeoutError(f"{self.folder}: no end after {limit} seconds")

    def _live(self, rank: int, port: int, ckpt: Path | None) -> None:
        code = 1
        try:
            with (self._notes / f"log-{rank}.txt").open("w") as log:
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)
                if self.ranks > 1:
                    os.environ.update(_torchrun(rank, self.ranks, port))
                if self.spoil is not None:
                    self.spoil(rank)
                self._fit(rank, ckpt)
            code = 0
        except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
            (self._notes / f"error-{rank}.txt").write_text(traceback.format_exc())
        finally:
            os._exit(code)

    def _fit(self, rank: int, ckpt: Path | None) -> None:
        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(
            torch.randn(N_EXAMPLES, 5, generator=draw),
            torch.randint(3, (N_EXAMPLES,), generator=draw),
        )
        observe(self._notes, rank)
        save = ModelCheckpoint(
            self.folder, filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=2,
            monitor="step", mode="max", save_last=True, enable_version_counter=False,
        )  # fmt: skip
        net = Net(self.clipping_norm, correlated=self.correlated)
        trainer = pl.Trainer(
            strategy=OpakeDDP(), accelerator="cpu", devices=self.ranks, max_epochs=EPOCHS,
            callbacks=[save, Resumed(self._notes)], default_root_dir=self.folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=10**6,
        )  # fmt: skip
        trainer.fit(net, DataLoader(data, BATCH_SIZE, shuffle=True), ckpt_path=ckpt)
        if rank == 0:
            _append(self._notes / "end", _end_of(net))


class Resumed(pl.Callback):
    """Writes down what the run says it has spent, before its first step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            _append(self._folder / "told", {"ledger": pl_module._dp.record.ledger.n_steps})


def observe(folder: Path, rank: int) -> None:
    """Append a line to a file at every release, before anything else is done with it."""
    original, path = Run.release, folder / f"released-{rank}"

    def release(self: Run, batch: Any, noted: Any = None) -> tuple[Any, Any]:
        released, aux = original(self, batch, noted)
        digest = hashlib.sha256()
        for leaf in optree.tree_leaves(released.pytree):
            digest.update(leaf.numpy().tobytes())
        _append(path, [self.state.step - 1, digest.hexdigest()])
        return released, aux

    Run.release = release


@dataclass(frozen=True)
class Seen:
    """What the observer saw.

    Attributes:
        releases: Different releases, of any rank: (step, digest).
        told: What the run said it had spent when it was resumed last; None if it did not get there.
    """

    releases: frozenset[tuple[int, str]]
    told: int | None

    @property
    def steps(self) -> int:
        """How many different steps were released."""
        return len({step for step, _ in self.releases})


def seen(folder: Path) -> Seen:
    """What has been observed in ``folder``; forgets what was told, so that it is told once."""
    releases = {
        (step, digest)
        for path in folder.glob("released-*")
        for step, digest in _lines(path)
    }  # fmt: skip
    told = _lines(folder / "told")
    (folder / "told").unlink(missing_ok=True)
    return Seen(frozenset(releases), told[-1]["ledger"] if told else None)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: a digest of everything that training goes on from, and the ledger."""

    weights: str
    ledger: int
    epsilon: float


def outcome(folder: Path) -> Outcome:
    """What the process that came to its end wrote."""
    lines = _lines(folder / "end")
    if not lines:
        errors = "\n".join(path.read_text() for path in folder.glob("error-*.txt"))
        raise RuntimeError(f"{folder}: the run did not come to its end\n{errors}")
    return Outcome(**lines[-1])


def best_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in ``folder`` that is whole; raises if one is not."""
    files = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in files:
        if not check_seal(path):
            raise CheckpointError(f"{path} has no seal")
    return files[0] if files else None


def warm_up() -> None:
    """What every process would otherwise do anew: forked ones find it done."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for n in range(2 * N_STEPS):
        Ledger().spend(_EVENT, n).epsilon_bound(1e-5)
    for n in range(SAVE_EVERY * (N_STEPS // SAVE_EVERY) - 1, N_STEPS + 1):
        Ledger().spend(_EVENT, n).epsilon(1e-5)


def _end_of(net: Any) -> dict[str, Any]:
    from opake_lightning.serialization import state_dict

    digest = hashlib.sha256()
    flat = {
        **state_dict(net._dp.state, keys=False),
        **{n: p.detach() for n, p in net.named_parameters()},
    }
    for name, value in flat.items():
        content = value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        digest.update(name.encode() + content)
    spent = net.privacy_spent()
    return {"weights": digest.hexdigest(), "ledger": spent.n_steps, "epsilon": spent.epsilon}


def _append(path: Path, value: Any) -> None:
    # One write, which a signal cannot tear.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, json.dumps(value).encode() + b"\n")
    os.close(descriptor)


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] == child


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to one of its processes."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "faults", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
