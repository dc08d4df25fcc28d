"""Files read and written with errors of one line."""

import os
from pathlib import Path

from training.host.errors import SHOWN_OF_A_PATH, UserError


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
