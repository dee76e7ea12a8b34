"""Ways to train with correlated noise that several test files go through."""

from __future__ import annotations

from typing import Any

from opake_lightning import DPFTRL
from opake_lightning.dpftrl.noise import (
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.random import key

BAND = band_mf_strategy(3)


def mf_plan(**changes: Any) -> DPFTRL:
    """The usual plan: three bands, σ = 1, C = 1, δ = 1e-5, key(7)."""
    kwargs = {
        "strategy": BAND,
        "clipping_norm": 1.0,
        "noise_multiplier": 1.0,
        "target_delta": 1e-5,
        "key": key(7),
        **changes,
    }
    if kwargs.get("target_epsilon") is not None and "noise_multiplier" not in changes:
        del kwargs["noise_multiplier"]
    return DPFTRL(**kwargs)


# Some 1/δ runs are simulated for the accounting.
_SIMULATED = {"target_delta": 0.01}

# One of each mechanism and each sampling.
MECHANISMS: dict[str, dict[str, Any]] = {
    "identity": {"strategy": identity_strategy()},
    "band_mf": {"strategy": BAND},
    "band_mf_b_min_sep": {"strategy": BAND, "sampling": "b_min_sep", **_SIMULATED},
    "band_mf_partition": {"strategy": band_mf_strategy(4), "sampling": "fixed_partition"},
    "bsr": {"strategy": bsr_strategy(3, momentum=0.5, normalized=True)},
    "blt": {"strategy": blt_strategy(2)},
    "bisr": {"strategy": bisr_strategy(3, normalized=True)},
    "bisr_in_order": {"strategy": bisr_strategy(3), "sampling": "fixed_order"},
    "lambda_cgd": {"strategy": lambda_cgd_strategy(0.7)},
    "lambda_cgd_bins": {
        "strategy": lambda_cgd_strategy(0.7, normalized=True),
        "sampling": "balls_in_bins",
        **_SIMULATED,
    },
}
# The same with squares, which only some optimizers can use.
PAIRS: dict[str, dict[str, Any]] = {
    "band_mf_identity": {"strategy": BAND, "second_moment_strategy": identity_strategy()},
    "band_mf_twice": {
        "strategy": BAND,
        "second_moment_strategy": BAND,
        "sampling": "b_min_sep",
        "second_moment": "per_example",
        **_SIMULATED,
    },
    "blt_bisr": {
        "strategy": blt_strategy(2),
        "second_moment_strategy": bisr_strategy(2),
        "second_moment": "per_example",
    },
    "lambda_cgd_blt": {
        "strategy": lambda_cgd_strategy(0.7),
        "second_moment_strategy": blt_strategy(1, momentum=0.9),
    },
}
ALL = {**MECHANISMS, **{f"pair_{name}": case for name, case in PAIRS.items()}}
