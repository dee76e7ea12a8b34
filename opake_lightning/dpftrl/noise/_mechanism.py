r"""Gaussian noise that is correlated over the steps of a run.

.. math:: \tilde g_t = \bar g_t + \sigma \Delta_t\, x_t, \qquad x = C^{-1} z, \qquad
          z_t \sim \mathcal N(0, I) \text{ independent}

with σ the noise multiplier, Δ the sensitivity that the clipped gradient carries, and C the lower
triangular matrix of a strategy. All :math:`\tilde g_t / (\sigma \Delta_t)` together are
:math:`C^{-1}` times one Gaussian release of :math:`C\, (\bar g_t / \sigma\Delta_t)_t`, which an
example moves by at most :math:`S / \sigma`: S is the sensitivity of C when an example takes part
as often as the schema allows. So a run of n steps costs what one Gaussian with multiplier
:math:`\sigma / S` costs, whole from its first step, also if what it computes at a step depends on
what it released before (arXiv:2202.08312, Theorem 2.1). Nothing here depends on the scale of C:
twice the matrix has half the noise and twice the sensitivity.

The noise of step t has standard deviation :math:`\sigma \Delta_t` times the norm of row t of
:math:`C^{-1}`.

A pair of gradient and squares is two such streams; how they share the budget is derived in
:mod:`opake_lightning.dpftrl.noise._pair`.

Source: Denisov et al. 2022 (arXiv:2202.08312).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final, overload

import torch
from torch import Tensor

from opake_lightning import _check
from opake_lightning._clipped import Release, release_of
from opake_lightning._pairs import noise_stddevs, squares_of
from opake_lightning._tree import Layout, layout_of
from opake_lightning.distributed import rank, sum_gradients, world_size
from opake_lightning.dpftrl.noise._pair import default_share, schema_of, square_ratio
from opake_lightning.dpftrl.noise._require import require_clipped
from opake_lightning.dpftrl.noise._rings import put_together, rings_behind, tree_of, zero_rings
from opake_lightning.dpftrl.noise._strategies import Strategy
from opake_lightning.dpftrl.noise._stream import Memory, stream_of
from opake_lightning.errors import CheckpointError, PrivacyError
from opake_lightning.random import RngKey, adding, fold_in, visit_normals
from opake_lightning.types import (
    ClippedPytree,
    NoisedPytree,
    SecondMomentClippedPytree,
    SecondMomentNoiseOutput,
)

__all__ = ["MFNoise", "MFNoiseState", "mf_gaussian_noise", "require_same_numbers"]

# By which numbers may differ: rounding in the sums that they come from.
_SAME = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class MFNoiseState:
    """State of a correlated noise mechanism.

    Attributes:
        key: Key of the run. Secret.
        step: Number of releases so far, those of earlier horizons included; the next one uses
            stream ``step`` of the key.
        start: What ``step`` was when this horizon began.
        strategy: The matrices, the horizon and the schema that the buffers belong to.
        square_share: Part of the privacy budget that the squares of a pair take; 0 before the first
            pair, unless it was given.
        numbers: What determines each stream's matrix. An optimised strategy comes out a little
            different on another kind of processor, and its noise must not go on as that of another.
        buffers: What each stream remembers, in units of noise with standard deviation 1. Secret.
        share: (r, W) where W ranks made the noise in shares: ``buffers`` are right for the
            coordinates of the r-th of them only. (0, 1) if they are for all.
    """

    key: RngKey
    step: int
    start: int
    strategy: str
    square_share: float
    numbers: dict[str, Tensor] = field(repr=False)
    buffers: dict[str, Any] = field(repr=False)
    share: tuple[int, int] = (0, 1)
    privacy_critical: ClassVar[bool] = True  # a checkpoint without all of it is refused


@final
class MFNoise:
    """The noise function that :func:`mf_gaussian_noise` makes.

    Attributes:
        strategy: Strategy of the stream of gradients.
        second_moment_strategy: That of the squares, or None.
        n_steps: The horizon.
        noise_multiplier: σ; accounted as one Gaussian with multiplier σ / ``sensitivity``.
        sensitivity: S of ``strategy`` under the participation schema; None if none is known.
        square_ratio: r, by which the noise of the squares is larger than if both streams had one
            strategy; 1.0 without squares.
    """

    def __init__(
        self,
        layout: Layout,
        strategy: Strategy,
        second_moment_strategy: Strategy | None,
        *,
        n_steps: int,
        noise_multiplier: float,
        start: int,
        schema: tuple[int, int] | None,
        square_share: float | None,
        memory: Memory,
    ) -> None:
        self.strategy, self.second_moment_strategy = strategy, second_moment_strategy
        self.n_steps, self.noise_multiplier = n_steps, noise_multiplier
        self.sensitivity = None if schema is None else strategy.matrix(n_steps).sensitivity(*schema)
        self.square_ratio = 1.0
        self._layout, self._start, self._share = layout, start, square_share
        self._streams = {"gradient": _NoiseStream(layout, strategy, n_steps, memory)}
        identity = f"{strategy.describe()} over {n_steps} steps from step {start}"
        identity += f", noise multiplier {noise_multiplier!r}"
        if schema is not None:
            identity += f", participations: {schema[0]} steps apart, at most {schema[1]}"
        if second_moment_strategy is not None:
            second = second_moment_strategy
            self.square_ratio = square_ratio(strategy, second, n_steps, schema)
            self._streams["square"] = _NoiseStream(layout, second, n_steps, memory, "square")
            identity += f", squares: {second.describe()}, share: {square_share}"
        self._identity = identity
        self._numbers = {name: stream.numbers for name, stream in self._streams.items()}

    def __repr__(self) -> str:
        """What determines the distribution of the noise."""
        return f"MFNoise({self._identity}, noise_multiplier={self.noise_multiplier!r})"

    def initial(self, key: RngKey) -> MFNoiseState:
        """The state before the first step of the horizon."""
        return MFNoiseState(
            key=key,
            step=self._start,
            start=self._start,
            strategy=self._identity,
            square_share=self._share or 0.0,
            numbers=self._numbers,
            buffers={name: s.zeros() for name, s in self._streams.items() if s.rows},
        )

    @overload
    def __call__(
        self, grads: ClippedPytree, state: MFNoiseState, *, inplace: bool = False
    ) -> tuple[NoisedPytree, MFNoiseState]: ...

    @overload
    def __call__(
        self, grads: SecondMomentClippedPytree, state: MFNoiseState, *, inplace: bool = False
    ) -> tuple[SecondMomentNoiseOutput, MFNoiseState]: ...

    def __call__(self, grads: Any, state: MFNoiseState, *, inplace: bool = False) -> Any:
        """Release ``grads`` with the noise of the next step of ``state``."""
        return self._release(grads, state, inplace=inplace, share=(0, 1))

    def across_ranks(self, grads: Any, state: MFNoiseState, *, inplace: bool = False) -> Any:
        """As to call it with the sum over ranks of ``grads``, but with the noise made in shares.

        Every rank adds its part of the coordinates' noise to its part of the gradient, and then
        comes the sum; what a stream remembers is kept up to date in that part only, until
        :meth:`whole` puts it together. The result is that of one process but for rounding, and
        equal on all ranks.
        """
        if isinstance(grads, SecondMomentClippedPytree) and grads.square is None:
            # What is squared is the sum without noise, so that has to come first.
            return self(sum_gradients(grads, inplace=inplace), state, inplace=True)
        return self._release(grads, state, inplace=inplace, share=(rank(), world_size()))

    def whole(self, state: MFNoiseState) -> MFNoiseState:
        """``state`` with what all ranks remember, for a checkpoint; every rank must call it.

        Overwrites the buffers of ``state``, where other ranks' parts belong.

        Raises:
            CheckpointError: If the ranks that share the noise are not together any more.
        """
        if state.share == (0, 1):
            return state
        _require_share(state, (rank(), world_size()))
        buffers = dict(state.buffers)
        for name, stream in self._streams.items():
            if stream.rows:
                rings, buffers[name] = stream.recall(buffers[name], copy=False)
                for ring in rings:
                    put_together(ring)
        return replace(state, buffers=buffers, share=(0, 1))

    def _release(
        self, grads: Any, state: MFNoiseState, *, inplace: bool, share: tuple[int, int]
    ) -> Any:
        require_clipped(grads, pairs=self.second_moment_strategy is not None)
        self._require_own(state)
        _require_share(state, share)
        sigma, squares = self.noise_multiplier, state.square_share
        if isinstance(grads, ClippedPytree):
            stddevs = {"gradient": sigma * grads.sensitivity}
            parts = {"gradient": self._release_of(grads, inplace=inplace, share=share)}
        else:
            squares = squares or default_share(grads)
            first, second = noise_stddevs(grads, sigma, squares)
            stddevs = {"gradient": first, "square": second * self.square_ratio}
            # Computed here: they may be those of the gradient, which is about to be written to.
            square, own = squares_of(grads, inplace=inplace)
            parts = {
                "gradient": self._release_of(grads.gradient, inplace=inplace, share=share),
                "square": self._release_of(square, inplace=own, share=share),
            }
        for name, stddev in stddevs.items():
            _check.size_of_noise(f"the standard deviation of the noise on the {name}", stddev)
        buffers = dict(state.buffers)
        rings: dict[str, list[Tensor]] = {}
        for name, stream in self._streams.items():
            if stream.rows and sigma > 0:
                kept = buffers.get(name)
                rings[name], buffers[name] = stream.recall(kept, copy=not inplace)
        # All has been checked; from here on it is written to.
        noised: dict[str, NoisedPytree] = {}
        for name, stream in self._streams.items():
            realised = stream.add_(
                parts[name],
                rings.get(name),
                state.key,
                state.step - self._start,
                stddevs[name],
                start=self._start,
                share=share,
            )
            noised[name] = NoisedPytree(parts[name].noised(), realised)
        after = replace(
            state,
            step=state.step + 1,
            square_share=squares,
            numbers=self._numbers,
            buffers=buffers,
            share=share if rings else (0, 1),
        )
        if isinstance(grads, ClippedPytree):
            return noised["gradient"], after
        return SecondMomentNoiseOutput(noised["gradient"], noised["square"]), after

    def _release_of(
        self, grads: ClippedPytree, *, inplace: bool, share: tuple[int, int]
    ) -> Release:
        release = release_of(grads, inplace=inplace, share=share)
        layout, mine = release.layout, self._layout
        if layout is not mine:
            found = (layout.treespec, layout.shapes, layout.groups)
            if found != (mine.treespec, mine.shapes, mine.groups):
                raise ValueError(
                    "the gradient does not have the structure, shapes, types and devices of the "
                    f"template that mf_gaussian_noise was given: {_difference(layout, mine)}"
                )
        return release

    def _require_own(self, state: MFNoiseState) -> None:
        if not isinstance(state, MFNoiseState):
            raise TypeError(
                f"expected the MFNoiseState that mf_gaussian_noise returned, got a "
                f"{type(state).__name__}"
            )
        if state.strategy != self._identity or state.start != self._start:
            raise CheckpointError(
                f"the noise state is that of\n  {state.strategy}\nbut the noise function is that "
                f"of\n  {self._identity}\nRestore with the settings that the state was saved with; "
                "for other ones begin a new horizon, which is accounted for on its own: "
                f"mf_gaussian_noise(..., start={state.step}) and the state that it returns"
            )
        if state.numbers is not self._numbers:
            require_same_numbers(state.numbers, self._numbers)
        kept = {name for name, stream in self._streams.items() if stream.rows}
        if set(state.buffers) != kept:
            raise CheckpointError(
                f"the noise state has buffers {sorted(state.buffers)}, expected {sorted(kept)}: "
                "memory= differs, and a buffer that was not kept up to date would give other noise "
                "than is accounted for"
            )
        paired = self.second_moment_strategy is not None and state.step > self._start
        if paired and state.square_share != (self._share or state.square_share or math.nan):
            raise CheckpointError(
                f"the noise state has square_share {state.square_share}, but one share holds for "
                "the whole horizon; the saved state is damaged"
            )
        if not (state.step >= self._start and 0 <= state.square_share < 1):
            raise CheckpointError(
                f"the noise state has step {state.step} and square_share {state.square_share}, "
                f"which no run has that begins at step {self._start}; the saved state is damaged"
            )
        if state.step >= self._start + self.n_steps:
            raise PrivacyError(
                f"all n_steps={self.n_steps} steps that the noise was declared for are done, and "
                "the privacy guarantee covers no more; declare more of them at the start, or begin "
                "a new horizon, which is accounted for on its own: "
                f"mf_gaussian_noise(..., start={state.step}) and the state that it returns"
            )


@final
class _NoiseStream:
    """The noise of one strategy, on flat tensors."""

    def __init__(
        self, layout: Layout, strategy: Strategy, n_steps: int, memory: Memory, word: str = ""
    ) -> None:
        matrix = strategy.matrix(n_steps)
        self._layout, self._word = layout, word
        self._scales, self._norms = matrix.scales(), matrix.row_norms()
        recurrence = strategy.recurrence(n_steps)
        self.numbers = torch.tensor(recurrence.numbers, dtype=torch.float64)
        self._stream = stream_of(recurrence, memory)
        self.rows = self._stream.rows

    def zeros(self) -> Any:
        """What is remembered before the first step."""
        return tree_of(zero_rings(self._layout, self.rows), self._layout)

    def recall(self, kept: Any, *, copy: bool) -> tuple[list[Tensor], Any]:
        """What is remembered, to be written to, as matrices and as the tree of them."""
        return rings_behind(kept, self._layout, self.rows, copy=copy)

    def add_(
        self,
        release: Release,
        rings: list[Tensor] | None,
        key: RngKey,
        t: int,
        stddev: float,
        *,
        start: int,
        share: tuple[int, int],
    ) -> float:
        """Add the noise of step ``t`` of a horizon, and return its standard deviation.

        Of what is written to and of ``rings``, it is only the ``share``.
        """
        keys = [self._key(key, start + t - lag) for lag in range(self._stream.draws(t))]
        groups = zip(self._layout.groups, release.total, release.out, strict=True)
        for index, (group, flat, out) in enumerate(groups):
            if stddev == 0:
                out.copy_(flat)
                continue
            like = flat.new_empty(0, len(flat), dtype=group.dtype)
            work = self._stream.at(
                t,
                stddev * float(self._scales[t]),
                like if rings is None else rings[index],
                adding(flat, out),
            )
            each = [fold_in(one, index) for one in keys]
            visit_normals(each, flat, work, share=share, dtype=group.dtype)
        return stddev * float(self._norms[t])

    def _key(self, key: RngKey, step: int) -> RngKey:
        stream = fold_in(fold_in(key, "mf_gaussian"), step)
        return fold_in(stream, self._word) if self._word else stream


def _require_share(state: MFNoiseState, share: tuple[int, int]) -> None:
    if state.share not in ((0, 1), share):
        raise CheckpointError(
            f"noise buffers are sharded over {state.share[1]} ranks, and this state holds shard "
            f"{state.share[0]} (this is rank {share[0]} of {share[1]}): gather on all ranks first, "
            "by the noise function's whole(state), go on with as many ranks, or resume from the "
            "last checkpoint"
        )


def mf_gaussian_noise(
    template: Any,
    strategy: Strategy,
    *,
    n_steps: int,
    noise_multiplier: float,
    key: RngKey,
    min_sep: int | None = None,
    max_participations: int | None = None,
    second_moment_strategy: Strategy | None = None,
    square_share: float | None = None,
    memory: Memory = "auto",
    start: int = 0,
) -> tuple[MFNoise, MFNoiseState]:
    r"""Noise that is correlated over the steps of a run, as ``strategy`` says.

    Guarantees: the noise of all steps together is :math:`C^{-1} z`, scaled at each step by
    ``noise_multiplier`` times the sensitivity of what is released; all elements have their own;
    the same key and steps give the same noise on every rank and after every restart, and no two
    horizons of one key share any draw. A pair is one release that costs what the gradient costs
    alone: under the schema, and, with strategies of at most ``min_sep`` bands, amplified by cyclic
    Poisson sampling.

    The sensitivity of the strategy does not enter the noise but its accounting, as the module's
    description says; a clipping norm may change by a public schedule.

    Args:
        template: Pytree of tensors as the gradient is, e.g. the parameters; values do not matter.
        strategy: What :func:`band_mf_strategy` and its like made.
        n_steps: Number of steps of the horizon. The guarantee is for all of them, and there are no
            more.
        noise_multiplier: σ, without unit; >= 0. 0 adds nothing and protects nothing.
        key: Key of the run; see :func:`opake_lightning.random.fresh_key`.
        min_sep: Least number of steps from one participation of an example to its next. Needed for
            pairs: that under which the run is accounted for. Without it, pairs of banded strategies
            get what cyclic Poisson sampling has, the larger number of bands, and must not be
            accounted for under another schema.
        max_participations: How often an example takes part at most; by default as often as the
            steps allow.
        second_moment_strategy: Strategy for the squares of a pair. If given, only
            :class:`~opake_lightning.types.SecondMomentClippedPytree` is taken.
        square_share: For pairs: the part ρ of the privacy budget that the squares take, in (0, 1).
            None is what :func:`~opake_lightning.dpsgd.noise.gaussian_noise` has at the first step,
            for all steps.
        memory: For strategies that need earlier draws only (BISR, λ-CGD): "store" them, or
            "regenerate" them from the key, which takes as long as drawing them did. "auto"
            regenerates if it is a single one. All others store.
        start: Number of releases that this key has been used for before; the horizon begins there.

    Returns:
        A function and its initial state: ``noised, state = noise_fn(grads, state)`` as with
        :func:`~opake_lightning.dpsgd.noise.gaussian_noise`. With ``inplace=True`` the memory of
        ``grads`` and of the buffers of ``state`` is written over, and neither may be used again.

    Raises:
        ValueError: If an argument is out of its range, or ``memory="regenerate"`` with a strategy
            that needs more than draws.
        PrivacyError: If a pair lacks the ``min_sep`` that its allocation depends on; and from
            ``noise_fn``, past ``n_steps``, or if given what has no known sensitivity.
        CheckpointError: From ``noise_fn``, if the state is that of other settings.

    Source: the module's description.

    >>> import torch
    >>> from opake_lightning.random import key
    >>> from opake_lightning.dpftrl.noise import lambda_cgd_strategy
    >>> noise_fn, state = mf_gaussian_noise(
    ...     torch.zeros(3), lambda_cgd_strategy(0.75), n_steps=2, noise_multiplier=2.0, key=key(7)
    ... )
    >>> for _ in range(2):
    ...     noised, state = noise_fn(ClippedPytree(torch.zeros(3), sensitivity=0.1), state)
    >>> round(noised.noise_stddev, 12)  # 2 x 0.1 x sqrt(1 + 0.75 ** 2)
    0.25
    """
    for name, given in (("strategy", strategy), ("second_moment_strategy", second_moment_strategy)):
        if not isinstance(given, Strategy) and (given is not None or name == "strategy"):
            raise TypeError(
                f"{name} must be made by identity_strategy() or its like, got {given!r}"
            )
    n_steps = _check.positive_int("n_steps", n_steps)
    if square_share is not None:
        square_share = _check.fraction("square_share", square_share, zero=False, one=False)
        if second_moment_strategy is None:
            raise ValueError("square_share is for pairs: give second_moment_strategy, or leave it")
    fold_in(key, "mf_gaussian")  # an error here, rather than at the first step, without a key
    noise_fn = MFNoise(
        layout_of(template),
        strategy,
        second_moment_strategy,
        n_steps=n_steps,
        noise_multiplier=_check.non_negative("noise_multiplier", noise_multiplier),
        start=_check.at_least("start", start, 0),
        schema=schema_of(strategy, second_moment_strategy, n_steps, min_sep, max_participations),
        square_share=square_share,
        memory=memory,
    )
    return noise_fn, noise_fn.initial(key)


def require_same_numbers(saved: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """Refuse noise that has been made with other matrices than the ones at hand.

    Raises:
        CheckpointError: If they differ by more than rounding does.
    """
    for name in saved.keys() | ours.keys():
        one, other = saved.get(name), ours.get(name)
        if (
            one is None
            or other is None
            or one.shape != other.shape
            or not torch.allclose(one.cpu(), other, rtol=_SAME, atol=_SAME)
        ):
            raise CheckpointError(
                f"the noise state was made with other numbers for the strategy of the {name}: what "
                "optimisation finds depends on the kind of processor and on the releases of NumPy "
                "and SciPy. Go on where the state was made, or begin a new horizon, which is "
                "accounted for on its own (in a plan: on_changed_plan='fork')"
            )


def _difference(found: Layout, wanted: Layout) -> str:
    if found.treespec != wanted.treespec:
        return f"{found.treespec} is not {wanted.treespec}"
    if found.shapes != wanted.shapes:
        pairs = zip(found.shapes, wanted.shapes, strict=True)
        index, (got, want) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
        return f"leaf {index} has shape {tuple(got)}, not {tuple(want)}"
    return "leaves are of another type or on another device"
