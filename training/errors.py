"""The one error class for what the person who started the program can mend."""

import functools
import io
import json
import os
import signal
import sys
import time
import traceback
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import torch

SHOWN_OF_A_PATH = 200  # characters
GRACE_SECONDS = 2.0  # from a rank's death to its peers' end; torchrun, which looks every 0.1 s, sees who died first


class UserError(ValueError):
    """Bad input: a flag, a file, a machine too small. Shown as one line, without a traceback, with exit status 1.

    The message names the value, the limit and what to do. Any other exception is a defect and keeps its traceback.
    """


def message_of(error: BaseException) -> str:
    """What is shown of an error that ends a program: a line where the user can mend it, else the traceback.

    A file that the system refuses is a line. So is memory that ran out, below the notes that were added to the error.
    """
    if is_out_of_host_memory(error):
        from training.memory.machine import available_host_bytes  # which imports this module

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


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether Python, NumPy or PyTorch's allocator for CPUs got no memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def check_can_write(file: Path, flag: str) -> None:
    """Raise UserError where `file`, which `flag` asks for, could not be written at the end; leaves what is there."""
    there = os.path.lexists(file)
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))  # a pipe would be waited for
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        shown = repr(str(file)[:SHOWN_OF_A_PATH])
        raise UserError(f"{flag} {shown} cannot be written to: {why}; give another file") from None
    if not there:
        file.unlink()


def read_file(file: Path, what_to_do: str) -> bytes:
    """The content of a regular file; a pipe would be waited for. Raises UserError, which ends with `what_to_do`."""
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"cannot read {file}: it is no regular file; {what_to_do}")
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(file)[:SHOWN_OF_A_PATH]}: {error.strerror}; {what_to_do}") from None


@contextmanager
def refused_as_user_error(prefix: str = "") -> Iterator[None]:
    """A ValueError raised in here refuses a value that the user gave: it becomes a UserError of the same words."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None
