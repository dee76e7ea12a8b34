"""The programs of the optimizers' guide that need correlated noise, as they are printed there.

Only the package's name is changed. What the guide leaves undefined is defined before; programs that
follow each other in the guide share a namespace.
"""

from __future__ import annotations

import pytest
import torch
import torchopt

from opake_lightning._pairs import square_sensitivity
from opake_lightning.dpftrl import accounting as dpftrl_acc
from opake_lightning.dpftrl.noise import band_mf_strategy
from opake_lightning.dpsgd.clipping import auto_clipped_grad, clipped_grad
from opake_lightning.random import key
from opake_lightning.scheduling import cosine_schedule

PRIVATE_SECOND_MOMENTS = """
from opake_lightning.dpftrl.noise import band_mf_strategy, mf_gaussian_noise
from opake_lightning.optimizers import adamw

# Strategy: momentum=beta1 (Adam's first moment workload)
strategy = band_mf_strategy(bands=8, momentum=0.9)
second_strategy = band_mf_strategy(bands=8, momentum=0.999)

# Noise: passing second_moment_strategy creates two MF streams (g, g²).
noise_fn, noise_state = mf_gaussian_noise(
    grad_template, strategy,
    n_steps=1000,
    noise_multiplier=noise_multiplier,
    key=key(42),
    second_moment_strategy=second_strategy,
)

# Optimizer: decoupled weight decay, callable LR schedule.
optimizer = adamw(lr=lr_schedule_fn, betas=(0.9, 0.999), weight_decay=0.01)
opt_state = optimizer.init(params)
"""

TRAINING_LOOP = """
for batch in dataloader:
    grads, clip_state = grad_fn(params, batch, state=clip_state)
    noisy_grads, noise_state = noise_fn(grads, noise_state)
    updates, opt_state = optimizer.update(
        noisy_grads, opt_state,
        params=params,
    )
    params = torchopt.apply_updates(params, updates)
"""

ACCOUNTING = """
strategy = band_mf_strategy(bands=bands)
mechanism = dpftrl_acc.mf_gaussian(nm, strategy)
process = dpftrl_acc.poisson(mechanism, sample_rate=q, n_steps=n)
"""

BOUNDS = {"clipping_norm": 1.0, "expected_batch_size": 8}
CLIPPING = {
    "aggregate": lambda: clipped_grad(losses, **BOUNDS, second_moment="aggregate"),
    "per example": lambda: clipped_grad(losses, **BOUNDS, second_moment="per_example"),
    "AUTO-S": lambda: auto_clipped_grad(losses, **BOUNDS, second_moment=True),
}


def losses(params, batch):
    x, y = batch
    return (x @ params["w"] + params["b"] - y) ** 2


@pytest.fixture(params=CLIPPING.values(), ids=CLIPPING.keys())
def reader(request):
    """What a reader has at hand."""
    torch.manual_seed(0)
    params = {"w": torch.ones(3), "b": torch.zeros(())}
    grad_fn, clip_state = request.param()
    return {
        "torchopt": torchopt,
        "key": key,
        "params": params,
        "grad_template": params,
        "grad_fn": grad_fn,
        "clip_state": clip_state,
        "noise_multiplier": 1.1,
        "lr_schedule_fn": cosine_schedule(1e-3, 0.0, transition_steps=1000),
        "dataloader": [(torch.randn(8, 3), torch.randn(8)) for _ in range(12)],
    }


def test_adamw_with_private_second_moments_trains(reader):
    exec(PRIVATE_SECOND_MOMENTS, reader)
    exec(TRAINING_LOOP, reader)
    assert reader["opt_state"]["step"] == reader["noise_state"].step == 12
    assert all(x.isfinite().all() for x in reader["params"].values())
    assert not torch.equal(reader["params"]["w"], torch.ones(3))
    # Both streams are correlated: what a step takes back of others adds to its own noise.
    released = reader["noisy_grads"]
    for part, strategy in (
        (released.gradient, reader["strategy"]),
        (released.square, reader["second_strategy"]),
    ):
        assert part.noise_stddev > 0
        row = strategy.matrix(1000).row_norms()
        assert row[11] > 1.1 * row[0]


def test_the_pair_costs_what_the_gradient_alone_costs(reader):
    exec(PRIVATE_SECOND_MOMENTS, reader)
    exec(TRAINING_LOOP, reader)
    grads, released, step = reader["grads"], reader["noisy_grads"], reader["noise_state"].step - 1
    first = grads.gradient.sensitivity
    if grads.square is None:
        second = square_sensitivity(first, grads.projection_radius)
    else:
        second = grads.square.sensitivity
    # How far an example moves what is released, over the noise before it was correlated. All
    # columns of both strategies have norm 1, so that these add up for any number of participations.
    moved = 0.0
    for part, distance, name in (
        (released.gradient, first, "strategy"),
        (released.square, second, "second_strategy"),
    ):
        matrix = reader[name].matrix(1000)
        assert matrix.sensitivity(min_sep=8) == pytest.approx(125**0.5)
        moved += (distance * matrix.row_norms()[step] / part.noise_stddev) ** 2
    assert moved == pytest.approx(1 / 1.1**2)


def test_accounting():
    values = {
        "band_mf_strategy": band_mf_strategy,
        "dpftrl_acc": dpftrl_acc,
        "bands": 10,
        "nm": 1.0,
        "q": 0.1,
        "n": 1000,
    }
    exec(ACCOUNTING, values)
    process = values["process"]
    # A hundred rounds of Poisson sampling, by dp-accounting.
    assert process.epsilon_at(1e-5) == pytest.approx(7.04660, rel=1e-3)
    assert process.n_steps == 1000
