"""What a checkpoint holds, what it must hold, and whose checkpoint may be resumed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from opake_lightning import CheckpointError, OpakeDDP, PoissonLoader
from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.optimizers import adam, adamw, sgd
from opake_lightning.plan import NonPrivate
from opake_lightning.random import key
from opake_lightning.trainer._record import _TYPES
from tests.trainer.helpers import (
    Net,
    Points,
    assert_same,
    made,
    make_loader,
    make_trainer,
    plan,
    saver,
    snapshot,
)
from tests.trainer.helpers import run_fit as fit

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


def saved(net: Net, path: Path, **trainer: Any) -> Path:
    """The checkpoint after four of eight steps."""
    fit(net, path, saver(path, every=4), **trainer)
    return path / "step=4.ckpt"


def leaves(node: Any) -> Iterator[Any]:
    """Every key and value, at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield name
            yield from leaves(value)
    elif isinstance(node, (list, tuple, set)):
        for value in node:
            yield from leaves(value)
    elif dataclasses.is_dataclass(node):
        yield from leaves({f.name: getattr(node, f.name) for f in dataclasses.fields(node)})
    else:
        yield node


def forms_of_the_key(net: Net) -> set[Any]:
    rng = net._dp.state.noise.key
    return {rng.hex(), rng.bits, rng, str(rng.bits)}


def holds_key(node: Any, net: Net) -> bool:
    forms = forms_of_the_key(net)
    return any(
        leaf in forms or (isinstance(leaf, str) and any(str(form) in leaf for form in forms))
        for leaf in leaves(node)
        if not isinstance(leaf, torch.Tensor)
    )


# -- what a checkpoint holds ----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [adamw, adam, lambda: sgd(lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("privacy", [plan(), plan(key=None), plan(target_epsilon=3.0)])
def test_checkpoints_load_without_pickle(privacy, optimizer, tmp_path):
    net = Net(privacy, optimizer)
    path = saved(net, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    assert holds_key(checkpoint, net)  # resuming needs it
    del checkpoint["optimizer_states"]
    assert not holds_key(checkpoint, net)


@pytest.mark.parametrize("privacy", [plan(), plan(key=None)])
def test_weights_only_files_hold_no_key(privacy, tmp_path):
    net = Net(privacy)
    save = ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True)
    trainer = fit(net, tmp_path, save)
    trainer.save_checkpoint(tmp_path / "again.ckpt", weights_only=True)
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    rng = net._dp.state.noise.key
    needles = [rng.hex().encode(), *(rng.bits.to_bytes(16, order) for order in ("big", "little"))]
    assert any(needle in (tmp_path / "full.ckpt").read_bytes() for needle in needles)
    for name in ("weights.ckpt", "again.ckpt"):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert not holds_key(checkpoint, net)
        (segment,) = checkpoint["opake_lightning"]["released"].values()
        assert segment["ledger"] == {"segments": [[1.0, 0.25, 8]]}
        raw = (tmp_path / name).read_bytes()
        assert not any(needle in raw for needle in needles)
    torch.save(net.state_dict(), tmp_path / "state.pt")
    assert not holds_key(net.state_dict(), net)
    assert not any(needle in (tmp_path / "state.pt").read_bytes() for needle in needles)


def test_hyperparameters_and_reprs_hold_no_key(tmp_path):
    net = Net()
    fit(net, tmp_path)
    told = f"{net} {net.privacy_spent()} {net.privacy} {net._dp.mechanism} {net._dp.state}"
    assert not any(
        str(form) in told for form in forms_of_the_key(net) if isinstance(form, (str, int))
    )


@pytest.mark.parametrize("weights_only_file", [False, True])
def test_a_loaded_module_tells_what_was_spent(weights_only_file, tmp_path):
    net = Net(plan(target_epsilon=3.0))
    trainer = fit(net, tmp_path)
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only_file)
    loaded = Net.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    spent = loaded.privacy_spent()
    assert spent == net.privacy_spent()
    assert 2.97 < spent.epsilon <= 3.0
    assert (spent.delta, spent.n_steps) == (1e-5, 8)
    assert (spent.plan["clipping_norm"], spent.plan["batch_size"]) == (1.0, 6)
    assert loaded._dp.record.key is None


class Forgetful(Net):
    """Overrides both hooks without calling super()."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]


class Careless(Forgetful):
    """Throws away what it does not know."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint.setdefault("theirs", 2)


@pytest.mark.parametrize("kind", [Forgetful, Careless])
def test_overridden_hooks_keep_the_record(kind, tmp_path):
    path = saved(kind(), tmp_path)
    loaded = kind.load_from_checkpoint(path)
    assert loaded.mine == 1
    assert loaded.privacy_spent().n_steps == 4
    resumed = kind()
    fit(resumed, tmp_path, ckpt=path)
    assert resumed.mine == 1
    assert resumed.privacy_spent().n_steps == 8


def test_loading_weights_for_a_test_does_not_touch_the_ledger(tmp_path):
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.per_example_loss(batch).mean())

    net = Tested()
    path = saved(net, tmp_path)
    make_trainer(tmp_path).test(net, DataLoader(Points(), 6), ckpt_path=path, verbose=False)
    assert net.privacy_spent().n_steps == 8
    assert net._dp.state.noise.step == 8


def test_five_hundred_steps_twice_cost_what_a_thousand_cost():
    event = GaussianEvent(1.1, 0.01)
    half = Ledger().spend(event, 500)
    whole = Ledger.from_dict(half.to_dict()).spend(event, 500)
    assert whole.epsilon(1e-5) == Ledger().spend(event, 1000).epsilon(1e-5)
    assert whole.epsilon(1e-5) == pytest.approx(1.5154, rel=1e-3)
    assert whole.epsilon(1e-5) >= 1.51535  # what dp-accounting gives, never below


# -- unknown is not zero --------------------------------------------------------------------------


def test_nobody_has_told_what_the_weights_of_a_new_module_cost(tmp_path):
    net = Net()
    assert str(net.privacy_spent()) == "no record of what these weights have cost"
    fit(net, tmp_path)
    assert net.privacy_spent().complete
    assert str(net.privacy_spent()).startswith("ε = 5.4576 at δ = 1e-05, 8 steps")


def test_a_state_dict_tells_nothing_of_its_cost(tmp_path):
    """Of a module that has a past, its own weights, or others, take nothing away."""
    net, other = Net(), Net()
    fit(net, tmp_path)
    before = net.privacy_spent()
    net.load_state_dict(net.state_dict())
    assert net.privacy_spent() == before
    other.load_state_dict(net.state_dict())
    assert not other.privacy_spent().complete
    fit(other, tmp_path)
    assert (other.privacy_spent().n_steps, other.privacy_spent().complete) == (8, False)
    assert "≥" in str(other.privacy_spent())
    public = Net()
    public.load_state_dict(net.state_dict())
    public.reset_privacy()  # as for weights that are known to cost nothing
    fit(public, tmp_path)
    assert public.privacy_spent().complete


def test_a_checkpoint_that_says_nothing_is_not_free(tmp_path):
    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net().net

    trainer = make_trainer(tmp_path, strategy="auto")
    trainer.strategy.connect(Plain())
    trainer.save_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    loaded = Net.load_from_checkpoint(tmp_path / "plain.ckpt", privacy=plan())
    assert not loaded.privacy_spent().complete


def test_weights_of_another_run_bring_their_past_along(tmp_path):
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            pass

    net, other = Tested(), Tested(plan(key=key(8)))
    path = saved(other, tmp_path / "other")
    fit(net, tmp_path)
    make_trainer(tmp_path).test(net, DataLoader(Points(), 6), ckpt_path=path, verbose=False)
    assert net.privacy_spent().n_steps == 8 + 4


@pytest.mark.parametrize(
    "passed_on",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))],
    ids=["copied", "pickled"],
)
def test_what_is_unknown_stays_so(passed_on, tmp_path):
    net = Net()
    net.load_state_dict(net.state_dict())
    net = passed_on(net)
    fit(net, tmp_path).save_checkpoint(tmp_path / "a.ckpt")
    assert not net.privacy_spent().complete
    assert not Net.load_from_checkpoint(tmp_path / "a.ckpt").privacy_spent().complete


# -- what it must hold ----------------------------------------------------------------------------


def _drop(*path: Any) -> Any:
    def edit(checkpoint: dict[str, Any]) -> None:
        node = checkpoint
        for name in path[:-1]:
            node = node[name]
        del node[path[-1]]

    return edit


def _set(value: Any, *path: Any) -> Any:
    def edit(checkpoint: dict[str, Any]) -> None:
        node = checkpoint
        for name in path[:-1]:
            node = node[name]
        node[path[-1]] = value

    return edit


RUN = ("optimizer_states", 0, "opake_lightning")
DAMAGE = {
    "key_digest": _drop(*RUN, "key_digest"),
    "weights": _drop(*RUN, "weights"),
    "training_weights": _drop(*RUN, "training_weights"),
    **{name: _drop(*RUN, "record", name) for name in _TYPES},
    "its inputs are": _drop(*RUN, "record", "inputs", "rates"),
    "noise_multiplier": _drop(*RUN, "record", "plan", "noise_multiplier"),
    "noise/step": _drop(*RUN, "state", "noise/step"),
    "optimizer/step": _drop(*RUN, "state", "optimizer/step"),
    "version": _drop(*RUN, "record", "version"),
    "'state'": _drop(*RUN, "state"),
    "not written by opake_lightning": _drop(*RUN),
    "holds weights only": _drop("optimizer_states", 0),
    "weights only, so": _drop("optimizer_states"),
    "4 steps were made on its key, and 0 are counted": _set({}, *RUN, "record", "released"),
    "noise_multiplier must be": _set(-1.0, *RUN, "record", "plan", "noise_multiplier"),
    "damaged, or of another release: TypeError": _set(7, *RUN, "state"),
    "private state is damaged, or of another": _set("x", *RUN, "record", "inputs", "plan"),
    "damaged, or of another release: AttributeError": _set(3, *RUN, "record", "inputs", "settings"),
}


@pytest.mark.parametrize(("named", "damage"), DAMAGE.items(), ids=DAMAGE.keys())
def test_a_missing_piece_is_named_and_nothing_changes(named, damage, tmp_path):
    path = saved(Net(), tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    damage(checkpoint)
    torch.save(checkpoint, tmp_path / "damaged.ckpt")
    _refused_without_a_trace(Net, tmp_path, tmp_path / "damaged.ckpt", named)


@pytest.mark.parametrize("field", ["released", "plan", "version", "lineage", "complete"])
def test_a_damaged_public_record_is_refused(field, tmp_path):
    checkpoint = torch.load(saved(Net(), tmp_path), weights_only=True)
    del checkpoint["opake_lightning"][field]
    torch.save(checkpoint, tmp_path / "damaged.ckpt")
    with pytest.raises(CheckpointError, match=field):
        Net.load_from_checkpoint(tmp_path / "damaged.ckpt")


def _refused_without_a_trace(make: Any, path: Path, ckpt: Path, match: str, **kwargs: Any) -> None:
    """Refused for a new module, and for one with a past, whose past stays as it is."""
    fresh, old = make(), Net(plan(key=None))
    fit(old, path)
    old.privacy, old.optimizer = fresh.privacy, fresh.optimizer
    for net in (fresh, old):
        weights = copy.deepcopy(net.state_dict())
        ledger = net._dp.record.ledger if net._dp else Ledger()
        position = net._dp.position() if net._dp else None
        with pytest.raises(CheckpointError, match=match):
            fit(net, path, ckpt=ckpt, **kwargs)
        torch.testing.assert_close(net.state_dict(), weights, rtol=0, atol=0)
        assert (net._dp.record.ledger if net._dp else Ledger()) == ledger
        if position is not None:
            assert net._dp.position() == position


# -- whose checkpoint it is -----------------------------------------------------------------------


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # field: (changed plan, changed loader, changed trainer)
    "clipping_norm": ({"clipping_norm": 2.0}, {}, {}),
    "noise_multiplier": ({"noise_multiplier": 1.5}, {}, {}),
    "batch_size": ({}, {"batch_size": 8}, {}),
    "n_examples": ({}, {"dataset": Points(30)}, {}),
    "target_delta": ({"target_delta": 1e-6}, {}, {}),
    "target_epsilon": ({"target_epsilon": 8.0}, {}, {}),
    "key": ({"key": key(8)}, {}, {}),
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_plan_is_refused_by_name(field, tmp_path):
    changed, loader, trainer = CHANGES[field]
    path = saved(Net(), tmp_path)
    _refused_without_a_trace(
        lambda: Net(plan(**changed)),
        tmp_path,
        path,
        rf"these differ: (\w+ \(.*\), )*(the digest of the )?{field} \(",
        loader=make_loader(**loader),
        **trainer,
    )


def test_a_changed_sample_rate_is_not_accounted_as_the_old_one(tmp_path):
    """Four steps at q = 0.5 and then four at 0.125 must not be reported as eight of either."""
    net = Net(plan(on_changed_plan="fork"))
    save = ModelCheckpoint(tmp_path, filename="a")
    fit(net, tmp_path, save, loader=make_loader(batch_size=12))
    assert net.privacy_spent().n_steps == 4
    resumed = Net(plan(on_changed_plan="fork"))
    limits = {"max_steps": 8, "max_epochs": -1}
    fit(resumed, tmp_path, loader=make_loader(batch_size=3), ckpt=tmp_path / "a.ckpt", **limits)
    expected = Ledger().spend(GaussianEvent(1.0, 0.5), 4).spend(GaussianEvent(1.0, 0.125), 4)
    assert resumed._dp.record.ledger == expected


def test_planned_steps_are_part_of_a_target(tmp_path):
    path = saved(Net(plan(target_epsilon=3.0)), tmp_path)
    _refused_without_a_trace(
        lambda: Net(plan(target_epsilon=3.0)),
        tmp_path,
        path,
        r"planned_steps \(checkpoint 8, now 12\)",
        max_epochs=3,
    )


def test_without_a_target_a_run_may_be_prolonged(tmp_path):
    path = saved(Net(), tmp_path)
    longer, whole = Net(), Net()
    a = fit(longer, tmp_path, ckpt=path, max_epochs=3)
    b = fit(whole, tmp_path, max_epochs=3)
    assert_same(snapshot(longer, a), snapshot(whole, b))


def test_another_optimizer_is_refused_by_name(tmp_path):
    path = saved(Net(optimizer=lambda: adamw(lr=0.1)), tmp_path)
    _refused_without_a_trace(
        lambda: Net(optimizer=lambda: sgd(lr=0.1)), tmp_path, path, "made with adamw.*uses sgd"
    )


def test_non_private_and_private_runs_are_not_mixed(tmp_path):
    path = saved(Net(), tmp_path)
    _refused_without_a_trace(
        lambda: Net(NonPrivate()), tmp_path, path, "noise_multiplier .*plan .*DPSGD.*NonPrivate"
    )
    (tmp_path / "b").mkdir()
    path = saved(Net(NonPrivate()), tmp_path / "b")
    _refused_without_a_trace(Net, tmp_path, path, "noise_multiplier .*plan .*NonPrivate.*DPSGD")


@pytest.mark.parametrize("named", [None, key(7)], ids=["neither", "now"])
def test_no_key_in_the_plan_takes_the_checkpoints(named, tmp_path):
    path = saved(Net(plan(key=named)), tmp_path)
    resumed = Net(plan(key=None))
    fit(resumed, tmp_path, ckpt=path)
    stored = torch.load(path, weights_only=True)["optimizer_states"][0]["opake_lightning"]
    assert resumed._dp.state.noise.key.hex() == stored["record"]["key"]


def test_two_runs_without_a_key_differ(tmp_path):
    keys = set()
    for _ in range(2):
        net = Net(plan(key=None))
        fit(net, tmp_path, max_epochs=1)
        keys.add(net._dp.state.noise.key)
    assert len(keys) == 2


# -- forks ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*there is no record of released steps:UserWarning")
@pytest.mark.parametrize("field", CHANGES)
def test_fork_goes_on_with_a_new_key_and_the_old_ledger(field, tmp_path):
    changed, loader, trainer = CHANGES[field]
    path = saved(Net(), tmp_path)
    keys = {Net.load_from_checkpoint(path).privacy_spent().n_steps: key(7)}
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()  # away from the record of what was released after the checkpoint
        ckpt = shutil.copy(path, folder)
        net = Net(plan(**changed, on_changed_plan="fork"))
        trainer = fit(net, folder, ckpt=ckpt, loader=make_loader(**loader), **CHANGES[field][2])
        keys[len(keys)] = net._dp.state.noise.key
        (first, before), *rest = net._dp.record.ledger.process.segments
        assert first == GaussianEvent(1.0, 0.25)
        assert before + sum(count for _, count in rest) == trainer.global_step
        assert before >= 4
        assert made(net) == [4, trainer.global_step - 4]
        if changed.get("target_epsilon"):
            assert 7.92 < net.privacy_spent().epsilon <= 8.0
    assert len(set(keys.values())) == 3  # two forks of one checkpoint share nothing either


class SameOnBothRanks(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        seen: list[Any] = [None, None]
        mine = module._dp.record.to_plain(secret=True), [p.tolist() for p in module.parameters()]
        dist.all_gather_object(seen, mine)
        assert seen[0] == seen[1]


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_fork_to_the_same_key(tmp_path):
    path = saved(Net(), tmp_path)
    net = Net(plan(clipping_norm=2.0, on_changed_plan="fork"))
    net.optimizer = adamw  # a lambda could not be sent to another process
    strategy = OpakeDDP(start_method="spawn")
    fit(net, tmp_path, SameOnBothRanks(), ckpt=path, devices=2, strategy=strategy)
    assert net.privacy_spent().n_steps == 8 + 4  # four were made after the checkpoint
    assert made(net) == [8, 4]
    assert net._dp.record.key != key(7)


def test_fork_hits_its_target_with_what_is_left(tmp_path):
    path = saved(Net(plan(noise_multiplier=2.0)), tmp_path)
    net = Net(plan(target_epsilon=4.0, on_changed_plan="fork"))
    fit(net, tmp_path, ckpt=path)
    spent = net.privacy_spent()
    assert spent.n_steps == 8 + 4  # four were made after the checkpoint, before the fork
    assert 3.96 < spent.epsilon <= 4.0


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
@pytest.mark.parametrize("target", [{}, {"target_epsilon": 9.0}], ids=["noise", "target"])
def test_a_fork_is_resumed_as_itself_as_often_as_it_stops(target, tmp_path):
    path = saved(Net(), tmp_path)
    save = partial(saver, every=1)

    def changed() -> Net:
        return Net(plan(clipping_norm=2.0, on_changed_plan="fork", **target))

    whole = changed()
    a = fit(whole, tmp_path, save(tmp_path / "5"), ckpt=path)
    for step in (5, 6, 7):
        resumed = changed()
        ckpt, later = (tmp_path / f"{n}" / f"step={step}.ckpt" for n in (step, step + 1))
        b = fit(resumed, tmp_path, save(later.parent), ckpt=ckpt)
        assert_same(snapshot(resumed, b), snapshot(whole, a))


def test_fork_of_the_same_plan_is_an_ordinary_resume(tmp_path):
    path = saved(Net(), tmp_path)
    net, whole = Net(plan(on_changed_plan="fork")), Net()
    a, b = fit(net, tmp_path, ckpt=path), fit(whole, tmp_path)
    assert_same(snapshot(net, a), snapshot(whole, b))


def test_a_checkpoint_of_a_second_fit_resumes(tmp_path):
    def twice(*callbacks: Any, ckpt: Any = None) -> dict[str, Any]:
        net = Net(plan(target_epsilon=4.0))
        if ckpt is None:
            net.privacy = plan(noise_multiplier=3.0)
            fit(net, tmp_path, max_epochs=1)
            net.privacy = plan(target_epsilon=4.0)
        return snapshot(net, fit(net, tmp_path, *callbacks, ckpt=ckpt))

    whole = twice(saver(tmp_path))
    save = saver(tmp_path, filename="again-{step}")
    assert_same(twice(save, ckpt=tmp_path / "step=3.ckpt"), whole)
    assert_same(twice(ckpt=tmp_path / "again-step=6.ckpt"), whole)
    assert whole["n_steps"] == 12
    assert 3.96 < whole["epsilon"] <= 4.0


def test_poisson_loader_of_the_user_resumes_on_a_single_device(tmp_path):
    path = saved(Net(), tmp_path)
    net, whole = Net(), Net()
    loader = PoissonLoader(Points(), 6)
    a = fit(net, tmp_path, ckpt=path, loader=loader, strategy="auto")
    b = fit(whole, tmp_path)
    assert_same(snapshot(net, a), snapshot(whole, b))
