"""Draws panels as SVG inside a page of HTML, without Matplotlib and without scripts."""

import math
from collections.abc import Sequence
from itertools import pairwise

from training.host.pages import escaped
from training.plots.panels import Curve, Panel

WIDTH, HEIGHT = 420, 200  # size of the axes, in units of the drawing
LEFT, BOTTOM, TOP, RIGHT = 58, 22, 8, 12  # around the axes
MOST_POINTS = 400  # of a polyline; longer lines keep the lowest and highest value of a stretch
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
# Attributes of a line, by a curve's kind.
STYLES = {"faint": ' opacity=".4" stroke-width=".8"', "dashed": ' stroke-dasharray="4 3"'}
STYLE = """
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-size: .85rem; font-weight: 600; overflow-wrap: anywhere; }
figure svg { width: 100%; height: auto; display: block; }
figure text { font: 11px system-ui, sans-serif; fill: var(--faint); }
figure .frame { fill: none; stroke: var(--line); }
figure .grid { stroke: var(--line); stroke-width: .5; }
.legend { font-size: .78rem; } .legend span { margin-right: .9rem; white-space: nowrap; }
.legend b { font-weight: 700; }
"""


def draw_panels(panels: Sequence[Panel]) -> str:
    """Returns a grid of figures, HTML."""
    return f'<div class="panels">{"".join(map(_draw_panel, panels))}</div>'


def ticks_between(low: float, high: float, most: int, are_whole: bool = False) -> list[float]:
    """Returns round numbers from low to high: 0.4, 0.6, 0.8, 1 for 0.3 to 1.1 and `most` 5."""
    if not low < high:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    if are_whole:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    return [step * count for count in range(first, math.floor(high / step + 1e-9) + 1)]


def labels_of(ticks: list[float]) -> list[str]:
    """Returns the numbers of an axis with the digits that tell each from the next.

    They are 0.69305 and 0.69310, for example, or 2e-05.
    """
    largest = max(map(abs, ticks)) or 1.0
    gap = min((after - before for before, after in pairwise(ticks)), default=largest / 1000)
    first, last = (math.floor(math.log10(size) + 1e-9) for size in (largest, gap))
    if -4 < first < 7:
        return [f"{value:,.{max(0, -last)}f}" for value in ticks]
    return [f"{value:.{first - last + 1}g}" for value in ticks]


def _draw_panel(panel: Panel) -> str:
    steps = [step for curve in panel.curves for step in curve.steps] + panel.left_out
    first, last = min(steps, default=0), max(steps, default=1)
    margin = 0.015 * (last - first) or 1.0  # a dot at the edge is seen whole
    first, last = first - margin, last + margin
    low, high = panel.limits

    def place(step: float, value: float) -> tuple[float, float]:
        return WIDTH * (step - first) / (last - first), HEIGHT * (high - value) / (high - low)

    lines = [f'<rect class="frame" x="0" y="0" width="{WIDTH}" height="{HEIGHT}"/>']
    labels: list[str] = []
    heights = ticks_between(low, high, 6)
    for value, label in zip(heights, labels_of(heights)):
        _, y = place(first, value)
        lines.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        labels.append(_text(LEFT - 5, TOP + y + 4, "end", label))
    steps = ticks_between(first, last, 6, are_whole=True)
    for step, label in zip(steps, labels_of(steps)):
        x, _ = place(step, low)
        labels.append(_text(LEFT + x, TOP + HEIGHT + 15, "middle", label))
    for step in panel.left_out:
        x, _ = place(step, low)
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}"'
        lines.append(f'<line stroke="{COLORS[3]}" stroke-width=".5" {ends}/>')
    lines += [_draw_curve(curve, place) for curve in panel.curves]
    # An inner drawing cuts off what is beyond its edges.
    inner = f'<svg x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}">{"".join(lines)}</svg>'
    size = f"0 0 {LEFT + WIDTH + RIGHT} {TOP + HEIGHT + BOTTOM}"
    drawing = f'<svg viewBox="{size}" role="img">{inner}{"".join(labels)}</svg>'
    return (
        f"<figure><figcaption>{escaped(panel.title)}</figcaption>{drawing}{_legend(panel)}</figure>"
    )


def _text(x: float, y: float, anchor: str, label: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{label}</text>'


def _draw_curve(curve: Curve, place) -> str:
    color = COLORS[curve.color % len(COLORS)]
    places = [place(*point) for point in _thinned(curve)]
    if curve.kind == "crosses":
        return "".join(
            f'<path stroke="{color}" d="M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8"/>'
            for x, y in places
        )
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    style = STYLES.get(curve.kind, "")
    shapes = [f'<polyline fill="none" stroke="{color}"{style} points="{text}"/>']
    if curve.kind == "dots" or len(places) < 30:  # a point alone is no line
        shapes += [f'<circle fill="{color}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places]
    return "".join(shapes)


def _thinned(curve: Curve) -> list[tuple[float, float]]:
    """Returns at most MOST_POINTS points: the lowest and the highest of each stretch, in order."""
    points = [*zip(curve.steps, curve.values)]
    if len(points) <= MOST_POINTS or curve.kind == "crosses":
        return points
    kept: list[tuple[float, float]] = []
    borders = [i * len(points) // (MOST_POINTS // 2) for i in range(MOST_POINTS // 2 + 1)]
    for start, stop in pairwise(borders):
        stretch = points[start:stop]
        lowest, highest = (choose(stretch, key=lambda point: point[1]) for choose in (min, max))
        kept += sorted({lowest, highest})
    return kept


def _legend(panel: Panel) -> str:
    names = [(curve.label, COLORS[curve.color % len(COLORS)]) for curve in panel.curves]
    if panel.left_out:
        names.append((f"{len(panel.left_out)} left out", COLORS[3]))
    if len(names) < 2:
        return ""
    shown = "".join(
        f'<span><b style="color:{color}">&#9644;</b> {escaped(name)}</span>'
        for name, color in names
    )
    return f'<div class="legend">{shown}</div>'
