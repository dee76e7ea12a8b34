"""One run, in as many processes as its arguments say, started in the way they say.

    launched.py FOLDER STRATEGY DEVICES NODES [WHAT-FAILS]

``STRATEGY`` is a name, or a start method that has none.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opake_lightning import OpakeDDP
from opake_lightning.optimizers import adamw
from tests.trainer.helpers import Net, make_loader, make_trainer, plan


class Failing(Net):
    """Fails on the last rank at the third step."""

    how = "nothing"

    def per_example_loss(self, batch: Any) -> Tensor:
        trainer = self.trainer
        if trainer.global_step == 3 and trainer.global_rank == trainer.world_size - 1:
            if self.how == "exit":
                os._exit(3)
            if self.how == "raise":
                raise ValueError("the loss of the user")
        return super().per_example_loss(batch)


def main(out: Path, strategy: Any, devices: int, nodes: int, how: str = "nothing") -> None:
    if not strategy.startswith("opake_ddp"):
        strategy = OpakeDDP(start_method=strategy)
    net = Failing(plan(noise_multiplier=1.0), partial(adamw, 0.05))  # spawn pickles it
    net.how = how
    trainer = make_trainer(
        out, strategy=strategy, devices=devices, num_nodes=nodes, max_steps=6, max_epochs=-1
    )
    trainer.fit(net, make_loader())
    # With a launcher that brings results back, this is the process that started the others.
    learned = nn.utils.parameters_to_vector(net.parameters()).detach()
    steps = net.privacy_spent().n_steps
    torch.save({"learned": learned, "steps": steps}, out / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(Path(arguments[0]), arguments[1], int(arguments[2]), int(arguments[3]), *arguments[4:])
