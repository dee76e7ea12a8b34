"""What has been spent so far, kept as it happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from opake_lightning import _check
from opake_lightning.accounting.horizon import WholeRun, restored_segments, saved_segments
from opake_lightning.accounting.monte_carlo import MonteCarlo
from opake_lightning.accounting.process import GaussianEvent, Process, coarse_epsilon
from opake_lightning.errors import CheckpointError, PrivacyError

__all__ = ["Ledger"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """The steps a run has taken, immutable: :meth:`spend` returns the next one.

    Steps may differ, as after a change of batch size or noise. A ledger's size grows with the
    number of such changes, not with the number of steps.

    Steps of a :class:`WholeRun` are counted one by one, but its whole cost is in ε from the first
    on. Costs that were measured by sampling have no distribution of privacy loss to compose: next
    to anything else, δ is split evenly between all of them and the rest, and the ε are added.
    That is valid, and loose; each measured cost holds with its own confidence.

    Guarantees:
        ε counts every step spent, in whatever order; :meth:`to_dict` and :meth:`from_dict` keep it
        exactly; :meth:`epsilon_bound` is never below :meth:`epsilon`, nor that below the true ε.

    Args:
        process: What was spent step by step; nothing by default.
        horizons: The whole runs that were begun, each with the number of steps done.

    >>> ledger = Ledger().spend(GaussianEvent(noise_multiplier=2.0), 3).spend(GaussianEvent(2.0))
    >>> ledger.to_dict()
    {'segments': [[2.0, 1.0, 4]]}
    >>> round(ledger.epsilon(1e-5), 4)  # four releases at 2 are one at 1
    4.3772
    """

    process: Process = field(default_factory=Process)
    horizons: tuple[tuple[WholeRun, int], ...] = ()

    def __post_init__(self) -> None:
        runs = [run for run, _ in self.horizons]
        if len(set(runs)) != len(runs):
            raise PrivacyError("duplicate horizon in a ledger: use another start= for the second")
        for run, done in self.horizons:
            if _check.at_least("steps done", done, 1) > run.n_steps:
                raise PrivacyError(
                    f"the whole run declared {run.n_steps} steps, which would make {done} done: its"
                    " noise and its privacy end with the last one. Declare a longer run from the "
                    "start, or begin another one (with its own start), which is paid in full"
                )

    @property
    def n_steps(self) -> int:
        """How many steps have been made."""
        return self.process.n_steps + sum(done for _, done in self.horizons)

    def spend(self, event: GaussianEvent | WholeRun, n: int = 1) -> Ledger:
        """Return the ledger after ``n`` more steps of ``event``; this computes no ε.

        Raises:
            PrivacyError: If a whole run has fewer than ``n`` of its declared steps left. The
                ledger stays as it was.
        """
        if not isinstance(event, WholeRun):
            return replace(self, process=self.process + Process(((event, n),)))
        if not _check.at_least("n", n, 0):
            return self
        begun, event = dict(self.horizons), self._recorded(event)
        begun[event] = begun.get(event, 0) + n
        return replace(self, horizons=tuple(begun.items()))

    def _recorded(self, event: WholeRun) -> WholeRun:
        """``event`` as it is recorded, if its horizon has begun."""
        same = (run for run, _ in self.horizons if run.is_but_for_rounding(event))
        return event if event in dict(self.horizons) else next(same, event)

    def epsilon(self, delta: float) -> float:
        """Return ε of all that was spent; 10 ms to 1 s the first time, seconds if it is sampled."""
        return self._shared(delta, lambda cost, share: cost.epsilon_at(share))

    def rough_epsilon(self, delta: float) -> float:
        """Return about ``epsilon(delta)``, ten times cheaper; where sampled, this is no bound."""
        return self._shared(delta, rough_epsilon)

    def epsilon_bound(self, delta: float) -> float:
        """Return a bound on ε that is cheap enough to ask for after every step.

        It is computed on a coarser grid and for counts rounded up by at most 1/32, so only 32 times
        while a run doubles in length. Whole runs cost the same at every step, and are computed
        once.

        Guarantees:
            Never below ``epsilon(delta)``; within 3 % of it for small ε and within 5 % for most.
        """
        if not self.process.segments:
            return self.epsilon(delta)
        rounded = tuple((event, _next_anchor(count)) for event, count in self.process.segments)
        return replace(self, process=Process(rounded))._shared(
            delta,
            lambda cost, share: (
                coarse_epsilon(cost, share) if isinstance(cost, Process) else cost.epsilon_at(share)
            ),
        )

    def _shared(
        self, delta: float, epsilon_of: Callable[[Process | MonteCarlo, float], float]
    ) -> float:
        """Add up the ε of what can be composed and of what cannot, at equal parts of δ."""
        delta = _check.fraction("delta", delta, zero=False, one=False)
        composed, sampled = self.process, list[MonteCarlo]()
        for run, _ in self.horizons:
            if isinstance(run.cost, Process):
                composed += run.cost
            else:
                sampled.append(run.cost)
        costs = [composed, *sampled] if composed.segments else sampled
        return math.fsum(epsilon_of(cost, delta / len(costs)) for cost in costs)

    def steps_within(
        self,
        event: GaussianEvent | WholeRun,
        epsilon: float,
        delta: float,
        *,
        max_steps: int = 10**7,
    ) -> int:
        """Return how many more steps of ``event`` the budget allows.

        Guarantees:
            With the result ``n``, ``spend(event, n).epsilon(delta) <= epsilon``, unless the budget
            is overspent already (then ``n`` is 0); with ``n + 1`` it is above, unless ``n`` is
            ``max_steps`` or all that is left of a whole run: of that the budget allows all or
            nothing.

        Args:
            event: The step to repeat, or a whole run.
            epsilon: The budget for everything in the ledger, >= 0.
            delta: In (0, 1).
            max_steps: Where to stop counting.

        >>> Ledger().steps_within(GaussianEvent(2.0), epsilon=4.38, delta=1e-5)  # four cost 4.3772
        4
        """
        budget = _check.non_negative("epsilon", epsilon)
        _check.at_least("max_steps", max_steps, 0)
        if isinstance(event, WholeRun):
            left = event.n_steps - dict(self.horizons).get(self._recorded(event), 0)
            enough = left > 0 and self.spend(event).epsilon(delta) <= budget
            return min(left, max_steps) if enough else 0

        def after(n: int) -> float:
            return self.spend(event, n).epsilon(delta)

        def roughly_after(n: int) -> float:
            if any(isinstance(run.cost, MonteCarlo) for run, _ in self.horizons):
                return after(n)
            bound = self.spend(event, n).rough_epsilon(delta)
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

    def to_dict(self) -> dict[str, list[Any]]:
        """Return plain numbers for a checkpoint: ``[noise_multiplier, sample_rate, count]``.

        Whole runs, if there are any, are under ``"horizons"``, each with its number of steps done.
        """
        saved: dict[str, list[Any]] = {"segments": [*saved_segments(self.process)]}
        if self.horizons:
            saved["horizons"] = [{**run.to_dict(), "done": done} for run, done in self.horizons]
        return saved

    @classmethod
    def from_dict(cls, saved: Mapping[str, object]) -> Ledger:
        """Return the ledger that :meth:`to_dict` saved.

        Raises:
            CheckpointError: If anything in ``saved`` is not as :meth:`to_dict` writes it: a ledger
                is restored whole or not at all.
        """
        if not isinstance(cast("object", saved), Mapping) or set(saved) - {"horizons"} != {
            "segments"
        }:
            raise CheckpointError(
                "the saved privacy ledger must be a dict with the key 'segments' and perhaps "
                f"'horizons', got {saved!r}; load a checkpoint that the run itself wrote"
            )
        try:
            process = restored_segments(saved["segments"])
            return cls(process, _restored_horizons(saved.get("horizons", ())))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the saved privacy ledger is damaged: {error}") from error


def rough_epsilon(cost: Process | MonteCarlo, delta: float) -> float:
    """Return about ``cost.epsilon_at(delta)``, ten times cheaper; a bound only for a process."""
    if isinstance(cost, Process):
        return coarse_epsilon(cost, delta)
    return cost.rough_epsilon(delta)


def _restored_horizons(rows: Any) -> tuple[tuple[WholeRun, int], ...]:
    if not isinstance(rows, (list, tuple)):
        raise TypeError(f"horizons must be a list, got {rows!r}")
    horizons: list[tuple[WholeRun, int]] = []
    for row in cast("list[Any]", rows):
        if not isinstance(row, dict) or "done" not in row:
            raise ValueError(f"{row!r} is not a whole run with the number of steps done")
        rest: dict[str, Any] = dict(row)
        done = rest.pop("done")
        horizons.append((WholeRun.from_dict(rest), done))
    return tuple(horizons)


def _next_anchor(count: int) -> int:
    """Round up to a multiple of the power of two at or below ``count / 32``."""
    spacing = 1 << max(count.bit_length() - 6, 0)
    return -(-count // spacing) * spacing
