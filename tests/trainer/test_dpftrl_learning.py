"""Correlated noise is worth it: the digits are learnt better than with independent noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from opake_lightning import DPFTRL, DPModule
from opake_lightning.dpftrl.noise import (
    band_mf_strategy,
    bisr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.optimizers import sgd
from opake_lightning.random import key
from tests.trainer.helpers import make_loader, make_trainer

pytestmark = pytest.mark.slow

EPSILON, DELTA, KEYS = 2.0, 1e-4, 8
# name: (strategy, learning rate, noise multiplier, sensitivity), the last two worked out elsewhere
CASES: dict[str, tuple[Any, float, float, float]] = {
    "identity": (identity_strategy(), 0.5, 7.756253, 4.472136),
    "band_mf": (band_mf_strategy(11), 1.0, 7.756253, 4.472136),
    "bisr": (bisr_strategy(4), 1.0, 10.310682, 5.944980),
    "lambda_cgd": (lambda_cgd_strategy(0.9, normalized=True), 1.0, 10.537123, 6.075543),
}


class Digits(DPModule):
    """Softmax regression on a fixed partition into 11 batches."""

    def __init__(self, strategy: Any, lr: float, seed: int) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)
        nn.init.zeros_(self.net.weight)
        nn.init.zeros_(self.net.bias)
        self.strategy, self.lr, self.seed = strategy, lr, seed

    def per_example_loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def configure_privacy(self) -> DPFTRL:
        return DPFTRL(
            clipping_norm=1.0,
            strategy=self.strategy,
            sampling="fixed_partition",
            target_epsilon=EPSILON,
            target_delta=DELTA,
            key=key(self.seed),
        )

    def configure_optimizers(self) -> Any:
        return sgd(lr=self.lr)


@pytest.fixture(scope="module")
def accuracies(tmp_path_factory):
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=360, stratify=y, random_state=0)
    x_train, x_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    y_train, y_test = (torch.tensor(part) for part in parts[2:])
    path = tmp_path_factory.mktemp("digits")
    found: dict[str, float] = {}
    for name, (strategy, lr, sigma, sensitivity) in CASES.items():
        hits = 0.0
        for seed in range(KEYS):
            net = Digits(strategy, lr, seed)
            loader = make_loader(TensorDataset(x_train, y_train), batch_size=131)
            make_trainer(path, max_epochs=20).fit(net, loader)
            spent = net.privacy_spent()
            assert spent.n_steps == 220
            assert 0.99 * EPSILON < spent.epsilon <= EPSILON
            assert spent.plan["noise_multiplier"] == pytest.approx(sigma, rel=3e-4)
            assert net._dp.mechanism.sensitivity == pytest.approx(sensitivity, rel=1e-6)
            hits += float((net.net(x_test).argmax(1) == y_test).float().mean())
        found[name] = hits / KEYS
    return found


def test_independent_noise_learns(accuracies):
    assert accuracies["identity"] > 0.84


@pytest.mark.parametrize("name", ["band_mf", "bisr", "lambda_cgd"])
def test_correlated_noise_gains_three_points_at_the_same_privacy(name, accuracies):
    assert accuracies[name] >= accuracies["identity"] + 0.03
