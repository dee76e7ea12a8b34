"""A step that draws nobody gets a batch with no rows, whatever the batch is made of."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from opake_lightning import PoissonLoader
from opake_lightning.dpsgd.sampling import poisson_indices
from opake_lightning.random import key
from opake_lightning.trainer.data import _emptied
from tests.cases_batches import Text, all_containers, reachable
from tests.trainer.helpers import Net, Points, make_trainer, plan

N = 300  # with a batch size of 1, more than one step in three draws nobody


def _seed_with_empty_first() -> int:
    return next(
        seed
        for seed in range(100)
        if not len(poisson_indices(key(seed), 0, n_examples=N, sample_rate=1 / N))
    )


@all_containers
def test_an_empty_draw_has_no_rows_in_any_container(case):
    made: list[Any] = []

    def collate(rows: list[Any]) -> Any:
        made.append(case.make(torch.stack([row[0] for row in (*rows, *rows)])))
        return made[-1]

    loader = PoissonLoader(Points(N), 1, key=key(_seed_with_empty_first()), collate_fn=collate)
    batch = next(iter(loader))
    (template,) = made
    assert type(batch) in (type(template), case.becomes)
    x, given = case.get(batch), case.get(template)
    assert (x.shape, x.dtype, len(given)) == ((0, 5), given.dtype, 2)
    kept = reachable(batch).values()
    assert not any(len(item) for item in kept if isinstance(item, Tensor))
    assert Text in map(type, kept)


def test_what_has_no_rows_stays_in_an_empty_draw():
    batch = {"x": torch.ones(2, 3), "scale": torch.tensor(2.0), "names": ["a"], "none": None}
    empty = _emptied(batch)
    assert empty.keys() == batch.keys()
    assert empty["scale"] is batch["scale"]
    assert (empty["x"].shape, empty["names"], empty["none"]) == ((0, 3), ["a"], None)


@pytest.mark.usefixtures("same_noise")
def test_a_mapping_that_is_no_dict_trains_with_empty_draws(tmp_path):
    rows: list[int] = []

    class MappingNet(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            rows.append(len(batch["x"]))

        def per_example_loss(self, batch: Any) -> Tensor:
            assert type(batch) is UserDict
            return F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")

    def collate(examples: list[Any]) -> UserDict[str, Any]:
        x, y, _ = default_collate(examples)
        return UserDict(x=x, y=y, text=["read"] * len(x))

    net = MappingNet(plan(key=key(_seed_with_empty_first())))
    loader = DataLoader(Points(N), batch_size=1, collate_fn=collate)
    make_trainer(tmp_path, max_epochs=1, max_steps=12).fit(net, loader)
    assert net.privacy_spent().n_steps == len(rows) == 12
    assert rows[0] == 0
    assert max(rows) > 0
