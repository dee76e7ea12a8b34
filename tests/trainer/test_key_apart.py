"""Runs whose key no checkpoint holds: they resume with it, bit for bit, and with no other."""

from __future__ import annotations

import copy
import io
import shutil
from typing import Any

import pytest
import torch

from opake_lightning import CheckpointError, OpakeDDP
from opake_lightning.accounting import GaussianEvent, Ledger
from opake_lightning.dpftrl.noise import bisr_strategy, identity_strategy, lambda_cgd_strategy
from opake_lightning.optimizers import adamw, schedule_free, sgd
from opake_lightning.plan import NonPrivate
from opake_lightning.random import RngKey, fold_in, key
from opake_lightning.trainer import _lifecycle
from opake_lightning.trainer._keys import derive
from opake_lightning.trainer._past import Past
from opake_lightning.trainer._record import Known, RunRecord, Segment
from tests.trainer.cases_dpftrl import mf_plan
from tests.trainer.helpers import (
    CLIPPING,
    Net,
    assert_same,
    made,
    make_loader,
    make_trainer,
    plan,
    saver,
    snapshot,
)
from tests.trainer.key_forms import forms

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]

KEY, OTHER = RngKey.from_hex("9ac3f1e07b5d28469ac4d0e1b7f35c82"), key(8)
APART = {"key": KEY, "key_in_checkpoint": False}


def apart(**changes: Any) -> Any:
    return plan(**{**APART, **changes})


def mf_apart(**changes: Any) -> Any:
    return mf_plan(**{**APART, "strategy": lambda_cgd_strategy(0.5), **changes})


def path_in(checkpoint: Any) -> list[str]:
    """The key derivation path that a checkpoint holds."""
    return stored(checkpoint)["record"]["path"]


def fit(net: Net, path: Any, *, ckpt: Any = None, save: str = "", **trainer: Any) -> Any:
    """Two epochs of four steps; with ``save``, a checkpoint after every step, in that folder."""
    callbacks = []
    if save:
        callbacks = [saver(path / save, every=1)]
    fitter = make_trainer(path, **{"callbacks": callbacks, **trainer})
    fitter.fit(net, make_loader(), ckpt_path=ckpt)
    return fitter


def stored(path: Any) -> dict[str, Any]:
    return torch.load(path, weights_only=True)["optimizer_states"][0]["opake_lightning"]


def resumes_alike(make: Any, path: Any, folder: str, at: int, whole: dict[str, Any]) -> None:
    resumed = make()
    trainer = fit(resumed, path, ckpt=path / folder / f"step={at}.ckpt")
    assert_same(snapshot(resumed, trainer), whole)


def holds_a_key_of(file: Any, net: Net) -> bool:
    content = file.read_bytes()
    keys = [KEY, net._dp.state.noise.key, getattr(net._dp.state.clip, "key", KEY)]
    return any(form in content for key in keys for form in forms(key))


PLANS = {
    "dpsgd": apart,
    "target": lambda: apart(target_epsilon=3.0),
    "adaptive": lambda: apart(clipping_norm=CLIPPING["adaptive"]),
    "identity": lambda: mf_apart(strategy=identity_strategy()),
    "lambda_cgd": mf_apart,
    "bisr": lambda: mf_apart(strategy=bisr_strategy(3)),
    "pair": lambda: mf_apart(second_moment_strategy=bisr_strategy(4)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_run_resumes_bit_for_bit_from_checkpoints_that_hold_no_key(name, tmp_path):
    def make() -> Net:
        return Net(PLANS[name](), dropout=0.3)

    net = make()
    whole = snapshot(net, fit(net, tmp_path, save="a"))
    files = sorted((tmp_path / "a").iterdir())
    assert len(files) == 8 + 2  # and the record of released steps, and that of their bits
    assert not any(holds_a_key_of(file, net) for file in files)
    saved = stored(tmp_path / "a" / "step=3.ckpt")
    assert not any("key" in path or "buffers" in path for path in saved["state"])
    for at in (1, 3, 5):
        resumes_alike(make, tmp_path, "a", at, whole)


def test_a_checkpoint_with_its_key_is_found_out(tmp_path):
    """The test above would pass on anything if ``holds_a_key_of`` never said yes."""
    net = Net(apart(key_in_checkpoint=True))
    fit(net, tmp_path, save="a")
    assert holds_a_key_of(tmp_path / "a" / "step=3.ckpt", net)


def test_two_runs_with_one_key_have_unrelated_noise(tmp_path):
    nets = [Net(apart()) for _ in range(3)]
    for net in nets[:2]:
        fit(net, tmp_path, save="a", max_epochs=1)
    path = tmp_path / "a" / "step=4.ckpt"
    after = [Net.load_from_checkpoint(path, privacy=apart()) for _ in range(2)]
    for net in after:
        fit(net, tmp_path, max_epochs=1)
        assert net.privacy_spent().n_steps == 8
    assert len({net._dp.state.noise.key for net in [*nets[:2], *after]} | {KEY}) == 5


# -- another key, or none -------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    fit(Net(apart()), tmp_path, save="a", max_epochs=1)
    return tmp_path / "a" / "step=3.ckpt"


def refused(privacy: Any, path: Any, match: str) -> None:
    net = Net(privacy, seed=2)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(CheckpointError, match=match) as error:
        fit(net, path.parent.parent, ckpt=path)
    assert not any(form.decode("latin-1") in str(error.value) for form in forms(KEY))
    assert net.privacy_spent().n_steps == 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("key_in_checkpoint", [True, False])
def test_another_key_is_refused_and_named(path, key_in_checkpoint):
    told = rf"these differ: the digest of the key \(.*{KEY.digest()}.*{OTHER.digest()}"
    refused(apart(key=OTHER, key_in_checkpoint=key_in_checkpoint), path, told)


@pytest.mark.parametrize("how", ["refuse", "fork"])
def test_no_key_is_refused(path, how):
    told = "holds no key.*key=random.key_from_file"
    refused(plan(key=None, on_changed_plan=how), path, told)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("path", [], "key of the plan is not the one"),
        ("path", ["fit::0"], "key of the plan is not the one"),
        ("path", [None], "corrupt checkpoint: bad key derivation"),
        ("path", None, "corrupt checkpoint: .*path must be a list"),
        ("key_digest", OTHER.digest(), "key of the plan is not the one"),
    ],
)
def test_a_changed_record_is_refused(path, name, value, match):
    checkpoint = torch.load(path, weights_only=True)
    saved = checkpoint["optimizer_states"][0]["opake_lightning"]
    (saved if name in saved else saved["record"])[name] = value
    torch.save(checkpoint, path)
    refused(apart(), path, match)


def test_a_key_that_was_changed_in_its_checkpoint_is_refused(tmp_path):
    fit(Net(plan(key=KEY)), tmp_path, save="a", max_epochs=1)
    path = tmp_path / "a" / "step=3.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    record = checkpoint["optimizer_states"][0]["opake_lightning"]["record"]
    live, record["key"] = record["key"], OTHER.hex()
    torch.save(checkpoint, path)
    for now in (plan(key=KEY), plan(key=KEY, clipping_norm=2.0, on_changed_plan="fork")):
        refused(now, path, "key in the checkpoint is not the one")
    record["key"] = live[1:]
    torch.save(checkpoint, path)
    refused(plan(key=KEY), path, "the checkpoint's key is damaged")


def test_the_option_may_change_when_a_run_resumes(tmp_path):
    net = Net(plan(key=KEY))
    whole = snapshot(net, fit(net, tmp_path, save="with"))
    for source, now, target in (("with", False, "out"), ("out", True, "in"), ("in", True, "")):
        at = {"with": 3, "out": 5, "in": 6}[source]
        net = Net(plan(key=KEY, key_in_checkpoint=now))
        trainer = fit(net, tmp_path, ckpt=tmp_path / source / f"step={at}.ckpt", save=target)
        assert_same(snapshot(net, trainer), whole)
    assert stored(tmp_path / "out" / "step=5.ckpt")["record"]["key"] is None
    assert stored(tmp_path / "in" / "step=6.ckpt")["record"]["key"] == whole["key"]


def test_noise_that_was_stored_is_not_silently_drawn_again(tmp_path):
    fit(Net(mf_plan(key=KEY, strategy=bisr_strategy(4))), tmp_path, save="a", max_epochs=2)
    refused(mf_apart(strategy=bisr_strategy(4)), tmp_path / "a" / "step=3.ckpt", "noise_memory")


# -- forks, second fits, copies -------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("new", [KEY, OTHER], ids=["same_key", "other_key"])
@pytest.mark.parametrize("make", [apart, mf_apart])
def test_a_fork_has_new_noise_and_resumes_as_itself(tmp_path, make, new, held):
    fit(Net(make(key_in_checkpoint=held)), tmp_path, save="a")

    def forked() -> Net:
        return Net(make(key=new, clipping_norm=2.0, on_changed_plan="fork"))

    net = forked()
    whole = snapshot(net, fit(net, tmp_path, ckpt=tmp_path / "a" / "step=3.ckpt", save="b"))
    assert made(net) == [8, 5]  # five were made after the checkpoint
    live, old = net._dp.state.noise.key, path_in(tmp_path / "a" / "step=3.ckpt")
    path = path_in(tmp_path / "b" / "step=5.ckpt")
    assert live == derive(new, path) != derive(new, old)
    assert not any(holds_a_key_of(file, net) for file in (tmp_path / "b").iterdir())
    resumes_alike(forked, tmp_path, "b", 5, whole)


@pytest.mark.filterwarnings("ignore:.*there is no record of released steps:UserWarning")
def test_two_forks_of_one_checkpoint_share_no_noise(path):
    keys = set()
    for _ in range(2):
        for record in path.parent.glob("*.steps"):
            record.unlink()  # as if the checkpoint had been copied elsewhere
        net = Net(apart(clipping_norm=2.0, on_changed_plan="fork"))
        fit(net, path.parent.parent, ckpt=path)
        keys.add(net._dp.state.noise.key)
    assert len(keys) == 2


@pytest.mark.parametrize("first", [apart, lambda: plan(key=None), lambda: plan(key=OTHER)])
def test_a_second_fit_resumes_whatever_key_the_first_had(tmp_path, first):
    net = Net(first())
    fit(net, tmp_path, max_epochs=1)
    before = net._dp.state.noise.key
    net.privacy = apart()
    whole = snapshot(net, fit(net, tmp_path, save="a"))
    assert whole["n_steps"] == 12
    live = net._dp.state.noise.key
    assert live != before
    assert live == derive(KEY, path_in(tmp_path / "a" / "step=3.ckpt")) != KEY
    resumes_alike(lambda: Net(apart()), tmp_path, "a", 3, whole)


@pytest.mark.parametrize("between", [NonPrivate, plan])
def test_a_fit_whose_checkpoints_hold_keys_gives_away_no_fit_beside_it(tmp_path, between):
    net, keys = Net(apart()), []
    for privacy in (apart(), between(), apart()):
        net.privacy = privacy
        fit(net, tmp_path).save_checkpoint(tmp_path / f"{len(keys)}.ckpt")
        keys.append(net._dp.state.noise.key)
    content = (tmp_path / "1.ckpt").read_bytes()
    assert any(form in content for form in forms(keys[1]))
    assert not any(form in content for form in forms(keys[0]))
    path = path_in(tmp_path / "2.ckpt")
    assert keys[2] == derive(KEY, path)
    assert keys[2] not in [derive(keys[1], path[at:]) for at in range(len(path) + 1)]


def test_runs_that_come_to_a_key_later_have_unrelated_noise(tmp_path):
    keys = {KEY}
    for _ in range(2):
        net = Net(plan(key=None))
        fit(net, tmp_path, max_epochs=1)
        net.privacy = apart()
        fit(net, tmp_path, max_epochs=1)
        keys.add(net._dp.state.noise.key)
    assert len(keys) == 3


def test_copies_resets_and_loaded_weights_have_own_noise_and_resume(tmp_path):
    net = Net(apart())
    fit(net, tmp_path, save="a", max_epochs=1)
    loaded = Net.load_from_checkpoint(tmp_path / "a" / "step=4.ckpt", privacy=apart())
    twin, anew = copy.deepcopy(net), copy.deepcopy(net)
    twin.privacy = anew.privacy = apart()
    assert twin._dp.record.key == derive(KEY, twin._dp.record.path)
    anew.reset_privacy()
    keys = {KEY, net._dp.state.noise.key}
    for number, module in enumerate((loaded, twin, anew)):
        whole = snapshot(module, fit(module, tmp_path, save=f"b{number}"))
        assert whole["n_steps"] == (8 if module is anew else 12)
        keys.add(module._dp.state.noise.key)
        resumes_alike(lambda: Net(apart()), tmp_path, f"b{number}", 3, whole)
    assert len(keys) == 5


def test_a_copy_of_an_ordinary_run_is_not_the_run(tmp_path):
    net = Net()
    fit(net, tmp_path, max_epochs=1)
    one, two = copy.deepcopy(net), copy.deepcopy(net)
    assert len({module._dp.record.key for module in (net, one, two)}) == 3
    assert one._dp.record.key != fold_in(net._dp.state.noise.key, "copy")


# -- from process to process ----------------------------------------------------------------------


BROUGHT = {
    "dpsgd": (plan, adamw),
    "apart": (apart, adamw),
    "adaptive": (lambda: plan(clipping_norm=CLIPPING["adaptive_groups"]), adamw),
    "schedule_free": (plan, lambda: schedule_free(sgd(lr=0.5), beta=0.7)),
    "dpftrl": (mf_plan, adamw),
}


@pytest.mark.parametrize("name", BROUGHT)
def test_what_a_process_brings_back_is_plain_and_enough_for_a_second_fit(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(_lifecycle, "common_nonce", lambda: "one")  # to compare what follows
    make, optimizer = BROUGHT[name]
    stayed = Net(make(), optimizer)
    fit(stayed, tmp_path, save="a", max_epochs=1)
    came = Net(stayed.privacy, optimizer)
    came.load_state_dict(stayed.state_dict())
    buffer = io.BytesIO()
    torch.save(stayed._dp.to_plain(secret=True), buffer)
    buffer.seek(0)
    came._dp = Past.from_plain(torch.load(buffer, weights_only=True))
    assert came.privacy_spent() == stayed.privacy_spent()
    assert came._dp.record == stayed._dp.record
    assert came._dp.journal.directories == stayed._dp.journal.directories
    a, b = (fit(net, tmp_path) for net in (stayed, came))
    assert_same(snapshot(came, b), snapshot(stayed, a))
    assert came.privacy_spent().n_steps == 12


def test_all_that_a_fit_has_left_is_brought_back():
    """Of a run that is behind its record, and shows other weights than it trains."""
    ledger = Ledger().spend(GaussianEvent(1.0), 4)
    record = RunRecord(
        "f00",
        KEY,
        ("fit::a", "copy:1:"),
        {"rates": "x"},
        2,
        3,
        {"s": Segment(ledger, ((0, "1 rank"), (3, "2 ranks")))},
        complete=False,
        plan={"target_delta": 0.1},
    )
    past = Past(record, since=Known({"t": Segment(ledger, ((0, "1 rank"),))}, complete=False))
    past.optimizer_name, past.parked = "adam", {"w": torch.ones(2)}
    came = Past.from_plain(past.to_plain(secret=True))
    assert (came.record, came.since, came.optimizer_name) == (record, past.since, "adam")
    assert torch.equal(came.parked["w"], past.parked["w"])
    assert came.journal.lineage == "f00"
    # Of all that, the public part has no key, and nothing that a key can be derived from.
    assert Past.from_plain(past.to_plain(secret=False)).record.key is None


def test_a_fit_in_other_processes_that_failed_and_left_no_record_is_unknown(tmp_path):
    past = Past(RunRecord("f00", KEY))
    assert past.record.complete
    assert not past.left_behind().since.complete
    past.journal.keep_in(tmp_path, Known())
    assert past.left_behind().since.complete
    assert past.left_behind().record.key != KEY


def point_adam() -> Any:
    return adamw(0.05)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_agree_on_the_noise_and_one_process_goes_on(tmp_path):
    net = Net(apart(), point_adam)
    strategy = OpakeDDP(start_method="spawn")
    fit(net, tmp_path, save="a", devices=2, strategy=strategy)
    assert net.privacy_spent().n_steps == 8
    resumed = Net(apart(), point_adam)
    # Apart from the record of the later steps, which one process may not make again.
    (tmp_path / "b").mkdir()
    last = shutil.copy(tmp_path / "a" / "step=3.ckpt", tmp_path / "b")
    with pytest.warns(UserWarning, match="no record of released steps"):
        fit(resumed, tmp_path, ckpt=last)
    assert resumed._dp.record.key == net._dp.record.key
    for mine, its in zip(resumed.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)
