"""A hang shows where it is: the stacks of a process in which nothing has ended for too long.

Python's faulthandler.dump_traceback_later walks the frames of threads that run meanwhile. In a step that was slow, not
stuck, that ended the process with a segmentation fault (Python 3.12, in a Triton launch). The thread here walks them
under the interpreter's lock, which every library call that waits gives back.
"""

import sys
import threading
import traceback


class Watchdog:
    """Prints the stack of each thread of this process, once, where `expect` is not called again in time."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def expect(self, seconds: float) -> None:
        """The next call, or `cancel`, is due within so many seconds."""
        self.cancel()
        self._timer = threading.Timer(seconds, self._bark, [seconds])
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _bark(self, seconds: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"nothing has ended for {seconds:.0f} s; what the threads of this process do:\n"]
        for identity, frame in sys._current_frames().items():
            lines += [f"thread {names.get(identity, identity)}:\n", *traceback.format_stack(frame)]
        print("".join(lines), file=sys.__stderr__, flush=True)
