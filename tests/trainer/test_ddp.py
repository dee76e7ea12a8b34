"""Two processes make the run that one makes: the same draws, sums, noise, once each."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from opake_lightning import CheckpointError
from opake_lightning.optimizers import adamw
from tests.support.two_ranks import BATCH_SIZE, SIGMA, fits, learned
from tests.trainer.helpers import CLIPPING, Net, make_loader, make_trainer, plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return fits(tmp_path_factory.mktemp("alone"), devices=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    """What two processes of torchrun found."""
    script = ROOT / "tests" / "support" / "two_ranks.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_noise_is_sigma_c_over_b_whatever_the_batch(alone):
    moves = alone["moves"]
    n = moves.numel()
    expected = SIGMA * 1.0 / BATCH_SIZE
    assert abs(moves.std() - expected) < 5 * expected / math.sqrt(2 * n)
    assert abs(moves.mean()) < 5 * expected / math.sqrt(n)
    for step, move in enumerate(moves):  # each step by itself: realised batches differ
        assert abs(move.std() - expected) < 5 * expected / math.sqrt(2 * len(move)), step
    correlation = torch.corrcoef(moves) - torch.eye(len(moves))
    assert correlation.abs().max() < 5 / math.sqrt(moves.shape[1])


@pytest.mark.dist
def test_two_ranks_add_the_noise_once(alone, ranks):
    for rank in ranks:
        assert torch.equal(rank["moves"], alone["moves"])


@pytest.mark.dist
def test_two_ranks_learn_what_one_does(alone, ranks):
    assert torch.equal(ranks[0]["exact"], ranks[1]["exact"])
    torch.testing.assert_close(ranks[0]["exact"], alone["exact"], rtol=0, atol=1e-6)
    assert [rank["global_step"] for rank in ranks] == [16, 16]
    for rank in ranks:
        # What carries no noise, too, is of the examples of all ranks.
        assert rank["metrics"].keys() >= {"not_private/loss", "not_private/norm_median"}
        torch.testing.assert_close(rank["metrics"], alone["metrics"])
        assert (rank["total"], alone["total"]) == (3 + 4, 3)
        # Also of those before a resume, which each rank has counted by itself.
        assert rank["dropped"] == alone["dropped"]
    half, whole = alone["dropped"]
    assert 0 < half < whole


@pytest.mark.dist
@pytest.mark.parametrize("clipping", CLIPPING)
def test_two_ranks_clip_and_count_as_one_does(alone, ranks, clipping):
    one, other = (rank[clipping] for rank in ranks)
    assert torch.equal(one["weights"], other["weights"])
    assert torch.equal(one["norms"], other["norms"])
    torch.testing.assert_close(one["weights"], alone[clipping]["weights"], rtol=0, atol=1e-6)
    torch.testing.assert_close(one["norms"], alone[clipping]["norms"])


@pytest.mark.dist
def test_shares_are_disjoint_and_together_the_draw(alone, ranks):
    first, second = (rank["draws"] for rank in ranks)
    assert first.keys() == second.keys() == alone["draws"].keys() == set(range(16))
    for step, draw in alone["draws"].items():
        assert sorted(first[step] + second[step]) == draw
        assert not set(first[step]) & set(second[step])
    assert any(not second[step] and first[step] for step in first)  # an empty share joins
    assert any(not draw for draw in alone["draws"].values())  # and an empty draw is a step


@pytest.mark.dist
def test_checkpoint_of_two_ranks_loads_on_one_device(alone, ranks, folder, tmp_path):
    net = Net.load_from_checkpoint(folder / "epoch=1-step=8.ckpt", weights_only=True)
    assert torch.equal(learned(net), ranks[0]["saved"])
    spent = net.privacy_spent()
    assert (spent.n_steps, spent.epsilon) == (8, alone["epsilon"])
    assert [rank["steps"] for rank in ranks] == [8, 8]


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_one_process_goes_on_where_two_stopped(alone, ranks, folder, tmp_path):
    """And makes no step again, whose last digits depend on how many there are."""
    net = Net(plan(target_epsilon=3.0), lambda: adamw(0.05))
    with pytest.raises(CheckpointError, match=r"made 4 more, with 2 rank.*and not with 1 rank"):
        make_trainer(tmp_path, callbacks=[ModelCheckpoint(folder)], max_epochs=2).fit(
            net, make_loader(), ckpt_path=folder / "epoch=0-step=4.ckpt", weights_only=True
        )
    # Taken away from the record, as if no step had been lost.
    last = shutil.copy(folder / "epoch=0-step=4.ckpt", tmp_path)
    net = Net(plan(target_epsilon=3.0), lambda: adamw(0.05))
    trainer = make_trainer(tmp_path, max_epochs=2)
    with pytest.warns(UserWarning, match="no record of released steps"):
        trainer.fit(net, make_loader(), ckpt_path=last, weights_only=True)
    assert net.privacy_spent().n_steps == 8
    torch.testing.assert_close(learned(net), alone["saved"], rtol=0, atol=1e-6)


def adam():
    return adamw(0.05)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "then", ["opake_ddp", pytest.param("opake_ddp_spawn", marks=pytest.mark.slow)]
)
def test_spawn_brings_back_what_was_spent(tmp_path, then):
    two, one = (Net(plan(noise_multiplier=0.0), adam) for _ in range(2))
    for spawn, done in (("opake_ddp_spawn", 8), (then, 16)):
        devices = 2 if spawn == "opake_ddp_spawn" else 1
        make_trainer(tmp_path, strategy=spawn, devices=devices).fit(two, make_loader())
        make_trainer(tmp_path).fit(one, make_loader())
        assert two.privacy_spent() == one.privacy_spent()
        assert two.privacy_spent().n_steps == done
        if done == 8:  # the weights that the second fit begins from have other last digits
            torch.testing.assert_close(learned(two), learned(one), rtol=0, atol=1e-6)
