"""Files of many documents, a row each: JSON, CSV, Parquet, and the Arrow files of `datasets`.

CONTAINERS has a line for each kind, by suffix. JSON, CSV and texts may be compressed: .gz or .zst
stands behind the suffix. Files are read as streams, so that memory holds a few rows and never a
whole file.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, NamedTuple

from training.data.forms import FIELDS, is_row
from training.data.unread import is_of_a_last_answer, is_of_answers
from training.host.errors import UserError, import_optional, is_installed

# A small file can hold any number of zeros. JSON takes up to 25 times its bytes in memory, when it
# is parsed.
MOST = 2**26  # bytes of a row
MOST_OF_TEXT = 2**28  # bytes of a compressed text
CHUNK = 2**20  # characters of a .json file that are read at a time
BATCH_BYTES = 2**28  # values in a batch of a table
# A row group is a bomb if it holds more bytes, and more of them per byte of the file.
LEAST_OF_A_BOMB, MOST_RATIO = 2**29, 500
BATCH = 64  # rows of a table that are turned into Python's objects at a time
COMPRESSIONS = (".gz", ".zst")
# Errors of Python's own that its libraries and pyarrow raise for damaged files.
OF_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    SystemError,
    struct.error,
    zlib.error,
)
JSON = "arrow.json"  # type of columns that hold JSON
END_OF_ARROW = b"\xff\xff\xff\xff\0\0\0\0"
SEPARATORS = {".csv": ",", ".tsv": "\t"}  # between fields, by suffix
OTHER_SEPARATORS = (";", "\t", "|", ",")  # found in files that other programs wrote
SPACE = re.compile(r"[ \t\r\n]*")

# A row's number, from 1, and the row: bytes with JSON of a line, otherwise an object.
Row = tuple[int, object]


class BrokenRow(NamedTuple):
    """A row that cannot be read, in a file whose other rows can."""

    why: str
    names: tuple[str, ...]  # its fields


class Container(NamedTuple):
    """Functions for a kind of file. Pieces of a file are bytes start .. stop - 1, whole rows."""

    read: Callable[[Path, int, int, int, frozenset[str]], Iterator[Row]]  # see read_rows
    cut: Callable[[Path, int], Iterator[tuple[int, int, int]]]  # see cut_rows
    is_compressible: bool  # whether .gz and .zst may stand behind the suffix


def suffix_of(file: Path) -> str:
    """Returns the suffix that tells a file's kind.

    It is ".jsonl" for a.JSONL.gz, ".py" for a.py, ".gz" for a.gz.
    """
    *_, before, last = "", "", *file.suffixes
    before, last = before.lower(), last.lower()
    if not before or last not in COMPRESSIONS:
        return last
    is_compressible = before not in CONTAINERS or CONTAINERS[before].is_compressible
    return before if is_compressible else last


def is_compressed(file: Path) -> bool:
    return file.suffix.lower() in COMPRESSIONS


def place(file: str | Path, number: int) -> str:
    """Returns a document's file, with its line or its row.

    They are "FILE:7" for line 7 of a .jsonl file, and "FILE, row 7" for row 7 of a table.
    """
    if not number:
        return str(file)
    is_line = CONTAINERS.get(suffix_of(Path(file)), LINES) is LINES
    return f"{file}:{number}" if is_line else f"{file}, row {number}"


def check_packages(files: list[Path]) -> None:
    for file in {(suffix_of(file), file.suffix.lower()): file for file in reversed(files)}.values():
        if suffix_of(file) in (".parquet", ".arrow"):
            import_optional("pyarrow", str(file))
        if file.suffix.lower() == ".zst":
            _zstd(file)


def read_rows(
    file: Path, start: int = 0, stop: int = 0, first: int = 1, fields: frozenset[str] = frozenset()
):
    """Yields (number, row) of the rows in a file, or in its piece.

    Args:
        start, stop, first: a piece, which cut_rows gave.
        fields: the columns of tables to read; a table without any of them is read whole.

    Raises UserError: the file is damaged, cut short or unreadable, or a row has more than MOST
    bytes.
    """
    with refusing_damage(file):
        yield from CONTAINERS[suffix_of(file)].read(file, start, stop, first, fields)


def cut_rows(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    """Yields pieces of about `size` bytes: (start, stop, number of the first row)."""
    with refusing_damage(file):
        yield from CONTAINERS[suffix_of(file)].cut(file, size)


def read_compressed(file: Path) -> bytes:
    """Returns a compressed text, of MOST_OF_TEXT bytes at most. Raises UserError for damage."""
    with refusing_damage(file), _open(file) as stream:
        content = stream.read(MOST_OF_TEXT + 1)
    if len(content) > MOST_OF_TEXT:
        raise UserError(
            f"{file} holds more than {MOST_OF_TEXT:,} bytes; "
            "decompress it, or cut it into several files"
        )
    return content


@contextlib.contextmanager
def refusing_damage(file: Path) -> Iterator[None]:
    """Turns errors in reading a file into a line that names it.

    Libraries' own errors are known by their modules.
    """
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8: byte {error.object[error.start]:#04x}; convert it to UTF-8"
        ) from None
    except Exception as error:
        library = type(error).__module__.partition(".")[0] in (
            "pyarrow",
            "backports",
            "compression",
        )
        if not library and not isinstance(error, OF_DAMAGE):
            raise
        if isinstance(error, OSError) and error.strerror and error.filename:
            raise UserError(
                f"cannot read {file}: {error.strerror}; give --data a readable file"
            ) from None
        what = (str(error).splitlines() or [type(error).__name__])[0][:150]
        raise UserError(
            f"{file} is damaged or cut short ({what}); get it again, or leave it out of --data"
        ) from None


def _zstd(file: Path) -> ModuleType:
    """Returns Python's module of Zstandard, new in 3.14, or the package for older versions."""
    name = "compression.zstd" if is_installed("compression.zstd") else "backports.zstd"
    return import_optional(name, str(file), name)


def _open(file: Path) -> IO[bytes]:
    if file.suffix.lower() == ".gz":
        return gzip.open(file)  # type: ignore[return-value]
    return _zstd(file).open(file) if file.suffix.lower() == ".zst" else file.open("rb")


def _whole(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    yield 0, file.stat().st_size, 1


# Lines


def _read_lines(
    file: Path, start: int, stop: int, first: int, fields: frozenset[str]
) -> Iterator[Row]:
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


def _read_values(
    file: Path, start: int, stop: int, first: int, fields: frozenset[str]
) -> Iterator[Row]:
    with _open(file) as raw, io.TextIOWrapper(raw, "utf-8-sig") as stream:
        values = _Values(stream, file)
        is_array = values.next_is("[")
        for number in itertools.count(1):
            if values.next_is("]" if is_array else ""):
                break
            if is_array and number > 1 and not values.next_is(","):
                why = "there is no comma before it"
                if values.next_is(""):
                    why = "the file ends before it"
                raise values.refusal(number, why)
            yield number, values.next(number)
        if is_array and not values.next_is(""):
            raise values.refusal(number, "the array has ended before it")


class _Values:
    """Takes JSON values from a stream of text.

    It holds one value and CHUNK characters behind it at most.
    """

    def __init__(self, stream: io.TextIOWrapper, file: Path):
        self._stream, self._file = stream, file
        self._text, self._at, self._decoder = "", 0, json.JSONDecoder()

    def next_is(self, sign: str) -> bool:
        """Whether `sign` comes next, behind space; both are passed. "" is the end of the text."""
        while True:
            at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if at < len(self._text):
                break
            self._text, self._at = self._stream.read(CHUNK), 0
            if not self._text:
                return not sign
        is_next = bool(sign) and self._text.startswith(sign, at)
        self._at = at + len(sign) if is_next else at
        return is_next

    def next(self, number: int) -> object:
        """Takes a value. More text is read until it is whole, each time twice as much."""
        self.next_is("")
        while True:
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
                return value
            except RecursionError as error:
                raise self.refusal(number, str(error)) from None
            except ValueError as error:
                # An error in the middle of the text is one whatever follows. A string may be longer
                # than the text.
                is_cut = (
                    str(error).startswith("Unterminated")
                    or getattr(error, "pos", 0) > len(self._text) - 16
                )
                self._text, self._at = self._text[self._at :], 0
                size = min(max(CHUNK, len(self._text)), MOST + 1 - len(self._text))
                following = self._stream.read(size) if is_cut else ""
                if not following:
                    raise self.refusal(number, str(error)) from None
                self._text += following
                if len(self._text) > MOST:
                    raise _too_long(place(self._file, number)) from None

    def refusal(self, number: int, why: str) -> UserError:
        return UserError(
            f"{place(self._file, number)}: not JSON ({why[:100]}); "
            "give one array of objects, or objects"
        )


# CSV


def _read_separated(
    file: Path, start: int, stop: int, first: int, fields: frozenset[str]
) -> Iterator[Row]:
    """Yields the rows behind the header as objects of texts. Quotes may hold several lines."""
    csv.field_size_limit(max(csv.field_size_limit(), MOST + 1))  # rows are bounded by _LinesOfRows
    separator = SEPARATORS[suffix_of(file)]
    with _open(file) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as stream:
        lines = _LinesOfRows(stream, file)
        rows = csv.reader(lines, delimiter=separator, strict=True)
        names = _header(file, _next_record(rows, str(file)) or [], separator)
        for number in itertools.count(1):
            lines.begin(number)
            values = _next_record(rows, place(file, number))
            if values is None:
                return
            if len(values) != len(names):
                why = (
                    f"has {len(values)} fields, the header {len(names)}; "
                    f"quote fields with {separator!r} in them"
                )
                yield number, BrokenRow(why, tuple(filter(None, names)))
                continue
            yield number, {name: value for name, value in zip(names, values) if name}


def _next_record(rows: Iterator[list[str]], where: str) -> list[str] | None:
    """Returns the fields of the next record that is no blank line; None at the end."""
    try:
        return next((values for values in rows if values), None)
    except csv.Error as error:
        raise UserError(
            f'{where}: not CSV ({error}); a field with quotes stands between quotes, and has "" '
            "for each"
        ) from None


class _LinesOfRows:
    """Lines of a stream. The lines of a row have MOST characters at most, all together."""

    def __init__(self, stream: io.TextIOWrapper, file: Path):
        self._stream, self._file, self._size, self._row = stream, file, 0, 0

    def begin(self, row: int) -> None:
        self._size, self._row = 0, row

    def __iter__(self):
        return self

    def __next__(self) -> str:
        line = self._stream.readline(MOST + 1)
        if not line:
            raise StopIteration
        self._size += len(line)
        if self._size > MOST:
            raise _too_long(place(self._file, self._row))
        return line


def _header(file: Path, names: list[str], separator: str) -> list[str]:
    """Returns the names of the columns. A column without one, as pandas' index, has ""."""
    names = [name.strip() for name in names]
    if len(names) == 1:
        for mark in (mark for mark in OTHER_SEPARATORS if mark != separator and mark in names[0]):
            cure = "rename it to .tsv" if mark == "\t" else f"write it with {separator!r}"
            raise UserError(f"{file} has {mark!r} between its fields, not {separator!r}; {cure}")
    twice = [name for i, name in enumerate(names) if name and name in names[:i]]
    if twice:
        raise UserError(
            f"{file} has two columns named {twice[0][:30]!r}; rename one, or leave it out"
        )
    return names


# Tables


def _read_parquet(
    file: Path, start: int, stop: int, first: int, fields: frozenset[str]
) -> Iterator[Row]:
    with _open_parquet(file) as table:
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        ends = [*itertools.accumulate((group.total_byte_size for group in groups), initial=0)]
        size = file.stat().st_size
        chosen = [
            i
            for i in range(len(groups))
            if start <= size * ends[i] // max(1, ends[-1]) < (stop or size)
        ]
        if chosen:
            columns = _columns(table.schema_arrow.names, fields) or None
            first = 1 + sum(group.num_rows for group in groups[: chosen[0]])
            yield from _rows_of(_batches_of(table, chosen, columns, file), file, first)


def _columns(names: list[str], fields: frozenset[str]) -> list[str]:
    """Returns the columns of a table to read: `fields`, and columns that may be of an answer.

    Returns none if all are to be read. Rows of no form are: their refusal names all columns.
    """
    are_renamed = not fields.difference(FIELDS).isdisjoint(names)
    if not are_renamed and not is_row(dict.fromkeys(names)):
        return []
    columns = [
        name for name in names if name in fields or is_of_answers(name) or is_of_a_last_answer(name)
    ]
    return columns if fields.intersection(columns) else []


def _batches_of(table, groups: list[int], columns: list[str] | None, file: Path) -> Iterator:
    """Yields batches of rows, of BATCH_BYTES at most or of one row each.

    Raises UserError for a row group with a row of more than MOST bytes, and for zeros by the
    gigabyte.
    """
    for i in groups:
        group = table.metadata.row_group(i)  # damage in `group.column(0)` would end the process
        size = group.total_byte_size
        if size > MOST * group.num_rows:
            raise _too_long(f"a row of {file}, row group {i},")
        if size > max(LEAST_OF_A_BOMB, MOST_RATIO * file.stat().st_size):
            raise UserError(
                f"{file}, row group {i}, has {size:,} bytes in less than a {MOST_RATIO}th, as no "
                "text is compressed; write it again, or leave it out of --data"
            )
        # Any number of rows may have the same value, which a group stores once.
        rows = max(1, min(BATCH, BATCH_BYTES // max(1, size)))
        yield from table.iter_batches(rows, [i], columns, use_threads=False)


def _cut_parquet(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    with _open_parquet(file) as table:
        count = table.num_row_groups
        num_bytes = sum(table.metadata.row_group(i).total_byte_size for i in range(count))
    pieces = max(1, min(count, num_bytes // size))
    borders = [file.stat().st_size * i // pieces for i in range(pieces + 1)]
    yield from ((start, stop, 1) for start, stop in itertools.pairwise(borders))


def _open_parquet(file: Path):
    return import_optional("pyarrow.parquet", str(file)).ParquetFile(
        file, page_checksum_verification=True
    )


def _read_arrow(
    file: Path, start: int, stop: int, first: int, fields: frozenset[str]
) -> Iterator[Row]:
    arrow = import_optional("pyarrow", str(file))
    with file.open("rb") as stream:
        stream.seek(-min(len(END_OF_ARROW), file.stat().st_size), io.SEEK_END)
        # pyarrow takes the end of a file for the end of its table
        if stream.read() != END_OF_ARROW:
            raise EOFError("no end of an Arrow stream")
    with arrow.OSFile(str(file)) as opened, arrow.ipc.open_stream(opened) as table:
        columns = _columns(table.schema.names, fields) or table.schema.names
        if _is_compressed_arrow(arrow, file):
            raise UserError(
                f"{file} has compressed batches, as `datasets` writes none; "
                "write it without compression"
            )
        for batch in table:
            # else damaged offsets would be followed to anywhere in memory
            batch.validate(full=True)
            yield from _rows_of([batch.select(columns)], file, first)
            first += batch.num_rows


def _is_compressed_arrow(arrow: ModuleType, file: Path) -> bool:
    """Whether the first batch of an Arrow stream is compressed, maybe to a bomb.

    Its header is a FlatBuffer: a table stands at `at`, behind the distance to the places of its
    fields.
    """

    def field(at: int, number: int) -> int:
        places = at - struct.unpack_from("<i", header, at)[0]
        [size] = struct.unpack_from("<H", header, places)
        return (
            4 + 2 * number < size and struct.unpack_from("<H", header, places + 4 + 2 * number)[0]
        )

    def follow(at: int) -> int:
        return at + struct.unpack_from("<I", header, at)[0]

    with arrow.OSFile(str(file)) as opened:
        messages = arrow.ipc.MessageReader.open_stream(opened)
        message = next((message for message in messages if message.type != "schema"), None)
        if message is None:
            return False
        header = message.metadata.to_pybytes()
        at = follow(0)
        at = follow(at + field(at, 2))  # message.header
        if message.type == "dictionary":
            at = follow(at + field(at, 1))  # dictionary.data
        return field(at, 3) > 0  # batch.compression


def _rows_of(batches: Iterable, file: Path, first: int) -> Iterator[Row]:
    for batch in batches:
        readers = {field.name: _reader_of(field) for field in batch.schema}
        read = _reader_of_object(readers)
        for part in (batch.slice(at, BATCH) for at in range(0, batch.num_rows, BATCH)):
            is_small = sum(map(_size_of, part.columns)) <= MOST
            for some in [part] if is_small else (part.slice(at, 1) for at in range(part.num_rows)):
                if not is_small and sum(map(_size_of, some.columns)) > MOST:
                    raise _too_long(place(file, first))
                for row in some.to_pylist():
                    try:
                        value: object = dict.fromkeys(row) | read(row)
                    except (ValueError, RecursionError) as error:
                        why = f"has a column of JSON that is none ({str(error)[:100]})"
                        value = BrokenRow(why, (*row,))
                    yield first, value
                    first += 1


def _size_of(array) -> int:
    """Returns about the bytes of an Arrow array's Python objects, often more than its own bytes.

    A list of a million nulls takes 8 bytes in the array, and a dictionary's value counts wherever
    it is used.
    """
    if hasattr(array, "dictionary"):
        used = (index for index in array.indices.to_pylist() if index is not None)
        return sum(_size_of(array.dictionary.slice(index, 1)) for index in used)
    if hasattr(array, "flatten") and array.type.num_fields:
        parts = array.flatten()
        return 8 * len(array) + sum(map(_size_of, parts if isinstance(parts, list) else [parts]))
    return 8 * len(array) + array.nbytes


def _reader_of(field) -> Callable | None:
    """Returns a function that makes a value of JSON's kinds of a table's value; None: it is one.

    Objects lose the names that have no value: a table has all names in all of them. Texts of JSON
    become what they say: `datasets` has values of several kinds so, such as messages with other
    names.
    """
    kind, metadata = field.type, field.metadata or {}
    if (
        getattr(kind, "extension_name", "") == JSON
        or metadata.get(b"ARROW:extension:name") == JSON.encode()
    ):
        return json.loads
    kind = getattr(kind, "storage_type", kind)  # another extension has it
    kind = kind.value_type if hasattr(kind, "index_type") else kind  # a dictionary has both
    if hasattr(kind, "value_field"):
        return _reader_of_list(_reader_of(kind.value_field))
    if hasattr(kind, "get_field_index"):  # a struct
        return _reader_of_object({part.name: _reader_of(part) for part in kind.fields})
    return None


def _reader_of_list(read: Callable | None) -> Callable[[list], list] | None:
    if read is None:
        return None
    return lambda values: [value if value is None else read(value) for value in values]


def _reader_of_object(readers: dict[str, Callable | None]) -> Callable[[dict], dict]:
    def read(value: dict) -> dict:
        named = ((name, part, readers[name]) for name, part in value.items() if part is not None)
        return {name: part if reader is None else reader(part) for name, part, reader in named}

    return read


LINES = Container(_read_lines, _cut_lines, is_compressible=True)
CONTAINERS = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": Container(_read_values, _whole, is_compressible=True),
    ".csv": Container(_read_separated, _whole, is_compressible=True),
    ".tsv": Container(_read_separated, _whole, is_compressible=True),
    ".parquet": Container(_read_parquet, _cut_parquet, is_compressible=False),
    ".arrow": Container(_read_arrow, _whole, is_compressible=False),
}
