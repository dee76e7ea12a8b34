"""How the figures and tables of the documentation look."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by everyone; each line has a marker or dash of its own, too.
BLUE, ORANGE, GREEN, RED, PURPLE, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#000000"
)  # fmt: skip
STYLE = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}

Made = tuple[Figure | None, str]


def canvas(n: int = 1, *, height: float = 3.4, share: bool = False) -> tuple[Figure, Any]:
    """A figure with ``n`` panels side by side."""
    figure = Figure(figsize=(7.6 if n > 1 else 5.6, height), layout="constrained")
    return figure, figure.subplots(1, n, sharey=share)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def short(x: float, digits: int = 2) -> str:
    """So many digits."""
    return f"{float(f'{x:.{digits}g}'):g}"


def log_spaced(n: int, per_decade: int = 12) -> list[int]:
    """Step numbers up to ``n``, evenly spaced on a logarithmic axis."""
    return sorted(
        {round(10 ** (i / per_decade)) for i in range(math.ceil(math.log10(n) * per_decade))} | {n}
    )


def mean_error(values: Sequence[float], sign: str = "") -> str:
    """Mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):{sign}.1f} ± {error:.1f}".replace("-", "−")
