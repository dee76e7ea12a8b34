"""What the tests of bad input share: both plans, and a fit that must be refused."""

from __future__ import annotations

import copy

import pytest
import torch

from opake_lightning import DPFTRL, PrivacyError
from opake_lightning.dpftrl.noise import band_mf_strategy
from opake_lightning.random import key
from tests.trainer.helpers import Net, make_loader, make_trainer, plan


def correlated(**changes):
    numbers = {"clipping_norm": 1.0, "noise_multiplier": 1.0, "key": key(7), **changes}
    return DPFTRL(strategy=band_mf_strategy(2), **numbers)


both = pytest.mark.parametrize("make_plan", [plan, correlated], ids=["DPSGD", "DPFTRL"])


def refused(path, match, *, module=None, loader=None, error=PrivacyError, **options):
    """A fit that ends with ``match`` before its first step, which leaves the weights alone."""
    module = Net() if module is None else module
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=match):
        make_trainer(path, **options).fit(module, make_loader() if loader is None else loader)
    assert module.privacy_spent().n_steps == 0
    for name, value in module.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name
