"""How much privacy a run spends, planned or done: numbers in, numbers out, no torch."""

from __future__ import annotations

from opake_lightning.accounting.calibrate import calibrate
from opake_lightning.accounting.ledger import Ledger
from opake_lightning.accounting.process import GaussianEvent, Process

__all__ = ["GaussianEvent", "Ledger", "Process", "calibrate"]
