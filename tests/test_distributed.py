"""Two processes over gloo against one: the sum, the noise, and what ranks must agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchopt
from torch import Tensor
from torch.nn import functional as F

from opake_lightning import distributed
from opake_lightning.distributed import require_equal, sum_gradients, world_size
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import sgd
from opake_lightning.plan import DPSGD, Mechanism, NonPrivate
from opake_lightning.random import key
from opake_lightning.types import ClippedPytree, NoisedPytree, SecondMomentClippedPytree
from tests.helpers import on_ranks

N, BATCH, STEPS = 24, 6, 4
PLAIN = NonPrivate()


def loss_fn(params: Any, batch: Any) -> Any:
    x, y = batch
    losses = (x @ params["w"] + params["b"].to(x.dtype) - y) ** 2
    return losses, (losses.detach(), {})


def zero_loss(params: Any, batch: Any) -> Any:
    losses = 0 * loss_fn({"w": params["w"][:3], "b": params["b"]}, batch)[0]
    return losses, losses.detach()


def dropout_loss(params: Any, batch: Any) -> Any:
    mask = F.dropout(torch.ones(1, 64), 0.5)
    return (params["w"].sum() * mask.sum(1)) + 0 * batch[1], mask


def params() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.5, -1.0, 2.0]), "b": torch.tensor(0.1, dtype=torch.float64)}


def mechanism(sigma: float) -> Mechanism:
    return Mechanism(DPSGD(clipping_norm=1.0, noise_multiplier=sigma), sigma, N, BATCH, None)


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(N, 3), torch.randn(N)


def parts() -> list[dict[str, Tensor]]:
    """The clipped gradient of each rank."""
    torch.manual_seed(6)
    return [{"w": torch.randn(50), "b": torch.randn(3, 7).double()} for _ in range(2)]


def train(rank: int, ranks: int, sigma: float = 0.0) -> Any:
    """Some steps on this rank's shares of the draws; the last is an empty draw."""
    plan, (x, y) = mechanism(sigma), data()
    step = plan.step(loss_fn, sgd(lr=0.1), key(3))
    now, state = params(), step.init(params())
    for t in range(STEPS):
        rows = plan.draw(key(3), t, rank=rank, world_size=ranks)
        batch = (x[rows], y[rows]) if len(rows) and t < STEPS - 1 else None
        now, _, state = step(now, batch, state)
    return {**now, "steps": state.step}


def train_plain(rank: int, ranks: int) -> Any:
    x, y = data()
    step = PLAIN.step(loss_fn, torchopt.sgd(0.1), key(3))
    now, state = params(), step.init(params())
    for _ in range(3):
        now, _, state = step(now, (x[rank::ranks], y[rank::ranks]), state)
    return now


def refusal(values: dict[str, object]) -> str:
    try:
        require_equal(values)
    except PrivacyError as error:
        return str(error)
    return ""


def work(rank: int) -> Any:
    """All that needs two processes, in one start of them."""
    mine = parts()[rank]
    kept = {name: leaf.clone() for name, leaf in mine.items()}
    summed = sum_gradients(ClippedPytree(mine, 0.5))
    pure = all(torch.equal(kept[name], mine[name]) for name in mine)
    raw = sum_gradients(mine)
    flat = torch.full((5,), 1.0 + rank)
    packed = {"a": flat[:2], "b": flat[2:]}
    sum_gradients(packed, inplace=True)
    try:
        sum_gradients(NoisedPytree(mine, 1.0))
        noised = ""
    except PrivacyError as error:
        noised = str(error)

    zeros = {"w": torch.zeros(50_000), "b": torch.zeros((), dtype=torch.float64)}
    plan = mechanism(2.0)
    step = plan.step(zero_loss, sgd(lr=0.1), key(3))
    batch = (torch.ones(2, 3), torch.ones(2))
    released, _, _ = step.release(zeros, batch, step.init(zeros))

    step = plan.step(dropout_loss, sgd(lr=0.1), key(3))
    _, mask, _ = step.release(params(), batch, step.init(params()))
    return {
        "world_size": world_size(),
        "summed": summed.pytree,
        "sensitivity": summed.sensitivity,
        "pure": pure,
        "raw": raw,
        "inplace": flat,
        "noised": noised,
        "equal": refusal({"C": 1.0, "nothing": None}),
        "different": refusal({"C": 1.0, "batch_size": 4 + rank}),
        "only on one": refusal({"C": 1.0} | ({"extra": None} if rank else {})),
        "noise": released.pytree["w"],
        "noise_stddev": released.noise_stddev,
        "mask": mask,
        "trained": train(rank, 2),
        "noisy": train(rank, 2, sigma=1.0),
        "plain": train_plain(rank, 2),
    }


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return on_ranks(work)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if isinstance(one[name], Tensor))


@pytest.mark.dist
@pytest.mark.parametrize("what", ["summed", "raw"])
def test_the_sum_over_ranks_is_that_of_one_process_and_equal_everywhere(ranks, what):
    first, second = parts()
    assert same(ranks[0][what], ranks[1][what])
    for name, leaf in ranks[0][what].items():
        assert leaf.dtype == first[name].dtype
        torch.testing.assert_close(leaf, first[name] + second[name], rtol=1e-6, atol=1e-6)
    for rank in ranks:
        assert (rank["world_size"], rank["sensitivity"], rank["pure"]) == (2, 0.5, True)
        assert torch.equal(rank["inplace"], torch.full((5,), 3.0))


@pytest.mark.dist
def test_noise_is_added_once_and_is_the_same_on_every_rank(ranks):
    # σ C / B = 2 · 1 / 6; noise added on each rank before the sum would be √2 times that.
    assert torch.equal(ranks[0]["noise"], ranks[1]["noise"])
    noise, stddev = ranks[0]["noise"].double(), 2 / BATCH
    error = stddev / (2 * noise.numel()) ** 0.5
    assert abs(float(noise.square().mean().sqrt()) - stddev) < 5 * error
    assert ranks[0]["noise_stddev"] == stddev


@pytest.mark.dist
def test_two_ranks_train_as_one_does(ranks):
    # Also where the draw is empty, and with noise, which does not know the number of ranks.
    for name, sigma in (("trained", 0.0), ("noisy", 1.0)):
        want = train(0, 1, sigma)
        assert same(ranks[0][name], ranks[1][name])
        for leaf in ("w", "b"):
            torch.testing.assert_close(ranks[0][name][leaf], want[leaf], rtol=1e-6, atol=1e-6)
        assert {rank[name]["steps"] for rank in ranks} == {STEPS}


@pytest.mark.dist
def test_a_run_without_privacy_takes_the_mean_over_ranks(ranks):
    want = train_plain(0, 1)
    for rank in ranks:
        for name, leaf in rank["plain"].items():
            torch.testing.assert_close(leaf, want[name], rtol=1e-6, atol=1e-6)


@pytest.mark.dist
def test_ranks_draw_different_dropout_masks(ranks):
    assert not torch.equal(ranks[0]["mask"], ranks[1]["mask"])


@pytest.mark.dist
def test_every_rank_is_told_what_differs(ranks):
    for rank in ranks:
        assert rank["equal"] == ""
        assert "ranks disagree on batch_size: [4, 5]" in rank["different"]
        assert "ranks disagree on extra: ['<missing>', None]" in rank["only on one"]
        assert "every rank's copy of the same noise" in rank["noised"]


def test_outside_a_process_group_everything_is_the_identity():
    grads = {"w": torch.ones(2)}
    assert world_size() == 1
    assert sum_gradients(grads) is grads
    summed = sum_gradients(ClippedPytree(grads, 0.5))
    assert summed.pytree is grads
    assert summed.sensitivity == 0.5
    require_equal({"a": object()})
    with pytest.raises(PrivacyError, match="got a NoisedPytree"):
        sum_gradients(NoisedPytree(grads, 1.0))


def test_a_rank_in_the_middle_may_be_the_one_that_differs(monkeypatch):
    def gather(into: list[Any], mine: Any, group: Any = None) -> None:
        into[:] = [mine, {"batch_size": 5}, mine]

    monkeypatch.setattr(distributed, "world_size", lambda group=None: 3)
    monkeypatch.setattr(distributed.dist, "all_gather_object", gather)
    require_equal({"batch_size": 5})
    with pytest.raises(PrivacyError, match=r"disagree on batch_size: \[4, 5, 4\]"):
        require_equal({"batch_size": 4})


def test_both_parts_of_a_pair_are_summed(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda group=None: 2)
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda flat, group=None: flat.mul_(2))
    gradient, square = ClippedPytree(torch.ones(2), 1.0), ClippedPytree(torch.full((2,), 3.0), 1.0)
    pair = sum_gradients(SecondMomentClippedPytree(gradient, square=square))
    assert torch.equal(pair.gradient.pytree, torch.full((2,), 2.0))
    assert torch.equal(pair.square.pytree, torch.full((2,), 6.0))
