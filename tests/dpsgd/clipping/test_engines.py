"""Every engine against a loop over examples, over all model cases."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import (
    TOLERANCE,
    B,
    Case,
    Truth,
    build,
    clipped,
    error_of,
    has_engines,
    truth_of,
)
from tests.dpsgd.clipping.cases import CASES
from tests.helpers import distance, norm_of, rows_of, trainable

# One-pass tests wait for the engine.
engines = pytest.mark.parametrize(
    "engine",
    [
        "vmap",
        pytest.param(
            "one_pass",
            marks=pytest.mark.skipif(not has_engines(), reason="clipped_grad has one engine only"),
        ),
    ],
)


def _over(*kinds: str) -> pytest.MarkDecorator:
    """Cases of these kinds, in all dtypes they exist in."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
            for name, spec in CASES.items()
            for dtype in spec.dtypes
            if not kinds or spec.expects in kinds
        ],
    )


all_cases = _over()
# Torch's advice about its own speed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
]
SLOWLY = ("There is a performance drop", "Using padding='same'")


def wrong_sums(case: Case, truth: Truth, tolerance: float, **options: Any) -> list[str]:
    """What differs from the truth; empty if all is right."""
    norms = [norm for norm in truth.norms if norm] or [1.0]
    middle = statistics.median(norms)
    wrong = []

    def compare(what: str, got: Any, want: list[Tensor]) -> None:
        if not (error := error_of(got, want)) <= tolerance:
            wrong.append(f"{what}: {error:.1e}")

    # If all are clipped to one length, an example whose norm is wrong has the wrong share.
    bounds = {"all clipped": 1e-6 * min(norms), "some": middle, "none": 1e6 * max(norms)}
    for what, bound in bounds.items():
        compare(what, clipped(case, bound, **options).pytree, truth.sums(bound))
    for size in (1, 2, case.size):
        got = clipped(case, middle, microbatch_size=size, **options)
        compare(f"in microbatches of {size}", got.pytree, truth.sums(middle))
    pair = clipped(case, middle, second_moment="per_example", microbatch_size=3, **options)
    compare("beside squares", pair.gradient.pytree, truth.sums(middle))
    compare("squares", pair.square.pytree, truth.sums(middle, power=2))
    return wrong


def _told(record: list[warnings.WarningMessage]) -> list[str]:
    """What was said, apart from torch's advice: that the one-pass engine steps aside."""
    messages = [str(warning.message) for warning in record]
    return [message for message in messages if not message.startswith(SLOWLY)]


# -- the cases themselves -------------------------------------------------------------------------


def test_there_are_enough_cases_of_every_kind():
    kinds = [spec.expects for spec in CASES.values()]
    assert kinds.count("exact") >= 40
    assert kinds.count("falls back") >= 10


@all_cases
def test_a_case_gives_every_row_its_own_loss(name, dtype):
    """Whoever writes a case states whether its rows depend on one another; so does no other."""
    spec = CASES[name]
    if spec.expects == "refused":
        return
    case = build(name, spec, dtype)
    losses = case.loss_fn(case.params, case.batch)
    assert losses.shape == (case.size,)
    rows = [rows_of(case.batch, i, i + 1) for i in range(case.size)]
    alone = torch.cat([case.loss_fn(case.params, row) for row in rows])
    assert torch.allclose(losses, alone, rtol=1e-5, atol=1e-6) is not spec.mixes
    # A gradient of zero would be found by any engine.
    assert statistics.median(truth_of(case).norms) > 1e-3


# -- the general engine ---------------------------------------------------------------------------


@all_cases
def test_the_general_engine_equals_a_loop(name, dtype):
    spec = CASES[name]
    case = build(name, spec, dtype)
    if (error := spec.beyond_vmap(dtype)) is not None:
        with pytest.raises((RuntimeError, NotImplementedError), match=error):
            clipped(case, 1.0)
    else:
        assert wrong_sums(case, truth_of(case), TOLERANCE[dtype]) == []


# -- the one-pass engine --------------------------------------------------------------------------

one_pass = pytest.mark.skipif(not has_engines(), reason="clipped_grad has one engine only")


@one_pass
@_over("exact")
def test_one_pass_equals_a_loop(name, dtype):
    # A notice that it fell back is a warning, and so an error here.
    case = build(name, CASES[name], dtype)
    assert wrong_sums(case, truth_of(case), TOLERANCE[dtype], engine="one_pass") == []


@one_pass
@_over("falls back", "either", "refused")
def test_what_one_pass_cannot_do_is_noticed(name, dtype):
    spec = CASES[name]
    case = build(name, spec, dtype)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        try:
            wrong = wrong_sums(case, truth_of(case), TOLERANCE[dtype], engine="auto")
        except (RuntimeError, ValueError, NotImplementedError):
            assert spec.expects == "refused" or spec.beyond_vmap(dtype) is not None
            return
    assert spec.expects != "refused"
    assert wrong == []
    if spec.expects == "falls back":
        assert _told(record)


def test_a_wrong_leaf_of_one_example_would_be_found():
    case = build("linear-2d", CASES["linear-2d"], torch.float64)
    (first, *others), *rest = truth_of(case).gradients
    off = Truth([[first * (1 + 1e-7), *others], *rest])
    assert len(wrong_sums(case, off, 1e-10)) == 8  # every comparison


# -- random numbers -------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("microbatch", [None, 1, 3])
def test_dropout_is_the_example_s_own(engine, microbatch):
    """Which mask is drawn is the engine's business: the gradient is that of the mask it drew."""
    net = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 3)).double()

    def losses(params: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = F.linear(x, params["0.weight"], params["0.bias"])
        dropped = F.dropout(hidden, 0.5) if mask is None else hidden * mask * 2
        out = F.linear(dropped, params["1.weight"], params["1.bias"])
        return out.sin().sum(1), dropped != 0

    params, x = trainable(net), torch.randn(B, 6, dtype=torch.float64)
    case = Case(params, lambda p, x: losses(p, x, None), x)  # type: ignore[arg-type,return-value]
    grads, masks = clipped(case, 1.0, engine=engine, has_aux=True, microbatch_size=microbatch)
    assert masks.shape == (B, 32)
    assert len({tuple(mask) for mask in masks.tolist()}) == B
    drawn = Case(params, lambda p, batch: losses(p, *batch)[0], (x, masks))
    assert error_of(grads.pytree, truth_of(drawn).sums(1.0)) < 1e-10


# -- mixed precision ------------------------------------------------------------------------------


# Where inputs are bf16 and weights float32, torch's batching rules for the backward of LayerNorm
# and of the math form of attention mix the two.
NOT_BY_VMAP = ("bert-block", "encoder-layer")


@engines
@pytest.mark.parametrize(
    "name", [*NOT_BY_VMAP, "convnet-with-inplace-relu", "causal-attention-by-hand"]
)
def test_autocast_rounds_the_loss_and_not_the_sums(engine, name):
    case = build(name, CASES[name], torch.float32)
    one = Case(case.params, case.loss_fn, rows_of(case.batch, 0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        truth = truth_of(case)
        smallest = 1e-3 * min(truth.norms)
        if engine == "vmap" and name in NOT_BY_VMAP:
            with pytest.raises(RuntimeError, match="expected scalar type"):
                clipped(case, smallest, engine=engine)
            return
        got = clipped(case, smallest, engine=engine).pytree
        alone = clipped(one, smallest, engine=engine).pytree
    assert {leaf.dtype for leaf in optree.tree_leaves(got)} == {torch.float32}
    # bf16 has 8 bits, and a batch is not added up in the order of single rows.
    assert distance(got, truth.sums(smallest)) < 0.03
    # What is clipped is what is summed: its length is exact, whatever was rounded before.
    assert norm_of(optree.tree_leaves(alone)) == pytest.approx(smallest, rel=1e-5)
