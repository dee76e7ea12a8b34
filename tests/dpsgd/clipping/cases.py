"""All model cases, by name."""

from __future__ import annotations

from tests.dpsgd.clipping import (
    cases_attention,
    cases_fooling,
    cases_layers,
    cases_networks,
    cases_raw,
)
from tests.dpsgd.clipping.case import Spec

CASES: dict[str, Spec] = {
    **cases_layers.CASES,
    **cases_networks.CASES,
    **cases_attention.CASES,
    **cases_raw.CASES,
    **cases_fooling.CASES,
}
