"""Small files with errors of one line; files and folders that are complete or absent."""

import contextlib
import errno
import fcntl
import io
import json
import logging
import math
import os
import re
import shutil
import stat
import typing
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from training.host.errors import SHOWN_OF_A_PATH, UserError, hub_download, printable
from training.host.signals import interrupted_by_signals

logger = logging.getLogger(__name__)
LOCK = ".lock"  # file in a folder that belongs to one run
# in the lock of a folder of `making`
MARK = " fills this folder, which gets its name when it is whole"
LOCK_CONTENT = re.compile(rb"([0-9]{1,10})(%s)?\n" % MARK.encode())
LOCK_BYTES = 128  # read of a lock
MOST_NAMES = 100  # tried by `making` for its folder, while other things have them
LONGEST_NAME = 255  # bytes; Linux's own limit
DEEPEST = 100  # nesting of values in a JSON file
# A longer JSON file is refused: parsed, it would take ten times its size in memory.
JSON_BYTES = 2**28


def check_working_directory() -> None:
    """Refuses a working directory that was deleted: no relative path is found from it."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the working directory is gone ({error.strerror}); change to another, by cd"
        ) from None


def check_can_write(file: Path, flag: str) -> None:
    """Refuses, with the name of `flag`, a file that a command could not write at its end.

    A file that exists stays as it is.
    """
    exists = os.path.lexists(file)
    try:
        # A pipe would be waited for.
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        shown = repr(str(file)[:SHOWN_OF_A_PATH])
        raise UserError(f"{flag} {shown} cannot be written to: {why}; give another file") from None
    if not exists:
        file.unlink()


def check_can_write_into(folder: Path, name: str, flag: str) -> None:
    """Makes a folder for the file that a command writes at its end, or refuses it by `flag`."""
    try:
        make_folder(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {folder} cannot be made: {error}; give another folder") from None
    check_can_write(folder / name, flag)


def hub_name(folder: str | Path) -> str | None:
    """Returns the name on the Hub of weights in its cache, such as Qwen/Qwen3-4B."""
    cached = re.search(r"models--([^/]+?)--([^/]+)", str(Path(folder).absolute()))
    return printable(f"{cached[1]}/{cached[2]}") if cached else None


def without_folders(value: object) -> object:
    """Returns a setting to publish: names in the place of paths, which may hold a user's name.

    Weights in the Hub's cache get their name on the Hub. A list is changed item by item.
    """
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str) or os.sep not in value:
        return value
    return hub_name(value) or printable(Path(value).name or value)


def without_places(content):
    """Returns a value of JSON without settings that say where something was on a machine, at any
    depth.

    Such are "name_or_path": "/home/me/model" and "vocab_file": "runs/of/me/vocab.json". Names on
    the Hub stay.
    """
    if isinstance(content, list):
        return [without_places(value) for value in content]
    if not isinstance(content, dict):
        return content
    return {
        name: without_places(value) for name, value in content.items() if not _is_place(name, value)
    }


def _is_place(name: str, value: object) -> bool:
    if not isinstance(value, str) or not name.endswith(("name_or_path", "_file", "_path")):
        return False
    is_path = re.match(r"[/~.]|[A-Za-z]:[\\/]|file:", value) is not None
    return is_path or value.count("/") > 1


def did_you_mean(path: Path) -> str:
    """Returns a hint, for the end of an error, at a path that differs from a wrong path by the case
    of its name."""
    with contextlib.suppress(OSError):
        for sibling in path.parent.iterdir():
            if sibling.name.lower() == path.name.lower() and sibling.name != path.name:
                return f"; did you mean {sibling}?"
    return ""


def check_paths(settings: Mapping[str, typing.Any]) -> None:
    """Refuses paths of data and weights that do not exist, by the names of their flags."""
    for name in ("init_from", "checkpoint"):
        if settings.get(name):
            check_weights_exist(Path(settings[name]))
    for name in ("data", "validation_data"):
        for path in settings.get(name) or []:
            check_data_exists(Path(path), name)


def check_data_exists(path: Path, name: str = "data") -> None:
    """Refuses a path of the flag `name` that does not exist; says how to download a Hub's data."""
    if path.exists():
        return
    parts = str(path).split(",")
    hint = did_you_mean(path)
    if _is_name_of_the_hub(path):
        download = hub_download(f"{path} --repo-type dataset --local-dir DIR")
        hint = f"; if it is a dataset of the Hugging Face Hub: {download}, then --{name} DIR"
    elif len(parts) > 1 and Path(parts[0]).exists():
        hint = f"; several stand apart: --{name} {' '.join(parts)}"
    raise UserError(f"data path {path} does not exist; give --{name} a file or a folder{hint}")


def check_weights_exist(folder: Path) -> None:
    """Refuses a folder of weights that does not exist; says how to download a Hub's model."""
    if not folder.exists():
        raise UserError(f"{folder} does not exist; {which_weights(folder)}")


def which_weights(folder: Path) -> str:
    """Returns the end of an error at a folder without a model: what to give in its place."""
    hint = did_you_mean(folder)
    if _is_name_of_the_hub(folder):
        download = hub_download(f"{folder} --local-dir DIR")
        hint = f"; if it is a model of the Hugging Face Hub: {download}"
    return f"give a checkpoint's step_ folder or one in Hugging Face's form{hint}"


def _is_name_of_the_hub(path: Path) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))) and not path.parent.exists()


def read_file(file: Path, what_to_do: str, most: float = math.inf) -> bytes:
    """Returns the content of a file.

    Raises UserError, with `what_to_do` at the end, for a file that cannot be read, has more than
    `most` bytes or is not regular: a pipe would be waited for.
    """
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"cannot read {file}: it is no regular file; {what_to_do}")
        if (size := file.stat().st_size) > most:
            raise UserError(
                f"cannot read {file}: it has {size} bytes, at most {most} are read; {what_to_do}"
            )
        return file.read_bytes()
    except OSError as error:
        why = f"{error.strerror}; {what_to_do}{did_you_mean(file)}"
        raise UserError(f"cannot read {str(file)[:SHOWN_OF_A_PATH]}: {why}") from None


def read_json(file: Path) -> dict:
    """Returns the object in a JSON file.

    Raises UserError if the file is missing, damaged or holds no object.
    """
    try:
        content = json.loads(read_file(file, "give another folder", JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is missing or damaged: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it holds no JSON object")
    if is_deep(content):
        raise UserError(f"{file} is damaged: its values are nested more than {DEEPEST} deep")
    return content


def is_deep(content: dict) -> bool:
    """Whether values of JSON are nested more than DEEPEST deep: functions that follow them would
    not come to an end."""
    level: list[dict | list] = [content]
    for _ in range(DEEPEST):
        values: list = []
        for container in level:
            values += container.values() if isinstance(container, dict) else container
        level = [value for value in values if isinstance(value, dict | list)]
    return bool(level)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Names `file` in OSErrors without a name, such as errors of an open file's writes."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(file)
        raise


@contextlib.contextmanager
def shown_as(final: Path, temporary: Path) -> Iterator[None]:
    """Names `final` in OSErrors about `temporary`, or about a file in it: nobody has heard of the
    temporary name."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str | os.PathLike):
            path = Path(error.filename)
            if path.is_relative_to(temporary):
                error.filename = str(final / path.relative_to(temporary))
        raise


def space_on(path: Path) -> str:
    """Returns words about the disk of a path, there or not: "the disk at /data has 0.01 of 500.00
    GB free"."""
    place = path.absolute()
    with contextlib.suppress(OSError):
        while not place.exists():
            place = place.parent
        usage = shutil.disk_usage(place)
        while not place.is_mount():
            place = place.parent
        return f"the disk at {place} has {usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free"
    return "its disk does not say what is free"


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, and flushes them: a loss of power leaves them."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        # A parent that may be written but not read cannot be flushed.
        with contextlib.suppress(OSError):
            flush(path.parent)


def write_file(file: Path, content: bytes, size: int | None = None) -> list[int]:
    """Writes and flushes a file, made longer if `size` is given.

    Returns [bytes of the file, CRC-32 of the content].
    """
    size = len(content) if size is None else size
    with naming(file), file.open("wb") as opened:
        opened.write(content)
        opened.truncate(size)
        opened.flush()
        os.fsync(opened.fileno())
    return [size, zlib.crc32(content)]


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Gives a path to write to, which is flushed and becomes `file` at the end.

    A kill leaves the earlier file whole. Each call has a path of its own. Links, devices, pipes and
    files of read-only folders are written to in place.
    """
    if (
        file.is_symlink()
        or (file.exists() and not file.is_file())
        or not os.access(file.parent, os.W_OK)
    ):
        yield file
        return
    temporary = file.with_name(f".{file.name[:40]}.{uuid.uuid4().hex}.tmp")
    with interrupted_by_signals(), shown_as(file, temporary):
        try:
            with naming(temporary):
                yield temporary
            flush(temporary)
            temporary.replace(file)
            flush(file.parent)
        finally:
            temporary.unlink(missing_ok=True)


def replace_file(file: Path, content: str) -> None:
    """Writes a small file as a whole; see `replacing`."""
    with replacing(file) as temporary:
        temporary.write_bytes(content.encode())


@contextlib.contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Gives a folder to fill, which is flushed and becomes `folder` at the end. A kill leaves
    nothing of that name.

    What a killed process left is deleted by the next that makes the same folder, and so is it after
    a signal. Raises UserError if `folder` has something in it, cannot be replaced, or another
    process is making it.
    """
    try:
        folder = folder.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to themselves
        raise UserError(f"{folder} cannot be made: {error}; give another folder") from None
    if folder.is_mount() or folder == Path.cwd():
        raise UserError(
            f"{folder} is a mount point or the working directory; give a new folder inside"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is already there; give a folder that is not, or an empty one")
    temporary = _name_to_fill(folder)
    with (
        interrupted_by_signals(),
        shown_as(folder, temporary),
        only_run_in(temporary, folder, MARK),
    ):
        try:
            for name in {*os.listdir(temporary)} - {LOCK}:
                delete(temporary / name)
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                flush(path)
            temporary.replace(folder)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError) and error.filename2 is not None:
                raise UserError(
                    f"{folder} cannot be made: {error.strerror}; give another folder"
                ) from None
            raise
        # The lock stays until now: another process would begin to fill a folder without it.
        (folder / LOCK).unlink()
        flush(folder)
        flush(folder.parent)


def _name_to_fill(folder: Path) -> Path:
    """Returns the folder for `making` to fill: the first name that is free, or a folder of an
    earlier `making`.

    Two processes that make the same folder get the same name, and so meet at its lock.
    """
    start = f".{folder.name[:40]}.{zlib.crc32(os.fsencode(folder.name)):08x}"
    names = (folder.with_name(f"{start}.{number}.tmp") for number in range(MOST_NAMES))
    free = next((name for name in names if not os.path.lexists(name) or _is_of_making(name)), None)
    if free is None:
        raise UserError(
            f"{folder.parent} has {MOST_NAMES} files whose names begin with {start}; delete them"
        )
    return free


def _is_of_making(temporary: Path) -> bool:
    """Whether `making` has made a folder: its lock says so. A kill or a loss of power may leave an
    empty lock alone."""
    try:
        status = os.lstat(temporary)
        names = os.listdir(temporary)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if not names:
            return True
        descriptor = os.open(temporary / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as lock:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return False
            content = lock.read(LOCK_BYTES)
    except OSError:
        return False
    match = LOCK_CONTENT.fullmatch(content)
    return (names == [LOCK] and not content.strip(b"\0")) or (
        match is not None and match[2] is not None
    )


def delete(path: Path) -> None:
    """Deletes a file, a link or a folder with all that is in it; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inside(folder: Path, name: object, named_by: Path) -> Path:
    """Returns the path of a file or folder in `folder` whose name stands in the file `named_by`.

    Raises UserError for other names: of places outside the folder, of the folder itself, or of no
    file at all.
    """
    with contextlib.suppress(TypeError, ValueError):
        is_plain = name == os.path.basename(name) and "\0" not in name  # type: ignore
        is_short = len(os.fsencode(name)) <= LONGEST_NAME  # type: ignore
        if is_plain and is_short and name not in ("", ".", ".."):
            return folder / name  # type: ignore
    raise UserError(
        f"{named_by} names {name!r:.80}, which is no file of its folder; give another folder"
    )


def size_on_disk(folders: list[Path]) -> int:
    return sum(
        file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()
    )


@contextlib.contextmanager
def only_run_in(folder: Path, shown: Path | None = None, mark: str = "") -> Iterator[None]:
    """Makes the folder, and locks it while this context lasts, or until the process ends.

    Raises UserError if another process has the lock, or the folder cannot be written to.

    Args:
        shown: name of the folder in errors, if it has another one for now.
        mark: stands in the lock behind the number of the process.
    """
    shown = shown or folder
    try:
        make_folder(folder)
        file = _open_lock(folder / LOCK)
    except OSError as error:
        why = error.strerror
        if os.path.lexists(folder / LOCK) and not stat.S_ISREG(os.lstat(folder / LOCK).st_mode):
            why = f"its {LOCK} is a link or another thing that is no file; delete that"
        raise UserError(f"folder {shown} cannot be written to: {why}; or choose another") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Deleted meanwhile, and made anew.
            if not os.path.samefile(file.fileno(), folder / LOCK):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            match = LOCK_CONTENT.match(file.read(LOCK_BYTES))
            run = f"another run, process {match[1].decode()}," if match else "another run"
            raise UserError(
                f"{run} writes into {shown}: wait for its end, or choose another folder"
            ) from None
        except OSError as error:
            logger.warning(
                "%s has no locks (%s): take care that no other run writes there", shown, error
            )
        content = file.read(LOCK_BYTES)
        # Another program's content stays.
        if not content.strip(b"\0") or LOCK_CONTENT.fullmatch(content):
            # A full disk takes no process number; the lock holds all the same.
            with contextlib.suppress(OSError):
                file.truncate(0)
                os.pwrite(file.fileno(), f"{os.getpid()}{mark}\n".encode(), 0)
                os.fsync(file.fileno())
                flush(folder)
        yield


@contextlib.contextmanager
def only_writer_of(folder: Path) -> Iterator[None]:
    """Locks an existing folder while this context lasts, without a file in it. `only_run_in` has
    another lock.

    Raises UserError if another process has the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process of this command writes into {folder}: wait for its end, or "
                "choose another folder"
            ) from None
        except OSError as error:
            logger.warning(
                "%s has no locks (%s): take care that nothing else writes there", folder, error
            )
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> io.FileIO:
    """Opens a lock, which no link leads to. Raises OSError for other things than regular files."""
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file
