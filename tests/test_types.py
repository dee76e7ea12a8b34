"""Private and released gradients cannot be mistaken for each other, or for a tensor."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import optree
import pytest
import torch

from opake_lightning.types import ClippedPytree, NoisedPytree, SecondMomentClippedPytree

KINDS = [ClippedPytree, NoisedPytree]
CLIPPED = ClippedPytree(None, 1.0)


def test_they_are_siblings():
    assert not issubclass(NoisedPytree, ClippedPytree)
    assert not issubclass(ClippedPytree, NoisedPytree)
    assert ClippedPytree.__bases__ == NoisedPytree.__bases__ == (object,)


@pytest.mark.parametrize("kind", KINDS)
def test_optree_does_not_look_inside(kind):
    wrapped = kind({"w": torch.zeros(1)}, 1.0)
    assert optree.tree_leaves(wrapped) == [wrapped]


@pytest.mark.parametrize(
    ("kind", "advice"), [(ClippedPytree, "add noise first"), (NoisedPytree, "first in a torchopt")]
)
def test_use_as_a_tensor_is_explained(kind, advice):
    wrapped = kind(torch.zeros(1), 1.0)
    with pytest.raises(AttributeError, match=f"{kind.__name__}.* no attribute 'norm'.*{advice}"):
        wrapped.norm()
    assert not hasattr(wrapped, "shape")
    with pytest.raises(dataclasses.FrozenInstanceError):
        wrapped.pytree = None
    with pytest.raises(TypeError):
        wrapped + wrapped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_they_can_be_copied_and_sent(kind, again):
    other = again(kind({"w": torch.arange(3.0)}, 0.5))
    assert type(other) is kind
    assert torch.equal(other.pytree["w"], torch.arange(3.0))
    assert getattr(other, dataclasses.fields(kind)[1].name) == 0.5


def test_the_types_that_are_released_are_kept_with_the_sum():
    wrapped = ClippedPytree(torch.zeros(1).double(), 1.0, dtypes=(torch.float32,))
    for again in (copy.copy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert again.dtypes == (torch.float32,)
    assert CLIPPED.dtypes is None


@pytest.mark.parametrize("given", [{}, {"square": CLIPPED, "projection_radius": 1.0}])
def test_a_pair_says_once_what_is_squared(given):
    with pytest.raises(ValueError, match="give either square"):
        SecondMomentClippedPytree(CLIPPED, **given)
