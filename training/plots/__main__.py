"""Draws runs: `python -m training.plots runs/default` makes metrics.png of the metrics.jsonl beside
it.

`python -m training.plots runs/a runs/b` draws both into one picture, for comparison. train.py draws
its own run at the end if Matplotlib is installed, and else says so.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from training.flags import Rule, flag, read_flags
from training.host.errors import UserError, import_optional
from training.host.files import check_can_write
from training.host.processes import command
from training.plots.curves import draw_run, draw_runs
from training.plots.panels import read_metrics

SUFFIXES = ".png", ".svg", ".pdf"


@dataclass
class PlotsFlags:
    """Draw a run's metrics.jsonl as metrics.png, or several runs into one picture."""

    run: list[Path] = flag(
        help="output_dir of a run, as runs/default; several: one picture of them", positional=True
    )
    out: Path = flag(Path("runs.png"), "the picture of several runs (.png, .svg, .pdf)")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "out",
            "with one run, whose picture is its metrics.png; drop it",
            lambda s: len(s.run) < 2,
        ),
    )


@command
def main(argv: list[str]) -> None:
    flags = read_flags(PlotsFlags, argv, "python -m training.plots")
    import_optional("matplotlib.figure", "a picture")
    if len(flags.run) == 1:
        print(draw_run(flags.run[0], read_metrics(flags.run[0])))
        return
    if len({run.resolve() for run in flags.run}) < len(flags.run):
        raise UserError(f"a run is given twice: {' '.join(map(str, flags.run))}; give each once")
    if flags.out.suffix not in SUFFIXES:
        raise UserError(
            f"out {flags.out} is none of {', '.join(SUFFIXES)}; give a name that ends so"
        )
    check_can_write(flags.out, "--out")
    draw_runs(flags.out, flags.run)
    print(flags.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
