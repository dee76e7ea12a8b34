"""A checkpoint is whole or not there, and one that was changed is not loaded."""

from __future__ import annotations

import gc
import io
import os
import random
import resource
import stat
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from opake_lightning import CheckpointError, PoissonLoader
from opake_lightning.trainer import _checkpoint_io
from opake_lightning.trainer._checkpoint_io import SealedCheckpointIO, check_seal
from tests.trainer.helpers import (
    BATCH_SIZE,
    Net,
    Points,
    assert_same,
    make_loader,
    saver,
    snapshot,
)
from tests.trainer.helpers import run_fit as fit

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> bytes:
    path = tmp_path_factory.mktemp("whole")
    fit(Net(), path, saver(path), max_epochs=1)
    return (path / "step=3.ckpt").read_bytes()


# -- what is written ------------------------------------------------------------------------------


class Ours(SealedCheckpointIO):
    """One that a user derived."""


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"strategy": "auto"},
        {"strategy": "auto", "plugins": [AsyncCheckpointIO]},
        {"plugins": [AsyncCheckpointIO]},
        {"plugins": [SealedCheckpointIO]},
        {"plugins": [TorchCheckpointIO]},
        {"plugins": [Ours]},
    ],
    ids=["ddp", "single", "async", "ddp_async", "given", "lightnings", "derived"],
)
def test_every_trainer_saves_sealed(how, tmp_path):
    if "plugins" in how:
        how = {**how, "plugins": [make() for make in how["plugins"]]}
    loader = PoissonLoader(Points(), BATCH_SIZE) if how.get("strategy") else make_loader()
    trainer = fit(Net(), tmp_path, saver(tmp_path), max_epochs=1, loader=loader, **how)
    path = tmp_path / "step=3.ckpt"
    assert check_seal(path)
    assert list(tmp_path.glob(f"opake-{trainer.lightning_module._dp.journal.lineage}.*.steps"))
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it holds the key


def test_a_users_own_io_is_left_alone(tmp_path):
    saved: list[str] = []

    class Own(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            saved.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    trainer = fit(Net(), tmp_path, saver(tmp_path), max_epochs=1, plugins=[Own()])
    assert type(trainer.strategy.checkpoint_io) is Own
    assert saved == ["step=3.ckpt"]
    assert not check_seal(tmp_path / "step=3.ckpt")
    with pytest.warns(UserWarning, match="no record"):  # it tells nobody where it saves
        fit(Net(), tmp_path, ckpt=tmp_path / "step=3.ckpt")  # which loads all the same


def test_a_sealed_file_is_an_ordinary_one(checkpoint, tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(checkpoint)
    assert zipfile.ZipFile(path).testzip() is None
    loaded = torch.load(path, weights_only=True)
    assert loaded["global_step"] == 3
    torch.save(loaded, path)  # changed on purpose: there is no seal to be wrong
    assert not check_seal(path)
    with pytest.warns(UserWarning, match="no record"):
        fit(Net(), tmp_path, ckpt=path)


def test_loading_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {}, "evil": Evil()}, path)
    for load in (
        lambda: SealedCheckpointIO().load_checkpoint(path),
        lambda: fit(Net(), tmp_path, ckpt=path),
        lambda: Net.load_from_checkpoint(path),
    ):
        with pytest.raises(Exception, match=r"[Ww]eights.only"):
            load()
    assert not (tmp_path / "ran").exists()


def test_an_open_file_is_loaded_as_by_lightning(checkpoint, tmp_path):
    net = Net.load_from_checkpoint(io.BytesIO(checkpoint))
    assert net.privacy_spent().n_steps == 3
    fit(net, tmp_path, max_epochs=1)
    assert net.privacy_spent().n_steps == 3 + 4  # though nothing is beside it to look for
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        Net().load_from_checkpoint(io.BytesIO(checkpoint))


# -- what was changed -----------------------------------------------------------------------------


def _flip(content: bytes, places: list[int]) -> bytes:
    changed = bytearray(content)
    for place in places:
        changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


@pytest.mark.parametrize("bits", [1, 2, 50])
def test_flipped_bits_are_found_wherever_they_are(bits, checkpoint, tmp_path):
    rng, path = random.Random(bits), tmp_path / "a.ckpt"
    for _ in range(300):
        places = rng.sample(range(8 * len(checkpoint)), bits)
        path.write_bytes(_flip(checkpoint, places))
        with pytest.raises(CheckpointError, match="damaged"):
            check_seal(path)


def test_every_bit_of_the_end_counts(checkpoint, tmp_path):
    """The seal itself, and the archive's own record of where everything is."""
    path = tmp_path / "a.ckpt"
    for place in range(8 * (len(checkpoint) - 150), 8 * len(checkpoint)):
        path.write_bytes(_flip(checkpoint, [place]))
        with pytest.raises(CheckpointError, match="damaged"):
            SealedCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("pad", [b"", b"x", b"\0" * 5000])
def test_a_file_that_was_cut_or_went_on_is_not_loaded(pad, checkpoint, tmp_path):
    rng, path = random.Random(0), tmp_path / "a.ckpt"
    sizes = [*rng.sample(range(len(checkpoint)), 60), 0, 1, 3, 4, 5, 21, 22, 23, 108, 109, 110]
    for size in sizes:
        path.write_bytes(checkpoint[:size] + pad)
        with pytest.raises(CheckpointError):
            SealedCheckpointIO().load_checkpoint(path)


PIECES = {
    "tensor": b"net.0.weight",
    "key": b"key_digest",
    "counter": b"noise/step",
    "ledger": b"segments",
    "epochs": b"completed",
}


@pytest.mark.parametrize("piece", PIECES)
def test_nothing_is_changed_by_a_damaged_checkpoint(piece, checkpoint, tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(_flip(checkpoint, [8 * (checkpoint.index(PIECES[piece]) + 14)]))
    net = Net()
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(CheckpointError, match="damaged"):
        fit(net, tmp_path, ckpt=path)
    with pytest.raises(CheckpointError, match="damaged"):
        Net.load_from_checkpoint(path)
    torch.testing.assert_close(dict(net.named_parameters()), weights, rtol=0, atol=0)
    assert net.privacy_spent().n_steps == 0


def test_lightnings_own_files_are_loaded_and_half_of_one_is_not(checkpoint, tmp_path):
    path = tmp_path / "a.ckpt"
    TorchCheckpointIO().save_checkpoint(torch.load(io.BytesIO(checkpoint), weights_only=True), path)
    assert SealedCheckpointIO().load_checkpoint(path)["global_step"] == 3
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"cannot be read|damaged"):
        SealedCheckpointIO().load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        SealedCheckpointIO().load_checkpoint(tmp_path / "missing.ckpt")


class Stops(Callback):
    """Raises after some steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.after:
            raise RuntimeError("stop")


# -- disks ----------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """No file may grow beyond: what a full disk does to a write, for any user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_write_that_fails_leaves_the_checkpoint_before(checkpoint, tmp_path):
    path, saved = tmp_path / "a.ckpt", torch.load(io.BytesIO(checkpoint), weights_only=True)
    path.write_bytes(checkpoint)
    for limit in (0, 100, 5000, len(checkpoint) - 30):
        with (
            file_size_limit(limit),
            pytest.raises(
                CheckpointError, match=r"could not be saved: File too large; the earlier"
            ),
        ):
            SealedCheckpointIO().save_checkpoint(saved, path)
        assert path.read_bytes() == checkpoint
        assert list(tmp_path.iterdir()) == [path]
    SealedCheckpointIO().save_checkpoint(saved, path)
    assert check_seal(path)


@pytest.mark.parametrize("at", ["write", "fsync", "rename"])
def test_a_save_that_is_interrupted_leaves_the_checkpoint_before(
    at, checkpoint, tmp_path, monkeypatch
):
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    path, saved = tmp_path / "a.ckpt", torch.load(io.BytesIO(checkpoint), weights_only=True)
    path.write_bytes(checkpoint)
    where: dict[str, tuple[Any, str]] = {
        "write": (_checkpoint_io, "_write"),
        "fsync": (os, "fsync"),
        "rename": (Path, "replace"),
    }
    monkeypatch.setattr(*where[at], stop)
    with pytest.raises(KeyboardInterrupt):
        SealedCheckpointIO().save_checkpoint(saved, path)
    monkeypatch.undo()
    assert path.read_bytes() == checkpoint
    SealedCheckpointIO().save_checkpoint(saved, path)  # over what was left of it
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]


def _fill(disk: Path) -> Callable[[], None]:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1024)):
                pass
        except OSError:
            pass
    return lambda: (disk / "filler").unlink()


def _lock(disk: Path) -> Callable[[], None]:
    flags = ["mount", "-o", "remount,ro", str(disk)]
    subprocess.run(flags, check=True)
    flags[2] = "remount,rw"
    return lambda: subprocess.run(flags, check=True) and None


class Breaks(ModelCheckpoint):
    """The disk goes bad before the second save."""

    def __init__(self, disk: Path, spoil: Callable[[Path], Callable[[], None]]) -> None:
        super().__init__(disk, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        self.disk, self.spoil, self.repair = disk, spoil, lambda: None

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if trainer.global_step == 6:
            if self.spoil is _lock:  # a file that is open for writing would keep it from that
                journal = trainer.lightning_module._dp.journal
                journal.__init__(journal.lineage)
            self.repair = self.spoil(self.disk)
        super()._save_checkpoint(trainer, filepath)


@pytest.mark.parametrize(
    ("spoil", "said"), [(_fill, "No space left"), (_lock, "Read-only file system")]
)
def test_a_bad_disk_stops_the_run_and_nothing_is_lost(spoil, said, disk, tmp_path):
    net, breaks = Net(), Breaks(disk, spoil)
    try:
        with pytest.raises(CheckpointError, match=rf"step=6.ckpt could not be saved: {said}"):
            fit(net, tmp_path, breaks)
    finally:
        breaks.repair()
    assert net.privacy_spent().n_steps == net._dp.state.step == 6
    resumed = Net()
    end = fit(resumed, tmp_path, ckpt=disk / "step=3.ckpt")
    assert_same(snapshot(resumed, end), snapshot(whole := Net(), fit(whole, tmp_path / "whole")))


def test_a_full_disk_does_not_stop_the_record(disk, tmp_path):
    class Fills(ModelCheckpoint):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                _fill(disk)

    net = Net()
    save = Fills(disk, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(net, tmp_path, save, max_steps=5, max_epochs=-1)
    assert net.privacy_spent().n_steps == 5
    (disk / "filler").unlink()
    resumed = Net()
    fit(resumed, tmp_path, ckpt=disk / "step=3.ckpt", max_steps=4, max_epochs=-1)
    assert resumed.privacy_spent().n_steps == 5


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_an_archive_may_be_resumed_from(disk, tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        fit(Net(), tmp_path, saver(disk), Stops(5))
    for _ in range(2):  # what a graph holds is found when the graph is gone
        gc.collect()  # closes the record, which would keep the disk from being locked
    repair = _lock(disk)
    net = Net()
    fit(net, tmp_path / "new", saver(tmp_path / "new"), ckpt=disk / "step=3.ckpt")
    repair()
    assert net.privacy_spent().n_steps == 8
    assert list((tmp_path / "new").glob("*.steps"))
