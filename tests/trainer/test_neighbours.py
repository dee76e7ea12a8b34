"""One example more or less moves each step's clipped sum by at most C, in a whole fit.

As in ``tests/dpsgd/test_neighbours.py``, with the releases of one fit given to the other, and with
rows that meet before the loss: in ``collate_fn``, in the dataset, in hooks.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import default_collate

from tests.losses import DRAWS, MIXING, MODELS, N_ROWS, STEPS_PER_EPOCH, WHEN, rows
from tests.losses_that_keep import KEEPING
from tests.trainer.forced import Fit, Trained

SLACK = 1 + 1e-6
LAST_ROW = N_ROWS - 1
WITHOUT = [[i for i in draw if i != LAST_ROW] for draw in DRAWS]
one_at_a_time = pytest.mark.filterwarnings("ignore:clipping one example at a time")
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

Batch = tuple[Tensor, Tensor]


def check(make: Any, path: Any, outlier: float = 100.0, **options: Any) -> int:
    """Compare two fits, and return how many steps both made before one was refused."""
    module = make()
    data = rows(outlier=outlier)
    one = Fit(module, path, data=data, **options)
    other = Fit(make(), path, WITHOUT, data=data, released=one.released, **options)
    for fit in (one, other):
        assert fit.module.privacy_spent().n_steps == len(fit.released) == len(fit.sums)
        assert (fit.refusal is None) == (len(fit.released) == len(DRAWS))
    pairs = list(zip(one.sums, other.sums, strict=False))
    for draw, (a, b) in zip(DRAWS, pairs, strict=False):
        limit = module.bound * SLACK if LAST_ROW in draw else 0.0
        assert float((a - b).norm()) <= limit
    return len(pairs)


# -- in the loss ----------------------------------------------------------------------------------

MEASURED = {
    "a random partner behind a coin": {"mixing": "partner", "when": "torch_coin"},
    "a batch mean from the third epoch on": {"mixing": "batch_mean", "when": "warm_up"},
    "the same, small, beside class weights": {
        "model": "weighted_classes",
        "mixing": "batch_mean",
        "weight": 0.001,
    },
}


@pytest.mark.parametrize("parts", MEASURED.values(), ids=MEASURED.keys())
def test_what_engines_for_whole_batches_let_through(tmp_path, parts):
    assert check(lambda: Trained(bound=10.0, **parts), tmp_path) == len(DRAWS)


@one_at_a_time
def test_one_example_at_a_time_with_an_attribute_kept_from_call_to_call(tmp_path):
    assert check(lambda: Trained(keeping="attribute_item", asks="shape"), tmp_path) == 0


@pytest.mark.parametrize("keeping", ["queue", "list_mean", "class_item", "module_dict_item"])
def test_what_is_kept_from_the_second_epoch_on_is_refused_then(tmp_path, keeping):
    steps = check(lambda: Trained(keeping=keeping, when="later"), tmp_path)
    assert steps == STEPS_PER_EPOCH


@pytest.mark.slow
@one_at_a_time
@settings(same_folder, max_examples=80)
@given(
    parts=st.fixed_dictionaries(
        {
            "model": st.sampled_from(sorted(MODELS)),
            "mixing": st.sampled_from(["", *sorted(MIXING)]),
            "keeping": st.sampled_from(["", "", *sorted(KEEPING)]),
            "when": st.sampled_from(sorted(WHEN)),
            "weight": st.sampled_from([0.001, 0.1, 1.0]),
            "asks": st.sampled_from(["", "", "value", "shape"]),
        }
    ),
    outlier=st.sampled_from([1.0, 100.0]),
    bound=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_generated_losses(tmp_path, parts, outlier, bound):
    steps = check(lambda: Trained(bound=bound, **parts), tmp_path, outlier)
    counted = parts["when"] == "counted" and parts["asks"]
    assert parts["keeping"] or counted or steps == len(DRAWS)


# -- before the loss ------------------------------------------------------------------------------


def standardised(batch: Batch) -> Batch:
    x, y = batch
    return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3), y


def mixed_up(batch: Batch) -> Batch:
    x, y = batch
    share = float(np.random.beta(1.0, 1.0))  # noqa: NPY002
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


def collate(then: Any) -> dict[str, Any]:
    """Options of a loader whose batches are changed after they were collated."""
    return {"collate_fn": lambda examples: then(tuple(default_collate(examples)))}


class BeforeTransfer(Trained):
    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return standardised(batch)


class AtTransfer(Trained):
    def transfer_batch_to_device(self, batch: Batch, device: Any, dataloader_idx: int) -> Batch:
        return standardised(super().transfer_batch_to_device(batch, device, dataloader_idx))


class AfterTransfer(Trained):
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return standardised(batch)


class AtBatchStart(Trained):
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        batch[0].sub_(batch[0].mean(0))


class InCallback(pl.Callback):
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        batch[0].sub_(batch[0].mean(0))


BEFORE_THE_LOSS: dict[str, tuple[Any, dict[str, Any]]] = {
    "collate_fn: MixUp": (Trained, collate(mixed_up)),
    "collate_fn: standardised": (Trained, collate(standardised)),
    "on_before_batch_transfer": (BeforeTransfer, {}),
    "transfer_batch_to_device": (AtTransfer, {}),
    "on_after_batch_transfer": (AfterTransfer, {}),
    "on_train_batch_start": (AtBatchStart, {}),
    "a callback's on_train_batch_start": (Trained, {"hooks": [InCallback()]}),
}


@pytest.mark.parametrize("name", BEFORE_THE_LOSS)
def test_rows_that_meet_before_the_loss_are_refused_at_the_first_step(tmp_path, name):
    make, options = BEFORE_THE_LOSS[name]
    assert check(make, tmp_path, 1.0, **options) == 0


def noisy(batch: Batch) -> Batch:
    """Augmentation of each row by itself; as many numbers are drawn however many rows there are."""
    x, y = batch
    return x * (1 + 0.1 * torch.rand(N_ROWS, 1))[: len(x)], y


def longest_first(batch: Batch) -> Batch:
    x, y = batch
    order = x.norm(dim=1).argsort(descending=True)
    return x[order], y[order]


@pytest.mark.parametrize("then", [noisy, longest_first, lambda batch: batch])
def test_rows_that_stay_apart_before_the_loss_are_not(tmp_path, then):
    assert check(Trained, tmp_path, 1.0, **collate(then)) == len(DRAWS)
