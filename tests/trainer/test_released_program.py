r"""The program that is released is attacked: how much does it give away, at least?

Each attack knows all but whether one example, the canary, took part, and is the best there is: the
likelihood ratio of all weights that a run released. If the run is (ε, δ)-private, then whatever
the threshold e^ε', no attack has

.. math:: P(\text{ratio} > e^{ε'} | \text{in}) - e^{ε'} P(\text{ratio} > e^{ε'} | \text{out}) > δ

for an ε' of ε or more. So the largest ε' at which it does so beyond doubt is a lower bound on the
true ε. Doubt is what the Clopper-Pearson intervals of both frequencies leave, together 1e-4. The
bound must not be above what was reported, and must come near it; where the program is sabotaged by
little, it must be above.

Many canaries share a run. Their gradients are at right angles, so each has coordinates, and noise,
of its own. Weights and ε are those of ``Trainer.fit``; only the last section is about the step.

**Seeds.** Everything is drawn from fixed ones (the key of fit i is ``key(i)``, of run i of the step
``key(1000 + i)``; who is in is drawn from seed 5), so a test gives the same result each time. Were
the noise drawn by another method, a right program would fail by chance once in 1 / DOUBT times for
a bound above ε. That the bound comes to NEAR, and that sabotage is found, are matters of enough
fits; half of those below are enough to find each sabotage of a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opake_lightning import DPFTRL, DPSGD, DPModule
from opake_lightning.accounting import Ledger
from opake_lightning.dpftrl.noise import band_mf_strategy, lambda_cgd_strategy
from opake_lightning.dpftrl.noise._mechanism import _NoiseStream
from opake_lightning.dpsgd import noise as independent_noise
from opake_lightning.dpsgd.clipping import _rule
from opake_lightning.optimizers import sgd
from opake_lightning.plan import _dpsgd
from opake_lightning.random import key
from tests.trainer.helpers import make_trainer

pytestmark = pytest.mark.slow
Scores = NDArray[np.float64]

N, BATCH = 512, 256
DELTA = 0.1  # where frequencies of some thousand runs can tell
LARGE = {"target_delta": DELTA, "allow_large_delta": True}
DOUBT = 1e-4
SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)  # of the reported ε: the thresholds, chosen beforehand
NEAR = 0.7  # of the reported ε: what the bound must come to if all is right


# -- the attack ----------------------------------------------------------------------------------


def epsilon_at_least(present: Scores, absent: Scores, epsilon: float, thresholds: Any) -> float:
    """A lower bound on ε at DELTA, from log likelihood ratios; wrong with a chance of DOUBT."""
    alpha = DOUBT / (4 * len(thresholds))  # two frequencies, to add and to remove

    def at_least(hits: int, n: int) -> float:
        return float(beta.ppf(alpha, hits, n - hits + 1)) if hits else 0.0

    def at_most(hits: int, n: int) -> float:
        return float(beta.ppf(1 - alpha, hits + 1, n - hits)) if hits < n else 1.0

    best = 0.0
    for threshold in (epsilon * share for share in thresholds):
        for inside, outside in ((present, absent), (-absent, -present)):
            hit = at_least(int((inside > threshold).sum()), len(inside))
            false = at_most(int((outside > threshold).sum()), len(outside))
            if hit - math.exp(threshold) * false > DELTA:
                best = max(best, threshold)
    return best


def check(
    present: Scores, absent: Scores, epsilon: float, *, right: bool, near: float = NEAR
) -> None:
    """The bound is near ε and not above; or, if the program is not ``right``, it is above."""
    shares = (near, *SHARES) if right else (1.02,)
    bound = epsilon_at_least(present, absent, epsilon, shares)
    if right:
        # The last threshold is ε itself: to be beyond it at δ is to be refuted.
        assert near * epsilon <= bound < epsilon
    else:
        assert bound > epsilon


# -- the program ---------------------------------------------------------------------------------


class Counter(DPModule):
    """Its released gradient is the noisy count of each canary: as plain as training can be."""

    def __init__(self, privacy: Any) -> None:
        super().__init__()
        self.privacy = privacy
        self.w = nn.Parameter(torch.zeros(N))

    def per_example_loss(self, batch: Any) -> Tensor:
        return -(batch[0] * self.w).sum(1)

    def configure_privacy(self) -> Any:
        return self.privacy

    def configure_optimizers(self) -> Any:
        return sgd(lr=1.0)


class Released(pl.Callback):
    """The weights after each step, which is what an attacker gets."""

    def __init__(self) -> None:
        self.weights = [np.zeros(N)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.weights.append(pl_module.w.detach().numpy().astype(np.float64))


def fits(path: Path, make_plan: Callable[[Any], Any], steps: int, n_fits: int) -> Iterator[Any]:
    """Of each fit: who was in, the released sums in clipping norms [steps, N], the reported ε."""
    coin = np.random.default_rng(5)
    for number in range(n_fits):
        inside = coin.random(N) < 0.5
        # Three times as long as allowed; those who are out are blank, and change nothing.
        rows = torch.diag(torch.from_numpy(3.0 * inside).float())
        net, released = Counter(make_plan(key(number))), Released()
        trainer = make_trainer(path, max_steps=steps, max_epochs=-1, callbacks=[released])
        trainer.fit(net, DataLoader(TensorDataset(rows), batch_size=BATCH, shuffle=True))
        yield inside, np.diff(released.weights, axis=0) * BATCH, net.privacy_spent().epsilon


# -- DP-SGD --------------------------------------------------------------------------------------

SIGMA, STEPS = 0.8, 2


def dpsgd(rng: Any) -> DPSGD:
    return DPSGD(clipping_norm=1.0, noise_multiplier=SIGMA, key=rng, **LARGE)


def dpsgd_scores(sums: Scores, sigma: float = SIGMA, rate: float = BATCH / N) -> Scores:
    return np.log1p(rate * np.expm1((sums - 0.5) / sigma**2)).sum(0)


@contextmanager
def noise_times(factor: float) -> Iterator[None]:
    add, stream = independent_noise.add_normal_, _NoiseStream.add_

    def less(rng: Any, out: Any, stddev: float, **kwargs: Any) -> Any:
        return add(rng, out, factor * stddev, **kwargs)

    def correlated(self: Any, *args: Any, **kwargs: Any) -> float:
        return stream(self, *args[:-1], factor * args[-1], **kwargs)

    with (
        mock.patch.object(independent_noise, "add_normal_", less),
        mock.patch.object(_NoiseStream, "add_", correlated),
    ):
        yield


@contextmanager
def clipped_to(factor: float) -> Iterator[None]:
    def loose(norms: Tensor, bounds: Any) -> Tensor:
        return torch.where(norms > factor * bounds, factor * bounds / norms, 1.0)

    with mock.patch.object(_rule, "scaled_down", loose):
        yield


@contextmanager
def told_too_little() -> Iterator[None]:
    """Nothing is wrong with the program, but it reports half of its ε."""
    epsilon = Ledger.epsilon

    def less(self: Ledger, delta: float) -> float:
        return 0.5 * epsilon(self, delta)

    with mock.patch.object(Ledger, "epsilon", less):
        yield


@contextmanager
def same_noise_again() -> Iterator[None]:
    """Every step has the noise of the first: two equations, one unknown."""
    add, drawn = independent_noise.add_normal_, {}

    def again(rng: Any, out: Tensor, stddev: float, **kwargs: Any) -> Tensor:
        first = drawn.setdefault("first", rng)
        if len(drawn) == 1 and first is not rng:
            drawn.clear()
            return add(first, out, stddev, **kwargs)
        return add(rng, out, stddev, **kwargs)

    with mock.patch.object(independent_noise, "add_normal_", again):
        yield


@contextmanager
def drawn_too_often() -> Iterator[None]:
    draw = _dpsgd.poisson_indices

    def often(*args: Any, sample_rate: float, **kwargs: Any) -> Any:
        return draw(*args, sample_rate=min(1.0, 1.5 * sample_rate), **kwargs)

    with mock.patch.object(_dpsgd, "poisson_indices", often):
        yield


def dpsgd_fits(path: Path, n_fits: int, score: Callable[..., Scores]) -> Any:
    present, absent, epsilon = [], [], 0.0
    for inside, sums, reported in fits(path, dpsgd, STEPS, n_fits):
        epsilon = reported
        scores = score(sums)
        present.append(scores[inside])
        absent.append(scores[~inside])
    return np.concatenate(present), np.concatenate(absent), epsilon


def test_trained_with_dpsgd(tmp_path):
    check(*dpsgd_fits(tmp_path, 60, dpsgd_scores), right=True)


# What is wrong, how many fits tell, and the ratio that an attacker takes who knows of it.
SABOTAGE: dict[str, tuple[Any, int, Callable[..., Scores]]] = {
    "half_the_noise": (lambda: noise_times(0.5), 8, lambda s: dpsgd_scores(s, SIGMA / 2)),
    "a_fifth_less_noise": (lambda: noise_times(0.8), 40, lambda s: dpsgd_scores(s, 0.8 * SIGMA)),
    "clipped_to_1.5": (lambda: clipped_to(1.5), 12, lambda s: dpsgd_scores(s / 1.5, SIGMA / 1.5)),
    "drawn_too_often": (drawn_too_often, 25, lambda s: dpsgd_scores(s, rate=1.5 * BATCH / N)),
    "told_too_little": (told_too_little, 24, dpsgd_scores),
    # The difference of both sums has no noise: how often a canary was drawn the second time only.
    "same_noise_again": (same_noise_again, 8, lambda s: 9.0 * (np.abs(s[1] - s[0]) > 0.5)),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_of_dpsgd_is_found(name, tmp_path):
    sabotaged, n_fits, score = SABOTAGE[name]
    with sabotaged():
        found = dpsgd_fits(tmp_path, n_fits, score)
    check(*found, right=False)


# -- DP-FTRL -------------------------------------------------------------------------------------

PASSES = 2
FTRL = {"lambda_cgd": lambda_cgd_strategy(0.7), "band_mf": band_mf_strategy(3)}
FTRL_SIGMA = {"lambda_cgd": 2.2, "band_mf": 1.6}


def ftrl_fits(path: Path, name: str, n_fits: int, factor: float = 1.0) -> Any:
    """All examples in the order of the dataset; canaries are those of the first batch."""
    strategy, sigma = FTRL[name], FTRL_SIGMA[name]
    every = N // BATCH
    steps = PASSES * every

    def make_plan(rng: Any) -> DPFTRL:
        return DPFTRL(
            clipping_norm=1.0,
            strategy=strategy,
            sampling="fixed_order",
            noise_multiplier=sigma,
            **LARGE,
            key=rng,
        )

    c = strategy.for_participation(every, PASSES).matrix(steps).dense()
    moved = c[:, ::every].sum(1)  # by a canary, where noise is independent with variance σ²
    variance = (factor * sigma) ** 2
    present, absent, epsilon = [], [], 0.0
    for inside, sums, reported in fits(path, make_plan, steps, n_fits):
        epsilon, first = reported, inside[:BATCH]
        white = (c @ sums)[:, :BATCH]
        scores = (moved @ white - moved @ moved / 2) / variance
        present.append(scores[first])
        absent.append(scores[~first])
    return np.concatenate(present), np.concatenate(absent), epsilon


@pytest.mark.parametrize("name", FTRL)
def test_trained_with_dpftrl(name, tmp_path):
    # How near the bound comes is a matter of the noise at hand: 0.60 and above were seen.
    check(*ftrl_fits(tmp_path, name, 60), right=True, near=0.55)


@pytest.mark.parametrize(("factor", "n_fits"), [(0.5, 10), (0.8, 60)])
def test_sabotage_of_dpftrl_is_found(factor, n_fits, tmp_path):
    with noise_times(factor):
        found = ftrl_fits(tmp_path, "lambda_cgd", n_fits, factor)
    check(*found, right=False)


# -- the step alone, with one canary among others --------------------------------------------------


def steps_of_one_canary(n_runs: int, factor: float = 1.0) -> tuple[Scores, Scores, float]:
    """Two steps of a linear model by the mechanism that a plan becomes; one score per run."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(12, 3, generator=draw)
    clipped = x / x.norm(dim=1, keepdim=True).clamp(min=1)
    canary = torch.tensor([0.6, -0.8, 0.0])
    mechanism = dpsgd(key(0)).resolve(
        n_examples=12, batch_size=6, planned_steps=STEPS, spent=Ledger()
    )

    def loss_fn(params: Any, batch: Any) -> Any:
        return -(batch[0] * params["w"]).sum(1), {}

    start = {"w": torch.zeros(3)}
    step = mechanism.step(loss_fn, sgd(lr=1.0), key(0), start)
    scores: tuple[list[Scores], list[Scores]] = [], []
    for run in range(n_runs):
        rng, params, sums = key(1000 + run), start, []
        x[5] = 2 * canary if run % 2 else 0 * canary
        clipped[5] = 0.0
        state = step.init(start)
        state = replace(state, noise=replace(state.noise, key=rng))
        for t in range(STEPS):
            rows = torch.from_numpy(mechanism.draw(rng, t))
            moved, _, state = step(params, (x[rows],) if len(rows) else None, state)
            known = clipped[rows].sum(0)
            sums.append(float((6 * (moved["w"] - params["w"]) - known) @ canary))
            params = moved
        scores[run % 2].append(dpsgd_scores(np.array(sums)[:, None], factor * SIGMA))
    spent = Ledger().spend(mechanism.event, STEPS)
    return np.concatenate(scores[1]), np.concatenate(scores[0]), spent.epsilon(DELTA)


def test_steps_of_dpsgd():
    check(*steps_of_one_canary(2400), right=True, near=0.3)


def test_sabotage_of_steps_is_found():
    with noise_times(0.5):
        found = steps_of_one_canary(1200, 0.5)
    check(*found, right=False)
