"""The program that the project promises, as a user would type it."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

PROGRAM = """
import lightning as L
from torch import nn
from torch.nn import functional as F
from opake_lightning import DPModule, DPSGD, OpakeDDP
from opake_lightning.optimizers import adamw

class Classifier(DPModule):                      # DPMixin + LightningModule; `class P(DPMixin, Existing)` works too
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def per_example_loss(self, batch):           # one loss per example: Tensor[B], or (Tensor[B], dict of per-example aux)
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="none")

    def configure_privacy(self):
        return DPSGD(clipping_norm=1.0, target_epsilon=3.0, target_delta=1e-5)

    def configure_optimizers(self):              # any functional GradientTransformation, ours or TorchOpt's
        return adamw(lr=1e-3, weight_decay=0.01)

trainer = L.Trainer(strategy=OpakeDDP(), max_epochs=20)
trainer.fit(Classifier(), DataLoader(train_set, batch_size=256, shuffle=True), val_loader)
"""  # noqa: E501 - as documented
RESUME = """
trainer.fit(Classifier(), loader, ckpt_path="last.ckpt")     # continues bit for bit
"""


@pytest.fixture
def names():
    """What stands around the program: the data."""
    x, y = load_digits(return_X_y=True)
    digits = TensorDataset(
        torch.tensor(x, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(y)
    )
    train_set, val_set = random_split(digits, [1400, 397])
    return {
        "__name__": "program",
        "DataLoader": DataLoader,
        "train_set": train_set,
        "val_loader": DataLoader(val_set, batch_size=397),
    }


# The program's own choice: a validation loader, and no validation_step.
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no:UserWarning")
def test_the_program_runs_as_written(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(PROGRAM, names)
    trainer = names["trainer"]
    module = trainer.lightning_module
    spent = module.privacy_spent()
    assert spent.n_steps == trainer.global_step == 20 * 6
    assert 2.97 < spent.epsilon <= 3.0
    assert (spent.delta, spent.plan["batch_size"]) == (1e-5, 256)
    x, y = (torch.stack(each) for each in zip(*names["val_loader"].dataset, strict=True))
    with torch.no_grad():
        assert (module.net.to("cpu")(x).argmax(1) == y).float().mean() > 0.5  # chance is 0.1


@pytest.mark.parametrize("again", ["the same trainer", "a new trainer"])
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no:UserWarning")
def test_its_last_line_continues_bit_for_bit(again, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    names["saver"] = saver
    line = "L.Trainer(strategy=OpakeDDP(), max_epochs=2, callbacks=[saver], logger=False)"
    program = PROGRAM.replace("L.Trainer(strategy=OpakeDDP(), max_epochs=20)", line)
    assert line in program
    exec(program, names)
    whole = names["trainer"].lightning_module

    (tmp_path / "epoch=0.ckpt").rename("last.ckpt")
    names["loader"] = DataLoader(names["train_set"], batch_size=256, shuffle=True)
    exec(RESUME if again == "the same trainer" else f"trainer = {line}{RESUME}", names)
    resumed = names["trainer"].lightning_module
    assert resumed is not whole
    assert resumed.privacy_spent() == whole.privacy_spent()
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
