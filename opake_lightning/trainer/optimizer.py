"""The face that a functional optimizer shows to Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from opake_lightning.trainer._lifecycle import resume
from opake_lightning.trainer._run import Run

__all__ = ["FunctionalOptimizer"]


class FunctionalOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose state is a :class:`Run` and whose step is functional.

    Stepping it is what moves ``trainer.global_step``; its ``param_groups[0]["lr"]`` shows the rate
    of the coming update; its ``state_dict`` is the one place in a checkpoint where the key is, and
    Lightning leaves it out of weights-only files.
    """

    def __init__(self, run: Run, params: dict[str, Tensor]) -> None:
        self._run = run
        super().__init__(list(params.values()), {"lr": float("nan")})
        self._show_rate()

    @classmethod
    def named(cls, name: str) -> type[FunctionalOptimizer]:
        """The same under the name of what it wraps, by which Lightning tells its rate: lr-adamw."""
        return type(name, (cls,), {}) if name else cls

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one release with ``closure`` and apply it.

        Args:
            closure: Returns the released gradient and the loss's auxiliary output.

        Returns:
            The auxiliary output.
        """
        if closure is None:
            raise RuntimeError(
                "a DPModule's optimizer is stepped by its training_step; it cannot be stepped "
                "without a release"
            )
        released, aux = closure()
        self._run.apply(released)
        self._show_rate()
        return aux

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters than the run was made with."""
        if self.param_groups:
            self._refuse_group()
        super().add_param_group(param_group)

    @staticmethod
    def _refuse_group() -> NoReturn:
        raise RuntimeError(
            "parameters cannot be added to a private run: the noise, the clipping norm and the "
            "optimizer state cover the ones it started with. Unfreeze them before fit, or start "
            "another fit"
        )

    def consolidate_state_dict(self) -> None:
        """Called on all ranks before the state is saved, which Lightning then does on one."""
        self._run.consolidate()

    def state_dict(self) -> dict[str, Any]:
        """The run's state: tensors and plain values, the key among them."""
        # With the entries that torch's own optimizers look for, which then say that they differ.
        return {"state": {}, "param_groups": [], "opake_lightning": self._run.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the run.

        Raises:
            CheckpointError: If the state is another optimizer's, or another run's.
        """
        resume(self._run, state_dict.get("opake_lightning"))
        self._show_rate()

    def _show_rate(self) -> None:
        rate = self._run.learning_rate()
        for group in self.param_groups:
            group["lr"] = float("nan") if rate is None else rate
