"""One to four ranks make one run, go on for one another, and end together."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import sgd
from opake_lightning.plan import DPSGD, Mechanism
from opake_lightning.random import key
from opake_lightning.trainer._rank_failure import require_same_checkpoint
from tests.helpers import on_ranks
from tests.support.many_ranks import (
    BATCH_SIZE,
    HALF,
    NOISES,
    RESUMED,
    SIGMA,
    STEPS,
    Counted,
)

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def found(folder: Path, what: str) -> dict[str, dict[int, Any]]:
    """What each rank of each fit found: {fit: {rank: result}}."""
    script = ROOT / "tests" / "support" / "many_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), what],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, dict[int, Any]] = {}
    for file in sorted(folder.glob("*.pt")):
        name, _, rank = file.stem.rpartition("-")
        results.setdefault(name, {})[int(rank)] = torch.load(file)
    return results


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    return found(tmp_path_factory.mktemp("same"), "same")


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    return found(tmp_path_factory.mktemp("failed"), "fail")


# -- one run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("what", ["exact", "noisy"])
def test_as_many_ranks_as_you_like_learn_the_same(same, ranks, what):
    alone, these = same["on1"][0], same[f"on{ranks}"]
    assert len(these) == ranks
    for rank in these.values():
        assert torch.equal(rank[what], these[0][what])
        torch.testing.assert_close(rank[what], alone[what], rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_as_many_ranks_as_you_like_draw_the_same(same, ranks):
    alone, these = same["on1"][0]["exact draws"], same[f"on{ranks}"].values()
    assert alone.keys() == set(range(STEPS))
    for step, draw in alone.items():
        shares = [rank["exact draws"][step] for rank in these]
        assert sorted(i for share in shares for i in share) == draw
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    shares = [len(rank["exact draws"][step]) for rank in these for step in alone]
    assert 0 in shares  # an empty share joins with zeros
    assert len(set(shares)) > 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_noise_is_there_once_however_many_make_it(same, ranks):
    these = same[f"on{ranks}"]
    for rank in these.values():
        assert torch.equal(rank["noise"], these[0]["noise"])
    noise = these[0]["noise"].double() / math.sqrt(3)  # of three steps
    expected = SIGMA * 1.0 / BATCH_SIZE
    assert abs(noise.std() - expected) < 5 * expected / math.sqrt(2 * NOISES**2)
    for part in noise.chunk(ranks):  # and the same in every rank's share
        assert abs(part.std() - expected) < 5 * expected / math.sqrt(2 * len(part))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_step_is_one_sum(same, ranks):
    for rank in same[f"on{ranks}"].values():
        first = rank["sums"].index(NOISES**2)  # after Lightning's, to set up; others end the epoch
        assert rank["sums"][first : first + 3] == [NOISES**2] * 3
        assert NOISES**2 not in rank["sums"][first + 3 :]


@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_other_ranks_go_on_where_some_stopped(same, before, after):
    alone, these = same["on1"][0], same[f"from{before}to{after}"]
    for rank in these.values():
        assert torch.equal(rank["noisy"], these[0]["noisy"])
        torch.testing.assert_close(rank["noisy"], alone["noisy"], rtol=0, atol=1e-6)
        assert rank["spent"] == these[0]["spent"]
        assert rank["spent"][0] == STEPS
    for step in range(HALF, STEPS):
        drawn = sorted(i for rank in these.values() for i in rank["draws"][step])
        assert drawn == alone["noisy draws"][step]
    assert min(these[0]["draws"]) == HALF


def one_step(params: dict[str, torch.Tensor]) -> list[int]:
    plan = DPSGD(clipping_norm=1.0, noise_multiplier=1.0)
    step = Mechanism(plan, 1.0, 24, 6, None).step(loss_fn, sgd(0.1), key(3))
    with Counted() as sizes:
        step.release(params, (torch.ones(2, 3),), step.init(params))
    return sizes


def loss_fn(params: Any, batch: Any) -> Any:
    total = sum(leaf.float().sum() for leaf in params.values())
    losses = batch[0].sum(1) * total
    return losses, losses.detach()


def sums_of() -> Any:
    several = {f"w{i}": torch.ones(i + 1) for i in range(20)}
    return one_step(several), one_step({**several, "wide": torch.ones(5, dtype=torch.float64)})


def differing(rank: int) -> str:
    try:
        require_same_checkpoint({"ledger": {}, "state": {"noise/key": f"{rank:032x}"}})
    except PrivacyError as error:
        return str(error)
    return ""


def in_pair(rank: int) -> Any:
    """All that two ranks can do without a trainer, in one start of them."""
    return {"sums": sums_of(), "differing": differing(rank), "learned": params_by_threads(rank)}


@pytest.fixture(scope="module")
def pair():
    return on_ranks(in_pair)


def test_there_is_one_sum_for_each_dtype(pair):
    for sizes, with_wide in (rank["sums"] for rank in pair):
        assert sizes == [210]
        assert sorted(with_wide) == [5, 210]


def params_by_threads(rank: int) -> Any:
    """One thread on rank 0, two on rank 1."""
    torch.set_num_threads(1 + rank)
    torch.manual_seed(0)
    params = {"w": torch.randn(3, 4000)}
    plan = DPSGD(clipping_norm=1.0, noise_multiplier=1.0)
    step = Mechanism(plan, 1.0, 24, 6, None).step(quadratic, sgd(0.1, momentum=0.9), key(3))
    state = step.init(params)
    for t in range(3):
        batch = (torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * t + rank)),)
        params, _, state = step(params, batch, state)
    torch.set_num_threads(1)
    return params["w"]


def quadratic(params: Any, batch: Any) -> Any:
    losses = (batch[0] @ params["w"]).square().mean(1)
    return losses, losses.detach()


def test_ranks_with_other_numbers_of_threads_stay_equal(pair):
    one, other = (rank["learned"] for rank in pair)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


# -- they end together ----------------------------------------------------------------------------


SOON = 30.0  # seconds, with the start of the fit, on a machine that has other things to do


def ends(results: dict[int, Any], *, at: int, with_word: str, alive: bool = True) -> None:
    assert results.keys() == ({0, 1, 2} if alive else {0, 1, 2} - {at})
    for rank, result in results.items():
        assert result["took"] < SOON
        if rank != at:
            assert with_word in result["error"]


@pytest.mark.parametrize("at", [0, 1])
def test_an_exception_on_one_rank_ends_all_with_its_reason(failed, at):
    results = failed[f"raise{at}"]
    ends(results, at=at, with_word=f"rank {at} failed: ValueError: the loss of the user")
    assert results[at]["error"] == "ValueError: the loss of the user"
    assert {result["steps"] for result in results.values()} == {3}


def test_losses_without_a_gradient_on_one_rank_end_all_before_a_step(failed):
    results = failed["detach1"]
    ends(results, at=1, with_word="rank 1 failed: PrivacyError: the loss depends on no")
    assert results[1]["error"].startswith(
        "PrivacyError: the loss depends on no trainable parameter"
    )
    assert {result["steps"] for result in results.values()} == {0}


@pytest.mark.parametrize("way", ["kill0", "kill1", "exit1"])
def test_a_rank_that_is_killed_is_named(failed, way):
    at = int(way[-1])
    ends(failed[way], at=at, with_word=f"rank {at} exited without an error", alive=False)


def test_a_save_that_fails_on_rank_0_fails_on_all(failed):
    results = failed["save1"]
    assert "could not be saved: File too large" in results[0]["error"]
    ends(results, at=0, with_word="rank 0 could not save")
    ends(results, at=0, with_word="File too large")
    assert {result["steps"] for result in results.values()} == {4}


def test_a_save_after_an_exception_waits_for_nobody(failed):
    # Lightning's OnExceptionCheckpoint saves on the rank that failed, and has a barrier after it.
    ends(failed["on_exception1"], at=1, with_word="rank 1 failed: ValueError")


def test_what_one_rank_remembers_of_the_noise_is_not_saved(failed):
    for result in failed["in_shares1"].values():
        assert result["took"] < SOON
        assert "CheckpointError" in result["error"]
        assert result["saved"] == []
    assert failed["on_exception1"][0]["saved"]  # what is whole on every rank is


def test_an_interrupted_rank_ends_all(failed):
    ends(failed["interrupt1"], at=1, with_word="rank 1 failed: KeyboardInterrupt")


def test_sigterm_ends_all_wherever_it_finds_them(failed):
    results = failed["term1"]
    assert results.keys() == {0, 1, 2}
    for result in results.values():
        assert "SIGTERMException" in result["error"]
        assert result["steps"] in (3, 4)
        assert result["took"] < SOON


def test_ranks_that_failed_are_started_anew(failed):
    for result in failed["twice1"].values():
        assert "ValueError: the loss of the user" in result["again"]
        assert "restart all processes" in result["again"]


def test_ranks_go_on_from_one_checkpoint(failed):
    for result in failed["stale1"].values():
        assert result["error"].startswith("PrivacyError: ranks disagree on the checkpoint's ledger")
        assert result["steps"] == 0


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("data1", "the training data"),
        ("momentum1", "the optimizer's settings"),
        ("logs1", "log_not_private"),  # whose sums one rank would wait for
    ],
)
def test_ranks_begin_with_the_same_rows_and_the_same_optimizer(failed, way, what):
    """Where each makes a split of its own, one example counts twice in a step."""
    for result in failed[way].values():
        assert result["error"].startswith(f"PrivacyError: ranks disagree on {what}")
        assert result["steps"] == 0


def test_a_group_that_does_not_share_its_draws(failed):
    for message in failed["unshared"].values():
        assert "draws for 1 processes, but the gradients of 2 would be summed" in message


def test_keys_are_compared_and_not_shown(pair):
    for told in (rank["differing"] for rank in pair):
        assert "key and counters (compared by digest)" in told
        assert f"{1:032x}" not in told
