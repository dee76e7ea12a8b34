"""Faults of the process, the data and the user: each is survived, or refused with a reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from opake_lightning import CheckpointError
from opake_lightning.trainer._run import Run
from tests.trainer import helpers
from tests.trainer.helpers import (
    N_CLASSES,
    N_FEATURES,
    Draws,
    Net,
    Points,
    assert_same,
    made,
    make_loader,
    make_trainer,
    plan,
    run_fit,
    snapshot,
)

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no last"),
]


saver = partial(helpers.saver, every=2)


def check_resumed(path: Path, ckpt: Path, spent: int, make: Any = Net, **how: Any) -> None:
    """The resumed run counts ``spent`` steps at once, and ends as one that was never broken."""
    told: list[int] = []

    class Tells(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            told.append(module.privacy_spent().n_steps)

    resumed, whole = make(), make()
    end = run_fit(resumed, path, Tells(), ckpt=ckpt, **how)
    assert told == [spent]
    assert_same(snapshot(resumed, end), snapshot(whole, run_fit(whole, path / "whole")))


# -- the process ----------------------------------------------------------------------------------


class Breaks(pl.Callback):
    """Raises ``error`` inside the loss of one step."""

    def __init__(self, step: int, error: type[BaseException]) -> None:
        self.step, self.error = step, error

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:

            def broken(batch: Any) -> Any:
                raise self.error("a fault")

            module.per_example_loss = broken


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt, MemoryError])
def test_an_error_in_the_loss(error, tmp_path):
    net = Net()
    with pytest.raises((error, SystemExit)):
        run_fit(net, tmp_path, saver(tmp_path), Breaks(5, error))
    assert net.privacy_spent().n_steps == net._dp.state.step == 5
    check_resumed(tmp_path, tmp_path / "step=4.ckpt", spent=5)


def test_ctrl_c_in_the_middle_of_a_run(tmp_path):
    class Presses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        with pytest.raises(SystemExit):
            run_fit(Net(), tmp_path, saver(tmp_path), Presses(), OnExceptionCheckpoint(tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)
    check_resumed(tmp_path / "a", tmp_path / "on_exception.ckpt", spent=5)
    check_resumed(tmp_path / "b", tmp_path / "step=4.ckpt", spent=8)  # all made by the one before


@pytest.mark.parametrize("halfway", [False, True])
def test_an_error_in_the_update_is_no_place_to_save(halfway, tmp_path, monkeypatch):
    """The step is released and counted; its weights are of no step, so they are not saved."""
    apply = Run.apply

    def broken(self: Run, released: Any) -> None:
        if self.state.step == 6:
            if halfway:
                next(iter(self.params.values())).data.add_(1.0)
            raise KeyboardInterrupt
        apply(self, released)

    monkeypatch.setattr(Run, "apply", broken)
    net = Net()
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(CheckpointError, match="weights belong to no step"):
            run_fit(net, tmp_path, saver(tmp_path), OnExceptionCheckpoint(tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert net.privacy_spent().n_steps == 6
    assert not (tmp_path / "on_exception.ckpt").exists()
    check_resumed(tmp_path, tmp_path / "step=4.ckpt", spent=6)


_PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.trainer.test_faults import *

class Kills(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

path = Path(sys.argv[1])
run_fit(Net(), path, saver(path), Kills())
"""


@pytest.mark.slow
def test_sigkill(tmp_path):
    child = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, check=False
    )
    assert child.returncode == -signal.SIGKILL
    check_resumed(tmp_path, tmp_path / "step=4.ckpt", spent=5)


@pytest.mark.slow
@pytest.mark.dist
def test_ten_kills_at_random_instants():
    """The quick form of the command that makes the table in the documentation."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--quick"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 under-counts" in done.stdout


# -- the data -------------------------------------------------------------------------------------


class Deadly(Points):
    """Ends the worker process that fetches its 20th example."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = 0

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        if self.fetched == 20 and torch.utils.data.get_worker_info() is not None:
            os._exit(1)
        return super().__getitem__(index)


def test_a_worker_that_dies(tmp_path):
    with pytest.raises(RuntimeError, match=r"worker .* exited unexpectedly"):
        run_fit(
            net := Net(),
            tmp_path,
            saver(tmp_path, every_n_train_steps=1),
            loader=make_loader(Deadly(), num_workers=1, prefetch_factor=1),
        )
    # torch raises it wherever the process happens to be, in the middle of a step too.
    last = max(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    check_resumed(tmp_path, last, spent=net.privacy_spent().n_steps)


class Raises(Points):
    """Cannot read one example, which is not among those that are compared."""

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise OSError("an example that cannot be read")
        return super().__getitem__(index)


@pytest.mark.usefixtures("same_noise")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_example_that_cannot_be_read(workers, tmp_path):
    """It is an error, and no example is left out: that would be a step of another batch."""
    net, draws = Net(), Draws()
    with pytest.raises(OSError, match="cannot be read"):
        run_fit(net, tmp_path, draws, saver(tmp_path, every_n_train_steps=1),
            loader=make_loader(Raises(), num_workers=workers))  # fmt: skip
    steps = net.privacy_spent().n_steps
    assert len(draws.seen) == steps
    if steps:
        check_resumed(tmp_path, tmp_path / f"step={steps}.ckpt", spent=steps)


class Slow(Points):
    """Takes its time, a different one for every example."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002 * (index % 7))
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_loader_changes_nothing(workers, tmp_path):
    slow, quick = Net(), Net()
    loader = make_loader(Slow(), num_workers=workers)
    a = run_fit(slow, tmp_path, loader=loader, max_epochs=1)
    b = run_fit(quick, tmp_path, max_epochs=1)
    assert_same(snapshot(slow, a), snapshot(quick, b))


# -- other checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "match"),
    [
        (99, "version 99, this release reads version 2"),
        (1, r"version 1, this release .* that of opake_lightning 0\.1, which can go on from it"),
    ],
)
def test_another_version_is_refused(version, match, tmp_path):
    run_fit(Net(), tmp_path, saver(tmp_path))
    path = tmp_path / "step=4.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    for entry in (
        checkpoint["optimizer_states"][0]["opake_lightning"],
        checkpoint["opake_lightning"],
    ):
        entry.get("record", entry)["version"] = version
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=match):
        run_fit(Net(), tmp_path, ckpt=path)
    with pytest.raises(CheckpointError, match=match):
        Net.load_from_checkpoint(path)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.Linear(N_FEATURES, 6)
        self.net[3] = nn.Linear(6, N_CLASSES)


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Linear(N_CLASSES, N_CLASSES))


@pytest.mark.parametrize(
    ("make", "said"), [(Wider, "size mismatch for net.0.weight"), (Deeper, "net.4.weight")]
)
def test_another_model_is_refused(make, said, tmp_path):
    run_fit(Net(), tmp_path, saver(tmp_path))
    net = make()
    with pytest.raises(RuntimeError, match=said):
        run_fit(net, tmp_path, ckpt=tmp_path / "step=4.ckpt")
    assert net.privacy_spent().n_steps == 0


@pytest.mark.parametrize("missing", ["all", "one"])
def test_weights_that_a_lax_load_passes_over_are_missed(missing, tmp_path):
    """As adapters saved under other names: everything but what was trained would be restored."""

    class Lax(Net):
        strict_loading = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            for name in list(weights) if missing == "all" else ["net.0.weight"]:
                weights[f"base.{name}"] = weights.pop(name)

    run_fit(Lax(), tmp_path, saver(tmp_path))
    net = Lax()
    with pytest.raises(CheckpointError, match=r"lacks trained weights: net\.0\.weight"):
        run_fit(net, tmp_path, ckpt=tmp_path / "step=4.ckpt")
    assert net.privacy_spent().n_steps == 0


class Adapters(Net):
    """Trains its last layer, and saves only that."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {n: v for n, v in checkpoint["state_dict"].items() if n.startswith("net.3")}
        checkpoint["state_dict"] = kept


def test_adapters_alone_are_enough(tmp_path):
    run_fit(Adapters(), tmp_path, saver(tmp_path))
    resumed, whole = Adapters(), Adapters()
    end = run_fit(resumed, tmp_path, ckpt=tmp_path / "step=4.ckpt")
    assert_same(snapshot(resumed, end), snapshot(whole, run_fit(whole, tmp_path / "whole")))


class Tied(Net):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.net = nn.Identity()
            self.embedding = nn.Embedding(N_CLASSES, 4)
            self.head = nn.Linear(4, N_CLASSES, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))

    def per_example_loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[1]), batch[1].roll(0), reduction="none")


def test_tied_embeddings_resume_tied(tmp_path):
    run_fit(Tied(), tmp_path, saver(tmp_path))
    resumed, whole = Tied(), Tied()
    end = run_fit(resumed, tmp_path, ckpt=tmp_path / "step=4.ckpt")
    assert resumed.head.weight is resumed.embedding.weight
    assert_same(snapshot(resumed, end), snapshot(whole, run_fit(whole, tmp_path / "whole")))
    loaded = Tied.load_from_checkpoint(tmp_path / "step=8.ckpt")
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded.privacy_spent().n_steps == 8


class Data(pl.LightningDataModule):
    """With a state of its own, and hyperparameters, in the checkpoint."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return make_loader(Points(self.hparams["size"]))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}


def test_a_checkpoint_with_a_data_module_loads_where_there_is_none(tmp_path):
    net = Net()
    make_trainer(tmp_path, callbacks=[saver(tmp_path)]).fit(net, datamodule=Data())
    loaded = Net.load_from_checkpoint(tmp_path / "step=8.ckpt")
    assert loaded.privacy_spent() == net.privacy_spent()
    with torch.no_grad():
        torch.testing.assert_close(loaded(Points().x), net(Points().x), rtol=0, atol=0)
    assert Data.load_from_checkpoint(tmp_path / "step=8.ckpt").hparams["size"] == 24
    run_fit(Net(), tmp_path, ckpt=tmp_path / "step=4.ckpt")


def test_a_dataset_of_another_size_is_refused_after_a_kill_too(tmp_path):
    with pytest.raises(ArithmeticError):
        run_fit(Net(), tmp_path, saver(tmp_path), Breaks(5, ArithmeticError))
    with pytest.raises(CheckpointError, match="n_examples"):
        run_fit(Net(), tmp_path, ckpt=tmp_path / "step=4.ckpt", loader=make_loader(Points(30)))
    net = Net(plan(on_changed_plan="fork"))
    loader = make_loader(Points(30))
    trainer = run_fit(net, tmp_path, ckpt=tmp_path / "step=4.ckpt", loader=loader, max_epochs=3)
    counts = [count for _, count in net._dp.record.ledger.process.segments]
    assert counts == [5, trainer.global_step - 4]
    assert made(net) == counts
