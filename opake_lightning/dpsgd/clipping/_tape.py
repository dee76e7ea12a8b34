"""A tape inside of vmap: which operations a loss uses its parameters in, and with what.

The loss is called on a batch of one row, under ``torch.func.vmap`` over rows. So a tensor of one
example cannot meet one of another, whatever the loss does: that is not checked, it is how it runs.
:class:`Tape` is the function mode inside of that vmap. Where a parameter takes part in an operation
that has a rule, the tape leaves vmap, computes on the tensors of all rows with the parameter
detached, and keeps input and output: each example's gradient follows from the input and the
gradient of the output. Where there is no rule, that one use gets an expanded view of the parameter
for each example, and autograd finds the gradients.

Tensors come in three kinds. *Batched* ones have a row for each example. *Parameters* are leaves and
whatever is computed of leaves and constants alone, such as a slice, a transpose, or a weight that
an adapter was added to. All others are *constants*, the same for all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from opake_lightning import _functorch
from opake_lightning._functorch import outside
from opake_lightning.dpsgd.clipping._draws import drawn_as_before
from opake_lightning.dpsgd.clipping._entries import (
    BODIES,
    CHECKS,
    OF_COPIES,
    ROW_WISE,
    RULES,
    Caution,
    Computed,
    Draws,
    NoData,
    NoRule,
    Retry,
    Rule,
    Use,
    WritesToBatch,
)
from opake_lightning.dpsgd.clipping._fence import Fence, memory_of
from opake_lightning.dpsgd.clipping._functions import (
    IN_FLOAT32,
    INDEXING,
    RANDOM,
    VIEWS,
    body_of,
    in_float32,
    is_basic,
    mapped,
    place_of,
    tensors_in,
    writes,
)
from opake_lightning.dpsgd.clipping._gradients import Gradients, Outer, Places
from opake_lightning.errors import PrivacyError

__all__ = ["Tape"]

# Elements of an output so small that a hook takes longer than to keep its gradient for a while.
_SMALL = 1 << 14


class Tape(TorchFunctionMode):
    """Sees every torch function of a loss; to be entered inside of the vmap over rows.

    Args:
        leaves: The parameters, each requiring a gradient.
        size: Number of examples.
        fence: What the loss may not write to.
        caution: See :class:`Caution`.
        draws: Set if this is a part of a batch: random numbers are those of its rows in the batch.
        wide: A copy of each leaf for each example, as vmap hands it to the loss; needed where
            tensors cannot be seen from inside of vmap.
        batch: Tensors that the loss may not write to: those of the batch, if they are no copies.

    Attributes:
        uses: What was recorded; an entry is taken out when the gradient of its output arrives.
        edges: Of uses whose output is small, where its gradient is in the graph: those the backward
            pass returns all at once. Others arrive one by one, and what they need is let go of.
        copies: Parameters that were expanded, with the expanded view, whose gradient has a row for
            each example.
        failure: What vmap could not run, and where; "" if there was nothing.
        hidden: Where a parameter was used inside of ``torch.func.grad`` of it; "" if nowhere.
        refusal: Why the loss is refused, if something that caught exceptions has hidden it.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        size: int,
        fence: Fence,
        *,
        caution: int = Caution.NONE,
        draws: Draws | None = None,
        wide: Sequence[Tensor] | None = None,
        batch: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self.batch = {memory_of(t) for t in batch if t.numel()}
        self.leaves, self.size, self.fence = list(leaves), size, fence
        self.caution, self.draws, self._wide = caution, draws, wide
        self.uses: list[Use | None] = []
        self.edges: dict[int, GradientEdge] = {}
        self.counts = [0] * len(leaves)
        self.kept_bytes = 0
        self.copies: dict[int, tuple[Computed, Tensor]] = {}
        self.anchors: dict[torch.device, Tensor] = {}
        # Tensors of the batch that the loss wants gradients of; the backward pass goes there too.
        self.tracked: list[Tensor] = []
        # What stands for the sizes of a packed sequence: lengths of examples, or the padded one.
        self.packed: dict[int, tuple[Tensor, Tensor | int]] = {}
        self.found: Callable[[Use, Tensor], None] | None = None
        self.failure = self.stale = self.hidden = ""
        self.refusal: PrivacyError | None = None
        self.level = 0
        self._data: dict[int, Tensor] = {}
        self._used: set[int] = set()
        self.known: dict[int, Computed] = {
            id(leaf): Computed(leaf, frozenset((number,)), isometric=True)
            for number, leaf in enumerate(self.leaves)
        }

    def __enter__(self) -> Any:
        """Start to watch."""
        if not self.level and _functorch.has_private_names():
            self.level = _functorch.level_now()
        kind = self.leaves[0].device.type if self.leaves else "cpu"
        self._narrow = torch.is_autocast_enabled(kind)
        return super().__enter__()

    # -- the mode -------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, seeing what goes in and comes out."""
        kwargs = kwargs or {}
        try:
            return self._call(func, args, kwargs)
        except PrivacyError:
            raise
        except Exception as error:
            # It fails for all rows if it fails for one. A loss that catches that, and goes another
            # way, would let one example decide for the others: it runs alone.
            if not self.failure:
                lines = str(error).splitlines() or [type(error).__name__]
                self.failure = f"{place_of(func)}: {lines[0][:200]}"
            raise

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (check := CHECKS.get(func)) is not None:
            answer = check(self, func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        params: list[Tensor] = []
        self._find(args, params)
        if kwargs:
            self._find(kwargs.values(), params)
        if self._wide is not None:
            run = self._without_rule if params else self._run
            return run(func, args, kwargs)
        if params:
            return self._with_params(func, args, kwargs)
        if _functorch.level_now() != self.level:
            self._note_hidden(func, args)
        elif func in ROW_WISE:
            try:
                return self.by_rule(RULES[func], func, args, kwargs)
            except NoRule:
                pass
        if writes(func) or "out" in kwargs:
            self._check_write(func, args, kwargs)
        if self.draws is not None and func in RANDOM:
            return drawn_as_before(self, func, args, kwargs)
        if not self.caution:
            return self._run(func, args, kwargs)
        tracked = kwargs.pop("requires_grad", False) if type(kwargs) is dict else False
        out = self._own_memory(self._run(func, args, kwargs), args)
        if tracked:
            with self:
                out.requires_grad_()
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._narrow and func in IN_FLOAT32:
            args, kwargs = mapped(args, in_float32), mapped(kwargs, in_float32)
        body = body_of(func)
        if body is None:
            return func(*args, **kwargs)
        if "requires_grad" in func.__code__.co_names:
            # Of what is batched vmap says that nothing requires a gradient.
            with self:
                return body(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # It may ask for a Python value inside, which can be answered where it is seen.
            with self:
                return body(*args, **kwargs)

    def _find(self, values: Iterable[Any], params: list[Tensor]) -> None:
        known = self.known
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in known:
                    params.append(value)
            elif isinstance(value, (tuple, list)):
                self._find(cast("Iterable[Any]", value), params)
            elif isinstance(value, dict):
                self._find(cast("dict[Any, Any]", value).values(), params)

    def _with_params(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if writes(func) or "out" in kwargs:
            self._check_write(func, args, kwargs)
        if _functorch.level_now() != self.level or func in RANDOM:
            return self._without_rule(func, args, kwargs)
        if self.caution >= Caution.NO_RULES:
            batched = self.any_batched((args, kwargs))
            return (self._without_rule if batched else self._compute)(func, args, kwargs)
        rule = RULES.get(func)
        if rule is not None:
            try:
                return self.by_rule(rule, func, args, kwargs)
            except NoData:
                return self._compute(func, args, kwargs)
            except (NoRule, TypeError, IndexError, AttributeError):
                pass  # arguments that the rule does not have; if they are wrong, torch says so
        if not self.any_batched((args, kwargs)):
            return self._compute(func, args, kwargs)
        if (body := BODIES.get(func) or body_of(func)) is not None:
            with self:
                return body(*args, **kwargs)
        return self._without_rule(func, args, kwargs)

    def _note_hidden(self, func: Any, args: tuple[Any, ...]) -> None:
        """Where a transform of the loss's own has wrapped a parameter, to be told if it matters."""
        for value in tensors_in(args):
            inner = value
            while _functorch.is_tracked(inner):
                inner = _functorch.unwrapped(inner)
            if inner is not value and id(inner) in self.known:
                self.hidden = place_of(func)

    # -- what tensors are -----------------------------------------------------------------------

    def is_parameter(self, value: object) -> bool:
        """Whether ``value`` is a leaf, or computed of leaves and constants."""
        return id(value) in self.known

    def is_data(self, value: object) -> bool:
        """Whether ``value``, an argument of a rule, has a row for each example."""
        return id(value) in self._data

    def any_batched(self, values: Any) -> bool:
        """Whether a tensor in ``values``, tuples, lists and dicts, has a row for each example."""
        for value in values.values() if isinstance(values, dict) else values:
            if isinstance(value, Tensor):
                if _functorch.physical_of(value, self.level) is not None:
                    return True
            elif isinstance(value, slice):
                if self.any_batched((value.start, value.stop, value.step)):
                    return True
            elif isinstance(value, (tuple, list, dict)) and self.any_batched(value):
                return True
        return False

    def wrapped(self, out: Any) -> Any:
        """``out``, whose tensors have the examples first, as the loss is to see it."""
        if isinstance(out, Tensor):  # as it mostly is: this is on the way of every operation
            return _functorch.add_batch_dim(out, 0, self.level)
        return mapped(out, self.wrapped)

    # -- rules ----------------------------------------------------------------------------------

    def by_rule(self, rule: Rule, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``rule`` makes of the tensors behind ``args``, outside of vmap."""
        data: dict[int, Tensor] = {}  # kept, so that nothing else gets their ids

        def physical(value: Tensor) -> Tensor:
            inner = _functorch.physical_of(value, self.level)
            if inner is None:
                return value
            data[id(inner)] = inner
            return inner

        # What is computed here is seen by no level, so it must write to nothing.
        with outside():
            args = [physical(a) if isinstance(a, Tensor) else mapped(a, physical) for a in args]
            kwargs = mapped(kwargs, physical) if kwargs else kwargs
            if not data:
                raise NoData
            before, self._data = self._data, data
            try:
                out = rule(self, func, *args, **kwargs)
            finally:
                self._data = before
        return self.wrapped(out)

    def value(self, param: Any) -> Any:
        """``param`` without its graph if it is a parameter, else itself."""
        return param.detach() if id(param) in self.known else param

    def rows(self, value: Tensor, keep: int) -> Tensor:
        """Shape [size, T, last ``keep`` dimensions], T all places of an example."""
        end = value.dim() - keep
        places = value.shape[:end].numel() // self.size
        shape = (self.size, places, *value.shape[end:])
        return value if value.shape == shape else value.reshape(shape)

    def summed(self, value: Tensor, keep: int) -> Places:
        """Gradients that are the sum over all places of an example."""
        return Places(value, self.size, keep)

    def outer(self, a: Tensor, b: Tensor, shape: torch.Size | None = None) -> Outer:
        """Gradients that are the sum of outer products over all places of an example."""
        return Outer(a, b if b.dtype == a.dtype else b.to(a.dtype), self.size, shape)

    def own(self, value: Any) -> Tensor:
        """A tensor, inside of a rule, with a row for each example, whatever it is."""
        if id(value) in self._data:
            return value
        if id(value) in self.known and torch.is_grad_enabled():
            return self._copy_of(value)
        return value.expand(self.size, *value.shape)

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
        known = self.known
        taken = tuple([(known[id(p)], f) for p, f in gradients if id(p) in known])
        if not taken or not torch.is_grad_enabled():
            return output
        if output._is_view():
            # A view that is written to (an in-place ReLU) would leave its place in the graph.
            output = torch.ops.aten._unsafe_view(output, output.shape)
        for computed, _ in taken:
            self._used.add(id(computed.tensor))
            for number in computed.leaves:
                self.counts[number] += 1
        self.kept_bytes += sum([value.nbytes for value in inputs])
        index = len(self.uses)
        self.uses.append(Use(name, taken, tuple([(value, value._version) for value in inputs])))
        if output.requires_grad:
            if output.numel() <= _SMALL:
                self.edges[index] = GradientEdge(cast("Any", output.grad_fn), output.output_nr)
            else:
                output.register_hook(partial(self.arrived, index))
            return output
        return cast("Tensor", _Tap.apply(output, self._anchor(output.device), self, index))

    def arrived(self, index: int, gradient: Tensor) -> None:
        """Hand over the gradient of the output of a use, once, and let go of what it kept."""
        use, self.uses[index] = self.uses[index], None
        if self.found is None or use is None:
            return
        if any(value._version != version for value, version in use.inputs):
            self.stale = use.name
            return
        self.found(use, gradient)

    def close(self) -> None:
        """Let go of everything: what holds the tape is held by it, too."""
        self.found = None
        self.uses.clear()
        self.edges.clear()
        self.known.clear()
        self.copies.clear()
        self.packed.clear()

    def _anchor(self, device: torch.device) -> Tensor:
        """A leaf that every use leads to, so that the backward pass comes through all of them."""
        if device not in self.anchors:
            self.anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self.anchors[device]

    # -- uses without a rule ----------------------------------------------------------------------

    def _without_rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With a copy for each example in place of every parameter."""

        def copy(value: Tensor) -> Tensor:
            return self.copy_for_each(value) if id(value) in self.known else value

        return self._run(OF_COPIES.get(func, func), mapped(args, copy), mapped(kwargs, copy))

    def copy_for_each(self, param: Tensor) -> Tensor:
        """An expanded view of ``param``, a row for each example, as the loss is to see it."""
        if self._wide is not None:
            (number,) = self.known[id(param)].leaves
            return self._wide[number]
        if not torch.is_grad_enabled():
            return param
        # Outside of all levels, those of the loss's own transforms too: so its gradient is that of
        # the whole loss, as any leaf's.
        with outside():
            wide = self._copy_of(param)
        return _functorch.add_batch_dim(wide, 0, self.level)

    def _copy_of(self, param: Tensor) -> Tensor:
        if id(param) not in self.copies:
            computed = self.known[id(param)]
            wide = param.detach().expand(self.size, *param.shape).requires_grad_()
            self.copies[id(param)] = computed, wide
            self._used.add(id(param))
            for number in computed.leaves:
                self.counts[number] += 1
            self.kept_bytes += wide.numel() * wide.element_size()
        return self.copies[id(param)][1]

    # -- what is computed of parameters and constants ---------------------------------------------

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of parameters and constants: its result is a parameter, too."""
        params: list[Tensor] = []
        self._find((args, kwargs), params)
        known = [self.known[id(p)] for p in params]
        target = args[0] if args and writes(func) and isinstance(args[0], Tensor) else None
        if target is not None and id(target) in self._used:
            # What was recorded of it has another value from here on.
            return self._with_more_caution(func, args, kwargs)
        out = self._run(func, args, kwargs)
        leaves = frozenset[int]().union(*[k.leaves for k in known])
        isometric = func in VIEWS or (func in INDEXING and is_basic(args[1]))
        isometric = isometric and len(leaves) == 1 and all(k.isometric for k in known)
        made = [out] if isinstance(out, Tensor) else tensors_in(out)
        if target is not None:
            made.append(target)  # x[...] = w returns nothing
        for value in made:
            if value.is_complex() and value.requires_grad:
                return self._with_more_caution(func, args, kwargs)
            if value.requires_grad and (id(value) not in self.known or writes(func)):
                self.known[id(value)] = Computed(value, leaves, isometric)
        return out

    def _with_more_caution(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.caution < Caution.NO_RULES:
            raise Retry(Caution.NO_RULES)
        return self._without_rule(func, args, kwargs)

    # -- writing ----------------------------------------------------------------------------------

    def _check_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See to it that nothing of an example is written to what all examples share.

        A guarantee depends on it: what a loss saw must not outlive the call, nor reach another
        example. vmap refuses such a write as well, but not in words, and not of every function.
        """
        target = kwargs.get("out", args[0] if args else None)
        targets = [target] if isinstance(target, Tensor) else tensors_in(target)
        for tensor in targets:
            inner = _functorch.physical_of(tensor, self.level)
            if inner is not None:
                if memory_of(inner) in self.batch:
                    raise WritesToBatch
                continue
            if id(tensor) in self.known and tensor.is_leaf:
                raise self.refuse(
                    f"the loss writes to the parameter {self.fence.name_of(tensor)} by "
                    f"{place_of(func)}; only the released gradient may change it"
                )
            if func in RANDOM or self.any_batched((args[1:], kwargs)):
                self._refuse_write(func, tensor)
            self.fence.keep(tensor)

    def _refuse_write(self, func: Any, tensor: Tensor) -> None:
        if self.caution < Caution.WIDE and not self.fence.owns(tensor):
            # Made by the loss, as far as can be seen: let each example have its own.
            raise Retry(Caution.WIDE)
        if self.caution < Caution.NO_RULES and id(tensor) in self.known:
            raise Retry(Caution.NO_RULES)
        raise self.refuse(
            f"the loss writes what an example says into {self.fence.name_of(tensor)}, which "
            f"outlives it, by {place_of(func)}; drop that, compute it on public data, or return it "
            "as an auxiliary output"
        )

    def refuse(self, why: str) -> PrivacyError:
        """The exception to raise; it comes through even if the loss catches it."""
        self.refusal = self.refusal or PrivacyError(why)
        return self.refusal

    def _own_memory(self, out: Any, args: tuple[Any, ...]) -> Any:
        """With caution: a constant that was made just now, in memory of each example's own."""
        if not isinstance(out, Tensor) or out.requires_grad or id(out) in self.known:
            return out
        if (
            _functorch.physical_of(out, self.level) is not None
            or _functorch.level_now() != self.level
        ):
            return out
        where = memory_of(out)
        if where and any(memory_of(a) == where for a in tensors_in(args)):
            return out  # a view, which is written to with its base
        with outside():
            wide = out.expand(self.size, *out.shape).clone()
        wide = _functorch.add_batch_dim(wide, 0, self.level)
        wide._opake_same_for_all = out  # type: ignore[attr-defined]
        return wide


class _Tap(torch.autograd.Function):
    """Passes on a tensor that nothing else gives a graph to, and tells of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, tape: Tape, index: int) -> Tensor:
        """The very tensor: what comes next may write to it."""
        del anchor
        ctx.tape, ctx.index = tape, index
        if not value._is_view():
            ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Hand over the gradient."""
        ctx.tape.arrived(ctx.index, gradients[0])
        return gradients[0], None, None, None
