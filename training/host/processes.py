"""Ends of a process: errors of one line, outputs without a reader, hangs with all stacks."""

import errno
import functools
import io
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from training.host.errors import SHOWN_OF_A_PATH, UserError, is_out_of_host_memory
from training.host.files import check_working_directory, space_on
from training.host.signals import Signalled
from training.host.sizes import GIB, available_host_bytes

# From a rank's death to its peers' end: torchrun looks every 0.1 s, so it sees who died first.
GRACE_SECONDS = 2.0
DISK_ERRORS = errno.ENOSPC, errno.EDQUOT, errno.EIO


def line_of(error: BaseException) -> str | None:
    """Returns the line to show for an error that the user can mend, below its notes.

    Users can mend bad input, files that the system refuses, and memory that ran out. Returns None
    for a defect, which has a traceback.
    """
    if is_out_of_host_memory(error):
        message = (str(error).strip().splitlines() or ["MemoryError"])[0][:300]
        left = f"{available_host_bytes() / GIB:.1f} GB are left to this process ({message})"
        cure = "lower --host_budget or --batch_size, or end what else runs here"
        return f"error: out of host memory, of which {left}; {cure}"
    if isinstance(error, UserError):
        return f"error: {' '.join(str(error).splitlines())}"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"error: {error.strerror}: this process may have {most} at once; "
            "raise that limit, as by ulimit -n 1024"
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        limits = "the limit of processes (ulimit -u, a container's pids) or of memory (ulimit -v)"
        return (
            f"error: the system starts no more threads; raise {limits}, or end what else runs here"
        )
    if (
        isinstance(error, OSError)
        and error.errno in DISK_ERRORS
        and isinstance(error.filename, str)
    ):
        cure = f"{space_on(Path(error.filename))}; free some there, or write to another"
        return f"error: {error.strerror}: {error.filename[:SHOWN_OF_A_PATH]}; {cure}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.strerror}: {str(error.filename)[:SHOWN_OF_A_PATH]}"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return (
            f"error: {error.strerror}: a file is cut short; raise the limit of its size, as by "
            "ulimit -f unlimited"
        )
    # An open file's reads and writes do not name it.
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return (
            f"error: {error.strerror}: a file is cut short; "
            "free some space on the disk, or use another"
        )
    if isinstance(error, getattr(sys.modules.get("torch"), "OutOfMemoryError", ())):
        return "\n".join([*getattr(error, "__notes__", ()), f"error: {str(error).splitlines()[0]}"])
    return None


def show_error(error: BaseException, is_main: bool) -> None:
    """Prints the error that ends this process, and lets torchrun repeat it in its summary.

    Errors of other ranks than the main rank wait for twice GRACE_SECONDS, and are shown only if
    nothing ends the rank meanwhile: often every rank fails alike, and one message is enough. So do
    errors in a collective: often a peer died, and the peer's own error is the one to read.
    """
    shown = line_of(error) or "".join(traceback.format_exception(error)).rstrip()
    frames = traceback.extract_tb(error.__traceback__)
    if not is_main or any("torch/distributed/" in frame.filename for frame in frames):
        time.sleep(2 * GRACE_SECONDS)
    with suppress(OSError, ValueError):  # nobody may be reading any more
        print(shown, file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"py_callstack": shown, "timestamp": int(time.time())}
        with suppress(OSError, ValueError):  # somebody may have changed the variable
            Path(file).write_text(
                json.dumps({"message": {"message": str(error), "extraInfo": told}})
            )


def open_standard_files() -> None:
    """Opens /dev/null in place of closed standard files: another file would get their number, and
    then their text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if name == "stdin" else "w"))  # noqa: SIM115


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Decorator of a script's main(argv), which then returns the exit status: main's own, 0 for
    None.

    An error that can be mended is printed as a line, and the status is 1; after Ctrl-C it is 130.
    Of another signal the process dies, once everything is cleaned up.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        open_standard_files()
        # Shows names that are not UTF-8, and any text on any terminal.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            check_working_directory()
            return main(argv) or 0
        except Exception as error:
            if line_of(error) is None:
                raise
            show_error(error, is_main=os.environ.get("RANK", "0") == "0")
            return 1
        except Signalled as interrupt:
            # A shell expects this of its programs; a library call returns.
            if main.__module__ == "__main__":
                with suppress(OSError, ValueError):
                    sys.stdout.flush()
                os.kill(os.getpid(), interrupt.number)
            return 128 + interrupt.number
        except KeyboardInterrupt:
            return 128 + signal.SIGINT

    return run


class _Lasting:
    """A text stream that drops whatever it cannot write.

    None: a stream that was closed when Python started.
    """

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
    """Lets prints fail in silence: a closed terminal, a pipe without a reader, or a full disk under
    a log."""
    output: typing.Any = _Lasting(sys.stdout)
    errors: typing.Any = _Lasting(sys.stderr)
    with redirect_stdout(output), redirect_stderr(errors):
        yield


class Watchdog:
    """Prints the stack of each thread of this process once if `expect` is not called again in time.

    Python's faulthandler.dump_traceback_later walks frames while they run: in a step that was slow,
    not stuck, this ended the process with a segmentation fault (Python 3.12, in a Triton launch).
    The thread here walks them under the interpreter's lock, and every library call that waits gives
    the lock back.
    """

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def expect(self, seconds: float) -> None:
        self.cancel()
        self._timer = threading.Timer(seconds, self._bark, [seconds])
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _bark(self, seconds: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        report = f"nothing has ended for {seconds:.0f} s; what the threads of this process do:\n"
        for thread, frame in frames:
            report += f"thread {names.get(thread, thread)}:\n"
            report += "".join(traceback.format_stack(frame))
        print(report, file=sys.__stderr__, flush=True)
