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

from opake_lightning.optimizers._adafactor import adafactor
from opake_lightning.optimizers._adam import adam, adamw
from opake_lightning.optimizers._ademamix import ademamix
from opake_lightning.optimizers._chain import NoiseAwareTransformation, chain, is_noise_aware
from opake_lightning.optimizers._factored import factored_precondition
from opake_lightning.optimizers._lion import lion
from opake_lightning.optimizers._precondition import (
    precondition,
    precondition_by_sum,
    rectified_precondition,
    scale_by_past_steps,
)
from opake_lightning.optimizers._radam import radam
from opake_lightning.optimizers._rmsprop import adadelta, adagrad, rmsprop
from opake_lightning.optimizers._schedule_free import (
    average_iterates,
    evaluation_params,
    schedule_free,
)
from opake_lightning.optimizers._sgd import sgd
from opake_lightning.optimizers._stages import (
    add_decayed_weights,
    add_slow_ema,
    clip_update_rms,
    ema,
    interpolated_sign,
    scale_by_learning_rate,
    scale_by_parameter_rms,
    trace,
)

__all__ = [
    "GradientTransformation",
    "NoiseAwareTransformation",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "add_slow_ema",
    "ademamix",
    "average_iterates",
    "chain",
    "clip_update_rms",
    "ema",
    "evaluation_params",
    "factored_precondition",
    "interpolated_sign",
    "is_noise_aware",
    "lion",
    "precondition",
    "precondition_by_sum",
    "radam",
    "rectified_precondition",
    "rmsprop",
    "scale_by_learning_rate",
    "scale_by_parameter_rms",
    "scale_by_past_steps",
    "schedule_free",
    "sgd",
    "trace",
]
