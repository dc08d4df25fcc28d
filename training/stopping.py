"""Signals that end a run early with nothing lost: noted here, obeyed by train.py between micro-batches."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

# A scheduler's or torchrun's end, Ctrl-C, a closed terminal, and the notice that Slurm sends ahead of a preemption.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SECONDS_TOGETHER = 1.0


class Stopped(Exception):
    """A run was asked to end in the middle of a step, whose gradients are dropped."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The numbers of the signals that have asked this process to end, while it is in the block.

    A signal that was ignored stays so, as SIGHUP under nohup. A second SIGINT ends the process at once, unless it comes
    with the first: torchrun passes on a Ctrl-C that its workers have got themselves.
    """
    received: list[int] = []
    interrupted = math.inf  # when the first SIGINT came

    def note(number, _):
        nonlocal interrupted
        if number == signal.SIGINT:
            if time.monotonic() > interrupted + SECONDS_TOGETHER:
                os._exit(128 + number)
            interrupted = min(interrupted, time.monotonic())
        received.append(number)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    noted = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    try:
        for number in noted:
            signal.signal(number, note)
        yield received
    finally:
        for number in noted:
            signal.signal(number, before[number])
