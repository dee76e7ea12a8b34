"""Packing: every leaf comes back, and a flat tensor is found only where there is one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opake_lightning._tree import (
    in_float64,
    layout_of,
    layouts_of_sum,
    leaves_with_paths,
    pack,
    packed,
    readable,
    room_for,
    unpack,
    wide,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
leaves = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6)


def numbered(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).to(dtype).view(shape)


@given(leaves=leaves)
def test_packing_and_unpacking_gives_back_every_leaf_in_wide_type(leaves):
    tree: Any = {f"{i}": [numbered(*spec, 10 * i), None] for i, spec in enumerate(leaves)}
    layout = layout_of(tree)
    flats = pack(tree, layout)
    back = unpack(flats, layout)
    assert optree.tree_structure(back) == optree.tree_structure(tree)
    for before, after in zip(optree.tree_leaves(tree), optree.tree_leaves(back), strict=True):
        assert after.dtype == wide(before.dtype)
        assert torch.equal(after, before.to(after.dtype))
    # What unpack returned is found again without a copy.
    for flat, again in zip(flats, pack(back, layout), strict=True):
        assert flat.numel() == 0 or flat.data_ptr() == again.data_ptr()
        assert torch.equal(flat, again)
    assert [z.shape for z in layout.zeros()] == [f.shape for f in flats]


def test_one_flat_tensor_for_each_wide_type():
    tree = [torch.zeros(n, dtype=dtype) for n, dtype in zip((1, 2, 3, 4), DTYPES, strict=True)]
    assert [(f.dtype, len(f)) for f in pack(tree, layout_of(tree))] == [
        (torch.float32, 8),
        (torch.float64, 2),
    ]


@given(leaves=leaves)
def test_sums_in_float64_lie_as_what_they_are_rounded_to(leaves):
    tree = {f"{i}": numbered(*spec, 10 * i) for i, spec in enumerate(leaves)}
    layout = layout_of(tree)
    sums = in_float64(layout)
    flats = sums.zeros()
    for flat, values in zip(flats, pack(tree, layout), strict=True):
        assert flat.dtype == torch.float64
        flat.copy_(values)
    exact = unpack(flats, sums)
    dtypes = tuple(leaf.dtype for leaf in optree.tree_leaves(tree))
    assert layouts_of_sum(exact, dtypes) == (sums, layout)
    assert layouts_of_sum(exact)[0] is layouts_of_sum(exact)[1] is layout_of(exact)
    found = packed(exact, sums)
    assert found is not None
    for flat, again in zip(flats, found, strict=True):
        assert flat.numel() == 0 or flat.data_ptr() == again.data_ptr()
    room = room_for(flats, layout, inplace=False)
    for out, flat in zip(room, flats, strict=True):
        out.copy_(flat)
    back = optree.tree_leaves(unpack(room, layout, dtypes))
    for before, after in zip(optree.tree_leaves(tree), back, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)


def test_room_is_made_where_the_type_is_another_or_nothing_may_be_written():
    tree = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
    layout = layout_of(tree)
    flats = in_float64(layout).zeros()
    for inplace in (False, True):
        room = room_for(flats, layout, inplace=inplace)
        assert [(out.dtype, len(out)) for out in room] == [(torch.float32, 2), (torch.float64, 3)]
        assert (room[1] is flats[1]) == inplace


BASE = torch.arange(8.0)
NOT_CONSECUTIVE = {
    "swapped": [BASE[4:8], BASE[:4]],
    "gap": [BASE[:3], BASE[4:8]],
    "overlap": [BASE[:4], BASE[2:6]],
    "repeated": [BASE[:4], BASE[:4]],
    "transposed": [BASE[:4].view(2, 2).t(), BASE[4:8]],
    "expanded": [BASE[:1].expand(2), BASE[2:4]],
    "strided": [BASE[::2], BASE[4:8]],
    "other-storage": [BASE[:4], BASE[4:8].clone()],
    "half": [BASE[:4].half(), BASE[4:8]],
}


@pytest.mark.parametrize("tree", NOT_CONSECUTIVE.values(), ids=NOT_CONSECUTIVE.keys())
def test_what_is_not_consecutive_views_is_copied_in_leaf_order(tree):
    (flat,) = pack(tree, layout_of(tree))
    want = torch.cat([leaf.float().reshape(-1) for leaf in tree])
    assert torch.equal(flat, want)
    assert flat.data_ptr() != BASE.data_ptr()


def test_views_that_start_inside_a_tensor_are_found_there():
    tree = {"a": BASE[2:4], "b": BASE[4:8].view(2, 2).requires_grad_()}
    (flat,) = pack(tree, layout_of(tree))
    assert flat.data_ptr() == BASE[2:].data_ptr()
    assert not flat.requires_grad
    assert torch.equal(flat, BASE[2:])


def test_a_single_tensor_and_nothing_at_all_are_trees():
    x = torch.randn(2, 3)
    assert unpack(pack(x, layout_of(x)), layout_of(x)).data_ptr() == x.data_ptr()
    assert pack({}, layout_of({})) == []
    assert leaves_with_paths(x)[0][0] == "the tensor"
    assert [path for path, _ in leaves_with_paths({"a": (x, [x])})] == ["a/0", "a/1/0"]


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        (
            {"a": torch.zeros(2, dtype=torch.int32)},
            TypeError,
            r"a has dtype torch\.int32; only real",
        ),
        (torch.zeros(2, dtype=torch.complex64), TypeError, "the tensor has dtype .*view_as_real"),
        ({"a": 1.0}, TypeError, r"expected a pytree of tensors, got a leaf of type float: 1\.0"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_path(tree, error, message):
    with pytest.raises(error, match=message):
        layout_of(tree)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"b": torch.zeros(2)}, "pytree structures differ: expected .*'a'.*, got .*'b'"),
        ({"a": {"x": torch.zeros(3)}}, r"a/x: expected shape \(2,\), got \(3,\)"),
        ({"a": {"x": torch.zeros(2, 1)}}, r"a/x: expected shape \(2,\), got \(2, 1\)"),
    ],
)
def test_a_tree_of_another_form_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        pack(tree, layout_of({"a": {"x": torch.zeros(2)}}))


@given(leaves=leaves, size=st.integers(1, 30))
def test_scattered_leaves_read_in_stretches_are_the_packed_ones(leaves, size):
    tree = {
        f"{i}": numbered(*spec, 10 * i).clone().requires_grad_() for i, spec in enumerate(leaves)
    }
    layout = layout_of(tree)
    for flat, read in zip(pack(tree, layout), readable(tree, layout), strict=True):
        stretches = [piece.clone() for piece in read.split(size)]
        assert all(len(piece) == size for piece in stretches[:-1])
        assert torch.equal(torch.cat(stretches), flat)


def test_a_leaf_that_is_not_contiguous_is_read_in_its_own_order():
    tree = [torch.arange(6.0).view(2, 3).t(), torch.arange(4.0)[::2]]
    (read,) = readable(tree, layout_of(tree))
    assert [piece.tolist() for piece in read.split(5)] == [[0, 3, 1, 4, 2], [5, 0, 2]]


def test_packed_leaves_are_not_read_but_found():
    layout = layout_of([torch.zeros(3), torch.zeros(2)])
    flats = layout.zeros()
    (read,) = readable(unpack(flats, layout), layout)
    assert read.data_ptr() == flats[0].data_ptr()


def test_dicts_fit_by_their_keys_whatever_their_order():
    layout = layout_of({"a": torch.zeros(2), "b": torch.zeros(1)})
    leaves = layout.leaves(OrderedDict(b=torch.ones(1), a=torch.zeros(2)))
    assert [leaf.tolist() for leaf in leaves] == [[0, 0], [1]]
