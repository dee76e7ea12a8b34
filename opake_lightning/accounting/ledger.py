"""What has been spent so far, kept as it happens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from opake_lightning import _check
from opake_lightning.accounting.process import GaussianEvent, Process, coarse_epsilon
from opake_lightning.errors import CheckpointError

__all__ = ["Ledger"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """The steps a run has taken, immutable: :meth:`spend` returns the next one.

    Steps may differ, as after a change of batch size or noise. A ledger's size grows with the
    number of such changes, not with the number of steps.

    Guarantees:
        ε counts every step spent, in whatever order; :meth:`to_dict` and :meth:`from_dict` keep it
        exactly; :meth:`epsilon_bound` is never below :meth:`epsilon`, nor that below the true ε.

    Args:
        process: What was spent before; nothing by default.

    >>> ledger = Ledger().spend(GaussianEvent(noise_multiplier=2.0), 3).spend(GaussianEvent(2.0))
    >>> ledger.to_dict()
    {'segments': [[2.0, 1.0, 4]]}
    >>> round(ledger.epsilon(1e-5), 4)  # four releases at 2 are one at 1
    4.3772
    """

    process: Process = field(default_factory=Process)

    @property
    def n_steps(self) -> int:
        """How many steps have been spent."""
        return self.process.n_steps

    def spend(self, event: GaussianEvent, n: int = 1) -> Ledger:
        """Return the ledger after ``n`` more steps of ``event``; this computes no ε."""
        return Ledger(self.process + Process(((event, n),)))

    def epsilon(self, delta: float) -> float:
        """Return ``process.epsilon_at(delta)``, which takes some 10 ms to 1 s the first time."""
        return self.process.epsilon_at(delta)

    def epsilon_bound(self, delta: float) -> float:
        """Return a bound on ε that is cheap enough to ask for after every step.

        It is computed on a coarser grid and for counts rounded up by at most 1/32, so only 32 times
        while a run doubles in length.

        Guarantees:
            Never below ``epsilon(delta)``; within 3 % of it for small ε and within 5 % for most.
        """
        rounded = tuple((event, _next_anchor(count)) for event, count in self.process.segments)
        return coarse_epsilon(Process(rounded), delta)

    def steps_within(
        self, event: GaussianEvent, epsilon: float, delta: float, *, max_steps: int = 10**7
    ) -> int:
        """Return how many more steps of ``event`` the budget allows.

        Guarantees:
            With the result ``n``, ``spend(event, n).epsilon(delta) <= epsilon``, unless the budget
            is overspent already (then ``n`` is 0); with ``n + 1`` it is above, unless ``n`` is
            ``max_steps``.

        Args:
            event: The step to repeat.
            epsilon: The budget for everything in the ledger, >= 0.
            delta: In (0, 1).
            max_steps: Where to stop counting.

        >>> Ledger().steps_within(GaussianEvent(2.0), epsilon=4.38, delta=1e-5)  # four cost 4.3772
        4
        """
        budget = _check.non_negative("epsilon", epsilon)
        _check.at_least("max_steps", max_steps, 0)

        def after(n: int) -> float:
            return self.spend(event, n).epsilon(delta)

        def roughly_after(n: int) -> float:
            bound = coarse_epsilon(self.spend(event, n).process, delta)
            return bound if bound <= budget else after(n)

        within, low = 0, after(0)
        if low > budget or max_steps == 0:
            return 0
        beyond = 1
        while (high := roughly_after(beyond)) <= budget:
            if beyond == max_steps:
                return max_steps
            within, low, beyond = beyond, high, min(4 * beyond, max_steps)
        attempts = 0
        while beyond - within > 1:
            attempts += 1
            middle = (within + beyond) // 2
            # ε is close to a power of the count; every third time halve, in case it is not.
            if attempts % 3 and 0 < low < high < math.inf:
                share = math.log(budget / low) / math.log(high / low)
                guess = int(max(within, 1) * (beyond / max(within, 1)) ** share)
                middle = min(max(guess, within + 1), beyond - 1)
            if (value := after(middle)) <= budget:
                within, low = middle, value
            else:
                beyond, high = middle, value
        return within

    def to_dict(self) -> dict[str, list[list[float | int]]]:
        """Return plain numbers for a checkpoint: ``[noise_multiplier, sample_rate, count]``."""
        return {
            "segments": [
                [event.noise_multiplier, event.sample_rate, count]
                for event, count in self.process.segments
            ]
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, object]) -> Ledger:
        """Return the ledger that :meth:`to_dict` saved.

        Raises:
            CheckpointError: If anything in ``saved`` is not as :meth:`to_dict` writes it: a ledger
                is restored whole or not at all.
        """
        if not isinstance(cast("object", saved), Mapping) or set(saved) != {"segments"}:
            raise CheckpointError(
                "the saved privacy ledger must be a dict with the one key 'segments', got "
                f"{saved!r}; load a checkpoint that the run itself wrote"
            )
        rows = saved["segments"]
        if not isinstance(rows, (list, tuple)):
            raise CheckpointError(
                f"the saved privacy ledger's segments must be a list, got {rows!r}"
            )
        return cls(Process(tuple(_segment(row) for row in cast("list[Any]", rows))))


def _segment(row: Any) -> tuple[GaussianEvent, int]:
    try:
        noise_multiplier, sample_rate, count = row
        return GaussianEvent(noise_multiplier, sample_rate), _check.positive_int("count", count)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the saved privacy ledger holds {row!r}, which is not [noise_multiplier, sample_rate, "
            f"count]: {error}"
        ) from error


def _next_anchor(count: int) -> int:
    """Round up to a multiple of the power of two at or below ``count / 32``."""
    spacing = 1 << max(count.bit_length() - 6, 0)
    return -(-count // spacing) * spacing
