"""What would weaken the guarantee is refused before the first step, and the message says why."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from opake_lightning import DPSGD, DPMixin, DPModule, OpakeDDP, PoissonLoader, PrivacyError
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.random import key
from opake_lightning.trainer._refusals import check_trainer
from tests.trainer.cases_dpftrl import mf_plan
from tests.trainer.helpers import Net, Points, make_loader, make_trainer, plan


def refused(path, match, *, module=None, loaders=None, error=PrivacyError, **trainer_kwargs):
    """A fit that must be refused with ``match``, leaving the model alone and spending nothing."""
    module = Net() if module is None else module
    before = copy.deepcopy(module.state_dict())
    trainer = make_trainer(path, **trainer_kwargs)
    with pytest.raises(error, match=match):
        trainer.fit(module, make_loader() if loaders is None else loaders)
    untouched(module, before)
    assert trainer.global_step == 0


def untouched(module, before):
    assert module.privacy_spent().n_steps == 0
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


# -- the module ----------------------------------------------------------------------------------


class Plain(pl.LightningModule):
    """What somebody has who forgot the mixin."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = nn.Linear(Points().x.shape[1], 1), 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.net(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


@pytest.mark.parametrize("strategy", ["opake_ddp", "opake_ddp_fork"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_plain_module_is_not_fitted(tmp_path, devices, strategy):
    module = Plain()
    before = copy.deepcopy(module.state_dict())
    trainer = make_trainer(tmp_path, strategy=strategy, devices=devices)
    with pytest.raises(PrivacyError, match=r"class Private\(DPMixin, Plain\)"):
        trainer.fit(module, DataLoader(Points(), batch_size=4))
    assert module.steps == trainer.global_step == 0
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_plain_module_is_validated_tested_and_asked(tmp_path):
    module, loader = Plain(), DataLoader(Points(), batch_size=4)
    trainer = make_trainer(tmp_path, strategy=OpakeDDP())
    for run in (trainer.validate, trainer.test, trainer.predict):
        assert run(module, loader)


# -- the trainer ---------------------------------------------------------------------------------


class ShardedOnCPU(FSDPStrategy):
    """FSDP as a user would pass it; the subclass gets past Lightning's own check for a GPU."""


@pytest.mark.parametrize(
    "strategy", ["ddp", DDPStrategy(), ShardedOnCPU()], ids=["ddp", "DDPStrategy", "FSDPStrategy"]
)
def test_strategies_that_move_raw_gradients(tmp_path, strategy):
    name = "DDPStrategy" if strategy == "ddp" else type(strategy).__name__
    refused(tmp_path, rf"strategy {name} .*raw gradients.*OpakeDDP\(\)", strategy=strategy)


def test_gradient_clip_val(tmp_path):
    refused(tmp_path, "gradient_clip_val=0.5 .*clipping_norm", gradient_clip_val=0.5)


def test_accumulate_grad_batches(tmp_path):
    refused(tmp_path, "accumulate_grad_batches=2.*batch_size", accumulate_grad_batches=2)


def test_gradient_scaler(tmp_path):
    scaler = torch.amp.GradScaler("cpu")
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    refused(tmp_path, "16-mixed.*skips steps.*bf16-mixed", plugins=[plugin])


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_narrow_weights(tmp_path, precision):
    refused(tmp_path, f"{precision}.*bf16-mixed", precision=precision)


def test_sync_batchnorm(tmp_path):
    refused(tmp_path, "sync_batchnorm=True.*GroupNorm", sync_batchnorm=True)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (LearningRateFinder, "LearningRateFinder runs real private steps"),
        (BatchSizeFinder, "BatchSizeFinder runs real private steps.*microbatch_size"),
        (lambda: StochasticWeightAveraging(1e-2), "StochasticWeightAveraging.*WeightAveraging"),
        (Unfreeze, "Unfreeze changes which parameters are trained.*requires_grad_"),
        (BackboneFinetuning, "BackboneFinetuning changes which parameters"),
        (lambda: ModelPruning("l1_unstructured"), "ModelPruning.*prune after training"),
        (lambda: GradientAccumulationScheduler({1: 2}), "GradientAccumulationScheduler.*one batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*callback is experimental:UserWarning")
def test_callbacks(tmp_path, make, match):
    refused(tmp_path, match, callbacks=[make()])


@pytest.mark.parametrize(
    ("search", "match"),
    [
        (lambda tuner, net: tuner.lr_find(net, make_loader()), "LearningRateFinder runs real"),
        (lambda tuner, net: tuner.scale_batch_size(net, make_loader()), "BatchSizeFinder runs"),
    ],
    ids=["lr_find", "scale_batch_size"],
)
def test_tuner(tmp_path, search, match):
    net = Net()
    net.lr, net.batch_size = 0.1, 6
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(PrivacyError, match=match):
        search(Tuner(make_trainer(tmp_path, strategy="auto")), net)
    untouched(net, before)


class Silent(Net):
    """Overrides early hooks without ``super()``, as many modules do."""

    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.1, 6

    def configure_callbacks(self):
        return []

    def setup(self, stage):
        pass

    def on_fit_start(self):
        pass

    def train_dataloader(self):
        return PoissonLoader(Points(), self.batch_size)


@pytest.mark.parametrize("search", [LearningRateFinder, BatchSizeFinder])
def test_hooks_without_super_do_not_get_around_it(tmp_path, search):
    module = Silent()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(PrivacyError, match="runs real private steps"):
        make_trainer(tmp_path, callbacks=[search()], strategy="auto").fit(module)
    untouched(module, before)


def test_open_ended_run_with_a_target(tmp_path):
    refused(
        tmp_path,
        "target_epsilon=3.0 needs a planned number of steps.*PrivacyBudget",
        module=Net(plan(target_epsilon=3.0)),
        max_epochs=-1,
    )


def test_target_that_is_spent(tmp_path):
    # Calibrating for what rounding left over would give a noise that trains nothing.
    module = Net(plan(target_epsilon=3.0))
    make_trainer(tmp_path).fit(module, make_loader())
    learned = copy.deepcopy(module.state_dict())
    with pytest.raises(PrivacyError, match=r"target_epsilon=3\.0 covers all .* 8 steps .*train on"):
        make_trainer(tmp_path).fit(module, make_loader())
    assert module.privacy_spent().n_steps == 8
    assert all(torch.equal(value, learned[name]) for name, value in module.state_dict().items())


# -- the data ------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield from Points()


def weighted():
    return DataLoader(Points(), batch_size=6, sampler=WeightedRandomSampler(torch.ones(24), 24))


@pytest.mark.parametrize(
    ("loaders", "match"),
    [
        (lambda: DataLoader(Stream(), batch_size=6), "Stream is an IterableDataset.*map-style"),
        (weighted, "samples with WeightedRandomSampler.*leave sampler and batch_sampler out"),
        (
            lambda: DataLoader(Points(), batch_size=6, sampler=SubsetRandomSampler(range(9))),
            "samples with SubsetRandomSampler",
        ),
        (
            lambda: DataLoader(
                Points(), batch_size=6, sampler=RandomSampler(Points(), replacement=True)
            ),
            "samples with RandomSampler",
        ),
        (
            lambda: DataLoader(
                Points(),
                batch_sampler=type("Mine", (BatchSampler,), {})(RandomSampler(Points()), 6, False),
            ),
            "samples with Mine",
        ),
        (lambda: DataLoader(Points(), batch_size=None), "samples with .*set batch_size="),
        (Points, "training loader is a Points.*DataLoader or PoissonLoader"),
        (lambda: [make_loader(), make_loader()], "2 training loaders.*ConcatDataset"),
        (lambda: {"a": make_loader(), "b": make_loader()}, "2 training loaders.*ConcatDataset"),
    ],
)
def test_loaders_that_are_no_poisson_draw(tmp_path, loaders, match):
    refused(tmp_path, match, loaders=loaders())


def test_ordinary_loader_on_a_single_device_names_both_remedies(tmp_path):
    refused(
        tmp_path, r"OpakeDDP\(\)\), which converts it.*or pass\s+PoissonLoader", strategy="auto"
    )


def test_poisson_loader_on_a_single_device_works(tmp_path):
    net = Net()
    make_trainer(tmp_path, strategy="auto").fit(net, PoissonLoader(Points(), batch_size=6))
    assert net.privacy_spent().n_steps == 8


def test_loader_with_a_key_of_its_own(tmp_path):
    loader = PoissonLoader(Points(), batch_size=6, key=key(3))
    refused(tmp_path, r"DPSGD\(\.\.\., key=\.\.\.\)", loaders=loader)


def test_batch_hook_that_adds_rows(tmp_path):
    class Doubling(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [torch.cat([t, t]) for t in batch]

    refused(tmp_path, "rows for .* drawn examples", module=Doubling())


# -- the module ----------------------------------------------------------------------------------


class WithBatchNorm(Net):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net.insert(1, nn.BatchNorm1d(4))


def test_batchnorm_in_train_mode(tmp_path):
    refused(tmp_path, r"net\.1 \(BatchNorm1d\).*GroupNorm or LayerNorm", module=WithBatchNorm())


@pytest.mark.filterwarnings("ignore:Found .* in eval mode:UserWarning")
def test_batchnorm_put_in_train_mode_later(tmp_path):
    class Wakes(WithBatchNorm):
        def on_train_start(self):
            self.net[1].train()

    module = Wakes()
    module.net[1].eval()
    refused(tmp_path, r"net\.1 \(BatchNorm1d\)", module=module)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode:UserWarning")
def test_frozen_batchnorm_is_accepted_and_keeps_its_statistics(tmp_path):
    module = WithBatchNorm()
    module.net[1].eval()
    module.net[1].running_mean.fill_(0.5)
    make_trainer(tmp_path, max_epochs=1).fit(module, make_loader())
    assert torch.equal(module.net[1].running_mean, torch.full((4,), 0.5))
    assert int(module.net[1].num_batches_tracked) == 0
    assert module.privacy_spent().n_steps == 4


def test_training_step_in_a_subclass():
    with pytest.raises(PrivacyError, match=r"Mine defines training_step.*per_example_loss"):

        class Mine(DPModule):
            def training_step(self, batch, batch_idx):
                return self.net(batch)


def test_mixin_after_the_module_it_should_go_around():
    class Plain(pl.LightningModule):
        def training_step(self, batch, batch_idx):
            raise AssertionError

    with pytest.raises(PrivacyError, match=r"class Mine\(DPMixin, "):

        class Mine(Plain, DPMixin):
            pass


def test_training_step_put_on_the_instance(tmp_path):
    net = Net()
    net.training_step = lambda batch, batch_idx: None
    refused(tmp_path, "training_step was replaced.*Compile submodules", module=net)


def test_automatic_optimization():
    net = Net()
    with pytest.raises(PrivacyError, match=r"automatic_optimization=True would step.*remove it"):
        net.automatic_optimization = True


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda n: [sgd(0.1), sgd(0.1)], "returned 2 objects.*one functional"),
        (lambda n: ([sgd(0.1)], []), "returned 2 objects"),
        (
            lambda n: {"optimizer": sgd(0.1), "lr_scheduler": None},
            "torch LR schedulers.*cosine_schedule",
        ),
        (lambda n: torch.optim.SGD(n.parameters(), lr=0.1), "returned SGD.*functional optimizer"),
        (
            lambda n: (
                [opt := torch.optim.SGD(n.parameters(), lr=0.1)],
                [torch.optim.lr_scheduler.StepLR(opt, 1)],
            ),
            "returned 2 objects.*schedule is an argument",
        ),
        (lambda n: None, "returned None.*functional optimizer"),
    ],
    ids=["two", "tuple", "dict", "torch", "torch with a scheduler", "none"],
)
def test_optimizers_that_are_not_one_functional_optimizer(tmp_path, make, match):
    class Mine(Net):
        def configure_optimizers(self):
            return make(self)

    refused(tmp_path, match, module=Mine())


def test_optimizer_put_on_the_instance_as_the_cli_does(tmp_path):
    # LightningCLI's --optimizer replaces configure_optimizers on the object, past every wrapper.
    net = Net()
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.1)
    refused(tmp_path, "configure_optimizers was replaced", module=net)


def test_mean_that_divides_by_the_weights_of_the_labels(tmp_path):
    """Of one row the weight cancels; see test_lightning for the mean that is right as it stands."""

    class Weighted(Net):
        def per_example_loss(self, batch):
            x, y, _ = batch
            return nn.functional.cross_entropy(self(x), y, weight=torch.tensor([1.0, 2.0, 3.0]))

    match = r'cross_entropy \(.*test_refusals.py:.* mean with weight=.*reduction="none"'
    refused(tmp_path, match, module=Weighted())


def test_plan_that_is_no_plan(tmp_path):
    refused(tmp_path, "configure_privacy must return", module=Net({"C": 1}), error=TypeError)


def test_missing_methods(tmp_path):
    class Bare(DPModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(5, 3)

        def configure_privacy(self):
            return plan()

        def configure_optimizers(self):
            return adamw(0.1)

    refused(
        tmp_path, r"Bare must define per_example_loss", module=Bare(), error=NotImplementedError
    )
    Bare.configure_privacy = DPModule.configure_privacy
    refused(
        tmp_path, r"Bare must define configure_privacy", module=Bare(), error=NotImplementedError
    )


def test_nothing_to_train(tmp_path):
    refused(tmp_path, "no trainable parameter", module=Net().requires_grad_(False))


def test_lazy_parameters(tmp_path):
    module = Net()
    module.net[0] = nn.LazyLinear(4)
    trainer = make_trainer(tmp_path)
    with pytest.raises(PrivacyError, match=r"net\.0\.weight is not initialised yet"):
        trainer.fit(module, make_loader())


def replace_layer(module):
    module.net[3] = nn.Linear(4, 3)


def unfreeze(module):
    module.net[0].requires_grad_(True)


@pytest.mark.parametrize("change", [replace_layer, unfreeze])
def test_parameters_changed_after_configure_optimizers(tmp_path, change):
    class Changing(Net):
        def on_train_start(self):
            change(self)

    module = Changing()
    module.net[0].requires_grad_(False)
    trainer = make_trainer(tmp_path)
    with pytest.raises(PrivacyError, match="trainable parameters changed after configure_optim"):
        trainer.fit(module, make_loader())
    assert module.privacy_spent().n_steps == 0


def test_add_param_group(tmp_path):
    class Adding(Net):
        def on_train_start(self):
            self.optimizers().add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    refused(tmp_path, "cannot be added to a private run", module=Adding(), error=RuntimeError)


def test_logging_inside_the_loss(tmp_path):
    class Telling(Net):
        def per_example_loss(self, batch):
            loss = super().per_example_loss(batch)
            self.log_dict({"train_loss": loss.mean()})
            return loss

    refused(tmp_path, r"self\.log\('train_loss'\).*log_not_private = True", module=Telling())


def test_unbounded_clipping_norm():
    with pytest.raises(PrivacyError, match=r"clipping_norm=inf.*NonPrivate\(\)"):
        DPSGD(clipping_norm=float("inf"), noise_multiplier=1.0)


def test_stepping_by_hand(tmp_path):
    with pytest.raises(PrivacyError, match=r"outside of Trainer\.fit"):
        Net().training_step([torch.zeros(1, 5)], 0)
    module = Net()
    make_trainer(tmp_path, max_epochs=1).fit(module, make_loader())
    with pytest.raises(RuntimeError, match="stepped by its training_step"):
        module.optimizers().optimizer.step()
    assert module.privacy_spent().n_steps == 4


def test_arguments_of_the_wrapper_that_is_not_used():
    with pytest.raises(PrivacyError, match=r"does not wrap.*find_unused_parameters"):
        OpakeDDP(find_unused_parameters=True)


# -- names and habits of other libraries -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_grad_norm", "clipping_norm="),
        ("noise", "noise_multiplier="),
        ("epsilon", "target_epsilon="),
        ("delta", "target_delta="),
        ("sample_rate", "batch_size"),
    ],
)
@pytest.mark.parametrize("make", [plan, mf_plan])
def test_names_of_other_libraries(make, name, ours):
    with pytest.raises(TypeError, match=rf"has no {name}=; it is .*{ours}"):
        make(**{name: 1.0})


@pytest.mark.parametrize("how", [{}, {"lr": 1e-3}])
def test_an_optimizer_that_is_given_the_parameters(how, tmp_path):
    class Usual(Net):
        def configure_optimizers(self) -> Any:
            return adamw(self.parameters(), **how)

    with pytest.raises(TypeError, match=r"is made without .*parameters.*adamw\(lr=1e-3\)"):
        make_trainer(tmp_path).fit(Usual(), make_loader())


def test_a_loss_with_the_arguments_of_a_training_step(tmp_path):
    class Usual(Net):
        def per_example_loss(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return super().per_example_loss(batch)

    module = Usual()
    with pytest.raises(TypeError, match=r"batch_idx.*per_example_loss\(self, batch\)"):
        make_trainer(tmp_path).fit(module, make_loader())
    assert module.privacy_spent().n_steps == 0


def test_a_plain_module_is_given_a_private_checkpoint(tmp_path):
    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net().net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = make_trainer(tmp_path)
    trainer.fit(Net(), make_loader())
    trainer.save_checkpoint(tmp_path / "private.ckpt")
    plain = make_trainer(tmp_path, strategy="auto")
    with pytest.raises(ValueError, match="different number of parameter groups"):
        plain.fit(Plain(), make_loader(), ckpt_path=tmp_path / "private.ckpt", weights_only=True)


def test_the_gpu_of_a_mac_is_named_with_its_remedy(tmp_path):
    trainer = make_trainer(tmp_path, strategy="auto")
    trainer.strategy._root_device = torch.device("mps")
    with pytest.raises(PrivacyError, match=r'mps.*float64.*Trainer\(accelerator="cpu"\)'):
        check_trainer(trainer)


def test_a_module_of_the_other_lightning_package_is_named():
    theirs = type("LightningModule", (), {"__module__": "pytorch_lightning.core.module"})
    with pytest.raises(PrivacyError, match=r"pytorch_lightning.*import lightning\.pytorch"):
        type("Private", (DPMixin, theirs), {})


@pytest.mark.parametrize("make", [EarlyStopping, ModelCheckpoint])
def test_a_callback_that_waits_for_what_is_not_logged(make, tmp_path):
    refused(
        tmp_path,
        f"{make.__name__} monitors 'not_private/loss'",
        callbacks=[make(monitor="not_private/loss")],
    )
    shown = Net()
    shown.log_not_private = True
    make_trainer(tmp_path, callbacks=[make(monitor="not_private/loss")]).fit(shown, make_loader())


@pytest.mark.parametrize("strategy", ["opake_ddp", "auto"])
def test_a_poisson_loader_with_an_order_of_its_own(strategy, tmp_path):
    """Nothing would see rows that are mixed there."""

    class Mixing(PoissonLoader):
        def __iter__(self):
            for x, *rest in super().__iter__():
                yield [x - x.mean(0), *rest]

    loader = Mixing(Points(), batch_size=6)
    refused(tmp_path, "Mixing has an __iter__ of its own", loaders=loader, strategy=strategy)
