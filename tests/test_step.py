"""The step as one pure function of parameters, batch and state."""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
import pytest
import torch
import torchopt
from torch import Tensor
from torch.nn import functional as F

from opake_lightning.dpftrl.noise import bsr_strategy, mf_gaussian_noise
from opake_lightning.dpsgd.clipping import clipped_grad
from opake_lightning.dpsgd.noise import NoiseState, gaussian_noise
from opake_lightning.errors import PrivacyError
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.random import key
from opake_lightning.step import Step, StepState, mean_grad, no_noise
from opake_lightning.types import ClippedPytree, NoisedPytree, SecondMomentNoiseOutput

OPTIMIZERS = {
    "sgd": lambda: sgd(lr=0.1, momentum=0.9),
    "adamw": lambda: adamw(lr=0.1, noise_bias_correction=True),
    "torchopt": lambda: torchopt.adam(lr=0.1),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def loss_fn(params: Any, batch: Any) -> Any:
    x, y = batch
    mask = F.dropout(torch.ones_like(x), 0.5)
    losses = ((mask * x) @ params["w"].float() + params["b"] - y) ** 2
    return losses, mask


def params() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.5, -1.0, 2.0]), "b": torch.tensor(0.1)}


def batch(n: int = 4) -> tuple[Tensor, Tensor]:
    return torch.arange(3.0 * n).view(n, 3).cos(), torch.arange(1.0 * n)


def make_step(optimizer: Any, *, sigma: float = 1.0, loss: Any = loss_fn, **options: Any) -> Step:
    grad_fn, clip_state = clipped_grad(loss, clipping_norm=1.0, has_aux=True, expected_batch_size=4)
    noise_fn, noise_state = gaussian_noise(noise_multiplier=sigma, key=key(7))
    return Step(grad_fn, noise_fn, optimizer, clip_state, noise_state, **options)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a state, which may be dataclasses, containers and wrappers."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors_of(getattr(value, f.name))]
    children = optree.tree_leaves(value, is_leaf=lambda x: x is not value)
    return [t for child in children if child is not value for t in tensors_of(child)]


def snapshot(value: Any) -> list[tuple[int, list[float]]]:
    return [(t._version, t.flatten().tolist()) for t in tensors_of(value)]


@optimizers
def test_the_pure_step_writes_to_nothing(make):
    step = make_step(make())
    now, data = params(), batch()
    state = step.init(now)
    for _ in range(2):
        before = snapshot([now, data, state.optimizer])
        global_state = torch.get_rng_state()
        new, _, new_state = step(now, data, state)
        assert snapshot([now, data, state.optimizer]) == before
        assert torch.equal(torch.get_rng_state(), global_state)
        assert state.step == new_state.step - 1
        assert all(not torch.equal(new[name], now[name]) for name in now)
        now, state = new, new_state


def test_the_pure_step_writes_to_no_memory_of_correlated_noise():
    noise_fn, noise_state = mf_gaussian_noise(
        params(), bsr_strategy(3), n_steps=4, noise_multiplier=1.0, key=key(7)
    )
    step = dataclasses.replace(make_step(sgd(lr=0.1)), noise_fn=noise_fn, noise_state=noise_state)
    _, _, state = step(params(), batch(), step.init(params()))
    before = snapshot(state.noise)
    assert before
    once, _, _ = step(params(), batch(), state)
    again, _, _ = step(params(), batch(), state)
    assert snapshot(state.noise) == before
    assert all(torch.equal(once[name], again[name]) for name in once)


@optimizers
def test_in_place_is_bit_for_bit_the_pure_step(make):
    step = make_step(make())
    pure, state = params(), step.init(params())
    written = params()
    written_state = step.init(written)
    addresses = [leaf.data_ptr() for leaf in written.values()]
    for t in range(12):
        data = batch(4) if t % 3 else None
        pure, aux, state = step(pure, data, state)
        written, written_aux, written_state = step(written, data, written_state, inplace=True)
        assert all(torch.equal(pure[name], written[name]) for name in pure)
        assert aux is written_aux is None or torch.equal(aux, written_aux)
    assert [leaf.data_ptr() for leaf in written.values()] == addresses
    assert state.noise == written_state.noise
    for a, b in zip(tensors_of(state.optimizer), tensors_of(written_state.optimizer), strict=True):
        assert torch.equal(a, b)


def test_one_step_by_hand():
    # Gradients (-3, -4) and (-0.3, -0.4), C = 1, lr 1, expected batch 4: w = (0.9, 1.2) / 4.
    def loss(w: Tensor, b: Any) -> Any:
        losses = 0.5 * (b[0] @ w - b[1]) ** 2
        return losses, losses

    step = make_step(sgd(lr=1.0), sigma=0.0, loss=loss)
    data = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.ones(2)
    w, aux, state = step(torch.zeros(2), data, step.init(torch.zeros(2)))
    torch.testing.assert_close(w, torch.tensor([0.225, 0.3]))
    assert aux.tolist() == [0.5, 0.5]
    assert state == StepState(state.clip, NoiseState(key(7), 1), state.optimizer)


@optimizers
@pytest.mark.parametrize("inplace", [False, True])
def test_a_sum_in_float64_is_one_until_it_is_released(make, inplace):
    """The same step as of a sum that float32 can hold; to the bit, as it is rounded once."""
    step = make_step(make())

    def exact(*args: Any, state: Any) -> Any:
        (grads, aux), state = step.grad_fn(*args, state=state)
        wide = {name: leaf.float().double() for name, leaf in grads.pytree.items()}
        dtypes = (torch.float32,) * len(wide)
        return (ClippedPytree(wide, grads.sensitivity, dtypes=dtypes), aux), state

    def rounded(*args: Any, state: Any) -> Any:
        (grads, aux), state = exact(*args, state=state)
        narrow = {name: leaf.float() for name, leaf in grads.pytree.items()}
        return (ClippedPytree(narrow, grads.sensitivity), aux), state

    results = []
    for grad_fn in (exact, rounded):
        other, watched = dataclasses.replace(step, grad_fn=grad_fn), []
        now = params()
        state = other.init(now)
        released, _, state = other.release(
            now, batch(), state, inplace=inplace, watch=watched.append
        )
        wanted = torch.float64 if grad_fn is exact else torch.float32
        assert {leaf.dtype for leaf in watched[0].pytree.values()} == {wanted}
        assert {leaf.dtype for leaf in released.pytree.values()} == {torch.float32}
        now, _ = other.update(now, released, state, inplace=inplace)
        results.append(now)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_release_is_counted_whatever_becomes_of_the_update():
    def explode(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    step = make_step(torchopt.base.GradientTransformation(lambda _: (), explode))
    state = step.init(params())
    released, _, after = step.release(params(), batch(), state)
    assert isinstance(released, NoisedPytree)
    assert (state.step, after.step) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        step.update(params(), released, after)
    again, _, _ = step.release(params(), batch(), after)
    assert not torch.equal(again.pytree["w"], released.pytree["w"])


def test_an_empty_draw_is_a_step_with_noise():
    step = make_step(sgd(lr=1.0))
    after, aux, state = step(params(), None, step.init(params()))
    noise_fn, noise_state = gaussian_noise(noise_multiplier=1.0, key=key(7))
    zeros = {name: torch.zeros_like(leaf) for name, leaf in params().items()}
    noise, _ = noise_fn(ClippedPytree(zeros, 1 / 4), noise_state)
    assert (aux, state.step) == (None, 1)
    for name, leaf in params().items():
        torch.testing.assert_close(after[name], leaf - noise.pytree[name])


def test_dropout_is_a_function_of_key_and_step():
    step = make_step(sgd(lr=0.1))
    state = step.init(params())
    data = torch.ones(4, 3), torch.ones(4)

    def mask(state: StepState) -> list[Any]:
        return step.release(params(), data, state)[1].tolist()

    first = mask(state)
    torch.manual_seed(99)
    assert mask(state) == first
    later = dataclasses.replace(state, noise=NoiseState(key(7), 1))
    other = dataclasses.replace(state, noise=NoiseState(key(8), 0))
    assert len({str(mask(s)) for s in (state, later, other)}) == 3
    unseeded = make_step(sgd(lr=0.1), seed_forward=False)
    torch.manual_seed(1)
    assert unseeded.release(params(), data, state)[1].tolist() != first


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("make", [torchopt.sgd, sgd], ids=["torchopt", "ours"])
def test_parameters_keep_their_type(make, inplace):
    step = make_step(make(0.1))
    mixed = {"w": params()["w"].bfloat16(), "b": params()["b"]}
    after, _, _ = step(mixed, batch(), step.init(mixed), inplace=inplace)
    assert [after[name].dtype for name in mixed] == [torch.bfloat16, torch.float32]


def test_the_noise_level_reaches_a_noise_aware_optimizer_only():
    seen = []

    def update(updates: Any, state: Any, **_: Any) -> Any:
        seen.append(updates)
        return updates, state

    step = make_step(torchopt.base.GradientTransformation(lambda _: (), update))
    step(params(), batch(), step.init(params()))
    assert list(seen[0]) == ["w", "b"]
    corrected, plain = (
        make_step(adamw(lr=0.1, noise_bias_correction=correct)) for correct in (True, False)
    )
    one, other = (s(params(), batch(), s.init(params()))[0] for s in (corrected, plain))
    assert not torch.equal(one["w"], other["w"])


# -- without privacy ----------------------------------------------------------------------------


def test_the_mean_gradient_is_that_of_autograd():
    def loss(p: Any, b: Any) -> Any:
        losses = (b[0] @ p["w"] - b[1]) ** 2
        return losses, "aux"

    now = {**params(), "unused": torch.ones(2)}
    w = now["w"].clone().requires_grad_()
    loss({"w": w}, batch())[0].mean().backward()
    (grads, aux), state = mean_grad(loss)(now, batch(), state="kept")
    assert torch.equal(grads["w"], w.grad)
    assert torch.equal(grads["unused"], torch.zeros(2))
    assert (aux, state) == ("aux", "kept")
    assert not now["w"].requires_grad


def test_no_noise_counts_the_step_and_changes_nothing():
    grads = {"w": torch.ones(2)}
    out, state = no_noise(grads, NoiseState(key(1), 4), inplace=True)
    assert out is grads
    assert state == NoiseState(key(1), 5)


def test_a_model_without_parameters_can_be_stepped():
    step = make_step(sgd(lr=0.1), loss=lambda _, b: (b[1], b[1]))
    after, _, state = step({}, batch(), step.init({}))
    assert (after, state.step) == ({}, 1)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_paid_for_second_moment_is_used_or_refused(inplace):
    noised = NoisedPytree(optree.tree_map(torch.ones_like, params()), 0.1)
    pair = SecondMomentNoiseOutput(noised, noised)
    for optimizer, match in ((torchopt.adam(lr=0.1), "not one of"), (sgd(lr=0.1), "sgd")):
        step = make_step(optimizer)
        before = params()
        with pytest.raises(PrivacyError, match=match):
            step.update(before, pair, step.init(before), inplace=inplace)
        assert optree.tree_all(optree.tree_map(torch.equal, before, params()))
    step = make_step(adamw(lr=0.1, weight_decay=0.0))
    moved, _ = step.update(params(), pair, step.init(params()))  # -lr · 1 / (sqrt(1) + eps)
    torch.testing.assert_close(moved["b"], torch.tensor(0.0), atol=1e-6, rtol=0)
