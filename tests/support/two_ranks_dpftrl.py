"""The fits with correlated noise that one and two processes must agree on, for torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from opake_lightning.optimizers import adamw
from tests.support.two_ranks import learned
from tests.trainer.cases_dpftrl import ALL, mf_plan
from tests.trainer.helpers import Draws, Net, make_loader, make_trainer, on_plans_key


def fits(out: Path, devices: int, rank: int = 0) -> dict[str, Any]:
    """Every mechanism without noise and with it, and one that is saved half-way."""
    kwargs = {"strategy": "opake_ddp", "devices": devices}
    result: dict[str, Any] = {}
    for name, case in ALL.items():
        # With noise twice: the second fit is a second horizon.
        for sigma, draws in ((0.0, [Draws()]), (1.0, [Draws(), Draws()])):
            net = Net(mf_plan(**case, noise_multiplier=sigma), lambda: adamw(0.05), seed=1 + rank)
            for seen in draws:
                # A second fit begins from weights that have other last digits on other ranks.
                trainer = make_trainer(out, callbacks=[seen], max_epochs=1, **kwargs)
                with on_plans_key():
                    trainer.fit(net, make_loader())
            spent = net.privacy_spent()
            result[f"{name}, {sigma}"] = {
                "weights": learned(net),
                "draws": [seen.seen for seen in draws],
                "spent": (spent.epsilon, spent.n_steps),
            }
    save = ModelCheckpoint(out, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    saved = Net(mf_plan(**ALL["pair_band_mf_identity"]), lambda: adamw(0.05))
    make_trainer(out, callbacks=[save], **kwargs).fit(saved, make_loader())
    return {**result, "saved": {"weights": learned(saved)}}


if __name__ == "__main__":
    where, me = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(fits(where, 2, me), where / f"rank{me}.pt")
