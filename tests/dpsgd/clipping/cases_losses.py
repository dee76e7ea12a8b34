"""What a loss is of: means, penalties, and losses that are meant for a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import (
    B,
    Case,
    Spec,
    normal,
    own_parameters,
    reduced,
    registry,
)

CASES: dict[str, Spec] = {}
case = registry(CASES)

C, D = 3, 5  # classes, features
LABELS = torch.tensor([0, 2, 1, 2])
# One number for a batch of one row, and one for a whole batch.
MEAN: dict[str, Any] = {"mixes": True}


def _of(loss: Callable[..., Tensor], *more: Callable[[torch.dtype], Tensor], **known: Any) -> Spec:
    """The spec of a loss of logits and what else is in the batch."""

    def make(dtype: torch.dtype) -> Case:
        params = normal(dtype, w=(C, D), b=(C,))
        batch = torch.randn(B, D, dtype=dtype), *[make(dtype) for make in more]

        def loss_fn(p: Any, batch: Any) -> Tensor:
            x, *rest = batch
            return loss(F.linear(x, p["w"], p["b"]), *rest)

        return Case(params, loss_fn, batch)

    return Spec(make, **known)


def labels(_: torch.dtype) -> Tensor:
    return LABELS.clone()


def floats(dtype: torch.dtype) -> Tensor:
    return torch.randn(B, C, dtype=dtype)


def shares(dtype: torch.dtype) -> Tensor:
    return torch.randn(B, C, dtype=dtype).softmax(1)


def bits(dtype: torch.dtype) -> Tensor:
    return (torch.randn(B, C) > 0).to(dtype)


def signs(dtype: torch.dtype) -> Tensor:
    return torch.tensor([1, -1, 1, -1]).to(dtype)


def weights(dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=dtype)


# -- one number, or one number in a row -----------------------------------------------------------

CASES |= {
    "cross-entropy-mean": _of(F.cross_entropy, labels, **MEAN),
    "cross-entropy-sum": _of(lambda z, y: F.cross_entropy(z, y, reduction="sum"), labels, **MEAN),
    "cross-entropy-each": _of(lambda z, y: F.cross_entropy(z, y, reduction="none"), labels),
    "cross-entropy-of-shares": _of(F.cross_entropy, shares, **MEAN),
    "cross-entropy-smoothed": _of(
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), labels, **MEAN
    ),
    "cross-entropy-smoothed-and-weighted": _of(
        lambda z, y: F.cross_entropy(
            z, y, torch.tensor([1.0, 2.0, 3.0]).to(z), reduction="none", label_smoothing=0.1
        ),
        labels,
    ),
    "cross-entropy-module": _of(nn.CrossEntropyLoss(), labels, **MEAN),
    "cross-entropy-weighted-each": _of(
        lambda z, y: F.cross_entropy(z, y, torch.tensor([1.0, 2.0, 3.0]).to(z), reduction="none"),
        labels,
    ),
    "cross-entropy-ignoring-each": _of(
        lambda z, y: F.cross_entropy(z, y, ignore_index=1, reduction="none"), labels
    ),
    "cross-entropy-weighted-mean": _of(
        lambda z, y: F.cross_entropy(z, y, torch.tensor([1.0, 2.0, 3.0]).to(z)),
        labels,
        refused="takes a mean with weight=",
    ),
    "cross-entropy-module-weighted-mean": _of(
        lambda z, y: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).to(z))(z, y),
        labels,
        refused="takes a mean with weight=",
    ),
    "cross-entropy-ignoring-mean": _of(
        lambda z, y: F.cross_entropy(z, y, ignore_index=1),
        labels,
        refused="takes a mean with ignore_index=",
    ),
    "nll-weighted-mean": _of(
        lambda z, y: F.nll_loss(F.log_softmax(z, 1), y, torch.tensor([1.0, 2.0, 3.0]).to(z)),
        labels,
        refused="takes a mean with weight=",
    ),
    "nll-mean": _of(lambda z, y: F.nll_loss(F.log_softmax(z, 1), y), labels, **MEAN),
    "mse-mean": _of(F.mse_loss, floats, **MEAN),
    "mse-by-features": _of(lambda z, y: F.mse_loss(z, y, reduction="none").mean(1), floats),
    "l1-mean": _of(F.l1_loss, floats, **MEAN),
    "smooth-l1": _of(F.smooth_l1_loss, floats, **MEAN),
    "huber": _of(lambda z, y: F.huber_loss(z, y, delta=0.5), floats, **MEAN),
    "binary": _of(F.binary_cross_entropy_with_logits, bits, **MEAN),
    "binary-weighted": _of(
        lambda z, y: F.binary_cross_entropy_with_logits(
            z, y, torch.ones(C).to(z) * 2, pos_weight=torch.tensor([1.0, 2.0, 3.0]).to(z)
        ),
        bits,
        **MEAN,
    ),
    "binary-of-probabilities": _of(
        lambda z, y: F.binary_cross_entropy(z.sigmoid(), y), bits, **MEAN
    ),
    "kl-batchmean": _of(
        lambda z, y: F.kl_div(F.log_softmax(z, 1), y, reduction="batchmean"), shares, **MEAN
    ),
    "poisson": _of(lambda z, y: F.poisson_nll_loss(z, y.abs()), floats, **MEAN),
    "gaussian": _of(
        lambda z, y: F.gaussian_nll_loss(z, y, F.softplus(z) + 0.1),
        floats,
        **MEAN,
        beyond_vmap=True,
    ),
    "hinge": _of(lambda z, y: F.hinge_embedding_loss(z[:, 0], y), signs, **MEAN),
    "multi-margin": _of(lambda z, y: F.multi_margin_loss(z, y), labels, **MEAN),
    "multilabel-margin": _of(
        lambda z, y: F.multilabel_margin_loss(z, F.pad(y[:, None], (0, C - 1), value=-1)),
        labels,
        **MEAN,
    ),
    "multilabel-soft-margin": _of(F.multilabel_soft_margin_loss, bits, **MEAN),
    "soft-margin": _of(lambda z, y: F.soft_margin_loss(z[:, 0], y), signs, **MEAN),
    "cosine-embedding": _of(
        lambda z, y, s: F.cosine_embedding_loss(z, y, s, margin=-0.5), floats, signs, **MEAN
    ),
    "margin-ranking": _of(
        lambda z, s: F.margin_ranking_loss(z[:, 0], z[:, 1], s, margin=3.0), signs, **MEAN
    ),
    "triplet": _of(lambda z, y: F.triplet_margin_loss(z, y, z.flip(1), margin=9.0), floats, **MEAN),
    "focal": _of(
        lambda z, y: (lambda c: ((1 - (-c).exp()) ** 2 * c).mean())(
            F.cross_entropy(z, y, reduction="none")
        ),
        labels,
        **MEAN,
    ),
    "dice": _of(
        lambda z, y: 1 - 2 * (z.sigmoid() * y).sum() / (z.sigmoid().sum() + y.sum() + 1),
        bits,
        **MEAN,
    ),
    "weighted-by-the-example": _of(
        lambda z, y, w: w * F.cross_entropy(z, y, reduction="none"), labels, weights
    ),
    "divided-by-the-sum-of-weights": _of(
        # Of one row, its own weight: it cancels, as is said of cross_entropy(weight=).
        lambda z, y, w: (w * F.cross_entropy(z, y, reduction="none")).sum() / w.sum() + 0 * w.sum(),
        labels,
        weights,
        **MEAN,
    ),
    "squeezed": _of(lambda z: z[:, :1].square().squeeze()),
    "sum-of-everything": _of(lambda z: z.sin().sum(), **MEAN),
    "first-of-the-batch": _of(lambda z: z[0].sin().sum(), **MEAN),
    "first-and-last-of-the-batch": _of(lambda z: (z[0] * z[-1]).sum(), **MEAN),
    "median": _of(lambda z: z.median(1).values),
    "top-two": _of(lambda z: z.topk(2, 1).values.sum(1)),
    "logsumexp": _of(lambda z: z.logsumexp(1)),
    "variance": _of(lambda z: z.var(1) + z.std(1)),
    "ctc-one-alphabet": _of(
        lambda z, y: F.ctc_loss(
            F.log_softmax(torch.stack([z, z.sin(), z.cos()]), -1),
            y[:, None] % 2 + 1,
            torch.full((len(z),), 3),
            torch.ones(len(z), dtype=torch.int64),
        ),
        labels,
        **MEAN,
    ),
}


@case()
def dense_prediction(dtype):
    net = nn.Conv2d(2, C, 3, padding=1).to(dtype)

    def loss_fn(p: Any, batch: Any) -> Tensor:
        x, y = batch
        logits = torch.func.functional_call(net, p, (x,))
        return F.cross_entropy(logits, y, reduction="none").mean((1, 2))

    batch = torch.randn(B, 2, 4, 4, dtype=dtype), torch.randint(0, C, (B, 4, 4))
    return Case({n: p.detach() for n, p in net.named_parameters()}, loss_fn, batch)


@case(beyond_vmap=True, **MEAN)
def cross_entropy_in_chunks(dtype):
    # Gradients are computed in the forward pass, for what requires one.
    params = normal(dtype, body=(D, D), head=(C, D))

    def loss_fn(p: Any, batch: Any) -> Tensor:
        x, y = batch
        hidden = F.linear(x, p["body"]).tanh().flatten(0, 1)
        return F.linear_cross_entropy(hidden, p["head"], y.flatten(), options=_chunks())

    return Case(params, loss_fn, (torch.randn(B, 4, D, dtype=dtype), torch.randint(0, C, (B, 4))))


@case(beyond_vmap=True, **MEAN)
def cross_entropy_in_chunks_of_a_frozen_head(dtype):
    params, head = normal(dtype, body=(D, D)), torch.randn(C, D, dtype=dtype)

    def loss_fn(p: Any, batch: Any) -> Tensor:
        x, y = batch
        hidden = F.linear(x, p["body"]).tanh().flatten(0, 1)
        return F.linear_cross_entropy(hidden, head, y.flatten(), options=_chunks())

    return Case(params, loss_fn, (torch.randn(B, 4, D, dtype=dtype), torch.randint(0, C, (B, 4))))


def _chunks() -> Any:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("new in torch 2.13")
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    return LinearCrossEntropyOptions(chunking_method="auto", batch_chunk_size=2)


@case(**MEAN)
def tokens_of_which_some_are_ignored(dtype):
    # -100 by default: the mean over a row's own tokens.
    params = normal(dtype, w=(C, D))

    def loss_fn(p: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(F.linear(x, p["w"]).flatten(0, 1), y.flatten())

    y = torch.tensor([[0, 1, -100, -100], [2, -100, -100, -100], [1, 1, 1, 0], [-100, 0, 2, 1]])
    return Case(params, loss_fn, (torch.randn(B, 4, D, dtype=dtype), y))


@case()
def mean_over_valid_tokens(dtype):
    params = normal(dtype, w=(C, D))

    def loss_fn(p: Any, batch: Any) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(F.linear(x, p["w"]).mT, y, reduction="none", ignore_index=0)
        return losses.sum(1) / (y != 0).sum(1)

    y = torch.tensor([[1, 2, 0, 0], [2, 0, 0, 0], [1, 1, 1, 2], [2, 2, 2, 0]])
    return Case(params, loss_fn, (torch.randn(B, 4, D, dtype=dtype), y))


# -- penalties ------------------------------------------------------------------------------------


def _penalised(penalty: Callable[[nn.Module, Tensor, Tensor], Any], **known: Any) -> Spec:
    """A loss by the module's own parameters, and what ``penalty`` makes of the module."""

    def make(dtype: torch.dtype) -> Case:
        net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, C)).to(dtype)

        def loss_fn(p: Any, x: Tensor) -> Tensor:
            del p
            out = net(x)
            return reduced(out) + 0.1 * penalty(net, x, out)

        return Case(own_parameters(net), loss_fn, torch.randn(B, D, dtype=dtype))

    return Spec(make, **known)


def _l2_in_a_loop(net: nn.Module, x: Tensor, out: Tensor) -> Any:
    total: Any = 0.0
    for name, parameter in net.named_parameters():
        if "bias" not in name:
            total += parameter.pow(2).sum()
    return total


def _l2_in_a_tensor(net: nn.Module, x: Tensor, out: Tensor) -> Any:
    total = torch.tensor(0.0, dtype=x.dtype)
    for parameter in net.parameters():
        total = total + torch.norm(parameter)
    return total


CASES |= {
    "l2-penalty": _penalised(lambda net, x, out: sum(p.square().sum() for p in net.parameters())),
    "l2-penalty-in-a-loop": _penalised(_l2_in_a_loop),
    "l2-penalty-in-a-tensor": _penalised(_l2_in_a_tensor),
    "l1-penalty": _penalised(lambda net, x, out: sum(p.abs().sum() for p in net.parameters())),
    "penalty-on-all-in-one-vector": _penalised(
        lambda net, x, out: torch.cat([p.flatten() for p in net.parameters()]).norm()
    ),
    "penalty-by-a-utility": _penalised(
        lambda net, x, out: nn.utils.parameters_to_vector(net.parameters()).square().mean()
    ),
    "penalty-on-orthogonality": _penalised(
        lambda net, x, out: (net[0].weight @ net[0].weight.T - torch.eye(4).to(x)).square().sum()
    ),
    "penalty-on-activations": _penalised(lambda net, x, out: out.abs().sum(1)),
    "penalty-on-the-logits-of-a-batch": _penalised(
        lambda net, x, out: out.logsumexp(1).square().mean(), mixes=True
    ),
    "penalty-on-the-mean-of-a-batch": _penalised(
        lambda net, x, out: out.mean(0).square().sum(), mixes=True
    ),
    "penalty-on-the-covariance-of-a-batch": _penalised(
        # Of one row, nothing is left but its mean.
        lambda net, x, out: (out.T @ out / len(x)).square().sum(),
        mixes=True,
    ),
    "penalty-on-the-size": _penalised(
        lambda net, x, out: sum(p.square().sum() / p.numel() for p in net.parameters())
    ),
    "penalty-towards-the-first-weights": _penalised(
        lambda net, x, out: sum((p - p.detach().round()).square().sum() for p in net.parameters())
    ),
}

# -- losses that are meant for a batch ------------------------------------------------------------


def _of_pairs(loss: Callable[[Tensor, Tensor], Tensor], **known: Any) -> Spec:
    """Two views of each row, embedded."""

    def make(dtype: torch.dtype) -> Case:
        params = normal(dtype, w=(4, D))

        def loss_fn(p: Any, batch: Any) -> Tensor:
            return loss(*(F.linear(x, p["w"]) for x in batch))

        batch = torch.randn(B, D, dtype=dtype), torch.randn(B, D, dtype=dtype)
        return Case(params, loss_fn, batch)

    return Spec(make, **{**MEAN, **known})


def _two_towers(a: Tensor, b: Tensor) -> Tensor:
    """Pairs and their similarity, without negatives of other rows."""
    return 1 - F.cosine_similarity(a, b).mean()


def _infonce_and_more(a: Tensor, b: Tensor) -> Tensor:
    """Of one row, the contrastive term is zero and the rest is left."""
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.1
    return F.cross_entropy(logits, torch.arange(len(a))) + (a - b).square().mean()


def _own_negatives(a: Tensor, b: Tensor) -> Tensor:
    """Negatives of the row's own."""
    negatives = torch.stack([b.roll(k, 1) for k in (1, 2)], 1)
    logits = torch.cat([(a * b).sum(1, keepdim=True), (a[:, None] * negatives).sum(2)], 1)
    return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.int64))


def _barlow(a: Tensor, b: Tensor) -> Tensor:
    """Barlow twins without the standardisation, which needs two rows."""
    cross = a.T @ b / len(a)
    return (cross - torch.eye(4).to(a)).square().sum()


def _partner(a: Tensor, b: Tensor) -> Tensor:
    """Mixed with a partner from the batch: of one row, with itself."""
    order = torch.randperm(len(a))
    mixed = 0.3 * a + 0.7 * a[order]
    return (mixed - b).square().mean()


def _rolled(a: Tensor, b: Tensor) -> Tensor:
    return (0.3 * a + 0.7 * a.roll(1, 0) - b).square().mean()


def _standardised(a: Tensor, b: Tensor) -> Tensor:
    scale = (a - a.mean(0)).square().mean(0).add(1).sqrt()
    return (a / scale - b).square().mean()


CASES |= {
    "two-towers": _of_pairs(_two_towers),
    "infonce-and-more": _of_pairs(_infonce_and_more),
    "infonce-with-own-negatives": _of_pairs(_own_negatives),
    "barlow-twins": _of_pairs(_barlow),
    "mixed-with-a-partner": _of_pairs(_partner),
    "mixed-with-a-neighbour": _of_pairs(_rolled),
    "standardised-by-the-batch": _of_pairs(_standardised),
}

# -- what is no loss of one row -------------------------------------------------------------------


@case(refused="one number per example")
def loss_of_every_token(dtype):
    params = normal(dtype, w=(C, D))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return F.linear(x, p["w"]).square().sum(2)

    return Case(params, loss_fn, torch.randn(B, 2, D, dtype=dtype))


@case(refused="one number per example")
def loss_that_is_no_tensor(dtype):
    params = normal(dtype, w=(C, D))

    def loss_fn(p: Any, x: Tensor) -> Any:
        return [F.linear(x, p["w"]).square().sum()]

    return Case(params, loss_fn, torch.randn(B, D, dtype=dtype))


@case(refused="one number per example")
def loss_of_two(dtype):
    params = normal(dtype, w=(C, D))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return F.linear(x, p["w"])[0, :2]

    return Case(params, loss_fn, torch.randn(B, D, dtype=dtype))
