"""A run goes on with what its steps followed from, or with a new key."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchopt
from lightning.pytorch.callbacks import EMAWeightAveraging

from opake_lightning import CheckpointError, PrivacyError
from opake_lightning.optimizers import adamw, schedule_free, sgd
from opake_lightning.plan import NonPrivate, _base
from opake_lightning.random import key
from opake_lightning.scheduling import cosine_schedule
from opake_lightning.trainer import PoissonLoader
from opake_lightning.trainer._inputs import Inputs, inputs_of, weights_digest
from tests.trainer.cases_dpftrl import mf_plan
from tests.trainer.helpers import (
    CLIPPING,
    Net,
    Points,
    assert_same,
    made,
    make_loader,
    make_trainer,
    plan,
    run_fit,
    saver,
    snapshot,
)

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")


class Edited(Points):
    """One row, one that is compared, is another."""

    def __getitem__(self, index: int) -> Any:
        x, y, i = super().__getitem__(index)
        return (x + 1 if index == 3 else x), y, i


class Scaled(pl.Callback):
    """Saves other weights than those that are trained."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {n: 0.9 * w for n, w in checkpoint["state_dict"].items()}


def net(optimizer: Any = None, **changes: Any) -> Net:
    return Net(plan(**changes), optimizer or (lambda: adamw(0.05)))


def _later(step: int) -> float:
    return 0.05 if step < 900 else 0.1


# What another process resumes with, and what the refusal says.
CHANGED = {
    "the rate": ({"optimizer": lambda: adamw(0.01)}, {}, "the learning rates"),
    "a later rate": (
        {"optimizer": lambda: adamw(_later)},
        {},
        "the learning rates",
    ),
    "momentum": (
        {"optimizer": lambda: adamw(0.05, betas=(0.8, 0.999))},
        {},
        r"the optimizer's first_moment.decay \(checkpoint 0.9, now 0.8\)",
    ),
    "weight decay": (
        {"optimizer": lambda: adamw(0.05, weight_decay=0.5)},
        {},
        r"the optimizer's decay.weight_decay \(checkpoint 0.01, now 0.5\)",
    ),
    "a row": ({}, {"loader": Edited}, r"the rows of the training data \(8 of them"),
}


@pytest.fixture
def saved(tmp_path: Any) -> Any:
    """Of a run of 4 steps; nothing was released after it."""
    run_fit(net(), tmp_path, saver(tmp_path, every=1), max_steps=4, max_epochs=-1)
    return tmp_path / "step=4.ckpt"


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_input_is_refused_and_forks_if_asked_to(name, saved, tmp_path):
    """Also where no later step is recorded: another process may go on from the same file."""
    changed, data, match = CHANGED[name]
    settings: dict[str, Any] = {"max_steps": 6, "max_epochs": -1, "ckpt": saved}
    if data:
        settings["loader"] = make_loader(data["loader"]())
    refused = net(**changed)
    with pytest.raises(CheckpointError, match=rf"these differ: {match}"):
        run_fit(refused, tmp_path, **settings)
    forked, straight = net(**changed, on_changed_plan="fork"), net()
    run_fit(forked, tmp_path, **settings)
    assert forked.privacy_spent().n_steps == 6
    assert made(forked) == [4, 2]
    run_fit(straight, tmp_path / "straight", max_steps=6, max_epochs=-1)
    assert forked._dp.state.noise.key != straight._dp.state.noise.key


def test_without_a_change_the_run_is_the_same(saved, tmp_path):
    resumed, whole = net(), net()
    end = run_fit(resumed, tmp_path, ckpt=saved)
    assert_same(snapshot(resumed, end), snapshot(whole, run_fit(whole, tmp_path / "whole")))


def test_a_longer_schedule_that_begins_alike_is_another_input(tmp_path):
    """Its rates are those of all later steps, not only of those that this fit makes."""

    def one(steps: int) -> Net:
        return net(lambda: adamw(cosine_schedule(0.05, 0.0, steps)))

    run_fit(one(8), tmp_path, saver(tmp_path))
    with pytest.raises(CheckpointError, match="the learning rates"):
        run_fit(one(9), tmp_path, ckpt=tmp_path / "step=6.ckpt")


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [Scaled, functools.partial(EMAWeightAveraging, decay=0.5)])
def test_weights_that_training_had_not_come_to_get_no_noise_of_its_steps(average, tmp_path):
    """The step's noise would be added to another gradient, and the difference would have none."""
    run_fit(net(), tmp_path, saver(tmp_path, every=3), average())
    with pytest.raises(CheckpointError, match=r"the weights .*give the trainer that callback"):
        run_fit(net(), tmp_path, ckpt=tmp_path / "step=3.ckpt")
    forked = net(on_changed_plan="fork")
    run_fit(forked, tmp_path, ckpt=tmp_path / "step=3.ckpt")
    assert forked.privacy_spent().n_steps == 8 + 5


@pytest.mark.parametrize("step", [1500, 1600, 3000, 500_000])
def test_a_rate_that_changes_at_any_late_step_is_another_input(step):
    def one(at: int) -> Inputs:
        schedule = adamw(lambda n: 0.05 if n < at else 0.001)
        return inputs_of(NonPrivate(), schedule, loader())

    assert one(step).rates != one(step + step // 50).rates


def test_averaged_weights_are_resumed_with_their_callback(tmp_path):
    def fit(name: str, **more: Any) -> Any:
        module = net()
        average = EMAWeightAveraging(decay=0.5)
        return snapshot(module, run_fit(module, tmp_path / name, average, **more))

    whole = fit("whole")
    run_fit(net(), tmp_path, saver(tmp_path), EMAWeightAveraging(decay=0.5))
    assert_same(fit("resumed", ckpt=tmp_path / "step=3.ckpt"), whole)


class ShowsOthers(pl.Callback):
    """Validates with other weights than it trains, and saves meanwhile."""

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.kept = copy.deepcopy(module.state_dict())
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(0.5)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(trainer.default_root_dir + "/shown.ckpt")

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.load_state_dict(self.kept)


def test_weights_that_are_shown_while_a_checkpoint_is_saved_are_not_those_of_training(tmp_path):
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    module = Validated(plan(), lambda: adamw(0.05))
    trainer = make_trainer(tmp_path, callbacks=[ShowsOthers()])
    with pytest.warns(UserWarning, match="other weights than training has come to"):
        trainer.fit(module, make_loader(), make_loader(shuffle=False))
    with pytest.raises(CheckpointError, match="these differ: the weights"):
        run_fit(net(), tmp_path, ckpt=tmp_path / "shown.ckpt")


def test_a_checkpoint_some_steps_after_a_validation_knows_its_own_weights(tmp_path):
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    module, resumed = Validated(plan(), lambda: adamw(0.05)), net()
    trainer = make_trainer(tmp_path, callbacks=[saver(tmp_path, every=6)])
    trainer.fit(module, make_loader(), make_loader(shuffle=False))
    run_fit(resumed, tmp_path, ckpt=tmp_path / "step=6.ckpt")
    assert all(map(torch.equal, resumed.parameters(), module.parameters()))


def test_published_weights_are_not_the_ones_that_are_compared(tmp_path):
    def free() -> Net:
        return net(lambda: schedule_free(sgd(0.05)))

    run_fit(free(), tmp_path, saver(tmp_path))
    resumed = free()
    run_fit(resumed, tmp_path, ckpt=tmp_path / "step=6.ckpt")
    assert resumed.privacy_spent().n_steps == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_every_bit_of_the_weights_counts(dtype):
    weights = {
        "a": torch.arange(10_000).to(dtype).view(100, 100),
        "b": torch.zeros((), dtype=dtype),
    }
    found = {weights_digest(weights)}
    for place in (0, 4095, 4096, 8192, 9999):
        changed = weights["a"].clone()
        changed.view(-1)[place] += 64
        found.add(weights_digest({**weights, "a": changed}))
    found.add(weights_digest({**weights, "b": weights["b"] + 1}))
    found.add(weights_digest({**weights, "a": weights["a"].view(10, 1000)}))
    found.add(weights_digest({"a": weights["b"], "b": weights["a"]}))
    assert len(found) == 9
    assert weights_digest({n: w.clone() for n, w in weights.items()}) in found
    transposed = weights["a"].t().contiguous().t()
    assert weights_digest({**weights, "a": transposed}) == weights_digest(weights)


# -- what is in the key ---------------------------------------------------------------------------


def other_weights() -> Net:
    module = net()
    with torch.no_grad():
        next(module.parameters())[0] += 1e-3
    return module


KEYED: dict[str, Any] = {
    "nothing": (net, {}),
    "the noise": (lambda: net(noise_multiplier=1.1), {}),
    "the sample rate": (net, {"loader": make_loader(batch_size=8)}),
    "the rate of learning": (lambda: net(lambda: adamw(0.06)), {}),
    "momentum": (lambda: net(lambda: adamw(0.05, betas=(0.8, 0.999))), {}),
    "a row": (net, {"loader": make_loader(Points(24, seed=1))}),
    "the weights": (other_weights, {}),
    "the end of a target": (lambda: net(target_epsilon=9.0), {"max_epochs": 1}),
}


def test_every_input_of_a_fit_is_in_its_key(tmp_path):
    """One named key does not give two runs the same noise for two gradients."""
    found = {}
    for name, (make, how) in KEYED.items():
        run_fit(module := make(), tmp_path, **how)
        found[name] = module._dp.record.key
    assert len(set(found.values())) == len(KEYED)
    run_fit(module := net(), tmp_path)
    assert module._dp.record.key == found["nothing"]


def test_a_release_that_calibrates_otherwise_has_other_noise(tmp_path, monkeypatch):
    """The same numbers, scaled by another σ, would give both away."""
    keys = set()
    for factor in (1.0, 1.01):
        calibrated = _base.calibrate
        monkeypatch.setattr(
            _base, "calibrate", lambda *a, f=factor, c=calibrated, **k: f * c(*a, **k)
        )
        run_fit(module := net(target_epsilon=9.0), tmp_path, max_epochs=1)
        keys.add(module._dp.record.key)
        monkeypatch.undo()
    assert len(keys) == 2


def test_optimizer_and_clipping_state_of_the_fit_before_are_in_the_key(tmp_path):
    """Also where the weights have come to the same."""
    keys = set()
    for change in (None, "moment", "norm"):
        module = net(clipping_norm=CLIPPING["adaptive"])
        run_fit(module, tmp_path, max_epochs=1)
        state = module._dp.state
        if change == "moment":
            state.optimizer["first_moment"].mean["net.0.bias"][0] += 1.0
        if change == "norm":
            clip = dataclasses.replace(state.clip, clipping_norms=(0.5,))
            module._dp.state = dataclasses.replace(state, clip=clip)
        run_fit(module, tmp_path, max_epochs=1)
        keys.add(module._dp.record.key)
    assert len(keys) == 3


class Restless(Points):
    """Another row each time, which no digest can compare."""

    rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        x, y, i = super().__getitem__(index)
        return x + self.rng.normal(), y, i


def test_a_fit_on_rows_that_cannot_be_compared_is_not_made_again_on_one_key(tmp_path, caplog):
    """Two runs of one script would add the same noise to the gradients of other rows."""
    keys: set[str] = set()
    for _ in range(2):
        module = net()
        run_fit(module, tmp_path, loader=make_loader(Restless()), max_steps=1)
        assert module._dp.fit.inputs.rows == ""
        keys.add(module._dp.record.segment)
    assert len(keys) == 2
    assert "the plan's key is not used as it is" in caplog.text


@pytest.mark.parametrize("lost", [False, True])
def test_other_microbatches_make_no_step_again_and_go_on_where_none_was_lost(lost, tmp_path):
    limits = {"max_steps": 6 if lost else 4, "max_epochs": -1}
    run_fit(net(), tmp_path, saver(tmp_path, every=1), **limits)
    other = net(microbatch_size=2)
    if not lost:
        run_fit(other, tmp_path, ckpt=tmp_path / "step=4.ckpt")
        assert made(other) == [8]
        (segment,) = other._dp.record.released.values()
        assert [step for step, _ in segment.rounding] == [0, 4]
        return
    with pytest.raises(CheckpointError, match=r"made 2 more, with .*of None, .* not with"):
        run_fit(other, tmp_path, ckpt=tmp_path / "step=4.ckpt")
    forked = net(microbatch_size=2, on_changed_plan="fork")
    run_fit(forked, tmp_path, ckpt=tmp_path / "step=4.ckpt")
    assert made(forked) == [6, 4]


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_only_steps_that_are_made_again_must_be_made_as_they_were(tmp_path):
    """Earlier ones may have been made on other ranks, or in other microbatches."""
    run_fit(net(), tmp_path, saver(tmp_path, every=1), max_steps=4, max_epochs=-1)
    other, again = net(microbatch_size=2), net(microbatch_size=2)
    how = {"max_steps": 7, "max_epochs": -1}
    run_fit(other, tmp_path, saver(tmp_path / "b", every=1), ckpt=tmp_path / "step=4.ckpt", **how)
    run_fit(again, tmp_path / "b", ckpt=tmp_path / "b" / "step=5.ckpt", **how)
    assert made(again) == [7]


# -- what is seen, and what is not ----------------------------------------------------------------


def loader(data: Any = None, **settings: Any) -> PoissonLoader:
    return PoissonLoader(data or Points(), 6, **settings)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sgd(0.1, momentum=0.9), sgd(0.1, momentum=0.8)),
        (sgd(0.1, momentum=0.9), sgd(0.1, momentum=0.9, nesterov=True)),
        (schedule_free(sgd(0.1)), schedule_free(sgd(0.1), beta=0.8)),
        (schedule_free(sgd(0.1)), schedule_free(sgd(0.1), warmup_steps=5)),
        (adamw(0.1), adamw(0.1, noise_bias_correction=True)),
        (torchopt.adam(0.1), torchopt.adam(0.1, eps=1e-6)),
        (torchopt.adam(0.1), torchopt.adam(0.2)),
        (torchopt.sgd(0.1, momentum=0.9), torchopt.sgd(0.1, momentum=0.8)),
    ],
)
def test_every_number_of_an_optimizer_is_compared(one, other):
    live, data = key(7), loader()
    saved = inputs_of(NonPrivate(), one, data).saved(live)
    assert inputs_of(NonPrivate(), one, data).changed(saved, live) == []
    assert inputs_of(NonPrivate(), other, data).changed(saved, live)


@pytest.mark.parametrize("value", [np.float64(0.9), np.float32(0.5), math.nan, True, 3])
def test_settings_are_plain_numbers_that_equal_themselves(value):
    def made() -> Any:
        def update(grads: Any) -> Any:
            return value, grads

        return torchopt.base.GradientTransformation(lambda params: params, update)

    saved = inputs_of(NonPrivate(), made(), loader()).saved(key(7))
    (setting,) = saved["settings"].values()
    assert type(setting) in (bool, int, float)
    assert inputs_of(NonPrivate(), made(), loader()).changed(saved, key(7)) == []


class Rows(Points):
    """Rows of one kind of value."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.full((2,), float(i)), i),
        lambda i: {"x": np.full(3, i), "name": f"row {i}", "none": None},
        lambda i: [torch.tensor(i, dtype=torch.bfloat16), b"abc", 1.5j, {"deep": (True, i)}],
    ],
    ids=["tensors", "a dict", "nested"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_any_plain_kind_are_compared(make, workers):
    same = [
        inputs_of(NonPrivate(), sgd(0.1), loader(Rows(make), num_workers=workers)).rows
        for _ in range(2)
    ]
    other = inputs_of(
        NonPrivate(), sgd(0.1), loader(Rows(lambda i: make(i + 1)), num_workers=workers)
    ).rows
    assert same[0] == same[1] != other
    assert same[0]
    assert other


def test_the_order_of_values_is_a_part_of_a_row():
    one = inputs_of(
        NonPrivate(), sgd(0.1), loader(Rows(lambda i: (torch.tensor([i]), torch.tensor([2 * i]))))
    ).rows
    two = inputs_of(
        NonPrivate(), sgd(0.1), loader(Rows(lambda i: (torch.tensor([2 * i]), torch.tensor([i]))))
    ).rows
    assert one != two


@pytest.mark.parametrize("workers", [0, 1])
def test_random_rows_are_compared_as_drawn_and_nobody_else_draws_otherwise(workers):
    """Augmentation from the global generators is a function of the seed."""
    state = torch.get_rng_state()
    noisy = Rows(lambda i: torch.randn(2) + float(np.random.rand()))  # noqa: NPY002
    found = [
        inputs_of(NonPrivate(), sgd(0.1), loader(noisy, num_workers=workers)).rows for _ in range(2)
    ]
    assert found[0] == found[1] != ""
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_differ_when_read_again_or_cannot_be_read_are_not_compared():
    own = np.random.default_rng(0)
    for make in (lambda i: own.normal(), lambda i: object(), lambda i: 1 // (i - 3)):
        assert inputs_of(NonPrivate(), sgd(0.1), loader(Rows(make))).rows == ""
    none, some = (Inputs({}, "sgd", {}, "", rows) for rows in ("", "some"))
    for one, other in ((none, some), (some, none)):
        assert one.changed(other.saved(key(7)), key(7)) == []


def test_who_has_a_candidate_for_the_data_cannot_ask_a_checkpoint():
    """Its digest is keyed: that the data are these is no private answer."""
    inputs = inputs_of(NonPrivate(), sgd(0.1), loader())
    assert inputs.saved(key(7))["rows"] != inputs.saved(key(8))["rows"] != inputs.rows


# -- data that change under the plan --------------------------------------------------------------


def test_correlated_noise_refuses_rows_that_move_between_epochs(tmp_path):
    """Two uses of one row are to be some steps apart, and a row is known by its index."""
    module = Net(mf_plan(), lambda: adamw(0.05))
    trainer = make_trainer(tmp_path, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(PrivacyError, match=r"reload_dataloaders_every_n_epochs=1.*DPFTRL"):
        trainer.fit(module, make_loader())
    assert module.privacy_spent().n_steps == 0
