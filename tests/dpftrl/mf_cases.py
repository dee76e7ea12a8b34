"""Strategies of every kind, and noise taken apart into the draws it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from opake_lightning._tree import layout_of, pack
from opake_lightning.dpftrl.noise import (
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
    mf_gaussian_noise,
)
from opake_lightning.random import RngKey, add_normal_, fold_in, key
from opake_lightning.types import ClippedPytree

DATA = json.loads((Path(__file__).parent.parent / "data" / "mf_noise.json").read_text())
STRATEGIES = {
    "identity": identity_strategy(),
    "band_mf": band_mf_strategy(bands=4),
    "band_mf momentum": band_mf_strategy(bands=3, momentum=0.9, error="max"),
    "blt": blt_strategy(n_buffers=2),
    "bsr": bsr_strategy(5, momentum=0.9),
    "bsr normalized": bsr_strategy(4, normalized=True),
    "bisr": bisr_strategy(4, momentum=0.5),
    "bisr normalized": bisr_strategy(4, normalized=True),
    "lambda_cgd": lambda_cgd_strategy(0.9),
    "lambda_cgd normalized": lambda_cgd_strategy(0.9, normalized=True),
}
# Those whose noise follows from few draws.
FROM_DRAWS = ("identity", "bisr", "bisr normalized", "lambda_cgd", "lambda_cgd normalized")


def template() -> dict[str, Any]:
    """Nested, with leaves of three types, one without elements and one without dimensions."""
    return {
        "layer": {"weight": torch.zeros(3, 4), "bias": torch.zeros(4, dtype=torch.float64)},
        "head": (torch.zeros(()), torch.zeros(0, 3), torch.zeros(2, 5, dtype=torch.float64)),
        "narrow": torch.zeros(7, dtype=torch.bfloat16),
        "none": None,
    }


def draws(rng: RngKey, tree: Any, step: int, word: str = "") -> list[Tensor]:
    """z of a step: one flat tensor for each type of the leaves."""
    stream = fold_in(fold_in(rng, "mf_gaussian"), step)
    stream = fold_in(stream, word) if word else stream
    empty = [torch.zeros_like(flat) for flat in pack(tree, layout_of(tree))]
    return [add_normal_(fold_in(stream, i), flat, 1.0) for i, flat in enumerate(empty)]


def flats(tree: Any) -> list[Tensor]:
    return pack(tree, layout_of(tree))


def released(noise_fn: Any, state: Any, n: int, tree: Any, sensitivity: float = 1.0) -> Any:
    """(noised gradients of n steps of zeros, state after them)."""
    out = []
    for _ in range(n):
        noised, state = noise_fn(ClippedPytree(zeros_like(tree), sensitivity), state)
        out.append(noised)
    return out, state


def zeros_like(tree: Any) -> Any:
    return optree.tree_map(torch.zeros_like, tree)


def noise(name: str, n: int, tree: Any, *, sigma: float = 1.0, seed: int = 7, **more: Any) -> Any:
    return mf_gaussian_noise(
        tree, STRATEGIES[name], n_steps=n, noise_multiplier=sigma, key=key(seed), **more
    )
