"""Small files, read and written with errors of one line, and replaced as a whole. A folder that belongs to one run."""

import contextlib
import fcntl
import json
import logging
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from training.host.errors import SHOWN_OF_A_PATH, UserError

logger = logging.getLogger(__name__)
JSON_BYTES = 2**28  # a longer JSON file is refused: parsed, it would take ten times its size in memory


def check_can_write(file: Path, flag: str) -> None:
    """Refuse, with the name of `flag`, a file that a command could not write at its end. Leaves one there as it is."""
    exists = os.path.lexists(file)
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))  # a pipe would be waited for
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        shown = repr(str(file)[:SHOWN_OF_A_PATH])
        raise UserError(f"{flag} {shown} cannot be written to: {why}; give another file") from None
    if not exists:
        file.unlink()


def read_file(file: Path, what_to_do: str, most: float = math.inf) -> bytes:
    """Returns the content of a file.

    Raises UserError, with `what_to_do` at the end, if the file cannot be read, has more than `most` bytes or is not a
    regular file: a pipe would be waited for.
    """
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"cannot read {file}: it is no regular file; {what_to_do}")
        if (size := file.stat().st_size) > most:
            raise UserError(f"cannot read {file}: it has {size} bytes, at most {most} are read; {what_to_do}")
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(file)[:SHOWN_OF_A_PATH]}: {error.strerror}; {what_to_do}") from None


def read_json(file: Path) -> dict:
    """Returns the object in a JSON file. Raises UserError if the file is missing, damaged or holds no object."""
    try:
        content = json.loads(read_file(file, "give another folder", JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is missing or damaged: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it holds no JSON object")
    return content


def write_file(file: Path, content: bytes, size: int | None = None) -> list[int]:
    """Write and flush a file, made longer if `size` is given. Returns [bytes of the file, CRC-32 of the content]."""
    size = len(content) if size is None else size
    with file.open("wb") as opened:
        opened.write(content)
        opened.truncate(size)
        opened.flush()
        os.fsync(opened.fileno())
    return [size, zlib.crc32(content)]


def replace_file(file: Path, content: str) -> None:
    """Write a small file under another name and rename it, so that a kill leaves the earlier file whole."""
    temporary = file.with_name(f".{file.name}.tmp")
    write_file(temporary, content.encode())
    temporary.replace(file)


def flush(path: Path) -> None:
    """Wait until the content of a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_on_disk(folders: list[Path]) -> int:
    """Returns the bytes of all files in these folders."""
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it while this context lasts. The end of the process ends the lock as well.

    Raises UserError if another process has the lock, or the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise UserError(f"folder {folder} cannot be written to: {error}; choose another") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"another run, process {file.read().strip()}, writes into {folder}: wait for its end, or choose "
                "another folder"
            ) from None
        except OSError as error:
            logger.warning("%s has no locks (%s): take care that no other run writes there", folder, error)
        with contextlib.suppress(OSError):  # a full disk takes no process number; the lock holds all the same
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield
