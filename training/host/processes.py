"""How a process ends: errors of one line, outputs that nobody reads any more, hangs that show where they are."""

import functools
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import torch

from training.host.errors import SHOWN_OF_A_PATH, UserError, is_out_of_host_memory
from training.host.memory import available_host_bytes

GRACE_SECONDS = 2.0  # from a rank's death to its peers' end; torchrun, which looks every 0.1 s, sees who died first


def message_of(error: BaseException) -> str:
    """What is shown of an error that ends a program: a line where the user can mend it, else the traceback.

    A file that the system refuses is a line. So is memory that ran out, below the notes that were added to the error.
    """
    if is_out_of_host_memory(error):
        asked = str(error).strip().splitlines() or ["MemoryError"]
        return (
            f"error: out of host memory, of which {available_host_bytes() / 2**30:.1f} GB are left to this process "
            f"({asked[0][:300]}); lower --host_budget or --batch_size, or end what else runs here"
        )
    if isinstance(error, UserError):
        return f"error: {' '.join(str(error).splitlines())}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.strerror}: {str(error.filename)[:SHOWN_OF_A_PATH]}"
    if isinstance(error, torch.OutOfMemoryError):
        return "\n".join([*getattr(error, "__notes__", ()), f"error: {str(error).splitlines()[0]}"])
    return "".join(traceback.format_exception(error)).rstrip()


def can_be_mended(error: BaseException) -> bool:
    """Whether `message_of` shows a line: bad input, a file that the system refuses, memory that ran out."""
    return isinstance(error, (UserError, OSError, torch.OutOfMemoryError)) or is_out_of_host_memory(error)


def show_error(error: BaseException, is_main: bool, before: str = "") -> None:
    """Print what ends this process, and have torchrun repeat it in its summary.

    Where every rank fails alike the main rank alone speaks, and what fails in a collective fails most often because a
    peer died, whose own error is to be read: such errors are shown only where, after twice GRACE_SECONDS, nobody has
    ended the rank.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not is_main or any("torch/distributed/" in frame.filename for frame in frames):
        time.sleep(2 * GRACE_SECONDS)
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(before + message_of(error), file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"py_callstack": message_of(error), "timestamp": int(time.time())}
        Path(file).write_text(json.dumps({"message": {"message": str(error), "extraInfo": told}}))


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """A script's main(argv), returning the exit status: 1, with a line on stderr, after an error that can be mended.

    130 after Ctrl-C, else main's own, None being 0. Everything else keeps its traceback.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        try:
            return main(argv) or 0
        except Exception as error:
            if not can_be_mended(error):
                raise
            show_error(error, is_main=os.environ.get("RANK", "0") == "0")
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT

    return run


class _Lasting:
    """A stream of text. What it cannot write is lost, and nothing else: None is one that was closed at the start."""

    def __init__(self, stream: typing.TextIO | None):
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


@contextmanager
def outliving_its_output() -> Iterator[None]:
    """In here a terminal that is closed, a pipe without a reader or a full disk below a log is no error."""
    with redirect_stdout(_Lasting(sys.stdout)), redirect_stderr(_Lasting(sys.stderr)):  # type: ignore[type-var]
        yield


class Watchdog:
    """Prints the stack of each thread of this process, once, where `expect` is not called again in time.

    Python's faulthandler.dump_traceback_later walks the frames of threads that run meanwhile. In a step that was slow,
    not stuck, that ended the process with a segmentation fault (Python 3.12, in a Triton launch). The thread here walks
    them under the interpreter's lock, which every library call that waits gives back.
    """

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
