"""The Lightning layer; the only part of the library that imports Lightning."""

from __future__ import annotations

from opake_lightning.trainer._checkpoint_io import SealedCheckpointIO
from opake_lightning.trainer.callbacks import PrivacyBudget
from opake_lightning.trainer.data import Draw, PoissonLoader
from opake_lightning.trainer.module import DPMixin, DPModule
from opake_lightning.trainer.optimizer import FunctionalOptimizer
from opake_lightning.trainer.report import PrivacySpent
from opake_lightning.trainer.strategy import OpakeDDP

__all__ = [
    "DPMixin",
    "DPModule",
    "Draw",
    "FunctionalOptimizer",
    "OpakeDDP",
    "PoissonLoader",
    "PrivacyBudget",
    "PrivacySpent",
    "SealedCheckpointIO",
]
