"""Draws a run: `python -m training.plots runs/default` makes metrics.png of the metrics.jsonl beside it.

train.py draws the same at the end of a run if Matplotlib is installed, and else says so.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from training.flags import flag, read_flags
from training.host.errors import import_optional
from training.host.processes import command
from training.plots.curves import draw_run, read_metrics


@dataclass
class PlotsFlags:
    """Draw a run's metrics.jsonl as metrics.png."""

    run: Path = flag(help="output_dir of a run, as runs/default", positional=True)


@command
def main(argv: list[str]) -> None:
    run = read_flags(PlotsFlags, argv, "python -m training.plots").run
    import_optional("matplotlib.figure", "a picture")
    print(draw_run(run, read_metrics(run)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
