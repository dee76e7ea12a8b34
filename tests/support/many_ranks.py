"""Fits on one to four ranks, forked by a process that has done nothing else; run as a script.

    many_ranks.py FOLDER same       # the same run on 1 to 4 ranks, and resumed on other numbers
    many_ranks.py FOLDER fail       # one of the ranks fails, in one way after the other

What each rank found is in FOLDER, by the name of the fit and the rank.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from opake_lightning import OpakeDDP, PoissonLoader
from opake_lightning.distributed import leave_group
from opake_lightning.optimizers import adamw, sgd
from tests.trainer.cases_dpftrl import mf_plan
from tests.trainer.helpers import Draws, Net, Points, make_loader, make_trainer, plan

STEPS, HALF = 8, 4
SIGMA, BATCH_SIZE = 2.0, 2  # of 24 examples: on 4 ranks most shares are empty
RESUMED = ((1, 2), (2, 1), (2, 3), (3, 4), (4, 2), (1, 4))
WAYS = (
    *("raise", "exit", "kill", "save", "on_exception", "in_shares", "interrupt"),
    *("stale", "twice", "term", "detach", "data", "momentum", "logs"),
)
NOISES = 200  # by 200 parameters in the module whose update is noise alone


class Silent(Net):
    """Its loss does not depend on its parameters, so an update is noise and nothing else."""

    def __init__(self) -> None:
        super().__init__(plan(noise_multiplier=SIGMA), lambda: sgd(1.0))
        self.net = nn.Linear(NOISES, NOISES, bias=False)
        nn.init.zeros_(self.net.weight)

    def per_example_loss(self, batch: Any) -> Tensor:
        return batch[0].sum(1) + 0.0 * self.net.weight.sum()


class Counted:
    """How often torch.distributed.all_reduce was called, and with how many elements."""

    def __enter__(self) -> list[int]:
        self.sizes: list[int] = []
        self.original = dist.all_reduce
        dist.all_reduce = self.count
        return self.sizes

    def count(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(tensor.numel())
        return self.original(tensor, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self.original


def learned(net: pl.LightningModule) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def in_ranks(world_size: int, work: Callable[[int], Any], out: Path, name: str) -> None:
    """``work(rank)`` in processes that a launcher outside of Lightning might have started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ |= {
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        torch.save(work(rank), out / f"{name}-{rank}.pt")
        leave_group()
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def trainer_for(out: Path, world_size: int, **kwargs: Any) -> pl.Trainer:
    kwargs = {"max_steps": STEPS, "max_epochs": -1, **kwargs}
    return make_trainer(out, strategy=OpakeDDP(), devices=world_size, **kwargs)


# -- the same run ---------------------------------------------------------------------------------


def fits(out: Path, world_size: int, rank: int) -> dict[str, Any]:
    """Without noise; noise alone; and with checkpoints on the way."""
    result = {}
    for name, sigma in (("exact", 0.0), ("noisy", 1.0)):
        draws = Draws()
        # Each rank starts from other weights, and rank 0's must win.
        net = Net(plan(noise_multiplier=sigma), lambda: adamw(0.05), seed=1 + rank)
        saver = ModelCheckpoint(out / f"{name}{world_size}", every_n_train_steps=HALF)
        trainer = trainer_for(out, world_size, callbacks=[draws, saver], max_steps=HALF)
        trainer.fit(net, make_loader(batch_size=BATCH_SIZE))
        first = draws.seen
        rest = trainer_for(out, world_size, callbacks=[draws := Draws()])
        rest.fit(net, make_loader(batch_size=BATCH_SIZE), ckpt_path=saver.best_model_path)
        result[name] = learned(net)
        result[f"{name} draws"] = {**first, **draws.seen}
    silent = Silent()
    with Counted() as sizes:
        trainer_for(out, world_size, max_steps=3).fit(silent, make_loader(batch_size=BATCH_SIZE))
    return {**result, "noise": learned(silent), "sums": sizes}


def resumed(out: Path, before: int, world_size: int) -> dict[str, Any]:
    """The second half of a run whose first half was made by ``before`` ranks."""
    net, draws = Net(plan(noise_multiplier=1.0), lambda: adamw(0.05), seed=9), Draws()
    checkpoint = next((out / f"half of {before} to {world_size}").glob("*.ckpt"))
    trainer_for(out, world_size, callbacks=[draws]).fit(
        net, make_loader(batch_size=BATCH_SIZE), ckpt_path=checkpoint, weights_only=True
    )
    spent = net.privacy_spent()
    return {"noisy": learned(net), "draws": draws.seen, "spent": (spent.n_steps, spent.epsilon)}


# -- one of them fails ----------------------------------------------------------------------------


class At(pl.Callback):
    """Does something on one rank, before step 3."""

    def __init__(self, rank: int, do: Callable[[], object]) -> None:
        self.rank, self.do = rank, do

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == self.rank:
            self.do()


class Failing(Net):
    """Its loss raises on one rank, at step 3."""

    at = 1

    def per_example_loss(self, batch: Any) -> Tensor:
        if self.trainer.global_step == 3 and self.trainer.global_rank == self.at:
            raise ValueError("the loss of the user")
        return super().per_example_loss(batch)


class Detaching(Failing):
    """Its losses have no gradient, on one rank."""

    def per_example_loss(self, batch: Any) -> Tensor:
        losses = Net.per_example_loss(self, batch)
        return losses.detach() if self.trainer.global_rank == self.at else losses


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def no_room() -> None:
    """From here on this process can write no file that is longer than 100 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


def room_again() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def fail(out: Path, way: str, world_size: int, at: int, rank: int) -> dict[str, Any]:
    """One rank fails; what this one raises, how soon, and whether it can go on by itself."""
    net, callbacks, checkpoint = Net(), [], None
    if way in ("raise", "on_exception", "twice", "detach"):
        net = Detaching() if way == "detach" else Failing()
        net.at = at
    if way == "in_shares":  # of noise whose past each rank remembers in part
        net = Failing(mf_plan())
        net.at = at
    if way in ("on_exception", "in_shares"):
        callbacks = [OnExceptionCheckpoint(out, f"{way}{rank}")]
    if way == "save":
        callbacks = [ModelCheckpoint(out / way, every_n_train_steps=4), At(0, no_room)]
    if way == "stale":  # each rank finds another file under the same name
        checkpoint = next((out / "before").glob(f"*step={3 if rank == at else 4}.ckpt"))
    data = Points(seed=1 if way == "data" and rank == at else 0)
    if way == "momentum" and rank == at:
        net = Net(optimizer=lambda: adamw(0.05, betas=(0.8, 0.999)))
    if way == "logs":
        net.log_not_private = rank == at
    does = {
        "exit": lambda: os._exit(3),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "interrupt": interrupt,
    }
    if way == "term":  # as a scheduler does, which signals all, but not at one instant
        callbacks = [At(0, terminate), At(at, terminate)]
    if way in does:
        callbacks = [At(at, does[way])]
    began = time.monotonic()
    try:
        trainer = trainer_for(out, world_size, callbacks=callbacks)
        trainer.fit(net, make_loader(data), ckpt_path=checkpoint)
        error: BaseException | None = None
    except BaseException as raised:  # noqa: BLE001 - also KeyboardInterrupt's SystemExit
        error = raised
    room_again()
    took = time.monotonic() - began
    steps = net.privacy_spent().n_steps
    again = None
    if way == "twice":  # nobody has left the process
        net.at = -1
        try:
            trainer_for(out, world_size, max_steps=2).fit(net, make_loader())
        except RuntimeError as refusal:
            again = str(refusal)
    if way in ("raise", "save"):
        # Whoever waits for this process, and not for its word, waits a long time.
        time.sleep(4)
    kind = type(error).__name__
    saved = [file.name for file in out.glob(f"{way}{rank}*.ckpt")]
    told = {"error": f"{kind}: {error}", "saved": saved}
    return {**told, "took": took, "steps": steps, "again": again}


def unshared(rank: int) -> str:
    """Two processes of a group that each draw everything."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        trainer = make_trainer(Path(), strategy="auto", max_steps=1, max_epochs=-1)
        trainer.fit(Net(), PoissonLoader(Points(), batch_size=6))
    except ValueError as error:
        return str(error)
    return ""


def main(out: Path, what: str) -> None:
    torch.set_num_threads(1)
    if what == "same":
        for ranks in (1, 2, 3, 4):
            in_ranks(ranks, lambda rank, ranks=ranks: fits(out, ranks, rank), out, f"on{ranks}")
        for before, after in RESUMED:
            name, half = f"from{before}to{after}", out / f"half of {before} to {after}"
            # Apart from the record of its later steps, which other ranks may not make again.
            half.mkdir()
            shutil.copy(next((out / f"noisy{before}").glob("*.ckpt")), half)
            in_ranks(
                after, lambda _, before=before, after=after: resumed(out, before, after), out, name
            )
        return
    saver = ModelCheckpoint(out / "before", every_n_train_steps=1, save_top_k=-1)
    in_ranks(
        1,
        lambda _: trainer_for(out, 1, callbacks=[saver], max_steps=4).fit(Net(), make_loader()),
        out,
        "before",
    )
    for way in WAYS:
        for at in (0, 1) if way in ("raise", "kill") else (1,):
            in_ranks(
                3,
                lambda rank, way=way, at=at: fail(out, way, 3, at, rank),
                out,
                f"{way}{at}",
            )
    in_ranks(2, unshared, out, "unshared")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
