"""Runs that leave the module they grew up with: copies, and what another process brings back."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from opake_lightning.dpsgd.noise import NoiseState
from opake_lightning.random import RngKey, fold_in
from opake_lightning.serialization import state_dict
from opake_lightning.step import StepState
from opake_lightning.trainer._journal import Journal, Spending, recorded
from opake_lightning.trainer._restored import Flat, adopted

__all__ = ["brought_back", "copied", "left_behind", "to_bring_back"]

_AS_THEY_ARE = ("begun", "_unfinished", "_optimizer_name", "_lineage", "_used", "_shared")


def copied(run: Any) -> Any:
    """A copy that goes on with its own key: two modules must not use the same noise."""
    copy = type(run)(dict(run.plan), lineage=secrets.token_hex(16))
    copy._optimizer_name, copy._since = run._optimizer_name, run._since
    copy.spending = copy.own = run.spending
    if run.state is not None:
        token = f"copy {secrets.token_hex(16)}"
        copy.words = (*run.words, token)
        # Buffers of correlated noise stay behind: the copy's next fit begins a new horizon.
        noise = NoiseState(fold_in(run.state.noise.key, token), run.state.noise.step)
        optimizer = adopted(run.state.optimizer, run.state.optimizer)
        copy.state = replace(run.state, noise=noise, optimizer=optimizer)
    copy._parked = None if run._parked is None else dict(run._parked)
    return copy


def left_behind(run: Any) -> Any:
    """``run`` after a fit in other processes that failed, so that nothing was brought back.

    They may have used its keys, and have counted in the record alone.
    """
    copy = copied(run)
    copy._since = recorded(run.journal.name, run.journal.directories) or copy._since
    return copy


def to_bring_back(run: Any) -> dict[str, Any]:
    """What the next fit in another process needs of ``run``: tensors and plain values. Secret.

    Like a copy, it leaves behind what correlated noise remembers: a fit begins a new horizon.
    """
    state = run.state
    return {
        **{name: getattr(run, name) for name in _AS_THEY_ARE},
        "released": run.spending.to_dict(),
        "own": run.own.to_dict(),
        "since": None if run._since is None else run._since.to_dict(),
        "journal": [run.journal.name, *map(str, run.journal.directories)],
        "plan": dict(run.plan),
        "words": list(run.words),
        "parked": run._parked and {name: p.detach().clone() for name, p in run._parked.items()},
        "state": state
        and {
            "clip": state_dict(state.clip),
            "key": state.noise.key.hex(),
            "step": state.noise.step,
            "optimizer": state_dict(state.optimizer),
        },
    }


def brought_back(run: Any, values: dict[str, Any]) -> Any:
    """The fresh ``run``, as another process left the one that it called :func:`to_bring_back`."""
    for name in _AS_THEY_ARE:
        setattr(run, name, values[name])
    run.spending, run.own = (Spending.from_dict(values[name]) for name in ("released", "own"))
    run.plan = values["plan"]
    run._since = values["since"] and Spending.from_dict(values["since"])
    name, *directories = values["journal"]
    run.journal = Journal(name)
    run.journal.go_on_in(map(Path, directories))
    run.words, run._parked = tuple(values["words"]), values["parked"]
    state = values["state"]
    if state is not None:
        noise = NoiseState(RngKey.from_hex(state["key"]), state["step"])
        run.state = StepState(Flat(state["clip"]), noise, Flat(state["optimizer"]))
    return run
