"""Small files, read and written with errors of one line; files and folders that are complete or absent."""

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from training.host.errors import SHOWN_OF_A_PATH, UserError

logger = logging.getLogger(__name__)
LOCK = ".lock"  # file in a folder that belongs to one run
LONGEST_NAME = 255  # bytes; Linux's own limit
JSON_BYTES = 2**28  # a longer JSON file is refused: parsed, it would take ten times its size in memory


def check_working_directory() -> None:
    """Refuse a working directory that was deleted: no relative path is found from it."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"the working directory is gone ({error.strerror}); change to another, by cd") from None


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


def check_can_write_into(folder: Path, name: str, flag: str) -> None:
    """Makes a folder for a file that a command writes at its end, or refuses it with the name of `flag`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {folder} cannot be made: {error}; give another folder") from None
    check_can_write(folder / name, flag)


def did_you_mean(path: Path) -> str:
    """Returns a hint, for the end of an error, at a path that differs from a wrong path by the case of its name."""
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            if other.name.lower() == path.name.lower() and other.name != path.name:
                return f"; did you mean {other}?"
    return ""


def read_file(file: Path, what_to_do: str, most: float = math.inf) -> bytes:
    """Returns the content of a file.

    Raises UserError, with `what_to_do` at the end, for a file that cannot be read, has more than `most` bytes or is not
    regular: a pipe would be waited for.
    """
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"cannot read {file}: it is no regular file; {what_to_do}")
        if (size := file.stat().st_size) > most:
            raise UserError(f"cannot read {file}: it has {size} bytes, at most {most} are read; {what_to_do}")
        return file.read_bytes()
    except OSError as error:
        why = f"{error.strerror}; {what_to_do}{did_you_mean(file)}"
        raise UserError(f"cannot read {str(file)[:SHOWN_OF_A_PATH]}: {why}") from None


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


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Gives a path to write to, which is flushed and becomes `file` at the end: a kill leaves the earlier file whole.

    Each call has a path of its own. Links, devices, pipes and files of read-only folders are written to in place.
    """
    if file.is_symlink() or (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK):
        yield file
        return
    temporary = file.with_name(f".{file.name[:40]}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(file)
        flush(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(file: Path, content: str) -> None:
    """Write a small file as a whole; see `replacing`."""
    with replacing(file) as temporary:
        temporary.write_bytes(content.encode())


@contextlib.contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Gives a folder to fill, which is flushed and becomes `folder` at the end. A kill leaves nothing of that name.

    Raises UserError if `folder` has something in it, cannot be replaced, or another process is making it.
    """
    folder = folder.resolve()
    if folder.is_mount() or folder == Path.cwd():
        raise UserError(f"{folder} is a mount point or the working directory; give a new folder inside")
    temporary = folder.with_name(f".{folder.name}.tmp")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is already there; give a folder that is not, or an empty one")
    with only_run_in(temporary):
        try:
            for leftover in {*temporary.iterdir()} - {temporary / LOCK}:  # a killed process has left it
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield temporary
            for path in (*temporary.iterdir(), temporary):
                flush(path)
            temporary.replace(folder)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError) and error.filename2 is not None:
                raise UserError(f"{folder} cannot be made: {error.strerror}; give another folder") from None
            raise
        (folder / LOCK).unlink()  # not earlier: another process would begin to fill a folder without a lock
        flush(folder.parent)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inside(folder: Path, name: object, named_by: Path) -> Path:
    """Returns the path of a file or folder in `folder` whose name stands in the file `named_by`.

    Raises UserError for other names: of places outside the folder, of the folder itself, or of no file at all.
    """
    with contextlib.suppress(TypeError, ValueError):
        is_plain = name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name  # type: ignore
        if is_plain and len(os.fsencode(name)) <= LONGEST_NAME:  # type: ignore
            return folder / name  # type: ignore
    raise UserError(f"{named_by} names {name!r:.80}, which is no file of its folder; give another folder")


def size_on_disk(folders: list[Path]) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it while this context lasts. The end of the process ends the lock as well.

    Raises UserError if another process has the lock, or the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise UserError(f"folder {folder} cannot be written to: {error}; choose another") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samefile(file.fileno(), folder / LOCK):  # deleted meanwhile, and made anew
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            file.seek(0)
            other = f"another run, process {file.read().strip()}, writes into {folder}"
            raise UserError(f"{other}: wait for its end, or choose another folder") from None
        except OSError as error:
            logger.warning("%s has no locks (%s): take care that no other run writes there", folder, error)
        with contextlib.suppress(OSError):  # a full disk takes no process number; the lock holds all the same
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield
