"""How much privacy a run spends, planned or done: numbers in, numbers out, no torch."""

from __future__ import annotations

from opake_lightning.accounting.calibrate import calibrate
from opake_lightning.accounting.horizon import WholeRun
from opake_lightning.accounting.ledger import Ledger
from opake_lightning.accounting.monte_carlo import BallsInBins, BMinSep, MonteCarlo
from opake_lightning.accounting.process import GaussianEvent, Process

__all__ = [
    "BMinSep",
    "BallsInBins",
    "GaussianEvent",
    "Ledger",
    "MonteCarlo",
    "Process",
    "WholeRun",
    "calibrate",
]
