"""The Poisson loader: an ordinary DataLoader's workers and collate function, a private draw."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from opake_lightning import _check
from opake_lightning._batches import take_apart
from opake_lightning.dpsgd.sampling import expected_rate, poisson_indices, rank_share
from opake_lightning.errors import PrivacyError
from opake_lightning.random import RngKey, fold_in, seeded

__all__ = ["Draw", "PoissonLoader"]


@dataclass(frozen=True, slots=True)
class Draw:
    """Which step a batch is for.

    Attributes:
        step: Number of the step, from 0.
        size: Number of examples this rank drew for it; private.
    """

    step: int
    size: int


class DrawFn(Protocol):
    """Which examples a rank gets at a step."""

    def __call__(self, key: RngKey, step: int, *, rank: int, world_size: int) -> NDArray[np.int64]:
        """Indices of this rank's share."""
        ...


class PoissonLoader:
    """Batches for DP-SGD: at each step every example is drawn independently with the same rate.

    That is what it does on its own, and under a DPModule whose plan is DPSGD. Under any other plan
    the examples are those that the plan draws; the rest of this description holds as well.

    The batch of a step is a function of (key, step) alone: not of the epoch, the number of workers
    or ranks, or how often a run was resumed. Random augmentations that a dataset draws from
    Python's, NumPy's or torch's global generators are made a function of (key, step, rank) too.

    A step may draw nothing. It still yields a batch, with the structure and dtypes of a real one
    and zero rows, and ``draw`` says that its size is 0.

    Args:
        dataset: A map-style dataset.
        batch_size: *Expected* batch size; the rate is ``batch_size / len(dataset)``.
        key: Key of the draws, for use outside of a Trainer. Under a DPModule leave it None: the
            module supplies the key and the step.
        rank: This rank.
        world_size: Number of ranks that share each draw.
        rows_may_mix_before_the_loss: Do not test whether ``collate_fn`` and batch hooks let one row
            change others, as MixUp does. The guarantee is then for a change of one row of what they
            return; plan and report say so.
        collate_fn, num_workers, pin_memory, ...: As for :class:`torch.utils.data.DataLoader`.

    Attributes:
        next_step: The step that the next batch will be for.
        draw: The step and size of the batch that was yielded last.
        untested: Whether a batch is still to be tested for rows that were mixed.

    Raises:
        PrivacyError: If the dataset is iterable-style, or the batch is larger than the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        key: RngKey | None = None,
        rank: int = 0,
        world_size: int = 1,
        rows_may_mix_before_the_loss: bool = False,
        **loader_kwargs: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise PrivacyError(
                f"{type(dataset).__name__} is an iterable-style dataset: its examples cannot be "
                "drawn independently of each other, which the privacy accounting assumes; use a "
                "map-style dataset (__getitem__ and __len__)"
            )
        for name in ("batch_sampler", "sampler", "shuffle", "drop_last"):
            if loader_kwargs.pop(name, None) not in (None, False):
                raise PrivacyError(f"PoissonLoader draws its own batches; remove {name}=")
        if not loader_kwargs.pop("in_order", True):
            raise ValueError("PoissonLoader needs in_order=True: a batch belongs to one step")
        n = _length(dataset)
        expected_rate(batch_size, n)  # refuses what cannot be drawn
        self.dataset = dataset
        self.batch_size = batch_size
        self.n_examples = n
        self.rank, self.world_size = rank, world_size
        self.rows_may_mix_before_the_loss = rows_may_mix_before_the_loss
        self.untested = True
        self.next_step = 0
        self.draw: Draw | None = None
        self._key = key
        self._position: Callable[[], tuple[RngKey, int]] | None = None
        self._draw: DrawFn = _Poisson(n, self.sample_rate)
        self._draws = _Draws(len(self))
        self._loader: DataLoader[Any] = DataLoader(
            cast("Any", _SeededDataset(dataset)),
            batch_sampler=cast("Any", self._draws),
            **loader_kwargs,
        )

    @property
    def sample_rate(self) -> float:
        """Probability that a step draws a given example."""
        return self.batch_size / self.n_examples

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return self._loader.num_workers

    @property
    def collate_fn(self) -> Any:
        """What makes a batch of the drawn examples."""
        return self._loader.collate_fn

    def indices(self, key: RngKey, step: int) -> Indices:
        """This rank's share of the examples drawn at ``step``.

        :meta private:
        """
        return _share(self._draw, key, step, self.rank, self.world_size)

    def fetching(self) -> tuple[Any, dict[str, Any]]:
        """The dataset as ``Indices`` are read from it, and how worker processes do that."""
        names = ("timeout", "worker_init_fn", "multiprocessing_context")
        return self._loader.dataset, {name: getattr(self._loader, name) for name in names}

    def __len__(self) -> int:
        """Steps of an epoch, which is an expected pass over the data."""
        return math.ceil(self.n_examples / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """One epoch of batches, from :attr:`next_step` on; nothing is drawn before the first."""
        if self._position is not None:
            self._key, self.next_step = self._position()
        if self._key is None:
            raise PrivacyError(
                "PoissonLoader has no key; pass key=random.key(7) or key=random.fresh_key(), or "
                "hand the loader to a Trainer with a DPModule, which supplies it"
            )
        end = self.next_step + len(self)
        drawn = self._draws.start(self._draw, self._key, self.next_step, self.rank, self.world_size)
        for batch in self._loader:
            self.draw = drawn.popleft()
            self.next_step = self.draw.step + 1
            yield batch if self.draw.size else _emptied(batch)
        if self.next_step != end:
            # To whoever iterates it would look like the end of the epoch.
            raise RuntimeError(
                f"the dataset or collate_fn raised StopIteration at step {self.next_step}, which "
                f"would end the epoch {end - self.next_step} steps early; let __getitem__ return "
                "an example for every index"
            )

    def follow(
        self, position: Callable[[], tuple[RngKey, int]], draw: DrawFn | None = None
    ) -> None:
        """Take key and step from ``position()`` at the start of every epoch.

        Args:
            position: Returns the key of the run, and the step that comes next.
            draw: Who is drawn; None is a Poisson draw with this loader's rate.

        Raises:
            PrivacyError: If the loader was made with a key of its own.
        """
        if self._key is not None and self._position is None:
            raise PrivacyError(
                "this PoissonLoader was made with key=, which is for use outside of a Trainer; "
                "under a DPModule give the key to the plan: DPSGD(..., key=...)"
            )
        self._position = position
        if draw is not None:
            self._draw = draw

    def state_dict(self) -> dict[str, int]:
        """The step that comes next; the key is not part of it."""
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at the step of :meth:`state_dict`."""
        self.next_step = _check.at_least("next_step", state["next_step"], 0)

    @property
    def _iterator(self) -> Any:
        # Lightning looks here for persistent workers to shut down at the end of a fit.
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator


@dataclass(frozen=True, slots=True)
class _Poisson:
    """One rank's share of a Poisson draw."""

    n_examples: int
    sample_rate: float

    def __call__(self, key: RngKey, step: int, *, rank: int, world_size: int) -> NDArray[np.int64]:
        drawn = poisson_indices(key, step, n_examples=self.n_examples, sample_rate=self.sample_rate)
        return rank_share(drawn, rank=rank, world_size=world_size)


class Indices(list[int]):
    """Indices of one batch, with the key of the random numbers its examples may draw."""

    def __init__(self, indices: list[int], stream: RngKey) -> None:
        super().__init__(indices)
        self.stream = stream

    def __reduce__(self) -> tuple[Any, ...]:
        return Indices, (list(self), self.stream)

    def replaced(self, places: dict[int, int]) -> Indices:
        """The same with the indices of other places in some places."""
        indices = [self[places.get(place, place)] for place in range(len(self))]
        return Indices(indices, self.stream)


class _Draws:
    """The batch sampler: index lists of one epoch, read ahead by the workers.

    It does not know the loader: a cycle would leave worker processes to the garbage collector.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def start(
        self, draw: DrawFn, key: RngKey, step: int, rank: int, world_size: int
    ) -> deque[Draw]:
        """Set where the coming epoch starts, and return the queue of what it will have drawn."""
        self._draw = draw
        self._key, self._first, self._rank, self._world_size = key, step, rank, world_size
        self._drawn: deque[Draw] = deque()
        return self._drawn

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Indices]:
        drawn, key, rank = self._drawn, self._key, self._rank
        for step in range(self._first, self._first + self._length):
            mine = _share(self._draw, key, step, rank, self._world_size)
            drawn.append(Draw(step, len(mine)))
            # A collate function cannot make a batch of nothing, so an empty draw fetches one
            # example for its structure; its rows are cut off before anyone sees them.
            yield mine or Indices([0], mine.stream)


def _share(draw: DrawFn, key: RngKey, step: int, rank: int, world_size: int) -> Indices:
    mine = draw(key, step, rank=rank, world_size=world_size).tolist()
    return Indices(mine, fold_in(fold_in(fold_in(key, "augment"), step), rank))


def _length(dataset: Any) -> int:
    try:
        return len(cast("Sized", dataset))
    except (TypeError, NotImplementedError) as error:
        raise PrivacyError(
            f"{type(dataset).__name__} does not tell its length ({error!r}), and the sample rate "
            "is batch_size / len(dataset); give it a __len__ that returns how many examples it has"
        ) from error


class _SeededDataset:
    """Fetches the examples of a batch with global random numbers that belong to the step."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Indices) -> list[Any]:
        with seeded(indices.stream):
            if hasattr(self._dataset, "__getitems__"):
                return self._dataset.__getitems__(list(indices))
            return [self._dataset[index] for index in indices]


def _emptied(batch: Any) -> Any:
    parts = take_apart((batch,))
    return parts.assemble(map(_no_rows, parts.leaves))[0]


def _no_rows(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, Tensor) and leaf.dim() else leaf


_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


def poisson_loader(loader: Any, *, rank: int, world_size: int) -> PoissonLoader:
    """The Poisson loader with everything of ``loader`` but its order.

    Raises:
        PrivacyError: If ``loader`` is not a DataLoader over a map-style dataset with a plain or
            shuffling sampler and a batch size, or has an ``__iter__`` of its own.
    """
    if not isinstance(loader, DataLoader):
        raise PrivacyError(
            f"the training loader is a {type(loader).__name__}; a private run needs one "
            "torch.utils.data.DataLoader or PoissonLoader, whose draws can be the plan's"
        )
    loader = cast("DataLoader[Any]", loader)
    if isinstance(loader.dataset, IterableDataset):
        raise PrivacyError(
            f"{type(loader.dataset).__name__} is an IterableDataset: its examples cannot be drawn "
            "independently of each other, which the privacy accounting assumes; use a map-style "
            "dataset (__getitem__ and __len__)"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise PrivacyError(
            f"{type(loader).__name__} has an __iter__ of its own, but a private run draws its own "
            "batches, which never go through it; do what it does in the dataset's __getitem__, in "
            "collate_fn or in on_after_batch_transfer"
        )
    _check_sampler(loader)
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if not kept.get("pin_memory_device"):
        kept.pop("pin_memory_device", None)
    return PoissonLoader(
        loader.dataset, cast("int", loader.batch_size), rank=rank, world_size=world_size, **kept
    )


def _check_sampler(loader: DataLoader[Any]) -> None:
    # Under several processes Lightning wraps a custom sampler; what counts is what the user chose.
    sampler = getattr(getattr(loader.sampler, "dataset", None), "_sampler", loader.sampler)
    plain = type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
    if plain and isinstance(sampler, RandomSampler):
        everything = sampler.num_samples == len(cast("Sized", loader.dataset))
        plain = everything and not sampler.replacement
    if not plain or type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        chosen = loader.batch_sampler if plain else sampler
        raise PrivacyError(
            f"the training DataLoader samples with {type(chosen).__name__}, but the privacy "
            "accounting assumes that each example is drawn independently with rate "
            "batch_size / len(dataset); leave sampler and batch_sampler out and set batch_size="
        )
