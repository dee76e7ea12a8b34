"""Training without privacy, said out loud."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from opake_lightning.accounting import GaussianEvent
from opake_lightning.dpsgd.noise import NoiseState
from opake_lightning.optimizers import GradientTransformation
from opake_lightning.random import RngKey
from opake_lightning.step import Step, mean_grad, no_noise

__all__ = ["NonPrivate"]


@dataclass(frozen=True, slots=True)
class NonPrivate:
    """No clipping, no noise, no sampling: ordinary training, reported as ε = ∞.

    The user's loader is left as it is and the gradient is the mean over the batch at hand, so a
    run equals the same module trained by Lightning with the matching torch optimizer. It is its own
    mechanism, having nothing to resolve.
    """

    target_delta: ClassVar[float] = 1e-5
    private: ClassVar[bool] = False
    key: ClassVar[None] = None
    key_in_checkpoint: ClassVar[bool] = True  # there is no noise that it could give away
    on_changed_plan: ClassVar[str] = "refuse"
    noise_multiplier: ClassVar[float] = 0.0

    @property
    def event(self) -> GaussianEvent:
        """A step without noise."""
        return GaussianEvent(0.0, 1.0)

    def fingerprint(self) -> dict[str, str | int | float | None]:
        """What must be equal for a run to go on."""
        return {"plan": "NonPrivate"}

    def public(self) -> dict[str, str | int | float | None]:
        """What may be published with the weights."""
        return {"plan": "NonPrivate", "target_delta": self.target_delta}

    def step(
        self,
        loss_fn: Callable[..., Any],
        optimizer: GradientTransformation,
        key: RngKey,
        params: Any = None,
    ) -> Step:
        """The step function for ``loss_fn(params, batch) -> (losses, aux)``."""
        del params
        state = NoiseState(key)
        return Step(mean_grad(loss_fn), no_noise, optimizer, None, state, seed_forward=False)
