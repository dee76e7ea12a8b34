r"""One kernel for a whole optimizer, where torch has one that does what the stages do.

Every stage that such a kernel could take part of enters its numbers in a :class:`Recipe`; any other
says that there is none. Torch's Adam serves all that divide by the root of accumulated squares,
:math:`v \leftarrow a v + b g^2`. With :math:`\beta_2 = a / (a + b)` it keeps
:math:`v / (a + b)`, which for an average is v; the number of the step sets the debiasing, and ∞ is
none; and a share of the learning rate takes in any further factor.

**Noise is taken off by way of AMSGrad.** Its kernel divides by the root of
:math:`\max(w, v)` for a given w. So :math:`\varphi / a` is taken off v before the call and
:math:`\varphi` given back after it, φ being the noise in the v of this step, and w is the floor.

A kernel rounds in other places than the stages do. The results differ by some 1e-7 of what the
parameters move by; with noise taken off, by some 1e-7 of the v it is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import Tensor

from opake_lightning.optimizers import _compiled

__all__ = ["Moment", "Momentum", "Recipe", "stretch"]

_adam_: Callable[..., None] = cast("Any", torch)._fused_adam_
_adamw_: Callable[..., None] = cast("Any", torch)._fused_adamw_
_adagrad_: Callable[..., None] = cast("Any", torch)._fused_adagrad_
_sgd_: Callable[..., None] = cast("Any", torch)._fused_sgd_

# Elements per call, where several have to be made. Measured: with fewer the calls themselves take
# long, with more the tensors leave the cache in between.
_BLOCK = 1 << 20


def stretch(flats: Sequence[Tensor], most: int, *, share: int) -> int:
    """Elements to take at a time: ``most``, or one in ``share`` of a model for which that is much.

    What is computed on the way then takes little memory beside the model's own.
    """
    return min(most, max(sum(flat.numel() for flat in flats) // share, 1 << 15))


@final
@dataclass(frozen=True, slots=True)
class Momentum:
    """SGD's.

    Attributes:
        trace: Flat tensors.
        decay: What is kept of the old.
        dampening: Share of the gradient that is left out, other than in the first step.
        nesterov: Whether to look ahead.
    """

    trace: Sequence[Tensor]
    decay: float
    dampening: float
    nesterov: bool


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """Accumulated squares, the direction being divided by the root of them.

    Attributes:
        square: Flat tensors.
        keep: What is kept of the old.
        add: What is added of the new.
        weight: v is divided by this first.
        bias_step: The step for which Adam's kernel does so.
        eps: Added to the root.
        gain: Factor of the quotient.
        noise: φ to be taken off v, this step's included.
        least: What is left at least, after the division by ``weight``.
    """

    square: Sequence[Tensor]
    keep: float
    add: float
    weight: float
    bias_step: float
    eps: float
    gain: float = 1.0
    noise: float = 0.0
    least: float = 0.0


@final
@dataclass(slots=True)
class Recipe:
    """The numbers of one update, as the stages enter them.

    Attributes:
        step: Number of updates before this one.
        variance: Of the gradient's noise.
        lr: Learning rate of this step.
        possible: Whether there is a kernel for what was entered so far.
        l2: Coupled weight decay.
        decay: Decoupled weight decay.
        mean: Flat tensors of a debiased average of gradients; None without one.
        mean_decay: Its decay.
        momentum: SGD's, if any.
        moment: Accumulated squares, if any.
        compiled: Whether to try a compiled kernel where noise is taken off.
    """

    step: int
    variance: float
    lr: float
    compiled: bool = False
    possible: bool = True
    l2: float = 0.0
    decay: float = 0.0
    mean: Sequence[Tensor] | None = None
    mean_decay: float = 0.0
    momentum: Momentum | None = None
    moment: Moment | None = None
    _entered: str = ""

    @property
    def takes_noise_off(self) -> bool:
        """Whether there is noise to be taken off accumulated squares."""
        return self.moment is not None and self.moment.noise > 0

    def enter(self, part: str) -> None:
        """Note that ``part`` comes next; kernels do things in one order only."""
        self._entered += part + " "

    def runs_on(self, flats: Sequence[Tensor]) -> bool:
        """Whether there is a kernel for what was entered, and for tensors like these.

        They are on the CPU: there the kernels have been tried, and bring most.
        """
        known = ("l2", "mean", "moment", "momentum", "decay", "lr")
        entered = self._entered.split()
        adam = self.moment is not None and self.momentum is None and not (self.l2 and self.decay)
        # Noise is taken off before the kernel multiplies by what is kept.
        if self.moment is not None and self.moment.noise and not self.moment.keep:
            return False
        sgd = self.moment is None and self.mean is None and not self.decay
        return (
            self.possible
            and entered == [part for part in known if part in entered]
            and entered[-1:] == ["lr"]
            and (adam or sgd)
            and all(flat.device.type == "cpu" for flat in flats)
        )

    def run(self, params: Sequence[Tensor], gradient: Sequence[Tensor]) -> None:
        """Update the state, and apply the update to ``params``, in place."""
        size = stretch(params, _BLOCK, share=16)
        for index, (param, g) in enumerate(zip(params, gradient, strict=True)):
            if not param.numel():
                continue
            if self.moment is None:
                self._sgd(param, g, index)
            elif self._is_adagrad(self.moment):
                self._adagrad(param, g, index, self.moment)
            else:
                self._adam(param, g, index, self.moment, size)

    def fill(
        self, moves: Sequence[Tensor], gradient: Sequence[Tensor], params: Sequence[Tensor] | None
    ) -> None:
        """Update the state, and write the update to ``moves``, which is what zeros become by it."""
        kernel = replace(self, l2=0.0, decay=0.0)
        if self.l2 and params is not None:
            pairs = zip(gradient, params, strict=True)
            gradient = [torch.add(g, param, alpha=self.l2) for g, param in pairs]
        for move in moves:
            move.zero_()
        kernel.run(moves, gradient)
        if self.decay and params is not None:
            for move, param in zip(moves, params, strict=True):
                move.add_(param, alpha=-self.lr * self.decay)

    def _sgd(self, param: Tensor, gradient: Tensor, index: int) -> None:
        momentum = self.momentum
        _sgd_(
            [param], [gradient], [] if momentum is None else [momentum.trace[index]],
            weight_decay=self.l2,
            momentum=0.0 if momentum is None else momentum.decay,
            lr=self.lr,
            dampening=0.0 if momentum is None else momentum.dampening,
            nesterov=momentum is not None and momentum.nesterov,
            maximize=False,
            is_first_step=self.step == 0,
        )  # fmt: skip

    def _is_adagrad(self, moment: Moment) -> bool:
        """Whether torch's kernel for a sum of squares will do."""
        plain = self.mean is None and not self.decay and not moment.noise
        return plain and moment.keep == moment.add == 1

    def _adagrad(self, param: Tensor, gradient: Tensor, index: int, moment: Moment) -> None:
        _adagrad_(
            [param], [gradient], [moment.square[index]], [torch.ones(())],
            lr=self.lr, lr_decay=0.0, weight_decay=self.l2, eps=moment.eps, maximize=False,
        )  # fmt: skip

    def _adam(self, param: Tensor, gradient: Tensor, index: int, moment: Moment, size: int) -> None:
        total, noisy = moment.keep + moment.add, bool(moment.noise)
        if noisy and self.compiled and self._compiled(param, gradient, index, moment):
            return
        gain = moment.gain
        if self.mean_decay and moment.bias_step != self.step + 1:
            gain *= 1 - self.mean_decay**moment.bias_step
            gain /= 1 - self.mean_decay ** (self.step + 1)
        if self.mean is not None and not noisy and total == 1:
            size = param.numel()
        pieces = param.split(size)
        if self.mean is None:
            scratch = torch.zeros_like(pieces[0])
            means = [scratch[: piece.numel()] for piece in pieces]
        else:
            means = list(self.mean[index].split(size))
        most = torch.finfo(param.dtype).max
        floor = min(moment.least * moment.weight / total, most)
        least = torch.full_like(pieces[0], floor) if noisy else pieces[0]
        step = torch.tensor(float(moment.bias_step))
        squares = moment.square[index].split(size)
        for p, g, m, v in zip(pieces, gradient.split(size), means, squares, strict=True):
            if noisy:
                v.sub_(min(moment.noise / moment.keep, most))
                least.fill_(floor)  # the kernel leaves the larger of the two there
            (_adam_ if self.l2 else _adamw_)(
                [p], [g], [m], [v], [least[: p.numel()]] if noisy else [], [step],
                lr=self.lr * gain, beta1=self.mean_decay, beta2=moment.keep / total,
                weight_decay=self.l2 or self.decay / gain, eps=moment.eps,
                amsgrad=noisy, maximize=False,
            )  # fmt: skip
            if total != 1:
                v.mul_(total)
            if noisy:
                v.add_(min(moment.noise, most))

    def _compiled(self, param: Tensor, gradient: Tensor, index: int, moment: Moment) -> bool:
        """Whether a compiled kernel has done it."""
        numbers = _compiled.Numbers(
            l2=self.l2,
            mean_add=1 - self.mean_decay,
            keep=moment.keep,
            add=moment.add,
            noise=moment.noise,
            debias=1 / moment.weight,
            least=moment.least,
            eps=moment.eps,
            rate=self.lr * moment.gain / (1 - self.mean_decay ** (self.step + 1)),
            shrink=1 - self.lr * self.decay,
        )
        mean = None if self.mean is None else self.mean[index]
        return _compiled.run(param, gradient, mean, moment.square[index], numbers)
