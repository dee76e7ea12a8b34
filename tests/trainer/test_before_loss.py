"""Rows are not mixed before the loss: what the test of collate functions and hooks must find.

And what it must not take for mixing, that a run does not notice it, and what becomes of a run whose
user says that mixing is meant.
"""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from functools import partial
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, default_collate

from opake_lightning import NonPrivate, OpakeDDP, PoissonLoader, PrivacyBudget, PrivacyError
from opake_lightning.errors import CheckpointError
from opake_lightning.random import key
from opake_lightning.trainer import _before_loss
from tests.trainer.helpers import (
    Net,
    Points,
    accepted,
    assert_same,
    make_loader,
    make_trainer,
    plan,
    refused,
    run_fit,
    saver,
    seed_globals,
    snapshot,
)

MEANT = r"rows_may_mix_before_the_loss=True"


# -- what mixes rows ------------------------------------------------------------------------------


def mixup(rows):
    x, y, index = default_collate(rows)
    share = torch.rand(())
    return share * x + (1 - share) * x[torch.randperm(len(x))], y, index


def mixup_numpy(rows):
    x, y, index = default_collate(rows)
    share, order = np.random.rand(), np.random.permutation(len(x))  # noqa: NPY002
    return share * x + (1 - share) * x[order], y, index


def mixup_python(rows):
    x, y, index = default_collate(rows)
    share, order = random.random(), random.sample(range(len(x)), len(x))
    return share * x + (1 - share) * x[order], y, index


def standardised(rows):
    x, y, index = default_collate(rows)
    return (x - x.mean(0)) / (x.std(0) + 1e-3), y, index


def slightly(rows):
    x, y, index = default_collate(rows)
    return x + 1e-6 * x.sum(0), y, index


def ranked(rows):
    x, y, index = default_collate(rows)
    return x.argsort(0).argsort(0).float(), y, index


def labels_of_neighbours(rows):
    x, y, index = default_collate(rows)
    return x, y.roll(1), index


def of_the_row_before(rows):
    x, y, index = default_collate(rows)
    return torch.cat([x[:1], x[1:] - x[:-1]]), y, index


def weighted_by_class(rows):
    x, y, index = default_collate(rows)
    return x * (y[:, None] == y).sum(1, keepdim=True), y, index


def padded_with_the_largest(rows):
    """The width is that of the longest row, the padding a value of another."""
    x = [row[0][: 1 + int(row[2]) % 5] for row in rows]
    most = max(float(each.max()) for each in x)
    wide = nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=most)
    return F.pad(wide, (0, 5 - wide.shape[1])), *default_collate([row[1:] for row in rows])


def padded_with_the_end_of_the_longest(rows):
    """Whoever replaces the longest row changes the width, too."""
    x = [row[0][: 3 + int(row[2] == rows[0][2])] for row in rows]
    wide = nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=float(x[0][-1]))
    return wide, *default_collate([row[1:] for row in rows])


def filled_up_from_the_longest(rows):
    x = [row[0][: 1 + int(row[2]) % 5] for row in rows]
    longest = max(x, key=len)
    wide = [torch.cat([each, longest[len(each) :]]) for each in x]
    return torch.stack(wide), *default_collate([row[1:] for row in rows])


def without_repeats(rows):
    kept = {int(row[2]): row for row in rows}
    assert len(kept) == len(rows), "an example came twice"
    return default_collate(rows)


def in_the_first_row(rows):
    x, y, index = default_collate(rows)
    x[0] = x.mean(0)
    return x, y, index


class Mixer:
    def __call__(self, rows):
        return standardised(rows)

    def collate(self, rows):
        return standardised(rows)


COLLATES = {
    each.__name__: each
    for each in (
        *(mixup, mixup_numpy, mixup_python, standardised, slightly, ranked, labels_of_neighbours),
        *(of_the_row_before, weighted_by_class, padded_with_the_largest, without_repeats),
        *(in_the_first_row, padded_with_the_end_of_the_longest, filled_up_from_the_longest),
    )
}


@pytest.mark.parametrize("name", COLLATES)
def test_a_collate_function_that_mixes_rows_is_refused_by_name(name, tmp_path):
    match = rf"collate_fn .*\.{name} lets one row .*__getitem__.*{MEANT}"
    refused(tmp_path, match, loader=make_loader(collate_fn=COLLATES[name]))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: partial(_keyword, scale=2.0), "_keyword"),
        (Mixer, "Mixer"),
        (lambda: Mixer().collate, r"Mixer\.collate"),
        (lambda: lambda rows: standardised(rows), "<lambda>"),
    ],
    ids=["partial", "object", "method", "lambda"],
)
def test_whatever_kind_of_callable_it_is(make, name, tmp_path):
    refused(tmp_path, rf"collate_fn .*{name} lets one row", loader=make_loader(collate_fn=make()))


def _keyword(rows, *, scale):
    x, y, index = standardised(rows)
    return scale * x, y, index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("strategy", ["auto", "opake_ddp"])
def test_with_workers_and_with_a_poisson_loader(workers, strategy, tmp_path):
    make = PoissonLoader if strategy == "auto" else DataLoader
    loader = make(Points(), batch_size=6, collate_fn=mixup, num_workers=workers)
    refused(tmp_path, "collate_fn .*mixup lets", loader=loader, strategy=strategy)


def by_batch(batch):
    x, *rest = batch
    return [(x - x.mean(0)) / x.std(0), *rest]


HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def with_hook(base, name, change):
    """A subclass of ``base`` whose hook ``name`` makes ``change(self, batch)``."""

    def hook(self, batch, *args):
        return change(self, batch) if self.trainer.training else batch

    return type("Hooked", (base,), {name: hook})


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return make_loader()


@pytest.mark.parametrize("where", [Net, Data])
@pytest.mark.parametrize("name", HOOKS)
def test_a_batch_hook_that_mixes_rows_is_refused_by_name(name, where, tmp_path):
    kind = with_hook(where, name, lambda self, batch: by_batch(batch))
    match = rf"Hooked\.{name} lets one row .*other rows of the batch differed"
    if where is Net:
        refused(tmp_path, match, kind())
    else:
        refused(tmp_path, match, loader=kind())


def test_the_first_at_fault_is_named(tmp_path):
    kind = with_hook(Net, "on_after_batch_transfer", lambda self, batch: by_batch(batch))
    refused(tmp_path, "collate_fn .*ranked lets", kind(), make_loader(collate_fn=ranked))
    fine = make_loader(collate_fn=lambda rows: default_collate(rows))
    refused(tmp_path, r"Hooked\.on_after_batch_transfer lets", kind(), fine)


class Batched(Points):
    """A dataset that is given all indices of a draw at once."""

    def __getitems__(self, indices):
        x = self.x[indices] - self.x[indices].mean(0)
        return list(zip(x, self.y[indices], torch.tensor(indices), strict=True))


class BatchedTensors(Batched):
    def __getitems__(self, indices):
        x = self.x[indices] - self.x[indices].mean(0)
        return [x, self.y[indices], torch.tensor(indices)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(24))])
def test_a_dataset_that_mixes_the_rows_it_fetches_together(wrap, workers, tmp_path):
    loader = make_loader(wrap(Batched()), num_workers=workers)
    refused(tmp_path, r"Batched\.__getitems__ lets one row", loader=loader)
    whole = make_loader(wrap(BatchedTensors()), num_workers=workers, collate_fn=_as_it_is)
    refused(tmp_path, r"BatchedTensors\.__getitems__ or collate_fn .*_as_it_is", loader=whole)


def _as_it_is(batch):
    return batch


def centre(self, batch):
    self.centre = batch[0].mean(0)
    return batch


def queue(self, batch):
    self.queue = [*getattr(self, "queue", []), batch[0][0]]
    return batch


def last(self, batch):
    self.seen["last"] = batch[0][-1]
    return batch


def counts(self, batch):
    self.seen["labels"] = int(batch[1].sum())
    return batch


def buffer(self, batch):
    self.mean.copy_(batch[0].mean(0))
    return batch


def array(self, batch):
    self.net.array = batch[0].mean(0).numpy()
    return batch


class Keeps(Net):
    def __init__(self):
        super().__init__()
        self.seen = {}
        self.register_buffer("mean", torch.zeros(5))


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (centre, r"Hooked\.centre"),
        (queue, r"Hooked\.queue"),
        (last, r"Hooked\.seen\.last"),
        (counts, r"Hooked\.seen\.labels"),
        (buffer, r"Hooked\.mean"),
        (array, r"Hooked\.net\.array"),
    ],
)
def test_a_hook_that_keeps_something_of_the_rows_for_the_loss(keep, name, tmp_path):
    hook = HOOKS[len(keep.__name__) % 3]
    kind = with_hook(Keeps, hook, keep)
    refused(tmp_path, rf"Hooked\.{hook} lets .*{name} was left with another value", kind())


class InPlace(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, at):
        batch[0].sub_(batch[0].mean(0))


class Replaces(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, at):
        batch[0] = batch[0] - batch[0].mean(0)


class InPlaceItself(Net):
    def on_train_batch_start(self, batch, at):
        batch[0].sub_(batch[0].mean(0))


@pytest.mark.parametrize("kind", [InPlace, Replaces, InPlaceItself])
def test_a_batch_that_is_changed_after_the_hooks(kind, tmp_path):
    match = rf"changed in on_train_batch_start \(of {kind.__name__}\).*on_after_batch_transfer"
    if kind is InPlaceItself:
        refused(tmp_path, match, kind())
    else:
        budget = PrivacyBudget(epsilon=100.0, delta=1e-5)  # has the hook as well
        refused(tmp_path, match, callbacks=[budget, kind()])


def remembering():
    """Adds the mean of the batch before, which it keeps in a closure."""
    memory = []

    def collate(rows):
        x, y, index = default_collate(rows)
        memory.append(x.mean())
        return x + memory[-2] if len(memory) > 1 else x, y, index

    return collate


class Remembers:
    """The same in a slot."""

    __slots__ = ("last",)

    def __call__(self, rows):
        x, y, index = default_collate(rows)
        before, self.last = getattr(self, "last", 0.0), x.mean()
        return x + before, y, index


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (remembering, r"collate lets .*a variable around it"),
        (Remembers, r"Remembers lets .*Remembers\.last"),
    ],
)
def test_a_collate_function_that_keeps_something_for_the_next_batch(make, name, tmp_path):
    refused(tmp_path, rf"collate_fn .*{name}", loader=make_loader(collate_fn=make()))


def of_the_system(rows):
    x, y, index = default_collate(rows)
    draw = np.random.default_rng()
    return x + torch.from_numpy(draw.normal(size=x.shape)).float(), y, index


def counting(rows, count=itertools.count()):  # noqa: B008 - to be shared
    x, y, index = default_collate(rows)
    return x + next(count), y, index


@pytest.mark.parametrize("collate", [of_the_system, counting])
def test_a_collate_function_that_cannot_be_tested(collate, tmp_path):
    match = rf"collate_fn .*{collate.__name__} is not a function of its rows.*global generators"
    refused(tmp_path, match, loader=make_loader(collate_fn=collate))


# -- what does not --------------------------------------------------------------------------------


class Texts(Points):
    """Sequences of different length."""

    def __getitem__(self, index):
        return self.x[index].abs()[: 1 + index % 5] + 0.1, self.y[index], torch.tensor(index)


class TextNet(Net):
    def per_example_loss(self, batch):
        x, y, *_ = batch.values() if isinstance(batch, UserDict) else batch
        x = F.pad(x, (0, 5 - x.shape[1]))
        return super().per_example_loss((x, y))


def padded(rows, side="right", sort=False):
    if sort:
        rows = sorted(rows, key=lambda row: len(row[0]), reverse=True)
    wide = nn.utils.rnn.pad_sequence(
        [row[0] for row in rows], batch_first=True, padding_side=side, padding_value=-1.0
    )
    return wide, *default_collate([row[1:] for row in rows])


def with_positions(rows):
    x, y, index = padded(rows)
    return x, y, index, torch.arange(x.shape[1]).expand(len(x), -1)


def masked(rows):
    """As for masked language models: one random number for every place, padding included."""
    x, y, index = padded(rows)
    return torch.where(torch.rand(x.shape) < 0.3, 0.0, x), y, index


def shuffled_words(rows, order=lambda n: random.sample(range(n), n)):
    """As many random numbers for each row as it has elements."""
    return padded([(row[0][order(len(row[0]))], *row[1:]) for row in rows])


class Dicts(Texts):
    def __getitem__(self, index):
        return dict(zip(("x", "y", "index"), super().__getitem__(index), strict=True))


def from_dicts(rows):
    """Takes the rows apart, as tokenizers' collate functions do."""
    xs = [row.pop("x") for row in rows]
    x, y, index = padded([(x, row["y"], row["index"]) for x, row in zip(xs, rows, strict=True)])
    return UserDict(x=x, y=y, index=index)


APART = {
    "padded": padded,
    "padded on the left": partial(padded, side="left"),
    "sorted": partial(padded, sort=True),
    "positions": with_positions,
    "masked": masked,
    "shuffled words": shuffled_words,
    "shuffled by NumPy": partial(shuffled_words, order=lambda n: np.random.permutation(n)),  # noqa: NPY002
    "shuffled by torch": partial(shuffled_words, order=torch.randperm),
}


@pytest.mark.parametrize("seed", [7, 8])
@pytest.mark.parametrize("name", APART)
def test_what_only_looks_like_mixing(name, seed, tmp_path):
    loader = make_loader(Texts(), collate_fn=APART[name])
    accepted(tmp_path, TextNet(plan(key=key(seed))), loader, steps=8, max_epochs=2)


def test_rows_that_are_taken_apart_and_a_batch_that_is_a_mapping(tmp_path):
    accepted(tmp_path, TextNet(), make_loader(Dicts(), collate_fn=from_dicts))


def test_all_that_is_no_number_is_the_same():
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32)
    a, b = bits[[0, 0, 2]].view(torch.float32), bits[[1, 1, 2]].view(torch.float32)
    assert _before_loss._rows_changed([a], [b], 3, {}) == 0
    assert _before_loss._rows_changed([a], [b.roll(1)], 3, {0: 1}) == 0  # in another order
    assert _before_loss._rows_changed([a], [b + 1], 3, {0: 1}) == 1


@pytest.mark.parametrize("name", ["padded", "padded on the left", "positions"])
def test_padding_of_two_rows(name, tmp_path):
    # One of them is longer, and replaced by the other it changes the width.
    loader = make_loader(Texts(2), batch_size=2, collate_fn=APART[name])
    accepted(tmp_path, TextNet(), loader, steps=2, max_epochs=2)


def not_numbers(rows):
    x, y, index = default_collate(rows)
    return x / (x > 0), y, index


class Buffered:
    """Gives the same memory every time."""

    def __init__(self):
        self.room = torch.zeros(24, 5)

    def __call__(self, rows):
        x, y, index = default_collate(rows)
        self.room[: len(x)] = x
        return self.room[: len(x)], y, index


def per_row(self, batch):
    x, *rest = batch
    return [x + 0.1 * torch.randn_like(x), *rest]


def counted(self, batch):
    self.batches = getattr(self, "batches", 0) + 1
    self.seen[self.batches] = len(batch)
    return batch


class OwnAugmentation(Points):
    """Draws from a generator of its own, as image libraries do."""

    def __init__(self):
        super().__init__()
        self.draw = np.random.default_rng(0)

    def __getitem__(self, index):
        x, *rest = super().__getitem__(index)
        return x + float(self.draw.normal()), *rest


class OwnAugmentationBatched(OwnAugmentation):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class OwnGenerator:
    def __init__(self):
        self.draw, self.batches = np.random.default_rng(0), 0

    def __call__(self, rows):
        x, y, index = default_collate(rows)
        self.batches += 1
        noise = torch.from_numpy(self.draw.normal(size=x.shape)).float()
        return x + self.batches * noise, y, index


class AllTheSame(Points):
    def __getitem__(self, index):
        return super().__getitem__(0)


class CopiesWorker(Points):
    """Opens what it reads from in the process that reads."""

    opened = None

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("make", "loader"),
    [
        (Net, lambda: make_loader(collate_fn=not_numbers)),
        (with_hook(Net, HOOKS[2], per_row), make_loader),
        (with_hook(Keeps, HOOKS[0], counted), make_loader),
        (Net, lambda: make_loader(OwnAugmentation(), collate_fn=lambda r: default_collate(r))),
        (Net, lambda: make_loader(OwnAugmentationBatched(), collate_fn=_own_default)),
        (Net, lambda: make_loader(collate_fn=OwnGenerator())),
        (Net, lambda: make_loader(AllTheSame(), collate_fn=_own_default)),
        (Net, lambda: make_loader(CopiesWorker(), collate_fn=_own_default, num_workers=1)),
        (Net, lambda: make_loader(Subset(Points(), range(24)))),
    ],
    ids=[
        *("NaN", "augmentation in a hook", "a counter", "a dataset's own generator"),
        *(
            "a batched dataset's",
            "a collate function's",
            "equal rows",
            "a dataset read by workers only",
            "a subset",
        ),
    ],
)
def test_what_rows_may_do(make, loader, tmp_path):
    accepted(tmp_path, make(), loader())


def _own_default(rows):
    return default_collate(rows)


def test_memory_that_is_used_again_hides_nothing(tmp_path):
    class Mixes(Buffered):
        def __call__(self, rows):
            x, y, index = super().__call__(rows)
            x -= x.mean(0)
            return x, y, index

    refused(tmp_path, "collate_fn .*Mixes.* lets", loader=make_loader(collate_fn=Mixes()))


def test_rows_that_cannot_leave_a_worker(tmp_path):
    class Local(Points):
        def __getitem__(self, index):
            return *super().__getitem__(index), lambda: None

    loader = make_loader(Local(), num_workers=1, collate_fn=_first_three)
    refused(tmp_path, rf"cannot be pickled.*num_workers=0.*{MEANT}", loader=loader)
    local = make_loader(Local(), collate_fn=_first_three)
    accepted(tmp_path, loader=local)


def _first_three(rows):
    return default_collate([row[:3] for row in rows])


NARROW = torch.tensor([[5.0, 6.0], [7.0, 8.0], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("beyond", "changed"),
    [
        ([[3, 4.5, 9], [0, 0, 0], [0, 0, 0]], 1),
        ([[3, 4.5, 9], [2, 3, 4], [2, 3, 4]], 1),  # positions
        ([[3, 4.5, 9], [3, 4.5, 9], [3, 4.5, 9]], 3),  # the end of the row that was longer
        ([[3, 4.5, 9], [0, 0, 0], [1, 1, 1]], 3),
        ([[3, 4.5, 9], [0, 0, 0], [0, 0, 7]], 3),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_what_other_rows_may_hold_where_one_is_longer(beyond, changed, before):
    beyond = torch.tensor(beyond)
    wide = torch.cat([beyond, NARROW] if before else [NARROW, beyond], 1)
    for a, b in ((wide, NARROW), (NARROW, wide)):
        assert _before_loss._rows_changed([a], [b], 3, {0: 1}) == changed
    wide[1:] += 1
    assert _before_loss._rows_changed([wide], [NARROW], 3, {0: 1}) == 3


# -- when it is tested, and that nobody notices ---------------------------------------------------


@pytest.fixture
def tested():
    """Numbers of the steps that were tested, from 1."""
    steps = []
    original = _before_loss._Test.run

    def run(self, indices):
        steps.append(self.loader.draw.step + 1)
        original(self, indices)

    with mock.patch.object(_before_loss._Test, "run", run):
        yield steps


def test_the_steps_that_are_tested(tmp_path, tested):
    saves = saver(tmp_path, 4)
    accepted(
        tmp_path,
        loader=make_loader(collate_fn=_own_default),
        max_epochs=5,
        steps=20,
        callbacks=[saves],
    )
    assert tested == [1, 2, 4, 8, 16]
    tested.clear()
    run_fit(
        Net(),
        tmp_path,
        saver(tmp_path, 4),
        ckpt=tmp_path / "step=4.ckpt",
        loader=make_loader(collate_fn=_own_default),
        max_epochs=5,
    )
    assert tested == [5, 8, 16]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_tests_the_rows_that_it_drew(workers):
    loader = PoissonLoader(Points(), 6, key=key(7), rank=1, world_size=2, num_workers=workers)
    for step, (_, _, index) in enumerate(loader):
        assert loader.indices(key(7), step) == index.tolist()
        rows = _before_loss.read_rows(loader, [loader.indices(key(7), step)])[0]
        assert [int(row[2]) for row in rows] == index.tolist()


def test_a_second_fit_tests_its_first_step(tmp_path, tested):
    loader, module = PoissonLoader(Points(), 6, collate_fn=_own_default), Net()
    for steps in (4, 8):
        accepted(tmp_path, module, loader, steps=steps)
    assert tested == [1, 2, 4, 5, 8]


def test_what_is_torch_s_own_is_not_tested(tmp_path, tested):
    accepted(tmp_path)
    assert tested == []


def test_a_draw_of_less_than_two_rows_is_tested_later(tmp_path, tested):
    # Of 24 examples, one a step: many draws are too small, and those are put off.
    module = Net(plan(key=key(7)))
    sizes = {}

    class Sizes(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            draw = trainer.train_dataloader.draw
            sizes[draw.step + 1] = draw.size

    loader = make_loader(batch_size=1, collate_fn=_own_default)
    accepted(tmp_path, module, loader, steps=24, callbacks=[Sizes()])
    first = min(step for step, size in sizes.items() if size >= 2)
    assert tested[0] == first
    assert all(sizes[step] >= 2 for step in tested)
    assert 1 < len(tested) <= 5


class Later:
    """Mixes rows from the fourth batch that it makes in a run on."""

    def __init__(self, at):
        self.at, self.batch = at, 0

    def __call__(self, rows):
        self.batch += 1
        return (standardised if self.batch >= self.at else default_collate)(rows)


def test_what_mixes_later_is_found_later_and_nothing_is_lost(tmp_path):
    loader = make_loader(collate_fn=Later(4))
    saves = saver(tmp_path, 1)
    module = refused(tmp_path, "Later lets one row", loader=loader, spent=3, callbacks=[saves])
    again = Net()
    trainer = run_fit(again, tmp_path, saver(tmp_path, 1), ckpt=tmp_path / "step=3.ckpt")
    whole = Net()
    assert_same(snapshot(again, trainer), snapshot(whole, run_fit(whole, tmp_path)))
    assert module.privacy_spent().n_steps == 3


def test_now_and_then_is_found_at_the_first_step(tmp_path):
    def sometimes(rows):
        return (mixup if random.random() < 0.5 else default_collate)(rows)

    found = 0
    for seed in range(10):
        module = Net(plan(key=key(seed)))
        try:
            make_trainer(tmp_path, max_steps=1).fit(module, make_loader(collate_fn=sometimes))
        except PrivacyError:
            found += 1
    assert found >= 7  # of 10, with probability 7/8 each


class Random(Net):
    """Draws from all global generators in a hook and in the loss."""

    def __init__(self, **kwargs):
        super().__init__(dropout=0.2, **kwargs)
        self.batches = 0
        self.register_buffer("scale", torch.ones(()))

    def on_after_batch_transfer(self, batch, at):
        x, *rest = batch
        self.batches += 1
        self.scale += 0.01
        noise = torch.randn(5) + random.random() + np.random.rand()  # noqa: NPY002
        return [x * self.scale + noise.float() * self.batches, *rest]


def of_its_own(rows, draw):
    x, y, index = default_collate(rows)
    return x + float(draw.normal()), y, index


def rng():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_does_not_notice_the_test(workers, tmp_path):
    def outcome():
        seed_globals(3)
        module = Random()
        collate = _own_default if workers else partial(of_its_own, draw=np.random.default_rng(5))
        loader = make_loader(collate_fn=collate, num_workers=workers)
        trainer = run_fit(module, tmp_path, loader=loader)
        return snapshot(module, trainer), rng(), (module.batches, module.scale.item())

    with mock.patch.object(_before_loss._Test, "needed", False):
        untested = outcome()
    tested = outcome()
    assert_same(tested[0], untested[0])
    assert tested[1:] == untested[1:]


def test_resumed_between_two_tests_a_run_is_the_same(tmp_path):
    def loader():
        return make_loader(collate_fn=masked_points)

    seed_globals(3)
    whole = Net(dropout=0.2)
    trainer = run_fit(whole, tmp_path, saver(tmp_path, 3), loader=loader())
    resumed = Net(dropout=0.2)
    again = run_fit(
        resumed, tmp_path, saver(tmp_path), ckpt=tmp_path / "step=3.ckpt", loader=loader()
    )
    assert_same(snapshot(resumed, again), snapshot(whole, trainer))


def masked_points(rows):
    return default_collate([(row[0] * 2, *row[1:]) for row in rows])


# -- if it is meant -------------------------------------------------------------------------------


def meant(how, **options):
    """A loader, and a trainer's options, that say that rows may be mixed."""
    if how == "strategy":
        return make_loader(**options), {"strategy": OpakeDDP(rows_may_mix_before_the_loss=True)}
    loader = PoissonLoader(Points(), 6, rows_may_mix_before_the_loss=how != "both", **options)
    both = OpakeDDP(rows_may_mix_before_the_loss=how == "both")
    return loader, {"strategy": "auto" if how == "alone" else both}


@pytest.mark.parametrize("how", ["strategy", "loader", "alone", "both"])
def test_rows_may_be_mixed_if_the_plan_says_so(how, tmp_path, tested, caplog):
    loader, options = meant(how, collate_fn=mixup)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        module = accepted(tmp_path, loader=loader, callbacks=[InPlace()], **options)
    assert tested == []
    assert module.privacy_spent().plan["rows_may_mix_before_the_loss"] is True
    assert "one example may move the gradients of others before the loss" in caplog.text


def test_otherwise_the_report_says_that_they_are_not(tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        module = accepted(tmp_path)
    assert module.privacy_spent().plan["rows_may_mix_before_the_loss"] is False
    assert "before the loss" not in caplog.text


@pytest.mark.parametrize("at_first", [False, True])
def test_it_is_part_of_the_plan_s_identity(at_first, tmp_path):
    loader, options = meant("strategy")
    run_fit(Net(), tmp_path, saver(tmp_path), loader=loader, **(options if at_first else {}))
    with pytest.raises(CheckpointError, match=r"rows_may_mix_before_the_loss \(checkpoint"):
        run_fit(
            Net(),
            tmp_path,
            saver(tmp_path),
            ckpt=tmp_path / "step=3.ckpt",
            **({} if at_first else options),
        )
    loader, options = meant("strategy")
    forking = Net(plan(on_changed_plan="fork"))
    run_fit(
        forking,
        tmp_path,
        saver(tmp_path),
        ckpt=tmp_path / "step=3.ckpt",
        **({} if at_first else options),
    )
    # What was spent while rows were mixed is in the same ledger.
    assert forking.privacy_spent().plan["rows_may_mix_before_the_loss"] is True


def test_a_fork_goes_on_with_what_its_loader_says(tmp_path):
    run_fit(Net(plan(target_epsilon=3.0)), tmp_path, saver(tmp_path))
    loader, options = meant("strategy", collate_fn=mixup)
    module = Net(plan(target_epsilon=9.0, on_changed_plan="fork"))
    run_fit(
        module, tmp_path, saver(tmp_path), ckpt=tmp_path / "step=3.ckpt", loader=loader, **options
    )
    spent = module.privacy_spent()
    assert (spent.n_steps, spent.plan["rows_may_mix_before_the_loss"]) == (13, True)


def test_what_was_spent_so_is_not_made_to_mean_more(tmp_path):
    loader, options = meant("strategy", collate_fn=mixup)
    module = Net()
    run_fit(module, tmp_path, saver(tmp_path), loader=loader, **options)
    run_fit(module, tmp_path)
    assert module.privacy_spent().plan["rows_may_mix_before_the_loss"] is True
    loaded = Net.load_from_checkpoint(tmp_path / "step=3.ckpt")
    run_fit(loaded, tmp_path)
    assert loaded.privacy_spent().plan["rows_may_mix_before_the_loss"] is True
    module.reset_privacy()
    run_fit(module, tmp_path)
    assert module.privacy_spent().plan["rows_may_mix_before_the_loss"] is False


def test_a_loader_that_says_so_in_the_middle_of_a_fit(tmp_path):
    class Changes(Net):
        def train_dataloader(self):
            loader = PoissonLoader(Points(), 6)
            loader.rows_may_mix_before_the_loss = self.trainer.current_epoch > 0
            return loader

    trainer = make_trainer(tmp_path, reload_dataloaders_every_n_epochs=1, strategy="auto")
    module = Changes()
    with pytest.raises(PrivacyError, match="rows_may_mix_before_the_loss is not what the run"):
        trainer.fit(module)
    assert module.privacy_spent().n_steps == 4


def test_without_privacy_rows_may_be_mixed(tmp_path):
    make_trainer(tmp_path, callbacks=[InPlace()]).fit(
        Net(NonPrivate()), make_loader(collate_fn=mixup)
    )
