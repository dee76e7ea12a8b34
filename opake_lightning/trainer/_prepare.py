"""Getting a fit ready: the plan resolved, the run prepared, everything checked before it starts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from opake_lightning.accounting import Ledger
from opake_lightning.distributed import require_equal, world_size
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.plan import NonPrivate, Plan, PrivateMechanism
from opake_lightning.random import RngKey, fold_in, fresh_key
from opake_lightning.trainer._inputs import inputs_of
from opake_lightning.trainer._lifecycle import begin, begin_resumed
from opake_lightning.trainer._loss import ModuleLoss
from opake_lightning.trainer._past import Past
from opake_lightning.trainer._record import RunRecord
from opake_lightning.trainer._refusals import (
    check_loader,
    check_module,
    check_reloading,
    check_signature,
    check_trainer,
    take_the_one,
)
from opake_lightning.trainer._run import Fit
from opake_lightning.trainer._unused_hooks import check_hooks
from opake_lightning.trainer.data import PoissonLoader
from opake_lightning.trainer.optimizer import FunctionalOptimizer
from opake_lightning.trainer.report import shorten_numbers, summary

__all__ = ["configure", "refuse_replaced"]


def configure(module: Any, returned: Any) -> FunctionalOptimizer:
    """Turn a functional optimizer into the facade, with everything the fit needs made ready."""
    if isinstance(returned, FunctionalOptimizer):
        return returned
    refuse_replaced(module)
    transformation = _functional(returned)
    plan = module.configure_privacy()
    if not isinstance(plan, Plan):
        raise TypeError(
            f"configure_privacy must return DPSGD(...), DPFTRL(...) or NonPrivate(), got {plan!r}"
        )
    trainer = module.trainer
    past = module._dp.past() if module._dp else Past(RunRecord(""))
    resuming = bool(trainer.ckpt_path)
    # A checkpoint brings its own ledger, and the σ that was calibrated with it.
    spent = Ledger() if resuming else past.record.knowing(past.since).ledger
    loader: PoissonLoader | None = None
    steps: int | None = None
    mechanism: PrivateMechanism | NonPrivate
    if isinstance(plan, NonPrivate):
        mechanism = plan
    else:
        check_trainer(trainer)
        check_reloading(trainer, plan)
        check_hooks(module)
        check_module(module)
        check_signature(module)
        if trainer.train_dataloader is None:
            trainer.fit_loop.setup_data()
        loader = check_loader(take_the_one(trainer))
        steps = _planned_steps(trainer)
        if steps == 0 and (plan.needs_horizon or plan.target_epsilon is not None):
            raise PrivacyError(
                f"the trainer has no step left to make (max_epochs={trainer.max_epochs}, "
                f"max_steps={trainer.max_steps}), so there is nothing to calibrate noise for; make "
                "a new Trainer, or raise trainer.fit_loop.max_epochs"
            )
        mechanism = plan.resolve(
            n_examples=loader.n_examples,
            batch_size=loader.batch_size,
            planned_steps=steps,
            spent=spent,
        )
        mix, loader.untested = loader.rows_may_mix_before_the_loss, True
        mechanism = replace(mechanism, rows_may_mix_before_the_loss=mix)
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if isinstance(mechanism, PrivateMechanism):
        mechanism.check(params, steps)
        mechanism.check_optimizer(transformation, params)
    private = isinstance(mechanism, PrivateMechanism)
    loss_fn = ModuleLoss(module, lambda: run.at_first_step, whole=not private)
    microbatch = getattr(plan, "microbatch_size", None)
    fit = Fit(
        mechanism, transformation, params, loss_fn,
        inputs_of(mechanism, transformation, loader),
        f"{world_size()} rank(s), microbatches of {microbatch}, {trainer.precision}",
        partial(_steps_left, trainer),
    )  # fmt: skip
    require_equal({**_inputs_of_rank(fit), "log_not_private": module.log_not_private})
    run = (begin_resumed if resuming else begin)(past, fit, _common_key(trainer, plan))
    key, step = run.position()
    digest = fold_in(key, "compare").hex()
    require_equal({"the key (compared by digest)": digest, "the number of steps so far": step})
    # Of a fit that failed earlier, there may be one that is not this fit's.
    run.loading, module._dp_loading = module._dp_loading if resuming else None, None
    if loader is not None:
        loader.follow(run.position, run.draw)
    module._dp = run
    shorten_numbers(trainer)
    rank_zero_info(summary(mechanism, steps=steps, spent=spent))
    return FunctionalOptimizer.named(getattr(transformation, "name", ""))(run, params)


def _planned_steps(trainer: pl.Trainer) -> int | None:
    """Steps that this fit will make; None if it has no planned end.

    Unlike ``trainer.estimated_stepping_batches`` it is right for a second fit with one trainer,
    whose epochs may be of another length.
    """
    # A checkpoint brings its own counts, and was calibrated to the fit as a whole.
    steps, epochs = (0, 0) if trainer.ckpt_path else (trainer.global_step, trainer.current_epoch)
    by_steps = None if trainer.max_steps == -1 else trainer.max_steps - steps
    if trainer.max_epochs in (None, -1):
        return by_steps if by_steps is None else max(by_steps, 0)
    by_epochs = (trainer.max_epochs - epochs) * int(trainer.num_training_batches)
    return max(by_epochs if by_steps is None else min(by_epochs, by_steps), 0)


def _steps_left(trainer: pl.Trainer) -> int | None:
    """Steps still to come in a fit that goes on from a checkpoint, which is being loaded.

    Lightning has its counters back by then; the epochs before may have been of another length.
    """
    by_steps = None if trainer.max_steps == -1 else trainer.max_steps - trainer.global_step
    if trainer.max_epochs in (None, -1):
        return by_steps
    length = int(trainer.num_training_batches)
    loop: Any = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
    by_epochs = (trainer.max_epochs - epochs.processed) * length
    if epochs.ready > epochs.processed:
        by_epochs -= min(batches.processed, length)
    return by_epochs if by_steps is None else min(by_epochs, by_steps)


def refuse_replaced(module: Any) -> None:
    """Refuse methods put on the object, where no wrapper of the class can see them."""
    for name in ("training_step", "configure_optimizers"):
        if name in vars(module):
            raise PrivacyError(
                f"{name} was replaced on the {type(module).__name__} object, as "
                "torch.compile(module) and LightningCLI's --optimizer do; a private run needs the "
                "class's own. Compile submodules instead, and return the functional optimizer from "
                "the class's configure_optimizers"
            )


def _functional(returned: Any) -> GradientTransformation:
    if isinstance(returned, (list, tuple)) and not isinstance(returned, GradientTransformation):
        if len(returned) == 1:
            return _functional(returned[0])
        raise PrivacyError(
            f"configure_optimizers returned {len(returned)} objects; return one functional "
            "optimizer, whose learning-rate schedule is an argument of it: "
            "adamw(lr=schedule)"
        )
    if isinstance(returned, dict):
        raise PrivacyError(
            "configure_optimizers returned a dict; torch LR schedulers do not reach a functional "
            "optimizer. Return the optimizer alone, with the schedule as its lr: "
            "adamw(lr=cosine_schedule(...))"
        )
    if not isinstance(returned, GradientTransformation):
        raise PrivacyError(
            f"configure_optimizers returned {type(returned).__name__}; a private run needs a "
            "functional optimizer, which sees only the released gradient, such as "
            "opake_lightning.optimizers.adamw(lr=1e-3)"
        )
    return returned


def _common_key(trainer: pl.Trainer, plan: Plan) -> RngKey:
    key = plan.key or fresh_key()
    return RngKey.from_hex(trainer.strategy.broadcast(key.hex()))


def _inputs_of_rank(fit: Fit) -> dict[str, object]:
    inputs = fit.inputs
    return {
        **inputs.plan,
        "noise_multiplier": fit.mechanism.noise_multiplier,
        "the optimizer's settings": inputs.settings,
        "the learning rates (compared by digest)": inputs.rates,
        "the training data (some rows, compared by digest)": inputs.rows,
        "the trainable parameters": [
            (name, tuple(p.shape), str(p.dtype)) for name, p in fit.params.items()
        ],
    }
