from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from opake_lightning.errors import CheckpointError
from opake_lightning.random import RngKey, key
from opake_lightning.serialization import from_state_dict, state_dict


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Inner:
    mean: Any
    count: int = 0


@dataclass(frozen=True, slots=True)
class Counter:
    privacy_critical: ClassVar[bool] = True
    step: int
    extra: Any = None


def everything(fill: float) -> dict[str, Any]:
    return {
        "inner": Inner({"layer.weight": torch.full((2, 3), fill), "a/b~c": torch.tensor(fill)}, 3),
        "tuple": (1, [2.5, torch.full((0,), fill)]),
        "named": Pair(torch.full((2,), fill, dtype=torch.bfloat16), None),
        "ordered": OrderedDict(z=True, a="word"),
        "deque": deque([1.0, 2.0], maxlen=3),
        "none": None,
        "empty": {},
        "key": key(7),
        "flag": False,
        "inf": math.inf,
    }


def saved(state: Any, path: Any) -> dict[str, Any]:
    torch.save(state_dict(state), path)
    return torch.load(path, weights_only=True)


def test_round_trip_of_every_kind_through_a_weights_only_file(tmp_path):
    state = everything(1.5)
    restored = from_state_dict(everything(0.0), saved(state, tmp_path / "s.pt"), strict=True)
    first, second = state_dict(state), state_dict(restored)
    assert first.keys() == second.keys()
    for path, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, second[path])
            assert value.dtype == second[path].dtype
        else:
            assert (value, type(value)) == (second[path], type(second[path]))
    assert isinstance(restored["named"], Pair)
    assert isinstance(restored["inner"], Inner)
    assert list(restored["ordered"]) == ["z", "a"]
    assert restored["deque"].maxlen == 3
    assert restored["key"] == key(7)


def test_paths_name_fields_and_escape_separators():
    assert set(state_dict(everything(0.0))) >= {
        "inner/mean/layer.weight",
        "inner/mean/a~1b~0c",
        "inner/count",
        "tuple/1/0",
        "named/left",
        "key",
    }


def test_a_saved_dict_does_not_change_with_training_nor_save_the_whole_base(tmp_path):
    base = torch.zeros(1_000_000)
    state = {"w": base[:2]}
    flat = state_dict(state)
    base.add_(1)
    assert flat["w"].tolist() == [0.0, 0.0]
    torch.save(flat, tmp_path / "s.pt")
    assert (tmp_path / "s.pt").stat().st_size < 10_000


def test_restored_tensors_alias_neither_the_dict_nor_the_template():
    template, flat = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    restored = from_state_dict(template, flat)
    restored["w"].add_(1)
    assert flat["w"].tolist() == [1.0, 1.0]
    assert template["w"].tolist() == [0.0, 0.0]


def test_restored_tensors_take_the_templates_dtype():
    restored = from_state_dict({"w": torch.zeros(2, dtype=torch.float64)}, {"w": torch.ones(2)})
    assert restored["w"].dtype == torch.float64


def test_a_missing_path_keeps_the_templates_value_unless_strict():
    template = Inner(torch.zeros(1), count=5)
    assert from_state_dict(template, {"mean": torch.ones(1)}).count == 5
    with pytest.raises(CheckpointError, match="lacks 'count'"):
        from_state_dict(template, {"mean": torch.ones(1)}, strict=True)


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"noise": Inner(RngKey(1))}, "noise/mean"),
        ({"noise": Counter(0)}, "noise/step"),
        ({"noise": Counter(0, {"below": [0]})}, "noise/extra/below/0"),
    ],
)
def test_what_is_critical_for_privacy_is_never_filled_in(template, path):
    flat = state_dict(template)
    del flat[path]
    with pytest.raises(CheckpointError, match=f"lacks '{path}'"):
        from_state_dict(template, flat)


@pytest.mark.parametrize(
    ("template", "flat", "match"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "does not know 'b'"),
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}, r"'a' has shape \(3, 2\).*\(2, 3\)"),
        ({"a": torch.zeros(2)}, {"a": 1.0}, "'a' is a float.*Tensor"),
        ({"a": 1.0}, {"a": torch.zeros(())}, "'a' is a Tensor.*float"),
        ({"a": 1}, {"a": 1.0}, "'a' is a float.*int"),
        ({"a": True}, {"a": 1}, "'a' is a int.*bool"),
        ({"a": key(7)}, {"a": "not hexadecimal"}, "'a' is not a key"),
        ({"a": key(7)}, {"a": 5}, "'a' is a int.*RngKey"),
    ],
)
def test_what_does_not_fit_is_refused_by_path(template, flat, match):
    with pytest.raises(CheckpointError, match=match):
        from_state_dict(template, flat)


def test_an_int_fills_a_float_and_anything_plain_fills_none():
    restored = from_state_dict({"a": 1.0, "b": None}, {"a": 2, "b": torch.ones(1)})
    assert type(restored["a"]) is float
    assert restored["b"].tolist() == [1.0]


@pytest.mark.parametrize("value", [object(), {1}, np.float64(1.0), torch.float32])
def test_what_has_no_plain_form_is_refused(value):
    with pytest.raises(TypeError, match="'a/0'"):
        state_dict({"a": [value]})


def test_two_equal_paths_are_refused():
    with pytest.raises(ValueError, match="two parts of the state have the path 'a/1'"):
        state_dict({"a": {1: 1.0, "1": 2.0}})
