"""The one error class for what the person who started the program can mend."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class UserError(ValueError):
    """Bad input: a flag, a file, a machine too small. Shown as one line, without a traceback, with exit status 1.

    The message names the value, the limit and what to do. Any other exception is a defect and keeps its traceback.
    """


def message_of(error: BaseException) -> str:
    """What is shown of an error that ends a program: a line where the user can mend it, else the traceback.

    Memory that ran out is a line too, below the notes that were added to the error.
    """
    if isinstance(error, UserError):
        return f"error: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return "\n".join([*getattr(error, "__notes__", ()), f"error: {str(error).splitlines()[0]}"])
    return "".join(traceback.format_exception(error)).rstrip()


@contextmanager
def refused_as_user_error(prefix: str = "") -> Iterator[None]:
    """A ValueError raised in here refuses a value that the user gave: it becomes a UserError of the same words."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None
