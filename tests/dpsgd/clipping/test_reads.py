"""What a loss asks of its tensors: a row's own values in every form, and no raw gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opake_lightning.dpsgd.clipping import clipped_grad
from opake_lightning.errors import PrivacyError

ONE_TWO = torch.tensor([[1.0, 2.0]])
ROWS = torch.tensor(
    [[1.0, 2.0], [1.0, 3.0], [5.0, 7.0], [0.0, 2.0], [float("nan"), 2.0], [1.0, 2.0]]
)
READS: dict[str, Any] = {
    "equal": lambda n: 1.0 if torch.equal(n, ONE_TWO) else -1.0,
    "allclose": lambda n: 1.0 if torch.allclose(n, ONE_TWO) else -1.0,
    "in": lambda n: 1.0 if 2.0 in n else -1.0,
    "repr": lambda n: 1.0 if "3" in repr(n[0]) else -1.0,
    "format": lambda n: 1.0 if "3" in f"{n[0, 1]}" else -1.0,
    "array with NaN": lambda n: 1.0 if n.numpy().max() == 2.0 else -1.0,
    "written array": lambda n: float(np.nan_to_num(n.numpy().__iadd__(1.0)).sum()),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_that_of_the_row(name):
    def loss(p: Any, batch: Any) -> Tensor:
        x, n = batch
        return (p["w"] * x).sum(1) * READS[name](n) + 0 * torch.nan_to_num(n).sum(1)

    x, batch = torch.arange(12.0).view(6, 2), ROWS.clone()
    grad_fn, state = clipped_grad(loss, clipping_norm=1e9, microbatch_size=6)
    grads, _ = grad_fn({"w": torch.ones(2)}, (x, batch), state=state)
    answers = [READS[name](row.clone()) for row in ROWS.split(1)]
    want = sum(answer * row for answer, row in zip(answers, x.double(), strict=True))
    torch.testing.assert_close(grads.pytree["w"], want, equal_nan=True, check_dtype=False)
    torch.testing.assert_close(batch, ROWS, rtol=0, atol=0, equal_nan=True)
    assert len(set(answers)) > 1


REFUSED: dict[str, Any] = {
    "mean weighted by default": (
        lambda z: F.cross_entropy(z, torch.zeros(len(z), dtype=torch.int64), torch.ones(4)),
        "takes a mean with weight=",
    ),
    "mean of likelihoods weighted by default": (
        lambda z: F.nll_loss(z, torch.zeros(len(z), dtype=torch.int64), torch.ones(4)),
        "takes a mean with weight=",
    ),
    "statistics kept by default": (
        lambda z: F.instance_norm(z[:, None], torch.zeros(1), torch.ones(1)).sum((1, 2)),
        "keeps statistics of the examples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_its_defaults(name):
    of, message = REFUSED[name]
    grad_fn, state = clipped_grad(lambda w, x: of(F.linear(x, w)), clipping_norm=1.0)
    with pytest.raises(PrivacyError, match=message):
        grad_fn(torch.ones(4, 3), torch.ones(2, 3), state=state)


@pytest.mark.parametrize(
    "call",
    [
        lambda p, z: torch.autograd.backward(z.sum()),
        lambda p, z: z.sum().backward(),
        lambda p, z: p["w"].register_hook(lambda g: g),
        lambda p, z: p["w"].register_post_accumulate_grad_hook(lambda g: None),
    ],
    ids=["autograd.backward", "backward", "hook", "hook after accumulation"],
)
def test_what_would_get_at_raw_gradients_is_refused(call):
    def loss(p: Any, x: Tensor) -> Tensor:
        z = (p["w"] * x).sum(1)
        call(p, z)
        return z

    grad_fn, state = clipped_grad(loss, clipping_norm=1.0)
    with pytest.raises(PrivacyError, match="the loss calls"):
        grad_fn({"w": torch.ones(2, requires_grad=True)}, torch.ones(3, 2), state=state)


@pytest.mark.filterwarnings("ignore:clipping one example at a time")
@pytest.mark.parametrize("alone", [False, True])
def test_a_refusal_that_the_loss_catches_comes_through(alone):
    def loss(w: Tensor, x: Tensor) -> Tensor:
        z = x @ w
        if alone:
            z = z[z > -9]
        with contextlib.suppress(PrivacyError):
            z.sum().backward()
        return z.sum()

    grad_fn, state = clipped_grad(loss, clipping_norm=1.0)
    with pytest.raises(PrivacyError, match="the loss calls"):
        grad_fn(torch.ones(2), torch.ones(3, 2), state=state)
