"""Forty steps of each optimizer against published programs, and against torch where torch has it.

Where references disagree on eps: RAdam adds it to the root of v before debiasing (torch; optax
after), Adagrad and RMSprop outside the root (torch; optax inside), Adafactor adds it to the squares
(paper, timm, optax; torch bounds V from below). Ours is the first in each case.
"""

from __future__ import annotations

import pytest
import torch
import torchopt

from opake_lightning import optimizers
from opake_lightning.optimizers import (
    adadelta,
    adafactor,
    adagrad,
    adamw,
    ademamix,
    lion,
    radam,
    rmsprop,
    schedule_free,
    sgd,
)

TO_TORCH = [
    ("radam", "RAdam", {"lr": 0.01}),
    ("radam", "RAdam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-2}),
    ("radam", "RAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("radam", "RAdam", {"lr": 0.01, "betas": (0.9, 0.7)}),
    ("radam", "RAdam", {"lr": 0.01, "betas": (0.9, 0.6)}),
    ("rmsprop", "RMSprop", {}),
    ("rmsprop", "RMSprop", {"alpha": 0.9, "momentum": 0.9, "weight_decay": 0.1, "eps": 1e-2}),
    ("adagrad", "Adagrad", {}),
    ("adagrad", "Adagrad", {"weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-2}),
    ("adadelta", "Adadelta", {}),
    ("adadelta", "Adadelta", {"lr": 0.5, "rho": 0.8, "eps": 1e-3, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("ours", "theirs", "settings"), TO_TORCH)
def test_forty_steps_equal_torch(ours, theirs, settings, problem):
    against_torch(
        getattr(optimizers, ours)(**settings),
        lambda params: getattr(torch.optim, theirs)(params, **settings),
        problem,
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"lr": None}, {"lr": 1e-2}),
        (
            {"lr": None, "weight_decay": 0.1, "update_rms_clip": 1.5},
            {"weight_decay": 0.1, "d": 1.5},
        ),
        ({"lr": lambda step: min(0.5, (step + 1) ** -0.5), "scale_parameter": True}, {"lr": 0.5}),
        ({"lr": None, "beta2_decay": -0.5, "eps": (1e-30, 0.3)}, {"beta2_decay": -0.5, "eps": 0.3}),
    ],
)
def test_adafactor_equals_torch(ours, theirs, problem):
    theirs = theirs | {"eps": (1e-15, theirs.get("eps", 1e-3))}
    against_torch(
        adafactor(**{"clip_per_tensor": True} | ours),
        lambda params: torch.optim.Adafactor(params, **theirs),
        problem,
    )


def against_torch(our, their_factory, problem):
    params = problem.params()
    reference = {name: torch.nn.Parameter(value.clone()) for name, value in params.items()}
    their, state = their_factory(reference.values()), our.init(params)
    for t in range(1, 41):
        for name, gradient in problem.grads(t).items():
            reference[name].grad = gradient + 0.1 * reference[name].detach()
        their.step()
        gradients = {name: g + 0.1 * params[name] for name, g in problem.grads(t).items()}
        updates, state = our.update(gradients, state, params=params)
        params = torchopt.apply_updates(params, updates)
        for name, value in params.items():
            torch.testing.assert_close(value, reference[name].detach(), rtol=0, atol=1e-10)


PUBLISHED = {
    "torch.RAdam wd0": radam(0.01),
    "torch.RAdam decoupled wd0.1": radam(0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "torch.Adadelta lr1": adadelta(),
    "torch.Adagrad lr1e-2": adagrad(),
    "torch.RMSprop lr1e-2": rmsprop(),
    "po.Lion lr1e-3 wd0.1": lion(1e-3, weight_decay=0.1),
    "po.AdEMAMix a5 nosched": ademamix(0.01),
    "po.AdEMAMix a5 T40 sched": ademamix(0.01, alpha_warmup_steps=40, beta3_warmup_steps=40),
    "torch.Adafactor lr1e-2": adafactor(clip_per_tensor=True),
    "torch.Adafactor lr1e-2 wd0.1": adafactor(weight_decay=0.1, clip_per_tensor=True),
    "torch.Adafactor lr0.5 (cap bites never at t>4)": adafactor(
        lambda step: min(0.5, (step + 1) ** -0.5), scale_parameter=True, clip_per_tensor=True
    ),
    "timm.Adafactor lr None (relative)": adafactor(clip_per_tensor=True),
    "timm.Adafactor lr1e-2": adafactor(0.01, clip_per_tensor=True),
    "po.AdaFactor lr1e-2 noscale norel nomom": adafactor(0.01, clip_per_tensor=True),
    "sf.AdamWScheduleFree b0.9,0.999 wd0": schedule_free(
        adamw(0.01, betas=(0.0, 0.999), weight_decay=0)
    ),
    "sf.AdamWScheduleFree wd0.1": schedule_free(adamw(0.01, betas=(0.0, 0.999), weight_decay=0.1)),
    "sf.AdamWScheduleFree warmup10": schedule_free(
        adamw(0.01, betas=(0.0, 0.999), weight_decay=0), warmup_steps=10
    ),
    "sf.SGDScheduleFree lr0.1 mom0.9": schedule_free(sgd(0.1)),
    "optax.schedule_free adamw wd0.1": schedule_free(
        adamw(0.01, betas=(0.0, 0.999), weight_decay=0.1)
    ),
    "optax.schedule_free sgd": schedule_free(sgd(0.1)),
    "optax.schedule_free over adamw b1=0.9 (double momentum)": schedule_free(
        adamw(0.01, weight_decay=0)
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trajectories(name, problem):
    follow(PUBLISHED[name], problem.load("optimizers.json")[name], problem)


def follow(optimizer, expected, problem, atol=1e-10):
    params = problem.params()
    state, seen = optimizer.init(params), 0
    for t in range(1, 41):
        updates, state = optimizer.update(problem.grads(t), state, params=params)
        params = torchopt.apply_updates(params, updates)
        at = expected.get(str(t), {})
        got = params | {f"x_{name}": x for name, x in getattr(state, "x", {}).items()}
        for name in at:
            reference = torch.tensor(at[name], dtype=torch.float64)
            torch.testing.assert_close(
                got[name], reference, rtol=0, atol=atol, msg=f"{name} at {t}"
            )
            seen += 1
    assert seen >= 16


@pytest.mark.parametrize(
    ("name", "optimizer", "atol"),
    [
        # The other placement of eps.
        ("optax.radam", radam(0.01), 1e-7),
        # Its decay is computed in float32.
        (
            "optax.adafactor lr1e-2 noscale default min_dim128",
            adafactor(0.01, min_dim_size_to_factor=128, clip_per_tensor=True),
            1e-8,
        ),
    ],
)
def test_published_trajectories_of_other_arithmetic(name, optimizer, atol, problem):
    follow(optimizer, problem.load("optimizers.json")[name], problem, atol)


def stable_adamw(w, gradients, beta1, beta2, lr=0.01, eps=1e-8):
    """StableAdamW of one tensor, as published: the iterates."""
    m = v = torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        share1, share2 = (1 - beta1) / (1 - beta1**t), (1 - beta2) / (1 - beta2**t)
        m, v = m + share1 * (g - m), v + share2 * (g * g - v)
        rms = (g * g / v.clamp(min=eps**2)).mean().sqrt().item()
        w = w - lr / max(1, rms) * m / (v.sqrt() + eps)
        yield w


def test_stable_adamw_is_written_down_right(problem):
    expected = problem.load("optimizers.json")["po.StableAdamW b0.9,0.999 wd0"]
    steps = stable_adamw(
        problem.params()["W"], (problem.grads(t)["W"] for t in range(1, 41)), 0.9, 0.999
    )
    for t, w in enumerate(steps, 1):
        if str(t) in expected:
            reference = torch.tensor(expected[str(t)]["W"], dtype=torch.float64)
            torch.testing.assert_close(w, reference, rtol=0, atol=1e-10)


def test_update_rms_clip_on_one_leaf_without_momentum_is_stable_adamw(problem):
    # The two clip by the same RMS where the gradient itself is divided; it is > 1 as they grow.
    w = free = problem.params()["W"]
    gradients = [1.2**t * problem.grads(t)["W"] for t in range(1, 41)]
    settings = {"betas": (0.0, 0.99), "eps": 1e-12, "weight_decay": 0.0}
    optimizer, plain = adamw(0.01, update_rms_clip=1.0, **settings), adamw(0.01, **settings)
    state, free_state = optimizer.init(w), plain.init(w)
    published = stable_adamw(w, gradients, 0.0, 0.99, eps=1e-12)
    for g, expected in zip(gradients, published, strict=True):
        updates, state = optimizer.update(g, state)
        unclipped, free_state = plain.update(g, free_state)
        w, free = w + updates, free + unclipped
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-10)
    assert (free - w).abs().max() > 1e-3


def test_adafactor_clips_the_whole_model_unless_told_otherwise():
    # Unfactored at first: U = sign(g), of RMS sqrt(1/2) over both tensors, 1 and 0 in each.
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    gradient = {"a": torch.tensor([5.0, -1.0]), "b": torch.zeros(2)}
    for each, size in [(False, 0.5 / 0.5**0.5), (True, 0.5)]:
        optimizer = adafactor(1.0, update_rms_clip=0.5, clip_per_tensor=each)
        updates, _ = optimizer.update(gradient, optimizer.init(params))
        torch.testing.assert_close(updates["a"], torch.tensor([-size, size]))
        assert not updates["b"].any()


def test_adafactor_keeps_rows_and_columns_only():
    params = {"conv": torch.zeros(2, 3, 4, 5), "bias": torch.zeros(7), "one": torch.zeros(())}
    state = adafactor().init(params)["second_moment"]
    assert {k: tuple(x.shape) for k, x in state.row.items()} == {
        "conv": (2, 3, 4), "bias": (0,), "one": (0,)
    }  # fmt: skip
    assert {k: tuple(x.shape) for k, x in state.col.items()} == {
        "conv": (2, 3, 5), "bias": (0,), "one": (0,)
    }  # fmt: skip
    assert {k: tuple(x.shape) for k, x in state.square.items()} == {
        "conv": (0,), "bias": (7,), "one": ()
    }  # fmt: skip


def test_radam_reads_its_second_moment_from_the_sixth_step_on():
    # Two streams of the same mean whose squares differ: until then their updates are the same.
    optimizer, size = radam(0.1, betas=(0.0, 0.999)), []
    state = optimizer.init(torch.zeros(1))
    for t in range(1, 9):
        updates, state = optimizer.update(torch.tensor([2.0]), state)
        size.append(-updates.item() / 0.1)
        rho = 1999 - 2 * t * 0.999**t / (1 - 0.999**t)
        if rho > 5:
            r = ((rho - 4) * (rho - 2) * 1999 / (1995 * 1997 * rho)) ** 0.5
            assert size[-1] == pytest.approx(r, rel=1e-5)
    assert size[:5] == pytest.approx([2.0] * 5)
    assert size[5] == pytest.approx(0.02582111280185855, rel=1e-5)


@pytest.mark.parametrize(
    ("t", "alpha", "beta3"),
    [
        (1, 0.125, 0.9961500222713224),
        (10, 1.25, 0.9996011953686023),
        (20, 2.5, 0.9998001996254803),
        (40, 5.0, 0.9999),
        (41, 5.0, 0.9999),
    ],
)
def test_ademamix_warm_up(t, alpha, beta3):
    stage = ademamix(alpha_warmup_steps=40, beta3_warmup_steps=40).stages["slow_moment"]
    assert stage.alpha(t - 1) == pytest.approx(alpha, rel=1e-14)
    assert stage.decay(t - 1) == pytest.approx(beta3, rel=1e-14)


def test_schedule_free_weighs_iterates_as_asked():
    # z = -0.1, -0.2 after two steps; c = 1, then 2^r / (1 + 2^r).
    for power, share in [(0.0, 1 / 2), (1.0, 2 / 3)]:
        optimizer, y = schedule_free(sgd(0.1), 0.0, weight_power=power), torch.zeros(1).double()
        state = optimizer.init(y)
        for _ in range(2):
            updates, state = optimizer.update(torch.ones(1).double(), state, params=y)
            y = y + updates
        assert state.z.item() == pytest.approx(-0.2)
        assert state.x.item() == pytest.approx(-0.1 - 0.1 * share)
        assert y.item() == pytest.approx(-0.2)


def test_schedule_free_weighs_by_the_largest_rate_so_far():
    # z = -0.2, -0.3: a falling rate weighs no less, a rising one (0.1, 0.2) weighs four times.
    for rates, x in [((0.2, 0.1), -0.25), ((0.1, 0.2), (-0.1 + 4 * -0.3) / 5)]:
        optimizer, y = schedule_free(sgd(lambda step, rates=rates: rates[step])), torch.zeros(1)
        state = optimizer.init(y)
        for _ in range(2):
            updates, state = optimizer.update(torch.ones(1), state, params=y)
            y = y + updates
        assert state.x.item() == pytest.approx(x)


def test_schedule_free_survives_a_first_step_without_a_rate():
    optimizer, y = schedule_free(sgd(lambda step: 0.1 * step)), torch.ones(1)
    state = optimizer.init(y)
    updates, state = optimizer.update(torch.ones(1), state, params=y)
    assert (updates.item(), state.x.item(), state.z.item()) == (0.0, 1.0, 1.0)
    updates, state = optimizer.update(torch.ones(1), state, params=y)
    assert state.x.item() == state.z.item() == pytest.approx(0.9)


def test_schedule_free_shows_the_rate_it_applies_while_it_warms_up():
    optimizer = schedule_free(adamw(0.1), warmup_steps=4)
    assert [optimizer.lr(step) for step in range(6)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    )


def test_schedule_free_takes_this_librarys_optimizers_only():
    with pytest.raises(TypeError, match="schedule_free takes an optimizer of opake_lightning"):
        schedule_free(torchopt.sgd(0.1))
    with pytest.raises(ValueError, match="already averages its iterates"):
        schedule_free(schedule_free(sgd(0.1)))
    with pytest.raises(ValueError, match="has no learning rate to warm up"):
        schedule_free(optimizers.chain(), warmup_steps=5)
    optimizer = schedule_free(sgd(0.1))
    with pytest.raises(ValueError, match="schedule_free needs the parameters"):
        optimizer.update(torch.ones(1), optimizer.init(torch.ones(1)))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: radam(betas=(0.9, 1.0)), "beta2 must be"),
        (lambda: lion(betas=(0.9, float("nan"))), "beta2 must be"),
        (lambda: lion(betas=(1.0, 0.9)), "beta1 must be"),
        (lambda: ademamix(betas=(0.9, 0.9, 1.0)), "beta3 must be"),
        (lambda: ademamix(alpha=-1.0), "alpha must be"),
        (lambda: ademamix(alpha_warmup_steps=0), "alpha_warmup_steps must be"),
        (lambda: ademamix(betas=(0.0, 0.9, 0.99), beta3_warmup_steps=9), "needs beta1 and beta3"),
        (lambda: rmsprop(alpha=1.0), "alpha must be"),
        (lambda: rmsprop(noise_floor_relative=-1.0), "noise_floor_relative must be"),
        (lambda: adagrad(initial_accumulator_value=-1.0), "initial_accumulator_value must be"),
        (lambda: adagrad(eps=0.0), "eps must be"),
        (lambda: adadelta(rho=float("nan")), "rho must be"),
        (lambda: adadelta(noise_floor=0.0), "noise_floor must be"),
        (lambda: adafactor(beta2_decay=0.8), "beta2_decay must be"),
        (lambda: adafactor(eps=(0.0, 1e-3)), r"eps\[0\] must be"),
        (lambda: adafactor(eps=(1e-30, 0.0)), r"eps\[1\] must be"),
        (lambda: adafactor(min_dim_size_to_factor=0), "min_dim_size_to_factor must be"),
        (lambda: schedule_free(sgd(0.1), beta=1.0), "beta must be"),
        (lambda: schedule_free(sgd(0.1), warmup_steps=-1), "warmup_steps must be"),
        (lambda: schedule_free(sgd(0.1), weight_power=-1.0), "weight_power must be"),
        (lambda: schedule_free(sgd(0.1), weight_lr_power=float("nan")), "weight_lr_power must be"),
    ],
)
def test_bad_settings_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()
