"""Log-probabilities and divergences of torch.distributions, which check their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import B, Case, Spec, normal, of_module, registry

CASES: dict[str, Spec] = {}
case = registry(CASES)

C, D = 3, 5  # classes, features
LABELS = torch.tensor([0, 2, 1, 2])


def _distribution(of: Callable[..., Tensor], **known: Any) -> Spec:
    """A log-probability, with arguments checked as is the default: that is, read and found true."""

    def make(dtype: torch.dtype) -> Case:
        params = normal(dtype, w=(C, D), b=(C,))

        def loss_fn(p: Any, batch: Any) -> Tensor:
            x, y = batch
            return -of(F.linear(x, p["w"], p["b"]), y).reshape(len(x), -1).sum(1)

        return Case(params, loss_fn, (torch.randn(B, D, dtype=dtype), LABELS.clone()))

    return Spec(make, **{"beyond_vmap": True, **known})


def _mixture(z: Tensor, y: Tensor) -> Tensor:
    parts = distributions.Normal(z, F.softplus(z) + 0.1)
    mixture = distributions.MixtureSameFamily(distributions.Categorical(logits=z.sin()), parts)
    return mixture.log_prob(y.to(z) - 1)


def _multivariate(z: Tensor, y: Tensor) -> Tensor:
    covariance = z[..., None] * z[..., None, :] + torch.eye(C).to(z)
    return distributions.MultivariateNormal(z, covariance).log_prob(torch.ones(C).to(z))


def _policy(z: Tensor, y: Tensor) -> Tensor:
    """A policy gradient with a bonus for entropy, as PPO has it."""
    policy = distributions.Categorical(logits=z)
    ratio = (policy.log_prob(y) + math.log(C)).exp()
    return torch.minimum(ratio, ratio.clamp(0.8, 1.2)) + 0.01 * policy.entropy()


def _transformed(z: Tensor, y: Tensor) -> Tensor:
    base = distributions.Normal(z, torch.ones_like(z))
    flow = distributions.TransformedDistribution(
        base, [distributions.SigmoidTransform(), distributions.AffineTransform(-1, 3)]
    )
    return flow.log_prob(torch.full_like(z, 0.7))


CASES |= {
    "normal": _distribution(
        lambda z, y: distributions.Normal(z, F.softplus(z) + 0.1).log_prob(y.to(z)[:, None])
    ),
    "normal-not-checked": _distribution(
        lambda z, y: distributions.Normal(z, 1.0, validate_args=False).log_prob(y.to(z)[:, None]),
        beyond_vmap=False,
    ),
    "categorical": _distribution(lambda z, y: distributions.Categorical(logits=z).log_prob(y)),
    "categorical-of-probabilities": _distribution(
        lambda z, y: distributions.Categorical(z.softmax(1)).log_prob(y)
    ),
    "categorical-entropy": _distribution(
        lambda z, y: distributions.Categorical(logits=z).entropy() + 0.0 * y
    ),
    "bernoulli": _distribution(
        lambda z, y: distributions.Bernoulli(logits=z).log_prob((y[:, None] > 1).to(z))
    ),
    "multivariate-normal": _distribution(_multivariate),
    "independent": _distribution(
        lambda z, y: distributions.Independent(distributions.Laplace(z, z.exp()), 1).log_prob(
            z.detach() + 1
        )
    ),
    "gamma": _distribution(
        lambda z, y: distributions.Gamma(z.exp(), z.cos() + 2).log_prob(y.to(z)[:, None] + 1)
    ),
    "beta": _distribution(
        lambda z, y: distributions.Beta(z.exp(), z.cos() + 2).log_prob((y[:, None] + 1) / 4)
    ),
    "dirichlet": _distribution(
        lambda z, y: distributions.Dirichlet(z.exp()).log_prob(torch.full((C,), 1 / C).to(z))
    ),
    "poisson-distribution": _distribution(
        lambda z, y: distributions.Poisson(z.exp()).log_prob(y.to(z)[:, None])
    ),
    "student": _distribution(
        lambda z, y: distributions.StudentT(z.exp() + 1, z).log_prob(y.to(z)[:, None])
    ),
    "mixture": _distribution(_mixture),
    "transformed": _distribution(_transformed),
    "policy-gradient": _distribution(_policy),
    "kl-of-normals": _distribution(
        lambda z, y: distributions.kl_divergence(
            distributions.Normal(z, z.exp()), distributions.Normal(0.0, 1.0)
        )
    ),
    "kl-of-categoricals": _distribution(
        lambda z, y: distributions.kl_divergence(
            distributions.Categorical(logits=z), distributions.Categorical(logits=z.detach().sin())
        )
    ),
}


@case(beyond_vmap=True)
def variational_autoencoder(dtype):
    # Noise comes with the batch, so that the loop has the same.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(D, 4), nn.Linear(2, D)

        def forward(self, x: Tensor, noise: Tensor) -> Tensor:
            mean, log_std = self.encoder(x).chunk(2, 1)
            posterior = distributions.Normal(mean, log_std.exp())
            out = self.decoder(mean + posterior.scale * noise)
            kl = distributions.kl_divergence(posterior, distributions.Normal(0.0, 1.0)).sum(1)
            return (out - x).square().sum(1) + kl

    return of_module(
        Net(), torch.randn(B, D), torch.randn(B, 2), dtype=dtype, loss=lambda out: out, own=True
    )
