"""Rows that are mixed before the loss: found by a test, since no construction rules them out.

The loss gets one row at a time. What a row is, though, was decided before: by ``collate_fn`` and by
Lightning's three batch-transfer hooks. They get all rows of a draw, and may make one of several, as
MixUp does, or measure each by the others. Then one example moves the gradients of many, each is
clipped by itself, and the noise does not cover it.

So at some steps, before anything is released, the drawn rows are collated and transferred again,
with one of them replaced by a copy of another and all generators set as before: one row of the
batch may differ then, bit for bit, and no more. Nor may the hooks leave anything of the rows where
a loss could find it. Not everything that makes other rows differ is mixing:

- *Order.* Rows may be sorted, so those that are not in their place are compared as a multiset.
- *Padding.* Of another width, what both have is compared; beyond it, other rows hold a constant.
- *Random numbers.* If one row takes more of them than another, all that are drawn later differ, but
  not in distribution. The states of the generators tell, and another row is tried: most take the
  same.

A test sees what happens while it is made. It is repeated at the steps 1, 2, 4, 8, ..., and after
every resume, with other rows and other random numbers.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from opake_lightning._batches import take_apart
from opake_lightning.errors import PrivacyError
from opake_lightning.random import RngKey, fold_in, seeded
from opake_lightning.trainer._hook_state import HookState, same, version_of
from opake_lightning.trainer.data import PoissonLoader

__all__ = ["Arrived", "arrived", "read_rows", "require_rows_apart", "require_unchanged"]

_LATE = "on_train_batch_start"
_OWN = ("lightning", "opake_lightning")  # whose callbacks only look
_TRIALS, _ENOUGH = 8, 4  # at most, and how many clean ones will do
_MEANT = (
    "or, if it is meant, say so with PoissonLoader(..., rows_may_mix_before_the_loss=True) or "
    "OpakeDDP(rows_may_mix_before_the_loss=True): the guarantee is then for a change of one row "
    "after that, and the report says so"
)

Arrived: TypeAlias = list[tuple[Tensor, int]]
_Trial: TypeAlias = dict[int, int]  # rows, and those that they are replaced by copies of


def arrived(batch: Any) -> Arrived:
    """The tensors of a batch, and how often each has been written to."""
    return [(tensor, version_of(tensor)) for tensor in _tensors(batch)]


def require_unchanged(module: Any, batch: Any, before: Arrived) -> None:
    """Refuse a batch that is not as the batch-transfer hooks left it: no test sees what came after.

    Raises:
        PrivacyError: Naming the hooks that may have changed it, and what to do instead.
    """
    now = arrived(batch)
    if len(now) == len(before) and all(
        a is b and n == m for (a, n), (b, m) in zip(now, before, strict=True)
    ):
        return
    owners = [type(o) for o in (module, *module.trainer.callbacks) if is_overridden(_LATE, o)]
    named = [o.__name__ for o in owners if o.__module__.partition(".")[0] not in _OWN]
    raise PrivacyError(
        f"the batch was changed in {_LATE} (of {' or '.join(named) or 'a callback'}), after the "
        "batch-transfer hooks, where nothing tests whether rows are mixed; change it in "
        f"on_after_batch_transfer, {_MEANT}"
    )


def require_rows_apart(module: Any, loader: PoissonLoader, key: RngKey, step: int) -> None:
    """If it is time to test that: refuse a step whose rows have been mixed before the loss.

    Guarantee: nothing has been released of a step that is refused, and the global generators go on
    as if there had been no test.

    Args:
        module: The module that is trained.
        loader: Its training loader, which has just drawn the batch.
        key: Key of the run.
        step: Number of the step, from 0.

    Raises:
        PrivacyError: Naming the function at fault, and what to do instead.
    """
    loader.untested |= not (step + 1) & step
    if not loader.untested or loader.draw is None or loader.draw.size < 2:
        return
    test = _Test(module, loader, fold_in(fold_in(key, "rows apart"), step))
    if test.needed:
        with seeded(test.key, test.device):  # also for what a DataLoader draws for its workers
            test.run(loader.indices(key, step))
    loader.untested = False


@dataclass(frozen=True, slots=True)
class _Stage:
    """One function that gets all rows of a draw, and what it belongs to if it is the user's."""

    name: str
    apply: Callable[[Any], Any]
    owner: Any = None


@dataclass(frozen=True, slots=True)
class _Result:
    """What became of some rows, what the hooks left behind, and where the generators stopped."""

    tensors: list[Tensor]
    left: dict[str, Any]
    generators: list[Any]


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How two results differ."""

    fault: str = ""  # what must not differ
    aligned: bool = True  # whether both took as many random numbers
    clean: bool = False  # whether replaced rows differ, and only those


class _Test:
    """The test of one draw."""

    def __init__(self, module: Any, loader: PoissonLoader, key: RngKey) -> None:
        self.loader, self.key = loader, key
        self.device = module.trainer.strategy.root_device
        self.stages = [_collate_of(loader), *_hooks_of(module)]
        dataset = loader.dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        # A dataset that gets all indices of a draw could mix its rows, too.
        self.fetch = f"{type(dataset).__name__}.__getitems__"
        self.fetches_batches = hasattr(dataset, "__getitems__")

    @property
    def needed(self) -> bool:
        """Whether any function in question is not torch's or Lightning's own."""
        return self.fetches_batches or any(stage.owner is not None for stage in self.stages)

    def run(self, indices: Any) -> None:
        """Make it.

        Raises:
            PrivacyError: If rows are mixed, or it cannot be told.
        """
        owners = {id(stage.owner): stage.owner for stage in self.stages if stage.owner is not None}
        self.state, self.size = HookState(list(owners.values())), len(indices)
        trials = self.trials()
        rows, replaced = self.read(indices, trials)
        self.require_repeatable(rows)
        verdicts: list[_Verdict] = []
        for number, (trial, other) in enumerate(zip(trials, replaced, strict=True)):
            verdicts.append(self.compare(rows, other, trial, number))
            clean = sum(verdict.clean for verdict in verdicts)
            if clean == _ENOUGH and not any(verdict.fault for verdict in verdicts):
                return
        at_fault = [number for number, verdict in enumerate(verdicts) if verdict.fault]
        # If some rows take more random numbers than others, a difference can always be due to that.
        certain = all(verdict.aligned for verdict in verdicts)
        if at_fault and (certain or not any(verdict.clean for verdict in verdicts)):
            number = at_fault[0]
            self.refuse(rows, replaced[number], trials[number], number)

    def trials(self) -> list[_Trial]:
        """Which rows are replaced, and by which others: one of them, then one half, one, the other.

        The halves find it for certain if others depend on one row only, such as the longest.
        """
        draw = np.random.default_rng(self.key.bits)
        # After the last row there is none that could draw other random numbers because of it.
        first, *others = draw.permutation(self.size).tolist()
        ones = cycle(dict.fromkeys([first, self.size - 1, *others]))
        found: list[_Trial] = []
        halves: list[Any] = []
        for number in range(_TRIALS // 2 if self.fetches_batches else _TRIALS):
            if number % 2:
                halves = halves or np.array_split(draw.permutation(self.size), 2)
            some = set(halves.pop().tolist()) if number % 2 else {next(ones)}
            kept = [row for row in range(self.size) if row not in some]
            found.append({row: kept[int(draw.integers(len(kept)))] for row in sorted(some)})
        return found

    def read(self, indices: Any, trials: list[_Trial]) -> tuple[Any, list[Any]]:
        """The rows of the draw, and of each trial."""
        if not self.fetches_batches:
            rows = read_rows(self.loader, [indices])[0]
            return rows, [_replaced(rows, trial) for trial in trials]
        lists = [indices, indices, *(indices.replaced(trial) for trial in trials)]
        rows, again, *replaced = read_rows(self.loader, lists)
        if _compare(self.apply(rows), self.apply(again), self.size).fault:
            # It has a generator of its own; what can be tested is what comes after it.
            if not self.apart(rows):
                _refuse_unrepeatable(self.fetch)
            replaced = [_replaced(cast("list[Any]", rows), trial) for trial in trials]
        return rows, replaced

    def apart(self, rows: Any) -> bool:
        """Whether what the dataset returned is a list with an entry for each row."""
        return isinstance(rows, list) and len(rows) == self.size

    def apply(self, rows: Any, number: int = 0, upto: int | None = None) -> _Result:
        """What the stages before ``upto`` make of ``rows``, with the random numbers of a trial."""
        with seeded(fold_in(self.key, number), self.device):
            try:
                batch = _copy(rows)
                for stage in self.stages[:upto]:
                    batch = stage.apply(batch)
                tensors = [tensor.detach().clone() for tensor in _tensors(batch)]
                states = [*_generators(self.device), *self.state.generators()]
                return _Result(tensors, self.state.changes(), states)
            finally:
                self.state.put_back()

    def compare(
        self, rows: Any, replaced: Any, trial: _Trial, number: int, upto: int | None = None
    ) -> _Verdict:
        """How a replacement shows behind the stages before ``upto``."""
        real = self.apply(rows, number, upto)
        try:
            other = self.apply(replaced, number, upto)
        except Exception as error:  # noqa: BLE001 - such as one about an id that is there twice
            return _Verdict(f"a {type(error).__name__} was raised")
        return _compare(real, other, self.size, trial)

    def require_repeatable(self, rows: Any) -> None:
        """Refuse hooks that make something else of the same rows and generators.

        Raises:
            PrivacyError: Naming the function.
        """
        if not _compare(self.apply(rows), self.apply(rows), self.size).fault:
            return
        for upto, stage in enumerate(self.stages, 1):
            one, two = (self.apply(rows, 0, upto) for _ in range(2))
            if _compare(one, two, self.size).fault:
                _refuse_unrepeatable(stage.name)
        _refuse_unrepeatable("collate_fn or a batch-transfer hook")

    def refuse(self, rows: Any, replaced: Any, trial: _Trial, number: int) -> NoReturn:
        """Name the first function after which a replacement shows where it must not."""
        fault = self.compare(rows, replaced, trial, number).fault
        name = self.fetch if self.fetches_batches else "collate_fn or a batch-transfer hook"
        # From the same rows on, the dataset has no part in it.
        apart = self.apart(rows)
        given = _replaced(rows, trial) if apart else replaced
        for upto, stage in enumerate(self.stages, 1):
            if found := self.compare(rows, given, trial, number, upto).fault:
                fault, name = found, stage.name if apart else f"{self.fetch} or {stage.name}"
                break
        raise PrivacyError(
            f"{name} lets one row of a draw reach the losses of others: with rows replaced by "
            f"copies of others, and the same random numbers, {fault}. Gradients are clipped row "
            "by row, so the noise would not cover what one example changes. Nothing of this step "
            "has been released. Transform each example by itself, in the dataset's __getitem__; "
            f"{_MEANT}"
        )


def _refuse_unrepeatable(name: str) -> NoReturn:
    raise PrivacyError(
        f"{name} is not a function of its rows and the global generators: called twice with the "
        "same, it gave something else the second time, so whether it mixes rows cannot be tested. "
        "Draw from torch's, NumPy's or Python's global generators, and keep nothing from one batch "
        f"to the next; {_MEANT}"
    )


# -- what gets all rows of a draw -----------------------------------------------------------------


def _collate_of(loader: PoissonLoader) -> _Stage:
    collate = loader.collate_fn
    if collate is default_collate:
        return _Stage("default_collate", collate)
    function = collate
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return _Stage(f"collate_fn {named.__module__}.{named.__qualname__}", collate, collate)


def _hooks_of(module: Any) -> list[_Stage]:
    trainer = module.trainer
    choose = trainer._data_connector._datahook_selector.get_instance
    stages = [_Stage("convert_input", trainer.precision_plugin.convert_input)]
    for hook, arguments in (
        ("on_before_batch_transfer", (0,)),
        ("transfer_batch_to_device", (trainer.strategy.root_device, 0)),
        ("on_after_batch_transfer", (0,)),
    ):
        owner = choose(hook)

        def apply(batch: Any, hook: str = hook, arguments: tuple[Any, ...] = arguments) -> Any:
            return module._call_batch_hook(hook, batch, *arguments)

        mine = owner if is_overridden(hook, owner) else None
        stages.append(_Stage(f"{type(owner).__name__}.{hook}", apply, mine))
    return stages


# -- rows -----------------------------------------------------------------------------------------


class _Sendable:
    """A dataset that says so where its rows cannot be sent from a worker process."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: Any) -> Any:
        rows = self._dataset.__getitems__(indices)
        try:
            ForkingPickler.dumps(rows)
        except Exception as error:
            raise PrivacyError(
                f"the dataset's examples cannot be pickled ({error}), so they do not come out of a "
                "worker process, and whether collate_fn mixes them cannot be tested; let "
                f"__getitem__ return plain values, or set num_workers=0, {_MEANT}"
            ) from error
        return rows


def _as_it_is(rows: Any) -> Any:
    return rows


def read_rows(loader: PoissonLoader, wanted: list[Any]) -> list[Any]:
    """The rows of each list of indices, read where the loader reads them.

    A dataset may open files when it is first read from. Were that in this process, the loader's
    workers, forked from it, would share one position in them.
    """
    dataset, settings = loader.fetching()
    if not loader.num_workers:
        return [dataset.__getitems__(each) for each in wanted]
    worker = DataLoader(
        cast("Any", _Sendable(dataset)),
        batch_sampler=wanted,
        num_workers=1,
        collate_fn=cast("Any", _as_it_is),
        **settings,
    )
    return list(worker)


def _replaced(rows: list[Any], trial: _Trial) -> list[Any]:
    return [rows[trial.get(number, number)] for number in range(len(rows))]


def _copy(rows: Any) -> Any:
    """Rows for one trial: a collate function may write to them, or take them out of their dicts."""
    try:
        # Each by itself: a row and its replacement must not become one object.
        return (
            [copy.deepcopy(row) for row in rows] if isinstance(rows, list) else copy.deepcopy(rows)
        )
    except Exception:  # noqa: BLE001 - whatever an object says that cannot be copied
        return rows


# -- comparing ------------------------------------------------------------------------------------


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in take_apart((batch,)).leaves if isinstance(leaf, Tensor)]


def _generators(device: torch.device) -> list[Any]:
    states: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    state = cast("Any", np.random.get_state())  # noqa: NPY002 - what hooks draw from
    return [*states, state[1].tobytes(), *state[2:]]


def _compare(real: _Result, other: _Result, size: int, trial: _Trial | None = None) -> _Verdict:
    """How two results differ, of ``size`` rows that are the same but for those of a trial."""
    some = trial or {}
    aligned = same(real.generators, other.generators)
    for name in sorted(real.left.keys() | other.left.keys()):
        if not same(real.left.get(name), other.left.get(name)):
            return _Verdict(f"{name} was left with another value", aligned)
    changed = _rows_changed(real.tensors, other.tensors, size, some)
    if changed is None:
        return _Verdict("the whole batch took another form", aligned=False)
    if changed > len(some):
        return _Verdict("other rows of the batch differed as well", aligned)
    return _Verdict(aligned=aligned, clean=changed > 0)


def _rows_changed(a: list[Tensor], b: list[Tensor], size: int, some: _Trial) -> int | None:
    """How many rows differ; None if they cannot be compared. What has no rows is for the engine."""
    if len(a) != len(b):
        return None
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.dim() and len(x) == size]
    if any(x.dtype != y.dtype or x.dim() != y.dim() or len(y) != size for x, y in pairs):
        return None
    if not pairs or all(x.shape == y.shape for x, y in pairs):
        return _differing(pairs, some)
    # Padded to another width, that of the longest row, on either side.
    for before in (False, True):
        parts = [_parts(x, y, before) for x, y in pairs]
        if _differing([(x, y) for x, y, *_ in parts], some) <= len(some) and all(
            _is_padding(beyond, size - len(some)) for _, _, *rest in parts for beyond in rest
        ):
            return len(some)
    return size


def _differing(pairs: list[tuple[Tensor, Tensor]], some: _Trial) -> int:
    if not pairs:
        return 0
    x, y = (torch.cat([_bytes(pair[side]) for pair in pairs], 1).numpy() for side in (0, 1))
    rows = np.flatnonzero((x != y).any(1)).tolist()
    if some.keys() >= set(rows):
        return len(rows)
    return (Counter(map(bytes, x)) - Counter(map(bytes, y))).total()


def _parts(x: Tensor, y: Tensor, before: bool) -> list[Tensor]:
    """The part that both have, of each; and what each has beyond it, which may be empty."""
    inside: list[Tensor] = []
    beyond: list[Tensor] = []
    for tensor in (x, y):
        place = [slice(None)]
        for width, common in zip(tensor.shape[1:], map(min, x.shape[1:], y.shape[1:]), strict=True):
            place.append(slice(width - common, width) if before else slice(0, common))
        rest = torch.ones(tensor.shape[1:], dtype=torch.bool, device=tensor.device)
        rest[tuple(place[1:])] = False
        inside.append(tensor[tuple(place)])
        beyond.append(tensor[:, rest])
    return [*inside, *beyond]


def _is_padding(beyond: Tensor, at_least: int) -> bool:
    """Whether so many rows have the same there, and it is one constant, or counts positions."""
    if not beyond.numel():
        return True
    rows = _bytes(beyond).numpy()
    for row, count in Counter(map(bytes, rows)).items():
        if count >= at_least:
            first = beyond[[bytes(each) == row for each in rows].index(True)]
            steps = first.double().nan_to_num().diff()
            if bool((steps == steps[:1]).all()):
                return True
    return False


def _bytes(tensor: Tensor) -> Tensor:
    """The bits of each row, all of them the same for a number that is not one."""
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    return rows.contiguous().view(torch.uint8)
