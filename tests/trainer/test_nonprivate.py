"""NonPrivate() is ordinary Lightning training; noise, when there is any, reaches the parameters."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opake_lightning import DPMixin, NonPrivate, OpakeDDP
from opake_lightning.optimizers import adam, adamw, sgd
from opake_lightning.random import key
from opake_lightning.scheduling import linear_schedule
from tests.trainer.helpers import Net, Points, make_loader, make_trainer, plan


class Existing(pl.LightningModule):
    """A module as people have them: nothing in it knows of privacy."""

    def __init__(self, optimizer, dropout=0.0):
        super().__init__()
        self.save_hyperparameters({"lr": 0.05})
        self.optimizer = optimizer
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.net = nn.Sequential(
                nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
            )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Private(DPMixin, Existing):
    def __init__(self, privacy, functional, dropout=0.0):
        super().__init__(optimizer=None, dropout=dropout)
        self.privacy, self.functional = privacy, functional

    def per_example_loss(self, batch):
        x, y, _ = batch
        return F.cross_entropy(self(x), y, reduction="none")

    def configure_privacy(self):
        return self.privacy

    def configure_optimizers(self):
        return self.functional(lr=linear_schedule(0.05, 0.0, 100))


def ragged_loader():
    """A shuffled loader whose last batch is smaller than the others."""
    return make_loader(Points(25), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("strategy", ["auto", "opake_ddp"])
@pytest.mark.parametrize(
    ("functional", "reference"),
    [
        (
            lambda lr: sgd(lr, momentum=0.9),
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        ),
        (lambda lr: adam(lr), lambda p: torch.optim.Adam(p, lr=0.05)),
        (
            lambda lr: adamw(lr, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_equals_plain_lightning_with_the_torch_optimizer(tmp_path, functional, reference, strategy):
    fit = {"max_steps": 50, "max_epochs": -1}
    plain, private = Existing(reference, dropout=0.2), Private(NonPrivate(), functional, 0.2)
    for module, chosen in ((plain, "auto"), (private, strategy)):
        torch.manual_seed(11)  # dropout draws from the global generator in both
        trainer = make_trainer(tmp_path, strategy=chosen, **fit)
        trainer.fit(module, ragged_loader(), DataLoader(Points(), 24))
        assert trainer.global_step == 50
    for ours, theirs in zip(private.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    spent = private.privacy_spent()
    assert (spent.epsilon, spent.n_steps) == (float("inf"), 50)


def test_one_process_of_opake_ddp_leaves_the_loader_alone(tmp_path):
    # Asking for the number of steps in setup() makes Lightning build the loaders before the
    # strategy is set up; a DistributedSampler put in then would shuffle a sequential loader.
    class Asking(Private):
        def setup(self, stage):
            assert self.trainer.estimated_stepping_batches == 4

    module = Asking(NonPrivate(), sgd)
    trainer = make_trainer(tmp_path, strategy=OpakeDDP(), max_epochs=1)
    loader = make_loader(shuffle=False)
    trainer.fit(module, loader, make_loader(shuffle=False))
    assert trainer.train_dataloader is loader


def test_existing_module_needs_three_methods(tmp_path):
    module = Private(plan(), sgd)
    before = [p.detach().clone() for p in module.parameters()]
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, make_loader(), DataLoader(Points(), 24))
    assert module.privacy_spent().n_steps == 4
    assert "val_acc" in trainer.callback_metrics
    assert "train_loss" not in trainer.callback_metrics
    assert all(not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_one_step_differs_from_a_non_private_one(tmp_path):
    private, plain = Net(plan(), lambda: sgd(0.1)), Net(NonPrivate(), lambda: sgd(0.1))
    for module in (private, plain):
        make_trainer(tmp_path, max_steps=1).fit(module, make_loader())
    for ours, theirs in zip(private.parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).abs().max() > 1e-3


def two_classes(n):
    draw = torch.Generator().manual_seed(n)
    y = torch.arange(n) % 2
    x = torch.randn(n, 5, generator=draw) + 2.0 * (2 * y[:, None] - 1)
    return TensorDataset(x, y)


def accuracy(path, sigma, seed=7):
    module = Net(plan(noise_multiplier=sigma, key=key(seed)), lambda: sgd(0.5))
    make_trainer(path, max_epochs=2).fit(module, make_loader(two_classes(200), batch_size=20))
    x, y = two_classes(500).tensors
    with torch.no_grad():
        return (module(x).argmax(1) == y).float().mean().item()


def test_noise_of_sigma_1000_leaves_nothing_learned(tmp_path):
    # An official example of another library once trained the plain model: its accuracy did not
    # move when the noise was set to 1000.
    assert accuracy(tmp_path, 0.0) > 0.95
    # What noise alone has made is as often wrong as right: of six models, one in 64 times no model
    # is worse than chance, and the keys are fixed.
    assert min(accuracy(tmp_path, 1000.0, seed) for seed in range(6)) < 0.5
