"""Correlated noise: strategies, their sensitivity and error, and the mechanism that streams it."""

from opake_lightning.dpftrl.noise._factories import (
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.dpftrl.noise._matrix import Rmse, StrategyMatrix
from opake_lightning.dpftrl.noise._mechanism import MFNoise, MFNoiseState, mf_gaussian_noise
from opake_lightning.dpftrl.noise._recurrence import Buffers, Inputs, Outputs, Recurrence
from opake_lightning.dpftrl.noise._sensitivity import Sensitivity
from opake_lightning.dpftrl.noise._strategies import Strategy
from opake_lightning.dpftrl.noise._workload import (
    Workload,
    iterate_workload,
    prefix_workload,
    velocity_workload,
)

__all__ = [
    "Buffers",
    "Inputs",
    "MFNoise",
    "MFNoiseState",
    "Outputs",
    "Recurrence",
    "Rmse",
    "Sensitivity",
    "Strategy",
    "StrategyMatrix",
    "Workload",
    "band_mf_strategy",
    "bisr_strategy",
    "blt_strategy",
    "bsr_strategy",
    "identity_strategy",
    "iterate_workload",
    "lambda_cgd_strategy",
    "mf_gaussian_noise",
    "prefix_workload",
    "velocity_workload",
]
