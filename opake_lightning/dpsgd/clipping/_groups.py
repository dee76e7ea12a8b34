r"""Groups of parameters, each clipped to a norm of its own.

.. math:: \bar g = \frac{1}{B} \sum_i \sum_k g_i^{(k)}
          \min\!\left(1, \frac{C_k}{\lVert g_i^{(k)} \rVert_2}\right)

with :math:`g^{(k)}` the gradient with respect to the parameters of group k, and zero elsewhere. The
groups share no parameter, so the parts of one example are orthogonal and its contribution has a
norm of at most :math:`\sqrt{\sum_k C_k^2}`, attained when every part is clipped. That is the
sensitivity, and noise is the same on every coordinate, σ times that. (Noise in proportion to C_k in
each group would cost more: the change, divided by its noise, would have norm √K/σ.)

Source: McMahan et al. 2018 (arXiv:1710.06963), per-layer clipping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import optree
from torch import nn

from opake_lightning import _check
from opake_lightning.errors import PrivacyError
from opake_lightning.types import PerGroup

__all__ = ["group_numbers", "names_of", "per_group", "per_layer"]


def per_group(
    bounds: Mapping[str | tuple[str, ...], float], *, default: float | None = None
) -> PerGroup:
    """Clip each group of parameters to its own norm; a ``clipping_norm`` of several numbers.

    A parameter's path is its name in the module (``"layers.1.weight"``), or, in a pytree, the keys
    that lead to it joined by dots. A pattern matches the parameters whose path begins with it, part
    by part: ``"layers.1"`` matches ``layers.1.weight`` and a parameter called ``layers.1``, but not
    ``layers.10.weight``. A part ``*`` stands for exactly one part, whatever it is:
    ``"layers.*.bias"``. Nothing else is special; patterns are no regular expressions.

    Every parameter must belong to exactly one group, and every pattern must match: anything else is
    refused when the parameters are known, before the first step.

    Args:
        bounds: From a pattern, or a tuple of patterns that make one group together, to the group's
            bound C_k, in units of the gradient; > 0.
        default: Bound of one more group, of all parameters that no pattern matches. None refuses
            such parameters.

    Returns:
        What every clipping function and ``DPSGD`` take as ``clipping_norm``. The sensitivity is
        √ΣC_k².

    Raises:
        ValueError: If a bound is not finite and > 0, or a pattern is malformed or given twice.

    >>> per_group({"encoder": 3.0, ("head", "norm"): 4.0}).sensitivity
    5.0
    """
    groups = tuple(
        ((patterns,) if isinstance(patterns, str) else tuple(patterns), bound)
        for patterns, bound in bounds.items()
    )
    return PerGroup(groups, default)


def per_layer(
    clipping_norm: float, params: Any, *, by: Literal["module", "parameter"] = "module"
) -> PerGroup:
    """One group for every layer, with equal bounds that make ``clipping_norm`` together.

    With K groups each has the bound ``clipping_norm`` / √K, so sensitivity and noise are those of
    clipping the whole gradient to ``clipping_norm``.

    Args:
        clipping_norm: The bound C over all groups, in units of the gradient; > 0.
        params: The module, whose parameters with ``requires_grad`` count, or a pytree of tensors.
        by: ``"module"`` puts the parameters that one module holds itself (weight and bias) into one
            group, ``"parameter"`` each into its own.

    Raises:
        ValueError: If ``clipping_norm`` is not finite and > 0, or ``by`` is another word.

    >>> layers = per_layer(2.0, nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
    >>> layers.bounds, layers.groups[0][0]
    ((1.0, 1.0, 1.0, 1.0), ('0.bias', '0.weight'))
    """
    total = _check.positive("clipping_norm", clipping_norm)
    if by not in ("module", "parameter"):
        raise ValueError(f"by must be 'module' or 'parameter', got {by!r}")
    if isinstance(params, nn.Module):
        params = {name: p for name, p in params.named_parameters() if p.requires_grad}
    layers: dict[str, list[str]] = {}
    for name in names_of(optree.tree_structure(params)):
        layers.setdefault(name if by == "parameter" else name.rpartition(".")[0], []).append(name)
    bound = total / math.sqrt(max(len(layers), 1))
    return PerGroup(tuple((tuple(names), bound) for names in layers.values()))


@lru_cache(maxsize=64)
def group_numbers(groups: PerGroup, treespec: optree.PyTreeSpec) -> tuple[int, ...]:
    """Number of the group of each leaf; the group of the default comes last.

    Raises:
        PrivacyError: If a leaf is in no group or two, or a pattern matches nothing.
    """
    names = names_of(treespec)
    patterns = [(p, number) for number, (group, _) in enumerate(groups.groups) for p in group]
    found = [[(p, number) for p, number in patterns if _matches(p, name)] for name in names]
    for name, matches in zip(names, found, strict=True):
        if len(matches) > 1:
            raise PrivacyError(
                f"the parameter {name!r} matches the patterns "
                f"{' and '.join(repr(pattern) for pattern, _ in matches)}; every parameter is "
                "clipped in one group, so make the patterns exclude each other"
            )
    used = {pattern for matches in found for pattern, _ in matches}
    for pattern, _ in patterns:
        if pattern not in used:
            raise PrivacyError(
                f"the pattern {pattern!r} matches no trained parameter; a pattern is the beginning "
                f"of a path, part by part, and the paths are {_some(names)}"
            )
    rest = [name for name, matches in zip(names, found, strict=True) if not matches]
    if rest and groups.default is None:
        raise PrivacyError(
            f"no pattern matches {_some(rest)}; add one, or give per_group(..., default=...), the "
            "bound of a group for the rest"
        )
    if groups.default is not None and not rest:
        raise PrivacyError(
            f"default={groups.default!r} has no parameter left to bound, and would only add noise; "
            "leave it out"
        )
    return tuple(matches[0][1] if matches else len(groups.groups) for matches in found)


def names_of(treespec: optree.PyTreeSpec) -> list[str]:
    """What the leaves are called, in patterns and in messages."""
    paths = optree.treespec_paths(treespec)
    return [".".join(map(str, path)) or "the tensor" for path in paths]


def _matches(pattern: str, name: str) -> bool:
    parts, path = pattern.split("."), name.split(".")
    return len(parts) <= len(path) and all(
        part in ("*", component) for part, component in zip(parts, path, strict=False)
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
