"""All model cases, by name."""

from __future__ import annotations

import importlib

from tests.dpsgd.clipping.case import Spec

FILES = (
    "layers", "products", "conv", "tables", "norms", "transformers", "recurrent", "arithmetic",
    "derived", "python", "writes", "autograd", "functions", "losses", "distributions",
    "networks", "attention", "raw", "fooling",
)  # fmt: skip
CASES: dict[str, Spec] = {}
for _file in FILES:
    _more = importlib.import_module(f"tests.dpsgd.clipping.cases_{_file}").CASES
    assert not CASES.keys() & _more.keys(), CASES.keys() & _more.keys()
    CASES |= _more
