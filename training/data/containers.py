"""Files that hold many documents, a row each: lines and arrays of JSON, Parquet, and the Arrow files of `datasets`.

CONTAINERS has a line for each kind, by suffix. JSON and texts may be compressed: .gz or .zst stands behind the suffix.
Files are read as streams, so that memory holds a few rows and never a whole file.
"""

import contextlib
import gzip
import importlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, NamedTuple

from training.host.errors import UserError, pip_install

MOST = 2**28  # bytes of a row, or of a compressed text: a small file can hold any number of zeros
CHUNK = 2**20  # characters of a .json file that are read at a time
BATCH = 64  # rows of a table that are turned into Python's objects at a time
COMPRESSIONS = (".gz", ".zst")
END_OF_ARROW = b"\xff\xff\xff\xff\0\0\0\0"
SPACE = re.compile(r"[ \t\r\n]*")

Row = tuple[int, object]  # a row's number, from 1, and the row: bytes with JSON of a line, otherwise an object


class Container(NamedTuple):
    """Functions for a kind of file. Pieces are bytes start .. stop - 1 of a file, which have whole rows."""

    read: Callable[[Path, int, int, int, frozenset[str]], Iterator[Row]]  # see read_rows
    cut: Callable[[Path, int], Iterator[tuple[int, int, int]]]  # see cut_rows
    is_compressible: bool  # whether .gz and .zst may stand behind the suffix


def suffix_of(file: Path) -> str:
    """Returns the suffix that tells a file's kind: ".jsonl" for a.JSONL.gz, ".py" for a.py, ".gz" for a.gz."""
    *_, before, last = "", "", *file.suffixes
    before, last = before.lower(), last.lower()
    is_compressed = last in COMPRESSIONS and before and (before not in CONTAINERS or CONTAINERS[before].is_compressible)
    return before if is_compressed else last


def is_compressed(file: Path) -> bool:
    return file.suffix.lower() in COMPRESSIONS


def place(file: str | Path, number: int) -> str:
    """Returns a document's file; "FILE:7" for line 7 of a .jsonl file, "FILE, row 7" for row 7 of a table or array."""
    if not number:
        return str(file)
    is_line = CONTAINERS.get(suffix_of(Path(file)), LINES) is LINES
    return f"{file}:{number}" if is_line else f"{file}, row {number}"


def check_packages(files: list[Path]) -> None:
    """Raises UserError if a file needs a package that is missing."""
    for file in {(suffix_of(file), file.suffix.lower()): file for file in reversed(files)}.values():
        if suffix_of(file) in (".parquet", ".arrow"):
            _import("pyarrow", file)
        if file.suffix.lower() == ".zst":
            _zstd(file)


def read_rows(file: Path, start: int = 0, stop: int = 0, first: int = 1, fields: frozenset[str] = frozenset()):
    """Yields (number, row) of the rows in a file, or in its piece `start`, `stop`, `first`, which cut_rows gave.

    Args:
        fields: columns of tables to read. A table without any of them is read whole.

    Raises:
        UserError: the file is damaged, cut short or unreadable, or a row has more than MOST bytes.
    """
    with refusing_damage(file):
        yield from CONTAINERS[suffix_of(file)].read(file, start, stop, first, fields)


def cut_rows(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    """Yields pieces (start, stop, number of the first row) of about `size` bytes of text, where a file can be cut."""
    with refusing_damage(file):
        yield from CONTAINERS[suffix_of(file)].cut(file, size)


def read_compressed(file: Path) -> bytes:
    """Returns the content of a compressed text. Raises UserError if it is damaged, or has more than MOST bytes."""
    with refusing_damage(file), _open(file) as stream:
        content = stream.read(MOST + 1)
    if len(content) > MOST:
        raise UserError(f"{file} holds more than {MOST:,} bytes of text; decompress it, or cut it into several files")
    return content


@contextlib.contextmanager
def refusing_damage(file: Path) -> Iterator[None]:
    """Turn errors in reading a file into a line that names it. Libraries' own errors are known by their modules."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8: byte {error.object[error.start]:#04x}; convert it to UTF-8") from None
    except Exception as error:
        library = type(error).__module__.partition(".")[0] in ("pyarrow", "backports", "compression")
        if not library and not isinstance(error, (OSError, EOFError, ValueError, zlib.error)):
            raise
        if isinstance(error, OSError) and error.strerror and error.filename:
            raise UserError(f"cannot read {file}: {error.strerror}; give --data a readable file") from None
        what = (str(error).splitlines() or [type(error).__name__])[0][:150]
        raise UserError(f"{file} is damaged or cut short ({what}); get it again, or leave it out of --data") from None


def _import(name: str, file: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.removesuffix(".parquet")
        raise UserError(f"{file} needs the {package} package: {pip_install('-r requirements-extra.txt')}") from None


def _zstd(file: Path) -> ModuleType:
    """Returns Python's module of Zstandard, new in 3.14, or the package that has it for older versions."""
    try:
        return importlib.import_module("compression.zstd")
    except ImportError:
        return _import("backports.zstd", file)


def _open(file: Path) -> IO[bytes]:
    """Opens a file for reading; what is compressed is decompressed on the way."""
    if file.suffix.lower() == ".gz":
        return gzip.open(file)  # type: ignore[return-value]
    return _zstd(file).open(file) if file.suffix.lower() == ".zst" else file.open("rb")


def _whole(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    yield 0, file.stat().st_size, 1


# Lines


def _read_lines(file: Path, start: int, stop: int, first: int, fields: frozenset[str]) -> Iterator[Row]:
    """Yields lines, which end with \\n alone: JSON allows the other separators inside a string."""
    with _open(file) as stream:
        lines = stream
        if stop and not is_compressed(file):
            stream.seek(start)
            lines = io.BytesIO(stream.read(stop - start))
        for number, line in enumerate(iter(lambda: lines.readline(MOST + 1), b""), start=first):
            if len(line) > MOST:
                raise _too_long(place(file, number))
            yield number, line


def _cut_lines(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    if is_compressed(file):
        yield from _whole(file, size)
        return
    start, number = 0, 1
    with file.open("rb") as stream:
        while lines := stream.read(size) + stream.readline():
            yield start, start + len(lines), number
            start, number = start + len(lines), number + lines.count(b"\n")


def _too_long(where: str) -> UserError:
    return UserError(f"{where} has more than {MOST:,} bytes; cut it into several documents")


# Arrays of JSON, or objects one after the other


def _read_values(file: Path, start: int, stop: int, first: int, fields: frozenset[str]) -> Iterator[Row]:
    with _open(file) as raw, io.TextIOWrapper(raw, "utf-8-sig") as stream:
        values = _Values(stream, file)
        is_array = values.next_is("[")
        for number in itertools.count(1):
            if values.next_is("]" if is_array else ""):
                break
            if is_array and number > 1 and not values.next_is(","):
                why = "the file ends before it" if values.next_is("") else "there is no comma before it"
                raise values.refusal(number, why)
            yield number, values.next(number)
        if is_array and not values.next_is(""):
            raise values.refusal(number, "the array has ended before it")


class _Values:
    """Takes JSON values from a stream of text, of which it holds one value and CHUNK characters behind it at most."""

    def __init__(self, stream: io.TextIOWrapper, file: Path):
        self._stream, self._file = stream, file
        self._text, self._at, self._decoder = "", 0, json.JSONDecoder()

    def next_is(self, sign: str) -> bool:
        """Whether `sign` comes next, which is passed then; "" is the end of the text. Passes space."""
        while (at := SPACE.match(self._text, self._at).end()) == len(self._text):  # type: ignore[union-attr]
            self._text, self._at = self._stream.read(CHUNK), 0
            if not self._text:
                return not sign
        self._at = at + len(sign) * (found := bool(sign) and self._text.startswith(sign, at))
        return found

    def next(self, number: int) -> object:
        """Takes a value. The text behind it may be in its next part, which is read, each time twice as long."""
        self.next_is("")
        while True:
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
                return value
            except RecursionError as error:
                raise self.refusal(number, str(error)) from None
            except ValueError as error:
                # An error in the middle of the text is one whatever follows. A string may be longer than the text.
                is_cut = str(error).startswith("Unterminated") or getattr(error, "pos", 0) > len(self._text) - 16
                self._text, self._at = self._text[self._at :], 0
                more = self._stream.read(max(CHUNK, len(self._text))) if is_cut else ""
                if not more:
                    raise self.refusal(number, str(error)) from None
                self._text += more
                if len(self._text) > MOST:
                    raise _too_long(place(self._file, number)) from None

    def refusal(self, number: int, why: str) -> UserError:
        return UserError(f"{place(self._file, number)}: not JSON ({why[:100]}); give one array of objects, or objects")


# Tables


def _read_parquet(file: Path, start: int, stop: int, first: int, fields: frozenset[str]) -> Iterator[Row]:
    """Yields the rows of the row groups that begin in a piece. Groups are given shares of the file's bytes."""
    with _open_parquet(file) as table:
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        ends = [*itertools.accumulate((group.total_byte_size for group in groups), initial=0)]
        size = file.stat().st_size
        chosen = [i for i in range(len(groups)) if start <= size * ends[i] // max(1, ends[-1]) < (stop or size)]
        if chosen:
            columns = [name for name in table.schema_arrow.names if name in fields] or None
            first = 1 + sum(group.num_rows for group in groups[: chosen[0]])
            yield from _rows_of(table.iter_batches(BATCH, chosen, columns, use_threads=False), first)


def _cut_parquet(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    with _open_parquet(file) as table:
        of_groups = [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]
    pieces = max(1, min(len(of_groups), sum(of_groups) // size))
    borders = [file.stat().st_size * i // pieces for i in range(pieces + 1)]
    yield from ((start, stop, 1) for start, stop in itertools.pairwise(borders))


def _open_parquet(file: Path):
    return _import("pyarrow.parquet", file).ParquetFile(file, page_checksum_verification=True)


def _read_arrow(file: Path, start: int, stop: int, first: int, fields: frozenset[str]) -> Iterator[Row]:
    arrow = _import("pyarrow", file)
    with file.open("rb") as stream:
        stream.seek(-min(len(END_OF_ARROW), file.stat().st_size), io.SEEK_END)
        if stream.read() != END_OF_ARROW:  # pyarrow takes the end of a file for the end of its table
            raise EOFError("no end of an Arrow stream")
    with arrow.OSFile(str(file)) as opened, arrow.ipc.open_stream(opened) as table:
        columns = [name for name in table.schema.names if name in fields] or table.schema.names
        yield from _rows_of((batch.select(columns) for batch in table), first)


def _rows_of(batches: Iterator, first: int) -> Iterator[Row]:
    for batch in batches:
        for part in (batch.slice(at, BATCH) for at in range(0, batch.num_rows, BATCH)):
            for row in part.to_pylist():
                yield first, {name: _without_nulls(value) for name, value in row.items()}
                first += 1


def _without_nulls(value):
    """Leaves out the names without a value in objects: a table has every name in every object."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


LINES = Container(_read_lines, _cut_lines, is_compressible=True)
CONTAINERS = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": Container(_read_values, _whole, is_compressible=True),
    ".parquet": Container(_read_parquet, _cut_parquet, is_compressible=False),
    ".arrow": Container(_read_arrow, _whole, is_compressible=False),
}
