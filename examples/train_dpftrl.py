"""Train on scikit-learn's digits with noise that is correlated over the steps of the run.

    python examples/train_dpftrl.py --preset smoke --optimizer adamw --mechanism blt --second-moment
    python examples/train_dpftrl.py --mechanism band_mf --epsilon 1 --key 7
    python examples/train_dpftrl.py --mechanism blt --sampling balls_in_bins --optimizer sgd

Model and data are those of examples/digits.py. Prints one table; S, the sensitivity, is how far one
example moves the correlated sums, in clipping norms.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, get_args

from digits import Digits, show, train
from rich.console import Console

from opake_lightning import DPFTRL, PrivacyError
from opake_lightning.accounting import Ledger
from opake_lightning.dpftrl.noise import (
    Strategy,
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.optimizers import (
    GradientTransformation,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamw,
    ademamix,
    lion,
    radam,
    rmsprop,
    sgd,
)
from opake_lightning.plan import Sampling
from opake_lightning.random import key

PRESETS = {
    "smoke": {"epochs": 2, "batch_size": 256},  # whether it runs; a few seconds
    "digits": {"epochs": 20, "batch_size": 128},
}
# Each with a learning rate that suits this model.
OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "sgd": (lambda lr: sgd(lr, momentum=0.9), 0.1),
    "adam": (adam, 0.03),
    "adamw": (lambda lr: adamw(lr, weight_decay=0.0), 0.03),
    "radam": (radam, 0.1),
    "ademamix": (ademamix, 0.03),
    "rmsprop": (rmsprop, 0.03),
    "adagrad": (adagrad, 0.3),
    "adadelta": (adadelta, 10.0),
    "adafactor": (adafactor, 0.03),
    "lion": (lion, 0.01),
}
# The strategy of each mechanism from the options, and which of them it takes.
MECHANISMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "identity": (identity_strategy, ()),
    "band_mf": (band_mf_strategy, ("bands", "momentum")),
    "blt": (blt_strategy, ("n_buffers", "momentum")),
    "bsr": (bsr_strategy, ("bands", "momentum", "normalized")),
    "bisr": (bisr_strategy, ("bandwidth", "momentum", "normalized")),
    "lambda_cgd": (lambda_cgd_strategy, ("lam", "normalized")),
}
SHAPES = {"bands": 4, "n_buffers": 3, "bandwidth": 4, "lam": 0.9, "momentum": 0.0}


class CorrelatedDigits(Digits):
    """The model of examples/digits.py under a plan and an optimizer of choice."""

    def __init__(self, plan: DPFTRL, optimizer: GradientTransformation) -> None:
        super().__init__()
        self.plan, self.optimizer = plan, optimizer

    def configure_privacy(self) -> DPFTRL:
        return self.plan

    def configure_optimizers(self) -> GradientTransformation:
        return self.optimizer


def options() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="digits", help="number of epochs and batch size")
    add("--epochs", type=int, help="instead of the preset's")
    add("--batch-size", type=int, help="expected batch size, instead of the preset's")
    add("--optimizer", choices=OPTIMIZERS, default="sgd")
    add("--lr", type=float, help="learning rate; each optimizer has one of its own")
    add("--mechanism", choices=MECHANISMS, default="band_mf", help="how noise is correlated")
    add("--bands", type=int, help="diagonals of band_mf and bsr")
    add("--n-buffers", type=int, help="buffers of blt")
    add("--bandwidth", type=int, help="diagonals of the inverse in bisr")
    add("--lam", type=float, help="what lambda_cgd takes back of the step before")
    add("--momentum", type=float, help="what band_mf, blt, bsr, bisr are made for")
    add("--normalized", action="store_true", help="columns of bsr, bisr, lambda_cgd of norm 1")
    add("--second-moment", action="store_true", help="release squares for Adam as well")
    add("--second-momentum", type=float, help="what the squares' strategy is made for")
    add("--sampling", choices=get_args(Sampling), help="how batches are drawn")
    add("--epsilon", type=float, default=3.0)
    add("--delta", type=float, default=1e-4)
    add("--key", type=int, help="a number that makes the run reproducible")
    return parser


def strategy_of(args: argparse.Namespace, momentum: float | None) -> Strategy:
    """The strategy that was asked for; an option that it does not take is refused."""
    make, takes = MECHANISMS[args.mechanism]
    given = {name: getattr(args, name) for name in SHAPES} | {"momentum": momentum}
    if args.normalized:
        given["normalized"] = True
    unused = [n for n, value in given.items() if value is not None and n not in takes]
    if unused:
        names = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise PrivacyError(f"--mechanism {args.mechanism} makes no use of {names}; leave it out")
    defaults = {name: value for name, value in SHAPES.items() if name in takes}
    return make(**defaults | {name: v for name, v in given.items() if v is not None})


def plan_of(args: argparse.Namespace) -> DPFTRL:
    """The plan that was asked for."""
    second = None
    if args.second_moment:
        momentum = args.momentum if args.second_momentum is None else args.second_momentum
        second = strategy_of(args, momentum)
    elif args.second_momentum is not None:
        raise PrivacyError("--second-momentum is for the squares; add --second-moment")
    return DPFTRL(
        clipping_norm=1.0,
        strategy=strategy_of(args, args.momentum),
        second_moment_strategy=second,
        sampling=args.sampling,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        key=None if args.key is None else key(args.key),
    )


def sensitivity(plan: DPFTRL, told: dict[str, Any]) -> float:
    """S of what has been run."""
    run = replace(plan, target_epsilon=None, noise_multiplier=told["noise_multiplier"]).resolve(
        n_examples=told["n_examples"],
        batch_size=told["batch_size"],
        planned_steps=told["planned_steps"],
        spent=Ledger(),
    )
    return run.sensitivity


def main(arguments: list[str] | None = None) -> None:
    """Train, test, report."""
    parser = options()
    args = parser.parse_args(arguments)
    preset = PRESETS[args.preset]
    make, lr = OPTIMIZERS[args.optimizer]
    try:
        plan = plan_of(args)
        model = CorrelatedDigits(plan, make(lr if args.lr is None else args.lr))
    except ValueError as error:  # PrivacyError is one
        parser.error(str(error))
    try:
        cells = train(
            model,
            epochs=preset["epochs"] if args.epochs is None else args.epochs,
            batch_size=preset["batch_size"] if args.batch_size is None else args.batch_size,
            shuffle=plan.sampling_used != "fixed_order",
            logger=False,
            enable_checkpointing=False,
        )
    except PrivacyError as error:
        parser.error(str(error))
    told = model.privacy_spent().plan
    cells["sensitivity"] = f"{sensitivity(plan, told):.4f}"
    show(f"Digits with {args.mechanism} noise, {args.optimizer}", cells)
    Console().print(f"{told['strategy']}, {told['sampling']} batches", highlight=False)


if __name__ == "__main__":
    main()
