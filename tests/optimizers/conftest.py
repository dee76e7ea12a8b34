"""The small problem on which reference trajectories were computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

DATA = Path(__file__).parent.parent / "data"


class Problem:
    """Two leaves; gradients that do not depend on the parameters."""

    def __init__(self) -> None:
        i, j = torch.arange(3).double()[:, None], torch.arange(4).double()
        self.index = 4 * i + j
        self.j = j

    def params(self) -> dict[str, torch.Tensor]:
        return {"W": torch.cos(1 + self.index), "b": 0.1 * torch.sin(1 + self.j)}

    def grads(self, t: int) -> dict[str, torch.Tensor]:
        return {
            "W": torch.sin(0.3 * (self.index + 1) + 0.7 * t) * (0.5 + 0.1 * self.index),
            "b": 0.01 * torch.cos(0.5 * (self.j + 1) + 0.2 * t) * (1 + self.j),
        }

    def check(self, expected: dict[str, Any], t: int, params: dict[str, torch.Tensor]) -> None:
        """Compare with a reference trajectory, where it has step ``t``."""
        for name, value in params.items():
            if str(t) in expected:
                reference = torch.tensor(expected[str(t)][name], dtype=torch.float64)
                torch.testing.assert_close(value, reference, rtol=0, atol=1e-10)

    @staticmethod
    def load(name: str) -> dict[str, Any]:
        return json.loads((DATA / name).read_text(encoding="utf-8"))


@pytest.fixture
def problem() -> Problem:
    return Problem()
