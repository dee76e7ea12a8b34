"""A small world for ``test_record_model.py``: processes, files, and what has really happened.

What is tested are the record and its transitions, inputs and their comparison, and the maps that
are written to disk: all of the library's. What is the world's own are weights, as terms that tell
which releases they came from, and the truth about every release.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from opake_lightning.accounting import GaussianEvent
from opake_lightning.errors import CheckpointError
from opake_lightning.random import RngKey, fold_in, key
from opake_lightning.trainer import _lifecycle
from opake_lightning.trainer._inputs import Inputs
from opake_lightning.trainer._record import Known, RunRecord

EVENT = GaussianEvent(1.0, 0.25)
NOTHING = json.dumps(Known().to_plain())
Step = tuple[str, int]  # a live key, as hexadecimal digits, and the number of a step
Weights = tuple[Any, ...]  # ("first", x) | ("average", weights) | ("moved", weights, step, rates)


class Setup(NamedTuple):
    """What a fit is made from. The code of the loss is seen by nothing but a proof."""

    plan: str = "plan"
    rates: str = "rates"
    data: str = "data"


def inputs_of(setup: Setup) -> Inputs:
    return Inputs({"plan": setup.plan, "key": None}, "sgd", {}, setup.rates, setup.data)


@cache
def past_of(weights: Weights) -> frozenset[Step]:
    """The releases that weights came from."""
    if weights[0] == "first":
        return frozenset()
    before = past_of(weights[1])
    return before | {weights[2]} if weights[0] == "moved" else before


def digest_of(weights: Weights) -> str:
    return str(weights)


class Process(NamedTuple):
    """One module in one process. ``record`` is the text of its plain values."""

    name: int
    record: str
    weights: Weights
    setup: Setup
    root: RngKey
    named: bool
    fitting: bool = False
    pending: bool = False  # released and written down, and the parameters have not moved
    folders: frozenset[int] = frozenset()
    lost: bool = False  # its own file was deleted
    since: str = NOTHING
    could_read: frozenset[Step] = frozenset()
    unknown: bool = False

    def value(self) -> RunRecord:
        return RunRecord.from_plain(json.loads(self.record))


class File(NamedTuple):
    """A checkpoint in a folder."""

    folder: int
    saved: str
    weights: Weights
    setup: Setup
    root: RngKey
    named: bool
    unknown: bool


class World(NamedTuple):
    """Everything there is, and everything that has happened."""

    processes: tuple[Process | None, ...]
    files: tuple[File, ...] = ()
    # (folder, lineage, writer) -> what it wrote last
    journals: tuple[tuple[tuple[int, str, int], str], ...] = ()
    told: frozenset[tuple[int, str, Step]] = frozenset()
    # What was ever written to a folder, whether or not it is still there.
    made: frozenset[tuple[int, str, Step]] = frozenset()
    gradients: tuple[tuple[Step, Any], ...] = ()
    handed_out: frozenset[str] = frozenset()  # keys that are in public values
    number: int = 0


@dataclass(frozen=True)
class Scenario:
    """What may happen, and how much of it."""

    does: frozenset[str]
    setups: tuple[Setup, ...] = (Setup(),)
    starts: tuple[tuple[bool, Setup], ...] = ((True, Setup()),)
    depth: int = 6
    places: int = 2
    steps: int = 3
    files: int = 2
    folders: int = 1
    rules: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)


class BrokenPromiseError(AssertionError):
    """With the name of the promise."""


def text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def kept(record: RunRecord) -> str:
    return text_of(record.to_plain(secret=True))


def put(world: World, place: int, process: Process | None, **more: Any) -> World:
    processes = (*world.processes[:place], process, *world.processes[place + 1 :])
    return world._replace(processes=processes, number=world.number + 1, **more)


# -- what is written and read ---------------------------------------------------------------------


def written(world: World, process: Process, folders: Any) -> World:
    """The process's own file in ``folders``, and no other, has all that it knows."""
    record, journals = process.value(), dict(world.journals)
    known = replace(record.known, complete=record.complete and not process.lost)
    for folder in folders:
        journals[folder, record.lineage, process.name] = text_of(known.to_plain())
    return world._replace(journals=tuple(sorted(journals.items())))


def read(world: World, folders: Any, lineage: str) -> Any:
    found = [
        Known.from_plain(json.loads(text))
        for (folder, name, _), text in world.journals
        if folder in folders and name == lineage
    ]
    return found[0].joined(*found[1:]) if found else None


def told(world: World, folders: Any, lineage: str) -> frozenset[Step]:
    return frozenset(s for folder, name, s in world.told if folder in folders and name == lineage)


# -- what happens ---------------------------------------------------------------------------------


def fit(world: World, place: int, process: Process, setup: Setup) -> World:
    """As ``_lifecycle.begin``."""
    record = process.value().knowing(Known.from_plain(json.loads(process.since)))
    record = record.rooted(process.root, apart=False)
    nonce = "" if process.named else f"{world.number}"
    inputs = inputs_of(setup)
    digest = inputs.digest(record.live_key, digest_of(process.weights))
    record = record.opened("fit", nonce, digest)
    record = replace(record, inputs=inputs.saved(record.live_key))
    process = process._replace(record=kept(record), setup=setup, fitting=True, since=NOTHING)
    return put(world, place, process)


def release(world: World, place: int, process: Process) -> World:
    """As ``Run.release``: counted and written down, before the parameters move."""
    record = process.value()
    step, gradient = (record.live_key.hex(), record.step), (process.setup, process.weights)
    gradients = dict(world.gradients)
    if gradients.setdefault(step, gradient) != gradient:
        raise BrokenPromiseError("one gradient")
    if step[0] in world.handed_out:
        raise BrokenPromiseError("no key in public")
    process = process._replace(record=kept(record.released_one(EVENT, "1 rank")), pending=True)
    world = put(world, place, process, gradients=tuple(sorted(gradients.items(), key=str)))
    return written(world, process, process.folders)


def move(world: World, place: int, process: Process) -> World:
    record = process.value()
    step = (record.live_key.hex(), record.step - 1)
    weights = ("moved", process.weights, step, process.setup.rates)
    now = world.told | {(folder, record.lineage, step) for folder in process.folders}
    process = process._replace(weights=weights, pending=False)
    return put(world, place, process, told=now, made=world.made | now)


def save(world: World, place: int, process: Process, folder: int) -> World:
    """As ``Run.state_dict`` and ``DPMixin._dp_saving``."""
    record = process.value()
    saved = {
        "record": record.to_plain(secret=True),
        "key_digest": record.segment,
        "state": {},
        "weights": digest_of(process.weights),
        "training_weights": None,
    }
    file = File(
        folder,
        text_of(saved),
        process.weights,
        process.setup,
        process.root,
        process.named,
        process.unknown,
    )
    process = process._replace(folders=process.folders | {folder})
    now = world.told | {(folder, record.lineage, step) for step in past_of(process.weights)}
    world = put(world, place, process, files=(*world.files, file), told=now)
    return written(world, process, {folder})


def resume(world: World, place: int, file: File, setup: Setup, *, average: bool) -> World:
    """As ``_lifecycle.resume``, with ``on_changed_plan="fork"`` where something differs."""
    saved = json.loads(file.saved)
    weights = ("average", file.weights) if average else file.weights
    same = setup == file.setup and not average
    plan = SimpleNamespace(
        key=file.root if file.named else None,
        key_in_checkpoint=True,
        on_changed_plan="refuse" if same else "fork",
        private=True,
    )
    inputs = inputs_of(setup)
    before = RunRecord.from_plain(saved["record"])
    try:
        record, live, forked = _lifecycle.compared(saved, inputs, plan, lambda: digest_of(weights))
    except CheckpointError as error:
        raise BrokenPromiseError("nothing changed, and goes on") from error
    found = read(world, {file.folder}, record.lineage)
    record = replace(record.knowing(found or Known(complete=False)), key=live)
    if forked:
        nonce, digest = f"{world.number}", inputs.digest(record.live_key, digest_of(weights))
        record = record.opened("fork", nonce, digest)
        record = replace(record, inputs=inputs.saved(record.live_key))
    if same and (record.key, record.step) != (before.key, before.step):
        raise BrokenPromiseError("nothing changed, and goes on")
    could_read = told(world, {file.folder}, record.lineage)
    ever = {
        step for folder, name, step in world.made if (folder, name) == (file.folder, record.lineage)
    }
    missing = ever - counted_by(record, world)
    process = Process(
        world.number,
        kept(record),
        weights,
        setup,
        file.root,
        file.named,
        fitting=True,
        folders=frozenset({file.folder}),
        could_read=could_read,
        unknown=file.unknown or bool(missing),
    )
    now = world.told | {(file.folder, record.lineage, step) for step in past_of(weights)}
    return written(put(world, place, process, told=now), process, {file.folder})


def load(world: World, place: int, file: File) -> World:
    """As ``load_from_checkpoint``: of what is public, and of the record beside the file."""
    public = RunRecord.from_plain(json.loads(file.saved)["record"]).public().to_plain(secret=False)
    record = RunRecord.from_plain(public)
    since = text_of((read(world, {file.folder}, record.lineage) or Known()).to_plain())
    process = Process(
        world.number,
        kept(record.public()),
        file.weights,
        file.setup,
        file.root if file.named else fold_in(key(0), world.number),
        file.named,
        since=since,
        unknown=file.unknown,
    )
    return put(world, place, process, handed_out=world.handed_out | _keys_in(public))


def copied(world: World, place: int, process: Process) -> World:
    record = process.value().copied()
    twin = process._replace(
        name=world.number, record=kept(record), fitting=False, folders=frozenset()
    )
    return put(world, place, twin)


def lost(world: World) -> World:
    """Files are deleted; who had them open writes to nowhere, until the next checkpoint."""
    processes = [
        p and p._replace(folders=frozenset(), lost=p.lost or bool(p.folders))
        for p in world.processes
    ]
    return world._replace(processes=tuple(processes), journals=(), told=frozenset())


def _keys_in(plain: dict[str, Any]) -> frozenset[str]:
    return frozenset() if plain["key"] is None else frozenset({plain["key"]})


# -- what must hold -------------------------------------------------------------------------------


def check(world: World) -> None:
    happened: dict[str, int] = {}
    for (live, step), _ in world.gradients:
        name = RngKey.from_hex(live).digest()
        happened[name] = happened.get(name, 0) + 1
        del step
    for process in world.processes:
        if process is None:
            continue
        record = process.value()
        counted = {name: segment.n_steps for name, segment in record.released.items()}
        since = process.could_read if process.fitting else frozenset()
        if (past_of(process.weights) | since) - counted_by(record, world):
            raise BrokenPromiseError("all is counted")
        if any(n > happened.get(name, 0) for name, n in counted.items()):
            raise BrokenPromiseError("nothing else is counted")
        if process.unknown and record.complete:
            raise BrokenPromiseError("unknown is told")


def counted_by(record: RunRecord, world: World) -> frozenset[Step]:
    """The releases of this world that ``record`` counts."""
    first: dict[str, int] = {}
    for (live, step), _ in world.gradients:
        first[live] = min(step, first.get(live, step))
    counts = {name: segment.n_steps for name, segment in record.released.items()}
    return frozenset(
        (live, step)
        for (live, step), _ in world.gradients
        if step - first[live] < counts.get(RngKey.from_hex(live).digest(), 0)
    )


# -- all that may happen --------------------------------------------------------------------------


def next_worlds(world: World, scenario: Scenario) -> Iterator[tuple[str, Callable[[], World]]]:
    """What may happen next, by name."""
    does, free = scenario.does, None
    for place, process in enumerate(world.processes):
        if process is None:
            free = place if free is None else free
            continue
        here = (world, place, process)
        if process.pending:
            yield f"{place} moves", lambda here=here: move(*here)
        elif process.fitting:
            if process.value().step < scenario.steps:
                yield f"{place} releases", lambda here=here: release(*here)
            if len(world.files) < scenario.files:
                for folder in range(scenario.folders):
                    yield f"{place} saves", lambda here=here, f=folder: save(*here, f)
        if "fit" in does and not process.pending:
            for setup in scenario.setups:
                yield f"{place} fits {setup}", lambda here=here, s=setup: fit(*here, s)
        if "kill" in does:
            yield f"{place} dies", lambda place=place: put(world, place, None)
        if "reset" in does and not process.pending:
            fresh = process._replace(
                record=kept(process.value().reset()), fitting=False, folders=frozenset(),
                weights=("first", "again"), could_read=frozenset(), unknown=False,
            )  # fmt: skip
            yield f"{place} resets", lambda place=place, f=fresh: put(world, place, f)
    if "lose" in does and world.journals:
        yield "records are lost", lambda: lost(world)
    if free is None:
        return
    if "again" in does or not world.number:
        for named, setup in scenario.starts:
            root = key(7) if named else fold_in(key(1), world.number)
            first = Process(world.number, kept(RunRecord("")), ("first", 0), setup, root, named)
            yield f"{free} begins", lambda f=first, s=setup: fit(world, free, f, s)
    for number, file in enumerate(world.files):
        for setup in scenario.setups:
            name = f"{free} resumes {number} with {setup}"
            yield name, lambda f=file, s=setup: resume(world, free, f, s, average=False)
        if "average" in does:
            name = f"{free} resumes {number}, averaged"
            yield name, lambda f=file: resume(world, free, f, f.setup, average=True)
        if "load" in does:
            yield f"{free} loads {number}", lambda f=file: load(world, free, f)
    if "copy" in does:
        for process in world.processes:
            if process is not None and not process.pending:
                yield f"{free} is a copy", lambda p=process: copied(world, free, p)


def search(scenario: Scenario) -> int:
    """All worlds within the depth, breadth first; how many there are.

    Raises:
        BrokenPromiseError: With how it came to that.
    """
    start = World((None,) * scenario.places)
    seen, queue = {start}, deque([(start, ())])
    while queue:
        world, path = queue.popleft()
        if len(path) == scenario.depth:
            continue
        for name, happen in next_worlds(world, scenario):
            try:
                after = happen()
                check(after)
            except BrokenPromiseError as error:
                error.add_note(" / ".join([*path, name]))
                raise
            if after not in seen:
                seen.add(after)
                queue.append((after, (*path, name)))
    return len(seen)
