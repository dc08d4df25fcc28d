"""Pictures of an evaluation: loss by position, scores by length, needles by depth and length. Needs Matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def draw_losses(path: Path, curves: Sequence[tuple[str, list[dict]]]) -> None:
    """Draw loss by position, a curve for each (name, rows of an evaluation's JSON)."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, rows in curves:
        # A bucket stands at its middle, on a logarithmic axis.
        middles = [(max(1, row["first"]) * (row["last"] + 1)) ** 0.5 for row in rows]
        axes.plot(middles, [row["loss"] for row in rows], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens before the predicted one", ylabel="loss, nats per token", title="Loss by position")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def interval(share: float, samples: int) -> tuple[float, float]:
    """Returns Wilson's 95% interval of a share that so many samples have; for 0 of 20 it is (0, 0.16).

    It is too wide, if anything, where a sample asks for several words: each sample counts once.
    """
    if not samples:  # an evaluation.json without them
        return share, share
    z = 1.96
    middle = share + z**2 / (2 * samples)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / samples + z**2 / (4 * samples**2))
    low, high = ((middle + side) / (1 + z**2 / samples) for side in (-half, half))
    return min(low, share), max(high, share)


def draw_tasks(path: Path, curves: Sequence[tuple[str, list[dict]]]) -> None:
    """Draw score by length, a panel for each task and a curve for each (name, rows of an evaluation's JSON).

    A bar is the 95% interval of the score. Where no task has a score nothing is drawn.
    """
    tasks = [*dict.fromkeys(row["task"] for _, rows in curves for row in rows if row["score"] is not None)]
    if not tasks:
        return
    figure = Figure(figsize=(3.2 * len(tasks), 3.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        for name, rows in curves:
            of_task = [row for row in rows if row["task"] == task and row["score"] is not None]
            if not of_task:
                continue
            lengths, scores = ([row[column] for row in of_task] for column in ("length", "score"))
            ends = [interval(row["score"], row.get("samples", 0)) for row in of_task]
            bars = [[abs(end - score) for end, score in zip(side, scores)] for side in zip(*ends)]
            axes.errorbar(lengths, scores, bars, fmt="o-", capsize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set(ylim=(-0.05, 1.05), xlabel="tokens", title=task.replace("_", " "))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.supylabel("share of the asked words found\nbars: 95% interval")
    figure.savefig(path)


def draw_needles(path: Path, rows: Sequence[dict]) -> None:
    """Draw a heat map of depth and length for each task; `rows` of an evaluation's JSON, tasks with depths only."""
    tasks = [*dict.fromkeys(row["task"] for row in rows)]
    figure = Figure(figsize=(5 * len(tasks), 3.5), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        of_task = [row for row in rows if row["task"] == task]
        depths = sorted({depth for row in of_task for depth in row["by_depth"]}, key=float)
        scores = [[row["by_depth"].get(depth, float("nan")) for row in of_task] for depth in depths]
        image = axes.imshow(scores, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(of_task)), [f"{row['length']:,}" for row in of_task])
        axes.set_yticks(range(len(depths)), [f"{float(depth):.0%}" for depth in depths])
        axes.set(xlabel="tokens", ylabel="depth of the needle", title=task.replace("_", " "))
        for y, row in enumerate(scores):
            for x, value in enumerate(row):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center")
    figure.colorbar(image, ax=figure.axes, label="score")
    figure.savefig(path)
