"""Where Lightning 2.6 loses count of epochs and batches when a resumed run is resumed again.

It tells where a checkpoint was made by comparing counters, and some ways of starting leave them
out of step: the next checkpoint then seems to be made elsewhere, and the run that resumes it makes
a step too many. The batches and the noise are functions of the step and do not suffer, but the
number of steps is what noise is calibrated to.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

__all__ = ["count_epoch", "settle"]


def settle(checkpoint: dict[str, Any]) -> None:
    """Bring the counters in ``checkpoint`` in step with each other, as Lightning loads it.

    An exception in ``on_train_epoch_start`` leaves an epoch that is ready, but with the batches of
    the one before, so that it would be skipped. A stop in mid-epoch (a budget, ``max_steps``)
    leaves one that seems to be over, so that its other batches would be skipped. And on a restart
    Lightning takes back the current count of the batch that was cut short, but not the total.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is None:  # someone else's; Lightning starts counting anew
        return
    batches = loops["epoch_loop.batch_progress"]
    epoch = loops["epoch_progress"]["current"]
    epoch["ready"] = min(epoch["ready"], epoch["started"])
    ended = epoch["ready"] > 0 and epoch["processed"] == epoch["ready"]
    if ended and batches["current"]["ready"] > 0 and not batches["is_last_batch"]:
        epoch["processed"] = epoch["ready"] - 1
        if epoch["completed"] == epoch["ready"]:
            epoch["completed"] -= 1
            loops["epoch_progress"]["total"]["completed"] -= 1
    for name in ("epoch_progress", "epoch_loop.batch_progress"):
        total, current = loops[name]["total"], loops[name]["current"]
        for stage in ("ready", "started", "processed"):
            total[stage] = total["completed"] + current[stage] - current["completed"]


def count_epoch(trainer: pl.Trainer) -> None:
    """Let the epoch that a resumed run is about to begin be counted as begun.

    Lightning takes it for the one before, if the checkpoint was made after that one's last batch.
    """
    loop: Any = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    over = epochs.ready == epochs.processed and batches.is_last_batch
    if loop.restarted_mid_epoch and over:
        loop.reset_restart_stage()
