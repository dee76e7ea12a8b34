"""The Poisson loader: whose draws, in what structure, from which DataLoader."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from opake_lightning import PoissonLoader, PrivacyError
from opake_lightning.dpsgd.sampling import poisson_indices
from opake_lightning.random import key
from opake_lightning.trainer.data import Draw, poisson_loader
from tests.trainer.helpers import Draws, Net, Points, make_loader, make_trainer, plan, seed_globals

RARE = 1 / 300  # batch_size=1 of 300 examples: three steps in four draw nobody


def indices(loader: PoissonLoader, epochs: int = 1) -> list[list[int]]:
    return [batch[2].tolist() for _ in range(epochs) for batch in loader]


# -- on its own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_are_those_of_key_and_step(workers):
    loader = PoissonLoader(Points(), 6, key=key(7), num_workers=workers)
    assert len(loader) == 4
    assert loader.sample_rate == 0.25
    expected = [
        poisson_indices(key(7), t, n_examples=24, sample_rate=0.25).tolist() for t in range(8)
    ]
    assert indices(loader, epochs=2) == expected
    assert loader.next_step == 8
    assert loader.draw == Draw(7, len(expected[7]))


def test_an_uneven_epoch_has_a_step_more():
    assert len(PoissonLoader(Points(), 7)) == 4
    assert len(PoissonLoader(Points(), 24)) == 1


def test_state_is_the_next_step_and_not_the_key():
    loader = PoissonLoader(Points(), 6, key=key(7))
    first = indices(loader, epochs=2)
    resumed = PoissonLoader(Points(), 6, key=key(7))
    resumed.load_state_dict({"next_step": 5})
    assert resumed.state_dict() == {"next_step": 5}
    assert indices(resumed)[:3] == first[5:]
    assert loader.state_dict() == {"next_step": 8}
    with pytest.raises(ValueError, match="next_step"):
        resumed.load_state_dict({"next_step": -1})


def test_who_is_followed_says_which_step_comes_next():
    loader = PoissonLoader(Points(), 6)
    loader.follow(lambda: (key(7), 5))
    assert next(iter(loader)) is not None
    assert loader.draw.step == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_off_epoch_goes_on_at_the_next_step(workers):
    loader = PoissonLoader(
        Points(), 6, key=key(7), num_workers=workers, persistent_workers=workers > 0
    )
    whole = indices(PoissonLoader(Points(), 6, key=key(7)), epochs=2)
    for batch in loader:
        assert batch[2].tolist() == whole[0]
        break
    assert indices(loader) == whole[1:5]


def test_ranks_share_one_draw():
    parts = [
        indices(PoissonLoader(Points(), 6, key=key(7), rank=rank, world_size=3))
        for rank in range(3)
    ]
    whole = indices(PoissonLoader(Points(), 6, key=key(7)))
    assert [sorted(a + b + c) for a, b, c in zip(*parts, strict=True)] == whole


def test_without_a_key_there_is_nothing_to_draw_from():
    with pytest.raises(PrivacyError, match="has no key"):
        next(iter(PoissonLoader(Points(), 6)))


def test_a_key_of_its_own_is_refused_under_a_module(tmp_path):
    with pytest.raises(PrivacyError, match="give the key to the plan"):
        make_trainer(tmp_path).fit(Net(), PoissonLoader(Points(), 6, key=key(7)))


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentations_belong_to_the_step(workers):
    """Not to what was drawn from the global generators before, nor to who draws."""

    class Noisy(Points):
        def __getitem__(self, index: int) -> Any:
            noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
            return noise, torch.rand(()), torch.tensor(index)

    def epoch(seed: int, n: int) -> list[Tensor]:
        seed_globals(seed)
        return [b[0] for b in PoissonLoader(Noisy(), 6, key=key(7), num_workers=n)]

    seed_globals(3)
    before = torch.rand(()), random.random(), np.random.rand()  # noqa: NPY002
    a, b = epoch(1, 0), epoch(2, workers)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert len({float(x) for batch in a for x in batch}) == sum(len(batch) for batch in a)
    # ... and the caller's own generators go on as if nothing had been drawn.
    seed_globals(3)
    next(iter(PoissonLoader(Noisy(), 6, key=key(7))))
    seed_globals(3)
    assert before == (torch.rand(()), random.random(), np.random.rand())  # noqa: NPY002


def test_ranks_augment_differently():
    class Noisy(Points):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(()), 0, 0

    parts = [
        next(iter(PoissonLoader(Noisy(), 24, key=key(7), rank=rank, world_size=2)))[0]
        for rank in range(2)
    ]
    assert len(parts[0]) == len(parts[1]) == 12
    assert not set(parts[0].tolist()) & set(parts[1].tolist())


def test_batched_fetching_is_used_where_a_dataset_has_it():
    class Batched(Points):
        def __getitems__(self, wanted: list[int]) -> list[Any]:
            assert type(wanted) is list
            return [Points.__getitem__(self, index) for index in wanted]

        def __getitem__(self, index: int) -> Any:
            raise AssertionError

    assert indices(PoissonLoader(Batched(), 6, key=key(7))) == indices(
        PoissonLoader(Points(), 6, key=key(7))
    )


# -- made from a DataLoader -----------------------------------------------------------------------


def _collate(rows: list[Any]) -> Any:
    return torch.utils.data.default_collate(rows)


def _init(worker: int) -> None:
    del worker


def test_everything_but_the_order_is_kept():
    generator = torch.Generator()
    given = DataLoader(
        Points(),
        batch_size=6,
        shuffle=True,
        num_workers=1,
        collate_fn=_collate,
        pin_memory=True,
        timeout=7,
        worker_init_fn=_init,
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    made = poisson_loader(given, rank=0, world_size=1)
    assert (made.batch_size, made.dataset, made.num_workers) == (6, given.dataset, 1)
    for name in (
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "multiprocessing_context",
    ):
        assert getattr(made._loader, name) == getattr(given, name), name


@pytest.mark.parametrize(
    "one",
    [
        lambda loader: [loader],
        lambda loader: (loader,),
        lambda loader: {"train": loader},
        lambda loader: CombinedLoader([loader], "max_size"),
        lambda loader: CombinedLoader(loader, "max_size_cycle"),
    ],
    ids=["list", "tuple", "dict", "combined list", "combined"],
)
@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.parametrize("strategy", ["opake_ddp", "auto"])
def test_a_collection_of_one_loader_is_that_loader(one, reload, strategy, tmp_path):
    class Has(Net):
        def train_dataloader(self) -> Any:
            return one(PoissonLoader(Points(), 6) if strategy == "auto" else make_loader())

    net, alone = Has(), Net()
    how = {"strategy": strategy, "reload_dataloaders_every_n_epochs": reload}
    trainer = make_trainer(tmp_path, **how)
    trainer.fit(net)
    make_trainer(tmp_path).fit(alone, make_loader())
    assert all(map(torch.equal, net.parameters(), alone.parameters()))
    assert isinstance(trainer.train_dataloader, PoissonLoader)


def test_drop_last_is_ignored_with_a_note(tmp_path, caplog):
    net = Net()
    loader = DataLoader(Points(23), batch_size=6, drop_last=True)
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, max_epochs=1).fit(net, loader)
    assert net.privacy_spent().n_steps == 4
    assert "drop_last has no effect" in caplog.text
    assert caplog.text.count("now draws Poisson batches") == 1


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Points())


class _OwnSampler(SequentialSampler):
    pass


class _OwnRandomSampler(RandomSampler):
    """Its order may be anything."""


class _OwnBatchSampler(BatchSampler):
    pass


class _Normalising(DataLoader[Any]):
    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x / x.norm(), y


def _refused() -> dict[str, tuple[DataLoader[Any], str]]:
    data = Points()
    weighted = WeightedRandomSampler([1.0] * 24, num_samples=24)
    batches = _OwnBatchSampler(SequentialSampler(data), 6, drop_last=False)
    return {
        "iterable": (DataLoader(_Stream(), batch_size=6), "_Stream is an IterableDataset"),
        "weighted": (DataLoader(data, 6, sampler=weighted), "WeightedRandomSampler"),
        "own sampler": (DataLoader(data, 6, sampler=_OwnSampler(data)), "_OwnSampler"),
        "own random sampler": (
            DataLoader(data, 6, sampler=_OwnRandomSampler(data)),
            "_OwnRandomSampler",
        ),
        "own batch sampler": (DataLoader(data, batch_sampler=batches), "_OwnBatchSampler"),
        "replacement": (
            DataLoader(data, 6, sampler=RandomSampler(data, replacement=True)),
            "RandomSampler",
        ),
        "a part": (
            DataLoader(data, 6, sampler=RandomSampler(data, num_samples=12)),
            "RandomSampler",
        ),
        "no batches": (DataLoader(data, batch_size=None), "batch_size"),
        "too large": (DataLoader(data, batch_size=25), r"batch_size=25 .*\(24 examples\)"),
        "empty": (DataLoader(TensorDataset(torch.zeros(0, 5)), batch_size=6), "dataset is empty"),
        "not a DataLoader": ([1, 2], "list"),
        "own order": (_Normalising(data, 6), "_Normalising has an __iter__ of its own"),
    }


@pytest.mark.parametrize("name", _refused())
def test_what_cannot_be_drawn_independently_is_refused(name):
    loader, match = _refused()[name]
    with pytest.raises(ValueError, match=match):  # PrivacyError is one
        poisson_loader(loader, rank=0, world_size=1)


@pytest.mark.parametrize("name", ["iterable", "weighted", "own batch sampler", "too large"])
def test_the_refusal_reaches_the_user_of_fit_before_a_step(name, tmp_path):
    loader, match = _refused()[name]
    net = Net()
    with pytest.raises(PrivacyError, match=match):
        make_trainer(tmp_path).fit(net, loader)
    assert net.privacy_spent().n_steps == 0


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"dataset": _Stream()}, PrivacyError, "iterable-style"),
        ({"dataset": iter([])}, PrivacyError, "iterable-style"),
        ({"batch_size": 25}, PrivacyError, "larger than the dataset"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"shuffle": True}, PrivacyError, "remove shuffle="),
        ({"drop_last": True}, PrivacyError, "remove drop_last="),
        ({"sampler": SequentialSampler([])}, PrivacyError, "remove sampler="),
        ({"in_order": False}, ValueError, "in_order"),
        ({"dataset": TensorDataset(torch.zeros(0, 1))}, ValueError, "empty"),
    ],
)
def test_arguments_are_checked(kwargs, error, match):
    with pytest.raises(error, match=match):
        PoissonLoader(**{"dataset": Points(), "batch_size": 6, **kwargs})


# -- empty draws ----------------------------------------------------------------------------------


class Records(Dataset[dict[str, Any]]):
    """What text pipelines yield: int64 tensors and strings in a dict."""

    def __init__(self, n: int) -> None:
        self.points = Points(n)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y, index = self.points[index]
        return {"x": x, "label": y, "index": index, "text": f"row {index}", "weight": 1.0}


def collate_records(rows: list[dict[str, Any]]) -> dict[str, Any]:
    out = torch.utils.data.default_collate(
        [{k: v for k, v in r.items() if k != "text"} for r in rows]
    )
    return {**out, "text": [row["text"] for row in rows]}


class DictNet(Net):
    def per_example_loss(self, batch: dict[str, Any]) -> Tensor:
        assert batch["label"].dtype == torch.int64
        return F.cross_entropy(self(batch["x"]), batch["label"], reduction="none") * batch["weight"]


def _rare_loader(n: int, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Records(n), batch_size=1, collate_fn=collate_records, **kwargs)


def _seed_with_empty_first() -> int:
    return next(s for s in range(100) if not len(_draw(s, 0)))


def _draw(seed: int, step: int, n: int = 300) -> Any:
    return poisson_indices(key(seed), step, n_examples=n, sample_rate=1 / n)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_batch_has_the_structure_of_a_real_one(workers):
    seed = _seed_with_empty_first()
    loader = PoissonLoader(
        Records(300), 1, key=key(seed), collate_fn=collate_records, num_workers=workers
    )
    batches = [batch for batch, _ in zip(loader, range(6), strict=False)]
    sizes = [len(_draw(seed, t)) for t in range(6)]
    assert 0 in sizes
    assert sizes[0] == 0
    for batch, size in zip(batches, sizes, strict=True):
        assert batch["x"].shape == (size, 5)
        assert batch["label"].dtype == batch["index"].dtype == torch.int64
        assert batch["weight"].dtype == torch.float64
        assert len(batch["index"]) == size


class Moves(pl.Callback):
    """Whether each step moved the parameters."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.moved: list[bool] = []
        self.last = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        now = [p.detach().clone() for p in module.parameters()]
        assert all(torch.isfinite(p).all() for p in now)
        self.moved.append(all((a != b).any() for a, b in zip(now, self.last, strict=True)))
        self.last = now


@pytest.mark.parametrize("strategy", ["auto", "opake_ddp"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
@pytest.mark.usefixtures("same_noise")
def test_an_empty_draw_is_a_step_with_noise(kind, workers, strategy, tmp_path):
    seed = _seed_with_empty_first()
    draws, moves = Draws(), Moves()
    net = (DictNet if kind == "dict" else Net)(plan(key=key(seed)))
    if strategy == "auto":
        data, collate = (Records(300), collate_records) if kind == "dict" else (Points(300), None)
        loader: Any = PoissonLoader(data, 1, collate_fn=collate, num_workers=workers)
    elif kind == "dict":
        loader = _rare_loader(300, num_workers=workers)
    else:
        loader = DataLoader(Points(300), batch_size=1, num_workers=workers)
    trainer = make_trainer(
        tmp_path, max_epochs=1, max_steps=12, strategy=strategy, callbacks=[draws, moves]
    )
    trainer.fit(net, loader)
    assert draws.seen == {t: _draw(seed, t).tolist() for t in range(12)}
    assert sum(not drawn for drawn in draws.seen.values()) >= 3
    assert moves.moved == [True] * 12
    assert net.privacy_spent().n_steps == trainer.global_step == 12
    assert net._dp.state.optimizer["step"] == 12


def test_a_run_of_nothing_but_empty_draws(tmp_path):
    net = Net(plan(key=key(0)))
    trainer = make_trainer(tmp_path, max_steps=4, max_epochs=-1)
    seed = next(s for s in range(1000) if not any(len(_draw(s, t)) for t in range(4)))
    net.privacy = plan(key=key(seed))
    trainer.fit(net, DataLoader(Points(300), batch_size=1))
    assert net.privacy_spent().n_steps == trainer.global_step == 4


# -- rows -----------------------------------------------------------------------------------------


class Drops(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [t[1:] for t in batch]


class Repeats(Net):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [torch.cat([t, t]) for t in batch]


class Merges(Net):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [t.unsqueeze(0) for t in batch]


@pytest.mark.parametrize("kind", [Drops, Repeats, Merges])
def test_hooks_that_change_the_number_of_rows_are_refused(kind, tmp_path):
    net = kind()
    with pytest.raises(PrivacyError, match=r"rows? for \d+ drawn examples"):
        make_trainer(tmp_path).fit(net, make_loader())
    assert net.privacy_spent().n_steps == 0


def test_a_collate_function_that_drops_rows_is_refused(tmp_path):
    net = Net()
    loader = make_loader(collate_fn=lambda rows: torch.utils.data.default_collate(rows[:1]))
    with pytest.raises(PrivacyError, match=r"1 rows for \d+ drawn examples"):
        make_trainer(tmp_path).fit(net, loader)


def test_a_hook_that_hides_the_batch_of_another_step_is_refused(tmp_path):
    class Rewinds(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            trainer.train_dataloader.draw = Draw(0, 3)

    net = Net()
    with pytest.raises(PrivacyError, match="drawn for step 0, but step 1"):
        make_trainer(tmp_path, callbacks=[Rewinds()]).fit(net, make_loader(collate_fn=_three))


def _three(rows: list[Any]) -> Any:
    return torch.utils.data.default_collate((rows * 3)[:3])


# -- examples that are not numbers ----------------------------------------------------------------


class Poisoned(Points):
    """One example of the 24 gives a gradient that is not finite."""

    def __init__(self, value: float, *, zero: bool = False) -> None:
        super().__init__()
        self.x[3] = value
        self.zero = zero


class Weighted(Net):
    """Leaves example 3 out of the loss if asked to."""

    without: bool = False

    def per_example_loss(self, batch: Any) -> Tensor:
        x, y, index = batch
        if not self.without:
            return super().per_example_loss(batch)
        keep = index != 3
        return super().per_example_loss((torch.where(keep[:, None], x, 0.0), y)) * keep


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.usefixtures("same_noise")
def test_an_example_that_is_not_finite_contributes_nothing(value, tmp_path):
    drawn = [
        t for t in range(8) if 3 in poisson_indices(key(7), t, n_examples=24, sample_rate=0.25)
    ]
    assert drawn
    with_it, without = Weighted(), Weighted()
    without.without = True
    trainer = make_trainer(tmp_path)
    trainer.fit(with_it, make_loader(Poisoned(value)))
    make_trainer(tmp_path).fit(without, make_loader(Points()))
    assert trainer.global_step == with_it.privacy_spent().n_steps == 8
    torch.testing.assert_close(with_it.state_dict(), without.state_dict(), rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(p).all() for p in with_it.parameters())
    assert with_it._dp.state.clip.nonfinite_examples == len(drawn)
