"""Differentially private training for PyTorch Lightning.

Plans and errors are here at once; names that need Lightning are looked up on first use, so that the
functional library works, and imports fast, without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.plan import DPFTRL, DPSGD, NonPrivate

if TYPE_CHECKING:
    from opake_lightning.trainer import DPMixin, DPModule, OpakeDDP, PoissonLoader, PrivacyBudget

__all__ = [
    "DPFTRL",
    "DPSGD",
    "CheckpointError",
    "DPMixin",
    "DPModule",
    "NonPrivate",
    "OpakeDDP",
    "PoissonLoader",
    "PrivacyBudget",
    "PrivacyError",
]

_LIGHTNING = frozenset({"DPMixin", "DPModule", "OpakeDDP", "PoissonLoader", "PrivacyBudget"})


def __getattr__(name: str) -> Any:
    """Look up a name that needs Lightning."""
    if name in _LIGHTNING:
        from opake_lightning import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names."""
    return sorted(__all__)
