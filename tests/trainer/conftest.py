"""What tests of the trainer share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opake_lightning.trainer._record import RunRecord


@pytest.fixture
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a named key be that of the first fit, whatever its inputs, to compare two of them."""
    opened = RunRecord.opened

    def as_named(self: RunRecord, word: str, nonce: str, inputs: str) -> RunRecord:
        del inputs
        if self.path or nonce:
            return opened(self, word, nonce, "")
        return replace(self, path=("named",), begun=0, step=0)

    monkeypatch.setattr(RunRecord, "opened", as_named)
