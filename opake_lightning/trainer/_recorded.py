"""What a run has spent, in memory and beside its checkpoints."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from lightning.pytorch.utilities import rank_zero_info

from opake_lightning.accounting import Ledger
from opake_lightning.distributed import rank
from opake_lightning.errors import CheckpointError
from opake_lightning.random import RngKey
from opake_lightning.trainer._journal import Journal, Spending, later, most_recorded, recorded
from opake_lightning.trainer._keys import common_token, derived

__all__ = ["Recorded", "refuse_to_repeat"]


class Recorded:
    """The part of a run that must not be lost: what has been released, and where that is recorded.

    A resumed run may repeat steps that were made after its checkpoint, and are recorded as released
    (:mod:`opake_lightning.trainer._journal`). While it does, ``own`` is behind ``spending``.

    Attributes:
        spending: What has been released, in this process and before, as it is recorded. A fit after
            another is among its forks.
        own: The part of it that this run's own steps amount to.
        journal: The record of releases beside the checkpoints.
        directories: Where to look for the record of a checkpoint that is about to be resumed.
        words: What was folded into the plan's key, to come to the one that is used; public.
        rounding: What the last digits of a step depend on: who makes it again comes to the same
            release only with the same. Where steps are not made again, a run may go on otherwise.
        process: The one that the run goes on in. In all others it is a copy.
    """

    def __init__(self) -> None:
        self.spending = self.own = Spending()
        self.journal = Journal()
        self.directories: list[Path] = []
        self.words: tuple[str, ...] = ()
        self.rounding = ""
        self.process = os.getpid()
        # Whether the live key has been used, or saved to be used, and whether others may have come
        # to it as well.
        self._used = self._shared = False
        # What was released after the checkpoint that the module was loaded from.
        self._since: Spending | None = None

    @property
    def ledger(self) -> Ledger:
        """What has been spent, in this process and before."""
        return self.spending.ledger

    @property
    def made(self) -> Ledger:
        """What the run's own steps have spent."""
        return self.own.ledger

    @property
    def made_by(self) -> tuple[str, ...]:
        """Who makes the coming steps, for the digest of those that were made."""
        return (*self.words, self.rounding)

    @property
    def forks(self) -> tuple[int, ...]:
        """After how many steps the run was given a new key, each time."""
        return self.spending.forks

    def known_of(self, journal: Journal, there: Spending) -> Spending:
        """The most that is known of a checkpoint's run, which had come to ``there``."""
        if self.journal.name == journal.name:
            there = later(self.spending, there)
        return most_recorded(journal.name, self.directories, there)

    def look_in(self, directory: Path) -> None:
        """See what was released after the checkpoint in ``directory`` that this is the past of."""
        self._since = recorded(self.journal.name, [directory])

    def settle(self) -> None:
        """Count, from the start of a new fit, what was released after the checkpoint it is from."""
        if self._since is not None:
            self.spending = self.own = later(self._since, self.spending)
            self._since = None

    def fork(self, key: RngKey) -> RngKey:
        """A new key for a run that goes on otherwise; all that is recorded counts in addition."""
        return self._on_new_key(key, f"fork {len(self.forks) + 1}", common_token())

    def for_another_fit(self, key: RngKey) -> RngKey:
        """The key for a fit after one with ``key``; as :meth:`fork`, but the same each time.

        The earlier fit may go on, too, from a checkpoint, and would come to the same steps with
        other gradients. All who resume one checkpoint share its key, and so do processes that a run
        was forked into or sent to, so what they fit next does not follow from it.
        """
        if self.made != self.ledger:  # steps of this key that this fit may not repeat as they were
            return self.fork(key)
        copied = self.process != os.getpid()
        if not self._used and not copied:
            return key
        word = f"fit {len(self.forks) + 1}"
        shared = self._shared or copied
        return self._on_new_key(key, *((word, common_token()) if shared else (word,)))

    def _on_new_key(self, key: RngKey, *words: str) -> RngKey:
        forks = (*self.forks, self.ledger.n_steps)
        self.spending = self.own = replace(self.spending, forks=forks)
        self.words, self._used, self._shared = (*self.words, *words), False, False
        self.process = os.getpid()
        return derived(key, words)

    def go_on_recording(self) -> None:
        """Record the coming releases where the next resume will look for them."""
        if rank():
            return
        for directory in self.directories:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self.journal.keep_in(directory, self)
            except OSError:  # such as an archive that may only be read
                continue
            return
        if self.directories:
            rank_zero_info(
                "opake_lightning: steps cannot be recorded beside the checkpoint that is resumed, "
                "which cannot be written to; they will be from the next checkpoint on."
            )


def refuse_to_repeat(made: int, after: int) -> NoReturn:
    """Refuse a checkpoint whose run went on otherwise than this one would."""
    raise CheckpointError(
        f"after this checkpoint, of {made} steps, the run made {after} more, and not all with this "
        "plan, key and learning rate, or not on as many ranks, with the same microbatch_size and "
        "precision, which change last digits: to make them again would use their noise for other "
        "gradients. Resume as they were made, or from a later checkpoint, or set on_changed_plan="
        '"fork" to go on with a new key'
    )
