"""What tests of the trainer share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.helpers import on_plans_key


@pytest.fixture
def same_noise() -> Iterator[None]:
    """Let a named key be that of the first fit, whatever its inputs, to compare two of them."""
    with on_plans_key():
        yield
