"""Draws the curves of a run, and writes pictures and their labels."""

import json
import logging
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from training.host.errors import UserError, import_optional, is_installed, pip_install, program
from training.host.files import read_file, read_json, replacing

logger = logging.getLogger(__name__)
LARGEST_NUMBER = 1e300  # Matplotlib overflows beyond it; somebody may have edited the file
STEPS_PER_SMOOTHED = 20  # the smoothed loss is a mean over a twentieth of the run
OBJECTIVES_METRICS = {  # and of experts
    "accuracy": "accuracy, share of pairs", "margin": "margin of rewards", "kl": "divergence from the reference, nats",
    "clip_share": "clipped tokens, share", "entropy": "entropy, nats", "expert_load": "fullest expert ÷ mean",
}  # fmt: skip
FEWEST_STEPS = 20  # a run of fewer steps has no picture at its end


def read_metrics(run: Path) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl without damaged ones. Raises UserError where there is none."""
    file = run / "metrics.jsonl"
    lines = read_file(file, "give the output_dir of a run").decode(errors="replace").splitlines()
    if not (rows := [row for line in lines if (row := parse_line(line))]):
        raise UserError(f"{file} has no step yet; give the output_dir of a run")
    return rows


def parse_line(line: str) -> dict | None:
    """Returns the metrics of a line, which have a step; None of a damaged line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and _is_number(row.get("step")) else None


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and abs(value) < LARGEST_NUMBER


def draw_run(run: Path, rows: list[dict]) -> Path:
    """Draws loss, learning rate, throughput and memory by step, those that have numbers; returns the picture's path."""
    figures = import_optional("matplotlib.figure", "a picture")
    for row in rows:
        peaks = row.get("peak_memory_gib")
        row["peak"] = max(filter(_is_number, peaks), default=None) if isinstance(peaks, list) else None
    panels = {
        "loss": f"loss, nats per {_unit(run)}", "learning_rate": "learning rate",
        "tokens_per_second": "tokens per second", "peak": "peak GPU memory of the fullest rank, GiB",
    }  # fmt: skip
    panels |= OBJECTIVES_METRICS
    panels = {name: label for name, label in panels.items() if points(rows, name)[0]}
    columns = 2 if len(panels) > 3 else max(1, len(panels))
    lines = -(-len(panels) // columns) or 1
    figure = figures.Figure(figsize=(12, 3.5 * lines if lines > 1 else 4), layout="constrained")
    axes = dict(zip(panels, figure.subplots(lines, columns, squeeze=False).flat))
    for empty in figure.axes[len(panels) :]:
        empty.remove()
    for name, panel in axes.items():
        panel.set(xlabel="step", ylabel=panels[name])
        if name != "loss":
            panel.plot(*points(rows, name), linewidth=0.8, label="training")
        if name in OBJECTIVES_METRICS and (held_out := points(rows, f"validation_{name}"))[0]:
            panel.plot(*held_out, "C1o-", label="validation")
            panel.legend()
        elif name not in ("loss", *OBJECTIVES_METRICS):
            panel.set_ylim(bottom=0)
    if "loss" in axes:
        _draw_loss(axes["loss"], rows)
    if "tokens_per_second" in axes and points(rows, "mfu")[0]:
        mfu = axes["tokens_per_second"].twinx()
        mfu.plot(*points(rows, "mfu"), "C1", linewidth=0.8)
        mfu.set_ylabel("model FLOP utilisation, share of the peak", color="C1")
        mfu.set_ylim(0, 1)
    save_picture(figure, path := run / "metrics.png")
    return path


def _unit(run: Path) -> str:
    """Returns byte or token, of which losses are means, by the run's config.json; both if that does not tell."""
    with suppress(UserError):
        if isinstance(tokenizer := read_json(run / "config.json").get("tokenizer"), str):
            return "byte" if tokenizer == "bytes" else "token"
    return "token or byte"


def save_picture(figure, path: Path) -> None:
    """Writes a Matplotlib figure as a whole, in the format of the path's suffix."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:])


def as_label(name: str) -> str:
    """Returns a folder's name as Matplotlib shows it: "$x^$" is no formula, bytes that are no text are escaped.

    A space goes before "_", with which Matplotlib's own labels begin: it leaves these out of legends.
    """
    shown = name.encode(errors="backslashreplace").decode().replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _draw_loss(axes, rows: list[dict]) -> None:
    """Draws the loss raw and smoothed, validations, spikes and left-out steps. The legend names what is drawn."""
    steps, losses = points(rows, "loss")
    span = len(losses) // STEPS_PER_SMOOTHED
    axes.plot(steps, losses, "C0", linewidth=0.8, alpha=0.4 if span else 1, label="training")
    if span:
        sums = [0.0, *accumulate(losses)]
        smooth = [(sums[end] - sums[max(0, end - span)]) / min(span, end) for end in range(1, len(sums))]
        axes.plot(steps, smooth, "C0", label=f"training, mean of {span} steps")
    for name, of, style in (
        ("validation", points(rows, "validation_loss"), "C1o-"),
        ("spike", points([row for row in rows if row.get("is_spike")], "loss"), "rx"),
    ):
        if of[0]:
            axes.plot(*of, style, label=name)
    for number, row in enumerate(row for row in rows if row.get("loss", 0) is None):
        axes.axvline(row["step"], color="r", linewidth=0.5, label="left out" if number == 0 else None)
    axes.legend()


def points(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Returns the steps that have a number of this name, and the numbers."""
    found = [row for row in rows if _is_number(row.get(name))]
    return [row["step"] for row in found], [row[name] for row in found]


def draw_at_end(run: Path) -> None:
    """Draw a finished run that is long enough; without Matplotlib say how to install it."""
    try:
        if len(rows := read_metrics(run)) < FEWEST_STEPS:
            return
        if is_installed("matplotlib"):
            logger.info("curves: %s", draw_run(run, rows))
        else:
            install, draw = pip_install("matplotlib"), f"{program()} -m training.plots {run}"
            logger.info("no picture of the curves: %s, then %s", install, draw)
    except Exception as error:  # a run that has ended well does not fail for its picture
        logger.warning("the curves of %s cannot be drawn: %s", run, error)
