"""What would get past the loss, or around the step, is refused by name.

Hooks that are never called, steps that are skipped, modules and hooks that write to weights or
gradients, hyperparameters that a checkpoint does not load with, metrics in the loss.
"""

from __future__ import annotations

import enum
import pathlib
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from opake_lightning import NonPrivate, PrivacyError
from opake_lightning.errors import CheckpointError
from opake_lightning.optimizers import adamw
from opake_lightning.trainer._refusals import check_module
from tests.trainer.helpers import (
    Net,
    Points,
    accepted,
    assert_same,
    make_loader,
    make_trainer,
    refused,
    run_fit,
    saver,
    snapshot,
)

# -- hooks that are never called ------------------------------------------------------------------

UNUSED = {
    "optimizer_step": "scheduling",
    "optimizer_zero_grad": "leave it out",
    "configure_gradient_clipping": "clipping_norm",
    "clip_gradients": "clipping_norm",
    "lr_scheduler_step": "scheduling",
    "backward": "stage of the optimizer",
    "on_before_backward": "stage of the optimizer",
    "on_after_backward": "stage of the optimizer",
    "on_before_zero_grad": "leave it out",
}


def ignored(self, *args, **kwargs):
    raise AssertionError("it was called")


def overriding(base, name):
    return type("Overriding", (base,), {name: ignored})


@pytest.mark.parametrize("name", UNUSED)
def test_a_hook_of_the_module_that_is_never_called(name, tmp_path):
    match = rf"Overriding overrides {name}, which a private run never calls: .*{UNUSED[name]}"
    refused(tmp_path, match, overriding(Net, name)())


@pytest.mark.parametrize("name", UNUSED)
def test_wherever_it_comes_from(name, tmp_path):
    kind = type("Inherits", (Net, overriding(object, name)), {})
    assert getattr(kind, name) is not ignored  # Lightning's own goes first
    kind = type("Inherits", (overriding(object, name), Net), {})
    refused(tmp_path, rf"Inherits overrides {name} \(defined in Overriding\)", kind())
    module = Net()
    setattr(module, name, partial(ignored, module))
    refused(tmp_path, rf"Net overrides {name}", module)
    taken_back = type("Back", (kind,), {name: getattr(pl.LightningModule, name)})
    accepted(tmp_path, taken_back())


OF_CALLBACKS = ["on_before_backward", "on_after_backward", "on_before_zero_grad"]


@pytest.mark.parametrize("name", OF_CALLBACKS)
def test_a_hook_of_a_callback_that_is_never_called(name, tmp_path):
    callback = overriding(pl.Callback, name)()
    refused(tmp_path, rf"Overriding overrides {name}, which a", callbacks=[callback])
    given = LambdaCallback(**{name: ignored})
    refused(tmp_path, rf"LambdaCallback overrides {name}, which a", callbacks=[given])

    class Brings(Net):
        def configure_callbacks(self):
            return [callback]

    refused(tmp_path, rf"Overriding overrides {name}, which a", Brings())


def test_hooks_that_are_called_may_be_overridden(tmp_path):
    calls = []

    def hook(name, self, *args, **kwargs):
        gradients = [p.grad for p in (self if isinstance(self, Net) else args[1]).parameters()]
        assert gradients == [None] * 4
        calls.append(name)

    names = ["on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end"]
    for base in (Net, pl.Callback):
        hooks = {
            n: (lambda *a, n=n, base=base, **k: hook(f"{base.__name__}.{n}", *a, **k))
            for n in names
        }
        kind = type("Hooked", (base,), hooks)
        if base is Net:
            accepted(tmp_path, kind())
        else:
            accepted(tmp_path, callbacks=[kind()])
    assert {name: calls.count(name) for name in calls} == {
        f"{base}.{name}": 4 for base in ("Net", "Callback") for name in names
    }


@pytest.mark.parametrize("name", UNUSED)
def test_without_privacy_they_are_ignored_as_before(name, tmp_path):
    callbacks = [overriding(pl.Callback, name)()] if name in OF_CALLBACKS else []
    module = overriding(Net, name)(NonPrivate())
    make_trainer(tmp_path, max_steps=2, callbacks=callbacks).fit(module, make_loader())


# -- steps that are skipped -----------------------------------------------------------------------


class Skips(Net):
    def on_train_batch_start(self, batch, at):
        return -1 if at == 1 else None


class Stops(Net):
    def on_train_batch_start(self, batch, at):
        if at == 1:
            raise StopIteration


class StopsInAHook(Net):
    def on_after_batch_transfer(self, batch, at):
        if self.trainer.global_step == 1:
            raise StopIteration
        return batch


class StopsCallback(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, at):
        if at == 1:
            raise StopIteration


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Skips, "on_train_batch_start of Skips returned -1, which skips.*limit_train_batches"),
        (Stops, "a hook raised StopIteration before the epoch's last step"),
        (StopsInAHook, "a hook raised StopIteration before the epoch's last step"),
        (StopsCallback, "a hook raised StopIteration before the epoch's last step"),
    ],
)
def test_an_epoch_whose_rest_is_skipped_is_refused(make, match, tmp_path):
    saves = saver(tmp_path, 1)
    callbacks = [make(), saves] if make is StopsCallback else [saves]
    module = Net() if make is StopsCallback else make()
    refused(tmp_path, match, module, spent=1, callbacks=callbacks)
    # Nothing is lost.
    resumed, whole = Net(), Net()
    trainer = run_fit(resumed, tmp_path, saver(tmp_path, 1), ckpt=tmp_path / "step=1.ckpt")
    assert_same(snapshot(resumed, trainer), snapshot(whole, run_fit(whole, tmp_path)))


def test_without_privacy_the_rest_of_an_epoch_may_be_skipped(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(Skips(NonPrivate()), make_loader())
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    "limits",
    [
        {"max_steps": 3},
        {"limit_train_batches": 2},
        {"fast_dev_run": 2},
        {"overfit_batches": 2},
        {"max_epochs": -1, "max_steps": 5},
        {"max_time": {"seconds": 0}},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
def test_limits_of_the_trainer_skip_nothing(limits, tmp_path):
    make_trainer(tmp_path, **limits).fit(Net(), make_loader())


@pytest.mark.filterwarnings("ignore:clipping one example at a time:UserWarning")
@pytest.mark.parametrize("privacy", [None, NonPrivate()])
def test_the_end_of_an_iterator_in_the_loss_is_no_step_without_noise(privacy, tmp_path):
    class Ends(Net):
        def per_example_loss(self, batch):
            raise StopIteration

    module = Ends(privacy)
    with pytest.raises(RuntimeError, match="StopIteration"):
        make_trainer(tmp_path).fit(module, make_loader())
    assert module.privacy_spent().n_steps == 0


# -- what would write to weights or gradients -----------------------------------------------------


class OwnEmbedding(nn.Embedding):
    pass


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, OwnEmbedding])
@pytest.mark.parametrize("trained", [True, False])
def test_a_table_that_rescales_the_rows_it_is_asked_for(kind, trained, tmp_path):
    module = Net()
    module.tables = nn.ModuleList([kind(24, 5, max_norm=1.0).requires_grad_(trained)])
    match = rf"tables\.0 \({kind.__name__}\) has max_norm=1\.0.*which ids occurred.*leave max_norm"
    refused(tmp_path, match, module)
    module.tables[0].max_norm = None
    check_module(module)


def full_backward(module):
    return module.net[0].register_full_backward_hook(lambda *_: None)


def full_backward_pre(module):
    return module.net[0].register_full_backward_pre_hook(lambda *_: None)


def backward(module):
    return module.net[0].register_backward_hook(lambda *_: None)


def of_the_module_itself(module):
    return module.register_full_backward_hook(lambda *_: None)


def everywhere(module):
    return torch_module.register_module_full_backward_hook(lambda *_: None)


def everywhere_before(module):
    return torch_module.register_module_full_backward_pre_hook(lambda *_: None)


def of_a_parameter(module):
    return module.net[0].weight.register_hook(lambda gradient: 2 * gradient)


def after_accumulation(module):
    return module.net[3].bias.register_post_accumulate_grad_hook(lambda _: None)


def max_norm(module):
    module.table.max_norm = 1.0


REGISTER = {
    full_backward: r"net\.0 \(Linear\) has a backward hook",
    full_backward_pre: r"net\.0 \(Linear\) has a backward hook",
    backward: r"net\.0 \(Linear\) has a backward hook",
    of_the_module_itself: r"the module \(.*\) has a backward hook",
    everywhere: "a backward hook for all modules",
    everywhere_before: "a backward hook for all modules",
    of_a_parameter: r"parameter net\.0\.weight has a hook",
    after_accumulation: r"parameter net\.3\.bias has a hook",
    max_norm: r"table \(Embedding\) has max_norm",
}


class Tabled(Net):
    """Has a table, and gets a hook before a step."""

    def __init__(self, register=None, at=0):
        super().__init__()
        self.register, self.at = register, at
        self.table = nn.Embedding(24, 5)

    def on_train_batch_start(self, batch, at):
        if self.register is not None and at == self.at:
            self.handle = self.register(self)

    def per_example_loss(self, batch):
        x, y, index = batch
        return super().per_example_loss((x + self.table(index), y))


@pytest.mark.parametrize("at", [None, 0, 2], ids=["before", "at the first step", "later"])
@pytest.mark.parametrize("register", REGISTER, ids=lambda each: each.__name__)
def test_a_hook_that_no_private_step_runs(register, at, tmp_path):
    module = Tabled(register if at is not None else None, at or 0)
    if at is None:
        module.handle = register(module)
    try:
        refused(tmp_path, REGISTER[register], module, spent=at or 0)
    finally:
        if module.handle is not None:
            module.handle.remove()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_without_privacy_they_run(tmp_path):
    module = Net(NonPrivate())
    calls = []
    module.net[0].register_full_backward_hook(lambda *_: calls.append(0))
    make_trainer(tmp_path, max_steps=2).fit(module, make_loader())
    assert calls == [0, 0]


def test_hooks_of_the_forward_pass_and_norms_made_by_them_are_allowed():
    module = Net()
    module.net[0].register_forward_hook(lambda *_: None)
    module.net[0].register_forward_pre_hook(lambda *_: None)
    for norm in (nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm):
        module.net.append(norm(nn.Linear(3, 3)))
    module.net.append(nn.utils.spectral_norm(nn.Linear(3, 3)))
    check_module(module)


# -- hyperparameters ------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


UNLOADABLE = {
    "a class": torch.optim.Adam,
    "a function": adamw,
    "a partial": partial(adamw, lr=0.1),
    "a path": pathlib.Path("data"),
    "a number of NumPy's": np.float64(0.1),
    "a module": nn.Linear(1, 1),
    "an enum": Colour.RED,
    "inside": {"a": [1, (Colour.RED,)]},
}


class Tuned(Net):
    def __init__(self, lr=0.1, privacy=None, **extra):
        super().__init__(privacy)
        self.save_hyperparameters({"lr": lr, **extra})


class TunedData(pl.LightningDataModule):
    def __init__(self, **extra):
        super().__init__()
        self.save_hyperparameters({"size": 3, **extra})

    def train_dataloader(self):
        return make_loader()


@pytest.mark.filterwarnings("ignore:Attribute 'chosen' (removed|is an instance):UserWarning")
@pytest.mark.parametrize("what", UNLOADABLE)
@pytest.mark.parametrize("kind", [Tuned, TunedData])
def test_hyperparameters_that_no_checkpoint_loads_with(kind, what, tmp_path):
    owner = kind(chosen=UNLOADABLE[what])
    module, data = (owner, make_loader()) if kind is Tuned else (Net(), owner)
    match = rf"hyperparameters of {kind.__name__}: chosen \(.*ignore=\['chosen'\]"
    trainer = make_trainer(tmp_path, callbacks=[saver(tmp_path)])
    with pytest.raises(CheckpointError, match=match):
        trainer.fit(module, data)
    assert module.privacy_spent().n_steps == 0
    # Nobody is kept from training without checkpoints.
    with pytest.warns(UserWarning, match=match):
        make_trainer(tmp_path, max_steps=1).fit(module, data)
    assert module.privacy_spent().n_steps == 1


def test_other_hyperparameters_are_saved_and_loaded(tmp_path):
    plain = {"a": None, "b": [1, 2.0, ("x", True)], "c": {"d": torch.ones(2)}, "e": torch.float16}
    module = Tuned(**plain)
    run_fit(module, tmp_path, saver(tmp_path))
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert saved["hyper_parameters"].keys() == {"lr", *plain}
    run_fit(Tuned(**plain), tmp_path, saver(tmp_path), ckpt=tmp_path / "step=3.ckpt")


def test_without_privacy_hyperparameters_may_be_anything(tmp_path):
    module = Tuned(privacy=NonPrivate(), chosen=torch.optim.Adam)
    run_fit(module, tmp_path, saver(tmp_path))


# -- metrics --------------------------------------------------------------------------------------


class Measured(Net):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch, at):
        x, y, *_ = batch
        self.accuracy(self(x), y)
        self.log("accuracy", self.accuracy)


def test_a_metric_that_is_updated_in_validation(tmp_path):
    module = Measured()
    trainer = make_trainer(tmp_path)
    trainer.fit(module, make_loader(), DataLoader(Points(), 8))
    x, y = Points().x, Points().y
    right = (module(x).argmax(1) == y).float().mean()
    assert trainer.callback_metrics["accuracy"] == pytest.approx(right.item())
    assert module.privacy_spent().n_steps == 8


def test_a_metric_that_is_updated_in_the_loss(tmp_path):
    class Tells(Measured):
        def per_example_loss(self, batch):
            x, y, *_ = batch
            self.accuracy.update(self(x), y)
            return super().per_example_loss(batch)

    module = Tells()
    trainer = make_trainer(tmp_path, num_sanity_val_steps=0)
    with pytest.raises(PrivacyError, match="accuracy"):
        trainer.fit(module, make_loader(), DataLoader(Points(), 8))
    assert module.privacy_spent().n_steps == 0


def test_no_checkpoint_is_saved_in_the_middle_of_a_step(tmp_path):
    """Whether there is a file would tell about an example."""

    class Saves(Net):
        def per_example_loss(self, batch):
            if self.trainer.global_step == 2:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")
            return super().per_example_loss(batch)

    net = Saves()
    with pytest.raises(PrivacyError, match=r"save_checkpoint inside per_example_loss.*callback"):
        make_trainer(tmp_path).fit(net, make_loader())
    assert not (tmp_path / "a.ckpt").exists()
    assert net.privacy_spent().n_steps == 2
