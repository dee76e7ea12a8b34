"""With correlated noise, too, two processes make the run that one makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opake_lightning.optimizers import adamw
from tests.support.two_ranks import learned
from tests.support.two_ranks_dpftrl import fits
from tests.trainer.cases_dpftrl import ALL, mf_plan
from tests.trainer.helpers import Net, make_loader, make_trainer

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return fits(tmp_path_factory.mktemp("alone"), devices=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    """What two processes of torchrun found."""
    script = ROOT / "tests" / "support" / "two_ranks_dpftrl.py"
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


@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize("name", ALL)
def test_two_ranks_draw_and_learn_what_one_does(name, sigma, alone, ranks):
    one = alone[f"{name}, {sigma}"]
    first, second = (rank[f"{name}, {sigma}"] for rank in ranks)
    horizons = list(zip(*(run["draws"] for run in (one, first, second)), strict=True))
    assert len(horizons) == 1 + int(sigma)
    for mine, a, b in horizons:
        assert mine.keys() == a.keys() == b.keys()
        assert len(mine) == 4
        for step, draw in mine.items():
            assert sorted(a[step] + b[step]) == draw
            assert not set(a[step]) & set(b[step])
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-6)
    assert first["spent"] == second["spent"] == one["spent"]
    assert one["spent"][1] == 4 * len(horizons)


def test_one_process_goes_on_where_two_stopped(alone, ranks, folder, tmp_path):
    net = Net(mf_plan(**ALL["pair_band_mf_identity"]), lambda: adamw(0.05))
    # Apart from the record of the later steps, which one process may not make again.
    last = shutil.copy(folder / "step=3.ckpt", tmp_path)
    with pytest.warns(UserWarning, match="no record of released steps"):
        make_trainer(tmp_path).fit(net, make_loader(), ckpt_path=last, weights_only=True)
    assert net.privacy_spent().n_steps == 8
    torch.testing.assert_close(learned(net), alone["saved"]["weights"], rtol=0, atol=1e-6)
    torch.testing.assert_close(learned(net), ranks[0]["saved"]["weights"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_spawned_processes_bring_back_the_horizon(tmp_path):
    two, one = (Net(mf_plan(noise_multiplier=0.5), adam) for _ in range(2))
    make_trainer(tmp_path, strategy="opake_ddp_spawn", devices=2).fit(two, make_loader())
    make_trainer(tmp_path).fit(one, make_loader())
    torch.testing.assert_close(learned(two), learned(one), rtol=0, atol=1e-6)
    for net in (two, one):
        make_trainer(tmp_path, max_epochs=1).fit(net, make_loader())
    assert two.privacy_spent() == one.privacy_spent()
    assert [run.start for run, _ in two._dp.record.ledger.horizons] == [0, 8]


def adam():
    return adamw(0.05)
