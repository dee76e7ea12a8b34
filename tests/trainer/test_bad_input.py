"""Bad data, losses and parameters: right, or refused before anything is spent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opake_lightning import PoissonLoader, PrivacyError
from opake_lightning.random import key
from tests.trainer.bad_input import both, correlated, refused
from tests.trainer.helpers import (
    Draws,
    Net,
    Points,
    Validated,
    assert_same,
    make_loader,
    make_trainer,
    snapshot,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]


# -- what the loss returns ------------------------------------------------------------------------


class Returns(Net):
    """Returns ``of(loss)`` in place of the losses."""

    def __init__(self, of, privacy=None):
        super().__init__(privacy)
        self.of = of

    def per_example_loss(self, batch):
        return self.of(super().per_example_loss(batch))


WRONG = {
    "nothing": (lambda loss: None, "one number per example"),
    "a list": (lambda loss: [loss], "one number per example"),
    "a dict": (lambda loss: {"loss": loss}, "one number per example"),
    "a column": (lambda loss: loss[:, None], r"shape \(\d+, 1\)"),
    "three things": (lambda loss: (loss, {}, 1), "tuple of 3.*loss alone"),
    "integers": (lambda loss: loss.long(), r"dtype torch\.int64"),
    "booleans": (lambda loss: loss > 0, r"dtype torch\.bool"),
    "complex numbers": (lambda loss: loss + 0j, r"dtype torch\.complex64"),
    "detached": (lambda loss: loss.detach(), "depends on no trainable parameter"),
    "constants": (lambda loss: torch.zeros(len(loss)), "depends on no trainable parameter"),
}


@pytest.mark.parametrize("name", WRONG)
def test_losses_that_have_no_gradient_of_their_own(name, tmp_path):
    """Left alone, the last five train on noise and spend as much as any other run."""
    of, match = WRONG[name]
    refused(tmp_path, match, module=Returns(of))


def test_losses_without_a_gradient_under_correlated_noise(tmp_path):
    of, match = WRONG["detached"]
    refused(tmp_path, match, module=Returns(of, correlated()))


@pytest.mark.parametrize(
    ("of", "match"),
    [
        (lambda loss: torch.cat([loss, loss]), r"got shape \(2,\)"),
        (lambda loss: loss[:0], r"got shape \(0,\)"),
    ],
    ids=["twice", "none"],
)
def test_more_or_fewer_losses_than_examples(of, match, tmp_path):
    refused(tmp_path, match, module=Returns(of))


def test_auxiliary_output_that_is_no_tensor(tmp_path):
    module = Returns(lambda loss: (loss, {"a": 1.0}))
    refused(tmp_path, "aux must hold tensors", module=module)


def test_a_later_loss_may_be_constant(tmp_path):
    """What a step does must not depend on data: only the first losses of a fit are looked at."""

    class Stops(Net):
        def per_example_loss(self, batch):
            loss = super().per_example_loss(batch)
            return loss.detach() if self.trainer.global_step > 2 else loss

    module, whole, saves = Stops(), Stops(), ModelCheckpoint(tmp_path, every_n_train_steps=5)
    straight, again = make_trainer(tmp_path, callbacks=[saves]), make_trainer(tmp_path)
    straight.fit(whole, make_loader())
    assert whole.privacy_spent().n_steps == 8
    # Nor are those of a resumed run, which makes the same steps.
    again.fit(module, make_loader(), ckpt_path=saves.best_model_path)
    assert_same(snapshot(module, again), snapshot(whole, straight))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@both
def test_a_run_without_a_single_finite_loss_is_noise_alone(make_plan, value, tmp_path):
    """The released gradients are those of a loss that is zero, bit for bit."""
    nothing, zero = (
        Returns(lambda loss: loss * value, make_plan()),
        Returns(lambda loss: loss * 0, make_plan()),
    )
    for module in (nothing, zero):
        make_trainer(tmp_path).fit(module, make_loader())
        assert module.privacy_spent().n_steps == 8
    for got, want in zip(nothing.parameters(), zero.parameters(), strict=True):
        assert torch.equal(got, want)
    assert nothing._dp.state.clip.nonfinite_examples > 0


# -- examples -------------------------------------------------------------------------------------


class Odd(Points):
    """Example 4, which no digest of the data sees, is what ``make`` says, while ``broken``."""

    def __init__(self, make):
        super().__init__()
        self.make, self.broken = make, True

    def __getitem__(self, index):
        example = super().__getitem__(index)
        return self.make(*example) if index == 4 and self.broken else example


def raises(error):
    def make(*_):
        raise error

    return make


ODD = {
    "a label too large": (lambda x, y, i: (x, y + 7, i), IndexError, "out of bounds"),
    "a label of -1": (lambda x, y, i: (x, y * 0 - 1, i), IndexError, "out of bounds"),
    "unreadable": (raises(OSError("disk")), OSError, "disk"),
    "the end of an iterator": (raises(StopIteration()), RuntimeError, "4 steps? early|early"),
    "nothing": (lambda *_: None, TypeError, "NoneType"),
    "of another shape": (lambda x, y, i: (x[:3], y, i), RuntimeError, "equal size|shapes"),
}


@pytest.mark.parametrize("name", ODD)
@both
@pytest.mark.usefixtures("same_noise")
def test_an_odd_example_stops_the_run_between_two_steps(make_plan, name, tmp_path):
    """Ledger and noise have counted the same steps, and the last checkpoint goes on from there.

    A StopIteration would look like the end of the epoch, and quietly leave steps out.
    """
    make, error, match = ODD[name]
    data, saves = Odd(make), ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    module = Net(make_plan())
    trainer = make_trainer(tmp_path, callbacks=[saves])
    with pytest.raises(error, match=match):
        trainer.fit(module, make_loader(data))
    done = module.privacy_spent().n_steps
    assert 0 < done == module._dp.state.noise.step == trainer.global_step < 8
    whole, resumed = Net(make_plan()), Net(make_plan())
    data.broken = False
    straight = make_trainer(tmp_path)
    straight.fit(whole, make_loader(data))
    again = make_trainer(tmp_path)
    again.fit(resumed, make_loader(data), ckpt_path=saves.best_model_path)
    assert_same(snapshot(resumed, again), snapshot(whole, straight))
    # The same module goes on, too, and counts on.
    make_trainer(tmp_path).fit(module, make_loader(data))
    assert module.privacy_spent().n_steps == done + 8


@pytest.mark.parametrize("workers", [0, 1])
def test_the_end_of_an_iterator_is_no_end_of_an_epoch(workers):
    loader = PoissonLoader(Odd(ODD["the end of an iterator"][0]), 24, key=key(7))
    assert len(loader) == 1
    with pytest.raises(RuntimeError, match=r"StopIteration at step 0.* 1 steps early"):
        list(loader)
    collated = PoissonLoader(Points(), 6, key=key(7), num_workers=workers, collate_fn=_ends)
    with pytest.raises(RuntimeError, match=r"step 0.* 4 steps early"):
        list(collated)


def _ends(rows):
    raise StopIteration


class Hides(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return None


def _nothing(rows):
    return None


@pytest.mark.parametrize(
    ("kind", "collate"), [(Net, _nothing), (Hides, None)], ids=["collate_fn", "hook"]
)
@pytest.mark.filterwarnings("ignore:train_dataloader yielded None:UserWarning")
@both
def test_a_batch_of_none_is_no_way_around_the_noise(make_plan, kind, collate, tmp_path):
    """Lightning would skip the step, and the run would end well without having made any."""
    loader = make_loader(collate_fn=collate)
    refused(tmp_path, "batch 0 became None.*zero rows", module=kind(make_plan()), loader=loader)


class Long(Points):
    def __len__(self):
        return 1000


class Growing(Points):
    size = 23

    def __len__(self):
        self.size += 1
        return self.size


class NoLength(Dataset):
    def __getitem__(self, index):
        return Points()[index]


class NotImplementedLength(NoLength):
    def __len__(self):
        raise NotImplementedError


@both
def test_a_length_that_is_too_large_is_found_out(make_plan, tmp_path):
    refused(
        tmp_path,
        "out of bounds",
        module=Net(make_plan()),
        loader=make_loader(Long()),
        error=IndexError,
    )


def test_the_length_at_the_beginning_is_the_one_that_counts(tmp_path):
    """Rate, divisor and draws all come from one number."""
    module = Net()
    make_trainer(tmp_path).fit(module, make_loader(Growing(), shuffle=False))
    assert module._dp.mechanism.n_examples < Growing.size + 10
    assert module.privacy_spent().n_steps == 2 * math.ceil(module._dp.mechanism.n_examples / 6)


@pytest.mark.parametrize("data", [NoLength, NotImplementedLength])
def test_a_dataset_without_a_length(data):
    with pytest.raises(PrivacyError, match=rf"{data.__name__} does not tell its length.*__len__"):
        PoissonLoader(data(), 6)


@pytest.mark.parametrize(
    "size", [None, 6.0, np.int64(6), torch.tensor(6), "6", True, 0, -1, math.nan], ids=repr
)
def test_a_batch_size_that_is_no_positive_int(size):
    with pytest.raises((TypeError, ValueError), match="batch_size must be"):
        PoissonLoader(Points(), size)


@both
def test_an_empty_dataset(make_plan, tmp_path):
    empty = TensorDataset(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))
    loader = DataLoader(empty, batch_size=6)
    refused(tmp_path, "dataset is empty", module=Net(make_plan()), loader=loader, error=ValueError)


@both
def test_a_batch_larger_than_the_dataset(make_plan, tmp_path):
    match = r"batch_size=25 is larger than the dataset \(24 examples\)"
    refused(tmp_path, match, module=Net(make_plan()), loader=make_loader(batch_size=25))


def test_a_batch_of_the_whole_dataset_is_a_rate_of_one(tmp_path):
    module, draws = Net(), Draws()
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[draws])
    trainer.fit(module, make_loader(batch_size=24))
    assert draws.seen == {0: list(range(24))}
    spent = module.privacy_spent()
    assert (spent.n_steps, round(spent.epsilon, 4)) == (1, 4.3772)  # the plain Gaussian's


def _no_rows(rows):
    return torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(TensorDataset(torch.zeros(0, 5), torch.zeros(0).long()), 4),
        lambda: DataLoader(Points(), 4, collate_fn=_no_rows),
    ],
    ids=["no batch", "no rows"],
)
@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero:UserWarning")
def test_validation_on_nothing(loader, tmp_path):
    module = Validated()
    make_trainer(tmp_path).fit(module, make_loader(), loader())
    assert module.privacy_spent().n_steps == 8


# -- parameters -----------------------------------------------------------------------------------


class With(Net):
    """A net that ``change`` has been made to, once it is there."""

    def __init__(self, change, privacy=None):
        super().__init__(privacy)
        change(self)

    def per_example_loss(self, batch):
        """With what only some changes bring, so that it has a gradient."""
        loss = super().per_example_loss(batch)
        brought = [getattr(self, name, None) for name in ("own", "other")]
        return loss + sum(
            (p - 1).float().square().sum() for p in brought if p is not None and p.requires_grad
        )


def own(value, **options):
    return lambda net: setattr(net, "own", nn.Parameter(value, **options))


def view_of_weight(net):
    net.own = nn.Parameter(net.net[0].weight.data)


def part_of_weight(net):
    net.own = nn.Parameter(net.net[0].weight.data[:2])


def crossing_columns(net):
    table = torch.randn(4, 6)
    net.own, net.other = nn.Parameter(table[:, :4]), nn.Parameter(table[:, 3:])


def overlapping_the_first_of_two(net):
    """In memory one lies between those that meet, in columns that neither has."""
    table = torch.randn(8, 6)
    net.wide = nn.Parameter(table[:, :3])
    net.narrow = nn.Parameter(table[:2, 3:])
    net.third = nn.Parameter(table[3:, 1:3])


def expanded_bias(net):
    net.net[0].bias = nn.Parameter(torch.zeros(1).expand(4))


def nan_in_weight(net):
    net.net[0].weight.data[0, 0] = math.nan


def only_empty(net):
    net.requires_grad_(False)
    net.own = nn.Parameter(torch.zeros(0, 3))


REFUSED = {
    "far apart": (overlapping_the_first_of_two, "wide and third share memory"),
    "complex": (own(torch.zeros(3, dtype=torch.complex64)), "complex64.*view_as_real"),
    "float8": (own(torch.zeros(3).to(torch.float8_e4m3fn)), "float8_e4m3fn.*16 bits"),
    "sparse": (own(torch.eye(3).to_sparse()), r"layout torch.sparse_coo.*to_dense\(\)"),
    "expanded": (expanded_bias, r"net\.0\.bias is expanded.*\.clone\(\)"),
    "one storage": (view_of_weight, r"net\.0\.weight.* share memory.*one nn\.Parameter"),
    "part of a storage": (part_of_weight, "share memory"),
    "crossing columns": (crossing_columns, "own and other share memory"),
    "lazy": (lambda net: net.net.insert(0, nn.LazyLinear(5)), "net.0.weight is not initialised"),
    "nothing but empty ones": (only_empty, "no trainable parameter .*empty"),
    "none": (lambda net: setattr(net, "net", nn.Flatten()), "no trainable parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
@both
def test_parameters_that_no_update_fits(make_plan, name, tmp_path):
    change, match = REFUSED[name]
    module = With(change, make_plan())
    trainer = make_trainer(tmp_path)
    with pytest.raises(PrivacyError, match=match):
        trainer.fit(module, make_loader())
    assert module.privacy_spent().n_steps == trainer.global_step == 0


def test_weights_that_are_no_numbers(tmp_path):
    refused(tmp_path, r"net\.0\.weight holds NaN or infinity", module=With(nan_in_weight))


def apart_columns(net):
    table = torch.randn(4, 6)
    net.own, net.other = nn.Parameter(table[:, :3]), nn.Parameter(table[:, 3:])


def transposed(net):
    net.net[0].weight = nn.Parameter(torch.randn(5, 4).t())


def twice(net):
    net.again = net.net[0].weight


ACCEPTED = {
    "integers, frozen": own(torch.arange(3), requires_grad=False),
    "booleans, frozen": own(torch.ones(3).bool(), requires_grad=False),
    "complex, frozen": own(torch.ones(3) + 1j, requires_grad=False),
    "no elements": own(torch.zeros(0, 4)),
    "no dimensions": own(torch.ones(())),
    "bfloat16": own(torch.zeros(3, dtype=torch.bfloat16)),
    "one under two names": twice,
    "transposed": transposed,
    "columns of one table": apart_columns,
}


@pytest.mark.parametrize("name", ACCEPTED)
@both
def test_parameters_that_look_odd_train_like_any(make_plan, name, tmp_path):
    module = With(ACCEPTED[name], make_plan())
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    make_trainer(tmp_path).fit(module, make_loader())
    assert module.privacy_spent().n_steps == 8
    for name, p in module.named_parameters():
        assert torch.isfinite(p).all()
        moved = not torch.equal(p, before[name])
        assert moved == (p.requires_grad and p.numel() > 0), name


COMPILED = {
    "a submodule": lambda net: setattr(net, "net", torch.compile(net.net, backend="eager")),
    "a layer": lambda net: net.net.__setitem__(0, torch.compile(net.net[0], backend="eager")),
    "in place": lambda net: net.net.compile(backend="eager"),
    "the whole, in place": lambda net: net.compile(backend="eager"),
}


@pytest.mark.parametrize("name", COMPILED)
@both
@pytest.mark.usefixtures("same_noise")
def test_compiled_modules_learn_what_the_others_do(make_plan, name, tmp_path):
    compiled, plain = (
        With(COMPILED[name], make_plan(noise_multiplier=0.01)),
        Net(make_plan(noise_multiplier=0.01)),
    )
    for module in (compiled, plain):
        make_trainer(tmp_path, max_epochs=1).fit(module, make_loader())
    assert compiled.privacy_spent() == plain.privacy_spent()
    for got, want in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_module_that_is_compiled_as_a_whole(tmp_path):
    module = torch.compile(Net(), backend="eager")
    with pytest.raises(PrivacyError, match=r"training_step was replaced.*Compile submodules"):
        make_trainer(tmp_path).fit(module, make_loader())
