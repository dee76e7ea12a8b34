"""DDP in which only clipped sums cross ranks."""

from __future__ import annotations

import atexit
import io
import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.launchers.multiprocessing import _disable_module_memory_sharing
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from opake_lightning.distributed import leave_group
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.trainer._past import Past
from opake_lightning.trainer._rank_failure import (
    ending_together,
    only_note_sigterm,
    refuse_to_meet_again,
)
from opake_lightning.trainer.data import PoissonLoader, poisson_loader

__all__ = ["OpakeDDP"]


class OpakeDDP(DDPStrategy):
    """One process per device; only clipped sums cross ranks, never raw gradients.

    Every rank computes the clipped sum of its share of one global draw and adds its share of the
    noise; these are summed. If one rank fails, all do, with its reason. An ordinary training
    DataLoader becomes a Poisson loader with rate ``batch_size / len(dataset)``, or draws as the
    plan does; ``batch_size`` is the expected size of the *global* draw, whatever the number of
    ranks.

    Args:
        rows_may_mix_before_the_loss: As for :class:`~opake_lightning.trainer.PoissonLoader`.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``; and all other
            arguments of ``lightning.pytorch.strategies.DDPStrategy`` but those that configure the
            DistributedDataParallel wrapper, which is not used.
    """

    def __init__(
        self, *args: Any, rows_may_mix_before_the_loss: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._rows_may_mix = rows_may_mix_before_the_loss
        unused = [
            name
            for name in ("_ddp_comm_state", "_ddp_comm_hook", "_ddp_comm_wrapper")
            if getattr(self, name) is not None
        ]
        if self._ddp_kwargs or unused or self._model_averaging_period is not None:
            given = sorted(self._ddp_kwargs) or unused or ["model_averaging_period"]
            raise PrivacyError(
                f"OpakeDDP does not wrap the model in DistributedDataParallel, so {given} would "
                "have no effect; leave them out"
            )

    @override
    def setup_environment(self) -> None:
        """As DDP, but a single process keeps the loaders it was given."""
        if self.lightning_module is not None:
            _refuse_plain_module(self.lightning_module.trainer)
        super().setup_environment()
        if self.world_size > 1 and self.lightning_module is not None:
            only_note_sigterm(self.lightning_module.trainer)
        if self.world_size == 1 and self.lightning_module is not None:
            # Lightning would put a DistributedSampler into every loader, which shuffles even a
            # sequential one; NonPrivate() promises an untouched loader.
            connector = self.lightning_module.trainer._accelerator_connector
            connector.use_distributed_sampler = False

    @override
    def setup_distributed(self) -> None:
        """As DDP, but a single process is no group: it needs no port, and no advice on syncing."""
        if self.num_nodes * self.num_processes > 1:
            refuse_to_meet_again()
            super().setup_distributed()
            # Lightning destroys only NCCL groups; a gloo group that meets the end of the
            # interpreter now and then aborts it ("terminate called"), after a run that went well.
            atexit.register(leave_group)
        else:
            reset_seed()
            self.set_world_ranks()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """As DDP, which a single process has no group for."""
        if self.world_size > 1:
            super().setup(trainer)
        else:
            Strategy.setup(self, trainer)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        """Leave out the wrapper, which would average raw gradients."""
        return model

    @override
    def configure_ddp(self) -> None:
        """Start all ranks from rank 0's weights, as the constructor of the wrapper would."""
        assert self.model is not None
        _sync_module_states(self.model)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Make the training loader a Poisson loader for this rank."""
        module = cast("Any", self.lightning_module)
        if module is None or not module.trainer.training or not hasattr(module, "_dp_is_private"):
            return dataloader
        plan = module.configure_privacy()
        if not getattr(plan, "private", False):  # what is no plan is refused a little later
            return dataloader
        if isinstance(dataloader, PoissonLoader):
            dataloader.rank, dataloader.world_size = self.global_rank, self.world_size
            dataloader.rows_may_mix_before_the_loss |= self._rows_may_mix
            return dataloader
        loader = poisson_loader(dataloader, rank=self.global_rank, world_size=self.world_size)
        loader.rows_may_mix_before_the_loss = self._rows_may_mix
        dropped = "; drop_last has no effect" if getattr(dataloader, "drop_last", False) else ""
        drawing = plan.drawing(loader.n_examples, loader.batch_size)
        rank_zero_info(f"opake_lightning: the training DataLoader now draws {drawing}{dropped}.")
        return loader

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """As DDP, but if rank 0 cannot write, all ranks raise, and none goes on without it."""
        failure: Exception | None = None
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        except Exception as error:  # noqa: BLE001 - raised again once the others know
            failure = error
        told = self.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if told is not None:
            raise CheckpointError(f"rank 0 could not save {filepath}: {told}")

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _MultiProcessingLauncher):
            self._launcher = _Launcher(self, start_method=cast("Any", self._start_method))
        elif isinstance(self._launcher, _SubprocessScriptLauncher):
            self._launcher = _ScriptLauncher(
                self._launcher.cluster_environment, self.num_processes, self.num_nodes
            )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="opake_ddp")`` work, and its spawn, fork and notebook forms."""
        for name, method in (
            ("opake_ddp", "popen"),
            ("opake_ddp_spawn", "spawn"),
            ("opake_ddp_fork", "fork"),
            ("opake_ddp_notebook", "fork"),
        ):
            strategy_registry.register(
                name,
                cls,
                description=f"DP-SGD with clipped sums across ranks, start method {method!r}",
                override=True,
                start_method=method,
            )


class _ScriptLauncher(_SubprocessScriptLauncher):
    """Runs what it is given so that the ranks end together."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _refuse_plain_module(kwargs.get("trainer"))
        return super().launch(partial(_together, function), *args, **kwargs)


class _Launcher(_MultiProcessingLauncher):
    """Brings back what was spent, too: a second fit in the main process must go on counting."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        _refuse_plain_module(trainer)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            module: Any = None if trainer is None else trainer.lightning_module
            if hasattr(module, "_dp"):
                module._dp = (module._dp or Past.unknown()).left_behind()
            raise

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        if self._start_method == "forkserver":
            # Lightning does it for spawn alone: all ranks would update the same memory.
            args, kwargs = _disable_module_memory_sharing((args, kwargs))
        run = getattr(None if trainer is None else trainer.lightning_module, "_dp", None)
        if run is not None:
            run.process = os.getpid()  # until it is brought back
        with ending_together():
            super()._wrapping_function(
                process_idx, trainer, function, args, kwargs, return_queue, global_states
            )

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        extra = super().get_extra_results(trainer)
        buffer = io.BytesIO()
        run = getattr(trainer.lightning_module, "_dp", None)
        torch.save(None if run is None else run.to_plain(secret=True), buffer)
        return {**extra, "opake_lightning": buffer.getvalue()}

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        values = torch.load(io.BytesIO(extra["opake_lightning"]), weights_only=True)
        if values is not None:
            cast("Any", trainer.lightning_module)._dp = Past.from_plain(values)


def _refuse_plain_module(trainer: pl.Trainer | None) -> None:
    """Before any process is started: without the mixin there is no clipping, no noise and no sum.

    A guarantee depends on it: the checks of the mixin are not there where it was forgotten.
    """
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return
    name = type(trainer.lightning_module).__name__
    if not hasattr(trainer.lightning_module, "_dp_is_private"):
        raise PrivacyError(
            f"{name} is a plain LightningModule, which OpakeDDP would train without privacy, and "
            f"on several devices without a sum over them. Make it private, class Private(DPMixin, "
            f"{name}), with per_example_loss and configure_privacy; or train it as it is with "
            "another strategy"
        )


def _together(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ending_together():
        return function(*args, **kwargs)


OpakeDDP.register_strategies(StrategyRegistry)
