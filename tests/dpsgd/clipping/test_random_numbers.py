"""Losses that draw random numbers: each example its own, whatever else happens to the batch.

What is drawn is the engine's business. So a loss returns what it drew as its auxiliary output, and
its gradient has to be that of what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import ClipState, clipped_grad
from tests.dpsgd.clipping.case import Case, clipped, normal, truth_of

N = 6
PARAMS = {"first": (32, 6), "second": (3, 32)}

Losses = Callable[[Any, Tensor, Any], tuple[Tensor, Any]]


def equals_what_was_drawn(losses: Losses, **options: Any) -> Any:
    """Check gradients against those of what was drawn, and return that."""
    params = normal(torch.float64, **PARAMS)
    x = torch.randn(N, 6, dtype=torch.float64)
    case = Case(params, lambda p, x: losses(p, x, None), x)  # type: ignore[arg-type,return-value]
    (grads, drawn), _ = clipped(case, 0.5, has_aux=True, **options)
    again = Case(params, lambda p, batch: losses(p, *batch)[0], (x, drawn))
    assert truth_of(again).error_of(grads.pytree, 0.5) < 1e-10
    return drawn


def _dropout(p: Any, x: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, p["first"])
    dropped = F.dropout(hidden, 0.5) if mask is None else hidden * mask * 2
    return F.linear(dropped, p["second"]).sin().sum(1), dropped != 0


def _module(p: Any, x: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, p["first"])
    dropped = nn.Dropout(0.5)(hidden) if mask is None else hidden * mask * 2
    return F.linear(dropped, p["second"]).sin().sum(1), dropped != 0


def _noise(p: Any, x: Tensor, noise: Any) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, p["first"])
    noise = torch.randn_like(hidden) if noise is None else noise
    return F.linear(hidden * noise, p["second"]).sin().sum(1), noise


def _constant_noise(p: Any, x: Tensor, noise: Any) -> tuple[Tensor, Tensor]:
    """Drawn without a tensor of the example: each has its own all the same."""
    noise = torch.randn(len(x), 32, dtype=x.dtype) if noise is None else noise
    return F.linear(F.linear(x, p["first"]) * noise, p["second"]).sin().sum(1), noise


def _of_a_weight(p: Any, x: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """Of a weight, a mask for each example, too."""
    w = p["first"]
    kept = (F.dropout(torch.ones_like(w), 0.5) > 0)[None] if mask is None else mask
    out = torch.einsum("bi,boi->bo", x, w * kept).tanh()
    return F.linear(out, p["second"]).sin().sum(1), kept.expand(len(x), -1, -1)


def _dropped_weight(p: Any, x: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    w = F.dropout(p["first"], 0.5)[None] if mask is None else p["first"] * mask * 2
    out = torch.einsum("bi,boi->bo", x, w.expand(len(x), -1, -1)).tanh()
    return F.linear(out, p["second"]).sin().sum(1), (w != 0).expand(len(x), -1, -1)


def _reparametrised(p: Any, x: Tensor, noise: Any) -> tuple[Tensor, Tensor]:
    """A variational autoencoder, its arguments checked."""
    mean, log_std = F.linear(x, p["first"]).mul(0.1).chunk(2, 1)
    if noise is None:
        sample = distributions.Normal(mean, log_std.exp()).rsample()
        noise = ((sample - mean) / log_std.exp()).detach()
    else:
        sample = mean + log_std.exp() * noise
    out = F.linear(torch.cat([sample, sample.sin()], 1), p["second"])
    return out.square().sum(1) + mean.square().sum(1), noise


def _gumbel(p: Any, x: Tensor, noise: Any) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, p["first"])
    if noise is None:
        noise = -torch.empty_like(logits).exponential_().log()
    out = F.linear(((logits + noise) / 0.5).softmax(1), p["second"])
    return out.sin().sum(1), noise


def _sampled(p: Any, x: Tensor, chosen: Any) -> tuple[Tensor, Tensor]:
    """A discrete choice, and the gradient of its log-probability."""
    policy = distributions.Categorical(logits=F.linear(x, p["first"]))
    chosen = policy.sample() if chosen is None else chosen
    out = F.linear(F.one_hot(chosen, 32).to(x.dtype), p["second"]).sum(1)
    return policy.log_prob(chosen) * (1 + chosen) + out.sin(), chosen


def _uniform_in_place(p: Any, x: Tensor, noise: Any) -> tuple[Tensor, Tensor]:
    """Drop-path, as the libraries of vision models write it."""
    if noise is None:
        noise = x.new_empty(len(x), 1).bernoulli_(0.5)
    hidden = x + F.linear(F.linear(x, p["first"]).tanh(), p["first"].T) * noise
    return F.linear(F.linear(hidden, p["first"]), p["second"]).sin().sum(1), noise


def _index(p: Any, x: Tensor, index: Any) -> tuple[Tensor, Tensor]:
    index = torch.randint(0, 32, (len(x),)) if index is None else index
    hidden = F.linear(x, p["first"]).gather(1, index[:, None])
    return (hidden * p["second"].mean()).sin().sum(1), index


ALL = {
    "dropout": _dropout,
    "dropout module": _module,
    "noise like a tensor": _noise,
    "noise by a shape": _constant_noise,
    "mask of a weight": _of_a_weight,
    "dropout of a weight": _dropped_weight,
    "rsample": _reparametrised,
    "gumbel": _gumbel,
    "categorical": _sampled,
    "in place": _uniform_in_place,
    "index": _index,
}


@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize("name", ALL)
def test_what_is_drawn_is_the_example_s_own(name, microbatch):
    drawn = equals_what_was_drawn(ALL[name], microbatch_size=microbatch)
    rows = {tuple(row.flatten().tolist()) for row in drawn}
    # Of two values, or of 32, some rows may have the same.
    assert len(rows) == N or (name in ("in place", "index", "categorical") and len(rows) > 1)


@pytest.mark.parametrize("name", ALL)
def test_without_rules_as_well(name):
    equals_what_was_drawn(ALL[name], caution=2)


@pytest.mark.parametrize("name", ["dropout", "noise by a shape", "rsample"])
def test_a_part_of_a_batch_draws_what_the_whole_would_have(name):
    """Rows that stay together after a value has split the batch have numbers of their own."""

    def losses(p: Any, x: Tensor, drawn: Any) -> tuple[Tensor, Any]:
        loss, drawn = ALL[name](p, x, drawn)
        return (loss if x.sum() > 0 else 2 * loss), drawn

    drawn = equals_what_was_drawn(losses)
    assert len({tuple(row.flatten().tolist()) for row in drawn}) == N


def _layer_drop(p: Any, x: Tensor, taken: Any) -> tuple[Tensor, Tensor]:
    """A layer that is left out by a number that is drawn, as LayerDrop does."""
    draw = torch.rand(len(x), dtype=x.dtype) if taken is None else taken
    hidden = F.linear(x, p["first"])
    if draw < 0.25:
        hidden = hidden.tanh()
    return F.linear(hidden, p["second"]).sin().sum(1), draw


def test_a_branch_on_what_was_drawn_is_taken_as_often_as_it_should():
    """If parts drew again, the rarer way would be taken too seldom."""
    torch.manual_seed(1)
    drawn = torch.cat([equals_what_was_drawn(_layer_drop) for _ in range(50)])
    share = float((drawn < 0.25).double().mean())
    assert share == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / len(drawn)) ** 0.5)
    assert len(drawn.unique()) == len(drawn)


def test_rows_that_run_alone_draw_numbers_of_their_own():
    def losses(p: Any, x: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        loss, mask = _dropout(p, x, mask)
        return loss * len(torch.unique((x * 5).long())), mask

    with pytest.warns(UserWarning, match="one example at a time"):
        drawn = equals_what_was_drawn(losses)
    assert len({tuple(mask) for mask in drawn.tolist()}) == N


def test_the_last_row_draws_nothing_of_the_others():
    """Whether an example is there must not show in another one's mask."""
    params = normal(torch.float64, **PARAMS)
    x = torch.randn(N, 6, dtype=torch.float64)

    def masks(rows: int) -> Tensor:
        torch.manual_seed(3)
        case = Case(params, lambda p, x: _dropout(p, x, None), x[:rows])  # type: ignore[arg-type,return-value]
        return clipped(case, 1.0, has_aux=True, microbatch_size=N)[0][1]

    torch.testing.assert_close(masks(N)[: N - 1], masks(N - 1))


def test_random_numbers_go_on_alike_however_often_a_loss_ran():
    """Twice from the same seed: the first run finds out what caution it takes, the second knows."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 3)
        out[:, 1:] = F.dropout(F.linear(x, w), 0.5)
        return out.sin().sum(1)

    grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, microbatch_size=4)
    w, x = torch.randn(2, 5), torch.randn(8, 5)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        grads, state = grad_fn(w, x, state=state)
        drawn.append((grads.pytree, torch.rand(1)))
    assert state.caution == 1
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_a_batch_that_is_split_leaves_the_generator_where_one_pass_does():
    """How far it is on must not tell how many answers there were."""

    def left_by(signs: Tensor) -> Tensor:
        def loss_fn(w: Tensor, x: Tensor) -> Tensor:
            loss = F.dropout(F.linear(x, w), 0.5).sum(1)
            return loss if x[0, 0] > 0 else 2 * loss

        grad_fn, _ = clipped_grad(loss_fn, clipping_norm=1.0, microbatch_size=4)
        torch.manual_seed(3)
        x = torch.ones(8, 5)
        x[:, 0] = signs
        grad_fn(torch.ones(2, 5), x, state=ClipState())
        return torch.rand(1)

    alike = torch.ones(8)
    assert torch.equal(left_by(alike), left_by(torch.tensor([1.0, -1.0] * 4)))
    assert torch.equal(left_by(alike), left_by(-alike))


@pytest.mark.parametrize("microbatch_size", [1, 4, None])
def test_a_loss_that_seeds_by_its_row_reaches_no_other(microbatch_size):
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        seeds = x[0, 0] > 0
        if seeds:
            torch.manual_seed(int(100 * x[0, 0]))
        return (x @ w) * (torch.rand(1, dtype=x.dtype) < 0.5) * ~seeds

    x = torch.rand(12, 3, dtype=torch.float64)
    x[:, 0] = -x[:, 0]
    sums = []
    for said in (0.123, 0.456):
        x[2, 0] = said
        grad_fn, state = clipped_grad(loss_fn, clipping_norm=1.0, microbatch_size=microbatch_size)
        torch.manual_seed(3)
        for _ in range(3):
            grads, state = grad_fn(torch.ones(3, dtype=torch.float64), x, state=state)
            sums.append(grads.pytree)
    for one, other in zip(sums[:3], sums[3:], strict=True):
        assert torch.equal(one, other)
