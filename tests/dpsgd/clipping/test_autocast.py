"""Mixed precision: the loss is rounded as the user asked for, norms and sums are not."""

from __future__ import annotations

import optree
import pytest
import torch

from tests.dpsgd.clipping.case import Case, build, clipped, counted, truth_of
from tests.dpsgd.clipping.cases import CASES
from tests.helpers import distance, norm_of, rows_of

NAMES = (
    "bert-block",
    "encoder-layer",
    "convnet-with-inplace-relu",
    "causal-attention-by-hand",
    "gpt2-block",
    "vit-block",
    "resnet-with-group-norm",
    "recurrent-lstm-of-two-layers",
    "mha-masked-and-padded",
    "conv-transpose2d",
    "layer-norm",
    "tied-embedding-and-head",
)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_rounds_the_loss_and_not_the_sums(name):
    case = build(name, CASES[name], torch.float32)
    one = Case(case.params, case.loss_fn, rows_of(case.batch, 0, 1))
    wide = truth_of(case)
    with torch.autocast("cpu", torch.bfloat16):
        truth = truth_of(case)
        smallest = 1e-3 * min(truth.norms)
        with counted() as count:
            got, _ = clipped(case, smallest, microbatch_size=case.size)
        alone, _ = clipped(one, smallest)
    assert (count.passes, count.alone) == (1, 0)
    assert {leaf.dtype for leaf in optree.tree_leaves(got.pytree)} == {torch.float64}
    assert set(got.dtypes) == {torch.float32}
    # bf16 has 8 bits, and a batch is not added up in the order of single rows, nor by the same
    # kernels on a processor that has some for bf16: so it is about as far from the loop in float32
    # as that in bf16 is.
    exact = wide.sums(smallest)
    assert distance(got.pytree, exact) < 3 * distance(truth.sums(smallest), exact) + 1e-3
    # What is clipped is what is summed: its length is exact, whatever was rounded before.
    assert norm_of(optree.tree_leaves(alone.pytree)) == pytest.approx(smallest, rel=1e-6)
