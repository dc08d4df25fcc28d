"""Signals that ask a process to end, as an exception where something must be cleaned up first."""

import contextlib
import signal
import threading
from collections.abc import Iterator

# Signals of a scheduler or torchrun, of a closed terminal, and of Slurm ahead of a preemption.
# Python itself makes KeyboardInterrupt of Ctrl-C.
ENDING_SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


class Signalled(KeyboardInterrupt):
    """A signal of this number has asked the process to end."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Makes ENDING_SIGNALS raise Signalled in here, so that they clean up as Ctrl-C does.

    A second one is ignored, so that it does not end the cleaning up. Signals that are ignored, or
    have a handler, stay as they are. Outside of the main thread nothing changes, since Python has
    its handlers there alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in ENDING_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]

    def interrupt(number: int, _) -> None:
        for ignored in numbers:
            signal.signal(ignored, signal.SIG_IGN)
        raise Signalled(number)

    try:
        for number in numbers:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
