"""A private run is an ordinary Lightning run: what people use with Lightning works with it."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torchopt
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from opake_lightning import NonPrivate, OpakeDDP
from opake_lightning.optimizers import adamw, sgd
from tests.trainer.helpers import (
    N_FEATURES,
    Net,
    Points,
    Validated,
    epsilon_after,
    fit,
    make_loader,
    make_trainer,
    plan,
    seed_globals,
)

# -- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_steps": 3}, 3),
        ({"max_epochs": -1, "max_steps": 7}, 7),
        ({"max_epochs": 2}, 8),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 4),
        ({"max_epochs": 1, "overfit_batches": 2}, 2),
        ({"fast_dev_run": 2}, 2),
        ({"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}, 8),
        ({"max_epochs": 1, "detect_anomaly": True}, 4),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
def test_one_step_is_one_release_and_one_global_step(tmp_path, limits, steps):
    trainer, net = fit(tmp_path, Net(plan(target_epsilon=3.0)), **limits)
    spent = net.privacy_spent()
    assert trainer.global_step == spent.n_steps == spent.plan["planned_steps"] == steps
    assert 2.97 < spent.epsilon <= 3.0


def test_model_checkpoint_every_step_and_by_metric(tmp_path):
    every = ModelCheckpoint(tmp_path / "every", every_n_train_steps=1, save_top_k=-1)
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", filename="{val_loss:.3f}")
    thrifty = ModelCheckpoint(
        tmp_path / "thrifty", monitor="privacy/epsilon", every_n_train_steps=3, save_top_k=1
    )
    trainer, _ = fit(tmp_path, Validated(), val=True, callbacks=[every, best, thrifty])
    assert trainer.global_step == 8
    assert len(list((tmp_path / "every").glob("*.ckpt"))) == 8
    assert best.best_model_score <= trainer.callback_metrics["val_loss"]
    assert "step=3" in thrifty.best_model_path


def test_early_stopping(tmp_path):
    stopper = EarlyStopping("val_loss", patience=1, min_delta=1e9)
    trainer, net = fit(tmp_path, Validated(), val=True, callbacks=[stopper], max_epochs=9)
    assert trainer.global_step == net.privacy_spent().n_steps == 8


# -- the learning rate ---------------------------------------------------------------------------


class Whole(Validated):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.per_example_loss(batch).mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 6):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return make_loader(batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(Points(), batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader


def test_datamodule_test_predict_and_load_from_checkpoint(tmp_path):
    saver = ModelCheckpoint(tmp_path / "saved")
    trainer = make_trainer(tmp_path, callbacks=[saver])
    module, data = Whole(), Data()
    trainer.fit(module, datamodule=data)
    assert trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"] > 0
    assert trainer.test(module, datamodule=data, verbose=False)[0]["test_loss"] > 0
    predicted = torch.cat(trainer.predict(module, datamodule=data))
    assert module.privacy_spent().n_steps == 8  # looking at data that are not trained on is free

    loaded = Whole.load_from_checkpoint(saver.best_model_path, weights_only=True)
    assert loaded.privacy_spent() == module.privacy_spent()
    # Predicting on a single device, without any strategy of ours.
    alone = make_trainer(tmp_path, strategy="auto")
    assert torch.equal(torch.cat(alone.predict(loaded, datamodule=data)), predicted)


class CLINet(Whole):
    def __init__(self, sigma: float = 1.0, width: int = 4):
        super().__init__(plan(noise_multiplier=sigma))
        self.save_hyperparameters()


def test_lightning_cli(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])  # args= beside pytest's own is warned about
    # Lightning 2.6 calls jsonargparse by a name that newer releases of it deprecate.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    cli = LightningCLI(
        CLINet,
        Data,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={**quiet, "accelerator": "cpu", "default_root_dir": str(tmp_path)},
        args=[
            "fit",
            "--seed_everything=false",
            "--trainer.strategy=opake_ddp",
            "--trainer.max_epochs=1",
            "--trainer.callbacks+=opake_lightning.trainer.PrivacyBudget",
            "--trainer.callbacks.epsilon=100",
            "--trainer.callbacks.delta=1e-5",
            "--model.sigma=2.0",
            "--data.batch_size=8",
        ],
    )
    spent = cli.model.privacy_spent()
    assert (spent.n_steps, spent.plan["noise_multiplier"], spent.plan["batch_size"]) == (3, 2.0, 8)


def test_bf16_mixed_keeps_weights_gradients_and_noise_in_float32(tmp_path):
    def learned(precision, sigma):
        module = Net(plan(noise_multiplier=sigma), lambda: sgd(0.5, momentum=0.9))
        seen = []
        inner = module.per_example_loss
        module.per_example_loss = lambda batch: seen.append(module(batch[0]).dtype) or inner(batch)
        fit(tmp_path, module, precision=precision)
        state = module._dp.state.optimizer["momentum"].trace
        assert {p.dtype for p in [*module.parameters(), *state.values()]} == {torch.float32}
        return nn.utils.parameters_to_vector(module.parameters()).detach(), set(seen)

    exact, full = learned("32-true", 0.0)
    mixed, half = learned("bf16-mixed", 0.0)
    assert (full, half) == ({torch.float32}, {torch.bfloat16})
    moved = exact - nn.utils.parameters_to_vector(Net().parameters()).detach()
    assert 0 < (mixed - exact).norm() < 0.02 * moved.norm()

    # The same noise to float32's last digits: noise rounded to bfloat16 would be off by 1e-2.
    noisy, _ = learned("32-true", 1000.0)
    mixed, _ = learned("bf16-mixed", 1000.0)
    torch.testing.assert_close(mixed, noisy, rtol=1e-3, atol=1.0)


class Mean(Net):
    """Its loss is the mean of the batch, as it is written for training without privacy."""

    def per_example_loss(self, batch):
        x, y, _ = batch
        return nn.functional.cross_entropy(self(x), y)


@pytest.mark.parametrize("privacy", [plan(), NonPrivate()], ids=["DPSGD", "NonPrivate"])
def test_a_mean_over_the_batch_is_right_as_it_stands(tmp_path, privacy):
    module, same = Mean(privacy), Net(privacy)
    for each in (module, same):
        seed_globals(0)  # without privacy it shuffles by them
        fit(tmp_path, each)
    for p, q in zip(module.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_float64(tmp_path):
    _, module = fit(tmp_path, Net(), precision="64-true")
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    _, single = fit(tmp_path, Net())
    for ours, theirs in zip(module.parameters(), single.parameters(), strict=True):
        assert ours.shape == theirs.shape
        assert ours.isfinite().all()


def test_weight_averaging(tmp_path):
    _, plain = fit(tmp_path, Net())
    averaging = WeightAveraging(avg_fn=lambda old, new, count: old + (new - old) / (count + 1))
    module = Net()
    seen = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append([p.detach().clone() for p in pl_module.parameters()])

    _, _ = fit(tmp_path, module, callbacks=[averaging, Record()])
    for p, q in zip(seen[-1], plain.parameters(), strict=True):
        assert torch.equal(p, q)  # the run itself is the one without the callback
    for index, p in enumerate(module.parameters()):
        assert not torch.equal(p, seen[-1][index])
    assert module.privacy_spent() == plain.privacy_spent()


@pytest.mark.filterwarnings("ignore:.*was called without a model:UserWarning")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
def test_on_exception_checkpoint(tmp_path):
    class Breaks(Net):
        broken = True

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.broken and self.trainer.global_step == 5:
                raise OSError("the cable")

    saver = OnExceptionCheckpoint(tmp_path, filename="broken")
    with pytest.raises(OSError, match="the cable"):
        fit(tmp_path, Breaks(), callbacks=[saver])
    whole, resumed = Net(), Breaks()
    resumed.broken = False
    fit(tmp_path, whole)
    make_trainer(tmp_path).fit(
        resumed, make_loader(), ckpt_path=tmp_path / "broken.ckpt", weights_only=True
    )
    assert resumed.privacy_spent() == whole.privacy_spent()
    for p, q in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


def test_eval_mode_before_fit_is_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="module.* in eval mode at the start of training"):
        fit(tmp_path, Net().eval())


def test_second_fit_counts_on(tmp_path):
    trainer, net = fit(tmp_path)
    first = [p.detach().clone() for p in net.parameters()]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, make_loader())
    assert net.privacy_spent().n_steps == 12
    make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    spent = net.privacy_spent()
    assert (spent.n_steps, spent.epsilon) == (16, epsilon_after(16))
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), first, strict=True))


class Overriding(Net):
    """Overrides every hook the library could have used, and never calls super()."""

    def setup(self, stage):
        pass

    def configure_callbacks(self):
        return []

    def configure_model(self):
        pass

    def on_fit_start(self):
        pass

    def on_train_start(self):
        pass

    def on_train_epoch_start(self):
        pass

    def on_train_batch_start(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass

    def on_train_epoch_end(self):
        pass

    def on_train_end(self):
        pass

    def on_save_checkpoint(self, checkpoint):
        pass

    def on_load_checkpoint(self, checkpoint):
        pass


def test_hooks_overridden_without_super(tmp_path):
    saver = ModelCheckpoint(tmp_path)
    trainer, module = fit(tmp_path, Overriding(), callbacks=[saver])
    _, plain = fit(tmp_path)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert trainer.callback_metrics["privacy/epsilon"].item() == pytest.approx(epsilon_after(8))
    loaded = Overriding.load_from_checkpoint(saver.best_model_path, weights_only=True)
    assert loaded.privacy_spent() == plain.privacy_spent()


def test_hooks_of_a_mixin_that_is_not_ours(tmp_path):
    class Habits:
        def configure_optimizers(self):
            return sgd(0.1)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["habit"] = 1

    class Mine(Habits, Net):
        pass

    saver = ModelCheckpoint(tmp_path)
    _, module = fit(tmp_path, Mine(), callbacks=[saver])
    assert module.privacy_spent().n_steps == 8
    saved = torch.load(saver.best_model_path, weights_only=True)
    assert saved["habit"] == 1
    assert "opake_lightning" in saved


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda: torchopt.adamw(lr=0.05), lambda: adamw(0.05)),
        (lambda: torchopt.sgd(lr=0.05, momentum=0.9), lambda: sgd(0.05, momentum=0.9)),
    ],
    ids=["adamw", "sgd"],
)
@pytest.mark.usefixtures("same_noise")
def test_torchopt_optimizers(tmp_path, theirs, ours):
    _, module = fit(tmp_path, Net(optimizer=theirs))
    _, same = fit(tmp_path, Net(optimizer=ours))
    for p, q in zip(module.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("same_noise")
def test_compiled_submodule(tmp_path):
    module = Net()
    module.net[0] = torch.compile(module.net[0], backend="eager")
    _, _ = fit(tmp_path, module)
    _, plain = fit(tmp_path)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_one_process_starts_no_process_group(tmp_path):
    # The group's only effects on one process would be a port and advice to set sync_dist.
    trainer, _ = fit(tmp_path, Validated(), val=True, strategy=OpakeDDP())
    assert not torch.distributed.is_initialized()
    assert trainer.world_size == 1
    assert "val_loss" in trainer.callback_metrics


class Shared(Net):
    """One submodule under two names, and one parameter in two submodules."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.again = self.net
        self.tied = nn.Linear(N_FEATURES, 4)
        self.tied.weight = self.net[0].weight
        nn.init.zeros_(self.tied.bias)

    def per_example_loss(self, batch):
        x, y, *_ = batch
        hidden = torch.tanh(self.tied(x))
        return torch.nn.functional.cross_entropy(
            self.net(x) + self.again[3](hidden), y, reduction="none"
        )


class Spelled(Shared):
    """The same loss, with nothing registered twice."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        del self.again
        self.bias = self.tied.bias
        del self.tied

    def per_example_loss(self, batch):
        x, y, *_ = batch
        hidden = torch.tanh(x @ self.net[0].weight.T + self.bias)
        return torch.nn.functional.cross_entropy(
            self.net(x) + self.net[3](hidden), y, reduction="none"
        )


@pytest.mark.usefixtures("same_noise")
def test_shared_modules_and_tied_parameters_train_as_one(tmp_path):
    # Without noise: the two have their parameters in another order, and noise follows it.
    _, shared = fit(tmp_path, Shared(plan(noise_multiplier=0.0)))
    _, spelled = fit(tmp_path, Spelled(plan(noise_multiplier=0.0)))
    assert shared.again is shared.net
    assert shared.tied.weight is shared.net[0].weight
    torch.testing.assert_close(shared.net.state_dict(), spelled.net.state_dict())
    torch.testing.assert_close(shared.tied.bias, spelled.bias)
