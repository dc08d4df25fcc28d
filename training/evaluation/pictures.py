"""Pictures of an evaluation: loss by position, scores by length, needles by depth and length. Needs Matplotlib."""

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


def draw_tasks(path: Path, curves: Sequence[tuple[str, list[dict]]]) -> None:
    """Draw score by length, a panel for each task and a curve for each (name, rows of an evaluation's JSON)."""
    tasks = [*dict.fromkeys(row["task"] for _, rows in curves for row in rows)]
    figure = Figure(figsize=(3.2 * len(tasks), 3.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        for name, rows in curves:
            points = [(row["length"], row["score"]) for row in rows if row["task"] == task and row["score"] is not None]
            axes.plot(*zip(*points) if points else ([], []), "o-", label=name)
        axes.set_xscale("log", base=2)
        axes.set(ylim=(-0.05, 1.05), xlabel="tokens", title=task.replace("_", " "))
        axes.grid(alpha=0.3)
    axes.legend()
    figure.supylabel("share of the asked words found")
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
