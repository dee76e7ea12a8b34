"""Plans: what a run promises, in one object that makes its parts agree.

A plan is what a user writes down. Together with what only the data and the trainer know (the size
of the dataset, the batch size, the number of steps) it becomes a mechanism, from which sampler,
clipping, noise and accounting all take the same numbers.
"""

from __future__ import annotations

from opake_lightning.plan._base import PrivateMechanism
from opake_lightning.plan._dpftrl import DPFTRL
from opake_lightning.plan._dpsgd import DPSGD, Mechanism
from opake_lightning.plan._mf_mechanism import MFMechanism, Sampling
from opake_lightning.plan._non_private import NonPrivate

__all__ = [
    "DPFTRL",
    "DPSGD",
    "MFMechanism",
    "Mechanism",
    "NonPrivate",
    "Plan",
    "PrivateMechanism",
    "Sampling",
]

Plan = DPSGD | DPFTRL | NonPrivate
