"""The LightningModule side: a mixin that owns ``training_step``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor

from opake_lightning.distributed import world_size
from opake_lightning.dpsgd.clipping import AdaptiveClipState
from opake_lightning.dpsgd.clipping._batch import examples_of
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.plan import Plan, PrivateMechanism
from opake_lightning.trainer._before_loss import (
    Arrived,
    arrived,
    require_rows_apart,
    require_unchanged,
)
from opake_lightning.trainer._checkpoint_io import (
    check_seal,
    directories_beside,
    directories_of,
    use_sealed,
)
from opake_lightning.trainer._diagnostics import means, total
from opake_lightning.trainer._lifecycle import begin_steps
from opake_lightning.trainer._lightning_counters import count_epoch, settle
from opake_lightning.trainer._loss import is_in_loss
from opake_lightning.trainer._past import Past
from opake_lightning.trainer._prepare import configure, refuse_replaced
from opake_lightning.trainer._refusals import (
    check_hyperparameters,
    check_loadable,
    check_loader,
    check_module,
    check_trainer,
    is_refused,
    take_the_one,
)
from opake_lightning.trainer._run import Loading, Run
from opake_lightning.trainer._unused_hooks import check_hooks
from opake_lightning.trainer.data import PoissonLoader
from opake_lightning.trainer.report import Meter, PrivacySpent

__all__ = ["DPMixin", "DPModule"]

_RECORD = "opake_lightning"


class DPMixin:
    """Makes a LightningModule train privately; put it first: ``class P(DPMixin, Existing)``.

    A subclass defines three methods: :meth:`per_example_loss`, :meth:`configure_privacy` and
    ``configure_optimizers``, which returns a functional optimizer such as
    :func:`opake_lightning.optimizers.adamw`. The mixin owns ``training_step``; everything else is
    ordinary Lightning.

    Guarantee: every training step makes exactly one release, with the plan's noise, and counts it;
    what cannot be trained privately is refused before the first one.

    Attributes:
        log_not_private: Set to True to log, under ``not_private/...``, the batch's mean loss, the
            means of the auxiliary outputs, the number of examples that were dropped because their
            gradient was not finite, and what
            :func:`~opake_lightning.dpsgd.clipping.not_private_diagnostics` tells. These carry no
            noise; publishing them is outside the guarantee.
    """

    if TYPE_CHECKING:
        _dp: Past | None
        _dp_loading: Loading | None
        _dp_arrived: Arrived | None
        _dp_meter: Meter | None
    log_not_private: bool = False
    # TorchScript reads the annotations of a class that it compiles, and knows few types.
    _dp, _dp_loading, _dp_arrived, _dp_meter = None, None, None, None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap the hooks that must run whether or not a subclass calls ``super()``."""
        super().__init_subclass__(**kwargs)
        others = [base for base in cls.__mro__ if base.__module__.startswith("pytorch_lightning.")]
        if others:
            raise PrivacyError(
                f"{cls.__name__} is a module of the package pytorch_lightning, whose Trainer would "
                "not know it; import lightning.pytorch instead, for modules, callbacks and Trainer"
            )
        if "training_step" in vars(cls):
            raise PrivacyError(
                f"{cls.__name__} defines training_step, which belongs to DPModule: it is what makes"
                " the private step. Define per_example_loss(batch), one loss per example, instead"
            )
        if cls.training_step is not DPMixin.training_step:
            raise PrivacyError(
                f"{cls.__name__} inherits a training_step that comes before DPMixin's and would "
                f"train without privacy; put the mixin first: class {cls.__name__}(DPMixin, ...)"
            )
        for name, wrap in _WRAPPED.items():
            hook = getattr(cls, name, None)
            if hook is not None and not hasattr(hook, "_dp_wrapped"):
                wrapper: Any = functools.wraps(hook)(wrap(name, hook))
                wrapper._dp_wrapped = True
                setattr(cls, name, wrapper)

    # -- what a user writes ---------------------------------------------------------------------

    def per_example_loss(self, batch: Any) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The loss of one example.

        Args:
            batch: A batch as the loader's collate function made it, on the module's device, but of
                one row: the method is called with one row at a time, vectorised over rows. A run
                that is not private calls it with the whole batch.

        Returns:
            Tensor of shape () or [1], or that and a dict of auxiliary tensors.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define per_example_loss(batch), returning the loss of a "
            "batch of one row, e.g. F.cross_entropy(self(x), y)"
        )

    def configure_privacy(self) -> Plan:
        """The plan: ``DPSGD(...)``, ``DPFTRL(...)`` or ``NonPrivate()``."""
        raise NotImplementedError(
            f"{type(self).__name__} must define configure_privacy(), returning for example "
            "DPSGD(clipping_norm=1.0, target_epsilon=3.0, target_delta=1e-5)"
        )

    def privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """ε, δ, number of steps and plan so far; also after ``load_from_checkpoint``.

        ε is stated at ``delta``, in (0, 1), by default the plan's. It is one curve: the promise
        holds at every δ at the same time.

        Of a module that was neither fitted nor loaded, ``complete`` is False: nobody has told what
        its weights have cost.
        """
        return (self._dp or Past.unknown()).spent(delta)

    def reset_privacy(self) -> None:
        """Forget what was spent and take a new key.

        Right only if the coming training data share no person with the data seen so far, or the
        module's weights have been discarded, or come from public data. Nothing else sets the ledger
        back.
        """
        trainer = getattr(self, "_trainer", None)
        state = TrainerState() if trainer is None else trainer.state
        if (state.fn, state.status) == (TrainerFn.FITTING, TrainerStatus.RUNNING):
            raise PrivacyError(
                "reset_privacy() during a fit, whose steps are made of the data that were seen so "
                "far; call it between two fits"
            )
        if self._dp is not None:
            self._dp = self._dp.reset()

    # -- the one hook nobody can go around ------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Make one private step. Returns nothing: a loss is not private."""
        del batch_idx
        module = cast("pl.LightningModule", self)
        run = self._dp_second_look()
        run.train_weights()
        seen: dict[str, float] | None = {} if self.log_not_private else None
        try:
            size = _rows_for_step(module, run, batch)
            optimizer = cast("Any", module.optimizers())
            aux = optimizer.step(closure=lambda: run.release(batch if size != 0 else None, seen))
        except StopIteration as error:  # which would make of this, for Lightning, a skipped step
            raise RuntimeError("per_example_loss or a batch hook raised StopIteration") from error
        self._dp_log(run, aux, size)
        for name, value in (seen or {}).items():
            module.log(f"not_private/{name}", value, batch_size=1)

    @property
    def automatic_optimization(self) -> bool:
        """False, whatever a base class says; ``training_step`` makes the step."""
        return False

    @automatic_optimization.setter
    def automatic_optimization(self, automatic_optimization: bool) -> None:
        if automatic_optimization:
            raise PrivacyError(
                "automatic_optimization=True would step the optimizer on a raw gradient; remove it"
            )

    def _apply_batch_transfer_handler(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # The last that is done to a batch where a test of its rows can see it.
        batch = super()._apply_batch_transfer_handler(batch, device, dataloader_idx)  # type: ignore[misc]
        trainer = getattr(self, "_trainer", None)
        self._dp_arrived = arrived(batch) if trainer is not None and trainer.training else None
        return batch

    def configure_callbacks(self) -> Any:
        """The first hook of a fit: refuse what can be refused before anything is set up."""
        trainer = cast("pl.LightningModule", self).trainer
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_replaced(self)
            if self._dp_is_private():
                check_trainer(trainer)
                check_hooks(self)
            # Lightning advises to save the weights from before the step; they could not be resumed.
            warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")
        return super().configure_callbacks()  # type: ignore[misc]

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """As in Lightning, except inside ``per_example_loss``, where it is refused."""
        if is_in_loss(self):
            raise PrivacyError(
                f"self.log({name!r}) inside per_example_loss would log what single examples say, "
                "without noise; return it as aux, and set log_not_private = True to see it"
            )
        super().log(name, *args, **kwargs)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch. To load it again changes nothing in what is known of the weights' cost."""
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if self._dp is not None:
            self._dp.gives(state)
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As in torch. A ``state_dict`` tells nothing of its cost, so ε is a lower bound from here.

        Not of one that this module has given out itself. Of weights that cost nothing,
        :meth:`reset_privacy` says so; :meth:`load_from_checkpoint` brings a ledger along.
        """
        loading = self._dp_loading
        self._dp = self._dp or Past.unknown()
        try:
            loaded = super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._dp.gets(state_dict)  # torch has loaded what fits by then
            if loading is not None:
                self._dp_loading = None
                loading.undo()
            raise
        self._dp.gets(state_dict)
        return loaded

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805 - a classmethod that Lightning does not let be called on an instance
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in Lightning; refuses a file that was damaged, and loads without running code.

        What ``privacy_spent()`` then tells is the cost of the weights in the file. A new fit from
        them starts from what the run went on to spend after it had saved them, if that is recorded
        beside the file.
        """
        check_seal(checkpoint_path)
        weights_only = True if weights_only is None else weights_only
        module = super().load_from_checkpoint(  # type: ignore[misc]
            checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs
        )
        if module._dp is not None:
            module._dp.look_in(directories_beside(checkpoint_path))
        return module

    # -- run before the hook of the same name, whoever overrides it --------------------------------

    def _dp_setup(self, stage: str) -> None:
        self._dp_loading = None  # there may be one of a fit that failed
        trainer: Any = cast("pl.LightningModule", self).trainer
        plan = self.configure_privacy() if stage == "fit" else None
        for owner in (self, trainer.datamodule):
            check_hyperparameters(owner, getattr(plan, "key", None))
            if getattr(plan, "private", False):
                check_loadable(owner, trainer)
        use_sealed(trainer.strategy, self._dp_saving)

    def _dp_saving(self, directory: Path, checkpoint: dict[str, Any]) -> None:
        # A run is resumed from a full checkpoint; what it releases from now on counts there.
        run = self._dp
        if isinstance(run, Run) and run.mechanism.private and "optimizer_states" in checkpoint:
            run.journal.keep_in(directory, run.record.known)

    def _dp_on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if is_in_loss(self):
            raise PrivacyError(
                "save_checkpoint inside per_example_loss: the step at hand is not counted yet, and "
                "whether there is a file would tell about an example; save in a callback, such as "
                "ModelCheckpoint(every_n_train_steps=...)"
            )
        if self._dp is not None:
            checkpoint[_RECORD] = self._dp.record.public().to_plain(secret=False)
        if isinstance(self._dp, Run):
            _publish(self._dp, checkpoint["state_dict"])
            self._dp.gives(checkpoint["state_dict"])

    def _dp_on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = getattr(self, "_trainer", None)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            if not checkpoint.get("optimizer_states"):
                raise CheckpointError(
                    "the checkpoint holds weights only, so the run cannot go on from it: its key, "
                    "counters and optimizer state are missing. Load it with load_from_checkpoint, "
                    "which keeps its ledger, and fit without ckpt_path"
                )
            settle(checkpoint)
            # The optimizer's entry brings the record, once configure_optimizers has made it.
            self._dp_loading = Loading.into(self, checkpoint, directories_of(trainer))
            self._dp = self._dp.apart() if self._dp else None
        loaded = Past.loaded(checkpoint.get(_RECORD))
        if trainer is not None:
            loaded.look_in(directories_of(trainer))
        # At once, and not when all has been loaded: whatever fails in between, the module may have
        # the weights by then.
        if self._dp is None:
            self._dp = loaded
        else:
            self._dp.joined_by(loaded)

    def _dp_after_on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self._dp is not None
        self._dp.gives(checkpoint["state_dict"])

    def _dp_on_train_start(self) -> None:
        count_epoch(cast("pl.LightningModule", self).trainer)
        self._dp_meter = Meter()
        # An epoch that is resumed in its middle has no on_train_epoch_start.
        self._dp_on_train_epoch_start()

    def _dp_after_on_train_start(self) -> None:
        self._dp_after_on_train_epoch_start()

    def _dp_after_on_train_epoch_start(self) -> None:
        if isinstance(self._dp, Run):
            begin_steps(self._dp)

    def _dp_on_train_epoch_start(self) -> None:
        # reload_dataloaders_every_n_epochs makes a new loader, which has no key yet.
        loader = take_the_one(cast("pl.LightningModule", self).trainer)
        if isinstance(loader, PoissonLoader) and isinstance(self._dp, Run):
            loader.follow(self._dp.position, self._dp.draw)

    def _dp_on_validation_start(self) -> None:
        fitting = cast("pl.LightningModule", self).trainer.state.fn == TrainerFn.FITTING
        if fitting and isinstance(self._dp, Run):
            self._dp.publish_weights()

    def _dp_on_validation_end(self) -> None:
        fitting = cast("pl.LightningModule", self).trainer.state.fn == TrainerFn.FITTING
        if fitting and isinstance(self._dp, Run):
            self._dp.train_weights()

    def _dp_on_train_end(self) -> None:
        # From here on the module is what its user tests, exports and publishes.
        if isinstance(self._dp, Run):
            self._dp.publish_weights()
            if self._dp_meter is not None:
                self._dp_meter.finish(self._dp, cast("pl.LightningModule", self).trainer)

    def _dp_on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch is None and isinstance(self._dp, Run) and self._dp.mechanism.private:
            raise PrivacyError(
                f"batch {batch_idx} became None, in the collate_fn or a batch hook, and Lightning "
                "makes no step on None: whether there is noise would depend on the data. Return a "
                "batch with one row per drawn example; of an empty draw, one with zero rows"
            )

    def _dp_after_on_train_batch_start(self, response: Any) -> None:
        if response == -1 and self._dp_is_private():
            raise PrivacyError(
                f"on_train_batch_start of {type(self).__name__} returned -1, which skips the rest "
                "of the epoch: how many releases there are would depend on the data. Set "
                "limit_train_batches or max_steps, or drop examples before training, by a rule "
                "that looks at each by itself"
            )

    def _dp_on_train_epoch_end(self) -> None:
        self._dp_refuse_skipped()

    # -- inside ---------------------------------------------------------------------------------

    def _dp_refuse_skipped(self) -> None:
        # Neither the last batch nor a limit nor should_stop, so something ended it by an exception.
        trainer: Any = cast("pl.LightningModule", self).trainer
        if not trainer.fit_loop.epoch_loop.done and self._dp_is_private():
            raise PrivacyError(
                "a hook raised StopIteration before the epoch's last step, which skips the rest of "
                "it: how many releases there are would depend on the data. Set trainer.should_stop "
                "to end a run; steps made so far are counted"
            )

    def _dp_is_private(self) -> bool:
        return getattr(self.configure_privacy(), "private", True)

    def _dp_second_look(self) -> Run:
        module = cast("pl.LightningModule", self)
        run = self._dp
        if not isinstance(run, Run):
            raise PrivacyError("training_step was called outside of Trainer.fit")
        trainable = [p for p in module.parameters() if p.requires_grad]
        known = list(run.params.values())
        if len(trainable) != len(known) or any(
            a is not b for a, b in zip(trainable, known, strict=True)
        ):
            raise PrivacyError(
                "the trainable parameters changed after configure_optimizers (a layer was replaced,"
                " frozen or unfrozen); clipping, noise and optimizer state cover the old ones. "
                "Change the model in __init__ or configure_model, or start another fit"
            )
        if run.mechanism.private and is_refused(module, known):
            check_module(module)
            raise PrivacyError("the module changed to what a private run cannot have")
        return run

    def _dp_log(self, run: Run, aux: Any, size: int | None) -> None:
        module = cast("pl.LightningModule", self)
        if self._dp_meter is not None:
            self._dp_meter.show(run, module)
        if isinstance(run.state.clip, AdaptiveClipState):
            # Of the next step; made from noisy counts, so it may be seen.
            module.log("privacy/clipping_norm", run.state.clip.clipping_norm, batch_size=1)
        if self.log_not_private:
            values: dict[str, Tensor] = {}
            if aux is not None and size != 0:
                losses, extra = aux
                values = {"loss": losses, **extra}
            # Of all ranks, so each takes part, also one that drew nothing.
            seen = means(values)
            seen["nonfinite_examples"] = total(getattr(run.state.clip, "nonfinite_examples", 0))
            for name, value in seen.items():
                module.log(f"not_private/{name}", float(value), batch_size=1)


def _publish(run: Run, state: dict[str, Any]) -> None:
    """Put the weights to publish in place of the trained ones, under all names of a tied one."""
    published = run.published()
    if published is None:
        return
    names = {p.data_ptr(): name for name, p in run.params.items() if p.numel()}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.data_ptr() in names:
            state[key] = published[names[value.data_ptr()]].to(value).clone()


def _wrap_configure(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    del name

    def configure_optimizers(self: Any) -> Any:
        try:
            returned = original(self)
        except TypeError as error:
            if "multiple values for argument 'lr'" not in str(error):
                raise
            raise TypeError(
                f"{error}: a functional optimizer is made without self.parameters(), as "
                "adamw(lr=1e-3), and is handed them later"
            ) from error
        return configure(self, returned)

    return configure_optimizers


def _wrap_before(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        getattr(self, f"_dp_{name}")(*args, **kwargs)
        return original(self, *args, **kwargs)

    return hook


def _wrap_around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        getattr(self, f"_dp_{name}")(*args, **kwargs)
        response = original(self, *args, **kwargs)
        getattr(self, f"_dp_after_{name}")(*args, **kwargs)
        return response

    return hook


def _wrap_moving(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    before = _wrap_before(name, original)
    own = original is not getattr(pl.LightningModule, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = self._dp if own else None
        with run.in_hook(name) if isinstance(run, Run) else nullcontext():
            return before(self, *args, **kwargs)

    return hook


def _wrap_batch_start(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    del name

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        response = original(self, *args, **kwargs)
        self._dp_after_on_train_batch_start(response)
        return response

    return hook


_WRAPPED: dict[str, Callable[[str, Callable[..., Any]], Any]] = {
    "configure_optimizers": _wrap_configure,
    "setup": _wrap_before,
    "on_train_start": _wrap_around,
    "on_save_checkpoint": _wrap_before,
    "on_load_checkpoint": _wrap_around,
    "on_train_epoch_start": _wrap_around,
    "on_train_batch_start": _wrap_batch_start,
    "on_train_batch_end": _wrap_moving,
    "on_train_epoch_end": _wrap_moving,
    "on_train_end": _wrap_before,
    "on_validation_start": _wrap_before,
    "on_validation_end": _wrap_before,
}


class DPModule(DPMixin, pl.LightningModule):
    """A LightningModule that trains privately: :class:`DPMixin` and ``LightningModule``."""


def _rows_for_step(module: Any, run: Run, batch: Any) -> int | None:
    """How many examples the batch holds, after checking that it is the one for this step."""
    before, module._dp_arrived = module._dp_arrived, None
    if not isinstance(run.mechanism, PrivateMechanism):
        return None
    loader = check_loader(module.trainer.train_dataloader)
    if (loader.n_examples, loader.batch_size) != (
        run.mechanism.n_examples,
        run.mechanism.batch_size,
    ):
        raise PrivacyError(
            f"the training loader now draws {loader.batch_size} of {loader.n_examples} examples, "
            f"but the run is accounted for {run.mechanism.batch_size} of "
            f"{run.mechanism.n_examples}; start another fit for other data"
        )
    if loader.rows_may_mix_before_the_loss != run.mechanism.rows_may_mix_before_the_loss:
        raise PrivacyError(
            "the training loader's rows_may_mix_before_the_loss is not what the run began with; "
            "start another fit for it"
        )
    if loader.world_size != world_size():
        raise PrivacyError(
            f"the training loader draws for {loader.world_size} processes, but the gradients of "
            f"{world_size()} would be summed, so that examples count more than once; let "
            "Trainer(strategy=OpakeDDP(), devices=...) make the process group"
        )
    key, step = run.position()
    draw = loader.draw
    if draw is None or draw.step != step:
        raise PrivacyError(
            f"the batch was drawn for step {draw.step if draw else None}, but step {step} comes "
            "next; hand the PoissonLoader to the Trainer as it is"
        )
    if draw.size and (rows := examples_of((batch,)).size) != draw.size:
        raise PrivacyError(
            f"the batch has {rows} rows for {draw.size} drawn examples; one row per example is the "
            "unit of privacy, so collate_fn and batch hooks must not add, drop or merge rows"
        )
    if not loader.rows_may_mix_before_the_loss:
        if before is not None:
            require_unchanged(module, batch, before)
        require_rows_apart(module, loader, key, step)
    return draw.size
