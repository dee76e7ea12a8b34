"""Combinations that would weaken or misreport the guarantee, refused before anything is spent."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_flatten

from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.plan import DPFTRL, DPSGD
from opake_lightning.random import RngKey
from opake_lightning.trainer._parameters import check_parameters
from opake_lightning.trainer.data import PoissonLoader
from opake_lightning.trainer.strategy import OpakeDDP

__all__ = [
    "check_hyperparameters",
    "check_loadable",
    "check_loader",
    "check_module",
    "check_reloading",
    "check_signature",
    "check_trainer",
    "is_refused",
    "take_the_one",
]

_CALLBACKS: dict[type[pl.Callback], str] = {
    LearningRateFinder: (
        "runs real private steps and then rolls their count back; search the learning rate on "
        "public data, or count every trial as a run of its own"
    ),
    BatchSizeFinder: (
        "runs real private steps and then rolls their count back, and the batch size is part of "
        "the guarantee; choose it, and bound memory with DPSGD(microbatch_size=...)"
    ),
    StochasticWeightAveraging: (
        "replaces the learning-rate schedule and re-estimates BatchNorm statistics on private "
        "data; average weights with the WeightAveraging callback, which only post-processes"
    ),
    BaseFinetuning: (
        "changes which parameters are trained during the run; freeze before fit with "
        "requires_grad_(False), and unfreeze between fits"
    ),
    ModelPruning: (
        "masks parameters outside of the optimizer, so that clipping and noise no longer cover "
        "what is trained; prune after training"
    ),
    GradientAccumulationScheduler: (
        "accumulates gradients over batches, but a draw is one batch; raise batch_size instead, "
        "and bound memory with DPSGD(microbatch_size=...)"
    ),
}


# By name: importing some of them takes packages that need not be there.
_SHARDED: dict[str, str] = {
    "FSDPStrategy": (
        ". It gives each rank a part of every layer, and sums gradients over ranks in the backward "
        "pass, before anything could clip them"
    ),
    "ModelParallelStrategy": (
        ". With FSDP2 a parameter is a DTensor whose gradient is reduced in the backward pass; "
        "with tensor parallelism one example's gradient, and so its norm, is spread over ranks"
    ),
    "DeepSpeedStrategy": (
        ". Its engine owns backward pass, reduction, clipping and optimizer; none of them knows "
        "single examples"
    ),
}

_NOT_RUN = (
    "private differentiation does not run it, so what it should change or show is left out; call "
    ".remove() of its handle. Change the released gradient in a stage of the optimizer, or an "
    "example's gradient in the loss"
)

_WRAPPERS = {
    "DistributedDataParallel": "averages raw gradients over ranks",
    "DataParallel": "splits a batch over devices and adds raw gradients",
    "FullyShardedDataParallel": "shards parameters and sums raw gradients over ranks",
}


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse trainer settings that a private run cannot have.

    Raises:
        PrivacyError: Naming the setting and what to do instead.
    """
    for complaint in _trainer_complaints(trainer):
        raise PrivacyError(complaint)


def check_signature(module: Any) -> None:
    """Refuse a loss that is not called with a batch alone.

    Raises:
        TypeError: With the signature that it should have.
    """
    loss = module.per_example_loss
    try:
        inspect.signature(loss).bind(None)
    except TypeError as error:
        raise TypeError(
            f"per_example_loss of {type(module).__name__} cannot be called with a batch alone "
            f"({error}); define it as per_example_loss(self, batch)"
        ) from None


def check_reloading(trainer: Any, plan: DPSGD | DPFTRL) -> None:
    """Refuse data that may change from epoch to epoch where the plan counts on the same.

    Raises:
        PrivacyError: Naming the setting and what to do instead.
    """
    every = trainer.reload_dataloaders_every_n_epochs
    if every and plan.needs_horizon:
        # A guarantee depends on it: rows are kept apart by their index.
        raise PrivacyError(
            f"reload_dataloaders_every_n_epochs={every}: {type(plan).__name__} accounts for how "
            "many steps lie between two uses of a row, which it knows by its index, and a loader "
            "that is made anew may give rows other indices; leave it out, or train with DPSGD"
        )


def _trainer_complaints(trainer: pl.Trainer) -> Iterator[str]:
    strategy = trainer.strategy
    if not isinstance(strategy, (SingleDeviceStrategy, OpakeDDP)):
        yield _about_strategy(strategy)
    if trainer.strategy.root_device.type == "mps":
        yield (
            "the device is mps, Apple's GPU, which has no float64, and sums of clipped gradients "
            'are float64; set Trainer(accelerator="cpu"), also where it was left to "auto"'
        )
    if trainer.gradient_clip_val:
        yield (
            f"gradient_clip_val={trainer.gradient_clip_val} would clip the noisy sum, on top of "
            "clipping each example; set DPSGD(clipping_norm=...) instead"
        )
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: a draw is one batch, so "
            "there is nothing to accumulate; raise the loader's batch_size instead, and bound "
            "memory with DPSGD(microbatch_size=...)"
        )
    precision = trainer.precision_plugin
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        yield (
            "precision='16-mixed' scales the loss and skips steps on overflow, depending on the "
            "data; use precision='bf16-mixed', which needs no scaler"
        )
    if trainer.precision not in ("32-true", "64-true", "bf16-mixed", "16-mixed"):
        yield (
            f"precision={trainer.precision!r} keeps the weights themselves in a narrow type; use "
            "precision='bf16-mixed', where weights, norms, sums and noise stay in float32"
        )
    # Only strategies with several processes have the attribute.
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        yield (
            "sync_batchnorm=True normalises each example by the others, on other ranks too; "
            "replace BatchNorm with GroupNorm or LayerNorm and leave it off"
        )
    for callback in getattr(trainer, "callbacks", []):
        name = type(callback).__name__
        for kind, why in _CALLBACKS.items():
            if isinstance(callback, kind):
                yield f"callback {name} {why}"
        monitor = str(getattr(callback, "monitor", ""))
        shown = getattr(trainer.lightning_module, "log_not_private", True)
        if monitor.startswith("not_private/") and not shown:
            yield (
                f"callback {name} monitors {monitor!r}, which is logged only by a module with "
                "log_not_private = True, and carries no noise: what it decides is outside the "
                "guarantee. Monitor what validation_step logs of other data"
            )


def _about_strategy(strategy: Strategy) -> str:
    names = {kind.__name__ for kind in type(strategy).__mro__}
    why = next((why for name, why in _SHARDED.items() if name in names), "")
    return (
        f"strategy {type(strategy).__name__} averages or shards raw gradients, which have not been "
        f"clipped per example{why}; use Trainer(strategy=OpakeDDP()) or a single device"
    )


def check_module(module: nn.Module) -> None:
    """Refuse modules that mix or keep examples, change gradients, or are not complete.

    Raises:
        PrivacyError: Naming the submodule or parameter and what to do instead.
    """
    if _has_global_hooks():
        raise PrivacyError(
            "a backward hook for all modules (register_module_full_backward_hook) is registered, "
            f"and {_NOT_RUN}"
        )
    for name, child in module.named_modules():
        if (kind := type(child).__name__) in _WRAPPERS:
            raise PrivacyError(
                f"{name} is wrapped in {kind}, which {_WRAPPERS[kind]}; leave the wrapper out, and "
                "use Trainer(strategy=OpakeDDP()) for several devices"
            )
        if is_mixing(child):
            raise PrivacyError(
                f"{name} ({type(child).__name__}) in training mode normalises each example by the "
                "others of the batch, so no example's gradient is its own; replace it with "
                "GroupNorm or LayerNorm, or put it in eval mode with fixed statistics"
            )
        if _rescales_rows(child):
            raise PrivacyError(
                f"{name} ({type(child).__name__}) has max_norm={child.max_norm}: looking an id up "
                "rescales its row of the weight, without noise, so the weights tell which ids "
                "occurred; leave max_norm out, or rescale all rows once a step outside of the "
                "loss, in on_train_batch_end"
            )
        if child._backward_hooks or child._backward_pre_hooks:
            raise PrivacyError(
                f"{name or 'the module'} ({type(child).__name__}) has a backward hook "
                f"(register_full_backward_hook or the like), and {_NOT_RUN}"
            )
    for name, parameter in module.named_parameters():
        if _has_hooks(parameter):
            raise PrivacyError(
                f"parameter {name} has a hook (register_hook or "
                f"register_post_accumulate_grad_hook), and {_NOT_RUN}"
            )
    check_parameters(module.named_parameters())


def is_refused(module: nn.Module, trained: Iterable[Tensor]) -> bool:
    """Whether :func:`check_module` would refuse what may have changed during a fit; cheap.

    Args:
        module: The module.
        trained: Its trainable parameters.
    """
    return (
        _has_global_hooks()
        or any(map(_has_hooks, trained))
        or any(
            child._backward_hooks
            or child._backward_pre_hooks
            or (_is_of_interest(type(child)) and (is_mixing(child) or _rescales_rows(child)))
            for child in _modules(module)
        )
    )


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """As ``module.modules()``, which makes the name of each, and takes five times as long."""
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        child = waiting.pop()
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            waiting += child._modules.values()
            yield child


@functools.lru_cache(maxsize=1024)
def _is_of_interest(kind: type[nn.Module]) -> bool:
    norms = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
    return issubclass(kind, (*norms, nn.Embedding, nn.EmbeddingBag))


def _has_global_hooks() -> bool:
    hooks: Any = torch_module
    return bool(hooks._global_backward_hooks or hooks._global_backward_pre_hooks)


def _has_hooks(parameter: Tensor) -> bool:
    tensor: Any = parameter
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _rescales_rows(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def is_mixing(module: nn.Module) -> bool:
    """Whether ``module`` makes one example's output depend on others in the batch."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.training or not module.track_running_stats
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.training and module.track_running_stats
    return False


def check_hyperparameters(owner: Any, key: RngKey | None) -> None:
    """Refuse hyperparameters with a key in them: loggers and all checkpoints write them out.

    Args:
        owner: A module or data module; None is neither.
        key: The plan's key, if it names one, to know it in whatever form it is there.

    Raises:
        PrivacyError: Naming the hyperparameter and what to do instead.
    """
    for name, value in dict(getattr(owner, "hparams", {})).items():
        if _holds_key(value, key):
            raise PrivacyError(
                f"hyperparameter {name} of {type(owner).__name__} holds the run's key, and "
                "hyperparameters go to loggers and into every checkpoint; leave it out with "
                f"self.save_hyperparameters(ignore=[{name!r}])"
            )


def check_loadable(owner: Any, trainer: pl.Trainer) -> None:
    """Refuse hyperparameters that no checkpoint could be loaded with, which a resume would find.

    If the trainer is to save none, there is only a warning.

    Args:
        owner: A module or data module; None is neither.
        trainer: Its trainer.

    Raises:
        CheckpointError: Naming the hyperparameters and what to do instead.
    """
    given: Any = getattr(owner, "hparams", None)
    if not given or _loads(dict(given) if isinstance(given, dict) else given):
        return
    names = [str(name) for name, value in given.items() if not _loads(value)]
    told = ", ".join(f"{name} ({type(given[name]).__name__})" for name in names)
    remedy = (
        f"leave it out with self.save_hyperparameters(ignore={names!r}), or save its name instead"
        if names
        else "give save_hyperparameters a plain dict (OmegaConf.to_container)"
    )
    complaint = (
        f"checkpoints would not load with these hyperparameters of {type(owner).__name__}: "
        f"{told or type(given).__name__}. They hold tensors and plain values only, so that loading "
        f"them runs no code; {remedy}"
    )
    if trainer.checkpoint_callbacks:
        raise CheckpointError(complaint)
    rank_zero_warn(complaint)


def _loads(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save({"value": value}, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever pickle, or the value's own class, says
        return False
    return True


def _holds_key(value: Any, key: RngKey | None) -> bool:
    if isinstance(value, RngKey):
        return True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_holds_key(getattr(value, f.name), key) for f in dataclasses.fields(value))
    if isinstance(value, dict):
        return any(_holds_key(child, key) for pair in value.items() for child in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_key(child, key) for child in value)
    if key is None:
        return False
    if isinstance(value, str):
        return value.strip().lower() in (key.hex(), str(key.bits))
    return isinstance(value, int) and value == key.bits


def take_the_one(trainer: pl.Trainer) -> Any:
    """The training loader; of a list or a dict of one, that one, and its batches as they are."""
    combined: Any = getattr(trainer.fit_loop, "_combined_loader", None)
    if combined is not None and len(combined.flattened) == 1:
        # What it gives its batches the form of, and puts its loaders back into.
        combined._iterables, combined._spec = combined.flattened[0], tree_flatten(0)[1]
    return trainer.train_dataloader


def check_loader(loader: Any) -> PoissonLoader:
    """The training loader, if it is one Poisson loader.

    Raises:
        PrivacyError: If it is an ordinary loader, has an ``__iter__`` of its own, or there are
            several.
    """
    if isinstance(loader, PoissonLoader):
        if type(loader).__iter__ is not PoissonLoader.__iter__:
            # A guarantee depends on it: no test would see rows that are mixed there.
            raise PrivacyError(
                f"{type(loader).__name__} has an __iter__ of its own, where nothing tests whether "
                "rows are mixed; do what it does in the dataset's __getitem__, in collate_fn or in "
                "on_after_batch_transfer"
            )
        return loader
    if loader is None:
        raise PrivacyError(
            "there is no training loader, so the sample rate is not known: pass one to fit, and "
            "leave limit_train_batches above 0"
        )
    if isinstance(loader, (dict, list, tuple)):
        raise PrivacyError(
            f"got a {type(loader).__name__} of {len(loader)} training loaders; a private run has "
            "one, whose draws are accounted for: pass the DataLoader itself, of several datasets "
            "over their torch.utils.data.ConcatDataset"
        )
    raise PrivacyError(
        f"the training loader is an ordinary {type(loader).__name__}, whose batches are not Poisson"
        " draws; either use Trainer(strategy=OpakeDDP()), which converts it, or pass "
        "PoissonLoader(dataset, batch_size=...) instead"
    )
