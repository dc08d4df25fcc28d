"""The one error class for what the person who started the program can mend."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SHOWN_OF_A_PATH = 200  # characters


class UserError(ValueError):
    """Bad input: a flag, a file, a machine too small. Shown as one line, without a traceback, with exit status 1.

    The message names the value, the limit and what to do. Any other exception is a defect and keeps its traceback.
    """


def message_of(error: BaseException) -> str:
    """What is shown of an error that ends a program: a line where the user can mend it, else the traceback.

    A file that the system refuses is a line. So is memory that ran out, below the notes that were added to the error.
    """
    if isinstance(error, UserError):
        return f"error: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.strerror}: {str(error.filename)[:SHOWN_OF_A_PATH]}"
    if isinstance(error, torch.OutOfMemoryError):
        return "\n".join([*getattr(error, "__notes__", ()), f"error: {str(error).splitlines()[0]}"])
    return "".join(traceback.format_exception(error)).rstrip()


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
