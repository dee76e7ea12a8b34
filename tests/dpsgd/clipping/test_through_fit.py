"""Model cases through ``Trainer.fit``: a step of SGD without noise is the loop's clipped mean."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optree
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from opake_lightning import DPSGD, DPModule, OpakeDDP, PoissonLoader
from opake_lightning.optimizers import sgd
from opake_lightning.random import key
from tests.dpsgd.clipping.case import TOLERANCE, Case, build, own, truth_of
from tests.dpsgd.clipping.cases import CASES
from tests.dpsgd.clipping.test_engine import SOME, over, quiet
from tests.dpsgd.clipping.test_engine import pytestmark as _of_torch
from tests.helpers import norm_of, rows_of

pytestmark = [
    *_of_torch,
    pytest.mark.filterwarnings("ignore:.*noise_multiplier=0"),
]


class _Rows(Dataset[Any]):
    """The rows of a case's batch."""

    def __init__(self, batch: Any, size: int) -> None:
        self.batch, self.size = batch, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return optree.tree_map(lambda leaf: leaf[index], self.batch)


def _collate(rows: list[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *rows)


class _Module(DPModule):
    """A case as a module: parameters that are a module's own stay what they are."""

    def __init__(self, case: Case, bound: float) -> None:
        super().__init__()
        leaves, self.treespec = optree.tree_flatten(case.params)
        self.leaves = nn.ParameterList(
            [leaf if leaf.requires_grad else nn.Parameter(leaf.clone()) for leaf in leaves]
        )
        self.loss_fn, self.bound = case.loss_fn, bound

    def per_example_loss(self, batch: Any) -> Tensor:
        return self.loss_fn(optree.tree_unflatten(self.treespec, list(self.leaves)), batch)

    def configure_privacy(self) -> DPSGD:
        return DPSGD(clipping_norm=self.bound, noise_multiplier=0.0, key=key(7))

    def configure_optimizers(self) -> Any:
        return sgd(lr=1.0)


def step_of(case: Case, bound: float, path: Path) -> list[Tensor]:
    """What one step of a fit, in which every example is drawn, subtracts from the parameters."""
    module = _Module(case, bound)
    before = [leaf.detach().double().clone() for leaf in module.leaves]
    trainer = pl.Trainer(
        default_root_dir=path,
        accelerator="cpu",
        devices=1,
        strategy=OpakeDDP(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = _Rows(own(case.batch), case.size)
    trainer.fit(module, PoissonLoader(rows, batch_size=case.size, collate_fn=_collate))
    assert trainer.global_step == module.privacy_spent().n_steps == 1
    return [old - leaf.detach().double() for old, leaf in zip(before, module.leaves, strict=True)]


def equals_the_clipped_mean(name: str, dtype: torch.dtype, path: Path) -> None:
    spec = CASES[name]
    case = build(name, spec, dtype)
    truth = truth_of(case)
    bound = statistics.median(truth.norms)
    start = [leaf.detach().clone() for leaf in optree.tree_leaves(case.params)]
    # Forward derivatives of expanded leaves that require a gradient are not to be had in torch.
    with quiet(spec, alone=name == "func-jvp-of-parameters"):
        moved = step_of(case, bound, path)
    want = [total / case.size for total in truth.sums(bound)]
    # A weight is rounded to its own type, however small its step.
    rounded = torch.finfo(dtype).eps * norm_of(start)
    off = norm_of([a - b for a, b in zip(moved, want, strict=True)])
    assert off <= TOLERANCE[dtype] * max(norm_of(want), bound / case.size) + rounded


def test_everything_is_drawn():
    case = build("linear-2d", CASES["linear-2d"], torch.float64)
    loader = PoissonLoader(
        _Rows(case.batch, case.size), batch_size=case.size, collate_fn=_collate, key=key(1)
    )
    assert len(next(iter(loader))[0]) == case.size
    assert torch.equal(
        _collate([rows_of(case.batch, i, i + 1) for i in range(4)])[0][:, 0], case.batch[0]
    )


@over(only=SOME[::3], refused=False)
def test_some_cases_through_a_fit(name, dtype, tmp_path):
    equals_the_clipped_mean(name, dtype, tmp_path)


@pytest.mark.slow
@over(refused=False)
def test_all_cases_through_a_fit(name, dtype, tmp_path):
    equals_the_clipped_mean(name, dtype, tmp_path)


@pytest.mark.slow
@over(refused=True)
def test_what_is_refused_is_refused_in_a_fit(name, dtype, tmp_path):
    spec = CASES[name]
    with pytest.raises((RuntimeError, ValueError), match=spec.refused):
        step_of(build(name, spec, dtype), 1.0, tmp_path)
