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
# One of each kind, for what takes long.
SOME = (
    "linear-3d-without-bias",
    "linear-frozen-bias",
    "matmul-batched-left",
    "einsum-experts",
    "bilinear-of-sequences",
    "conv2d-circular",
    "conv-2d-all-at-once",
    "conv-transpose-1d-all-at-once",
    "embedding-with-padding-in-every-place",
    "bag-of-weights-by-a-layer",
    "group-norm-of-images",
    "batch-norm-by-its-statistics-2d",
    "tied-embedding-and-head",
    "resnet-with-group-norm",
    "mha-masked-and-padded",
    "sdpa-learned-bias-and-padding",
    "encoder-stack-nested-evaluation",
    "recurrent-lstm-projected-of-two-layers-bidirectional",
    "packed-gru-of-two-layers-bidirectional",
    "cell-lstm-plain",
    "mul-column",
    "arithmetic-in-place-into-a-slice",
    "arithmetic-complex",
    "pruned-own",
    "alias-by-partial",
    "lora",
    "derived-written-to",
    "l2-penalty-in-a-loop",
    "cross-entropy-mean",
    "branch-of-three",
    "nine-answers-of-some",
    "boolean-index",
    "retry-where-it-fails",
    "written-slices",
    "batch-scaled-in-place-then-a-branch",
    "counts-its-calls",
    "gradient-penalty-between-two",
    "func-grad",
    "checkpoint-old",
    "function-old",
    "torchscript",
    "categorical",
    "mixed-with-a-partner",
    "nested-parameters-and-batches",
    "unused-and-frozen",
)
# What torch says of its own speed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
]


def over(
    dtypes: tuple[torch.dtype, ...] = BOTH, *, refused: bool, only: tuple[str, ...] = tuple(CASES)
) -> pytest.MarkDecorator:
    """Cases in these dtypes, as far as they exist in them."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
            for name in only
            for dtype in CASES[name].dtypes
            if dtype in dtypes and bool(CASES[name].refused) is refused
        ],
    )


def usual_norms(truth: Truth) -> list[float]:
    return [norm for norm in truth.norms if norm] or [1.0]


def wrong_parts(truth: Truth, pair: Any, bound: float, tolerance: float) -> list[str]:
    """What differs from the truth in sum, squares and norms; empty if all is right."""
    scale = max(truth.norms)
    norms = zip(pair.gradient.report.norms[0].tolist(), truth.norms, strict=True)
    errors = {
        "norms": max(abs(got - want) for got, want in norms) / max(scale, 1e-300),
        "sum": truth.error_of(pair.gradient.pytree, bound),
        "squares": truth.error_of(pair.square.pytree, bound, power=2),
    }
    return [f"{what}: {error:.1e}" for what, error in errors.items() if not error <= tolerance]


def wrong_at_once(case: Case, spec: Spec, truth: Truth, tolerance: float) -> list[str]:
    """What differs from what the case says, and from the truth, with some examples clipped."""
    bound = statistics.median(usual_norms(truth))
    with warnings.catch_warnings(record=True) as told, counted() as count:
        warnings.simplefilter("always")
        pair, state = clipped(case, bound, second_moment="per_example", microbatch_size=case.size)
    said = [str(warning.message) for warning in told]
    found = {
        "passes": (count.passes, spec.passes),
        "alone": (count.alone, spec.alone),
        "caution": (state.caution, spec.caution),
        "that rows run alone": (sum(text.startswith(ALONE) for text in said), spec.alone > 0),
        "unused parameters": (sum(text.startswith(UNUSED) for text in said), spec.unused),
    }
    otherwise = [f"{what} {got}, not {want}" for what, (got, want) in found.items() if got != want]
    return otherwise + wrong_parts(truth, pair, bound, tolerance)


def wrong_in_parts(case: Case, truth: Truth, tolerance: float, **options: Any) -> list[str]:
    """What differs from the truth in microbatches, with all, some, and no examples clipped."""
    norms = usual_norms(truth)
    middle, wrong = statistics.median(norms), []
    # If all are clipped to one length, an example whose norm is wrong has the wrong share.
    for what, bound, size in (
        ("all clipped, one by one", 1e-6 * min(norms), 1),
        ("none clipped, in pairs", 1e6 * max(norms), 2),
        ("some clipped, at once", middle, case.size),
    ):
        got, _ = clipped(case, bound, microbatch_size=size, **options)
        if not (error := truth.error_of(got.pytree, bound)) <= tolerance:
            wrong.append(f"{what}: {error:.1e}")
    pair, _ = clipped(case, middle, second_moment="per_example", microbatch_size=3, **options)
    return wrong + wrong_parts(truth, pair, middle, tolerance)


@contextmanager
def quiet(spec: Spec, *, alone: bool = False) -> Iterator[None]:
    """Without the warnings that the case states; with ``alone`` also that rows run alone."""
    with warnings.catch_warnings():
        if spec.alone or alone:
            warnings.filterwarnings("ignore", ALONE)
        if spec.unused:
            warnings.filterwarnings("ignore", UNUSED)
        yield


# -- the cases themselves -------------------------------------------------------------------------


@pytest.mark.slow
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
    name, tolerance = "linear-2d", 1e-10
    case = build(name, CASES[name], torch.float64)
    (first, *others), *rest = truth_of(case).gradients
    off = Truth([[first * (1 + 1e-7), *others], *rest])
    assert len(wrong_in_parts(case, off, tolerance)) == 6  # every comparison
    assert len(wrong_at_once(case, CASES[name], off, tolerance)) == 3


# -- the engine -----------------------------------------------------------------------------------


@over(DOUBLE, refused=False)
def test_the_engine_equals_a_loop_in_as_many_passes_as_stated(name, dtype):
    spec = CASES[name]
    case = build(name, spec, dtype)
    assert wrong_at_once(case, spec, truth_of(case), TOLERANCE[dtype]) == []


@over(refused=True)
def test_what_has_no_right_result_is_refused(name, dtype):
    spec = CASES[name]
    case = build(name, spec, dtype)
    with pytest.raises((RuntimeError, ValueError), match=spec.refused):
        clipped(case, 1.0)


def in_microbatches_it_equals_a_loop(name: str, dtype: torch.dtype) -> None:
    spec = CASES[name]
    case = build(name, spec, dtype)
    truth = truth_of(case)
    assert wrong_at_once(case, spec, truth, TOLERANCE[dtype]) == []
    with quiet(spec):
        assert wrong_in_parts(case, truth, TOLERANCE[dtype]) == []


def without_it_equals_a_loop(name: str, dtype: torch.dtype, **options: Any) -> None:
    """What a case is without rules, or without torch's private names."""
    spec = CASES[name]
    case = build(name, spec, dtype)
    truth = truth_of(case)
    bound = statistics.median(truth.norms)
    with quiet(spec, alone=spec.beyond_vmap):
        pair, _ = clipped(case, bound, second_moment="per_example", microbatch_size=3, **options)
    assert wrong_parts(truth, pair, bound, TOLERANCE[dtype]) == []


@over(BOTH, only=SOME, refused=False)
def test_some_cases_equal_a_loop_in_microbatches(name, dtype):
    in_microbatches_it_equals_a_loop(name, dtype)


@over(DOUBLE, only=SOME, refused=False)
def test_some_cases_equal_a_loop_without_rules(name, dtype):
    without_it_equals_a_loop(name, dtype, caution=2)


@over(DOUBLE, only=SOME, refused=False)
def test_some_cases_equal_a_loop_without_torch_s_private_names(name, dtype, monkeypatch):
    monkeypatch.setattr(_functorch, "_C", None)
    without_it_equals_a_loop(name, dtype)


@pytest.mark.slow
@over(refused=False)
def test_all_cases_equal_a_loop_in_microbatches(name, dtype):
    in_microbatches_it_equals_a_loop(name, dtype)


@pytest.mark.slow
@over(DOUBLE, refused=False)
def test_all_cases_equal_a_loop_without_rules(name, dtype):
    without_it_equals_a_loop(name, dtype, caution=2)


@pytest.mark.slow
@over(DOUBLE, refused=False)
def test_all_cases_equal_a_loop_without_torch_s_private_names(name, dtype, monkeypatch):
    monkeypatch.setattr(_functorch, "_C", None)
    without_it_equals_a_loop(name, dtype)
