"""Functional optimizers that know about noise.

Each factory returns a TorchOpt gradient transformation: ``init(params)`` gives a state,
``update(gradients, state, params=params)`` the updates and the next state, and
``torchopt.apply_updates(params, updates)`` the new parameters. They take raw pytrees of gradients,
with which they are the well-known optimizers to the last digits, and the
:class:`~opake_lightning.types.NoisedPytree` of a noise mechanism, which also tells them how much of
what they see is noise. Parameters may be any pytree of tensors; the state is kept in float32 for
narrower parameters.

A factory is a :func:`chain` of stages, and you can make your own.
"""

from __future__ import annotations

from torchopt.base import GradientTransformation

from opake_lightning.optimizers._adam import adam, adamw
from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain, is_noise_aware
from opake_lightning.optimizers._sgd import sgd
from opake_lightning.optimizers._stages import (
    add_decayed_weights,
    clip_update_rms,
    ema,
    precondition,
    scale_by_learning_rate,
    trace,
)

__all__ = [
    "GradientTransformation",
    "NoiseAwareTransformation",
    "adam",
    "adamw",
    "add_decayed_weights",
    "chain",
    "clip_update_rms",
    "ema",
    "is_noise_aware",
    "precondition",
    "scale_by_learning_rate",
    "sgd",
    "trace",
]
