"""Chains of one's own."""

from __future__ import annotations

import copy

import pytest
import torch
import torchopt

from opake_lightning.optimizers import (
    adamw,
    add_decayed_weights,
    chain,
    clip_update_rms,
    is_noise_aware,
    scale_by_learning_rate,
    sgd,
    trace,
)
from opake_lightning.serialization import state_dict


@pytest.fixture
def params():
    return {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(3)}


def test_checkpoint_paths_of_adamw(params):
    optimizer = adamw(update_rms_clip=1.0, noise_bias_correction=True)
    assert set(state_dict(optimizer.init(params))) == {
        "step",
        "first_moment/mean/layer.weight",
        "first_moment/mean/layer.bias",
        "second_moment/square/layer.weight",
        "second_moment/square/layer.bias",
        "second_moment/noise",
        "second_moment/signed",
    }


def test_the_paths_do_not_depend_on_which_options_are_on(params):
    full = adamw(update_rms_clip=1.0, noise_bias_correction=True, decoupled_weight_decay=False)
    assert set(state_dict(full.init(params))) == set(state_dict(adamw().init(params)))


def test_state_without_memory_is_a_count(params):
    assert state_dict(sgd(0.1).init(params)) == {"step": 0}


@pytest.mark.parametrize("optimizer", [chain(), chain(only=trace(0.9))])
def test_what_is_handed_out_can_be_written_to(optimizer):
    gradient = torch.ones(3)
    updates, state = optimizer.update(gradient, optimizer.init(gradient))
    updates.add_(5)
    assert gradient.tolist() == [1.0] * 3
    again, _ = optimizer.update(gradient, state)
    assert again.tolist() in ([1.0] * 3, pytest.approx([1.9] * 3))


def test_stages_that_do_nothing_are_left_out():
    assert add_decayed_weights(0.0, coupled=True) is None
    assert trace(0.0) is None
    assert clip_update_rms(None) is None


def test_a_chain_refuses_two_rates_and_the_name_of_the_count():
    with pytest.raises(ValueError, match="2 stages that apply a learning rate"):
        chain(a=scale_by_learning_rate(0.1), b=scale_by_learning_rate(0.1))
    with pytest.raises(ValueError, match="cannot be named 'step'"):
        chain(step=trace(0.9))


def test_copies_and_torchopt_chains_stay_noise_aware():
    optimizer = copy.deepcopy(sgd(0.5))
    assert (optimizer.name, optimizer.lr(0)) == ("sgd", 0.5)
    assert is_noise_aware(torchopt.chain(optimizer, torchopt.transform.scale(0.5)))
    assert not is_noise_aware(torchopt.chain(torchopt.transform.scale(0.5), optimizer))


def test_gradients_in_and_out_of_autograd(params):
    weights = {name: torch.nn.Parameter(value) for name, value in params.items()}
    gradient = {name: (value * value).sum() * value for name, value in weights.items()}
    optimizer = adamw()
    updates, state = optimizer.update(gradient, optimizer.init(weights), params=weights)
    assert not any(x.requires_grad for x in updates.values())
    assert not any(x.requires_grad for x in state_dict(state).values() if torch.is_tensor(x))


def test_leaves_of_different_types_keep_them():
    params = {"half": torch.ones(2, dtype=torch.bfloat16), "double": torch.ones(2).double()}
    optimizer = adamw(lr=0.1, weight_decay=0.0)
    updates, state = optimizer.update(params, optimizer.init(params), params=params)
    assert {name: x.dtype for name, x in updates.items()} == {
        "half": torch.bfloat16,
        "double": torch.float64,
    }
    assert state["first_moment"].mean["double"].dtype == torch.float64
    torch.testing.assert_close(
        updates["double"], torch.full((2,), -0.1).double(), rtol=1e-6, atol=0
    )
