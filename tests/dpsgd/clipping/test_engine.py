"""The engine against a loop over examples, over all model cases."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from opake_lightning import _functorch
from tests.dpsgd.clipping.case import (
    BOTH,
    DOUBLE,
    TOLERANCE,
    Case,
    Spec,
    Truth,
    build,
    clipped,
    counted,
    own,
    tracked,
    truth_of,
)
from tests.dpsgd.clipping.cases import CASES
from tests.helpers import rows_of

ALONE, UNUSED = "clipping one example at a time", "no example's loss has a gradient for"
# What torch says of its own speed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
]


def over(dtypes: tuple[torch.dtype, ...] = BOTH, *, refused: bool) -> pytest.MarkDecorator:
    """Cases in these dtypes, as far as they exist in them."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
            for name, spec in CASES.items()
            for dtype in spec.dtypes
            if dtype in dtypes and bool(spec.refused) is refused
        ],
    )


def wrong_sums(case: Case, truth: Truth, tolerance: float, **options: Any) -> list[str]:
    """What differs from the truth; empty if all is right."""
    norms = [norm for norm in truth.norms if norm] or [1.0]
    middle = statistics.median(norms)
    wrong = []

    def compare(what: str, got: Any, bound: float, power: int = 1) -> None:
        if not (error := truth.error_of(got, bound, power)) <= tolerance:
            wrong.append(f"{what}: {error:.1e}")

    # If all are clipped to one length, an example whose norm is wrong has the wrong share.
    for what, bound, size in (
        ("all clipped, one by one", 1e-6 * min(norms), 1),
        ("none clipped, in pairs", 1e6 * max(norms), 2),
        ("some clipped, at once", middle, case.size),
    ):
        got, _ = clipped(case, bound, microbatch_size=size, **options)
        compare(what, got.pytree, bound)
    pair, _ = clipped(case, middle, second_moment="per_example", microbatch_size=3, **options)
    compare("beside squares", pair.gradient.pytree, middle)
    compare("squares", pair.square.pytree, middle, power=2)
    return wrong


@contextmanager
def quiet(spec: Spec, *, alone: bool = False) -> Iterator[None]:
    """Without the warnings that the case states; with ``alone`` also that rows run alone."""
    with warnings.catch_warnings():
        if spec.alone or alone:
            warnings.filterwarnings("ignore", ALONE)
        if spec.unused:
            warnings.filterwarnings("ignore", UNUSED)
        yield


def ran_as_stated(case: Case, spec: Spec) -> list[str]:
    """How the batch ran, where that is not what the case says; empty if it is."""
    with warnings.catch_warnings(record=True) as told, counted() as count:
        warnings.simplefilter("always")
        _, state = clipped(case, 1.0, microbatch_size=case.size)
    said = [str(warning.message) for warning in told]
    found = {
        "passes": (count.passes, spec.passes),
        "alone": (count.alone, spec.alone),
        "caution": (state.caution, spec.caution),
        "that rows run alone": (sum(text.startswith(ALONE) for text in said), spec.alone > 0),
        "unused parameters": (sum(text.startswith(UNUSED) for text in said), spec.unused),
    }
    return [f"{what} {got}, not {want}" for what, (got, want) in found.items() if got != want]


# -- the cases themselves -------------------------------------------------------------------------


@over(DOUBLE, refused=False)
def test_a_case_says_whether_its_rows_mix(name, dtype):
    """And has gradients that tell its rows apart, so that no engine is right by chance."""
    spec = CASES[name]
    case = build(name, spec, dtype)
    params = tracked(case)
    with torch.random.fork_rng():
        try:
            whole = case.loss_fn(params, own(case.batch))
        except (RuntimeError, ValueError, IndexError, AssertionError):
            whole = torch.zeros(0)
    rows = [own(rows_of(case.batch, i, i + 1)) for i in range(case.size)]
    alone = torch.stack([case.loss_fn(params, row).reshape(()) for row in rows])
    same = whole.shape == alone.shape and torch.allclose(whole, alone, rtol=1e-5, atol=1e-6)
    assert same is not spec.mixes
    truth = truth_of(case)
    assert statistics.median(truth.norms) > 1e-3
    assert len({f"{norm:.9e}" for norm in truth.norms}) > 1


def test_a_wrong_leaf_of_one_example_would_be_found():
    case = build("linear-2d", CASES["linear-2d"], torch.float64)
    (first, *others), *rest = truth_of(case).gradients
    off = Truth([[first * (1 + 1e-7), *others], *rest])
    assert len(wrong_sums(case, off, 1e-10)) == 5  # every comparison


# -- the engine -----------------------------------------------------------------------------------


@over(refused=False)
def test_the_engine_equals_a_loop(name, dtype):
    spec = CASES[name]
    case = build(name, spec, dtype)
    truth = truth_of(case)
    assert ran_as_stated(case, spec) == []
    with quiet(spec):
        assert wrong_sums(case, truth, TOLERANCE[dtype]) == []


@over(refused=True)
def test_what_has_no_right_result_is_refused(name, dtype):
    spec = CASES[name]
    case = build(name, spec, dtype)
    with pytest.raises((RuntimeError, ValueError), match=spec.refused):
        clipped(case, 1.0)


# -- the same with less to go by ------------------------------------------------------------------


def equals_a_loop(case: Case, **options: Any) -> None:
    truth = truth_of(case)
    middle = statistics.median(truth.norms)
    got, _ = clipped(case, middle, microbatch_size=3, **options)
    assert truth.error_of(got.pytree, middle) <= TOLERANCE[torch.float64]


@over(DOUBLE, refused=False)
def test_without_rules_it_equals_a_loop(name, dtype):
    spec = CASES[name]
    with quiet(spec, alone=spec.beyond_vmap):
        equals_a_loop(build(name, spec, dtype), caution=2)


@over(DOUBLE, refused=False)
def test_without_torch_s_private_names_it_equals_a_loop(name, dtype, monkeypatch):
    spec = CASES[name]
    monkeypatch.setattr(_functorch, "_C", None)
    with quiet(spec, alone=spec.beyond_vmap):
        equals_a_loop(build(name, spec, dtype))
