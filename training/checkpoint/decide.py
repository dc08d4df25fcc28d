"""Decides the checkpoints of a run: their folder, their contents, and when they are due."""

import re
from dataclasses import dataclass
from pathlib import Path

from training.checkpoint.flags import CHECKPOINT_INTERVAL, KEPT_CHECKPOINTS, CheckpointFlags
from training.host.errors import UserError


@dataclass(frozen=True)
class Interval:
    """Steps and seconds between checkpoints; 0: they say nothing."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class Saving:
    """The folder of a run, and its checkpoints."""

    output_dir: Path
    contents: str  # "full": to resume from; "model"; or "none": there are no checkpoints
    interval: Interval
    kept: int  # last ones that stay, beside the best

    @property
    def is_on(self) -> bool:
        return self.contents != "none"


def decide_saving(flags: CheckpointFlags) -> Saving:
    return Saving(
        Path(flags.output_dir),
        flags.save,
        parse_interval(flags.checkpoint_interval or CHECKPOINT_INTERVAL),
        flags.keep_checkpoints or KEPT_CHECKPOINTS,
    )


def parse_interval(text: str) -> Interval:
    """Returns 200 steps for "200", and 1,800 seconds for "30min".

    Raises UserError for other texts.
    """
    match = re.fullmatch(r"(\d{1,9})|(\d{1,6}(?:\.\d{1,6})?)min", text)
    if match is None:
        raise UserError(
            f"checkpoint_interval must be a number of steps, or of minutes as 30min: got {text!r}"
        )
    steps, minutes = match.groups(default="0")
    return Interval(int(steps), 60 * float(minutes))
