"""Watching a loss: which operations it uses its parameters in, with what, and what comes out.

The loss of a batch runs once, under :class:`Recorder`. Every call of a torch function passes
through it. Where a parameter takes part in an operation that has a rule, the operation runs with
the parameter detached, its inputs are kept, and the gradient of its output is asked for. Therefore
a parameter that still gets a gradient in the end was used in a way that was not understood.

Tensors come in three kinds. *Data* depends on the batch; it is marked, and what is computed of it
is marked. *Parameters* are leaves and whatever is computed of leaves and constants alone, such as a
slice, a transpose, or a weight that an adapter was added to. All others are *constants*.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name

from opake_lightning.dpsgd.clipping import _calm
from opake_lightning.dpsgd.clipping._functions import (
    INDEXING,
    ORDERING,
    SPREADING,
    VIEWS,
    body_of,
    is_basic,
    steers,
    writes,
)
from opake_lightning.dpsgd.clipping._gradients import Dense, Gradients
from opake_lightning.dpsgd.clipping._uses import Computed, Unsupported, Use

__all__ = ["Recorder"]

Rule = Callable[..., Any]


class Recorder(TorchFunctionMode):
    """Sees every torch function while it is active.

    Args:
        leaves: The parameters, each requiring a gradient.
        size: Number of examples in the batch.
        rules: From torch function to rule.
        calm: Replace random numbers by fixed ones, and leave dropout out.
        watching: Only see to it that nothing outside of the loss is written to.

    Attributes:
        signature: For each operation with a rule: its name, the leaves in it, and whether its
            output has one row per example, not several.
        counts: How many uses each leaf has.
        path: A hash of all functions that were called, in their order.
        kept_bytes: Memory of the inputs that are kept.
        refusal: Why the loss cannot be done, if something that caught exceptions has hidden it.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        size: int,
        rules: dict[Any, Rule],
        *,
        calm: bool = False,
        watching: bool = False,
    ) -> None:
        super().__init__()
        self.size = size
        self.signature: list[tuple[str, tuple[int, ...], bool]] = []
        self.counts = [0] * len(leaves)
        self.kept_bytes = 0
        self.path = 0
        self._depth = 0
        self.found: Callable[[Use, Tensor], None] | None = None
        self._uses: list[Use | None] = []
        self.refusal: Unsupported | None = None
        self.leaves = list(leaves)
        self.recording = True
        # Where the examples are: 0, or 1 inside of an attention that puts time first.
        self.axis = 0
        self._rules = rules
        # Not the recorder itself: tensors would hold it, and it holds tensors.
        self._mark = object()
        self._calm = calm
        self._watching = watching
        self._eager = contextlib.ExitStack()
        self.anchors: dict[torch.device, Tensor] = {}
        self._known: dict[int, Computed] = {}
        self._originals: dict[tuple[int, torch.Size], Computed] = {}
        for number, leaf in enumerate(leaves):
            self._known[id(leaf)] = Computed(leaf, frozenset((number,)), isometric=True)

    def __enter__(self) -> Any:
        """Start to watch; compiled modules run uncompiled, or the watcher would be compiled too."""
        if "torch._dynamo" in sys.modules:
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Leave compiled modules to their compilers again."""
        super().__exit__(*error)
        self._eager.close()

    def replay(self, originals: Sequence[Tensor]) -> None:
        """From here on record nothing, and take the module's own parameters for the leaves.

        A checkpointed part of the loss runs again during the backward pass, when a functional call
        has put back what it had replaced.
        """
        self.recording = False
        for number, param in enumerate(originals):
            if param.numel():
                own = Computed(param, frozenset((number,)), isometric=True)
                self._originals.setdefault((param.data_ptr(), param.shape), own)

    # -- what tensors are -----------------------------------------------------------------------

    def is_parameter(self, value: object) -> bool:
        """Whether ``value`` is a leaf, or computed of leaves and constants."""
        if id(value) in self._known:
            return True
        if self.recording or not isinstance(value, Tensor) or not value.requires_grad:
            return False
        original = self._originals.get((value.data_ptr(), value.shape))
        if original is None:
            return False
        # A part that runs again may have its parameters from another hand, in the same memory.
        self._known[id(value)] = replace(original, tensor=value)
        return True

    def is_data(self, value: object) -> bool:
        """Whether ``value`` depends on the batch."""
        if self.recording or not isinstance(value, Tensor):
            return getattr(value, "_opake_data", None) is self._mark
        # A checkpointed part that runs again has lost its marks: all that it did not make itself.
        return not self.is_parameter(value) and not self._is_made(value)

    def _is_made(self, value: object) -> bool:
        """Whether ``value`` was made during the loss, of constants."""
        return getattr(value, "_opake_made", None) is self._mark

    def mark(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as data."""
        if isinstance(value, Tensor):
            value._opake_data = self._mark  # type: ignore[attr-defined]
        elif isinstance(value, (tuple, list)):
            for item in cast("Iterable[Any]", value):
                self.mark(item)
        return value

    def refuse(self, why: str) -> Unsupported:
        """The exception to raise."""
        self.refusal = Unsupported(why)
        return self.refusal

    def name_of(self, *params: Any) -> str:
        """Numbers of the leaves behind ``params``, for a message."""
        numbers = {n for p in params if id(p) in self._known for n in self._known[id(p)].leaves}
        return ", ".join(f"{{{number}}}" for number in sorted(numbers))

    # -- for rules ------------------------------------------------------------------------------

    def value(self, param: Any) -> Any:
        """``param`` without its graph if it is a parameter, else itself."""
        return param.detach() if self.is_parameter(param) else param

    def per_example(self, value: Tensor) -> Tensor:
        """``value`` with shape [size, k, ...], where its rows are those of the examples k by k."""
        if not self.axis:
            return value.unflatten(0, (self.size, -1))
        if value.dim() > 2 and value.shape[1] == self.size:
            return value.transpose(0, 1)
        return value.unflatten(0, (-1, self.size)).transpose(0, 1)

    def require_data(self, value: Any, name: str) -> None:
        """Refuse an operation whose input is not of the batch, or has rows of no example."""
        if not self.is_data(value) or self.is_parameter(value):
            raise self.refuse(f"{name} combines parameters with the batch in an unknown way")
        self.require_rows(value, name)

    def require_rows(self, value: Tensor, name: str) -> None:
        """Refuse a tensor whose first dimension is not made of the examples' rows."""
        if self.axis and value.dim() > 2 and value.shape[1] == self.size:
            return
        if not value.dim() or not len(value) or len(value) % self.size:
            raise self.refuse(
                f"{name} has a tensor of shape {tuple(value.shape)} where {self.size} examples "
                "come first"
            )

    def record(
        self,
        name: str,
        output: Tensor,
        gradients: Sequence[tuple[Any, Callable[[Tensor], Gradients]]],
        *inputs: Tensor,
    ) -> Tensor:
        """Keep a use and return the output to go on with.

        Args:
            name: Of the operation.
            output: What it returned, from detached parameters.
            gradients: Pairs of an argument and the function that makes its examples' gradients
                from that of ``output``. Arguments that are not parameters are left out.
            inputs: Tensors that the functions use.
        """
        taken = tuple([(self._known[id(p)], f) for p, f in gradients if self.is_parameter(p)])
        if not taken or not torch.is_grad_enabled():
            return self.mark(output)
        self.require_rows(output, name)
        if output._is_view():
            # A view that is written to (an in-place ReLU) would leave its place in the graph.
            output = torch.ops.aten._unsafe_view(output, output.shape)
        index = len(self._uses)
        if self.recording:
            numbers = tuple([n for p, _ in taken for n in sorted(p.leaves)])
            self.signature.append((name, numbers, len(output) == self.size))
            for number in numbers:
                self.counts[number] += 1
            self.kept_bytes += sum(value.nbytes for value in inputs)
            kept = tuple([(value, value._version) for value in inputs])
            self._uses.append(Use(name, taken, kept, self.axis))
        output = cast("Tensor", _Tap.apply(output, self._anchor(output.device), self, index))
        return self.mark(output)

    def arrived(self, index: int, gradient: Tensor) -> None:
        """Hand over the gradient of the output of a use, once, and let go of what it kept."""
        use, self._uses[index] = self._uses[index], None
        assert use is not None
        assert self.found is not None
        if any(value._version != version for value, version in use.inputs):
            raise self.refuse(f"the input of {use.name} was changed in place afterwards")
        axis, self.axis = self.axis, use.axis
        with cast("Any", torch)._C.DisableTorchFunction():  # this is not the loss
            self.found(use, gradient)
        self.axis = axis

    def close(self) -> None:
        """Let go of everything: what holds the recorder is held by it, too."""
        self.found = None
        self._uses.clear()
        self._known.clear()
        self._originals.clear()

    def _anchor(self, device: torch.device) -> Tensor:
        """A leaf that every use leads to, so that the backward pass comes through all of them."""
        if device not in self.anchors:
            self.anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self.anchors[device]

    def spread(
        self, param: Tensor, shape: Sequence[int], name: str, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A copy of ``param`` for each example, broadcast to ``shape``."""
        axis = self.axis
        if len(shape) == param.dim() > axis and param.shape[axis] == shape[axis] != 1:
            raise self.refuse(f"{name} has a row of a parameter for each example")
        output = param.detach().to(dtype or param.dtype).expand(tuple(shape))
        own = (1,) * (len(shape) - param.dim()) + tuple(param.shape)

        def gradients(gradient: Tensor) -> Gradients:
            if axis:
                # Time first: the dimension of the examples is one of 1 in the parameter.
                rows = gradient.transpose(0, axis)
                sizes = (*own[axis::-1][:1], *own[1:axis], *own[:1], *own[axis + 1 :])
            else:
                rows, sizes = self.per_example(gradient), (1, *own)
            summed = [d for d, n in enumerate(sizes) if d and n == 1 and rows.shape[d] != 1]
            values = rows.sum(summed) if summed else rows
            return Dense(values.reshape(self.size, *param.shape))

        return self.record(name, output, [(param, gradients)])

    # -- the mode -------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, seeing what goes in and comes out."""
        del types
        kwargs = kwargs or {}
        params: list[Tensor] = []
        kinds: list[int] = []
        data = _look((args, kwargs.values()) if kwargs else args, self, params, kinds)
        if not self._depth:
            # What a tensor is taken for is part of what has to be tried out; so is which dimensions
            # change places.
            order = str(args[1:]) if func in ORDERING else ""
            self.path = hash((self.path, func, tuple(kinds), order))
        if self._calm and (calm := _calm.REPLACED.get(func)) is not None:
            out = calm(func, *args, **kwargs)
            return self.mark(out) if data else out
        if not params:
            return self._without(func, args, kwargs, data=data)
        if not data:
            return self._compute(func, args, kwargs, params)
        rule = self._rules.get(func)
        if rule is not None:
            try:
                return rule(self, func, *args, **kwargs)
            except (TypeError, IndexError, AttributeError) as error:
                # Arguments by name, or others that the rule does not have. If they are wrong,
                # another engine will say so.
                raise self.refuse(f"{_name(func)} was called in an unknown way") from error
        if (body := body_of(func)) is not None:
            with self._inside(), self._time_first(func, args, kwargs):
                return body(*args, **kwargs)
        raise self.refuse(f"{_name(func)} of parameter {self.name_of(*params)} has no rule")

    @contextlib.contextmanager
    def _inside(self) -> Generator[None]:
        """Active again, within a function that is taken apart."""
        self._depth += 1
        try:
            with self:
                yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def _time_first(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Generator[None]:
        """Attention swaps time and examples, whatever its module was given."""
        before = self.axis
        if func is functional.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            if query.dim() != 3 or query.shape[1] != self.size:
                raise self.refuse(f"attention has a query of shape {tuple(query.shape)}")
            self.axis = 1
        try:
            yield
        finally:
            self.axis = before

    def _without(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, data: bool
    ) -> Any:
        """An operation without parameters."""
        statistics = func in (functional.batch_norm, functional.instance_norm)
        if (self._calm or statistics) and (body := body_of(func)) is not None:
            with self._inside():
                return self.mark(body(*args, **kwargs)) if data else body(*args, **kwargs)
        target = kwargs.get("out", args[0] if args and writes(func) else None)
        if func in (torch.batch_norm, torch.instance_norm) and args[5]:
            target = args[3]  # the running mean
        if isinstance(target, Tensor) and not (self.is_data(target) or self._is_made(target)):
            raise self.refuse(
                f"{_name(func)} writes to a tensor from outside the loss, such as a buffer"
            )
        if not data:
            return self._constant(func, args, func(*args, **kwargs))
        if func is torch.autograd.grad:
            raise self.refuse("the loss takes a gradient of its own, with respect to the batch")
        if self._watching:
            out = func(*args, **kwargs)
        else:
            if steers(func, args, kwargs):
                raise self.refuse(
                    f"{_name(func)} makes Python or shapes depend on the batch's values"
                )
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and not out.dim():
                raise self.refuse(
                    f"{_name(func)} makes one number of the whole batch, where each example should "
                    'have its own (a loss, as with reduction="none")'
                )
        if func is Tensor.__setitem__:
            self.mark(args[0])
        return self.mark(out) if isinstance(out, (Tensor, tuple, list)) else out

    def _constant(self, func: Any, args: tuple[Any, ...], out: Any) -> Any:
        """What was computed of constants is one, unless it was given a row for each example."""
        if isinstance(out, (tuple, list)):
            for value in _tensors(out):
                value._opake_made = self._mark  # type: ignore[attr-defined]
        if not isinstance(out, Tensor) or any(out is arg for arg in args):
            return out
        if func in SPREADING:
            many = out.dim() > self.axis and out.shape[self.axis] == self.size
            source = args[0].shape if isinstance(args[0], Tensor) else ()
            own = (1,) * (out.dim() - len(source)) + tuple(source)
            many = many and own[self.axis] != self.size
        else:
            # Indices that were made for each example; other numbers may have any shape.
            made = not any(isinstance(arg, Tensor) for arg in args)
            indices = made and not out.is_floating_point() and out.dim() > 1
            many = indices and out.shape[0] == self.size
        if many:
            return self.mark(out)
        out._opake_made = self._mark  # type: ignore[attr-defined]
        return out

    def _compute(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: list[Tensor]
    ) -> Any:
        """An operation of parameters and constants: its result is a parameter, too."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.requires_grad and not self.is_parameter(value):
                raise self.refuse(
                    f"{_name(func)} combines parameter {self.name_of(*params)} with a tensor that "
                    "has a gradient of unknown origin"
                )
        if func in SPREADING:
            try:
                shape = SPREADING[func](*args, **kwargs)
            except TypeError as error:
                raise self.refuse(f"{_name(func)} was called in an unknown way") from error
            own = (1,) * (len(shape) - params[0].dim()) + tuple(params[0].shape)
            if len(shape) > self.axis and shape[self.axis] == self.size != own[self.axis]:
                return self.spread(params[0], shape, _name(func))
        versions = [p._version for p in params]
        out = func(*args, **kwargs)
        if [p._version for p in params] != versions:
            raise self.refuse(
                f"{_name(func)} writes to parameter {self.name_of(*params)} during the loss"
            )
        isometric = func in VIEWS or (func in INDEXING and is_basic(args[1]))
        known = [self._known[id(p)] for p in params]
        leaves = frozenset[int]().union(*[k.leaves for k in known])
        isometric = isometric and len(leaves) == 1 and all(k.isometric for k in known)
        for value in (out,) if isinstance(out, Tensor) else _tensors(out):
            if value.is_complex():
                raise self.refuse(f"{_name(func)} makes a complex parameter")
            if value.requires_grad and id(value) not in self._known:
                self._known[id(value)] = Computed(value, leaves, isometric)
        return out


class _Tap(torch.autograd.Function):
    """Passes on a tensor, and tells of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, recorder: Recorder, index: int) -> Tensor:
        del anchor
        ctx.told = recorder, index
        if not value._is_view():
            # The very tensor: what comes next may write to it.
            ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recorder, index = ctx.told
        recorder.arrived(index, gradients[0])
        return gradients[0], None, None, None


def _look(
    values: Iterable[Any], recorder: Recorder, params: list[Tensor], kinds: list[int]
) -> bool:
    """Put parameters among ``values`` into ``params`` and kinds of tensors into ``kinds``.

    Returns:
        Whether there are data.
    """
    data = False
    for value in values:
        if isinstance(value, Tensor):
            if recorder.is_parameter(value):
                params.append(value)
                kinds.append(2)
            elif recorder.is_data(value):
                data = True
                kinds.append(1)
            else:
                kinds.append(0)
        elif isinstance(value, (tuple, list)) or type(value) in _VALUES:
            data = _look(cast("Iterable[Any]", value), recorder, params, kinds) or data
        elif isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            data = _look(ends, recorder, params, kinds) or data
    return data


_VALUES = (type({}.values()),)


def _tensors(value: Any) -> list[Tensor]:
    if not isinstance(value, (tuple, list)):
        return []
    return [item for item in cast("Iterable[Any]", value) if isinstance(item, Tensor)]


def _name(func: Any) -> str:
    return resolve_name(func) or getattr(func, "__name__", repr(func))
