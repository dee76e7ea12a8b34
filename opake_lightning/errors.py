"""The two errors of this library; other complaints are ``ValueError`` or ``TypeError``."""

from __future__ import annotations

__all__ = ["CheckpointError", "PrivacyError"]


class PrivacyError(ValueError):
    """What was asked for would weaken, misreport or overspend the privacy guarantee."""


class CheckpointError(RuntimeError):
    """A saved state is incomplete, damaged, or belongs to another run."""
