"""What the steps of a segment follow from, beside its key.

The noise of one key and step may be added to one gradient only: the difference of two releases with
the same noise has none. So a digest of the inputs is a part of the key, and a run goes on from a
checkpoint with the inputs that it had, or with a new key. Compared are, always, and not only where
steps are to be made again:

- the plan: mechanism, clipping, noise, sampling, horizon;
- every number that the optimizer was made with, and its learning rate at fixed steps: the first
  thousand, and each that is one in a hundred later from there on, so that a longer run is still
  the same;
- a few rows of the data, if to fetch them twice gives the same;
- the weights, by a checksum: those that were loaded must be those that training had come to.

Not seen are the code of the loss, all other rows, frozen weights, and what a callable hides.

**The rows' digest is keyed.** A bare one would tell whoever has a candidate for the data whether it
is the one; that is no private answer.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, cast, final

import numpy as np
import optree
import torch
from torch import Tensor

from opake_lightning._tree import layout_of, pack, packed
from opake_lightning.errors import CheckpointError
from opake_lightning.random import RngKey, fold_in, key, seeded
from opake_lightning.serialization import state_dict
from opake_lightning.trainer._before_loss import read_rows
from opake_lightning.trainer._keys import digest_of
from opake_lightning.trainer.data import Indices, PoissonLoader
from opake_lightning.types import NoisedPytree, SecondMomentNoiseOutput

__all__ = [
    "Inputs",
    "Weights",
    "inputs_of",
    "name_of",
    "release_bits",
    "state_digest",
    "weights_digest",
]

_ROWS = 8
# A schedule may count up to its step, so there is an end to them.
_RATES = [*range(1024), *(int(1024 * 1.01**n) for n in range(697))]
_COLUMNS = 4096
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, str)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of one process.

    Attributes:
        plan: The mechanism's fingerprint.
        optimizer: What the optimizer is called.
        settings: What the optimizer was made with, by a name for each number.
        rates: Digest of its learning rates; "" if it hides them.
        rows: Digest of some rows of the data, not keyed, so never to be saved; "" if they cannot be
            compared.
    """

    plan: dict[str, Any]
    optimizer: str
    settings: dict[str, Any]
    rates: str
    rows: str

    def saved(self, live: RngKey) -> dict[str, Any]:
        """For a checkpoint of a run on this key."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own, "rows": self._keyed(live)}

    def digest(self, before: RngKey, *others: object) -> str:
        """For the entry that is folded into the key ``before``; public."""
        return digest_of(sorted(self.saved(before).items()), *others)

    def changed_plan(self, saved: Mapping[str, Any]) -> list[str]:
        """What of the plan differs from a checkpoint's, in words.

        Raises:
            CheckpointError: If the optimizer is another one.
        """
        if saved.keys() != {field.name for field in dataclasses.fields(self)}:
            raise CheckpointError(f"corrupt checkpoint: its inputs are {sorted(saved)}")
        if saved["optimizer"] != self.optimizer:
            raise CheckpointError(
                f"the checkpoint was made with {saved['optimizer']}, this run uses "
                f"{self.optimizer}; resume with the same optimizer, or start a new run from "
                "the weights with load_from_checkpoint"
            )
        ours, theirs = self.plan, saved["plan"]
        if ours.get("key") is None:
            # No key asked for: the checkpoint's is as good as any.
            ours, theirs = {**ours, "key": None}, {**theirs, "key": None}
        return [
            f"{'the digest of the key' if k == 'key' else k} "
            f"(checkpoint {theirs.get(k)!r}, now {ours.get(k)!r})"
            for k in sorted(ours.keys() | theirs.keys())
            if ours.get(k) != theirs.get(k)
        ]

    def changed(self, saved: Mapping[str, Any], live: RngKey) -> list[str]:
        """What else differs from a checkpoint of a run on this key, in words."""
        ours, theirs = self.settings, saved["settings"]
        found = [
            f"the optimizer's {name} (checkpoint {theirs.get(name)!r}, now {ours.get(name)!r})"
            for name in sorted(ours.keys() | theirs.keys())
            if repr(ours.get(name)) != repr(theirs.get(name))  # NaN is NaN
        ]
        if self.rates != saved["rates"]:
            found.append("the learning rates")
        rows = self._keyed(live)
        if rows and saved["rows"] and rows != saved["rows"]:
            found.append(f"the rows of the training data ({_ROWS} of them are compared)")
        return found

    def _keyed(self, live: RngKey) -> str:
        if not self.rows:
            return ""
        secret = fold_in(live, "rows").hex().encode()
        return blake2b(self.rows.encode(), key=secret, digest_size=16).hexdigest()


def inputs_of(mechanism: Any, optimizer: Any, loader: PoissonLoader | None) -> Inputs:
    """Inputs of a run on the rows of ``loader``, some of which are read.

    Without a loader, as in a run that is not private, only plan and optimizer are told.
    """
    plan, name = dict(mechanism.fingerprint()), name_of(optimizer)
    if loader is None:
        return Inputs(plan, name, {}, "", "")
    settings = dict(_settings(optimizer, "", set()))
    return Inputs(plan, name, settings, _rates(getattr(optimizer, "lr", None)), _rows(loader))


def name_of(optimizer: Any) -> str:
    """What an optimizer is called in a checkpoint."""
    return str(getattr(optimizer, "name", "") or f"a TorchOpt {type(optimizer).__name__}")


def state_digest(state: Any) -> str:
    """A checksum of a state's tensors and plain values; keys are left out."""
    values = state_dict(state, keys=False)
    tensors = {path: value for path, value in values.items() if isinstance(value, Tensor)}
    plain = {path: value for path, value in values.items() if path not in tensors}
    return digest_of(weights_digest(tensors), sorted(plain.items()))


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """A checksum of the bits of ``weights``, the same on every device.

    It guards against accidents: exact sums of words, 4096 to a row, over all rows and all columns.
    Of what is not a real tensor with its elements in memory, only the name is told.
    """
    digest = blake2b(digest_size=16)
    for name, weight in weights.items():
        if weight.is_complex():
            weight = torch.view_as_real(weight.resolve_conj())
        if weight.layout != torch.strided or weight.is_meta or weight.is_quantized:
            digest.update(name.encode())
            continue
        words = weight.detach().contiguous().view(-1).view(_WORDS[weight.element_size()])
        whole = len(words) - len(words) % _COLUMNS
        table = words[:whole].view(-1, _COLUMNS)
        digest.update(repr((name, tuple(weight.shape), weight.dtype)).encode())
        sums = [table.sum(dim, dtype=torch.int64) for dim in (0, 1)]
        for part in (*sums, words[whole:]):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def release_bits(released: NoisedPytree | SecondMomentNoiseOutput) -> bytes:
    """A sum of the bits of a release, 8 bytes, the same on every device."""
    pair = isinstance(released, SecondMomentNoiseOutput)
    parts = [released.gradient, released.square] if pair else [released]
    trees = [part.pytree for part in parts]
    total = sum(int(bits) for tree in trees for bits in _bits(pack(tree, layout_of(tree))))
    return (total % (1 << 64)).to_bytes(8, "big")


@final
class Weights:
    """Weights whose bits are summed after every step, where they do not leave their device."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._places: list[int] = []
        self._flats: list[Tensor] | None = None

    def bits(self) -> list[Tensor]:
        """Sums of the bits of all of them, the same for the same weights."""
        # That they lie one after the other is found out once, and not at every step.
        places = [weight.data_ptr() for weight in self._weights.values()]
        if places != self._places:
            self._places = places
            self._flats = packed(self._weights, layout_of(self._weights))
        flats = self._flats
        return _bits(pack(self._weights, layout_of(self._weights)) if flats is None else flats)


def _bits(flats: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for flat in flats:
        raw = flat.view(torch.uint8)
        whole = len(raw) - len(raw) % 8
        found.append(raw[:whole].view(torch.int64).sum() + raw[whole:].sum())
    return found


def _rates(schedule: Any) -> str:
    if schedule is None:
        return ""
    digest = blake2b(digest_size=16)
    for step in _RATES:
        try:
            rate = float(cast("Any", schedule)(step) if callable(schedule) else schedule)
            digest.update(repr(rate).encode())
        except Exception as error:  # noqa: BLE001 - a schedule may end, where the run does
            digest.update(type(error).__name__.encode())
    return digest.hexdigest()


def _settings(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """All numbers and words that ``value`` was made with, with a name for each."""
    if isinstance(value, np.generic):
        value = value.item()  # a checkpoint that holds one of numpy's loads only with pickle
    if value is None or isinstance(value, _PLAIN):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, part in _parts(value):
        yield from _settings(part, f"{path}.{name}" if path else name, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in cast("Mapping[Any, Any]", value).items())
    elif hasattr(value, "stages") and hasattr(value, "lr"):  # this library's; rates are apart
        yield from (("name", value.name), *value.stages.items())
    elif dataclasses.is_dataclass(value):
        # A stage's schedule is among the rates.
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        yield from ((name, part) for name, part in parts if not callable(part))
    elif isinstance(value, (tuple, list)):
        names = getattr(cast("Any", value), "_fields", range(len(cast("Any", value))))
        yield from ((str(name), part) for name, part in zip(names, cast("Any", value), strict=True))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        yield from _closed_over(value)


def _closed_over(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a function of another library keeps its settings in."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not there yet
            continue


def _rows(loader: PoissonLoader) -> str:
    """A digest of rows spread over the data; "" if they are not the same when read again."""
    # As in a step: what is drawn for a row is a function of the seed, and nobody else's draws move.
    seed = key(0)
    chosen = sorted({int(i) for i in np.linspace(0, loader.n_examples - 1, _ROWS)})
    try:
        with seeded(seed):  # also for what a DataLoader draws for its workers
            found = {_digest(rows) for rows in read_rows(loader, [Indices(chosen, seed)] * 2)}
    except Exception:  # noqa: BLE001 - a row that cannot be read fails in the step that draws it
        return ""
    return found.pop() if len(found) == 1 else ""


def _digest(rows: Any) -> str:
    digest = blake2b(digest_size=16)
    for value in optree.tree_leaves(rows, none_is_leaf=True):
        digest.update(_bytes_of(value))
    return digest.hexdigest()


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError
        return repr((array.dtype.str, array.shape)).encode() + array.tobytes()
    if isinstance(value, bytes):
        return value
    if value is None or isinstance(value, (*_PLAIN, complex)):
        return repr(value).encode()
    if hasattr(value, "tobytes") and hasattr(value, "size"):  # an image of PIL
        return repr(value.size).encode() + value.tobytes()
    raise TypeError
