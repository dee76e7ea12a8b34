"""A step that is made again comes out as it did, or is not given out."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from opake_lightning import CheckpointError, OpakeDDP
from opake_lightning.random import key
from opake_lightning.trainer._inputs import release_bits
from opake_lightning.trainer._journal import Journal
from opake_lightning.trainer._record import Known
from opake_lightning.types import NoisedPytree
from tests.trainer.cases_dpftrl import mf_plan
from tests.trainer.helpers import Net, Points, make_loader, plan, run_fit, saver
from tests.trainer.test_journal import Tells, killed

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")


class Rewritten(Net):
    """The code of the loss was changed."""

    def per_example_loss(self, batch: Any) -> Tensor:
        return 0.5 * super().per_example_loss(batch)


class Edited(Points):
    """Rows that no digest of the data sees are others."""

    def __getitem__(self, index: int) -> Any:
        x, y, i = super().__getitem__(index)
        return (x if index in (0, 3, 6, 9, 13, 16, 19, 23) else -x), y, i


class Frozen(Net):
    """A part of the model is not trained, and not saved."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale * x)


CHANGED = {
    "the loss": (Net, Rewritten, None),
    "other rows": (Net, Net, Edited),
    "what is not trained": (lambda: Frozen(1.0), lambda: Frozen(2.0), None),
    "the loss, correlated": (lambda: Net(mf_plan()), lambda: Rewritten(mf_plan()), None),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_step_that_comes_out_otherwise_is_not_given_out(name, tmp_path):
    before, now, data = CHANGED[name]
    ckpt = killed(tmp_path, net=before())
    net, tells, loader = now(), Tells(), make_loader(data() if data else None)
    with pytest.raises(CheckpointError, match=r"step 3 was made before, and came out otherwise"):
        run_fit(net, tmp_path, tells, saver(tmp_path / "b", 1), ckpt=ckpt, loader=loader)
    assert tells.counts == [5]
    saved = torch.load(ckpt, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in net.state_dict().items())
    with pytest.raises(CheckpointError, match="no checkpoint is made here"):
        net._dp.state_dict()  # half of a step
    # And whoever made the steps may make them again.
    run_fit(again := before(), tmp_path, ckpt=ckpt)
    assert again.privacy_spent().n_steps == 8


def test_the_remedy(tmp_path):
    """Another key, which changes what is compared."""
    ckpt = killed(tmp_path)
    net = Rewritten(plan(key=key(8), on_changed_plan="fork"))
    run_fit(net, tmp_path, ckpt=ckpt)
    assert net.privacy_spent().n_steps == 5 + 5


def test_what_came_after_the_lost_steps_has_nothing_to_prove(tmp_path):
    ckpt = killed(tmp_path)
    for file in tmp_path.glob("*.bits"):
        content = file.read_bytes()
        assert len(content) == 8 * 5
        file.write_bytes(content[: 8 * 3 + 4])  # cut off: steps 3 and 4 are counted, and no more
    run_fit(net := Rewritten(), tmp_path, ckpt=ckpt)
    assert net.privacy_spent().n_steps == 8


def test_a_file_that_is_gone_or_cannot_be_written_proves_nothing(tmp_path):
    ckpt = killed(tmp_path)
    (bits,) = tmp_path.glob("*.bits")
    bits.unlink()
    bits.mkdir()
    run_fit(net := Net(), tmp_path, ckpt=ckpt)
    assert net.privacy_spent().n_steps == 8


@pytest.mark.filterwarnings("ignore:.*no record of released steps")
@pytest.mark.parametrize("gone", ["the record", "the right to write"])
def test_a_proof_is_asked_for_whatever_else_is_there(gone, tmp_path, monkeypatch):
    ckpt = killed(tmp_path)
    if gone == "the record":
        for file in tmp_path.glob("*.steps"):
            file.unlink()
    else:

        def refuses(*args: Any) -> None:
            raise PermissionError

        monkeypatch.setattr(Journal, "keep_in", refuses)
    with pytest.raises(CheckpointError, match="step 3 was made before, and came out otherwise"):
        run_fit(Rewritten(), tmp_path / "b", ckpt=ckpt)


def test_of_two_that_make_one_step_at_once_one_is_refused(tmp_path):
    """Neither had seen the step of the other when it was resumed."""
    run_fit(Net(), tmp_path, saver(tmp_path), max_steps=3)
    ckpt = tmp_path / "step=3.ckpt"

    class Meanwhile(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            run_fit(Net(), tmp_path / "other", ckpt=ckpt)

    with pytest.raises(CheckpointError, match="step 3 was made before, and came out otherwise"):
        run_fit(Rewritten(), tmp_path, Meanwhile(), ckpt=ckpt)


def test_a_proof_is_of_one_step_of_one_segment(tmp_path):
    journal = Journal("1")
    journal.keep_in(tmp_path, Known())
    assert journal.prove("ab" * 16, 3, b"abcdefgh")
    places = [tmp_path / "none", tmp_path]
    assert Journal("1").prove("ab" * 16, 3, b"abcdefgh", places)
    assert not Journal("1").prove("ab" * 16, 3, b"ABCDEFGH", places)
    assert not journal.prove("ab" * 16, 3, b"ABCDEFGH")
    for segment, step in (("cd" * 16, 3), ("ab" * 16, 2), ("ab" * 16, 4)):
        assert Journal("1").prove(segment, step, b"ABCDEFGH", [tmp_path])


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_prove_what_they_repeat(tmp_path):
    def fit(net: Net, *callbacks: Any, **how: Any) -> Net:
        strategy = OpakeDDP(start_method="spawn")
        run_fit(net, tmp_path, *callbacks, devices=2, strategy=strategy, **how)
        return net

    fit(Net(), saver(tmp_path))
    ckpt = tmp_path / "step=3.ckpt"
    assert fit(Net(), ckpt=ckpt).privacy_spent().n_steps == 8
    with pytest.raises(Exception, match="step 3 was made before"):
        fit(Rewritten(), ckpt=ckpt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bit_changes_the_sum(dtype):
    flat = torch.randn(7, dtype=dtype, generator=torch.Generator().manual_seed(1))
    released = NoisedPytree({"a": flat[:4].view(2, 2), "b": flat[4:]}, 1.0)
    found = release_bits(released)
    assert len(found) == 8
    for i in range(7):
        other = flat.clone()
        other.view(torch.uint8)[i * dtype.itemsize] ^= 1
        assert release_bits(NoisedPytree({"a": other[:4].view(2, 2), "b": other[4:]}, 1.0)) != found
    apart = NoisedPytree({"a": flat[:4].view(2, 2).clone(), "b": flat[4:].clone()}, 1.0)
    assert release_bits(apart) == found
