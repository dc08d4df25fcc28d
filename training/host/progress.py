"""Progress of a long command: a bar in a terminal, and a line now and then where the output goes to
a file."""

import math
import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0
LINE = (
    "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt} {unit}, {elapsed} so far, {remaining} "
    "left{postfix}"
)


class Progress(tqdm):
    """Takes tqdm's arguments.

    A file has a line at the start, and one every SECONDS_BETWEEN_LINES.
    """

    def __init__(self, *arguments, **options):
        self._is_bar = sys.stderr.isatty()
        self._shown = -math.inf
        if not self._is_bar:
            options |= {"bar_format": LINE, "leave": False}
        super().__init__(*arguments, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self._is_bar:
            super().display(msg, pos)
            return
        now = time.monotonic()
        if msg != "" and now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            print(self, file=self.fp, flush=True)
