"""Pictures of an evaluation, by Matplotlib: loss by position, needles by length and depth."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from training.plots.curves import as_label, save_picture


def draw_losses(path: Path, curves: Sequence[tuple[str, list[dict]]], unit: str = "token") -> None:
    """Draws loss per `unit` by position, a curve for each (name, rows of an evaluation's JSON)."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, rows in curves:
        # A bucket stands at its middle, on a logarithmic axis.
        middles = [(max(1, row["first"]) * (row["last"] + 1)) ** 0.5 for row in rows]
        axes.plot(middles, [row["loss"] for row in rows], "o-", label=as_label(name))
    borders = {row["last"] + 1 for _, rows in curves for row in rows}
    axes.set(
        xlabel=f"{unit}s before the predicted one",
        ylabel=f"loss, nats per {unit}",
        title="Loss by position",
    )
    _finish(figure, path, borders)


def _finish(figure: Figure, path: Path, numbers: Iterable[float]) -> None:
    """Saves curves over a logarithmic axis, which names `numbers` in full: "4,096", not 2^12."""
    [axes] = figure.axes
    axes.set_xscale("log", base=2)
    ticks = sorted(numbers)
    axes.set_xticks(
        ticks, [f"{number:,}" for number in ticks], rotation=45, ha="right", rotation_mode="anchor"
    )
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, path)


def interval(share: float, samples: int) -> tuple[float, float]:
    """Returns Wilson's 95% interval of a share of samples; for 0 of 20 it is (0, 0.16)."""
    if not samples:  # an evaluation.json without them
        return share, share
    z = 1.96
    middle = share + z**2 / (2 * samples)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / samples + z**2 / (4 * samples**2))
    low, high = ((middle + side) / (1 + z**2 / samples) for side in (-half, half))
    return min(low, share), max(high, share)


def draw_needles(path: Path, curves: Sequence[tuple[str, list[dict]]]) -> None:
    """Draws score by length with its 95% interval, a curve for each name and rows of JSON."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, rows in curves:
        rows = [row for row in rows if row["score"] is not None]
        if rows:
            lengths, scores = ([row[column] for row in rows] for column in ("length", "score"))
            ends = [interval(row["score"], row.get("samples", 0)) for row in rows]
            bars = [[abs(end - score) for end, score in zip(side, scores)] for side in zip(*ends)]
            axes.errorbar(lengths, scores, bars, fmt="o-", capsize=3, label=as_label(name))
    judged = {row["length"] for _, rows in curves for row in rows if row["score"] is not None}
    axes.set(
        ylim=(-0.05, 1.05),
        xlabel="tokens",
        ylabel="share of the needles found",
        title="Needles; bars: 95% interval",
    )
    _finish(figure, path, judged)


def ink_on(color: Sequence[float]) -> str:
    """Returns black or white, whichever has more contrast on a colour.

    A colour is red, green, blue and alpha, each 0 to 1. The contrast is WCAG's: (lighter + 0.05) /
    (darker + 0.05) of two relative luminances.
    """
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color[:3]
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    is_dark = 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05
    return "white" if is_dark and color[3] > 0 else "black"  # no colour: the page's white


def draw_depths(path: Path, rows: Sequence[dict]) -> None:
    """Draws a heat map of depth and length, of rows of JSON that all have depths."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    depths = sorted({depth for row in rows for depth in row["by_depth"]}, key=float)
    scores = [[row["by_depth"].get(depth, float("nan")) for row in rows] for depth in depths]
    image = axes.imshow(scores, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(rows)), [f"{row['length']:,}" for row in rows])
    axes.set_yticks(range(len(depths)), [f"{float(depth):.0%}" for depth in depths])
    axes.set(xlabel="tokens", ylabel="depth of the needle", title="Needles by depth")
    for y, row in enumerate(scores):
        for x, value in enumerate(row):
            shown = "-" if math.isnan(value) else f"{value:.2f}"
            color = ink_on(tuple(image.to_rgba(value)))
            axes.text(x, y, shown, ha="center", va="center", color=color)
    figure.colorbar(image, ax=axes, label="score")
    save_picture(figure, path)
