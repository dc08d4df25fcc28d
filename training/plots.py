"""Draws a run: `python -m training.plots runs/default` makes metrics.png of the metrics.jsonl beside it.

train.py draws the same at the end of a run if Matplotlib is installed.
"""

import json
import logging
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from training.flags import flag, read_flags
from training.host.errors import UserError
from training.host.files import read_file
from training.host.processes import command

logger = logging.getLogger(__name__)
LARGEST_NUMBER = 1e300  # Matplotlib overflows beyond it; somebody may have edited the file
FEWEST_STEPS = 20  # a run of fewer steps has no picture at its end


@dataclass
class PlotsFlags:
    """Draw a run's metrics.jsonl as metrics.png."""

    run: Path = flag(help="output_dir of a run, as runs/default", positional=True)


def read_metrics(run: Path) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl without damaged ones. Raises UserError where there is none."""
    file = run / "metrics.jsonl"
    rows = []
    for line in read_file(file, "give the output_dir of a run").decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _is_number(row.get("step")):
            rows.append(row)
    if not rows:
        raise UserError(f"{file} has no step yet; give the output_dir of a run")
    return rows


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and abs(value) < LARGEST_NUMBER


def draw_run(run: Path, rows: list[dict]) -> Path:
    """Draws loss, learning rate, throughput and memory by step, and returns the picture's path."""
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(12, 7), layout="constrained")
    loss, rate, speed, memory = figure.subplots(2, 2, sharex=True).flat
    loss.plot(*_points(rows, "loss"), linewidth=0.8, label="training")
    loss.plot(*_points(rows, "validation_loss"), "o-", label="validation")
    spikes = [row for row in rows if row.get("is_spike")]
    if spikes:
        loss.plot(*_points(spikes, "loss"), "rx", label="spike")
    for row in rows:
        if row.get("loss", 0) is None:
            loss.axvline(row["step"], color="r", linewidth=0.5)
    loss.set(ylabel="loss, nats per token; red line: left out")
    loss.legend()
    rate.plot(*_points(rows, "learning_rate"))
    rate.set(ylabel="learning rate")
    speed.plot(*_points(rows, "tokens_per_second"), linewidth=0.8)
    speed.set(ylabel="tokens per second", xlabel="step", ylim=(0, None))
    if any("mfu" in row for row in rows):
        mfu = speed.twinx()
        mfu.plot(*_points(rows, "mfu"), "C1", linewidth=0.8)
        mfu.set(ylabel="model FLOP utilisation", ylim=(0, 1))
    for row in rows:
        peaks = row.get("peak_memory_gib")
        row["peak"] = max(filter(_is_number, peaks), default=None) if isinstance(peaks, list) else None
    memory.plot(*_points(rows, "peak"))
    memory.set(ylabel="peak GPU memory, GiB, of the fullest rank", xlabel="step", ylim=(0, None))
    path = run / "metrics.png"
    figure.savefig(path)
    return path


def _points(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of the rows that have a number of this name."""
    found = [row for row in rows if _is_number(row.get(name))]
    return [row["step"] for row in found], [row[name] for row in found]


def draw_at_end(run: Path) -> None:
    """Draw a finished run, if Matplotlib is installed and the run is long enough."""
    if find_spec("matplotlib") is None:
        return
    try:
        if len(rows := read_metrics(run)) >= FEWEST_STEPS:
            logger.info("curves: %s", draw_run(run, rows))
    except Exception as error:  # a run that has ended well does not fail for its picture
        logger.warning("the curves of %s cannot be drawn: %s", run, error)


@command
def main(argv: list[str]) -> None:
    run = read_flags(PlotsFlags, argv, "python -m training.plots").run
    if find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib: pip install matplotlib")
    print(draw_run(run, read_metrics(run)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
