"""Numbers: torch.optim, published references, and ones worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torchopt

from opake_lightning.optimizers import adam, adamw, sgd
from opake_lightning.types import NoisedPytree

SETTINGS = [
    (sgd, torch.optim.SGD, {"lr": 0.05}),
    (sgd, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (sgd, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    (sgd, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    (sgd, torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    (adam, torch.optim.Adam, {}),
    (adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.9), "eps": 1e-3}),
    (adamw, torch.optim.AdamW, {}),
    (adamw, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (adamw, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-2}),
]


@pytest.mark.parametrize(("ours", "theirs", "settings"), SETTINGS)
def test_forty_steps_equal_torch(ours, theirs, settings, problem):
    params = problem.params()
    reference = {name: torch.nn.Parameter(value.clone()) for name, value in params.items()}
    their = theirs(reference.values(), **settings)
    our = ours(**settings)
    state = our.init(params)
    for t in range(1, 41):
        for name, gradient in problem.grads(t).items():
            reference[name].grad = gradient + 0.1 * reference[name].detach()
        their.step()
        gradients = {name: g + 0.1 * params[name] for name, g in problem.grads(t).items()}
        updates, state = our.update(gradients, state, params=params)
        params = torchopt.apply_updates(params, updates)
        for name, value in params.items():
            torch.testing.assert_close(value, reference[name].detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("torch.SGD mom0.9 nesterov0", sgd(0.01, momentum=0.9)),
        ("torch.Adam L2 wd0.1", adam(0.01, weight_decay=0.1)),
        ("torch.Adam L2 wd0.1", adamw(0.01, weight_decay=0.1, decoupled_weight_decay=False)),
        ("torch.AdamW wd0.1", adamw(0.01, weight_decay=0.1)),
    ],
)
def test_published_trajectories(name, optimizer, problem):
    expected, params = problem.load("optimizers.json")[name], problem.params()
    state = optimizer.init(params)
    for t in range(1, 41):
        updates, state = optimizer.update(problem.grads(t), state, params=params)
        params = torchopt.apply_updates(params, updates)
        problem.check(expected, t, params)


@pytest.mark.parametrize(
    ("name", "sigma", "settings"),
    [
        # Tang et al. have no eps in the denominator.
        ("tang_const_sig0.02_gamma1e-8", lambda t: 0.02, {"noise_floor": 1e-8, "eps": 1e-30}),
        (
            "chooi_floor_const_sig0.02_gamma1e-8_wd0.1",
            lambda t: 0.02,
            {"noise_floor": 1e-8, "weight_decay": 0.1},
        ),
        (
            "chooi_floor_tv_sig_gamma1e-8",
            lambda t: 0.02 * (1 + math.sin(t) / 2),
            {"noise_floor": 1e-8},
        ),
        ("chooi_floor_const_sig0.3_gamma1e-4", lambda t: 0.3, {"noise_floor": 1e-4}),
    ],
)
def test_published_corrected_trajectories(name, sigma, settings, problem):
    expected, params = problem.load("dp_adam_bc.json")[name], problem.params()
    optimizer = adamw(0.01, noise_bias_correction=True, **{"weight_decay": 0.0} | settings)
    state = optimizer.init(params)
    for t in range(1, 41):
        noised = NoisedPytree(problem.grads(t), sigma(t))
        updates, state = optimizer.update(noised, state, params=params)
        params = torchopt.apply_updates(params, updates)
        problem.check(expected, t, params)
        if str(t) in expected:
            phi_hat = state["second_moment"].noise / (1 - 0.999**t)
            assert phi_hat == pytest.approx(expected[str(t)]["phi_hat"], rel=1e-12)


def test_the_corrected_scalar_example(problem):
    example = problem.load("dp_adam_bc.json")["scalar_example"]
    optimizer = adam(
        example["lr"],
        (example["beta1"], example["beta2"]),
        example["eps"],
        noise_bias_correction=True,
        noise_floor=example["gamma"],
    )
    theta = torch.zeros((), dtype=torch.float64)
    state = optimizer.init(theta)
    for g, step in zip(example["g"], example["steps"], strict=True):
        noised = NoisedPytree(torch.tensor(g, dtype=torch.float64), example["sigma"])
        updates, state = optimizer.update(noised, state)
        theta = theta + updates
        assert theta.item() == pytest.approx(step["theta"], abs=1e-12)


def test_decoupled_decay_alone_takes_one_to_0_999():
    params = {"x": torch.ones(1, dtype=torch.float64)}
    optimizer = adamw(lr=0.01, weight_decay=0.1)
    zero = {"x": torch.zeros(1, dtype=torch.float64)}
    updates, _ = optimizer.update(zero, optimizer.init(params), params=params)
    assert torchopt.apply_updates(params, updates)["x"].item() == pytest.approx(0.999, abs=1e-15)


def test_update_rms_clip_is_over_the_whole_model_and_before_weight_decay():
    # The first direction of Adam is sign(g): (1, -1, 1) and 0, so RMS² = 3/4.
    params = {"a": torch.full((3,), 2.0), "b": torch.full((1,), 2.0)}
    gradient = {"a": torch.tensor([5.0, -0.1, 1.0]), "b": torch.zeros(1)}
    optimizer = adamw(lr=1.0, weight_decay=0.5, update_rms_clip=0.5)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params=params)
    clipped = 0.5 / math.sqrt(3 / 4)
    expected = torch.tensor([-clipped - 1, clipped - 1, -clipped - 1])
    torch.testing.assert_close(updates["a"], expected)
    torch.testing.assert_close(updates["b"], torch.tensor([-1.0]))


def test_update_rms_clip_never_enlarges(problem):
    # A scale of limit / RMS without the max(1, ·) would pass the test above.
    plain, clipped = adamw(update_rms_clip=None), adamw(update_rms_clip=100.0)
    params = problem.params()
    first, _ = plain.update(problem.grads(1), plain.init(params), params=params)
    second, _ = clipped.update(problem.grads(1), clipped.init(params), params=params)
    torch.testing.assert_close(first["W"], second["W"], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: sgd(-0.1), "lr must be"),
        (lambda: sgd(float("nan")), "lr must be"),
        (lambda: sgd(0.1, momentum=-1.0), "momentum must be"),
        (lambda: sgd(0.1, momentum=0.9, dampening=1.5), "dampening must be"),
        (lambda: sgd(0.1, nesterov=True), "nesterov=True needs momentum > 0"),
        (lambda: sgd(0.1, 0.9, dampening=0.1, nesterov=True), "dampening=0.1"),
        (lambda: sgd(0.1, weight_decay=-1.0), "weight_decay must be"),
        (lambda: adam(betas=(1.0, 0.9)), "beta1 must be"),
        (lambda: adam(betas=(0.9, float("nan"))), "beta2 must be"),
        (lambda: adam(eps=0.0), "eps must be"),
        (lambda: adam(eps=1e-46), "eps must be"),
        (lambda: adamw(noise_floor=0.0), "noise_floor must be"),
        (lambda: adamw(update_rms_clip=0.0), "update_rms_clip must be"),
        (lambda: adamw(weight_decay=float("inf")), "weight_decay must be"),
    ],
)
def test_bad_settings_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()
