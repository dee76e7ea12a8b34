"""The programs of the optimizers' guide that this library implements, as they are printed there.

Only the package's name is changed. What the guide leaves undefined (parameters, data, a loss, a
noise multiplier) is defined before, and the programs of one section share a namespace, as a reader
would run them. Those that need correlated noise are in ``tests/test_seed_dpftrl.py``.
"""

from __future__ import annotations

import pytest
import torch

WHY_FUNCTIONAL = """
import torchopt
from opake_lightning.optimizers import adamw

optimizer = adamw(lr=1e-3, weight_decay=0.01)
opt_state = optimizer.init(params)

# Explicit state in -> state out
updates, opt_state = optimizer.update(noisy_grads, opt_state, params=params)
params = torchopt.apply_updates(params, updates)
"""

TRAINING_LOOP = """
import torchopt
from opake_lightning.dpsgd.clipping import clipped_grad
from opake_lightning.dpsgd.noise import gaussian_noise
from opake_lightning.optimizers import adamw
from opake_lightning.random import key

# Gradient pipeline
grad_fn, clip_state = clipped_grad(
    loss_fn, clipping_norm=1.0, argnums=0, batch_argnums=1,
)
noise_fn, noise_state = gaussian_noise(noise_multiplier=noise_multiplier, key=key(42))

# DP-aware AdamW; pass `noise_bias_correction=True` to enable the
# φ-EMA subtraction once the LR is tuned for the workload.
optimizer = adamw(lr=1e-3, weight_decay=0.01)
opt_state = optimizer.init(params)

for batch in dataloader:
    grads, clip_state = grad_fn(params, batch, state=clip_state)
    noisy_grads, noise_state = noise_fn(grads, noise_state)
    updates, opt_state = optimizer.update(noisy_grads, opt_state, params=params)
    params = torchopt.apply_updates(params, updates)
"""

ADAFACTOR = """
from opake_lightning.optimizers import adafactor

optimizer = adafactor(lr=5e-4, weight_decay=0.01)
# `update_rms_clip=1.0` (the default) clips one model-wide/global RMS,
# rather than clipping each parameter leaf independently.
"""

ADAMW = """
from opake_lightning.optimizers import adamw

optimizer = adamw(lr=1.5e-4, weight_decay=0.01)
# Plain Adam (no decoupled WD): adamw(..., decoupled_weight_decay=False).
# StableAdamW (model-wide/global RMS-clipped update, not per-leaf):
# adamw(..., update_rms_clip=1.0).
"""

SGD = """
from opake_lightning.optimizers import sgd
optimizer = sgd(lr=0.01, momentum=0.9)
"""

RMSPROP = """
from opake_lightning.optimizers import rmsprop
optimizer = rmsprop(lr=1e-2, alpha=0.99, noise_bias_correction=True)
"""

ADAGRAD = """
from opake_lightning.optimizers import adagrad
optimizer = adagrad(lr=1e-2, noise_bias_correction=True)
"""

CORRECTION = """
from opake_lightning.optimizers import adamw

# Without correction — standard AdamW math.
optimizer = adamw(lr=1e-3, weight_decay=0.01)

# With correction — pass NoisedPytree updates from gaussian_noise().
optimizer = adamw(lr=1e-3, weight_decay=0.01, noise_bias_correction=True)
updates, opt_state = optimizer.update(noisy_grads, opt_state, params=params)
"""

SCHEDULE_FREE = """
from opake_lightning.optimizers import adamw, schedule_free

optimizer = schedule_free(
    adamw(lr=1e-3, noise_bias_correction=True), beta=0.9
)
opt_state = optimizer.init(params)

# Train as usual: trainer treats `params` as y_t.
for batch in dataloader:
    ...
    updates, opt_state = optimizer.update(noisy_grads, opt_state, params=params)
    params = torchopt.apply_updates(params, updates)

# At save / eval time, read the published x_t directly off the state:
eval_params = opt_state.x
"""

SCHEDULE = """
from opake_lightning.optimizers import adamw
from opake_lightning.scheduling import cosine_schedule, with_warmup

decay = cosine_schedule(
    init_value=1e-3, end_value=0.0,
    transition_steps=900, transition_begin=100,
)
schedule = with_warmup(decay, transition_steps=100)
optimizer = adamw(lr=schedule, weight_decay=0.01, noise_bias_correction=True)
"""

CHECKPOINT = """
from opake_lightning.optimizers import adamw
from opake_lightning.serialization import from_state_dict, state_dict

opt = adamw(lr=1e-3, weight_decay=0.01, noise_bias_correction=True)
state = opt.init(params)
# ... train ...

# Save
torch.save(state_dict(state), "opt.pt")

# Restore: re-init a template, then build a new state from the saved dict.
template = opt.init(params)
state = from_state_dict(template, torch.load("opt.pt"))
"""


def loss_fn(params, batch):
    x, y = batch
    return ((x @ params["w"] + params["b"] - y) ** 2).sum()


@pytest.fixture
def reader():
    """What a reader has at hand."""
    namespace = {
        "torch": torch,
        "params": {"w": torch.ones(3), "b": torch.zeros(())},
        "loss_fn": loss_fn,
        "noise_multiplier": 1.1,
        "dataloader": [(torch.randn(8, 3), torch.randn(8)) for _ in range(4)],
    }
    exec(TRAINING_LOOP, namespace)
    return namespace


def test_training_loop(reader):
    assert reader["opt_state"]["step"] == 4
    assert reader["noisy_grads"].noise_stddev == pytest.approx(1.1)
    assert all(x.isfinite().all() for x in reader["params"].values())
    assert not torch.equal(reader["params"]["w"], torch.ones(3))


def test_why_functional_optimizers(reader):
    before = {name: x.clone() for name, x in reader["params"].items()}
    exec(WHY_FUNCTIONAL, reader)
    assert reader["opt_state"]["step"] == 1
    assert all(not torch.equal(x, before[name]) for name, x in reader["params"].items())


@pytest.mark.parametrize(
    "program", [ADAFACTOR, ADAMW, SGD, RMSPROP, ADAGRAD, SCHEDULE], ids=lambda p: p.split()[3]
)
def test_choosing_an_optimizer(reader, program):
    exec(program, reader)
    optimizer, params = reader["optimizer"], reader["params"]
    updates, _ = optimizer.update(reader["noisy_grads"], optimizer.init(params), params=params)
    assert all(x.isfinite().all() for x in updates.values())


def test_correction_goes_on_from_a_state_without_it(reader):
    exec(CORRECTION, reader)
    assert reader["opt_state"]["step"] == 5
    assert all(x.isfinite().all() for x in reader["updates"].values())


def test_schedule(reader):
    exec(SCHEDULE, reader)
    assert [reader["optimizer"].lr(step) for step in (0, 50, 100, 1000)] == [0.0, 5e-4, 1e-3, 0.0]


def test_schedule_free(reader):
    start = {name: x.clone() for name, x in reader["params"].items()}
    exec(SCHEDULE_FREE, reader)
    x, y = reader["eval_params"], reader["params"]
    z = reader["opt_state"].z
    for name in y:
        assert not torch.equal(x[name], start[name])
        torch.testing.assert_close(y[name], 0.1 * z[name] + 0.9 * x[name])


def test_checkpoint(reader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(CHECKPOINT, reader)
    assert reader["state"]["step"] == 0
