"""Every figure and every measured number of docs/optimizers.md and docs/correlated_noise.md.

    python benchmarks/figures.py                    # all; minutes, nearly all of them for training
    python benchmarks/figures.py --only adagrad     # one of them
    python benchmarks/figures.py --only digits --draw   # from the measurements of last time

All from fixed keys. A figure goes to docs/images/PAGE-NAME.png and its table into the page, between
the comments ``<!-- figures.py NAME -->`` and ``<!-- end -->``. `digits` and `accuracy` train.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import correlated
import digits_runs
import matplotlib as mpl
import torch
from digits_runs import FLOORS, corrected
from drawing import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    STYLE,
    Made,
    canvas,
    log_spaced,
    mean_error,
    short,
    table,
)
from torch import Tensor

from opake_lightning.optimizers import (
    GradientTransformation,
    adadelta,
    adafactor,
    adagrad,
    adamw,
    ademamix,
    lion,
    radam,
    rmsprop,
    schedule_free,
    sgd,
)
from opake_lightning.random import add_normal_, fold_in, key
from opake_lightning.types import NoisedPytree

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"

SIGMA = 0.012  # noise on a coordinate of the gradient in the runs on digits


def follow(
    optimizer: GradientTransformation, gradient: Tensor, steps: int, *, sigma: float = SIGMA
) -> Iterator[tuple[int, Tensor, Tensor, Any]]:
    """Steps on a constant gradient plus noise: number, noisy gradient, update, state."""
    params = torch.zeros_like(gradient)
    state = optimizer.init(params)
    for step in range(1, steps + 1):
        flat = add_normal_(fold_in(key(1), step), torch.zeros(gradient.numel()), sigma)
        noisy = gradient + flat.view_as(gradient)
        update, state = optimizer.update(NoisedPytree(noisy, sigma), state, params=params)
        yield step, noisy, update, state


def levels(ratios: Sequence[float], copies: int) -> Tensor:
    """A row of ``copies`` coordinates for each ratio of gradient to noise."""
    return torch.tensor(ratios).unsqueeze(1).expand(-1, copies).contiguous() * SIGMA


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.square().mean().sqrt())


def second_moment() -> Made:
    """Adam's second moment with and without the noise taken off."""
    ratios, steps = (0.1, 0.3, 1.0, 3.0), 2000
    figure, axes = canvas(2, share=True)
    final = []
    for axis, title, options in (
        (axes[0], "as it is", {}),
        (axes[1], "noise taken off", corrected(gamma=1e-4 * SIGMA**2)),
    ):
        optimizer = adamw(1.0, betas=(0.0, 0.999), weight_decay=0.0, **options)
        marks, lines = log_spaced(steps), []
        for step, noisy, update, _ in follow(optimizer, levels(ratios, 400), steps):
            if step in marks:  # the update is -noisy / sqrt(v)
                v = (noisy / update).square() / SIGMA**2
                lines.append(v.quantile(torch.tensor([0.1, 0.5, 0.9]), dim=1))
        low, middle, high = torch.stack(lines).unbind(1)
        looks = zip((BLUE, ORANGE, GREEN, RED), "os^D", strict=True)
        for i, (ratio, (colour, marker)) in enumerate(zip(ratios, looks, strict=True)):
            label = f"g = {ratio:g} σ"
            axis.plot(
                marks, middle[:, i], color=colour, marker=marker, ms=4, markevery=4, label=label
            )
            axis.axhline(ratio**2, color=colour, ls=":", lw=1.2)
        axis.set(xscale="log", yscale="log", xlabel="step", title=title, ylim=(7e-5, 30))
        final.append(
            [
                f"{short(m)} ({short(a)} to {short(b)})"
                for a, m, b in zip(low[-1], middle[-1], high[-1], strict=True)
            ]
        )
    axes[0].set_ylabel("second moment / σ² (median)")
    axes[0].plot([], [], color="gray", ls=":", label="without noise: g²")
    axes[0].legend(loc="lower left")
    rows = [[f"{r:g}", f"{r * r:g}", *pair] for r, *pair in zip(ratios, *final, strict=True)]
    return figure, table(["g / σ", "g² / σ²", "v̂ / σ², as it is", "noise taken off"], rows)


LOOKS = dict(
    zip(FLOORS, zip((BLACK, BLUE, GREEN, ORANGE, PURPLE, RED), "os^DvX", strict=True), strict=True)
)


def floor() -> Made:
    """How far a coordinate moves, by how much of its gradient is noise."""
    steps, last = 180, 50
    ratios = [0.0, *(10 ** (i / 8) for i in range(-16, 7))]
    figure, axis = canvas(height=3.8)
    rows = []
    for name, options in FLOORS.items():
        colour, marker = LOOKS[name]
        optimizer = adamw(1.0, weight_decay=0.0, **options)
        kept, largest = torch.zeros(len(ratios)), 0.0
        for step, _, update, _ in follow(optimizer, levels(ratios, 400), steps):
            largest = max(largest, float(update[0].abs().max()))
            if step > steps - last:
                kept += update.square().mean(1) / last
        moves = kept.sqrt()
        axis.plot(ratios[1:], moves[1:], color=colour, marker=marker, ms=4, markevery=2, label=name)
        rows.append([name, *(short(float(moves[i])) for i in (0, 9, 17)), short(largest)])
    axis.set(xscale="log", yscale="log", xlabel="gradient / noise, g / σ")
    axis.set_ylabel("move per step / lr (RMS)")
    axis.legend(loc="upper right", bbox_to_anchor=(1, 0.97))
    head = ["floor", "g = 0", "g = 0.1 σ", "g = σ", "largest move at g = 0"]
    return figure, table(head, rows)


def scatter() -> Made:
    """How exactly the noise can be taken off after some number of steps."""
    marks, rows = (1, 10, 100, 1000, 10000), []
    optimizer = adamw(1.0, weight_decay=0.0, **corrected())
    for step, _, _, state in follow(optimizer, levels([0.0], 2000), marks[-1]):
        if step in marks:
            moment, weight = state["second_moment"], 1 - 0.999**step
            left = (moment.square - moment.noise) / weight / SIGMA**2
            rows.append(
                [f"{step}", short(rms(left)), f"{100 * float((left < 0).float().mean()):.0f} %"]
            )
    return None, table(["step", "scatter of v̂ − φ̂, / σ²", "below zero"], rows)


def adagrad_sum() -> Made:
    """The sum of squares that Adagrad divides by, and what is left of its steps."""
    ratio, steps = 0.3, 3000
    figure, axes = canvas(2)
    marks = log_spaced(steps)
    rows = []
    for name, options, colour, dash in (
        ("no correction", {}, BLACK, "-"),
        ("r = 0.1", corrected(0.1), GREEN, "-."),
        ("γ = 1e-6", corrected(0.0, 1e-6), PURPLE, ":"),
    ):
        sums, moves, largest = [], [], 0.0
        for step, noisy, update, _ in follow(
            adagrad(1.0, **options), levels([ratio, 0], 1000), steps
        ):
            largest = max(largest, float(update[1].abs().max()))
            if step in marks:
                sums.append(float((noisy / update).square()[0].median()) / SIGMA**2)
                moves.append(rms(update[1]))
        axes[0].plot(marks, sums, color=colour, ls=dash, label=name)
        axes[1].plot(marks, moves, color=colour, ls=dash, label=name)
        rows.append([name, short(sums[-1]), short(moves[-1]), short(largest)])
    axes[0].plot(marks, [ratio**2 * t for t in marks], color=BLUE, ls="--", label="Σ g², no noise")
    axes[0].set(xscale="log", yscale="log", xlabel="step", title="g = 0.3 σ")
    axes[0].set_ylabel("sum of squares / σ² (median)")
    axes[1].set(xscale="log", yscale="log", xlabel="step", title="g = 0")
    axes[1].set_ylabel("move per step / lr (RMS)")
    axes[0].legend(loc="upper left")
    head = [f"step {steps}", "sum / σ² at g = 0.3 σ", "move / lr at g = 0", "largest move at g = 0"]
    return figure, table(head, rows)


def radam_warmup() -> Made:
    """RAdam's first steps on noise alone, next to Adam's."""
    steps = 3000
    figure, axis = canvas()
    marks, rows = [1, 5, 6, 20, 180, 1000, 3000], []
    for name, make, options, colour, dash in (
        ("adamw", adamw, {"weight_decay": 0.0}, BLACK, "-"),
        ("radam", radam, {}, BLUE, "--"),
        ("radam, r = 0.1", radam, corrected(0.1), GREEN, "-."),
    ):
        moves = [rms(u) for _, _, u, _ in follow(make(1.0, **options), levels([0.0], 2000), steps)]
        axis.plot(range(1, steps + 1), moves, color=colour, ls=dash, label=name)
        rows.append([name, *(short(moves[t - 1]) for t in marks)])
    axis.set(xscale="log", yscale="log", xlabel="step", ylabel="move per step / lr (RMS), g = 0")
    axis.legend(loc="lower right")
    return figure, table(["step", *map(str, marks)], rows)


def adadelta_feedback() -> Made:
    """Adadelta on noise alone: what is floored below feeds what is above."""
    steps = 2000
    figure, axis = canvas()
    rows = []
    for name, options, colour, dash in (
        ("no correction", {}, BLACK, "-"),
        ("r = 1 (default)", corrected(1.0), BLUE, "--"),
        ("r = 0.1", corrected(0.1), GREEN, "-."),
        ("r = 0.01", corrected(0.01), ORANGE, (0, (5, 1, 1, 1, 1, 1))),
        ("γ = 1e-6", corrected(0.0, 1e-6), PURPLE, ":"),
    ):
        optimizer = adadelta(1.0, **options)
        moves = [rms(u) for _, _, u, _ in follow(optimizer, torch.zeros(1000), steps, sigma=1.0)]
        axis.plot(range(1, steps + 1), moves, color=colour, ls=dash, label=name)
        rows.append([name, *(short(moves[t - 1]) for t in (10, 180, 2000))])
    axis.set(xscale="log", yscale="log", xlabel="step", ylabel="move per step / lr (RMS), g = 0")
    axis.legend(loc="upper left", bbox_to_anchor=(0, 0.85))
    return figure, table(["", "step 10", "step 180", "step 2000"], rows)


def schedule_free_noise() -> Made:
    """Noise in the average x, next to the noise in the last iterate of SGD."""
    steps, n = 3000, 2000
    marks = log_spaced(steps)
    figure, axis = canvas(height=3.8)
    rows = []
    for curvature, colour, marker in (
        (0.0, RED, "o"),
        (0.01, ORANGE, "s"),
        (0.1, GREEN, "^"),
        (1.0, BLUE, "v"),
    ):
        reduction = []
        plain, averaged = sgd(1.0), schedule_free(sgd(1.0), beta=0.9)
        w, y = torch.zeros(n), torch.zeros(n)
        plain_state, state = plain.init(w), averaged.init(y)
        for step in range(1, steps + 1):
            noise = add_normal_(fold_in(key(1), step), torch.zeros(n), 1.0)
            u, plain_state = plain.update(curvature * w + noise, plain_state, params=w)
            w = w + u
            u, state = averaged.update(curvature * y + noise, state, params=y)
            y = y + u
            if step in marks:
                reduction.append(rms(w) / rms(state.x))
        axis.plot(
            marks,
            reduction,
            color=colour,
            marker=marker,
            ms=4,
            markevery=3,
            label=f"lr · curvature = {curvature:g}",
        )
        rows.append(
            [f"{curvature:g}", *(f"{reduction[marks.index(t)]:.2f}" for t in (10, 100, 1000))]
        )
    axis.plot(marks, [t**0.5 for t in marks], color=BLACK, ls=":", label="√n")
    axis.set(xscale="log", yscale="log", xlabel="steps n", ylabel="noise in SGD's w / noise in x")
    axis.legend(loc="upper left")
    rows.append(["√n", *(f"{t**0.5:.2f}" for t in (10, 100, 1000))])
    return figure, table(["lr · curvature", "n = 10", "n = 100", "n = 1000"], rows)


def adamax_max() -> Made:
    """What a running maximum keeps of the noise, and what of the gradient."""
    ratios = [10 ** (i / 6) for i in range(-12, 7)]
    gradient = levels([0.0, *ratios], 400)
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    reference = torch.optim.Adamax([weight], lr=0.0)
    optimizer = adamw(1.0, betas=(0.0, 0.999), weight_decay=0.0, **corrected(gamma=1e-4 * SIGMA**2))
    below = torch.zeros(())
    for _, noisy, update, _ in follow(optimizer, gradient, 3000):
        weight.grad = noisy
        reference.step()
        below = (noisy / update).abs() / SIGMA
    at = torch.tensor([0.1, 0.5, 0.9])
    figure, axis = canvas()
    rows = {}
    for name, values, colour in (
        ("Adamax's maximum", reference.state[weight]["exp_inf"] / SIGMA, RED),
        ("√(v̂ − φ̂) of adamw", below, BLUE),
    ):
        low, middle, high = values.quantile(at, dim=1)
        axis.fill_between(ratios, low[1:], high[1:], color=colour, alpha=0.2, lw=0)
        axis.plot(ratios, middle[1:], color=colour, label=name)
        rows[name] = [short(float(x)) for x in (middle[0], middle[7], middle[13], middle[-1])]
    axis.plot(ratios, ratios, color=BLACK, ls=":", label="g")
    axis.set(xscale="log", yscale="log", xlabel="gradient / noise, g / σ", ylabel="denominator / σ")
    axis.legend(loc="lower right")
    head = ["denominator / σ", "g = 0", "g = 0.1 σ", "g = σ", "g = 10 σ"]
    return figure, table(head, [[name, *row] for name, row in rows.items()])


def walk() -> Made:
    """How far 500 steps take a coordinate with a gradient, and one of noise alone."""
    off = {"weight_decay": 0.0}
    rows = []
    for name, optimizer in {
        "`sgd`, momentum 0.9": sgd(1.0, momentum=0.9),
        "`adamw`": adamw(1.0, **off),
        "`adamw`, r = 1": adamw(1.0, **off, **corrected(1.0)),
        "`adamw`, r = 0.1": adamw(1.0, **off, **corrected(0.1)),
        "`adamw`, γ = 1e-8": adamw(1.0, **off, **corrected(0.0, 1e-8)),
        "`radam`": radam(1.0),
        "`ademamix`": ademamix(1.0),
        "`rmsprop`": rmsprop(1.0),
        "`adagrad`": adagrad(1.0),
        "`lion`": lion(1.0),
        "`adafactor`": adafactor(1.0),
        "`adafactor`, r = 0.1": adafactor(1.0, **corrected(0.1)),
    }.items():
        way = sum(u for _, _, u, _ in follow(optimizer, levels([0.3, 0.0], 1000), 500))
        ahead, astray = float(-way[0].mean()), rms(way[1])
        rows.append([name, short(ahead), short(astray), f"{ahead / astray:.1f}"])
    return None, table(["", "g = 0.3 σ: moved ahead / lr", "g = 0: strayed / lr", "ratio"], rows)


def digits_row(name: str, measured: dict[str, Any], baseline: list[float]) -> list[str]:
    """Best rate, accuracy with it, difference to AdamW on the same keys, neighbours."""
    curve = {float(lr): value for lr, value in measured["curve"].items()}
    order, best, final = sorted(curve), float(measured["best"]), measured["final"]
    at = order.index(best)
    beside = [f"{curve[order[i]]:.1f}" if 0 <= i < len(order) else "–" for i in (at - 1, at + 1)]
    gaps = [a - b for a, b in zip(final, baseline, strict=True)]
    return [
        name,
        f"{best:g}",
        mean_error(final),
        mean_error(gaps, sign="+") if any(gaps) else "",
        *beside,
    ]


def digits(raw: dict[str, Any]) -> Made:
    """Accuracy on digits: floors over learning rates, and all optimizers at their best."""
    figure, axes = canvas(2, height=3.8, share=True)
    blocks = []
    for axis, (model, title) in zip(
        axes,
        (
            ("softmax", "Softmax regression, 650 parameters"),
            ("network", "Network, 4,810 parameters"),
        ),
        strict=True,
    ):
        for name, (colour, marker) in LOOKS.items():
            label = "`adamw`" if name == "no correction" else f"`adamw`, {name}"
            curve = raw[model][label]["curve"]
            axis.plot(
                [float(lr) for lr in curve],
                list(curve.values()),
                color=colour,
                marker=marker,
                ms=4,
                label=name,
            )
        axis.set(xscale="log", xlabel="learning rate", title=title, ylim=(45, 97))
        baseline = raw[model]["`adamw`"]["final"]
        head = [title, "best lr", "accuracy, %", "− `adamw`", "lr / 3", "3 lr"]
        blocks.append(table(head, [digits_row(o, x, baseline) for o, x in raw[model].items()]))
    axes[0].set_ylabel("accuracy on held-out digits, %")
    axes[0].legend(loc="lower right")
    return figure, "\n\n".join(blocks)


# What trains: how, and where the measurements lie.
MEASURED: dict[str, tuple[Callable[[int], Any], Path]] = {
    "digits": (digits_runs.measure, ROOT / "benchmarks" / "digits.json"),
    "accuracy": (correlated.measure, ROOT / "benchmarks" / "correlated.json"),
}


def measured(name: str) -> Any:
    """The measurements of last time."""
    return json.loads(MEASURED[name][1].read_text(encoding="utf-8"))


# By page.
MAKERS: dict[str, dict[str, Callable[[], Made]]] = {
    "optimizers": {
        "second-moment": second_moment,
        "floor": floor,
        "scatter": scatter,
        "walk": walk,
        "adagrad": adagrad_sum,
        "radam": radam_warmup,
        "adadelta": adadelta_feedback,
        "schedule-free": schedule_free_noise,
        "adamax": adamax_max,
        "digits": lambda: digits(measured("digits")),
    },
    "correlated_noise": {
        "error": correlated.error,
        "accuracy": lambda: correlated.accuracies(measured("accuracy")),
    },
}
PAGE_OF = {name: page for page, makers in MAKERS.items() for name in makers}


def make(name: str, images: Path) -> str:
    """Make one figure in the folder ``images``, and return its table."""
    page = PAGE_OF[name]
    with mpl.rc_context(STYLE):
        figure, block = MAKERS[page][name]()
        if figure is not None:
            figure.savefig(images / f"{page}-{name}.png", dpi=150)
    return block


def put_into_page(name: str, block: str) -> bool:
    """Replace the table of ``name`` in its page; False if the page has no place for it."""
    page = DOCS / f"{PAGE_OF[name]}.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    place = re.compile(rf"(<!-- figures\.py {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    new, n = place.subn(lambda found: f"{found[1]}\n{block}\n\n{found[2]}", text)
    if n:
        page.write_text(new, encoding="utf-8")
    return bool(n)


def main() -> None:
    """Make the figures, fill in the tables, print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PAGE_OF, help="make one of them")
    parser.add_argument("--draw", action="store_true", help="train nothing anew")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that train")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in [args.only] if args.only else PAGE_OF:
        if name in MEASURED and not args.draw:
            measure, raw = MEASURED[name]
            raw.write_text(json.dumps(measure(args.jobs), indent=1), encoding="utf-8")
        block = make(name, IMAGES)
        print(f"\n## {name}" + ("" if put_into_page(name, block) else " (not on the page)"))
        print(block)


if __name__ == "__main__":
    main()
